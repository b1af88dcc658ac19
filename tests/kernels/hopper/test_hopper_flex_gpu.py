"""The Hopper kernels with programs and lists of blocks against f64: drawn masks, scores and lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from flashlane import create_block_mask as create_flashlane_mask
from flashlane import flex_attention
from flashlane.core.arch import arch_of
from flashlane.flex import masks as named
from flashlane.flex import packed, windows
from flashlane.flex.bind import bind
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.flex import backward, forward, masks, run_backward, run_forward
from flashlane.kernels.hopper.flex.problem import problem_of

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(arch_of(HERE) != ARCH, reason="needs an sm_90 GPU")]
DRAWS = 24
LONGEST = 1400
Function = Callable[..., Any]
SCORES: dict[str, Function | None] = {
    "none": None,
    "linear": lambda s, b, h, q, k: s + (k - q) * 0.01,
    "small tanh": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
    "large tanh": lambda s, b, h, q, k: 2 * torch.tanh(s),
    "by head": lambda s, b, h, q, k: s * (1 + 0.1 * h) - 0.01 * (q - k).abs(),
    "linear by head": lambda s, b, h, q, k: 0.5 * s - 0.004 * (h + 1) * (q - k),
}
BOUNDED: dict[str, Function | None] = {
    "cap of 52": lambda s, b, h, q, k: 52 * torch.tanh(s / 52),
    "clamp": lambda s, b, h, q, k: (4 * s).clamp(-20, 70),
    "far from 0": lambda s, b, h, q, k: 12 * torch.sigmoid(s - 0.01 * (q - k).abs()) + 200,
}
"""Scores whose exponentials need no row maximum of bf16 operands; as small and large tanh."""


@dataclass
class Case:
    seed: int

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.head_dim = r.choice((64, 96, 128, 128))
        self.heads, self.kv_heads = r.choice(((2, 2), (4, 2), (4, 1)))
        self.batch, self.queries, self.keys = r.choice((1, 2)), r.randrange(1, LONGEST), r.randrange(1, LONGEST)
        self.score, self.mask = r.choice(tuple(SCORES)), r.choice(("documents", "by head", "blocks", "few blocks"))
        self.block = r.choice(((128, 128), (64, 64), (128, 64), (256, 128)))
        self.dtype = r.choice((torch.bfloat16, torch.float16))
        generator = torch.Generator("cuda").manual_seed(self.seed)

        def normal(length: int, heads: int) -> torch.Tensor:
            size = self.batch, heads, length, self.head_dim
            return torch.randn(size, device="cuda", dtype=self.dtype, generator=generator).transpose(1, 2)

        self.q, self.k, self.v = (
            normal(self.queries, self.heads), normal(self.keys, self.kv_heads), normal(self.keys, self.kv_heads)
        )  # fmt: skip
        self.document = (torch.rand(LONGEST, device="cuda", generator=generator) < 0.01).int().cumsum(0).int()
        self.shown, self.block_mask = self._mask(generator)
        self.program, self.arguments = bind(
            SCORES[self.score], self.block_mask.mask_mod, torch.device("cuda", 0), "f32"
        )

    def _mask(self, generator: torch.Generator) -> tuple[Function, BlockMask]:
        document, lengths = self.document, (self.queries, self.keys)
        if self.mask == "documents":
            visible: Function = lambda b, h, q, k: (document[q] == document[k]) & (q >= k)  # noqa: E731
            return visible, create_block_mask(visible, None, None, *lengths, device="cuda", BLOCK_SIZE=self.block)
        if self.mask == "by head":
            visible = lambda b, h, q, k: ((q + h * 37) % 5 != 0) & ((k // 8) % (h + 2) != 1)  # noqa: E731
            size = self.batch, self.heads
            return visible, create_block_mask(visible, *size, *lengths, device="cuda", BLOCK_SIZE=self.block)
        density = 0.4 if self.mask == "blocks" else 0.04
        (rows, columns), (m, n) = (-(-a // b) for a, b in zip(lengths, self.block, strict=True)), self.block
        listed = torch.rand(1, self.heads, rows, columns, device="cuda", generator=generator) < density
        counts = listed.sum(-1, dtype=torch.int32)
        indices = torch.argsort(listed.int(), dim=-1, descending=True, stable=True).int()
        visible = lambda b, h, q, k: listed[0, h, q // m, k // n]  # noqa: E731
        lists = torch.zeros_like(counts), indices, counts, indices
        return visible, BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=self.block, mask_mod=noop_mask, seq_lengths=lengths)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def reference(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
        """q, k and v in f64, the output and the LSE, differentiable."""
        operands = tuple(t.double().detach().requires_grad_() for t in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in operands)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        scores = q @ k.mT * self.scale
        sizes = enumerate(scores.shape)
        at = tuple(torch.arange(n, device="cuda").view([-1 if i == axis else 1 for i in range(4)]) for axis, n in sizes)
        function = SCORES[self.score]
        scores = scores if function is None else function(scores, *at)
        scores = scores.masked_fill(~self.shown(*at).expand_as(scores), -torch.inf)
        lse = scores.logsumexp(-1)
        return operands, (torch.exp(scores - lse[..., None]).nan_to_num(0.0) @ v).transpose(1, 2), lse

    def call(self) -> tuple[Any, ...]:
        return self.program, self.arguments, self.block_mask, self.scale


def poison() -> None:
    """Leave NaN where outputs are allocated next."""
    left = [torch.full((1 << 22,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    del left


@pytest.mark.parametrize("asked", [False, True], ids=["bits", "program asked"])
@pytest.mark.parametrize("seed", range(DRAWS))
def test_values_lse_and_gradients(seed: int, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked:
        monkeypatch.setattr(masks, "MOST_BYTES", -1)
    case = Case(seed)
    operands, expected, expected_lse = case.reference()
    visible = torch.isfinite(expected_lse)
    poison()
    out, lse = forward(case.q, case.k, case.v, *case.call())
    tolerance = 2e-2 if case.dtype == torch.bfloat16 else 4e-3
    assert (out.double() - expected).abs().max() < tolerance
    if visible.any():
        assert (lse.double() - expected_lse)[visible].abs().max() < 5e-3
    assert (lse[~visible] == -torch.inf).all() and (out.transpose(1, 2)[~visible] == 0).all()

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    loss = (expected * dout.double()).sum() + (torch.where(visible, expected_lse, 0.0) * dlse.double()).sum()
    gradients = [g.nan_to_num(0.0) for g in torch.autograd.grad(loss, operands)]
    poison()
    found = backward(case.q, case.k, case.v, out, lse, dout, dlse, *case.call())
    for one, gradient in zip(found, gradients, strict=True):
        assert (one.double() - gradient).norm() <= 1e-2 * gradient.norm() + 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_the_deterministic_backward_repeats_its_bits(seed: int) -> None:
    case = Case(seed)
    out, lse = forward(case.q, case.k, case.v, *case.call())
    dout = torch.randn_like(out)
    runs = []
    for _ in range(4):
        poison()
        runs.append(backward(case.q, case.k, case.v, out, lse, dout, None, *case.call(), deterministic=True))
    for run in runs[1:]:
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(runs[0], run, strict=True))


def against_f64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: str, visibility: Function, mask: BlockMask
) -> None:
    """flex_attention of ``(b, h, s, d)`` tensors, and its gradients, next to f64 on the same operands."""
    n, m = q.shape[2], k.shape[2]
    at = tuple(torch.arange(size, device="cuda").view([-1 if i == axis else 1 for i in range(4)]) for axis, size in
               enumerate((q.shape[0], q.shape[1], n, m)))  # fmt: skip
    wide = [t.double().detach().requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in wide[1:])
    scores = wide[0] @ keys.mT * q.shape[3] ** -0.5
    function = (SCORES | BOUNDED)[score]
    scores = scores if function is None else function(scores, *at)
    scores = scores.masked_fill(~visibility(*at).expand_as(scores), -torch.inf)
    wanted_lse = scores.logsumexp(-1)
    visible = wanted_lse.isfinite()
    expected = torch.exp(scores - wanted_lse[..., None]).nan_to_num(0.0) @ values
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    poison()
    out, lse = flex_attention(*leaves, function, mask, None, True, True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    assert (out.double() - expected).norm() <= 1e-2 * expected.norm()
    assert torch.equal(lse.isfinite(), visible) and (lse.double() - wanted_lse)[visible].abs().max() < 5e-3
    poison()
    found = torch.autograd.grad((out * dout).sum() + (torch.where(visible, lse, 0) * dlse).sum(), leaves)
    loss = (expected * dout.double()).sum() + (torch.where(visible, wanted_lse, 0.0) * dlse.double()).sum()
    for one, gradient in zip(found, torch.autograd.grad(loss, wide), strict=True):
        gradient = gradient.nan_to_num(0.0)
        assert (one.double() - gradient).norm() <= 1e-2 * gradient.norm() + 1e-6


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("window", [(-1, 0), (70, 0), (33, 90)])
@pytest.mark.parametrize(
    ("head_dim", "tile", "without_maximum"), [(128, (192, 80), (192, 64)), (64, (256, 64), (256, 64))]
)
def test_scores_in_a_window(
    score: str, window: tuple[int, int], head_dim: int, tile: tuple[int, int], without_maximum: tuple[int, int]
) -> None:
    """Through the public function: a window is an argument of the kernels, not a list."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, head_dim, device="cuda", dtype=torch.bfloat16) for h, n in ((4, 700), (2, 500), (2, 500))
    )
    problem = problem_of(*(t.transpose(1, 2) for t in (q, k, v)), head_dim**-0.5, window)
    config = run_forward.config_of(problem, bind(SCORES[score], None, q.device)[0], None)
    assert (config.block_m, config.block_n) == (without_maximum if "tanh" in score or "linear" in score else tile)
    assert bool(config.program) == (score != "none") != config.across_tiles
    left, right = window
    both: Function = lambda b, h, i, j: (i - j <= left) & (j - i <= right)  # noqa: E731
    shown: Function = both if left >= 0 else lambda b, h, i, j: j - i <= right
    mask = create_flashlane_mask(shown, None, None, 700, 500, "cuda")
    assert windows.NOTES.of(mask) == window
    against_f64(q, k, v, score, shown, mask)


@pytest.mark.parametrize("score", [name for name in SCORES if name != "none"])
@pytest.mark.parametrize(
    ("head_dim", "queries", "keys", "window", "rows"),
    [
        (64, 2050, 2050, (-1, 0), (112, 128)), (64, 700, 500, (-1, -1), (112, 128)),
        (40, 2050, 2047, (-1, 90), (112, 112)), (64, 1500, 1300, (-1, 0), (96, 128)),
        (40, 1024, 1024, (-1, -1), (96, 128)), (64, 1024, 900, (-1, 0), (64, 128)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_steps_of_the_backward(
    score: str, head_dim: int, queries: int, keys: int, window: tuple[int, int], rows: tuple[int, int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """The queries of a step depend on the lengths, the window and whether a score is linear; lengths end
    inside a step, and inside a block."""
    torch.manual_seed(0)
    sizes = (4, queries), (2, keys), (2, keys)
    q, k, v = (torch.randn(2, h, n, head_dim, device="cuda", dtype=dtype) for h, n in sizes)
    problem = problem_of(*(t.transpose(1, 2) for t in (q, k, v)), head_dim**-0.5, window)
    config = run_backward.config_of(problem, bind(SCORES[score], None, q.device)[0], None)
    assert config.block_m == rows[score == "linear"] and config.program
    right = window[1]
    shown: Function = lambda b, h, i, j: (j - i <= right) if right >= 0 else (i == i) | (j == j)  # noqa: E731
    mask = None if right < 0 else create_flashlane_mask(shown, None, None, queries, keys, "cuda")
    assert mask is None or windows.NOTES.of(mask) == window
    against_f64(q, k, v, score, shown, mask)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("steep", [-0.2, 0.03])
def test_scores_by_distance_and_a_captured_slope(lists: bool, head_dim: int, steep: float) -> None:
    """A row's part of a linear score is in the row's maximum and its LSE; the slope is of each head."""
    torch.manual_seed(0)
    n, m = 900, 1100
    slopes = torch.tensor([steep, -steep, 0.0, steep / 3], device="cuda")
    limit = torch.full((n,), m - 3, device="cuda", dtype=torch.int32)  # a mask with it is no window
    window: Function = lambda b, h, i, j: i >= j - 40  # noqa: E731
    visible: Function = (lambda b, h, i, j: window(b, h, i, j) & (j < limit[i])) if lists else window
    mask = create_flashlane_mask(visible, None, None, n, m, "cuda")
    assert (windows.NOTES.of(mask) is None) == lists
    q, k, v = (torch.randn(2, h, s, head_dim, device="cuda", dtype=torch.bfloat16) for h, s in ((4, n), (2, m), (2, m)))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return s + slopes[h] * (j - i)

    at = tuple(torch.arange(size, device="cuda").view([-1 if i == axis else 1 for i in range(4)]) for axis, size in
               enumerate((2, 4, n, m)))  # fmt: skip
    keys, values = (t.double().repeat_interleave(2, 1) for t in (k, v))
    scores = score(q.double() @ keys.mT * head_dim**-0.5, *at).masked_fill(~visible(*at).expand(2, 4, n, m), -torch.inf)
    poison()
    out, lse = flex_attention(q, k, v, score, mask, None, True, True)
    wanted = torch.softmax(scores, -1) @ values
    assert (out.double() - wanted).norm() <= 1e-2 * wanted.norm()
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 5e-3


@pytest.mark.parametrize("growth", [0.35, 5.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_linear_scores_that_grow_from_block_to_block(head_dim: int, masked: bool, growth: float) -> None:
    """Their maximum is deferred: it is raised by sums, or, where exponentials overflow, scores are computed again."""
    torch.manual_seed(0)
    n = 1100
    q, k, v = (torch.randn(2, 3, n, head_dim, device="cuda", dtype=torch.bfloat16).contiguous() for _ in range(3))
    q.abs_(), k.abs_()  # blocks are walked from the last one to the first
    k.mul_((1 + (n - torch.arange(n, device="cuda")) // 64 * growth)[:, None].to(k.dtype))
    slopes = torch.tensor([0.02, 0.3, -0.05], device="cuda")
    seen = lambda b, h, i, j: i >= j  # noqa: E731
    mask = create_flashlane_mask(seen, None, None, n, n, "cuda") if masked else None

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return s + slopes[h] * (j - i)

    i, j = torch.arange(n, device="cuda")[:, None], torch.arange(n, device="cuda")
    scores = q.double() @ k.double().mT * head_dim**-0.5 + slopes.double()[:, None, None] * (j - i)
    scores = scores.masked_fill(~seen(0, 0, i, j), -torch.inf) if masked else scores
    poison()
    out, lse = flex_attention(q, k, v, score, mask, None, False, True)
    wanted = torch.softmax(scores, -1) @ v.double()
    assert (out.double() - wanted).norm() <= 1e-2 * wanted.norm()
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=2e-6, atol=5e-3)


@pytest.mark.parametrize("score", ["small tanh", "large tanh"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_tanh_with_lists(score: str, head_dim: int, block: int, dtype: torch.dtype) -> None:
    """Of bf16 operands it has the special-function unit's error, as without lists; the backward has no ping-pong."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 700, head_dim, device="cuda", dtype=dtype) for h in (4, 2, 2))
    document = (torch.rand(700, device="cuda") < 0.01).int().cumsum(0).int()
    visible: Function = lambda b, h, i, j: ((document[i] == document[j]) | (j < 9)) & (i >= j)  # noqa: E731
    mask = create_flashlane_mask(visible, None, None, 700, 700, "cuda", block)
    problem = problem_of(*(t.transpose(1, 2) for t in (q, k, v)), head_dim**-0.5)
    program = bind(SCORES[score], mask.mask_mod, q.device)[0]
    configs = (
        run_forward.config_of(problem, program, (block, block), True),
        run_backward.config_of(problem, program, (block, block), True),
    )
    for config in configs:
        approximate = dtype == torch.bfloat16
        assert ("approximate_tanh(" in config.program) == approximate != ("program::tanh(" in config.program)
    assert configs[1].ping_pong == "off"
    against_f64(q, k, v, score, visible, mask)


@pytest.mark.parametrize("score", [*BOUNDED, "small tanh"])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)])
def test_bounded_scores_at_both_of_their_ends(score: str, lists: bool, head_dim: int, dtype: torch.dtype) -> None:
    """Large products reach a cap; some rows have only scores at its low end, and some see nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 700, head_dim, device="cuda", dtype=dtype) for h in (4, 2, 2))
    q[:, :, ::3] *= 20
    q[:, :, 5::40], k[:, :, 600:] = -4, 4  # of these, the products are far below 0
    first = torch.where(torch.arange(700, device="cuda") % 40 == 5, 600, 9).int()
    visible: Function = lambda b, h, i, j: (j >= first[i]) & (i >= j - 50) if lists else i >= j  # noqa: E731
    mask = create_flashlane_mask(visible, None, None, 700, 700, "cuda")
    assert (windows.NOTES.of(mask) is None) == lists
    program = bind(BOUNDED.get(score) or SCORES[score], None, q.device)[0]
    assert program.centre is not None and (program.centre > 200) == (score == "far from 0")
    against_f64(q, k, v, score, visible, mask)


@pytest.mark.parametrize("score", ["linear", "small tanh", "clamp"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_with_a_nan_has_no_number(score: str, head_dim: int) -> None:
    q, k, v = (torch.randn(1, 2, 300, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[0, 1, 77, 3] = torch.nan
    mask = create_flashlane_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, "cuda")
    out = flex_attention(q, k, v, (SCORES | BOUNDED)[score], mask)
    nan = torch.zeros(out.shape[:-1], dtype=torch.bool, device="cuda")
    nan[0, 1, 77] = True
    assert torch.equal(out.isnan().all(-1), nan) and torch.equal(out.isnan().any(-1), nan)


@pytest.mark.parametrize("score", ["linear", "small tanh", "large tanh"])
@pytest.mark.parametrize("lists", [False, True])
def test_what_a_query_does_not_see_changes_none_of_its_bits(score: str, lists: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 640, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    visible_keys = 300
    other = k.clone()
    other[:, :, visible_keys:] *= 100
    limit = torch.full((640,), 640, device="cuda", dtype=torch.int32)  # a mask with it is no window
    shown: Function = (lambda b, h, i, j: (i >= j) & (j < limit[i])) if lists else (lambda b, h, i, j: i >= j)
    mask = create_flashlane_mask(shown, None, None, 640, 640, "cuda")
    outputs = [flex_attention(q, keys, v, SCORES[score], mask)[:, :, :visible_keys] for keys in (k, other)]
    assert torch.equal(*(out.view(torch.int16) for out in outputs))


@pytest.mark.parametrize("kind", ["full", "causal", "a function"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_documents(kind: str, head_dim: int) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor([0, 1, 200, 200, 555, 700], device="cuda")
    ids = torch.repeat_interleave(torch.arange(5, 0, -1, device="cuda"), offsets.diff())
    shown: Function = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)  # noqa: E731
    mask_mod = shown if kind == "a function" else named.documents(offsets, kind == "causal")
    mask = create_flashlane_mask(mask_mod, None, None, 700, 700, "cuda")
    assert packed.NOTES.of(mask) is not None
    sizes = (4, 2, 2)
    q, k, v = (torch.randn(1, h, 700, head_dim, device="cuda", dtype=torch.bfloat16) for h in sizes)
    results = []
    for backend in ("FLASHLANE", "REFERENCE"):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        poison()
        out, lse = flex_attention(*leaves, None, mask, None, True, True, {"BACKEND": backend})
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)))
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape and (one.double() - other.double()).norm() <= 1e-2 * other.double().norm()
