"""All that context parallelism has to show on two GPUs of one host, by one command.

    PYTHONPATH=src python3 benchmarks/scripts/two_gpus.py --out $OUT
    PYTHONPATH=src python3 benchmarks/scripts/two_gpus.py --rehearse --out rehearsal

Each part is processes of its own with a limit, so that one that hangs costs no other:

    check      context_parallel.py: every method and layout against one GPU, and 500 repeats that must have equal bits
    speed      times of the problems by each transport, and of what a call consists of
    captured   a call in a CUDA graph: whether it is right, and its time
    peers      times of the other methods and of torch's own context parallelism
    switched   check and speed with all that is built but off (context_parallel.py, SWITCHES)
    sanitizer  the first checks again with rank 1 under compute-sanitizer's memcheck
    faults     two_gpus_faults.py: a rank that is lost, or makes another call
    bench      flashlane bench --ranks 2, with the model of more ranks
    step       flashlane e2e --ranks 2: a training step under FSDP2 and context parallelism

It writes two_gpus.json: what each part found, and for each target its figure, and whether it is met; that table is
printed last. A part that ended well in an earlier run with the same --out is not run again, unless --again is given.
Exit status 1: a check failed or a part did not end well. A target that is missed is no failure. ``--rehearse`` runs all
of it by gloo on a CPU, with small problems and without the sanitizer: the figures of a rehearsal say nothing.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from context_parallel import DEFAULT, REPEATS, SWITCHES

from flashlane.bench.measure.results import write_atomically

FORMAT = "flashlane-two-gpus/2"
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
LIMITS = {"check": 150, "speed": 120, "captured": 90, "peers": 120, "switched": 180, "sanitizer": 240, "faults": 120}
LIMITS |= {"bench": 120, "step": 120}
"""Seconds of each part."""
REHEARSED = 240
"""Seconds of each part of a rehearsal, of which it takes about 15 where no other process uses the CPU."""
DONE = {
    "check": "check,repeats,check_all",
    "speed": "speed,parts",
    "captured": "captured",
    "peers": "peers",
    "switched": "check,speed,repeats,check_all",
}
"""What context_parallel.py does in each part that is its own."""
AT_ONCE = ("sanitizer", "faults")
"""Parts that measure no times and are run at once."""
TIMED = ("speed", "switched")
"""The parts whose times are held against the targets."""


def limit_of(part: str, rehearse: bool) -> int:
    """Seconds of a part."""
    return REHEARSED if rehearse else LIMITS[part]


def commands(out: Path, rehearse: bool, ranks: int) -> dict[str, list[list[str]]]:
    """The processes of each part, which run at once."""
    one = [sys.executable, str(HERE / "context_parallel.py"), "--ranks", str(ranks)]
    one += ["--backend", "gloo", "--repeats", "6"] if rehearse else ["--repeats", str(REPEATS)]
    by_part = {}
    for part, done in DONE.items():
        command = [*one, "--do", done, "--seconds", str(limit_of(part, rehearse) - 40), "--out", str(out / part)]
        by_part[part] = [[*command, *(["--switches", ",".join(SWITCHES)] if part == "switched" else [])]]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # In a rehearsal rank 1 is a process like the others: what is tried is that the ranks meet and check.
    under = [] if rehearse else [sanitizer, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    meeting = out / "meeting"
    by_part["sanitizer"] = [
        [*(under if rank == 1 else []), *one, "--rank", str(rank), "--folder", str(meeting), "--out",
         str(out / f"sanitizer-{rank}")]
        for rank in range(ranks)
    ]  # fmt: skip
    faults = [sys.executable, str(HERE / "two_gpus_faults.py"), "--out", str(out / "faults")]
    by_part["faults"] = [[*faults, *(["--backend", "gloo"] if rehearse else [])]]
    cli = [sys.executable, "-m", "flashlane"]
    small = ["--device", "cpu", "--tokens", "32", "--iters", "1"] if rehearse else []
    by_part["bench"] = [[*cli, "bench", "--ranks", str(ranks), *small, "--out", str(out / "bench")]]
    by_part["step"] = [[*cli, "e2e", "--ranks", str(ranks), *small, "--out", str(out / "step")]]
    return by_part


_running: list[subprocess.Popen[bytes]] = []
"""The processes of all parts."""


def end(*_: Any) -> None:
    """End the processes of all parts, and this one."""
    for each in _running:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
    sys.exit(1)


def run(name: str, processes: list[list[str]], out: Path, limit: float) -> dict[str, Any]:
    """A part: its status, seconds, and the end of what its processes wrote."""
    began, running = time.monotonic(), []
    for number, command in enumerate(processes):
        log = (out / f"{name}-{number}.log").open("w")
        # A group of its own, so that the ranks end with the process that started them.
        running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        _running.append(running[-1])
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


FILES = {
    **dict.fromkeys(("check", "speed", "captured", "peers", "switched"), "context_parallel.json"),
    **{"faults": "two_gpus_faults.json", "bench": "ranks.json", "step": "ranks.json"},
}
"""What each part writes in its folder."""


def results(out: Path) -> dict[str, Any]:
    """What each part wrote."""
    files = {part: out / part / name for part, name in FILES.items()}
    return {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}


def judged(out: Path) -> list[dict[str, Any]]:
    """Each target with the share of the ideal that the default call reaches, as it is and with what is off."""
    rows = []
    for kind in TIMED:
        file = out / kind / "context_parallel.json"
        problems = json.loads(file.read_text()).get("speed", []) if file.exists() else []
        found = {each["name"]: row for each in problems for row in each.get("rows", []) if row["method"] == DEFAULT}
        for (problem, way), target in TARGETS.items():
            share = found[problem][f"{way}_efficiency"] if problem in found else None
            met = None if share is None else share >= target
            rows.append({"problem": problem, "passes": way, "target": target, "part": kind, "share": share, "met": met})
    return rows


def earlier(file: Path, rehearse: bool, ranks: int) -> dict[str, dict[str, Any]]:
    """The parts of an earlier run of this kind that ended well, by their names."""
    if not file.exists():
        return {}
    body = json.loads(file.read_text())
    same = (body.get("format"), body.get("rehearsal"), body.get("ranks")) == (FORMAT, rehearse, ranks)
    return {part["part"]: part for part in body["parts"] if part["ok"]} if same else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/two_gpus"), help="folder of the results")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="by gloo on a CPU, with small problems")
    parser.add_argument("--parts", default=",".join(LIMITS), help="a list of parts")
    parser.add_argument("--again", action="store_true", help="run parts again that ended well in an earlier run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    out = options.out.resolve()
    planned = commands(out, options.rehearse, options.ranks)
    part_names = options.parts.split(",")
    if unknown := [name for name in part_names if name not in planned]:
        parser.error(f"--parts has {unknown[0]!r}; it may have {', '.join(planned)}")
    shutil.rmtree(out / "meeting", ignore_errors=True)
    (out / "meeting").mkdir(parents=True)
    file = out / "two_gpus.json"
    earlier_parts = earlier(file, options.rehearse, options.ranks)
    ended = {name: part for name, part in earlier_parts.items() if name not in part_names or not options.again}
    due = [name for name in part_names if name not in ended]
    for name in part_names:
        if name in ended:
            print(f"{name} ended well in an earlier run", flush=True)
    while due:
        some = [name for name in due if name in AT_ONCE] if due[0] in AT_ONCE else due[:1]
        due = [name for name in due if name not in some]
        for name in some:
            shutil.rmtree(out / name, ignore_errors=True)
        with ThreadPoolExecutor(len(some)) as pool:
            parts = list(pool.map(lambda name: run(name, planned[name], out, limit_of(name, options.rehearse)), some))
        for part in parts:
            if missing := unfinished(out / part["part"] / "context_parallel.json"):
                part |= {"ok": False, "not done": missing}
            print(json.dumps(part), flush=True)
            ended[part["part"]] = part
        of_parts = results(out)
        body = {"format": FORMAT, "rehearsal": options.rehearse, "ranks": options.ranks}
        body["environment"] = next((each["environment"] for each in of_parts.values()), {})
        body["parts"] = [ended[each] for each in planned if each in ended]
        write_atomically(file, json.dumps({**body, "targets": judged(out), "results": of_parts}, indent=1))
    for row in judged(out):
        words = {None: "not measured", True: "met", False: "missed"}[row["met"]]
        share = "" if row["share"] is None else f"{row['share']:.1%}"
        print(f"{row['problem']:10} {row['passes']:8} {row['part']:9} target {row['target']:.0%}  {words:12} {share}")
    raise SystemExit(0 if all(ended[name]["ok"] for name in part_names) else 1)


if __name__ == "__main__":
    main()
