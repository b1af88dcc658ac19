"""How a command ends on bad input: one line on stderr, and the status that the kind of failure has."""

from __future__ import annotations

import re
import sys

import typer

from flashlane.bench.measure.defaults import NOT_WRITTEN

BAD_INPUT_STATUS = 2


def print_failure(error: Exception) -> typer.Exit:
    """Print what is wrong; returns the end of the command, to be raised: 2, or 3 where something cannot be written."""
    say(f"[bold red]error:[/] {escaped(_message(error))}")
    return typer.Exit(NOT_WRITTEN if _is_not_written(error) else BAD_INPUT_STATUS)


def say(text: str, style: str = "") -> None:
    """Print a line of rich's markup on stderr."""
    from rich.console import Console

    Console(file=sys.stderr).print(text, style=style, soft_wrap=True, highlight=False)


def escaped(text: str) -> str:
    """``rich.markup.escape``, without loading rich at the start of every command."""
    return re.sub(r"(\\*)(\[[a-z#/@][^[]*?])", r"\1\1\\\2", text)


def _message(error: Exception) -> str:
    """One line; of an error of the operating system with the file that it concerns."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        verb = " cannot be written" if _is_not_written(error) else ""
        return f"{error.filename}{verb}: {error.strerror}"
    return " ".join(str(error).split("\n"))


def _is_not_written(error: Exception) -> bool:
    from flashlane.core.files import NO_ROOM, NotWritten

    return isinstance(error, NotWritten) or (isinstance(error, OSError) and error.errno in NO_ROOM)
