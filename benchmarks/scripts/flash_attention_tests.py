"""Run FlashAttention's own test modules on flashlane, and write what came of every function.

    python benchmarks/scripts/flash_attention_tests.py PATH/flash-attention --out flash_attention_tests.json
        [--modules 4,2,3] [--sample 3] [--seed 0] [--processes 14] [--seconds 80] [--on-cpu]

``PATH`` has the modules where FlashAttention's repository has them. ``tools/fa2_tests.py`` runs each, unmodified:
FlashAttention-4's whole, and ``--sample`` cases of each function of the others, which have hundreds of thousands. After
``--seconds`` the module that runs is ended; its row has what was done by then and says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically

SCRIPT = "benchmarks/scripts/flash_attention_tests.py"
TOOLS = Path(__file__).parents[2] / "tools"
MODULES = {
    "4": "tests/cute/test_flash_attn_fast.py",
    "2": "tests/test_flash_attn.py",
    "3": "hopper/test_flash_attn.py",
}
ENDING_SECONDS = 10
RECORD = "FLASH_ATTENTION_TESTS_RECORD"
"""The variable with the path of the file that gets the cases."""
WHOLE = "4"
"""The module that runs without a sample: it has 241 cases."""
SELECTED = {"2": "not race", "3": "not race"}
"""Which of a module's functions run: one runs each case 250 times in FlashAttention-2's, and 1000 times next to 70 GiB
of memory in FlashAttention-3's, where the other processes need the GPU's memory too."""
VARIABLES = {"3": {"FLASH_ATTENTION_DISABLE_LOCAL": "TRUE"}}
"""Environment variables of a module. FlashAttention-3's then leaves out windows; otherwise nearly every case begins
with an ``attention_chunk``, for which flashlane has no kernel, and the rest of the case does not run."""


def command(module: Path, generation: str, options: argparse.Namespace) -> list[str]:
    words = [sys.executable, str(TOOLS / "fa2_tests.py"), str(module), "-q", "-W", "ignore", "--tb=short"]
    words += ["-p", Path(__file__).stem, f"--seed={options.seed}"]
    words += ["-n", str(options.processes)] if options.processes > 1 else []
    words += ["--on-cpu"] if options.on_cpu else []
    words += ["-k", SELECTED[generation]] if generation in SELECTED else []
    return words if generation == WHOLE else [*words, f"--sample={options.sample}"]


def pytest_configure(config: pytest.Config) -> None:
    """This file is a plugin of the pytest that it runs, too: a line of JSON for every case, as it ends."""
    record = os.environ.get(RECORD)
    if record and not hasattr(config, "workerinput"):
        sys.path.insert(0, str(TOOLS))
        config.pluginmanager.register(importlib.import_module("foreign_tests").Record(Path(record)))


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Outcomes of a module's cases, the reasons of skips with their counts, and the failures in words."""
    outcomes = Counter(line["outcome"] for line in lines)
    functions: dict[str, Counter[str]] = {}
    for line in lines:
        name = line["case"].split("::")[-1].split("[")[0]
        functions.setdefault(name, Counter())[line["outcome"]] += 1
    skips = Counter(line["why"] for line in lines if line["outcome"] == "skipped")
    return {
        **{name: outcomes[name] for name in ("passed", "skipped", "failed")},
        "functions": {name: dict(counts) for name, counts in functions.items()},
        "skips": dict(skips.most_common()),
        "failures": {line["case"]: _error(line["why"]) for line in lines if line["outcome"] == "failed"},
    }


def _error(why: str) -> str:
    """What pytest marks as the error in a failure's text, or the end of the text where it marks nothing."""
    errors = [line[1:].strip() for line in why.splitlines() if line.startswith("E ")]
    return " ".join(errors)[:400] if errors else why[-400:]


def recorded(words: list[str], environ: dict[str, str], record: Path, seconds: float) -> dict[str, Any]:
    """What came of the cases that a command runs, which writes a line of JSON for each into ``record``.

    Args:
        words: the command.
        environ: its environment.
        record: the file of the lines; next to it lies the output.
        seconds: after which it is ended.
    """
    began, ended = time.monotonic(), False
    log = record.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environ)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            ended = True
            process.send_signal(signal.SIGINT)  # so that pytest ends its workers
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    row = {"seconds": time.monotonic() - began, "ended_early": ended, "status": process.returncode, **summary(lines)}
    return row if lines else row | {"output": log.read_text()[-2000:]}


def run(generation: str, options: argparse.Namespace, record: Path, seconds: float) -> dict[str, Any]:
    words = command(options.repository / MODULES[generation], generation, options)
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = VARIABLES.get(generation, {})
    environ = {**os.environ, **variables, RECORD: str(record), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    row = {"module": MODULES[generation], "sample": None if generation == WHOLE else options.sample}
    row |= {"seed": options.seed, "selected": SELECTED.get(generation), "variables": variables}
    return row | recorded(words, environ, record, seconds)


def show(row: dict[str, Any]) -> None:
    """Print what came of a module, and each failure."""
    counts = ", ".join(f"{row[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
    print(f"{row['module']}: {counts} in {row['seconds']:.0f} s{', ended early' * row['ended_early']}", flush=True)
    for case, why in row["failures"].items():
        print(f"  {case}: {' '.join(why.split())[-200:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="FlashAttention's repository, or its test modules in its layout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modules", default=",".join(MODULES), help=f"generations, of {', '.join(MODULES)}")
    parser.add_argument("--sample", type=int, default=3, help="cases of each function of 2's and 3's modules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=80.0, help="for all modules together")
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    generations = options.modules.split(",")
    if unknown := set(generations) - set(MODULES):
        parser.error(f"--modules has {', '.join(sorted(unknown))}; it may hold {', '.join(MODULES)}")
    if missing := [MODULES[name] for name in generations if not (options.repository / MODULES[name]).is_file()]:
        parser.error(f"repository is {options.repository}, which lacks {', '.join(missing)}")
    device = torch.device("cpu" if options.on_cpu else "cuda", None if options.on_cpu else 0)
    body: dict[str, Any] = {
        "format": "flashlane-flash-attention-tests/1",
        "script": SCRIPT,
        "environment": environment(device),
    }
    rows, began = [], time.monotonic()
    for name in generations:
        left = max(1.0, options.seconds - time.monotonic() + began)
        rows.append(run(name, options, options.out.with_name(f"flash_attention_{name}.jsonl"), left))
        write_atomically(options.out, json.dumps(body | {"rows": rows}, indent=1) + "\n")
        show(rows[-1])
    return int(any(row["failed"] or not row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
