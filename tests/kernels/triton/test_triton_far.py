"""Tensors whose elements lie further apart than 32 bits count, in memory that is mostly untouched."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import replace

import pytest
import torch
from kvcache_steps import Step, update_of

from flashlane.api.kvcache import update_in_torch
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton.backward import triton_backward

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing did yet
KERNEL = registry.get("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def strided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same numbers at other strides."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    memory = mmap.mmap(-1, size * tensor.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def far(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers; the first and the last column lie 2^31 elements apart."""
    *outer, columns = tensor.shape
    packed = tuple(math.prod(outer[axis + 1 :]) for axis in range(len(outer)))
    return strided(tensor, (*packed, -(-(2**31) // (columns - 1))))


def results(inputs: Inputs, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output, LSE and gradients."""
    problem = AttentionProblem.from_inputs(inputs)
    out, lse = torch.empty_like(do, memory_format=torch.contiguous_format), torch.empty(do.shape[0], 4, do.shape[1])
    KERNEL.forward(problem, inputs, out, lse)
    found = triton_backward(problem, inputs, out, lse, do)
    return out, lse, found.q, found.k, found.v, *(() if found.bias is None else (found.bias,))


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_columns(name: str) -> None:
    q, do = torch.randn(2, 2, 3, 4, 16).half()
    k, v = torch.randn(2, 2, 5, 2, 16).half()
    inputs = Inputs(q, k, v, bias=torch.randn(3, 5).half())
    apart = inputs if name == "do" else replace(inputs, **{name: far(getattr(inputs, name))})
    found = results(apart, far(do) if name == "do" else do)
    torch.testing.assert_close(found, results(inputs, do))


def test_slopes_of_batch_rows() -> None:
    """A view of a tensor with more axes has such strides."""
    q, do = torch.randn(2, 3, 3, 4, 16)
    k, v = torch.randn(2, 3, 5, 2, 16)
    slopes = torch.rand(3, 4)
    inputs = Inputs(q, k, v, alibi_slopes=slopes)
    apart = replace(inputs, alibi_slopes=strided(slopes, (2**30 + 8, 2)))
    torch.testing.assert_close(results(apart, do), results(inputs, do))


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache"])
def test_columns_of_what_a_cache_is_given(name: str) -> None:
    launch = pytest.importorskip("flashlane.kernels.triton.cache_update").launch
    update, same = (update_of(Step(rotary=16), torch.float16, "cpu") for _ in range(2))
    update = replace(update, **{name: far(getattr(update, name))})
    written = []
    for each, run in ((update, launch), (same, update_in_torch)):
        q_out, seqused = each.allocate()
        run(each, q_out, seqused)
        written.append((q_out, seqused, each.k_cache, each.v_cache))
    torch.testing.assert_close(*written, rtol=2e-3, atol=2e-3)
