"""Launches go to the stream that is current, and into a graph that is captured."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel


def check_stream_and_graph(
    kernel: Kernel, problem: AttentionProblem, inputs: Inputs, run: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Fail unless a forward on another stream, and one replayed with another q, give the bits that ``run`` gives."""
    expected = run()
    out, lse = (torch.full_like(t, math.nan) for t in expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        kernel.forward(problem, inputs, out, lse)
    assert not side.query(), "the launch did not wait on the stream that was current"
    side.synchronize()
    assert torch.equal(out, expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.forward(problem, inputs, out, lse)
    inputs.q.normal_()
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, run()[0])
