"""The decode kernel without a GPU: what the compiler says, the rules that choose, what a launch is given."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_problems import draw, faults
from disassembly import counted

from flashlane import jit
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import launch, launch_pool, tensormap
from flashlane.kernels.decode import select as rules
from flashlane.kernels.decode.config import DecodeConfig
from flashlane.kernels.decode.select import config_for, splits_for
from flashlane.kernels.tile_layout import TileLayout
from flashlane.reference.naive import reference_attention

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
    {"batch": 64, "seqused_k": True, "page_size": 16, "sinks": True},
    {"batch": 64, "seqlen_q": 8, "softcap": 30.0, "page_size": 48},
    *(
        {"batch": 26, "heads": heads, "seqlen_k": 24000, "head_dim": wide, "head_dim_v": wide, "page_size": page}
        for heads, wide in ((8, 64), (32, 128), (8, 256), (256, 128), (256, 256))
        for page in (0, 16, 24)
    ),
    {"batch": 64, "num_splits": 1},
]


def names(change: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in change.items()) or "one token"


@pytest.mark.parametrize(
    ("change", "arch"),
    [(change, arch) for number, change in enumerate(CORNERS) for arch in ("sm_90a", ("sm_80", "sm_120")[number % 2])],
    ids=lambda x: x if isinstance(x, str) else names(x),
)
def test_compiles_without_spills(change: dict[str, Any], arch: str) -> None:
    """Each on Hopper and on one other architecture.

    Static assertions in the device file hold the Python formulas and the mirrored structs against it.
    """
    problem = replace(BASE, arch=arch, **change)
    assert KERNEL.supports(problem) is None
    config = KERNEL.config(problem)
    compiled = KERNEL.compile(config, arch)
    report = compiled.report
    assert report.spills == 0 and report.stack == 0 and not report.warnings
    needs = KERNEL.resources(config)
    assert needs.shared_memory + report.static_shared <= jit.shared_limit(arch)
    held = jit.occupancy(arch, needs.threads, report.registers, needs.shared_memory + report.static_shared)
    assert held.ctas >= config.min_blocks
    if arch == "sm_90a":
        counts = counted(compiled.cubin)
        assert counts["HMMA"] > 0 and counts["LDSM"] > 0 and counts["LDGSTS"] > 0 and counts["MUFU.EX2"] > 0
        assert (counts.get("UTMALDG", 0) > 0) == config.tma
        assert counts.get("STL", 0) == counts.get("LDL", 0) == 0


def test_shared_memory_by_hand() -> None:
    """Four warp groups of three stages of 16 rows of K and V; or 128 splits' statistics and four sums of each; Q."""
    config = DecodeConfig("bf16", 128, 128, warps_m=1, warp_groups=4, stages=3)
    assert config.shared_memory == 4 * 3 * 2 * 16 * 256 + 16 * 256 + 4 * 16 * 8 + 16
    small = replace(config, head_dim=16, head_dim_v=16, stages=2)
    assert small.shared_memory == 128 * (16 * 8 + 16) + 16 * 32 + 4 * 16 * 8 + 16
    assert replace(small, cluster=8).shared_memory == small.shared_memory + 16 * (8 + 4 * 32)


def test_shared_memory_with_tma_by_hand() -> None:
    """Three stages of 128 rows of two planes each of K and V; Q; statistics; six barriers."""
    config = DecodeConfig("bf16", 128, 128, warps_m=1, warp_groups=8, stages=3, tma=True, box_rows=128)
    assert config.shared_memory == 3 * 4 * 128 * 128 + 16 * 256 + 8 * 16 * 8 + 16 + 6 * 8
    assert config.threads == 9 * 32 and config.max_splits == 65536 // (16 * 8 + 16)
    assert replace(config, head_dim=80).stage_bytes == config.stage_bytes  # a plane that is not full takes as much
    assert config.group_sums == config.stage_bytes  # they lie where the last step's keys were


def test_shared_memory_of_stream_k_by_hand() -> None:
    """Stages; queries of two tiles; statistics; four work tiles and two barriers each; sums that a step cannot hold."""
    config = DecodeConfig("bf16", 128, 128, warps_m=1, warp_groups=8, stages=3, stream_k=True)
    tiles = 4 * (144 + 2 * 8)
    assert config.shared_memory == 8 * 3 * 2 * 16 * 256 + 2 * 16 * 256 + 8 * 16 * 8 + 16 + tiles
    assert config.threads == 9 * 32 and config.max_splits == 132 and config.scratch == 8 * 2 * 16 * 256
    rows = replace(config, warps_m=4, warp_groups=2, stages=7)
    assert rows.scratch == 132 * (64 * 8 + 16) > rows.group_sums > 2 * 2 * 16 * 256
    assert rows.shared_memory == 2 * 7 * 2 * 16 * 256 + 2 * 64 * 256 + rows.scratch + 2 * 64 * 8 + 16 + tiles


def test_rows_of_tiles_are_read_without_bank_conflicts() -> None:
    """And the chunks of a sector stay side by side: cp.async would fetch a sector twice that it writes to two."""
    for columns in range(16, 257, 16):
        layout = TileLayout(columns, True)
        assert all(layout.conflicts(row, chunk) == 0 for row in (0, 8) for chunk in range(columns // 8))
        pairs = [
            (layout.offset(row, chunk), layout.offset(row, chunk + 1))
            for row in range(16)
            for chunk in range(0, columns // 8, 2)
        ]
        assert all(one // 32 == other // 32 for one, other in pairs)


def test_the_swizzle_is_that_of_tma() -> None:
    """128 bytes: bits 4 to 6 of an address are XORed with bits 7 to 9 (PTX ISA, tensor swizzling modes)."""
    layout = TileLayout(64, True)
    for row, chunk in itertools.product(range(32), range(8)):
        plain = row * 128 + chunk * 16
        assert layout.offset(row, chunk) == plain ^ (plain >> 7 & 7) << 4


def test_bytes_in_flight_hide_the_latency() -> None:
    """Every shape keeps in flight what an SM's part of the copy rate needs, if shared memory allows it at all."""
    needed = 4.29e12 / 132 * 1.0e-6
    for head_dim, rows, items in itertools.product((64, 128, 192, 256), (1, 8, 16), (1, 64)):
        config = config_for(replace(BASE, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=rows, batch=items))
        pipelines = 1 if config.tma else config.warp_groups
        assert config.min_blocks * pipelines * (config.stages - 1) * config.stage_bytes > needed


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
        ({"varlen": True, "seqlen_q": 2**31 - 1}, "rows of a sequence share a KV head; it takes up to 1073741824"),
    ):
        reason = KERNEL.supports(replace(BASE, **change))
        assert reason is not None and words in reason, change


def test_auto_takes_it_where_rows_are_few() -> None:
    assert dispatch.select(BASE) is KERNEL
    assert dispatch.select(replace(BASE, seqlen_q=8)) is KERNEL
    hopper = registry.get("hopper(wgmma+tma)")
    for change in ({}, {"seqused_k": True}, {"seqused_k": True, "page_size": 64}, {"batch": 16, "seqused_k": True}):
        assert dispatch.select(replace(BASE, seqlen_q=16, **change)) is hopper, change
        assert dispatch.select(replace(BASE, seqlen_q=8, **change)) is KERNEL, change
    for change in ({"seqlen_k": 128}, {"window_left": 4096}):
        assert dispatch.select(replace(BASE, batch=1, kv_heads=1, heads=4, seqlen_q=16, **change)) is KERNEL, change
    assert dispatch.select(replace(BASE, seqlen_q=2048, seqlen_k=2048)) is not KERNEL


described: list[tensormap.TensorMap] = []
"""The tensor maps that launches asked the driver for."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What would have been launched on an H200, with the driver replaced by a list."""
    recorded: list[tuple[Any, ...]] = []
    described.clear()

    class Fake:
        def prepare(self, grid: Any, block: Any, shared: int, params: Any, overlapped: bool) -> Any:
            own, _ = params
            return lambda stream: recorded.append((grid, block, shared, type(own).from_buffer_copy(own)))

        def occupancy(self, threads: int, shared: int) -> int:
            return jit.occupancy("sm_90a", threads, 0, shared).ctas

    class Device:
        multi_processor_count = 132

    monkeypatch.setattr(jit, "load", lambda compiled, device: Fake())
    monkeypatch.setattr(jit, "compile", lambda source, arch, debug: source)
    monkeypatch.setattr(tensormap, "encode", lambda tensor_map: described.append(tensor_map) or bytes(128))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    monkeypatch.setattr(tensormap, "mover", lambda place: lambda address: None)
    monkeypatch.setattr(launch, "stream_getter", lambda: lambda device: 0)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    counters = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr(launch_pool, "counters_of", lambda device, stream, count, capturing: counters[:count])
    registry.changed()
    yield recorded
    registry.changed()


def test_what_a_launch_is_given(launches: list[tuple[Any, ...]]) -> None:
    pages = torch.zeros(40, 16, 2, 128, dtype=torch.float16)
    q = torch.zeros(3, 8, 5, 128, dtype=torch.float16).transpose(1, 2)
    table, used = torch.zeros(3, 13, dtype=torch.int32), torch.full((3,), 200, dtype=torch.int32)
    sinks, slopes = torch.zeros(8), torch.zeros(3, 8)
    inputs = Inputs(q, pages, pages, sinks=sinks, alibi_slopes=slopes, block_table=table, seqused_k=used)
    problem = AttentionProblem.from_inputs(inputs, causal=True, softcap=10.0).on("sm_90a")
    out, lse = torch.empty(3, 5, 8, 128, dtype=torch.float16), torch.empty(3, 8, 5)
    config = rules.config_of(problem, rules.Shape(2, 4, block_n=32, tma=True, cluster=2))
    KERNEL.run(config, problem, inputs, out, lse, splits=3)
    ((grid, block, shared, params),) = launches
    assert problem.rows_of_kv_head == 20 and config.rows == 32 and config.pages == "whole"
    box = (64, 16, 1, 1)
    assert [(m.sizes, m.strides, m.box, m.swizzle) for m in described] == [
        ((128, 16, 2, 40), (512, 256, 8192), box, 128)
    ] * 2
    assert grid == (2 * config.cluster, 3, 3) and block == (config.threads, 1, 1) and shared == config.shared_memory
    strides = (params.attention.q_batch, params.attention.q_row, params.attention.q_head, params.attention.q_column)
    assert strides == q.stride()
    assert (params.attention.k_batch, params.attention.k_row) == pages.stride()[:2]
    assert (params.attention.seqlen_k, params.attention.group, params.kv_heads) == (13 * 16, 4, 2)
    assert (params.seqlen.block_table, params.seqlen.table_batch, params.seqlen.page_size) == (table.data_ptr(), 13, 16)
    assert params.seqlen.seqused_k == used.data_ptr() and params.seqlen.leftpad_k is None
    assert (params.score.alibi, params.score.alibi_batch, params.score.sinks_are_float) == (slopes.data_ptr(), 8, 1)
    assert params.score.softcap_log2 == pytest.approx(10 * math.log2(math.e))
    assert params.split.splits == 3 and params.split.arrivals and params.total_q == -1 and not params.equal_lengths
    assert [n * params.group_inverse >> 32 for n in range(100)] == [n // 4 for n in range(100)]


@pytest.mark.parametrize("paged", [False, True])
def test_splits_are_as_many_as_are_asked_for(launches: list[tuple[Any, ...]], paged: bool) -> None:
    """On the same grid of splits, by the same CTAs, whatever the batch; at most one split a step of 128 keys."""
    launch_sizes = {}
    for batch, num_splits in itertools.product((1, 3, 64), (0, 1, 3, 8, 1000)):
        q, k = torch.zeros(batch, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(batch, 2000, 2, 128).bfloat16()
        inputs = Inputs(q, k, k, seqused_k=torch.full((batch,), 2000, dtype=torch.int32))
        if paged:
            table = torch.arange(batch * 125, dtype=torch.int32).view(batch, 125)
            inputs = replace(inputs, k=k.view(-1, 16, 2, 128), v=k.view(-1, 16, 2, 128), block_table=table)
        problem = AttentionProblem.from_inputs(inputs, num_splits=num_splits).on("sm_90a")
        assert dispatch.select(problem) is KERNEL
        KERNEL.forward(problem, inputs, torch.empty_like(q), torch.empty(batch, 8, 1))
        grid, block, shared, params = launches[-1]
        assert params.split.splits == grid[1] and bool(params.split.out) == (grid[1] > 1)
        launch_sizes[batch, num_splits] = grid[0], grid[1], block, shared
    for num_splits, parts in ((1, 1), (3, 3), (8, 8), (1000, 16)):
        blocks = {launch_sizes[batch, num_splits] for batch in (1, 3, 64)}
        assert len(blocks) == 1 and next(iter(blocks))[:2] == (2, parts)
    assert len({launch_sizes[batch, 0] for batch in (1, 3, 64)}) > 1  # what is asked for with 0 follows the batch


def test_splits_asked_for_are_the_only_ones() -> None:
    """Keys are divided over no cluster and by no stream-K; most splits are as many as there is room for."""
    for num_splits, arch, change in itertools.product((1, 7, 500), ("sm_80", "sm_90a", "sm_120"), CORNERS):
        problem = replace(BASE, arch=arch, **(change | {"num_splits": num_splits}))
        found = {config_for(replace(problem, batch=batch)) for batch in (1, 2, 16, 500)}
        (config,) = found
        assert config.cluster == 1 and not config.stream_k and not config.tma
        steps = -(-problem.seqlen_k // config.step)
        for items, resident in itertools.product((1, 8, 5000), (66, 264)):
            assert splits_for(problem, config, items, resident) == min(num_splits, 128, steps)
    assert splits_for(replace(BASE, seqlen_k=0, num_splits=3), config, 8, 132) == 1
    window = replace(BASE, num_splits=9, window_left=400, window_right=0)
    assert splits_for(window, config, 8, 132) == -(-401 // config.step) + 1 < 9  # it may begin within a step


def test_a_configuration_that_divides_keys_otherwise_is_refused(launches: list[tuple[Any, ...]]) -> None:
    q, k = torch.zeros(4, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 500, 8, 128, dtype=torch.bfloat16)
    problem = AttentionProblem.from_inputs(Inputs(q, k, k), num_splits=1).on("sm_90a")
    for shape in (rules.Shape(1, 8, tma=True, stream_k=True), rules.Shape(1, 8, cluster=2)):
        config = rules.config_of(problem, shape)
        with pytest.raises(ValueError, match=r"config is .* no stream-K and no clusters, as num_splits is 1"):
            KERNEL.run(config, problem, Inputs(q, k, k), torch.empty_like(q), torch.empty(4, 8, 1))
    assert launches == []


def test_stream_k_is_launched_once_an_sm(launches: list[tuple[Any, ...]]) -> None:
    q, k = torch.zeros(64, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(64, 500, 8, 128, dtype=torch.bfloat16)
    problem = AttentionProblem.from_inputs(Inputs(q, k, k)).on("sm_90a")
    stream = rules.config_of(problem, rules.Shape(1, 8, stream_k=True))
    for _ in range(2):
        KERNEL.run(stream, problem, Inputs(q, k, k), torch.empty_like(q), torch.empty(64, 8, 1))
    (grid, block, _, params), _ = launches
    assert grid == (128, 1, 1)  # 16 for each head
    assert block == (288, 1, 1) and params.equal_lengths and params.split.out and not described


def test_rows_are_copied_by_cp_async_where_tma_cannot_read(launches: list[tuple[Any, ...]]) -> None:
    """An axis that is stepped along by 0; a configuration that was asked for by name raises."""
    q, k = torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 500, 2, 128, dtype=torch.bfloat16)
    inputs = Inputs(q, k.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1))
    problem = AttentionProblem.from_inputs(inputs).on("sm_90a")
    out, lse = torch.empty_like(q), torch.empty(2, 8, 1)
    assert KERNEL.config(problem).tma
    KERNEL.forward(problem, inputs, out, lse)
    assert launches[0][1] == (config_for(problem, tma=False).threads, 1, 1) and not described
    with pytest.raises(ValueError, match="by 0"):
        KERNEL.run(KERNEL.config(problem), problem, inputs, out, lse)


ENTRY = '\nextern "C" __global__ void entry() {}\n'
STREAM_K = """
constexpr int MOST_TILES = 1024;
// What the CTAs of a head compute, as TileScheduler<true> does: a tile of sequence i has `units[i % COUNT]` steps.
template <int COUNT>
struct Launch {
    const int (&units)[COUNT];
    const int sequences, ctas;
    const bool equal;
    int each = 0, stride[MOST_TILES] = {}, begin[MOST_TILES] = {}, total = 0;

    __device__ constexpr Launch(const int (&lengths)[COUNT], int sequence_count, int cta_count)
        : units(lengths), sequences(sequence_count), ctas(cta_count), equal(COUNT == 1) {
        int steps = 0;
        for (int i = 0; i < sequences; ++i) steps += units[i % COUNT];
        each = ceil_div(steps, ctas);
        const StreamRanges ranges(units[0], sequences, ctas);
        if (equal) each = ranges.each;
        for (int i = 0; i < sequences; ++i) {
            begin[i] = total, stride[i] = equal ? ranges.stride : units[i % COUNT];
            total += stride[i];
        }
    }

    // Every step once, in order; the splits of a tile agree on their number and have partials of their own.
    __device__ constexpr bool right() const {
        int tile = 0, next = 0, split = 0, splits = 0, steps = 0, most = 0;
        bool partials[2 * MOST_TILES] = {};
        for (int cta = 0; cta < ctas; ++cta) {
            int unit = cta * each < total ? cta * each : total, mine = 0;
            const int end = unit + each < total ? unit + each : total;
            while (unit < end) {
                while (tile + 1 < sequences && unit >= begin[tile] + stride[tile]) {
                    if (next != units[tile % COUNT] || split != splits) return false;
                    ++tile, next = 0, split = 0, splits = 0;
                }
                const int from = unit - begin[tile], rest = end - begin[tile];
                const int to = rest < stride[tile] ? rest : stride[tile];
                const int own = units[tile % COUNT], stop = to < own ? to : own;
                unit = begin[tile] + to;
                if (stop <= from) continue;
                const StreamSplit found(begin[tile], own, from, to, each, cta);
                if (from != next || found.split != split || (split > 0 && found.splits != splits)) return false;
                const int partial = split == 0 ? found.first_partial : found.later_partials + 2 * split;
                if (found.splits > 1 && (partial / 2 != cta || partials[partial])) return false;
                if (found.splits > 1) partials[partial] = true;
                next = stop, splits = found.splits, ++split, mine += stop - from, steps += stop - from;
            }
            if (mine > most) most = mine;
        }
        int all = 0;
        for (int i = 0; i < sequences; ++i) all += units[i % COUNT];
        return tile == sequences - 1 && steps == all && next == units[tile % COUNT] &&
               split == splits && most * 16 <= ceil_div(all, ctas) * 17;
    }
};
"""


def evaluated(checks: list[str]) -> None:
    """The compiler evaluates the device's own functions."""
    source = KERNEL.kernel_source(KERNEL.config(BASE))
    text = '#include "decode/tile_scheduler.cuh"\n' + STREAM_K + "\n".join(checks) + ENTRY
    jit.compile(replace(source, name="stream_k.cu", text=text, entry="entry"), "sm_90a")


def test_stream_k_covers_every_step_once() -> None:
    draw, checks = random.Random(5), []
    for number in range(60):
        batch, ctas = draw.choice((1, 2, 16, 70)) * draw.choice((1, 3, 8)), draw.choice((1, 7, 16, 132))
        longest = draw.choice((1, 8, 64, 513))
        units = [draw.randint(1, longest) for _ in range(1 if number % 2 else draw.randint(2, 40))]
        checks.append(
            f"constexpr int units_{number}[] = {{{', '.join(map(str, units))}}};\n"
            f"static_assert(Launch<{len(units)}>(units_{number}, {batch}, {ctas}).right());"
        )
    evaluated(checks)


def test_ranges_of_stream_k_end_where_tiles_end() -> None:
    """64 sequences of 1k keys and 8 heads on an H200: four whole tiles for each of 128 CTAs; one of 64k: 16 splits."""
    drawn = random.Random(6)
    shapes = [(8, 64, 16), (512, 1, 16)]
    shapes += [(drawn.randint(1, 600), drawn.randint(1, 70), drawn.randint(1, 132)) for _ in range(60)]
    found = {shape: rules.fitted_range(*shape) for shape in shapes}
    assert found[shapes[0]] == (32, 1) and found[shapes[1]] == (32, 16)
    evaluated([
        *(f"static_assert(StreamRanges({', '.join(map(str, shape))}).each == {found[shape][0]});" for shape in shapes),
        "static_assert(StreamRanges(8, 64, 16).stride == 8 && StreamRanges(512, 1, 16).stride == 512);",
        "constexpr StreamSplit found(512, 512, 32, 64, 32, 17);",
        "static_assert(found.split == 1 && found.splits == 16);",
    ])  # fmt: skip


def test_nothing_is_launched_for_nothing(launches: list[tuple[Any, ...]]) -> None:
    q, k = torch.zeros(2, 0, 4, 64, dtype=torch.float16), torch.zeros(2, 9, 4, 64, dtype=torch.float16)
    problem = AttentionProblem.from_inputs(Inputs(q, k, k)).on("sm_90a")
    KERNEL.forward(problem, Inputs(q, k, k), torch.empty_like(q), torch.empty(2, 4, 0))
    assert launches == []


def test_drawn_problems_are_legal_and_the_bound_holds_for_the_reference() -> None:
    """What the GPU tests draw, on the CPU: nothing outside the cache is needed, and rounding alone is within bounds."""
    for item in draw(24, seed=1):
        problem, inputs = item.build(torch.device("cpu"))
        out, lse = reference_attention(problem, inputs, torch.float64)
        assert not out.isnan().any()
        assert faults(problem, inputs, out.to(problem.dtype), lse.float()) is None
        if out.numel() and out.abs().max() > 0:
            assert faults(problem, inputs, (out * 1.05).to(problem.dtype), lse.float()) is not None
