"""The two ceilings of a device, measured: how fast it copies, and how fast it multiplies matrices.

Source: Williams, Waterman and Patterson, Roofline (2009). The copy rate counts a byte read and a byte written. The
matrix rate is that of torch's own product (cuBLAS on a GPU) of large square matrices. A Hopper GPU has faster
instructions than ``mma.sync``, so that the ceiling of ``mma.sync`` is measured separately, with operands in registers
(``lessons/ceiling.py``); kernels of ``mma.sync`` are compared with that ceiling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlane.bench.measure.results import Row
from flashlane.bench.measure.timing import Settings, clock_for
from flashlane.core.files import parse_json
from flashlane.core.problem import DTYPES, AttentionProblem
from flashlane.core.registry import Kernel

FORMAT = "flashlane-ceilings/1"
OLD_FORMAT, OLD_KEY = "flashlane-roofs/1", "roofs"
"""The format and the key of files that earlier versions wrote."""
GPU_COPY_BYTES, CPU_COPY_BYTES = 1 << 30, 1 << 26
GPU_MATRIX, CPU_MATRICES = 8192, (256, 512, 1024)
REPEATS = 7


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device."""

    copy: float
    """GB/s, the sum of bytes read and bytes written."""
    matrix: dict[str, float] = field(default_factory=dict)
    """TFLOP/s of torch's matrix product by dtype."""
    mma: dict[str, float] = field(default_factory=dict)
    """TFLOP/s of ``mma.sync`` with f32 accumulators by dtype; empty for a device without that instruction."""

    def rate(self, dtype: str, tag: str = "") -> float | None:
        """The matrix rate that limits a kernel, in TFLOP/s: that of ``mma.sync`` for kernels that multiply with it."""
        return (self.mma.get(dtype) if tag.startswith("mma(") else None) or self.matrix.get(dtype)

    def attainable(self, intensity: float, dtype: str, tag: str = "") -> float | None:
        """The TFLOP/s that both ceilings allow at an intensity in FLOP/byte; None for a dtype that was not measured."""
        rate = self.rate(dtype, tag)
        return None if rate is None else min(rate, intensity * self.copy * 1e-3)

    def ridge(self, dtype: str, tag: str = "") -> float | None:
        """The intensity in FLOP/byte above which the matrix rate is the lower ceiling."""
        rate = self.rate(dtype, tag)
        return None if rate is None else rate / (self.copy * 1e-3)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def measure_rates(device: torch.device, dtypes: tuple[str, ...]) -> DeviceRates:
    """Measure a device; a process does it once for the same dtypes."""
    with torch.no_grad():
        if device.type != "cuda":
            # A CPU's attention computes 16-bit types in f32, whose product is mostly the faster one.
            rates = {dtype: matrix_rate(device, DTYPES[dtype]) for dtype in {_on_cpu(dtype) for dtype in dtypes}}
            return DeviceRates(copy_rate(device), {dtype: rates[_on_cpu(dtype)] for dtype in dtypes})
        matrix = {dtype: matrix_rate(device, DTYPES[dtype]) for dtype in dtypes}
        mma = {dtype: ceiling(device.index or 0, dtype, "f32") for dtype in dtypes if dtype in ("f16", "bf16")}
        return DeviceRates(copy_rate(device), matrix, mma)


def _on_cpu(dtype: str) -> str:
    return "f64" if dtype == "f64" else "f32"


def copy_rate(device: torch.device) -> float:
    """GB/s of a copy of a buffer much larger than every cache."""
    size = GPU_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _milliseconds(lambda: target.copy_(source), device) * 1e-6


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of the product of two random square matrices; on a CPU the best of several sizes."""
    sizes = (GPU_MATRIX,) if device.type == "cuda" else CPU_MATRICES
    return max(_product(size, device, dtype) for size in sizes)


def _product(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _milliseconds(functools.partial(torch.mm, a, b, out=out), device) * 1e-9


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of the fastest of :data:`REPEATS` calls, because a ceiling is a rate that can be reached."""
    clock = clock_for(device, Settings())
    clock.time(call, 2)
    return min(clock.time(call, REPEATS))


def is_rates_file(body: Any) -> bool:
    """Whether a parsed JSON file is one that ``flashlane roofline`` wrote."""
    return isinstance(body, dict) and body.get("format") in (FORMAT, OLD_FORMAT)


def stored_ceilings(body: Mapping[str, Any]) -> Any:
    """The ceilings in a file or in the environment of a run, also one of an earlier version; None if absent."""
    return body.get("ceilings") or body.get(OLD_KEY)


def rates_of(body: Any, path: str) -> DeviceRates:
    """The ceilings in a JSON object.

    Raises:
        ValueError: the object is damaged; the message has ``path``.
    """
    try:
        tables = {name: {str(k): _rate(v) for k, v in dict(body.get(name) or {}).items()} for name in ("matrix", "mma")}
        return DeviceRates(_rate(body["copy"]), **tables)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} has damaged ceilings: {type(error).__name__} {error}") from None


def _rate(value: Any) -> float:
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{value} is not a rate")
    return float(value)


@dataclass(frozen=True)
class Placed:
    """One timed row and the ceilings at its intensity."""

    problem: str
    tag: str
    kind: str
    dtype: str
    intensity: float
    """FLOP/byte, where each input is read once and each output is written once."""
    tflops: float
    attainable: float
    """The TFLOP/s that both ceilings allow."""
    ridge: float

    @property
    def share(self) -> float:
        """``tflops / attainable``."""
        return self.tflops / self.attainable

    @property
    def lower_ceiling(self) -> str:
        """The ceiling that is lower at this intensity."""
        return "matrix rate" if self.intensity >= self.ridge else "copy rate"

    @property
    def bound_by(self) -> str:
        """What limits the rate: the lower ceiling, or neither."""
        return "neither" if self.share < LATENCY_SHARE else self.lower_ceiling


LATENCY_SHARE = 0.15
"""Below this share of the lower ceiling, launches, latency or the host limit the rate, and neither ceiling does."""


def place(rows: Iterable[Row], ceilings: DeviceRates) -> list[Placed]:
    """The timed rows of all dtypes that have a ceiling, in their order."""
    points = []
    for row in rows:
        dtype = str(row.sizes.get("dtype"))
        if row.timing is None or not row.tflops or ceilings.rate(dtype, row.tag) is None:
            continue
        intensity = row.tflops * row.timing.median * 1e9 / bytes_of(row)
        attainable, ridge = ceilings.attainable(intensity, dtype, row.tag), ceilings.ridge(dtype, row.tag)
        points.append(Placed(row.problem, row.tag, row.kind, dtype, intensity, row.tflops, attainable, ridge))
    return points


def bytes_of(row: Row) -> int:
    """The least bytes that a row's problem moves."""
    from flashlane.bench.measure.flops import least_bytes
    from flashlane.bench.measure.grid import make_problem

    s = row.sizes
    problem = make_problem(
        s["batch"], s["heads"], s["seqlen_q"], s["head_dim"], DTYPES[s["dtype"]], kv_heads=s["kv_heads"],
        seqlen_k=s["seqlen_k"], head_dim_v=s.get("head_dim_v"),
    )  # fmt: skip
    return least_bytes(problem, row.direction)


def sentence(points: list[Placed]) -> str:
    """A sentence on what bounds one problem, and what share of it the fastest kernel and the fastest peer reach."""
    best = {kind: max((p for p in points if p.kind == kind), key=lambda p: p.tflops, default=None)
            for kind in ("kernel", "peer")}  # fmt: skip
    placed = [p for p in best.values() if p is not None]
    first = placed[0]
    side = "above" if first.intensity >= first.ridge else "below"
    text = (
        f"{first.intensity:.0f} FLOP/byte, {side} the ridge at {first.ridge:.0f}: the {first.lower_ceiling} bounds it"
    )
    if all(p.share < LATENCY_SHARE for p in placed):
        text = (
            f"{first.intensity:.0f} FLOP/byte; neither ceiling bounds it, everything is below "
            f"{LATENCY_SHARE:.0%} of them: launches, latency or the host do"
        )
    reach = [f"{p.tag} reaches {p.tflops:.3g} of {p.attainable:.3g} TFLOP/s ({p.share:.0%})" for p in placed]
    return f"{first.problem}: {text}; {', '.join(reach)}."


def read_rates_file(path: Path, device: str) -> DeviceRates:
    """The ceilings of a file that ``flashlane roofline`` wrote on a device.

    Raises:
        ValueError: the file cannot be read, is not such a file, or was measured on another device.
    """
    try:
        body = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--ceilings: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"--ceilings: {path} is not valid JSON: {error}") from None
    if not is_rates_file(body):
        raise ValueError(f"--ceilings: {path} is not a file of flashlane roofline")
    measured_on = (body.get("environment") or {}).get("device")
    if measured_on != device:
        raise ValueError(f"--ceilings: {path} was measured on {measured_on}, the results on {device}")
    return rates_of(stored_ceilings(body) or {}, f"--ceilings: {path}")


# --- the ceiling of mma.sync

FAMILY = "mma"
"""The kernels whose products are ``mma.sync`` m16n8k16."""


def accumulators(kernel: Kernel, problem: AttentionProblem) -> tuple[str, str]:
    """The accumulator dtypes of QKᵀ and PV, each ``f32`` or ``f16``."""
    said = dict(
        item.strip().split("=", 1) for item in kernel.low_precision_reference(problem).split(",") if "=" in item
    )
    return said.get("scores", "f32"), said.get("out", "f32")


def share_of_ceiling(
    kernel: Kernel | None, problem: AttentionProblem, tflops: float | None, device: torch.device
) -> float | None:
    """TFLOP/s divided by the ``mma.sync`` rate of the device; None for other kernels, dtypes and devices.

    If the two products accumulate in different dtypes, the ceiling is the rate of doing one product after the other.
    """
    if kernel is None or kernel.family != FAMILY or device.type != "cuda" or not tflops:
        return None
    if problem.dtype_name not in ("f16", "bf16"):
        return None
    rates = [ceiling(device.index or 0, problem.dtype_name, kind) for kind in accumulators(kernel, problem)]
    work = (problem.head_dim, problem.head_dim_v)
    return tflops * sum(part / rate for part, rate in zip(work, rates, strict=True)) / sum(work)


@functools.cache
def ceiling(device: int, dtype: str, accumulate: str) -> float:
    """TFLOP/s of ``mma.sync`` loops on registers; the first call takes about a third of a second."""
    from flashlane.lessons.ceiling import mma_ceiling

    return mma_ceiling(dtype, accumulate, device=device)
