"""What the backward of one rank takes without messages, on one GPU: where a share of the ideal is lost.

    python benchmarks/scripts/rank_backward.py --out $OUT --seconds 30

The ideal is one GPU's backward of the whole problem, divided by the number of ranks. Causal, layout zigzag, 32/8 heads,
head dim 128, bf16. The last rank's two chunks are neighbours and have one launch; the other ranks have two, or one over
two ranges of queries. That one is held against f64, against two launches, and against one GPU's launch bit by bit.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from gpu_run import device_or_exit, options, run_parts

from flashlane import jit
from flashlane.bench.measure.timing import SteadyClock, drawn_order
from flashlane.core.problem import AttentionProblem, CallOptions
from flashlane.distributed import attend
from flashlane.distributed.attend import Partial, Settings
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import add_rows
from flashlane.distributed.functional import head_bounds
from flashlane.distributed.launches import Launch, RangedBackward
from flashlane.distributed.plan import Division, gather_calls
from flashlane.distributed.ranged import query_ranges_of
from flashlane.inspect.prebuild import sources_of
from flashlane.kernels.hopper.backward.kernel import config_of_rank
from flashlane.kernels.hopper.backward.launch import PreparedBackward
from flashlane.kernels.hopper.backward.one_cta.launch import schedule

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PROBLEMS = {"8k, 2 ranks": (8192, 2), "4k, 2 ranks": (4096, 2), "8k, 4 ranks": (8192, 4), "4k, 4 ranks": (4096, 4)}
"""Tokens of each GPU, and ranks."""
ALL, GROUPS = (0, KV_HEADS), head_bounds((1, KV_HEADS - 2, 1), KV_HEADS)
"""The bounds of groups of KV heads: one, and small ones first and last, whose gradients return one after another."""


def blocks_of(division: Division, rank: int) -> list[Block]:
    """The blocks of a rank; each has a launch."""
    calls = gather_calls(division, rank, True, False).calls
    return [each for each in calls if isinstance(each, Block)]


@dataclass(frozen=True)
class Kind:
    """What calls are like besides their blocks."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False

    def problem(self, block: Block, heads: slice) -> AttentionProblem:
        """A block's problem, of some KV heads."""
        count = heads.stop - heads.start
        return AttentionProblem(
            batch=1, heads=count * self.heads // self.kv_heads, kv_heads=count, seqlen_q=block.q_stop - block.q_first,
            seqlen_k=block.k_stop - block.k_first, head_dim=self.head_dim, head_dim_v=self.head_dim, dtype=self.dtype,
            scale=self.head_dim**-0.5, window_left=block.left, window_right=block.right, needs_grad=True,
            deterministic=self.deterministic, arch="sm_90a",
        )  # fmt: skip


PLAIN = Kind()


def divisions(name: str) -> Iterator[tuple[Division, int, tuple[int, ...]]]:
    """The calls of a problem: one GPU's call of everything, then for some ranks all KV heads at once and in groups."""
    tokens, ranks = PROBLEMS[name]
    yield Division("contiguous", (tokens * ranks,), 1, -1, 0), 0, (0, KV_HEADS)
    for rank, bounds in itertools.product((0, 1) if ranks == 2 else (0, ranks - 1), (ALL, GROUPS)):
        yield Division("zigzag", (tokens * ranks,), ranks, -1, 0), rank, bounds


class RankCalls:
    """The launches of a rank's blocks over keys that are there, for groups of KV heads."""

    def __init__(
        self, blocks: list[Block], bounds: tuple[int, ...], device: torch.device, kind: Kind = PLAIN,
        tensors: tuple[torch.Tensor, ...] | None = None, shares: bool = False,
    ) -> None:  # fmt: skip
        self.blocks = blocks
        rows, keys = max(each.q_stop for each in self.blocks), max(each.k_stop for each in self.blocks)
        shapes = (rows, kind.heads), (keys, kind.kv_heads), (keys, kind.kv_heads), (rows, kind.heads)
        self.q, self.k, self.v, self.do = tensors or (
            torch.randn(1, *shape, kind.head_dim, dtype=kind.dtype, device=device) for shape in shapes
        )
        self.out, self.dq = torch.empty_like(self.q), torch.full_like(self.q, math.nan)
        self.streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        options = CallOptions(scale=kind.head_dim**-0.5, deterministic=kind.deterministic)
        settings = Settings(options, needs_grad=True)
        share = kind.heads // kind.kv_heads
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
        with mock.patch.object(attend, "F32_GRADIENTS", shares):
            self.backward()
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

    def one_launch(self) -> Callable[[], list[list[Partial]]] | None:
        """:meth:`backward` with one launch for both blocks; None where no kernel has it."""
        groups = []
        for q, kv, out, do, dq, runs in self.groups:
            one = RangedBackward.of([block for block, *_ in runs], [each for _, each, _ in runs], q, kv)
            if one is None:
                return None
            lse = torch.cat([lse for *_, lse in sorted(runs, key=lambda run: run[0].q_first)], 2)
            groups.append((one, (q, kv, out, lse, do, dq)))

        def run() -> list[list[Partial]]:
            partials = []
            for one, tensors in groups:
                gradients = one.run(*tensors)
                if gradients is None:
                    raise AssertionError("the launch takes no such strides")
                partials.append([Partial(one.keys, *gradients)])
            return partials

        return run

    def sums(self, found: list[list[Partial]]) -> list[torch.Tensor]:
        """The f32 gradients of all keys, as they are sent: the sum over blocks."""
        totals = []
        for (_, kv, *_), partials in zip(self.groups, found, strict=True):
            for i, like in enumerate(kv):
                parts = [(each.keys, (each.dk, each.dv)[i]) for each in partials]
                whole = [at for at, (keys, _) in enumerate(parts) if keys == slice(0, like.shape[1])]
                total = parts.pop(whole[0])[1].float() if whole else torch.zeros_like(like, dtype=torch.float32)
                for keys, part in parts:
                    add_rows(total, keys, part)
                totals.append(total)
        return totals

    def reference(self) -> list[torch.Tensor]:
        """dQ, dK and dV by the formula in f64."""
        q, k, v = (t.double().requires_grad_() for t in (self.q, self.k, self.v))
        share, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
        for each in self.blocks:
            rows, keys = slice(each.q_first, each.q_stop), slice(each.k_first, each.k_stop)
            part = [t[0, keys].repeat_interleave(share, 1) for t in (k, v)]
            scores = torch.einsum("ihd,jhd->hij", q[0, rows], part[0]) * scale
            i = torch.arange(each.q_stop - each.q_first, device=q.device)[:, None] + scores.shape[2] - scores.shape[1]
            j = torch.arange(scores.shape[2], device=q.device)
            hidden = (j > i + each.right) if each.right >= 0 else torch.zeros_like(j > i)
            hidden |= (j < i - each.left) if each.left >= 0 else False
            shares = torch.softmax(scores.masked_fill(hidden, -math.inf), 2)
            out = torch.einsum("hij,jhd->ihd", shares, part[1])
            torch.autograd.backward(out, self.do[0, rows].double())
        return [t.grad for t in (q, k, v) if t.grad is not None]


CHECKED = [
    ("a zigzag rank, even", Division("zigzag", (4096,), 2, -1, 0), 0, Kind(8, 2)),
    ("a zigzag rank, odd", Division("zigzag", (3001,), 2, -1, 0), 0, Kind(8, 2)),
    ("rank 1 of 4", Division("zigzag", (2777,), 4, -1, 0), 1, Kind(6, 2)),
    ("chunks of a few rows", Division("zigzag", (37,), 3, -1, 0), 1, Kind(2, 1)),
    ("a window", Division("zigzag", (3001,), 2, 700, 0), 0, Kind(4, 2)),
    ("deterministic", Division("zigzag", (3001,), 2, -1, 0), 0, Kind(4, 2, deterministic=True)),
    ("deterministic, rank 2 of 4", Division("zigzag", (4441,), 4, -1, 0), 2, Kind(4, 1, deterministic=True)),
    ("head dim 64", Division("zigzag", (3001,), 2, -1, 0), 0, Kind(8, 2, 64)),
    ("head dim 64, deterministic", Division("zigzag", (3001,), 2, -1, 0), 0, Kind(8, 2, 64, deterministic=True)),
    ("a window of two sides", Division("zigzag", (3001,), 2, 700, 200), 0, Kind(4, 2)),
    ("two sides, deterministic", Division("zigzag", (2777,), 3, 300, 90), 1, Kind(4, 2, 64, deterministic=True)),
    ("no left side, 40 on the right side", Division("zigzag", (2049,), 2, -1, 40), 0, Kind(4, 4, 96)),
    ("head dim 96, f16", Division("zigzag", (2049,), 3, -1, 0), 0, Kind(4, 4, 96, torch.float16)),
]
"""Ranks with two blocks whose backward is checked."""
RELATIVE = {torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""Largest ‖gradient − ref‖ / ‖ref‖ against f64."""
REPEATS = 30


def checked(division: Division, rank: int, kind: Kind, device: torch.device) -> dict[str, Any]:
    """One launch of two ranges against f64 and against two launches; the same bits at every run where they have to."""
    torch.manual_seed(5)
    calls = RankCalls(blocks_of(division, rank), (0, kind.kv_heads), device, kind)
    two = calls.sums(calls.backward())
    two.insert(0, calls.dq.clone())
    run = calls.one_launch()
    if run is None:
        return {"ok": False, "error": "no such launch"}
    calls.dq.fill_(math.nan)
    one = calls.sums(run())
    one.insert(0, calls.dq.clone())
    reference = calls.reference()

    def errors(found: list[torch.Tensor]) -> list[float]:
        pairs = zip(found, reference, strict=True)
        return [float(((a.double() - b).norm() / b.norm()).nan_to_num(math.inf)) for a, b in pairs]

    wrong = 0
    for _ in range(REPEATS):
        calls.dq.fill_(math.nan)
        dk, dv = calls.sums(run())
        equal = torch.equal(dk, one[1]) and torch.equal(dv, one[2])
        wrong += not (equal and (torch.equal(calls.dq, one[0]) or not kind.deterministic))
    of_one, of_two = errors(one), errors(two)
    right = all(a <= RELATIVE[kind.dtype] and a <= 1.02 * b + 1e-5 for a, b in zip(of_one, of_two, strict=True))
    return {"ok": right and not wrong and len(calls.blocks) == 2, "one launch": of_one, "two": of_two,
            "repeats with other bits": wrong, "blocks": [str(each) for each in calls.blocks]}  # fmt: skip


def as_one_gpu(kind: Kind, first: int, length: int, device: torch.device) -> dict[str, Any]:
    """Two ranges that are one sequence, the first of whole m-blocks: the bits of one range's launch, as a rank's."""
    whole = Block(0, 0, length, 0, length, -1, 0)
    blocks = [replace(whole, q_stop=first, k_stop=first), replace(whole, q_first=first)]
    torch.manual_seed(6)
    one = RankCalls([whole], (0, kind.kv_heads), device, kind, shares=True)
    partials = one.backward()
    expected = [one.dq.clone(), partials[0][0].dk, partials[0][0].dv]
    tensors = one.q, one.k, one.v, one.do
    run = RankCalls(blocks, (0, kind.kv_heads), device, kind, tensors)
    run.out.copy_(one.out)
    ranged = run.one_launch()
    if ranged is None:
        return {"ok": False, "error": "no such launch"}
    run.groups[0][-1][0][2].copy_(one.groups[0][-1][0][2][:, :, :first])
    run.groups[0][-1][1][2].copy_(one.groups[0][-1][0][2][:, :, first:])
    found = run.one_launch()()[0][0]  # type: ignore[misc]
    same = [torch.equal(a.to(b.dtype), b) for a, b in zip((run.dq, found.dk, found.dv), expected, strict=True)]
    return {"ok": all(same[0 if kind.deterministic else 1 :]), "same bits of dq, dk, dv": same}


def compile_ahead() -> dict[str, Any]:
    """All kernels at once."""
    calls = [(*each, PLAIN) for name in PROBLEMS for each in divisions(name)]
    calls += [(division, rank, (0, kind.kv_heads), kind) for _, division, rank, kind in CHECKED]
    problems, both = set(), set()
    for division, rank, bounds, kind in calls:
        for heads in itertools.starmap(slice, itertools.pairwise(bounds)):
            blocks = blocks_of(division, rank)
            own = {kind.problem(block, heads) for block in blocks}
            problems |= own
            both |= {config_of_rank(problem) for problem in own}
            if len(blocks) == 2:
                like, ranges, keys = query_ranges_of(blocks)
                rows = max(each.q_stop for each in blocks)
                joined = replace(like, q_first=0, q_stop=rows, k_first=keys.start, k_stop=keys.stop)
                both.add(config_of_rank(kind.problem(joined, heads), ranges))
    sources = [source for problem in problems for source in sources_of(problem)]
    sources += [source for config in both if config is not None for source in config.sources()]
    sources = list(dict.fromkeys(sources))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), sources))
    return {"kernels": len(sources)}


def heated(
    calls: dict[str, Callable[[], object]], heat: Callable[[], object], rounds: int = 9, heat_ms: float = 30.0
) -> dict[str, float]:
    """The median milliseconds of each call, in a random order each round, and after the same work before each.

    A GPU at its power limit runs what follows an idle or a memory-bound call some percent faster than what follows
    products of matrices. So each call comes after so many milliseconds of ``heat``.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names, clock = sorted(calls), SteadyClock()
    once = {name: clock.time(call, 1)[0] for name, call in (*calls.items(), ("", heat))}
    for _, index in drawn_order(len(names), rounds, seed=7):
        for _ in range(max(1, round(heat_ms / once[""]))):
            heat()
        name = names[index]
        samples[name] += clock.time(calls[name], max(2, round(15.0 / once[name])))
    return {name: statistics.median(each) for name, each in samples.items()}


def with_section(calls: RankCalls, section: int, device: torch.device) -> Callable[[], object]:
    """The one launch with another number of heads in a section of the L2 head swizzle, and its sums."""
    ((q, kv, out, do, dq, runs),) = calls.groups
    like, ranges, keys = query_ranges_of(calls.blocks)
    joined = replace(like, q_first=0, q_stop=q.shape[1], k_first=keys.start, k_stop=keys.stop)
    problem = PLAIN.problem(joined, slice(0, KV_HEADS))
    config = config_of_rank(problem, ranges)
    if config is None:
        raise AssertionError("no such launch")
    config = replace(config, heads_per_section=section)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    prepared = PreparedBackward(
        config, schedule(config, problem, sms, ranges), problem, q.shape, kv[0].shape, device.index or 0, ranges=ranges
    )
    one = RangedBackward(prepared.repeated(device, q.dtype), keys)
    lse = torch.cat([lse for *_, lse in sorted(runs, key=lambda run: run[0].q_first)], 2)
    return lambda: one.run(q, kv, out, lse, do, dq)


def measured(name: str, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a rank's backward with the sums of dK and dV over its launches, and its share of the ideal."""
    ranks = PROBLEMS[name][1]
    (one, *others) = divisions(name)
    single_rank = RankCalls(blocks_of(*one[:2]), one[2], device)
    timed: dict[str, Callable[[], object]] = {"whole problem": single_rank.backward}
    for division, rank, bounds in others:
        what = f"rank {rank}" if bounds == ALL else f"rank {rank}, groups of heads"
        blocks = blocks_of(division, rank)
        before, wide = (RankCalls(blocks, bounds, device, shares=shares) for shares in (False, True))
        timed[f"{what}: dK and dV in bf16"] = lambda c=before: c.sums(c.backward())
        timed[f"{what}: dK and dV in f32"] = lambda c=wide: c.sums(c.backward())
        ranged = wide.one_launch()
        if ranged is not None:
            timed[f"{what}: f32, one launch"] = lambda c=wide, r=ranged: c.sums(r())
            for section in (2, 4, 8) if bounds == ALL else ():
                timed[f"{what}: f32, one launch, {section} heads a section"] = with_section(wide, section, device)
    ms = heated(timed, single_rank.backward)
    ideal = ms["whole problem"] / ranks
    return {"ms": {key: round(value, 4) for key, value in ms.items()},
            "share of the ideal": {key: round(ideal / value, 4) for key, value in ms.items()}}  # fmt: skip


def main() -> None:
    parser = options(__doc__, "rank_backward", 30.0)
    parser.add_argument("--only-times", action="store_true", help="no checks")
    parser.add_argument("--check", default="", help="only checks whose name has this")
    arguments = parser.parse_args()
    device = device_or_exit()
    faulthandler.dump_traceback_later(arguments.seconds + 15, exit=True)
    parts = [("kernels", compile_ahead)]
    parts += [(name, lambda call=call: checked(*call, device)) for name, *call in CHECKED if arguments.check in name]
    for kind in (Kind(8, 2), Kind(32, 16), Kind(4, 1, deterministic=True), Kind(4, 2, 64, deterministic=True)):
        what = f"as one GPU: {kind}"
        if arguments.check in what:
            parts.append((what, lambda kind=kind: as_one_gpu(kind, 1920, 3777, device)))
    if arguments.only_times:
        parts = parts[:1]
    parts += [(name, lambda name=name: measured(name, device)) for name in PROBLEMS]
    run_parts(parts, arguments.seconds, arguments.out / "rank_backward.json")


if __name__ == "__main__":
    main()
