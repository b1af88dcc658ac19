"""The gradient of a clamped value that equals a bound, which torch changed in version 2.14."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.flex_oracle import places

from flashlane.flex import aten, derivative
from flashlane.flex import bind as bind_module
from flashlane.flex.bind import bind
from flashlane.flex.evaluate import evaluate
from flashlane.flex.expression import constant

CPU = torch.device("cpu")
BOUNDS = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
OF_SINCE_2_14 = {  # by (x, min, max): what x, min and max get
    (-1, -1, 1): (0.5, 0.5, 0), (1, -1, 1): (0.5, 0, 0.5), (0, -1, 1): (1, 0, 0), (-1, 0, 1): (0, 1, 0),
    (1, -1, 0): (0, 0, 1), (0, 0, 0): (1, 0, 0), (-1, 0, 0): (0, 1, 0), (1, 0, 0): (0, 0, 1), (0, 1, -1): (0, 0, 1),
}  # fmt: skip
OF_EARLIER = {
    (-1, -1, 1): (1, 0, 0), (1, -1, 1): (1, 0, 0), (0, -1, 1): (1, 0, 0), (-1, 0, 1): (0, 1, 0),
    (1, -1, 0): (0, 0, 1), (0, 0, 0): (1, 0, 0), (-1, 0, 0): (0, 1, 0), (1, 0, 0): (0, 0, 1), (0, 1, -1): (0, 0, 1),
}  # fmt: skip


def gradients_of_clamp(x: float, low: float, high: float, numbers: bool) -> tuple[float, ...]:
    """The derivatives of a clamped score by the score and by both bounds; numbers have none."""
    lows, highs = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (low, high))
    if numbers:
        program, arguments = bind(lambda score, b, h, q, kv: torch.clamp(score, low, high), None, CPU, "f64")
    else:
        program, arguments = bind(lambda score, b, h, q, kv: torch.clamp(score, lows[h], highs[h]), None, CPU, "f64")
    seed = constant(1.0, "f64")
    of_loads = {e.value: gradient for e, gradient in derivative.of_loads(program.score, seed)}
    places_of = [next(i for i, t in enumerate(arguments.tensors) if t is each) for each in (lows, highs) if not numbers]
    of_bounds = [of_loads[place] for place in places_of]
    inputs = {"score": torch.tensor(x, dtype=torch.float64), **places((1, 1, 1, 1))}
    roots = [program.score, derivative.of_score(program.score), *of_bounds]
    value, *found = evaluate(roots, inputs, arguments.tensors, ())
    assert value.item() == torch.clamp(inputs["score"], low, high).item()
    return tuple(t.item() for t in found)


@pytest.mark.parametrize("shares", [False, True], ids=["torch before 2.14", "torch 2.14"])
def test_the_gradient_of_a_value_at_a_bound(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "SHARES_AT_BOUNDS", shares)
    monkeypatch.setattr(bind_module, "_traced", {})
    for (x, low, high), wanted in (OF_SINCE_2_14 if shares else OF_EARLIER).items():
        assert gradients_of_clamp(x, low, high, numbers=False) == wanted, (x, low, high)
        of_number = 1.0 if wanted[0] == 1 and not (shares and x in (low, high)) else 0.0
        assert gradients_of_clamp(x, low, high, numbers=True) == (of_number,), (x, low, high)


def test_the_gradient_of_a_value_at_a_bound_is_torchs() -> None:
    for x, low, high in itertools.product(BOUNDS, repeat=3):
        leaves = [t.clone().requires_grad_() for t in (x, low, high)]
        of_tensors = torch.autograd.grad(torch.clamp(*leaves), leaves)
        (of_numbers,) = torch.autograd.grad(torch.clamp(leaves[0], low.item(), high.item()), leaves[0])
        at = x.item(), low.item(), high.item()
        if x < low == high and not aten.SHARES_AT_BOUNDS:  # torch loses the gradient of both bounds here
            of_tensors = tuple(torch.tensor(float(leaf is leaves[1])) for leaf in leaves)
        assert gradients_of_clamp(*at, numbers=False) == tuple(g.item() for g in of_tensors), at
        assert gradients_of_clamp(*at, numbers=True) == (of_numbers.item(),), at
