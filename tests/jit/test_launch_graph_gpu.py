"""Backwards that recur on a GPU: their graphs make what their launches make, also when what they read has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import flashlane
from flashlane.core.problem import arch_of
from flashlane.jit import launch_graph, launch_pool

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")
CALLS = 3 * launch_pool.RECURRENCES


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The streams of the graphs that were launched."""
    streams: list[int] = []
    record = launch_graph.record

    def noted(enqueue: Callable[[int], None]) -> Callable[[int], int] | None:
        graph = record(enqueue)

        def launch(stream: int) -> int:
            streams.append(stream)
            return graph(stream)

        return graph and launch

    monkeypatch.setattr(launch_graph, "record", noted)
    yield streams


def leaves(rows: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    return [
        torch.randn(1, rows, heads, head_dim, device=HERE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = flashlane.flash_attn_func(q, k, v, causal=True)
    return torch.autograd.grad(out, (q, k, v), out.detach())


def error_of(found: tuple[torch.Tensor, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    rows = [t.detach().transpose(1, 2).double().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*rows, is_causal=True)
    given = flashlane.flash_attn_func(q, k, v, causal=True).detach().transpose(1, 2).double()
    wanted = torch.autograd.grad(out, rows, given)
    pairs = zip(found, wanted, strict=True)
    return max(float((a.transpose(1, 2).double() - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("rows", "head_dim"), [(256, 64), (1, 64), (777, 128), (300, 192), (129, 256)])
def test_a_training_loop_reads_what_lies_there_now(rows: int, head_dim: int, launched: list[int]) -> None:
    q, k, v = leaves(rows, 4, head_dim)
    for _ in range(CALLS):
        with torch.no_grad():
            for tensor in (q, k, v):
                tensor.normal_()
        found = gradients(q, k, v)
        assert rows == 1 or error_of(found, q, k, v) < 0.02
        del found
    assert launched, "no call recurred"


@pytest.mark.gpu
@needs_hopper
def test_packed_lengths_may_change_where_they_lie(launched: list[int]) -> None:
    """A graph has the address of the lengths, not the lengths; another address is another graph."""
    total, heads, head_dim = 1024, 4, 64
    q, k, v = (
        torch.randn(total, heads, head_dim, device=HERE, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )
    starts = [torch.tensor(each, dtype=torch.int32, device=HERE) for each in ((0, 300, 1024), (0, 512, 1024))]
    given = torch.randn_like(q)

    def grads(at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = flashlane.flash_attn_varlen_func(q, k, v, at, at, 724, 724, causal=True, deterministic=False)
        return torch.autograd.grad(out, (q, k, v), given)

    def alone(first: int) -> list[torch.Tensor]:
        parts = []
        for rows in (slice(0, first), slice(first, total)):
            one = [t.detach()[None, rows].requires_grad_() for t in (q, k, v)]
            out = flashlane.flash_attn_func(*one, causal=True)
            parts.append([g[0] for g in torch.autograd.grad(out, one, given[None, rows])])
        return [torch.cat(both) for both in zip(*parts, strict=True)]

    place = starts[0].clone()
    for number in range(CALLS):
        place.copy_(starts[number % 2])
        for found, wanted in zip(grads(place), alone((300, 512)[number % 2]), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    for number in range(4):
        for found, wanted in zip(grads(starts[number % 2]), alone((300, 512)[number % 2]), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert launched


@pytest.mark.gpu
@needs_hopper
def test_in_a_callers_capture_and_on_other_streams(launched: list[int]) -> None:
    q, k, v = leaves(300, 4, 128)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = flashlane.flash_attn_func(q, k, v, causal=True)
        given = torch.randn_like(out)

        def grads() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), given, retain_graph=True)

        wanted = [t.clone() for t in grads()]
        for _ in range(CALLS):
            grads()
        assert stream.cuda_stream in launched
        count, captured = len(launched), torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            kept = grads()
        assert len(launched) == count, "a caller's graph has the launches themselves"
        for tensor in kept:
            tensor.fill_(torch.nan)
        captured.replay()
        stream.synchronize()
        for a, b in zip(kept, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        for a, b in zip(grads(), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@needs_hopper
def test_threads_with_streams_of_their_own(launched: list[int]) -> None:
    def worker(number: int) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            q, k, v = leaves(200 + number, 4, 64)
            for _ in range(CALLS):
                found = None
                found = gradients(q, k, v)
            torch.cuda.current_stream().synchronize()
            return error_of(found, q, k, v)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(worker, range(8))) < 0.02
    assert launched


@pytest.mark.gpu
@needs_hopper
def test_graphs_end_with_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(launch_graph._kept)
    monkeypatch.setattr(launch_graph, "GRAPHS_KEPT", len(before) + 2)
    kept = []
    for number in range(4):
        q, k, v = leaves(100 + number, 2, 64)
        kept.append((q, k, v))
        for _ in range(CALLS):
            found = gradients(q, k, v)
            del found
        assert len(launch_graph._kept) <= len(before) + 2
    assert launch_graph._kept - before, "none was recorded"
