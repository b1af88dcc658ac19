"""Measures context parallelism: it starts the processes of a group and times the problems that they share."""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from flashlane import flash_attn_func, flash_attn_varlen_func
from flashlane.bench.measure.isolated import without_ctrl_c
from flashlane.bench.measure.timing import HostClock, SteadyClock, drawn_order
from flashlane.core.arch import DTYPE_NAMES
from flashlane.distributed import (
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    explain_transport,
    shard_sequence,
)
from flashlane.distributed.comm import Ranks, start
from flashlane.distributed.functional import head_bounds
from flashlane.jit import compiler

GROUP_SECONDS = 60
"""The timeout of the group's operations."""
ROUNDS = 21
ROUND_MS, PREHEAT_MS = 40.0, 25.0
"""The time for which a call is repeated in each round, at least twice, and that for which it runs before on a GPU."""
MOST_CALLS = 200
"""The most repetitions of a call in a round."""
Call = Callable[[], object]
BY_MESSAGES = "allgather by messages"
"""The name of the row of "allgather" with transport "messages"; that with the default transport is "allgather"."""
ONE = "one process"
"""The name of the row of the whole problem in each process."""


@dataclass(frozen=True)
class SharedProblem:
    """Self-attention under a causal mask over a sequence, or packed documents, that all ranks share."""

    tokens: int
    """Tokens of each rank, where ``documents`` is empty."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    documents: tuple[int, ...] = ()
    """Tokens of each document; empty for one sequence."""
    dtype: str = "bfloat16"

    def total(self, ranks: int) -> int:
        return sum(self.documents) or self.tokens * ranks

    def describe(self, ranks: int) -> str:
        """One line, as tables show it."""
        what = f"{len(self.documents)} documents" if self.documents else "one sequence"
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        dtype = DTYPE_NAMES[getattr(torch, self.dtype)]
        return f"{what} of {self.total(ranks)} tokens, {heads} D{self.head_dim} {dtype} causal"

    def tensors(self, ranks: int, device: torch.device) -> list[torch.Tensor]:
        """q, k, v and do of all tokens, ``(1, s, h, d)`` or packed ``(total, h, d)``; every rank gets the same."""
        random = torch.Generator(device).manual_seed(1)
        outer = (self.total(ranks),) if self.documents else (1, self.total(ranks))
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        dtype = getattr(torch, self.dtype)
        return [torch.randn(*outer, h, self.head_dim, generator=random, device=device, dtype=dtype) for h in heads]

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *itertools.accumulate(self.documents)]

    def on_one(self, ranks: int, device: torch.device, **options: Any) -> Measured:
        """The whole problem as one process computes it."""
        q, k, v, do = self.tensors(ranks, device)

        def forward(*qkv: torch.Tensor) -> torch.Tensor:
            if not self.documents:
                return flash_attn_func(*qkv, causal=True, **options)
            cu = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=device)
            longest = max(self.documents)
            return flash_attn_varlen_func(*qkv, cu, cu, longest, longest, causal=True, **options)

        return Measured((q, k, v), do, forward)

    def shared(self, device: torch.device, group: Any = None, layout: str = "zigzag", **options: Any) -> Measured:
        """This rank's shard of the problem."""
        size = group.size() if group is not None else dist.get_world_size()
        cu = self.cu_seqlens if self.documents else None
        dim = 0 if self.documents else 1
        q, k, v, do = (
            shard_sequence(t, dim, cu_seqlens=cu, layout=layout, group=group) for t in self.tensors(size, device)
        )

        def forward(*qkv: torch.Tensor) -> torch.Tensor:
            where = {"group": group, "layout": layout, **options}
            if cu is not None:
                return context_parallel_attn_varlen_func(*qkv, cu, causal=True, **where)
            return context_parallel_attn_func(*qkv, causal=True, seqlen=self.total(size), **where)

        return Measured((q, k, v), do, forward)


@dataclass(frozen=True)
class Measured:
    """Tensors and the function of them that is timed."""

    qkv: tuple[torch.Tensor, ...]
    do: torch.Tensor
    forward_of: Callable[..., torch.Tensor]

    def forward(self) -> torch.Tensor:
        """The output, without gradients."""
        with torch.no_grad():
            return self.forward_of(*self.qkv)

    def both(self) -> tuple[torch.Tensor, ...]:
        """The output, dq, dk and dv."""
        qkv = [t.detach().requires_grad_() for t in self.qkv]
        out = self.forward_of(*qkv)
        return out.detach(), *torch.autograd.grad(out, qkv, self.do)


def round_milliseconds(calls: dict[str, Call], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call on the slowest rank, round by round.

    In each round every call is timed once, in an order that is drawn for the round and is the same on all ranks. Each
    runs by itself for :data:`PREHEAT_MS` before, as what ran before a call decides the clock of a power-limited GPU.

    Args:
        calls: what is timed, by name; all ranks have the same names in the same order.
        device: of this rank.
        rounds: how often each call is timed.
    """
    counts, names = {}, list(calls)
    for name, call in calls.items():
        call()
        counts[name] = max(2, min(MOST_CALLS, round(ROUND_MS / max(_slowest(call, 2, 0, device), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _, index in drawn_order(len(names), rounds):
        name = names[index]
        before = math.ceil(counts[name] * PREHEAT_MS / ROUND_MS) if ROUND_MS and device.type == "cuda" else 1
        times[name].append(_slowest(calls[name], counts[name], before, device))
    return times


def milliseconds(calls: dict[str, Call], device: torch.device, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of each call on the slowest rank: the median over the rounds of :func:`round_milliseconds`."""
    return {name: statistics.median(each) for name, each in round_milliseconds(calls, device, rounds).items()}


def shares_of_ideal(times: dict[str, list[float]], size: int) -> dict[str, float]:
    """For each call the share of the ideal that it reaches, as the median over rounds.

    In a round it is the time of :data:`ONE` over the number of ranks, over the call's own time.

    Args:
        times: those of :func:`round_milliseconds`.
        size: the number of ranks.
    """
    return {
        name: statistics.median(one / size / own for one, own in zip(times[ONE], each, strict=True))
        for name, each in times.items()
    }


def _slowest(call: Call, count: int, before: int, device: torch.device) -> float:
    """Milliseconds of one of ``count`` calls on the slowest rank, after ``before`` calls that are not timed."""
    for _ in range(before):
        call()
    dist.barrier()
    clock = SteadyClock() if device.type == "cuda" else HostClock()
    worst = torch.tensor([statistics.fmean(clock.time(call, count))], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def default_methods(problem: SharedProblem) -> dict[str, dict[str, Any]]:
    """The methods that are timed when none is named: all of them, "allgather" by messages in several ways, too."""
    few = max(1, problem.kv_heads // 4)
    some = f"{BY_MESSAGES}, {few} KV head{'' if few == 1 else 's'} at a time"
    return {
        "allgather": {"method": "allgather"},
        BY_MESSAGES: {"method": "allgather", "transport": "messages"},
        some: {"method": "allgather", "transport": "messages", "heads_k_stride": few},
        "ring": {"method": "ring"},
        "ulysses": {"method": "ulysses"},
    }


def time_methods(
    device: torch.device,
    problem: SharedProblem,
    methods: dict[str, dict[str, Any]],
    layout: str = "zigzag",
    rounds: int = ROUNDS,
    more: dict[str, Measured] | None = None,
) -> list[dict[str, Any]]:
    """Measure the milliseconds of methods of a problem, and the share of the ideal that each reaches.

    All are timed in the same rounds, in drawn orders (:func:`round_milliseconds`).

    Args:
        device: the device of this rank.
        problem: what is computed. In the first row every rank computes the whole problem alone, all at the same time.
        methods: by the names of their rows, arguments of the context-parallel functions.
        layout: which tokens a rank has.
        rounds: how often each method is timed.
        more: other implementations, by the names of their rows.

    Returns:
        A row for each method: its name, milliseconds of the slowest rank, the ideal (one process's time over the
        number of ranks) over that as the median over rounds, and the milliseconds of each round, for the forward and
        for forward and backward.
    """
    size = dist.get_world_size()
    variants = {ONE: problem.on_one(size, device)}
    for name, options in methods.items():
        variants[name] = problem.shared(device, layout=layout, **options)
    variants |= more or {}
    rows: list[dict[str, Any]] = [{"method": name} for name in variants]
    for way in ("forward", "both"):
        times = round_milliseconds({name: getattr(each, way) for name, each in variants.items()}, device, rounds)
        shares = shares_of_ideal(times, size)
        for row, (name, each) in zip(rows, times.items(), strict=True):
            row[f"{way}_ms"] = round(statistics.median(each), 4)
            row[f"{way}_efficiency"] = round(shares[name], 4)
            row[f"{way}_rounds_ms"] = [round(ms, 4) for ms in each]
    return rows


def link_rates(device: torch.device, megabytes: int = 32) -> dict[str, float]:
    """GB/s that each rank sends to the next one while it receives as much, and microseconds of a message of 4 KiB."""
    ranks = Ranks.of(dist.group.WORLD)
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    sent = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange(count: int) -> Call:
        return lambda: start(ranks, [(after, sent[:count])], [(before, received[:count])]).wait()

    found = milliseconds({"large": exchange(len(sent)), "small": exchange(4096)}, device)
    return {"gbs": len(sent) / found["large"] / 1e6, "latency_us": found["small"] * 1e3}


def join_ranks(rank: int, size: int, folder: str, backend: str, job: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in this process as one of ``size`` ranks, and return its result.

    The ranks meet through a file in ``folder``. The other arguments are those of :func:`on_ranks`.
    """
    _notes.update(file=Path(folder, f"note_{rank}"), began=time.monotonic())
    note("joining the group")
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    else:  # more threads than cores wait for each other at each operation
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_SECONDS),
        device_id=device if backend == "nccl" else None,
    )
    found = job(device, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    return found


_notes: dict[str, Any] = {}
"""Of this process, where it is a rank: the file of its last note, and when it began."""


def note(what: str) -> None:
    """Note what this rank begins to do, for the error of :func:`on_ranks` if its time ends meanwhile."""
    if _notes:
        seconds, (kernels, compiling) = time.monotonic() - _notes["began"], compiler.work_done()
        _notes["file"].write_text(f"{what} since {seconds:.1f} s, {kernels} kernels compiled in {compiling:.1f} s")


def _work(
    rank: int, size: int, folder: str, backend: str, job: Callable[..., Any], arguments: Sequence[Any],
    stop: float | None,
) -> None:  # fmt: skip
    if hasattr(signal, "pthread_sigmask"):  # what waited while torch was loaded ends the rank here, without a traceback
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if stop is not None:
        stacks = os.open(Path(folder, f"stack_{rank}"), os.O_WRONLY | os.O_CREAT)
        faulthandler.dump_traceback_later(max(0.1, stop - time.monotonic()), file=stacks)
    found = join_ranks(rank, size, folder, backend, job, *arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))


SECONDS_FOR_STACKS = 3.0
"""After the seconds of :func:`on_ranks`, so that each rank has written where it is."""


def on_ranks(size: int, backend: str, job: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
    """Run a module's function in ``size`` processes of one group, and return rank 0's result as JSON holds it.

    Args:
        size: the number of processes, each with a GPU of its own where the backend is "nccl".
        backend: "nccl" or "gloo".
        job: called with the rank's device and ``arguments``.
        arguments: of the job, which other processes unpickle.
        seconds: after them all ranks are ended, or None to wait as long as they take.

    Raises:
        ProcessRaisedException: a rank raised; the others are ended.
        TimeoutError: the ranks took longer than ``seconds``; the message has the last :func:`note` of each and where
            in the code it is.
    """
    with tempfile.TemporaryDirectory() as folder:
        stop = None if seconds is None else time.monotonic() + seconds
        with without_ctrl_c():
            context = processes.spawn(_work, (size, folder, backend, job, arguments, stop), nprocs=size, join=False)
        while not context.join(None if stop is None else 1.0):
            if stop is not None and time.monotonic() > stop + SECONDS_FOR_STACKS:
                for each in context.processes:
                    each.kill()
                raise TimeoutError(f"{size} ranks took longer than {seconds:g} s\n" + _where_ranks_are(size, folder))
        return json.loads(Path(folder, "result.json").read_text())


def _where_ranks_are(size: int, folder: str) -> str:
    """The last note of each rank, and its stacks."""
    lines = []
    for rank in range(size):
        files = Path(folder, f"note_{rank}"), Path(folder, f"stack_{rank}")
        last, stack = (file.read_text() if file.exists() else "nothing yet" for file in files)
        lines += [f"rank {rank}: {last}", stack[-4000:]]
    return "\n".join(lines)


def problem_fields(problem: SharedProblem, ranks: int) -> dict[str, Any]:
    """The fields by which results name a problem."""
    return {"problem": problem.describe(ranks), "ranks": ranks, **asdict(problem)}


def measure_all(
    device: torch.device,
    problem: SharedProblem,
    methods: tuple[str, ...] | None,
    layout: str,
    rounds: int,
    step: bool,
    counts: tuple[int, ...],
    across_gbs: float,
) -> dict[str, Any]:
    """Measure on every rank what ``flashlane bench ranks`` shows; the arguments are its options."""
    from flashlane.bench.measure.scaling import Links, Workload, checked, modelled_rows
    from flashlane.bench.suites.sharded_step import StepProblem, time_steps

    size = dist.get_world_size()
    options = default_methods(problem) if methods is None else {name: {"method": name} for name in methods}
    rows = time_methods(device, problem, options, layout, rounds)
    links = link_rates(device, 32 if device.type == "cuda" else 1)
    measured: dict[str, Any] = {
        "rows": rows,
        "links": links,
        "modelled": [],
        "modelled_from": "",
        "steps": [],
        "notes": [],
    }
    gathered = [row for row in rows if row["method"].startswith("allgather")]
    if counts and device.type == "cpu":
        measured["notes"].append("no model: times of processes on a CPU say only that all runs")
    elif counts and (problem.documents or layout != "zigzag" or not gathered):
        measured["notes"].append("no model: it knows one sequence in layout zigzag, by method allgather")
    elif counts:
        best = min(gathered, key=lambda row: row["both_ms"])
        stride = options[best["method"]].get("heads_k_stride")
        by_messages = options[best["method"]].get("transport") == "messages"
        workload = Workload(
            problem.tokens,
            problem.heads,
            problem.kv_heads,
            problem.head_dim,
            size,
            rows[0]["forward_ms"],
            rows[0]["both_ms"],
            groups=group_sizes(stride, problem.kv_heads),
            element_bytes=getattr(torch, problem.dtype).itemsize,
            copies=not by_messages and explain_transport(None, device)[0] == "copies",
        )
        rates = Links(links["gbs"], links["latency_us"], across_gbs=across_gbs)
        off = checked(workload, rates, best["forward_ms"], best["both_ms"])
        measured["modelled"] = modelled_rows(workload, rates, (size, *counts))
        measured["modelled_from"] = best["method"]
        measured["notes"].append(
            f"the model is {off['forward']:+.1%} off the measured forward and {off['both']:+.1%} off forward and "
            f"backward on {size} ranks"
        )
    if step:
        sizes = StepProblem(problem.tokens)
        if device.type == "cpu":
            sizes = StepProblem(problem.tokens, 2, 64, 128, 4, 2, 101, "float32")
        measured["steps"] = time_steps(device, sizes, methods or ("allgather", "ring", "ulysses"), layout, rounds)
        measured["step_problem"] = asdict(sizes)
    return measured


def group_sizes(stride: int | tuple[int, ...] | None, kv_heads: int) -> tuple[int, ...]:
    """The number of KV heads of each group that is fetched."""
    bounds = head_bounds(stride, kv_heads)
    return tuple(stop - first for first, stop in itertools.pairwise(bounds))
