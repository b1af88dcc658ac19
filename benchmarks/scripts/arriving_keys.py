"""One launch over ranges of keys, and keys that arrive while it runs: right and how fast, on one GPU.

    python benchmarks/scripts/arriving_keys.py --out $OUT --seconds 50

What context parallelism does between GPUs happens here on one: keys lie in pinned host memory and are copied, chunk by
chunk, into memory that holds NaN until then. The host sets a flag before each copy, when the kernel already runs; a
flag is set after each. Only DMA and the stream's own writes are used: a kernel that waits has all SMs. Each kernel runs
once before, over keys that are there: to load one may wait for all streams, of which one then waits for the host.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_run import run_parts

from flashlane import jit
from flashlane.bench.measure.timing import SteadyClock
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import Arriving
from flashlane.distributed.blocks import Block
from flashlane.distributed.plan import Division, gather_calls, gather_plan
from flashlane.distributed.ranged import arriving_chunks_of, blocks_of_all, chunks_of, edges_of, ranges_of, window_of
from flashlane.jit import launch
from flashlane.kernels.hopper.forward.kernel import KERNEL
from flashlane.kernels.hopper.forward.ranged import as_dense
from flashlane.reference.naive import reference_attention

HERE = torch.device("cuda")
RELATIVE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Largest ‖out − ref‖ / ‖ref‖ against f64."""
LIMIT = 5.0
"""Seconds that a kernel waits for a chunk before it ends with an error."""


@dataclass(frozen=True)
class Case:
    """A rank's part of a call."""

    lengths: tuple[int, ...]
    ranks: int = 2
    rank: int = 0
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    left: int = -1
    right: int = 0
    layout: str = "zigzag"

    @property
    def division(self) -> Division:
        return Division(self.layout, self.lengths, self.ranks, self.left, self.right)  # type: ignore[arg-type]

    def __str__(self) -> str:
        mask = {(-1, 0): "causal", (-1, -1): "full"}.get((self.left, self.right), f"window {self.left},{self.right}")
        size = f"H{self.heads[0]}/{self.heads[1]} D{self.head_dim} {mask}"
        return f"{self.layout} {self.lengths} rank {self.rank} of {self.ranks} {size}"


ONE_LAUNCH = [
    *(Case((length,), rank=rank) for length in (4096, 1001) for rank in (0, 1)),
    Case((777, 0, 1, 2050, 130, 63), 3, 1),
    Case((3001,), 4, 2, heads=(6, 1), head_dim=64),
    Case((1500,), 2, 1, heads=(2, 2), head_dim=256, dtype=torch.float16),
    Case((2000,), 2, 0, left=300),
    Case((900, 411), 2, 1, right=-1),
    Case((2400,), 3, 1, layout="contiguous"),
    Case((2000,), 2, 0, left=300, right=100),
    Case((777, 0, 1, 2050, 130, 63), 3, 1, left=200, right=60),
    Case((1500,), 2, 0, heads=(2, 2), head_dim=256, dtype=torch.float16, right=333),
]
ARRIVE = [
    Case((8192,), rank=0),
    Case((8192,), rank=1),
    Case((5001,), 3, 2, head_dim=64),
    Case((3333,), 2, 0, heads=(2, 2), head_dim=256, dtype=torch.float16),
    Case((6007,), 2, 1, left=2500),
    Case((6007,), 2, 0, left=2500, right=300),
]


def problem_of(case: Case, blocks: list[Block]) -> AttentionProblem:
    """The blocks of a case as packed sequences."""
    (left, right), (rows, keys) = window_of(blocks), ranges_of(blocks).longest
    return AttentionProblem(
        batch=len(blocks), heads=case.heads[0], kv_heads=case.heads[1], seqlen_q=rows, seqlen_k=keys,
        head_dim=case.head_dim, head_dim_v=case.head_dim, dtype=case.dtype, scale=case.head_dim**-0.5,
        window_left=left, window_right=right, varlen=True, arch="sm_90a",
    )  # fmt: skip


def dense_problem(problem: AttentionProblem, block: Block) -> AttentionProblem:
    """A block alone, with its own window."""
    return replace(
        problem, batch=1, varlen=False, seqlen_q=block.q_stop - block.q_first, seqlen_k=block.k_stop - block.k_first,
        window_left=block.left, window_right=block.right,
    )  # fmt: skip


class Call:
    """A case's tensors on the GPU: queries, the keys of all ranks, and those of this one."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case, self.plan = case, gather_plan(case.division, case.rank)
        calls = gather_calls(case.division, case.rank, True, False)
        blocks = blocks_of_all(calls)
        arriving_chunks = arriving_chunks_of(case.division, case.rank)
        if blocks is None or arriving_chunks is None:
            raise ValueError(f"{case} is no call of one launch")
        self.blocks, self.calls, self.arriving_chunks = blocks, calls, arriving_chunks
        heads, kv_heads = case.heads
        self.q, self.k, self.v = (
            torch.randn(rows, count, case.head_dim, dtype=case.dtype, device=HERE)
            for rows, count in ((calls.rows, heads), (self.plan.keys, kv_heads), (self.plan.keys, kv_heads))
        )
        self.ranges, self.arriving_ranges = ranges_of(blocks), ranges_of(blocks, chunks_of(self.plan, arriving_chunks))
        self.problem = problem_of(case, blocks)
        self.inputs = Inputs(self.q, self.k, self.v)

    def empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE, NaN."""
        out = torch.full_like(self.q, math.nan)
        return out, torch.full((self.q.shape[1], self.q.shape[0]), math.nan, device=HERE)

    def one_launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE over keys that are there."""
        out, lse = self.empty()
        KERNEL.prepare_ranges(self.problem, self.ranges, self.inputs, out)(self.q, self.k, self.v, out, lse, None)
        return out, lse

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by packed sequences with copies of their keys, and rows of no range as sequences without keys.

        One range of all rows is a dense sequence.
        """
        dense = as_dense(self.problem, self.ranges, self.inputs, None)
        if dense is not None:
            keys = slice(0, dense.seqlen_k)
            out, lse = self.empty()
            inputs = Inputs(self.q[None], self.k[None, keys], self.v[None, keys])
            KERNEL.run(KERNEL.config(dense), dense, inputs, out[None], lse[None])
            return out, lse
        keys, ends_q, ends_k, at = [], [0], [0], 0
        for each in sorted(self.ranges.sequences):
            if each.q_first > at:
                ends_q.append(each.q_first), ends_k.append(ends_k[-1])
            keys.append(torch.arange(each.k_first, each.k_stop, device=HERE))
            ends_q.append(each.q_stop), ends_k.append(ends_k[-1] + each.k_stop - each.k_first)
            at = each.q_stop
        index = torch.cat(keys)
        lengths = (torch.tensor(ends, dtype=torch.int32, device=HERE) for ends in (ends_q, ends_k))
        inputs = Inputs(self.q, self.k[index], self.v[index], None, None, None, None, *lengths)
        out, lse = self.empty()
        problem = replace(self.problem, batch=len(ends_q) - 1)
        KERNEL.run(KERNEL.config(self.problem), problem, inputs, out, lse)
        return out, lse

    def error(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[float, float]:
        """‖out − ref‖ / ‖ref‖ and the largest difference of the LSE, against f64."""
        wrong, size, wrong_lse = 0.0, 0.0, 0.0
        for each in self.blocks:
            rows, keys = slice(each.q_first, each.q_stop), slice(each.k_first, each.k_stop)
            inputs = Inputs(*(t[None] for t in (self.q[rows], self.k[keys], self.v[keys])))
            found = dense_problem(self.problem, each)
            ref, ref_lse = reference_attention(found, inputs, torch.float64)
            wrong += float((out[rows].double() - ref[0]).square().sum())
            size += float(ref.square().sum())
            seen = torch.isfinite(ref_lse[0])
            wrong_lse = max(wrong_lse, float((lse[:, rows].double() - ref_lse[0])[seen].abs().max()))
        return math.sqrt(wrong / size), wrong_lse


class Transport:
    """Copies of a call's foreign keys, from pinned memory, each of which waits for a flag that the host sets."""

    def __init__(self, call: Call) -> None:
        self.call, self.driver = call, launch.driver()
        self.at_least = int(self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        self.sent = [t.cpu().pin_memory() for t in (call.k, call.v)]
        self.k, self.v = torch.full_like(call.k, math.nan), torch.full_like(call.v, math.nan)
        own = call.plan.received[call.case.rank]
        self.own = tuple(torch.cat([t[each.key : each.key + each.count] for each in own]) for t in (call.k, call.v))
        self.edges = [slice(key, key + count) for _, key, count in edges_of(call.plan)]
        self.foreign = [slice(each.segment.key, each.segment.key + each.segment.count) for each in call.arriving_chunks]
        self.flags = torch.zeros(2048, dtype=torch.int32, device=HERE)
        self.host_flag, self.lost = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))
        self.stream = torch.cuda.Stream()
        self.number = self.released = 0
        self.out, self.lse = call.empty()
        arriving = self.arriving()
        self.run = KERNEL.prepare_ranges(call.problem, call.arriving_ranges, call.inputs, self.out, arriving)
        self.launch()  # all flags have the number 0
        self.poison()
        torch.cuda.synchronize()

    def arriving(self, limit: float = LIMIT) -> Arriving:
        return Arriving(self.own, self.flags.data_ptr(), self.number, self.lost.data_ptr(), limit)

    def poison(self) -> None:
        """NaN where keys are to come, and the own rows at the edges of own chunks."""
        for t, full in ((self.k, self.call.k), (self.v, self.call.v)):
            t.fill_(math.nan)
            for rows in self.edges:
                t[rows] = full[rows]
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)

    def _do(self, name: str, *arguments: Any) -> None:
        (code,) = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed: {code.name}")

    def enqueue_copies(self, order: list[int], waits: bool = True, within: bool = False) -> None:
        """Copy the chunks in an order on the second stream, which waits for what this stream has enqueued.

        Args:
            order: numbers of the chunks.
            waits: whether each waits for the host's flag.
            within: from this GPU's memory, not from the host.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        stream = self.stream.cuda_stream
        for number, i in enumerate(order):
            if waits:
                host_flag = self.host_flag.data_ptr()
                self._do("cuStreamWaitValue32", stream, host_flag, self.released + number + 1, self.at_least)
            rows = self.foreign[i]
            name, sent = (
                ("cuMemcpyDtoDAsync", (self.call.k, self.call.v)) if within else ("cuMemcpyHtoDAsync", self.sent)
            )
            for t, source in list(zip((self.k, self.v), sent, strict=True)):
                size = (rows.stop - rows.start) * t.stride(0) * t.element_size()
                self._do(name, t[rows].data_ptr(), source[rows].data_ptr(), size, stream)
            flag = self.flags.data_ptr() + 4 * self.call.arriving_chunks[i].flag
            self._do("cuStreamWriteValue32", stream, flag, self.number, 0)

    def launch(self, limit: float = LIMIT) -> None:
        self.run(self.call.q, self.k, self.v, self.out, self.lse, self.arriving(limit))

    def release_copy(self) -> None:
        """Let one more copy begin."""
        self.released += 1
        self.host_flag[0] = self.released

    def once(self, chance: random.Random, delay: float) -> bool:
        """One call whose keys come while it runs; whether it still ran when the last copy was released."""
        self.number += 1
        self.poison()
        order = list(range(len(self.foreign)))
        if chance.random() < 0.5:
            chance.shuffle(order)
        self.enqueue_copies(order)
        self.launch()
        ended = torch.cuda.Event()
        ended.record()
        for _ in order:
            time.sleep(chance.random() * delay)
            waited = not ended.query()
            self.release_copy()
        torch.cuda.synchronize()
        return waited


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    """Whether bits are the same; NaN of rows that nobody writes are."""
    kinds = {2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(a.view(kinds[a.element_size()]), b.view(kinds[b.element_size()]))
        for a, b in zip(one, other, strict=True)
    )


def check_one_launch(case: Case) -> dict[str, Any]:
    """One launch against f64, and against packed sequences with copied keys, whose bits it must have."""
    call = Call(case)
    results = call.one_launch()
    error, lse_error = call.error(*results)
    written = torch.zeros(len(call.q), dtype=torch.bool, device=HERE)
    for each in call.ranges.sequences:
        written[each.q_first : each.q_stop] = True
    untouched = bool(results[0][~written].isnan().all() and results[1][:, ~written].isnan().all())
    same_bits = True
    if all(each.shift is None for each in call.ranges.sequences):  # else no packed sequences have these pairs
        packed = call.packed()
        same_bits = same(
            tuple(t[written] for t in (results[0], results[1].T)), tuple(t[written] for t in (packed[0], packed[1].T))
        )
    ok = error <= RELATIVE[case.dtype] and lse_error < 1e-4 and same_bits and untouched
    return {"case": str(case), "ok": ok, "error": error, "lse_error": lse_error, "same_bits": same_bits,
            "untouched": untouched, "config": KERNEL.config(call.problem).describe()}  # fmt: skip


def check_arrivals(case: Case, repeats: int, until: float) -> dict[str, Any]:
    """Calls whose keys arrive meanwhile, against the launch over keys that are there: same bits at each repeat."""
    call, chance = Call(case), random.Random(1)
    expected = call.one_launch()
    transport = Transport(call)
    wrong, waited, runs = 0, 0, 0
    for _ in range(repeats):
        if time.monotonic() > until:
            break
        waited += transport.once(chance, 3e-4)
        wrong += not same((transport.out, transport.lse), expected)
        runs += 1
    # The check must be able to fail: with flags that are set too early, NaN must be seen.
    transport.number += 1
    transport.flags.fill_(transport.number)
    transport.poison()
    transport.launch()
    torch.cuda.synchronize()
    seen = bool(transport.out.isnan().any())
    return {"case": str(case), "ok": wrong == 0 and seen and runs > 0 and waited > 0, "repeats": runs, "wrong": wrong,
            "waited": waited, "early_flags_are_seen": seen, "chunks": len(call.arriving_chunks)}  # fmt: skip


def check_lost(case: Case, limit: float) -> dict[str, Any]:
    """A chunk that never comes ends the kernel with an error, and the host finds which one it was.

    The error ends the process's use of the GPU, so this runs in a process of its own.
    """
    call = Call(case)
    transport = Transport(call)
    transport.number += 1
    transport.poison()
    order = [i for i in range(len(call.arriving_chunks)) if i != 1]
    transport.enqueue_copies(order, waits=False)
    torch.cuda.synchronize()
    start, message = time.monotonic(), ""
    try:
        transport.launch(limit)
        torch.cuda.synchronize()
    except Exception as error:
        message = str(error).splitlines()[0]
    seconds = time.monotonic() - start
    flag = call.arriving_chunks[1].flag
    lost = int(transport.lost[0]) - 1
    return {"ok": bool(message) and lost == flag and limit <= seconds < limit + 5, "message": message, "lost": lost,
            "flag": flag, "seconds": seconds}  # fmt: skip


TIMED = {"8k": 16384, "4k": 8192}
"""Tokens of one sequence on two ranks, 32/8 heads, D 128, causal."""


def microseconds(calls: dict[str, Callable[[], None]], rounds: int = 7, count: int = 20) -> dict[str, float]:
    """The times of calls: medians over rounds in which each is timed in turn."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    clock = SteadyClock()
    for _ in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)  # the host is ahead
            samples[name].append(clock.time(call, count)[0] * 1e3)
    return {name: round(statistics.median(times[1:]), 1) for name, times in samples.items()}


def two_lanes(call: Call) -> Callable[[], None]:
    """The blocks one by one on two streams, each over its keys where they are: what a rank does now."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    out, _ = call.empty()
    runs = []
    for each in call.blocks:
        rows, keys = slice(each.q_first, each.q_stop), slice(each.k_first, each.k_stop)
        problem = dense_problem(call.problem, each)
        tensors = [t[None] for t in (call.q[rows], call.k[keys], call.v[keys])]
        own = torch.empty(1, call.q.shape[1], each.q_stop - each.q_first, device=HERE)
        repeat = KERNEL.prepare(problem, Inputs(*tensors), out[None, rows], own)
        runs.append((repeat, *tensors, out[None, rows], own, tuple(t.data_ptr() for t in tensors)))

    def run() -> None:
        streams[1].wait_stream(streams[0])
        for i, (repeat, *given) in enumerate(runs):
            with torch.cuda.stream(streams[i % 2]):
                repeat(*given)
        streams[0].wait_stream(streams[1])

    return run


def whole_problem(tokens: int) -> Callable[[], None]:
    """One GPU's call of the whole problem."""
    q, k, v = (torch.randn(1, tokens, heads, 128, dtype=torch.bfloat16, device=HERE) for heads in (32, 8, 8))
    problem = AttentionProblem.from_inputs(Inputs(q, k, v), causal=True)
    out, lse = torch.empty_like(q), torch.empty(1, 32, tokens, device=HERE)
    repeat, addresses = KERNEL.prepare(problem, Inputs(q, k, v), out, lse), (q.data_ptr(), k.data_ptr(), v.data_ptr())
    return lambda: repeat(q, k, v, out, lse, addresses)


def times(name: str) -> dict[str, Any]:
    """Microseconds of a rank's forward, over keys that are there and over keys whose flags are polled."""
    row: dict[str, Any] = {"name": name}
    calls = {"whole problem": whole_problem(TIMED[name])}
    for rank in (0, 1):
        call = Call(Case((TIMED[name],), rank=rank, heads=(32, 8)))
        out, lse = call.empty()
        ranged = KERNEL.prepare_ranges(call.problem, call.ranges, call.inputs, out)
        transport = Transport(call)
        transport.number += 1
        transport.flags.fill_(transport.number)
        transport.k.copy_(call.k), transport.v.copy_(call.v)
        calls[f"rank {rank}: two streams"] = two_lanes(call)
        calls[f"rank {rank}: one launch"] = lambda r=ranged, c=call, o=out, e=lse: r(c.q, c.k, c.v, o, e, None)
        calls[f"rank {rank}: one launch, flags polled"] = transport.launch
    row["microseconds"] = microseconds(calls)
    ideal = row["microseconds"]["whole problem"] / 2
    row["share of half"] = {name: round(ideal / us, 4) for name, us in row["microseconds"].items()}
    return row


def copies_within(limit: float = 3.0) -> dict[str, Any]:
    """Whether copies within the GPU's memory, enqueued before the kernel, get on while it has all SMs.

    Copies from the host and from other GPUs are made by DMA. Those within a GPU's memory may be kernels, for which no
    SM is left then. The kernel that waits for them ends with an error, and with it the process's use of the GPU.
    """
    call = Call(Case((TIMED["8k"],), heads=(32, 8)))
    transport = Transport(call)
    get_on = True
    try:
        for _ in range(3):
            transport.number += 1
            transport.poison()
            torch.cuda.synchronize()
            transport.enqueue_copies(list(range(len(transport.foreign))), waits=False, within=True)
            transport.launch(limit)
            torch.cuda.synchronize()
    except Exception:
        get_on = False
    return {"get_on": get_on}


def compile_ahead() -> dict[str, Any]:
    """All kernels at once."""
    sources = []
    timed = [Case((tokens,), rank=rank, heads=(32, 8)) for tokens in TIMED.values() for rank in (0, 1)]
    for case in (*ONE_LAUNCH, *ARRIVE, *timed):
        blocks = blocks_of_all(gather_calls(case.division, case.rank, True, False))
        if blocks is None:
            continue
        problem = problem_of(case, blocks)
        if len(blocks) == 1:
            dense = dense_problem(problem, blocks[0])
            sources.append(replace(KERNEL.config(dense), arrivals=case not in ONE_LAUNCH).source())
        config = replace(KERNEL.config(problem), ranges=True)
        sources.append(config.source())
        sources += [replace(config, arrivals=True).source()] if case not in ONE_LAUNCH else []
        sources += [KERNEL.config(problem).source()] if case in ONE_LAUNCH else []
        if case in timed:
            whole = replace(problem, batch=1, varlen=False, seqlen_q=sum(case.lengths), seqlen_k=sum(case.lengths))
            sources += [KERNEL.config(each).source()
                        for each in (whole, *(dense_problem(problem, block) for block in blocks))]  # fmt: skip
    sources = list(dict.fromkeys(sources))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), sources))
    return {"kernels": len(sources)}


PARTS: dict[str, Callable[[], Any]] = {
    "lost": lambda: check_lost(ARRIVE[0], 0.5),
    "within": copies_within,
}
"""What may end a process's use of the GPU: each runs in its own."""


def begin(part: str) -> subprocess.Popen[str]:
    """A part in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, "--part", part], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a part found."""
    try:
        shown, _ = process.communicate(timeout=25)
    except subprocess.TimeoutExpired:
        process.kill()
        return {"ok": False, "error": f"no end within 25 s: {process.communicate()[0][-1000:]}"}
    lines = [line for line in shown.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"ok": False, "error": shown[-1500:]}


def apart(part: str) -> dict[str, Any]:
    """A part from its beginning to its end."""
    return result_of(begin(part))


def parts(options: argparse.Namespace, until: float) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Correctness first."""
    yield "kernels", compile_ahead
    for case in ONE_LAUNCH if "one-launch" in options.do else ():
        yield f"one launch: {case}", lambda case=case: check_one_launch(case)
    begun = {part: begin(part) for part in PARTS if "lost" in options.do}
    if "arrive" in options.do:
        for case in ARRIVE:
            yield f"keys that arrive: {case}", lambda case=case: check_arrivals(case, 20, until)
        yield "repeats", lambda: check_arrivals(ARRIVE[1], options.repeats, until - 4)
    for part, process in begun.items():
        yield part, lambda process=process: result_of(process)
    for name in TIMED if "times" in options.do else ():
        yield "times", lambda name=name: times(name)


NAMES = {
    "arrive": "arriving_keys.json",
    "one-launch": "ranges_in_one_launch.json",
    "lost": "arriving_keys_lost.json",
    "times": "arriving_keys_times.json",
}
"""What is done, and the file of each; of several, that of the first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the result")
    parser.add_argument("--seconds", type=float, default=50, help="nothing is begun after so many")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--do", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part]()), flush=True)
        return
    until = time.monotonic() + options.seconds
    faulthandler.dump_traceback_later(options.seconds + 15, exit=True)
    sys.exit(not run_parts(parts(options, until), options.seconds, options.out / NAMES[options.do[0]]))


if __name__ == "__main__":
    main()
