"""The course's two attention tables: plain PyTorch attention by size, and FlashAttention against PyTorch.

``attention``: batch 8, one head, f32, no mask; forward, backward and memory before the backward pass. ``flash``: batch
1, one head, causal; forward, backward and both, against eager PyTorch and PyTorch under ``torch.compile``. Passes are
timed separately: the forward records its graph, and the backward runs on a graph that was recorded before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F

from flashlane import flash_attn_func
from flashlane.bench.measure.timing import Clock, Settings, Timing, clocks_for, measure_by
from flashlane.bench.suites.suite import (
    ERROR,
    FAIL,
    OOM,
    Column,
    OutOfMemory,
    SavedBytes,
    Value,
    guarded,
    milliseconds,
    refuse_beyond_memory,
    release,
    speedup,
)
from flashlane.core.problem import DTYPES
from flashlane.core.work import DIRECTIONS, Direction
from flashlane.models.attention import eager_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Compiling = Literal["static", "dynamic", "none"]
COMPILING: tuple[Compiling, ...] = ("static", "dynamic", "none")
SCORE_COPIES = {"forward": 3, "backward": 5, "both": 5}
"""Score matrices that plain attention holds at once, by which cases that exceed a CPU's memory are refused."""
TOLERANCE = {"f16": 1e-2, "bf16": 2e-2, "f32": 2e-3, "f64": 1e-6}
"""The largest relative L2 error of an output or gradient against torch's own attention in f32 (f64 for f64)."""
GPU_SETTINGS = Settings(
    rounds=5, round_ms=5.0, warmup_ms=20.0, warmup=2, max_iterations=100, budget_ms=2000.0,
    protocols=("flushed", "steady"),
)  # fmt: skip
FURTHER = 12
"""A narrow terminal hides the speed-ups of further protocols before any other column."""
CPU_SETTINGS = Settings(rounds=3, round_ms=2.0, warmup_ms=4.0, warmup=1, max_iterations=50, budget_ms=600.0)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(QKᵀ)V without a mask, as separate operations; ``(b, s, h, d)``."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v).transpose(1, 2)


@dataclass(frozen=True)
class Case:
    """One row: length, head dim and dtype."""

    seqlen: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"N{self.seqlen} D{self.head_dim} {self.dtype}"


@dataclass
class Pass:
    """One implementation in one direction, for the timer; its graph exists only inside its context."""

    tag: str
    attend: Attend
    direction: Direction
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    do: torch.Tensor
    score_bytes: int = 0
    """Bytes of one score matrix; 0 for an implementation that holds none."""
    out: torch.Tensor | None = field(default=None, repr=False)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        refuse_beyond_memory(SCORE_COPIES[self.direction] * self.score_bytes, self.do.device)
        try:
            with torch.enable_grad():
                if self.direction == "backward":
                    self.out = guarded(lambda: self.attend(*self.tensors), self.do.device)
                yield
        finally:
            self.out = None

    def call(self) -> object:
        return guarded(self._call, self.do.device)

    def _call(self) -> object:
        if self.direction == "forward":
            return self.attend(*self.tensors)
        keep = self.direction == "backward"
        out = self.out if keep else self.attend(*self.tensors)
        return torch.autograd.grad(out, self.tensors, self.do, retain_graph=keep)


@dataclass
class Implementation:
    """One implementation of a suite: its key in the columns, and a function that gives its attention for a case."""

    key: str
    label: str
    prepare: Callable[[Case], Attend]
    holds_scores: bool = True


def compiled(attend: Attend, how: Compiling) -> Callable[[Case], Attend]:
    """``torch.compile`` of plain attention, for each shape (static) or once for all lengths (dynamic)."""
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward pass that is timed runs many times on one graph
    if how == "dynamic":
        once = torch.compile(attend, dynamic=True)
        return lambda case: once

    def prepare(case: Case) -> Attend:
        torch._dynamo.reset()  # after eight shapes dynamo would silently run the eager version
        return torch.compile(attend, dynamic=False)

    return prepare


@dataclass
class AttentionSuite:
    """One of the two tables that the module's docstring describes.

    Args:
        name: ``attention`` or ``flash``.
        device: the device on which it runs.
        seqlens: sequence lengths.
        head_dims: head dims.
        dtypes: names of dtypes.
        batch: the number of sequences.
        heads: heads of each sequence.
        compiling: whether torch.compile is compared, and how (``flash`` only).
        kernel: tag of our kernel, or None for the one that the dispatcher takes.
        timing: how long to measure, and under which protocols (on a CPU, which has one clock, a single one).
        seed: seed of the inputs.
    """

    name: Literal["attention", "flash"]
    device: torch.device
    seqlens: Sequence[int]
    head_dims: Sequence[int]
    dtypes: Sequence[str]
    batch: int = 1
    heads: int = 1
    compiling: Compiling = "none"
    kernel: str | None = None
    timing: Settings = GPU_SETTINGS
    seed: int = 0

    def __post_init__(self) -> None:
        self.causal = self.name == "flash"
        self._clocks: dict[str, Clock] = {}
        plain = eager_attention if self.causal else plain_attention
        ours = functools.partial(flash_attn_func, causal=self.causal, kernel=self.kernel)
        self.implementations = [Implementation("torch", "eager PyTorch", lambda case: plain)]
        if self.causal and self.compiling != "none":
            prepare = compiled(plain, self.compiling)
            self.implementations.append(Implementation("compiled", f"torch.compile ({self.compiling})", prepare))
        self.implementations.append(Implementation("ours", "flashlane", lambda case: ours, holds_scores=False))

    @property
    def title(self) -> str:
        mask = "causal" if self.causal else "no mask"
        return f"{self.name}: batch {self.batch}, {self.heads} head{'s' * (self.heads > 1)}, {mask}, ms"

    @property
    def columns(self) -> tuple[Column, ...]:
        keys = [implementation.key for implementation in self.implementations]
        sizes = (Column("seqlen", "seq_len"), Column("head_dim", "d_model"), Column("dtype", "precision"))
        short = {"forward": "fwd", "backward": "bwd", "both": "fbwd"}
        if not self.causal:
            columns = [
                column
                for key in keys
                for column in (
                    Column(f"{key}_forward", f"fwd_{key}(ms)", 3, drop=self._drop("forward", key)),
                    Column(f"{key}_backward", f"bwd_{key}(ms)", 3, drop=self._drop("backward", key)),
                    Column(f"{key}_memory", f"mem_{key}(MB)", 1, drop=self._drop("memory", key)),
                )
            ]
            return (sizes[1], sizes[0], sizes[2], *columns, *self._speedups(short, ("forward", "backward")))
        letters = {"forward": "ft", "backward": "bt", "both": "fbt"}
        times = [
            Column(f"{key}_{d}", f"{letters[d]}_{key}", 3, drop=self._drop(d, key)) for key in keys for d in DIRECTIONS
        ]
        return (*sizes, *times, *self._speedups({"forward": "fwd", "backward": "bwd", "both": "tot"}, DIRECTIONS))

    def _speedups(self, names: dict[str, str], directions: Sequence[str]) -> Iterator[Column]:
        others = [implementation.key for implementation in self.implementations[:-1]]
        for protocol, other, direction in itertools.product(self._protocols(), others, directions):
            suffix = "" if len(others) == 1 else f"_{other}"
            title = f"speedup_{names[direction]}{suffix}{protocol}"
            drop = self._drop(direction) + (FURTHER if protocol else 0)
            yield Column(f"speedup_{other}_{direction}{protocol}", title, 2, "x", drop=drop)

    def _protocols(self) -> tuple[str, ...]:
        """What the keys of each protocol end in: nothing for the first, whose milliseconds the table shows."""
        return ("", *(f"_{name}" for name in self.timing.protocols[1:]))

    def _drop(self, what: str, key: str = "") -> int:
        """A narrow terminal hides the forward last; within a direction, our time last, then the speed-up."""
        ours = self.implementations[-1].key
        return 1 + 3 * (*DIRECTIONS, "memory").index(what) + {ours: 0, "": 1}.get(key, 2)

    @property
    def notes(self) -> list[str]:
        labels = ", ".join(f"{i.key}: {i.label}" for i in self.implementations)
        notes = [
            f"{labels}. Milliseconds: median of interleaved rounds. The forward records its graph; the backward is "
            "timed separately, on a graph that was recorded before.",
            "OOM: out of memory. N/A: one of the two times is missing. FAIL: our result is off; it is not timed.",
        ]
        if len(self._protocols()) > 1:
            notes.append("Before each call the L2 cache is flushed; _steady: of calls back to back.")
        if self.causal:
            notes.append("ft, bt, fbt: forward, backward, both as one step.")
        else:
            how = "torch's allocator" if self.device.type == "cuda" else "inputs, output and what autograd saved"
            notes.append(f"mem: bytes alive before the backward pass ({how}), a million bytes.")
        return notes

    def settings(self) -> dict[str, Any]:
        problem = {"batch": self.batch, "heads": self.heads, "causal": self.causal, "seed": self.seed}
        how = {"rounds": self.timing.rounds, "round_ms": self.timing.round_ms, "compile": self.compiling}
        return {**problem, **how, "kernel": self.kernel or "auto", "tolerance": TOLERANCE}

    def cases(self) -> list[Case]:
        if self.causal:
            return [Case(n, d, t) for n, d, t in itertools.product(self.seqlens, self.head_dims, self.dtypes)]
        return [Case(n, d, t) for t, d, n in itertools.product(self.dtypes, self.head_dims, self.seqlens)]

    def describe(self, case: Case) -> str:
        return f"{self.name} {case}"

    def measure(self, case: Case, say: Callable[[str], None], messages: list[str]) -> list[dict[str, Value]]:
        row: dict[str, Value] = {"seqlen": case.seqlen, "head_dim": case.head_dim, "dtype": case.dtype}
        self._clocks = self._clocks or clocks_for(self.device, self.timing)
        try:
            tensors, do = guarded(lambda: self._inputs(case), self.device)
        except OutOfMemory:
            row |= {column.key: OOM for column in self.columns if column.key not in row}
            return [row]
        score_bytes = self.batch * self.heads * case.seqlen**2 * DTYPES[case.dtype].itemsize
        passes = {i.key: (i.prepare(case), score_bytes if i.holds_scores else 0, i.label) for i in self.implementations}
        say("check")
        wrong = self._check(case, passes["ours"][0], tensors, do)
        if wrong:
            messages.append(f"{case}: {wrong}")
            passes.pop("ours")
            row |= {column.key: FAIL for column in self.columns if column.key.startswith("ours_")}
        for direction in ("forward", "backward") if not self.causal else DIRECTIONS:
            items = [Pass(key, a, direction, tensors, do, size) for key, (a, size, _) in passes.items()]
            results = measure_by(self._clocks, items, self.timing, lambda tag, d=direction: say(f"{d} {tag}"))
            for item, result in zip(items, results, strict=True):
                what = f"{case} {direction} {item.tag}"
                if isinstance(result, Exception):
                    row[f"{item.tag}_{direction}"] = milliseconds(_without_traceback(result), what, messages)
                    continue
                for protocol, timing in zip(self._protocols(), result.values(), strict=True):
                    row[f"{item.tag}_{direction}{protocol}"] = milliseconds(timing, what, messages)
            release(self.device)
        if not self.causal:
            for key, (attend, size, _) in passes.items():
                row[f"{key}_memory"] = self._memory(attend, tensors, size)
        for column in self.columns:
            if column.key.startswith("speedup_"):
                _, other, timed = column.key.split("_", 2)
                row[column.key] = speedup(row.get(f"{other}_{timed}"), row.get(f"ours_{timed}"))
        del tensors, do, items
        release(self.device)
        return [row]

    def _inputs(self, case: Case) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        shape = (self.batch, case.seqlen, self.heads, case.head_dim)
        q, k, v, do = (
            torch.randn(shape, generator=generator, device=self.device).to(DTYPES[case.dtype]) for _ in range(4)
        )
        return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), do

    def _check(
        self, case: Case, attend: Attend, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], do: torch.Tensor
    ) -> str:
        """The error of our output or gradients against torch's attention in a wider type, as text; empty if right."""
        wide = torch.float64 if case.dtype == "f64" else torch.float32
        try:
            mine_all = guarded(lambda: _results(attend, tensors, do), self.device)
            exact = tuple(t.detach().to(wide).requires_grad_() for t in tensors)
            right = guarded(lambda: _results(self._torch_attention, exact, do.to(wide)), self.device)
        except OutOfMemory:
            return ""  # the cells of the measurement say that memory is exhausted
        except Exception as error:
            return f"flashlane: {type(error).__name__}: {error}"
        for name, mine, theirs in zip(("out", "dq", "dk", "dv"), mine_all, right, strict=True):
            error = float((mine.to(wide) - theirs).norm() / theirs.norm().clamp(min=torch.finfo(wide).tiny))
            if not error <= TOLERANCE[case.dtype]:
                return f"flashlane: {name} is off by {error:.2e} (relative L2; allowed {TOLERANCE[case.dtype]:g})"
        return ""

    def _torch_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)

    def _memory(
        self,
        attend: Attend,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        score_bytes: int,
    ) -> Value:
        """Megabytes alive between the forward and the backward: q, k, v, the output and what autograd saved."""
        on_gpu = self.device.type == "cuda"
        release(self.device)  # memory of the previous implementation
        before = torch.cuda.memory_allocated(self.device) if on_gpu else 0  # a library's workspace is no part of it
        try:
            refuse_beyond_memory(SCORE_COPIES["forward"] * score_bytes, self.device)
            with torch.enable_grad(), contextlib.nullcontext() if on_gpu else SavedBytes() as saved:
                out = guarded(lambda: attend(*tensors), self.device)
                if saved is None:
                    total = torch.cuda.memory_allocated(self.device) - before + sum(t.nbytes for t in tensors)
                else:
                    total = saved.total(*tensors, out)
        except OutOfMemory:
            return OOM
        except Exception:
            return ERROR  # the timing of the same call says what it raises
        return total / 1e6


def _results(
    attend: Attend, tensors: tuple[torch.Tensor, ...], do: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        out = attend(*tensors)
        return (out.detach(), *torch.autograd.grad(out, tensors, do))


def _without_traceback(result: Timing | Exception) -> Timing | Exception:
    """A result whose exception holds no traceback, which would keep the tensors of its frames alive."""
    return result.with_traceback(None) if isinstance(result, Exception) else result


def powers(low: int, high: int) -> list[int]:
    """low, 2·low, 4·low, … up to high."""
    return [low << i for i in range((high // low).bit_length())]
