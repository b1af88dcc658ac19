"""Makes block lists on a GPU: the states of blocks from column intervals or a mask program, and lists from states."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from flashlane import jit
from flashlane.core.arch import arch_of
from flashlane.flex.neighbourhoods import AXES, ROWS, Neighbourhood
from flashlane.flex.program import HEADER, Arguments, Program
from flashlane.jit import KernelSource
from flashlane.jit.launch import MAX_GRID, on_device

THREADS = 128
SEGMENT = 1024
"""Columns of blocks that one CTA of interval_states counts."""


class IntervalParams(ctypes.Structure):
    """The launch parameters of ``interval_states.cu``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("starts", "ends", "states")),
        *((name, ctypes.c_int) for name in ("intervals", "queries", "keys", "block_q", "block_k", "rows", "columns")),
        ("segments", ctypes.c_int),
    ]


class NeighbourhoodParams(ctypes.Structure):
    """The launch parameters of ``neighbourhood_states.cu``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "states")),
        ("axes", ctypes.c_int * 2 * AXES),
        *((name, ctypes.c_int) for name in ("position", "tokens", "block_q", "block_k", "rows", "columns")),
    ]


class _Lists(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("counts", "indices", "full_counts", "full_indices")]


class ListParams(ctypes.Structure):
    """The launch parameters of ``block_lists.cu``."""

    _fields_ = [
        ("states", ctypes.c_void_p),
        ("of_rows", _Lists),
        ("of_columns", _Lists),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
    ]


def source(name: str, constants: dict[str, int], header: str | None = None) -> KernelSource:
    """A kernel of this package, by the name of its file and entry."""
    text = Path(__file__).with_name(f"{name}.cu").read_text(encoding="utf-8")
    headers = () if header is None else ((HEADER, header),)
    return KernelSource(f"flex/{name}.cu", text, name, tuple(constants.items()), headers)


@functools.cache
def interval_source() -> KernelSource:
    return source("interval_states", {"THREADS": THREADS, "SEGMENT": SEGMENT})


@functools.cache
def neighbourhood_source() -> KernelSource:
    return source("neighbourhood_states", {"THREADS": THREADS})


@functools.cache
def list_source() -> KernelSource:
    return source("block_lists", {"THREADS": THREADS})


@functools.lru_cache(maxsize=256)
def program_source(program: Program, block_size: tuple[int, int]) -> KernelSource:
    """The kernel of a mask program, for one size of blocks."""
    block_q, block_k = block_size
    constants = {"THREADS": max(32, min(128, -(-block_k // 32) * 32)), "BLOCK_Q": block_q, "BLOCK_K": block_k}
    return source("program_states", constants, program.header())


@functools.lru_cache(maxsize=256)
def _function(wanted: KernelSource, index: int) -> jit.Function:
    arch = arch_of(torch.device("cuda", index))
    return jit.load(jit.compile(wanted, arch), index)  # type: ignore[arg-type]


def _blocks(lengths: tuple[int, int], block_size: tuple[int, int]) -> tuple[int, int]:
    return -(-lengths[0] // block_size[0]), -(-lengths[1] // block_size[1])


def interval_states(
    starts: torch.Tensor, ends: torch.Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> torch.Tensor:
    """The states of all blocks, int8 ``(B or 1, H or 1, rows, columns)``, from the tensors of ``Intervals``."""
    batch, heads, intervals, queries = starts.shape
    rows, columns = _blocks(lengths, block_size)
    states = torch.empty(batch, heads, rows, columns, dtype=torch.int8, device=starts.device)
    if not states.numel():
        return states
    segments = -(-columns // SEGMENT)
    sizes = (intervals, queries, lengths[1], *block_size, rows, columns, segments)
    with on_device(starts.device.index):
        function = _function(interval_source(), starts.device.index)
        for matrices, addresses in _parts(starts, ends, states):
            params = IntervalParams(*addresses, *sizes)
            function.launch((rows * segments, matrices, 1), (THREADS, 1, 1), 0, params)
    return states


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[int, list[int]]]:
    """Divide contiguous ``(batch, heads, …)`` for launches whose grids have an axis of so many matrices, the heads of
    all batch rows: how many a launch has, and where each tensor has its first one."""
    for parts in zip(*(t.flatten(0, 1).split(MAX_GRID[1]) for t in tensors), strict=True):
        yield len(parts[0]), [part.data_ptr() for part in parts]


def neighbourhood_states(
    neighbourhood: Neighbourhood, block_size: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of all blocks, int8 ``(1, 1, rows, columns)``, and ``Neighbourhood.table``, in one launch."""
    tokens = neighbourhood.tokens
    rows, columns = _blocks((tokens, tokens), block_size)
    states = torch.empty(1, 1, rows, columns, dtype=torch.int8, device=device)
    table = torch.empty(ROWS, tokens, dtype=torch.int32, device=device)
    sizes = (neighbourhood.position, tokens, *block_size, rows, columns)
    axes = (ctypes.c_int * 2 * AXES)(*neighbourhood.axes)
    params = NeighbourhoodParams(table.data_ptr(), states.data_ptr(), axes, *sizes)
    with on_device(device.index):
        _function(neighbourhood_source(), device.index).launch(
            (rows, -(-columns // THREADS), 1), (THREADS, 1, 1), 0, params
        )
    return states, table


@functools.cache
def _program_params(program_params: type[ctypes.Structure]) -> type[ctypes.Structure]:
    fields = [("program", program_params), ("states", ctypes.c_void_p), ("count", ctypes.c_longlong)]
    fields += [(name, ctypes.c_int) for name in ("heads", "rows", "columns", "queries", "keys")]  # type: ignore[list-item]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


def look_at_pairs(
    states: torch.Tensor,
    program: Program,
    arguments: Arguments,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> None:
    """Settle the unknown blocks of a table of states by the mask of a program, pair by pair.

    Args:
        states: int8 ``(batch, heads, rows, columns)`` on a GPU.
        program: the program whose mask is evaluated.
        arguments: the tensors and integers that the program reads.
        lengths: the numbers of queries and of keys.
        block_size: the numbers of queries and of keys of a block.
    """
    if not states.numel():
        return
    kernel = program_source(program, block_size)
    threads = int(dict(kernel.constants)["THREADS"])
    given = program.params(arguments)
    params = _program_params(type(given))(given, states.data_ptr(), states.numel(), *states.shape[1:], *lengths)
    index = states.device.index
    with on_device(index):
        _function(kernel, index).launch((-(-states.numel() // threads), 1, 1), (threads, 1, 1), 0, params)


def block_mask(
    states: torch.Tensor, mask_mod: Any, lengths: tuple[int, int], block_size: tuple[int, int], separate: bool
) -> BlockMask:
    """The ``BlockMask`` that ``blocks.from_states`` makes of the same arguments, in one launch of up to 65535 heads."""
    batch, heads, rows, columns = states.shape

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(batch, heads, *shape, dtype=torch.int32, device=states.device)

    kinds = 2 if separate else 1
    of_rows = [t for _ in range(kinds) for t in (empty(rows), empty(rows, columns))]
    of_columns = [t for _ in range(kinds) for t in (empty(columns), empty(columns, rows))]
    if states.numel():
        with on_device(states.device.index):
            function = _function(list_source(), states.device.index)
            for matrices, (of_states, *at) in _parts(states, *of_rows, *of_columns):
                lists = _Lists(*at[: len(of_rows)]), _Lists(*at[len(of_rows) :])
                params = ListParams(of_states, *lists, rows, columns)
                function.launch((rows + columns, matrices, 1), (THREADS, 1, 1), 0, params)
    else:
        for t in (*of_rows[::2], *of_columns[::2]):
            t.zero_()
    none = [] if separate else [None, None]
    return BlockMask(lengths, *of_rows, *none, *of_columns, *none, BLOCK_SIZE=block_size, mask_mod=mask_mod)
