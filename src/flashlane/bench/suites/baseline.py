"""The baseline logs: the problems of the benchmark logs from which this project started, and the times in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flashlane.bench.measure.grid import make_problem
from flashlane.core.problem import DTYPES, AttentionProblem

REPORTED = Path(__file__).with_name("baseline_reported.json")


@dataclass(frozen=True)
class Line:
    """One problem of a log, and the implementations that the log timed on it."""

    log: str
    problem: AttentionProblem
    kernels: tuple[str, ...]
    peers: tuple[str, ...]
    reported: dict[str, float] = field(default_factory=dict, hash=False)
    """The log's milliseconds by tag, on the GPU of the log."""


def lines(arch: str | None, path: Path = REPORTED) -> Iterator[Line]:
    """Every problem of every log, as problems of an architecture."""
    for log in json.loads(path.read_text(encoding="utf-8"))["logs"]:
        for row in log["rows"]:
            problem = make_problem(*row["shape"], DTYPES[row["dtype"]], arch=arch)
            kernels = tuple(tag for tag in row["ms"] if not tag.startswith("("))
            peers = tuple(tag for tag in row["ms"] if tag.startswith("("))
            yield Line(log["name"], problem, kernels, peers, row["ms"])


def select_lines(arch: str | None, words: tuple[str, ...]) -> list[Line]:
    """The lines whose title and log have all of the words.

    Raises:
        ValueError: there is none; the message says what titles look like.
    """
    every = list(lines(arch))
    chosen = [line for line in every if all(word in f"{line.problem.describe()}, {line.log}" for word in words)]
    if not chosen:
        first = every[0]
        raise ValueError(
            f"--only is {','.join(words)!r}; no problem of the logs has all of these words, "
            f"the first is {first.problem.describe() + ', ' + first.log!r} (--list shows them)"
        )
    return chosen
