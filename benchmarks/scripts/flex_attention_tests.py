"""Run FlexAttention's own tests and attention-gym's on flashlane, and write what came of every function.

    python benchmarks/scripts/flex_attention_tests.py --out flex_attention_tests.json [--torch test_flex_attention.py]
        [--gym attention-gym] [--gym-modules test_mods,test_vsa] [--sample 1] [--seed 2] [--processes 14] [--seconds 50]
        [--on-cpu]

``tools/flex_tests.py`` runs each module, unmodified: of PyTorch's ``--sample`` cases of each function, of
attention-gym's all. PyTorch's module and those of attention-gym run at once. After ``--seconds`` what still runs is
ended; its row has what was done by then and says so. Rows of ``--out`` that other tests or another kind of device have
stay.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flash_attention_tests as recording
import torch

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically

SCRIPT = "benchmarks/scripts/flex_attention_tests.py"
OUTCOMES = ("passed", "skipped", "failed")
GYM = (
    "test_mods", "test_document_mask", "test_shared_prefix", "test_block_diffusion", "test_graphormer",
    "test_global_sliding_window", "test_jetspec", "test_sandwich", "test_vsa", "test_merge_attention", "test_natten",
    "test_causal_block_mask",
)  # fmt: skip
"""attention-gym's modules that call flex_attention or make block masks."""


def command(modules: list[Path], record: Path, options: argparse.Namespace, gym: bool) -> list[str]:
    words = [sys.executable, str(recording.TOOLS / "flex_tests.py"), *map(str, modules), "-q", "-W", "ignore"]
    words += ["--tb=short", f"--record={record}"]
    if gym:
        words += ["--package", str(options.gym), "--eager"]
    else:
        words += [f"--sample={options.sample}", f"--seed={options.seed}"]
        words += [] if options.on_cpu else ["--uncompiled", "-k", "CUDA"]
    words += ["--on-cpu"] if options.on_cpu else []
    processes = min(options.processes, len(modules)) if gym else options.processes
    return words + (["-n", str(processes)] if processes > 1 else [])


def run(modules: list[Path], options: argparse.Namespace, gym: bool) -> dict[str, Any]:
    name = "attention-gym" if gym else "PyTorch"
    record = options.out.with_name(f"flex_tests_{name}_{'cpu' if options.on_cpu else 'gpu'}.jsonl")
    device = torch.device("cpu" if options.on_cpu else "cuda", None if options.on_cpu else 0)
    row: dict[str, Any] = {"of": name, "on": device.type, "modules": [module.stem for module in modules]}
    row |= {} if gym else {"sample": options.sample, "seed": options.seed}
    row["environment"] = environment(device)
    return row | recording.recorded(command(modules, record, options, gym), dict(os.environ), record, options.seconds)


def others(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file that none of these replaces."""
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    new = {(row["of"], row["on"]) for row in rows}
    return [row for row in before if (row["of"], row["on"]) not in new]


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows that have a result. A run that could not import its module has none, and replaces none."""
    ran = [row for row in rows if any(row[outcome] for outcome in OUTCOMES)]
    if ran:
        body = {"format": "flashlane-flex-attention-tests/1", "script": SCRIPT, "environment": ran[0]["environment"]}
        write_atomically(path, json.dumps(body | {"rows": [*others(path, ran), *ran]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file; rows of other tests in it stay")
    parser.add_argument("--torch", type=Path, help="PyTorch's test/inductor/test_flex_attention.py")
    parser.add_argument("--gym", type=Path, help="attention-gym's repository")
    parser.add_argument("--gym-modules", default=",".join(GYM), help="its modules")
    parser.add_argument("--sample", type=int, default=1, help="cases of each function of PyTorch's module")
    parser.add_argument("--seed", type=int, default=2, help="of the sample")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    runs = [([options.torch], False)] if options.torch else []
    runs += [([options.gym / "test" / f"{n}.py" for n in options.gym_modules.split(",")], True)] if options.gym else []
    if not runs:
        parser.error("neither --torch nor --gym is given; at least one must be")
    if missing := [str(path) for modules, _ in runs for path in modules if not path.is_file()]:
        parser.error(f"there is no {', '.join(missing)}")
    with ThreadPoolExecutor(len(runs)) as pool:
        rows = list(pool.map(lambda of: run(of[0], options, of[1]), runs))
    keep(options.out, rows)
    for row in rows:
        counts = ", ".join(f"{row[outcome]} {outcome}" for outcome in OUTCOMES)
        print(f"{row['of']}: {counts} in {row['seconds']:.0f} s{', ended early' * row['ended_early']}", flush=True)
        for case, why in row["failures"].items():
            print(f"  {case}: {' '.join(why.split())[-200:]}")
    return int(any(not row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
