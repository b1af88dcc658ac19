"""Every combination of arguments is computed right or raises, with the same words on all ranks; none gives a number
that is not that of one process."""

from __future__ import annotations

import itertools
from typing import Any

import context_parallel_cases as cases
import pytest
from context_parallel_cases import Case
from rank_pool import RankPool
from test_context_parallel import TOLERANCE

RANKS = 3
LAYOUTS = ("zigzag", "contiguous", "striped")
LENGTHS = {"one sequence": (11,), "documents": (5, 0, 6)}


def combinations(method: str, lengths: tuple[int, ...]) -> list[Case]:
    """Layouts, masks, ALiBi, transports and groups of heads."""
    masks: list[dict[str, Any]] = [
        {"causal": causal, "window": window} for causal in (True, False) for window in ((-1, -1), (3, 0), (3, 2))
    ]
    return [
        Case(
            lengths=lengths, kv_heads=4, head_dim=4, head_dim_v=4, **mask, alibi=alibi, method=method, layout=layout,
            transport=transport, heads_k_stride=stride, reads_lse=False,
        )
        for layout, mask, alibi, transport, stride in itertools.product(
            LAYOUTS, masks, (False, True), ("messages", "copies"), (None, 3)
        )
    ]  # fmt: skip


def refused(case: Case) -> bool:
    """What docs/context-parallel.md says raises."""
    one_sided = case.causal or case.window[1] == 0
    method = case.method
    if method == "auto":
        method = "ulysses" if case.alibi and not one_sided else "allgather"
    if method != "allgather" and (case.transport == "copies" or case.heads_k_stride):
        return True
    computed = method == "ulysses" or (one_sided and (method == "allgather" or case.layout == "striped"))
    return case.alibi and not computed


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("method", ["auto", "allgather", "ring", "ulysses"])
def test_right_or_refused(pool: RankPool, method: str, lengths: tuple[int, ...]) -> None:
    asked = combinations(method, lengths)[:: 1 if method == "allgather" else 3]
    found = list(zip(*pool.run(cases.each_on_rank, asked, RANKS, ranks=list(range(RANKS))), strict=True))
    wrong: dict[str, Any] = {}
    for case, each in zip(asked, found, strict=True):
        if isinstance(each[0], str):
            if not refused(case) or len(set(each)) != 1 or not each[0].startswith("NotImplementedError: "):
                wrong[str(case)] = each
            continue
        worst = cases.worst_difference(cases.assembled(case, list(each)), cases.expected(case))
        if refused(case) or max(worst.values()) > 5 * TOLERANCE:
            wrong[str(case)] = worst
    assert not wrong
