"""The process around a command: its streams never fail it, and Ctrl-C ends it with status 130 from the first moment.

This module imports nothing that takes time, and so is there before anything that does.
"""

from __future__ import annotations

import codecs
import errno
import functools
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from flashlane.bench.measure.defaults import INTERRUPTED, NOT_WRITTEN

ASCII = dict(zip("·×±µ–—−…→≤≥²√∞", "-x+u---.><>2v8", strict=True))
"""What a terminal without Unicode shows for our characters: one for one, so that columns stay where they are."""
CODEC_ERRORS = "flashlane-ascii"


class SteadyStream(io.BufferedIOBase):
    """The bytes of stdout or stderr. When they can no longer be written, ``error`` says why and the rest is dropped."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def write(self, data: Any) -> int:
        self._try(self.stream.write, data)
        return len(data)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, do: Any, *data: Any) -> None:
        try:
            do(*data)
        except OSError as error:
            self.error = self.error or error
            # What the stream still holds goes nowhere: Python flushes it at the end, and must not fail then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def main() -> NoReturn:
    """Run the command line and end the process; the entry point of the ``flashlane`` script."""
    signal.signal(signal.SIGINT, _end_now)
    if os.environ.get("COLUMNS", "1").strip("0") == "":  # of no width nothing would be shown
        del os.environ["COLUMNS"]
    _replace_closed()
    out, err = _steady("stdout"), _steady("stderr")
    warnings.formatwarning = functools.partial(_warning, warnings.formatwarning)
    status = _run()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    lost = next((s.error for s in (out, err) if s and s.error and s.error.errno != errno.EPIPE), None)
    if lost is not None:
        sys.stderr.write(f"error: the output could not be written: {lost.strerror}\n")
        status = status or NOT_WRITTEN
    sys.stderr.flush()
    sys.exit(status)


def _warning(usual: Callable[..., str], message: Warning | str, category: type[Warning], *place: Any) -> str:
    """A line of stderr for a warning of ours, which is for the user; others keep the place in the code."""
    text = " ".join(str(message).split())
    return f"warning: {text}\n" if text.startswith("flashlane ") else usual(message, category, *place)


def _run() -> int:
    from typer.main import get_command

    from flashlane.cli.main import app

    try:
        # The name also under ``python -m flashlane``: a shell's completion is for it, and would else be for ``python``.
        status = get_command(app).main(prog_name="flashlane", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except OSError as error:  # what no command handles: the shell's own files, for its completion
        sys.stderr.write(f"error: {error.filename or 'a file'} cannot be written: {error.strerror or error}\n")
        return 2
    except Exception as error:
        if type(error).__name__ == "Abort":  # the end of stdin where a question was asked
            return 1
        if not hasattr(error, "exit_code"):
            raise
        return _misused(error)
    return status if isinstance(status, int) else 0


def _misused(error: Any) -> int:
    """Say what the parser refuses: in a line and a hint, as the box that typer draws takes a third of a second."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        text = _of_value(" ".join(error.format_message().split()))
        named = text[1:2].isupper()  # it begins with an argument's name, such as TAG
        sys.stderr.write(f"error: {text if named else text[:1].lower() + text[1:]}\n")
        if context is not None:
            sys.stderr.write(f"{context.command_path} --help says what there is\n")
    return int(error.exit_code)


WANTED = {"integer": "a whole number", "int": "a whole number", "number": "a number", "float": "a number"}
"""What an option may be, by the type in the parser's message, whose names differ between versions of typer."""


def _of_value(message: str) -> str:
    """What an option was given and what it may be, where a number was not one; the parser's own text has neither."""
    kind = re.search(r"\bvalid (\w+)", message)
    wanted = WANTED.get(kind[1], "") if kind else ""
    options = re.findall(r"'(-[^']*)'", message)
    for place, word in enumerate(sys.argv if wanted else ()):
        option, equals, value = word.partition("=")
        if option in options:
            value = value if equals else (sys.argv[place + 1 : place + 2] or [""])[0]
            return f"{option} is {value!r}; it may be {wanted}"
    return message


def loaded() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt: a command runs, and may have something to keep."""
    if signal.getsignal(signal.SIGINT) is _end_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_now(*_: Any) -> NoReturn:
    """Modules are being loaded. An exception would pass through code that takes it for a failed import."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def _replace_closed() -> None:
    """A stream that is closed, as by ``2>&-``, leads nowhere from now on, here and in processes that are started.

    Python has None for it, and the next file that is opened would have its number, and get what is written to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # held there: it would close what replaces it


def _steady(name: str) -> SteadyStream | None:
    """Replace ``sys.stdout`` (or stderr) by one that neither raises nor refuses a character."""
    stream = getattr(sys, name)
    buffer = getattr(stream, "buffer", None)
    if buffer is None:  # closed
        return None
    codecs.register_error(CODEC_ERRORS, _nearest_ascii)
    steady = SteadyStream(buffer)
    text = io.TextIOWrapper(
        steady, encoding=stream.encoding, errors=CODEC_ERRORS, line_buffering=stream.isatty() or name == "stderr"
    )
    setattr(sys, name, text)
    return steady


def _nearest_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end
