"""Ten steps of training follow one curve, whichever kernels compute attention and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_kernels import StandIn
from training import losses_of_training

from flashlane.core import registry
from flashlane.core.problem import arch_of
from flashlane.models import Config, Transformer

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 10
CONFIGS = {
    64: Config(d_model=256, d_ff=384, layers=2, heads=4, kv_heads=2, vocab=97),
    80: Config(d_model=320, d_ff=384, layers=2, heads=4, vocab=97),
    128: Config(d_model=256, d_ff=384, layers=2, heads=2, kv_heads=1, vocab=97),
    256: Config(d_model=512, d_ff=384, layers=2, heads=2, vocab=97),
}
"""Small models by head dim: heads in groups, and 80, which the course's largest has."""
FAMILIES = (("hopper(wgmma+tma)", "hopper"), ("hopper(wgmma+tma)", "triton"), ("triton", "triton"), ("tiled", "tiled"))
"""A forward kernel, and the backward that is made to follow it."""


@pytest.fixture
def only() -> Iterator[Any]:
    """Leaves one backward in the table, and counts how often it runs."""
    calls: list[str] = []
    with contextlib.ExitStack() as tables:

        def choose(tag: str) -> list[str]:
            registered = registry.get_backward(tag)

            def counted(*arguments: Any, **keywords: Any) -> Any:
                calls.append(tag)
                return registered.run(*arguments, **keywords)

            tables.enter_context(registry.backward_table_of(StandIn(registered, counted)))
            return calls

        yield choose


def curve(config: Config, attention: str, device: torch.device, dtype: torch.dtype, seqlen: int) -> list[float]:
    """The losses of ten steps on the same tokens from the same weights; dtype f32 is without autocast."""
    torch.manual_seed(0)
    model = Transformer(replace(config, attention=attention)).to(device)
    tokens = torch.randint(config.vocab, (4, seqlen + 1)).to(device)
    return losses_of_training(model, tokens, STEPS, 3e-3, dtype)


def assert_one_curve(config: Config, forward: str, device: torch.device, dtype: torch.dtype, seqlen: int) -> None:
    """At most three times as far from the curve in f32 as torch's attention in that type is."""
    exact = curve(config, "sdpa", device, torch.float32, seqlen)
    theirs = curve(config, "sdpa", device, dtype, seqlen)
    ours = curve(config, forward, device, dtype, seqlen)
    assert exact[-1] < exact[0] - 0.2, "it learns"
    allowed = 3 * max(abs(a - b) for a, b in zip(theirs, exact, strict=True)) + 5e-4 * exact[0]
    assert max(abs(a - b) for a, b in zip(ours, exact, strict=True)) <= allowed, (ours, theirs, exact)


def test_the_curve_is_followed_on_a_cpu(only: Any) -> None:
    calls = only("tiled")
    config = replace(CONFIGS[64], d_model=64, d_ff=96)
    assert_one_curve(config, "tiled", torch.device("cpu"), torch.bfloat16, seqlen=17)
    assert len(calls) == STEPS * config.layers


def test_wrong_gradients_leave_the_curve(only: Any) -> None:
    only("tiled")
    (right,) = registry.backward_kernels()

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        found = right.run(*arguments, **keywords)
        return found._replace(v=found.v * -1)

    with registry.backward_table_of(StandIn(right, wrong)), pytest.raises(AssertionError):
        assert_one_curve(
            replace(CONFIGS[64], d_model=64, d_ff=96), "tiled", torch.device("cpu"), torch.bfloat16, seqlen=17
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", CONFIGS)
@pytest.mark.parametrize(("forward", "backward"), FAMILIES)
def test_ten_steps_follow_one_curve(forward: str, backward: str, head_dim: int, dtype: torch.dtype, only: Any) -> None:
    if "hopper" in (forward + backward) and arch_of(GPU) != "sm_90a":
        pytest.skip("needs an sm_90 GPU")
    calls = only(backward)
    assert_one_curve(CONFIGS[head_dim], forward, GPU, dtype, seqlen=333)
    assert len(calls) == STEPS * CONFIGS[head_dim].layers, f"the {backward} backward ran {len(calls)} times"
