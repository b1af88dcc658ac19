"""What the kernels are given of a block mask: states of units, bits of partial ones, and lists for tiles.

They are made when a mask is first used, and kept with it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource, launch
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.block_lists import (
    FULL,
    PARTIAL,
    UNIT,
    BlockLists,
    MaskBitsParams,
    tile_lists,
    unit_states,
)
from flashlane.kernels.hopper.flex.problem import BlockMask, Program
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.program import PROGRAM_HEADER

SOURCE = "kernels/hopper/flex/mask_bits.cu"
THREADS = 128
SLOT_BYTES = 2 * UNIT * UNIT // 8
"""Bytes of a unit's bits, once by queries and once by keys."""
MOST_BYTES = 256 << 20
"""The most bytes of a mask's bits; where there are more, the kernels evaluate the program instead."""
NO_SLOT, WHOLE_SLOT = -1, -2
"""Units without bits: hidden, and visible as a whole."""
MASKS_KEPT = 8
"""Masks in units that are kept for one ``BlockMask``, whose function may read other tensors at each call."""


@dataclass
class UnitMask:
    """A mask in units of 64 queries and 64 keys, on its GPU. Batch and heads are 1 where all have the same."""

    states: torch.Tensor
    """int8 ``(batch, head, query unit, key unit)``."""
    slots: torch.Tensor | None = None
    """int32, with an even number of key units: where the bits of a unit are. None: a program says what is visible."""
    by_query: torch.Tensor | None = None
    """int32 ``(slot, query, 2)``: 64 bits, of keys."""
    by_key: torch.Tensor | None = None
    """int32 ``(slot, key, 2)``: 64 bits, of queries."""
    read: tuple[torch.Tensor, ...] = ()
    """The tensors that the mask was made from; kept, so that no other one gets their addresses."""
    lists: dict[tuple[Any, ...], BlockLists] = field(default_factory=dict)
    stream: torch.cuda.Stream = field(init=False)
    """The stream on which it was made."""

    def __post_init__(self) -> None:
        self.stream = launch.current_stream(self.states.device)

    def bits(self, words: torch.Tensor | None) -> MaskBitsParams:
        """The bits as a kernel is given them."""
        if self.slots is None or words is None:
            return MaskBitsParams()
        batch, heads, rows, columns = self.slots.shape
        size = rows * columns
        steps = heads * size * (batch > 1), size * (heads > 1)
        return MaskBitsParams(self.slots.data_ptr(), words.data_ptr(), *steps, columns)

    def cached_lists(self, key: tuple[Any, ...], make: Callable[[], BlockLists]) -> BlockLists:
        """What ``make`` gives, made once for a key, for kernels on the current stream."""
        lists, stream = self.lists.get(key), launch.current_stream(self.states.device)
        if lists is None:
            lists = self.lists[key] = make()
            stream.synchronize()  # other streams may be the next to read it
        if stream != self.stream:
            tables = (lists.counts, lists.entries, lists.order, lists.ranks, self.slots, self.by_query, self.by_key)
            for table in tables:
                if table is not None:
                    table.record_stream(stream)
        return lists


_unit_masks: WeakKeyDictionary[BlockMask, dict[tuple[Any, ...], UnitMask]] = WeakKeyDictionary()


def unit_mask(mask: BlockMask, program: Program, captured: Any, problem: AttentionProblem) -> UnitMask:
    """A block mask in units, made when it is first asked for.

    Args:
        mask: of the call.
        program: of the call; its mask is asked about the units of partial blocks.
        captured: the program's arguments.
        problem: the call.
    """
    tensors = tuple(getattr(captured, "tensors", captured) or ())
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    # A score's tensors do not count: an optimizer writes them at each step.
    of_mask = [tensors[i] for i in program.read_by_mask]
    read = tuple([t for t in (*lists, *of_mask) if t is not None])
    if any(t.is_inference() for t in of_mask):  # nothing says whether they have changed
        return _unit_mask(mask, program, captured, problem, read)
    states = tuple([(t.data_ptr(), 0 if t.is_inference() else t._version, t.shape, t.stride()) for t in read])
    key = program, states, tuple(getattr(captured, "integers", ())), problem.batch, problem.heads
    key += problem.seqlen_q, problem.seqlen_k
    known = _unit_masks.setdefault(mask, {})
    found = known.get(key)
    if found is None:
        while len(known) >= MASKS_KEPT:
            del known[next(iter(known))]
        found = known[key] = _unit_mask(mask, program, captured, problem, read)
    return found


def _unit_mask(
    mask: BlockMask, program: Program, captured: Any, problem: AttentionProblem, read: tuple[torch.Tensor, ...]
) -> UnitMask:
    lengths = problem.seqlen_q, problem.seqlen_k
    given = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    states = unit_states(*given, tuple(mask.BLOCK_SIZE), lengths)
    if program.mask is None:
        states = torch.where(states == PARTIAL, FULL, states)
        return UnitMask(_ending_inside(states, lengths[1]), read=read)
    asked = program.mask_inputs()
    batch, heads = (
        size if name in asked else size_of_states
        for name, size, size_of_states in zip("bh", (problem.batch, problem.heads), states.shape[:2], strict=True)
    )
    states = states.expand(batch, heads, -1, -1).contiguous()
    looked_at = states == PARTIAL
    if lengths[1] % UNIT:
        looked_at[..., -1] |= states[..., -1] == FULL
    units = looked_at.flatten().nonzero().flatten()
    if len(units) * SLOT_BYTES > MOST_BYTES:
        return UnitMask(_ending_inside(states, lengths[1]), read=read)
    return _with_bits(UnitMask(states, read=read), units, program, captured, lengths)


def _ending_inside(states: torch.Tensor, keys: int) -> torch.Tensor:
    """The states, with that of a key unit which is not full of keys lowered from full to partial."""
    if keys % UNIT:
        states[..., -1].clamp_(max=PARTIAL)
    return states


# ---- bits


def bits_source(header: str) -> KernelSource:
    """``mask_bits.cu`` for a program."""
    return KernelSource(SOURCE, device_code(SOURCE), "hopper_mask_bits", (), ((PROGRAM_HEADER, header),))


@functools.cache
def _bits_params(program: type[ctypes.Structure]) -> type[ctypes.Structure]:
    pointers = [(name, ctypes.c_void_p) for name in ("units", "states", "slots", "by_query", "by_key")]
    integers = [(name, ctypes.c_int) for name in ("heads", "rows", "columns", "slot_columns", "queries", "keys")]
    return type("MaskBitsLaunchParams", (ctypes.Structure,), {"_fields_": [*pointers, *integers, ("program", program)]})


def _with_bits(
    mask: UnitMask, units: torch.Tensor, program: Program, captured: Any, lengths: tuple[int, int]
) -> UnitMask:
    """The mask with the bits of these units, and with the states that they turn out to have."""
    states = mask.states
    _, heads, rows, columns = states.shape
    slots = torch.where(states == FULL, WHOLE_SLOT, NO_SLOT).to(torch.int32)
    mask.slots = torch.nn.functional.pad(slots, (0, columns % 2), value=NO_SLOT).contiguous()
    words = torch.empty((2, max(1, len(units)), UNIT, 2), dtype=torch.int32, device=states.device)
    mask.by_query, mask.by_key = words.unbind(0)
    if not len(units):
        return mask
    arguments = program.params(captured)
    tables = (units, states, mask.slots, mask.by_query, mask.by_key)
    params = _bits_params(type(arguments))(
        *(t.data_ptr() for t in tables), heads, rows, columns, mask.slots.shape[-1], *lengths, arguments
    )
    index = states.device.index
    with launch.on_device(index):
        function = jit.load(jit.compile(bits_source(program.header()), ARCH), index)
        function.launch((len(units), 1, 1), (THREADS, 1, 1), 0, params)
    return mask


# ---- lists


def forward_lists(mask: UnitMask, config: HopperConfig) -> BlockLists:
    """The n-blocks of each m-block, for a configuration's tile."""

    def make() -> BlockLists:
        return tile_lists(mask.states, config.block_m, config.block_n, bits=mask.bits(mask.by_query))

    return mask.cached_lists(("forward", config.block_m, config.block_n), make)


def backward_lists(mask: UnitMask, config: GradientConfig, problem: AttentionProblem) -> tuple[BlockLists, ...]:
    """The m-blocks of each n-block, for the kernel of the gradients."""
    block_m, keys = config.block_m, config.block_n

    def make() -> BlockLists:
        states = mask.states.transpose(2, 3)
        return tile_lists(states, keys, block_m, problem.group, config.in_order, mask.bits(mask.by_key))

    return (mask.cached_lists(("backward", block_m, keys, problem.group, config.in_order), make),)
