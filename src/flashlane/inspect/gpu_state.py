"""The current state of this machine's GPUs: clocks, power, temperature, memory, utilisation and their processes.

It is read through NVML if the package nvidia-ml-py is installed, else from the driver's program nvidia-smi.
"""

from __future__ import annotations

import contextlib
import csv
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

SECONDS = 20
"""Limit of one call of nvidia-smi."""
MIB = 2**20
IDLE = 0x1
"""The bit of the clock reasons that is set while nothing runs."""
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Why clocks are lower than they could be: bits of NVML's clocksEventReasons."""
QUERY = (
    "uuid", "name", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw",
    "enforced.power.limit", "power.default_limit", "memory.used", "memory.total", "utilization.gpu",
    "clocks_throttle_reasons.active",
)  # fmt: skip


class NoState(RuntimeError):
    """The state of the GPUs cannot be read here; the message says what is missing."""


@dataclass(frozen=True)
class Process:
    """A process that computes on a GPU."""

    pid: int
    name: str
    memory: int | None
    """Bytes."""


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment, in MHz, watts, degrees Celsius, bytes and percent; None is what the GPU does not give."""

    uuid: str
    name: str
    sm_clock: float | None = None
    sm_clock_max: float | None = None
    memory_clock: float | None = None
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    utilisation: float | None = None
    reasons: int = 0
    processes: tuple[Process, ...] = ()

    @property
    def slowed_by(self) -> tuple[str, ...]:
        """The reasons why its clocks are lower than they could be."""
        return tuple(text for bit, text in REASONS.items() if self.reasons & bit)


def states(with_processes: bool = False) -> list[GpuState]:
    """The state of every GPU of this machine.

    Raises:
        NoState: neither NVML nor nvidia-smi answers; the message says what is missing.
    """
    problems = []
    for read in (_by_nvml, _by_nvidia_smi):
        try:
            found = read(with_processes)
        except NoState as error:
            problems.append(str(error))
        else:
            if found:
                return found
            problems.append("there is no NVIDIA GPU")
    raise NoState("; ".join(dict.fromkeys(problems)))


# --- NVML ---


def _by_nvml(with_processes: bool) -> list[GpuState]:
    with _nvml() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_nvml_state(nvml, handle, with_processes) for handle in handles]


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise NoState("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except Exception as error:  # the library has a class of its own for each of its codes
        raise NoState(f"NVML does not answer: {error}") from None
    try:
        yield pynvml
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _nvml_state(nvml: Any, handle: Any, with_processes: bool) -> GpuState:
    def ask(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception:  # "not supported", say: a figure less
            return None

    def watts(read: Callable[[Any], int]) -> float | None:
        found = ask(lambda: read(handle))
        return None if found is None else found / 1000

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    running = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) if with_processes else ()
    return GpuState(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        sm_clock=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        sm_clock_max=ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_clock=ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        temperature=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        power=watts(nvml.nvmlDeviceGetPowerUsage),
        power_limit=watts(nvml.nvmlDeviceGetEnforcedPowerLimit),
        power_default=watts(nvml.nvmlDeviceGetPowerManagementDefaultLimit),
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        utilisation=None if rates is None else rates.gpu,
        reasons=ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0,
        processes=tuple(
            Process(p.pid, _text(ask(lambda p=p: nvml.nvmlSystemGetProcessName(p.pid)) or "?"), p.usedGpuMemory)
            for p in running or ()
        ),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- nvidia-smi ---


def _by_nvidia_smi(with_processes: bool) -> list[GpuState]:
    states = [_smi_state(line) for line in _smi(f"--query-gpu={','.join(QUERY)}")]
    if not with_processes:
        return states
    processes: dict[str, list[Process]] = {}
    for uuid, pid, name, used in _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        memory = _number(used)
        entry = Process(int(_number(pid) or 0), name, None if memory is None else int(memory * MIB))
        processes.setdefault(uuid, []).append(entry)
    return [replace(state, processes=tuple(processes.get(state.uuid, ()))) for state in states]


def _smi(query: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NoState("the program nvidia-smi (it comes with the driver) is not on the PATH")
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoState(f"nvidia-smi does not answer: {error}") from None
    if ended.returncode:
        said = (ended.stdout + ended.stderr).strip().splitlines() or ["no reason given"]
        raise NoState(f"nvidia-smi failed: {said[0]}")
    return [[cell.strip() for cell in line] for line in csv.reader(ended.stdout.splitlines()) if line]


def _smi_state(line: Sequence[str]) -> GpuState:
    uuid, name, *figures, reasons = line
    numbers = [_number(text) for text in figures]
    sm, sm_max, memory, temperature, power, limit, default, used, total, busy = numbers
    return GpuState(
        uuid, name, sm, sm_max, memory, temperature, power, limit, default,
        memory_used=None if used is None else used * MIB,
        memory_total=None if total is None else total * MIB,
        utilisation=busy,
        reasons=int(reasons, 16) if reasons.startswith("0x") else 0,
    )  # fmt: skip


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
