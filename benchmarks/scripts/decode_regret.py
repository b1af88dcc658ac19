"""What the decode kernel's predictions lose to the fastest candidates of timed problems, and how far off they are.

    PYTHONPATH=src python3 benchmarks/scripts/decode_regret.py [FILE] [--worst 8]

FILE is what ``time_choices.py --family decode`` writes. Candidates of the table's shapes with any number of splits, and
stream-K, are predicted; as in a call, only those that a problem's choice compares may be chosen. Needs no GPU: what an
edit of ``kernels/split_kv.py`` changes is seen at once. Prints the summary and the worst choices.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from choice_families import decode_configs
from cost_fit import print_regrets, set_offsets
from hopper_shapes import Shape, problem_of
from timings_file import check_timings

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.decode.config import DecodeConfig
from flashlane.kernels.decode.select import compared_configs, predicted_time

FILE = Path(__file__).resolve().parents[1] / "results" / "choices_decode_1121.json"
ROWS = 32
"""Query rows of a KV head beyond which the Hopper forward runs a problem."""


@dataclass
class Timed:
    """A timed candidate, as ``cost_fit.Row``."""

    number: int
    microseconds: float
    title: str
    words: str
    offset: float = 0.0


def candidate_of(words: str, configs: dict[str, DecodeConfig]) -> tuple[DecodeConfig, int | None]:
    """The configuration that the results' words name, and its most splits; None with stream-K.

    Args:
        words: ``cp.async 1x8x16, 3 stages, at most 4 splits``.
        configs: those of the problem, by what they are called.

    Raises:
        SystemExit: the problem has no such configuration, or the words name no splits, as those of older files.
    """
    name, _, most = words.partition(", at most ")
    config = configs.get(name)
    if config is None or not (config.stream_k or most):
        raise SystemExit(f"{words!r} is not a configuration with its splits; time the problems again (time_choices.py)")
    return config, None if config.stream_k else int(most.split()[0])


def timed(body: dict[str, Any]) -> tuple[list[Timed], list[float]]:
    """The candidates of a file of results, and the logarithm of predicted over measured time.

    That is infinite for those that the problem's choice does not compare. Problems whose choice was not timed, since it
    was no candidate then, are left out.
    """
    rows, errors = [], []
    for number, row in enumerate(body["rows"]):
        problem: AttentionProblem = problem_of(Shape(**{**row["problem"], "lengths": tuple(row["problem"]["lengths"])}))
        if problem.rows_of_kv_head > ROWS:
            continue
        configs = {config.describe(): config for config, _ in decode_configs(problem)}
        compared = compared_configs(problem)
        chosen = min(compared, key=lambda config, problem=problem: predicted_time(problem, config)).describe()
        if not any(words.partition(", at most ")[0] == chosen for words, *_ in row["ms"]):
            continue
        for words, _, ms, *_ in row["ms"]:
            config, splits = candidate_of(words, configs)
            rows.append(Timed(number, 1e3 * ms, row["title"], words))
            predicted = predicted_time(problem, config, splits) if config in compared else math.inf
            errors.append(math.log(predicted / rows[-1].microseconds))
    return rows, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--worst", type=int, default=8, help="problems that are listed")
    arguments = parser.parse_args()
    check_timings(parser, [arguments.file])
    rows, errors = timed(json.loads(arguments.file.read_text(encoding="utf-8")))
    set_offsets(rows, np.array(errors))
    print_regrets(arguments.file.name, rows, np.array(errors), arguments.worst)


if __name__ == "__main__":
    main()
