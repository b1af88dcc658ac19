"""Whole models with the attention swapped by name: what flashlane's attention is worth to a model that has it.

    PYTHONPATH=src python3 benchmarks/scripts/e2e.py [--workloads wan,llama-8k,...] [--seconds 60] [--small] [--out DIR]

The models are those of the published packages diffusers and transformers, of random weights. Everything but the
attention is the same, its calls interleaved by the bench's own timer. Before it is timed, each attention's output is
held against the first one's. Printed and written (e2e.json) are milliseconds a call and how many times as fast as the
default each is. ``--small`` takes tiny models, on a CPU too, to see that everything runs: its times mean nothing.

| workload | what is called |
| --- | --- |
| wan | one layer of a Wan2.1-14B forward, 75,600 tokens of a video (40 heads of 128) |
| llama-8k, llama-32k | forward and backward of two layers of Llama-3.1-8B's shape |
| gemma-8k | the same of Gemma's shape, head dim 256 |
| gpt-oss-4k | forward of two layers of gpt-oss's shape, sinks and windows; transformers' own is eager |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlane import bench
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import finite, write_atomically
from flashlane.bench.measure.timing import Timing, clock_for, measure

OURS = "flashlane"
TOLERANCE = 0.05
"""Largest norm of a difference of two attentions' results by the norm of the first."""
Attention = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Item:
    """A model's call under one attention, as the timer takes it."""

    tag: str
    call: Callable[[], torch.Tensor]
    context: Attention


Built = tuple[Callable[[], torch.Tensor], dict[str, Attention]]
"""A model's call, and its attentions by name; the first is what the package takes by default."""


# --- diffusers ---


def wan(device: torch.device, small: bool) -> Built:
    import diffusers

    from flashlane import register_diffusers

    register_diffusers(OURS)
    shape = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32} if small else {}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        model = diffusers.WanTransformer3DModel(**shape, num_layers=1).to(dtype).eval()
        latents = torch.randn(1, 16, *((1, 8, 8) if small else (21, 90, 160)), dtype=dtype)
        text = torch.randn(1, 16 if small else 512, model.config.text_dim, dtype=dtype)
        step = torch.tensor([500])

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(latents, step, text, return_dict=False)[0]

    @contextlib.contextmanager
    def backend(name: str) -> Iterator[None]:
        model.set_attention_backend(name)
        yield

    names = {"default": "native", OURS: OURS}
    if device.type == "cuda":
        names |= {"flash": "_native_flash", "cudnn": "_native_cudnn"}
    return call, {tag: lambda name=name: backend(name) for tag, name in names.items()}


# --- transformers ---


def training(kind: str, tokens: int, **config: Any) -> Callable[[torch.device, bool], Built]:
    """Forward and backward of a causal model on one sequence."""

    def build(device: torch.device, small: bool) -> Built:
        model, ids = _model(kind, tokens, config, device, small)

        def call() -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            # What the check reads: the gradient of the first layer's queries has been through every attention.
            return model.model.layers[0].self_attn.q_proj.weight.grad

        return call, _attentions(model, device)

    return build


def reading(kind: str, tokens: int, **config: Any) -> Callable[[torch.device, bool], Built]:
    """Forward of a model that transformers runs in eager mode only."""

    def build(device: torch.device, small: bool) -> Built:
        model, ids = _model(kind, tokens, config, device, small)

        def call() -> torch.Tensor:
            with torch.no_grad():
                return model(input_ids=ids, use_cache=False, logits_to_keep=64).logits

        own = _attentions(model, device)
        return call, {"default": lambda: _implementation(model, "eager", contextlib.nullcontext()), OURS: own[OURS]}

    return build


def _model(
    kind: str, tokens: int, config: dict[str, Any], device: torch.device, small: bool
) -> tuple[Any, torch.Tensor]:
    import transformers

    if small:
        tokens = 64
        config = {**config, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
        config["num_key_value_heads"] = min(2, config["num_key_value_heads"])
    torch.manual_seed(0)
    settings = getattr(transformers, f"{kind}Config")(**config, vocab_size=1024, num_hidden_layers=2, pad_token_id=0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(settings).to(dtype)
        ids = torch.randint(1, 1024, (1, tokens))
    return model, ids


@contextlib.contextmanager
def _implementation(model: Any, name: str, inner: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    model.set_attn_implementation(name)
    with inner:
        yield


def _attentions(model: Any, device: torch.device) -> dict[str, Attention]:
    from flashlane import register_transformers

    name = register_transformers()
    found: dict[str, Attention] = {
        "default": lambda: _implementation(model, "sdpa", contextlib.nullcontext()),
        OURS: lambda: _implementation(model, name, contextlib.nullcontext()),
    }
    if device.type == "cuda":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        for tag, backend in backends.items():
            found[tag] = lambda backend=backend: _implementation(model, "sdpa", sdpa_kernel(backend))
    return found


LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072}
GEMMA = {"hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16, "num_key_value_heads": 16}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
WORKLOADS: dict[str, Callable[[torch.device, bool], Built]] = {
    "wan": wan,
    "llama-8k": training("Llama", 8192, **LLAMA),
    "llama-32k": training("Llama", 32768, **LLAMA),
    "gemma-8k": training("Gemma", 8192, **GEMMA, head_dim=256, max_position_embeddings=8192),
    "gpt-oss-4k": reading("GptOss", 4096, **GPT_OSS, head_dim=64, num_local_experts=4, num_experts_per_tok=2),
}


# --- measuring ---


@dataclass(frozen=True)
class Row:
    """One attention in one workload."""

    workload: str
    attention: str
    error: float | None
    """Norm of the difference from the default's result by the norm of that."""
    timing: Timing | None
    speedup: float | None = None
    """How many times as fast as the default."""
    failure: str = ""


def rows_of(name: str, device: torch.device, settings: bench.Settings, small: bool) -> list[Row]:
    """Check and time every attention of a workload."""
    call, attentions = WORKLOADS[name](device, small)
    items, rows, wanted = [], [], None
    for tag, context in attentions.items():
        try:
            with context():
                result = call().detach().float()
        except Exception as error:  # a backend refuses what it cannot run; its row says so
            rows.append(Row(name, tag, None, None, failure=f"{type(error).__name__}: {str(error).splitlines()[0]}"))
            continue
        wanted = result if wanted is None else wanted
        difference = float((result - wanted).norm() / wanted.norm())
        items.append((Item(tag, call, context), difference))
        if not difference <= TOLERANCE:
            rows.append(Row(name, tag, difference, None, failure=f"differs by {difference:.3g}, may by {TOLERANCE}"))
            items.pop()
    found = measure([item for item, _ in items], clock_for(device, settings), settings)
    for (item, difference), timing in zip(items, found, strict=True):
        failed = isinstance(timing, Exception)
        rows.append(Row(name, item.tag, difference, None if failed else timing, failure=str(timing) if failed else ""))
    base = next((row.timing.median for row in rows if row.attention == "default" and row.timing), None)
    return [replace(row, speedup=base / row.timing.median) if base and row.timing else row for row in rows]


def show(rows: list[Row]) -> None:
    print(f"{'workload':12} {'attention':10} {'ms':>10} {'speedup':>8} {'error':>9}")
    for row in rows:
        if row.timing is None:
            print(f"{row.workload:12} {row.attention:10} {row.failure}")
            continue
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}"
        print(f"{row.workload:12} {row.attention:10} {row.timing.median:10.3f} {speedup:>8} {row.error:9.2g}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of them, with commas between")
    parser.add_argument("--seconds", type=float, default=10.0, help="GPU time of each attention of a workload, at most")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of e2e.json")
    known = parser.parse_args(arguments)
    chosen = known.workloads.split(",")
    if unknown := [name for name in chosen if name not in WORKLOADS]:
        parser.error(f"--workloads has {unknown[0]!r}; it may have {', '.join(WORKLOADS)}")
    if not torch.cuda.is_available() and not known.small:
        parser.error("torch sees no CUDA device; --small runs tiny models on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = bench.Settings(rounds=5, round_ms=8.0, warmup=1, budget_ms=1e3 * known.seconds, protocols=("steady",))
    rows: list[Row] = []
    for name in chosen:
        rows += rows_of(name, device, settings, known.small)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    show(rows)
    body = {"environment": environment(device), "small": known.small, "rows": finite([asdict(row) for row in rows])}
    known.out.mkdir(parents=True, exist_ok=True)
    write_atomically(known.out / "e2e.json", json.dumps(body, indent=1) + "\n")
    return int(any(row.attention == OURS and row.timing is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
