"""Configurations of the Hopper backward against each other, and against a peer: what a field of them is worth.

    PYTHONPATH=src python3 benchmarks/scripts/backward_candidates.py --vary block_m=64,80 --vary k_stages=1,2
        [--only d128,causal] [--peers fa4,cudnn] [--out FILE.json] [--seconds 60]
    PYTHONPATH=src python3 benchmarks/scripts/backward_candidates.py --compile --vary block_m=64,80,96 --only d96

Of each cell of hopper_backward.py, backward alone, every combination of the fields' values is put into the table's
configuration. Each is checked against the formula's gradients on a small problem of its kind and against the table's
choice (``*``) on the cell, then all are timed interleaved, hot. What does not fit shared memory is left out and said.
``--compile`` needs no GPU: registers, spills and shared memory of each. Exit status 1 when a configuration was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from gpu_run import ROUNDS, device_or_exit, heat
from hopper_backward import PEER_TAGS, TAG, Cell, cells, wanted
from hopper_forward import rates, time_interleaved
from hopper_shapes import Shape, make, problem_of

from flashlane import bench, jit
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import flops, sequences_of
from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.backward.config import SWITCHES, GradientConfig
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients

FORMAT = "flashlane-backward-candidates/1"
ARCH = "sm_90a"
FIXED = ("dtype", "head_dim", "head_dim_v", *SWITCHES)
"""Fields that a problem decides."""
SMALL = {"batch": 2, "heads": 2, "kv_heads": 1, "seqlen_q": 333, "seqlen_k": 333}
"""Sizes of the problem on which a configuration is held against the formula."""
TOLERANCE = 1e-2
"""Largest relative error (Frobenius) of a gradient: bf16's is near 4e-3."""
Values = dict[str, tuple[object, ...]]


def parsed(words: Sequence[str]) -> Values:
    """``block_m=64,80`` as a field and its values: numbers, ``true`` and ``false``.

    Raises:
        ValueError: a word is none of that form.
    """
    known = {"true": True, "false": False}
    found: Values = {}
    for word in words:
        name, _, values = word.partition("=")
        try:
            found[name] = tuple(known[v] if v in known else int(v) for v in values.split(","))
        except ValueError:
            raise ValueError(f"--vary is {word!r}; it must be like block_m=64,80 or k_stages=1,2") from None
    return found


def combinations(base: GradientConfig, values: Values) -> Iterator[GradientConfig]:
    """A configuration, then with each combination of its fields' values; fields that it has not are left out.

    Raises:
        ValueError: a field is the problem's, or the configuration has none of the fields.
    """
    free = [field.name for field in fields(base) if field.name not in FIXED]
    if decided := set(values) & set(FIXED):
        raise ValueError(f"--vary has {', '.join(sorted(decided))}, which the problem decides; free: {', '.join(free)}")
    own = {name: found for name, found in values.items() if name in free}
    if not own:
        raise ValueError(f"--vary has {', '.join(values) or 'nothing'}; {type(base).__name__} has {', '.join(free)}")
    made = (replace(base, **dict(zip(own, chosen, strict=True))) for chosen in itertools.product(*own.values()))
    yield from dict.fromkeys((base, *made))


def refusal(config: GradientConfig) -> str | None:
    """Compile a configuration; why there is none such, or None."""
    if config.shared_memory > jit.shared_limit(ARCH):
        return f"{config.shared_memory} bytes of shared memory; a block has {jit.shared_limit(ARCH)}"
    try:
        for source in config.sources():
            jit.compile(source, ARCH)
    except (ValueError, jit.CompileError) as error:
        return str(error).splitlines()[0]
    return None


def refusals(configs: Sequence[GradientConfig]) -> dict[GradientConfig, str | None]:
    """Of all at once, on all processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(configs, pool.map(refusal, configs), strict=True))


def changes(config: GradientConfig, base: GradientConfig) -> str:
    """What a configuration has other than the base: ``block_m=64, k_stages=2``."""
    differ = [field.name for field in fields(base) if getattr(config, field.name) != getattr(base, field.name)]
    return ", ".join(f"{name}={getattr(config, name)}" for name in differ) or "*"


# ---- without a GPU


def said(cell: Cell, values: Values, why: dict[GradientConfig, str | None]) -> Iterator[str]:
    """What the compiler says of each configuration of a cell, a line each."""
    base = backward.config_of(problem_of(cell.shape, cell.deterministic))
    for config in combinations(base, values):
        name = f"{changes(config, base):<52} {config.shared_memory:>7} bytes"
        if why[config]:
            yield f"  {name}  left out: {why[config]}"
            continue
        for source in config.gradient_sources():
            report = jit.compile(source, ARCH).report
            yield f"  {name}  {source.entry}: {report.registers} registers, {report.spills} bytes spilled"


# ---- on a GPU


@dataclass
class Given:
    """A problem, its tensors, and what its forward found."""

    problem: AttentionProblem
    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor

    def run(self, config: GradientConfig) -> Gradients:
        return backward.hopper_backward(self.problem, self.inputs, self.out, self.lse, self.do, config=config)


def given(shape: Shape, deterministic: bool, device: torch.device) -> Given:
    problem, inputs = make(shape, device)
    problem = replace(problem, deterministic=deterministic)
    out = inputs.q.new_empty((*inputs.q.shape[:-1], problem.head_dim_v))
    rows = (problem.heads, len(inputs.q)) if shape.lengths else (problem.batch, problem.heads, problem.seqlen_q)
    lse = torch.empty(rows, device=device)
    registry.get(TAG).forward(problem, inputs, out, lse)
    return Given(problem, inputs, out, lse, torch.randn_like(out))


def worst(found: Gradients, right: Sequence[torch.Tensor]) -> float:
    """The largest relative error of dq, dk and dv; NaN where one has a NaN."""
    errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found[:3], right, strict=True)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def formula(small: Given) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v in f32 by autograd."""
    leaves = [getattr(small.inputs, name).float().requires_grad_() for name in "qkv"]
    inputs = replace(small.inputs, **dict(zip("qkv", leaves, strict=True)))
    with torch.enable_grad():
        out, _ = reference_attention(small.problem, inputs, torch.float32)
    return torch.autograd.grad(out, leaves, small.do.float())


def peer_calls(large: Given, names: Sequence[str]) -> dict[str, Callable[[], object]]:
    """A backward of each peer that can run the problem; what it cannot is said."""
    found: dict[str, Callable[[], object]] = {}
    for name in names:
        (peer,) = bench.select_peers(PEER_TAGS[name])
        reason = peer.available(large.do.device) or peer.supports(large.problem)
        if reason:
            print(f"  no {name}: {reason}")
            continue
        leaves = [getattr(large.inputs, letter).detach().requires_grad_() for letter in "qkv"]
        inputs = replace(large.inputs, **dict(zip("qkv", leaves, strict=True)))
        with torch.enable_grad(), peer.context():
            out = peer.prepare(large.problem, inputs)()
        found[name] = lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, large.do, retain_graph=True)
    return found


def measure(
    cell: Cell,
    values: Values,
    why: dict[GradientConfig, str | None],
    device: torch.device,
    names: Sequence[str],
    rounds: int,
    round_ms: float,
) -> dict[str, object]:
    """A row: TFLOP/s, spread and error of every configuration, and the TFLOP/s of the peers."""
    large = given(cell.shape, cell.deterministic, device)
    base = backward.config_of(large.problem)
    small = given(replace(cell.shape, **SMALL, lengths=()), cell.deterministic, device)
    right, like = formula(small), large.run(base)[:3]
    row = {"cell": cell.name, "table": base.describe(), "errors": {}, "absent": []}
    calls: dict[str, Callable[[], object]] = {}
    for config in combinations(base, values):
        name = changes(config, base)
        if why[config]:
            row["absent"].append(f"{name}: {why[config]}")
            continue
        errors = {"small": worst(small.run(config), right), "large": worst(large.run(config), like)}
        row["errors"][name] = errors
        if all(error <= TOLERANCE for error in errors.values()):
            calls[name] = lambda config=config: large.run(config)
    calls |= peer_calls(large, names)
    work = 2.5 * sum(flops(sequence) for sequence in sequences_of(large.problem, large.inputs))
    return row | rates(time_interleaved(calls, rounds, round_ms), work)


def report(row: dict[str, object]) -> str:
    """A cell's lines: fastest first, with how much faster than the table's choice it is."""
    ms, lines = row["ms"], [f"{row['cell']}: {row['table']}"]
    for name in sorted(ms, key=ms.get):
        ratio = f"{ms['*'] / ms[name]:.3f}" if "*" in ms else "  -  "
        lines.append(f"  {row['tflops'][name]:7.1f} TFLOP/s {1e3 * ms[name]:9.1f} us  {ratio}  {name}")
    lines += [f"  WRONG by {errors}: {name}" for name, errors in row["errors"].items() if name not in ms]
    return "\n".join((*lines, *(f"  left out: {text}" for text in row["absent"])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", action="append", default=[], metavar="FIELD=V,W", help="a field and its values")
    parser.add_argument("--only", default="", help="cells with all of these words in group or name: d128,n4096")
    parser.add_argument("--peers", default="", help=f"some of {','.join(PEER_TAGS)}")
    parser.add_argument("--compile", action="store_true", help="what the compiler says, without a GPU")
    parser.add_argument("--out", type=Path, help="FILE.json, written anew after each cell")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds, at least {ROUNDS}")
    parser.add_argument("--round-ms", type=float, default=6.0, help="how long a round repeats one configuration")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further cell after so long")
    arguments = parser.parse_args()
    names = [word for word in arguments.peers.split(",") if word]
    if not set(names) <= set(PEER_TAGS):
        parser.error(f"--peers is {arguments.peers!r}; it may hold {', '.join(PEER_TAGS)}")
    chosen = [cell for cell in cells(("backward",)) if wanted(cell, arguments.only)]
    if not chosen:
        parser.error(f"--only is {arguments.only!r}; no cell has all of these words")
    try:
        values = parsed(arguments.vary)
        bases = [backward.config_of(problem_of(cell.shape, cell.deterministic)) for cell in chosen]
        configs = list(dict.fromkeys(config for base in bases for config in combinations(base, values)))
    except ValueError as error:
        parser.error(str(error))
    device = None if arguments.compile else device_or_exit()
    why = refusals(configs)
    if device is None:
        for cell in chosen:
            print(cell.name, *said(cell, values, why), sep="\n", flush=True)
        return 0
    body = {"format": FORMAT, "environment": environment(device), "vary": arguments.vary, "rows": []}
    wrong, stop = False, time.monotonic() + arguments.seconds
    heat(device)
    for cell in chosen:
        if time.monotonic() > stop:
            print(f"time is up before {cell.name}")
            break
        row = measure(cell, values, why, device, names, max(ROUNDS, arguments.rounds), arguments.round_ms)
        wrong |= any(name not in row["ms"] for name in row["errors"])
        body["rows"].append(row)
        print(report(row), flush=True)
        if arguments.out:
            write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
