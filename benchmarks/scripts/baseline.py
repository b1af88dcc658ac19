"""Time every listed mma tag on the baseline grid next to torch's attention, on a GPU; one table at the end.

    PYTHONPATH=src python3 benchmarks/scripts/baseline.py --out benchmarks [--tags split-q,share] [--seconds 60]
        [--resume]

Every output is checked before it is timed; implementations are interleaved round by round. The shape that is too
short to fill a GPU is timed again by CUDA-graph replay, which leaves out the cost of the host. Writes baseline.json
(and .csv), as ``flashlane bench`` writes them, again after each problem. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpu_run import compile_ahead, device_or_exit, has_rows, kept, options, print_failures, run_and_keep, settings_for

from flashlane import bench
from flashlane.bench.measure.grid import BASELINE_SHAPES
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import Results, Row, check_writable
from flashlane.core import registry
from flashlane.core.problem import arch_of

SHORT = 1024
"""Queries up to which a shape is timed by graph replay too."""
REPLAY = "graph replay"
BASELINES = "unfused,sdpa-efficient,flash,cudnn"


def kernels_with(words: Sequence[str]) -> list[registry.Kernel]:
    """The listed tags of the mma family, or all tags in it that have one of the words."""
    family = [kernel for kernel in registry.kernels(listed_only=not words) if kernel.family == "mma"]
    return [kernel for kernel in family if not words or any(word in kernel.tag for word in words)]


def design(tag: str) -> str:
    """What a tag is compared by: where the data lives. ``mma(split-q+share-kv+acc-f32+stage1)``: split-q+share-kv."""
    words = tag.removeprefix("mma(").removesuffix(")").split("+")
    return "+".join(word for word in words if word.startswith(("naive", "split", "share", "tiling")))


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The fastest tag of each design and every baseline, for each problem, next to SDPA flash and cuDNN."""
    for problem in dict.fromkeys(row.problem for row in rows):
        timed = [row for row in rows if row.problem == problem and row.timing]
        peers = {row.tag: row.timing.median for row in timed if row.kind == "peer"}
        fastest: dict[str, Row] = {}
        for row in sorted(timed, key=lambda row: row.timing.median):
            fastest.setdefault(design(row.tag) if row.kind == "kernel" else row.tag, row)
        yield f"{problem:<66}{'ms':>9} {'±%':>5} {'TFLOP/s':>7} {'×flash':>7} {'×cudnn':>7}"
        for row in fastest.values():
            ms = row.timing.median
            ratios = (f"{peers[tag] / ms:7.3f}" if tag in peers else "      –" for tag in ("(flash)", "(cudnn)"))
            yield f"  {row.tag:<64}{ms:9.4f} {50 * row.timing.spread:5.1f} {row.tflops:7.1f} {' '.join(ratios)}"


def measure(arguments: argparse.Namespace) -> Results:
    """Every problem in turn, then the short ones by replay."""
    device = device_or_exit()
    words = [word for word in arguments.tags.split(",") if word]
    kernels = kernels_with(words)
    if not kernels:
        raise SystemExit(f"--tags is {arguments.tags!r}, which is in no tag of the mma family")
    problems = [bench.make_problem(*shape, arch=arch_of(device)) for shape in BASELINE_SHAPES]
    replayed = [problem for problem in problems if problem.seqlen_q <= SHORT]
    selection = bench.Selection(tags=tuple(k.tag for k in kernels), peers=bench.select_peers(arguments.baselines))
    runs = len(problems) + len(replayed)
    settings = settings_for(runs * (len(kernels) + len(selection.peers)), arguments.seconds, arguments.rounds)
    count = compile_ahead(itertools.product(kernels, problems))
    print(f"{len(kernels)} tags, {count} configurations compiled, {settings}", file=sys.stderr, flush=True)
    path = arguments.out / "baseline.json"
    results = kept(path, arguments.resume, device)
    jobs = [(problem, settings, "") for problem in problems]
    jobs += [(problem, replace(settings, protocols=("replay",)), REPLAY) for problem in replayed]
    with Bar(len(jobs)) as reporter:
        for seed, (problem, how, note) in enumerate(jobs):
            if has_rows(results, problem, note):
                continue
            results = run_and_keep(
                problem, results, path, selection=selection, settings=how, seed=seed, reporter=reporter, note=note
            )
    return results


def main() -> int:
    parser = options(__doc__, "baseline", seconds=60.0)
    parser.add_argument("--tags", default="", help="instead of the listed tags: all that contain one of these words")
    parser.add_argument("--baselines", default=BASELINES, help="as in flashlane bench")
    parser.add_argument("--resume", action="store_true", help="keep the problems that the file has")
    arguments = parser.parse_args()
    check_writable(arguments.out)
    results = measure(arguments)
    print("\n".join(summary(results.rows)))
    return print_failures(results)


if __name__ == "__main__":
    sys.exit(main())
