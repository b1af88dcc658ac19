"""Which n-blocks of the Hopper backward are tiles under a window, and which rows of dK and dV are zeroed besides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hopper_fakes import gradient_launches

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward import select
from flashlane.kernels.hopper.backward.launch import BackwardParams, PreprocessParams
from flashlane.kernels.hopper.backward.seen_keys import has_unseen_keys, seen_n_blocks

KEYS, QUERIES = 128, 96


def problem_of(seqlen_q: int, seqlen_k: int, left: int, right: int = 0, **more: object) -> AttentionProblem:
    fields = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128, "dtype": torch.bfloat16}
    fields |= {"scale": 0.1, "arch": "sm_90a", "window_left": left, "window_right": right, **more}
    return AttentionProblem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **fields)


def test_they_are_those_with_a_key_that_a_query_sees() -> None:
    chance, unseen = random.Random(0), 0
    for _ in range(500):
        queries, keys = chance.choice((1, 60, 128, 200, 513)), chance.choice((1, 100, 128, 400, 700, 1500))
        left, right = chance.choice((-1, 0, 5, 127, 300)), chance.choice((-1, 0, 9, 130))
        alignment = chance.choice(("bottom-right", "top-left"))
        problem = problem_of(queries, keys, left, right, alignment=alignment)
        query, key = torch.arange(queries)[:, None] + problem.shift, torch.arange(keys)[None]
        seen = torch.ones(queries, keys, dtype=torch.bool)
        seen &= key >= query - left if left >= 0 else True
        seen &= key <= query + right if right >= 0 else True
        blocks = sorted(set((seen.any(0).nonzero().flatten() // KEYS).tolist()))
        n_blocks = seen_n_blocks(problem, KEYS, QUERIES)
        if left < 0:
            assert n_blocks == range(-(-keys // KEYS)) and not has_unseen_keys(problem, KEYS, QUERIES)
        elif blocks:
            assert n_blocks == range(blocks[0], blocks[-1] + 1), problem
        else:
            assert len(n_blocks) == 1 and n_blocks.stop <= -(-keys // KEYS), "a launch has a tile"
        unseen += has_unseen_keys(problem, KEYS, QUERIES)
    assert unseen > 100


def test_additions_in_order_have_the_tiles_of_a_full_last_m_block() -> None:
    """Each waits for all n-blocks that the queries of its m-block would see: 100 queries count as 192."""
    problem = problem_of(100, 1500, 5, alignment="top-left")
    assert seen_n_blocks(problem, KEYS, QUERIES) == range(1)
    assert seen_n_blocks(replace(problem, deterministic=True), KEYS, QUERIES) == range(2)


@pytest.mark.parametrize(("head_dim", "seqlen_k"), [(64, 2000), (192, 2000), (128, 2001)])
def test_tiles_and_zeros_cover_all_keys_once(head_dim: int, seqlen_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(300, seqlen_k, 127, head_dim=head_dim, head_dim_v=head_dim)
    config = select.config_of(problem)
    assert config.unseen_keys
    (before, gradients, _), tensors = gradient_launches(config, problem, monkeypatch)
    assert isinstance(before.params, PreprocessParams) and isinstance(gradients.params, BackwardParams)
    tiles = range(gradients.params.first_block, gradients.params.first_block + gradients.params.blocks)
    assert tiles == seen_n_blocks(problem, KEYS, QUERIES) and gradients.params.tiles == len(tiles) * 2 * 2
    assert before.params.first_key == tiles.start * KEYS > 0
    assert before.params.end_key == min(seqlen_k, tiles.stop * KEYS)
    assert (before.params.dk, before.params.dv) == (tensors.dk.data_ptr(), tensors.dv.data_ptr())


def test_without_such_keys_nothing_is_zeroed_by_rows() -> None:
    for problem in (
        problem_of(1000, 1000, 127),
        problem_of(300, 2000, -1),
        problem_of(300, 2000, 127, varlen=True),
    ):
        assert not select.config_of(problem).unseen_keys
