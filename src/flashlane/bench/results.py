"""What a run of the bench found, and its files: JSON with everything, CSV with one line a row.

A file is written beside its place and moved over it, so that a reader sees the old one or the new one, never half.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashlane.bench.check import Verdict
from flashlane.bench.compile_report import Usage
from flashlane.bench.timing import Timing

FORMAT = "flashlane-bench/1"
OK, FAIL, ERROR, UNCHECKED = "ok", "FAIL", "error", "unchecked"


@dataclass(frozen=True)
class Row:
    """One implementation on one problem."""

    problem: str
    sizes: dict[str, Any]
    tag: str
    kind: str
    """``kernel`` (of the registry) or ``baseline``."""
    status: str
    """``ok``, ``FAIL`` (its check), ``error`` (it raised) or ``unchecked``."""
    message: str = ""
    """Why, when the status is not ``ok``."""
    values: tuple[float, ...] = ()
    """First, second and last element of the output."""
    timing: Timing | None = None
    tflops: float | None = None
    tflops_founding: float | None = None
    speedup: float | None = None
    """Time of the best checked baseline of the same problem over this row's time."""
    usage: Usage | None = None
    """Registers and shared memory of the compiled kernel, where there is one."""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Skipped:
    """An implementation that did not run a problem, and why."""

    problem: str
    tag: str
    reason: str


@dataclass
class Results:
    """Rows in the order of the table, what was skipped, and on what it was measured. Iterates over its rows."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    compiled: list[Usage] = field(default_factory=list)
    """The compile report, when one was asked for."""
    unlisted: int = 0
    """Further kernels of the table, which nobody asked for; the files say how to ask."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def failed(self) -> list[Row]:
        """Rows of kernels whose check failed or that raised; a baseline's faults are its own, and only shown."""
        return [r for r in self.rows if r.kind == "kernel" and r.status in (FAIL, ERROR)]

    def to_json(self) -> str:
        """Everything, as JSON (numbers that JSON has not are null)."""
        body = {"format": FORMAT, **asdict(self), "unlisted_note": unlisted_note(self.unlisted)}
        return json.dumps(finite(body), indent=1, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """One line a row, skipped implementations included."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(_flat_names()), lineterminator="\n", extrasaction="raise")
        writer.writeheader()
        writer.writerows(_flat(row, self.environment) for row in self.rows)
        writer.writerows(
            {"problem": s.problem, "tag": s.tag, "status": "skipped", "message": s.reason} for s in self.skipped
        )
        return text.getvalue()

    def write(self, directory: Path, stem: str | None = None) -> tuple[Path, Path]:
        """Write ``<stem>.json`` and ``<stem>.csv``, each replaced at once; the two paths."""
        stem = stem or file_stem(str(self.environment.get("device", "device")))
        json_path, csv_path = directory / f"{stem}.json", directory / f"{stem}.csv"
        write_atomically(json_path, self.to_json())
        write_atomically(csv_path, self.to_csv())
        return json_path, csv_path


def unlisted_note(unlisted: int, verb: str = "runs") -> str:
    """How many kernels of the table nobody asked for, and how to ask; empty when there is none."""
    how = f"--show-all {verb} them all, --tags WORD some"
    return f"{unlisted} further variants of the kernel grid: {how}" if unlisted else ""


def file_stem(device: str, kind: str = "bench") -> str:
    """``bench-20250131-235959-nvidia-h200``."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{kind}-{now}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')[:40]}"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by a text in one step; when anything fails the old file stands and no other is left."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp gives 0600; a result is for others to read
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def check_writable(directory: Path, name: str = "--out") -> None:
    """Make the directory and try to write there, before anything is measured.

    Raises:
        ValueError: it cannot be written; the message has ``name`` and the reason.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{name} is {str(directory)!r}, where results cannot be written: {error.strerror or error}"
        ) from None


def finite(value: Any) -> Any:
    """The value with every number that JSON has not (NaN, infinities) as None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat_names() -> tuple[str, ...]:
    sizes = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "dtype", "causal")
    figures = ("first", "second", "last", "ms", "ms_q1", "ms_q3", "rounds", "iterations", "method")
    speeds = ("tflops", "tflops_founding", "speedup")
    usage = ("registers", "spills", "shared_bytes", "blocks_per_sm", "occupancy")
    errors = ("max_error", "allowed_error", "relative_l2", "lse_error")
    machine = ("device", "commit", "date")
    return ("problem", *sizes, "tag", "kind", "status", "message", *figures, *speeds, *usage, *errors, *machine)


def _flat(row: Row, environment: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {name: row.sizes.get(name) for name in _flat_names() if name in row.sizes}
    flat |= {"problem": row.problem, "tag": row.tag, "kind": row.kind, "status": row.status, "message": row.message}
    flat |= dict(zip(("first", "second", "last"), row.values, strict=False))
    if row.timing is not None:
        t = row.timing
        flat |= {"ms": t.median, "ms_q1": t.quartile_low, "ms_q3": t.quartile_high}
        flat |= {"rounds": t.rounds, "iterations": t.iterations, "method": t.method}
    flat |= {"tflops": row.tflops, "tflops_founding": row.tflops_founding, "speedup": row.speedup}
    if row.usage is not None:
        u = row.usage
        flat |= {"registers": u.registers, "spills": u.spills, "shared_bytes": u.shared_bytes}
        flat |= {"blocks_per_sm": u.blocks, "occupancy": u.occupancy}
    if row.verdict is not None:
        v = row.verdict
        flat |= {"max_error": v.max_error, "allowed_error": v.allowed, "relative_l2": v.relative_l2}
        flat |= {"lse_error": v.lse_error}
    flat |= {name: environment.get(name) for name in ("device", "commit", "date")}
    return flat
