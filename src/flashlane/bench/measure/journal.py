"""A file of JSON lines that survives its writer: each record is on the disk before the next is begun.

The first line says what all records have in common; a file whose first line says otherwise is not continued. A writer
that is killed in the middle of a line leaves it incomplete, and the next writer cuts it off. Two writers at once
are refused by a lock that ends with the process that holds it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashlane.core.files import parse_json

try:
    import fcntl
except ImportError:  # without it two writers at once are not noticed
    fcntl = None  # type: ignore[assignment]

FORMAT = "flashlane-journal/1"


class Full(ValueError):
    """The journal cannot be written any further; all earlier records are kept."""


class Journal:
    """Records by their keys, appended one at a time; a context manager.

    Args:
        path: the file; it is made when it does not exist and ``common`` is given.
        common: what all records have in common, as JSON has it; None takes an existing file as it is, to read it.
        fresh: start again; an old file is kept next to it, its name ending in ``.old``.

    Raises:
        ValueError: the file does not exist and ``common`` is None, it is no journal of these ``common`` values, is
            damaged, cannot be written, or another process writes it.
    """

    def __init__(self, path: Path, common: Mapping[str, Any] | None, *, fresh: bool = False) -> None:
        self.path, self.common = path, json.loads(json.dumps(common))
        if common is None and not path.exists():
            raise ValueError(f"{path} does not exist: there is nothing to export")
        self.records: dict[str, dict[str, Any]] = {}
        if fresh and path.exists():
            os.replace(path, path.with_name(path.name + ".old"))
        try:
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            if not stat.S_ISREG(os.fstat(self.handle).st_mode):
                raise ValueError(f"{path} cannot be a journal: a folder, a device or a pipe")
            self._lock()
            self._load()
        except BaseException:
            os.close(self.handle)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Put a record on the disk; when this returns it is there.

        Raises:
            Full: it cannot be written (a full disk, say).
        """
        line = {"key": key, **record}
        self._write(line)
        self.records[key] = line

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{self.path} is being written by another process; wait for it, or end it") from None

    def _load(self) -> None:
        with open(self.path, "rb") as file:
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        if text and not whole and not text.startswith(b'{"format"'):
            raise ValueError(f"{self.path} is not a journal of flashlane; move it away, or name another with --name")
        if whole != text:  # the last line is incomplete: add() never returned for that record
            os.ftruncate(self.handle, len(whole))
        lines = whole.decode("utf-8", errors="replace").splitlines()
        if not lines:
            self._write({"format": FORMAT, "common": self.common})
            return
        self._check_head(self._parse(lines[0], 1))
        for number, line in enumerate(lines[1:], 2):
            record = self._parse(line, number)
            if not isinstance(record.get("key"), str):
                raise self._damaged(number, "it has no key")
            self.records[record["key"]] = record

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        try:
            found = parse_json(line)
        except ValueError as error:
            raise self._damaged(number, str(error)) from None
        if not isinstance(found, dict):
            raise self._damaged(number, f"a JSON {type(found).__name__}")
        return found

    def _check_head(self, head: Mapping[str, Any]) -> None:
        if head.get("format") != FORMAT or not isinstance(head.get("common"), dict):
            raise ValueError(
                f"{self.path} is not a journal of flashlane: format {head.get('format')!r}, not {FORMAT!r}"
            )
        was = head["common"]
        if self.common is None:
            self.common = was
        for name in dict.fromkeys((*was, *self.common)):
            if was.get(name) != self.common.get(name):
                raise ValueError(
                    f"{self.path} was begun with {_difference(name, was.get(name), self.common.get(name))}; "
                    "go on with what it was, or start again with --fresh (the old file is kept)"
                )

    def _write(self, line: Mapping[str, Any]) -> None:
        size = os.fstat(self.handle).st_size
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self.handle, data[written:])
            os.fsync(self.handle)
        except OSError as error:
            try:
                os.ftruncate(self.handle, size)
            except OSError:  # the next writer cuts the incomplete line off
                raise self._unwritable(error) from None
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> Full:
        kept = f"; the {len(self.records)} cells before are kept" if self.records else ""
        return Full(f"{self.path} cannot be written: {error.strerror or error}{kept}")

    def _damaged(self, number: int, why: str) -> ValueError:
        return ValueError(f"{self.path} is damaged in line {number} ({why}); start again with --fresh (it is kept)")


def _difference(name: str, was: Any, now: Any) -> str:
    """The old and the new value of a setting, or of the first field that differs where it has fields."""
    if isinstance(was, dict) and isinstance(now, dict):
        field = next(key for key in {**was, **now} if was.get(key) != now.get(key))
        return f"{name}.{field} {was.get(field)!r}, now it is {now.get(field)!r}"
    return f"{name} {was!r}, now it is {now!r}"
