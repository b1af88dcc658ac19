"""Check and time context parallelism on the GPUs of one host, by both transports.

    PYTHONPATH=src python3 benchmarks/scripts/context_parallel.py --ranks 2 --out benchmarks/results

Writes context_parallel.json after each part: (check) a few cases by each transport against one GPU; (speed) times of
the problems, in drawn orders, next to a share of one GPU's time for the whole problem; (parts) times of what a
call consists of; (repeats) calls that must be equal bit by bit; (captured) calls replayed from a CUDA graph; (peers)
times of the other methods and of torch's own context parallelism; (check_all) every method and layout. ``--do`` names
the parts that are done. Exit status 1 when a check fails. "ring" with layout zigzag is ring-flash-attention's algorithm
over these kernels.

With ``--switches`` what is built but off is on: by messages, one launch of the backward of two chunks. With ``--backend
gloo`` the ranks are processes on the CPU, with small problems in f32 and two timed calls of each: a rehearsal, whose
times say nothing.

With ``--rank R --folder F`` this process is one of the ranks, which others join by the same folder, so that one of them
can run under compute-sanitizer; it only checks.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from flashlane import flash_attn_func
from flashlane.bench.measure import ranks as measure_ranks
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.ranks import (
    Measured,
    SharedProblem,
    join_ranks,
    milliseconds,
    note,
    on_ranks,
    problem_fields,
    time_methods,
)
from flashlane.bench.measure.results import write_atomically
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.distributed import explain_transport, key_parts, launches, token_indices
from flashlane.distributed.attend import Settings
from flashlane.distributed.comm import Ranks, start
from flashlane.distributed.gather import Gathering, Task
from flashlane.distributed.plan import Division
from flashlane.reference.naive import reference_attention

SWITCHES: dict[str, tuple[Any, str]] = {"two-ranges": (launches, "TWO_RANGES")}
"""What ``--switches`` turns on, by its name."""
FORMAT = "flashlane-context-parallel/1"
REPEATS = 500
SLOW_SECONDS = 300
"""The timeout of a group of which a rank runs under the sanitizer."""
DEFAULT = "allgather"
"""With the transport that a caller gets who names none: copies on GPUs of one host, messages on a CPU."""
MESSAGES = "allgather by messages"
COPIES = "allgather by copies"
GROUPS = "allgather by copies, 2 KV heads first"
PARTS_OF_KEYS = "allgather by copies, backward in parts"
"""By copies, where a backward that can be in parts of its keys is in parts. In checks and repeats that of the other
methods is not."""
HOW: dict[str, dict[str, Any]] = {
    DEFAULT: {"method": "allgather"},
    MESSAGES: {"method": "allgather", "transport": "messages"},
    COPIES: {"method": "allgather", "transport": "copies"},
    GROUPS: {"method": "allgather", "transport": "copies", "heads_k_stride": (2, 1 << 20)},
    PARTS_OF_KEYS: {"method": "allgather", "transport": "copies"},
    "ring": {"method": "ring"},
    "ulysses": {"method": "ulysses"},
}
TRANSPORTS = (DEFAULT, MESSAGES, GROUPS)
METHODS = (MESSAGES, COPIES, PARTS_OF_KEYS, "ring", "ulysses")
LAYOUTS = ("zigzag", "contiguous", "striped")


def packed_documents(total: int) -> tuple[int, ...]:
    """Lengths from 512 to 8192 that fill so many tokens, the same at each call."""
    chance, found = random.Random(3), []
    while sum(found) < total:
        found.append(min(chance.randint(512, 8192), total - sum(found)))
    return tuple(found)


PARTS = ("check", "speed", "parts", "repeats", "captured", "peers", "check_all")
"""What ``--do`` may name, in the order in which it is done."""
ON_GPUS = ("parts", "captured")
"""The parts that a rehearsal leaves out."""
PROBLEMS = {
    "8k": SharedProblem(8192),
    "4k": SharedProblem(4096),
    "MHA 16k": SharedProblem(16384, kv_heads=32),
    "documents": SharedProblem(16384, documents=packed_documents(32768)),
}


SMALL = {
    "8k": SharedProblem(64, 4, 2, 16, dtype="float32"),
    "4k": SharedProblem(32, 4, 2, 16, dtype="float32"),
    "MHA 16k": SharedProblem(64, 4, 4, 16, dtype="float32"),
    "documents": SharedProblem(64, 4, 2, 16, dtype="float32", documents=(40, 0, 1, 70, 17)),
}
"""Problems of a rehearsal, by the names of those that they stand for."""


def is_rehearsal(device: torch.device) -> bool:
    """Whether problems are small and in f32, as ranks are processes on a CPU."""
    return device.type == "cpu"


def problem_of(name: str, device: torch.device) -> SharedProblem:
    """The problem of a name, small on a CPU."""
    return (SMALL if is_rehearsal(device) else PROBLEMS)[name]


def check(
    device: torch.device,
    tokens: int = 1001,
    kinds: tuple[str, ...] = METHODS,
    layouts: tuple[str, ...] = LAYOUTS,
    all_heads: tuple[tuple[int, int], ...] = ((8, 2), (4, 4)),
) -> list[dict[str, Any]]:
    """Methods and layouts in bf16 against one GPU: no farther from f32 than twice that GPU's own result.

    On a CPU they are in f32, with an error of 1e-5.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    small = {"head_dim": 16, "dtype": "float32"} if is_rehearsal(device) else {}
    least = 1e-5 if small else 1e-3
    rows = []
    for documents, (heads, kv_heads) in itertools.product(((), (tokens, 0, 1, 2 * tokens, 37)), all_heads):
        problem = SharedProblem(tokens, heads, kv_heads, documents=documents, **small)
        total = problem.total(size)
        whole = problem.on_one(size, device)
        right = exact(problem, size, device)
        alone = whole.both()
        for method, layout in itertools.product(kinds, layouts):
            asked = HOW[method]
            case = {"documents": list(documents), "heads": [heads, kv_heads], "method": method, "layout": layout}
            note(f"check of {case}")
            call = problem.shared(device, layout=layout, **asked)
            with parts_of(method):
                call.both()  # the second call is made with what is kept of the first
                results = call.both()
            lengths = documents or (total,)
            indices = token_indices(
                cu_seqlens=[0, *itertools.accumulate(lengths)], layout=layout, rank=rank, world_size=size
            )
            axis, indices = (0 if documents else 1), indices.to(device)
            worst = 0.0
            for ours, one, exact_one in zip(results, alone, right, strict=True):
                mine = exact_one.index_select(axis, indices)
                limit = 2 * (one.index_select(axis, indices).float() - mine).abs().max() + least * mine.abs().max()
                worst = max(worst, float((ours.float() - mine).abs().max() / limit))
            share = torch.tensor([worst], device=device)
            dist.all_reduce(share, dist.ReduceOp.MAX)
            rows.append({**case, "error_of_limit": round(float(share), 3), "ok": bool(share <= 1)})
    return rows


def parts_of(method: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which backwards of :data:`PARTS_OF_KEYS` are in parts, and others are not."""
    return mock.patch.object(key_parts, "KEY_PARTS", method == PARTS_OF_KEYS)


def exact(problem: SharedProblem, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Output and gradients of one process in f32, by the formula and torch's autograd: nothing is compiled."""
    *qkv, do = (t.float() for t in problem.tensors(size, device))
    qkv = [t.requires_grad_() for t in qkv]
    packed: dict[str, Any] = {}
    if problem.documents:
        cu, longest = torch.tensor(problem.cu_seqlens, dtype=torch.int32, device=device), max(problem.documents)
        packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    inputs = Inputs(*qkv, **packed)
    asked = AttentionProblem.from_inputs(inputs, scale=problem.head_dim**-0.5, causal=True)
    out, _ = reference_attention(asked, inputs)
    return out.detach(), *torch.autograd.grad(out, qkv, do)


def quick(device: torch.device) -> list[dict[str, Any]]:
    """The transports in the layout that is timed."""
    return check(device, tokens_of(device), (*TRANSPORTS, COPIES, PARTS_OF_KEYS), ("zigzag",), ((8, 4),))


def check_and_repeat(device: torch.device, tokens: int, count: int) -> dict[str, Any]:
    """Both in one group, as the test on two GPUs wants them, and the default transport."""
    found = {"check": check(device, tokens), "repeats": repeats(device, count)}
    return {**found, "transport": explain_transport(None, device)}


def every(device: torch.device) -> list[dict[str, Any]]:
    """All methods and layouts, on a CPU with one number of heads."""
    heads = ((8, 2),) if is_rehearsal(device) else ((8, 2), (4, 4))
    return check(device, tokens_of(device), all_heads=heads)


def rounds_on(device: torch.device) -> int:
    """Rounds in which each call is timed."""
    return 1 if is_rehearsal(device) else measure_ranks.ROUNDS


def tokens_of(device: torch.device) -> int:
    """Tokens of a rank that are checked."""
    return 19 if is_rehearsal(device) else 1001


def repeats(device: torch.device, count: int, methods: tuple[str, ...] = METHODS) -> dict[str, Any]:
    """How many of so many runs differ from the first in any bit, of output or gradients.

    A backward in parts adds to dQ in any order; its dK and dV are compared.
    """
    of_problems = {}
    for method in methods:
        tokens = 32 if is_rehearsal(device) else 1024
        dtype = "float32" if is_rehearsal(device) else "bfloat16"
        in_parts = method == PARTS_OF_KEYS
        compared = (0, 2, 3) if in_parts else (0, 1, 2, 3)
        call = SharedProblem(tokens, 8, 4, dtype=dtype).shared(device, deterministic=not in_parts, **HOW[method])
        other = torch.zeros(1, device=device)
        note(f"repeats of {method}")
        with parts_of(method):
            first = call.both()
            for _ in range(count // 5 if method in ("ring", "ulysses") else count):
                again = call.both()
                other += ~torch.stack([(first[i] == again[i]).all() for i in compared]).all()
        dist.all_reduce(other)
        of_problems[method] = int(other)
    return of_problems


def speed(device: torch.device, name: str) -> dict[str, Any]:
    """Milliseconds of one problem by each transport."""
    problem = problem_of(name, device)
    rows = time_methods(device, problem, {kind: HOW[kind] for kind in TRANSPORTS}, rounds=rounds_on(device))
    return {"name": name, **problem_fields(problem, dist.get_world_size()), "rows": rows, "failures": {}}


def peers(device: torch.device, name: str, torchs: bool) -> dict[str, Any]:
    """Milliseconds of one problem by the other methods, and by torch's own context parallelism where that runs."""
    problem, size = problem_of(name, device), dist.get_world_size()
    failures, more = {}, {}
    if torchs and not problem.documents:
        try:
            more["torch context_parallel"] = torch_context_parallel(problem, device)
            more["torch context_parallel"].both()
        except Exception as error:
            more.clear()
            failures["torch context_parallel"] = f"{type(error).__name__}: {error}"[:300]
    methods = {"ring (ring-flash-attention's)": HOW["ring"], "ulysses": HOW["ulysses"]}
    rows = time_methods(device, problem, methods, rounds=rounds_on(device), more=more)
    return {"name": name, **problem_fields(problem, size), "rows": rows, "failures": failures}


def captured(device: torch.device, name: str) -> dict[str, Any]:
    """Milliseconds of a call that a CUDA graph replays, so that the host has no part in them.

    By messages, and by the default transport, whose captured call sends messages, too.
    """
    of_problems: dict[str, Any] = {"name": name}
    for kind, way in itertools.product((MESSAGES, DEFAULT), ("forward", "both")):
        before, run = (getattr(problem_of(name, device).shared(device, **HOW[each]), way) for each in (MESSAGES, kind))
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for _ in range(3):
                before()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept = run()
        replayed = milliseconds({"": graph.replay}, device)
        of_problems[f"{kind}, {way}, replayed"] = round(replayed[""], 4)
        of_problems[f"{kind}, {way}, equal"] = float(_same(kept, before()))
    return of_problems


def _same(some: Any, other: Any) -> bool:
    """Whether outputs are equal, and gradients close: dQ is summed in any order."""
    torch.cuda.synchronize()
    pairs = [(some, other)] if isinstance(some, torch.Tensor) else list(zip(some, other, strict=True))
    return torch.equal(*pairs[0]) and all(torch.allclose(one, two, rtol=0.05, atol=0.05) for one, two in pairs[1:])


def torch_context_parallel(problem: SharedProblem, device: torch.device) -> Measured:
    """torch.distributed.tensor.experimental's ring over its own flash attention; KV heads repeated where it must."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(device.type, (size,))
    q, k, v, do = (t.transpose(1, 2).contiguous() for t in problem.tensors(size, device))
    k, v = (t.repeat_interleave(problem.heads // problem.kv_heads, 1) for t in (k, v))
    buffers = [q, k, v, do]
    context = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4)
    context.__enter__()  # stays on: it shards the buffers in place, and its dispatch must see the backward too

    def forward(*qkv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

    return Measured((q, k, v), do, forward)


def parts(device: torch.device, name: str) -> dict[str, float]:
    """Milliseconds of what an allgather call consists of, one after another, and of the host's part."""
    problem, size, ranks = PROBLEMS[name], dist.get_world_size(), Ranks.of(dist.group.WORLD)
    peer, before = (ranks.rank + 1) % size, (ranks.rank - 1) % size
    buffer = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    _, k, v = problem.shared(device).qkv
    alone = _without_messages(problem, device)
    division = Division("zigzag", (problem.total(size),), size, -1, 0)
    task = Task(ranks, division, Settings(CallOptions(scale=problem.head_dim**-0.5)))
    times = milliseconds(
        {
            "kernels of a rank, forward": alone.forward,
            "kernels of a rank, both": alone.both,
            "gather of K and V by messages": lambda: Gathering(task, k, v).finish(),
            "64 MiB sent and received": lambda: start(ranks, [(peer, buffer)], [(before, other)]).wait(),
            "4 KiB sent and received": lambda: start(ranks, [(peer, buffer[:4096])], [(before, other[:4096])]).wait(),
        },
        device,
    )
    for kind in TRANSPORTS:
        call = SharedProblem(512).shared(device, **HOW[kind])
        for way in ("forward", "both"):
            times[f"host's, {way}, {kind}"] = host_milliseconds(getattr(call, way), device)
    return {key: round(ms, 4) for key, ms in times.items()}


def _without_messages(problem: SharedProblem, device: torch.device) -> Measured:
    """The kernels of this rank's two chunks over keys that are there, on two streams: what no transport can beat."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, do = problem.tensors(size, device)
    chunk = problem.tokens // 2
    ends = [(2 * size - rank) * chunk, (rank + 1) * chunk]
    some = [tuple(t[:, end - n : end] for t, n in ((q, chunk), (k, end), (v, end), (do, chunk))) for end in ends]
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream(device)
        outs = []
        for i, stream in enumerate(streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                outs.append(flash_attn_func(*tensors[3 * i : 3 * i + 3], causal=True))
        for stream in streams:
            here.wait_stream(stream)
        return torch.cat(outs, 1)

    return Measured(tuple(t for each in some for t in each[:3]), torch.cat([each[3] for each in some], 1), forward)


def host_milliseconds(call: Any, device: torch.device) -> float:
    """Until a call returns, while the GPU is behind; the mean of 50 calls."""
    count = 50
    call()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    ms = (time.perf_counter() - began) * 1e3 / count
    torch.cuda.synchronize(device)
    return ms


def job(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """The parts, on every rank."""
    body: dict[str, Any] = {"format": FORMAT, "environment": environment(device), "ranks": dist.get_world_size()}
    began, measurements = time.monotonic(), options["do"]
    if is_rehearsal(device):
        measure_ranks.ROUND_MS = 0.0  # two calls a round
        measurements = [name for name in measurements if name not in ON_GPUS]
    for name in options["switches"]:
        setattr(*SWITCHES[name], True)
    body["switches"] = options["switches"]

    def part(name: str, run: Any, *arguments: Any) -> Any:
        late = torch.tensor([time.monotonic() - began > options["seconds"]], device=device)
        dist.broadcast(late, 0)  # all ranks skip the same parts
        if late:
            body.setdefault("skipped", []).append(name)
            return {"skipped": "no time left"}
        note(name)
        try:
            result = run(device, *arguments)
        except Exception:
            result = {"error": traceback.format_exc()[-2000:]}
        if dist.get_rank() == 0:
            body.setdefault(name, []).append(result) if name in ("speed", "peers", "captured") else body.update(
                {name: result}
            )
            say(name, result, time.monotonic() - began)
            write()
        return result

    def write() -> None:
        write_atomically(Path(options["out"]) / "context_parallel.json", json.dumps(body, indent=1))

    runs: dict[str, list[tuple[Any, ...]]] = {
        "check": [(quick,)],
        "speed": [(speed, name) for name in PROBLEMS],
        "parts": [(parts, "8k")],
        "repeats": [(repeats, options["repeats"])],
        "captured": [(captured, "8k"), (captured, "documents")],
        "peers": [(peers, name, True) for name in PROBLEMS],
        "check_all": [(every,)],
    }
    for name in measurements:
        for run, *arguments in runs[name]:
            part(name, run, *arguments)
    if dist.get_rank() == 0:
        write()  # with what was skipped last
    return body


def say(name: str, result: Any, seconds: float) -> None:
    """What a part found, as a person reads it."""
    print(f"--- {name} ({seconds:.0f} s)", flush=True)
    if isinstance(result, dict) and "rows" in result:
        print(result["problem"], result["failures"] or "")
        for row in result["rows"]:
            print(
                f"{row['method']:42} forward {row['forward_ms']:8.3f} ms {row['forward_efficiency']:6.1%}   both "
                f"{row['both_ms']:8.3f} ms {row['both_efficiency']:6.1%}"
            )
    elif name.startswith("check") and isinstance(result, list):
        wrong = [row for row in result if not row["ok"]]
        print(f"{len(result)} cases, {len(wrong)} wrong", *wrong, sep="\n")
    else:
        print(result["error"] if isinstance(result, dict) and "error" in result else result)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of context_parallel.json")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--seconds", type=float, default=110.0, help="nothing new is begun after them")
    parser.add_argument("--do", default=",".join(PARTS), help=f"a list of {', '.join(PARTS)}")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--switches", default="", help=f"a list of {', '.join(SWITCHES)}")
    parser.add_argument("--rank", type=int, help="this process is that rank; it only checks")
    parser.add_argument("--folder", type=Path, help="where the ranks of --rank meet")
    options = parser.parse_args()
    if options.backend == "nccl" and torch.cuda.device_count() < options.ranks:
        print(f"this script needs {options.ranks} GPUs and sees {torch.cuda.device_count()}", file=sys.stderr)
        raise SystemExit(2)
    if (options.rank is None) != (options.folder is None):
        parser.error("--rank and --folder are given together")
    switches = [name for name in options.switches.split(",") if name]
    if unknown := [name for name in switches if name not in SWITCHES]:
        parser.error(f"--switches has {unknown[0]!r}; it may have {', '.join(SWITCHES)}")
    wanted = ["check"] if options.rank is not None else [name for name in PARTS if name in options.do.split(",")]
    if unknown := [name for name in options.do.split(",") if name not in PARTS]:
        parser.error(f"--do has {unknown[0]!r}; it may have {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    job_options = {"out": str(options.out.resolve()), "repeats": options.repeats, "seconds": options.seconds}
    job_options |= {"do": wanted, "switches": switches}
    if options.rank is None:
        body = on_ranks(options.ranks, options.backend, job, job_options)
    else:
        measure_ranks.GROUP_SECONDS = SLOW_SECONDS
        body = join_ranks(options.rank, options.ranks, str(options.folder.resolve()), options.backend, job, job_options)
    checks = [body.get(name, []) for name in ("check", "check_all")]
    wrong = any(not isinstance(rows, list) or any(not row["ok"] for row in rows) for rows in checks)
    differing = body.get("repeats", {})
    if wrong or "error" in differing or any(differing.get(kind, 0) for kind in differing):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
