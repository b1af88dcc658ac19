"""Context parallelism: attention whose tokens are divided among the ranks of a ``torch.distributed`` group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlane.lazy import loader

if TYPE_CHECKING:
    from flashlane.distributed.functional import (
        context_parallel_attn_func,
        context_parallel_attn_varlen_func,
        explain_transport,
    )
    from flashlane.distributed.names import (
        llama3_flash_attn_prepare_cu_seqlens,
        llama3_flash_attn_varlen_func,
        ring_flash_attn_func,
        stripe_flash_attn_func,
        ulysses_attn_func,
        zigzag_ring_flash_attn_func,
        zigzag_ring_flash_attn_varlen_func,
    )
    from flashlane.distributed.sharding import position_ids, shard_sequence, token_indices, unshard_sequence
    from flashlane.distributed.torch_hook import context_parallel_sdpa

_MODULES = {
    "functional": ("context_parallel_attn_func", "context_parallel_attn_varlen_func", "explain_transport"),
    "names": (
        "llama3_flash_attn_prepare_cu_seqlens",
        "llama3_flash_attn_varlen_func",
        "ring_flash_attn_func",
        "stripe_flash_attn_func",
        "ulysses_attn_func",
        "zigzag_ring_flash_attn_func",
        "zigzag_ring_flash_attn_varlen_func",
    ),
    "sharding": ("position_ids", "shard_sequence", "token_indices", "unshard_sequence"),
    "torch_hook": ("context_parallel_sdpa",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "context_parallel_attn_func",
    "context_parallel_attn_varlen_func",
    "context_parallel_sdpa",
    "explain_transport",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "position_ids",
    "ring_flash_attn_func",
    "shard_sequence",
    "stripe_flash_attn_func",
    "token_indices",
    "ulysses_attn_func",
    "unshard_sequence",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_varlen_func",
]


__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
