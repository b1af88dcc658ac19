"""Fit the cost models of launches with a CTA for each tile to timings of candidates, and write them into the package.

    PYTHONPATH=src python3 benchmarks/scripts/fit_grid_cost.py --family mma [--held-out 5] [--judge FILE]
        [--timings benchmarks/results/choices_mma.json] [--out src/flashlane/kernels/mma/cost.json]

The timings are those of ``time_choices.py`` at fitting seeds; the families are those of :data:`PARTS`. Each tile shape
of a head dim has four coefficients: a tile, an n-block, a masked n-block, and which part of a CTA's time the others on
its SM do not lengthen. All share the time of a launch and that of combining splits. Printed are the errors within
problems and the regret: the chosen candidate's time over the fastest one's. With ``--held-out K`` each K-th part of the
problems is left out in turn, and their regret is printed; with ``--judge`` the problems of other files are judged by
the coefficients that were fitted, and then by what was chosen when they were timed.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import backward_launches
import numpy as np
from choice_families import TRITON, forward_configs, mma_configs, timed_backward_configs
from cost_fit import print_regrets, set_offsets
from hopper_shapes import Shape, problem_of
from timings_file import check_timings

from flashlane import jit
from flashlane.bench.measure.results import write_atomically
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource
from flashlane.kernels.grid_cost import SMS, Grid
from flashlane.kernels.mma import cost as mma_cost
from flashlane.kernels.tile_cost import Coefficients
from flashlane.kernels.triton import cost as triton_cost
from flashlane.kernels.triton.backward_configs import BackwardConfig

ROOT = Path(__file__).parents[2]
RATE = 300.0
"""TFLOP/s of products of half precision from which the fit begins."""
FIRST = np.log([2.0, 1.0, 0.3, 0.4])
"""Of a tile, an n-block and a masked one over what the products alone take, and what is fixed: where the fit begins."""
STAY = np.array([0.08, 0.15, 0.1, 0.4])
"""How strongly each stays at what the same shape has at other head dims."""
STEP = 0.02
"""Of a coefficient's logarithm, with which it is found how a launch depends on it."""
STEPS = 8
"""Of Gauss and Newton in a round."""
SOFT = 0.03
"""Errors above this count less than by their squares."""
FARTHEST = 0.7
"""So far each logarithm may go in one round, as what it does to a launch was found where it was."""
TRIED = {"launch": (1.0, 2.0, 3.0, 4.0), "combine": (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)}
"""Values that are tried of what shapes share, with ``--search``."""
NEAR = 1.05
"""A shape that nowhere took less than so many times the time of its kernel's fastest is not compared."""
START = {"launch": 2.0, "combine": 5.0}
"""Microseconds of a launch, and of combining splits."""


@dataclass(frozen=True)
class Part:
    """One launch of a candidate."""

    name: str
    """Of its tile shape, as a key of the data."""
    grid: Grid
    resident: int
    unit: float
    """Microseconds of an n-block's products at :data:`RATE`, on an SM that holds ``resident`` CTAs."""

    def time(self, values: np.ndarray) -> float:
        """Predicted microseconds, with coefficients in units of :attr:`unit`."""
        tile, block, masked, fixed = np.exp(values).tolist()
        one = Coefficients(tile * self.unit, block * self.unit, masked * self.unit)
        return self.grid.time(one, SMS["sm_90a"], self.resident, min(1.0, fixed))


@dataclass
class Timed:
    """A timed candidate."""

    number: int
    title: str
    words: str
    microseconds: float
    parts: tuple[Part, ...]
    kernel: str = ""
    """Its tag, where several kernels were timed."""
    source: KernelSource | None = None
    """Of a kernel that NVRTC compiles."""
    added: float = 0.0
    """Microseconds of what follows the launches."""
    descriptors: bool = False
    """Whether the host makes descriptors, which may take it longer than the kernel runs."""
    offset: float = 0.0


@dataclass
class Model:
    """Coefficients by the name of a shape, and what shapes share."""

    values: dict[str, np.ndarray] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)

    def time(self, row: Timed) -> float:
        combined = self.shared["combine"] * sum(part.grid.splits > 1 for part in row.parts)
        found = row.added + self.shared["launch"] * len(row.parts) + combined
        return found + sum(part.time(self.values[part.name]) for part in row.parts)

    def error(self, row: Timed) -> float:
        return math.log(self.time(row) / row.microseconds)

    def errors(self, rows: Sequence[Timed]) -> np.ndarray:
        return np.array([self.error(row) for row in rows])


def unit_of(shape: Shape, tile: tuple[int, int], resident: int) -> float:
    """Microseconds of the products of a tile of rows and keys; one of f32 is six of half precision."""
    flop = 2 * tile[0] * tile[1] * (shape.head_dim + shape.head_dim_v) * (6 if shape.dtype == "f32" else 1)
    return flop / 1e6 / (RATE / SMS["sm_90a"]) * resident


Launches = Callable[[list[int]], tuple[Part, ...]]
"""The launches of a candidate, given the CTAs of an SM of each."""


def mma_parts(problem: AttentionProblem, shape: Shape) -> dict[str, Launches]:
    """The launch of each candidate, by its words."""
    parts = {}
    for tag, variant in mma_cost.COMPARED.items():
        for config, tile in mma_cost.shapes_of(variant, problem).items():
            name = mma_cost.name_of(mma_cost.class_of(problem), variant, tile)
            size = config.block_m, config.block_n
            parts[f"{tag} {config.describe()}"] = lambda r, name=name, config=config, size=size: (
                Part(name, mma_cost.grid_of(problem, config), r[0], unit_of(shape, size, r[0])),
            )
    return parts


def forward_parts(problem: AttentionProblem, shape: Shape) -> dict[str, Launches]:
    """The same of Triton's forward."""
    precision, parts = TRITON.precision_of(problem), {}
    for config in forward_configs(problem, shape.dtype):
        name, size = triton_cost.name_of(problem, precision, config), (config.bm, config.bn)
        parts[config.describe()] = lambda r, name=name, config=config, size=size: (
            Part(name, triton_cost.forward_grid(problem, config), r[0], unit_of(shape, size, r[0])),
        )
    return parts


def backward_parts(problem: AttentionProblem, shape: Shape) -> dict[str, Launches]:
    """The same of Triton's backward, with two launches."""
    precision, of_config = TRITON.precision_of(problem), {}
    for config in timed_backward_configs(problem, shape.dtype):
        grids = backward_launches.grids_of(problem, config)

        def launches(
            r: list[int], config: BackwardConfig = config, grids: tuple[Grid, Grid] = grids
        ) -> tuple[Part, ...]:
            parts = []
            for side, tile, grid, resident in zip(("key", "query"), (config.key, config.query), grids, r, strict=True):
                name = backward_launches.name_of(problem, precision, side, tile, config.descriptors)
                unit = unit_of(shape, (tile.bm, tile.bn), resident) * (2 if side == "key" else 1.5)
                parts.append(Part(name, grid, resident, unit))
            return tuple(parts)

        of_config[config.describe()] = launches
    return of_config


PARTS = {"mma": mma_parts, "triton_forward": forward_parts, "triton_backward": backward_parts}
FITTED = {family: tuple(f"choices_{family}{which}.json" for which in ("", "_1001", "_even")) for family in PARTS}
"""The files of timings that a family's coefficients are fitted to."""


def rows_of(family: str, paths: Sequence[Path]) -> list[Timed]:
    """All candidates of some files that the kernels still have."""
    rows = []
    for number, entry in enumerate(entry for path in paths for entry in json.loads(path.read_text())["rows"]):
        shape = Shape(**(entry["problem"] | {"lengths": ()}))
        problem = problem_of(shape)
        parts, sources, added = PARTS[family](problem, shape), {}, 0.0
        if family == "mma":
            sources = {f"{k.tag} {c.describe()}": k.kernel_source(c) for k, c in mma_configs(problem)}
        for words, _, ms, _, resident in entry["ms"]:
            if words in parts:
                kernel = words.split()[0] if family == "mma" else ""
                launches = parts[words](resident)
                if family == "triton_backward":
                    added = backward_launches.added_microseconds(problem, [part.grid for part in launches])
                described = family == "triton_forward" and "tma" in words
                source = sources.get(words)
                rows.append(Timed(number, shape.title, words, 1e3 * ms, launches, kernel, source, added, described))
    return rows


def kin_of(name: str) -> str:
    """The name of a shape without its head dim and mask."""
    return re.sub(r"^\d+ | \d+( causal)?:", "", name)


def fit_values(rows: list[Timed], model: Model) -> None:
    """Coefficients of each shape, by weighted least squares on the logarithms, the others as they are."""
    groups: dict[str, list[tuple[Timed, Part]]] = collections.defaultdict(list)
    for row in rows:
        for part in row.parts:
            groups[part.name].append((row, part))
    kin: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for name in groups:
        if name in model.values:
            kin[kin_of(name)].append(model.values[name])
    centers = {name: np.mean(kin[kin_of(name)] or [FIRST], axis=0) for name in groups}
    for name in groups:
        model.values.setdefault(name, centers[name])
    for name, mine in groups.items():
        center, start = centers[name], model.values[name]
        slopes = np.array([slopes_of(part, start) for _, part in mine])
        whole = np.array([model.time(row) for row, _ in mine])
        wanted = np.array([math.log(row.microseconds) + row.offset for row, _ in mine])
        values = start
        for _ in range(STEPS):
            times = np.maximum(whole + slopes @ (np.exp(values - start) - 1), 0.1 * whole)
            errors = np.log(times) - wanted
            by_value = slopes * np.exp(values - start) / times[:, None]
            weighted = by_value.T / np.sqrt(1 + (errors / SOFT) ** 2)
            side = weighted @ errors + STAY**2 * (values - center)
            values = values - np.linalg.solve(weighted @ by_value + np.diag(STAY**2), side)
            values = np.clip(values, start - FARTHEST, start + FARTHEST)
        model.values[name] = values


def slopes_of(part: Part, values: np.ndarray) -> np.ndarray:
    """By how much a launch takes longer where each coefficient is e times what it is, as far as that is linear."""
    base = part.time(values)
    return np.array([(part.time(values + STEP * one) - base) / STEP for one in np.eye(len(values))])


def spread(rows: list[Timed], model: Model) -> float:
    """Standard deviation of the errors within problems."""
    return float(np.std(model.errors(rows) - np.array([row.offset for row in rows])))


def fit(rows: list[Timed], rounds: int, shared: dict[str, float] | None = None) -> Model:
    """The coefficients with which the errors within problems are least.

    Args:
        rows: of timed candidates.
        rounds: of fits of all shapes.
        shared: what shapes share, or None to try values of it.
    """
    model = Model(shared=dict(shared or START))
    for row in rows:
        row.offset = 0.0
    for _ in range(rounds):
        fit_values(rows, model)
        set_offsets(rows, 0.5 * model.errors(rows))
    for name in () if shared else model.shared:
        fitted = {}
        for value in TRIED[name]:
            tried = fit(rows, 2, model.shared | {name: value})
            fitted[value] = spread(rows, tried)
        model.shared[name] = min(fitted, key=fitted.__getitem__)
        print(name, {value: round(error, 4) for value, error in fitted.items()}, flush=True)
    return model if shared else fit(rows, rounds, model.shared)


def errors_of(rows: list[Timed], model: Model) -> np.ndarray:
    """The logarithm of predicted over measured time of each candidate; infinite where its shapes are not known."""
    known = [all(part.name in model.values for part in row.parts) for row in rows]
    return np.array([model.error(row) if able else math.inf for row, able in zip(rows, known, strict=True)])


def judged(title: str, rows: list[Timed], model: Model, worst: int) -> dict[str, float]:
    """The summary of candidates."""
    rows, errors = calls_of(rows, errors_of(rows, model), model.shared)
    set_offsets(rows, errors)
    return print_regrets(title, rows, errors, worst)


def calls_of(rows: list[Timed], errors: np.ndarray, shared: dict[str, float]) -> tuple[list[Timed], np.ndarray]:
    """Candidates with the times of calls: where descriptors take the host longer than the kernel runs, that counts."""
    calls, least = [], shared.get("descriptors", 0.0)
    for row, error in zip(rows, errors, strict=True):
        took = max(row.microseconds, least) if row.descriptors else row.microseconds
        predicted = row.microseconds * math.exp(error)
        predicted = max(predicted, least) if row.descriptors else predicted
        calls.append((replace(row, microseconds=took), math.log(predicted / took)))
    return [row for row, _ in calls], np.array([error for _, error in calls])


def host_of_descriptors(paths: Sequence[Path]) -> dict[str, float]:
    """Microseconds of the host for a call with descriptors, the median of those that were measured."""
    found = []
    for entry in (entry for path in paths for entry in json.loads(path.read_text())["rows"]):
        found += [us for (words, *_), us in zip(entry["ms"], entry.get("host_us", ())) if "tma" in words]
    return {"descriptors": round(statistics.median(found), 1)} if found else {}


def held_out(rows: list[Timed], folds: int, rounds: int, shared: dict[str, float]) -> None:
    """Leave each part of the problems out in turn, and judge all by the fits that did not see them."""
    numbers = sorted({row.number for row in rows})
    random.Random(0).shuffle(numbers)
    fold_of = {number: place % folds for place, number in enumerate(numbers)}
    left, errors = [], []
    for fold in range(folds):
        model = fit([row for row in rows if fold_of[row.number] != fold], rounds, START)
        mine = [row for row in rows if fold_of[row.number] == fold]
        left += mine
        errors += list(errors_of(mine, model))
    left, found = calls_of(left, np.array(errors), START | shared)
    set_offsets(left, found)
    print_regrets("held out", left, found, worst=10)


def shapes_of(rows: list[Timed], model: Model) -> dict[str, list[float]]:
    """Shapes that were near once: microseconds, the fixed part, CTAs of an SM, and for mma registers of a thread."""
    best: dict[tuple[int, str], float] = collections.defaultdict(lambda: math.inf)
    for row in rows:
        best[row.number, row.kernel] = min(best[row.number, row.kernel], row.microseconds)
    near = [row for row in rows if row.microseconds <= NEAR * best[row.number, row.kernel]]
    parts = {part.name: (part, row) for row in near for part in row.parts}
    shapes = {}
    for name, (part, row) in sorted(parts.items()):
        *costs, fixed = np.exp(model.values[name]).tolist()
        shapes[name] = [*(round(x * part.unit, 4) for x in costs), round(min(1.0, fixed), 4), part.resident]
        if row.source is not None:
            shapes[name].append(jit.compile(row.source, "sm_90a").report.registers)
    return shapes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(PARTS), required=True)
    parser.add_argument("--timings", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--held-out", type=int, default=0)
    parser.add_argument("--search", action="store_true", help="try values of what shapes share")
    parser.add_argument("--judge", type=Path, nargs="+")
    options = parser.parse_args()
    results = ROOT / "benchmarks" / "results"
    timings = options.timings or [path for path in map(results.joinpath, FITTED[options.family]) if path.exists()]
    check_timings(parser, [*timings, *(options.judge or ())])
    rows = rows_of(options.family, timings)
    shared = host_of_descriptors(timings) if options.family == "triton_forward" else {}
    if options.held_out:
        held_out(rows, options.held_out, options.rounds, shared)
        return 0
    model = fit(rows, options.rounds, None if options.search else START)
    model.shared = model.shared | shared
    summary = judged("fitted", rows, model, worst=10)
    print({name: round(value, 3) for name, value in model.shared.items()})
    if options.judge:
        rows = rows_of(options.family, options.judge)
        judged("judged", rows, model, worst=10)
        rows, _ = calls_of(rows, np.zeros(len(rows)), model.shared)
        print_regrets("chosen when they were timed", rows, np.full(len(rows), math.inf), worst=10)
    if options.out:
        sources = [json.loads(path.read_text()) for path in timings]
        body = {
            "script": "benchmarks/scripts/fit_grid_cost.py",
            "timings": {
                path.name: {"seed": source["seed"]}
                | {name: source["environment"].get(name) for name in ("device", "commit", "date")}
                for path, source in zip(timings, sources, strict=True)
            },
            "fit": summary,
            "shared": model.shared,
            "shapes": shapes_of(rows, model),
        }
        write_atomically(options.out, json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
