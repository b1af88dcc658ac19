"""On a GPU: CUDA graphs, inductor, autocast, and a host that is never waited for."""

from __future__ import annotations

import pytest
import torch

import flashlane

pytestmark = pytest.mark.gpu


def qkv(grad: bool = False, dtype: torch.dtype = torch.float16, n: int = 256) -> list[torch.Tensor]:
    return [torch.randn(2, n, 4, 64, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3)]


def test_a_captured_forward_and_backward_replays_on_new_inputs() -> None:
    q, k, v = qkv(grad=True)

    def step() -> list[torch.Tensor]:
        out = flashlane.flash_attn_func(q, k, v, causal=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=2e-3, atol=2e-3)


def test_a_replayed_graph_draws_new_dropout() -> None:
    q, k, v = qkv()
    flashlane.flash_attn_func(q, k, v, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashlane.flash_attn_func(q, k, v, 0.5)
    outs = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        outs.append(out.clone())
    assert not torch.equal(outs[0], outs[1]), "two replays drew one mask"
    assert torch.equal(outs[0], outs[2]), "the seed does not repeat the mask"


def test_compiles_with_inductor_forward_backward_and_dropout() -> None:
    q, k, v = qkv(grad=True)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
        return flashlane.flash_attn_func(q * 2, k, v, p, causal=True).float().square().mean()

    compiled = torch.compile(step, fullgraph=True)
    got = torch.autograd.grad(compiled(q, k, v, 0.0), (q, k, v))
    want = torch.autograd.grad(step(q, k, v, 0.0), (q, k, v))
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-4)
    losses = [compiled(q, k, v, 0.5) for _ in range(2)]
    assert losses[0] != losses[1] and all(torch.isfinite(torch.stack(losses)))


def test_autocast_on_the_gpu() -> None:
    q, k, v = qkv(grad=True, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = flashlane.flash_attn_func(q, k, v)
    assert out.dtype == torch.bfloat16
    low = [t.detach().bfloat16() for t in (q, k, v)]
    assert torch.equal(out, flashlane.flash_attn_func(*low))
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32


def test_no_call_waits_for_the_device() -> None:
    """But the first one of a process, after which the counters of tiles are zeros on every stream."""
    q, k, v = qkv(grad=True)

    def calls() -> None:
        flashlane.flash_attn_func(q, k, v, 0.5, causal=True).float().sum().backward()
        with torch.no_grad():
            flashlane.flash_attn_func(q, k, v, causal=True)

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
