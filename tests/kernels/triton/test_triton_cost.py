"""What the cost model of the Triton kernels chooses, without Triton and without a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from flashlane import jit
from flashlane.bench import make_problem
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import changed
from flashlane.kernels.triton import cost, forward_configs

KERNEL = registry.get("triton")


def problem(**sizes: object) -> AttentionProblem:
    asked = {"batch": 2, "heads": 8, "seqlen_q": 2048, "head_dim": 64, "dtype": torch.bfloat16, "arch": "sm_90a"}
    return make_problem(**{**asked, **sizes})


def drawn(chance: random.Random) -> AttentionProblem:
    length = round(80 * 150 ** chance.random())
    return problem(
        batch=chance.choice((1, 2, 9)), heads=chance.choice((1, 2, 8, 24)), seqlen_q=length,
        head_dim=chance.choice((64, 80, 128, 256)), causal=chance.choice((False, True)),
        dtype=chance.choice((torch.float32, torch.bfloat16)),
    )  # fmt: skip


def test_a_choice_is_the_same_each_time_has_the_least_predicted_time_and_is_in_the_table() -> None:
    chance = random.Random(0)
    for _ in range(60):
        problem = drawn(chance)
        first = KERNEL.config(problem)
        changed()  # what was kept is forgotten
        assert KERNEL.config(problem) == first == next(iter(KERNEL.candidates(problem)))
        listed = list(forward_configs.candidates(problem, jit.shared_limit("sm_90a"), KERNEL.precision_of(problem)))
        assert first in listed and set(KERNEL.candidates(problem)) == set(listed)
        times = [ms for _, ms in KERNEL.predicted_configs(problem)]
        assert times == sorted(times)
        if times:
            assert KERNEL.predicted_configs(problem)[0][0] == first.describe()


def test_small_problems_in_f32_get_small_tiles_and_large_ones_large_tiles() -> None:
    """One tile of 128 rows for all took 1.4 times the time on the small ones (H200)."""
    small, large = (KERNEL.config(problem(batch=b, seqlen_q=n, dtype=torch.float32)) for b, n in ((1, 300), (16, 8192)))
    assert small.bm < large.bm == 128


def test_descriptors_are_for_calls_that_take_longer_than_the_host_needs_for_them() -> None:
    _, shared = cost.coefficients()
    short, long = problem(seqlen_q=300), problem(batch=16, seqlen_q=8192)
    assert not KERNEL.config(short).descriptors and KERNEL.config(long).descriptors
    for words, ms in KERNEL.predicted_configs(short):
        assert "tma" not in words or ms >= shared["descriptors"] / 1e3


def test_more_work_never_takes_less() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = problem(dtype=dtype, batch=4)
        more = [base, replace(base, batch=8), replace(base, batch=8, seqlen_k=4096)]
        times = [dict(KERNEL.predicted_configs(asked)) for asked in more]
        assert len(times[0]) > 1, dtype
        for words in times[0]:
            assert times[0][words] <= times[1][words] <= times[2][words], words


UNKNOWN = ({"arch": "sm_80"}, {"varlen": True}, {"alibi": "heads"}, {"dropout_p": 0.1}, {"seqlen_q": 8})
UNKNOWN += ({"head_dim": 512, "head_dim_v": 512},)


@pytest.mark.parametrize("changes", UNKNOWN)
def test_where_nothing_is_known_the_table_decides(changes: dict[str, object]) -> None:
    asked = replace(problem(), **changes)
    assert not cost.forward_ranked(asked, KERNEL.candidates(asked), "ieee") and KERNEL.predicted_ms(asked) is None
    limit = jit.shared_limit(asked.arch)
    assert KERNEL.config(asked) == next(forward_configs.candidates(asked, limit, KERNEL.precision_of(asked)))


def test_coefficients_are_sound_and_explain_shows_times() -> None:
    known, shared = cost.coefficients()
    assert len(known) > 20 and all(
        min(t.one.tile, t.one.block, t.one.masked) > 0 and t.resident for t in known.values()
    )
    assert all(0 < t.fixed <= 1 for t in known.values())
    assert shared.keys() == {"launch", "combine", "descriptors"}
    words = " ".join(str(dispatch.explain_problem(problem(dtype=torch.float32))).split())
    assert "runs, predicted" in words and "% slower" in words
