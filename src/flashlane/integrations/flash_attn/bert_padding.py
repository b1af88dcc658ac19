"""``flash_attn.bert_padding``: between padded batches and packed sequences, in torch operations, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flashlane.core.validate import check_strided
from flashlane.integrations.flash_attn.lengths import readable

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of ``(n, …)`` by their indices.

    Raises:
        TypeError, ValueError: an argument is no tensor, or the indices are no whole numbers, or more than the rows.
    """
    _check_indices(indices, "values", values, values.shape[0] if isinstance(values, torch.Tensor) else 0)
    return values.index_select(0, indices)


def index_first_axis_residual(values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`index_first_axis`, and the tensor itself."""
    return index_first_axis(values, indices), values


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """``(first_axis_dim, …)`` with rows at their indices and zeros elsewhere.

    Raises:
        TypeError, ValueError: an argument is no tensor, or the indices are no whole numbers, or more than the rows.
    """
    _check_indices(indices, "values", values, first_axis_dim)
    return _put(values, indices, first_axis_dim)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Rows ``(total, …)`` of ``(b, s, …)`` where a mask says so; it waits for a GPU.

    Args:
        hidden_states: ``(b, s, …)``.
        attention_mask: ``(b, s)``, bool or integers, 1 where a row is used.
        unused_mask: of the same shape, 1 where a row is kept but not used.

    Returns:
        The rows, their indices in ``(b·s, …)``, cu_seqlens int32 ``(b + 1,)``, the longest sequence, and how many rows
        of each sequence are used, int32 ``(b,)``.

    Raises:
        TypeError, ValueError: an argument is no tensor, or a mask has another shape than the rows.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = every.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _cumulative(lengths), _longest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """:func:`unpad_input` where each row of the batch holds several sequences, one after another.

    Args:
        hidden_states: ``(b, s, …)``.
        attention_mask_in_length: integers ``(b, s)``: the lengths of a row's sequences first, then zeros.

    Raises:
        TypeError, ValueError: an argument is no tensor, the lengths have another shape than the rows, or those of a row
            are more than it has.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    filled, most = attention_mask_in_length.sum(-1, keepdim=True), hidden_states.shape[1]
    if _longest(filled) > most:
        raise ValueError(
            f"attention_mask_in_length has sums {filled.flatten().tolist()}; each may be 0 to {most}, the rows of "
            f"hidden_states"
        )
    mask = torch.arange(attention_mask_in_length.shape[-1], device=filled.device) < filled
    indices = mask.flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _cumulative(lengths), _longest(lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of :func:`unpad_input`: ``(batch, seqlen, …)``, with zeros elsewhere."""
    _check_indices(indices, "hidden_states", hidden_states, batch * seqlen)
    return _put(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _put(values: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
    """A tensor of so many rows: ``values`` at the indices, which were checked, and zeros elsewhere."""
    return values.new_zeros((rows, *values.shape[1:])).index_copy(0, indices.long(), values)


def _check_indices(indices: Any, name: str, values: Any, rows: int) -> None:
    """Check indices of rows, and the tensor called ``name``; the numbers themselves where they are on the CPU."""
    check_strided(name, values)
    check_strided("indices", indices)
    if indices.dtype not in (torch.int32, torch.int64):  # a mask would count as rows 0 and 1
        raise TypeError(f"indices has dtype {indices.dtype}; it must be torch.int64 or torch.int32")
    if readable(indices) and indices.numel():
        first, last = (int(bound) for bound in indices.aminmax())
        if first < 0 or last >= rows:
            raise ValueError(f"indices has {first} to {last}; each may be 0 to {rows - 1}, of {rows} rows")


def _check_mask(name: str, mask: Any, hidden_states: Any) -> None:
    """Raise unless a mask has one value for each row: with fewer, rows of other sequences would be taken."""
    check_strided("hidden_states", hidden_states)
    check_strided(name, mask)
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states has shape {tuple(hidden_states.shape)}; it must be (batch, seqlen, ...)")
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}; it must be (batch, seqlen), {tuple(hidden_states.shape[:2])}"
        )
