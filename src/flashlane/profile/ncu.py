"""Nsight Compute on single implementations: run it, read its CSV back, say what bounds a kernel.

The tool's command runs :mod:`flashlane.profile.target`, which launches each implementation once between two launches of
a marker kernel, so that every launch in between belongs to that tag. The clocks are left alone (``--clock-control
none``): cycles then repeat within 1 % although the clock does not.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flashlane.bench.measure.flops import Direction
from flashlane.core.problem import AttentionProblem
from flashlane.profile.target import MARKER, Request
from flashlane.profile.tools import NCU, run_tool

CYCLES = "sm__cycles_elapsed.max"
SECONDS, REPORT_SECONDS = 240.0, 600.0
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "short_scoreboard",
    "sleeping", "tex_throttle", "wait",
)  # fmt: skip
"""Why a warp could not issue; ``gmma``, waiting for wgmma, exists on Hopper alone."""
MEANINGS = {
    "barrier": "other warps at a barrier",
    "branch_resolving": "the target of a branch",
    "dispatch_stall": "the dispatcher",
    "drain": "its last stores, before it ends",
    "gmma": "a wgmma group to finish",
    "imc_miss": "the cache of constants",
    "lg_throttle": "the queue of global loads and stores",
    "long_scoreboard": "global memory or L2",
    "math_pipe_throttle": "a busy arithmetic pipe",
    "membar": "a memory barrier",
    "mio_throttle": "the queue of shared memory and special functions",
    "no_instruction": "the instruction cache",
    "not_selected": "another warp that was issued",
    "short_scoreboard": "shared memory or a special function",
    "sleeping": "the end of its own sleep",
    "tex_throttle": "the queue of the texture unit",
    "wait": "the fixed latency of the instruction before",
}


@dataclass(frozen=True)
class Metric:
    """One line of the table of counters."""

    title: str
    name: str
    unit: str = "%"


LDSM_CONFLICTS = "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm"
METRICS: tuple[Metric, ...] = (
    Metric("time", "gpu__time_duration.sum", "µs"),
    Metric("SM cycles", CYCLES, ""),
    Metric("DRAM throughput", "dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    Metric("L2 throughput", "lts__throughput.avg.pct_of_peak_sustained_elapsed"),
    Metric("SM throughput", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    Metric("tensor pipe active", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    Metric("MUFU (XU) pipe", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed"),
    Metric("FMA pipe", "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed"),
    Metric("shared-memory pipe", "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed"),
    Metric("issue slots used", "sm__inst_issued.avg.pct_of_peak_sustained_elapsed"),
    Metric("achieved occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    Metric("DRAM read", "dram__bytes_read.sum", "MB"),
    Metric("DRAM written", "dram__bytes_write.sum", "MB"),
    Metric("bank conflicts, loads", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum", ""),
    Metric("bank conflicts, stores", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum", ""),
    Metric("bank conflicts, ldmatrix", f"{LDSM_CONFLICTS}.sum", ""),
    Metric("ldmatrix conflicts, least SM", f"{LDSM_CONFLICTS}.min", ""),
    Metric("ldmatrix conflicts, mean SM", f"{LDSM_CONFLICTS}.avg", ""),
    Metric("ldmatrix conflicts, most SM", f"{LDSM_CONFLICTS}.max", ""),
    Metric("registers a thread", "launch__registers_per_thread", ""),
)
SCALE = {"µs": 1e-3, "MB": 1e-6}
"""Factors of units from ncu's base units (ns, bytes)."""
UNITS: dict[str, str] = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "device memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "the L2 cache",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "the tensor cores",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed": "the special-function units (exp2)",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed": "the FMA pipe",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": "shared memory",
    "sm__inst_issued.avg.pct_of_peak_sustained_elapsed": "instruction issue",
}
BOUND = 60.0
"""Percent of its peak from which a unit is said to bind."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch and what was counted."""

    kernel: str
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def stalls(self) -> list[tuple[str, float]]:
        """(reason, share of all stalled warps) from the most frequent."""
        found = {m[1]: value for name, value in self.metrics.items() if (m := STALL.fullmatch(name))}
        found.pop("selected", None)
        total = sum(found.values())
        shares = ((reason, value / total) for reason, value in found.items() if total and value)
        return sorted(shares, key=lambda pair: -pair[1])

    @property
    def bound_by(self) -> str:
        """One sentence: the busiest unit where one is busy, else what the warps wait for."""
        busy = sorted(
            ((self.metrics[name], unit) for name, unit in UNITS.items() if name in self.metrics), reverse=True
        )
        if not busy:
            return "nothing that tells was counted"
        percent, unit = busy[0]
        if percent >= BOUND:
            return f"bound by {unit}: busy {percent:.0f} % of the time"
        waits = f"; warps wait most for {meaning(self.stalls[0][0])} ({self.stalls[0][1]:.0%})" if self.stalls else ""
        return f"bound by latency: the busiest unit is {unit}, at {percent:.0f} %{waits}"

    def rows(self) -> list[tuple[str, str]]:
        """(title, figure with unit) of every metric counted."""
        rows = []
        for metric in METRICS:
            value = self.metrics.get(metric.name)
            if value is None:
                continue
            value *= SCALE.get(metric.unit, 1.0)
            digits = 1 if metric.unit else 0
            rows.append((metric.title, f"{value:,.{digits}f} {metric.unit}".replace(",", " ").strip()))
        return rows


def meaning(reason: str) -> str:
    """What a stall reason says, in words."""
    return MEANINGS.get(reason, reason.replace("_", " "))


def all_metrics() -> tuple[str, ...]:
    """Every counter of the table, and the stall reasons."""
    stalls = (f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS)
    return (*(metric.name for metric in METRICS), *stalls)


def count(
    problem: AttentionProblem,
    tags: Sequence[str],
    direction: Direction = "forward",
    *,
    metrics: Iterable[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cuda",
    seconds: float = SECONDS,
    report: Path | None = None,
    sections: str = "full",
) -> dict[str, list[Launch]]:
    """Count metrics of one call of each implementation, kernels and peers by their tags.

    Args:
        problem: the call.
        tags: of the implementations.
        direction: forward or backward.
        metrics: names for ncu; default :func:`all_metrics`. Those unknown to this ncu or chip are left out.
        seed: of the inputs.
        device: a CUDA device.
        seconds: how long ncu may take; with a report :data:`REPORT_SECONDS`.
        report: a file, ``.ncu-rep``, that the same run writes, to be opened with ``ncu-ui`` or ``ncu --import``.
        sections: the set of sections that the report has, as ``ncu --list-sets`` has them: full, detailed, basic.

    Returns:
        The launches of each tag, in order.

    Raises:
        RuntimeError: ncu is not there or counted nothing; the message has what it said.
        ValueError: a tag is unknown.
    """
    if not tags:
        return {}
    path = NCU.path
    if path is None:
        raise RuntimeError(NCU.remedy)
    names = known_metrics(path, tuple(all_metrics() if metrics is None else metrics))
    request = Request(problem, tuple(tags), direction, seed, str(device), calls=1)
    with tempfile.TemporaryDirectory(prefix="flashlane-ncu-") as folder:
        spec = Path(folder) / "request.json"
        spec.write_text(request.to_json(), encoding="utf-8")
        target = [sys.executable, "-m", "flashlane.profile.target", str(spec)]
        if report is None:
            launches = run_ncu(path, target, names, ["--profile-from-start", "off"], seconds)
        else:
            launches = _record(path, target, names, report, sections)
    return by_tag(launches, tags)


def report_command(
    ncu: str, target: Sequence[str], report: Path, sections: str, metrics: Sequence[str] = ()
) -> list[str]:
    """The command that records a report for Nsight Compute's window: a ``.ncu-rep`` with a set of sections.

    Args:
        ncu: the tool's path.
        target: the command that it runs.
        report: the file.
        sections: ``full``, ``detailed``, ``basic``, … as ``ncu --list-sets`` has them.
        metrics: counters that the report has besides those of its sections.
    """
    words = [ncu, "--set", sections, "--import-source", "yes", "--force-overwrite", "--profile-from-start", "off"]
    words += ["--metrics", ",".join(metrics)] if metrics else []
    return [*words, "--clock-control", "none", "-o", str(report.with_suffix("")), *target]


def _record(ncu: str, target: Sequence[str], metrics: Sequence[str], report: Path, sections: str) -> list[Launch]:
    """Record a report, and read the metrics back from it."""
    _, said = _run(report_command(ncu, target, report, sections, metrics), REPORT_SECONDS)
    if not report.is_file():
        raise RuntimeError(f"ncu wrote no report: {complaint(said) or 'it did not say why'}")
    read = [ncu, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    table, _ = _run(read, SECONDS)
    launches = [
        Launch(each.kernel, {name: value for name, value in each.metrics.items() if name in metrics})
        for each in read_csv(table)
    ]
    if not launches:
        raise RuntimeError(f"ncu wrote {report}, and reads no launch from it")
    return launches


def known_metrics(ncu: str, metrics: Sequence[str]) -> tuple[str, ...]:
    """The metrics that this ncu lists for this chip: it refuses a whole run for one name that it does not know."""
    if len(metrics) == 1:
        return tuple(metrics)
    try:
        done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return tuple(metrics)
    names = set(re.findall(r"^(\w+__\w+)", done.stdout, re.MULTILINE))
    if not names:
        return tuple(metrics)
    # launch__ figures and derived ones are not listed; a base name stands for all its roll-ups.
    return tuple(m for m in metrics if m.startswith("launch__") or m.partition(".")[0] in names)


def run_ncu(
    ncu: str, target: Sequence[str], metrics: Sequence[str], extra: Sequence[str] = (), seconds: float = SECONDS
) -> list[Launch]:
    """Run a command under ncu with the clocks left alone; every launch that it counted.

    Raises:
        RuntimeError: it counted nothing, or took longer than ``seconds``; the message has what it said.
    """
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", *extra]
    table, said = _run([*command, "--metrics", ",".join(metrics), *target], seconds)
    launches = read_csv(table)
    if not launches:
        raise RuntimeError(f"ncu counted nothing: {complaint(said) or 'it did not say why'}")
    return launches


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """What ncu printed on stdout; and all that it printed, with its status where that is not 0."""
    done = run_tool("ncu", command, seconds)
    status = f"\nstatus {done.returncode}" if done.returncode else ""
    return done.stdout, done.stdout + done.stderr + status


def complaint(text: str) -> str:
    """What ncu said went wrong, with what to do about the most usual cause."""
    said = [line for line in text.splitlines() if re.match(r"==(ERROR|WARNING)==", line)]
    found = " ".join(dict.fromkeys(said)) or text.strip()[-300:]
    if "ERR_NVGPUCTRPERM" in text:
        found += " (this user may not read the counters: run as root, or set NVreg_RestrictProfilingToAdminUsers=0)"
    return found


def read_csv(text: str) -> list[Launch]:
    """The launches of ``ncu --csv --page raw --print-units base``; lines that are not its table are passed over.

    A metric that ncu could not collect ("n/a") is left out.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    names = next((row for row in rows if row and row[0] == "ID"), None)
    if names is None:
        return []
    launches = []
    for row in rows[rows.index(names) + 1 :]:
        if not row[0].isdigit():  # the line of units
            continue
        cells = dict(zip(names, row, strict=False))
        numbers = {name: cell.replace(",", "") for name, cell in cells.items() if "__" in name}
        metrics = {n: float(c) for n, c in numbers.items() if re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", c)}
        launches.append(Launch(cells.get("Kernel Name", ""), metrics))
    return launches


def by_tag(launches: Sequence[Launch], tags: Sequence[str]) -> dict[str, list[Launch]]:
    """Launches by the tag that they belong to: those after the n-th marker are the n-th tag's.

    Raises:
        RuntimeError: there are not as many markers as tags.
    """
    groups: list[list[Launch]] = []
    for launch in launches:
        if MARKER in launch.kernel:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
    if len(groups) != len(tags):
        raise RuntimeError(f"ncu saw {len(groups)} of {len(tags)} implementations; one of them raised under it")
    return dict(zip(tags, groups, strict=True))


def to_json(counted: Mapping[str, Sequence[Launch]]) -> str:
    """What was counted, as JSON."""
    body = {
        tag: [{"kernel": x.kernel, "bound_by": x.bound_by, "metrics": dict(x.metrics)} for x in launches]
        for tag, launches in counted.items()
    }
    return json.dumps(body, indent=1) + "\n"
