"""The Hopper backward with gradients in f32 on a GPU, of every design: drawn problems by the peers' rule."""

from __future__ import annotations

import collections

import pytest
import torch
from backward_rule import poison
from hopper_gradients import BF16, F16, KERNEL, Variant, assert_right, drawn_problems, needs_hopper, repeats

from flashlane.core.dispatch import select_backward

DRAWS = 6
FEATURES = ((), ("varlen",), ("deterministic",), ("softcap", "alibi", "sinks"), ("varlen", "deterministic", "alibi"))
VARIANTS = [
    Variant((BF16, F16)[number % 2], head_dim, mask=("right", "both", "full")[number % 3], features=features)
    for head_dim in (40, 64, 80, 96, 128, 192, 256)
    for number, features in enumerate(FEATURES)
    if head_dim in (64, 128, 256) or not features
]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_in_f32_are_right_and_nearer(variant: Variant) -> None:
    """Rounded, they are judged as those that kernels round; before, they are nearer to f64 over all draws."""
    squares: collections.Counter[tuple[str, str]] = collections.Counter()
    for _, item, problem, inputs in drawn_problems(variant, DRAWS):
        rows, what = item.backward_inputs(problem, inputs)
        chosen, call = select_backward(problem, KERNEL), (what.out, what.lse, what.do, what.dlse)
        assert chosen.tag == "hopper"
        poison(rows, extra=1 << 24)
        narrow = chosen.run_f32(problem, rows, *call, f32_dq=False, forward=KERNEL)
        assert (narrow.q.dtype, narrow.k.dtype, narrow.v.dtype) == (variant.dtype, torch.float32, torch.float32)
        poison(rows, extra=1 << 24)
        wide = chosen.run_f32(problem, rows, *call, f32_dq=True, forward=KERNEL)
        assert {each.dtype for each in wide[:3]} == {torch.float32}
        for found in (narrow, wide):
            rounded = found._replace(**{name: getattr(found, name).to(variant.dtype) for name in ("q", "k", "v")})
            assert_right(item, rows, what, rounded)
        again = chosen.run_f32(problem, rows, *call, f32_dq=True, forward=KERNEL)
        for name in repeats(problem):
            first, second = getattr(wide, name), getattr(again, name)
            assert first is second is None or torch.equal(first, second), (
                f"{item}: other bits of d{name} in another run"
            )
        for way, found in (("plain", chosen.run(problem, rows, *call)), ("f32", wide)):
            for name in ("q", "k", "v"):
                squares[way, name] += float((getattr(found, name).double() - what.right[name]).square().sum())
    assert all(0 < squares["f32", name] < squares["plain", name] for name in ("q", "k", "v")), squares
