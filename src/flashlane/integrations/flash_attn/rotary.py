"""``flash_attn.layers.rotary``: rotary position embedding in torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashlane.api.functional import by_callers_names
from flashlane.api.rotary import rotate
from flashlane.core.validate import (
    check_dtype,
    check_flag,
    check_longest,
    check_starts,
    check_strided,
    kind_of,
    whole_number,
)
from flashlane.integrations.flash_attn.lengths import readable
from flashlane.integrations.flash_attn.packed import parts_of
from flashlane.ops.watched import holds_numbers

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]

Offsets = int | torch.Tensor


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rows rotated for the positions ``seqlen_offsets + row``; differentiable in x.

    Args:
        x: ``(b, s, h, d)``, or with ``cu_seqlens`` packed sequences ``(total, h, d)``.
        cos: ``(seqlen_rotary, rotary_dim / 2)``.
        sin: of the same shape.
        interleaved: whether columns 2i and 2i + 1 are a pair, or else i and i + rotary_dim / 2.
        inplace: write the result into x and return it; where x is a leaf that requires gradients, what is returned has
            memory of its own.
        seqlen_offsets: of all sequences, or integers ``(b,)``.
        cu_seqlens: int32 ``(b + 1,)``.
        max_seqlen: the longest packed sequence; not read.

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it. Positions beyond the tables are found where
            offsets and lengths are numbers or on the CPU; a GPU's are not read, and count as the nearest in the tables.
    """
    seqlen_offsets = whole_number(seqlen_offsets)
    inplace = check_flag("inplace", inplace)
    _check(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens)
    if inplace and _is_wanting_leaf(x):
        return _through_copy(x, apply_rotary_emb, cos, sin, interleaved, True, seqlen_offsets, cu_seqlens)
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=x.device)
        offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
        turned = rotate(x, cos, sin, offsets + rows, interleaved=interleaved)
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.bucketize(rows, cu_seqlens[1:], right=True).clamp(max=cu_seqlens.shape[0] - 2)
        offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
        turned = rotate(x[None], cos, sin, offsets + rows - cu_seqlens[sequence], interleaved=interleaved)[0]
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """:func:`apply_rotary_emb` with row 0 at position 0."""
    return apply_rotary_emb(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """q and k of a packed tensor rotated in place; returns it.

    Args:
        qkv: ``(b, s, 3, h, d)``, or with ``num_heads_q`` ``(b, s, num_heads_q + 2·hk, d)``.
        cos: see :func:`apply_rotary_emb`; also sin, interleaved and seqlen_offsets.
        sin: as cos.
        cos_k: of k, where it differs (XPos).
        sin_k: as cos_k.
        interleaved: as cos.
        seqlen_offsets: as cos.
        num_heads_q: heads of q of a tensor of four axes.
    """
    q, k, _ = parts_of(qkv, num_heads_q)
    if _is_wanting_leaf(qkv):
        rest = (interleaved, seqlen_offsets, num_heads_q)
        return _through_copy(qkv, apply_rotary_emb_qkv_, cos, sin, cos_k, sin_k, *rest)
    of_k = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    names = {"x": "qkv", "cos": "cos" if cos_k is None else "cos_k", "sin": "sin" if sin_k is None else "sin_k"}
    by_callers_names(names, _check, k, *of_k, interleaved, whole_number(seqlen_offsets))  # before q is written to
    by_callers_names({"x": "qkv"}, apply_rotary_emb, q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, *of_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> torch.Tensor:
    """Rotate k of ``kv (b, s, 2, h, d)`` in place, and return ``kv``.

    Raises:
        TypeError, ValueError: an argument is not valid; the message names it.
    """
    check_strided("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv has shape {tuple(kv.shape)}; it must be (batch, seqlen, 2, heads, head_dim)")
    if _is_wanting_leaf(kv):
        return _through_copy(kv, apply_rotary_emb_kv_, cos, sin, interleaved, seqlen_offsets)
    by_callers_names({"x": "kv"}, apply_rotary_emb, kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def _is_wanting_leaf(x: torch.Tensor) -> bool:
    return x.requires_grad and x.is_leaf and torch.is_grad_enabled()


def _through_copy(x: torch.Tensor, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """A function that works in place, of a leaf that requires gradients, which autograd lets nothing write to.

    FlashAttention's functions take one: the numbers are written to it, and gradients flow through what is returned.
    """
    turned = function(x.clone(), *arguments)
    with torch.no_grad():
        x.copy_(turned)
    return turned


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of q and k with tables that grow with the longest sequence seen.

    Sources: Su et al. 2021 (RoFormer); with ``scale_base``, Sun et al. 2022 (XPos).
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[torch.Tensor, ...] | None = None

    def _frequencies(self, device: torch.device | None) -> torch.Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (steps / self.dim)

    def tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """cos and sin of q, then of k, each ``(positions, dim / 2)`` for at least ``seqlen`` positions."""
        kept = self._tables
        if kept is not None and kept[0].device == device and kept[0].dtype == dtype and kept[0].shape[0] >= seqlen:
            if not (self.training and kept[0].is_inference()):
                return kept
        # In f32 even where the model is not: positions are large.
        frequencies = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._frequencies(device)
        angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), frequencies.to(device))
        both = [angles.cos(), angles.sin()]
        wide = [*both, *both]
        if self.scale is not None:
            power = (torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2) / self.scale_base
            scale = self.scale.to(device) ** power[:, None]
            wide = [both[0] * scale, both[1] * scale, both[0] / scale, both[1] / scale]
        made = tuple(table.to(dtype) for table in wide)
        if torch.compiler.is_compiling() or holds_numbers(*made):  # what a transform made is of no use after it
            self._tables = made
        return made

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rotate in place.

        Args:
            qkv: see :func:`apply_rotary_emb_qkv_`; with ``kv`` it is q, ``(b, s, h, d)``.
            kv: ``(b, s, 2, hk, d)``.
            seqlen_offset: of all sequences, or integers ``(b,)``, which need ``max_seqlen``.
            max_seqlen: how many positions the tables must have.
            num_heads_q: see :func:`apply_rotary_emb_qkv_`.
        """
        check_strided("qkv", qkv)
        if qkv.dim() < 4:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}; it must have rank 4 or 5: (batch, seqlen, ...)")
        seqlen_offset = whole_number(seqlen_offset)
        names = {"seqlen_offsets": "seqlen_offset", "x": "qkv"}
        by_callers_names(names, _check_kind_of_offsets, seqlen_offset, qkv, qkv.shape[0])
        if max_seqlen is None:
            if isinstance(seqlen_offset, torch.Tensor):
                raise ValueError(
                    "max_seqlen is None and seqlen_offset is a tensor; it must say how long the tables are"
                )
            max_seqlen = qkv.shape[1] + seqlen_offset
        max_seqlen = whole_number(max_seqlen)
        check_longest("max_seqlen", max_seqlen)
        cos, sin, cos_k, sin_k = self.tables(max_seqlen, qkv.device, qkv.dtype)
        if not isinstance(seqlen_offset, torch.Tensor) and cos.shape[0] < qkv.shape[1] + seqlen_offset:
            least = qkv.shape[1] + seqlen_offset
            raise ValueError(f"max_seqlen is {max_seqlen}; it must be at least {least}, seqlen_offset + seqlen")
        rest = (self.interleaved, seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *rest, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, *rest)


def _check(x: Any, cos: Any, sin: Any, interleaved: Any, offsets: Any, cu_seqlens: Any = None) -> None:
    """Check all arguments of :func:`apply_rotary_emb` but ``inplace``; of the offsets a whole number was taken."""
    _check_x(x, cu_seqlens)
    _check_tables(cos, sin, x)
    check_flag("interleaved", interleaved)
    _check_offsets(offsets, x, cos, cu_seqlens)


def _check_device(name: str, t: torch.Tensor, x: torch.Tensor) -> None:
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device} and x is on {x.device}; they must agree")


def _check_x(x: Any, cu_seqlens: Any) -> None:
    """Check what is rotated, and the lengths of its sequences: what these hold too, where it can be read."""
    check_strided("x", x)
    check_dtype("x", x.dtype)
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank:
        how = "without" if cu_seqlens is None else "with"
        raise ValueError(f"x has shape {tuple(x.shape)}; {how} cu_seqlens it must have rank {rank}")
    if cu_seqlens is None:
        return
    check_strided("cu_seqlens", cu_seqlens)
    _check_whole("cu_seqlens", cu_seqlens)
    _check_device("cu_seqlens", cu_seqlens, x)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (batch + 1,) with batch >= 1")
    if readable(cu_seqlens):
        check_starts("cu_seqlens", cu_seqlens, x.shape[0], "x")


def _check_whole(name: str, t: torch.Tensor) -> None:
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {t.dtype}; it must hold whole numbers")


def _check_tables(cos: Any, sin: Any, x: torch.Tensor) -> None:
    for name, t in (("cos", cos), ("sin", sin)):
        check_strided(name, t)
        check_dtype(name, t.dtype)
        _check_device(name, t, x)
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}; it must be (seqlen_rotary, rotary_dim / 2) with rotary_dim at most "
            f"{x.shape[-1]}, the head_dim"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {tuple(sin.shape)}; it must be that of cos, {tuple(cos.shape)}")


def _check_offsets(offsets: Offsets, x: torch.Tensor, cos: torch.Tensor, cu_seqlens: torch.Tensor | None) -> None:
    """Check the kind of ``seqlen_offsets``, and that all positions are in the tables where that can be read."""
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _check_kind_of_offsets(offsets, x, batch)
    given = [t for t in (offsets, cu_seqlens) if isinstance(t, torch.Tensor)]
    if (given and not readable(*given)) or not batch:
        return
    if isinstance(offsets, torch.Tensor) and int(offsets.min()) < 0:
        raise ValueError(f"seqlen_offsets is {offsets.tolist()}; each must be at least 0")
    rows = x.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    if isinstance(offsets, torch.Tensor):
        offsets = offsets.long()  # a sum in int32 could be negative
    elif isinstance(rows, torch.Tensor):
        rows = int(rows.max())  # a tensor takes no number of more than 64 bits
    ends = offsets + rows
    last = int(ends.max()) if isinstance(ends, torch.Tensor) else ends
    if last > cos.shape[0]:
        raise ValueError(f"cos has {cos.shape[0]} positions; it must have at least {last}, seqlen_offsets + seqlen")


def _check_kind_of_offsets(offsets: Any, x: torch.Tensor, batch: int) -> None:
    if isinstance(offsets, torch.Tensor):
        check_strided("seqlen_offsets", offsets)
        _check_whole("seqlen_offsets", offsets)
        _check_device("seqlen_offsets", offsets, x)
        if tuple(offsets.shape) != (batch,):
            raise ValueError(
                f"seqlen_offsets has shape {tuple(offsets.shape)}; it must be (batch,), ({batch},), or one whole number"
            )
    elif not isinstance(offsets, int | torch.SymInt) or isinstance(offsets, bool):
        raise TypeError(
            f"seqlen_offsets is {kind_of(offsets)}; it must be a whole number or a tensor of them, (batch,)"
        )
    elif offsets < 0:
        raise ValueError(f"seqlen_offsets is {offsets}; it must be at least 0")
