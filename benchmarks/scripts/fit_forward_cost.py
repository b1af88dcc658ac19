"""Fit the coefficients of the forward's cost model to timings of candidates, and write them into the package.

    PYTHONPATH=src python3 benchmarks/scripts/fit_forward_cost.py benchmarks/results/choices_forward.json [MORE …]
        [--unaligned benchmarks/results/choices_forward_unaligned.json]
        [--out src/flashlane/kernels/hopper/forward/cost.json] [--held-out 5] [--keep]

The timings are those of ``time_choices.py`` at fitting seeds. Each shape of a class of head dims has three coefficients
(a tile, an n-block, a masked n-block), all shapes share five more. What a problem's candidates have in common (the
clock of the moment, the power that random data take) is no choice: each problem has an offset, which is dropped.
Printed are the errors within problems and the regret: the chosen candidate's time over the fastest one's. With
``--held-out K`` each K-th problem is left out of the fit, and their regret is printed apart. With ``--keep`` only the
shapes of these timings are fitted; the other coefficients of the package stay, and so do those that all shapes share.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cost_fit import print_regrets, regrets, set_offsets
from hopper_shapes import Shape, problem_of
from scipy.optimize import least_squares
from timings_file import check_timings

from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.forward import cost
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.tiles import class_of
from flashlane.kernels.memory_rate import overlapped
from flashlane.kernels.tile_cost import Coefficients, TileBlocks

START = cost.Traffic(
    launch=4.0,
    excess=0.06,
    enough=2.5,
    resident=40.0,
    unaligned=0.0006,
    unshared=25.0,
    unaligned_tile=0.3,
    few_heads=0.25,
    drift=0.06,
    apart=0.01,
)
UNALIGNED = (0.0, 0.0003, 0.0006, 0.0011, 0.0016)
UNSHARED = (15.0, 20.0, 25.0, 30.0)
UNALIGNED_TILE = (0.0, 0.1, 0.2, 0.3, 0.4)
"""Values of the coefficients that problems with other head dims decide."""
GRID = {
    "few_heads": (0.0, 0.1, 0.2, 0.3, 0.5, 0.8),
    "enough": (0.4, 0.8, 1.2, 1.6, 2.0, 2.5, 3.0),
    "excess": (0.0, 0.03, 0.06, 0.1, 0.15, 0.25),
    "resident": (10.0, 20.0, 30.0, 40.0, 60.0),
    "drift": (0.0, 0.02, 0.04, 0.06, 0.08, 0.12),
    "apart": (0.0, 0.005, 0.01, 0.015, 0.02, 0.03),
}
"""Values that are tried of what all shapes share, one after the other."""
FILE = 1000
"""So many numbers of problems are kept for each file of timings."""
LEAST_MICROSECONDS = 45.0
"""Problems whose fastest candidate takes less are left out: the host was timed there."""
FIRST = np.log([2.0, 1.0, 0.4])
"""Of a tile, an n-block and a masked one over what the products alone take: where the fit begins, and weakly stays."""


@dataclass
class Row:
    """A timed candidate."""

    number: int
    """Of its problem."""
    problem: AttentionProblem
    config: HopperConfig
    microseconds: float
    blocks: TileBlocks
    name: str
    unit: float
    """Microseconds of an n-block's products at the rate of the tensor cores."""
    offset: float = 0.0

    @property
    def title(self) -> str:
        """The title of the problem."""
        return self.problem.describe()[:60]

    @property
    def words(self) -> str:
        """The words of the configuration."""
        return self.config.describe()

    def time(self, values: np.ndarray, traffic: cost.Traffic) -> float:
        """Predicted microseconds, with coefficients in units of :attr:`unit`."""
        tile, block, masked = np.exp(values) * self.unit
        costs = self.blocks.costs(cost.with_packing(Coefficients(tile, block, masked), self.config))
        heads = self.problem.heads // self.config.packed_heads * self.problem.batch * self.config.v_slices
        section = min(heads, self.config.heads_per_section or 1)
        factor = cost.slowdown(self.problem, self.config, section, costs, block, traffic)
        tiles = cost.until_done(costs, heads, section, SMS // self.config.cluster, factor)
        return traffic.launch + overlapped(tiles, cost.reading(self.problem, self.config, self.blocks.share))

    def time_in_class(self, traffic: cost.Traffic) -> float:
        """The same with the coefficients that the package has, in proportion to the products of this head dim."""
        one = cost.coefficients_of(self.config)
        values = np.log([one.tile / self.unit, one.block / self.unit, one.masked / self.unit])
        return self.time(values, traffic)


def rows_of(path: Path, aligned: bool = True, first: int = 0) -> list[Row]:
    """All candidates of a file that the kernel still has.

    Args:
        path: of the timings.
        aligned: only problems with the head dims of their class.
        first: number of the first problem.
    """
    rows, kernel = [], registry.get("hopper(wgmma+tma)")
    for number, entry in enumerate(json.loads(path.read_text())["rows"], first):
        problem = problem_of(Shape(**(entry["problem"] | {"lengths": ()})))
        if 1e3 * min(ms for _, _, ms, _ in entry["ms"]) < LEAST_MICROSECONDS:
            continue
        shapes = (dataclasses.replace(c, heads_per_section=0) for c in kernel.candidates(problem))
        known = {config.describe(): config for config in shapes}
        one = class_of(problem.head_dim, problem.head_dim_v)
        exact = (one.head_dim, one.head_dim_v) == (problem.head_dim, problem.head_dim_v)
        for described, section, ms, _ in entry["ms"]:
            config = known.get(described.split(", heads_per_section")[0])
            if config is None or config.split or (aligned and not exact):
                continue
            if config.cluster > 1 and problem.has_right_only:  # which are not compared
                continue
            config = dataclasses.replace(config, heads_per_section=section)
            name = cost.name_of(one.head_dim, one.head_dim_v, cost.shape_of(config))
            unit = (
                2e-6 * config.cta_rows * config.block_n * (one.head_dim + one.head_dim_v) / (cost.MATRIX_TFLOPS / SMS)
            )
            rows.append(Row(number, problem, config, 1e3 * ms, cost.blocks_of(problem, config), name, unit))
    return rows


def fit(rows: list[Row], traffic: cost.Traffic, fixed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Coefficients of each shape, by least squares on the logarithms."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.name].append(row)

    def solve(name: str, mine: list[Row]) -> np.ndarray:
        def residuals(values: np.ndarray) -> np.ndarray:
            errors = [math.log(row.time(values, traffic) / row.microseconds) - row.offset for row in mine]
            return np.concatenate([errors, 0.05 * (values - FIRST)])

        start = fixed.get(name, FIRST)
        return least_squares(residuals, start, loss="soft_l1", f_scale=0.03, max_nfev=7, diff_step=1e-2).x

    return {name: solve(name, mine) for name, mine in groups.items()}


def errors_of(rows: list[Row], values: dict[str, np.ndarray], traffic: cost.Traffic) -> np.ndarray:
    return np.array([math.log(row.time(values[row.name], traffic) / row.microseconds) for row in rows])


def spread_of(rows: list[Row], values: dict[str, np.ndarray], traffic: cost.Traffic) -> float:
    """Standard deviation of the errors within problems."""
    return float(np.std(errors_of(rows, values, traffic) - np.array([row.offset for row in rows])))


def fit_unaligned(rows: list[Row], traffic: cost.Traffic) -> cost.Traffic:
    """The same with the coefficients of unaligned rows that have the least sum of mean regret and error.

    Args:
        rows: of problems whose head dim is not that of their class.
        traffic: the coefficients so far.
    """
    rows = [
        row for row in rows if class_of(row.problem.head_dim, row.problem.head_dim_v).head_dim != row.config.head_dim
    ]
    ratios = {}
    for unaligned, unshared, tile in itertools.product(UNALIGNED, UNSHARED, UNALIGNED_TILE):
        tried = traffic._replace(unaligned=unaligned, unshared=unshared, unaligned_tile=tile)
        errors = np.array([math.log(row.time_in_class(tried) / row.microseconds) for row in rows])
        set_offsets(rows, errors)
        spread = float(np.std(errors - np.array([row.offset for row in rows])))
        regret = float(np.mean([ratio for ratio, _, _ in regrets(rows, errors)]) - 1)
        ratios[tried] = regret + spread, errors
    best = min(ratios, key=lambda tried: ratios[tried][0])
    set_offsets(rows, ratios[best][1])
    print_regrets("unaligned", rows, ratios[best][1], worst=5)
    return best


def with_more(
    arguments: argparse.Namespace, shapes: dict[str, list[float]], source: dict, summary: dict[str, float]
) -> dict:
    """The package's file with the coefficients of more shapes, and what these are fitted to."""
    body = json.loads(arguments.out.read_text(encoding="utf-8"))
    more = {"timings": [path.name for path in arguments.timings], "seed": source["seed"], "fit": summary}
    more |= {"environment": {name: source["environment"].get(name) for name in ("device", "commit", "date")}}
    more |= {"shapes": list(shapes)}
    kept = [each for each in body.get("more", []) if each["timings"] != more["timings"]]
    body["shapes"] = dict(sorted({**body["shapes"], **shapes}.items()))
    return body | {"more": [*kept, more]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timings", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("src/flashlane/kernels/hopper/forward/cost.json"))
    parser.add_argument("--unaligned", type=Path, help="timings of time_choices.py --unaligned")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="the package's other coefficients stay as they are")
    arguments = parser.parse_args()
    check_timings(parser, [*arguments.timings, *([arguments.unaligned] if arguments.unaligned else [])])
    rows = [row for i, path in enumerate(arguments.timings) for row in rows_of(path, first=FILE * i)]
    held_out = [row for row in rows if arguments.held_out and row.number % arguments.held_out == 0]
    rows = [row for row in rows if row not in held_out] if held_out else rows
    traffic, values = cost.coefficients()[1] if arguments.keep else START, {}
    for _ in range(arguments.rounds):
        values = fit(rows, traffic, values)
        set_offsets(rows, errors_of(rows, values, traffic))
        for name, tried in () if arguments.keep else GRID.items():
            spread = {value: spread_of(rows, values, traffic._replace(**{name: value})) for value in tried}
            traffic = traffic._replace(**{name: min(spread, key=spread.get)})
        summary = print_regrets("fitted", rows, errors_of(rows, values, traffic))
    print(traffic)
    print_regrets("fitted", rows, errors_of(rows, values, traffic), worst=15)
    if held_out:
        held_out = [row for row in held_out if row.name in values]
        errors = errors_of(held_out, values, traffic)
        set_offsets(held_out, errors)
        print_regrets("held out", held_out, errors, worst=10)
        return 0
    if arguments.unaligned:
        files = (arguments.unaligned, *arguments.timings)
        others = [row for i, path in enumerate(files) for row in rows_of(path, aligned=False, first=FILE * i)]
        traffic = fit_unaligned(others, traffic)
    source = json.loads(arguments.timings[0].read_text())
    units = {row.name: row.unit for row in rows}
    shapes = {name: [round(float(x), 4) for x in np.exp(values[name]) * units[name]] for name in sorted(values)}
    if arguments.keep:
        write_atomically(arguments.out, json.dumps(with_more(arguments, shapes, source, summary), indent=1) + "\n")
        return 0
    body = {
        "script": "benchmarks/scripts/fit_forward_cost.py",
        "timings": [path.name for path in arguments.timings],
        "seed": source["seed"],
        "environment": {name: source["environment"].get(name) for name in ("device", "commit", "date")},
        "fit": summary,
        "traffic": traffic._asdict(),
        "shapes": shapes,
    }
    write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
