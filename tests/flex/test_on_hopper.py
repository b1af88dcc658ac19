"""flex_attention by the module of the Hopper kernels, with a GPU that only writes launches down."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hopper_fakes import Launches, addresses, install
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane.flex import attention, masks
from flashlane.flex.bind import bind
from flashlane.kernels.hopper import flex
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.kernel import prepared_of
from flashlane.kernels.hopper.flex import masks as unit_masks
from flashlane.kernels.hopper.flex import run_backward, run_forward, run_packed
from flashlane.kernels.hopper.flex.problem import problem_of
from flashlane.kernels.hopper.forward.kernel import KERNEL
from flashlane.kernels.hopper.forward.launch import config_and_splits


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Calls on the CPU are those of an sm_90 GPU."""
    monkeypatch.setattr(attention, "OF_THE_REFERENCE", ())
    monkeypatch.setattr(attention, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(flex, "arch_of", lambda device: ARCH)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", None, raising=False)  # of a torch for CUDA, which needs one
    plans = run_forward._plan, run_backward._plan, prepared_of
    for plan in plans:
        plan.cache_clear()
    yield from install(monkeypatch)
    for plan in plans:
        plan.cache_clear()


@dataclass(frozen=True)
class Reads:
    """A program whose mask reads these of its tensors."""

    read_by_mask: tuple[int, ...]


def test_a_mask_in_units_is_kept_for_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = flashlane.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")
    monkeypatch.setattr(unit_masks, "_unit_mask", lambda *_: object())
    program, captured = Reads((0,)), torch.zeros(3)
    sizes = {"batch": 2, "heads": 4, "seqlen_q": 256, "seqlen_k": 256}

    def made(tensor: torch.Tensor = captured, **changes: int) -> object:
        return unit_masks.unit_mask(mask, program, (tensor,), SimpleNamespace(**{**sizes, **changes}))

    first = made()
    assert made() is first
    others = [made(**{name: size - 1}) for name, size in sizes.items()]
    assert first not in others and len({id(each) for each in others}) == 4
    captured.add_(1)
    assert made() is not first, "what the mask reads was written"
    program = Reads(())
    first = made()
    captured.add_(1)
    assert made() is first, "the score alone reads it"
    mask.kv_num_blocks.add_(0)
    again = made()
    assert again is not first, "a list was written"
    mask.kv_indices = mask.kv_indices.clone()
    assert made() is not again, "the mask has another list"


def operands(grad: bool = False) -> list[torch.Tensor]:
    shapes = (2, 4, 300, 64), (2, 2, 200, 64), (2, 2, 200, 64)
    return [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=grad) for shape in shapes]


def causal(b, h, q, kv):
    return q >= kv


def after(b, h, q, kv):
    return q > kv


@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, q, kv: score - (q - kv)], ids=["plain", "score"])
@pytest.mark.parametrize("mask", ["none", "torch's of one block", "ours", "of one block", "a window"])
def test_both_directions_reach_the_kernels(launches: Launches, score_mod, mask: str) -> None:
    tensors = operands(grad=True)
    q, k, _ = tensors
    block_mask = {
        "none": None,
        "torch's of one block": torch_flex._create_empty_block_mask(q, k),
        "ours": flashlane.create_block_mask(after, None, None, 300, 200, "cpu"),
        "of one block": flashlane.create_block_mask(after, None, None, 300, 200, "cpu", 1 << 30),
        "a window": flashlane.create_block_mask(causal, None, None, 300, 200, "cpu"),
    }[mask]
    out, lse = flashlane.flex_attention(*tensors, score_mod, block_mask, enable_gqa=True, return_lse=True)
    assert out.shape == (2, 4, 300, 64) and out.is_contiguous() and lse.shape == (2, 4, 300)
    *_, forward = launches
    params = forward[-1]
    assert addresses(params) == [t.data_ptr() for t in tensors]
    assert (params.seqlen.seqlen_q, params.seqlen.seqlen_k) == (300, 200)
    assert (params.window_left, params.window_right) == (-1, 0 if mask == "a window" else -1)
    assert bool(params.lists.counts) == (mask in ("ours", "of one block"))
    launches.clear()
    gradients = torch.autograd.grad(out.float().sum() + lse.sum(), tensors)
    assert launches and [g.shape for g in gradients] == [t.shape for t in tensors]


@pytest.mark.parametrize("masked", [False, True])
def test_the_backward_is_compiled_while_the_forward_is(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    works, compiled = [], []
    monkeypatch.setattr(run_forward, "alongside", lambda work: works.append(work) or contextlib.nullcontext())
    monkeypatch.setattr(run_forward, "compile_together", lambda sources, arch: compiled.extend(sources))
    monkeypatch.setattr(run_backward, "config_of", functools.lru_cache(run_backward.config_of.__wrapped__))
    mask = flashlane.create_block_mask(after, None, None, 300, 200, "cpu") if masked else None

    def attend(tensors: list[torch.Tensor]) -> torch.Tensor:
        return flashlane.flex_attention(*tensors, lambda score, b, h, q, kv: score.sin(), mask, enable_gqa=True)

    attend(operands())
    with torch.no_grad():
        attend(operands(grad=True))
    assert not works, "no gradient is wanted"
    tensors = operands(grad=True)
    out = attend(tensors)
    (work,) = works
    work()
    assert len(compiled) == 3 and run_backward.config_of.cache_info().misses == 1
    torch.autograd.grad(out.float().sum(), tensors)
    assert run_backward.config_of.cache_info().misses == 1, "the backward runs what was compiled"
    attend(tensors)
    assert len(works) == 1, "a later call compiles nothing"


def test_what_the_kernels_refuse_is_told(launches: Launches) -> None:
    wide = [torch.zeros(1, 2, 128, 264, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(NotImplementedError, match="head_dim of q and k is 264"):
        flashlane.flex_attention(*wide)
    mask = flashlane.create_block_mask(after, None, None, 300, 200, "cpu", 32)
    with pytest.raises(NotImplementedError, match="blocks of \\(32, 32\\); it takes multiples of 64"):
        flashlane.flex_attention(*operands(), None, mask, enable_gqa=True)
    assert not launches


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-31, 1e31])
def test_the_factor_of_products_whose_maximum_is_taken_is_positive(
    launches: Launches, scale: float, masked: bool
) -> None:
    """A negative one made zeros of all rows, and 0 made NaN."""
    said = re.escape(f"scale is {scale:g}; without")
    mask = flashlane.create_block_mask(after, None, None, 300, 200, "cpu") if masked else None
    with pytest.raises(NotImplementedError, match=rf"{said} a score .* 1e-30 to 1e\+30\. .*TORCH"):
        flashlane.flex_attention(*operands(), None, mask, scale, enable_gqa=True)
    assert not launches
    q, k, v = (t.transpose(1, 2) for t in operands())
    with pytest.raises(NotImplementedError, match=said):
        flex.forward(q, k, v, flex.NO_MASK, bind(None, None, q.device)[1], None, scale)
    flashlane.flex_attention(*operands(), lambda score, b, h, q, kv: score + q, mask, scale, enable_gqa=True)
    assert launches, "a program multiplies before the maximum is taken"


def test_a_captured_tensor_with_an_axis_that_kernels_cannot_count_is_refused(launches: Launches) -> None:
    """With 2^32 pairs, as a flat table of 65536 tokens has, the size wrapped to 0, and elements before it were read."""
    table = torch.zeros(1).expand(1 << 32)

    def score(score, b, h, q, kv):
        return score + table[q.long() * 65536 + kv]

    with pytest.raises(NotImplementedError, match=r"shape \(4294967296,\); an axis may have up to 2147483647 .*TORCH"):
        flashlane.flex_attention(*operands(), score, enable_gqa=True)
    assert not launches
    call = (*operands(), score, None, None, True, False, None, None, "reference")
    assert bool((attention.attend(*call) == 0).all()), "which calls that may run otherwise do"
    program, arguments = bind(score, None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=r"shape \(4294967296,\)"):
        program.params(arguments)


@pytest.mark.parametrize("grad", [False, True])
def test_more_documents_than_a_backward_takes_are_lists_there(launches: Launches, grad: bool) -> None:
    """The backward refused them, after the forward had run."""
    q = torch.zeros(1, 1, 65536, 8, dtype=torch.bfloat16, requires_grad=grad)
    mask = flashlane.create_block_mask(masks.documents(torch.arange(65537)), None, None, 65536, 65536, "cpu")
    out = flashlane.flex_attention(q, q, q, None, mask)
    assert bool(launches[-1][-1].lists.counts) == grad and bool(launches[-1][-1].seqlen.cu_seqlens_q) != grad
    if grad:
        launches.clear()
        assert torch.autograd.grad(out.float().sum(), q)[0].shape == q.shape and launches


def test_a_call_without_a_score_and_lists_runs_the_kernel_without_a_program(launches: Launches) -> None:
    q, k, v = (t.transpose(1, 2) for t in operands())
    program, arguments = bind(None, causal, q.device)
    for config in (None, run_forward.config_of(problem_of(q, k, v, 0.1, (-1, 0)), program.without_mask(), None)):
        flex.forward(q, k, v, program.without_mask(), arguments, None, 0.1, (-1, 0), config=config)
        chosen = launches.plans[-1].config
        assert chosen.program == "" and not chosen.block_lists and chosen.has_right
    problem = launches.plans[0].problem
    assert launches.plans[0].config == config_and_splits(KERNEL.config(problem), problem)[0], "as flash_attn_func's"


@pytest.mark.parametrize("contiguous", [True, False], ids=["by head", "by row"])
def test_packed_documents_reach_the_kernels_of_packed_sequences(launches: Launches, contiguous: bool) -> None:
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32)
    mask = flashlane.create_block_mask(masks.documents(offsets, causal=True), None, None, 300, 300, "cpu")
    tensors = [torch.zeros(1, h, 300, 64, dtype=torch.bfloat16) for h in (4, 2, 2)]
    if not contiguous:
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    tensors = [t.requires_grad_() for t in tensors]
    out, lse = flashlane.flex_attention(*tensors, None, mask, enable_gqa=True, return_lse=True)
    assert out.shape == (1, 4, 300, 64) and out.stride() == tensors[0].stride() and lse.shape == (1, 4, 300)
    *_, params = launches[-1]
    assert addresses(params) == [t.data_ptr() for t in tensors] and not params.lists.counts
    assert (params.seqlen.batch, params.seqlen.seqlen_q, params.window_right) == (2, 300, 0)
    lengths = (ctypes.c_int * 3).from_address(params.seqlen.cu_seqlens_k)
    assert list(lengths) == [0, 100, 300] and (params.out, params.lse) == (out.data_ptr(), lse.data_ptr())
    launches.clear()
    gradients = torch.autograd.grad(out.float().sum() + lse.sum(), tensors)
    assert launches and [g.shape for g in gradients] == [t.shape for t in tensors]


def test_documents_that_do_not_fit_are_told(launches: Launches) -> None:
    q = torch.zeros(1, 300, 4, 64, dtype=torch.bfloat16)
    documents = masks.documents(torch.tensor([0, 200])).documents
    program, arguments = bind(None, None, q.device)
    with pytest.raises(ValueError, match="documents of 200 tokens are given with q"):
        flex.forward(q, q, q, program, arguments, None, 0.1, documents=documents)


@pytest.mark.parametrize("wants_lse", [False, True])
def test_the_gradient_of_packed_documents_is_that_of_one_packed_call(
    wants_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []

    def backward(*arguments: object) -> SimpleNamespace:
        calls.append(arguments)
        return SimpleNamespace(q=torch.full((9,), 1.0), k=torch.full((9,), 2.0), v=torch.full((9,), 3.0))

    monkeypatch.setattr(run_packed, "hopper_backward", backward)
    q, k = torch.zeros(1, 9, 4, 64), torch.zeros(1, 9, 2, 64)
    out, dout, lse, dlse = torch.ones_like(q), torch.ones_like(q), torch.ones(1, 4, 9), torch.full((1, 4, 9), 5.0)
    documents = SimpleNamespace(offsets=torch.tensor([0, 4, 9]), longest=5, causal=True)
    grads = run_packed.backward(q, k, k, out, lse, dout, dlse if wants_lse else None, documents, 0.5, True)
    assert [(t.shape, float(t[0, 0])) for t in grads] == [((1, 9), 1.0), ((1, 9), 2.0), ((1, 9), 3.0)]
    ((problem, inputs, *tensors),) = calls
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.window_right) == (2, 5, 5, 0)
    assert problem.deterministic and problem.varlen and (problem.heads, problem.kv_heads) == (4, 2)
    assert inputs.q.shape == (9, 4, 64) and inputs.cu_seqlens_q is inputs.cu_seqlens_k is documents.offsets
    *given, last = tensors
    assert [t.shape for t in given] == [(9, 4, 64), (4, 9), (9, 4, 64)]
    assert last is None if not wants_lse else (last.shape == (4, 9) and bool((last == 5).all()))
