"""Run PyTorch's own attention tests with flashlane in torch's registry, and write what came of every function.

    python benchmarks/scripts/torch_attention_tests.py PATH/test/test_transformers.py --out torch_attention_tests.json
        [PATH/test/test_varlen_attention.py] [--of "PyTorch 2.9.1"] [--sample 24] [--seed 1] [--processes 8]
        [--seconds 90]

``tools/torch_tests.py`` runs each module, unmodified and all at once. Of test_transformers.py it runs ``--sample``
cases of each function that uses SDPA on CUDA, without dropout, which torch's own kernel would run; of other modules
all. After ``--seconds`` what still runs is ended; its row has what was done by then and says so.
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

SCRIPT = "benchmarks/scripts/torch_attention_tests.py"
SAMPLED = "test_transformers"
"""The module of which cases are drawn: one function alone has 36,864."""
SELECTED = "(SDPA or AttnBias or TestTransformers) and CUDA and not (dropout_p_0_22 or dropout_p_0_48 or dropout_p_0_1)"


def command(module: Path, record: Path, options: argparse.Namespace) -> list[str]:
    words = [sys.executable, str(recording.TOOLS / "torch_tests.py"), str(module), "-q", "-W", "ignore", "--tb=short"]
    words += [f"--record={record}", *(["-n", str(options.processes)] if options.processes > 1 else [])]
    if module.stem == SAMPLED:
        words += [f"--sample={options.sample}", f"--seed={options.seed}", "-k", SELECTED]
    return words


def run(module: Path, options: argparse.Namespace) -> dict[str, Any]:
    record = options.out.with_name(f"{module.stem}.jsonl")
    drawn = module.stem == SAMPLED
    row = {"module": module.name, "of": options.of, "sample": options.sample if drawn else None, "seed": options.seed}
    row |= {"selected": SELECTED if drawn else None}
    return row | recording.recorded(command(module, record, options), dict(os.environ), record, options.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", type=Path, nargs="+", help="test modules of PyTorch")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--of", default="", help="the version of PyTorch that the modules are of")
    parser.add_argument("--sample", type=int, default=24, help="cases of each function of test_transformers.py")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--processes", type=int, default=8, help="of each module")
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    if missing := [str(path) for path in options.modules if not path.is_file()]:
        parser.error(f"there is no {', '.join(missing)}")
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; its registry has operators for CUDA only")
    body = {"format": "flashlane-torch-attention-tests/1", "script": SCRIPT}
    body |= {"environment": environment(torch.device("cuda", 0))}
    with ThreadPoolExecutor(len(options.modules)) as pool:
        rows = list(pool.map(lambda module: run(module, options), options.modules))
    write_atomically(options.out, json.dumps(body | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        recording.show(row)
    return int(any(row["failed"] or not row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
