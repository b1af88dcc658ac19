"""Check and time every variant of flashlane.lessons against torch on a GPU; one table at the end, JSON to a file.

    python benchmarks/scripts/lessons_gpu.py results/lessons.json
    python benchmarks/scripts/lessons_gpu.py results/lessons.json --block hgemm --size 4096

Each block runs in a process of its own with a time limit. A kernel that hangs, or that leaves the CUDA context
unusable, costs the rest of its group (one operation on one input): a new process goes on with the next one. Exits 1
when anything failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

FORMAT = "flashlane-lessons/1"
SECONDS = 240
"""Limit of one process."""


def main() -> int:
    arguments = parsed()
    from flashlane.lessons import comparison

    if arguments.child:
        return run_block(arguments.block[0], arguments.size, arguments.first, arguments.path)
    rows, machine, failures = [], {}, []
    for block in arguments.block or comparison.LESSONS:
        found, problems = in_processes(block, arguments)
        machine = machine or found["environment"]
        rows += [comparison.Row(**row) for row in found["rows"]]
        failures += [f"FAILED {block}: {problem}" for problem in problems]
    print(comparison.table(rows))
    for group, tag in comparison.best_by_group(rows).items():
        print(f"best  {group:<44} {tag}")
    print(f"median spread {100 * comparison.noise(rows):.1f} %", *failures, sep="\n")
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    result = {"format": FORMAT, "environment": machine, "failures": failures, "rows": [row.to_dict() for row in rows]}
    arguments.path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures or not rows or any(not row.ok for row in rows) else 0


def parsed() -> argparse.Namespace:
    from flashlane.lessons import comparison

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the JSON file to write")
    parser.add_argument("--block", action="append", choices=list(comparison.LESSONS), help="all of them when absent")
    parser.add_argument("--size", type=int, default=8192, help="M = N = K of hgemm")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit of one process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_processes(block: str, arguments: argparse.Namespace) -> tuple[dict, list[str]]:
    """What a block's processes wrote, and what went wrong with them."""
    result, problems, first = {"environment": {}, "rows": []}, [], 0
    with tempfile.TemporaryDirectory() as folder:
        while True:
            path = Path(folder, f"{first}.json")
            command = [sys.executable, __file__, str(path), "--child", "--block", block]
            command += ["--size", str(arguments.size), "--first", str(first)]
            try:
                code = subprocess.run(command, timeout=arguments.seconds, check=False).returncode
                problem = f"a process ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                problem = f"a process ran past {arguments.seconds} s"
            results = json.loads(path.read_text()) if path.exists() else None
            if results:
                result["environment"] = result["environment"] or results["environment"]
                result["rows"] += results["rows"]
            if not problem:
                return result, problems
            begun = results["groups"] if results else []
            problems.append(f"{problem} at {begun[-1] if begun else 'its start'}")
            if not begun:
                return result, problems
            first += len(begun)


def run_block(block: str, size: int, first: int, path: Path) -> int:
    """Check and time one block from a group on; the file is rewritten before and after each."""
    import torch

    from flashlane.bench.measure.environment import environment
    from flashlane.lessons import comparison

    device = torch.device("cuda", torch.cuda.current_device())
    groups = comparison.hgemm_groups(device, size) if block == "hgemm" else comparison.LESSONS[block](device)
    result = {"environment": environment(device), "groups": [], "rows": []}
    for group in islice(groups, first, None):
        result["groups"].append(group.name)
        path.write_text(json.dumps(result))
        rows = comparison.run_group(group, comparison.SETTINGS, device)
        result["rows"] += [row.to_dict() for row in rows]
        path.write_text(json.dumps(result))
        print(f"{group.block} {group.name}: {sum(row.ok for row in rows)} of {len(rows)} right", file=sys.stderr)
        torch.cuda.synchronize(device)  # raises when a kernel broke the context; another process goes on
    return 0


if __name__ == "__main__":
    sys.exit(main())
