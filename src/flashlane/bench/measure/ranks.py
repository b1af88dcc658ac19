"""Context parallelism measured: the processes of a group, their problems, and what is timed on them."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from flashlane import flash_attn_func, flash_attn_varlen_func
from flashlane.distributed import context_parallel_attn_func, context_parallel_attn_varlen_func, shard_sequence

GROUP_SECONDS = 60
ROUNDS = 3
ROUND_MS = 60.0
Call = Callable[[], object]


@dataclass(frozen=True)
class SharedProblem:
    """Self-attention under a causal mask over a sequence, or packed documents, that all ranks share."""

    tokens: int
    """A rank."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    documents: tuple[int, ...] = ()
    """Tokens of each; none: one sequence."""
    dtype: str = "bfloat16"

    def total(self, ranks: int) -> int:
        return sum(self.documents) or self.tokens * ranks

    def describe(self, ranks: int) -> str:
        """One line, as tables show it."""
        what = f"{len(self.documents)} documents" if self.documents else "one sequence"
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        return f"{what} of {self.total(ranks)} tokens, {heads} D{self.head_dim} {self.dtype} causal"

    def tensors(self, ranks: int, device: torch.device) -> list[torch.Tensor]:
        """q, k, v and the output's gradient of all tokens; the same on every rank."""
        random = torch.Generator(device).manual_seed(1)
        outer = (self.total(ranks),) if self.documents else (1, self.total(ranks))
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        dtype = getattr(torch, self.dtype)
        return [torch.randn(*outer, h, self.head_dim, generator=random, device=device, dtype=dtype) for h in heads]

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *itertools.accumulate(self.documents)]

    def on_one(self, ranks: int, device: torch.device, **asked: Any) -> Measured:
        """The whole problem in one process."""
        q, k, v, do = self.tensors(ranks, device)

        def forward(*qkv: torch.Tensor) -> torch.Tensor:
            if not self.documents:
                return flash_attn_func(*qkv, causal=True, **asked)
            cu = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=device)
            longest = max(self.documents)
            return flash_attn_varlen_func(*qkv, cu, cu, longest, longest, causal=True, **asked)

        return Measured((q, k, v), do, forward)

    def shared(self, device: torch.device, group: Any = None, layout: str = "zigzag", **asked: Any) -> Measured:
        """This rank's part of it."""
        size = group.size() if group is not None else dist.get_world_size()
        cu = self.cu_seqlens if self.documents else None
        dim = 0 if self.documents else 1
        q, k, v, do = (
            shard_sequence(t, dim, cu_seqlens=cu, layout=layout, group=group) for t in self.tensors(size, device)
        )

        def forward(*qkv: torch.Tensor) -> torch.Tensor:
            where = {"group": group, "layout": layout, **asked}
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
        """Without gradients."""
        with torch.no_grad():
            return self.forward_of(*self.qkv)

    def both(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients."""
        qkv = [t.detach().requires_grad_() for t in self.qkv]
        out = self.forward_of(*qkv)
        return out.detach(), *torch.autograd.grad(out, qkv, self.do)


def milliseconds(calls: dict[str, Call], device: torch.device, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of each call, the slowest rank's: medians over rounds in which each is timed in turn."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(2, min(50, round(ROUND_MS / max(_slowest(call, 2, device), 1e-3))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_slowest(call, counts[name], device))
    return {name: statistics.median(values) for name, values in found.items()}


def _slowest(call: Call, count: int, device: torch.device) -> float:
    call()
    dist.barrier()
    torch.cuda.synchronize(device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    worst = torch.tensor([start.elapsed_time(stop) / count], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _work(rank: int, size: int, folder: str, backend: str, job: Callable[..., Any], arguments: Sequence[Any]) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
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
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(size: int, backend: str, job: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of a module in so many processes of one group; what it returns on rank 0, as JSON holds it.

    Args:
        size: processes, each with a GPU of its own where the backend is "nccl".
        backend: "nccl" or "gloo".
        job: called with the rank's device and the arguments.

    Raises:
        ProcessRaisedException: a rank raised; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_work, (size, folder, backend, job, arguments), nprocs=size)
        return json.loads(Path(folder, "result.json").read_text())


def problem_fields(problem: SharedProblem, ranks: int) -> dict[str, Any]:
    """A problem as results name it."""
    return {"problem": problem.describe(ranks), "ranks": ranks, **asdict(problem)}
