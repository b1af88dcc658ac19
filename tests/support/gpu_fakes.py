"""Machines with GPUs that are not there, for the tests of what looks at them: a program nvidia-smi, a module pynvml."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

IDLE_LINE = "GPU-a, NVIDIA H200, 1980, 1980, 3201, 35, 75.5, 700.00, 700.00, 4, 143771, 0, 0x0000000000000001"
SLOW_LINE = "GPU-b, NVIDIA H200, 1200, 1980, 3201, 78, 399.2, 400.00, 700.00, 3072, 143771, 97, 0x0000000000000004"
PROCESSES = "GPU-b, 4242, /opt/train.py, 3072"


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """A program ``nvidia-smi`` on the PATH that answers with these lines; no NVML next to it."""
    program = folder / "nvidia-smi"
    said = "\\n".join(lines)
    program.write_text(
        "#!/bin/sh\n"
        f"case \"$1\" in --query-gpu=*) printf '{said}\\n';; --query-compute-apps=*) echo '{PROCESSES}';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return program


class Nvml:
    """The module ``pynvml`` of a machine with one GPU, which gives no temperature."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        self.looks = 0

    def __getattr__(self, name: str) -> object:
        answers = {
            "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": b"GPU-c", "nvmlDeviceGetName": "NVIDIA H100", "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetPowerUsage": 350_000, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=2**30, total=80 * 2**30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50),
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=2**20)],
            "nvmlSystemGetProcessName": b"/usr/bin/python3", "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20,
        }  # fmt: skip
        if name == "nvmlDeviceGetClockInfo":
            return self._clock
        if name not in answers:
            raise AttributeError(name)
        return lambda *_: answers[name]

    def _clock(self, handle: object, kind: int) -> int:
        self.looks += 1
        return 1000 + 100 * self.looks if kind == self.NVML_CLOCK_SM else 2619
