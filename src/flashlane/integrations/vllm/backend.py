"""The classes of vLLM's backend ``CUSTOM``; importing this module imports vLLM.

vLLM passes the packed queries of many requests, a paged cache ``(blocks, kv_heads, block_size, 2 * head_size)`` of any
strides whose last axis has K and then V, and the slot of each token's row in it. Batches with one query for each
request run flashlane's decoding kernel, which CUDA graphs can capture; all others run its packed attention over pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from flashlane.api.functional import flash_attn_varlen_func, flash_attn_with_kvcache

NAME = "CUSTOM"
PAGE = 16
"""The rows of a block are a multiple of this."""
OLDEST = (8, 0)
"""Compute capability of the oldest GPU on which a CUDA kernel runs."""
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass
class FlashlaneMetadata(AttentionMetadata):
    """The lengths and tables of a batch, which all layers share."""

    tokens: int
    """Rows of the batch, including those that only pad it to the size of a captured graph."""
    longest_query: int
    longest: int
    """An upper bound of the keys of a request."""
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    places: tuple[torch.Tensor, torch.Tensor] | None = None
    """Block and row of each token, which the first layer that writes finds for the others. None in batches of one query
    a request: a CUDA graph may hold these, and its replays must follow the slots."""


class FlashlaneMetadataBuilder(AttentionMetadataBuilder[FlashlaneMetadata]):
    """Makes the metadata from vLLM's own, without waiting for the GPU."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashlaneMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal is a tensor, one for each request; flashlane has no kernel for it")
        return FlashlaneMetadata(
            tokens=common.num_actual_tokens,
            longest_query=common.max_query_len,
            longest=common.max_seq_len,
            cu_seqlens_q=common.query_start_loc,
            cu_seqlens_k=torch.nn.functional.pad(common.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )


class FlashlaneBackend(AttentionBackend):
    """The properties by which vLLM selects a backend."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashlaneImpl]:
        return FlashlaneImpl

    @staticmethod
    def get_builder_cls() -> type[FlashlaneMetadataBuilder]:
        return FlashlaneMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER or attn_type in ENCODERS

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability[:2]) >= OLDEST


class FlashlaneImpl(AttentionImpl[FlashlaneMetadata]):
    """One layer's attention.

    Args:
        num_heads: heads of the queries.
        head_size: head dim of q, k and v.
        scale: softmax scale.
        num_kv_heads: heads of the cache; ``num_heads`` by default.
        alibi_slopes: one for each head.
        sliding_window: keys that a query sees, itself included; all by default.
        kv_cache_dtype: must be the dtype of the model.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``.
        attn_type: a decoder's, or an encoder's without a cache.
        kv_sharing_target_layer_name: the layer whose cache is read; if given, nothing is written to it.
        sinks: ``(num_heads,)``, learnable sinks.

    Raises:
        NotImplementedError: an argument has a value for which flashlane has no kernel.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER and attn_type not in ENCODERS:
            raise NotImplementedError(f"attn_type is {attn_type!r}; flashlane has no kernel for it")
        if kv_cache_dtype not in FlashlaneBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"kv_cache_dtype is {kv_cache_dtype!r}; flashlane has no kernel for it")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.softcap = logits_soft_cap or 0.0
        self.writes = kv_sharing_target_layer_name is None
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashlaneMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new rows to the cache, compute attention into ``output``, and return it.

        Args:
            layer: the layer of the model; not read.
            query: ``(tokens, num_heads, head_size)``; rows past those of the batch are not read.
            key: ``(tokens, num_kv_heads, head_size)``, or None where another layer wrote the cache.
            value: as key.
            kv_cache: ``(blocks, num_kv_heads, block_size, 2 * head_size)``.
            attn_metadata: that of the batch; None while vLLM measures memory, when the output is 0.
            output: ``(tokens, num_heads, head_size)``, or with the last two axes flattened.
            output_scale: must be None.
            output_block_scale: must be None.

        Raises:
            NotImplementedError: a scale of the output is given.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale is given; flashlane has no kernel for it")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.tokens
        q, out = query[:tokens], output[:tokens].view(tokens, self.num_heads, self.head_size)
        if self.attn_type in ENCODERS:
            found = self._packed(q, key[:tokens], value[:tokens], attn_metadata, attn_metadata.cu_seqlens_q)
            out.copy_(found)
            return output
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if self.writes and key is not None:
            places = attn_metadata.places
            if places is None:
                places = _places(attn_metadata.slot_mapping[:tokens], k_cache.shape[1])
                if attn_metadata.longest_query != 1:
                    attn_metadata.places = places
            _store(k_cache, v_cache, key[:tokens], value[:tokens], places)
        if attn_metadata.longest_query == 1:
            requests = attn_metadata.seq_lens.shape[0]
            out[:requests].copy_(self._decode(q[:requests], k_cache, v_cache, attn_metadata))
        else:
            lengths = attn_metadata.cu_seqlens_k
            out.copy_(self._packed(q, k_cache, v_cache, attn_metadata, lengths, attn_metadata.block_table))
        return output

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: FlashlaneMetadata
    ) -> torch.Tensor:
        """Attention of one query for each request."""
        out = flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=batch.seq_lens,
            block_table=batch.block_table[: len(q)],
            **self._asked(q, batch.causal),
        )
        return out.squeeze(1)

    def _packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: FlashlaneMetadata,
        cu_seqlens_k: torch.Tensor,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of any number of queries for each request, which are the last tokens of its keys."""
        longest = batch.longest_query if block_table is None else batch.longest
        if block_table is not None:
            longest = min(longest, block_table.shape[1] * k.shape[1])
        return flash_attn_varlen_func(
            q,
            k,
            v,
            batch.cu_seqlens_q,
            cu_seqlens_k,
            batch.longest_query,
            longest,
            block_table=block_table,
            **self._asked(q, batch.causal and self.attn_type not in ENCODERS),
        )

    def _asked(self, q: torch.Tensor, causal: bool) -> dict[str, Any]:
        if self.alibi_slopes is not None and self.alibi_slopes.device != q.device:
            self.alibi_slopes = self.alibi_slopes.to(q.device)
        reach = -1 if self.sliding_window is None else self.sliding_window - 1
        return {
            "softmax_scale": self.scale,
            "causal": causal,
            "window_size": (reach, 0 if causal else reach),
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }


def _places(slots: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and row of slots in blocks of so many rows; the first row of the null block for a row without a slot."""
    slots = slots.clamp(min=0)
    return slots // size, slots % size


def _store(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write rows to their places in pages ``(blocks, block_size, h, d)``."""
    k_cache.index_put_(places, k.to(k_cache.dtype))
    v_cache.index_put_(places, v.to(v_cache.dtype))
