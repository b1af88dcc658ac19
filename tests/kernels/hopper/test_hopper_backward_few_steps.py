"""Which tile a dense backward of few steps gets, held against what was timed (docs/notebook/0054)."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from timed_problems import problem_titled

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.one_cta import tiles
from flashlane.kernels.hopper.backward.select import config_of

ARCHIVE = Path(__file__).parents[3] / "benchmarks" / "archive"


def timed(name: str) -> list[dict[str, Any]]:
    body = json.loads((ARCHIVE / name).read_text())
    return [row for key, rows in body.items() if key != "environment" for row in rows]


def has_few_steps(problem: AttentionProblem) -> bool:
    """Whether what is between tiles counts most; of half as many queries without a mask."""
    queries = tiles.FEW_STEPS if tiles.is_masked(problem) else tiles.FEW_STEPS // 2
    return tiles.few_steps(problem) and (problem.window_left >= 0 or problem.rows_of_kv_head <= queries)


def losses(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Times as long as the fastest candidate the choice of today takes, of problems of few steps where it was timed."""
    found = {}
    for row in rows:
        problem = problem_titled(row["title"])
        if problem.head_dim > 128 or not has_few_steps(problem):
            continue
        # Of a configuration that was timed twice, the mean.
        times: dict[str, list[float]] = {}
        for name, words in row["config"].items():
            if name not in ("old1", "old4", "old5"):
                times.setdefault(words, []).append(row["ms"][name])
        means = {words: statistics.mean(ms) for words, ms in times.items()}
        chosen = config_of(problem).describe()
        if chosen in means and len(means) > 1:
            found[row["title"]] = means[chosen] / min(means.values())
    return found


@pytest.mark.parametrize(
    ("name", "count", "mean", "worst"),
    [("backward_few_steps.json", 220, 1.003, 1.05), ("backward_few_steps_unseen.json", 60, 1.003, 1.025)],
)
def test_the_choice_loses_little_where_candidates_were_timed(name: str, count: int, mean: float, worst: float) -> None:
    found = losses(timed(name))
    assert len(found) >= count
    assert statistics.geometric_mean(found.values()) < mean, "on the seeds that the constants were fitted to, or unseen"
    assert max(found.values()) < worst, max(found, key=found.__getitem__)


def test_on_unseen_seeds_the_choice_gained() -> None:
    gains = [row["ms"]["base"] / row["ms"]["new"] for row in timed("backward_few_steps_unseen.json")]
    assert len(gains) == 63 and 1.02 < statistics.geometric_mean(gains) < 1.03 and min(gains) > 0.975


NAMES = {(80, 1): "p80", (64, 1): "p64", (64, 2): "k2reg"}
"""What the file calls tiles, by queries of a step and stages of K."""


def test_without_a_mask_the_predicted_time_chooses_and_loses_little_whatever_the_lengths() -> None:
    """No length decides: problems of many steps have a tile of few steps where that is predicted to be faster."""
    losses, long = [], 0
    for row in timed("backward_few_steps.json"):
        problem = problem_titled(row["title"])
        if not 96 < problem.head_dim <= 128 or " full " not in row["title"] or "p80" not in row["ms"]:
            continue
        tile = tiles.pick(problem)
        name = "k2idle" if tile.postprocess == "idle_warps" else NAMES[tile.block_m, tile.k_stages]
        losses.append(row["ms"][name] / min(row["ms"].get(each, math.inf) for each in (*NAMES.values(), "k2idle")))
        long += not has_few_steps(problem)
    assert long == 46 and len(losses) == 57
    assert statistics.geometric_mean(losses) < 1.002 and max(losses) < 1.03
    found = tiles.pick(problem_titled("D128 full N701 B3 H40/20"))
    assert (found.block_m, found.k_stages) == (64, 2), "its 1402 queries of a group end in a nearly empty step of 80"


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_empty_problems_have_a_tile(head_dim: int, mask: str) -> None:
    problem = problem_titled(f"D{head_dim} {mask} N700 B2 H4")
    for changes in ({"seqlen_k": 0}, {"seqlen_q": 0}, {"seqlen_q": 0, "seqlen_k": 0}, {"batch": 0}):
        assert tiles.pick(replace(problem, **changes)).block_m > 0, changes
