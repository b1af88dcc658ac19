"""The parts of the command line that need a GPU, once each, in about a minute and a half.

    PYTHONPATH=src python3 benchmarks/scripts/cli_gpu.py --out results [--seconds 95] [--only compare,profile]

Replays with the host's cost apart, cycles and counters from Nsight Compute, the share of the mma.sync ceiling, a
comparison with a peer that hangs, a sweep with the ceilings, the roofline, a profile, a report. Everything that the
commands write goes into one product.zip, what they print into product.log. Exit status 1 when a step fails or its
output lacks what it must have, 2 without a GPU; a step for which no time is left is named and skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_run import device_or_exit

TAG = "mma(split-q+acc-f32+swizzle-qkv+stage1)"
HANGING = """
import time
from flashlane.bench import Peer

def hang(problem, inputs):
    return lambda: (inputs.q @ inputs.k.transpose(-1, -2), time.sleep(3600))

PEERS = (Peer("(hangs)", "a library that never comes back", hang),)
"""


@dataclass(frozen=True)
class Step:
    """One command, and what must be in the files that it wrote."""

    name: str
    words: Sequence[str]
    wrong: Callable[[Path], str | None]
    """What is wrong with the files in the folder, or None."""


def rows_of(folder: Path, pattern: str) -> list[dict]:
    """The rows of the newest results file of that name."""
    path = max(folder.glob(pattern), key=lambda p: p.stat().st_mtime)
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def graphs(folder: Path) -> str | None:
    rows = [r for r in rows_of(folder, "bench-*.json") if r["timing"]]
    if not rows or any("graph" not in r["timing"]["method"] or not r["host_us"] for r in rows):
        return "a row lacks the replay or the host's cost"
    return None


def cycles(folder: Path) -> str | None:
    rows = [r for r in rows_of(folder, "bench-*.json") if r["timing"]]
    if not any(r["cycles"] for r in rows):
        return "no row has cycles: " + "; ".join(json.loads(newest(folder, "bench-*.json"))["notes"])
    ours = [r for r in rows if r["tag"].startswith("mma(") and r["direction"] == "forward"]
    if not ours or any(not 0.05 < (r["mma_ceiling"] or 0) < 1.05 for r in ours):
        return f"shares of the mma.sync ceiling: {[r['mma_ceiling'] for r in ours]}"
    if any(not r["memory"]["reserved"] for r in rows):
        return "a row lacks the allocator's figures"
    return None


def newest(folder: Path, pattern: str) -> str:
    return max(folder.glob(pattern), key=lambda p: p.stat().st_mtime).read_text(encoding="utf-8")


def hung(folder: Path) -> str | None:
    from flashlane.bench.measure.isolated import UNRESPONSIVE

    rows = {r["tag"]: r for r in rows_of(folder, "compare-*.json") if r["direction"] == "forward"}
    said = rows.get("(hangs)", {}).get("message", "")
    if UNRESPONSIVE not in said:
        return f"the hanging peer's row says {said!r}"
    return None if rows.get("(flash)", {}).get("timing") else "nothing was measured after it was ended"


def swept(folder: Path) -> str | None:
    body = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    ceilings = body["environment"].get("ceilings") or {}
    rates = (ceilings.get("copy", 0), ceilings.get("matrix", {}).get("f16", 0), ceilings.get("mma", {}).get("f16", 0))
    if not (rates[0] > 500 and rates[1] > 50 and rates[2] > 50):
        return f"ceilings: {rates}"
    return None if len({r["problem"] for r in body["rows"]}) == 4 else "not four cells"


def placed(folder: Path) -> str | None:
    points = json.loads((folder / "ceilings.json").read_text(encoding="utf-8"))["points"]
    high = [p for p in points if p["share"] > 1.1]
    return f"above its ceiling: {high[:2]}" if high or not points else None


def profiled(folder: Path) -> str | None:
    body = json.loads(next(p for p in folder.glob("profile-*.json") if "trace" not in p.name).read_text())
    launches = body["ncu"].get(TAG) or []
    if not launches:
        return f"no launch was counted: {body['notes']}"
    metrics = launches[0]["metrics"]
    lacking = [m for m in ("sm__cycles_elapsed.max", "dram__throughput.avg.pct_of_peak_sustained_elapsed",
                           "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
                           "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
                           "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio")
               if m not in metrics]  # fmt: skip
    return f"counters lacking: {lacking}" if lacking else None


def reported(folder: Path) -> str | None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    return None if TAG in text and "</html>" in text else "the page lacks a tag"


def steps(folder: Path, peers: Path) -> list[Step]:
    """The commands, in the order in which they run; later ones read what earlier ones wrote."""
    out = ["--out", str(folder)]
    small = ["--B", "2", "--H", "8", "--N", "1024", "--D", "64"]
    few = ["--kernels", TAG, "--baselines", "flash,cudnn"]
    return [
        Step("graph", ["bench", *small, *few, "--graph", "--quick", *out], graphs),
        Step("cycles", ["bench", *small, *few, "--cycles", "--backward", "--quick", *out], cycles),
        Step("sweep", ["sweep", *small[:4], "--N", "1024,4096", "--D", "64,128", *few, "--ceilings", "--quick", *out],
             swept),
        Step("roofline", ["roofline", "--results", str(folder / "sweep.json"), *out], placed),
        Step("profile", ["profile", "--tag", TAG, "--tag", "(flash)", *small, "--tool", "all", *out], profiled),
        Step("report", ["report", str(folder / "sweep.json"), "--out", str(folder / "report.html")], reported),
        Step("compare", ["compare", *small, "--quick", "--timeout", "10", "--baselines",
                         "unfused,flash,cudnn,sdpa-efficient", "--peers-from", str(peers), *out], hung),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of product.zip and product.log")
    parser.add_argument("--seconds", type=float, default=95.0, help="no step begins after so long")
    parser.add_argument("--only", default="", help="names of steps, in a list")
    arguments = parser.parse_args()
    device_or_exit()
    os.environ.setdefault("COLUMNS", "200")
    from typer.testing import CliRunner

    from flashlane.cli.main import app

    arguments.out.mkdir(parents=True, exist_ok=True)
    names = [word for word in arguments.only.split(",") if word]
    start, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as scratch, (arguments.out / "product.log").open("w", encoding="utf-8") as log:
        folder, peers = Path(scratch) / "product", Path(scratch) / "hanging.py"
        folder.mkdir()
        peers.write_text(HANGING)
        for step in steps(folder, peers):
            if names and step.name not in names:
                continue
            begun = time.monotonic()
            if begun - start > arguments.seconds:
                print(f"{step.name:10} SKIPPED: no time left", flush=True)
                continue
            done = CliRunner().invoke(app, list(step.words))
            log.write(f"$ flashlane {' '.join(step.words)}\n{done.output}\n{done.exception or ''}\n")
            log.flush()
            problem = f"status {done.exit_code}: {done.stderr[-600:]}" if done.exit_code else looked(step, folder)
            failed += problem is not None
            print(f"{step.name:10} {time.monotonic() - begun:5.1f} s  {problem or 'ok'}", flush=True)
        shutil.make_archive(str(arguments.out / "product"), "zip", folder)
    print(
        f"{failed} steps failed, {time.monotonic() - start:.0f} s; wrote product.zip and product.log in {arguments.out}"
    )
    return 1 if failed else 0


def looked(step: Step, folder: Path) -> str | None:
    """What is wrong with a step's files; a file that is not there is wrong too."""
    try:
        return step.wrong(folder)
    except (OSError, ValueError, KeyError, StopIteration, TypeError) as error:
        return f"its files: {type(error).__name__} {error}"


if __name__ == "__main__":
    sys.exit(main())
