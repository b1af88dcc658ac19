"""Repeated calls of flex_attention on a GPU: the first call's bits, on other streams, in graphs, of new numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlane
from flashlane.core.arch import arch_of
from flashlane.flex import masks, repeats
from flashlane.kernels.hopper.arch import ARCH

pytestmark = pytest.mark.gpu
TOKENS, HEADS = 300, 4


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() or arch_of(torch.device("cuda", 0)) != ARCH:
        pytest.skip("no Hopper GPU")
    repeats.forget()


def linear(score, b, h, q, kv):
    return score + (kv - q) * 0.01


def capped(score, b, h, q, kv):
    return 20 * torch.tanh(score / 20)


def masks_by_name() -> dict[str, Callable[[], Any]]:
    def made(function: Any) -> Any:
        return flashlane.create_block_mask(function, None, None, TOKENS, TOKENS, "cuda")

    return {
        "none": lambda: None,
        "causal": lambda: made(masks.causal()),
        "documents": lambda: made(masks.documents(torch.tensor([0, 120, TOKENS], device="cuda"), causal=True)),
        "function": lambda: made(lambda b, h, q, kv: (q * 7 + kv) % 5 != 0),
    }


def operands(head_dim: int, grad: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = 1, TOKENS, HEADS, head_dim
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    return [t.requires_grad_() for t in tensors] if grad else tensors


def entries() -> int:
    return sum(map(len, repeats._entries.values()))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["none", "causal", "documents", "function"])
@pytest.mark.parametrize("score", [None, linear, capped], ids=["plain", "linear", "tanh"])
def test_a_repeated_call_has_the_bits_of_the_first(head_dim: int, name: str, score: Any) -> None:
    mask, tensors = masks_by_name()[name](), operands(head_dim, True)
    dout = torch.randn_like(tensors[0])
    results = []
    for _ in range(4):
        out, lse = flashlane.flex_attention(*tensors, score, mask, return_lse=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            results.append((out, lse, *torch.autograd.grad(out, tensors, dout)))
        finally:
            torch.use_deterministic_algorithms(False)
    assert entries() == 1
    for repeated in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], repeated, strict=True))


def test_a_number_that_changes_and_another_stream_and_a_graph_are_right() -> None:
    q, k, v = operands(64, False)
    factor = 0.5

    def scaled(score, b, h, q, kv):
        return score * factor

    half = [flashlane.flex_attention(q, k, v, scaled) for _ in range(4)]
    factor = 2.0
    twice = flashlane.flex_attention(q, k, v, scaled)
    expected = flashlane.flex_attention(
        *(t.float() for t in (q, k, v)), scaled, kernel_options={"BACKEND": "REFERENCE"}
    )
    assert (twice.float() - expected).abs().max() < 2e-2 and not torch.equal(half[0], twice)
    factor = 0.5
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = flashlane.flex_attention(q, k, v, scaled)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashlane.flex_attention(q, k, v, scaled)
    for _ in range(2):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, half[0])
    assert torch.equal(elsewhere, half[0]) and torch.equal(half[3], half[0])


@pytest.mark.parametrize("name", ["none", "causal"])
def test_a_call_without_a_score_has_the_bits_of_flash_attn_func(name: str) -> None:
    """With the keys of a causal mask aligned by the first ones, which is the same for equal lengths."""
    mask, (q, k, v) = masks_by_name()[name](), operands(128, False)
    own = flashlane.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=name == "causal")
    for _ in range(3):
        assert torch.equal(flashlane.flex_attention(q, k, v, None, mask), own.transpose(1, 2))
