"""The results of a run of the bench, and their files: JSON with everything, CSV with one line for each row.

A file is written under a temporary name and renamed, so that a reader sees the old or the new one, never a part.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

from flashlane.bench.measure.check import Verdict
from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.memory import Memory
from flashlane.bench.measure.timing import PROTOCOLS, Timing
from flashlane.core.files import parse_json, write_atomically
from flashlane.inspect.compile_report import Usage

if TYPE_CHECKING:
    import pandas

FORMAT = "flashlane-bench/1"
STOPPED = "interrupted"
"""The value of :attr:`Results.stopped` after Ctrl-C."""
OK, FAIL, ERROR, UNCHECKED = "ok", "FAIL", "error", "unchecked"


@dataclass(frozen=True)
class Row:
    """One implementation on one problem."""

    problem: str
    sizes: dict[str, Any]
    tag: str
    kind: str
    """``kernel`` (of the registry) or ``peer`` (another library)."""
    status: str
    """``ok``, ``FAIL`` (its check), ``error`` (it raised) or ``unchecked``."""
    message: str = ""
    """Why, when the status is not ``ok``."""
    values: tuple[float, ...] = ()
    """First, second and last element of the output."""
    timing: Timing | None = None
    """The times under the first protocol of the settings."""
    tflops: float | None = None
    """TFLOP/s at the median, of the matrix products."""
    tflops_all: float | None = None
    """TFLOP/s at the median, of all operations (:func:`~flashlane.bench.measure.flops.flops`)."""
    speedup: float | None = None
    """The time of the best checked peer on the same problem, divided by this row's time."""
    usage: Usage | None = None
    """Registers and shared memory of the compiled kernel, if there is one."""
    verdict: Verdict | None = None
    direction: Direction = "forward"
    """What was run and timed: ``forward``, ``backward`` (alone) or ``both``."""
    tflops_peak: float | None = None
    """TFLOP/s of the fastest round."""
    tflops_mean: float | None = None
    """TFLOP/s at the mean of all rounds."""
    mma_ceiling: float | None = None
    """For a kernel that uses ``mma.sync``: its rate divided by that of the instruction alone, measured in this run."""
    memory: Memory | None = None
    host_us: float | None = None
    """Microseconds that the host spends in one call; measured when graphs are replayed."""
    cycles: float | None = None
    """SM cycles of one call, summed over its launches (Nsight Compute)."""
    timings: dict[str, Timing] = field(default_factory=dict)
    """The times under every protocol; empty in older files, which have one protocol."""


@dataclass(frozen=True)
class Skipped:
    """An implementation that did not run a problem, and why."""

    problem: str
    tag: str
    reason: str


@dataclass
class Results:
    """The rows in the order of the table, what was skipped, and the environment; iterating gives the rows."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    compiled: list[Usage] = field(default_factory=list)
    """The compile report, if one was requested."""
    unlisted: int = 0
    """The number of further kernels in the registry, which did not run because they were not named."""
    notes: list[str] = field(default_factory=list)
    """Notes about figures that were requested and could not be measured."""
    stopped: str = ""
    """Why the run ended before its last problem; empty if it did not."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def failed(self) -> list[Row]:
        """The rows of our kernels whose check failed or that raised an error; failures of peers do not count."""
        return [r for r in self.rows if r.kind == "kernel" and r.status in (FAIL, ERROR)]

    def to_json(self) -> str:
        """Everything, as JSON; NaN and infinities are null."""
        body = {"format": FORMAT, **asdict(self), "unlisted_note": unlisted_note(self.unlisted)}
        return json.dumps(finite(body), indent=1, allow_nan=False) + "\n"

    def to_csv(self, skipped: bool = True) -> str:
        """CSV with one line for each row, and with ``skipped`` one for each implementation that was skipped."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(_flat_names()), lineterminator="\n", extrasaction="raise")
        writer.writeheader()
        writer.writerows(_flat(row, self.environment) for row in self.rows)
        writer.writerows(
            {"problem": s.problem, "tag": s.tag, "status": "skipped", "message": s.reason}
            for s in self.skipped
            if skipped or "out of memory" in s.reason
        )
        return text.getvalue()

    def frame(self) -> pandas.DataFrame:
        """A tidy table with a line for each row and a column for each figure, named as in the CSV file.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError('a frame needs pandas: pip install "flashlane[notebooks]"') from error
        return pandas.DataFrame(flat_rows(self), columns=list(_flat_names()))

    def _repr_html_(self) -> str | None:
        """The most important columns of the frame, for a notebook."""
        try:
            frame = self.frame()
        except ImportError:
            return None
        return frame[["problem", "tag", "status", "ms", "tflops", "speedup", "max_error"]].to_html(index=False)

    def write(self, directory: str | os.PathLike[str], stem: str | None = None) -> tuple[Path, Path]:
        """Write ``<stem>.json`` and ``<stem>.csv``, each replaced as a whole; returns the two paths."""
        directory = Path(directory)
        stem = stem or file_stem(str(self.environment.get("device", "device")))
        json_path, csv_path = directory / f"{stem}.json", directory / f"{stem}.csv"
        write_atomically(json_path, self.to_json())
        write_atomically(csv_path, self.to_csv())
        return json_path, csv_path


def unlisted_note(unlisted: int, verb: str = "runs") -> str:
    """A note with the number of kernels that were not named, and how to name them; empty if there are none."""
    how = f"--show-all {verb} them all, --tags WORD some"
    return f"{unlisted} further variants of the kernel grid: {how}" if unlisted else ""


def file_stem(device: str, kind: str = "bench") -> str:
    """``bench-20250131-235959-nvidia-h200``."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{kind}-{now}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')[:40]}"


def check_writable(directory: Path, name: str = "--out") -> None:
    """Make the directory and test, before anything is measured, that files can be written there.

    Raises:
        ValueError: they cannot; the message has ``name`` and the reason.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{name} is {str(directory)!r}, where results cannot be written: {error.strerror or error}"
        ) from None


def load_results(path: str | os.PathLike[str]) -> Results:
    """The results in a file that the bench wrote.

    Raises:
        ValueError: the file cannot be read, is damaged, or is not a results file; the message names it.
    """
    return results_of(read_json(Path(path)), str(path))


def read_json(path: Path) -> Any:
    """The contents of a JSON file.

    Raises:
        ValueError: the file cannot be read, or is not JSON; the message names it.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} {not_json(path, error)}") from None


def not_json(path: Path, error: Exception) -> str:
    """Why a file is not a results file: it is a sweep's journal, or damaged."""
    if path.suffix == ".jsonl":
        return f"is a sweep's journal; give {path.with_suffix('.json').name}, which the sweep writes (or --export)"
    return f"is not valid JSON: {error}"


def results_of(body: Any, path: str) -> Results:
    """The results in the JSON of a results file; ``path`` is for the message.

    Raises:
        ValueError: it is something else, or damaged.
    """
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"{path} is not a results file of flashlane bench: format {found!r}, not {FORMAT!r}")
    try:
        return Results(
            environment=dict(body["environment"]),
            settings=dict(body["settings"]),
            rows=[_row_of(row) for row in body["rows"]],
            skipped=[Skipped(**item) for item in body.get("skipped", ())],
            compiled=[_from_fields(Usage, item) for item in body.get("compiled", ())],
            unlisted=int(body.get("unlisted", 0)),
            notes=[str(note) for note in body.get("notes", ())],
            stopped=str(body.get("stopped", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from None


OLD_NAMES = {"tflops_founding": "tflops_all"}
"""Earlier names of fields in files of earlier versions, in which a peer's kind is ``baseline``."""
NUMBERS = ("float", "float | None", "int", "int | None")
"""Types of fields that are numbers, as dataclasses keep them."""
_PARTS = {"timing": Timing, "usage": Usage, "verdict": Verdict, "memory": Memory}


def _row_of(row: dict[str, Any]) -> Row:
    parts = {name: _from_fields(kind, row.get(name)) for name, kind in _PARTS.items()}
    parts["timings"] = {name: _from_fields(Timing, each) for name, each in (row.get("timings") or {}).items()}
    row = {OLD_NAMES.get(name, name): value for name, value in row.items()}
    row["kind"] = "peer" if row["kind"] == "baseline" else row["kind"]
    verdict = row.get("verdict")
    if verdict is not None:  # JSON has no infinity: an infinite error is null there
        infinite = {k: math.inf for k in ("max_error", "allowed", "relative_l2") if verdict.get(k) is None}
        parts["verdict"] = _from_fields(Verdict, verdict | infinite)
    return _from_fields(Row, {**row, **parts, "values": tuple(row.get("values") or ())})


def _from_fields(kind: type, fields: dict[str, Any] | None) -> Any:
    """A dataclass from a mapping; lists become tuples, and fields of later versions are ignored.

    Raises:
        TypeError: a number is something else; None stands for those that JSON cannot express.
    """
    if fields is None:
        return None
    names = kind.__dataclass_fields__
    for name, value in fields.items():
        if name in names and names[name].type in NUMBERS and not (value is None or isinstance(value, int | float)):
            raise TypeError(f"{name} is {value!r}; it must be a number")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if k in names})


def finite(value: Any) -> Any:
    """The value with every NaN and infinity, which JSON cannot express, replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat_names() -> tuple[str, ...]:
    sizes = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "dtype", "causal")
    figures = ("first", "second", "last", "ms", "ms_q1", "ms_q3", "ms_min", "ms_max", "ms_mean")
    figures += (*(f"ms_{name}" for name in PROTOCOLS), "rounds", "iterations", "method", "host_us", "cycles")
    speeds = ("tflops", "tflops_peak", "tflops_mean", "tflops_all", "speedup", "mma_ceiling")
    memory = ("memory_extra", "memory_allocated", "memory_reserved", "memory_peak", "memory_method")
    usage = ("registers", "spills", "shared_bytes", "blocks_per_sm", "occupancy")
    errors = ("max_error", "allowed_error", "relative_l2", "lse_error")
    machine = ("device", "commit", "date")
    head = ("problem", "direction", *sizes, "tag", "kind", "status", "message")
    return (*head, *figures, *speeds, *memory, *usage, *errors, *machine)


def flat_rows(results: Results) -> list[dict[str, Any]]:
    """Every row of the CSV file and the frame, as mappings with the same keys; absent figures are None."""
    names = _flat_names()
    return [dict.fromkeys(names) | _flat(row, results.environment) for row in results.rows]


def _flat(row: Row, environment: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {name: row.sizes.get(name) for name in _flat_names() if name in row.sizes}
    flat |= {"problem": row.problem, "direction": row.direction, "tag": row.tag, "kind": row.kind}
    flat |= {"status": row.status, "message": row.message}
    flat |= dict(zip(("first", "second", "last"), row.values, strict=False))
    if row.timing is not None:
        t = row.timing
        flat |= {"ms": t.median, "ms_q1": t.quartile_low, "ms_q3": t.quartile_high}
        flat |= {"ms_min": t.fastest, "ms_max": t.slowest, "ms_mean": t.mean}
        flat |= {"rounds": t.rounds, "iterations": t.iterations, "method": t.method}
    flat |= {f"ms_{name}": timing.median for name, timing in row.timings.items()}
    flat |= {"tflops": row.tflops, "tflops_peak": row.tflops_peak, "tflops_mean": row.tflops_mean}
    flat |= {"tflops_all": row.tflops_all, "speedup": row.speedup, "mma_ceiling": row.mma_ceiling}
    flat |= {"host_us": row.host_us, "cycles": row.cycles}
    if row.memory is not None:
        flat |= {f"memory_{name}": value for name, value in asdict(row.memory).items()}
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
