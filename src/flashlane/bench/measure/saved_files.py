"""Writes what a command measured to the folder asked for, or to that for temporary files where the first fails.

A command writes before it prints, so that nothing that happens to its output (a closed pipe, Ctrl-C) loses a result.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashlane.core.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from flashlane.bench.measure.results import Results


@dataclass(frozen=True)
class SavedFiles:
    """The files that were written, and what went wrong before."""

    paths: tuple[Path, ...]
    problem: str = ""

    def report_to(self, console: Console) -> None:
        """Say where the files are; what went wrong goes to stderr."""
        if self.problem:
            print(f"error: {self.problem}", file=sys.stderr)
        for path in self.paths:
            console.print(f"wrote {path}", style="dim", soft_wrap=True, markup=False)


def save_texts(directory: Path, texts: Mapping[str, str | bytes]) -> SavedFiles:
    """Write files by their names into a folder; where that fails, all of them into the folder for temporary files."""
    return save_files(
        directory, {name: lambda path, text=text: write_atomically(path, text) for name, text in texts.items()}
    )


def save_files(directory: Path, writers: Mapping[str, Callable[[Path], None]]) -> SavedFiles:
    """:func:`save_texts` of files that are not texts: each writer gets the path, and raises OSError where it cannot."""
    problem = ""
    for folder in (directory, Path(tempfile.gettempdir())):
        try:
            for name, write in writers.items():
                write(folder / name)
        except OSError as error:
            reason = error.strerror or error
            if problem:
                return SavedFiles((), f"{problem}; nor can {str(folder)!r} ({reason}): only what is printed is kept")
            problem = f"--out is {str(folder)!r}, which cannot be written ({reason})"
        else:
            where = f"{problem}; the results are in {folder}" if problem else ""
            return SavedFiles(tuple(folder / name for name in writers), where)
    raise AssertionError("unreachable")


def save_results(
    results: Results, directory: Path, extra: Mapping[str, str] | None = None, kind: str = "bench"
) -> SavedFiles:
    """:func:`save_texts` of a run's JSON and CSV.

    Args:
        results: the results of the run.
        directory: the folder for the files.
        extra: the texts of further files by their suffixes.
        kind: the first word of the files' names.
    """
    from flashlane.bench.measure.results import file_stem

    stem = file_stem(str(results.environment.get("device", "device")), kind)
    texts = {".json": results.to_json(), ".csv": results.to_csv(), **(extra or {})}
    return save_texts(directory, {f"{stem}{suffix}": text for suffix, text in texts.items()})
