"""``flashlane doctor``: which components flashlane finds on this machine, and what does not work without the others.

:func:`examine` looks for them, and runs one small attention to check its result. It finds packages by their metadata
and imports only what that run needs. A component that is missing or broken never makes it raise.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashlane.jit import cache, sass, toolchain

if TYPE_CHECKING:
    from rich.table import Table

    from flashlane.inspect.gpu_state import GpuState

Status = Literal["ok", "degraded", "missing", "optional"]
"""``optional``: it is missing, and nothing is lost. For the run of a kernel, ``missing`` means a wrong result."""

OLDEST_PYTHON = (3, 10)
OLDEST = {
    "torch": "2.10",
    "numpy": "1.26",
    "triton": "3.6",
    "cuda-bindings": "12.9",
    "matplotlib": "3.8",
    "pandas": "2.0",
    "transformers": "5.0",
    "safetensors": "0.5",
}
"""The oldest versions that pyproject.toml allows. pip refuses others only where flashlane itself is installed by it."""
OLDEST_CAPABILITY = (8, 0)
NVRTC_EXTRA = 'pip install "flashlane[nvrtc]"'
CUDA_TORCH = "install torch for CUDA 13 (pytorch.org, Get started)"
_STYLES: dict[Status, str] = {"ok": "green", "degraded": "yellow", "missing": "red", "optional": "dim"}
_COMMAND_SECONDS = 10
RUN, WRONG = "attention", "a wrong result"
TOLERANCE = {"f16": 4e-3, "f32": 2e-5}
"""The largest absolute error of the run's output that counts as right, by dtype; inputs are normal random numbers."""
FEW_PROCESSES = 3


@dataclass(frozen=True)
class Finding:
    """One component that was looked for."""

    group: str
    name: str
    status: Status
    found: str = ""
    """Version, path or size; empty if it is missing."""
    cost: str = ""
    """What does not work, or works worse, without it; empty if it is here."""
    remedy: str = ""
    """How to get it; empty if it is here."""


@dataclass(frozen=True)
class Report:
    """All findings, in the order they are shown."""

    findings: tuple[Finding, ...]

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    @property
    def can_compile(self) -> bool:
        """Whether device code can be compiled here."""
        return all(self[name].status != "missing" for name in ("NVRTC", "runtime headers"))

    @property
    def can_launch(self) -> bool:
        """Whether kernels can also run here."""
        return self.can_compile and self["GPU"].status == "ok"

    @property
    def wrong(self) -> bool:
        """Whether a kernel ran and its result was wrong."""
        return any(finding.name == RUN and finding.found == WRONG for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One sentence: what this machine can do."""
        if self.wrong:
            return (
                "Attention was run here, and its result is wrong: nothing that this machine computes can be relied on."
            )
        if self.can_launch:
            return "Everything that the GPU kernels need is here, and one that was run gave the right result."
        if self.can_compile:
            return "Kernels compile here but do not run: reference, tiled and SDPA run on the CPU."
        return "Only reference, tiled and SDPA run here; kernels do not compile."

    def to_json(self) -> str:
        """The findings and the verdict, as JSON."""
        body = {
            "can_compile": self.can_compile,
            "can_launch": self.can_launch,
            "verdict": self.verdict,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }
        return json.dumps(body, indent=2)


@dataclass(frozen=True)
class _Package:
    group: str
    distribution: str
    module: str
    cost: str
    remedy: str
    optional: bool = False
    """Whether nothing is lost without it."""

    def examine(self) -> Finding:
        version = _version(self.distribution)
        if version is None and not _importable(self.module):
            status: Status = "optional" if self.optional else "missing"
            return Finding(self.group, self.distribution, status, cost=self.cost, remedy=self.remedy)
        return _old(self.group, self.distribution, version) or Finding(
            self.group, self.distribution, "ok", version or "found, version unknown"
        )


_PACKAGES = (
    _Package("python", "numpy", "numpy", "no attention runs", "pip install numpy"),
    _Package("python", "triton", "triton", "no Triton kernels, no disassembler", "pip install triton (Linux)"),
    _Package("python", "cuda-bindings", "cuda.bindings", "nothing compiles", NVRTC_EXTRA),
)
_PEERS = (
    _Package(
        "peers",
        "flash-attn",
        "flash_attn.flash_attn_interface",  # flash-attn-4 also has a folder flash_attn
        "no FlashAttention-2 row in the bench",
        "pip install flash-attn --no-build-isolation",
    ),
    _Package(
        "peers",
        "flash-attn-3",
        "flash_attn_interface",
        "no FlashAttention-3 row in the bench",
        "build hopper/ of the flash-attention repository",
    ),
    _Package(
        "peers", "flash-attn-4", "flash_attn.cute", "no FlashAttention-4 row in the bench", "pip install flash-attn-4"
    ),
    _Package("peers", "xformers", "xformers", "no xFormers row in the bench", "pip install xformers"),
    _Package("peers", "ffpa-attn", "ffpa_attn", "no ffpa-attn row in the bench", "pip install ffpa-attn"),
    _Package(
        "peers", "flashinfer-python", "flashinfer", "no FlashInfer row in the bench", "pip install flashinfer-python"
    ),
)
_EXTRAS = (
    _Package("extras", "matplotlib", "matplotlib", "no plots", 'pip install "flashlane[plots]"'),
    _Package("extras", "pandas", "pandas", "no data frames of results", "pip install pandas"),
    _Package("extras", "transformers", "transformers", "no `flashlane capture`", 'pip install "flashlane[hf]"'),
    _Package("extras", "safetensors", "safetensors", "no `--qkv FILE.safetensors`", 'pip install "flashlane[hf]"'),
)
_TOOLS = (
    ("ncu", "Nsight Compute", "no counters of a kernel (bandwidth, stalls)", "install Nsight Compute"),
    ("nsys", "Nsight Systems", "no timeline of a whole run", "install Nsight Systems"),
    ("compute-sanitizer", "compute-sanitizer", "no memcheck or racecheck of kernels", "install the CUDA toolkit"),
)


def examine() -> Report:
    """Look for all components on this machine. A missing or broken one never makes it raise."""
    torch = _torch()
    parts: tuple[tuple[str, Callable[[], Finding | Iterable[Finding]]], ...] = (
        ("Python", _python),
        ("OS", _system),
        ("GPU", lambda: _gpus(torch)),
        ("driver", _driver),
        ("torch", lambda: _torch_finding(torch)),
        ("torch CUDA", lambda: _torch_cuda(torch)),
        ("NVRTC", _nvrtc),
        ("runtime headers", _headers),
        ("disassembler", _disassembler),
        *((package.distribution, package.examine) for package in _PACKAGES),
        ("cache", _cache),
        *((package.distribution, package.examine) for package in _PEERS),
        ("FlexAttention", lambda: _flex(torch)),
        ("cuDNN SDPA", lambda: _cudnn(torch)),
        *((label, lambda tool=tool: _tool(*tool)) for tool in _TOOLS for label in (tool[1],)),
        *((package.distribution, package.examine) for package in _EXTRAS),
        ("GPU state", lambda: _states(torch)),
        (RUN, lambda: _attention(torch)),
    )
    return Report(tuple(finding for name, look in parts for finding in _safely(name, look)))


def render(report: Report) -> Table:
    """The findings as a table, in groups."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="flashlane doctor", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("component", no_wrap=True)
    table.add_column("what is here; else what you lose, and how to get it", overflow="fold")
    group = report.findings[0].group if report.findings else ""
    for finding in report.findings:
        if finding.group != group:
            table.add_row("", "", "")
        group = finding.group
        said = [finding.found, finding.cost, finding.remedy and f"get it: {finding.remedy}"]
        # Text, not markup: "flashlane[nvrtc]" is not a style.
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.name), Text("; ".join(filter(None, said)) or "–"))
    return table


def _safely(name: str, look: Callable[[], Finding | Iterable[Finding]]) -> tuple[Finding, ...]:
    try:
        found = look()
        return (found,) if isinstance(found, Finding) else tuple(found)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        cost = f"looking for it failed: {type(error).__name__}: {first_line}"
        return (Finding("broken", name, "missing", cost=cost),)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return Finding("system", "Python", "degraded", version, "nothing is tested there", f"Python {needed} or newer")
    return Finding("system", "Python", "ok", version)


def _system() -> Finding:
    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("system", "OS", "degraded", name, "the GPU kernels are tested on Linux only", "Linux or WSL")
    return Finding("system", "OS", "ok", name)


def _gpus(torch: Any) -> list[Finding]:
    cost = "kernels compile but do not run; reference, tiled and SDPA run on the CPU"
    if torch is None or not torch.cuda.is_available():
        return [Finding("system", "GPU", "missing", cost=cost, remedy="a machine with an NVIDIA GPU, sm_80 or newer")]
    return [_gpu(torch, index) for index in range(torch.cuda.device_count())]


def _gpu(torch: Any, index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    text = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs, "
        f"sm_{properties.major}{properties.minor}"
    )
    name = "GPU" if index == 0 else f"GPU {index}"
    if capability < OLDEST_CAPABILITY:
        return Finding("system", name, "degraded", text, "too old for the mma.sync kernels", "a GPU of sm_80 or newer")
    return Finding("system", name, "ok", text)


def _driver() -> Finding:
    """The driver's own version, from the kernel module, or nvidia-smi where that is not readable."""
    module = Path("/proc/driver/nvidia/version")
    text = (
        module.read_text() if module.is_file() else _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv")
    )
    if found := re.search(r"\b\d{3}\.\d+(\.\d+)?", text):
        return Finding("system", "driver", "ok", f"{found[0]}{_driver_cuda()}")
    return Finding("system", "driver", "missing", cost="nothing runs on a GPU", remedy="install the NVIDIA driver")


def _driver_cuda() -> str:
    """The newest CUDA version that the driver runs."""
    try:
        from cuda.bindings import driver

        code, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError, OSError):
        return ""
    return "" if code else f", CUDA up to {version // 1000}.{version % 1000 // 10}"


def _torch() -> Any:
    try:
        import torch
    except Exception:  # a broken install may raise anything, from OSError to RuntimeError
        return None
    return torch


def _old(group: str, distribution: str, version: str | None) -> Finding | None:
    """What is said of a package that is older than flashlane allows; None of others."""
    oldest = OLDEST.get(distribution)
    if oldest is None or version is None or _numbers(version) >= _numbers(oldest):
        return None
    cost = f"older than flashlane needs: nothing is tested with it, or {distribution} is not used"
    return Finding(group, distribution, "degraded", version, cost, f'pip install "{distribution}>={oldest}"')


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version)[:2])


def _torch_finding(torch: Any) -> Finding:
    if torch is None:
        broken = "it is installed but does not import" if _importable("torch") else ""
        return Finding("python", "torch", "missing", broken, "flashlane does not work at all", "pip install torch")
    return _old("python", "torch", torch.__version__) or Finding("python", "torch", "ok", torch.__version__)


def _torch_cuda(torch: Any) -> Finding:
    version = None if torch is None else torch.version.cuda
    if version is None:
        return Finding("python", "torch CUDA", "missing", "a CPU build", "torch does not see a GPU", CUDA_TORCH)
    if int(version.split(".")[0]) < 13:
        cost = "NVRTC and headers may be missing or too old for sm_100 and up"
        return Finding("python", "torch CUDA", "degraded", version, cost, CUDA_TORCH)
    return Finding("python", "torch CUDA", "ok", version)


def _nvrtc() -> Finding:
    try:
        architectures = [arch for arch in toolchain.supported_architectures() if arch[-1].isdigit()]
        found = f"{toolchain.compiler_version()}: {', '.join(architectures)}"
    except toolchain.OldCompilerError as error:
        cost = f"{error.version} is too old, no kernel compiles"
        return Finding("compiler", "NVRTC", "missing", cost=cost, remedy=f"{CUDA_TORCH}, or cuda-bindings 13")
    except (toolchain.ToolchainError, RuntimeError):
        return Finding("compiler", "NVRTC", "missing", cost="no kernel compiles", remedy=NVRTC_EXTRA)
    return Finding("compiler", "NVRTC", "ok", found)


def _headers() -> Finding:
    try:
        return Finding("compiler", "runtime headers", "ok", str(toolchain.include_directory()))
    except toolchain.ToolchainError:
        return Finding("compiler", "runtime headers", "missing", cost="no kernel compiles", remedy=NVRTC_EXTRA)


def _disassembler() -> Finding:
    tools = sass.disassemblers()
    if tools:
        return Finding("compiler", "disassembler", "ok", tools[0])
    cost = "no SASS and no instruction counts in reports"
    return Finding("compiler", "disassembler", "missing", cost=cost, remedy="pip install triton, or the CUDA toolkit")


def _cache() -> Finding:
    disk = cache.default()
    state = disk.state()
    entries = f"{state.entries} {'entry' if state.entries == 1 else 'entries'}"
    found = f"{disk.folder}: {entries}, {state.bytes / 2**20:.1f} of {disk.limit / 2**20:.0f} MiB"
    remedy = f"set {cache.DIRECTORY_VARIABLE} to a folder that can be written to"
    if not disk.writable():
        return Finding("cache", "cache", "degraded", found, "every process compiles again what is not there", remedy)
    return Finding("cache", "cache", "ok", found)


def _flex(torch: Any) -> Finding:
    remedy = f"torch {OLDEST['torch']} or newer, and triton"
    if torch is None or not _importable("torch.nn.attention.flex_attention"):
        return Finding("peers", "FlexAttention", "missing", cost="no FlexAttention row in the bench", remedy=remedy)
    return Finding("peers", "FlexAttention", "ok", f"torch {torch.__version__}")


def _cudnn(torch: Any) -> Finding:
    version = None
    if torch is not None and torch.version.cuda and torch.backends.cudnn.is_available():
        version = torch.backends.cudnn.version()
    if version is None:
        return Finding(
            "peers", "cuDNN SDPA", "missing", cost="no cuDNN row in the bench", remedy=f"a GPU; {CUDA_TORCH}"
        )
    return Finding("peers", "cuDNN SDPA", "ok", f"cuDNN {version}")


def _tool(command: str, name: str, cost: str, remedy: str) -> Finding:
    folders = [Path(os.environ[home], "bin") for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)]
    where = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders), "/usr/local/cuda/bin"])
    path = shutil.which(command, path=where)
    if path is None:
        return Finding("tools", name, "missing", cost=cost, remedy=remedy)
    return Finding("tools", name, "ok", path)


def _states(torch: Any) -> list[Finding]:
    """Clocks, power limit and other processes of each GPU."""
    from flashlane.inspect.gpu_state import NoState, states

    if torch is None or not torch.cuda.is_available():
        return []
    try:
        found = states(with_processes=True)
    except NoState as error:
        cost = "a lowered clock, a power cap or other processes go unnoticed"
        remedy = f"pip install nvidia-ml-py, or nvidia-smi of the driver ({error})"
        return [Finding("state", "GPU state", "missing", cost=cost, remedy=remedy)]
    return [finding for number, state in enumerate(found) for finding in _state(state, number)]


def _state(state: GpuState, number: int) -> list[Finding]:
    which = "" if number == 0 else f" {number}"
    sm = f"SM {_rounded(state.sm_clock)} of {_rounded(state.sm_clock_max)} MHz"
    clocks = f"{sm}, memory {_rounded(state.memory_clock)} MHz"
    from flashlane.inspect.gpu_state import IDLE

    slowed = state.slowed_by
    findings = [
        Finding(
            "state",
            f"clocks{which}",
            "degraded" if slowed else "ok",
            clocks + (f", slowed by {', '.join(slowed)}" if slowed else " (idle)" if state.reasons & IDLE else ""),
            "times are those of a slowed GPU" if slowed else "",
            "flashlane monitor shows it live" if slowed else "",
        )
    ]
    low = state.power_limit is not None and state.power_default is not None and state.power_limit < state.power_default
    power = f"{_rounded(state.power_limit)} W, of which {_rounded(state.power)} W are drawn now"
    findings.append(
        Finding(
            "state",
            f"power limit{which}",
            "degraded" if low else "ok",
            power + (f"; the card's default is {_rounded(state.power_default)} W" if low else ""),
            "clocks fall under load" if low else "",
            f"nvidia-smi --power-limit {_rounded(state.power_default)}, as root" if low else "",
        )
    )
    others = [process for process in state.processes if process.pid != os.getpid()]
    named = [f"{Path(p.name).name} (pid {p.pid}{_gib(p.memory)})" for p in others[:FEW_PROCESSES]]
    named += [f"{len(others) - FEW_PROCESSES} more"] if len(others) > FEW_PROCESSES else []
    findings.append(
        Finding(
            "state",
            f"other processes{which}",
            "degraded" if others else "ok",
            ", ".join(named) or "none",
            "times are shared with them" if others else "",
            "wait for them, or end them" if others else "",
        )
    )
    return findings


def _rounded(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _gib(size: int | None) -> str:
    return "" if size is None else f", {size / 2**30:.1f} GiB"


def _attention(torch: Any) -> Finding:
    """Run the kernel that is chosen for a small problem, and compare it with the formula in full precision."""
    if torch is None:
        return Finding("run", RUN, "missing", cost="nothing can be run", remedy="pip install torch")
    import flashlane
    from flashlane.core.problem import AttentionProblem, Inputs
    from flashlane.reference.naive import reference_attention

    on_gpu = torch.cuda.is_available()
    device, name = ("cuda", "f16") if on_gpu else ("cpu", "f32")
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float16 if on_gpu else torch.float32
    q, k, v = (torch.randn(1, 192, 2, 64, generator=generator, device=device).to(dtype) for _ in range(3))
    # On a CPU, auto may choose the formula itself, which must not be compared with itself.
    chosen = flashlane.explain(q, k, v, causal=True).chosen if on_gpu else "tiled"
    start = time.perf_counter()
    out = flashlane.flash_attn_func(q, k, v, causal=True, kernel=chosen)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    inputs = Inputs(*(t.float() for t in (q, k, v)))
    expected, _ = reference_attention(AttentionProblem.from_inputs(inputs, causal=True), inputs)
    error = (out.float() - expected.float()).abs().max().item()
    if not error <= TOLERANCE[name]:  # NaN too
        cost = f"{chosen} in {name} is off by {error:.1e}; at most {TOLERANCE[name]:.0e} is right"
        return Finding("run", RUN, "missing", WRONG, cost, "flashlane bench --check says which kernels are wrong")
    where = "on the GPU" if on_gpu else "on the CPU"
    return Finding("run", RUN, "ok", f"{chosen} {where}, {name}: right to {error:.1e}, {seconds:.1f} s with loading")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    """Whether a module can be found, without importing it: for a dotted name, in the folders of its parent."""
    top, *submodules = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or not submodules:
        return spec is not None
    places = [Path(root, *submodules) for root in spec.submodule_search_locations or ()]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def _output(*command: str) -> str:
    """The standard output of a command; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
