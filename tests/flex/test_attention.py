"""flex_attention on the CPU against torch's functions, formula and autograd, in f64."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import flex_oracle
from support.flex_kernels import Kernels, install
from support.programs import SIZES, draw
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import flashlane
from flashlane.flex import attention as attention_module
from flashlane.flex import masks, packed, reference, windows

Function = Callable[..., Any] | None


def operands(
    batch: int, heads: int, kv_heads: int, rows: int, columns: int, d: int = 8, dv: int = 8
) -> list[torch.Tensor]:
    shapes = (batch, heads, rows, d), (batch, kv_heads, columns, d), (batch, kv_heads, columns, dv)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def compare(
    tensors: list[torch.Tensor],
    score_mod: Function,
    block_mask: BlockMask | None,
    extra: list[torch.Tensor] | None = None,
) -> None:
    """Output, LSE and every gradient."""
    extra = extra or []
    out, lse = flashlane.flex_attention(*tensors, score_mod, block_mask, enable_gqa=True, return_lse=True)
    right, expected_lse = flex_oracle.attention(*tensors, score_mod, block_mask)
    close = {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(out, right, **close)
    torch.testing.assert_close(lse, expected_lse, **close)
    weights = torch.randn_like(out), torch.randn_like(lse)
    sums = [
        (o * weights[0]).sum() + torch.where(logs == -torch.inf, 0, logs * weights[1]).sum()
        for o, logs in ((out, lse), (right, expected_lse))
    ]
    found, expected = (torch.autograd.grad(s, [*tensors, *extra], allow_unused=True) for s in sums)
    for a, b in zip(found, expected, strict=True):
        if a is not None or b is not None:
            a, b = (t if t is not None else torch.zeros_like(other) for t, other in ((a, b), (b, a)))
            torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("seed", range(24))
def test_drawn_scores_and_masks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in tiles so small that rows, heads and batches are cut."""
    chooser = random.Random(seed)
    batch, heads, rows, columns = SIZES
    monkeypatch.setattr(reference, "TILE", chooser.choice([700, 3000, 1 << 21]))
    score, mask = draw(seed, "score_mod"), draw(seed, "mask_mod")
    floating = [t.requires_grad_() for t in score.captured.values() if t.dtype == torch.float64]
    block_mask = None
    if seed % 4:
        size = chooser.choice([8, 16, (16, 8), 64])
        sizes = [chooser.choice([None, n]) for n in (batch, heads)] if seed % 2 else [batch, heads]
        used = flashlane.flex.bind.bind(None, mask.function, torch.device("cpu"))[0].inputs()
        sizes = [n if letter in used else given for letter, n, given in zip("bh", (batch, heads), sizes, strict=True)]
        block_mask = flashlane.create_block_mask(mask.function, *sizes, rows, columns, "cpu", BLOCK_SIZE=size)
    tensors = operands(batch, heads, chooser.choice([1, heads]), rows, columns, 8, chooser.choice([4, 8]))
    compare(tensors, score.function if seed % 3 else None, block_mask, floating)


def test_rows_that_see_nothing() -> None:
    tensors = operands(2, 2, 1, 20, 20)
    mask = flashlane.create_block_mask(lambda b, h, q, kv: (q < kv) & (q % 3 != 0), None, None, 20, 20, "cpu", 8)
    compare(tensors, None, mask)
    out, lse = flashlane.flex_attention(*tensors, None, mask, enable_gqa=True, return_lse=True)
    assert not out[:, :, ::3].any() and (lse[:, :, ::3] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum() + lse[:, :, 1].sum(), tensors)
    assert not grads[0][:, :, ::3].any() and all(g.isfinite().all() for g in grads)
    compare(tensors, lambda score, b, h, q, kv: torch.where(kv > q + 4, score, -float("inf")), None)


def test_empty_lists() -> None:
    tensors = operands(1, 2, 2, 32, 32)
    none = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*none, BLOCK_SIZE=16)
    compare(tensors, None, mask)
    out = flashlane.flex_attention(*tensors, None, mask)
    assert not out.any()
    nothing = flashlane.create_block_mask(lambda b, h, q, kv: q < 0, None, None, 32, 32, "cpu", 16)
    assert not nothing.kv_num_blocks.any() and not nothing.full_q_num_blocks.any()
    compare(tensors, None, nothing)


@pytest.mark.parametrize("block", [64, 128])
def test_block_lists_by_hand_for_each_head(block: int) -> None:
    """Without a mask function every pair of a listed block is visible."""
    n, heads = 3, 3
    table = torch.rand(1, heads, n, n) < 0.5
    counts, indices = flashlane.flex.blocks.lists(table)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=block, seq_lengths=(n * block - 5, n * block))
    tensors = operands(2, heads, heads, n * block - 5, n * block, 4, 4)
    compare(tensors, None, mask)
    visible = table.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, : n * block - 5]
    lse = flashlane.flex_attention(*tensors, None, mask, return_lse=True)[1]
    scores = torch.where(visible, tensors[0] @ tensors[1].mT / 2, -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


@pytest.mark.parametrize("tile", [30, 300, 1 << 21])
def test_keys_of_one_batch_serve_all(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each batch row has tiles of its own."""
    monkeypatch.setattr(reference, "TILE", tile)
    q, k, v = operands(3, 2, 2, 10, 12)
    k, v = (t[:1].detach().requires_grad_() for t in (k, v))
    compare([q, k, v], lambda score, b, h, q, kv: score * (b + 1), None)


def test_gradients_of_what_captured_tensors_are_computed_from() -> None:
    tensors = operands(2, 2, 2, 9, 11)
    slopes, table = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2,), (5, 2)))

    def score_mod(score, b, h, q, kv):
        return score * slopes.exp()[h] + table[torch.clamp(q - kv, -2, 2) + 2, h] + table.sum(1)[b]

    compare(tensors, score_mod, None, [slopes, table])


def test_captured_gradients_are_the_same_in_every_run() -> None:
    q, k, v = (torch.randn(1, 4, 64, 16, requires_grad=True) for _ in range(3))
    table = torch.randn(7, requires_grad=True)
    found = []
    for _ in range(3):
        out = flashlane.flex_attention(q, k, v, lambda score, b, h, i, j: score + table[(i - j) % 7])
        found.append(torch.autograd.grad(out.square().sum(), [table, q]))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_results_of_every_kind() -> None:
    tensors = operands(1, 2, 2, 6, 7)
    out = flashlane.flex_attention(*tensors)
    with_lse = flashlane.flex_attention(*tensors, return_lse=True)
    asked, aux = flashlane.flex_attention(*tensors, return_aux=AuxRequest(lse=True, max_scores=True))
    scores = tensors[0] @ tensors[1].mT / 8**0.5
    assert torch.equal(out, with_lse[0]) and torch.equal(out, asked) and torch.equal(aux.lse, with_lse[1])
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))
    assert flashlane.flex_attention(*tensors, return_aux=AuxRequest())[1] == (None, None)
    torch.testing.assert_close(
        flashlane.flex_attention(*tensors, scale=2.0), (scores * 8**0.5 * 2).softmax(-1) @ tensors[2]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_and_autocast(dtype: torch.dtype) -> None:
    wide = operands(1, 2, 2, 33, 33)
    q, k, v = (t.detach().to(dtype) for t in wide)
    out, lse = flashlane.flex_attention(q, k, v, lambda score, b, h, i, j: score * 0.5, return_lse=True)
    wanted = flex_oracle.attention(q.double(), k.double(), v.double(), lambda score, b, h, i, j: score * 0.5, None)[0]
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out.double() - wanted).abs().max() < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert flashlane.flex_attention(q.float(), k.float(), v.float()).dtype == torch.bfloat16


def _of_products(a: torch.Tensor, b: torch.Tensor) -> Callable[..., Any]:
    return lambda score, batch, h, i, j: score * 3 + (a @ b)[h, j]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_autocast_casts_the_operands_as_torchs_function_and_nothing_else(dtype: torch.dtype) -> None:
    """Products of captured tensors and of the reference stay as they are, at the first call and at those like it."""
    q = torch.randn(1, 2, 5, 16).to(dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = torch.randn(2, 7, dtype=work), torch.randn(7, 5, dtype=work)
    cast = q if dtype == torch.float64 else q.bfloat16()
    table = a @ b
    wanted = flashlane.flex_attention(cast, cast, cast, lambda s, _, h, i, j: s * 3 + table[h, j], return_lse=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = flashlane.flex_attention(q, q, q, _of_products(a, b), return_lse=True)
            of_torch = torch_flex.flex_attention(q, q, q, _of_products(a, b))
        assert found[0].dtype == of_torch.dtype == cast.dtype
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        assert (of_torch.double() - found[0].double()).abs().max() <= (0 if dtype == torch.float64 else 2**-6) + 1e-12
    outside = flashlane.flex_attention(cast, cast, cast, _of_products(a, b), return_lse=True)
    assert torch.equal(outside[1], wanted[1])


def test_a_backward_under_autocast_has_the_gradients_of_one_outside() -> None:
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    out = flashlane.flex_attention(q, q, q)
    wanted = torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(out.square().sum(), q)[0], wanted)


WRONG = {
    "query has 4 heads and key 2": lambda q, k, v: flashlane.flex_attention(q, k[:, :2], v[:, :2]),
    "key has head dim 4": lambda q, k, v: flashlane.flex_attention(q, k[..., :4], v),
    r"value has shape \(1, 4, 9, 8\)": lambda q, k, v: flashlane.flex_attention(q, k, v[:, :, :9]),
    "BACKEND is .NO.; it may be AUTO": lambda *qkv: flashlane.flex_attention(*qkv, kernel_options={"BACKEND": "NO"}),
    "made for 20 queries and 20 keys; this call has 10 and 10": lambda q, k, v: flashlane.flex_attention(
        q, k, v, block_mask=flashlane.create_block_mask(lambda b, h, i, j: i >= j, None, None, 20, 20, "cpu")
    ),
    "block_mask has heads 2; it must be 1 or 4": lambda q, k, v: flashlane.flex_attention(
        q, k, v, block_mask=flashlane.create_block_mask(lambda b, h, i, j: i >= j, None, 2, 10, 10, "cpu")
    ),
    r"kv_num_blocks has shape \(4, 1\); it must be \(batch": lambda q, k, v: flashlane.flex_attention(
        q, k, v, block_mask=_of_lists([torch.ones(4, 1).int(), torch.zeros(4, 1, 1).int()], (10, 10))
    ),
    "query has shape": lambda q, k, v: flashlane.flex_attention(q[0], k, v),
    r"query has shape \(1, 4, 10, 0\): its head dim is 0; it must be at": lambda q, k, v: flashlane.flex_attention(
        q[..., :0], k[..., :0], v
    ),
    r"value has shape \(1, 4, 10, 0\): its head dim is 0": lambda q, k, v: flashlane.flex_attention(q, k, v[..., :0]),
    r"query has shape \(1, 0, 10, 8\): its number of heads is 0": lambda q, k, v: flashlane.flex_attention(
        q[:, :0], k[:, :0], v[:, :0]
    ),
    r"key has shape \(1, 0, 10, 8\): its number of heads is 0": lambda q, k, v: flashlane.flex_attention(
        q, k[:, :0], v[:, :0], enable_gqa=True
    ),
    "BLOCK_SIZE is 0": lambda *qkv: flashlane.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, "cpu", 0),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WRONG[message](*operands(1, 4, 4, 10, 10))


def _masked(**options: Any) -> Callable[..., Any]:
    return lambda *qkv: flashlane.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, "cpu", **options)


def _nested(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.nested.nested_tensor(list(t.detach())) for t in tensors]


OF_ANOTHER_KIND = {
    "query has dtype torch.int32; it may be one of torch.float16,": lambda *qkv: flashlane.flex_attention(
        *(t.int() for t in qkv)
    ),
    "query has dtype torch.float8_e4m3fn; it may be one of torch.float16,": lambda *qkv: flashlane.flex_attention(
        *(t.detach().float().to(torch.float8_e4m3fn) for t in qkv)
    ),
    "value has dtype torch.float16 and query has torch.float64; they": lambda q, k, v: flashlane.flex_attention(
        q, k, v.half()
    ),
    "query is a nested tensor; ": lambda *qkv: flashlane.flex_attention(*_nested(*qkv)),
    "key has layout torch.sparse_coo; it must be torch.strided": lambda q, k, v: flashlane.flex_attention(
        q, k.detach().to_sparse(), v
    ),
    "enable_gqa is 'no'; it must be True or False": lambda *qkv: flashlane.flex_attention(*qkv, enable_gqa="no"),
    "return_lse is 'no'; it must be True or False": lambda *qkv: flashlane.flex_attention(*qkv, return_lse="no"),
    "block_mask is a tuple; it must be a BlockMask or None": lambda *qkv: flashlane.flex_attention(*qkv, None, ()),
    "mask_mod is an int; it must be a function of b, h, q_idx and kv_idx": lambda *qkv: flashlane.create_block_mask(
        3, None, None, 8, 8, "cpu"
    ),
    "mask_mod is None; it must be a function": lambda *qkv: flashlane.create_block_mask(None, None, None, 8, 8, "cpu"),
    "separate_full_blocks is 'no'; it must be True or False": _masked(separate_full_blocks="no"),
    "compute_dq_write_order is 2; it must be True or False": _masked(compute_dq_write_order=2),
    "dq_kv_order is None; it must be True or False": _masked(dq_kv_order=None),
    "_compile is 'no'; it must be True or False": _masked(_compile="no"),
}  # fmt: skip


@pytest.mark.parametrize("message", OF_ANOTHER_KIND)
def test_arguments_of_another_kind_are_named(message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        OF_ANOTHER_KIND[message](*operands(1, 4, 4, 10, 10))


def test_flags_of_other_kinds_count_as_what_they_equal() -> None:
    tensors = [t.detach() for t in operands(1, 4, 2, 10, 10)]
    found = flashlane.flex_attention(*tensors, enable_gqa=1, return_lse=torch.tensor(True))
    wanted = flashlane.flex_attention(*tensors, enable_gqa=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_torchs_own_function_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what programs do not have, and only where the caller says so."""
    tensors = [t.detach().float() for t in operands(1, 2, 2, 10, 10)]
    calls = []
    monkeypatch.setattr(
        attention_module, "torch_function", lambda device: lambda *a, **k: (calls.append((a, k)), tensors[0])[1]
    )

    def searching(score, b, h, q, kv):
        return score + torch.searchsorted(torch.arange(4.0), score)

    with pytest.raises(NotImplementedError, match="searchsorted"):
        flashlane.flex_attention(*tensors, searching)
    assert not calls
    assert (
        flashlane.flex_attention(*tensors, searching, kernel_options={"BACKEND": "TRITON", "BLOCK_M": 64}) is tensors[0]
    )
    assert calls[0][0][3] is searching and calls[0][0][-1] == {"BACKEND": "TRITON", "BLOCK_M": 64}


def test_under_torch_compile_the_graph_breaks_and_results_are_the_same() -> None:
    tensors = [t.detach() for t in operands(1, 2, 2, 10, 10)]

    def model(q, k, v):
        return flashlane.flex_attention(q * 2, k, v, lambda score, b, h, i, j: score + i) + 1

    torch.testing.assert_close(torch.compile(model, backend="eager")(*tensors), model(*tensors))


def test_the_stand_in_has_the_kernels_signatures() -> None:
    real = importlib.import_module(attention_module.KERNELS)
    not_of_calls = {"ARCH", "sources_of_lists"}
    assert not_of_calls < set(real.__all__) and all(hasattr(real, name) for name in real.__all__)
    for name in set(real.__all__) - not_of_calls:
        ours = [p.name for p in inspect.signature(getattr(Kernels(None), name)).parameters.values()]
        theirs = list(inspect.signature(getattr(real, name)).parameters.values())
        assert ours == [p.name for p in theirs][: len(ours)]
        assert all(p.default is not p.empty for p in theirs[len(ours) :]), name


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Calls on the CPU go where those on a GPU go."""
    return install(monkeypatch)


def test_the_kernels_get_narrow_lists_and_the_reference_the_captured_gradients(kernels: Kernels) -> None:
    tensors = operands(2, 3, 1, 24, 24)
    bias = torch.randn(24, dtype=torch.float64, requires_grad=True)
    mask = flashlane.create_block_mask(lambda b, h, q, kv: q > kv, 2, 3, 24, 24, "cpu", 8)
    compare(tensors, lambda score, b, h, q, kv: torch.tanh(score) + bias[kv], mask, [bias])
    assert [name for name, _ in kernels.called] == ["supports", "forward", "backward"] and kernels.called[2][1]
    assert kernels.called[0][1] == ((2, 24, 3, 8), (2, 24, 1, 8), (2, 24, 1, 8))
    assert kernels.called[1][1].kv_indices.shape[:2] == (1, 1)
    kernels.called.clear()
    q, k, v = (t.detach() for t in tensors)
    out = flashlane.flex_attention(q, k, v, lambda score, b, h, q, kv: score + bias[kv], enable_gqa=True)
    assert torch.autograd.grad(out.sum(), bias)[0].isfinite().all()
    assert [name for name, _ in kernels.called] == ["supports", "forward"]


def test_on_other_gpus_torchs_function_runs_what_no_backend_is_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [t.detach() for t in operands(1, 2, 2, 10, 10)]
    given: list[tuple[str, float | None]] = []

    def torchs(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse, options, *, return_aux):
        given.append((options["BACKEND"], scale))
        return q + 1

    monkeypatch.setattr(attention_module, "torch_function", lambda device: torchs)
    wanted = flashlane.flex_attention(*tensors)
    monkeypatch.setattr(attention_module, "arch_of", lambda device: "sm_80")
    for options in (None, {"BACKEND": "AUTO"}):
        assert torch.equal(flashlane.flex_attention(*tensors, scale=0.5, kernel_options=options), tensors[0] + 1)
    assert given == [("AUTO", 0.5)] * 2
    monkeypatch.setattr(attention_module, "OF_THE_REFERENCE", ())
    with pytest.raises(NotImplementedError, match="architecture is sm_80"):
        flashlane.flex_attention(*tensors, kernel_options={"BACKEND": "FLASHLANE"})
    reference = flashlane.flex_attention(*tensors, kernel_options={"BACKEND": "REFERENCE"})
    assert torch.equal(reference, wanted) and len(given) == 2


def test_a_call_that_no_kernel_takes_raises_and_names_the_choices(kernels: Kernels) -> None:
    kernels.reason = "architecture is sm_80; it takes sm_90a"
    tensors = [t.detach() for t in operands(1, 2, 2, 10, 10)]
    with pytest.raises(
        NotImplementedError, match=r"architecture is sm_80; it takes sm_90a\. kernel_options=.*'REFERENCE'"
    ):
        flashlane.flex_attention(*tensors)
    assert [name for name, _ in kernels.called] == ["supports"]
    out = flashlane.flex_attention(*tensors, kernel_options={"BACKEND": "REFERENCE"})
    torch.testing.assert_close(out, flex_oracle.attention(*tensors, None, None)[0])


WINDOWS = {
    "causal": (lambda b, h, q, kv: q >= kv, (-1, 0)),
    "the other way round": (lambda b, h, q, kv: kv <= q, (-1, 0)),
    "later keys": (lambda b, h, q, kv: kv >= q, (0, -1)),
    "with an offset": (lambda b, h, q, kv: q + 3 >= kv, (-1, 3)),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv < 5), (4, 0)),
    "both sides": (lambda b, h, q, kv: (q - kv).abs() <= 6, (6, 6)),
    "twice": (lambda b, h, q, kv: (q - kv <= 9) & (kv - q <= 2) & (kv > q - 5), (4, 2)),
    "named": (masks.causal(), (-1, 0)),
    "named window": (masks.sliding_window(4, 1), (4, 1)),
    "with sinks": (masks.sliding_window(4, 1, 2), None),
    "before itself": (lambda b, h, q, kv: q > kv, None),
    "one of two": (lambda b, h, q, kv: (q >= kv) | (kv - q <= 3), None),
    "a bound that grows": (lambda b, h, q, kv: (q - kv).abs() <= kv, None),
    "twice the position": (lambda b, h, q, kv: q + q >= kv, None),
    "by head": (lambda b, h, q, kv: q + h >= kv, None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_needs_no_lists(kernels: Kernels, name: str) -> None:
    function, window = WINDOWS[name]
    tensors = operands(1, 2, 2, 20, 26)
    mask = flashlane.create_block_mask(function, 1, 2, 20, 26, "cpu", 8)
    assert windows.NOTES.of(mask) == window
    compare(tensors, lambda score, b, h, q, kv: score * 2 - kv, mask)
    assert (kernels.called[1][1] is None) == (window is not None)


def test_a_mask_with_another_function_or_other_lists_is_no_window() -> None:
    mask = flashlane.create_block_mask(masks.causal(), 1, 2, 64, 64, "cpu", 8)
    assert windows.NOTES.of(mask[:, :1]) is None
    by_hand = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=8, mask_mod=mask.mask_mod)
    assert windows.NOTES.of(by_hand) is None
    mask.mask_mod = lambda b, h, q, kv: q > kv + 3
    assert windows.NOTES.of(mask) is None


DOCUMENTS = torch.tensor([0, 9, 9, 30, 40])
NO_LISTS = {"documents": masks.documents(DOCUMENTS), "causal documents": masks.documents(DOCUMENTS, causal=True)}


@pytest.mark.parametrize("name", NO_LISTS)
def test_packed_documents_need_no_lists(kernels: Kernels, name: str) -> None:
    tensors = operands(1, 2, 2, 40, 40)
    mask = flashlane.create_block_mask(NO_LISTS[name], None, None, 40, 40, "cpu", 8)
    compare(tensors, None, mask)
    assert kernels.called[1] == ("forward", None)
    kernels.called.clear()
    compare(tensors, lambda score, b, h, q, kv: score * 2 - kv, mask)
    assert kernels.called[1][1] is not None, "with a score there are lists"
    kernels.called.clear()
    flashlane.flex_attention(*(t.detach() for t in operands(2, 2, 2, 40, 40)), None, mask)
    assert kernels.called[1][1] is not None, "of one batch row alone"


def test_documents_are_those_of_the_mask_when_it_was_made() -> None:
    offsets = torch.tensor([0, 10, 40], dtype=torch.int32)
    mask = flashlane.create_block_mask(masks.documents(offsets, causal=True), None, None, 40, 40, "cpu", 8)
    offsets[1] = 20
    found = packed.NOTES.of(mask)
    assert found is not None and found.offsets.tolist() == [0, 10, 40] and (found.longest, found.tokens) == (30, 40)
    assert packed.NOTES.of(mask[:, :, :2]) is None
    shorter = flashlane.create_block_mask(masks.documents(offsets), None, None, 30, 30, "cpu", 8)
    assert packed.NOTES.of(shorter) is None, "the mask is asked about fewer tokens"
    for wrong in ([1, 10, 40], [0, 20, 10, 40]):
        with pytest.raises(ValueError, match="they must begin with 0 and ascend"):
            masks.documents(torch.tensor(wrong))


class Wrapped(torch.Tensor):
    """A tensor subclass as libraries make them: it holds another, and wraps what torch's operators give for that."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = pytree.tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        found = pytree.tree_map_only(torch.Tensor, cls, function(*bare[0], **bare[1]))
        return return_and_correct_aliasing(function, args, kwargs or {}, found)


def test_a_tensor_subclass_stays_one() -> None:
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    want = flashlane.flex_attention(q, k, v, return_lse=True)
    found = flashlane.flex_attention(Wrapped(q), Wrapped(k), Wrapped(v), return_lse=True)
    for got, expected in zip(found, want, strict=True):
        assert isinstance(got, Wrapped)
        assert torch.equal(got.held, expected)


IDS = torch.tensor([3] * 9 + [1] * 21 + [7] * 10)
FUNCTIONS = {
    "documents": (lambda b, h, q, kv: IDS[q] == IDS[kv], False),
    "causal documents": (lambda b, h, q, kv: (q >= kv) & (IDS[kv] == IDS[q]), True),
    "twice causal": (lambda b, h, q, kv: (q >= kv) & ((IDS[q] == IDS[kv]) & (kv <= q)), True),
    "in a window": (lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q - kv <= 4), None),
    "strictly before": (lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q > kv), None),
    "other documents": (lambda b, h, q, kv: IDS[q] != IDS[kv], None),
    "another tensor": (lambda b, h, q, kv: IDS[q] == (IDS + 0)[kv], None),
    "by position": (lambda b, h, q, kv: IDS[q] == IDS[q], None),
    "in segments": (lambda b, h, q, kv: SEGMENTS[q] == SEGMENTS[kv], None),
    "of two dimensions": (lambda b, h, q, kv: IDS[None][b, q] == IDS[None][b, kv], None),
}
SEGMENTS = IDS.roll(5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_packed_documents_need_no_lists(kernels: Kernels, name: str) -> None:
    function, causal = FUNCTIONS[name]
    mask = flashlane.create_block_mask(function, None, None, 40, 40, "cpu", 8)
    found = packed.NOTES.of(mask)
    assert (found is None) == (causal is None)
    if found is not None:
        assert found.causal == causal and found.offsets.tolist() == [0, 9, 30, 40] and found.longest == 21
    compare(operands(1, 2, 2, 40, 40), None, mask)
    assert (kernels.called[1][1] is None) == (causal is not None)


def test_documents_whose_tensor_changes_are_lists_again(kernels: Kernels) -> None:
    kernels.repeats = False
    ids = IDS.clone()
    mask = flashlane.create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 40, 40, "cpu", 8)
    tensors = [t.detach() for t in operands(1, 2, 2, 40, 40)]
    flashlane.flex_attention(*tensors, None, mask)
    ids[0] = 4
    flashlane.flex_attention(*tensors, None, mask)
    ids = ids.clone()
    flashlane.flex_attention(*tensors, None, mask)
    lists = [given for name, given in kernels.called if name == "forward"]
    assert [given is None for given in lists] == [True, False, False]


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3), (2, 0, 1, 3), (1, 2, 3, 0)], ids=["by head", "rows first", "columns first"]
)
def test_the_output_lies_as_the_query_does(order: tuple[int, ...]) -> None:
    """As with torch's compiled function; rows are contiguous in any case."""
    shape = 2, 3, 12, 16
    q = torch.randn([shape[axis] for axis in order]).permute(*(order.index(axis) for axis in range(4)))
    out = flashlane.flex_attention(q, q, q)
    assert out.stride(3) == 1
    assert sorted(range(3), key=out.stride) == sorted(range(3), key=q.stride)
    torch.testing.assert_close(out, flashlane.flex_attention(*(q.contiguous() for _ in range(3))))


def test_functions_of_tensors_that_require_gradients_are_translated_in_inference_mode() -> None:
    q, w = torch.randn(1, 2, 16, 8, dtype=torch.float64), torch.randn(2, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        made_there = torch.randn(2, dtype=torch.float64)
    score_mod = lambda s, b, h, i, j: s * w.exp()[h] + made_there[h] * i  # noqa: E731
    mask_mod = lambda b, h, i, j: (w[h] > 0) | (i >= j)  # noqa: E731
    with torch.inference_mode():
        mask = flashlane.create_block_mask(mask_mod, 1, 2, 16, 16, device="cpu", BLOCK_SIZE=8)
        out = flashlane.flex_attention(q, q, q, score_mod, mask)
    with torch.no_grad():
        torch.testing.assert_close(out.clone(), flex_oracle.attention(q, q, q, score_mod, mask)[0])


def _of_lists(lists: list[torch.Tensor], lengths: tuple[int, int]) -> BlockMask:
    """The mask of counts and indices that torch does not look at."""
    rest = dict.fromkeys(("full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"))
    rest |= dict.fromkeys(("full_q_num_blocks", "full_q_indices"))
    return BlockMask(lengths, *lists, **rest, BLOCK_SIZE=(16, 16), mask_mod=lambda b, h, q, kv: q >= 0)


LISTS = {
    "kv_indices has 99; it may have 0 to 4, the last block": ([2, 1], [[0, 99], [1, 0]], 80),
    "kv_indices has -1; it may have": ([1, 1], [[0, 1], [-1, 0]], 80),
    "kv_num_blocks has 3; it may have 0 to 2, the length of a list": ([2, 3], [[0, 1], [1, 0]], 80),
    "kv_num_blocks has 2 rows of blocks; 40 queries in blocks of 16 have 3": ([2, 1], [[0, 1], [1, 0]], 40),
}


@pytest.mark.parametrize("message", LISTS)
def test_lists_by_hand_that_do_not_fit_are_named(message: str) -> None:
    counts, indices, length = LISTS[message]
    lists = [torch.tensor(t, dtype=torch.int32)[None, None] for t in (counts, indices)]
    rows = 32 if "rows" not in message else length
    mask = _of_lists(lists, (rows, 80))
    with pytest.raises(ValueError, match=f"block_mask: {message}"):
        flashlane.flex_attention(*operands(1, 1, 1, rows, 80), None, mask)


def test_what_lists_hold_past_their_counts_is_not_read() -> None:
    lists = [torch.tensor(t, dtype=torch.int32)[None, None] for t in ([1, 1], [[0, 99], [1, -7]])]
    mask = _of_lists(lists, (32, 32))
    tensors = operands(1, 1, 1, 32, 32)
    halves = [
        torch.nn.functional.scaled_dot_product_attention(*(t[:, :, i : i + 16] for t in tensors)) for i in (0, 16)
    ]
    torch.testing.assert_close(flashlane.flex_attention(*tensors, None, mask), torch.cat(halves, 2))


def test_a_call_on_a_device_without_kernels_says_so() -> None:
    q = torch.empty(1, 2, 16, 8, device="meta")
    with pytest.raises(NotImplementedError, match="no kernel of flashlane runs this call"):
        flashlane.flex_attention(q, q, q)


@pytest.mark.parametrize("of_output", [torch.clone, torch.sin])
def test_a_second_derivative_is_refused_and_not_left_out(of_output: Callable[..., torch.Tensor]) -> None:
    """Of a linear function of the output, too, whose gradient needs none."""
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    out = flashlane.flex_attention(q, q, q)
    (first,) = torch.autograd.grad(of_output(out).sum(), q, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(of_output(out).sum(), q, retain_graph=True)[0])
    message = "^flex_attention has no second derivative: it can be differentiated once$"
    with pytest.raises(NotImplementedError, match=message):
        (out.sum() + first.square().sum()).backward()
