"""The Triton backward on a GPU: thousands of problems by the peers' rule, repeats to the bit, large offsets, graphs.

``FLASHLANE_DRAWS`` says how many problems each variant draws; benchmarks of a release use hundreds.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_rule import judge
from triton_variants import BACKWARD_VARIANTS as VARIANTS
from triton_variants import BackwardVariant as Variant

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton.backward import config_of, triton_backward
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients

pytestmark = pytest.mark.gpu
DRAWS = int(os.environ.get("FLASHLANE_DRAWS", "12"))
BF16 = torch.bfloat16


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_is_as_near_as_torch(variant: Variant) -> None:
    backward = functools.partial(triton_backward, precision=variant.precision)
    for seed in range(DRAWS):
        case = variant.draw(seed)
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


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two gradients are equal; None, which a problem without the input has, equals None only."""
    return a is b if a is None or b is None else torch.equal(a, b)


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
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


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
