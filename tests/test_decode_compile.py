"""The decode kernel without a GPU: what the compiler says, the rules that choose, what a launch is given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_problems import draw, faults

from flashlane import dispatch, jit, registry
from flashlane.kernels.decode import config as rules
from flashlane.kernels.decode import decode
from flashlane.kernels.decode.config import DecodeConfig, config_for, split_count, splits_for
from flashlane.layout import TileLayout
from flashlane.problem import AttentionProblem, Inputs
from flashlane.reference import reference_attention

KERNEL = registry.get("decode(split-kv)")
BASE = AttentionProblem(1, 32, 8, 1, 65536, 128, 128, torch.bfloat16, 128**-0.5, arch="sm_90a")
CORNERS: list[dict[str, Any]] = [
    {},
    {"batch": 64, "head_dim": 64, "head_dim_v": 64},
    {"head_dim": 256, "head_dim_v": 256},
    {"head_dim": 192, "seqlen_q": 16, "page_size": 64},
    {"head_dim": 40, "head_dim_v": 40, "softcap": 30.0, "seqlen_q": 8, "page_size": 17},
    {"seqlen_q": 16, "page_size": 7},
    {"dtype": torch.float16, "seqlen_q": 8, "alibi": True, "seqlen_k": 1024},
]


def names(change: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in change.items()) or "one token"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("change", CORNERS, ids=names)
def test_compiles_without_spills(change: dict[str, Any], arch: str) -> None:
    """Static assertions in the device file hold the Python formulas and the mirrored structs against it."""
    problem = replace(BASE, arch=arch, **change)
    assert KERNEL.supports(problem) is None
    config = KERNEL.config(problem)
    compiled = KERNEL.compile(config, arch)
    report = compiled.report
    assert report.spills == 0 and report.stack == 0 and not report.warnings
    needs = KERNEL.resources(config)
    assert needs.shared_memory + report.static_shared <= jit.shared_limit(arch)
    held = jit.occupancy(arch, needs.threads, report.registers, needs.shared_memory + report.static_shared)
    assert held.blocks >= config.min_blocks
    counts = jit.instruction_counts(compiled.cubin) if arch == "sm_90a" else None
    if counts is not None:
        assert counts["HMMA"] > 0 and counts["LDSM"] > 0 and counts["LDGSTS"] > 0 and counts["MUFU.EX2"] > 0
        assert counts.get("STL", 0) == counts.get("LDL", 0) == 0


def test_shared_memory_by_hand() -> None:
    """Four teams of three stages of 16 rows of K and V, 17 chunks each, and 16 such rows of Q; then 128 parts."""
    config = DecodeConfig("bf16", 128, 128, warps_m=1, teams=4, stages=3)
    assert config.shared_memory == 4 * 3 * 2 * 16 * 272 + 16 * 272
    assert replace(config, head_dim=16, head_dim_v=16, stages=2).shared_memory == 16 * 128 * 8
    assert replace(config, head_dim=16, head_dim_v=16, stages=2, cluster=8).shared_memory == 16 * 128 * 8 + 16 * 104


def test_rows_of_tiles_are_read_without_bank_conflicts() -> None:
    for columns in range(16, 257, 16):
        layout = TileLayout(columns, False)
        assert all(layout.conflicts(row, chunk) == 0 for row in (0, 8) for chunk in range(columns // 8))


def test_bytes_in_flight_hide_the_latency() -> None:
    """Every shape keeps what an SM's share of the copy rate needs under way, if shared memory allows it at all."""
    needed = 4.29e12 / 132 * 1.0e-6
    for head_dim, rows, items in itertools.product((64, 128, 192, 256), (1, 8, 16), (1, 64)):
        config = config_for(replace(BASE, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=rows, batch=items))
        stage = rules.stage_bytes(head_dim, head_dim, config.keys)
        assert config.min_blocks * config.teams * (config.stages - 1) * stage > needed


@pytest.mark.parametrize("uneven", [False, True])
def test_split_counts_are_possible(uneven: bool) -> None:
    for items, steps, slots in itertools.product(
        (1, 3, 8, 66, 100, 512, 5000), (0, 1, 7, 64, 1024, 8192), (1, 132, 264)
    ):
        splits = split_count(items, steps, slots, uneven)
        assert 1 <= splits <= max(1, min(rules.MAX_SPLITS, steps))
        if uneven and items >= rules.UNEVEN_WAVES * slots:
            assert splits == 1


def estimate(items: int, steps: int, slots: int, splits: int) -> float:
    """The cost that split_count describes, written out again: waves of parts, the start of each, the adding up."""
    each = math.ceil(steps / splits)
    waves = items * math.ceil(steps / each) / slots
    last = math.ceil(waves) - waves
    busy = max(waves, rules.BUSY) if waves <= 1 else waves + rules.TAIL * last
    cost = each * busy + rules.START_STEPS * math.ceil(waves)
    return cost + (rules.PARTS_STEPS + rules.PART_STEPS * splits) * (splits > 1)


def test_split_count_is_the_cheapest() -> None:
    for items, steps, slots in itertools.product((1, 5, 8, 40, 100, 130, 300, 512), (1, 8, 33, 512), (66, 132, 264)):
        best = min(estimate(items, steps, slots, splits) for splits in range(1, min(steps, 128) + 1))
        assert estimate(items, steps, slots, split_count(items, steps, slots)) == pytest.approx(best)


def chosen(**change: Any) -> tuple[int, int, int]:
    """Teams, blocks of a cluster and parts that an H200 runs a problem with."""
    problem = replace(BASE, **change)
    config = config_for(problem)
    items = problem.batch * problem.kv_heads * -(-rules.rows_of(problem) // config.rows)
    return config.teams, config.cluster, splits_for(problem, config, items, 132 * config.min_blocks)


def test_what_an_h200_runs() -> None:
    """The choices that docs/notebook/0004-decode.md measured as the fastest."""
    assert chosen(seqlen_k=1024) == (8, 8, 1)  # one cluster an item: no work space
    assert chosen(seqlen_k=1024, batch=2) == (8, 4, 1)
    assert chosen(seqlen_k=1024, batch=4) == (8, 2, 1)
    assert chosen() == (8, 2, 8)  # 128 large blocks
    assert chosen(batch=16, seqlen_k=8192) == (8, 1, 1)
    assert chosen(batch=64, seqlen_k=1024) == (4, 1, 1)  # more items than SMs: two small blocks an SM
    assert chosen(batch=16, seqlen_k=8192, seqused_k=True) == (4, 1, 4)  # unknown lengths: two waves
    assert chosen(seqused_k=True) == chosen()  # of one sequence they cannot differ
    assert chosen(seqlen_q=8) == (4, 2, 8)
    assert chosen(window_left=100, window_right=0) == (8, 1, 1)  # a window is one step


def test_clusters_are_for_hopper() -> None:
    for arch in ("sm_80", "sm_86", "sm_100", "sm_120"):
        for batch in (1, 4, 64):
            assert config_for(replace(BASE, arch=arch, batch=batch)).cluster == 1


def test_refusals_name_the_reason() -> None:
    for change, words in (
        ({"arch": None}, "GPU"),
        ({"dtype": torch.float32}, "f16 or bf16"),
        ({"head_dim": 264}, "up to 256"),
        ({"bias": True}, "bias"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"aligned": False}, "16 bytes"),
        ({"batch": 65536}, "65535"),
        ({"arch": "sm_75"}, "sm_75"),
        ({"scale": -1.0}, "scale"),
    ):
        reason = KERNEL.supports(replace(BASE, **change))
        assert reason is not None and words in reason, change


def test_auto_takes_it_where_rows_are_few() -> None:
    assert dispatch.select(BASE) is KERNEL
    assert dispatch.select(replace(BASE, seqlen_q=16)) is KERNEL
    assert dispatch.select(replace(BASE, seqlen_q=2048, seqlen_k=2048)) is not KERNEL


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What would have been launched on an H200, with the driver replaced by a list."""
    found: list[tuple[Any, ...]] = []

    class Fake:
        def launch(self, *arguments: Any) -> None:
            found.append(arguments)

        def occupancy(self, threads: int, shared: int) -> int:
            return jit.occupancy("sm_90a", threads, 0, shared).blocks

    class Device:
        multi_processor_count = 132

    monkeypatch.setattr(jit, "load", lambda compiled, device: Fake())
    monkeypatch.setattr(jit, "compile", lambda source, arch: source)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    monkeypatch.setattr(decode, "_arrivals", lambda count, device: torch.zeros(count, dtype=torch.int32))
    registry.changed()
    yield found
    registry.changed()


def test_what_a_launch_is_given(launches: list[tuple[Any, ...]]) -> None:
    pages = torch.zeros(40, 16, 2, 128, dtype=torch.float16)
    q = torch.zeros(3, 8, 5, 128, dtype=torch.float16).transpose(1, 2)
    table, used = torch.zeros(3, 13, dtype=torch.int32), torch.full((3,), 200, dtype=torch.int32)
    sinks, slopes = torch.zeros(8), torch.zeros(3, 8)
    inputs = Inputs(q, pages, pages, sinks=sinks, alibi_slopes=slopes, block_table=table, seqused_k=used)
    problem = AttentionProblem.from_inputs(inputs, causal=True, softcap=10.0).on("sm_90a")
    out, lse = torch.empty(3, 5, 8, 128, dtype=torch.float16), torch.empty(3, 8, 5)
    KERNEL.run(KERNEL.config(problem), problem, inputs, out, lse, splits=3)
    ((grid, block, shared, params),) = launches
    config = KERNEL.config(problem)
    assert rules.rows_of(problem) == 20 and config.rows == 32 and config.pages == "whole"
    assert grid == (2 * config.cluster, 3, 3) and block == (config.threads, 1, 1) and shared == config.shared_memory
    strides = (params.attention.q_batch, params.attention.q_row, params.attention.q_head, params.attention.q_column)
    assert strides == q.stride()
    assert (params.attention.k_batch, params.attention.k_row) == pages.stride()[:2]
    assert (params.attention.seqlen_k, params.attention.group, params.kv_heads) == (13 * 16, 4, 2)
    assert (params.cache.block_table, params.cache.table_batch, params.cache.page_size) == (table.data_ptr(), 13, 16)
    assert params.cache.seqused_k == used.data_ptr() and params.cache.leftpad_k is None
    assert (params.alibi_slopes, params.alibi_batch, params.sinks_are_float) == (slopes.data_ptr(), 8, 1)
    assert params.softcap_log2 == pytest.approx(10 * math.log2(math.e))
    assert params.split.splits == 3 and params.split.arrivals and params.total_q == -1
    assert [n * params.group_inverse >> 32 for n in range(100)] == [n // 4 for n in range(100)]


def test_nothing_is_launched_for_nothing(launches: list[tuple[Any, ...]]) -> None:
    q, k = torch.zeros(2, 0, 4, 64, dtype=torch.float16), torch.zeros(2, 9, 4, 64, dtype=torch.float16)
    problem = AttentionProblem.from_inputs(Inputs(q, k, k)).on("sm_90a")
    KERNEL.forward(problem, Inputs(q, k, k), torch.empty_like(q), torch.empty(2, 4, 0))
    assert launches == []


@pytest.mark.parametrize("group", [2, 3, 7, 12, 128, 1000, decode.MAX_GROUP])
def test_rows_divide_exactly_by_the_group(group: int) -> None:
    """A row of a tile, counted from the tile's first head, is below group + 64."""
    inverse = -(-(1 << 32) // group)
    ends = (0, 1, group - 1, group, group + 1, group + 63)
    assert all(n * inverse >> 32 == n // group for n in ends)
    assert inverse < 1 << 32


def test_drawn_problems_are_legal_and_the_bound_holds_for_the_reference() -> None:
    """What the GPU tests draw, on the CPU: nothing outside the cache is needed, and rounding alone is within bounds."""
    for item in draw(24, seed=1):
        problem, inputs = item.build(torch.device("cpu"))
        out, lse = reference_attention(problem, inputs, torch.float64)
        assert not out.isnan().any()
        assert faults(problem, inputs, out.to(problem.dtype), lse.float()) is None
        if out.numel() and out.abs().max() > 0:
            assert faults(problem, inputs, (out * 1.05).to(problem.dtype), lse.float()) is not None
