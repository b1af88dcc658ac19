"""The common part of the suites: their results and files, the loop over their cases, and the values of a cell.

A suite is a list of cases and a function that measures one. Its table is written as a terminal table, Markdown, CSV and
JSON. The files are rewritten after each row, so that an interruption loses one row. The cell of a case that runs out of
memory says OOM, and the run continues.
"""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.progress import Reporter, Silent
from flashlane.bench.measure.results import file_stem, finite, write_atomically
from flashlane.bench.measure.runner import out_of_memory
from flashlane.bench.measure.timing import Timing

if TYPE_CHECKING:
    from rich.console import Group

FORMAT = "flashlane-suite/1"
OOM, NA, FAIL, ERROR = "OOM", "N/A", "FAIL", "error"
Value = float | int | str | None
"""A cell: a number, one of the words above or a name, or None where nothing was tried."""
T = TypeVar("T")


class OutOfMemory(RuntimeError):
    """A cell ran out of memory, or would."""


@dataclass(frozen=True)
class Column:
    """One column of a suite's table."""

    key: str
    title: str
    digits: int | None = None
    """Digits after the point of a number; None prints a value as it is."""
    unit: str = ""
    """The unit after a number: ``×``."""
    drop: int = 0
    """In a narrow terminal, columns with the highest number are hidden first; a column with 0 never is."""

    def cell(self, value: Value) -> str:
        if value is None:
            return "–"
        if isinstance(value, float) and self.digits is not None:
            return f"{value:.{self.digits}f}{self.unit}"
        return str(value)


@dataclass
class SuiteResults:
    """The rows of a suite so far, and the environment in which they were measured."""

    suite: str
    title: str
    columns: tuple[Column, ...]
    environment: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """Sentences that explain the table."""
    rows: list[dict[str, Value]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    """One line for each failure."""
    complete: bool = False
    """Whether every case was measured."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""

    @property
    def failed(self) -> bool:
        """Whether a check of ours failed or something raised."""
        return any(value in (FAIL, ERROR) for row in self.rows for value in row.values())

    def to_json(self) -> str:
        columns = [{"key": c.key, "title": c.title} for c in self.columns]
        body = {"format": FORMAT, "suite": self.suite, "title": self.title, "complete": self.complete}
        body |= {"environment": self.environment, "settings": self.settings, "columns": columns, "rows": self.rows}
        return json.dumps(finite({**body, "notes": self.notes, "messages": self.messages}), indent=1) + "\n"

    def to_csv(self) -> str:
        """One line a row, numbers in full, the columns' titles as head."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.title for column in self.columns])
        writer.writerows([_blank(row.get(column.key)) for column in self.columns] for row in self.rows)
        return text.getvalue()

    def to_markdown(self) -> str:
        """A heading, the table, the notes and where it was measured."""
        cells = [[column.title for column in self.columns]] + self.cells()
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = [
            "| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells
        ]
        lines.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
        notes = [*self.notes, *self.messages, self.where()]
        notes += [] if self.complete else ["The run was stopped before the last row."]
        return f"# {self.title}\n\n" + "\n".join(lines) + "\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"

    def table(self, width: int) -> Group:
        """The table for a terminal of a width; a line below it names the hidden columns."""
        from rich.text import Text

        from flashlane.inspect import fitted_table

        def shown(column: Column) -> fitted_table.Column:
            def cell(row: dict[str, Value]) -> Text:
                text = column.cell(row.get(column.key))
                return Text(text, _STYLES.get(text, ""))

            return fitted_table.Column(column.title, cell, column.drop)

        first, *others = self.columns
        return fitted_table.make_table(
            self.rows,
            [shown(column) for column in others],
            self.title,
            width,
            head=first.title,
            name=lambda row: first.cell(row.get(first.key)),
            elsewhere="see the files",
        )

    def cells(self) -> list[list[str]]:
        """Every row as text."""
        return [[column.cell(row.get(column.key)) for column in self.columns] for row in self.rows]

    def where(self) -> str:
        """Device, versions, commit and date in one line."""
        e = self.environment
        return f"{e['device']}, torch {e['torch']}, flashlane {e['flashlane']}, commit {e['commit']}, {e['date']}"

    def texts(self, stem: str) -> dict[str, str]:
        """JSON, CSV and Markdown by the names of their files."""
        made = {"json": self.to_json(), "csv": self.to_csv(), "md": self.to_markdown()}
        return {f"{stem}.{suffix}": text for suffix, text in made.items()}

    def write(self, folder: Path, stem: str) -> tuple[Path, ...]:
        """Write :meth:`texts`, each replaced in one step; their paths."""
        for name, text in self.texts(stem).items():
            write_atomically(folder / name, text)
        return tuple(folder / name for name in self.texts(stem))


_STYLES = {OOM: "yellow", NA: "dim", FAIL: "bold red", ERROR: "bold red", "–": "dim"}


def _blank(value: Value) -> Value:
    return "" if value is None else value


class Suite(Protocol):
    """A table to measure."""

    name: str
    title: str
    columns: tuple[Column, ...]
    notes: list[str]

    def cases(self) -> Sequence[Any]:
        """The cases, in order; each gives one row or a few."""

    def describe(self, case: Any) -> str:
        """One line for the progress bar."""

    def measure(self, case: Any, say: Callable[[str], None], messages: list[str]) -> list[dict[str, Value]]:
        """The rows of a case; ``say`` gets what is running, and failures are appended to ``messages``."""

    def settings(self) -> dict[str, Any]:
        """The settings of the suite, for the JSON file."""


def run_suite(
    suite: Suite,
    device: torch.device,
    *,
    seconds: float | None = None,
    reporter: Reporter | None = None,
    keep: Callable[[SuiteResults], None] = lambda results: None,
) -> SuiteResults:
    """Measure every case of a suite.

    Args:
        suite: the suite to measure.
        device: the device that the environment describes.
        seconds: no case begins after this time.
        reporter: gets the progress of the run.
        keep: called with the results so far after each case, and at the end.

    Returns:
        The results; after Ctrl-C or after ``seconds`` those of the finished cases, with ``complete`` False.
    """
    reporter = reporter or Silent()
    merged = SuiteResults(
        suite.name, suite.title, suite.columns, environment(device), suite.settings(), list(suite.notes)
    )
    cases, start = suite.cases(), time.monotonic()
    try:
        for number, case in enumerate(cases):
            if seconds is not None and number and time.monotonic() - start > seconds:
                merged.messages.append(
                    f"{len(cases) - number} of {len(cases)} cases were left out: {seconds:g} s are over"
                )
                break
            reporter.begin(suite.describe(case), 1)
            merged.rows += suite.measure(case, lambda what: reporter.step(what, advance=False), merged.messages)
            merged.complete = number + 1 == len(cases)
            keep(merged)
    except KeyboardInterrupt:
        merged.interrupted = True
    keep(merged)
    return merged


def stem_of(suite: Suite, device: str) -> str:
    """The name of a run's files, without suffix."""
    return file_stem(device, f"suite-{suite.name}")


# --- memory ---


def guarded(call: Callable[[], T], device: torch.device) -> T:
    """The result of a call.

    Raises:
        OutOfMemory: in the place of an error about memory, whose traceback holds tensors.
    """
    try:
        return call()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemory) or not _is_out_of_memory(error):
            raise
    gc.collect()
    release(device)
    raise OutOfMemory("out of memory")


def release(device: torch.device) -> None:
    """Return a GPU's memory that no tensor uses from torch's cache to the driver."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _is_out_of_memory(error: BaseException) -> bool:
    words = ("not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError) or out_of_memory(error) or any(word in str(error) for word in words)


def refuse_beyond_memory(needed: int, device: torch.device) -> None:
    """Raise :class:`OutOfMemory` on a CPU without so much free memory, where the process would be killed."""
    if device.type != "cpu":
        return
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    except (AttributeError, OSError, ValueError):
        return
    if needed > 0.8 * free:
        raise OutOfMemory(f"it would need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: not tried")


class SavedBytes:
    """Bytes of the tensors that autograd saves inside this context, each storage once."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def __enter__(self) -> SavedBytes:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._seen, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an operation that saves its own output would otherwise never be freed

    def total(self, *others: torch.Tensor) -> int:
        """Bytes of all saved tensors and of ``others``, each storage once."""
        for tensor in others:
            self._seen(tensor)
        return sum(self.storages.values())


# --- cells ---


def milliseconds(result: Timing | Exception, what: str, messages: list[str]) -> Value:
    """The cell of a timing: its median, OOM, or ``error`` with a message."""
    if isinstance(result, Timing):
        return result.median
    if isinstance(result, OutOfMemory):
        return OOM
    messages.append(f"{what}: {type(result).__name__}: {str(result).splitlines()[0] if str(result) else ''}")
    return ERROR


def speedup(theirs: Value, ours: Value) -> Value:
    """How many times as fast ours is, or N/A where one of them has no time."""
    both = isinstance(theirs, float) and isinstance(ours, float) and ours > 0
    return theirs / ours if both else NA
