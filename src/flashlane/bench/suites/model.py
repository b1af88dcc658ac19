"""The course's profile table: the times of a transformer's forward, backward and optimizer step with each attention.

One model of each size is trained on random tokens. Its attention is changed between steps, so that all implementations
have the same weights, optimizer state and clock rate. In each round every attention takes one step; the order of the
attentions is random.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashlane.bench.measure.grid import make_problem
from flashlane.bench.measure.timing import drawn_order
from flashlane.bench.suites.suite import FAIL, Column, OutOfMemory, Value, guarded, milliseconds, release, speedup
from flashlane.core import registry
from flashlane.core.dispatch import explain_problem
from flashlane.core.problem import DTYPES, AttentionProblem, arch_of
from flashlane.models import SIZES, Config, Transformer, select_attention

SMALLEST = {"xs": Config(256, 1024, 4, 4)}
"""A further size, for a CPU."""
ALL_SIZES = SMALLEST | SIZES
PHASES = ("forward", "backward", "optimizer")
COMPILED = "+compile"
"""The suffix of an attention's name that asks for ``torch.compile`` of each layer, with fixed shapes."""
LOSS_TOLERANCE = 2e-2
"""The largest relative difference of an attention's first loss from that of the first attention in the list."""


@dataclass(frozen=True)
class Case:
    """One model at one length."""

    size: str
    seqlen: int

    def __str__(self) -> str:
        return f"{self.size} N{self.seqlen}"


@dataclass
class Steps:
    """The measurements of one attention: seconds of each phase of each step, and the peak of memory in bytes."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    peak: int | None = None
    error: Exception | None = None
    loss: float | None = None


@dataclass
class ModelSuite:
    """The profile table.

    Args:
        device: the device on which it runs.
        sizes: names of :data:`ALL_SIZES`.
        seqlens: context lengths.
        attentions: names for :func:`flashlane.models.select_attention`, which may end in :data:`COMPILED`; speed-ups
            refer to the first.
        batch: sequences in a step.
        dtype: bf16 and f16 run under autocast with f32 weights, f32 without autocast.
        steps: measured steps of each attention.
        warmup: steps before these.
        seed: seed of weights and tokens.
    """

    device: torch.device
    sizes: Sequence[str]
    seqlens: Sequence[int]
    attentions: Sequence[str] = ("sdpa", "auto")
    batch: int = 4
    dtype: str = "bf16"
    steps: int = 10
    warmup: int = 3
    seed: int = 0

    name = "model"

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size not in ALL_SIZES:
                raise ValueError(f"--sizes has {size!r}; it may be {', '.join(ALL_SIZES)}")
        for attention in self.attentions:
            select_attention(attention.removesuffix(COMPILED))

    @property
    def title(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"model: batch {self.batch}, {self.dtype}, vocab {SIZES['sm'].vocab}, AdamW, {steps}, ms"

    @property
    def columns(self) -> tuple[Column, ...]:
        phases = [
            column
            for phase in PHASES
            for column in (
                Column(f"{phase}_avg", f"avg_{phase}", 2, drop=1),
                Column(f"{phase}_total", f"total_{phase}", 1, drop=3),
            )
        ]
        return (
            Column("size", "model_name"),
            Column("seqlen", "seq_len"),
            Column("attention", "attention"),
            *phases,
            Column("step_avg", "avg_total", 2),
            Column("peak", "peak(MB)", 0, drop=1),
            Column("tokens", "tokens/s", 0, drop=2),
            Column("speedup", f"speedup_vs_{self.attentions[0]}", 2, "x"),
        )

    @property
    def notes(self) -> list[str]:
        on_gpu = self.device.type == "cuda"
        peak = "a million bytes at the peak of a step, weights and optimizer state included"
        peak = peak if on_gpu else "unknown on a CPU"
        precision = f"f32 weights under {self.dtype} autocast" if self.dtype != "f32" else "f32 throughout"
        return [
            f"Milliseconds a step: avg is the median of the steps, total their sum; forward with loss, "
            f"backward and optimizer step apart; {precision}.",
            f"peak: {peak}. OOM: out of memory. FAIL: the first loss is off. {COMPILED}: layers compiled by torch.",
            *self._kernels(),
        ]

    def _kernels(self) -> list[str]:
        """Notes that name the forward and the backward kernel of each attention of ours."""
        tags: dict[str, list[str]] = {}
        ours = {"auto", *(kernel.tag for kernel in registry.kernels())}
        for name, case in itertools.product(self.attentions, self.cases()):
            tag = name.removesuffix(COMPILED)
            if tag not in ours:
                continue
            try:
                said = explain_problem(self._problem(case), None if tag == "auto" else tag)
            except NotImplementedError:  # its row says so
                continue
            tags.setdefault(f"{name} runs {said.chosen}, backward {said.backward}", []).append(str(case))
        return [f"{what}: {', '.join(cases)}." for what, cases in tags.items()]

    def _problem(self, case: Case) -> AttentionProblem:
        """The problem of a model's attention."""
        config = ALL_SIZES[case.size]
        sizes = (self.batch, config.heads, case.seqlen, config.head_dim, DTYPES[self.dtype])
        problem = make_problem(*sizes, kv_heads=config.kv_heads, causal=True, arch=arch_of(self.device))
        return replace(problem, needs_grad=True)

    def settings(self) -> dict[str, Any]:
        how = {"batch": self.batch, "dtype": self.dtype, "steps": self.steps, "warmup": self.warmup, "seed": self.seed}
        sizes = {name: vars(ALL_SIZES[name]) for name in self.sizes}
        return {**how, "sizes": sizes, "attentions": list(self.attentions), "loss_tolerance": LOSS_TOLERANCE}

    def cases(self) -> list[Case]:
        return [Case(size, seqlen) for size in self.sizes for seqlen in self.seqlens]

    def describe(self, case: Case) -> str:
        return f"model {case}"

    def measure(self, case: Case, say: Callable[[str], None], messages: list[str]) -> list[dict[str, Value]]:
        try:
            training = guarded(lambda: _Training(self, case), self.device)
        except OutOfMemory:
            return [
                self._row(case, name, Steps(error=OutOfMemory("out of memory")), messages) for name in self.attentions
            ]
        steps_of = {name: Steps() for name in self.attentions}
        for number in range(self.warmup):
            for name, steps in steps_of.items():
                say(f"warm up {name}")
                training.step(name, steps, keep=False, first=number == 0)
        order = list(steps_of.items())
        for _, index in drawn_order(len(order), self.steps):
            name, steps = order[index]
            say(name)
            training.step(name, steps)
        del training
        release(self.device)
        rows = [self._row(case, name, steps, messages) for name, steps in steps_of.items()]
        for row in rows:
            row["speedup"] = speedup(rows[0]["step_avg"], row["step_avg"])
        self._compare_losses(case, steps_of, rows, messages)
        return rows

    def _row(self, case: Case, name: str, steps: Steps, messages: list[str]) -> dict[str, Value]:
        row: dict[str, Value] = {"size": case.size, "seqlen": case.seqlen, "attention": name}
        if steps.error is not None:
            cell = milliseconds(steps.error, f"{case} {name}", messages)
            return row | {c.key: cell for c in self.columns if c.key not in row}
        step_seconds = [sum(parts) for parts in zip(*(getattr(steps, phase) for phase in PHASES), strict=True)]
        for phase in PHASES:
            times = getattr(steps, phase)
            row |= {f"{phase}_avg": 1e3 * statistics.median(times), f"{phase}_total": 1e3 * sum(times)}
        row["step_avg"] = 1e3 * statistics.median(step_seconds)
        row["peak"] = None if steps.peak is None else steps.peak / 1e6
        row["tokens"] = self.batch * case.seqlen / statistics.median(step_seconds)
        return row

    def _compare_losses(
        self, case: Case, found: dict[str, Steps], rows: list[dict[str, Value]], messages: list[str]
    ) -> None:
        """Mark the rows FAIL whose first loss differs from that of the first attention."""
        right = next((steps.loss for steps in found.values() if steps.loss is not None), None)
        for (name, steps), row in zip(found.items(), rows, strict=True):
            if steps.loss is None or abs(steps.loss - right) <= LOSS_TOLERANCE * abs(right):
                continue
            messages.append(f"{case} {name}: its first loss is {steps.loss:.4f}, and should be {right:.4f}")
            row |= {key: FAIL for key in row if key not in ("size", "seqlen", "attention")}


class _Training:
    """A model, its optimizer and its tokens."""

    def __init__(self, suite: ModelSuite, case: Case) -> None:
        self.suite, self.device = suite, suite.device
        torch.manual_seed(suite.seed)
        with suite.device:
            self.model = Transformer(replace(ALL_SIZES[case.size], attention=suite.attentions[0]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        vocab = self.model.config.vocab
        self.layers = {False: self.model.blocks}
        self.attends = {name: select_attention(name.removesuffix(COMPILED)) for name in suite.attentions}
        self.tokens = torch.randint(vocab, (suite.batch, case.seqlen + 1), device=suite.device)
        low = suite.dtype != "f32"
        self.autocast = (
            (lambda: torch.autocast(self.device.type, DTYPES[suite.dtype])) if low else contextlib.nullcontext
        )

    def step(self, name: str, steps: Steps, keep: bool = True, first: bool = False) -> None:
        """One step with an attention; ``keep`` keeps its times, ``first`` its loss, without an optimizer step."""
        if steps.error is not None:
            return
        self._take(name)
        try:
            times, loss = guarded(lambda: self._timed(update=not first), self.device)
        except Exception as error:
            steps.error = error.with_traceback(None)
            self.optimizer.zero_grad(set_to_none=True)
            return
        if first:
            steps.loss = loss
        if keep:
            for phase, seconds in zip(PHASES, times, strict=True):
                getattr(steps, phase).append(seconds)
            if self.device.type == "cuda":
                steps.peak = max(steps.peak or 0, torch.cuda.max_memory_allocated(self.device))

    def _take(self, name: str) -> None:
        """Set the attention of every layer, and whether the layers are compiled; their weights do not change."""
        for block in self.layers[False]:
            block.attention.attend = self.attends[name]
        compiled = name.endswith(COMPILED)
        if compiled not in self.layers:
            torch.compiler.reset()  # dynamo would count the compilations for other lengths as those of these layers
            made = (torch.compile(block, dynamic=False) for block in self.layers[False])
            self.layers[compiled] = torch.nn.ModuleList(made)
        self.model.blocks = self.layers[compiled]

    def _timed(self, update: bool) -> tuple[list[float], float]:
        """Seconds of forward, backward and optimizer step, each up to a synchronisation, and the loss.

        Without ``update`` the weights do not change, so that the next attention's first loss is of the same model.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        marks = [self._now()]
        with self.autocast():
            loss = self.model.loss(self.tokens)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        if update:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marks.append(self._now())
        return [later - earlier for earlier, later in itertools.pairwise(marks)], loss.item()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
