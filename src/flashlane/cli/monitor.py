"""``flashlane monitor``: clocks, power, memory and utilisation of the GPUs, live, alone or while a command runs."""

from __future__ import annotations

import contextlib
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console, Group

    from flashlane.inspect.gpu_state import GpuState

FIGURES = {
    "SM MHz": "sm_clock",
    "mem MHz": "memory_clock",
    "W": "power",
    "°C": "temperature",
    "MiB": "memory_used",
    "busy %": "utilisation",
}
"""What is shown, and the field of a state that it is."""
LEAST = 0.1


def monitor_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="What to run meanwhile; monitoring ends with it."),
    ] = None,
    interval: Annotated[float, o.option("--interval", help="Seconds between two looks.", panel=o.MEASURE)] = 1.0,
    seconds: Annotated[
        float | None,
        o.option("--seconds", help="End after SECONDS. Default: at Ctrl-C.", metavar="SECONDS", panel=o.MEASURE),
    ] = None,
    gpu: Annotated[
        int | None, o.option("--gpu", help="Only this GPU, by nvidia-smi's index. Default: all.", panel=o.MEASURE)
    ] = None,
    out: Annotated[
        Path | None, o.option("--out", help="Also write every look to this CSV file.", panel=o.OUTPUT)
    ] = None,
) -> None:
    """Show clocks, power, memory and utilisation of the GPUs, live; with a command, run it and sum up what it did.

    Reads NVML through the package nvidia-ml-py, else the program nvidia-smi. At the end: least, mean and most of each
    figure, and what slowed the clocks down. A power cap or heat makes the figures of a benchmark doubtful.

    Exit status: 0 done, 2 bad input or no GPU to look at, 3 the file cannot be written, 130 interrupted (the summary is
    printed); with a command the command's own.

    Examples:

      flashlane monitor --interval 0.5

      flashlane monitor --out gpu.csv -- flashlane bench --preset gpt2
    """
    from flashlane.bench.measure.results import check_writable
    from flashlane.inspect.fitted_table import make_console
    from flashlane.inspect.gpu_state import NoState

    if not LEAST <= interval <= o.MOST_SECONDS:
        raise ValueError(f"--interval is {interval:g}; it may be {LEAST:g} to {o.MOST_SECONDS:.0f} seconds")
    o.check_seconds(seconds)
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out is {str(out)!r}, which is a folder; it names a file")
        check_writable(out.parent)
    console = make_console()
    try:
        watch = Watch(gpu)
        status = _run(watch, command or [], interval, seconds, console)
    except NoState as error:
        raise ValueError(f"the state of the GPUs cannot be read: {error}") from None
    if out is not None:
        watch.write(out)
    print_summary(watch, console)
    if out is not None:
        console.print(f"wrote {out}", style="dim", soft_wrap=True, markup=False)
    if status:
        raise typer.Exit(status)


class Watch:
    """Looks at the GPUs, and keeps what it saw."""

    def __init__(self, gpu: int | None = None) -> None:
        self.gpu = gpu
        self.start = time.monotonic()
        self.looks: list[tuple[float, list[GpuState]]] = []
        self.look()

    def look(self) -> list[GpuState]:
        """The GPUs now.

        Raises:
            ValueError: there is no GPU of the index asked for.
        """
        from flashlane.inspect.gpu_state import states

        gpus = states()
        if self.gpu is not None:
            if not 0 <= self.gpu < len(gpus):
                raise ValueError(f"--gpu is {self.gpu}; there are {len(gpus)}: 0 to {len(gpus) - 1}")
            gpus = [gpus[self.gpu]]
        self.looks.append((time.monotonic() - self.start, gpus))
        return gpus

    def name(self, position: int) -> str:
        """``0 NVIDIA H200`` of the GPU at a position of a look."""
        return f"{self.gpu if self.gpu is not None else position} {self.looks[0][1][position].name}"

    def write(self, path: Path) -> None:
        """Every look as CSV, a line a GPU.

        Raises:
            NotWritten: it cannot be written.
        """
        import io

        from flashlane.core.files import write_named

        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["seconds", "gpu", *FIGURES.values(), "slowed_by"])
        for seconds, found in self.looks:
            for position, state in enumerate(found):
                figures = [getattr(state, field) for field in FIGURES.values()]
                writer.writerow([f"{seconds:.3f}", self.name(position), *figures, "; ".join(state.slowed_by)])
        write_named(path, text.getvalue(), "--out")


def _run(watch: Watch, command: Sequence[str], interval: float, seconds: float | None, console: Console) -> int:
    """Look until it is over; the status to end with."""
    child = None
    if command:
        try:
            child = subprocess.Popen(list(command))
        except OSError as error:
            raise ValueError(f"COMMAND is {command[0]!r}, which cannot be run: {error.strerror}") from None

    def left() -> float:
        """Seconds until the end that ``--seconds`` names."""
        return float("inf") if seconds is None else seconds - (time.monotonic() - watch.start)

    def over() -> bool:
        return left() <= 0 or (child is not None and child.poll() is not None)

    def wait() -> None:
        """Sleep until the next look, or the end of the command or of ``--seconds`` where that is earlier."""
        pause = min(interval, max(0.0, left()))
        if child is None:
            time.sleep(pause)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(pause)

    try:
        if child is None and console.is_terminal:
            _live(watch, wait, over, console)
        else:
            _plain(watch, wait, over, None if child is not None else console)
    except KeyboardInterrupt:
        if child is not None:  # which got the signal from the terminal, too
            return child.wait() or o.INTERRUPTED
        return o.INTERRUPTED
    return _ended(child)


def _ended(child: subprocess.Popen[bytes] | None) -> int:
    """The status of the command, which is ended when --seconds are over before it is."""
    if child is None:
        return 0
    if child.poll() is None:
        child.terminate()
        child.wait()
        sys.stderr.write("--seconds are over: the command was ended\n")
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _live(watch: Watch, wait: Callable[[], None], over: Callable[[], bool], console: Console) -> None:
    from rich.live import Live

    with Live(table_of(watch, console.width), console=console, transient=True, auto_refresh=False) as live:
        while not over():
            wait()
            watch.look()
            live.update(table_of(watch, console.width), refresh=True)


def _plain(watch: Watch, wait: Callable[[], None], over: Callable[[], bool], console: Console | None) -> None:
    """A line for each look; none while a command has the terminal."""
    while not over():
        if console is not None:
            seconds, found = watch.looks[-1]
            for position, state in enumerate(found):
                figures = (f"{name} {_figure(state, field)}" for name, field in FIGURES.items())
                console.print(f"{seconds:.1f} s · {watch.name(position)} · {' · '.join(figures)}", markup=False)
        wait()
        watch.look()


def table_of(watch: Watch, width: int) -> Group:
    """The last look, a row a GPU."""
    from flashlane.inspect.fitted_table import Column, make_table

    seconds, found = watch.looks[-1]
    columns = [Column(name, lambda i, field=field: _figure(found[i], field)) for name, field in FIGURES.items()]
    columns.append(Column("slowed by", lambda i: ", ".join(found[i].slowed_by), drop=1, justify="left", fold=True))
    title = f"{seconds:.0f} s · Ctrl-C ends"
    return make_table(range(len(found)), columns, title, width, head="GPU", name=watch.name, elsewhere="--out FILE")


def print_summary(watch: Watch, console: Console) -> None:
    """Least, mean and most of each figure of each GPU, and what slowed its clocks down."""
    from flashlane.inspect.fitted_table import Column, make_table, say

    for position in range(len(watch.looks[0][1])):
        states = [found[position] for _, found in watch.looks]
        rows = [(name, _values_of(states, field)) for name, field in FIGURES.items()]
        columns = [
            Column(title, lambda row, do=do: f"{do(row[1]):.0f}" if row[1] else "–")
            for title, do in (("least", min), ("mean", statistics.fmean), ("most", max))
        ]
        title = f"{watch.name(position)} · {o.counted(len(states), 'look')} in {watch.looks[-1][0]:.1f} s"
        console.print(make_table(rows, columns, title, console.width, head="", name=lambda row: row[0]))
        limits = [
            f"{value:.0f} {unit}"
            for value, unit in ((states[0].sm_clock_max, "MHz"), (states[0].power_limit, "W"))
            if value
        ]
        if limits:
            say(console, f"limits: {', '.join(limits)}", "dim")
        slowed: dict[str, int] = {}
        for state in states:
            for reason in state.slowed_by:
                slowed[reason] = slowed.get(reason, 0) + 1
        for reason, times in slowed.items():
            say(console, f"slowed by {reason} in {times} of {len(states)} looks", "yellow")


def _values_of(seen: Sequence[Any], field: str) -> list[float]:
    values = [getattr(state, field) for state in seen]
    return [value / 2**20 if field == "memory_used" else value for value in values if value is not None]


def _figure(state: GpuState, field: str) -> str:
    found = _values_of([state], field)
    return f"{found[0]:.0f}" if found else "–"
