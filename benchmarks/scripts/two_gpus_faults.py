"""What the ranks on two GPUs do when one of them is lost, or makes another call: an error on the others, never a hang.

    PYTHONPATH=src python3 benchmarks/scripts/two_gpus_faults.py --out $OUT

Two ranks first make all calls once, so that everything is compiled. Then each fault has two processes of its own, and
all faults are tried at once. (other shapes) rank 1 gives other heads at a first call: both raise an error that names
them. (lost by copies, lost by messages) rank 1 ends after a first call, and rank 0 makes it again. (other size by
messages) both have made two calls, and each repeats another one of them. Writes two_gpus_faults.json, again whenever
a process has ended: for each fault and rank the seconds after the fault until its process ended, its status and its
last line; of one that had to be killed, what its threads waited for. Exit status 1: a process was still there
:data:`MOST_SECONDS` after the group's timeout, or ended without an error. ``--backend gloo`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashlane.bench.measure import ranks as measure_ranks
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.ranks import join_ranks, on_ranks
from flashlane.bench.measure.results import write_atomically
from flashlane.distributed import context_parallel_attn_func

FORMAT = "flashlane-two-gpus-faults/1"
GROUP_SECONDS, MOST_SECONDS = 10, 15
START_SECONDS = 100
"""The most seconds from the start of the processes to the faults."""
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
    faulthandler.dump_traceback_later(GROUP_SECONDS + MOST_SECONDS - 2)
    if fault == "other shapes":
        call(device, fault, heads=4 - 2 * rank)
    elif fault.startswith("lost"):
        if rank == 1:
            os._exit(0)
        call(device, fault)
    else:
        call(device, fault, rows=512 + 512 * rank)


def calls_once(device: torch.device) -> str:
    """All calls of the faults, without one."""
    for fault in FAULTS:
        call(device, fault), call(device, fault, rows=1024)
    return "compiled"


def tried(backend: str, write: Callable[[list[dict[str, Any]], dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Each fault and rank: how long after the fault its process ended, and how."""
    running: list[tuple[str, int, Path, subprocess.Popen[bytes]]] = []
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
        found: dict[int, dict[str, Any]] = {}
        start = time.time()
        while len(found) < len(running):
            for at, each in enumerate(running):
                began = each[2] / f"moment_{each[1]}"
                late = began.stat().st_mtime + GROUP_SECONDS + MOST_SECONDS if began.exists() else start + START_SECONDS
                if at not in found and (each[-1].poll() is not None or time.time() > late):
                    threads = []
                    if each[-1].returncode is None:
                        threads = threads_of(each[-1].pid)
                        each[-1].kill()
                        each[-1].wait()
                    else:
                        ended[at] = time.time()
                    found[at] = row_of(*each[:3], each[-1].returncode, ended.get(at), threads)
                    write([found[number] for number in sorted(found)], found[at])
            time.sleep(0.1)
    return [found[number] for number in sorted(found)]


def threads_of(process: int) -> list[str]:
    """The name and state of each thread of a process, and the function of the system's kernel in which it waits."""
    found = []
    for task in sorted(Path(f"/proc/{process}/task").iterdir()):
        with contextlib.suppress(OSError):
            state = [line for line in (task / "status").read_text().splitlines() if line.startswith("State")]
            found.append(" ".join([(task / "comm").read_text().strip(), *state, (task / "wchan").read_text()]))
    return found


def row_of(
    fault: str, rank: int, meeting: Path, status: int, ended: float | None, threads: list[str]
) -> dict[str, Any]:
    """What became of a process; ``ended`` is when it ended by itself, or None."""
    began = meeting / f"moment_{rank}"
    text = (meeting / f"log_{rank}").read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "did not answer" in line or "timeout" in line.lower()]
    row: dict[str, Any] = {"fault": fault, "rank": rank, "status": status}
    row["seconds"] = round(ended - float(began.read_text()), 1) if ended is not None and began.exists() else None
    row["said"] = (told or lines or [""])[-1][-400:]
    if ended is None:
        row["end of its log"], row["threads"] = lines[-40:], threads
    in_time = row["seconds"] is not None and row["seconds"] <= GROUP_SECONDS + MOST_SECONDS
    row["ok"] = in_time and (status != 0 or (fault, rank) in MAY_END_WELL)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--fault", choices=FAULTS, help="this process is a rank of that fault")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.fault is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to write all that a GPU maps takes longer than a timeout
        measure_ranks.GROUP_SECONDS = GROUP_SECONDS
        moment = str(options.folder / f"moment_{options.rank}")
        join_ranks(options.rank, 2, str(options.folder), options.backend, rank_job, options.fault, moment)
        return
    device = torch.device("cuda" if options.backend == "nccl" else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    body = {"format": FORMAT, "environment": environment(device), "group_seconds": GROUP_SECONDS}

    def write(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
        write_atomically(options.out / "two_gpus_faults.json", json.dumps({**body, "rows": rows}, indent=1))
        print(
            *(value for name, value in new.items() if name not in ("end of its log", "threads")), sep=" | ", flush=True
        )

    on_ranks(2, options.backend, calls_once, seconds=START_SECONDS)
    rows = tried(options.backend, write)
    for row in rows:
        print(*row.values(), sep=" | ")
    raise SystemExit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    main()
