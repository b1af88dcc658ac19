"""Choices of windowed and packed problems of the Hopper backward against what was timed (notebook 0026)."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from timed_problems import problem_titled

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward import design_cost
from flashlane.kernels.hopper.backward.kernel import KERNEL
from flashlane.kernels.hopper.backward.select import DESIGNS, design_of

CLUSTERS_SINCE = 1.035
"""Times as fast as clusters are since these problems were timed (notebook 0055)."""
TIMED = Path(__file__).parents[3] / "benchmarks" / "archive" / "backward_window_choices.json"


def rows(*kinds: str) -> list[tuple[AttentionProblem, dict[str, float], dict[str, Any]]]:
    """Problems that were timed, how much faster than the choice of then each candidate was, and the row."""
    measured = []
    timed = json.loads(TIMED.read_text())
    for row in timed["rows"] + [row for row in timed["second"]["rows"] if "unseen" not in row["kind"]]:
        if row["kind"] not in kinds:
            continue
        problem = problem_titled(row["title"])
        medians = {name: statistics.median(times) for name, times in row["ms"].items()}
        base = (medians["today"] + medians["today again"]) / 2
        measured.append((problem, {name: base / median for name, median in medians.items()}, row))
    assert measured
    return measured


def section_of(problem: AttentionProblem) -> int:
    config = KERNEL.config(problem)
    return DESIGNS[config.design].schedule(config, problem, 132).gradients[0].sizes["heads_per_section"]


def test_two_kernels_are_taken_where_they_were_faster() -> None:
    kinds = ("odd D", "narrow wide D", "middle wide D", "long wide D", "unseen", "511", "640", "1000")
    gains = {True: [], False: []}
    for problem, gain, _ in rows(*kinds):
        if problem.head_dim > 128 and "split 64,64,c1" in gain:
            two = design_of(problem) == "split_dkdv_dq"
            gains[two].append(gain["split 64,64,c1"])
            config = KERNEL.config(problem)
            assert not two or (config.block_m, config.block_n, config.cluster) == (64, 64, 1)
    assert len(gains[True]) == 11 and min(gains[True]) > 1.05, gains
    assert len(gains[False]) == 13 and statistics.mean(gains[False]) < 1.01 and max(gains[False]) < 1.12, gains


def test_predicted_gains_of_two_kernels_are_near_those_found() -> None:
    """Problems of ten waves of tiles and more; what short launches gain by their last waves is not predicted."""
    errors = []
    for problem, gain, _ in rows("odd D", "narrow wide D", "middle wide D", "unseen"):
        tiles = -(-problem.seqlen_k // 128) * problem.kv_heads * problem.batch
        if problem.head_dim > 128 and "split 64,64,c1" in gain and tiles > 660:
            predicted = CLUSTERS_SINCE * design_cost.clusters(problem) / design_cost.two_kernels(problem)
            errors.append(predicted / gain["split 64,64,c1"] - 1)
    assert len(errors) == 8 and max(map(abs, errors)) < 0.06, errors


def test_packed_sequences_and_wide_windows_keep_clusters() -> None:
    problem, _, _ = rows("narrow wide D")[0]
    assert design_of(problem) == "split_dkdv_dq"
    for change in ({"varlen": True}, {"window_left": 1000}, {"window_left": -1}):
        assert design_of(replace(problem, **change)) == "two_cta", change


def test_a_window_that_hides_nothing_is_chosen_for_as_a_causal_mask() -> None:
    gains = []
    for problem, gain, _ in rows("hides none"):
        chosen = KERNEL.config(problem)
        assert chosen == KERNEL.config(replace(problem, window_left=-1)) and not chosen.has_left
        assert not dict(KERNEL.sources(problem)[1].constants)["HAS_LEFT"]
        gains.append(gain["causal"])
    assert len(gains) == 6 and min(gains) > 1.01


def test_sections_of_windows_are_near_the_fastest_of_those_timed() -> None:
    """The mean is 2.7 % with the heads one after the other."""
    lost = []
    for problem, gain, _ in rows("unseen", "window D128", "long D128", "window D96", "window D64"):
        if problem.head_dim > 128 or KERNEL.config(problem).block_m not in (64, 96, 112, 128):
            continue
        heads = problem.kv_heads * problem.batch
        timed = {1: 1.0} | {int(name[1:]): each for name, each in gain.items() if re.fullmatch(r"s\d+", name)}
        timed |= {heads: gain["sall"]} if "sall" in gain else {}
        section = section_of(problem)
        lost.append(max(timed.values()) / timed[min(timed, key=lambda other, at=section: abs(other - at))] - 1)
    assert len(lost) > 15 and statistics.mean(lost) < 0.012 and max(lost) < 0.06, lost


def test_packed_narrow_heads_have_loops_of_their_own() -> None:
    for problem, gain, _ in rows("packed D64"):
        config = KERNEL.config(problem)
        assert config.own_loops and config.block_m == 128 and config.ping_pong == "off"
        assert gain["own 128"] > 1.005
    dense, _, _ = rows("packed D64")[0]
    assert not KERNEL.config(replace(dense, varlen=False, window_left=300)).own_loops
