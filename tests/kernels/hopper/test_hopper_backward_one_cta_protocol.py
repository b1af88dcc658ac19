"""Who waits for whom in the one-CTA Hopper backward, as a model that any machine runs: no schedule hangs, each read
finds what it should, and each step's dQ is added once.

Tiles are ordinary, or keyless: consumer 1 has no keys of them, and makes no products but dQ (``hidden_steps`` in
``mainloop.cuh``). A rule that a role does not follow is found out, unless other barriers imply it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from barrier_model import NUMBERS, play
from hypothesis import given, settings
from hypothesis import strategies as st
from one_cta_model import WARPS, Cta, Tile, Variant

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.backward.select import config_of

CHOSEN = {
    "peeled": Variant(True, 1, "until_complete", True, "dq_and_ds"),
    "peeled, no ping-pong": Variant(True, 1, "off", True, "dq_and_ds"),
    "peeled, own buffer": Variant(True, 1, "off", True, "in_turn"),
    "pipelined": Variant(False, 2, "until_issued", False, "in_turn"),
    "in order": Variant(False, 1, "until_issued", True, "registers"),
    "in order, own buffer": Variant(False, 1, "off", True, "in_turn"),
}
"""Those of head dims above 96, where consumers skip a tile's steps (``SKIPS_KEYLESS``)."""
VARIANTS = {
    **CHOSEN,
    "pipelined, no ping-pong": Variant(False, 2, "off", False, "in_turn"),
    "not peeled": Variant(False, 1, "off", True, "ds_and_dq"),
}
"""And two that a configuration may ask for."""
DRAWN = st.lists(
    st.builds(Tile, st.integers(0, 5), st.booleans(), st.sampled_from(("whole", "whole", "part", "last"))), max_size=7
)


def run_tiles(cta: Cta, seed: int) -> None:
    """Run all tiles of a CTA in a random schedule.

    Raises:
        AssertionError: it hangs, a read finds what it should not, or the dQ of a step is not added once.
    """
    play(cta.roles(), cta.events, random.Random(seed))
    assert sorted(cta.added) == cta.expected_dq()
    assert sorted(cta.stored) == list(itertools.product(NUMBERS, WARPS, range(len(cta.tiles))))


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=100)
@given(tiles=DRAWN, seed=st.integers(0, 1 << 32))
def test_a_cta_takes_tile_after_tile(name: str, tiles: list[Tile], seed: int) -> None:
    run_tiles(Cta(VARIANTS[name], tiles), seed)


def test_the_variants_are_those_that_problems_get() -> None:
    """A variant that is new to :data:`CHOSEN` has to be run, too."""
    chosen = set()
    flags = (False, True)
    for head_dim, length, varlen, deterministic, right in itertools.product(
        (104, 120, 128), (128, 661, 2716, 16384), flags, flags, (-1, 0)
    ):
        shape = {"batch": 4, "heads": 16, "kv_heads": 16, "seqlen_q": length, "seqlen_k": length}
        head = {"head_dim": head_dim, "head_dim_v": head_dim, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a"}
        kind = {"varlen": varlen, "deterministic": deterministic, "window_right": right}
        config = config_of(AttentionProblem(**shape, **head, **kind))
        if isinstance(config, OneCtaConfig) and not config.skips_hidden:
            chosen.add(Variant.of(config))
    assert chosen == set(CHOSEN.values())


# --- without a rule


TILES = [
    Tile(3),
    Tile(2, keyless=True),
    Tile(1, keyless=True),
    Tile(1),
    Tile(0, keyless=True),
    Tile(1, keyless=True),
    Tile(4, keyless=True, split="part"),
    Tile(0, split="last"),
    Tile(2, keyless=True, split="last"),
    Tile(5),
    Tile(5, keyless=True),
    Tile(1),
]


def shows(name: str, rule: str, seeds: int) -> bool:
    """Whether a schedule of a variant shows that a rule is not followed."""
    found = False
    for seed in range(seeds):
        cta = Cta(VARIANTS[name], TILES, rule)
        try:
            run_tiles(cta, seed)
        except AssertionError:
            found = True
        assert cta.omitted, "no role has this rule"
        if found:
            break
    return found


def where(holds: Callable[[Variant], bool]) -> list[str]:
    return [name for name, variant in VARIANTS.items() if holds(variant)]


EVERY = list(VARIANTS)
PING_PONG, NO_PING_PONG = where(lambda v: v.ping_pong != "off"), where(lambda v: v.ping_pong == "off")
PIPELINED = where(lambda v: v.pipelined)
IN_DS, OWN_BUFFER = where(lambda v: v.in_ds), where(lambda v: v.staging == "in_turn")
UNDER_LAST_DQ = where(lambda v: v.staging == "dq_and_ds")
BY_TMA = where(lambda v: v.tma)
FAULTS = {
    # Of a consumer without keys.
    "keyless q_empty": EVERY,
    "keyless do_empty": EVERY,
    "keyless v_empty": EVERY,
    "keyless k_empty": PIPELINED,
    "keyless K of the tile before": PIPELINED,
    "keyless ping_pong_wait": PING_PONG,
    "keyless ping_pong_arrive": PING_PONG,
    "keyless ds_empty before zeros": NO_PING_PONG,
    "keyless zeros": EVERY,
    "keyless ds_full": EVERY,
    "keyless ds_empty after dQ": EVERY,
    "keyless waits for what all warps staged": IN_DS,
    "keyless v_full": ["pipelined, no ping-pong"],
    # Of every consumer.
    "ds_empty before dS": EVERY,
    "v_empty after dP": PIPELINED,
    "k_empty after dQ": UNDER_LAST_DQ,
    "dq_empty before dQ": BY_TMA,
    "dq_empty before dV": IN_DS,
    "ds_empty before dK": IN_DS,
    "dV is read before dQ": UNDER_LAST_DQ,
    "dV is read before dK": OWN_BUFFER,
    "dK is read before dV": OWN_BUFFER,
}
IMPLIED = {
    # A consumer passes its ping-pong barrier when the other one has issued products of the same step: its dQ of two
    # steps before, which read the stage of dS, is then complete.
    "keyless ds_empty before zeros": PING_PONG,
    # dQ waits for the dS of consumer 0, which is made when K is there. A stage of dS is empty when all warps have
    # released Q and dO of two steps before, so that a release of these is counted in its own phase. One of V comes when
    # consumer 0 has read V of the tile before; where that is released before the wait for dS, ping-pong implies it.
    "keyless q_full, do_full, k_full, v_full": [name for name in EVERY if name != "pipelined, no ping-pong"],
    "keyless q_full": ["pipelined, no ping-pong"],
    "keyless do_full": ["pipelined, no ping-pong"],
    "keyless k_full": ["pipelined, no ping-pong"],
}
"""Waits of a consumer without keys that no schedule misses."""


def pairs(rules: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(rule, name) for rule, names in rules.items() for name in names]


@pytest.mark.parametrize(("rule", "name"), pairs(FAULTS))
def test_a_cta_without_one_of_its_rules_is_found_out(rule: str, name: str) -> None:
    assert shows(name, rule, seeds=200), "no schedule shows the fault"


@pytest.mark.parametrize(("rule", "name"), pairs(IMPLIED))
def test_a_wait_that_other_barriers_imply_has_no_effect(rule: str, name: str) -> None:
    assert not shows(name, rule, seeds=20), "the wait is needed, and belongs to the faults"
