"""Where the time of a whole model's call goes: the kernels of a call of ``flashlane e2e``, by their share.

    PYTHONPATH=src python3 benchmarks/scripts/e2e_kernels.py [wan llama-32k] [--attention flash,cudnn,flashlane]
        [--seconds 60] [--out benchmarks/results]

It builds the workloads of ``flashlane e2e``, runs each attention until the clock is that of a GPU under load, and
records the kernels of the next call with torch's profiler. A kernel counts as attention, as a matrix product, as a copy
or as another one by its name. The file is written again after each call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from gpu_run import device_or_exit
from torch.profiler import ProfilerActivity, profile

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.bench.suites.e2e import WORKLOADS
from flashlane.bench.suites.suite import release
from flashlane.bench.suites.whole_models import Built, Setup

FORMAT = "flashlane-e2e-kernels/1"
CLASSES = (
    ("attention", ("hopper_", "flash_", "fmha", "sdpa", "attention", "decode_", "triton_attention")),
    ("product", ("gemm", "nvjet", "cutlass", "cublas", "wgmma_")),
    ("copy", ("copy", "memcpy", "memset", "fill", "cat")),
)
"""Classes of kernels and parts of the names in each; the first that fits holds."""
LISTED = 14
HEAT_SECONDS = 0.5


def class_of(name: str) -> str:
    lower = name.lower()
    return next((title for title, parts in CLASSES if any(part in lower for part in parts)), "other")


def kernels_of(call: Any) -> list[tuple[str, float, int]]:
    """Name, milliseconds and launches of each kernel of a call, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += event.device_time_total / 1e3
            found[event.name][1] += 1
    return sorted(((name, ms, int(count)) for name, (ms, count) in found.items()), key=lambda each: -each[1])


def heated(call: Any) -> float:
    """Milliseconds of the last of so many calls that the power limit sets the clock."""
    stop = time.monotonic() + HEAT_SECONDS
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if time.monotonic() > stop:
            return start.elapsed_time(end)


def row_of(workload: str, tag: str, built: Built) -> dict[str, Any]:
    """A call's time, the milliseconds of each class of kernels, and the longest kernels."""
    with built.attentions[tag]():
        built.call()
        ms = heated(built.call)
        kernels = kernels_of(built.call)
    classes: dict[str, float] = defaultdict(float)
    for name, took, _ in kernels:
        classes[class_of(name)] += took
    listed = [{"kernel": name[:160], "ms": round(took, 3), "launches": n, "class": class_of(name)}
              for name, took, n in kernels[:LISTED]]  # fmt: skip
    return {"workload": workload, "attention": tag, "ms": ms, "classes": dict(classes), "kernels": listed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["wan", "llama-32k"])
    parser.add_argument("--attention", default="flash,cudnn,flashlane")
    parser.add_argument("--layers", type=int, default=2, help="of the models whose layers are alike")
    parser.add_argument("--seconds", type=float, default=60.0, help="no call is begun later than this")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    device, began = device_or_exit(), time.monotonic()
    body = {"format": FORMAT, "environment": environment(device), "seed": 0, "layers": options.layers}
    rows: list[dict[str, Any]] = []
    for name in options.workloads:
        built = WORKLOADS[name].build(Setup(device, layers=options.layers))
        for tag in options.attention.split(","):
            if time.monotonic() - began > options.seconds:
                print(f"{name} {tag}: no time left")
                continue
            rows.append(row_of(name, tag, built))
            write_atomically(options.out / "e2e_kernels.json", json.dumps(body | {"rows": rows}, indent=1) + "\n")
            classes = {title: round(ms, 1) for title, ms in rows[-1]["classes"].items()}
            print(f"{time.monotonic() - began:5.1f} s {name} {tag} {rows[-1]['ms']:.1f} ms", json.dumps(classes))
            for each in rows[-1]["kernels"]:
                print(
                    f"    {each['ms']:9.3f} ms {each['launches']:4} {each['class']:9} {each['kernel'][:100]}",
                    flush=True,
                )
        built = None
        release(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
