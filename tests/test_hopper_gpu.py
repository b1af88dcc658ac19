"""The Hopper kernel on a GPU: each tile of its tables, its features, streams and graphs. Drawing them runs anywhere."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import pytest
import torch

from flashlane import registry
from flashlane.kernels.hopper import shapes
from flashlane.kernels.hopper.config import HopperConfig
from flashlane.kernels.hopper.forward import specialise
from flashlane.problem import AttentionProblem, Inputs, arch_of
from flashlane.reference import reference_attention

KERNEL = registry.get("hopper(wgmma+tma)")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RELATIVE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Largest ‖out − ref‖ / ‖ref‖ against f32."""
KINDS = ("packed", "cache", "pages")
SEEDS = 12
needs_hopper = pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")
ROWS = [
    (row, causal)
    for table, causal in ((shapes.FULL, False), (shapes.CAUSAL, True), (shapes.LOW, True))
    for row in table
]


def draw(kind: str, seed: int) -> tuple[AttentionProblem, Inputs]:
    """Sequences of unlike length, with score modifiers now and then; what no sequence owns is NaN."""
    chance, generator = random.Random(f"{kind} {seed}"), torch.Generator(HERE).manual_seed(seed)
    dtype, head_dim = chance.choice(tuple(RELATIVE)), chance.choice((64, 128, 128, 80, 256))
    kv_heads, batch = chance.choice((1, 2)), chance.choice((1, 3, 5, 20))
    heads = kv_heads * chance.choice((1, 2, 4, 3))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=HERE).to(dtype)

    def whole(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=HERE)

    more: dict[str, object] = {}
    if chance.random() < 0.3:
        more["sinks"] = torch.randn(heads, generator=generator, device=HERE)
    if chance.random() < 0.3:
        size = chance.choice(((heads,), (batch, heads)))
        more["alibi_slopes"] = torch.rand(size, generator=generator, device=HERE)
    if kind == "packed":
        lengths_q = [chance.choice((0, 1, 17, 64, 128, 300, 700)) for _ in range(batch)]
        lengths_k = [chance.choice((0, 1, 33, 200, 500, 900)) if chance.random() < 0.5 else n for n in lengths_q]
        starts = [[sum(lengths[:i]) for i in range(batch + 1)] for lengths in (lengths_q, lengths_k)]
        total_q, total_k = (max(1, start[-1] + chance.choice((0, 0, 40))) for start in starts)
        q, k, v = (
            normal(total_q, heads, head_dim),
            normal(total_k, kv_heads, head_dim),
            normal(total_k, kv_heads, head_dim),
        )
        k[starts[1][-1] :], v[starts[1][-1] :] = math.nan, math.nan
        more |= {"cu_seqlens_q": whole(starts[0]), "cu_seqlens_k": whole(starts[1])}
        more |= {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    else:
        q = normal(batch, chance.choice((1, 2, 8, 100, 200)), heads, head_dim)
        capacity, page = chance.choice((130, 256, 600, 1500)), chance.choice((16, 64, 256, 8, 48))
        per_sequence = -(-capacity // page)
        if kind == "cache":
            k, v = normal(batch, capacity, kv_heads, head_dim), normal(batch, capacity, kv_heads, head_dim)
            rows = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)).tolist()
            more["batch_idx"] = whole(rows)
        else:
            capacity, pages = per_sequence * page, batch * per_sequence + 3
            k, v = normal(pages, page, kv_heads, head_dim), normal(pages, page, kv_heads, head_dim)
            table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: batch * per_sequence]
            more["block_table"] = whole(table.tolist()).view(batch, per_sequence)
        used = [chance.randint(0, capacity) for _ in range(batch)]
        more["seqused_k"] = whole(used)
        if kind == "cache" and chance.random() < 0.5:
            more["leftpad_k"] = whole([chance.randint(0, n) for n in used])
        for i, n in enumerate(used):
            if kind == "cache":
                k[rows[i], n:], v[rows[i], n:] = math.nan, math.nan
            else:
                for j, owner in enumerate(more["block_table"][i].tolist()):
                    first = min(max(n - j * page, 0), page)
                    k[owner, first:], v[owner, first:] = math.nan, math.nan
    asked = chance.choice(
        ({}, {"causal": True}, {"window_size": (50, 10)}, {"window_size": (200, 0)}, {"softcap": 15.0})
    )
    inputs = Inputs(q, k, v, **more)
    return AttentionProblem.from_inputs(inputs, **asked), inputs


def run(
    problem: AttentionProblem, inputs: Inputs, config: HopperConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, written over NaN."""
    *batch, rows, heads, _ = inputs.q.shape
    out = torch.full((*batch, rows, heads, problem.head_dim_v), math.nan, dtype=problem.dtype, device=HERE)
    lse = torch.full((*batch, heads, rows), math.nan, device=HERE)
    KERNEL.run(config or KERNEL.config(problem), problem, inputs, out, lse)
    return out, lse


def assert_right(problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    with torch.no_grad():
        ref_out, ref_lse = reference_attention(problem, inputs, torch.float32)
    finite = torch.isfinite(ref_lse)
    assert torch.isfinite(out).all() and torch.equal(torch.isfinite(lse), finite)
    assert (lse[~finite] == -math.inf).all()
    torch.testing.assert_close(lse[finite], ref_lse[finite], rtol=0, atol=1e-4)
    assert (out.float() - ref_out).norm() <= RELATIVE[problem.dtype] * ref_out.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_legal_and_various(kind: str) -> None:
    problems = [draw(kind, seed)[0].on("sm_90a") for seed in range(SEEDS)]
    assert all(KERNEL.supports(problem) is None for problem in problems)
    for names in (("sinks",), ("alibi",), ("softcap",), ("causal",), ("window_left",)):
        assert any(getattr(p, name) not in (False, 0, -1) for p in problems for name in names), names
    assert {p.dtype for p in problems} == set(RELATIVE) and len({p.head_dim for p in problems}) > 2


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_tile_of_the_tables(number: int) -> None:
    row, causal = ROWS[number]
    dtype = tuple(RELATIVE)[number % 2]
    q = torch.randn(2, 1500, 6, row.head_dim, device=HERE).to(dtype)
    k = torch.randn(2, 1777, 2, row.head_dim, device=HERE).to(dtype)
    v = torch.randn(2, 1777, 2, row.head_dim_v, device=HERE).to(dtype)
    inputs = Inputs(q, k, v)
    problem = AttentionProblem.from_inputs(inputs, causal=causal)
    tile = HopperConfig(problem.dtype_name, row.head_dim, row.head_dim_v, **asdict(row.shape))
    config = specialise(tile, problem)
    out, lse = run(problem, inputs, config)
    assert_right(problem, inputs, out, lse)
    again = run(problem, inputs, config)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_unlike_length(kind: str, seed: int) -> None:
    problem, inputs = draw(kind, seed)
    assert_right(problem, inputs, *run(problem, inputs))


@pytest.mark.gpu
@needs_hopper
def test_a_thousand_launches_on_four_streams() -> None:
    pool = [draw(kind, seed) for kind in KINDS for seed in range(0, SEEDS, 2)]
    alone = [run(*item) for item in pool]
    torch.cuda.synchronize()
    chance, streams = random.Random(0), [torch.cuda.Stream() for _ in range(4)]
    for _ in range(20):
        found = []
        for _ in range(50):
            number = chance.randrange(len(pool))
            with torch.cuda.stream(chance.choice(streams)):
                found.append((number, run(*pool[number])))
        torch.cuda.synchronize()
        for number, (out, lse) in found:
            assert torch.equal(out, alone[number][0]) and torch.equal(lse, alone[number][1]), pool[number][0].describe()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_replay(kind: str) -> None:
    problem, inputs = draw(kind, 3)
    alone, _ = run(problem, inputs)
    out, lse = torch.empty_like(alone), torch.empty((*alone.shape[:-3], alone.shape[-2], alone.shape[-3]), device=HERE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            KERNEL.forward(problem, inputs, out, lse)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, alone)
