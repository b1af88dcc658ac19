"""Time forwards for which two source trees choose otherwise: the choices of both, interleaved.

    PYTHONPATH=OLD/src python3 benchmarks/scripts/changed_choices.py --choose before.json
    PYTHONPATH=src python3 benchmarks/scripts/changed_choices.py --before before.json
        [--seed 1334] [--what splits=14,shape=14,section=8] [--rounds 7] [--seconds 190] [--out benchmarks/results]

The first command writes the choices of a tree and needs no GPU. The second one compares them with those of its own tree
and times problems where the splits of the keys, the shape of a tile or the heads of a section differ: :data:`NAMED`,
drawn dense ones of fitting seeds, and drawn ones with short queries and long keys. All kernels are compiled first, in
threads. The results of both choices are compared with each other, and on some rows with a reference in f64. Where the
new choice has splits, it is also timed with a split less and one more, and with the order of tiles that is predicted to
be next. Writes changed_choices.json after each problem, and prints a table at the end. Exit status 1 where a result is
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from choice_shapes import shape_of
from gpu_run import device_or_exit, heat
from hopper_shapes import Shape, make, problem_of

from flashlane import jit
from flashlane.bench.measure import drawn
from flashlane.bench.measure.check import relative_l2
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import check_writable, read_json, write_atomically
from flashlane.bench.measure.timing import Settings, clocks_for, measure_by
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.forward import select
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.launch import config_and_splits, sources_of

FORMAT = "flashlane-changed-choices/1"
HOPPER = registry.get("hopper(wgmma+tma)")
NAMED = (Shape(2, 21, 21, 645, 10998, 128, 128, True), Shape(1, 30, 30, 1400, 18400, 248, 248, False))
"""What docs/notebook/0045-what-memory-draws.md names."""
SEED = 1334
"""The first fitting seed of the dense problems; that of the short ones is between them."""
DENSE_SEEDS, SHORT_SEED = range(16), 6
"""The seeds, counted from the first one."""
PER_SEED, SHORT = 200, 600
SHORT_QUERIES = replace(
    drawn.TIMED["dense"], lengths=drawn.LogUniform(128, 1500), keys=drawn.LogUniform(4000, 40000), alike=0.0
)
TOLERANCE = 1.2e-2
"""Largest ‖a − b‖ / ‖b‖ of two results, of which one or both are rounded to 16 bits."""
ROWS = 24
"""Rows of the reference, of the first and the last head."""


def shapes(seed: int) -> dict[str, list[Shape]]:
    """The problems of each kind that may be timed."""
    dense = [shape_of(drawn.timed("dense", seed + j, i)) for j in DENSE_SEEDS for i in range(PER_SEED)]
    chances = (random.Random(f"short {seed + SHORT_SEED} {i}") for i in range(SHORT))
    return {"named": list(NAMED), "dense": dense, "short": [shape_of(drawn.draw(c, SHORT_QUERIES)) for c in chances]}


def chosen(shape: Shape) -> tuple[HopperConfig, int]:
    """The configuration that a tree chooses, and its number of splits."""
    problem = problem_of(shape).with_hiding_sides
    config, splits = config_and_splits(select.config_for(problem), problem)
    return config, splits


def words_of(config: HopperConfig) -> dict[str, Any]:
    """The fields of a configuration that a choice decides, without its number of splits."""
    return {name: value for name, value in asdict(config).items() if isinstance(value, int) and name != "kv_splits"}


def choose(path: Path, seed: int) -> None:
    """Write the choices of this tree."""
    body = {}
    for shape in itertools.chain(*shapes(seed).values()):
        config, splits = chosen(shape)
        body[shape.title] = {"splits": splits, "config": words_of(config)}
    path.write_text(json.dumps(body) + "\n")


@dataclass(frozen=True)
class Comparison:
    """A problem, and the configurations that are timed: what both trees choose, and some like the second."""

    kind: str
    what: str
    """What differs: ``splits``, ``shape`` or ``section``."""
    shape: Shape
    configs: dict[str, HopperConfig]

    @property
    def problem(self) -> AttentionProblem:
        return problem_of(self.shape).with_hiding_sides


def comparisons(before: dict[str, Any], most: dict[str, int], seed: int) -> Iterator[Comparison]:
    """The problems whose choices differ, kinds and what differs in turn; so many of each."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for kind, each in shapes(seed).items():
        for one in differing(kind, each, before):
            group = found.setdefault((kind, one.what), [])
            if len(group) < most.get(one.what, 0):
                group.append(one)
    for row in itertools.zip_longest(*found.values()):
        yield from (one for one in row if one is not None)


def differing(kind: str, some: list[Shape], before: dict[str, Any]) -> Iterator[Comparison]:
    for shape in some:
        config, splits = chosen(shape)
        old, fields = before[shape.title], words_of(config)
        if old == {"splits": splits, "config": fields}:
            continue
        apart = {name for name in fields if old["config"][name] != fields[name]}
        what = "splits" if old["splits"] != splits else "section" if apart == {"heads_per_section"} else "shape"
        earlier = replace(config, **old["config"], kv_splits=old["splits"] if old["splits"] > 1 else 0)
        yield Comparison(kind, what, shape, {"before": earlier, "after": config, **likes(shape, config)})


def likes(shape: Shape, config: HopperConfig) -> dict[str, HopperConfig]:
    """Configurations of the same kernel: with other splits, and in the next order of tiles."""
    if not config.split:
        return {}
    found = {f"splits {n}": replace(config, kv_splits=n) for n in (config.kv_splits - 1, config.kv_splits + 1) if n > 1}
    problem = problem_of(shape).with_hiding_sides
    same = [
        other
        for other, _ in select.ranked(problem)
        if replace(other, heads_per_section=config.heads_per_section) == config != other
    ]
    if same:
        found[f"section {same[0].heads_per_section}"] = same[0]
    return {name: other for name, other in found.items() if config_and_splits(other, problem)[1] == other.kv_splits}


def predicted(problem: AttentionProblem, config: HopperConfig) -> float:
    """Microseconds by the cost model."""
    launch = select.cost.Launch(problem, config, max(1, config.kv_splits))
    return launch.predicted(config.heads_per_section or 1)


class _Item:
    """A call as the clocks take it."""

    def __init__(self, tag: str, call: Callable[[], object]) -> None:
        self.tag, self.call = tag, call

    context = staticmethod(contextlib.nullcontext)


def reference(problem: AttentionProblem, inputs: Inputs, batch: int, head: int) -> tuple[list[int], torch.Tensor]:
    """Some rows of a head, and their output in f64."""
    half = ROWS // 2
    rows = sorted({*range(min(half, problem.seqlen_q)), *range(max(0, problem.seqlen_q - half), problem.seqlen_q)})
    q = inputs.q[batch, rows, head].double()
    k, v = (t[batch, :, head // problem.group].double() for t in (inputs.k, inputs.v))
    scores = problem.scale * q @ k.T
    for i, row in enumerate(rows):
        seen = problem.visible_keys(row)
        scores[i, : seen.start], scores[i, seen.stop :] = -math.inf, -math.inf
    return rows, torch.softmax(scores, -1) @ v


def time_one(one: Comparison, device: torch.device, settings: Settings) -> dict[str, Any]:
    """A row: errors, and microseconds of each configuration under each protocol."""
    problem, inputs = make(one.shape, device)
    problem = problem.with_hiding_sides
    size = (*inputs.q.shape[:-1], problem.head_dim_v)
    batch, rows, heads, _ = size
    outs = {}
    for name in ("before", "after"):
        out = torch.full(size, torch.nan, dtype=problem.dtype, device=device)
        lse = torch.full((batch, heads, rows), torch.nan, device=device)
        HOPPER.run(one.configs[name], problem, inputs, out, lse)
        outs[name] = out, lse
    errors = {"apart": relative_l2(outs["after"][0].float(), outs["before"][0].float())}
    errors["lse apart"] = (outs["after"][1] - outs["before"][1]).abs().max().item()
    for at, head in ((0, 0), (batch - 1, heads - 1)):
        some, wanted = reference(problem, inputs, at, head)
        for name in outs:
            found = relative_l2(outs[name][0][at, some, head].double(), wanted)
            errors[name] = max(errors.get(name, 0.0), found)
    out, lse = outs["after"]
    items = [
        _Item(name, lambda config=config: HOPPER.run(config, problem, inputs, out, lse))
        for name, config in one.configs.items()
    ]
    timings = measure_by(clocks_for(device, settings), items, settings)
    us: dict[str, dict[str, float]] = {}
    for item, found in zip(items, timings, strict=True):
        if isinstance(found, Exception):
            raise found
        us[item.tag] = {name: 1e3 * timing.median for name, timing in found.items()}
    return {
        "kind": one.kind, "what": one.what, "problem": asdict(one.shape), "title": one.shape.title, "errors": errors,
        "ok": max(errors[name] for name in ("apart", "before", "after")) <= TOLERANCE and errors["lse apart"] < 1e-3,
        "configs": {name: config.describe() for name, config in one.configs.items()},
        "predicted_us": {name: predicted(problem, config) for name, config in one.configs.items()}, "us": us,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    us, model = row["us"], row["predicted_us"]
    text = f"{'' if row['ok'] else 'WRONG '}{row['title']:42s} predicted {model['before']:7.1f} {model['after']:7.1f}"
    for protocol in ("steady", "flushed"):
        old, new = us["before"][protocol], us["after"][protocol]
        text += f"  {protocol} {old:7.1f} {new:7.1f} {new / old:5.3f}"
    more = [f"{name} {each['steady'] / us['before']['steady']:.3f}" for name, each in us.items()][2:]
    return f"{text}  {row['what']}: {row['configs']['after']}; {', '.join(more)}"


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", type=Path, help="write the choices of this tree, and time nothing")
    parser.add_argument("--before", type=Path, help="the choices of another tree")
    parser.add_argument(
        "--what", default="splits=14,shape=14,section=8", help="most problems of each kind by what differs"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="the first fitting seed, for both commands")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=190.0, help="begin no problem so long after the start")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.choose:
        choose(arguments.choose, arguments.seed)
        return 0
    if arguments.before is None:
        parser.error("--before is missing; it must be a file that --choose wrote")
    check_writable(arguments.out)
    most = {name: int(number) for name, _, number in (each.partition("=") for each in arguments.what.split(","))}
    try:
        before = read_json(arguments.before)
    except ValueError as error:
        parser.error(f"--before: {error}")
    compared = list(comparisons(before, most, arguments.seed))
    device = device_or_exit()
    configs = {(config_and_splits(c, one.problem)[0]) for one in compared for c in one.configs.values()}
    sources = dict.fromkeys(source for config in configs for source in sources_of(config))
    print(f"{len(compared)} problems, {len(sources)} kernels after {time.monotonic() - began:.0f} s", flush=True)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda source: jit.compile(source, ARCH), sources))
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    settings = Settings(
        rounds=arguments.rounds, round_ms=arguments.round_ms, warmup_ms=4.0, max_iterations=40, preheat_ms=12.0,
        protocols=("steady", "flushed"),
    )  # fmt: skip
    body: dict[str, Any] = {"format": FORMAT, "script": "benchmarks/scripts/changed_choices.py"}
    body |= {"environment": environment(device), "rounds": arguments.rounds, "seed": arguments.seed, "rows": []}
    rows: list[dict[str, Any]] = body["rows"]
    heat(device)
    with torch.no_grad():
        for one in compared:
            if time.monotonic() - began > arguments.seconds:
                print(f"time is up after {len(rows)} of {len(compared)} problems")
                break
            rows.append(time_one(one, device, settings))
            write_atomically(arguments.out / "changed_choices.json", json.dumps(body, indent=1) + "\n")
            torch.cuda.empty_cache()
    print(*map(line, rows), sep="\n")
    for group in dict.fromkeys((row["kind"], row["what"]) for row in rows):
        text = f"{' '.join(group):16s} new over old"
        for protocol in ("steady", "flushed"):
            mine = [row["us"] for row in rows if (row["kind"], row["what"]) == group]
            ratios = [us["after"][protocol] / us["before"][protocol] for us in mine]
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            text += f"  {protocol} {mean:.3f} in the mean, {min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{text}, {len(mine)} problems")
    print(f"{time.monotonic() - began:.0f} s; wrong: {[row['title'] for row in rows if not row['ok']] or 'none'}")
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
