"""Torch's CausalBias, a mask's name and sizes in a tensor whose own numbers nothing wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import flashlane

pytestmark = pytest.mark.usefixtures("torch_kernels")


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("keys", [3, 5, 7])
@pytest.mark.parametrize("bias_of", [causal_upper_left, causal_lower_right])
def test_sdpa_takes_the_mask_that_it_stands_for(
    bias_of: Callable[[int, int], CausalBias], keys: int, compiled: bool
) -> None:
    q, (k, v) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 4, keys, 8)
    bias, function = bias_of(5, keys), flashlane.scaled_dot_product_attention
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).nan_to_num(0.0)
    torch.testing.assert_close(function(q, k, v, attn_mask=bias), expected)
    torch.testing.assert_close(function(q[:, 0], k[:, 0], v[:, 0], attn_mask=bias), expected[:, 0])


def test_it_is_refused_elsewhere_and_of_other_sizes() -> None:
    q, bias = torch.randn(1, 5, 5, 8), causal_upper_left(5, 6)
    message = r"^attn_mask is a CausalBias of \(queries, keys\) \(5, 6\); it must be of \(5, 5\)$"
    with pytest.raises(ValueError, match=message):
        flashlane.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    with pytest.raises(ValueError, match="is_causal is True and attn_mask is given"):
        flashlane.scaled_dot_product_attention(q, q, q, attn_mask=causal_upper_left(5, 5), is_causal=True)
    for name, call in {
        "attn_bias": lambda: flashlane.flash_attn_func(q, q, q, attn_bias=causal_upper_left(5, 5)),
        "k": lambda: flashlane.flash_attn_func(q, bias, q),
    }.items():
        with pytest.raises(TypeError, match=f"^{name} is torch's CausalBias, which holds no numbers; it must be"):
            call()
