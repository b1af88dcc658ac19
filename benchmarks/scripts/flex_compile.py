"""Processor time of the first call of a program in flex_attention: what NVRTC compiles for it, without a GPU.

    PYTHONPATH=src python benchmarks/scripts/flex_compile.py --out flex_compile.json

The cells are scores and masks of ``flex_speed.py``, and scores that are long to compile: a sine, and rows of captured
tensors. Each kernel of a call is compiled again, in an empty folder, one
after another; a call compiles them in threads, so that the longest one is what a user waits for. Times are of the
process, so that other work on the machine does not count, and the median of ``--repeats``, as it still disturbs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flex_speed
import torch

from flashlane import jit
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.flex import masks
from flashlane.flex.bind import bind
from flashlane.jit import KernelSource, compiler
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.flex import run_backward, run_forward
from flashlane.kernels.hopper.flex.problem import problem_of

SCRIPT = "benchmarks/scripts/flex_compile.py"
TOKENS, BLOCK = 4096, (128, 128)
ROWS, SHORT_ROWS = torch.ones(flex_speed.HEADS, 8), torch.ones(flex_speed.HEADS, 3)
SCORES = {"none": None, "linear": flex_speed.linear, "tanh": flex_speed.capped}
SCORES |= {
    "sine": lambda score, b, h, q, kv: score.sin(),
    "tanh of 8": lambda score, b, h, q, kv: score + (ROWS[h] * score).tanh().sum(),
    "largest of 8": lambda score, b, h, q, kv: score + (ROWS[h] + score).amax(),
    "largest of 3": lambda score, b, h, q, kv: score + (SHORT_ROWS[h] + score).amax(),
}


def calls(*head_dims: int) -> Iterator[tuple[dict[str, Any], dict[str, KernelSource]]]:
    """What a row says of a call, and the sources of its kernels by name."""
    documents = masks.documents(torch.tensor([0, TOKENS]), causal=True).function
    for head_dim in head_dims:
        shape = torch.empty(1, TOKENS, flex_speed.HEADS, head_dim, device="meta", dtype=torch.bfloat16)
        for mask_name, mask, window, block in (("causal", None, (-1, 0), None), ("lists", documents, (-1, -1), BLOCK)):
            for score_name, score in SCORES.items():
                problem = problem_of(shape, shape, shape, head_dim**-0.5, window)
                program, _ = bind(score, mask, torch.device("cpu"))
                given = problem, program, block, block is not None
                backward = run_backward.config_of(*given).sources()
                sources = {"forward": run_forward.config_of(*given).source()}
                sources |= {f"backward {number}": source for number, source in enumerate(backward)}
                yield {"head_dim": head_dim, "mask": mask_name, "score": score_name}, sources


def seconds_of(source: KernelSource) -> float:
    """Processor time of one compilation that no cache has."""
    before = os.environ.get("FLASHLANE_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLASHLANE_CACHE_DIR"] = folder
        try:
            began = time.process_time()
            compiler._memo.clear()
            jit.compile(source, ARCH)
            return time.process_time() - began
        finally:
            if before is None:
                del os.environ["FLASHLANE_CACHE_DIR"]
            else:
                os.environ["FLASHLANE_CACHE_DIR"] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    body = {"format": "flashlane-flex-compile/1", "script": SCRIPT, "environment": environment(torch.device("cpu"))}
    body["repeats"] = options.repeats
    rows: list[dict[str, Any]] = []
    seconds_of(next(calls(96))[1]["forward"])  # which also loads NVRTC
    taken: dict[KernelSource, float] = {}  # cells share kernels
    for row, sources in calls(64, 128):
        for source in sources.values():
            if source not in taken:
                taken[source] = round(statistics.median(seconds_of(source) for _ in range(options.repeats)), 3)
        rows.append(row | {"seconds": {name: taken[source] for name, source in sources.items()}})
        print(rows[-1], flush=True)
        write_atomically(options.out, json.dumps(body | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
