"""Backward passes of Hopper kernels that ``torch.autograd`` maps, in its thread of the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashlane

pytestmark = pytest.mark.gpu


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flashlane.flash_attn_func(q, k, v, causal=True)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device=q.device)
    return flashlane.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 200, 200)


def by_function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flashlane.flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), lambda score, b, h, i, j: score + 0.1 * h)


@pytest.mark.parametrize("call", [dense, packed, by_function])
def test_a_batch_of_gradients_is_that_of_each(call: Callable[..., torch.Tensor]) -> None:
    tensors = [torch.randn(1, 300, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    for _ in range(2):  # the second call is like an earlier one
        out = call(*tensors)
        grads = torch.randn(3, *out.shape, dtype=out.dtype, device="cuda")
        found = torch.autograd.grad(out, tensors, grads, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(out, tensors, grad, retain_graph=True) for grad in grads]
        for some, others in zip(found, zip(*each, strict=True), strict=True):
            right = torch.stack(others).double()
            assert (some.double() - right).norm() <= 1e-2 * right.norm()
