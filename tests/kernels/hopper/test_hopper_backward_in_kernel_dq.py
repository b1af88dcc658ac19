"""Which launch zeroes an m-block of dq_accum, and which writes its dQ: what the three kernels must agree on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward import in_kernel_zeros
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.head_swizzle import even, heads_per_section
from flashlane.kernels.hopper.backward.in_kernel_zeros import zeros_of
from flashlane.kernels.hopper.backward.one_cta import tiles as one_cta_tiles
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import (
    OWN_LAUNCHES,
    ZEROED_AHEAD,
    in_kernel_dq_of,
)
from flashlane.kernels.hopper.backward.select import DESIGNS, config_of
from flashlane.kernels.hopper.backward.split_q import WHOLE_TILES


def asked(**changes: object) -> AttentionProblem:
    fields = {"batch": 8, "heads": 16, "kv_heads": 16, "seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 128}
    fields |= {"head_dim_v": 128, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a", "window_right": 0}
    return AttentionProblem(**{**fields, **changes})


CHECKS = """
#include "attention/tile_scheduler.cuh"
#include "hopper/backward/dq_assignment.cuh"

// TileOrder is the inverse of swizzled_tile, and counts the tiles of each head among the first ones of the launch.
__device__ constexpr bool order_agrees(int heads, int n_blocks, int section) {
    const TileOrder order{heads, n_blocks, section};
    const int tiles = heads * n_blocks;
    int before[16] = {};
    for (int index = 0; index < tiles + 3; ++index) {
        for (int head = 0; head < heads; ++head)
            if (order.tiles_before(head, index) != before[head]) return false;
        if (index >= tiles) continue;
        const SwizzledTile tile = swizzled_tile<false>(index, heads, n_blocks, section);
        if (order.index(tile.block, tile.head) != index) return false;
        ++before[tile.head];
    }
    return true;
}

// assigned_n_block, of the preprocess and postprocess kernels, is the inverse of assigned_m_blocks; all have a tile.
__device__ constexpr bool assignments_agree(int n_blocks, int m_blocks) {
    int m_block = 0;
    for (int n_block = 0; n_block < n_blocks; ++n_block) {
        const BlockRange assigned = assigned_m_blocks(n_block, n_blocks, m_blocks);
        if (assigned.low != m_block) return false;
        for (; m_block < assigned.high; ++m_block)
            if (assigned_n_block(m_block, n_blocks, m_blocks) != n_block) return false;
    }
    return m_block == m_blocks;
}

// Zeros of tile i are due when tile i - zeroed_before is taken: no later than the first tile of i's head.
__device__ constexpr bool zeros_come_first(int heads, int n_blocks, int section, int zeroed_before) {
    const TileOrder order{heads, n_blocks, section};
    for (int index = zeroed_before; index < heads * n_blocks; ++index) {
        const int head = swizzled_tile<false>(index, heads, n_blocks, section).head;
        if (index - zeroed_before > order.index(0, head)) return false;
    }
    return true;
}

// In-kernel zeros: who takes a tile writes the zeros of a later one. Each tile whose zeros the preprocess kernel does
// not write is zeroed once, by a tile that is taken before the first one of its head.
__device__ constexpr bool zeros_come_before(int heads, int n_blocks, int section, int own, int zeroed_before) {
    const TileOrder order{heads, n_blocks, section};
    const int tiles = heads * n_blocks;
    int zeroed[160] = {};
    for (int taken = own; taken < tiles; ++taken) {
        const int tile = tile_to_zero(taken, own, zeroed_before);
        if (tile >= tiles) continue;
        if (taken >= order.index(0, swizzled_tile<false>(tile, heads, n_blocks, section).head)) return false;
        ++zeroed[tile];
    }
    for (int tile = 0; tile < tiles; ++tile)
        if (zeroed[tile] != (tile >= zeroed_before)) return false;
    return zeroed_before >= own || tiles <= own;
}

extern "C" __global__ void entry() {}
"""
"""The compiler evaluates the device's own functions."""
SIZES = [(1, 1, 1), (1, 12, 1), (12, 1, 5), (12, 12, 12), (7, 5, 3), (3, 2, 11)]
SIZES += [tuple(draw.randint(1, 12) for _ in range(3)) for draw in [random.Random(18)] for _ in range(30)]


def holds(checks: list[str]) -> None:
    text = CHECKS + "".join(f"static_assert({check});\n" for check in checks)
    constants = (("VARLEN", False), ("BLOCK_M", 64), ("HEAD_DIM", 128), ("Element", "float"))
    jit.compile(KernelSource("test.cu", text, "entry", constants), "sm_90a")


def test_a_tiles_index_is_its_place() -> None:
    holds([f"order_agrees({heads}, {blocks}, {section})" for heads, blocks, section in SIZES])
    with pytest.raises(jit.CompileError):
        holds(["!order_agrees(7, 5, 3)"])


def test_every_m_block_is_assigned_to_one_tile() -> None:
    holds([f"assignments_agree({blocks}, {group * rows})" for group, blocks, rows in SIZES])


def test_no_tile_waits_for_zeros_that_wait_for_it() -> None:
    checks = []
    for heads, blocks, section in SIZES:
        problem = asked(batch=1, heads=heads, kv_heads=heads, seqlen_k=128 * blocks)
        found = in_kernel_dq_of(problem, 128, section, 0)
        assert (found.heads, found.n_blocks, found.heads_per_section) == (heads, blocks, section)
        checks.append(f"zeros_come_first({heads}, {blocks}, {section}, {found.zeroed_before})")
    holds(checks)
    assert any(heads > section for heads, _, section in SIZES), "a later section is zeroed by the launch itself"
    with pytest.raises(jit.CompileError):
        holds(["zeros_come_first(12, 5, 3, 1)"])


@pytest.mark.parametrize("workers", [0, 1, 9, 40])
@pytest.mark.parametrize("own_tiles", [False, True])
def test_zeros_of_a_launch_come_before_the_head_that_they_are_for(
    own_tiles: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_kernel_zeros, "TILES_AHEAD", workers // 3)
    checks, in_launch = [], 0
    for heads, blocks, section in SIZES:
        problem = asked(batch=1, heads=heads, kv_heads=heads, seqlen_k=128 * blocks)
        found = zeros_of(problem, 128, section, workers, own_tiles)
        assert not found.writes and found.tiles == heads * blocks
        in_launch += found.zeroed_before < found.tiles
        own = min(workers, found.tiles) if own_tiles else 0
        checks.append(f"zeros_come_before({heads}, {blocks}, {section}, {own}, {found.zeroed_before})")
    holds(checks)
    assert in_launch >= 5 or workers == 40, "launches that are long enough"
    with pytest.raises(jit.CompileError):
        holds(["zeros_come_before(12, 5, 3, 4, 15)"])  # the tile that is taken is of the same section


@pytest.mark.parametrize(
    ("changes", "zeros"),
    [
        ({"seqlen_q": 3528, "seqlen_k": 3528, "batch": 13, "heads": 21, "kv_heads": 21}, True),
        ({"seqlen_q": 3000, "seqlen_k": 3000, "batch": 3, "heads": 14, "kv_heads": 14}, False),  # half of the tiles
        ({"seqlen_q": 2244, "seqlen_k": 2244, "window_right": -1, "batch": 11, "heads": 39, "kv_heads": 39}, True),
        ({"seqlen_q": 8120, "seqlen_k": 8120, "window_right": -1, "batch": 20}, False),  # zeros are few
        ({"seqlen_q": 2244, "seqlen_k": 2244, "window_right": -1, "deterministic": True, "batch": 30}, False),
        ({"seqlen_q": 823, "seqlen_k": 823, "window_right": -1, "head_dim": 192, "batch": 20}, True),
        ({"seqlen_q": 823, "seqlen_k": 823, "head_dim": 192, "batch": 20}, False),  # clusters under a causal mask
        ({"seqlen_q": 3390, "seqlen_k": 3390, "window_right": -1, "head_dim": 192, "batch": 20}, False),
        ({"seqlen_q": 823, "seqlen_k": 823, "window_right": -1, "head_dim": 192, "batch": 20, "varlen": True}, False),
        ({"seqlen_q": 823, "seqlen_k": 823, "window_left": 99, "head_dim": 192, "batch": 20}, False),
    ],
)
def test_launches_zero_where_zeros_are_a_part_of_their_time(changes: dict[str, int], zeros: bool) -> None:
    problem = asked(**{**changes, "head_dim_v": changes.get("head_dim", 128)})
    config = config_of(problem)
    assert config.zeroing_ctas == zeros * (1 if problem.head_dim == 128 else 2)
    schedule = DESIGNS[config.design].schedule(config.specialised(problem), problem, SMS).in_kernel_dq
    assert (0 < schedule.zeroed_before < schedule.tiles) == zeros


def test_short_sequences_of_many_heads_have_in_kernel_dq() -> None:
    for changes in (
        {},
        {"seqlen_q": 1024, "seqlen_k": 1024, "batch": 16},
        {"window_left": 1024, "seqlen_q": 8192, "seqlen_k": 8192},
    ):
        config = one_cta_tiles.pick(asked(**changes))
        assert config.in_kernel_dq and config.dq == "register_atomics" and config.k_stages == 2 and config.block_m == 64
    changed = (
        {"batch": 1},
        {"deterministic": True},
        {"seqlen_q": 4096},
        {"head_dim": 64, "head_dim_v": 64},
        {"softcap": 9.0},
    )
    for changes in (*changed, {"window_right": -1}, {"kv_heads": 4}, {"varlen": True}, {"alibi": True}):
        assert not one_cta_tiles.pick(asked(**changes)).in_kernel_dq, changes
    for changes in ({"seqlen_q": 1024}, {"seqlen_k": 1024, "batch": 32}):
        assert one_cta_tiles.pick(asked(**changes)).in_kernel_dq, "tiles without steps are counted, too"
    few = one_cta_tiles.pick(asked(batch=1, seqlen_q=1144, seqlen_k=1144))
    assert few.k_stages == 2 and few.dq == "register_atomics", "too few tiles for idle warps"


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({"seqlen_q": 560, "seqlen_k": 560}, False),
        ({"seqlen_q": 700, "seqlen_k": 700}, False),
        ({"seqlen_q": 728, "seqlen_k": 728, "heads": 36, "kv_heads": 36, "batch": 6}, False),
        ({"seqlen_q": 1023, "seqlen_k": 1023, "heads": 38, "kv_heads": 38, "batch": 6}, True),
        ({"seqlen_q": 860, "seqlen_k": 860}, True),
        ({"seqlen_q": 900, "seqlen_k": 560}, False),
        ({"seqlen_q": 600, "seqlen_k": 600, "head_dim": 104, "head_dim_v": 104}, True),
        ({"seqlen_q": 300, "seqlen_k": 300, "window_right": -1}, False),
        ({"seqlen_q": 430, "seqlen_k": 430, "window_right": -1, "head_dim": 120, "head_dim_v": 120}, True),
    ],
)
def test_idle_warps_have_steps_that_take_as_long_as_their_work(changes: dict[str, int], idle: bool) -> None:
    """As the problems of notebooks 0053 and 0054 were faster."""
    config = one_cta_tiles.pick(asked(**{"batch": 40, **changes}))
    assert config.in_kernel_dq == idle, config.describe()
    assert config.dq == "register_atomics" and config.block_m == 64 and config.k_stages == 2


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "block_m"),
    [(11, 7, 2367, 64), (13, 36, 2333, 64), (1, 30, 4288, 80), (1, 34, 5165, 80), (3, 38, 2057, 80)],
)
def test_long_causal_tiles_are_those_that_were_faster(batch: int, heads: int, seqlen: int, block_m: int) -> None:
    """By 1.02 to 1.06 in five problems of docs/notebook/0043: steps of 64 queries have idle warps or are not taken."""
    config = one_cta_tiles.pick(asked(batch=batch, heads=heads, kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen))
    assert config.block_m == block_m and config.in_kernel_dq == (block_m == 64)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen"), [(7, 29, 29, 2236), (7, 39, 39, 4471), (10, 36, 18, 1769)]
)
def test_windows_of_any_width_have_idle_warps_up_to_96(batch: int, heads: int, kv_heads: int, seqlen: int) -> None:
    """By 1.03 to 1.05 (docs/notebook/0043)."""
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seqlen_q": seqlen, "seqlen_k": seqlen}
    config = one_cta_tiles.pick(asked(**sizes, head_dim=96, head_dim_v=96, window_left=4096))
    assert config.in_kernel_dq and config.block_m == 64


@pytest.mark.parametrize(
    ("head_dim", "mask", "longest", "tile"),
    [
        (128, {}, 300, (80, "until_complete", 1)),
        (128, {"window_right": 0}, 9000, (80, "until_complete", 1)),
        (112, {"window_right": 0}, 9000, (80, "until_complete", 1)),
        (120, {"window_right": 0}, 9000, (80, "off", 1)),
        (128, {"window_right": 0}, 1000, (64, "off", 1)),
        (128, {"window_left": 128, "window_right": 0}, 4100, (64, "off", 1)),
        (128, {"window_left": 1024, "window_right": 0}, 4100, (64, "off", 1)),
        (112, {"window_left": 1024, "window_right": 0}, 4100, (80, "until_complete", 1)),
        (128, {"window_left": 2048, "window_right": 512}, 4100, (80, "until_complete", 1)),
        (96, {}, 9000, (64, "until_issued", 2)),
        (96, {"window_right": 0}, 9000, (64, "until_issued", 2)),
        (96, {"window_left": 1024, "window_right": 0}, 4100, (64, "until_issued", 2)),
        (80, {"window_left": 2048, "window_right": 512}, 4100, (64, "until_issued", 2)),
        (64, {"window_right": 0}, 9000, (128, "off", 2)),
    ],
)
def test_packed_sequences_have_the_tiles_that_were_fastest(
    head_dim: int, mask: dict[str, int], longest: int, tile: tuple[int, str, int]
) -> None:
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": longest, "seqlen_k": longest}
    picked = one_cta_tiles.pick(asked(varlen=True, **sizes, **{"window_right": -1, **mask}))
    assert (picked.block_m, picked.ping_pong, picked.k_stages) == tile
    assert picked.stores_by_tma and picked.peels == (picked.k_stages == 1)


@pytest.mark.parametrize("head_dim", [96, 128])
def test_idle_warps_need_steps_and_tiles(head_dim: int) -> None:
    """They take as long as some steps for a tile's dQ, and count the tiles of all keys."""

    def picked(left: int, seqlen_k: int = 4096) -> OneCtaConfig:
        sizes = {"seqlen_q": 2048, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim}
        return one_cta_tiles.pick(asked(window_left=left, **sizes))

    assert [picked(left).in_kernel_dq for left in (127, 383, 384, 1024)] == [False, False, True, True]
    assert [picked(1024, n).in_kernel_dq for n in (6144, 8192)] == [True, False], "3072 keys are seen"
    assert [picked(1024, n).unseen_keys for n in (6144, 8192)] == [False, True]
    assert picked(127).dq == "register_atomics" and picked(127).unseen_keys


def test_the_launch_before_writes_the_first_zeros() -> None:
    problem = asked()
    section = heads_per_section(problem)
    found = in_kernel_dq_of(problem, 128, section, SMS)
    assert (found.heads, found.n_blocks, found.tiles) == (128, 16, 2048)
    assert found.zeroed_before == 16 * section + ZEROED_AHEAD * SMS
    assert in_kernel_dq_of(replace(problem, batch=1), 128, 16, SMS).zeroed_before == 256, "all of them"


def test_what_the_launches_tell_each_other_has_its_place() -> None:
    problem = asked()
    config = one_cta_tiles.pick(problem)
    rows = backward_launch.RowBlocks(problem, torch.Size((8, 2048, 16, 128)), config.block_m)
    found = in_kernel_dq_of(problem, config.block_n, 16, SMS)
    offsets = backward_launch.workspace_of(rows, config, WHOLE_TILES, found).offsets
    assert offsets["added"] - offsets["zeroed"] >= 128 <= offsets["written"] - offsets["added"]
    assert backward_launch.workspace_of(rows, config, WHOLE_TILES, found).words - offsets["written"] >= 2048
    zeros = backward_launch.workspace_of(rows, config, WHOLE_TILES, zeros_of(problem, config.block_n, 16, SMS, True))
    assert zeros.words - zeros.offsets["zeroed"] >= 128 and not {"added", "written"} & set(zeros.offsets)
    assert not {"zeroed", "added", "written"} & set(
        backward_launch.workspace_of(rows, config, WHOLE_TILES, OWN_LAUNCHES).offsets
    )


@pytest.mark.parametrize(
    ("heads", "most"), [(32, 5), (84, 10), (104, 12), (44, 4), (7, 3), (1, 30), (10, 100), (128, 16)]
)
def test_sections_of_heads_are_nearly_equal(heads: int, most: int) -> None:
    section = even(heads, most)
    assert 1 <= section <= heads and (most // 2 <= section <= 2 * most or heads < most)
    assert -heads % section <= section / 3, "none of a few heads, which would begin their longest tiles at the end"


def test_nothing_to_order_is_no_error() -> None:
    """Packed sequences may all be empty."""
    assert heads_per_section(asked(seqlen_q=0, seqlen_k=0, varlen=True)) >= 1
