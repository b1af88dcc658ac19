"""Gradients of modifiers that belong to rows, where no kernel runs: against autograd."""

from __future__ import annotations

import pytest
import torch

from flashlane.core.problem import Inputs
from flashlane.kernels.score import row_gradients_without_keys


@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 7)], ids=["batch", "packed"])
def test_without_keys_a_sink_has_the_gradients_of_its_head_s_rows(shape: tuple[int, ...]) -> None:
    """The LSE of every row is then its head's sink, and −∞ in heads whose sink is −∞."""
    sinks = torch.tensor([0.5, -torch.inf, 2.0], requires_grad=True)
    lse, dlse = sinks[:, None].expand(shape), torch.randn(shape)
    (expected,) = torch.autograd.grad((lse[..., ::2, :] * dlse[..., ::2, :]).sum(), sinks)
    q = torch.empty(0)
    inputs = Inputs(q, q, q, sinks=sinks.detach())
    torch.testing.assert_close(row_gradients_without_keys(inputs, lse.detach(), dlse)["sinks"], expected)
    assert not row_gradients_without_keys(inputs, lse.detach(), None)["sinks"].any()
    empty = torch.empty(*shape[:-1], 0)
    assert row_gradients_without_keys(inputs, empty, empty)["sinks"].tolist() == [0.0] * 3
    assert row_gradients_without_keys(Inputs(q, q, q), lse.detach(), dlse) == {}
