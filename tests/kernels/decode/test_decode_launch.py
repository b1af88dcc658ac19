"""What the decode kernel's launches are given, without a GPU: addresses, tensor maps, sizes and memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hopper_fakes import SMS, WORD, Launches, install

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import launch as jit_launch
from flashlane.jit import launch_pool
from flashlane.kernels.decode import decode
from flashlane.kernels.decode import launch as decode_launch
from flashlane.kernels.decode import select as rules
from flashlane.kernels.decode.config import DecodeConfig
from flashlane.kernels.decode.launch import ParamsWithMaps

KERNEL = registry.get("decode(split-kv)")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    decode_launch._prepared.cache_clear()
    yield from install(monkeypatch)
    decode_launch._prepared.cache_clear()


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The memory of partial results of each launch."""
    made: list[torch.Tensor] = []

    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty_strided(size, stride, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(jit_launch, "allocator", lambda device: allocate)
    return made


def problem_of(inputs: Inputs, **asked: object) -> AttentionProblem:
    return AttentionProblem.from_inputs(inputs, **asked).on("sm_90a")


def results_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, rows, heads, _ = inputs.q.shape
    return inputs.q.new_zeros((*batch, rows, heads, inputs.v.shape[-1])), torch.zeros((*batch, heads, rows))


def dense(batch: int = 2, keys: int = 8192) -> Inputs:
    """Groups of four heads; v is wider than k."""
    k, v = (torch.zeros(batch, keys, 2, columns, dtype=torch.bfloat16) for columns in (64, 80))
    return Inputs(torch.zeros(batch, 1, 8, 64, dtype=torch.bfloat16), k, v)


def config_of(problem: AttentionProblem, tma: bool = True, **changes: object) -> DecodeConfig:
    """One without clusters, unless the changes say otherwise."""
    config = rules.config_of(problem, rules.Shape(1, 8, tma=tma))
    assert config is not None
    return replace(config, **{"cluster": 1, **changes})


def pointed_to(params: ParamsWithMaps) -> tuple[int, int]:
    """What the maps of K and V point to."""
    return tuple(int.from_bytes(bytes(getattr(params, f"{side}_map"))[:WORD], "little") for side in "kv")


@pytest.mark.parametrize("tma", [False, True])
def test_what_a_launch_of_splits_is_given(launches: Launches, floats: list[torch.Tensor], tma: bool) -> None:
    inputs = dense()
    problem, (out, lse) = problem_of(inputs, scale=0.5, causal=True), results_of(inputs)
    config = config_of(problem, tma)
    KERNEL.run(config, problem, inputs, out, lse, splits=3)
    ((grid, block, shared, params),) = launches
    assert (grid, block, shared) == ((2, 3, 2), (config.threads, 1, 1), config.shared_memory)
    given, attention = params.params, params.params.attention
    places = [getattr(attention, name) for name in ("q", "k", "v", "out", "lse")]
    assert places == [t.data_ptr() for t in (inputs.q, inputs.k, inputs.v, out, lse)]
    assert (attention.batch, attention.heads, attention.group, attention.seqlen_k) == (2, 8, 4, 8192)
    assert (attention.q_batch, attention.q_head, attention.out_batch, attention.out_head) == (512, 64, 640, 80)
    assert (attention.v_batch, attention.v_row, attention.v_head) == inputs.v.stride()[:3]
    assert (given.kv_heads, given.m_blocks, given.total_q, given.equal_lengths) == (2, 1, -1, 1)
    assert given.group_inverse == 1 << 30 and given.split.splits == 3 and given.split.arrivals == 77
    rows = 2 * 2 * 3 * config.rows  # of each tile's splits: a sum for each column, a maximum and a row sum
    (memory,) = floats
    assert memory.numel() == rows * (config.head_dim_v + 2)
    assert given.split.out == memory.data_ptr()
    assert given.split.statistics == memory.data_ptr() + 4 * rows * config.head_dim_v
    if not tma:
        assert not launches.maps
        return
    assert [each.sizes for each in launches.maps] == [(64, 8192, 2, 2), (80, 8192, 2, 2)]
    assert [each.box[:2] for each in launches.maps] == [(64, config.box_rows)] * 2
    assert pointed_to(params) == (inputs.k.data_ptr(), inputs.v.data_ptr())
    others = Inputs(inputs.q, inputs.k.clone(), inputs.v.clone())
    KERNEL.run(config, problem, others, out, lse, splits=3)
    assert pointed_to(launches[1][3]) == (others.k.data_ptr(), others.v.data_ptr()) and len(launches.maps) == 2


def test_a_cluster_has_statistics_and_an_arrival_for_each_of_its_ctas(
    launches: Launches, floats: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[int, bool]] = []
    memory = SimpleNamespace(data_ptr=lambda: 400)
    monkeypatch.setattr(launch_pool, "counters_of", lambda *given: counted.append(given[2:]) or memory)
    inputs = dense()
    problem = problem_of(inputs)
    config = config_of(problem, cluster=2)
    KERNEL.run(config, problem, inputs, *results_of(inputs), splits=3)
    assert launches[0][0] == (4, 3, 2) and counted == [(2 * 2 * 2, False)]
    assert floats[0].numel() == 2 * 2 * 3 * config.rows * (config.head_dim_v + 4)


def test_a_captured_launch_has_counters_of_its_own(
    launches: Launches, floats: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so has the launch after it on the same stream, as a replay may run next to it."""
    counted: list[tuple[int, bool]] = []

    def counters(device: int, stream: int, count: int, capturing: bool) -> SimpleNamespace:
        counted.append((stream, capturing))
        return SimpleNamespace(data_ptr=functools.partial(int, 1000 * len(counted)))

    monkeypatch.setattr(launch_pool, "counters_of", counters)
    inputs = dense()
    problem = problem_of(inputs)
    for launches.capturing in (False, False, True, True, False, False):
        KERNEL.run(config_of(problem), problem, inputs, *results_of(inputs), splits=3)
    assert counted == [(1000, False), (1000, True), (1000, True), (1000, False)]
    assert [each[3].params.split.arrivals for each in launches] == [1000, 1000, 2000, 3000, 4000, 4000]


def test_each_call_is_given_its_own_lengths(launches: Launches) -> None:
    lengths = [torch.tensor(each, dtype=torch.int32) for each in ([4, 9], [4, 9], [7, 8])]
    inputs = [replace(dense(), seqused_k=each) for each in lengths]
    problem = problem_of(inputs[0])
    for each in (*inputs, inputs[0]):
        KERNEL.run(config_of(problem, False), problem, each, *results_of(each), splits=1)
    given = [params.params.seqlen.seqused_k for _, _, _, params in launches]
    assert given == [each.data_ptr() for each in (*lengths, lengths[0])]


@pytest.mark.parametrize("group", [1, 2, 3, 7, 12, 128, 1000, decode.MAX_GROUP])
def test_rows_divide_exactly_by_the_group(launches: Launches, group: int) -> None:
    """A row of a tile, counted from the tile's first head, is below group + 64."""
    k = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    inputs = Inputs(torch.zeros(1, 1, group, 64, dtype=torch.bfloat16), k, k.clone())
    problem = problem_of(inputs)
    KERNEL.run(config_of(problem, False), problem, inputs, *results_of(inputs), splits=1)
    inverse = launches[0][3].params.group_inverse  # 0 stands for a group of one head
    assert all((n * inverse >> 32 if inverse else n) == n // group for n in (0, 1, group - 1, group, group + 63))


def test_one_split_needs_no_memory(launches: Launches, floats: list[torch.Tensor]) -> None:
    inputs = dense()
    problem = problem_of(inputs)
    KERNEL.run(config_of(problem), problem, inputs, *results_of(inputs), splits=1)
    assert not floats and launches[0][3].params.split.out is None


@pytest.mark.parametrize("each", [None, 5])
def test_stream_k_has_two_partial_tiles_a_cta(launches: Launches, floats: list[torch.Tensor], each: int | None) -> None:
    inputs = dense()
    problem = problem_of(inputs)
    config = rules.config_of(problem, rules.Shape(1, 8, stream_k=True))
    KERNEL.run(config, problem, inputs, *results_of(inputs), splits=each)
    ((grid, _, _, params),) = launches
    ctas = SMS if each is None else 5 * 2 * 2
    assert grid == (ctas, 1, 1) and params.params.split.splits == ctas
    assert floats[0].numel() == 2 * ctas * config.rows * (config.head_dim_v + 2)


def test_packed_sequences_are_a_batch_of_one(launches: Launches) -> None:
    q, k = torch.zeros(5, 8, 64, dtype=torch.bfloat16), torch.zeros(600, 2, 64, dtype=torch.bfloat16)
    starts = [torch.tensor(each, dtype=torch.int32) for each in ([0, 2, 5], [0, 100, 600])]
    lengths = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": 3, "max_seqlen_k": 500}
    inputs = Inputs(q, k, k.clone(), **lengths)
    problem, (out, lse) = problem_of(inputs), results_of(inputs)
    KERNEL.run(config_of(problem), problem, inputs, out, lse, splits=1)
    params = launches[0][3].params
    assert (params.total_q, params.equal_lengths, params.attention.seqlen_q) == (5, 0, 3)
    assert (params.attention.q_batch, params.attention.q_row, params.attention.out_batch) == (0, 512, 0)
    assert (params.seqlen.cu_seqlens_q, params.seqlen.cu_seqlens_k) == tuple(t.data_ptr() for t in starts)
    assert launches.maps[0].sizes == (64, 600, 2, 1)


def test_configurations_that_cannot_run_are_refused(launches: Launches) -> None:
    inputs = dense()
    expanded = replace(inputs, k=inputs.k[:1].expand(2, -1, -1, -1))
    problem = problem_of(expanded)
    with pytest.raises(ValueError, match="TMA steps along no axis by 0"):
        KERNEL.run(config_of(problem), problem, expanded, *results_of(inputs))
    KERNEL.run(config_of(problem, False), problem, expanded, *results_of(inputs))
    asked = problem_of(inputs, num_splits=2)
    for changes in ({"cluster": 2}, {"stream_k": True, "tma": False}):
        with pytest.raises(ValueError, match="no stream-K and no clusters, as num_splits is 2"):
            KERNEL.run(config_of(asked, **changes), asked, inputs, *results_of(inputs))
    assert len(launches) == 1
    KERNEL.run(config_of(asked), asked, inputs, *results_of(inputs))
    assert len(launches) == 2 and launches[1][0] == (2, 2, 2)


def test_without_queries_nothing_is_launched(launches: Launches) -> None:
    inputs = dense()
    empty = replace(inputs, q=inputs.q[:, :0])
    KERNEL.forward(problem_of(empty), empty, *results_of(empty))
    assert not launches
