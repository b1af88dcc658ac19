"""Fit the cost models of launches with a CTA for each tile to timings of candidates, and write them into the package.

    PYTHONPATH=src python3 benchmarks/scripts/fit_grid_cost.py --family mma [--held-out 5] [--judge FILE]
        [--timings benchmarks/results/choices_mma.json] [--out src/flashlane/kernels/mma/cost.json]

The timings are those of ``time_choices.py`` at fitting seeds; families are ``mma`` and ``triton_forward``. Each tile
shape of a head dim has three coefficients (a tile, an n-block, a masked n-block); all share the time of a launch, and
the shapes of a group what a CTA gains that has an SM for itself. Printed are the errors within problems and the regret:
the chosen candidate's time over the fastest one's. With ``--held-out K`` each K-th part of the problems is left out in
turn, and their regret is printed; with ``--judge`` the problems of another file are judged by the coefficients that
were fitted.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from choice_families import TRITON, forward_configs, mma_configs
from cost_fit import set_offsets, told
from hopper_shapes import Shape, problem_of
from scipy.optimize import least_squares

from flashlane import jit
from flashlane.bench.measure.results import write_atomically
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource
from flashlane.kernels.grid_cost import SMS, Grid
from flashlane.kernels.mma import cost as mma_cost
from flashlane.kernels.tile_cost import Coefficients
from flashlane.kernels.triton import cost as triton_cost

ROOT = Path(__file__).parents[2]
RATE = 300.0
"""TFLOP/s of products of half precision from which the fit begins."""
FIRST = np.log([2.0, 1.0, 0.3])
"""Of a tile, an n-block and a masked one over what the products alone take: where the fit begins."""
STAY = np.array([0.08, 0.15, 0.1])
"""How strongly each stays at what the same shape has at other head dims."""
ALONE = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LAUNCH = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
"""Values that are tried of what shapes share, with ``--search``."""
NEAR = 1.05
"""A shape that nowhere took less than so many times the time of its kernel's fastest is not compared."""
ALONE_START, LAUNCH_START = 0.6, 2.0
"""Those that were best for mma and for Triton's forward."""


@dataclass(frozen=True)
class Part:
    """One launch of a candidate."""

    name: str
    """Of its tile shape, as a key of the data."""
    group: str
    """Whose ``alone`` it has."""
    grid: Grid
    resident: int
    unit: float
    """Microseconds of an n-block's products at :data:`RATE`, on an SM that holds ``resident`` CTAs."""

    def time(self, values: np.ndarray, alone: float) -> float:
        """Predicted microseconds, with coefficients in units of :attr:`unit`."""
        return self.grid.time(Coefficients(*np.exp(values) * self.unit), SMS["sm_90a"], self.resident, alone)


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
    offset: float = 0.0


@dataclass
class Model:
    """Coefficients by the name of a shape, and what shapes share."""

    values: dict[str, np.ndarray] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)

    def time(self, row: Timed) -> float:
        found = self.shared["launch"] * sum(1 + (part.grid.splits > 1) for part in row.parts)
        return found + sum(p.time(self.values[p.name], self.shared[p.group]) for p in row.parts)

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
    """Of each candidate's words, its launch."""
    found = {}
    for tag, variant in mma_cost.COMPARED.items():
        for config, tile in mma_cost.shapes_of(variant, problem).items():
            name = mma_cost.name_of(mma_cost.class_of(problem), variant, tile)
            size = config.block_m, config.block_n
            found[f"{tag} {config.describe()}"] = lambda r, name=name, config=config, size=size, split=variant.split: (
                Part(name, split, mma_cost.grid_of(problem, config), r[0], unit_of(shape, size, r[0])),
            )
    return found


def forward_parts(problem: AttentionProblem, shape: Shape) -> dict[str, Launches]:
    """The same of Triton's forward."""
    precision, found = TRITON.precision_of(problem), {}
    for config in forward_configs(problem, shape.dtype):
        name, size = triton_cost.name_of(problem, precision, config), (config.bm, config.bn)
        found[config.describe()] = lambda r, name=name, config=config, size=size: (
            Part(name, "forward", triton_cost.forward_grid(problem, config), r[0], unit_of(shape, size, r[0])),
        )
    return found


PARTS = {"mma": mma_parts, "triton_forward": forward_parts}


def rows_of(family: str, path: Path) -> list[Timed]:
    """All candidates of a file that the kernels still have."""
    found = []
    for number, entry in enumerate(json.loads(path.read_text())["rows"]):
        shape = Shape(**(entry["problem"] | {"lengths": ()}))
        problem = problem_of(shape)
        parts, sources = PARTS[family](problem, shape), {}
        if family == "mma":
            sources = {f"{k.tag} {c.describe()}": k.kernel_source(c) for k, c in mma_configs(problem)}
        for words, _, ms, _, resident in entry["ms"]:
            if words in parts:
                kernel = words.split()[0] if family == "mma" else ""
                launches = parts[words](resident)
                found.append(Timed(number, shape.title, words, 1e3 * ms, launches, kernel, sources.get(words)))
    return found


def kin_of(name: str) -> str:
    """The name of a shape without its head dim."""
    return re.sub(r"^\d+ | \d+:", "", name)


def fit_values(rows: list[Timed], model: Model) -> None:
    """Coefficients of each shape, by least squares on the logarithms, the others as they are."""
    groups: dict[str, list[tuple[Timed, Part]]] = collections.defaultdict(list)
    for row in rows:
        for part in row.parts:
            groups[part.name].append((row, part))
    kin: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for name in groups:
        if name in model.values:
            kin[kin_of(name)].append(model.values[name])
    centers = {name: np.mean(kin[kin_of(name)] or [FIRST], axis=0) for name in groups}
    for name, mine in groups.items():
        model.values.setdefault(name, centers[name])
        rest = [model.time(row) - part.time(model.values[name], model.shared[part.group]) for row, part in mine]

        def residuals(
            values: np.ndarray, mine: list = mine, rest: list = rest, center: np.ndarray = centers[name]
        ) -> np.ndarray:
            errors = [
                math.log((part.time(values, model.shared[part.group]) + other) / row.microseconds) - row.offset
                for (row, part), other in zip(mine, rest, strict=True)
            ]
            return np.concatenate([errors, STAY * (values - center)])

        start = model.values[name]
        model.values[name] = least_squares(residuals, start, loss="soft_l1", f_scale=0.03, max_nfev=8, diff_step=1e-2).x


def spread(rows: list[Timed], model: Model) -> float:
    """Standard deviation of the errors within problems."""
    return float(np.std(model.errors(rows) - np.array([row.offset for row in rows])))


def start_of(rows: list[Timed]) -> dict[str, float]:
    """What shapes share, unless other values are tried."""
    return {"launch": LAUNCH_START} | {part.group: ALONE_START for row in rows for part in row.parts}


def fit(rows: list[Timed], rounds: int, shared: dict[str, float] | None = None) -> Model:
    """The coefficients with which the errors within problems are least.

    Args:
        rows: of timed candidates.
        rounds: of fits of all shapes.
        shared: what shapes share, or None to try values of it.
    """
    model = Model(shared=dict(shared or start_of(rows)))
    for row in rows:
        row.offset = 0.0
    for _ in range(rounds):
        fit_values(rows, model)
        set_offsets(rows, 0.5 * model.errors(rows))
    for name in () if shared else model.shared:
        found = {}
        for value in LAUNCH if name == "launch" else ALONE:
            tried = fit(rows, 2, model.shared | {name: value})
            found[value] = spread(rows, tried)
        model.shared[name] = min(found, key=found.__getitem__)
        print(name, {value: round(error, 4) for value, error in found.items()}, flush=True)
    return model if shared else fit(rows, rounds, model.shared)


def judged(title: str, rows: list[Timed], model: Model, worst: int) -> dict[str, float]:
    """The summary of candidates whose shapes are known."""
    known = [row for row in rows if all(part.name in model.values for part in row.parts)]
    set_offsets(known, model.errors(known))
    return told(title, known, model.errors(known), worst)


def held_out(rows: list[Timed], folds: int, rounds: int) -> None:
    """Leave each part of the problems out in turn, and judge all by the fits that did not see them."""
    numbers = sorted({row.number for row in rows})
    random.Random(0).shuffle(numbers)
    fold_of = {number: place % folds for place, number in enumerate(numbers)}
    shared, left, errors = start_of(rows), [], []
    for fold in range(folds):
        model = fit([row for row in rows if fold_of[row.number] != fold], rounds, shared)
        mine = [r for r in rows if fold_of[r.number] == fold and all(p.name in model.values for p in r.parts)]
        left += mine
        errors += list(model.errors(mine))
    set_offsets(left, np.array(errors))
    told("held out", left, np.array(errors), worst=10)


def shapes_of(rows: list[Timed], model: Model) -> dict[str, list[float]]:
    """Of shapes that were near once: microseconds, CTAs of an SM, and for mma the registers of a thread."""
    best: dict[tuple[int, str], float] = collections.defaultdict(lambda: math.inf)
    for row in rows:
        best[row.number, row.kernel] = min(best[row.number, row.kernel], row.microseconds)
    near = [row for row in rows if row.microseconds <= NEAR * best[row.number, row.kernel]]
    parts = {part.name: (part, row) for row in near for part in row.parts}
    found = {}
    for name, (part, row) in sorted(parts.items()):
        found[name] = [*(round(float(x), 4) for x in np.exp(model.values[name]) * part.unit), part.resident]
        if row.source is not None:
            found[name].append(jit.compile(row.source, "sm_90a").report.registers)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(PARTS), required=True)
    parser.add_argument("--timings", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=0)
    parser.add_argument("--search", action="store_true", help="try values of what shapes share")
    parser.add_argument("--judge", type=Path)
    given = parser.parse_args()
    timings = given.timings or ROOT / "benchmarks" / "results" / f"choices_{given.family}.json"
    rows = rows_of(given.family, timings)
    if given.held_out:
        held_out(rows, given.held_out, given.rounds)
        return 0
    model = fit(rows, given.rounds, None if given.search else start_of(rows))
    summary = judged("fitted", rows, model, worst=10)
    print({name: round(value, 3) for name, value in model.shared.items()})
    if given.judge:
        judged(f"judged by {given.judge.name}", rows_of(given.family, given.judge), model, worst=10)
    if given.out:
        source = json.loads(timings.read_text())
        body = {
            "script": "benchmarks/scripts/fit_grid_cost.py",
            "timings": timings.name,
            "seed": source["seed"],
            "environment": {name: source["environment"].get(name) for name in ("device", "commit", "date")},
            "fit": summary,
            "shared": model.shared,
            "shapes": shapes_of(rows, model),
        }
        write_atomically(given.out, json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
