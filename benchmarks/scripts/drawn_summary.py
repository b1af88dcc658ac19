"""Files of drawn.py: joined, and what their rows amount to (how many problems are ahead, regret, a picture)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import peers_chart

from flashlane.bench.measure.results import write_atomically

FORMAT = "flashlane-drawn/1"
OURS = "flashlane"
SAME = ("device", "commit", "torch", "cudnn", "flash-attn-4", "flashinfer-python")
"""What must be the same for rows to stand in one file."""
WORST = 10
Row = Mapping[str, Any]
Body = Mapping[str, Any]


def read(path: Path) -> dict[str, Any]:
    """A file of drawn.py.

    Raises:
        ValueError: it is none.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else None
        raise ValueError(f"{path} has format {found!r}; it must be {FORMAT!r}")
    return body


def join(folders: Sequence[Path], out: Path) -> list[Path]:
    """Put the rows of files of one name in ``folders`` into one file of that name in ``out``; these files.

    Raises:
        ValueError: two of them are of other devices, commits, versions, protocols or peers, or have the same problem.
    """
    names = sorted({path.name for folder in folders for path in folder.glob("drawn_*.json")})
    if not names:
        raise ValueError(f"--join is {', '.join(map(str, folders))}; no such folder has a file drawn_*.json")
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        bodies = [read(folder / name) for folder in folders if (folder / name).is_file()]
        joined = dict(
            bodies[0], rows=sorted((row for body in bodies for row in body["rows"]), key=itemgetter("number"))
        )
        for body in bodies[1:]:
            if any(body["environment"].get(key) != joined["environment"].get(key) for key in SAME) or any(
                body[key] != joined[key] for key in ("kind", "direction", "seed", "count", "protocols", "peers")
            ):
                raise ValueError(f"--join has files {name} of two devices, commits, versions, lists or protocols")
        numbers = [row["number"] for row in joined["rows"]]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"--join has files {name} of which two hold the same problem")
        write_atomically(out / name, json.dumps(joined, indent=1) + "\n")
    return [out / name for name in names]


def ratios(rows: Sequence[Row], protocol: str) -> list[float]:
    """Time of the fastest peer over ours, ascending, of the problems that a peer ran."""
    return sorted(row["ratio"][protocol] for row in rows if protocol in row.get("ratio", {}))


def figures(rows: Sequence[Row], protocol: str) -> dict[str, float]:
    """Count, share of ratios of at least 1, least and geometric mean; empty without a ratio."""
    values = ratios(rows, protocol)
    if not values:
        return {}
    return {
        "problems": len(values),
        "ahead": sum(ratio >= 1 for ratio in values) / len(values),
        "least": values[0],
        "mean": math.exp(statistics.fmean(map(math.log, values))),
    }


def fastest_of(ms: Mapping[str, Mapping[str, float]], protocol: str) -> str | None:
    """The configuration with the least time under a protocol, or None."""
    return min((name for name in ms if protocol in ms[name]), key=lambda name: ms[name][protocol], default=None)


def regrets(rows: Sequence[Row], protocol: str) -> list[float]:
    """How much longer the chosen configuration takes than the best candidate (0.03: 3 %), ascending.

    Which one is best comes from the first times, how much better it is from the second ones. Where it was not better
    then, the regret is 0.
    """
    losses = []
    for row in rows:
        timed = row.get("candidates", {})
        again, best = timed.get("again", {}), fastest_of(timed.get("ms", {}), protocol)
        if all(protocol in again.get(name, {}) for name in (best, timed.get("chosen"))):
            losses.append(max(0.0, again[timed["chosen"]][protocol] / again[best][protocol] - 1))
    return sorted(losses)


def percentile(values: Sequence[float], share: float) -> float:
    """The least of ascending values that so large a share of them does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def worst(rows: Sequence[Row]) -> list[tuple[float, str, Row]]:
    """Ratio, protocol and row of the problems with the lowest ratio in either protocol, the lowest first."""
    found = [(*min((ratio, name) for name, ratio in row["ratio"].items()), row) for row in rows if row.get("ratio")]
    return sorted(found, key=lambda item: item[:2])[:WORST]


def summary(body: Body) -> Iterator[str]:
    """Lines for a terminal."""
    rows, where = body["rows"], body["environment"]
    title = f"{body['direction']}, {body['kind']}, seed {body['seed']} ({body['role']})"
    yield f"{title}: {len(rows)} of {body['count']} problems, {where.get('device')}, commit {where.get('commit')}"
    for protocol in body["protocols"]:
        found = figures(rows, protocol)
        if found:
            yield (
                f"  {protocol:<8} {found['problems']:4d} problems  {found['ahead']:6.1%} at 1.00 or above  "
                f"least {found['least']:.3f}  geometric mean {found['mean']:.3f}"
            )
        behind = regrets(rows, protocol)
        if behind:
            yield (
                f"  {protocol:<8} {len(behind):4d} problems  regret of the chosen configuration: 95th percentile "
                f"{percentile(behind, 0.95):.1%}, worst {behind[-1]:.1%}"
            )
    told = worst(rows)
    if told:
        yield "  ratio          ours   peer TFLOP/s"
    for ratio, protocol, row in told:
        peer = row["best_peer"][protocol]
        ours, theirs = row["tflops"][OURS][protocol], row["tflops"][peer][protocol]
        yield f"  {ratio:.3f} {protocol:<7} {ours:6.1f} {theirs:6.1f} {peer:<10} {row['number']:3d}: {row['problem']}"
    missing: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row.get("absent", {}).items():
            missing.setdefault(name, []).append(why)
    for name, reasons in missing.items():
        often = statistics.mode(reasons)
        yield f"  {name} is absent from {len(reasons)} problems: {often[:48]} ({reasons.count(often)} times)"
    behind_others: dict[str, list[float]] = {}
    for row in rows:
        for name, times in row.get("far_behind", {}).items():
            behind_others.setdefault(name, []).append(times)
    for name, times in behind_others.items():
        yield f"  {name} is not timed in {len(times)} problems: {min(times):.2f} times the fastest peer's time or more"
    for row in rows:
        if not row["ok"]:
            yield f"  WRONG {row['number']}: {row['problem']}: {row['absent'].get(OURS, '')[:160]}"


def picture(bodies: Sequence[Body], target: Path) -> bool:
    """Draw the sorted ratios, a panel for each file and protocol; False where there are none or no matplotlib."""
    panels = {
        f"{body['direction']}, {body['kind']}, {protocol}": found
        for body in bodies
        for protocol in body["protocols"]
        if (found := ratios(body["rows"], protocol))
    }
    if not panels:
        return False
    try:
        peers_chart.draw(panels, target)
    except ImportError:
        return False
    return True
