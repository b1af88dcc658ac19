"""Gradients of ranks in bf16 have the error of one process: what is added over steps and ranks is not rounded before.

Each case is held against f64, and shows that it would find parts in bf16.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import context_parallel_cases as cases
import numpy
import pytest
import torch
from context_parallel_cases import Case
from gradient_errors import RINGS, errors_on_ranks
from rank_pool import RankPool

from flashlane.bench.measure.ranks import on_ranks

RANKS = 4
LAYOUTS = ("zigzag", "contiguous", "striped")
FEW, MANY = (90, 60, 53), (3, 2, 90, 0, 1, 95, 4, 8)
"""Documents that have a call each, and those that are packed in one."""
VARIANTS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (60, 0)},
    "window of two sides": {"causal": False, "window": (60, 30)},
    "few documents": {"lengths": FEW},
    "many documents": {"lengths": MANY},
    "documents with a window": {"lengths": MANY, "window": (25, 0)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "logit scale": {"logit_scale": True},
    "deterministic": {"deterministic": True},
    "documents, deterministic, with all": {
        "lengths": FEW, "deterministic": True, "softcap": 20.0, "sinks": True, "logit_scale": True,
    },
    "gradient of the LSE": {"reads_lse": True},
    "batch": {"batch": 2, "window": (60, 0)},
}  # fmt: skip
ALIBI = {"alibi": True}, {"alibi": True, "lengths": MANY}, {"alibi": True, "window": (60, 0), "deterministic": True}


def case_of(variant: dict[str, Any], **where: Any) -> Case:
    return Case(**{"lengths": (203,), "reads_lse": False, "dtype": torch.bfloat16, **variant, **where})


def errors(found: dict[str, numpy.ndarray], right: dict[str, numpy.ndarray]) -> dict[str, float]:
    """Of dQ, dK and dV, relative to their norms."""
    size = numpy.linalg.norm
    return {name: float(size(found[name] - right[name]) / size(right[name])) for name in ("dq", "dk", "dv")}


def of_ranks(pool: RankPool, case: Case, right: dict[str, numpy.ndarray], ranks: int = RANKS) -> dict[str, float]:
    found = pool.run(cases.on_rank, case, ranks, ranks=list(range(ranks)))
    return errors(cases.assembled(case, found), right)


def compare(pool: RankPool, case: Case, names: tuple[str, ...] = ("dq", "dk", "dv"), ranks: int = RANKS) -> None:
    """Gradients have the error of one process; those of ``names`` would not if parts of them were rounded.

    An output that is half way between two numbers may be rounded to the other one, which was worth 4 % in one case.
    """
    right = cases.expected(case)
    one = errors(cases.one_process(case), right)
    found = of_ranks(pool, case, right, ranks)
    assert all(found[name] < 1.05 * one[name] for name in found), (str(case), found, one)
    rounded = of_ranks(pool, dataclasses.replace(case, rounded=True), right, ranks)
    assert all(rounded[name] > 1.08 * one[name] for name in names), (str(case), rounded, one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_ring_of_four_steps(pool: RankPool, variant: dict[str, Any], layout: str) -> None:
    compare(pool, case_of(variant, method="ring", layout=layout))


@pytest.mark.slow
def test_a_ring_of_two_steps_with_more_scores(pool: RankPool) -> None:
    """So many that another kernel computes the blocks, packed ones, too."""
    for variant in ({}, {"lengths": FEW}, {"lengths": MANY}, {"lengths": MANY, "sinks": True}):
        compare(pool, case_of(variant, method="ring"), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ALIBI, ids=str)
def test_a_ring_with_distances(pool: RankPool, variant: dict[str, Any]) -> None:
    compare(pool, case_of(variant, method="ring", layout="striped"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_that_adds_to_one_dq(pool: RankPool, layout: str) -> None:
    """The launches that a causal ring of one sequence has on a Hopper GPU."""
    case = case_of({}, method="ring", layout=layout, parted=True)
    right = cases.expected(case)
    one, found = errors(cases.one_process(case), right), of_ranks(pool, case, right)
    assert all(found[name] < 1.05 * one[name] for name in found), (found, one)
    assert all(map(bool, pool.run(cases.parts_on_rank, case, RANKS)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["usp", "allgather"])
def test_other_methods(pool: RankPool, method: str) -> None:
    """``allgather`` merges rows from all shards in layout striped; else it adds the gradients of keys alone."""
    for variant in ({}, {"window": (60, 0)}, {"lengths": MANY}, {"sinks": True, "softcap": 20.0}):
        compare(pool, case_of(variant, method=method, layout="striped"))
        compare(pool, case_of(variant, method=method), ("dk", "dv"))


@pytest.mark.slow
def test_what_two_gpus_run() -> None:
    """The job of ``test_two_gpus.py``, with two processes of a CPU."""
    found = on_ranks(2, "gloo", errors_on_ranks, tuple(RINGS), seconds=100)
    for name, of_ways in found.items():
        assert all(of_ways["ranks"][each] < 1.05 * of_ways["one"][each] for each in ("dq", "dk", "dv")), (name, of_ways)
        assert of_ways["rounded"]["dq"] > 1.08 * of_ways["ranks"]["dq"], (name, of_ways)
        assert not any(of_ways.get("again", {}).values()) and ("again" in of_ways) == ("deterministic" in name)
