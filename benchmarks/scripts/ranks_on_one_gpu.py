"""Context parallelism by copies whose kernels poll flags, with all ranks on one GPU: what one GPU can prove.

    python benchmarks/scripts/ranks_on_one_gpu.py --out $OUT --seconds 60

In one process: the ranks' calls are enqueued one after another, each rank on streams of its own, in memory of its own.
The kernel of the first rank runs, and waits for keys, before those of the second are enqueued; the host waits at random
in between. In two processes: torch's symmetric memory refuses two ranks on one GPU, so their memory is shared by CUDA
IPC, and the GPU goes from one to the other by time slices.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from gpu_run import run_parts

import flashlane
from flashlane.core.problem import AttentionProblem, CallOptions
from flashlane.distributed import copies, functional, peer_memory, streams
from flashlane.distributed.allgather import GatherAttention
from flashlane.distributed.attend import Settings
from flashlane.distributed.comm import Ranks
from flashlane.distributed.functional import head_bounds
from flashlane.distributed.gather import Task
from flashlane.distributed.launches import RangedLaunch
from flashlane.distributed.layout import token_indices
from flashlane.distributed.peer_memory import FLAG_BYTES, GpuMemory
from flashlane.distributed.plan import Division, gather_calls
from flashlane.distributed.polled import ChunkGathering, come_in_chunks, polled_launch
from flashlane.distributed.ranged import blocks_of_all, ranges_of, window_of
from flashlane.inspect.prebuild import compile_all, sources_of
from flashlane.jit import KernelSource, launch
from flashlane.kernels.hopper.backward.kernel import config_of_rank
from flashlane.kernels.hopper.forward.kernel import KERNEL

# Ranks wait for each other on streams, three a rank. Streams that share a queue wait for each other, too, and a process
# has eight queues by default.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
HERE = torch.device("cuda", 0)
SECONDS = 30.0
"""That a kernel waits for a chunk, and that a process waits for another: long, as the GPU may have other users."""
CLOSE = {"out": 0.02, "q": 0.03, "k": 0.03, "v": 0.03}
"""Largest ‖ours − one GPU's‖ / ‖one GPU's‖ of bf16 results, which differ by the order of tiles."""


class MemoryInProcess(GpuMemory):
    """A rank's memory in the process that all ranks share."""

    def __init__(self, size: int, rank: int, half: int, others: list[torch.Tensor]) -> None:
        timeout = SimpleNamespace(_timeout=timedelta(seconds=SECONDS))
        group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=timeout))
        self._given = others
        super().__init__(Ranks(group, rank, size), HERE, half)

    def _allocate(self, size: int) -> tuple[torch.Tensor, list[int]]:
        return self._given[self.ranks.rank], [t.data_ptr() for t in self._given]


class MemoryByIpc(GpuMemory):
    """A rank's memory, which another process of the same GPU has opened by CUDA IPC."""

    def _allocate(self, size: int) -> tuple[torch.Tensor, list[int]]:
        driver = launch.driver()

        def call(name: str, *arguments: Any) -> Any:
            code, *found = getattr(driver, name)(*arguments)
            if code:
                raise RuntimeError(f"{name} failed: {code.name}")
            return found[0] if found else None

        address = int(call("cuMemAlloc", size))
        handles: list[Any] = [None] * self.ranks.size
        own = bytes(call("cuIpcGetMemHandle", address).reserved)
        dist.all_gather_object(handles, own, group=self.ranks.group)
        addresses = []
        for rank, given in enumerate(handles):
            handle = driver.CUipcMemHandle()
            handle.reserved = given
            addresses.append(address if rank == self.ranks.rank else int(call("cuIpcOpenMemHandle", handle, 1)))
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=self.device)
        memory.zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier(self.ranks.group)
        return memory, addresses


class Problem:
    """One call that ranks share, in bf16, causal unless a window says otherwise, and what one GPU gives for it."""

    def __init__(
        self, ranks: int, tokens: int | tuple[int, ...] = 3001, heads: tuple[int, int] = (8, 4), head_dim: int = 128,
        layout: Any = "zigzag", left: int = -1, right: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(3)
        self.lengths = (tokens,) if isinstance(tokens, int) else tokens
        self.ranks, self.layout, self.left, self.heads = ranks, layout, left, heads
        self.right = right
        self.division = Division(layout, self.lengths, ranks, left, right)
        shapes = [(1, sum(self.lengths), count, head_dim) for count in (heads[0], heads[1], heads[1], heads[0])]
        self.whole = [torch.randn(shape, dtype=torch.bfloat16, device=HERE) for shape in shapes]
        self.rows = [token_indices(layout, self.lengths, ranks, rank).to(HERE) for rank in range(ranks)]

    def __str__(self) -> str:
        _, length, _, dim = self.whole[0].shape
        what = f"{len(self.lengths)} documents" if len(self.lengths) > 1 else "one sequence"
        size = f"{length} tokens, {self.ranks} ranks, heads {self.heads}, D {dim}, window {self.left},{self.right}"
        return f"{what}, {self.layout}, {size}"

    def of_rank(self, rank: int) -> list[torch.Tensor]:
        """Leaves q, k and v, and the output's gradient, of a rank."""
        found = [t.index_select(1, self.rows[rank]) for t in self.whole]
        return [t.requires_grad_() for t in found[:3]] + found[3:]

    def expected(self) -> dict[str, torch.Tensor]:
        """Output and gradients of one GPU."""
        q, k, v = (t.clone().requires_grad_() for t in self.whole[:3])
        options = {"causal": self.right == 0, "window_size": (self.left, self.right)}
        if len(self.lengths) == 1:
            out = flashlane.flash_attn_func(q, k, v, **options)
        else:
            ends = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=HERE)
            given = q[0], k[0], v[0], ends, ends, max(self.lengths), max(self.lengths)
            out = flashlane.flash_attn_varlen_func(*given, **options)[None]
        out.backward(self.whole[3])
        return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}

    def differences(self, results: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """The differences of all ranks' results, by their names."""
        worst = {}
        for name, right in self.expected().items():
            whole = torch.full_like(right, torch.nan)
            for rows, each in zip(self.rows, results, strict=True):
                whole[:, rows] = each[name]
            worst[name] = float((whole.float() - right.float()).norm() / right.float().norm())
        return worst


class InOneProcess:
    """The ranks of a problem, whose calls are enqueued one after another."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self.problem, self.chance = problem, random.Random(seed)
        self.used = 0
        size, kv_heads = problem.ranks, problem.heads[1]
        width = 2 * problem.whole[1][0, 0].numel()
        half = peer_memory.aligned(8 * width * problem.whole[1].shape[1])
        memory = [torch.zeros(FLAG_BYTES + 2 * half, dtype=torch.uint8, device=HERE) for _ in range(size)]
        torch.cuda.synchronize()
        self.memory = memory
        self.memories = [MemoryInProcess(size, rank, half, memory) for rank in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self.call_streams = [[torch.cuda.Stream() for _ in range(1, streams.MOST_STREAMS)] for _ in range(size)]
        scale = problem.whole[0].shape[3] ** -0.5
        settings = Settings(CallOptions(scale=scale), needs_grad=True)
        bounds = head_bounds(None, kv_heads), head_bounds(_groups(kv_heads), kv_heads)
        self.in_chunks = come_in_chunks(problem.division)
        self.tasks = [
            Task(
                each.ranks, problem.division, settings, *bounds, copies=True, wants_lse=False, in_chunks=self.in_chunks
            )
            for each in self.memories
        ]

    def warm_up(self, backward: bool) -> None:
        """Load all kernels while nobody waits: to load one may wait for all streams, and ranks wait for each other."""
        for each in self.memory:
            each[:FLAG_BYTES].view(torch.int32).fill_(1 << 20)
        with mock.patch.object(MemoryInProcess, "write", lambda *_: None):
            for _ in range(2):
                self.step(0, backward)
        for memory, each in zip(self.memories, self.memory, strict=True):
            each[:FLAG_BYTES].view(torch.int32).fill_(memory.exchanges)
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """What is enqueued inside is the rank's."""
        with (
            mock.patch.dict(streams._streams, {HERE: self.call_streams[rank]}),
            mock.patch.object(copies, "memory_of", lambda *asked: self.memory_of(rank, asked[2])),
            torch.cuda.stream(self.streams[rank]),
        ):
            yield

    def memory_of(self, rank: int, size: int) -> MemoryInProcess:
        if size > self.memories[rank].half:
            raise ValueError(f"an exchange takes {size} bytes; there are {self.memories[rank].half}")
        return self.memories[rank]

    def poison(self) -> None:
        """NaN in all memory that keys come to."""
        torch.cuda.synchronize()
        for each in self.memory:
            each[FLAG_BYTES:] = 255
        torch.cuda.synchronize()

    def late(self, longest: float) -> None:
        if longest:
            time.sleep(self.chance.random() * longest)

    def step(self, longest: float, backward: bool) -> list[dict[str, torch.Tensor]]:
        """One step of all ranks in a random order; they are enqueued so many seconds apart at most."""
        order = list(range(self.problem.ranks))
        self.chance.shuffle(order)
        self.poison()
        tensors = []
        for rank in order:
            with self.as_rank(rank):  # so that autograd adds gradients on the rank's stream
                tensors.append(self.problem.of_rank(rank))
        torch.cuda.synchronize()
        outs = []
        for rank, (q, k, v, _) in zip(order, tensors, strict=True):
            with self.as_rank(rank):
                outs.append(GatherAttention.apply(self.tasks[rank], q, k, v, None, None, None)[0])
            self.late(longest)
        for rank, out, (*_, do) in zip(order, outs, tensors, strict=True):
            if backward:
                with self.as_rank(rank):
                    out.backward(do)
                self.late(longest)
        torch.cuda.synchronize()
        found: list[dict[str, torch.Tensor]] = [{} for _ in order]
        for rank, out, (q, k, v, _) in zip(order, outs, tensors, strict=True):
            found[rank] = {"out": out.detach()} | ({"q": q.grad, "k": k.grad, "v": v.grad} if backward else {})
        return found


def polled_only(task: Task) -> bool:
    """Whether the forwards of a task were all made by one launch, that polls where keys come in chunks."""
    if task.in_chunks:
        made = [value for key, value in task.memo.items() if isinstance(key, tuple) and key[0] is polled_launch]
        return bool(made) and all(value is not None for value in made)
    forwards = [value for value in task.launches.values() if value is not None]
    return bool(forwards) and all(isinstance(each, RangedLaunch) for value in forwards for each in value)


DOCUMENTS = (700, 130, 2, 1900, 64, 511, 333, 1200, 90, 257, 1023, 48, 610, 77, 1, 405, 39, 88, 512, 700, 3, 260)
"""More than come in chunks."""
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "two ranks": lambda: Problem(2),
    "three ranks, odd": lambda: Problem(3, 4097, (6, 2), 64),
    "four ranks": lambda: Problem(4, 8192, (4, 4)),
    "window": lambda: Problem(2, 3000, left=700),
    "contiguous": lambda: Problem(3, 2500, (4, 1), 256, "contiguous"),
    "documents": lambda: Problem(2, DOCUMENTS),
    "fewer documents": lambda: Problem(2, DOCUMENTS[:12]),
    "many chunks": lambda: Problem(2, 16384, (8, 2)),
    "two sides": lambda: Problem(3, 3500, left=600, right=200),
    "two sides of documents": lambda: Problem(2, DOCUMENTS, left=300, right=70),
}
FIRST = ("two ranks", "documents", "fewer documents")


def _groups(kv_heads: int) -> tuple[int, ...] | None:
    """KV heads whose gradients return one after another: few first and last."""
    few = max(1, kv_heads // 8)
    return (few, kv_heads - 2 * few, few) if kv_heads >= 4 else None


def kernels_of(problem: Problem) -> Iterator[KernelSource]:
    """All that a problem runs, on one GPU and on its ranks."""
    (heads, kv_heads), (_, length, _, dim) = problem.heads, problem.whole[0].shape

    def asked(rows: int, keys: int, left: int, right: int, kv: int = kv_heads) -> AttentionProblem:
        return AttentionProblem(
            batch=1, heads=kv * (heads // kv_heads), kv_heads=kv, seqlen_q=rows, seqlen_k=keys, head_dim=dim,
            head_dim_v=dim, dtype=torch.bfloat16, scale=dim**-0.5, window_left=left, window_right=right,
            needs_grad=True, arch="sm_90a",
        )  # fmt: skip

    if len(problem.lengths) > 1:
        longest, count = max(problem.lengths), len(problem.lengths)
        yield from sources_of(replace(asked(longest, longest, problem.left, problem.right), batch=count, varlen=True))
    else:
        yield from sources_of(asked(length, length, problem.left, problem.right))
    groups = set(peer_memory.head_counts(head_bounds(_groups(kv_heads), kv_heads)))
    for rank in range(problem.ranks):
        blocks = blocks_of_all(gather_calls(problem.division, rank, True, False)) or []
        if len(problem.lengths) > 1:
            for kv in groups:
                packed = asked(*ranges_of(blocks).longest, *window_of(blocks), kv)
                packed = replace(packed, batch=len(blocks), varlen=True)
                yield from sources_of(packed)
                yield replace(KERNEL.config(packed), ranges=True).source()
            continue
        for each, kv in itertools.product(blocks, groups):
            rows, keys = each.q_stop - each.q_first, each.k_stop - each.k_first
            of_block = asked(rows, keys, each.left, each.right, kv)
            yield from sources_of(of_block)
            f32 = config_of_rank(of_block)
            yield from () if f32 is None else f32.sources()
            if len(blocks) == 1:  # a dense launch
                yield replace(KERNEL.config(of_block), arrivals=True).source()
        ranges = ranges_of(blocks)
        polled = replace(asked(*ranges.longest, *window_of(blocks)), batch=len(blocks), varlen=True)
        yield replace(KERNEL.config(polled), ranges=True, arrivals=True).source()


def sources(names: Iterable[str] = PROBLEMS) -> list[KernelSource]:
    """What problems of these names run, and those of two processes."""
    problems = [PROBLEMS[name]() for name in names] + [Problem(2, SHARED_TOKENS)]
    return list(dict.fromkeys(source for problem in problems for source in kernels_of(problem)))


def compile_ahead(names: Iterable[str] = PROBLEMS) -> dict[str, Any]:
    """The kernels of all problems at once."""
    built = compile_all((source, "sm_90a") for source in sources(names))
    return {"kernels": len(built.compiled), "compiled now": built.fresh, "ok": not built.wrong, "wrong": built.wrong}


def in_one_process(name: str) -> dict[str, Any]:
    """Output and gradients of six steps against one GPU; each step's output has the same bits."""
    steps = 6
    problem = PROBLEMS[name]()
    ranks = InOneProcess(problem)
    ranks.warm_up(True)
    first = ranks.step(2e-3, True)
    worst = problem.differences(first)
    other = 0
    for _ in range(steps - 1):
        again = ranks.step(2e-3, True)
        other += any(not torch.equal(a["out"], b["out"]) for a, b in zip(first, again, strict=True))
    polled = all(polled_only(task) for task in ranks.tasks)
    ok = polled and not other and all(error <= CLOSE[key] for key, error in worst.items())
    return {"case": str(problem), "ok": ok, "polled": polled, "other_bits": other, "steps": steps,
            "errors": {key: round(value, 5) for key, value in worst.items()}}  # fmt: skip


def repeats(count: int, until: float) -> dict[str, Any]:
    """Forwards of two ranks: the same bits at each."""
    ranks = InOneProcess(PROBLEMS["two ranks"](), 1)
    ranks.warm_up(False)
    first, other, done = ranks.step(0, False), 0, 0
    while done < count and time.monotonic() < until:
        again = ranks.step(1e-3 if done % 2 else 0, False)
        other += any(not torch.equal(a["out"], b["out"]) for a, b in zip(first, again, strict=True))
        done += 1
    return {"ok": not other and done > 0, "repeats": done, "other_bits": other}


def early() -> dict[str, Any]:
    """Without the wait for flags NaN is seen: what the checks above would find."""
    ranks = InOneProcess(PROBLEMS["many chunks"](), 2)
    ranks.warm_up(False)
    for each in ranks.memory:
        each[:FLAG_BYTES].view(torch.int32).fill_(1 << 20)
    with mock.patch.object(ChunkGathering, "_start", lambda self: None):
        found = ranks.step(0, False)
    return {"ok": any(bool(each["out"].isnan().any()) for each in found)}


# ---- two processes

SHARED_TOKENS = 4096


def _process(rank: int, size: int, folder: str, count: int) -> None:
    faulthandler.dump_traceback_later(APART_SECONDS - 6, exit=True)
    torch.cuda.set_device(HERE)
    share_sms()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    problem, chance = Problem(size, SHARED_TOKENS), random.Random(rank)
    with mock.patch.object(peer_memory, "GpuMemory", MemoryByIpc), mock.patch.object(functional, "POLLED", True):
        outputs, first, other = None, None, 0
        for _ in range(count):
            q, k, v, do = problem.of_rank(rank)
            time.sleep(chance.random() * 2e-3)
            out = functional.context_parallel_attn_func(q, k, v, causal=True, seqlen=SHARED_TOKENS, transport="copies")
            if first is None:
                out.backward(do)
                first, outputs = out.detach(), {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
            else:
                other += not torch.equal(first, out)
    torch.cuda.synchronize()
    whole = problem.expected()
    rows = problem.rows[rank]
    errors = {
        name: float((outputs[name].float() - right[:, rows].float()).norm() / right[:, rows].float().norm())
        for name, right in whole.items()
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps({"errors": errors, "other_bits": other}))
    dist.barrier()


def two_processes(folder: str, count: int = 200) -> dict[str, Any]:
    """Two processes of one GPU, whose memory is shared by CUDA IPC."""
    processes.spawn(_process, (2, folder, count), nprocs=2)
    found = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]
    ok = all(not each["other_bits"] and all(v <= CLOSE[k] for k, v in each["errors"].items()) for each in found)
    return {"ok": ok, "repeats": count, "ranks": found}


def symmetric_memory(rank: int, size: int, folder: str) -> None:
    """What torch's symmetric memory says to two ranks on one GPU."""
    torch.cuda.set_device(HERE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/symmetric", rank=rank, world_size=size)
    import torch.distributed._symmetric_memory as symmetric

    symmetric.rendezvous(symmetric.empty(4096, dtype=torch.uint8, device=HERE), dist.group.WORLD)


def asked_of_torch(folder: str) -> dict[str, Any]:
    """Whether torch's symmetric memory refuses."""
    try:
        processes.spawn(symmetric_memory, (2, folder), nprocs=2)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return {"refused": True, "message": (lines or [str(error)])[-1][:300]}
    return {"refused": False}


APART: dict[str, Callable[[str], dict[str, Any]]] = {
    "two processes": two_processes,
    "symmetric memory": asked_of_torch,
}
"""Parts that start processes; each runs in a process of its own, for so many seconds at most."""
APART_SECONDS = 75


def apart(part: str, folder: Path) -> dict[str, Any]:
    """What such a part found. Processes that it leaves behind end with the timeout of what they wait for."""
    command = [sys.executable, __file__, "--apart", part, "--out", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=APART_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        return {"ok": False, "error": f"no end within {APART_SECONDS} s: {late.stdout!r} {late.stderr!r}"[-1500:]}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"ok": False, "error": (done.stdout + done.stderr)[-1500:]}


SMS_FOR_COPIES, MOST_RANKS = 32, 4
"""Copies within a GPU's memory may be kernels, and kernels that poll would have all SMs. So the kernels of so many
ranks, the most that a problem has, may poll at once and leave some."""


def share_sms() -> None:
    """Let a kernel of this process take no more SMs than the kernels of all ranks can have at once."""
    real = torch.cuda.get_device_properties(HERE)
    properties = SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if not name.startswith("__")})
    properties.multi_processor_count = (real.multi_processor_count - SMS_FOR_COPIES) // MOST_RANKS
    mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for ranks_on_one_gpu.json")
    parser.add_argument("--seconds", type=float, default=60, help="nothing is begun after so many")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, help="these problems in one process, and nothing else")
    parser.add_argument("--apart", choices=APART, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.apart:
        faulthandler.dump_traceback_later(APART_SECONDS - 2, exit=True)
        print(json.dumps(APART[options.apart](str(options.out))), flush=True)
        return
    share_sms()
    faulthandler.dump_traceback_later(options.seconds + APART_SECONDS + 10, exit=True)
    folder = options.out / "processes"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    runs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("kernels", compile_ahead),
        *((name, lambda name=name: in_one_process(name)) for name in FIRST),
        ("early", early),
        ("repeats", lambda: repeats(options.repeats, time.monotonic() + 6)),
        *((name, lambda name=name: in_one_process(name)) for name in PROBLEMS if name not in FIRST),
        ("two processes", lambda: apart("two processes", folder)),
        ("symmetric memory", lambda: apart("symmetric memory", folder)),
    ]
    if options.only:
        runs = [("kernels", lambda: compile_ahead(options.only))]
        runs += [(name, lambda name=name: in_one_process(name)) for name in options.only]
    sys.exit(not run_parts(runs, options.seconds, options.out / "ranks_on_one_gpu.json"))


if __name__ == "__main__":
    main()
