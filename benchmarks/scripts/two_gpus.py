"""All that context parallelism has to show on two GPUs of one host, by one command.

    PYTHONPATH=src python3 benchmarks/scripts/two_gpus.py --out $OUT
    PYTHONPATH=src python3 benchmarks/scripts/two_gpus.py --rehearse --out rehearsal

Each part is processes of its own with a limit, so that one that hangs costs no other:

    default    context_parallel.py --peers: every method and layout against one GPU, times of the problems with peers,
               500 repeats that must have the same bits, a call in a CUDA graph
    switched   the same without peers, with all that is built but off (context_parallel.py, SWITCHES)
    sanitizer  the first checks again with rank 1 under compute-sanitizer's memcheck
    bench      flashlane bench --ranks 2, with the model of more ranks
    step       flashlane e2e --ranks 2: a training step under FSDP2 and context parallelism

It writes two_gpus.json: for each target its figure, and whether it is met; the table is printed last. Exit status 1: a
check failed or a part did not end well. A target that is missed is no failure. ``--rehearse`` runs all of it by gloo on
a CPU, with small problems and without the sanitizer: the figures of a rehearsal say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from context_parallel import REPEATS, SWITCHES

from flashlane.bench.measure.results import write_atomically

FORMAT = "flashlane-two-gpus/1"
HERE = Path(__file__).parent
TARGETS = {
    ("8k", "forward"): 0.98,
    ("8k", "both"): 0.96,
    ("4k", "forward"): 0.93,
    ("4k", "both"): 0.93,
    ("MHA 16k", "forward"): 0.95,
    ("MHA 16k", "both"): 0.95,
    ("documents", "forward"): 0.90,
    ("documents", "both"): 0.90,
}
"""The least share of the ideal, half of one GPU's time for the whole problem, by problem and passes."""
LIMITS = {"default": 240, "switched": 150, "sanitizer": 240, "bench": 120, "step": 120}
"""Seconds of each part."""
REHEARSAL = 3
"""How many times the limits a rehearsal may take, as CPUs are slow."""


def limit_of(part: str, rehearse: bool) -> int:
    """Seconds of a part."""
    return LIMITS[part] * (REHEARSAL if rehearse else 1)


def commands(out: Path, rehearse: bool, ranks: int) -> dict[str, list[list[str]]]:
    """The processes of each part, which run at once."""
    seconds = {part: str(limit_of(part, rehearse) - 40) for part in LIMITS}
    one = [sys.executable, str(HERE / "context_parallel.py"), "--ranks", str(ranks)]
    one += ["--backend", "gloo", "--repeats", "6"] if rehearse else ["--repeats", str(REPEATS)]
    found = {
        "default": [[*one, "--peers", "--seconds", seconds["default"], "--out", str(out / "default")]],
        "switched": [
            [*one, "--switches", ",".join(SWITCHES), "--seconds", seconds["switched"], "--out",
             str(out / "switched")]
        ],
    }  # fmt: skip
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # In a rehearsal rank 1 is a process like the others: what is tried is that the ranks meet and check.
    under = [] if rehearse else [sanitizer, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    meeting = out / "meeting"
    found["sanitizer"] = [
        [*(under if rank == 1 else []), *one, "--rank", str(rank), "--folder", str(meeting), "--out",
         str(out / f"sanitizer-{rank}")]
        for rank in range(ranks)
    ]  # fmt: skip
    cli = [sys.executable, "-m", "flashlane"]
    small = ["--device", "cpu", "--tokens", "32", "--iters", "1"] if rehearse else []
    found["bench"] = [[*cli, "bench", "--ranks", str(ranks), *small, "--out", str(out / "bench")]]
    found["step"] = [[*cli, "e2e", "--ranks", str(ranks), *small, "--out", str(out / "step")]]
    return found


def run(name: str, processes: list[list[str]], out: Path, limit: float) -> dict[str, Any]:
    """A part: its status, seconds, and the end of what its processes wrote."""
    began, running = time.monotonic(), []
    for number, command in enumerate(processes):
        log = (out / f"{name}-{number}.log").open("w")
        # A group of its own, so that the ranks end with the process that started them.
        running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
    status: list[Any] = []
    try:
        for each in running:
            try:
                status.append(each.wait(max(1.0, began + limit - time.monotonic())))
            except subprocess.TimeoutExpired:
                status.append("no end within its limit")
    finally:
        for each in running:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    ends = [(out / f"{name}-{number}.log").read_text()[-1500:] for number in range(len(processes))]
    found: dict[str, Any] = {"part": name, "ok": status == [0] * len(processes), "seconds": time.monotonic() - began}
    return found if found["ok"] else {**found, "status": status, "end": ends}


def unfinished(file: Path) -> list[str]:
    """What a run of context_parallel.py left out for lack of time, or could not do."""
    if not file.exists():
        return []
    body = json.loads(file.read_text())
    parts = [(name, each) for name, found in body.items() for each in (found if isinstance(found, list) else [found])]
    failed = [name for name, each in parts if isinstance(each, dict) and "error" in each]
    return sorted({*failed, *body.get("skipped", [])})


def best_shares(found: dict[str, Any]) -> dict[tuple[str, str], tuple[float, str]]:
    """The largest share of the ideal of each problem and passes, and its transport."""
    shares = {}
    for problem in found.get("speed", []):
        rows = [row for row in problem.get("rows", []) if row["method"] != "one process"]
        for way in ("forward", "both") if rows else ():
            best = max(rows, key=lambda row: row[f"{way}_efficiency"])
            shares[problem["name"], way] = best[f"{way}_efficiency"], best["method"]
    return shares


def judged(out: Path) -> list[dict[str, Any]]:
    """Each target with its figure, by the transports that are on and with those that are off."""
    rows = []
    shares = {}
    for kind in ("default", "switched"):
        file = out / kind / "context_parallel.json"
        shares[kind] = best_shares(json.loads(file.read_text())) if file.exists() else {}
    for (problem, way), target in TARGETS.items():
        for kind, each in shares.items():
            share, method = each.get((problem, way), (None, ""))
            met = None if share is None else share >= target
            rows.append({"problem": problem, "passes": way, "target": target, "switches": kind, "share": share,
                         "method": method, "met": met})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/two_gpus"), help="folder of the results")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="by gloo on a CPU, with small problems")
    parser.add_argument("--parts", default=",".join(LIMITS), help="a list of parts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of a part end, too
    out = options.out.resolve()
    shutil.rmtree(out / "meeting", ignore_errors=True)
    (out / "meeting").mkdir(parents=True)
    planned = commands(out, options.rehearse, options.ranks)
    wanted = options.parts.split(",")
    if unknown := [name for name in wanted if name not in planned]:
        parser.error(f"--parts has {unknown[0]!r}; it may have {', '.join(planned)}")
    found: dict[str, Any] = {"format": FORMAT, "rehearsal": options.rehearse, "parts": [], "targets": []}
    for name in wanted:
        found["parts"].append(run(name, planned[name], out, limit_of(name, options.rehearse)))
        if missing := unfinished(out / name / "context_parallel.json"):
            found["parts"][-1] |= {"ok": False, "not done": missing}
        print(json.dumps(found["parts"][-1]), flush=True)
        found["targets"] = judged(out)
        write_atomically(out / "two_gpus.json", json.dumps(found, indent=1))
    for row in found["targets"]:
        words = {None: "not measured", True: "met", False: "missed"}[row["met"]]
        share = "" if row["share"] is None else f"{row['share']:.1%} {row['method']}"
        print(
            f"{row['problem']:10} {row['passes']:8} {row['switches']:9} target {row['target']:.0%}  {words:12} {share}"
        )
    raise SystemExit(0 if all(part["ok"] for part in found["parts"]) else 1)


if __name__ == "__main__":
    main()
