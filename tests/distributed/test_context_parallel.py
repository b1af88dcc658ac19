"""Context parallelism on gloo, two to four processes, against one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import context_parallel_cases as cases
import numpy
import pytest
from context_parallel_cases import Case
from rank_pool import RankPool

TOLERANCE = 1e-5
DOCUMENTS = (5, 0, 17, 1, 30, 3, 9)
LAYOUTS = ("zigzag", "contiguous", "striped")
VARIANTS = (
    {},
    {"causal": False, "kv_heads": 4},
    {"window": (5, 0), "batch": 2},
    {"causal": False, "window": (4, 3)},
    {"lengths": DOCUMENTS},
    {"lengths": DOCUMENTS, "causal": False},
    {"lengths": DOCUMENTS, "window": (6, 0), "softcap": 3.0},
    {"lengths": DOCUMENTS, "causal": False, "window": (3, 2)},
    {"lengths": (3, 20, 11, 7, 5, 9), "sinks": True, "logit_scale": True},
    {"batch": 2, "heads": 6, "kv_heads": 1, "sinks": True},
    {"heads": 5, "kv_heads": 5, "head_dim_v": 16},
    {"heads": 12, "kv_heads": 4, "packed": True},
    {"lengths": (2,), "sinks": True},
    {"lengths": (0,)},
)
_expected: dict[Case, dict[str, numpy.ndarray]] = {}


def differences(pool: RankPool, case: Case, ranks: int) -> dict[str, float]:
    """The results that are further from one process's than the tolerance, relative to the largest value or 1."""
    results = cases.assembled(case, pool.run(cases.on_rank, case, ranks, ranks=list(range(ranks))))
    how = {"method": "allgather", "layout": "zigzag", "heads_k_stride": None, "transport": "messages", "again": False}
    how |= {"polled": False, "shared": False, "parted": False, "large": False, "summed": False}
    key = Case(**{**vars(case), **how})
    if key not in _expected:
        _expected[key] = cases.expected(case)
    right = _expected[key]
    worst = cases.worst_difference(results, right)
    sizes = {name: numpy.abs(values[numpy.isfinite(values)]).max(initial=1.0) for name, values in right.items()}
    return {name: value for name, value in worst.items() if not value <= TOLERANCE * sizes[name]}


def all_wrong(
    pool: RankPool, variants: Iterable[dict[str, Any]], more: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """The differences of cases that have some, on 2, 3 and 4 ranks in turn; ``more`` gives a number's other fields."""
    wrong = {}
    for number, variant in enumerate(variants):
        ranks, case = 2 + number % 3, Case(**variant, **more(number))
        if found := differences(pool, case, ranks):
            wrong[f"{ranks} ranks, {case}"] = found
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses", "usp"])
def test_same_as_one_process(pool: RankPool, method: str, layout: str) -> None:
    wrong = {}
    for number, variant in enumerate(VARIANTS):
        case = Case(**variant, method=method, layout=layout)
        # Each variant on two numbers of ranks, all numbers being tried by all variants together.
        for ranks in {4} if method == "usp" else {2 + number % 2, 4 - number % 3 % 2}:
            found = differences(pool, case, ranks)
            if found:
                wrong[f"{ranks} ranks, {case}"] = found
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["messages", "copies"])
def test_a_second_step(pool: RankPool, transport: str) -> None:
    """What is kept of a call serves the next one, with other values; here nobody reads the LSE."""
    assert not all_wrong(
        pool,
        (*VARIANTS, {"kv_heads": 4, "lengths": (61,)}),
        lambda number: {
            "transport": transport,
            "reads_lse": False,
            "again": True,
            "heads_k_stride": 1 if number % 3 == 1 else None,
            "layout": LAYOUTS[number % 5 % 3],
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_copies_between_ranks_of_any_speed(pool: RankPool, ranks: int) -> None:
    """Calls one after another, of which one rank may begin the next while another one reads."""
    for variant in ({"lengths": (61,), "kv_heads": 4}, {"layout": "contiguous", "lengths": (40,), "window": (5, 0)}):
        case = Case(**variant, transport="copies", reads_lse=False)
        first, *others = zip(*pool.run(cases.on_slow_rank, case, ranks, 4, ranks=list(range(ranks))), strict=True)
        right = cases.expected(case)
        assert max(cases.worst_difference(_joined(case, first), right).values()) <= 5 * TOLERANCE
        for other in others:
            assert not any(cases.worst_difference(_joined(case, other), _joined(case, first)).values())


def _joined(case: Case, found: tuple[dict[str, numpy.ndarray], ...]) -> dict[str, numpy.ndarray]:
    return cases.assembled(case, list(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, layout, causal",
    [
        ("allgather", "zigzag", True),
        ("allgather", "contiguous", True),
        ("allgather", "striped", True),
        ("ring", "striped", True),
        ("usp", "striped", True),
        ("ulysses", "zigzag", True),
        ("ulysses", "striped", False),
        ("auto", "zigzag", False),
    ],
)
def test_alibi(pool: RankPool, method: str, layout: str, causal: bool) -> None:
    """Distances are those of positions, whatever lies between the blocks of a rank."""
    for variant in ({"batch": 2, "sinks": True}, {"lengths": DOCUMENTS}, {"lengths": (9, 11), "window": (5, 0)}):
        case = Case(**variant, alibi=True, method=method, layout=layout, causal=causal)
        assert not differences(pool, case, 4), str(case)


@pytest.mark.slow
def test_keys_by_heads_at_a_time(pool: RankPool) -> None:
    for stride, documents in itertools.product((1, 2, (1, 2)), ((37,), DOCUMENTS)):
        case = Case(lengths=documents, heads=6, kv_heads=3, heads_k_stride=stride, sinks=True, logit_scale=True)
        assert not differences(pool, case, 3), str(case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_into_the_other_ranks_memory(pool: RankPool, layout: str) -> None:
    """The places and the flags of the exchanges, which a GPU's streams use in the same way, in a shared file."""
    assert not all_wrong(
        pool, (*VARIANTS, *VARIANTS[:6]),
        lambda number: {"layout": layout, "transport": "copies", "heads_k_stride": (1, 2) if number % 2 else None},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_come_in_chunks_while_a_kernel_polls_their_flags(pool: RankPool, layout: str) -> None:
    """The protocol of the GPU's forward with a kernel of the reference that reads block by block, in a second step."""
    assert not all_wrong(
        pool, (*VARIANTS, {"kv_heads": 4, "lengths": (61,)}, {"lengths": (200,)}),
        lambda number: {"layout": layout, "transport": "copies", "polled": True, "again": number % 2 == 0,
                        "reads_lse": number % 3 > 0},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["messages", "copies"])
def test_a_backward_of_two_chunks_in_one_launch(pool: RankPool, transport: str) -> None:
    more = {"lengths": (61,), "window": (30, 0)}, {"lengths": (200,)}, {"causal": False, "window": (9, 4)}
    assert not all_wrong(
        pool, (*VARIANTS, *more),
        lambda number: {"transport": transport, "shared": True, "again": number % 2 == 0, "reads_lse": False,
                        "heads_k_stride": 1 if number % 3 == 1 else None},
    )  # fmt: skip


@pytest.mark.slow
def test_all_ranks_but_the_last_have_two_chunks_in_it(pool: RankPool) -> None:
    case = Case(lengths=(61,), shared=True, reads_lse=False)
    assert pool.run(cases.shares_on_rank, case, 4) == [[True]] * 3 + [[False]]
    case = dataclasses.replace(case, heads_k_stride=1)
    assert pool.run(cases.shares_on_rank, case, 3, ranks=[0, 1, 2]) == [[True] * 2] * 2 + [[False] * 2]
    case = Case(lengths=(61,), shared=True, reads_lse=False, causal=False, window=(9, 4))
    assert pool.run(cases.shares_on_rank, case, 4) == [[True]] * 3 + [[False]]


@pytest.mark.slow
@pytest.mark.parametrize("polled", [False, True])
def test_a_backward_in_parts_of_its_keys(pool: RankPool, polled: bool) -> None:
    """Lengths that the ranks do not divide, too; what has no parts has the launches that it had."""
    more = (
        {"lengths": (61,), "kv_heads": 4},
        {"lengths": (200,)},
        {"lengths": (40,), "layout": "contiguous"},
        {"lengths": (21, 0, 40, 9)},
    )
    assert not all_wrong(
        pool, (*VARIANTS, *more),
        lambda number: {"transport": "copies", "polled": polled, "parted": True, "again": number % 2 == 0,
                        "reads_lse": number % 5 == 0},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parted", [False, True])
def test_gradients_of_k_and_v_are_added_apart(pool: RankPool, layout: str, parted: bool) -> None:
    """In parts those of the later own keys are added before the last launch, on two to four ranks."""
    assert not all_wrong(
        pool, (*VARIANTS, {"kv_heads": 4, "lengths": (61,)}, {"lengths": (40, 9)}, {"kv_heads": 4, "lengths": (200,)}),
        lambda number: {"layout": layout, "large": True, "parted": parted, "reads_lse": False,
                        "transport": ("messages", "copies")[parted or number % 2], "again": number % 3 == 0},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parted", [False, True])
def test_one_kernel_adds_the_gradients_of_k_and_v(pool: RankPool, layout: str, parted: bool) -> None:
    """It is given the addresses of all parts; what it does not take is added by torch."""
    assert not all_wrong(
        pool, (*VARIANTS, {"kv_heads": 4, "lengths": (61,)}, {"lengths": (40, 9)}, {"kv_heads": 4, "lengths": (200,)}),
        lambda number: {"layout": layout, "summed": True, "parted": parted, "reads_lse": False,
                        "transport": ("messages", "copies")[parted or number % 2], "again": number % 3 == 0,
                        "heads_k_stride": 1 if number % 4 == 1 and not parted else None},
    )  # fmt: skip


@pytest.mark.slow
def test_how_many_sums_a_backward_has(pool: RankPool) -> None:
    """Of rank 0 the first chunk has gradients from both ranks, and the last one from itself; of rank 1 all rows have
    them from both. Where own keys come first, these are added first."""
    case = Case(lengths=(61,), transport="copies", parted=True, summed=True, reads_lse=False)
    assert pool.run(cases.sums_on_rank, case, 2, ranks=[0, 1]) == [[2, 2], [2, 2]]
    few_keys = dataclasses.replace(case, heads=16, kv_heads=1)
    assert pool.run(cases.sums_on_rank, few_keys, 2, ranks=[0, 1]) == [[4], [2]]
    by_messages = dataclasses.replace(case, transport="messages", parted=False)
    assert pool.run(cases.sums_on_rank, by_messages, 2, ranks=[0, 1]) == [[4], [2]]
    assert pool.run(cases.sums_on_rank, dataclasses.replace(case, batch=2), 2, ranks=[0, 1]) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["ring", "usp"])
def test_the_steps_of_a_ring_add_to_one_dq(pool: RankPool, method: str, layout: str) -> None:
    """What has no such launches has those that it had."""
    wrong = {}
    for number, variant in enumerate((*VARIANTS, {"kv_heads": 4, "lengths": (61,)}, {"lengths": (200,)})):
        case = Case(
            **variant, method=method, layout=layout, parted=True, again=number % 2 == 0, reads_lse=number % 3 == 0
        )
        ranks = 4 if method == "usp" else 2 + number % 3
        if found := differences(pool, case, ranks):
            wrong[f"{ranks} ranks, {case}"] = found
    assert not wrong
    case = Case(method=method, layout=layout, parted=True, reads_lse=False)
    assert all(map(bool, pool.run(cases.parts_on_rank, case, 4)))


@pytest.mark.slow
def test_which_parts_a_rank_has(pool: RankPool) -> None:
    """The last rank has foreign keys before its own ones; another rank but the first also has some between them. With
    fewer query heads for each of the keys, these take longer to fetch, and a part of the own keys comes first."""
    case = Case(lengths=(61,), transport="copies", parted=True, reads_lse=False)
    few_keys = dataclasses.replace(case, heads=16, kv_heads=1)
    for each, first in ((few_keys, []), (case, [0])):
        two, three = ([*first, *range(len(first), len(first) + count)] for count in (2, 3))
        assert pool.run(cases.parts_on_rank, each, 2, ranks=[0, 1]) == [two] * 2
        assert pool.run(cases.parts_on_rank, each, 4) == [two, three, three, two]
        documents = dataclasses.replace(each, lengths=(21, 0, 40))
        assert pool.run(cases.parts_on_rank, documents, 2, ranks=[0, 1]) == [sorted(two * 2)] * 2
        one_token = dataclasses.replace(each, lengths=(40, 1))  # rank 0 has it, and no other rank's keys for it
        assert pool.run(cases.parts_on_rank, one_token, 2, ranks=[0, 1]) == [[], two]
    for other in ({"transport": "messages"}, {"window": (9, 0)}, {"heads_k_stride": 1}):
        assert pool.run(cases.parts_on_rank, dataclasses.replace(case, **other), 2, ranks=[0, 1]) == [[]] * 2


@pytest.mark.slow
def test_such_a_kernel_computes_all_blocks_in_one_launch(pool: RankPool) -> None:
    case = Case(lengths=(200,), transport="copies", polled=True)
    assert pool.run(cases.launches_on_rank, case, 4) == [[2], [2], [2], [1]]
    case = dataclasses.replace(case, causal=False, window=(40, 7))
    assert pool.run(cases.launches_on_rank, case, 4) == [[2], [2], [2], [1]]


@pytest.mark.slow
def test_packed_blocks_read_each_key_where_it_lies(pool: RankPool) -> None:
    """One launch over ranges of the gathered keys, in groups of heads too; the backward has packed copies of them.

    Blocks of a window of two sides have several windows by their last queries and keys, and one in positions.
    """
    windows = {}, {"window": (6, 0)}, {"causal": False, "window": (3, 2)}, {"causal": False, "window": (-1, 4)}
    for number, window in enumerate(windows * 2):
        stride, reads_lse = ((None, True), (1, False))[number // len(windows)]
        case = Case(
            lengths=(9, 4, 17, 30, 5, 3, 21), polled=True, heads_k_stride=stride, reads_lse=reads_lse, again=True,
            **window,
        )  # fmt: skip
        assert not differences(pool, case, 3), str(case)
        launches = pool.run(cases.launches_on_rank, dataclasses.replace(case, again=False), 3, ranks=[0, 1, 2])
        assert all(each == [each[0]] * (2 if stride else 1) and each[0] > 4 for each in launches), launches


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, forward, both",
    [
        (Case(), 1, 3),
        (Case(lengths=DOCUMENTS), 1, 3),
        (Case(heads_k_stride=1), 2, 6),
        (Case(transport="copies"), 0, 0),
        (Case(method="ring"), 3, 10),
        (Case(method="ulysses"), 2, 4),
        (Case(method="usp"), 3, 8),
        (Case(method="ring", layout="contiguous", lengths=(40,), window=(4, 0)), 1, 4),
    ],
    ids=str,
)
def test_batches_of_messages(pool: RankPool, case: Case, forward: int, both: int) -> None:
    """What a call sends: so many batches a rank, the same number on all ranks at most."""
    found = pool.run(cases.messages_on_rank, case, 4)
    assert max(each["forward"] for each in found) == forward
    assert max(each["both"] for each in found) == both
    assert all(each["others"] == 0 for each in found)


@pytest.mark.slow
def test_a_window_sends_its_halo(pool: RankPool) -> None:
    """Four rows of keys and values to the rank after, whatever the length."""
    case = Case(layout="contiguous", lengths=(80,), window=(4, 0))
    row = 2 * case.kv_heads * case.head_dim * 4
    assert [each["bytes"] for each in pool.run(cases.messages_on_rank, case, 4)] == [4 * row] * 3 + [0]
