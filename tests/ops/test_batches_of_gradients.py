"""Backward passes that ``torch.autograd`` maps: ``is_grads_batched``, ``jacobian(vectorize=True)``."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch._vmap_internals import _vmap
from torch.autograd.functional import jacobian

import flashlane

pytestmark = pytest.mark.usefixtures("torch_kernels")
CU_SEQLENS = torch.tensor([0, 2, 5], dtype=torch.int32)


def dense(*tensors: torch.Tensor) -> torch.Tensor:
    return flashlane.flash_attn_func(*tensors, causal=True).sum(1)


def with_lse(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flashlane.flash_attn_func(*tensors, return_lse=True)


def lse_alone(*tensors: torch.Tensor) -> torch.Tensor:
    return flashlane.flash_attn_func(*tensors, return_lse=True)[1]


def modified(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flashlane.flash_attn_func(q, k, v, sinks=q[0, 0, :, 0], attn_bias=v[0, :, 0, 0]).sum(1)


def packed(*tensors: torch.Tensor) -> torch.Tensor:
    return flashlane.flash_attn_varlen_func(*(t[0] for t in tensors), CU_SEQLENS, CU_SEQLENS, 3, 3).sum(0)


def operator(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.ops.flashlane.forward(*tensors, None, True, needs_grad=True)[0].sum(1)


def captured(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    slopes = v[0, 0, :, 0]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return flashlane.flex_attention(q, k, v, lambda score, b, h, i, j: score * slopes[h]).sum(2)


def qkv() -> list[torch.Tensor]:
    return [torch.randn(1, 5, 2, 4, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("call", [dense, with_lse, lse_alone, modified, packed, operator, captured])
def test_a_jacobian_is_that_of_one_row_after_another(call: Callable[..., torch.Tensor]) -> None:
    tensors = tuple(qkv())
    for _ in range(2):  # the second call is like an earlier one
        found, expected = (jacobian(call, tensors, vectorize=vectorize) for vectorize in (True, False))
        torch.testing.assert_close(found, expected)


def test_a_compiled_backward_is_mapped() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    call = torch.compile(dense, backend="aot_eager", fullgraph=True)
    grads = torch.randn(3, *dense(q, k, v).shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(call(q, k, v), q, grads, is_grads_batched=True)
    expected = [torch.autograd.grad(dense(q, k, v), q, grad)[0] for grad in grads]
    torch.testing.assert_close(found, torch.stack(expected))


def test_maps_are_nested_and_other_threads_compute_them() -> None:
    """The backward of tensors on a GPU runs in a thread of that device."""
    q, k, v = qkv()
    q.requires_grad_()
    out, grads = flashlane.flash_attn_func(q, k, v), torch.randn(2, 3, *q.shape, dtype=torch.float64)

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(out, q, grad, retain_graph=True)[0]

    def gradient_of_a_thread(grad: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: results.append(gradient(grad)))
        thread.start()
        thread.join()
        return results[0]

    expected = torch.stack([torch.stack([gradient(grad) for grad in some]) for some in grads])
    for function in (gradient, gradient_of_a_thread):
        torch.testing.assert_close(_vmap(_vmap(function))(grads), expected)


@pytest.mark.parametrize("call", [dense, captured])
def test_a_second_derivative_of_a_batch_is_refused(call: Callable[..., torch.Tensor]) -> None:
    q, k, v = qkv()
    out = call(q.requires_grad_(), k, v)
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"has no (second )?derivative"):
        (found,) = torch.autograd.grad(out, q, grads, is_grads_batched=True, create_graph=True)
        found.sum().backward()
