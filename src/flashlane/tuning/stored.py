"""What ``flashlane tune`` found on this GPU: the fastest configuration of a tag, and the fastest tag, by problem class.

One JSON file a device model, in ``<cache>/tune``: read once a process, replaced in one step under a lock, ignored with
a warning where it is damaged, and entry by entry where the device code is no longer the one that was timed. Without a
file the kernels' own heuristics decide. The measuring is in :mod:`flashlane.tuning.search`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch

from flashlane.core import registry
from flashlane.core.arch import arch_of
from flashlane.core.files import parse_json, write_atomically
from flashlane.core.problem import FEATURES, AttentionProblem
from flashlane.core.registry import BackwardKernel
from flashlane.core.tuned import PLAIN, backward_tag, few_blocks, folder
from flashlane.jit import toolchain
from flashlane.kernels.device_file import device_code, imported_device_code

try:
    import fcntl
except ImportError:  # Windows: two processes that tune at once may lose one's entries there, never half a file
    fcntl = None  # type: ignore[assignment]

FORMAT = "flashlane-tune/1"


@dataclass(frozen=True)
class ProblemClass:
    """Problems that one measurement speaks for. Lengths stand for all down to half of them."""

    tag: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    seqlen_q: int
    """The power of two at or above the problem's; seqlen_k in the same way."""
    seqlen_k: int
    few_blocks: bool
    aligned: bool

    @property
    def key(self) -> str:
        """The class as one stable line: ``mma(naive) f16 D64/64 causal Q8192 K8192 many-blocks aligned``."""
        words = [self.tag, self.dtype, f"D{self.head_dim}/{self.head_dim_v}", "causal" if self.causal else "full"]
        words += [f"Q{self.seqlen_q}", f"K{self.seqlen_k}", "few-blocks" if self.few_blocks else "many-blocks"]
        return " ".join([*words, "aligned" if self.aligned else "unaligned"])


@dataclass(frozen=True)
class Tuned:
    """One stored choice, and where it comes from."""

    tag: str
    config: dict[str, Any]
    """Fields of the kernel's config dataclass."""
    problem: str
    ms: float
    tflops: float | None
    source: str
    """The device file."""
    digest: str
    """The digest of the device file and the headers when it was timed."""
    date: str
    versions: dict[str, Any]


def class_of(tag: str, problem: AttentionProblem) -> ProblemClass | None:
    """The class of a problem for a tag; None for what is not tuned: windows, score modifiers, packed sequences."""
    if problem.window_left >= 0 or problem.window_right > 0 or any(getattr(problem, name) for name in FEATURES):
        return None
    return ProblemClass(
        tag=tag,
        dtype=problem.dtype_name,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        seqlen_q=_bucket(problem.seqlen_q),
        seqlen_k=_bucket(problem.seqlen_k),
        few_blocks=few_blocks(problem),
        aligned=problem.aligned,
    )


def _bucket(length: int) -> int:
    return 1 << (length - 1).bit_length() if length else 0


def backward_class(kernel: BackwardKernel, problem: AttentionProblem) -> ProblemClass | None:
    """The class of a problem for a backward kernel; None for what is not tuned, such as sums in one order."""
    return None if problem.deterministic else class_of(backward_tag(kernel), problem)


def find(tag: str, problem: AttentionProblem) -> Tuned | None:
    """The stored choice for a problem of a GPU, as :mod:`flashlane.core.tuned` asks for it."""
    table = _table(str(problem.arch))
    asked = class_of(tag, problem) if table else None
    return None if asked is None else table.get(asked.key)


@registry.memoised
def _table(arch: str) -> dict[str, Tuned]:
    """What is known of the first visible GPU of an architecture; read once, until something is stored."""
    device = device_of(arch)
    return {} if device is None else load(path_of(device, arch))


def device_of(arch: str) -> str | None:
    """Name of the first visible GPU of that architecture, or None."""
    if not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if arch_of(torch.device("cuda", index)) == arch:
            return torch.cuda.get_device_name(index)
    return None


def path_of(device: str, arch: str) -> Path:
    """The file of a device model."""
    return folder() / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-{arch}.json"


def load(path: Path) -> dict[str, Tuned]:
    """The entries of a file that hold for the device code as it is; warns of what it leaves out."""
    try:
        _, _, entries = _read(path)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        _warn(f"flashlane ignores {path}, which it cannot read ({type(error).__name__}: {error}): tune again")
        return {}
    current = {key: entry for key, entry in entries.items() if _is_current(entry)}
    if len(current) < len(entries):
        _warn(
            f"flashlane ignores {len(entries) - len(current)} of {len(entries)} entries of {path}: they were timed "
            "with other device code; run flashlane tune again"
        )
    return current


def _read(path: Path) -> tuple[str, str, dict[str, Tuned]]:
    """Device, architecture and every entry of a file, current or not; one of :data:`UNREADABLE` where it is damaged."""
    body = parse_json(path.read_text(encoding="utf-8"))
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}, not {FORMAT!r}")
    return str(body["device"]), str(body["arch"]), {key: _entry(value) for key, value in body["entries"].items()}


UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a file raises that is damaged, or of another version of flashlane."""


def _entry(value: Mapping[str, Any]) -> Tuned:
    entry = Tuned(**value)
    wrong = [f.name for f in fields(Tuned) if not isinstance(getattr(entry, f.name), _KINDS[f.name])]
    if wrong or not all(isinstance(item, PLAIN) for item in entry.config.values()):
        raise ValueError(f"an entry has a bad {', '.join(wrong) or 'config'}")
    return entry


_KINDS: dict[str, tuple[type, ...]] = {field.name: (str,) for field in fields(Tuned)}
_KINDS |= {"config": (dict,), "ms": (int, float), "tflops": (int, float, type(None)), "versions": (dict,)}


def _is_current(entry: Tuned) -> bool:
    try:
        return digest_of(entry.source) == entry.digest
    except ValueError:
        return False


@functools.cache
def digest_of(source: str) -> str:
    """SHA-256 of a device file, all headers that it includes and the Triton files that it imports.

    Raises:
        ValueError: the package has no such file.
    """
    try:
        texts = [device_code(source)]
    except OSError:
        raise ValueError(f"device file is {source!r}, which the package does not have") from None
    others = imported_device_code(source) if source.endswith(".py") else toolchain.device_headers(texts[0])
    texts += [f"{name}\n{text}" for name, text in others.items()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def save(device: str, arch: str, entries: Mapping[str, Tuned]) -> Path:
    """Add entries, by the keys of their classes, to a device's file (in place of older ones), and use them from now."""
    path = path_of(device, arch)
    with _locked(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what cannot be read, or holds no more, goes
            kept = load(path)
        _write(path, device, arch, {**kept, **entries})
    return path


def forget(words: Sequence[str] = ()) -> int:
    """Drop the entries whose tag contains one of the words (without words: all), of every device; how many.

    Entries of other device code count too. A file that cannot be read is dropped without words alone, and else warned
    of: another version of flashlane may have written it.
    """
    dropped = 0
    for path in files():
        with _locked(path):
            try:
                device, arch, entries = _read(path)
            except UNREADABLE as error:
                if words:
                    _warn(f"flashlane leaves {path}, which it cannot read ({type(error).__name__}: {error})")
                else:
                    path.unlink(missing_ok=True)
                continue
            left = {key: e for key, e in entries.items() if words and not any(word in e.tag for word in words)}
            dropped += len(entries) - len(left)
            if not left:
                path.unlink(missing_ok=True)
            elif len(left) < len(entries):
                _write(path, device, arch, left)
    registry.changed()
    return dropped


def files() -> list[Path]:
    """The files of all devices that were tuned with this cache folder."""
    return sorted(folder().glob("*.json"))


def _write(path: Path, device: str, arch: str, entries: Mapping[str, Tuned]) -> None:
    body = {"format": FORMAT, "device": device, "arch": arch}
    body["entries"] = {key: asdict(entry) for key, entry in sorted(entries.items())}
    write_atomically(path, json.dumps(body, indent=1) + "\n")
    registry.changed()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time between reading a file and replacing it; readers need no lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock: IO[str]
    with path.with_suffix(".lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
