"""Time what the baseline logs report, every problem and every line of them, on a GPU.

    PYTHONPATH=src python3 benchmarks/scripts/baseline_logs.py --out benchmarks/results [--only D512] [--seconds 60]
        [--resume]

The baseline logs are those of the project that this one grew out of: flashlane.bench.suites.baseline has their
problems, tags and milliseconds. Each problem runs with the tags that its log has for it, checked, interleaved round by
round. Writes baseline_logs.json (and .csv) as ``flashlane bench`` does, again after each problem;
docs/baseline-grid.md is made of it. Exit status 1 when a kernel of ours fails its check.
"""

from __future__ import annotations

import argparse
import sys

from gpu_run import compile_ahead, device_or_exit, has_rows, kept, options, print_failures, run_and_keep, settings_for

from flashlane import bench
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import Results, check_writable
from flashlane.bench.suites.baseline import select_lines
from flashlane.core import registry
from flashlane.core.problem import arch_of


def measure(arguments: argparse.Namespace) -> Results:
    """Every line in turn."""
    device = device_or_exit()
    try:
        lines = select_lines(arch_of(device), tuple(word for word in arguments.only.split(",") if word))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    implementations = sum(len(line.kernels) + len(line.peers) for line in lines)
    settings = settings_for(implementations, arguments.seconds, arguments.rounds)
    compile_ahead((registry.get(tag), line.problem) for line in lines for tag in line.kernels)
    path = arguments.out / "baseline_logs.json"
    results = kept(path, arguments.resume, device)
    with Bar(len(lines)) as reporter:
        for seed, line in enumerate(lines):
            if has_rows(results, line.problem, line.log):
                continue
            peers = bench.select_peers(",".join(tag.strip("()") for tag in line.peers))
            results = run_and_keep(
                line.problem, results, path, selection=bench.Selection(tags=line.kernels, peers=peers),
                settings=settings, seed=seed, reporter=reporter, note=line.log,
            )  # fmt: skip
    return results


def main() -> int:
    parser = options(__doc__, "baseline_logs", seconds=60.0)
    parser.add_argument("--only", default="", help="problems whose title and log have all of these words: D512")
    parser.add_argument("--resume", action="store_true", help="keep the problems that the file has")
    arguments = parser.parse_args()
    check_writable(arguments.out)
    results = measure(arguments)
    return print_failures(results)


if __name__ == "__main__":
    sys.exit(main())
