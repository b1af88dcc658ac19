"""The decode kernel on a GPU: drawn problems against float64, and what must hold of launches."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from decode_problems import Drawn, draw, faults

from flashlane.bench.measure.drawn_case import PLAIN
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.decode.select import config_of
from flashlane.kernels.decode.tables import STREAM, Shape

pytestmark = pytest.mark.gpu
KERNEL = registry.get("decode(split-kv)")
CUDA = torch.device("cuda")
Result = tuple[torch.Tensor, torch.Tensor]


def poisoned(problem: AttentionProblem, inputs: Inputs) -> Result:
    """Output and LSE full of NaN."""
    out = torch.full((*inputs.q.shape[:-1], problem.head_dim_v), math.nan, dtype=problem.dtype, device=CUDA)
    *batch, rows, heads, _ = inputs.q.shape
    return out, torch.full((*batch, heads, rows), math.nan, device=CUDA)


def run(problem: AttentionProblem, inputs: Inputs, splits: int | None = None) -> Result:
    out, lse = poisoned(problem, inputs)
    KERNEL.run(KERNEL.config(problem), problem, inputs, out, lse, splits)
    return out, lse


@pytest.mark.parametrize("seed", range(16))
def test_agrees_with_the_reference(seed: int) -> None:
    for item in draw(16, seed):
        problem, inputs = item.build(CUDA)
        assert KERNEL.supports(problem) is None, problem.describe()
        fault = faults(problem, inputs, *run(problem, inputs, item.splits))
        assert fault is None, f"{item}: {fault}"


@pytest.mark.parametrize("num_splits", [1, 3, 8, 128])
def test_agrees_with_the_reference_in_splits_asked_for(num_splits: int) -> None:
    for item in draw(12, seed=2000 + num_splits):
        problem, inputs = item.build(CUDA)
        fault = faults(problem, inputs, *run(replace(problem, num_splits=num_splits), inputs))
        assert fault is None, f"{item}: {fault}"


SHAPES = (
    Shape(1, 8),
    Shape(1, 8, tma=True, cluster=4),
    Shape(2, 4, block_n=32, tma=True),
    Shape(1, 8, stream_k=True),
    Shape(1, 4, stream_k=True),
    Shape(2, 4, stream_k=True),
    Shape(4, 2, stream_k=True),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape).removeprefix("Shape"))
def test_every_way_of_reading_and_sharing_agrees(shape: Shape) -> None:
    """Whatever the tables choose; waits trap in debug builds, so that none of them hangs."""
    ran = 0
    for drawn in draw(24, seed=1000):
        pages = drawn.case.seed % 3 * 24 + 16 if drawn.case.page else 0
        item = drawn.changed(head_dim=128, head_dim_v=128, dtype=torch.bfloat16, page=pages)
        problem, inputs = item.build(CUDA)
        config = config_of(problem, shape)
        if config is None or problem.rows_of_kv_head > 64:
            continue
        out, lse = poisoned(problem, inputs)
        KERNEL.run(config, problem, inputs, out, lse, item.splits, debug=True)
        fault = faults(problem, inputs, out, lse)
        assert fault is None, f"{item}: {fault}"
        ran += 1
    assert ran > 5


@pytest.mark.parametrize(
    ("shape", "head_dim", "group"),
    [
        (rule.shape, head_dim, group)
        for rule in STREAM["sm_90a"]
        for head_dim in (64, 128, 192, 256)
        for group in (1, 6, 16 * rule.shape.warps_m)
        if rule.head_dim // 2 < head_dim <= rule.head_dim or head_dim == 64
    ],
)
def test_stream_k_of_many_short_sequences(shape: Shape, head_dim: int, group: int) -> None:
    """Tiles of fewer steps than stages, of no keys at all, and of many splits, in one launch."""
    draw_length = random.Random(head_dim + group)
    for longest, paged in itertools.product((40, 300, 2000), (0, 64)):
        lengths = [draw_length.choice((0, 1, 1, draw_length.randrange(longest))) for _ in range(70)]
        lengths[draw_length.randrange(70)] = 2000
        case = replace(
            PLAIN, lengths=tuple((1, length) for length in lengths), kv_heads=3, group=group, head_dim=head_dim,
            head_dim_v=head_dim, used=True, page=paged, unowned="nan", seed=longest,
        )  # fmt: skip
        problem, inputs = Drawn(case, torch.bfloat16).build(CUDA)
        config = config_of(problem, shape)
        assert config is not None
        first = None
        for _ in range(3):
            out, lse = poisoned(problem, inputs)
            KERNEL.run(config, problem, inputs, out, lse, debug=True)
            fault = faults(problem, inputs, out, lse) if first is None else None
            assert fault is None, f"{config.describe()} up to {longest} keys: {fault}"
            assert first is None or torch.equal(out, first)
            first = out


LONG = Drawn(
    replace(
        PLAIN, lengths=((1, 20000),) * 2, kv_heads=8, group=4, head_dim=128, head_dim_v=128, used=True, unowned="nan",
        seed=51,
    ),
    torch.bfloat16,
)  # fmt: skip
TOKENS = LONG.changed(seqlen_q=8, page=64, seed=30)


@pytest.mark.parametrize("item", [LONG, TOKENS, LONG.changed(head_dim=256, head_dim_v=256, dtype=torch.float16)])
def test_repeats_to_the_bit(item: Drawn) -> None:
    """Whichever CTA arrives last combines the splits in their order."""
    problem, inputs = item.build(CUDA)
    first = run(problem, inputs)
    assert faults(problem, inputs, *first) is None
    for _ in range(20):
        again = run(problem, inputs)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_a_graph_follows_the_lengths_on_the_device() -> None:
    problem, inputs = LONG.changed(batch=4, capacity=5000).build(CUDA)
    for t in (inputs.k, inputs.v):
        t.normal_()
    run(problem, inputs)
    out, lse = poisoned(problem, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNEL.forward(problem, inputs, out, lse)
    for lengths in ((5000, 5000, 5000, 5000), (0, 1, 64, 4999), (0, 0, 0, 0), (17, 3000, 0, 5000)):
        inputs.seqused_k.copy_(torch.tensor(lengths))
        inputs.q.normal_()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert faults(problem, inputs, out, lse) is None, lengths
        assert torch.equal(out, run(problem, inputs)[0])


def test_an_empty_sequence_gives_zero_and_minus_infinity() -> None:
    problem, inputs = LONG.changed(batch=3, capacity=500).build(CUDA)
    inputs.seqused_k.zero_()
    inputs.k.fill_(math.nan)
    inputs.v.fill_(math.nan)
    out, lse = run(problem, inputs)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())
    sinks = torch.randn(32, device=CUDA)
    out, lse = run(replace(problem, sinks=True), replace(inputs, sinks=sinks))
    assert bool((out == 0).all()) and torch.allclose(lse, sinks[:, None].expand_as(lse), rtol=1e-6)


def test_four_streams_at_once() -> None:
    """Each stream has its own counters; a graph has its own, whatever runs next to it."""
    problem, inputs = LONG.changed(capacity=9000).build(CUDA)
    expected = run(problem, inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]
    results: list[Result] = []
    out, lse = poisoned(problem, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):
        KERNEL.forward(problem, inputs, out, lse)
    torch.cuda.synchronize()
    for number in range(200):
        with torch.cuda.stream(streams[number % 4]):
            if number % 10 == 7:
                graph.replay()
            results.append(run(problem, inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(got, expected[0]) and torch.equal(stats, expected[1]) for got, stats in results)
    assert torch.equal(out, expected[0])


def test_large_offsets() -> None:
    """Pages and rows further apart than 2^31 elements."""
    stride = 1 << 27
    space = torch.empty(33 * stride + 64, dtype=torch.bfloat16, device=CUDA)
    k = torch.as_strided(space, (1, 33, 1, 64), (stride * 33, stride, 64, 1))
    k.normal_()
    inputs = Inputs(torch.randn(1, 2, 4, 64, device=CUDA).bfloat16(), k, k)
    problem = AttentionProblem.from_inputs(inputs, causal=True)
    assert faults(problem, inputs, *run(problem, inputs)) is None
    pages = torch.as_strided(space, (33, 1, 1, 64), (stride, 64, 64, 1))
    table = torch.randperm(33, device=CUDA).int().view(1, 33)
    inputs = replace(inputs, k=pages, v=pages, block_table=table)
    problem = AttentionProblem.from_inputs(inputs)
    assert faults(problem, inputs, *run(problem, inputs)) is None


def test_a_bound_that_can_fail() -> None:
    problem, inputs = LONG.changed(capacity=700).build(CUDA)
    out, lse = run(problem, inputs)
    assert faults(problem, inputs, out * 1.02, lse) is not None
    assert faults(problem, inputs, out, lse + 1e-3) is not None
