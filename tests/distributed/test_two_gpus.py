"""Context parallelism on two GPUs of one host, over NCCL and by copies: right, and the same bits at every run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_errors import RINGS, errors_on_ranks
from rank_kernels import TOKENS

from flashlane.bench.measure.ranks import on_ranks

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"
SECONDS = 85.0
"""For both tests together. Where the ranks take longer, the error says what each of them was doing, and for how many
seconds it had compiled."""
RING_SECONDS = 300.0
"""For the rings, which compile about a hundred kernels."""
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What two ranks found that began once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(SCRIPTS))
        script = importlib.import_module("context_parallel")
        return on_ranks(2, "nccl", script.check_and_repeat, TOKENS, 50, seconds=SECONDS)


@pytest.fixture(scope="module")
def gradients() -> dict[str, Any]:
    """The errors of the gradients of two ranks, which began once."""
    return on_ranks(2, "nccl", errors_on_ranks, tuple(RINGS), seconds=RING_SECONDS)


@pytest.mark.gpu
@needs_two
def test_methods_and_layouts_are_right(found: dict[str, Any]) -> None:
    assert len(found["check"]) == 60
    wrong = [str(row) for row in found["check"] if not row["ok"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@needs_two
def test_repeats_have_the_same_bits(found: dict[str, Any]) -> None:
    assert len(found["repeats"]) == 5
    assert set(found["repeats"].values()) == {0}


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_rounds_gradients_once(gradients: dict[str, Any], name: str) -> None:
    """Those of one process are as near to f64."""
    errors = gradients[name]
    assert all(errors["ranks"][each] < 1.1 * errors["one"][each] for each in ("dq", "dk", "dv")), errors
    assert errors["rounded"]["dq"] > 1.03 * errors["ranks"]["dq"], errors
    assert not any(errors.get("again", {}).values()), errors


@pytest.mark.gpu
@needs_two
def test_calls_copy_by_default_where_gpus_reach_each_other(found: dict[str, Any]) -> None:
    transport, reason = found["transport"]
    if all(torch.cuda.can_device_access_peer(one, 1 - one) for one in (0, 1)):
        assert transport == "copies", reason
    else:
        assert transport == "messages" and "does not reach" in reason
