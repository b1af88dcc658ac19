"""Two results files of ``flashlane bench`` against each other: which cells moved, by more than noise explains.

A cell is one implementation (tag) on one problem. Its evidence is the median of every round, which each row has.
The logarithms of the rounds of both runs go into Yuen's test of trimmed means (K. K. Yuen, Biometrika 61, 1974), which
is Welch's t test with the extreme fifth of the rounds cut at either end, so that one disturbed round neither makes nor
hides a loss. A rank or permutation test would not do: of 5 rounds against 5 its smallest p is 0.008, which no
correction for more than a few cells leaves significant.

What is tested is not "equal" but "apart by at most the floor": the rounds of one run share its clocks, temperature and
allocations and so do not show how far two runs of the same code lie apart; the floor is the room left for that. Holm's
correction keeps the chance of even one false alarm in a whole comparison below alpha.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashlane.bench.measure.defaults import ALPHA, FLOOR_PERCENT
from flashlane.bench.measure.results import ERROR, FAIL, FORMAT, finite, not_json
from flashlane.core.files import parse_json

REPORT_FORMAT = "flashlane-regress/1"
TRIM = 0.2
"""Part of the rounds cut at either end."""
RESOLUTION = 1e-3
"""Standard error at least assumed: a clock's tick can make every round of a short kernel the same number."""
LOSS, GAIN, SUSPECT, SAME = "loss", "gain", "suspect", "same"
BROKEN, MISSING, NEW = "broken", "missing", "new"
WANTED = f"a results file of `flashlane bench` (JSON, format {FORMAT!r})"


@dataclass(frozen=True)
class Recorded:
    """One row of a results file, as far as it is compared."""

    kind: str
    status: str
    message: str
    method: str | None
    samples: tuple[float, ...]
    """Milliseconds, one a round; empty where it was not timed."""


@dataclass(frozen=True)
class Run:
    """One results file: its rows by (problem, tag), and why others did not run."""

    path: str
    environment: dict[str, Any]
    rows: dict[tuple[str, str], Recorded]
    skipped: dict[tuple[str, str], str]

    @property
    def device(self) -> str:
        return str(self.environment.get("device"))

    @property
    def timed(self) -> int:
        """How many of its rows were timed."""
        return sum(1 for row in self.rows.values() if row.samples)


@dataclass(frozen=True)
class Cell:
    """One implementation on one problem, before and after."""

    problem: str
    tag: str
    kind: str
    verdict: str
    """``loss`` or ``gain`` (significant), ``suspect`` (slower by more than the floor, but within noise), ``same``,
    ``broken`` (was timed, now fails its check or raises), ``missing`` (was timed, now is not) or ``new``."""
    before_ms: float | None = None
    after_ms: float | None = None
    change: float | None = None
    """Trimmed mean time after over before, less 1: 0.05 is 5 % slower."""
    p: float | None = None
    """Holm-corrected probability of such a distance beyond the floor from noise alone."""
    rounds: tuple[int, int] = (0, 0)
    message: str = ""

    @property
    def fails(self) -> bool:
        """Whether it makes the comparison fail; a peer's faults are its own, and only shown."""
        return self.kind == "kernel" and self.verdict in (LOSS, BROKEN)


@dataclass(frozen=True)
class Comparison:
    """All cells of two runs, in the order of the baseline, new ones last."""

    baseline: Run = field(repr=False)
    later: Run = field(repr=False)
    floor: float
    alpha: float
    cells: tuple[Cell, ...]

    def of(self, *verdicts: str) -> list[Cell]:
        """The cells with one of these verdicts."""
        return [cell for cell in self.cells if cell.verdict in verdicts]

    @property
    def compared(self) -> int:
        """How many cells were timed in both runs."""
        return sum(1 for cell in self.cells if cell.change is not None)

    @property
    def failed(self) -> list[Cell]:
        """The kernels' cells that are significantly slower or broken."""
        return [cell for cell in self.cells if cell.fails]

    @property
    def peer_change(self) -> float | None:
        """Median change of the peers, whose code is not ours: what the machine or a library did."""
        changes = [c.change for c in self.cells if c.kind != "kernel" and c.change is not None]
        return statistics.median(changes) if changes else None

    def summary(self) -> str:
        """One line: how many cells, how many moved which way."""
        counts = [f"{len(self.of(v))} {words}" for v, words in SUMMARY.items() if self.of(v) or v in (LOSS, GAIN)]
        peers = "" if self.peer_change is None else f"; the peers moved by {percent(self.peer_change)} in the median"
        return f"{self.compared} cells compared: {', '.join(counts)}{peers}"

    def to_json(self) -> str:
        """Everything, as JSON."""
        runs = {name: {"path": r.path, **r.environment} for name, r in self._runs()}
        body = {
            "format": REPORT_FORMAT,
            **runs,
            "floor": self.floor,
            "alpha": self.alpha,
            "summary": self.summary(),
            "failed": len(self.failed),
            "peer_change": self.peer_change,
            "cells": [{**asdict(cell), "fails": cell.fails} for cell in self.cells],
        }
        return json.dumps(finite(body), indent=1, allow_nan=False) + "\n"

    def _runs(self) -> tuple[tuple[str, Run], tuple[str, Run]]:
        return ("baseline", self.baseline), ("later", self.later)


SUMMARY = {
    LOSS: "slower",
    GAIN: "faster",
    BROKEN: "broken",
    SUSPECT: "suspect (slower, but within noise)",
    MISSING: "missing in the later run",
    NEW: "new",
}


def percent(change: float) -> str:
    """``+5.0 %``: a positive change is a longer time."""
    return f"{100 * change:+.1f} %"


def load(path: Path) -> Run:
    """Read a results file.

    Raises:
        ValueError: it cannot be read, is not a results file, is damaged, or has no timed row; the message names it.
    """
    return parse(read(path), str(path))


def read(path: Path) -> str:
    """The text of a results file.

    Raises:
        ValueError: it cannot be read; the message names it.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{str(path)!r} does not exist; it must be {WANTED}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"{str(path)!r} cannot be read ({why}); it must be {WANTED}") from None


def parse(text: str, path: str) -> Run:
    """The run in the text of a results file.

    Raises:
        ValueError: it is not a results file, is damaged, or has no timed row; the message has ``path``.
    """
    try:
        body = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path!r} {not_json(Path(path), error)}; it must be {WANTED}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"{path!r} has format {found!r}; it must be {WANTED}")
    try:
        environment = dict(body["environment"])
        skipped = {(str(s["problem"]), str(s["tag"])): str(s["reason"]) for s in body.get("skipped", ())}
        rows: dict[tuple[str, str], Recorded] = {}
        for number, row in enumerate(body["rows"]):
            key = str(row["problem"]), str(row["tag"])
            if key in rows:
                raise ValueError(f"row {number} repeats {' · '.join(key)}")
            rows[key] = _recorded(row, number)
    except KeyError as error:
        raise ValueError(f"{path!r} is damaged: {error} is missing; it must be {WANTED}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path!r} is damaged: {error}; it must be {WANTED}") from None
    run = Run(path, environment, rows, skipped)
    if not run.timed:
        raise ValueError(f"{path!r} has no timed row; it must be {WANTED} that timed something")
    return run


def _recorded(row: dict[str, Any], number: int) -> Recorded:
    kind, status, message = str(row["kind"]), str(row["status"]), str(row.get("message", ""))
    timing = row.get("timing")
    if timing is None:
        return Recorded(kind, status, message, None, ())
    samples = timing["samples"]
    right = isinstance(samples, list) and samples
    if not right or any(type(s) not in (int, float) or not math.isfinite(s) or s <= 0 for s in samples):
        raise ValueError(f"row {number} has samples {samples!r:.80}; they must be milliseconds above 0, one a round")
    return Recorded(kind, status, message, str(timing["method"]), tuple(map(float, samples)))


def compare(
    baseline: Run,
    later: Run,
    *,
    floor: float = FLOOR_PERCENT / 100,
    alpha: float = ALPHA,
    across_devices: bool = False,
) -> Comparison:
    """Compare two runs cell by cell.

    Args:
        baseline: the run that is compared with.
        later: the run that may be slower.
        floor: change that counts as none, as a fraction of the time.
        alpha: chance of any false alarm among all cells.
        across_devices: compare although the devices differ.

    Raises:
        ValueError: ``floor`` or ``alpha`` is out of range, the devices differ, no cell is timed in both, or one was
            timed in two different ways.
    """
    if not 0 <= floor < 1:
        raise ValueError(f"floor is {floor:g}; it may be a fraction from 0 up to, but not, 1")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha:g}; it may be a probability between 0 and 1")
    if baseline.device != later.device and not across_devices:
        raise ValueError(
            f"{baseline.path!r} was measured on {baseline.device!r}, {later.path!r} on {later.device!r}; "
            "measure both on one device, or say --across-devices"
        )
    common = [key for key, row in baseline.rows.items() if row.samples and _samples(later, key)]
    if not common:
        raise ValueError(f"{baseline.path!r} and {later.path!r} have no timed cell (problem and tag) in common")
    for key in common:
        methods = baseline.rows[key].method, later.rows[key].method
        if methods[0] != methods[1]:
            raise ValueError(
                f"{' · '.join(key)} was timed by {methods[0]!r} in {baseline.path!r} and by {methods[1]!r} in "
                f"{later.path!r}; measure both in one way (--graph or not)"
            )
    tests = [shift_test(_samples(baseline, key), _samples(later, key), math.log1p(floor)) for key in common]
    corrected = holm([p for _, p in tests])
    judged = {
        key: _timed_cell(key, baseline.rows[key], later.rows[key], shift, p, floor, alpha)
        for key, (shift, _), p in zip(common, tests, corrected, strict=True)
    }
    cells = [judged.get(key) or _gone(key, row, later) for key, row in baseline.rows.items() if row.samples]
    cells += [
        Cell(*key, row.kind, NEW, after_ms=statistics.median(row.samples), rounds=(0, len(row.samples)))
        for key, row in later.rows.items()
        if row.samples and not _samples(baseline, key)
    ]
    return Comparison(baseline, later, floor, alpha, tuple(cells))


def _samples(run: Run, key: tuple[str, str]) -> tuple[float, ...]:
    row = run.rows.get(key)
    return row.samples if row else ()


def _timed_cell(
    key: tuple[str, str], before: Recorded, after: Recorded, shift: float, p: float, floor: float, alpha: float
) -> Cell:
    verdict = SAME
    if p < alpha:
        verdict = LOSS if shift > 0 else GAIN
    elif shift > math.log1p(floor):
        verdict = SUSPECT
    rounds = len(before.samples), len(after.samples)
    note = "one round cannot be told from noise; measure with --rounds 7 or more" if min(rounds) < 2 else ""
    times = statistics.median(before.samples), statistics.median(after.samples)
    return Cell(*key, after.kind, verdict, *times, math.expm1(shift), p, rounds, note if verdict == SUSPECT else "")


def _gone(key: tuple[str, str], before: Recorded, later: Run) -> Cell:
    """A cell that the baseline timed and the later run did not."""
    row = later.rows.get(key)
    if row is not None and row.status in (FAIL, ERROR):
        verdict, message = BROKEN, f"{row.status}: {row.message}" if row.message else row.status
    elif row is not None:
        verdict, message = MISSING, row.message or "it was not timed"
    else:
        verdict, message = MISSING, later.skipped.get(key, "the later run does not have it")
    times = {"before_ms": statistics.median(before.samples), "rounds": (len(before.samples), 0)}
    return Cell(*key, before.kind, verdict, **times, message=message)


def shift_test(before: Sequence[float], after: Sequence[float], margin: float) -> tuple[float, float]:
    """Log of the ratio of trimmed mean times, and the two-sided p of it lying beyond ±``margin`` (Yuen's test).

    Of a single round nothing is known about noise, so p is 1.
    """
    (mean_a, var_a, free_a), (mean_b, var_b, free_b) = _trimmed(before), _trimmed(after)
    shift, excess = mean_b - mean_a, abs(mean_b - mean_a) - margin
    if not free_a or not free_b or excess <= 0:
        return shift, 1.0
    total = var_a + var_b
    free = total**2 / (var_a**2 / free_a + var_b**2 / free_b) if total else float(free_a + free_b)
    return shift, min(1.0, 2 * t_tail(excess / max(math.sqrt(total), RESOLUTION), free))


def _trimmed(samples: Sequence[float]) -> tuple[float, float, int]:
    """Trimmed mean of the logarithms, its squared standard error, and its degrees of freedom."""
    logs = sorted(math.log(sample) for sample in samples)
    cut = int(TRIM * len(logs))
    inner = logs[cut : len(logs) - cut]
    mean, free = statistics.fmean(inner), len(inner) - 1
    if not free:
        return mean, 0.0, 0
    winsorised = [inner[0]] * cut + inner + [inner[-1]] * cut
    centre = statistics.fmean(winsorised)
    squares = sum((x - centre) ** 2 for x in winsorised)
    return mean, squares / (len(inner) * free), free


def t_tail(t: float, free: float) -> float:
    """P(T ≥ t) of Student's t.

    Raises:
        ImportError: there is no scipy.
    """
    try:
        from scipy.stats import t as student
    except ImportError as error:
        raise ImportError('regress needs scipy: pip install "flashlane[bench]"') from error
    return float(student.sf(t, free))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Each p corrected for their number (S. Holm, 1979), in the same order."""
    corrected, highest = [0.0] * len(probabilities), 0.0
    for rank, index in enumerate(sorted(range(len(probabilities)), key=probabilities.__getitem__)):
        highest = max(highest, min(1.0, (len(probabilities) - rank) * probabilities[index]))
        corrected[index] = highest
    return corrected
