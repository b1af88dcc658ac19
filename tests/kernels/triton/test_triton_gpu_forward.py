"""The Triton forward on a GPU: drawn problems of every feature by the peers' rule, and what must hold of a launch.

``FLASHLANE_DRAWS`` says how many problems each variant draws, ``FLASHLANE_SHARE=2/8`` takes every eighth variant from
the second on, so that several processes share the compiling.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from problems import Case, Products, tf32_factor

from flashlane.bench.measure.check import exact_matmul
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton.forward_configs import TritonConfig
from flashlane.reference.naive import reference_attention

pytestmark = pytest.mark.gpu
DRAWS = int(os.environ.get("FLASHLANE_DRAWS", "12"))
SHARE, SHARES = (int(word) for word in os.environ.get("FLASHLANE_SHARE", "1/1").split("/"))
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 113, 127, 128, 203, 333, 512, 1023)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WINDOWS = ((5, -1), (70, 0), (64, 9), (0, 200))
STRIDES = {
    "plain": ("plain", "transposed", "expanded"),
    "sliced": ("sliced",),
}


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for; lengths, heads and values are drawn."""

    dtype: torch.dtype = BF16
    head_dim: int = 64
    head_dim_v: int = 0
    mask: str = "any"
    features: tuple[str, ...] = ()
    strides: str = "plain"
    tag: str = "triton"

    def __str__(self) -> str:
        dims = f"{self.head_dim}-{self.head_dim_v or self.head_dim}"
        strides = () if self.strides == "plain" else (self.strides,)
        return "_".join((self.tag, str(self.dtype)[6:], dims, self.mask, *self.features, *strides))


MASKS = ("full", "causal", "window")
ALL = ("alibi", "bias", "sinks", "softcap", "dropout")
VARIANTS = (
    *(Variant(dtype, d, mask=mask) for dtype in (BF16, F16) for d in (64, 128) for mask in MASKS),
    *(Variant(head_dim=d, mask="causal") for d in (8, 16, 32, 40, 59, 80, 96, 111, 160, 192, 256, 320, 512)),
    *(Variant(F16, d, mask="full", strides="sliced") for d in (8, 32, 59, 64, 96, 111, 320)),
    *(Variant(head_dim=d, head_dim_v=dv, mask="causal") for d, dv in ((192, 128), (64, 512), (111, 32), (59, 80))),
    *(Variant(head_dim=d, head_dim_v=dv, mask="full") for d, dv in ((59, 16), (40, 96), (128, 32))),
    *(Variant(head_dim=d, mask=mask, features=("varlen",)) for d in (64, 128) for mask in MASKS),
    *(Variant(mask="causal", features=(feature,)) for feature in ALL),
    *(Variant(F16, 128, mask="full", features=(feature,)) for feature in ALL),
    *(Variant(head_dim=d, mask="window", features=("varlen", *ALL)) for d in (64, 111)),
    *(Variant(mask="causal", features=(f,)) for f in ("used", "leftpad", "batch_idx", "paged")),
    *(Variant(head_dim=128, mask=mask, features=("paged", "used", "leftpad")) for mask in MASKS),
    *(Variant(head_dim=128, mask="causal", features=("used", "batch_idx", feature)) for feature in ALL[:4]),
    Variant(mask="causal", features=("varlen", "paged")),
    *(Variant(F32, d, mask=mask) for d in (64, 128) for mask in ("full", "causal")),
    *(Variant(F32, d, mask="causal") for d in (8, 59, 96, 256, 512)),
    Variant(F32, 40, mask="window", features=("varlen", *ALL)),
    Variant(F32, 64, mask="causal", features=("paged", "used")),
    *(Variant(F32, d, mask="causal", tag="triton(ieee)") for d in (40, 64, 128)),
    *(Variant(F32, d, mask="causal", tag="triton(tf32)") for d in (40, 64, 128)),
)  # fmt: skip


def draw(variant: Variant, number: int) -> Case:
    chance = random.Random(f"{variant} {number}")
    has = variant.features.__contains__

    def length() -> tuple[int, int]:
        few = chance.random() < 0.3  # one tile of packed heads, and split keys
        return chance.choice((1, 2, 3) if few else LENGTHS), chance.choice((*LENGTHS, 2500) if few else LENGTHS)

    lengths = [length() for _ in range(chance.randint(1, 4) if has("varlen") else 1)]
    if has("varlen") and chance.random() < 0.5:
        lengths[chance.randrange(len(lengths))] = chance.choice([(0, 64), (64, 0), (0, 0), (1, 300)])
    elif chance.random() < 0.05:
        lengths[0] = chance.choice([(0, 64), (64, 0)])
    return Case(
        lengths=tuple(lengths) if has("varlen") else tuple(lengths * chance.randint(1, 3)),
        varlen=has("varlen"),
        kv_heads=chance.randint(1, 3),
        group=chance.choice((1, 1, 2, 3, 8)),
        head_dim=variant.head_dim,
        head_dim_v=variant.head_dim_v or variant.head_dim,
        causal=variant.mask == "causal",
        alignment=chance.choice(("bottom-right", "bottom-right", "top-left")),
        window=chance.choice(WINDOWS) if variant.mask == "window" else (-1, -1),
        softcap=chance.choice((1.5, 20.0)) if has("softcap") else 0.0,
        alibi=chance.choice(("heads", "batch")) if has("alibi") else "none",
        bias=tuple(chance.random() < 0.6 for _ in range(4)) if has("bias") else None,
        hide=chance.random() < 0.5,
        sinks=has("sinks"),
        strides=chance.choice(STRIDES[variant.strides]),
        seed=chance.randrange(2**32),
        dropout=0.17 if has("dropout") else 0.0,
        used=has("used"),
        leftpad=has("leftpad"),
        batch_idx=has("batch_idx"),
        page_size=chance.choice((1, 16, 64, 100)) if has("paged") else 0,
    )


def build(case: Case, dtype: torch.dtype) -> tuple[AttentionProblem, Inputs]:
    return case.build(dtype, device="cuda")


def run(
    problem: AttentionProblem, inputs: Inputs, tag: str = "triton", config: TritonConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, written over NaN."""
    rows = inputs.q.shape[:-1]
    shape = (problem.heads, rows[0]) if problem.varlen else (problem.batch, problem.heads, problem.seqlen_q)
    out = torch.full((*rows, problem.head_dim_v), math.nan, dtype=problem.dtype, device="cuda")
    lse = torch.full(shape, math.nan, device="cuda")
    kernel = registry.get(tag)
    assert kernel.supports(problem) is None
    if config is None:
        kernel.forward(problem, inputs, out, lse)
    else:
        kernel.run(config, problem, inputs, out, lse)
    return out, lse


def complaint(
    problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, tf32: bool = False
) -> str:
    """What is wrong by FlashAttention-3's rule (2·max|pt − ref| and the rounding of ref), or nothing.

    pt is the formula in the problem's dtype; with ``tf32`` in f32 with products that see 10 bits of their factors.
    """
    if not out.numel():
        return ""
    wide = torch.float64 if problem.dtype == F32 else torch.float32
    with torch.no_grad(), exact_matmul():
        want, want_lse = reference_attention(problem, inputs, wide)
        with Products(tf32_factor) if tf32 else contextlib.nullcontext():
            low, low_lse = reference_attention(problem, inputs, problem.dtype)
    rounded = want.to(problem.dtype)
    allowed = 2 * (low.to(wide) - want).abs().max() + 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max()
    allowed += 8 * torch.finfo(F32).eps * want.abs().max() + (1e-5 if problem.dtype != F32 else 0.0)
    error = (out.to(wide) - want).abs().max()
    if not error <= allowed:
        return f"out: error {error:.3g} above {allowed:.3g}, {int(out.isnan().sum())} NaN"
    seen = torch.isfinite(want_lse)
    if not torch.equal(torch.isfinite(lse), seen) or lse.isnan().any():
        return "LSE: finite where it must not be, or the reverse"
    if seen.any():
        error = (lse.to(wide) - want_lse)[seen].abs().max()
        bound = (4e-6 if problem.dtype == F32 else 2e-5) * max(1.0, want_lse[seen].abs().max())
        if tf32:
            bound += 2 * (low_lse.to(wide) - want_lse)[seen].abs().max()
        if not error <= bound:
            return f"LSE: error {error:.3g} above {bound:.3g}"
    return ""


@pytest.mark.parametrize("variant", VARIANTS[SHARE - 1 :: SHARES], ids=str)
def test_agrees_with_the_reference(variant: Variant) -> None:
    for number in range(DRAWS):
        case = draw(variant, number)
        problem, inputs = build(case, variant.dtype)
        out, lse = run(problem, inputs, variant.tag)
        wrong = complaint(problem, inputs, out, lse, tf32="tf32" in variant.tag)
        assert not wrong, f"{wrong}: {problem.describe()} with {registry.get(variant.tag).config(problem)}, {case}"


PLAIN = Case(
    lengths=((333, 700),) * 2, varlen=False, kv_heads=2, group=2, head_dim=64, head_dim_v=64, causal=True,
    alignment="bottom-right", window=(-1, -1), softcap=0.0, alibi="none", bias=None, hide=False, sinks=False,
    strides="plain", seed=7,
)  # fmt: skip


def test_every_candidate_is_right() -> None:
    for dtype in (BF16, F32):
        for head_dim in (64, 128):
            problem, inputs = build(replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim), dtype)
            for config in registry.get("triton").candidates(problem):
                assert not complaint(problem, inputs, *run(problem, inputs, config=config)), config


@pytest.mark.parametrize("lengths", [(333, 700), (1, 9000)], ids=["tiles", "splits"])
def test_repeats_to_the_bit(lengths: tuple[int, int]) -> None:
    problem, inputs = build(replace(PLAIN, lengths=(lengths,), dropout=0.2), BF16)
    first = run(problem, inputs)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run(problem, inputs), strict=True))


def test_large_offsets() -> None:
    """Rows further apart than 2^31 elements take all together, and tiles of keys that span as many."""
    rows, stride = 70, 1 << 25
    space = torch.empty(rows * stride + 64, dtype=F16, device="cuda")
    q = torch.as_strided(space, (1, rows, 1, 64), (1, stride, 1, 1)).normal_()
    inputs = Inputs(q, q, q)
    problem = AttentionProblem.from_inputs(inputs)
    assert not complaint(problem, inputs, *run(problem, inputs))


def test_runs_on_the_current_stream_and_in_a_graph() -> None:
    for lengths in ((300, 300), (1, 5000)):
        problem, inputs = build(replace(PLAIN, lengths=(lengths,)), BF16)
        expected = run(problem, inputs)
        out, lse = (torch.full_like(t, math.nan) for t in expected)
        kernel = registry.get("triton")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            kernel.forward(problem, inputs, out, lse)
        assert not side.query(), "the launch did not wait on the stream that was current"
        side.synchronize()
        assert torch.equal(out, expected[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.forward(problem, inputs, out, lse)
        inputs.q.normal_()
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(problem, inputs)[0])


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (((100, 300), (65, 200)), ((96, 112), (62, 400))),  # the other's sums are multiples of 16
        (((100, 600), (65, 200)), ((97, 111), (70, 700))),
    ],
    ids=["tiles", "splits"],
)
def test_a_call_after_the_first_builds_nothing(
    first: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lengths that are cut up alike run what is compiled; another call like the first does not reach Triton."""
    from flashlane.kernels.triton import forward
    from flashlane.kernels.triton import forward_configs as configs

    def compiled() -> int:
        return len(forward.attention_kernel().device_caches[torch.cuda.current_device()][0])

    problem, inputs = build(replace(PLAIN, varlen=True, lengths=first), BF16)
    other_problem, other_inputs = build(replace(PLAIN, varlen=True, lengths=other), BF16)
    many = {configs.splits_of(p, registry.get("triton").config(p)) > 1 for p in (problem, other_problem)}
    assert len(many) == 1, "the keys of one are split, and of the other not: two kernels by design"
    run(problem, inputs)
    before = compiled()
    assert not complaint(other_problem, other_inputs, *run(other_problem, other_inputs))
    assert compiled() == before
    monkeypatch.setattr(forward.Plan, "__init__", lambda *args: pytest.fail("a plan was made"))
    run(problem, inputs)


FIRST_CALL = """
import torch, triton
from flashlane import flash_attn_func

built, launched = [], []
triton.knobs.runtime.jit_post_compile_hook = lambda **known: built.append(known["fn"].name)
triton.knobs.runtime.launch_enter_hook.add(lambda data: launched.append(data.get()["name"]))
q, k, v = (torch.randn(1, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
flash_attn_func(q, k, v, causal=True, kernel="triton").sum().backward()
torch.cuda.synchronize()
print(len(built), len(launched), *sorted(launched))
"""


def test_a_fresh_process_compiles_no_more_than_it_runs(tmp_path: Path) -> None:
    """Configurations are tables, or were stored by the tuner: nothing is tried, forward and backward."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}  # in f32, whose backward is Triton's
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built, launched, *names = done.stdout.split()
    assert int(launched) == len(names) == len(set(names)) >= 3, done.stdout
    assert int(built) == int(launched), done.stdout
