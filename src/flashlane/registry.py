"""Kernel: a tag, what it can do and what it needs; and the table of all kernels.

A kernel is added by one line in :data:`MODULES` naming the module that defines it; the module calls
:func:`register`. Everything else (dispatch, ``explain``, the bench, the compile tests) reads the table.
"""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from flashlane.jit import Compiled, KernelSource
    from flashlane.problem import AttentionProblem, Inputs

MODULES = (
    "flashlane.reference",
    "flashlane.tiled",
    "flashlane.kernels.fa1.flash_attention_1",
    "flashlane.kernels.mma.naive",
    "flashlane.kernels.mma.attention",
)


class Kernel(ABC):
    """One implementation of attention's forward pass, named by its tag."""

    tag: str
    family: str
    summary: str
    """One line: the idea."""
    source: str
    """Paper, or PTX section, that it comes from."""
    priority: int = 0
    """``auto`` takes the supporting kernel with the highest :meth:`preference`, which starts from this."""

    @abstractmethod
    def supports(self, problem: AttentionProblem) -> str | None:
        """None when the kernel can run the problem, else the reason in words."""

    @abstractmethod
    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the output ``(b, sq, h, dv)`` and the LSE, f32 ``(b, h, sq)``, natural logarithm.

        Varlen: ``(total_q, h, dv)`` and ``(h, total_q)``. Both are allocated by the caller and fully written.
        """

    def preference(self, problem: AttentionProblem) -> float:
        """How much ``auto`` wants this kernel for a problem it supports; data of the kernel's heuristic."""
        return self.priority

    def low_precision_reference(self, problem: AttentionProblem) -> str:
        """Which emulation the peers' relative rule compares with: see ``flashlane.bench.check``."""
        return "standard"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag}>"


@dataclass(frozen=True)
class Resources:
    """What one launch of a compiled configuration takes."""

    threads: int
    shared_memory: int
    """Dynamic shared memory of one block, bytes."""


class DeviceKernel(Kernel):
    """A kernel written in CUDA C++ and compiled by :mod:`flashlane.jit`."""

    architectures: tuple[str, ...] = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
    """The architectures that CI compiles every shipped configuration for."""

    @abstractmethod
    def config(self, problem: AttentionProblem) -> Any:
        """The configuration (a frozen dataclass) that the heuristic gives to a supported problem."""

    @abstractmethod
    def kernel_source(self, config: Any) -> KernelSource:
        """The device code and the compile-time constants of a configuration."""

    @abstractmethod
    def resources(self, config: Any) -> Resources:
        """Threads and shared memory of one block of a configuration."""

    @abstractmethod
    def shipped(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Every configuration that the heuristic can choose, with the architectures it can be chosen on."""

    def compile(self, config: Any, arch: str) -> Compiled:
        """Compile a configuration (or load it from the disk cache)."""
        from flashlane import jit

        return jit.compile(self.kernel_source(config), arch)


_KERNELS: dict[str, Kernel] = {}
_loaded = False


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the table; its tag must be new."""
    if kernel.tag in _KERNELS:
        raise ValueError(f"tag {kernel.tag!r} is registered already")
    _KERNELS[kernel.tag] = kernel
    return kernel


def kernels() -> tuple[Kernel, ...]:
    """All kernels, in the order of the table."""
    global _loaded
    if not _loaded:
        for module in MODULES:
            importlib.import_module(module)
        _loaded = True
    return tuple(_KERNELS.values())


def get(tag: str) -> Kernel:
    """The kernel of that tag.

    Raises:
        ValueError: no kernel has it; the message names the nearest tags.
    """
    table = {kernel.tag: kernel for kernel in kernels()}
    if tag not in table:
        raise ValueError(f"kernel is {tag!r}, which no kernel is called; {suggest(tag, tuple(table))}")
    return table[tag]


def suggest(word: str, known: tuple[str, ...]) -> str:
    """``did you mean …`` with the nearest known words, or the list of them all."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5) or [name for name in known if word in name][:3]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}"
