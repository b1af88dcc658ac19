"""What a call of flex_attention costs the host in microseconds: forward, forward that records a gradient, and both.

    PYTHONPATH=src python3 benchmarks/scripts/flex_host.py --out flex_host.json [--seconds 20] [--tokens 128]

Calls are issued back to back and the clock is read before the device is waited for, as in ``host_cost.py``. The problem
is small, so that the device keeps up. ``kernel`` rows are ``flash_attn_func`` on the same tensors, and ``torch`` rows
an empty ``torch.autograd.Function``. The file is written again after each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host_cost import Both, Cost, Empty, measure

import flashlane
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.core.problem import Inputs
from flashlane.flex import blocks, masks

SCRIPT = "benchmarks/scripts/flex_host.py"
HEADS, HEAD_DIM = 8, 64
ROUNDS = 41
TARGETS = {"forward": 120.0, "both": 250.0}
"""What a call with a score may cost, µs."""


def linear(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score + (kv - q) * 0.01


def capped(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return 30 * torch.tanh(score / 30)


def cases(tokens: int, device: torch.device) -> dict[str, tuple[Callable[..., Any] | None, Any]]:
    """Scores and block masks by name."""
    slopes, cap = torch.rand(HEADS, device=device), 30.0

    def slope_of_head(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return cap * torch.tanh((score + slopes[h] * (kv - q)) / cap)

    def mask_of(function: Any) -> Any:
        return flashlane.create_block_mask(function, None, None, tokens, tokens, device)

    offsets = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32, device=device)
    causal, documents = mask_of(masks.causal()), mask_of(masks.documents(offsets, causal=True))
    chunks = mask_of(masks.block_causal_documents(offsets, max(64, tokens // 4)))
    table = torch.ones(1, HEADS, -(-tokens // 128), -(-tokens // 128), dtype=torch.bool).tril()
    counts, indices = (t.to(device) for t in blocks.lists(table))
    none, lengths = torch.zeros_like(counts), (tokens, tokens)
    by_hand = torch.nn.attention.flex_attention.BlockMask.from_kv_blocks(
        none, indices, counts, indices, BLOCK_SIZE=128, seq_lengths=lengths
    )
    return {
        "no score, no mask": (None, None),
        "causal": (None, causal),
        "linear, causal": (linear, causal),
        "tanh, causal": (capped, causal),
        "a slope of each head in a closure, causal": (slope_of_head, causal),
        "causal documents": (None, documents),
        "block-causal lists": (None, chunks),
        "linear, block-causal lists": (linear, chunks),
        "lists by hand": (None, by_hand),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)
    shape = 1, options.tokens, HEADS, HEAD_DIM
    plain = [torch.randn(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(3)]
    leaves = [t.detach().requires_grad_() for t in plain]
    items: list[tuple[Cost, Callable[[], object], Callable[[], Any]]] = []

    def add(name: str, kernel: str, call: Callable[..., Any]) -> None:
        items.append((Cost(name, "forward", kernel), lambda: call(*plain), torch.no_grad))
        items.append((Cost(name, "gradient", kernel), lambda: call(*leaves), contextlib.nullcontext))
        both = Both(lambda: call(*leaves), Inputs(*leaves))
        items.append((Cost(name, "both", kernel), both, contextlib.nullcontext))

    for name, (score, mask) in cases(options.tokens, device).items():
        add(name, "flex", lambda *t, s=score, m=mask: flashlane.flex_attention(*t, s, m))
    add(
        "flash_attn_func, causal",
        "kernel",
        lambda *t: flashlane.flash_attn_func(*(x.transpose(1, 2) for x in t), causal=True),
    )
    empty = Both(lambda: Empty.apply(*leaves), Inputs(*leaves))
    items.append((Cost("an empty autograd.Function", "both", "torch"), empty, contextlib.nullcontext))
    body = {"format": "flashlane-flex-host/1", "script": SCRIPT, "environment": environment(device), "seed": 0}
    body |= {"tokens": options.tokens, "heads": HEADS, "head_dim": HEAD_DIM, "targets_us": TARGETS}

    def keep() -> None:
        rows = [cost.figures() for cost, _, _ in items]
        write_atomically(options.out, json.dumps({**body, "rows": rows}, indent=1) + "\n")

    wait = torch.cuda.synchronize if gpu else (lambda: None)
    began = time.monotonic()
    measure(items, wait, options.rounds, options.seconds, keep)
    for cost, _, _ in items:
        figures = cost.figures()
        print(f"{cost.name:45} {cost.path:9} {figures.get('us', float('nan')):7.1f} µs  {cost.error[:120]}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
