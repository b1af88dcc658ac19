"""Benches a grid of problems cell by cell into a journal, so that an interrupted sweep goes on where it stopped.

A cell is one problem in one direction. It is done when its record is on the disk; a sweep that is killed loses only
the cell that it was measuring. An implementation that runs out of memory, hangs or crashes is recorded, and the sweep
goes on.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.isolated import Died, Spec, Workers, join_rates
from flashlane.bench.measure.journal import Journal
from flashlane.bench.measure.progress import Reporter
from flashlane.bench.measure.results import Results, Skipped, results_of, write_atomically
from flashlane.bench.measure.runner import TITLES
from flashlane.core.problem import AttentionProblem

DONE, OOM, DIED = "done", "out of memory", "died"


@dataclass(frozen=True)
class Cell:
    """One problem in one direction."""

    problem: AttentionProblem
    direction: Direction

    @property
    def key(self) -> str:
        """The title, which is unique in a grid and the same in every run."""
        return self.problem.describe() + TITLES[self.direction]

    def seed(self, base: int) -> int:
        """The seed of the cell's inputs; it does not depend on the other cells of the grid."""
        return base + zlib.crc32(self.key.encode()) % (1 << 31)


def cells_of(problems: Iterable[AttentionProblem], directions: Sequence[Direction]) -> list[Cell]:
    """Every problem in every direction, each once."""
    cells = {(cell := Cell(problem, direction)).key: cell for problem in problems for direction in directions}
    return list(cells.values())


def common_of(spec: Spec, seed: int, environment: dict[str, Any]) -> dict[str, Any]:
    """What all cells of a journal have in common: the device, the versions, the commit, the seed and the options."""
    machine = {name: environment.get(name) for name in ("device", "driver", "torch", "flashlane", "commit")}
    chosen = asdict(spec)
    chosen.pop("directions")  # each cell has its own
    return {**machine, "seed": seed, **chosen}


def sweep(
    cells: Sequence[Cell],
    spec: Spec,
    journal: Journal,
    *,
    seconds: float,
    seed: int,
    reporter: Reporter,
    retry: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Bench the cells that the journal does not have; ``retry`` also benches those whose status is not ``done``.

    Raises:
        journal.Full: the journal cannot be written; what is in it is kept.
        ValueError: the worker refused a cell.
    """
    todo = [cell for cell in cells if _is_open(journal.records.get(cell.key), retry)]
    with Workers(spec, seconds, reporter) as workers:
        for cell in todo:
            try:
                results = workers.run(cell.problem, cell.direction, cell.seed(seed))
            except Died as error:
                journal.add(cell.key, {"status": DIED, "message": error.reason, "results": None})
                say(f"{cell.key}: {error.reason}")
                continue
            journal.add(cell.key, {"status": status_of(results), "results": as_json(results)})


def _is_open(record: dict[str, Any] | None, retry: bool) -> bool:
    return record is None or (retry and record["status"] != DONE)


def status_of(results: Results) -> str:
    """``out of memory`` when nothing was timed and an implementation ran out of memory; ``done`` otherwise."""
    if any(row.timing for row in results.rows) or not lacking_memory(results):
        return DONE
    return OOM


def lacking_memory(results: Results) -> list[str]:
    """The tags that ran out of memory."""
    lines = [(row.tag, row.message) for row in results.rows] + [(s.tag, s.reason) for s in results.skipped]
    return [tag for tag, text in lines if text.startswith("out of memory") or text.endswith(": out of memory")]


def as_json(results: Results) -> dict[str, Any]:
    """Results as the values that JSON holds."""
    return json.loads(results.to_json())


def collected(journal: Journal, cells: Sequence[Cell]) -> Results | None:
    """What the journal has of these cells, as one run's results; None when no cell has results."""
    results: Results | None = None
    lost: list[Skipped] = []
    for cell in cells:
        record = journal.records.get(cell.key)
        if record is None:
            continue
        if record["results"] is None:
            lost.append(Skipped(cell.key, "(everything)", f"{record['status']}: {record['message']}"))
            continue
        of_cell = results_of(record["results"], str(journal.path))
        if results is None:
            results = of_cell
        else:
            results.rows += of_cell.rows
            results.skipped += of_cell.skipped
            join_rates(results.environment, of_cell.environment)
            results.notes += [note for note in of_cell.notes if note not in results.notes]
    if results is not None:
        results.skipped += lost
        results.settings["directions"] = list(dict.fromkeys(cell.direction for cell in cells))
        results.settings["seed"] = journal.common.get("seed")
        results.settings["sweep"] = {"cells": len(cells), "done": len(journal.records), "journal": journal.path.name}
    return results


def summary_rows(results: Results) -> list[tuple[str, ...]]:
    """The row of every cell, with the columns of :data:`HEAD`."""
    from flashlane.bench.present.table import NONE, significant
    from flashlane.bench.present.verdict import duels, times

    rows = []
    for duel in duels(results):
        title, ours, peer = duel.problem, duel.ours, duel.peer
        members = [row for row in results.rows if row.problem == title]
        few = Results({}, {}, members, [s for s in results.skipped if s.problem == title])
        lacking = ", ".join(lacking_memory(few))
        figures = (significant(ours.timing.median), significant(ours.tflops)) if ours else (NONE, NONE)
        tags = (ours.tag if ours else NONE, peer.tag if peer else NONE)
        rows.append((title, tags[0], *figures, tags[1], times(duel.ratio), lacking))
    return rows


HEAD = ("problem", "fastest of ours", "ms", "TFLOP/s", "best peer", "× best peer", "out of memory")


def markdown(results: Results) -> str:
    """The summary as Markdown."""
    lines = [HEAD, ("---", "---", "---:", "---:", "---", "---:", "---"), *summary_rows(results)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    where = results.environment
    head = f"{where.get('device')}; torch {where.get('torch')}; commit {where.get('commit')}; {where.get('date')}"
    return f"{head}\n\n{table}\n"


def write(results: Results, folder: Path, name: str) -> list[Path]:
    """Write ``NAME.json``, ``.csv`` and ``.md``, each atomically, and return their paths."""
    texts = {".json": results.to_json(), ".csv": results.to_csv(skipped=False), ".md": markdown(results)}
    for suffix, text in texts.items():
        write_atomically(folder / f"{name}{suffix}", text)
    return [folder / f"{name}{suffix}" for suffix in texts]
