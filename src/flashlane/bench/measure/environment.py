"""Describes what a figure was measured on: device, driver, versions, commit, date and command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

COMMAND = "FLASHLANE_COMMAND"
PACKAGES = (
    "triton",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "flash-attn",
    "flash-attn-4",
    "xformers",
    "ffpa-attn",
    "flashinfer-python",
    "transformers",
    "diffusers",
)


def environment(device: torch.device) -> dict[str, object]:
    """The facts of a results file about machine, software and command; every value is plain JSON, W and MHz as text."""
    return {
        **({"script": script} if (script := script_path()) else {}),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": _command(),
        "device": device_name(device),
        "arch": _arch(device),
        "driver": _nvidia_smi("driver_version", device),
        "power_limit_w": _nvidia_smi("power.limit", device),
        "clock_mhz": _nvidia_smi("clocks.sm", device),
        "clock_max_mhz": _nvidia_smi("clocks.max.sm", device),
        "flashlane": version("flashlane"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        **{name: found for name in PACKAGES if (found := version(name)) is not None},
        "python": platform.python_version(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        **({} if device.type == "cuda" else _load()),
    }


def _load() -> dict[str, object]:
    """The load of a CPU before anything is measured: runnable processes, averaged over a minute, and cores."""
    try:
        return {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
    except (AttributeError, OSError):
        return {}


def device_name(device: torch.device) -> str:
    """The product name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit that this package's source tree is at, ``+dirty`` when it differs from it.

    Outside git, what ``FLASHLANE_COMMIT`` says (for a tree that was copied to a GPU machine), or None.
    """
    package = Path(__file__).resolve().parents[2]
    head = _output("git", "-C", str(package), "rev-parse", "--short=12", "HEAD")
    if head is None:
        return os.environ.get("FLASHLANE_COMMIT")
    return head + ("+dirty" if _output("git", "-C", str(package), "status", "--porcelain", "--", package) else "")


def child_environment() -> dict[str, str]:
    """The environment for a Python process that this one starts, in which it imports this same package."""
    source = str(Path(__file__).resolve().parents[3])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), COMMAND: _command()}


def _command() -> str:
    """The command that the user typed; a process that the bench started gets it from the environment.

    Of absolute paths it has the last part alone: the folders of one machine say nothing on another.
    """
    if COMMAND in os.environ:
        return os.environ[COMMAND]
    program = Path(sys.argv[0])
    words = ["flashlane" if program.stem in ("flashlane", "__main__") else program.name, *sys.argv[1:]]
    return " ".join(re.sub(r"(^|(?<=[=,]))/[^=,]*/(?=[^/=,])", "", word) for word in words)


def script_path() -> str | None:
    """The script of ``benchmarks/scripts`` that this process runs, as a path in the repository; None for another."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    where = Path(program).resolve() if program else None
    return "/".join(where.parts[-3:]) if where and where.parts[-3:-1] == ("benchmarks", "scripts") else None


def _arch(device: torch.device) -> str | None:
    from flashlane.core.problem import arch_of

    return arch_of(device)


def _nvidia_smi(query: str, device: torch.device) -> str | None:
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    # By UUID: nvidia-smi's own index does not follow CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return _output("nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits")


def _output(*command: object) -> str | None:
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
