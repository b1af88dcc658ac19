"""torch's FlexAttention as its users run it, for ``flex_speed.py``: compiled for a cell, with its own block mask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

BACKENDS = {"triton": "TRITON", "flash": "FLASH"}
"""``BACKEND`` of torch's flex_attention, by the name in the tables."""
LEAST_TILE = 64
"""Rows and columns of Triton's tiles for blocks that its default tiles do not divide: it asks the user for smaller."""


def every_pair(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return q >= 0


def with_function(mask: BlockMask) -> BlockMask:
    """The same lists with a mask function, without which torch 2.11's FLASH computes every block."""
    made = copy.copy(mask)
    made.mask_mod = every_pair
    return made


def options(name: str, mask: BlockMask | None) -> dict[str, Any]:
    """``kernel_options`` of a backend: Triton's default tiles have 128 rows, which blocks of 64 rows do not take.

    Its backward has such tiles too, but takes no option for them: with blocks of 64 rows it is refused.
    """
    found: dict[str, Any] = {"BACKEND": BACKENDS[name]}
    if name == "triton" and mask is not None and min(mask.BLOCK_SIZE) < 2 * LEAST_TILE:
        found |= dict.fromkeys(("BLOCK_M", "BLOCK_N"), LEAST_TILE)
    return found


def function(
    name: str, score_mod: Callable[..., Any] | None, mask: BlockMask | None, device: torch.device
) -> Callable[..., torch.Tensor]:
    """torch's flex_attention of ``(b, h, s, d)`` tensors, compiled for the shapes of its first call.

    Args:
        name: of :data:`BACKENDS`.
        score_mod: the score function, or None.
        mask: torch's own block mask, or None.
        device: of the tensors; on a CPU torch's function is not compiled.
    """
    kernel_options = options(name, mask)
    flex_attention = torch_flex.flex_attention
    if device.type != "cpu":
        flex_attention = torch.compile(flex_attention, dynamic=False)

    def call(*operands: torch.Tensor) -> torch.Tensor:
        return flex_attention(*operands, score_mod=score_mod, block_mask=mask, kernel_options=kernel_options)

    return call
