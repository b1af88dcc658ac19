"""dK and dV of the backward on their way through shared memory: where that is so, and in how many bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from disassembly import disassembled
from sass_loops import families, steady_loops

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.jit import sass
from flashlane.kernels.hopper.backward.kernel import config_of, config_of_rank
from flashlane.kernels.hopper.backward.launch import MAPPED, STORED
from flashlane.kernels.hopper.backward.one_cta.config import IN_DS, OneCtaConfig

ARCH = "sm_90a"
CAUSAL, WINDOW = {"window_right": 0}, {"window_left": 500, "window_right": 0}
KEYS = 128
"""Of a tile."""


def problem_with(head_dim: int, head_dim_v: int = 0, seqlen: int = 1024, **more: Any) -> AttentionProblem:
    return AttentionProblem(
        batch=16, heads=16, kv_heads=16, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim, **{"dtype": torch.bfloat16, "scale": 0.1, "arch": ARCH, **more},
    )  # fmt: skip


def config_with(*args: Any, **more: Any) -> OneCtaConfig:
    config = config_of(problem_with(*args, **more))
    assert isinstance(config, OneCtaConfig)
    return config


@pytest.mark.parametrize(
    ("head_dim", "more", "staging"),
    [
        (64, {}, "both"),
        (64, CAUSAL, "both"),
        (64, WINDOW, "both"),
        (48, CAUSAL, "both"),
        (64, {**CAUSAL, "varlen": True}, "both"),
        (64, {**CAUSAL, "deterministic": True}, "both"),
        (128, {"seqlen": 740}, "in_turn"),
        (128, {}, "dq_and_ds"),
        (128, CAUSAL, "in_turn"),
        (104, WINDOW, "in_turn"),
        (96, CAUSAL, "in_turn"),
        (80, WINDOW, "in_turn"),
        (88, {}, "in_turn"),
        (96, {"seqlen": 2048}, "ds_and_room"),
        (72, {"seqlen": 4096}, "ds_and_room"),
        (88, {**CAUSAL, "seqlen": 12000}, "ds_and_room"),
        (64, {**CAUSAL, "softcap": 30.0}, "registers"),
        (96, {**CAUSAL, "varlen": True}, "in_turn"),
        (96, {**CAUSAL, "varlen": True, "seqlen": 4096}, "in_turn"),
        (96, {**CAUSAL, "varlen": True, "softcap": 30.0}, "registers"),
        (96, {**CAUSAL, "deterministic": True}, "in_turn"),
        (128, {**CAUSAL, "deterministic": True}, "in_turn"),
        (128, {"deterministic": True, "seqlen": 4096}, "registers"),
        (128, {**CAUSAL, "varlen": True}, "in_turn"),
        (128, {**CAUSAL, "varlen": True, "seqlen": 4096}, "dq_and_ds"),
        (128, {**WINDOW, "varlen": True}, "in_turn"),
        (128, {"seqlen": 4096}, "dq_and_ds"),  # steps of 80 queries leave no other room, also where tiles are split
        (104, {**CAUSAL, "seqlen": 4096}, "dq_and_ds"),
        (128, {**CAUSAL, "seqlen": 4096, "alibi": True}, "registers"),
    ],
)
def test_dk_and_dv_go_through_shared_memory_where_that_was_faster(
    head_dim: int, more: dict[str, Any], staging: str
) -> None:
    config = config_with(head_dim, **more)
    assert config.staging == staging
    assert config.stores_by_tma == (staging != "registers")


def test_what_a_tensor_map_cannot_store_stays_in_registers() -> None:
    config = replace(config_with(64, **CAUSAL), tma_stores=True)
    assert config.staging == "both"
    for more in ({"block_lists": True}, {"program": "a program"}, {"f32_dkdv": True}):
        assert replace(config, **more).staging == "registers"
    for ranks in (problem_with(64, **CAUSAL), problem_with(128, **CAUSAL)):
        of_rank = config_of_rank(ranks)
        assert of_rank is not None and of_rank.tma_stores and of_rank.f32_dkdv and of_rank.staging == "registers"


@pytest.mark.parametrize(
    ("head_dims", "staging", "bytes_of_both"),
    [
        ((64, 64), "both", KEYS * (128 + 128)),
        ((64, 40), "both", KEYS * (128 + 128)),
        ((128, 128), "in_turn", KEYS * 256),
        ((104, 120), "in_turn", KEYS * 256),
    ],
)
def test_shared_memory_has_whole_chunks_of_each_row(
    head_dims: tuple[int, int], staging: str, bytes_of_both: int
) -> None:
    config = config_with(*head_dims, **CAUSAL)
    assert config.staging == staging
    assert config.regions["dK and dV"] == bytes_of_both
    without = replace(config, tma_stores=False, subtracts_in_products=config.product_statistics)
    assert config.shared_memory == without.shared_memory + bytes_of_both <= jit.shared_limit(ARCH)
    compiled = jit.compile(config.gradient_sources()[0], ARCH)  # which asserts that the device's layout has these bytes
    report = compiled.report
    assert report.spills <= config.spills_allowed and not [line for line in report.warnings if "spill" not in line]
    text = disassembled(compiled.cubin)
    stores = sum(-(-dim // 64) for dim in head_dims)
    assert sass.count_instructions(text)["UTMASTG"] == stores, "a warp stores each chunk of columns at once"


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "more", "rows", "postprocess"),
    [
        (88, 1024, CAUSAL, 64, "idle_warps"),  # 176 bytes a row: off the sector
        (88, 4096, CAUSAL, 64, "idle_warps"),
        (88, 12000, CAUSAL, 96, "own_launch"),
        (88, 1024, {}, 64, "idle_warps"),
        (88, 3000, {}, 96, "own_launch"),
        (80, 3000, CAUSAL, 64, "idle_warps"),
        (80, 1024, {}, 64, "idle_warps"),
        (96, 2600, CAUSAL, 64, "idle_warps"),
        (96, 640, CAUSAL, 64, "own_launch"),
        (96, 8000, CAUSAL, 96, "own_launch"),
        (96, 1250, {}, 64, "idle_warps"),  # 14 steps of 96 queries would have 1344
        (96, 1340, {}, 96, "own_launch"),
        (96, 1024, WINDOW, 64, "idle_warps"),
    ],
)
def test_head_dims_72_to_96_have_small_steps_where_these_were_faster(
    head_dim: int, seqlen: int, more: dict[str, Any], rows: int, postprocess: str
) -> None:
    config = config_with(head_dim, seqlen=seqlen, **more)
    assert (config.block_m, config.postprocess, config.dq) == (rows, postprocess, "register_atomics")
    assert config.tma_stores and (config.k_stages == 2) == (rows == 64) != config.peels


@pytest.mark.parametrize("head_dim", [104, 120, 128])
def test_few_steps_add_from_registers_where_idle_warps_have_too_few_tiles(head_dim: int) -> None:
    config = config_of(replace(problem_with(head_dim, **CAUSAL), batch=2))
    assert (config.dq, config.postprocess, config.stores_by_tma) == ("register_atomics", "own_launch", True)


def test_dv_takes_the_place_of_ds_and_dk_that_of_dq() -> None:
    """They take no bytes of their own, so that each fits where the other tile of the warps ends."""
    config = replace(config_with(128, seqlen=4096), split_q=False)
    without = replace(config, tma_stores=False, subtracts_in_products=config.product_statistics)
    assert config.staging == "dq_and_ds" and config.shared_memory == without.shared_memory
    assert replace(config, split_q=True).staging == "dq_and_ds", "the whole tiles of a launch that splits others"
    assert replace(config, peeled=False).staging == "ds_and_dq", "dV is complete, and its place free, after the last dQ"
    fits = {rows: replace(config, block_m=rows).staging for rows in (48, 80)}
    assert fits == {48: "both", 80: "dq_and_ds"}, "fewer queries leave room"
    for other in (
        {"k_stages": 2, "block_m": 80},
        {"dq": "register_atomics"},
        {"dq": "ordered_tma_reduce_add", "split_q": False},
    ):
        assert replace(config, **other).staging not in IN_DS, other


def test_a_chunk_of_dk_has_room_besides_ds_at_72_to_96() -> None:
    config = config_with(96, seqlen=4096)
    assert config.staging == "ds_and_room" and config.regions["dK and dV"] == KEYS * 128
    for other in ({"block_m": 80}, {"head_dim": 64}, {"k_stages": 2}, {"f32_dkdv": True}):
        assert replace(config, **other).staging != "ds_and_room", other


LONG = {"seqlen": 4096}


@pytest.mark.parametrize(
    ("head_dim", "more", "peels"),
    [
        (128, LONG, True),
        (104, {**CAUSAL, **LONG}, True),
        (96, LONG, True),
        (96, {**CAUSAL, "seqlen": 8000}, True),
        (128, {**CAUSAL, "seqlen": 12000, "varlen": True}, True),
        (128, {"seqlen": 12000, "varlen": True}, True),
        (96, {**CAUSAL, "seqlen": 12000, "varlen": True}, False),
        (128, {**LONG, "deterministic": True}, False),
        (128, {**LONG, "alibi": True}, False),
        (64, LONG, False),
        (128, CAUSAL, False),
        (128, {**WINDOW, **LONG}, False),
    ],
)
def test_first_steps_are_peeled_where_that_was_faster(head_dim: int, more: dict[str, Any], peels: bool) -> None:
    config = config_with(head_dim, **more)
    assert config.peels == peels
    if not peels:
        return
    for other in ({"k_stages": 2}, {"skips_hidden": True}, {"dq": "ordered_tma_reduce_add", "split_q": False}):
        assert not replace(config, **other).peels, other
    of_rank = None if more.get("varlen") else config_of_rank(problem_with(head_dim, **more))
    if of_rank is not None:
        full = head_dim > 96 and "window_right" not in more
        assert not of_rank.peels and of_rank.ping_pong == ("until_complete" if full else "off")


@pytest.mark.parametrize(("head_dim", "more"), [(128, {}), (104, CAUSAL), (96, {})])
def test_a_peeled_step_leaves_the_loop_its_registers(head_dim: int, more: dict[str, Any]) -> None:
    """The first step has all products but dQ. The loop has no more instructions than without it."""
    config = replace(config_with(head_dim, **more, **LONG), split_q=False)
    assert config.peels
    products, of_loop = [], []
    for each in (config, replace(config, peeled=False)):
        text = disassembled(jit.compile(each.gradient_sources()[0], ARCH).cubin)
        products.append(sass.count_instructions(text)["HGMMA"])
        of_loop.append(min(len(loop) for loop in steady_loops(text) if families(loop)["HGMMA"] > 16))
    # S and dP over columns and statistics, dV and dK over queries.
    first_step = 2 * (-(-head_dim // 16) + config.product_statistics) + 2 * (config.block_m // 16)
    assert products[0] == products[1] + first_step
    assert of_loop[0] <= of_loop[1]


@pytest.mark.parametrize("head_dims", [(136, 136), (192, 192), (192, 128)])
def test_clusters_stage_dk_and_dv_up_to_192(head_dims: tuple[int, int]) -> None:
    config: Any = config_of(problem_with(*head_dims))
    assert config.design == "two_cta" and config.stores_by_tma
    assert config.regions["dK and dV"] == 64 * sum(2 * 64 * -(-dim // 64) for dim in head_dims)
    assert config_of(problem_with(*head_dims, **CAUSAL, varlen=True)).stores_by_tma, (
        "all but the last rows of a sequence"
    )
    assert not config_of(problem_with(200)).stores_by_tma, "no room"


def test_only_tma_stores_need_maps_of_dk_and_dv() -> None:
    config = config_with(128, **CAUSAL)
    assert MAPPED + STORED * config.stores_by_tma == ("q", "k", "v", "dout", "dk_map", "dv_map")
    assert MAPPED + STORED * replace(config, tma_stores=False).stores_by_tma == ("q", "k", "v", "dout")
