"""Check and time context parallelism on the GPUs of one host.

    PYTHONPATH=src python3 benchmarks/scripts/context_parallel.py --ranks 2 --out benchmarks/results

Writes context_parallel.json: (1) cases against one GPU, on NCCL; (2) repeats that must be equal bit by bit; (3) times
of the forward, and of forward and backward, of each method and of torch's own context parallelism, next to a share of
one GPU's time for the whole problem; (4) times of the parts. "ring" with layout zigzag is ring-flash-attention's
algorithm over these kernels. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.ranks import (
    Measured,
    SharedProblem,
    milliseconds,
    on_ranks,
    problem_fields,
    time_methods,
)
from flashlane.bench.measure.results import write_atomically
from flashlane.core.problem import Asked
from flashlane.distributed import token_indices
from flashlane.distributed.attend import Results, Settings, attend
from flashlane.distributed.comm import Ranks, start
from flashlane.distributed.gather import Gathering, Task
from flashlane.distributed.lanes import Lanes
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.plan import Division, gather_calls

FORMAT = "flashlane-context-parallel/1"
REPEATS = 500
COPIES = "allgather by copies"
METHODS = ("allgather", COPIES, "ring", "ulysses")
LAYOUTS = ("zigzag", "contiguous", "striped")


def packed_documents(total: int, seed: int = 3) -> tuple[int, ...]:
    """Lengths from 512 to 8192 that fill so many tokens."""
    chance, found = random.Random(seed), []
    while sum(found) < total:
        found.append(min(chance.randint(512, 8192), total - sum(found)))
    return tuple(found)


PROBLEMS = {
    "8k": SharedProblem(8192),
    "4k": SharedProblem(4096),
    "MHA 16k": SharedProblem(16384, kv_heads=32),
    "documents": SharedProblem(16384, documents=packed_documents(32768)),
}


def check(device: torch.device, tokens: int = 1001, kinds: tuple[str, ...] = METHODS) -> list[dict[str, Any]]:
    """Every method and layout in bf16 against one GPU: no farther from f32 than twice that GPU's own result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = []
    heads_of = ((8, 2), (4, 4))[: len(kinds)]
    for documents, (heads, kv_heads) in itertools.product(((), (tokens, 0, 1, 2 * tokens, 37)), heads_of):
        problem = SharedProblem(tokens, heads, kv_heads, documents=documents)
        total = problem.total(size)
        whole = problem.on_one(size, device)
        right = exact(problem, size, device)
        alone = whole.both()
        for method, layout in itertools.product(kinds, LAYOUTS):
            asked = {"method": "allgather", "transport": "copies"} if method == COPIES else {"method": method}
            case = {"documents": list(documents), "heads": [heads, kv_heads], "method": method, "layout": layout}
            found = problem.shared(device, layout=layout, **asked).both()
            lengths = documents or (total,)
            own = token_indices(
                cu_seqlens=[0, *itertools.accumulate(lengths)], layout=layout, rank=rank, world_size=size
            )
            axis, own = (0 if documents else 1), own.to(device)
            worst = 0.0
            for ours, one, exact_one in zip(found, alone, right, strict=True):
                mine = exact_one.index_select(axis, own)
                limit = 2 * (one.index_select(axis, own).float() - mine).abs().max() + 1e-3 * mine.abs().max()
                worst = max(worst, float((ours.float() - mine).abs().max() / limit))
            share = torch.tensor([worst], device=device)
            dist.all_reduce(share, dist.ReduceOp.MAX)
            rows.append({**case, "error_of_limit": round(float(share), 3), "ok": bool(share <= 1)})
    return rows


def exact(problem: SharedProblem, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Output and gradients of one process in f32."""
    wide = problem.on_one(size, device, kernel="reference")
    qkv = tuple(t.float() for t in wide.qkv)
    return Measured(qkv, wide.do.float(), wide.forward_of).both()


def repeats(device: torch.device, count: int) -> dict[str, Any]:
    """How many of so many runs differ from the first in any bit, of output or gradients."""
    found = {}
    for method in METHODS:
        asked = {"method": "allgather", "transport": "copies"} if method == COPIES else {"method": method}
        call = SharedProblem(1024, 8, 2).shared(device, deterministic=True, **asked)
        first = call.both()
        other = torch.zeros(1, device=device)
        for _ in range(count if method.startswith("allgather") else count // 5):
            other += ~torch.stack([(a == b).all() for a, b in zip(first, call.both())]).all()
        dist.all_reduce(other)
        found[method] = int(other)
    return found


def speed(device: torch.device, name: str, torchs: bool) -> dict[str, Any]:
    """Milliseconds of one problem by every method, and by torch's own context parallelism where that runs."""
    problem, size, heads = PROBLEMS[name], dist.get_world_size(), PROBLEMS[name].kv_heads
    methods: dict[str, dict[str, Any]] = {}
    few, rest = max(1, heads // 8), heads - 2 * max(1, heads // 8)
    for stride in (None, heads // 2):
        methods[f"allgather, {stride or 'all'} KV heads at a time"] = {"heads_k_stride": stride}
    for stride in (None, heads // 2, (few, heads), (2 * few, heads), (few, rest, few), (2 * few, rest, few)):
        methods[f"{COPIES}, {stride or 'all'} KV heads"] = {"heads_k_stride": stride, "transport": "copies"}
    methods["ring (ring-flash-attention's)"] = {"method": "ring"}
    methods["ulysses"] = {"method": "ulysses"}
    failures, more = {}, {}
    if torchs and not problem.documents:
        try:
            more["torch context_parallel"] = torch_context_parallel(problem, device)
            more["torch context_parallel"].both()
        except Exception as error:
            more.clear()
            failures["torch context_parallel"] = f"{type(error).__name__}: {error}"[:300]
    rows = time_methods(device, problem, methods, more=more)
    return {"name": name, **problem_fields(problem, size), "rows": rows, "failures": failures}


def torch_context_parallel(problem: SharedProblem, device: torch.device) -> Measured:
    """torch.distributed.tensor.experimental's ring over its own flash attention; KV heads repeated where it must."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cuda", (size,))
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
    """Milliseconds of what an allgather call consists of, one after another."""
    problem, size, ranks = PROBLEMS[name], dist.get_world_size(), Ranks.of(dist.group.WORLD)
    q, k, v = problem.shared(device).qkv
    division = Division("zigzag", (problem.total(size),), size, -1, 0)
    task = Task(ranks, division, Settings(Asked(scale=problem.head_dim**-0.5)))
    calls = gather_calls(division, ranks.rank, True, False)
    keys, values = gathered(task, k, v)
    results = Results.of(q, v.shape[-1], calls, Modifiers())

    def attend_all(overlap: bool) -> None:
        lanes = Lanes(device)
        if not overlap:
            lanes.streams = [lanes.streams[0]] * 3
        attend(results, q, keys, values, calls, Modifiers(), task.settings, lanes)
        lanes.join()

    peer, before = (ranks.rank + 1) % size, (ranks.rank - 1) % size
    buffer = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    found = milliseconds(
        {
            "gather of K and V": lambda: gathered(task, k, v),
            "forward's kernels on two streams": lambda: attend_all(True),
            "forward's kernels one after another": lambda: attend_all(False),
            "64 MiB sent and received": lambda: start(ranks, [(peer, buffer)], [(before, other)]).wait(),
            "4 KiB sent and received": lambda: start(ranks, [(peer, buffer[:4096])], [(before, other[:4096])]).wait(),
        },
        device,
    )
    for asked in (
        {},
        {"heads_k_stride": (1, 7)},
        {"transport": "copies"},
        {"transport": "copies", "heads_k_stride": (1, 7)},
    ):
        call = SharedProblem(512).shared(device, **asked)
        for way in ("forward", "both"):
            found[f"host's, {way} {asked}"] = host_milliseconds(getattr(call, way), device)
    return {key: round(ms, 4) for key, ms in found.items()}


def host_milliseconds(call: Any, device: torch.device, count: int = 50) -> float:
    """Until a call returns, while the GPU is behind."""
    call()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    ms = (time.perf_counter() - began) * 1e3 / count
    torch.cuda.synchronize(device)
    return ms


def gathered(task: Task, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values as a rank computes with them."""
    gathering = Gathering(task, k, v)
    gathering.finish()
    return gathering.gathered


def job(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Everything, on every rank."""
    found: dict[str, Any] = {"format": FORMAT, "environment": environment(device), "ranks": dist.get_world_size()}
    began = time.monotonic()

    def part(name: str, run: Any, *arguments: Any) -> Any:
        if time.monotonic() - began > options["seconds"]:
            return {"skipped": "no time left"}
        try:
            result = run(device, *arguments)
        except Exception:
            result = {"error": traceback.format_exc()[-2000:]}
        if dist.get_rank() == 0:
            found.setdefault(name, []).append(result) if name == "speed" else found.update({name: result})
            say(name, result, time.monotonic() - began)
            write_atomically(Path(options["out"]) / "context_parallel.json", json.dumps(found, indent=1))
        return result

    part("check", check, 1001, METHODS if options["check"] == "all" else (COPIES,))
    part("speed", speed, "8k", options["torch"])
    part("parts", parts, "8k")
    part("repeats", repeats, options["repeats"])
    for name in list(PROBLEMS)[1:]:
        part("speed", speed, name, options["torch"])
    return found


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
    elif name == "check" and isinstance(result, list):
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
    parser.add_argument("--check", choices=("all", "copies"), default="all", help="which methods are checked")
    parser.add_argument("--no-torch", action="store_true", help="without torch's own context parallelism")
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        print(f"this script needs {options.ranks} GPUs and sees {torch.cuda.device_count()}", file=sys.stderr)
        raise SystemExit(2)
    options.out.mkdir(parents=True, exist_ok=True)
    given = {"out": str(options.out.resolve()), "repeats": options.repeats, "seconds": options.seconds}
    given |= {"check": options.check, "torch": not options.no_torch}
    found = on_ranks(options.ranks, "nccl", job, given)
    wrong = [row for row in found["check"] if not row["ok"]] if isinstance(found["check"], list) else ["check"]
    if wrong or any(found.get("repeats", {"": 1}).values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
