"""Dividing tensors among ranks and joining them again, and the positions of a rank's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashlane.core.arch import compute_dtype
from flashlane.core.validate import kind_of, whole_number
from flashlane.distributed import comm
from flashlane.distributed import layout as layouts
from flashlane.distributed.agree import Fields, agree_on_grid
from flashlane.distributed.comm import Grid, Group, Message, Ranks, check_backend, check_rank
from flashlane.distributed.functional import digest, lengths_of
from flashlane.distributed.layout import Layout, order_of_shards, rows_of, runs_of
from flashlane.distributed.once import differentiated_once

Lengths = torch.Tensor | Sequence[int] | None


def token_indices(
    seqlen: int | None = None,
    *,
    cu_seqlens: Lengths = None,
    layout: Layout = "zigzag",
    group: Group = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The indices in the whole call of a rank's tokens, in the order of its rows.

    Attention expects this order. To divide other tensors in the same way, such as labels, take
    ``tensor.index_select(dim, token_indices(...))``.

    Args:
        seqlen: tokens of the sequence, or None with ``cu_seqlens``.
        cu_seqlens: of packed documents; see :func:`flashlane.distributed.context_parallel_attn_varlen_func`.
        layout: "zigzag", "contiguous" or "striped".
        group: the process group that gives ``rank`` and ``world_size`` if they are None.
        rank: the rank whose tokens are returned; with ``world_size``, no process group is needed.
        world_size: the number of ranks.
        device: the device of the result; the CPU by default.

    Returns:
        int64 ``(rows,)``.

    Raises:
        TypeError, ValueError: an argument is not valid; the message names it.
    """
    where = _where(seqlen, cu_seqlens, layout, group, rank, world_size)
    return layouts.token_indices(*where).to("cpu" if device is None else device, copy=True)


def position_ids(
    seqlen: int | None = None,
    *,
    cu_seqlens: Lengths = None,
    layout: Layout = "zigzag",
    group: Group = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The position of each of a rank's tokens in its document, as rotary embeddings need it: int64 ``(rows,)``.

    The arguments and errors are those of :func:`token_indices`.
    """
    where = _where(seqlen, cu_seqlens, layout, group, rank, world_size)
    return layouts.token_positions(*where).to("cpu" if device is None else device, copy=True)


def shard_sequence(
    x: torch.Tensor, dim: int = 1, *, cu_seqlens: Lengths = None, layout: Layout = "zigzag", group: Group = None
) -> torch.Tensor:
    """This rank's tokens of a tensor that has all tokens along ``dim``; differentiable.

    Args:
        x: a tensor with any number of tokens, the same on all ranks. Nothing is sent.
        dim: the axis of the tokens.
        cu_seqlens: of packed documents, which end with the axis; None for one sequence.
        layout: "zigzag", "contiguous" or "striped".
        group: the ranks, as :func:`flashlane.distributed.context_parallel_attn_func` takes them.

    Raises:
        TypeError, ValueError: an argument is not valid; the message names it.
    """
    lengths = _lengths_along(x, dim, cu_seqlens)
    grid = Grid.of(group)
    runs = runs_of(layout, lengths, grid.size, grid.rank)
    if len(lengths) == 1:  # slices of it, which cost less than indices
        parts = [_part(x, dim, run) for run in runs]
        return torch.cat(parts, dim) if len(parts) > 1 else (parts[0] if parts else x.narrow(dim, 0, 0)).contiguous()
    return x.index_select(dim, layouts.token_indices(layout, lengths, grid.size, grid.rank).to(x.device))


@torch.compiler.disable
def unshard_sequence(
    x: torch.Tensor,
    dim: int = 1,
    *,
    seqlen: int | None = None,
    cu_seqlens: Lengths = None,
    layout: Layout = "zigzag",
    group: Group = None,
) -> torch.Tensor:
    """All tokens of a tensor of which each rank has its own along ``dim``; the inverse of :func:`shard_sequence`.

    All ranks of the group must call it. It is differentiable: the gradient of a rank's tokens is the sum over the ranks
    of the gradients of their losses. If all n ranks compute the same loss, that is n times the gradient of the loss.

    Args:
        x: this rank's tokens.
        dim: the axis of the tokens.
        seqlen: the number of tokens of the sequence; needed if the ranks have different numbers of tokens.
        cu_seqlens: of packed documents, in place of ``seqlen``.
        layout: as for :func:`shard_sequence`.
        group: as for :func:`shard_sequence`.

    Raises:
        TypeError, ValueError: an argument is not valid; the message names it.
        RuntimeError: a rank did not answer within the group's timeout.
    """
    error: Exception | None = None
    fields: Fields = ()
    try:
        _check_axis(x, dim)
    except (TypeError, ValueError) as found:
        if not dist.is_available() or not dist.is_initialized():
            raise  # no other rank waits for this one
        error = found
    grid = Grid.of(group)
    try:
        if error is None:
            if cu_seqlens is None and seqlen is None:
                seqlen = x.shape[dim] * grid.size
            layout, lengths, size, rank = _where(seqlen, cu_seqlens, layout, group, grid.rank, grid.size)
            counts = [rows_of(runs_of(layout, lengths, size, each)) for each in range(size)]
            if x.shape[dim] != counts[rank]:
                raise ValueError(
                    f"x has {x.shape[dim]} tokens along axis {dim} on rank {rank}; layout {layout!r} gives it "
                    f"{counts[rank]} of {sum(lengths)}"
                )
            fields = _fields(x, dim, layout, lengths, cu_seqlens is not None)
            check_backend(grid.keys.group, "x", x.device)
    except (TypeError, ValueError) as found:
        error = found
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    agree_on_grid(grid.groups, fields, device, error)  # before anything is sent, as messages must have equal sizes
    rows = x.movedim(dim, 0)
    for ranks in reversed(grid.groups):
        inner = grid.heads.size if grid.heads and ranks is grid.keys else 1
        first = grid.keys.rank * grid.heads.size if grid.heads and ranks is grid.heads else 0
        sizes = tuple(sum(counts[first + i * inner : first + (i + 1) * inner]) for i in range(ranks.size))
        rows = _Join.apply(ranks, sizes, rows)
    order = order_of_shards(layout, lengths, size).to(x.device)
    return rows.index_select(0, order).movedim(0, dim)


def _fields(x: torch.Tensor, dim: int, layout: Layout, lengths: tuple[int, ...], varlen: bool) -> Fields:
    """What must be the same on all ranks: they join tensors of the same kind."""
    others = list(x.shape)
    del others[dim]
    gives_gradients = torch.is_grad_enabled() and x.requires_grad
    return (
        ("unshard_sequence", True),
        ("x without its tokens", tuple(others)),
        ("dim", dim % x.dim()),
        ("dtype", str(x.dtype)),
        ("layout", layout),
        ("cu_seqlens" if varlen else "seqlen", digest(lengths) if varlen else lengths[0]),
        ("requires_grad", gives_gradients),
    )


class _Join(torch.autograd.Function):
    """Concatenates the rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sizes: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
        ctx.call = ranks, sizes
        joined = x.new_empty((sum(sizes), *x.shape[1:]))
        parts = list(joined.split(list(sizes)))
        x = x.contiguous()
        parts[ranks.rank].copy_(x)
        others = [peer for peer in range(ranks.size) if peer != ranks.rank]
        sends: list[Message] = [(peer, x) for peer in others]
        comm.start(ranks, sends, [(peer, parts[peer]) for peer in others], comm.label_of("tokens", sizes)).wait()
        return joined

    @staticmethod
    @differentiated_once(linear=True)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ranks, sizes = ctx.call
        parts = [part.contiguous() for part in grad.split(list(sizes))]
        own = parts[ranks.rank]
        found = [own if peer == ranks.rank else torch.empty_like(own) for peer in range(ranks.size)]
        others = [peer for peer in range(ranks.size) if peer != ranks.rank]
        sends, receives = ([(peer, each[peer]) for peer in others] for each in (parts, found))
        comm.start(ranks, sends, receives, comm.label_of("gradients of tokens", sizes)).wait()
        total = torch.zeros_like(own, dtype=own.dtype if own.is_complex() else compute_dtype(own.dtype))
        for part in found:
            total = total + part
        return None, None, total.to(grad.dtype)


def _part(x: torch.Tensor, dim: int, run: layouts.Run) -> torch.Tensor:
    index: list[slice] = [slice(None)] * x.dim()
    index[dim] = slice(run.start, run.stop, run.step)
    return x[tuple(index)]


def _check_axis(x: torch.Tensor, dim: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is {kind_of(x)}; it must be a torch.Tensor")
    if hasattr(x, "to_local"):
        raise TypeError("x is a DTensor; it must be this rank's own torch.Tensor, as x.to_local() is")
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim!r}; x has {x.dim()} axes")


def _lengths_along(x: torch.Tensor, dim: int, cu_seqlens: Lengths) -> tuple[int, ...]:
    _check_axis(x, dim)
    if cu_seqlens is None:
        return (x.shape[dim],)
    lengths = lengths_of(cu_seqlens)
    if sum(lengths) != x.shape[dim]:
        raise ValueError(f"cu_seqlens ends at {sum(lengths)} and x has {x.shape[dim]} tokens along axis {dim}")
    return lengths


def _where(
    seqlen: int | None, cu_seqlens: Lengths, layout: Layout, group: Group, rank: int | None, world_size: int | None
) -> tuple[Layout, tuple[int, ...], int, int]:
    layouts.check_layout(layout)
    seqlen, rank, world_size = map(whole_number, (seqlen, rank, world_size))
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueError(f"seqlen is {seqlen!r} and cu_seqlens {cu_seqlens!r}; give one of them")
    if cu_seqlens is None and (type(seqlen) is not int or seqlen < 0):
        raise ValueError(f"seqlen is {seqlen!r}; it must be a whole number of at least 0")
    lengths = (seqlen,) if cu_seqlens is None else lengths_of(cu_seqlens)
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank!r} and world_size {world_size!r}; give both or neither")
    if rank is None:
        grid = Grid.of(group)
        rank, world_size = grid.rank, grid.size
    check_rank(rank, world_size)
    return layout, lengths, world_size, rank
