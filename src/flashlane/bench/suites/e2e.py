"""Whole models with the attention swapped by name and everything else equal: ``flashlane e2e``.

Before an attention is timed, its result is compared with that of the library's default. The bench's own timer
interleaves the calls round by round, in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from flashlane.bench.measure.timing import Settings, Timing, clock_for, drawn_order, measure, summarise
from flashlane.bench.suites import whole_models as models
from flashlane.bench.suites.generation import generate, ours_in_transformers
from flashlane.bench.suites.suite import (
    FAIL,
    NA,
    Column,
    OutOfMemory,
    Value,
    guarded,
    milliseconds,
    release,
    speedup,
)
from flashlane.bench.suites.whole_models import DEFAULT, OURS, Attention, Built, Served, Setup, Workload

GPU_SETTINGS = Settings(rounds=5, round_ms=8.0, warmup_ms=30.0, warmup=1, budget_ms=2e4, protocols=("steady",))
CPU_SETTINGS = Settings(rounds=3, round_ms=1.0, warmup_ms=1.0, warmup=1, budget_ms=2e4)
REST = "rest"
_STEP = "forward and backward of {} of {}'s shape on {} tokens"

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("wan", "one of the 40 blocks of Wan2.1-14B on 75,600 tokens of a video", "diffusers", models.wan),
        Workload(
            "llama-8k",
            _STEP.format("some layers", "Llama-3.1-8B", "8,192"),
            "transformers",
            models.training("Llama", 8192, **models.LLAMA),
        ),
        Workload(
            "llama-32k",
            _STEP.format("some layers", "Llama-3.1-8B", "32,768"),
            "transformers",
            models.training("Llama", 32768, **models.LLAMA),
        ),
        Workload(
            "gemma",
            _STEP.format("some layers", "Gemma-7B", "8,192") + ", head dim 256",
            "transformers",
            models.training("Gemma", 8192, **models.GEMMA),
        ),
        Workload(
            "gpt-oss",
            "forward of some layers of gpt-oss-20b's shape on 4,096 tokens, windows and learned logits; the default is "
            "eager",
            "transformers",
            models.reading("GptOss", 4096, **models.GPT_OSS),
        ),
        Workload(
            "minilm", "embeddings of 1,024 padded sentences by MiniLM's own weights", "transformers", models.minilm
        ),
        Workload(
            "generate",
            "32 requests of 64 to 2,048 tokens to Llama-3.1-8B's shape over transformers' paged cache, 64 tokens each",
            "transformers",
            generate,
            "psutil",
        ),
    )
}


@dataclass(frozen=True)
class _Item:
    """A model's call under one attention, as the timer takes it."""

    tag: str
    call: Callable[[], torch.Tensor]
    context: Attention


@dataclass
class E2ESuite:
    """The table of whole models.

    Args:
        device: the device on which they run.
        workloads: names of :data:`WORKLOADS`.
        attentions: names of :data:`flashlane.bench.suites.whole_models.ATTENTIONS`; the default always runs.
        layers: layers of the models that are built with some of their layers.
        small: build tiny models.
        model: folder or package with the weights of minilm.
        timing: how long to measure.
        seed: seed of weights and tokens.
    """

    device: torch.device
    workloads: Sequence[str]
    attentions: Sequence[str] = models.ATTENTIONS
    layers: int = 2
    small: bool = False
    model: str | None = None
    timing: Settings = GPU_SETTINGS
    seed: int = 0

    name = "e2e"
    title = "e2e: whole models with the attention swapped by name"
    columns = (
        Column("workload", "workload"),
        Column("attention", "attention"),
        Column("ms", "ms", 3),
        Column("speedup", "vs default", 2, "x"),
        Column("to_flash", "vs flash", 2, "x", drop=2),
        Column("to_cudnn", "vs cudnn", 2, "x", drop=1),
        Column("tokens", "tokens/s", 0, drop=3),
        Column("whole_s", "whole model s", 2, drop=4),
        Column("error", "error", drop=5),
        Column("spread", "spread", drop=6),
    )

    def __post_init__(self) -> None:
        if "generate" in self.workloads and self.device.type == "cuda":
            ours_in_transformers()

    @property
    def notes(self) -> list[str]:
        small = ["Tiny models (--small): their times mean nothing."] if self.small else []
        notes = [f"{name}: {WORKLOADS[name].what}." for name in self.workloads]
        return [
            *small,
            f"ms: a call, the median of the rounds; models of {self.layers} layers where it says some, "
            f"{models.VOCABULARY} words, random weights. default is what the library takes by itself.",
            "error: norm of the difference from default's result by the norm of that; of generate, how far the worst "
            "token is below the best logit, in standard deviations.",
            *self._order(),
            *notes,
        ]

    def _order(self) -> list[str]:
        """A note that says which backend SDPA tries first here, since the default depends on it."""
        if self.device.type != "cuda":
            return []
        t = torch.empty(1, 1, 8, 8, device=self.device, dtype=torch.bfloat16)
        chosen = SDPBackend(torch._fused_sdp_choice(t, t, t)).name.removesuffix("_ATTENTION").lower()
        return [f"SDPA takes its backend {chosen} first on this device, with torch {torch.__version__}."]

    def settings(self) -> dict[str, Any]:
        known = {"workloads": list(self.workloads), "attentions": list(self.attentions), "layers": self.layers}
        return known | {"small": self.small, "seed": self.seed, "timing": asdict(self.timing)}

    def cases(self) -> list[Workload]:
        return [WORKLOADS[name] for name in self.workloads]

    def describe(self, case: Workload) -> str:
        return case.name

    def measure(self, case: Workload, say: Callable[[str], None], messages: list[str]) -> list[dict[str, Value]]:
        if missing := case.missing(self.device):
            messages.append(missing)
            return [self._row(case.name, OURS, NA)]
        say("build")
        setup = Setup(self.device, self.layers, self.small, self.model, self.seed)
        try:
            built = guarded(lambda: case.build(setup), self.device)
            rows = (self._served if isinstance(built, Served) else self._timed)(case.name, built, say, messages)
        except Exception as error:
            rows = [self._row(case.name, OURS, milliseconds(error, case.name, messages))]
        built = None
        release(self.device)
        return rows

    def _chosen(self, attentions: Mapping[str, Attention]) -> dict[str, Attention]:
        return {tag: found for tag, found in attentions.items() if tag == DEFAULT or tag in self.attentions}

    def _row(self, name: str, tag: str, cell: Value, **more: Value) -> dict[str, Value]:
        return {column.key: None for column in self.columns} | {"workload": name, "attention": tag, "ms": cell, **more}

    # --- calls that the bench's timer takes ---

    def _timed(
        self, name: str, built: Built, say: Callable[[str], None], messages: list[str]
    ) -> list[dict[str, Value]]:
        attentions = self._chosen(built.attentions)
        wrong, errors, reference = {}, {}, None
        for tag, context in attentions.items():
            say(f"check {tag}")
            try:
                with context():
                    result = guarded(built.call, self.device).detach().float()
            except Exception as error:  # a peer may refuse what it cannot run; its row says so
                wrong[tag] = self._refused(name, tag, error, messages)
                continue
            reference = result if reference is None else reference
            errors[tag] = float((result - reference).norm() / reference.norm())
            if not errors[tag] <= built.tolerance:
                messages.append(f"{name} {tag}: its result differs by {errors[tag]:.3g}, may by {built.tolerance:g}")
                wrong[tag] = FAIL
        items = [_Item(tag, built.call, context) for tag, context in attentions.items() if tag not in wrong]
        if built.rest is not None:
            items.append(_Item(REST, built.rest, attentions[DEFAULT]))
        timings = measure(items, clock_for(self.device, self.timing), self.timing, say)
        found = dict(zip([item.tag for item in items], timings, strict=True))
        without_attention = found.pop(REST, None)
        rows = []
        for tag in attentions:
            timing = found.get(tag)
            cell = wrong.get(tag) or milliseconds(timing, f"{name} {tag}", messages)
            more: dict[str, Value] = {"error": _digits(errors.get(tag))}
            if isinstance(timing, Timing):
                more |= {"tokens": built.tokens / timing.median * 1e3, "spread": _percent(timing)}
                if built.blocks and isinstance(without_attention, Timing):
                    more["whole_s"] = (built.blocks * timing.median + without_attention.median) / 1e3
            rows.append(self._row(name, tag, cell, **more))
        return self.compared(rows)

    def _refused(self, name: str, tag: str, error: Exception, messages: list[str]) -> Value:
        """The cell of an attention that raised: an error for ours and the default, N/A for a peer."""
        cell = milliseconds(error.with_traceback(None), f"{name} {tag}", messages)
        return cell if tag in (DEFAULT, OURS) or isinstance(error, OutOfMemory) else NA

    # --- requests ---

    def _served(
        self, name: str, built: Served, say: Callable[[str], None], messages: list[str]
    ) -> list[dict[str, Value]]:
        """Rows of each part and attention. A first run, which compiles, is compared with the model's own logits."""
        attentions = self._chosen(built.attentions)
        if OURS not in attentions and OURS in self.attentions:
            messages.append(f"{name} {OURS}: transformers takes FlashAttention's functions on a GPU only")
        wrong, errors = {}, {}
        for tag, context in attentions.items():
            say(f"check {tag}")
            try:
                with context():
                    guarded(built.run, self.device)
                errors[tag] = built.check()
            except Exception as error:
                wrong[tag] = self._refused(name, tag, error, messages)
                continue
            if not errors[tag] <= built.tolerance:
                messages.append(
                    f"{name} {tag}: a token is {errors[tag]:.3g} below the best, may be {built.tolerance:g}"
                )
                wrong[tag] = FAIL
        right = [tag for tag in attentions if tag not in wrong]
        seconds: dict[str, list[Mapping[str, float]]] = {tag: [] for tag in right}
        for _, index in drawn_order(len(right), self.timing.rounds, self.timing.order_seed):
            say(right[index])
            with attentions[right[index]]():
                seconds[right[index]].append(built.run())
        rows = []
        for part, tokens in built.tokens.items():
            served = []
            for tag in attentions:
                if tag in wrong:
                    served.append(self._row(f"{name} {part}", tag, wrong[tag], error=_digits(errors.get(tag))))
                    continue
                timing = summarise([1e3 * each[part] for each in seconds[tag]], 1, "host clock")
                more = {"tokens": tokens / timing.median * 1e3, "spread": _percent(timing)}
                served.append(self._row(f"{name} {part}", tag, timing.median, error=_digits(errors[tag]), **more))
            rows += self.compared(served)
        return rows

    @staticmethod
    def compared(rows: list[dict[str, Value]]) -> list[dict[str, Value]]:
        """The rows of one workload with their speed-ups over the default and over two backends of SDPA."""
        times = {row["attention"]: row["ms"] for row in rows}
        for row in rows:
            row["speedup"] = speedup(times.get(DEFAULT), row["ms"])
            for backend in ("flash", "cudnn"):
                row[f"to_{backend}"] = speedup(times[backend], row["ms"]) if backend in times else None
        return rows


def _digits(error: float | None) -> Value:
    return None if error is None else f"{error:.1e}"


def _percent(timing: Timing) -> str:
    return f"{100 * timing.spread:.1f} %"
