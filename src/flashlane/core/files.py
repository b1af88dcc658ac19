"""Files that are replaced in one step, and what is said when that, or reading one, fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of an ``OSError`` which say that the disk is full, and not that the input is wrong."""


class NotWritten(ValueError):
    """There is no room for a file; the message names it and says why."""


def refusal(error: OSError, message: str) -> ValueError:
    """What to raise for a file that cannot be written: :class:`NotWritten` for want of room, else a bad argument."""
    return (NotWritten if error.errno in NO_ROOM else ValueError)(f"{message}: {error.strerror or error}")


def write_atomically(path: Path, text: str | bytes) -> None:
    """Replace a file by a text in one step; when anything fails the old file stands and no other is left.

    Where the path is a link, the file that it leads to is replaced. What is no file, such as a pipe, is written to.

    Raises:
        OSError: it cannot be written; ``filename`` names it.
    """
    data, name = text if isinstance(text, bytes) else text.encode(), ""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        folder, file_name = os.path.split(os.path.realpath(path))
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{file_name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp gives 0600; a result is for others to read
        os.replace(name, os.path.join(folder, file_name))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds.

    Raises:
        ValueError: it is not JSON, or is nested deeper than Python reads, for which json has no error of its own.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def write_named(path: Path, text: str | bytes, option: str) -> None:
    """:func:`write_atomically` for a file that an option names.

    Raises:
        NotWritten: there is no room; the message has the option.
        ValueError: it cannot be written for another reason.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise refusal(error, f"{option} is {str(path)!r}, which cannot be written") from None
