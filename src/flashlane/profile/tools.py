"""The profilers that are no part of this package: where each is, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flashlane.bench.measure.environment import child_environment


def run_tool(name: str, words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a profiler's command line to its end, whatever its status.

    Raises:
        RuntimeError: it did not start, or did not end in that time.
    """
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=seconds, check=False, env=child_environment()
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} did not end within {seconds:g} s") from None
    except OSError as error:
        raise RuntimeError(f"{name} cannot be run: {error.strerror or error}") from None


@dataclass(frozen=True)
class Tool:
    """A program of NVIDIA's."""

    command: str
    name: str
    packages: str
    """What the toolkit's own packages are called."""

    @property
    def path(self) -> str | None:
        """Where it is: on PATH, or in the CUDA toolkit that CUDA_HOME names; None when it is in neither."""
        found = shutil.which(self.command)
        if found is None and (home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
            found = shutil.which(str(Path(home) / "bin" / self.command))
        return found

    @property
    def remedy(self) -> str:
        """How to get it, in one sentence."""
        return (
            f"{self.command} ({self.name}) is not on the PATH nor in CUDA_HOME: it comes with the CUDA toolkit "
            f"(package {self.packages}), or alone from developer.nvidia.com"
        )

    def need(self, name: str) -> str:
        """Its path.

        Raises:
            ValueError: it is not there; the message begins with ``name``, the option that asked, and says the remedy.
        """
        if self.path is None:
            raise ValueError(f"{name}: {self.remedy}")
        return self.path


NCU = Tool("ncu", "Nsight Compute", "cuda-nsight-compute")
NSYS = Tool("nsys", "Nsight Systems", "cuda-nsight-systems")


def need_ncu(device: torch.device, name: str) -> str:
    """The path of Nsight Compute, for a CUDA device.

    Raises:
        ValueError: the device is no GPU, or the tool is not there.
    """
    if device.type != "cuda":
        raise ValueError(f"{name} reads the counters of an NVIDIA GPU; the device is {device}")
    return NCU.need(name)
