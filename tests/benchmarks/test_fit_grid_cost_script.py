"""The fit of the cost models: what it is made of, and that it finds what made the times."""

from __future__ import annotations

import importlib
import json
import math
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from masked_problems import drawn, visible

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("fit_grid_cost")


def test_tiles_of_keys_walk_over_the_queries_that_see_them(fit: ModuleType) -> None:
    chance = random.Random(0)
    for _ in range(200):
        problem, bm, bn = drawn(chance), chance.choice((4, 16)), chance.choice((8, 16))
        seen = visible(problem)
        found = fit.backward_launches.query_blocks_of(problem, bm, bn)
        assert len(found.blocks) == -(-problem.seqlen_k // bn)
        for tile, (blocks, cut) in enumerate(zip(*found[:2], strict=True)):
            mine = seen[:, tile * bn : (tile + 1) * bn]
            rows = np.flatnonzero(mine.any(1))
            walked = range(rows[0] // bm, rows[-1] // bm + 1) if len(rows) else range(0)
            hidden = sum(not mine[b * bm : (b + 1) * bm].all() for b in walked)
            # Blocks of the last tile are all compared with the number of keys.
            masked = len(walked) if (tile + 1) * bn > problem.seqlen_k else hidden
            assert (blocks, cut) == (len(walked) * problem.group, masked * problem.group), (problem, bm, bn, tile)


def test_the_fit_finds_the_coefficients_that_made_the_times(fit: ModuleType) -> None:
    """Times of candidates are made by the package's model; the fit knows nothing of it, and chooses as it does."""
    timings = ROOT / "benchmarks" / "results" / "choices_triton_forward.json"
    rows = fit.rows_of("triton_forward", [timings])
    known, shared = fit.triton_cost.coefficients()
    of_known_parts = [row for row in rows if all(part.name in known for part in row.parts)]
    for row in of_known_parts:
        times = []
        for part in row.parts:
            one = known[part.name]
            times.append(part.grid.time(one.one, 132, part.resident, one.fixed) + shared["launch"])
        row.microseconds = sum(times) + shared["combine"] * sum(part.grid.splits > 1 for part in row.parts)
    model = fit.fit(of_known_parts, 5, {name: shared[name] for name in ("launch", "combine")})
    summary = fit.judged("made", of_known_parts, model, 0)
    assert summary["problems"] > 30 and summary["error_within_problems"] < 0.06, summary
    assert summary["mean_regret"] < 0.005, summary


def test_what_descriptors_cost_the_host_counts_where_a_kernel_is_shorter(fit: ModuleType) -> None:
    def row(us: float, descriptors: bool) -> object:
        return fit.Timed(0, "a problem", "words", us, (), descriptors=descriptors)

    rows, errors = fit.calls_of(
        [row(10.0, True), row(20.0, False), row(90.0, True)], np.log([2.0, 1.5, 0.1]), {"descriptors": 30.0}
    )
    assert [each.microseconds for each in rows] == [30.0, 20.0, 90.0]
    assert errors == pytest.approx([0.0, math.log(1.5), math.log(30 / 90)])
    known = fit.calls_of([row(10.0, True)], np.array([math.inf]), {"descriptors": 30.0})[1]
    assert known[0] == math.inf, "what the model does not compare stays that"


def test_the_coefficients_of_the_package_name_the_timings_that_made_them() -> None:
    for name in ("mma/cost.json", "triton/forward_cost.json"):
        body = json.loads((ROOT / "src" / "flashlane" / "kernels" / name).read_text())
        for file, told in body["timings"].items():
            timed = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
            assert told["seed"] == timed["seed"] < 2000 and told["commit"] == timed["environment"]["commit"]
