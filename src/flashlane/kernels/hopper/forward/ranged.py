"""Hopper forward launches of sequences that are ranges of rows and of keys, and of keys that arrive meanwhile."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import LINK_RATE, OWN, Arriving, Range, RangedRepeat, Ranges
from flashlane.jit import launch, tensormap
from flashlane.jit.launch_pool import LaunchPlan
from flashlane.kernels import makespan
from flashlane.kernels.hopper.forward import cost, select
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.launch import FIELDS, HopperParams, PreparedForward, key_map
from flashlane.kernels.hopper.forward.tile_scheduler import packings

NANOSECONDS = 1_000_000_000
_MAP = ctypes.c_ubyte * tensormap.MAP_BYTES
OWN_MAPS = ("own_k", "own_v")
MOST_DIVIDED = 16
"""The most ranges of a launch that are divided so that their last tiles are full: each becomes two sequences."""


class _Plain(ctypes.Structure):
    """``PlainParams`` with the byte of an empty ``ProgramParams``, but not its padding."""

    _fields_ = (*FIELDS, ("program", ctypes.c_ubyte))


_PLAIN_BYTES = -(-ctypes.sizeof(_Plain) // tensormap.MAP_BYTES) * tensormap.MAP_BYTES
"""Where ``ArrivalParams`` begins, which lies on a multiple of what a map takes."""


class ArrivalParams(ctypes.Structure):
    """Mirror of ``Params`` where keys arrive: the plain ones, and ``ArrivalParams`` (``attention/arrivals.cuh``)."""

    _fields_ = (
        *FIELDS,
        ("before_arrivals", ctypes.c_ubyte * (_PLAIN_BYTES - _Plain.program.offset)),
        *((name, _MAP) for name in OWN_MAPS),
        *((name, ctypes.c_void_p) for name in ("chunks", "flags", "lost")),
        ("limit", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("count", "value")),
        ("padding", _MAP),
    )


class RangedForward(PreparedForward):
    """What calls with the same ranges have in common.

    Args:
        config: the configuration, with ``ranges``, and with ``arrivals`` where the ranges have chunks.
        problem: packed sequences, or that of :func:`as_dense` without ``ranges``.
        ranges: the sequences.
        inputs: q, k and v.
        out: the output.
        arriving: what arrives, where the ranges have chunks.
    """

    def __init__(
        self,
        config: HopperConfig,
        problem: AttentionProblem,
        ranges: Ranges,
        inputs: Inputs,
        out: torch.Tensor,
        arriving: Arriving | None,
    ) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        if not problem.varlen:
            q, k, v, out = q[None], k[None, : problem.seqlen_k], v[None, : problem.seqlen_k], out[None]
        kind: type[ctypes.Structure] = ArrivalParams if config.arrivals else HopperParams
        tensors = q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.shape, out.stride()
        super().__init__(config, problem, *tensors, out.device.index, None, kind)
        self.sequences = ranges.on(out.device)
        if arriving is not None:
            self.maps += tuple(key_map(config, t.shape, t.stride()) for t in arriving.own)
            self.operands, self.map_fields = (*self.operands, 3, 4), (*self.map_fields, *OWN_MAPS)
            self.plan = LaunchPlan(self._launches, ("q", "k", "v", "own k", "own v"))
            self.params.chunks, self.params.count = self.sequences[2].data_ptr(), len(ranges.chunks)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        """Enqueue the kernel; the tensors are like those of the first call, and so is ``arriving``."""
        rows, keys, _ = self.sequences
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if arriving is None:
            complete = None
        else:
            addresses += tuple(t.data_ptr() for t in arriving.own)

            def complete(params: ArrivalParams) -> None:
                params.flags, params.value, params.lost = arriving.flags, arriving.value, arriving.lost
                params.limit = int(arriving.seconds * NANOSECONDS)

        inputs = Inputs(q, k, v, cu_seqlens_q=rows, cu_seqlens_k=keys)
        with launch.on_device(self.device):
            self.launch(q, k, v, out, lse, addresses, inputs, complete)


def as_dense(
    problem: AttentionProblem, ranges: Ranges, inputs: Inputs, arriving: Arriving | None
) -> AttentionProblem | None:
    """The same call as a dense sequence, whose tile scheduler is faster; None where it is not one.

    It has one range, of all rows and of the first keys. A dense tile may load rows past the last key, which must be
    past the end of a tensor: TMA then loads zeros.
    """
    first, *others = ranges.sequences
    if others or first[:3] != (0, inputs.q.shape[0], 0) or first != first._replace(shift=None):
        return None
    for chunk in ranges.chunks:
        own = arriving is not None and chunk.flag == OWN
        if own and chunk.stop >= first.k_stop and chunk.own_row + first.k_stop - chunk.first < arriving.own[0].shape[0]:
            return None
    return replace(problem, batch=1, varlen=False, seqlen_q=first.q_stop, seqlen_k=first.k_stop)


def tiles_end_with_rows(ranges: Ranges, queries: int) -> Ranges:
    """The same rows in ranges whose last tiles are full: what is left over is a tile of the rows that see fewest keys.

    Under a causal mask each other tile then ends up to a tile's rows earlier, and so do its keys.

    Args:
        ranges: of a launch.
        queries: of a tile.
    """
    found: list[Range] = []
    for each in ranges.sequences:
        rows, shift = (each.q_stop - each.q_first) % queries, each.alignment
        stop = each.q_first + rows
        if rows and stop < each.q_stop:
            found.append(each._replace(q_first=stop, shift=shift + rows))
            each = each._replace(q_stop=stop, shift=shift)
        found.append(each)
    return Ranges(tuple(found), ranges.chunks)


def own_keys_first(problem: AttentionProblem, ranges: Ranges, config: HopperConfig) -> Ranges:
    """The same rows, where other ranks' keys come late with some tiles that need none of them first.

    A range has its tiles from its last rows on, and a tile its keys from the last one on. If copies take longer than
    the first tile's keys, all tiles that run at first wait for them, unless tiles over own keys run before. The
    shortest ones of these stay at the end, as they fill it.

    Args:
        problem: the ranges' packed sequences under a causal mask.
        ranges: those with most work first, with the chunks that arrive.
        config: the tile.
    """
    own = [chunk for chunk in ranges.chunks if chunk.flag == OWN]
    foreign = sum(chunk.stop - chunk.first for chunk in ranges.chunks if chunk.flag != OWN)
    parts = as_problems(problem, ranges)
    needs_none = [any(c.first <= r.k_first and r.k_first + p.seqlen_k <= c.stop for c in own)
                  for r, p in zip(ranges.sequences, parts, strict=True)]  # fmt: skip
    if not foreign or needs_none[0] or not any(needs_none):
        return ranges
    launches = [cost.Launch(part, config, 1) for part in parts]
    width = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    copied = 1e6 * foreign * problem.kv_heads * width / LINK_RATE
    late = copied - parts[0].seqlen_k / config.block_n * launches[0].one.block
    if late <= 0:
        return ranges
    at = max((i for i, fine in enumerate(needs_none) if fine), key=lambda i: sum(launches[i].costs))
    moved = launches[at].costs

    def time(tiles: int) -> float:
        """Microseconds with so many m-blocks of that range first, and what is then left of the wait."""
        before, after = moved[:tiles], moved[tiles:]
        order = [before, *(after if i == at else each.costs for i, each in enumerate(launches))]
        runs = [(tile, launches[at].heads) for costs in order for tile in costs]
        waited = max(0.0, late - sum(before) * launches[at].heads / launches[at].workers)
        return makespan.makespan_of_runs(runs, launches[at].workers) + waited

    count = min(range(len(moved) + 1), key=time)
    each = ranges.sequences[at]
    border = max(each.q_first, each.q_stop - count * (config.block_m // config.pack_gqa))
    if border == each.q_stop:
        return ranges
    first = each._replace(q_first=border, shift=each.alignment + border - each.q_first)
    rest = [] if border == each.q_first else [each._replace(q_stop=border, shift=each.alignment)]
    others = [[other] for other in ranges.sequences]
    others[at] = rest
    return Ranges((first, *(other for some in others for other in some)), ranges.chunks)


def fastest(
    problem: AttentionProblem, ranges: Ranges, config: HopperConfig
) -> tuple[HopperConfig, AttentionProblem, Ranges]:
    """The configuration, problem and ranges of a causal launch, with the order of its tiles.

    Up to :data:`MOST_DIVIDED` ranges are divided so that tiles end with their rows. A tile has one query head, or all
    heads of a group: whole tiles of one head leave more rows over, in the tiles of most keys, than those of a group
    do. What is predicted to end first is taken.

    Args:
        problem: the ranges' packed sequences under a causal mask, or one range as a dense problem.
        ranges: those with most work first.
        config: the configuration of the problem.
    """
    options = [(config, problem, ranges)]
    packed = [replace(config, packed_heads=p.heads, pack_gqa=p.rows) for p in packings(problem, config.block_m)]
    if not problem.varlen and not config.split:
        options = [(each, problem, ranges) for each in packed]
    elif problem.varlen and config.pack_gqa == 1 and len(ranges.sequences) <= MOST_DIVIDED:
        options = [_divided(problem, ranges, each) for each in packed]
    timed = []
    for each, whole, some in options:
        size, time = select.section_of_ranges(as_problems(whole, some), each)
        timed.append((time, (replace(each, heads_per_section=size), whole, some)))
    return min(timed, key=lambda entry: entry[0])[1]


def _divided(
    problem: AttentionProblem, ranges: Ranges, config: HopperConfig
) -> tuple[HopperConfig, AttentionProblem, Ranges]:
    """A configuration with the ranges as its tiles divide them, and their problem."""
    some = own_keys_first(problem, tiles_end_with_rows(ranges, config.block_m // config.pack_gqa), config)
    return config, replace(problem, batch=len(some.sequences)), some


def as_problems(problem: AttentionProblem, ranges: Ranges) -> list[AttentionProblem]:
    """Each range as a dense problem, over the keys that its queries see under a causal mask."""
    dense = replace(problem, batch=1, varlen=False)
    found = []
    for each in ranges.sequences:
        rows, keys = each.q_stop - each.q_first, each.k_stop - each.k_first
        seen = min(keys, each.alignment + rows + problem.window_right)
        found.append(replace(dense, seqlen_q=rows, seqlen_k=max(1, seen)))
    return found


def prepare(
    config: HopperConfig,
    problem: AttentionProblem,
    ranges: Ranges,
    inputs: Inputs,
    out: torch.Tensor,
    arriving: Arriving | None,
) -> RangedRepeat:
    """What :meth:`~flashlane.core.registry.Kernel.prepare_ranges` gives, with a configuration of the problem."""
    if (arriving is None) != (not ranges.chunks):
        raise ValueError("arriving must be given where ranges have chunks, and only there")
    config = replace(config, ranges=problem.varlen, arrivals=bool(ranges.chunks))
    return RangedForward(config, problem, ranges, inputs, out, arriving).run
