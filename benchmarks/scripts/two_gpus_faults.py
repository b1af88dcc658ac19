"""What the ranks on two GPUs do when one of them is lost, or makes another call: an error on the others, never a hang.

    PYTHONPATH=src python3 benchmarks/scripts/two_gpus_faults.py --out $OUT

Each fault has two processes of its own, and all faults are tried at once. (other shapes) rank 1 gives other heads at a
first call: both raise an error that names them. (lost by copies, lost by messages) rank 1 ends after a first call, and
rank 0 makes it again. (other size by messages) both have made two calls, and each repeats another one of them. Writes
two_gpus_faults.json: for each fault and rank the seconds after the fault until the process ended, its status and its
last line. Exit status 1: a process was still there :data:`MOST_SECONDS` after the group's timeout, or ended without an
error. ``--backend gloo`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashlane.bench.measure import ranks as measure_ranks
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.ranks import join_ranks
from flashlane.bench.measure.results import write_atomically
from flashlane.distributed import context_parallel_attn_func

FORMAT = "flashlane-two-gpus-faults/1"
GROUP_SECONDS, MOST_SECONDS = 10, 20
FAULTS = ("other shapes", "lost by copies", "lost by messages", "other size by messages")
MAY_END_WELL = {("lost by copies", 1), ("lost by messages", 1)}
"""Fault and rank whose process ends itself."""
TRANSPORT = {"lost by copies": "copies"}


def call(device: torch.device, fault: str, rows: int = 512, heads: int = 4) -> torch.Tensor:
    """The output of this rank, when the GPU has computed it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(1, rows, heads, 64, device=device, dtype=dtype)
    out = context_parallel_attn_func(q, q, q, causal=True, transport=TRANSPORT.get(fault, "messages"))
    return out.float().sum().cpu()


def rank_job(device: torch.device, fault: str, moment: str) -> None:
    """What a rank does; the fault's moment is written to a file."""
    rank = dist.get_rank()
    if fault != "other shapes":
        call(device, fault), call(device, fault, rows=1024)
        dist.barrier()
    Path(moment).write_text(str(time.time()))
    if fault == "other shapes":
        call(device, fault, heads=4 - 2 * rank)
    elif fault.startswith("lost"):
        if rank == 1:
            os._exit(0)
        call(device, fault)
    else:
        call(device, fault, rows=512 + 512 * rank)


def tried(backend: str) -> list[dict[str, Any]]:
    """Each fault and rank: how long after the fault its process ended, and how."""
    running, found = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(FAULTS):
            meeting = Path(folder, str(number))
            meeting.mkdir()
            for rank in (0, 1):
                log = (meeting / f"log_{rank}").open("w")
                words = ["--fault", fault, "--rank", str(rank), "--folder", str(meeting), "--backend", backend]
                process = subprocess.Popen([sys.executable, __file__, *words], stdout=log, stderr=subprocess.STDOUT)
                running.append((fault, rank, meeting, process))
        ended: dict[int, float] = {}
        stop = time.time() + 90
        while len(ended) < len(running) and time.time() < stop:
            for at, (_, _, _, process) in enumerate(running):
                if at not in ended and process.poll() is not None:
                    ended[at] = time.time()
            time.sleep(0.1)
        for at, (fault, rank, meeting, process) in enumerate(running):
            if at not in ended:
                process.kill()
                process.wait()
            began = meeting / f"moment_{rank}"
            lines = [
                line for line in (meeting / f"log_{rank}").read_text(errors="replace").splitlines() if line.strip()
            ]
            told = [line for line in lines if "Error" in line or "did not answer" in line or "timeout" in line.lower()]
            row: dict[str, Any] = {"fault": fault, "rank": rank, "status": process.returncode}
            row["seconds"] = round(ended[at] - float(began.read_text()), 1) if at in ended and began.exists() else None
            row["said"] = (told or lines or [""])[-1][-400:]
            in_time = row["seconds"] is not None and row["seconds"] <= GROUP_SECONDS + MOST_SECONDS
            row["ok"] = in_time and (process.returncode != 0 or (fault, rank) in MAY_END_WELL)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--fault", choices=FAULTS, help="this process is a rank of that fault")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.fault is not None:
        measure_ranks.GROUP_SECONDS = GROUP_SECONDS
        moment = str(options.folder / f"moment_{options.rank}")
        join_ranks(options.rank, 2, str(options.folder), options.backend, rank_job, options.fault, moment)
        return
    rows = tried(options.backend)
    device = torch.device("cuda" if options.backend == "nccl" else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    body = {"format": FORMAT, "environment": environment(device), "group_seconds": GROUP_SECONDS, "rows": rows}
    write_atomically(options.out / "two_gpus_faults.json", json.dumps(body, indent=1))
    for row in rows:
        print(*row.values(), sep=" | ")
    raise SystemExit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    main()
