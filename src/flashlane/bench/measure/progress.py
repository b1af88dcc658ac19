"""Shows progress on stderr: a live bar on a terminal, and one plain line for each problem elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Reporter(Protocol):
    """The interface to which a run reports its progress."""

    def begin(self, title: str, steps: int) -> None:
        """Report that a problem, or a phase, of ``steps`` steps starts."""

    def step(self, what: str, advance: bool = True) -> None:
        """Report the next step; with ``advance`` False only the text changes, not the count."""


class Silent:
    """A reporter that shows nothing, for use from Python."""

    def begin(self, title: str, steps: int) -> None:
        pass

    def step(self, what: str, advance: bool = True) -> None:
        pass


class Bar:
    """A reporter and context manager that shows which problem and step of ``total`` problems a run is at."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.live = self.console.is_terminal
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[what]}"),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task("", total=None, what="")

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def begin(self, title: str, steps: int) -> None:
        self.done += 1
        title = f"[{self.done}/{self.total}] {title}"
        self.bar.reset(self.task, description=title.replace("[", r"\["), total=steps, what="")
        if not self.live:
            elapsed = time.monotonic() - self.start
            self.console.print(f"{title} ({elapsed:.0f} s)", markup=False, highlight=False, soft_wrap=True)

    def step(self, what: str, advance: bool = True) -> None:
        self.bar.update(self.task, what=what, advance=1 if advance else 0)
