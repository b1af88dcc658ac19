"""What the backward of one rank takes without messages, on one GPU: where a share of the ideal is lost.

    python benchmarks/scripts/rank_backward.py --out $OUT --seconds 30

The ideal is one GPU's backward of the whole problem, divided by the number of ranks. Causal, layout zigzag, 32/8 heads,
head dim 128, bf16. The last rank's two chunks are neighbours and have one launch; the other ranks have two.
"""

from __future__ import annotations

import faulthandler
import itertools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from gpu_run import device_or_exit, options, run_parts, time_interleaved

from flashlane import jit
from flashlane.core.problem import AttentionProblem, CallOptions
from flashlane.distributed.attend import Partial, Settings
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import add_rows
from flashlane.distributed.functional import head_bounds, stride_by_copies
from flashlane.distributed.launches import Launch
from flashlane.distributed.plan import Division, gather_calls
from flashlane.inspect.prebuild import sources_of

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PROBLEMS = {"8k, 2 ranks": (8192, 2), "4k, 2 ranks": (4096, 2), "8k, 4 ranks": (8192, 4), "4k, 4 ranks": (4096, 4)}
"""Tokens of each GPU, and ranks."""
ALL, GROUPS = (0, KV_HEADS), head_bounds(stride_by_copies(KV_HEADS)[1], KV_HEADS)
"""The bounds of groups of KV heads: one, and those whose gradients return one after another by copies."""


def blocks_of(division: Division, rank: int) -> list[Block]:
    """The blocks of a rank; each has a launch."""
    calls = gather_calls(division, rank, True, False).calls
    return [each for each in calls if isinstance(each, Block)]


def divisions(name: str) -> Iterator[tuple[Division, int, tuple[int, ...]]]:
    """Of a problem: one GPU's call of everything, then for some ranks all KV heads at once and in groups."""
    tokens, ranks = PROBLEMS[name]
    yield Division("contiguous", (tokens * ranks,), 1, -1, 0), 0, (0, KV_HEADS)
    for rank, bounds in itertools.product((0, 1) if ranks == 2 else (0, ranks - 1), (ALL, GROUPS)):
        yield Division("zigzag", (tokens * ranks,), ranks, -1, 0), rank, bounds


class RankCalls:
    """The launches of a rank's blocks over keys that are there, for groups of KV heads."""

    def __init__(self, division: Division, rank: int, bounds: tuple[int, ...], device: torch.device) -> None:
        self.blocks = blocks_of(division, rank)
        rows, keys = max(each.q_stop for each in self.blocks), max(each.k_stop for each in self.blocks)
        shapes = (rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (rows, HEADS)
        self.q, self.k, self.v, self.do = (
            torch.randn(1, *shape, HEAD_DIM, dtype=torch.bfloat16, device=device) for shape in shapes
        )
        self.out, self.dq = torch.empty_like(self.q), torch.empty_like(self.q)
        self.streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        settings = Settings(CallOptions(scale=HEAD_DIM**-0.5), needs_grad=True)
        share = HEADS // KV_HEADS
        self.groups = []
        for first, stop in itertools.pairwise(bounds):
            heads, kv_heads = slice(first * share, stop * share), slice(first, stop)
            q, out = self.q[:, :, heads], self.out[:, :, heads]
            kv = self.k[:, :, kv_heads], self.v[:, :, kv_heads]
            runs = []
            for block in self.blocks:
                one = Launch(block, q, kv, out, settings)
                lse = torch.empty(1, q.shape[2], block.q_stop - block.q_first, device=device)
                one.forward(q, kv, out, lse)
                runs.append((block, one, lse))
            self.groups.append((q, kv, out, self.do[:, :, heads], self.dq[:, :, heads], runs))
        torch.cuda.synchronize()

    def backward(self) -> list[list[Partial]]:
        """The gradients of each group, its blocks on two streams, as :mod:`flashlane.distributed.allgather` does it."""
        self.streams[1].wait_stream(self.streams[0])
        gradients = []
        for q, kv, out, do, dq, runs in self.groups:
            partials = []
            for at, (block, one, lse) in enumerate(runs):
                with torch.cuda.stream(self.streams[at % 2]):
                    dk, dv = one.backward(q, kv, out, lse, do, dq)
                partials.append(Partial(slice(block.k_first, block.k_stop), dk, dv))
            gradients.append(partials)
        self.streams[0].wait_stream(self.streams[1])
        return gradients

    def sums(self, found: list[list[Partial]]) -> None:
        """The f32 gradients of all keys, as they are sent: the sum over blocks."""
        for (_, kv, *_), partials in zip(self.groups, found, strict=True):
            for i, like in enumerate(kv):
                parts = [(each.keys, (each.dk, each.dv)[i]) for each in partials]
                whole = [at for at, (keys, _) in enumerate(parts) if keys == slice(0, like.shape[1])]
                total = parts.pop(whole[0])[1].float()
                for keys, part in parts:
                    add_rows(total, keys, part)


def compile_ahead() -> dict[str, Any]:
    """All kernels at once."""
    problems = {
        AttentionProblem(
            batch=1, heads=kv_heads * HEADS // KV_HEADS, kv_heads=kv_heads, seqlen_q=block.q_stop - block.q_first,
            seqlen_k=block.k_stop - block.k_first, head_dim=HEAD_DIM, head_dim_v=HEAD_DIM, dtype=torch.bfloat16,
            scale=HEAD_DIM**-0.5, window_left=block.left, window_right=block.right, needs_grad=True, arch="sm_90a",
        )
        for name in PROBLEMS
        for division, rank, bounds in divisions(name)
        for block in blocks_of(division, rank)
        for kv_heads in {stop - first for first, stop in itertools.pairwise(bounds)}
    }  # fmt: skip
    sources = list(dict.fromkeys(source for problem in problems for source in sources_of(problem)))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), sources))
    return {"kernels": len(sources)}


def measured(name: str, device: torch.device) -> dict[str, Any]:
    """Milliseconds of the backward's parts, and the kernels' share of the ideal."""
    ranks = PROBLEMS[name][1]
    (one, *others) = divisions(name)
    whole = RankCalls(*one, device)
    timed: dict[str, Callable[[], object]] = {"whole problem": whole.backward}
    launches = {}
    for division, rank, bounds in others:
        calls, what = RankCalls(division, rank, bounds, device), f"rank {rank}"
        launches[what] = len(calls.blocks)
        if bounds == GROUPS:
            timed[f"{what}: kernels in groups of heads"] = calls.backward
            continue
        timed[f"{what}: kernels"] = calls.backward
        found = calls.backward()
        timed[f"{what}: sums of dK and dV"] = lambda c=calls, f=found: c.sums(f)
    ms = {key: statistics.median(each) for key, each in time_interleaved(timed, 7, 25.0).items()}
    ideal = ms["whole problem"] / ranks
    shares = {key: round(ideal / value, 4) for key, value in ms.items() if "kernels" in key}
    return {"ms": {key: round(value, 4) for key, value in ms.items()}, "share of the ideal": shares,
            "launches": launches}  # fmt: skip


def main() -> None:
    given = options(__doc__, "rank_backward", 30.0).parse_args()
    device = device_or_exit()
    faulthandler.dump_traceback_later(given.seconds + 15, exit=True)
    parts = [("kernels", compile_ahead), *((name, lambda name=name: measured(name, device)) for name in PROBLEMS)]
    run_parts(parts, given.seconds, given.out / "rank_backward.json")


if __name__ == "__main__":
    main()
