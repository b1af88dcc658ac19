"""Set the Hopper backward against its targets: backward alone and forward with backward, next to every peer.

    PYTHONPATH=src python3 benchmarks/scripts/hopper_backward.py [--out FILE.json] [--only d128,causal] [--resume]

bf16. Peers: cuDNN and FlashAttention-2 (torch's SDPA), FlashAttention-4, FlexAttention. In one process, pre-heated, the
gradients of each cell are checked, then timed interleaved round by round; a ratio is the fastest peer's median over
ours. Cells that another backward of ours would run are not measured. The file is written again after each cell;
``--resume`` keeps the cells that it has and measures the others. Exit status 1 when a check fails; a missed target is a
result, not a failure.

FlashAttention-4 compiles for tens of seconds a kind of cell: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 has it keep its
kernels for a later process.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gpu_run import BOTH, ROUNDS, Row, compile_ahead, device_or_exit, figures, heat, run_and_keep, saved_rows
from hopper_shapes import PEER_TAGS, Shape, log_normal_lengths, make, square

from flashlane import bench
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import Results, write_atomically
from flashlane.core import registry
from flashlane.core.dispatch import backward_choices, select_backward
from flashlane.core.problem import AttentionProblem, Inputs

FORMAT = "flashlane-hopper-backward/3"
TAG = "hopper(wgmma+tma)"
BACKWARD = "hopper"
"""The backward that must run after it."""
OURS = "flashlane"
ANY_ORDER = "(any-order)"
"""Ours without ``deterministic``, next to a deterministic cell: what determinism costs."""
DIRECTIONS: tuple[Direction, ...] = ("backward", "both")


@dataclass(frozen=True)
class Group:
    """Cells with one target."""

    about: str
    required: float
    """Least ratio of every cell."""
    mean: float | None = None
    """Least geometric mean of the ratios."""


GROUPS = {
    "grid": Group("D 64 and 128", 1.00, 1.05),
    "d256": Group("D 256", 1.35),
    "dims": Group("D 96, 160 and 192", 1.10),
    "gqa": Group("heads 32/8, causal", 1.05),
    "varlen": Group("log-normal mix of lengths", 1.05),
    "deterministic": Group("deterministic, of FlashAttention-4's", 1.05),
}
FAST_CELL, FAST_RATE = "D256 full N16384", 500.0
COST = 0.08
"""Most that determinism may cost."""
LENGTHS = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Cell:
    """One problem in one direction."""

    group: str
    shape: Shape
    direction: Direction

    @property
    def deterministic(self) -> bool:
        return self.group == "deterministic"

    @property
    def name(self) -> str:
        return f"{self.shape.title}{' deterministic' if self.deterministic else ''} {self.direction}"

    @property
    def peers(self) -> tuple[str, ...]:
        """Peers that have a target here."""
        return ("fa4",) if self.deterministic else tuple(PEER_TAGS)

    def build(self, device: torch.device) -> tuple[AttentionProblem, Inputs]:
        problem, inputs = make(self.shape, device)
        return replace(problem, deterministic=self.deterministic), inputs


def cells(directions: Sequence[Direction] = DIRECTIONS) -> Iterator[Cell]:
    """Every cell of the targets, the two directions of a problem after each other."""
    for group, shape in shapes():
        yield from (Cell(group, shape, direction) for direction in directions)


def shapes() -> Iterator[tuple[str, Shape]]:
    masks = (False, True)
    for group, head_dims in (("grid", (64, 128)), ("d256", (256,))):
        for head_dim in head_dims:
            for causal in masks:
                yield from ((group, square(head_dim, head_dim, causal, seqlen)) for seqlen in LENGTHS)
    for head_dim in (96, 160, 192):
        yield from (("dims", Shape(2, 16, 16, 8192, 8192, head_dim, head_dim, causal)) for causal in masks)
    for batch, seqlen in ((4, 4096), (1, 16384)):
        yield "gqa", Shape(batch, 32, 8, seqlen, seqlen, 128, 128, True)
    lengths = log_normal_lengths()
    yield "varlen", Shape(len(lengths), 32, 8, max(lengths), max(lengths), 128, 128, True, lengths=lengths)
    for head_dim in (64, 96, 128, 160, 192, 256):
        for causal in masks:
            yield "deterministic", square(head_dim, head_dim, causal, 4096)


def is_selected(cell: Cell, only: str) -> bool:
    """Whether a cell has every word of a comma list among its group and the words of its name."""
    words = {word.strip().lower() for word in only.split(",") if word.strip()}
    return words <= {cell.group, *cell.name.lower().split()}


def declined(problem: AttentionProblem) -> str | None:
    """Why another backward than the Hopper one would run a problem, or None."""
    kernel = registry.get(TAG)
    reason = kernel.supports(problem)
    if reason is not None:
        return f"{TAG}: {reason}"
    of = replace(problem, needs_grad=True)
    chosen = select_backward(of, kernel).tag
    if chosen == BACKWARD:
        return None
    reasons = {choice.tag: choice.reason for choice in backward_choices(of, kernel)}
    known = reasons.get(BACKWARD, "there is none of that name")
    return f"the {chosen} backward would run, not {BACKWARD}: {known or 'it is ranked lower'}"


def any_order(problem: AttentionProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Ours, its gradients summed in any order."""
    from flashlane.ops.call import attention

    free = replace(problem, deterministic=False)
    return lambda: attention(free, inputs, TAG)[0]


def measure(
    cell: Cell, device: torch.device, names: Sequence[str], settings: bench.Settings, reporter: Bar
) -> tuple[Row, Results | None]:
    """A cell's row, and the results that it was made of."""
    problem, inputs = cell.build(device)
    reason = declined(problem)
    if reason is not None:
        return judged(cell, problem, None, reason), None
    peers = bench.select_peers(",".join(PEER_TAGS[name] for name in names if name in cell.peers) or "none")
    if cell.deterministic:
        peers += (bench.Peer(ANY_ORDER, "ours, in any order", any_order),)
    results = run_and_keep(
        bench.Case(problem, inputs=inputs), None, None, selection=bench.Selection(tags=(TAG,), peers=peers),
        settings=settings, seed=0, reporter=reporter, directions=(cell.direction,),
    )  # fmt: skip
    return judged(cell, problem, results), results


def judged(cell: Cell, problem: AttentionProblem, results: Results | None, reason: str | None = None) -> Row:
    """Times, rates and the ratio to the fastest peer, and why what has no time has none."""
    names = {TAG: OURS, **{tag: name for name, tag in PEER_TAGS.items()}}
    row: Row = {"name": cell.name, "group": cell.group, "direction": cell.direction, "problem": problem.describe()}
    row |= {"required": GROUPS[cell.group].required, "ratio": None, "best_peer": None, "met": False, "cost": None}
    fields = figures(results, names)
    if reason is not None:
        fields["absent"][OURS] = reason
    fields["tflops"].pop(ANY_ORDER, None), fields["spread"].pop(ANY_ORDER, None)
    ms, free = fields["ms"], fields["ms"].pop(ANY_ORDER, None)
    others = {name: value for name, value in ms.items() if name != OURS}
    if OURS in ms and others:
        best = min(others, key=others.get)
        row |= {"best_peer": best, "ratio": others[best] / ms[OURS]}
        row["met"] = row["ratio"] >= row["required"]
    if OURS in ms and free:
        row["cost"] = ms[OURS] / free - 1
    return row | fields


def line(row: Row) -> str:
    """A cell on one line."""
    figures = "  ".join(f"{name} {rate:5.1f}" for name, rate in row["tflops"].items())
    verdict = "no ratio"
    if row["ratio"] is not None:
        verdict = f"{row['ratio']:.3f} of {row['best_peer']} {'pass' if row['met'] else 'MISS'} {row['required']:.2f}"
    cost = "" if row["cost"] is None else f", determinism costs {100 * row['cost']:.1f} %"
    absent = "".join(f"; no {name}: {why[:70]}" for name, why in row["absent"].items())
    return f"{row['name']:<46} {figures}  {verdict}{cost}{absent}"


def judge(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Every target over the cells that were measured: the required and the measured figure, and whether it is met."""
    targets = []

    def add(target: str, required: float, values: Sequence[float], pick: Callable[[Sequence[float]], float]) -> None:
        value, cells = pick(values) if values else None, len(values)
        targets.append(
            {"target": target, "required": required, "cells": cells, "measured": value, "met": met(value, required)}
        )

    for name, group in GROUPS.items():
        for direction in DIRECTIONS:
            own = [row for row in rows if row["group"] == name and row["direction"] == direction]
            ratios = [row["ratio"] for row in own if row["ratio"] is not None]
            add(f"{group.about}, {direction}: least ratio", group.required, ratios, min)
            if group.mean is not None:
                add(f"{group.about}, {direction}: mean ratio", group.mean, ratios, geometric_mean)
    fast = [row for row in rows if row["name"].startswith(FAST_CELL) and row["direction"] == "backward"]
    fast = [row["tflops"][OURS] for row in fast if row["group"] == "d256" and OURS in row["tflops"]]
    add(f"{FAST_CELL}, backward: TFLOP/s", FAST_RATE, fast, min)
    costs = [row["cost"] for row in rows if row["cost"] is not None and row["direction"] == "backward"]
    worst = max(costs) if costs else None
    targets.append({
        "target": "deterministic, backward: highest cost", "required": COST, "cells": len(costs), "measured": worst,
        "met": worst is not None and worst <= COST,
    })  # fmt: skip
    return targets


def met(value: float | None, required: float) -> bool:
    return value is not None and value >= required


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(targets: Sequence[dict[str, object]]) -> Iterator[str]:
    """A line a target."""
    for target in targets:
        value = "not measured" if target["measured"] is None else f"{target['measured']:8.3f}"
        verdict = "" if target["measured"] is None else "pass" if target["met"] else "MISS"
        yield f"{target['target']:<58} {target['cells']:3d} cells  {value} of {target['required']:g}  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hopper_backward.json"))
    parser.add_argument("--only", default="", help="cells with all of these words in group or name: d128,n4096,both")
    parser.add_argument("--peers", default=",".join(PEER_TAGS), help=f"some of {','.join(PEER_TAGS)}")
    parser.add_argument("--directions", default=",".join(DIRECTIONS), help=f"some of {','.join(DIRECTIONS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds, at least {ROUNDS}")
    parser.add_argument("--round-ms", type=float, default=8.0, help="how long a round repeats one implementation")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further cell after so long")
    parser.add_argument("--resume", action="store_true", help="keep the cells that FILE.json has a time of")
    arguments = parser.parse_args()
    names, directions = ([word for word in text.split(",") if word] for text in (arguments.peers, arguments.directions))
    for option, words, allowed in (("--peers", names, PEER_TAGS), ("--directions", directions, DIRECTIONS)):
        if not set(words) <= set(allowed):
            parser.error(f"{option} is {','.join(words)!r}; it may hold {', '.join(allowed)}")
    chosen = [cell for cell in cells(directions) if is_selected(cell, arguments.only)]
    if not chosen:
        parser.error(f"--only is {arguments.only!r}; no cell has all of these words")
    device = device_or_exit()
    try:
        rows = saved_rows(arguments.out, FORMAT, "name", device) if arguments.resume else {}
        rows = {name: row for name, row in rows.items() if OURS in row["ms"]}
    except ValueError as error:
        parser.error(str(error))
    settings = bench.Settings(
        rounds=max(ROUNDS, arguments.rounds), round_ms=arguments.round_ms, warmup_ms=40.0, max_iterations=100,
        budget_ms=4000.0, protocols=BOTH,
    )  # fmt: skip
    todo = [cell for cell in chosen if cell.name not in rows]
    compile_ahead((registry.get(TAG), cell.build(device)[0]) for cell in todo if cell.direction == todo[0].direction)
    here = environment(device)
    wrong: list[str] = []
    heat(device)
    stop = time.monotonic() + arguments.seconds
    with Bar(len(todo)) as reporter:
        for cell in todo:
            if time.monotonic() > stop:
                print(f"time is up before {cell.name}")
                break
            row, results = measure(cell, device, names, settings, reporter)
            wrong += [f"{cell.name}: {found.message}" for found in (results.failed if results else ())]
            rows[cell.name] = row | {"commit": here["commit"], "date": here["date"]}
            ordered = [rows[cell.name] for cell in cells() if cell.name in rows]
            body = {"format": FORMAT, "environment": here, "settings": asdict(settings), "rows": ordered}
            write_atomically(arguments.out, json.dumps({**body, "targets": judge(ordered)}, indent=1) + "\n")
            print(line(row), flush=True)
    print(*(f"WRONG {text}" for text in wrong), *summary(judge(list(rows.values()))), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
