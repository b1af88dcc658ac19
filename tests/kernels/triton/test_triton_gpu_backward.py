"""The Triton backward on a GPU: thousands of problems by the peers' rule, repeats to the bit, large offsets, graphs.

``FLASHLANE_DRAWS`` says how many problems each variant draws; benchmarks of a release use hundreds.
"""

from __future__ import annotations

import functools
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backward_rule import judge
from problems import Case

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton.backward import config_of, triton_backward
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients

pytestmark = pytest.mark.gpu
DRAWS = int(os.environ.get("FLASHLANE_DRAWS", "12"))
LENGTHS = (1, 2, 17, 63, 64, 65, 113, 127, 128, 129, 203, 256, 300, 512)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for; lengths, heads and values are drawn."""

    dtype: torch.dtype = BF16
    head_dim: int = 64
    head_dim_v: int = 0
    mask: str = "any"
    features: tuple[str, ...] = ()
    strides: tuple[str, ...] = ("plain", "transposed")
    precision: str = "ieee"

    def __str__(self) -> str:
        dims = f"{self.head_dim}-{self.head_dim_v or self.head_dim}"
        words = (str(self.dtype)[6:], dims, self.mask, *self.features)
        return "_".join(words + ((self.precision,) if self.precision != "ieee" else ()))


VARIANTS = (
    *(
        Variant(dtype, d, mask=mask)
        for dtype in (BF16, F16)
        for d in (64, 128)
        for mask in ("full", "causal", "window")
    ),
    *(Variant(head_dim=d, mask="causal", strides=("sliced", "expanded", "plain")) for d in (8, 40, 59, 96, 111, 256)),
    Variant(head_dim=192, head_dim_v=128, mask="causal"),
    Variant(F16, 64, 128, "full"),
    *(Variant(head_dim=d, mask=mask, features=("varlen",)) for d in (64, 128) for mask in ("full", "causal")),
    *(Variant(mask="causal", features=(f,)) for f in ("softcap", "alibi", "sinks", "dropout", "bias")),
    Variant(mask="full", features=("bias", "sinks")),
    Variant(F16, 64, mask="window", features=("varlen", "softcap", "alibi", "sinks", "dropout", "bias")),
    Variant(head_dim=128, mask="causal", features=("varlen", "alibi", "dropout")),
    *(Variant(F32, 64, mask="causal", precision=p) for p in ("ieee", "tf32", "tf32x3", "bf16x6")),
    *(Variant(F32, 128, mask="full", precision=p) for p in ("ieee", "tf32x3", "bf16x6")),
    Variant(F32, 40, mask="window", features=("varlen", "softcap", "alibi", "sinks", "dropout", "bias")),
)


def draw(variant: Variant, seed: int) -> Case:
    chance = random.Random(f"{variant} {seed}")
    varlen = "varlen" in variant.features
    lengths = [(chance.choice(LENGTHS), chance.choice(LENGTHS)) for _ in range(chance.randint(1, 4) if varlen else 1)]
    if varlen and chance.random() < 0.5:
        lengths[chance.randrange(len(lengths))] = chance.choice([(0, 64), (64, 0), (0, 0), (1, 300)])
    return Case(
        lengths=tuple(lengths) if varlen else tuple(lengths * chance.randint(1, 3)),
        varlen=varlen,
        kv_heads=chance.randint(1, 2),
        group=chance.choice((1, 1, 2, 3)),
        head_dim=variant.head_dim,
        head_dim_v=variant.head_dim_v or variant.head_dim,
        causal=variant.mask == "causal" or (variant.mask == "any" and chance.random() < 0.5),
        alignment=chance.choice(("bottom-right", "top-left")),
        window=(chance.choice((0, 5, 70, 130)), chance.choice((0, 9, 100))) if variant.mask == "window" else (-1, -1),
        softcap=chance.choice((1.5, 20.0)) if "softcap" in variant.features else 0.0,
        alibi=chance.choice(("heads", "batch")) if "alibi" in variant.features else "none",
        bias=tuple(chance.random() < 0.6 for _ in range(4)) if "bias" in variant.features else None,
        hide=chance.random() < 0.5,
        sinks="sinks" in variant.features,
        strides=chance.choice(variant.strides),
        seed=seed,
        dropout=0.17 if "dropout" in variant.features else 0.0,
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_is_as_near_as_torch(variant: Variant) -> None:
    backward = functools.partial(triton_backward, precision=variant.precision)
    for seed in range(DRAWS):
        case = draw(variant, seed)
        try:
            judge(*case.build(variant.dtype, device="cuda"), backward, variant.precision)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


def plain(n: int, d: int, batch: int = 2, heads: int = 4, kv_heads: int = 4, **asked: Any):
    q, k, v = (torch.randn(batch, n, h, d, device="cuda", dtype=BF16) for h in (heads, kv_heads, kv_heads))
    inputs = Inputs(q, k, v)
    return AttentionProblem.from_inputs(inputs, **asked), inputs


def ran(problem: AttentionProblem, inputs: Inputs, do: torch.Tensor) -> Gradients:
    out, lse = reference_attention(problem, inputs)
    return triton_backward(problem, inputs, out.to(problem.dtype), lse, do)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_to_the_bit(head_dim: int) -> None:
    problem, inputs = plain(777, head_dim, kv_heads=2, causal=True, deterministic=True)
    sinks = torch.randn(4, device="cuda", dtype=BF16)
    inputs = replace(inputs, bias=torch.randn(1, 4, 777, 777, device="cuda", dtype=BF16), sinks=sinks)
    problem = AttentionProblem.from_inputs(inputs, causal=True, deterministic=True)
    out, lse = reference_attention(problem, inputs)
    do = torch.randn_like(out).to(BF16)
    first = triton_backward(problem, inputs, out.to(BF16), lse, do)
    for _ in range(50):
        again = triton_backward(problem, inputs, out.to(BF16), lse, do)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_reads_through_descriptors_where_it_can() -> None:
    problem, inputs = plain(256, 64)
    do = torch.randn(2, 256, 4, 64, device="cuda", dtype=BF16)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert config_of(problem, inputs, do).descriptors is hopper
    assert not config_of(problem, inputs, do[:1, :1].expand(do.shape)).descriptors
    same = ran(problem, inputs, do[:, :1].expand(do.shape))
    copied = ran(problem, inputs, do[:, :1].expand(do.shape).contiguous())
    for a, b in zip(same[:3], copied[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_large_offsets() -> None:
    """Rows further apart than 2^31 elements."""
    rows, stride = 70, 1 << 25
    space = torch.empty(rows * stride + 64, dtype=BF16, device="cuda")
    q = torch.as_strided(space, (1, rows, 1, 64), (1, stride, 1, 1)).normal_()
    far = Inputs(q, q, q)
    problem = AttentionProblem.from_inputs(far, causal=True)
    near = Inputs(*(t.contiguous() for t in (q, q, q)))
    do = torch.randn(1, rows, 1, 64, device="cuda", dtype=BF16)
    for a, b in zip(ran(problem, far, do)[:3], ran(problem, near, do)[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_runs_in_a_graph() -> None:
    problem, inputs = plain(300, 64, causal=True)
    out, lse = reference_attention(problem, inputs)
    out, do = out.to(BF16), torch.randn_like(out).to(BF16)
    expected = triton_backward(problem, inputs, out, lse, do)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_backward(problem, inputs, out, lse, do)
    do.mul_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, 2 * b) for a, b in zip(found[:3], expected[:3], strict=True))
