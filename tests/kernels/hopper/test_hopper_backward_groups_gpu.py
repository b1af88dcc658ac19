"""Steps through all query heads of an m-block first, on a GPU: the gradients of the other order, of any tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_gradients import (
    BF16,
    DRAWS,
    F16,
    Drawn,
    Variant,
    assert_right,
    dense,
    draw,
    drawn_problems,
    forwarded,
    needs_hopper,
    run,
)

from flashlane.kernels.hopper.backward.kernel import config_of

LENGTHS = ((900, 900), (1400, 1400), (333, 2000), (2000, 333), (640, 641))
VARIANTS = tuple(Variant((BF16, F16)[d // 8 % 2], d) for d in (72, 80, 88, 96, 104, 112, 120, 128, 160, 192, 256))
VARIANTS += (Variant(BF16, 192, 128), Variant(F16, 64, 128), Variant(BF16, 40))
VARIANTS += tuple(Variant(BF16, d, features=("varlen",)) for d in (64, 96, 128, 256))
VARIANTS += tuple(Variant(BF16, d, mask=mask) for d in (96, 128, 192) for mask in ("left", "both", "full"))
VARIANTS += tuple(Variant(BF16, d, features=("softcap", "alibi", "sinks")) for d in (64, 128, 256))


def of_groups(variant: Variant, number: int) -> Drawn:
    """The drawn problem of a number, with groups of heads; every other one has several tiles on each SM."""
    item = draw(variant, number)
    group = (8, 2, 5, 16)[number % 4]
    if number % 2:
        lengths = (LENGTHS[number // 2 % len(LENGTHS)],) * 6
        return replace(item, case=replace(item.case, lengths=lengths, kv_heads=3, group=group))
    return replace(item, case=replace(item.case, group=group))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_both_orders_of_steps_make_the_same_gradients(variant: Variant) -> None:
    """dK and dV are sums in another order, and so are not the same to the bit."""
    ran = 0
    for _, item, problem, inputs in drawn_problems(variant, drawing=of_groups):
        config = config_of(problem)
        if config.design == "split_dkdv_dq":
            continue
        inner = replace(config, heads_inner=True, split_q=False)
        (values,) = {dict(source.constants)["HEADS_INNER"] for source in inner.gradient_sources()}
        assert values, inner.describe()
        rows, what = item.backward_inputs(problem, inputs)
        assert_right(item, rows, what, run(problem, rows, what, inner))
        ran += 1
    assert ran >= DRAWS // 4


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [88, 128, 256])
def test_both_orders_of_a_large_problem(head_dim: int) -> None:
    """With more tiles than SMs steps through heads first make what the other order makes."""
    problem, inputs = dense(1999, head_dim, batch=8, heads=32, kv_heads=4, causal=True)
    config, what = replace(config_of(problem), heads_inner=True, split_q=False), forwarded(problem, inputs)
    assert config.heads_first
    found = run(problem, inputs, what, config)
    other = run(problem, inputs, what, replace(config, heads_inner=False))
    for name in "qkv":
        a, b = getattr(found, name).float(), getattr(other, name).float()
        assert float((a - b).norm() / b.norm()) < 4e-3, name
        assert not torch.isnan(a).any()
