"""Sequences as FlashAttention-3 and -4 give their lengths: packed by ``cu_seqlens``, padded with ``seqused``, or pages.

Where flashlane's kernels have no argument for such lengths, the rows are packed first: they are gathered, and the rows
of the output scattered, by indices that are computed on the device of the lengths. Nothing waits for a GPU, and both
steps are differentiable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlane.api import functional
from flashlane.api.functional import by_callers_names, flash_attn_varlen_func, flash_attn_with_kvcache
from flashlane.api.kvcache import capacity_of
from flashlane.core.arch import records_gradients
from flashlane.core.problem import MODIFIERS, CallOptions, Inputs
from flashlane.core.validate import (
    FARTHEST,
    check_cu_seqlens,
    check_equal_lengths,
    check_longest,
    check_splits,
    check_starts,
    check_strided,
    contiguous,
    kind_of,
    whole_number,
)
from flashlane.ops.watched import holds_numbers, is_observed

_NAMES = {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k", "block_table": "page_table"}
"""What callers of :func:`attend` call arguments of ``flash_attn_with_kvcache``."""


@dataclass(frozen=True, slots=True)
class Side:
    """The sequences of q, or those of k and v, as packed rows."""

    cu_seqlens: torch.Tensor
    longest: Any
    source: torch.Tensor | None = None
    """int32, for each packed row its index among the given rows; None: the same index."""
    target: torch.Tensor | None = None
    """int32, for each given row its index in the packed result."""
    used: torch.Tensor | None = None
    """bool, which of the given rows belong to a sequence."""

    def packed(self, t: torch.Tensor) -> torch.Tensor:
        rows = t.flatten(0, 1) if t.dim() == 4 else t
        return rows if self.source is None else rows.index_select(0, self.source)

    def unpacked(self, t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A packed result ``(total, …)`` with the leading axes of the given tensor; 0 in rows that no sequence has."""
        if self.target is None:
            return t.unflatten(0, shape) if len(shape) > 1 else t
        rows = t.index_select(0, self.target)
        rows = torch.where(self.used.view(-1, *(1 for _ in t.shape[1:])), rows, 0)
        return rows.unflatten(0, shape) if len(shape) > 1 else rows


def readable(*tensors: torch.Tensor) -> bool:
    """Whether the contents of tensors can be checked without waiting for a GPU."""
    return not is_observed() and holds_numbers(*tensors) and all(t.is_cpu for t in tensors)


def check_used(name: str, used: Any, batch: int, q: torch.Tensor, most: int | torch.Tensor, why: str) -> None:
    """Check how many rows are in use of each sequence; the numbers themselves where they are on the CPU.

    Args:
        name: what the caller calls them.
        used: whatever was given.
        batch: the number of sequences.
        q: the tensor on whose device they must be.
        most: the rows that there are of each sequence.
        why: what gives ``most``.

    Raises:
        TypeError: it is no int32 tensor.
        ValueError: it has another shape or device, or numbers that cannot be.
    """
    if not isinstance(used, torch.Tensor):
        raise TypeError(f"{name} is {kind_of(used)}; it must be an int32 torch.Tensor of shape ({batch},)")
    check_strided(name, used)
    if used.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {used.dtype}; it must be torch.int32")
    if tuple(used.shape) != (batch,):
        raise ValueError(f"{name} has shape {tuple(used.shape)}; it must be (batch,), ({batch},)")
    if used.device != q.device:
        raise ValueError(f"{name} is on {used.device} and q is on {q.device}; they must agree")
    bounds = (used, most) if isinstance(most, torch.Tensor) else (used,)
    if not readable(*bounds):
        return
    limit = most if isinstance(most, torch.Tensor) else min(most, FARTHEST)  # torch compares with no larger number
    if not bool(((used >= 0) & (used <= limit)).all()):
        largest = most.tolist() if isinstance(most, torch.Tensor) else most
        raise ValueError(f"{name} is {used.tolist()}; it may be 0 to {largest}, {why}")


def side(name: str, t: torch.Tensor, cu: torch.Tensor | None, used: torch.Tensor | None, longest: Any) -> Side:
    """The sequences of a tensor.

    Args:
        name: "q" or "k", for errors.
        t: ``(total, h, d)`` with ``cu``, else ``(b, s, h, d)``.
        cu: int32 ``(b + 1,)``.
        used: int32 ``(b,)``: rows in use of each sequence; all by default.
        longest: of a sequence; None: as long as the padded axis.

    Raises:
        TypeError, ValueError: a length cannot be; the message names its argument.
    """
    _check_rank(name, t, cu)
    if cu is not None and used is None:
        if longest is None:
            raise ValueError(f"max_seqlen_{name} is None and cu_seqlens_{name} is given; it must be a whole number")
        check_cu_seqlens(f"cu_seqlens_{name}", contiguous(cu), t)
        return Side(cu, whole_number(longest))
    if used is not None:
        _check_rows_in_use(name, t, cu, used, longest)
    total = t.shape[0] if cu is not None else t.shape[0] * t.shape[1]
    device = t.device
    if cu is None:
        batch, length = t.shape[:2]
        starts = torch.arange(batch, device=device, dtype=torch.int32) * length
        longest = length
        if used is None:
            return Side(torch.arange(batch + 1, device=device, dtype=torch.int32) * length, length)
    else:
        starts, longest = cu[:-1], whole_number(longest)
    cu_packed = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    rows = torch.arange(total, device=device, dtype=torch.int32)
    last = used.shape[0] - 1
    of = torch.bucketize(rows, cu_packed[1:], right=True).clamp(max=last)
    source = (starts[of] + rows - cu_packed[of]).clamp(0, max(0, total - 1))
    of = torch.bucketize(rows, starts, right=True).sub_(1).clamp(min=0)
    within = rows - starts[of]
    inside = within < used[of]
    target = torch.where(inside, cu_packed[of] + within, 0)
    return Side(cu_packed, longest, source, target, inside)


def _check_rank(name: str, t: torch.Tensor, cu: torch.Tensor | None) -> None:
    """Raise ValueError unless a tensor has the axes of packed rows, or of padded ones without ``cu``."""
    wanted = 4 if cu is None else 3
    if t.dim() != wanted:
        how = "without" if cu is None else "with"
        raise ValueError(f"{name} has shape {tuple(t.shape)}; {how} cu_seqlens_{name} it must have rank {wanted}")


def _check_rows_in_use(name: str, t: torch.Tensor, cu: torch.Tensor | None, used: Any, longest: Any) -> None:
    argument = f"seqused_{name}"
    if cu is None:
        check_used(argument, used, t.shape[0], t, t.shape[1], f"the rows of {name}")
        return
    check_cu_seqlens(f"cu_seqlens_{name}", contiguous(cu), t)
    check_used(argument, used, cu.shape[0] - 1, t, _longest(f"max_seqlen_{name}", longest), f"max_seqlen_{name}")
    if readable(cu):
        check_starts(f"cu_seqlens_{name}", cu, t.shape[0], name)
        check_used(argument, used, cu.shape[0] - 1, t, cu.diff(), f"the rows of cu_seqlens_{name}")


def _longest(name: str, longest: Any) -> Any:
    longest = whole_number(longest)
    check_longest(name, longest)
    return longest


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    page_table: torch.Tensor | None,
    num_splits: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the layout of q, and LSE ``(b, h, sq)`` or ``(h, total_q)``; ``options`` is passed on.

    ``num_splits`` reaches calls over pages, and those of a padded q and k without a gradient: others have no such
    argument.
    """
    num_splits = whole_number(num_splits)
    check_splits(num_splits)
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_strided(name, t)
    check_equal_lengths(k, v)
    if page_table is not None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k is given with page_table, and so are the lengths, by seqused_k; it must be None")
    if page_table is not None and seqused_k is None:
        raise ValueError("seqused_k is None and page_table is given; it must be the lengths, int32 (batch,)")
    tensors = [t for t in (q, k, v, *options.values()) if isinstance(t, torch.Tensor)]
    differentiable = records_gradients() and any(t.requires_grad for t in tensors)
    if seqused_k is not None and cu_seqlens_k is None:
        _check_rank("q", q, cu_seqlens_q)
        rows_of_k = by_callers_names(_NAMES, capacity_of, k, v, page_table)
        batch = q.shape[0] if cu_seqlens_q is None else check_cu_seqlens("cu_seqlens_q", contiguous(cu_seqlens_q), q)
        check_used("seqused_k", seqused_k, batch, q, rows_of_k, "the rows of k")
    if cu_seqlens_q is seqused_q is cu_seqlens_k is None and (page_table is not None or not differentiable):
        options.pop("deterministic", None)
        options |= {"cache_seqlens": seqused_k, "block_table": page_table, "num_splits": num_splits}
        return by_callers_names(_NAMES, flash_attn_with_kvcache, q, k, v, return_lse=True, **options)
    queries = side("q", q, cu_seqlens_q, seqused_q, max_seqlen_q)
    rows = queries.packed(q)
    if page_table is not None:
        options["num_splits"] = num_splits
        out, lse = _over_pages(queries, rows, k, v, seqused_k, page_table, max_seqlen_k, **options)
    else:
        keys = side("k", k, cu_seqlens_k, seqused_k, max_seqlen_k)
        counts = [each.cu_seqlens.shape[0] - 1 for each in (queries, keys)]
        if counts[0] != counts[1]:
            raise ValueError(f"k has {counts[1]} sequences and q has {counts[0]}; they must have as many")
        lengths = (queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest)
        out, lse = flash_attn_varlen_func(rows, keys.packed(k), keys.packed(v), *lengths, return_lse=True, **options)
    shape = tuple(q.shape[:-2])
    lse = queries.unpacked(lse.transpose(0, 1), shape).transpose(-1, -2)
    return queries.unpacked(out, shape), lse


def _over_pages(
    queries: Side,
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    max_seqlen_k: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flashlane.flash_attn_varlen_func` of packed queries over pages; ``num_splits`` is among its options."""
    longest = page_table.shape[1] * k.shape[1]
    if max_seqlen_k is not None:
        longest = min(longest, _longest("max_seqlen_k", max_seqlen_k))
        why = "the smaller of max_seqlen_k and the pages"
        check_used("seqused_k", seqused_k, seqused_k.shape[0], rows, longest, why)
    cu_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    lengths = {"cu_seqlens_q": queries.cu_seqlens, "cu_seqlens_k": cu_k, "block_table": page_table}
    longest_of = {"max_seqlen_q": queries.longest, "max_seqlen_k": longest}
    modifiers = {name: options.pop(name) for name in MODIFIERS if name in options}
    call = CallOptions(options.pop("softmax_scale"), **options)
    return functional._attend(Inputs(rows, k, v, **modifiers, **lengths, **longest_of), (None, *call), True, False)
