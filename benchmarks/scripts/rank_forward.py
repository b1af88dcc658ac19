"""What the forward of one rank takes on one GPU, by the launches that it has and by one launch over ranges.

    python benchmarks/scripts/rank_forward.py --out $OUT --seconds 20

The keys are there. "Apart" are a call of packed blocks whose keys are copied, or several that are merged where a window
has two sides; and of up to four blocks a launch each, on two streams. One launch reads each key where it lies. Of a
ring it times the forward of all steps over shards that are there, with partial outputs rounded to bf16 and in f32.
"""

from __future__ import annotations

import faulthandler
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from arriving_keys import Call, Case, dense_problem, microseconds, problem_of, two_lanes
from context_parallel import packed_documents
from gpu_run import device_or_exit, options, run_parts

from flashlane import jit
from flashlane.core.problem import CallOptions
from flashlane.distributed import attend as rank_attend
from flashlane.distributed import launches
from flashlane.distributed.attend import Results, Settings, State, accumulate, attend, merge
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import Packed
from flashlane.distributed.layout import token_indices
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.plan import Division, gather_calls, ring_calls
from flashlane.distributed.ranged import blocks_of_all, ranges_of
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.forward.kernel import KERNEL

CASES = {
    "documents": Case(packed_documents(32768), heads=(32, 8)),
    "documents, 16k": Case(packed_documents(16384), heads=(32, 8)),
    "documents, window 1024,256": Case(packed_documents(32768), heads=(32, 8), left=1024, right=256),
    "8k, window 1024,256": Case((16384,), heads=(32, 8), left=1024, right=256),
    "8k, window 1024,0": Case((16384,), heads=(32, 8), left=1024),
    "4k, D 256": Case((8192,), heads=(16, 8), head_dim=256),
}
"""Of two ranks: blocks that are many, that have two windows, or that have wide heads."""
RELATIVE = 1e-2
"""Largest ‖one launch − default‖ / ‖default‖ of bf16 outputs."""


def launched_apart(call: Call, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], None]:
    """Packed blocks with copies of their keys, by the functions of context parallelism for calls with modifiers."""
    q, k, v = (t[None] for t in (call.q, call.k, call.v))
    settings = Settings(CallOptions(scale=call.case.head_dim**-0.5))
    results = Results(out[None], lse[None])

    def run() -> None:
        if call.calls.disjoint:
            attend(results, q, k, v, call.calls.calls[0], Modifiers(), settings)
        else:
            merge(results, q, k, v, call.calls, Modifiers(), settings)

    return run


def one_launch(call: Call, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], object]:
    """All blocks as ranges; packed ones by the launch that context parallelism prepares."""
    if not any(isinstance(each, Packed) for each in call.calls.calls):
        run = KERNEL.prepare_ranges(call.problem, call.ranges, call.inputs, out)
        return lambda: run(call.q, call.k, call.v, out, lse, None)
    q, kv = call.q[None], (call.k[None], call.v[None])
    settings = Settings(CallOptions(scale=call.case.head_dim**-0.5))
    found = launches.launches_of({}, call.calls, q, kv, kv, out[None], settings)
    if found is None:
        raise ValueError(f"{call.case} has no one launch")
    return lambda: found[0].forward(q, kv, out[None], lse[None])


def host_microseconds(run: Callable[[], object], count: int = 20) -> float:
    """Until a call returns, while the GPU is behind."""
    torch.cuda._sleep(100_000_000)
    began = time.perf_counter()
    for _ in range(count):
        run()
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    return round(seconds * 1e6 / count, 1)


def measured(name: str) -> dict[str, Any]:
    """Microseconds of both ranks, and of the host; outputs of both ways are compared before."""
    row: dict[str, Any] = {"name": name, "ok": True, "host": {}}
    runs: dict[str, Callable[[], object]] = {}
    for rank in (0, 1):
        call = Call(replace(CASES[name], rank=rank))
        packed = any(isinstance(each, Packed) for each in call.calls.calls)
        (out, lse), (expected, right) = call.empty(), call.empty()
        one = one_launch(call, out, lse)
        one()
        if packed:
            default = launched_apart(call, expected, right)
            default()
            error = float((out.float() - expected.float()).norm() / expected.float().norm())
            row["ok"] &= error < RELATIVE and bool((lse - right).abs().max() < 1e-3)
            row["host"] |= {
                f"rank {rank}: apart": host_microseconds(default),
                f"rank {rank}: one launch": host_microseconds(one),
            }
        else:
            default = two_lanes(call)
        runs |= {f"rank {rank}: apart": default, f"rank {rank}: one launch": one}
    row["microseconds"] = microseconds(runs, rounds=5, count=10)
    return row


def ring(division: Division, rank: int, f32: bool, tensors: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A rank's output over the shards of all ranks, merged in the order of a ring."""
    shards = [token_indices(division.layout, division.lengths, division.ranks, each) for each in range(division.ranks)]
    q, *_ = (t.index_select(1, shards[rank].to(t.device)) for t in tensors)
    kv = [[t.index_select(1, shard.to(t.device)) for t in tensors[1:]] for shard in shards]
    settings = Settings(CallOptions(scale=q.shape[3] ** -0.5), kernel=KERNEL.tag)

    def run() -> torch.Tensor:
        state = State(q, q.shape[3])
        with mock.patch.object(rank_attend, "F32_PARTIALS", f32):
            for step in range(division.ranks):
                shard = (rank - step) % division.ranks
                accumulate(state, q, *kv[shard], ring_calls(division, rank, shard, False, False), Modifiers(), settings)
        return state.finish(Modifiers())[0]

    return run


RINGS = {"ring 8k, 2 ranks": (8192, 2), "ring 8k, 4 ranks": (8192, 4), "ring 4k, 2 ranks": (4096, 2)}
"""Tokens of each GPU, and ranks."""


def measured_ring(name: str) -> dict[str, Any]:
    """Microseconds of a ring's forward by both kinds of partial outputs, which are merged in f32."""
    tokens, ranks = RINGS[name]
    division = Division("zigzag", (tokens * ranks,), ranks, -1, 0)
    tensors = [torch.randn(1, tokens * ranks, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8)]
    runs: dict[str, Callable[[], object]] = {}
    for rank in (0, ranks - 1):
        rounded, wide = (ring(division, rank, f32, tensors) for f32 in (False, True))
        error = float((rounded().float() - wide().float()).norm() / wide().float().norm())
        runs |= {f"rank {rank}: bf16 partial outputs": rounded, f"rank {rank}: f32 partial outputs": wide}
    return {"name": name, "ok": error < RELATIVE, "difference": error, "microseconds": microseconds(runs, 5, 6)}


def sources() -> Iterator[KernelSource]:
    """All kernels."""
    for case in (replace(case, rank=rank) for case in CASES.values() for rank in (0, 1)):
        calls = gather_calls(case.division, case.rank, True, False)
        blocks = blocks_of_all(calls) or []
        problem = problem_of(case, blocks)
        yield replace(KERNEL.config(problem), ranges=True).source()
        if len(blocks) == 1:
            yield KERNEL.config(dense_problem(problem, blocks[0])).source()
        for each in calls.calls:
            if isinstance(each, Packed):
                rows, keys = ranges_of(each.blocks).longest
                like = each.blocks[0]
                found = replace(problem, batch=len(each.sequences), seqlen_q=rows, seqlen_k=keys)
                yield KERNEL.config(replace(found, window_left=like.left, window_right=like.right)).source()
            else:
                yield KERNEL.config(dense_problem(problem, each)).source()


def ring_sources() -> Iterator[KernelSource]:
    """Those of the rings, for both kinds of partial outputs."""
    for tokens, ranks in RINGS.values():
        division = Division("zigzag", (tokens * ranks,), ranks, -1, 0)
        like = problem_of(Case(division.lengths, heads=(32, 8)), [Block(0, 0, 1, 0, 1, -1, 0)])
        for rank, other in itertools.product((0, ranks - 1), range(ranks)):
            for block in ring_calls(division, rank, other, False, False).calls:
                config = KERNEL.config(dense_problem(like, block))
                yield config.source()
                yield replace(config, split=True, combine_in_kernel=False).source()


def compile_ahead() -> dict[str, Any]:
    """All kernels at once."""
    found = list(dict.fromkeys((*sources(), *ring_sources())))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), found))
    return {"kernels": len(found)}


def main() -> None:
    arguments = options(__doc__, "rank_forward", 20.0).parse_args()
    device_or_exit()
    faulthandler.dump_traceback_later(arguments.seconds + 15, exit=True)
    parts: list[tuple[str, Callable[[], Any]]] = [("kernels", compile_ahead)]
    parts += [(name, lambda name=name: measured(name)) for name in CASES]
    parts += [(name, lambda name=name: measured_ring(name)) for name in RINGS]
    run_parts(parts, arguments.seconds, arguments.out / "rank_forward.json")


if __name__ == "__main__":
    main()
