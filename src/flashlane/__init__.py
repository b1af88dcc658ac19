"""flashlane: exact attention from hand-written PTX, compiled on the user's machine, called from Python.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlane.lazy import loader

if TYPE_CHECKING:
    from flashlane.api.combine import combine
    from flashlane.api.functional import (
        explain,
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flashlane.api.sdpa import scaled_dot_product_attention
    from flashlane.flex.attention import flex_attention
    from flashlane.flex.block_mask import create_block_mask
    from flashlane.integrations.diffusers import register_diffusers
    from flashlane.integrations.transformers import register_transformers

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "combine",
    "create_block_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "register_diffusers",
    "register_transformers",
    "scaled_dot_product_attention",
]

_ELSEWHERE = {
    "combine": "flashlane.api.combine",
    "create_block_mask": "flashlane.flex.block_mask",
    "flex_attention": "flashlane.flex.attention",
    "register_diffusers": "flashlane.integrations.diffusers",
    "register_transformers": "flashlane.integrations.transformers",
    "scaled_dot_product_attention": "flashlane.api.sdpa",
}


__getattr__ = loader(__name__, dict.fromkeys(__all__[1:], "flashlane.api.functional") | _ELSEWHERE)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
