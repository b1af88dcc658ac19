"""Check and time every variant of flashlane.blocks against torch on a GPU; one table at the end, JSON to a file.

    python benchmarks/blocks_gpu.py results/blocks.json
    python benchmarks/blocks_gpu.py results/blocks.json --block hgemm --size 4096

Each block runs in a process of its own with a time limit, so that a kernel that hangs, or that leaves the CUDA context
unusable, costs its own block only; what that had measured by then is kept. Exits 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 240
"""Limit of one block."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the JSON file to write")
    parser.add_argument("--block", action="append", help="hgemm, softmax or activation; all when absent")
    parser.add_argument("--size", type=int, default=8192, help="M = N = K of hgemm")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit of one block")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    from flashlane.blocks import bench

    unknown = set(arguments.block or ()) - set(bench.BLOCKS)
    if unknown:
        parser.error(f"--block is {', '.join(sorted(unknown))}; it may be {', '.join(bench.BLOCKS)}")
    if arguments.child:
        run_block(arguments.block[0], arguments.size, arguments.path)
        return 0
    rows, machine, failures = [], {}, []
    for block in arguments.block or bench.BLOCKS:
        found, message = in_a_process(block, arguments.size, arguments.seconds)
        machine = machine or found.get("environment", {})
        rows += [bench.Row(**row) for row in found.get("rows", [])]
        if message:
            failures.append(f"{block}: {message}")
    print(bench.table(rows))
    for group, tag in bench.best_by_group(rows).items():
        print(f"best  {group:<44} {tag}")
    print(f"median spread {100 * bench.noise(rows):.1f} %", *failures, sep="\n")
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": machine, "failures": failures, "rows": [row.to_dict() for row in rows]}
    arguments.path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures or not rows or any(not row.ok for row in rows) else 0


def in_a_process(block: str, size: int, seconds: int) -> tuple[dict, str]:
    """What a block's process wrote, and what went wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, __file__, str(path), "--child", "--block", block, "--size", str(size)]
        try:
            code = subprocess.run(command, timeout=seconds, check=False).returncode
            message = "" if code == 0 else f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            message = f"its process ran past {seconds} s"
        return (json.loads(path.read_text()) if path.exists() else {}), message


def run_block(block: str, size: int, path: Path) -> None:
    """Check and time one block; the file is rewritten after every group."""
    import torch

    from flashlane.bench.environment import environment
    from flashlane.blocks import bench

    device = torch.device("cuda", torch.cuda.current_device())
    groups = bench.hgemm_groups(device, size) if block == "hgemm" else bench.BLOCKS[block](device)
    result = {"environment": environment(device), "rows": []}
    for group in groups:
        rows = bench.run_group(group, bench.SETTINGS, device)
        result["rows"] += [row.to_dict() for row in rows]
        path.write_text(json.dumps(result))
        print(f"{group.block} {group.name}: {sum(row.ok for row in rows)} of {len(rows)} right", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
