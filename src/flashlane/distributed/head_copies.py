"""Ulysses by copies: ranks exchange tokens for heads in each other's memory, while their kernels run.

The heads of a rank come in groups. As soon as the queries, keys and values of a group are there, its kernel begins,
while copy engines bring the next groups; the output of a group goes back while the kernels of later groups run. Each
kernel has all tokens of its heads, so that a rank computes exactly its share of what one GPU would, and no gradient is
summed over ranks. In the backward the gradient of the output comes with them, and those of queries, keys and values go
back. Output and LSE of a rank's heads are kept for it.

Nothing but copies of the driver moves data, since a kernel of another kind might find no SM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashlane.core.arch import compute_dtype, no_autocast
from flashlane.core.problem import VECTOR_BYTES, Inputs
from flashlane.distributed.attend import Settings
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import Calls
from flashlane.distributed.comm import Ranks, label_of
from flashlane.distributed.launches import Launch
from flashlane.distributed.layout import Run, runs_of
from flashlane.distributed.once import differentiated_once
from flashlane.distributed.peer_memory import MOST_GROUPS, Exchange, HeadMove, PeerMemory, Places, half_of, memory_of
from flashlane.distributed.plan import Division, gather_calls
from flashlane.distributed.streams import COMPUTE_STREAMS, COPY_STREAM, CallStreams
from flashlane.distributed.transport import Place, Transport, why_not_copies
from flashlane.distributed.ulysses import Heads

PARTS_OF_HEADS = 3
"""The KV heads of a rank come in up to so many groups: the first one is smaller, as nothing is computed before it has
come. The last one is not, since its tiles must fill all SMs until the end. Of 3, 4 and 6, 3 was the fastest on two
H200."""
MORE_STREAMS = 2
"""The streams of a call besides those of all calls: for copies within this rank's memory, and for results."""
TO_HEADS, TO_TOKENS = "heads to ranks", "tokens to ranks"


def group_bounds(kv_heads: int) -> tuple[int, ...]:
    """The first KV head of each group, and the end of the last group, of a rank's KV heads."""
    first = max(1, kv_heads // (2 * PARTS_OF_HEADS))
    rest = kv_heads - first
    groups = min(rest, PARTS_OF_HEADS - 1)
    return (0, *(first + rest * i // groups for i in range(groups)), kv_heads) if rest else (0, kv_heads)


@dataclass(frozen=True, eq=False)
class HeadTask:
    """Everything about such a call on this rank except its tensors."""

    ranks: Ranks
    division: Division
    """Of all tokens to the ranks that exchange heads."""
    heads: Heads
    head_dims: tuple[int, int]
    dtype: torch.dtype
    settings: Settings
    call: int = 0
    """As :attr:`flashlane.distributed.gather.Task.call`."""
    launches: dict[object, Launch] = field(default_factory=dict)
    memo: dict[object, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The tokens of the whole call."""
        return sum(self.division.lengths)

    @property
    def share(self) -> int:
        """Query heads of a KV head."""
        return self.heads.heads // self.heads.kv_heads

    @property
    def bounds(self) -> tuple[int, ...]:
        """:func:`group_bounds` of each rank."""
        return group_bounds(self.heads.kv_heads // self.heads.ranks)

    @property
    def groups(self) -> range:
        return range(len(self.bounds) - 1)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The tokens of a rank."""
        return runs_of(self.division.layout, self.division.lengths, self.ranks.size, rank)

    def heads_of(self, rank: int, group: int, queries: bool) -> range:
        """The heads of a group of a rank, among all heads of the call."""
        first, stop = self.bounds[group], self.bounds[group + 1]
        start, share = self.heads.keys(rank).start, self.share if queries else 1
        return range((start + first) * share, (start + stop) * share)

    def places(self, kind: str, backward: bool) -> Places:
        """Offsets of what comes by (group, tensor), where heads come, and by (group, tensor, sender), where results do;
        they are the same on all ranks but for rows."""
        key = kind, backward
        if key not in self.memo:
            self.memo[key] = places = Places()
            dim, dim_v = self.head_dims
            to_heads, to_tokens = [(True, dim), (False, dim), (False, dim_v)], [(True, dim_v)]
            if backward:
                to_heads, to_tokens = [*to_heads, (True, dim_v)], to_heads
            most = max(sum(run.count for run in self.runs(rank)) for rank in range(self.ranks.size))
            for group in self.groups:
                for i, (queries, width) in enumerate(to_heads if kind == TO_HEADS else to_tokens):
                    row = len(self.heads_of(0, group, queries)) * width * self.dtype.itemsize
                    if kind == TO_HEADS:
                        places.add((group, i), self.tokens * row)
                    else:
                        for sender in range(self.ranks.size):
                            places.add((group, i, sender), most * row)
        return self.memo[key]

    @property
    def half(self) -> int:
        """The most bytes of an exchange."""
        return max(self.places(kind, backward).size for kind in (TO_HEADS, TO_TOKENS) for backward in (False, True))

    def moves(self, peer: int, group: int, backward: bool) -> list[HeadMove]:
        """The copies of this rank's tokens to a group of a rank's heads."""
        key = "moves", peer, group, backward
        if key not in self.memo:
            offsets, dims = self.places(TO_HEADS, backward).offsets, (*self.head_dims, self.head_dims[1])
            dims = (self.head_dims[0], *dims)
            self.memo[key] = found = []
            for i in range(4 if backward else 3):
                heads = self.heads_of(peer, group, i in (0, 3))
                row = len(heads) * dims[i] * self.dtype.itemsize
                found += [
                    HeadMove(i, offsets[group, i] + run.start * row, run.row, run.count, heads.start, len(heads))
                    for run in self.runs(self.ranks.rank)
                ]
        return self.memo[key]

    def moves_back(self, peer: int, group: int, backward: bool) -> list[HeadMove]:
        """The copies of a rank's tokens of results of a group of this rank's heads."""
        key = "moves back", peer, group, backward
        if key not in self.memo:
            offsets, rank = self.places(TO_TOKENS, backward).offsets, self.ranks.rank
            self.memo[key] = found = []
            for i in range(3 if backward else 1):
                queries, width = i == 0, self.head_dims[1] if i == 2 or not backward else self.head_dims[0]
                count = len(self.heads_of(rank, group, queries))
                row = count * width * self.dtype.itemsize
                found += [
                    HeadMove(i, offsets[group, i, rank] + run.row * row, run.start, run.count, 0, count)
                    for run in self.runs(peer)
                ]
        return self.memo[key]

    def launch(self, group: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Launch:
        """What computes a group of heads, prepared at its first call."""
        if group not in self.launches:
            (block,) = calls_of(self.division).calls
            assert isinstance(block, Block)  # by why_not
            self.launches[group] = Launch(block, q, (k, v), out, self.settings, f32_gradients=False)
        return self.launches[group]


def calls_of(division: Division) -> Calls:
    """The kernel calls of a rank over all tokens."""
    return gather_calls(division, 0, True, False)


def why_not(division: Division, heads: Heads, batch: int, plain: bool) -> str | None:
    """Why Ulysses sends messages for a call; None where it can copy.

    Args:
        division: of all tokens to the ranks that exchange heads.
        heads: of the call.
        batch: elements of the batch.
        plain: whether there is no score modifier, and no LSE is returned.
    """
    if division.ranks > 1:
        return "ranks exchange keys, too"
    if heads.heads % heads.ranks or heads.kv_heads % heads.ranks:
        return f"{heads.heads} heads and {heads.kv_heads} KV heads are not divided evenly among {heads.ranks} ranks"
    if batch != 1:
        return f"the batch has {batch} elements"
    if not plain:
        return "score modifiers and the LSE are not copied"
    if division.layout == "striped":
        return "tokens of layout 'striped' do not lie one after another"
    if len([each for each in division.lengths if each]) != 1:
        return "there is more than one document"
    calls = calls_of(division)
    if len(calls.calls) != 1 or not isinstance(calls.calls[0], Block) or not calls.full or not calls.disjoint:
        return "some token sees no key"
    if len(group_bounds(heads.kv_heads // heads.ranks)) > MOST_GROUPS + 1:
        return "there are too many groups of heads"
    return None


def refuse_messages(division: Division, inputs: Inputs, plain: bool) -> None:
    """Raise NotImplementedError if a call would send messages; the arguments are those of :func:`task_of`."""
    if reason := why_not(division, _heads_of(division, inputs), _batch_of(inputs), plain):
        raise NotImplementedError(f"transport is 'copies' with method 'ulysses', which sends messages: {reason}")


def task_of(
    ranks: Ranks,
    division: Division,
    settings: Settings,
    inputs: Inputs,
    transport: Transport,
    plain: bool,
    places: Sequence[Place],
    call: int,
) -> HeadTask | None:
    """What a call of "ulysses" copies; None where it sends messages. All ranks decide from the same values.

    Args:
        ranks: those that exchange heads.
        division: of all tokens to them.
        settings: the other arguments of the call.
        inputs: q, k and v, with a batch or packed.
        transport: as the caller gave it.
        plain: whether there is no score modifier, and no LSE is returned.
        places: of the ranks.
        call: its number.
    """
    heads, q = _heads_of(division, inputs), inputs.q
    if transport == "messages" or why_not(division, heads, _batch_of(inputs), plain) is not None:
        return None
    task = HeadTask(ranks, division, heads, (q.shape[-1], inputs.v.shape[-1]), q.dtype, settings, call)
    if transport == "copies" or why_not_copies(places, 1, task.half, half_of(ranks, q.device)) is None:
        return task
    return None


def _heads_of(division: Division, inputs: Inputs) -> Heads:
    return Heads(inputs.q.shape[-2], inputs.k.shape[-2], division.heads_ranks)


def _batch_of(inputs: Inputs) -> int:
    return 1 if inputs.q.dim() == 3 else inputs.q.shape[0]


class HeadCopies(torch.autograd.Function):
    """Output of a rank's tokens, by copies; all heads of tokens in, and all heads of tokens out."""

    @staticmethod
    def forward(ctx: Any, task: HeadTask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        q, k, v = map(_readable, (q, k, v))
        exchanges, streams = _begin(task, q)
        out = q.new_empty((*q.shape[:3], v.shape[-1]))
        outs, lses = [], []
        groups = _bring(task, (q, k, v), exchanges[0], streams, False)
        with no_autocast(q.device):
            for group in task.groups:
                with streams.on(0):
                    heads = len(task.heads_of(task.ranks.rank, group, True))
                    outs.append(q.new_empty((1, task.tokens, heads, v.shape[-1])))
                    lses.append(q.new_empty((1, heads, task.tokens), dtype=compute_dtype(q.dtype)))
            done = []
            for group, stream in _arriving(groups, exchanges[0], streams):
                with streams.on(stream):
                    queries, keys, values = groups[group].blocks
                    launch = task.launch(group, queries, keys, values, outs[group])
                    launch.forward(queries, (keys, values), outs[group], lses[group])
                done.append(streams.mark(stream))
        _give_back(task, [(each,) for each in outs], (out,), done, exchanges[1], streams, False)
        ctx.task, ctx.count = task, len(outs)
        if task.settings.needs_grad:
            ctx.save_for_backward(q, k, v, *outs, *lses)
        streams.keep(groups, outs, lses)
        streams.join(exchanges[1].end)
        return out

    @staticmethod
    @differentiated_once()
    def backward(ctx: Any, do: torch.Tensor | None) -> tuple[Any, ...]:
        task = ctx.task
        q, k, v, *others = ctx.saved_tensors
        outs, lses = others[: ctx.count], others[ctx.count :]
        if do is None:
            return None, None, None, None
        do = _readable(do)
        exchanges, streams = _begin(task, q)
        results = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        groups = _bring(task, (q, k, v, do), exchanges[0], streams, True)
        gradients, done = [], []
        with no_autocast(q.device):
            for group, stream in _arriving(groups, exchanges[0], streams):
                with streams.on(stream):
                    queries, keys, values, of_out = groups[group].blocks
                    dq = torch.empty_like(queries)
                    launch = task.launch(group, queries, keys, values, outs[group])
                    dk, dv = launch.backward(queries, (keys, values), outs[group], lses[group], of_out, dq)
                gradients.append((dq, dk, dv))
                done.append(streams.mark(stream))
        _give_back(task, gradients, results, done, exchanges[1], streams, True)
        streams.keep(groups, gradients)
        streams.join(exchanges[1].end)
        return None, *results


@dataclass(frozen=True)
class _Group:
    """The tensors of a group of heads in this rank's memory, and the event after which its own tokens are there."""

    blocks: tuple[torch.Tensor, ...]
    own: Any


def _begin(task: HeadTask, q: torch.Tensor) -> tuple[tuple[Exchange, Exchange], CallStreams]:
    """The two exchanges of a pass, and its streams."""
    if "half" not in task.memo:
        task.memo["half"] = task.half
    memory: PeerMemory = memory_of(task.ranks, q.device, task.memo["half"])
    one, other = (memory.exchange(label_of(task.call, kind)) for kind in (TO_HEADS, TO_TOKENS))
    return (one, other), CallStreams(q.device, MORE_STREAMS)


def _bring(
    task: HeadTask, tensors: tuple[torch.Tensor, ...], exchange: Exchange, streams: CallStreams, backward: bool
) -> list[_Group]:
    """Enqueue the sending of all heads, group by group; the groups of this rank's heads, on their way."""
    rank, (own, _) = task.ranks.rank, streams.more
    others = exchange.memory.others
    with streams.on(COPY_STREAM):
        exchange.begin()
        for group in task.groups:
            for peer in others:
                exchange.send_heads(peer, task.moves(peer, group, backward), tensors)
                exchange.arrive(peer, group)
    groups, offsets = [], task.places(TO_HEADS, backward).offsets
    for group in task.groups:
        with streams.on(own):
            exchange.send_heads(rank, task.moves(rank, group, backward), tensors)
        blocks = []
        for i, t in enumerate(tensors):
            heads = task.heads_of(rank, group, i in (0, 3))
            blocks.append(exchange.block(offsets[group, i], (1, task.tokens, len(heads), t.shape[-1]), t.dtype))
        groups.append(_Group(tuple(blocks), streams.mark(own)))
    return groups


def _arriving(groups: list[_Group], exchange: Exchange, streams: CallStreams) -> Iterator[tuple[int, int]]:
    """The number of each group and of the stream that computes it, whose later work waits for the group."""
    for group, each in enumerate(groups):
        stream = group % COMPUTE_STREAMS
        streams.wait(stream, each.own)
        with streams.on(stream):
            for peer in exchange.memory.others:
                exchange.expect(peer, group)
        yield group, stream


def _give_back(
    task: HeadTask,
    of_groups: list[tuple[torch.Tensor, ...]],
    to: tuple[torch.Tensor, ...],
    done: list[Any],
    exchange: Exchange,
    streams: CallStreams,
    backward: bool,
) -> None:
    """Send results of this rank's heads to the ranks of their tokens, and write those of this rank's tokens."""
    rank, (own, back) = task.ranks.rank, streams.more
    others, offsets = exchange.memory.others, task.places(TO_TOKENS, backward).offsets
    streams.after(back, COPY_STREAM)  # a group has one flag for both exchanges, whose value only grows
    with streams.on(back):
        exchange.begin()
    for group, results in enumerate(of_groups):
        streams.wait(back, done[group])
        with streams.on(back):
            for peer in others:
                exchange.send_heads(peer, task.moves_back(peer, group, backward), results)
                exchange.arrive(peer, group)
        streams.wait(own, done[group])
        with streams.on(own):
            for i, (target, result) in enumerate(zip(to, results, strict=True)):
                heads = task.heads_of(rank, group, i == 0)
                for run in task.runs(rank):
                    exchange.memory.copy_rows_of_heads(
                        target[:, run.row : run.row + run.count, heads.start : heads.stop],
                        result[:, run.start : run.start + run.count],
                    )
    with streams.on(COPY_STREAM):
        for group, results in enumerate(of_groups):
            for peer in others:
                exchange.expect(peer, group)
                for i, (target, result) in enumerate(zip(to, results, strict=True)):
                    heads = task.heads_of(peer, group, i == 0)
                    shape = (1, target.shape[1], len(heads), result.shape[-1])
                    block = exchange.block(offsets[group, i, peer], shape, result.dtype)
                    exchange.memory.copy_rows_of_heads(target[:, :, heads.start : heads.stop], block)


def _readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the heads of a row do not lie one after another, or off the sectors."""
    packed = t.stride(-1) == 1 and t.stride(-2) == t.shape[-1] and t.data_ptr() % VECTOR_BYTES == 0
    return t if packed else t.contiguous()
