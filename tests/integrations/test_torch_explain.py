"""``flashlane.integrations.torch.explain``: what it says of a call of SDPA is what torch would run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashlane
from flashlane.integrations import torch as registry


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[SDPBackend]:
    """The backends that torch takes, the last of the list each time, for tensors that count as a GPU's."""
    taken = [SDPBackend.FLASH_ATTENTION]
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **named: taken[-1].value)
    monkeypatch.setattr(registry, "is_enabled", lambda: True)
    monkeypatch.setattr(registry, "DEVICE", "cpu")
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [1, 3, 2, 0])
    return taken


HALF = torch.randn(1, 2, 5, 8).bfloat16()
MASK = torch.zeros(5, 5, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "taken", "said"),
    [
        (
            {"dropout_p": 0.5},
            "FLASH_ATTENTION",
            "FLASH_ATTENTION: dropout_p is 0.5; torch's kernels draw their own mask",
        ),
        ({"attn_mask": MASK}, "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION: attn_mask is given, which torch's flash"),
        ({"query": HALF.float()}, "EFFICIENT_ATTENTION", "query has dtype torch.float32; torch's flash backend takes"),
        ({"query": torch.randn(1, 2, 5, 264).half()}, "MATH", "query has head dim 264; torch's flash backend takes"),
        ({"value": torch.randn(1, 2, 5, 16).bfloat16()}, "MATH", "query, key and value have different head dims"),
        (
            {"query": HALF[:, :, :3], "is_causal": True},
            "CUDNN_ATTENTION",
            "is_causal is True with 3 queries and 5 keys",
        ),
        ({}, "CUDNN_ATTENTION", "torch's flash backend refuses it; torch.backends.cuda.can_use_flash_attention"),
    ],
    ids=lambda given: given if isinstance(given, str) else ", ".join(given),  # not their values, which are drawn
)
def test_what_runs_as_before_is_explained(
    given: dict[str, Any], taken: str, said: str, choices: list[SDPBackend]
) -> None:
    choices.append(getattr(SDPBackend, taken))
    found = registry.explain(**{"query": HALF, "key": HALF, "value": HALF, **given})
    assert found.startswith(f"torch's own kernel, of its backend {taken}: ") and said in found and "\n" not in found


def test_what_runs_flashlane_is_explained(choices: list[SDPBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.explain(HALF, HALF, HALF, is_causal=True)
    x = HALF.transpose(1, 2)
    assert found == f"flashlane, under torch's backend FLASH_ATTENTION\n{flashlane.explain(x, x, x, causal=True)}"
    choices.append(SDPBackend.CUDNN_ATTENTION)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [3, 1, 2, 0])
    assert "torch tries CUDNN_ATTENTION first; enable(prefer=True)" in registry.explain(HALF, HALF, HALF)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert registry.explain(HALF, HALF, HALF).endswith("the flash backend is disabled")
    monkeypatch.undo()
    assert registry.explain(HALF, HALF, HALF).endswith(": flashlane is not enabled")
    monkeypatch.setattr(registry, "is_enabled", lambda: True)
    assert "query is on cpu; flashlane is under torch's operators for CUDA only" in registry.explain(HALF, HALF, HALF)


@pytest.mark.parametrize(
    ("bias_of", "queries", "keys"),
    [(causal_upper_left, 5, 5), (causal_lower_right, 5, 5), (causal_lower_right, 3, 5), (causal_lower_right, 5, 3)],
)
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_a_causal_bias_is_explained_as_torch_takes_it(
    bias_of: Callable[[int, int], Any],
    queries: int,
    keys: int,
    choices: list[SDPBackend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, bias = HALF[:, :, :queries], HALF[:, :, :keys], bias_of(queries, keys)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *t, **given: asked.append(given) or choices[-1].value)
    monkeypatch.setattr(registry, "can_use_flash_attention", lambda params: True)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [3, 1, 2, 0])
    expected = flashlane.explain(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), causal=True)
    assert registry.explain(q, k, k, bias) == f"flashlane, under torch's backend FLASH_ATTENTION\n{expected}"
    assert len(asked) == (queries == keys)  # else torch asks for flash alone, and gives it is_causal
    assert all(given["is_causal"] is True and given["attn_mask"] is None for given in asked)
    with pytest.raises(ValueError, match="is_causal is True and attn_mask is a CausalBias"):
        registry.explain(q, k, k, bias, is_causal=True)


def test_an_upper_left_bias_is_what_is_causal_is(choices: list[SDPBackend]) -> None:
    choices.append(SDPBackend.MATH)
    given = HALF[:, :, :3], HALF, HALF
    assert registry.explain(*given, causal_upper_left(3, 5)) == registry.explain(*given, is_causal=True)
    assert "is_causal is True with 3 queries and 5 keys" in registry.explain(*given, causal_upper_left(3, 5))


def test_a_lower_right_bias_that_flash_does_not_take_is_explained(
    choices: list[SDPBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    choices.append(SDPBackend.MATH)
    q, k, bias = HALF[:, :, :3].float(), HALF.float(), causal_lower_right(3, 5)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [3, 1, 2, 0])
    monkeypatch.setattr(registry, "can_use_flash_attention", lambda params: False)
    monkeypatch.setattr(registry, "can_use_efficient_attention", lambda params: True)
    said = "query has dtype torch.float32; torch's flash backend takes float16 and bfloat16"
    assert registry.explain(q, k, k, bias) == f"torch's own kernel, of its backend EFFICIENT_ATTENTION: {said}"
    monkeypatch.setattr(registry, "can_use_efficient_attention", lambda params: False)
    assert registry.explain(q, k, k, bias) == f"torch's own kernel, of its backend MATH: {said}"
    found = registry.explain(q.bfloat16(), k.bfloat16(), k.bfloat16(), bias)
    assert "torch's flash backend refuses it; torch.backends.cuda.can_use_flash_attention" in found


def test_it_explains_what_torch_makes_of_the_tensors_first(choices: list[SDPBackend]) -> None:
    """torch casts them under autocast, and pads head dims before its flash backend gets them."""
    q = torch.randn(1, 2, 5, 60)
    padded = F.pad(q.bfloat16(), (0, 4)).transpose(1, 2)
    expected = flashlane.explain(padded, padded, padded, softmax_scale=60**-0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert registry.explain(q, q, q) == f"flashlane, under torch's backend FLASH_ATTENTION\n{expected}"
