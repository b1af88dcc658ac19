"""Numbers that tensors hold: lengths that a compiled function reads, meta tensors; an axis of ``vmap`` of size 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashlane

pytestmark = pytest.mark.usefixtures("torch_kernels")
CU_SEQLENS = torch.tensor([0, 4, 10], dtype=torch.int32)


@torch._dynamo.config.patch(capture_scalar_outputs=True)  # after pytest's own, torch 2.15 has no such option any more
def test_a_compiled_function_reads_the_longest_length_itself() -> None:
    def packed(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        longest = cu.diff().max().item()
        return flashlane.flash_attn_varlen_func(x, x, x, cu, cu, longest, longest, causal=True)

    def gradient(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 320, dtype=torch.float64).view(10, 4, 8).requires_grad_()
        out = function(x, CU_SEQLENS)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]

    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradient(compiled), gradient(packed))


def test_a_compiled_call_refuses_a_negative_length_by_name() -> None:
    x = torch.randn(10, 4, 8)
    call = torch.compile(flashlane.flash_attn_varlen_func, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="max_seqlen_k is -1; it must be a whole number of at least 0"):
        call(x, x, x, CU_SEQLENS, CU_SEQLENS, 6, -1)


def test_a_number_on_the_meta_device_is_refused_by_name() -> None:
    x, cache, number = torch.randn(10, 4, 8), torch.randn(2, 16, 4, 8), torch.tensor(6, device="meta")
    with pytest.raises(TypeError, match=r"^max_seqlen_q is tensor\(.*device='meta'.*it must be a whole number"):
        flashlane.flash_attn_varlen_func(x, x, x, CU_SEQLENS, CU_SEQLENS, number, 6)
    with pytest.raises(TypeError, match=r"^num_splits is tensor\(.*device='meta'.*it must be a whole number"):
        flashlane.flash_attn_with_kvcache(cache[:, :1], cache, cache, num_splits=number)


def test_an_axis_of_vmap_of_size_0_is_named() -> None:
    q = torch.randn(2, 5, 4, 8)
    with pytest.raises(ValueError, match=r"^the axis that torch\.vmap maps has size 0; it must be at least 1$"):
        torch.vmap(lambda sinks: flashlane.flash_attn_func(q, q, q, sinks=sinks))(torch.randn(0, 4))
