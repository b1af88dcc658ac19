"""Where sequences lie in the tensors of a call: the Python side of ``cuda/attention/seqlen.cuh``."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem, Inputs

POINTERS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "batch_idx", "block_table")
"""Inputs that tell where sequences lie; the parameters have the same names."""


@dataclass(frozen=True)
class SeqlenConfig:
    """Which ways of placing sequences a kernel is compiled with; none of them: dense tensors."""

    varlen: bool = False
    """Sequences are packed one after another."""
    cache: bool = False
    """Lengths, first rows or batch rows of K and V come by sequence."""
    paged: bool = False
    """K and V lie in pages."""

    @classmethod
    def of(cls, problem: AttentionProblem) -> SeqlenConfig:
        """What a problem needs, and no more."""
        cache = problem.seqused_k or problem.leftpad_k or problem.batch_idx
        return cls(varlen=problem.varlen, cache=cache, paged=problem.paged)

    @property
    def dense(self) -> bool:
        """Whether every sequence is a row of the batch axis, of one length."""
        return not (self.varlen or self.cache or self.paged)

    def constants(self) -> tuple[tuple[str, bool], ...]:
        """Name and value of each compile-time constant."""
        return tuple((field.name.upper(), getattr(self, field.name)) for field in fields(self))

    def words(self) -> list[str]:
        """What is on, for tables."""
        return [field.name for field in fields(self) if getattr(self, field.name)]


SEQLEN_EXAMPLES = (
    {"varlen": True},
    {"seqused_k": True},
    {"seqused_k": True, "page_size": 64},
    {"seqused_k": True, "page_size": 12},
)
"""Fields of problems that lead through what a kernel with a :class:`SeqlenConfig` can be compiled with."""


def page_box_rows(problem: AttentionProblem, block: int, unit: int) -> int:
    """Rows of a TMA box of K and V in pages: the largest multiple of ``unit`` that divides a page and a key block.

    It is 0 where there are no pages, and where the rows of a box could begin anywhere in a page's units.
    """
    if not problem.page_size or problem.page_size % unit or problem.leftpad_k:
        return 0
    return max(rows for rows in range(unit, block + 1, unit) if problem.page_size % rows == block % rows == 0)


class SeqlenParams(ctypes.Structure):
    """Mirror of ``SeqlenParams``."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("batch", "seqlen_q", "seqlen_k", "bottom_right", "page_size")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in ("table_batch", "table_page")),
    )

    @classmethod
    def of(cls, problem: AttentionProblem) -> SeqlenParams:
        """All but addresses and strides, of dense tensors or of the longest sequences."""
        return cls(
            page_size=problem.page_size,
            batch=problem.batch,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            bottom_right=problem.alignment == "bottom-right",
        )

    def point_to(self, pointers: tuple[int, ...]) -> None:
        """Set what the function of :func:`seqlen_pointers_of` gives for a call, for the launch that follows."""
        _POINTERS_AND_STRIDES.pack_into(self, SeqlenParams.cu_seqlens_q.offset, *pointers)


_POINTERS_AND_STRIDES = struct.Struct(f"{len(POINTERS)}P2q")
"""The fields of :class:`SeqlenParams` from the first pointer on, which lie one after another."""


def given_pointers(problem: AttentionProblem) -> tuple[str, ...]:
    """Which of :data:`POINTERS` the calls of a problem have."""
    given = {"cu_seqlens_q": problem.varlen, "cu_seqlens_k": problem.varlen, "block_table": problem.paged}
    return tuple(name for name in POINTERS if given.get(name) or getattr(problem, name, False))


def seqlen_pointers_of(problem: AttentionProblem) -> Callable[[Inputs], tuple[int, ...]]:
    """Gives addresses of the lengths and the block table of a problem's calls, 0 for what they have not, and the
    strides of the table."""
    return _pointers_of(given_pointers(problem))


@functools.cache
def _pointers_of(given: tuple[str, ...]) -> Callable[[Inputs], tuple[int, ...]]:
    """Code without loops: each call runs it."""
    addresses = [f"inputs.{name}.data_ptr()" if name in given else "0" for name in POINTERS]
    strides = "*inputs.block_table.stride()" if "block_table" in given else "0, 0"
    return eval(f"lambda inputs: ({', '.join(addresses)}, {strides})")


def plain_inputs_of(problem: AttentionProblem) -> Callable[[Inputs], Inputs]:
    """:func:`plain_seqlen_inputs` for the calls of a problem."""
    return _plain_inputs_of(given_pointers(problem))


@functools.cache
def _plain_inputs_of(given: tuple[str, ...]) -> Callable[[Inputs], Inputs]:
    contiguous = [f"inputs.{name}.is_contiguous()" for name in given]
    code = f"lambda inputs: inputs if {' and '.join(contiguous) or True} else plain_seqlen_inputs(inputs)"
    return eval(code, {"plain_seqlen_inputs": plain_seqlen_inputs})


def plain_seqlen_inputs(inputs: Inputs) -> Inputs:
    """The same inputs, with lengths and block table contiguous. Keep them until the launch is enqueued."""
    changes = {}
    for name in POINTERS:
        tensor = getattr(inputs, name)
        if tensor is not None and not tensor.is_contiguous():
            changes[name] = tensor.contiguous()
    return replace(inputs, **changes) if changes else inputs
