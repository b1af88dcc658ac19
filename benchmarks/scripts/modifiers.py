"""What a soft cap and ALiBi cost the forward: the same call with them and without, interleaved, on a GPU.

    python benchmarks/scripts/modifiers.py --out benchmarks/results [--seed 1600 --drawn 14] [--cap 30] [--only D128]

By the public function. Problems are those of the targets in bf16 (N 4096 and 16384, H·D = 2048), and dense ones of
drawn.py's list of the seed. Each output is compared with the formula in f64 for one head, then the three calls are
timed in drawn order under both protocols. The figure is a call's speed over that of the plain one. Writes
modifiers.json, again after each problem. Exit status 1 when an output is wrong.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpu_run import BOTH, device_or_exit, options

from flashlane import bench, flash_attn_func
from flashlane.bench.measure.check import relative_l2
from flashlane.bench.measure.drawn import timed
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.implementations import Implementation
from flashlane.bench.measure.inputs import random_inputs
from flashlane.bench.measure.results import check_writable, write_atomically
from flashlane.bench.measure.timing import clocks_for, measure_by
from flashlane.core.problem import AttentionProblem, Inputs, arch_of
from flashlane.reference.naive import reference_attention

FORMAT = "flashlane-modifiers/1"
PLAIN, MODIFIERS = "plain", ("softcap", "alibi")
WIDTH = 2048
ALLOWED = 1e-2
"""Relative error of an output."""


def problems(seed: int, drawn: int, arch: str | None, tokens: int = 16384) -> Iterator[AttentionProblem]:
    """The problems of the targets, then those of a seed."""
    made = partial(bench.make_problem, dtype=torch.bfloat16, arch=arch)
    for head_dim, causal in itertools.product((64, 96, 128, 192, 256), (True, False)):
        yield made(4, WIDTH // head_dim, tokens // 4, head_dim, causal=causal)
    for head_dim in (64, 128):
        yield made(1, WIDTH // head_dim, tokens, head_dim, causal=True)
    for number in range(drawn):
        yield timed("dense", seed, number).problem(arch)


def slopes_of(heads: int, device: torch.device) -> torch.Tensor:
    """ALiBi's own slopes: 2^(-8 i / heads), i from 1 on."""
    return torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)], device=device)


def arguments(modifier: str, cap: float, slopes: torch.Tensor) -> dict[str, Any]:
    return {PLAIN: {}, "softcap": {"softcap": cap}, "alibi": {"alibi_slopes": slopes}}[modifier]


def error(out: torch.Tensor, inputs: Inputs, given: dict[str, Any], problem: AttentionProblem) -> float:
    """Relative error of the last head of the first sequence, against the formula in f64."""
    slopes = given.get("alibi_slopes")
    q, k, v = (t[:1, :, -1:] for t in (inputs.q, inputs.k, inputs.v))
    one = Inputs(q, k, v, alibi_slopes=None if slopes is None else slopes[-1:])
    options = {"scale": problem.scale, "causal": problem.has_right_only, "softcap": given.get("softcap", 0.0)}
    right, _ = reference_attention(AttentionProblem.from_inputs(one, **options), one, torch.float64)
    return float(relative_l2(out[:1, :, -1:].double(), right.double()))


def measured(problem: AttentionProblem, cap: float, device: torch.device, settings: bench.Settings) -> dict[str, Any]:
    """A row: errors, milliseconds by protocol and call, and speeds over the plain call."""
    inputs = random_inputs(problem, device, 0)
    slopes = slopes_of(problem.heads, device)
    given = {m: arguments(m, cap, slopes) for m in (PLAIN, *MODIFIERS)}
    same = {"causal": problem.has_right_only, "softmax_scale": problem.scale}
    calls = {m: partial(flash_attn_func, inputs.q, inputs.k, inputs.v, **same, **each) for m, each in given.items()}
    errors = {m: error(call(), inputs, given[m], problem) for m, call in calls.items()}
    items = [Implementation(m, "kernel", call) for m, call in calls.items()]
    timings = measure_by(clocks_for(device, settings), items, settings)
    ms: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for item, timing in zip(items, timings, strict=True):
        if isinstance(timing, Exception):
            failed[item.tag] = str(timing)[:200]
            continue
        for protocol, each in timing.items():
            ms.setdefault(protocol, {})[item.tag] = each.median
    speed = {p: {m: of[PLAIN] / of[m] for m in MODIFIERS if m in of and PLAIN in of} for p, of in ms.items()}
    wrong = [m for m, each in errors.items() if not each <= ALLOWED]
    return {"problem": problem.describe(), "error": errors, "ms": ms, "speed": speed, "failed": failed, "wrong": wrong}


def line(row: dict[str, Any]) -> str:
    """A problem, and the speeds over the plain call: of each modifier by protocol."""
    speeds = (f"{m} {' / '.join(f'{of[m]:.3f}' for of in row['speed'].values() if m in of)}" for m in MODIFIERS)
    ends = f"  WRONG {', '.join(row['wrong'])}" if row["wrong"] else ""
    return f"{row['problem']:36} {'   '.join(speeds)}{ends}  {row['failed'] or ''}".rstrip()


def main() -> int:
    parser = options(__doc__, "modifiers", seconds=60.0)
    parser.add_argument("--seed", type=int, default=1600, help="of the drawn problems")
    parser.add_argument("--drawn", type=int, default=14, help="how many of them")
    parser.add_argument("--cap", type=float, default=30.0, help="the soft cap")
    parser.add_argument("--only", default="", help="problems that have all of these words: D128,causal")
    chosen_by = parser.parse_args()
    device = device_or_exit()
    check_writable(chosen_by.out)
    words = {word for word in chosen_by.only.split(",") if word}
    found = problems(chosen_by.seed, chosen_by.drawn, arch_of(device))
    chosen = [one for one in found if words <= set(one.describe().split())]
    if not chosen:
        parser.error(f"--only is {chosen_by.only!r}; no problem has all of these words")
    settings = bench.Settings(rounds=chosen_by.rounds, round_ms=6.0, warmup_ms=12.0, protocols=BOTH)
    body = {"format": FORMAT, "environment": environment(device), "seed": chosen_by.seed, "cap": chosen_by.cap}
    rows: list[dict[str, Any]] = []
    print(f"speed over that of plain scores, {' / '.join(BOTH)}")
    for problem in chosen:
        rows.append(measured(problem, chosen_by.cap, device, settings))
        print(line(rows[-1]), flush=True)
        write_atomically(chosen_by.out / "modifiers.json", json.dumps(body | {"rows": rows}, indent=1) + "\n")
    for protocol in BOTH:
        for modifier in MODIFIERS:
            found = [row["speed"][protocol][modifier] for row in rows if modifier in row["speed"].get(protocol, {})]
            if found:
                mean = statistics.geometric_mean(found)
                print(f"{modifier}, {protocol}: geometric mean {mean:.3f}, least {min(found):.3f}, of {len(found)}")
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
