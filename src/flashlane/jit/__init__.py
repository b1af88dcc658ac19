"""Compile CUDA C++ at first use, keep the result on disk, launch it on torch's stream; budgets and SASS too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlane.jit.budget import LIMITS, ArchLimits, Occupancy, limits, occupancy, shared_limit
from flashlane.jit.compiler import (
    Compiled,
    CompileError,
    KernelSource,
    alongside,
    compile,
    compile_together,
    constants_header,
)
from flashlane.jit.launch import Function, LaunchError, load, rated_bandwidth
from flashlane.jit.report import CompileReport
from flashlane.jit.toolchain import ToolchainError
from flashlane.lazy import loader

if TYPE_CHECKING:
    from flashlane.jit.sass import disassemble, instruction_counts

__all__ = [
    "LIMITS",
    "ArchLimits",
    "CompileError",
    "CompileReport",
    "Compiled",
    "Function",
    "KernelSource",
    "LaunchError",
    "Occupancy",
    "ToolchainError",
    "alongside",
    "compile",
    "compile_together",
    "constants_header",
    "disassemble",
    "instruction_counts",
    "limits",
    "load",
    "occupancy",
    "rated_bandwidth",
    "shared_limit",
]

__getattr__ = loader(__name__, dict.fromkeys(("disassemble", "instruction_counts"), "flashlane.jit.sass"))
