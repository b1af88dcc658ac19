"""What modifiers do beyond a block: rows without keys, the extra logit added once, positions of blocks."""

from __future__ import annotations

import math

import torch

from flashlane.distributed.modifiers import Modifiers

SINKS = torch.tensor([0.5, -1.0])
SLOPES = torch.tensor([0.25, -2.0])


def test_the_lse_of_rows_without_keys_is_that_of_the_extra_logit() -> None:
    lse = torch.full((2, 2, 3), math.nan)
    Modifiers(sinks=SINKS).fill_without_keys(lse)
    assert torch.equal(lse, SINKS[None, :, None].expand(2, 2, 3))
    Modifiers().fill_without_keys(lse)
    assert torch.equal(lse, torch.full((2, 2, 3), -math.inf))


def test_the_extra_logit_is_added_once_and_takes_its_part_of_the_probability() -> None:
    scores = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    lse, part = Modifiers(sinks=SINKS).finish(scores.logsumexp(-1))
    with_logit = torch.cat([scores, SINKS.double()[None, :, None, None].expand(2, 2, 3, 1)], -1)
    torch.testing.assert_close(lse, with_logit.logsumexp(-1))
    torch.testing.assert_close(part, with_logit.softmax(-1)[..., :-1].sum(-1))
    assert Modifiers(sinks=SINKS).of_some_keys() == Modifiers()
    unchanged, whole = Modifiers(alibi_slopes=SLOPES).finish(lse)
    assert unchanged is lse and whole is None


def test_a_row_of_the_extra_logit_alone_has_no_probability_of_keys() -> None:
    lse, part = Modifiers(sinks=SINKS).finish(torch.full((1, 2, 1), -math.inf))
    assert torch.equal(lse, SINKS[None, :, None]) and torch.equal(part, torch.zeros(1, 2, 1))


def test_slopes_count_positions_and_not_rows_of_a_block() -> None:
    named = Modifiers(alibi_slopes=SLOPES)
    assert torch.equal(named.of_block(3, lambda t: t).alibi_slopes, 3 * SLOPES)
    lse = torch.randn(1, 2, 4, dtype=torch.float64)
    moved = named.moved(lse, 7, lambda slopes: slopes[None, :, None])
    torch.testing.assert_close(moved, lse + 7 * SLOPES.double()[None, :, None])
    assert Modifiers(sinks=SINKS).moved(lse, 7, lambda slopes: slopes) is lse
