"""The disk cache of compiled kernels: one checked file an entry, written by atomic rename.

Our own rather than ``cuda.core.utils.FileStreamProgramCache``: machines carry versions of cuda-core without it,
and an entry here holds the compiler's report next to the cubin.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DIRECTORY_VARIABLE = "FLASHLANE_CACHE_DIR"
LIMIT_VARIABLE = "FLASHLANE_CACHE_LIMIT"
DEFAULT_LIMIT = 1 << 30
NO_DIRECTORY = Path(os.devnull, "flashlane")
"""A path at which no folder can be: the cache folder of a user without a home."""

CUBINS_PACKAGE, CUBINS_INDEX = "flashlane_cubins", "index.json"
PTX_FOLDER = Path(__file__).parent.parent / "ptx"
"""Where a wheel of flashlane has the PTX of common kernels (``make wheel``); a clone has no such folder."""

_MAGIC = b"flashlane-cache-1\n"
_CUBIN, _PTX = ".cubin", ".ptx"
_TEMPORARY = ".writing-"
_STALE_SECONDS = 3600.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class CacheState(NamedTuple):
    """What a cache folder holds."""

    entries: int
    bytes: int


class DiskCache:
    """A folder of entries, each ``key -> bytes``; safe for many processes at once.

    A reader sees a whole entry or none: writers rename into place, and each entry carries its SHA-256, so that one
    cut short or damaged counts as absent. A folder that cannot be written to is warned of once, then ignored.
    """

    def __init__(
        self, folder: Path, limit: int = DEFAULT_LIMIT, reads_only: bool = False, suffix: str = _CUBIN
    ) -> None:
        self.folder = folder
        self.limit = limit
        self._suffix = suffix
        self._reads_only = reads_only
        self._warned = False

    def get(self, key: str) -> bytes | None:
        """The entry, or None when it is absent, unreadable or damaged; reading makes it the newest."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + 32
        payload = data[start:]
        if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != hashlib.sha256(payload).digest():
            return None
        if not self._reads_only:
            with contextlib.suppress(OSError):
                os.utime(path)
        return payload

    def __contains__(self, key: str) -> bool:
        """Whether there is a file of that entry; whether it is whole, :meth:`get` says."""
        return os.path.isfile(self._path(key))

    def put(self, key: str, payload: bytes) -> None:
        """Store an entry and drop the oldest ones above the limit; failing to write warns once and does no more."""
        data = _MAGIC + hashlib.sha256(payload).digest() + payload
        if len(data) > self.limit:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write(self._path(key), data)
        except OSError as error:
            self._warn(error)
        else:
            self._evict(keep=self._path(key))

    def state(self) -> CacheState:
        """Number of entries and their size."""
        sizes = [info.st_size for _, info in self._files(suffix=self._suffix)]
        return CacheState(len(sizes), sum(sizes))

    def writable(self) -> bool:
        """Whether entries can be stored, as far as looking shows; nothing is created."""
        # os.path.exists, unlike Path's, is False of what may not be looked at: another user's home.
        existing = next(p for p in (self.folder, *self.folder.absolute().parents) if os.path.exists(p))
        return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{self._suffix}"

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)  # mkstemp gives 0600; other users may read a folder that was filled for them
            os.replace(temporary, path)
        except BaseException:
            DiskCache._remove(Path(temporary))
            raise

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):  # another process may have been faster
            path.unlink()

    def _files(self, prefix: str = "", suffix: str = "") -> Iterator[tuple[Path, os.stat_result]]:
        """Files of the folder with their stat; another process may remove them meanwhile."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as found:
            for item in found:
                if item.name.startswith(prefix) and item.name.endswith(suffix):
                    with contextlib.suppress(OSError):
                        yield Path(item.path), item.stat()

    def _evict(self, keep: Path) -> None:
        for path, info in self._files(prefix=_TEMPORARY):
            if time.time() - info.st_mtime > _STALE_SECONDS:  # its writer was killed
                self._remove(path)
        files = sorted(self._files(suffix=self._suffix), key=lambda item: item[1].st_mtime)
        excess = sum(info.st_size for _, info in files) - self.limit
        for path, info in files:
            if excess <= 0:
                break
            if path != keep:
                self._remove(path)
                excess -= info.st_size

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            place = f"in {self.folder} ({error.strerror or error})"
            if self.folder == NO_DIRECTORY:
                place = "as the user has no home (HOME is not set)"
            warnings.warn(
                f"flashlane cannot keep compiled kernels {place}: every process compiles them again; set "
                f"{DIRECTORY_VARIABLE} to a folder that can be written to",
                RuntimeWarning,
                stacklevel=2,
            )


_caches: dict[tuple[Path, int], DiskCache] = {}


def default() -> DiskCache:
    """The cache that the environment names: one object a folder, so that it warns once a process."""
    wanted = (directory(), size_limit())
    return _caches.setdefault(wanted, DiskCache(*wanted))


def directory() -> Path:
    """``FLASHLANE_CACHE_DIR``, else ``XDG_CACHE_HOME/flashlane``, else ``~/.cache/flashlane``.

    A user may have no home, as in a container that runs under any number: it is then :data:`NO_DIRECTORY`.

    Raises:
        ValueError: ``FLASHLANE_CACHE_DIR`` begins with the home of a user who has none.
    """
    chosen, base, home = map(os.environ.get, (DIRECTORY_VARIABLE, "XDG_CACHE_HOME", "HOME"))
    if home is None:  # the system's list of users says where it is
        return _directory.__wrapped__(chosen, base, home)
    return _directory(chosen, base, home)


@functools.lru_cache(maxsize=16)
def _directory(chosen: str | None, base: str | None, home: str | None) -> Path:
    """:func:`directory` of an environment: each call of new lengths asks for it, and a path is slow to build."""
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ValueError(
                f"{DIRECTORY_VARIABLE} is {chosen!r}, of which no home is known; it may be the whole path of a folder"
            ) from None
    try:
        return Path(base, "flashlane") if base else Path("~/.cache/flashlane").expanduser()
    except RuntimeError:
        return NO_DIRECTORY


def size_limit() -> int:
    """``FLASHLANE_CACHE_LIMIT`` in bytes (``500M``, ``2G``; 0 keeps nothing), else 1 GiB.

    Raises:
        ValueError: it is not a size.
    """
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_LIMIT
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{LIMIT_VARIABLE} is {text!r}; it may be bytes or a size such as 500M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


def ptx(folder: Path | None = None) -> DiskCache:
    """Kernels as PTX (``jit/ptx.py``), compressed: those of flashlane's own wheel, or a folder that is to be filled."""
    return DiskCache(folder or PTX_FOLDER, reads_only=folder is None, suffix=_PTX)


class Installed(NamedTuple):
    """The cubins of an installed package ``flashlane-cubins``, compiled elsewhere (``tools/cubin_wheel.py``)."""

    store: DiskCache
    compiler: str
    """What ``toolchain.compiler_version()`` was where they were compiled; part of their keys."""
    runtime_headers: str
    """What ``toolchain.runtime_headers_digest()`` gave."""


def installed() -> Installed | None:
    """The installed cubins, or None where there are none, where their index cannot be read, or where none count."""
    return _found_installed() if _installed_counts else None


_installed_counts = True


@contextlib.contextmanager
def without_installed() -> Iterator[None]:
    """Inside no cubins are installed, so that the cache gets all that is compiled: a folder for another machine."""
    global _installed_counts
    before, _installed_counts = _installed_counts, False
    try:
        yield
    finally:
        _installed_counts = before


@functools.cache
def _found_installed() -> Installed | None:
    spec = importlib.util.find_spec(CUBINS_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            index = json.loads(Path(folder, CUBINS_INDEX).read_text(encoding="utf-8"))
            store = DiskCache(Path(folder), reads_only=True)
            return Installed(store, index["compiler"], index["runtime_headers"])
    return None
