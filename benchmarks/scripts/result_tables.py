"""Committed results as Markdown: the tables of each format of a file, and where we lead and trail its peers.

readme_tables.py puts them into the documents.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import baseline_tables
import flex_tables
import foreign_tables
import two_gpus_tables
from baseline_tables import CEILING, by_problem, milliseconds, share
from markdown_parts import number, significant, table, wrapped

VERSIONS = ("torch", "cuda", "driver", "flashlane")
NOT_MEASURED = "Not measured yet.\n"
BOTH = ("forward", "both")

Result = Mapping[str, Any]
Row = Mapping[str, Any]


def bench_tables(path: Path, view: str = "") -> str:
    """A result as Markdown: on what it was measured, then the tables of its format and view."""
    if not path.is_file():
        return NOT_MEASURED
    result = json.loads(path.read_text(encoding="utf-8"))
    kind = str(result.get("format") or ("flashlane-lessons/0" if "block" in (result.get("rows") or [{}])[0] else None))
    views = next((views for prefix, views in VIEWS.items() if kind.startswith(prefix)), None)
    if views is None:
        raise ValueError(f"{path.name} has format {kind!r}; it must be a file that flashlane bench wrote")
    if view not in views:
        raise ValueError(f"{path.name} has no view {view!r}; it may be one of {', '.join(map(repr, views))}")
    in_parts = kind.startswith(two_gpus_tables.FORMAT)
    where = two_gpus_tables.environment_of(result, view) if in_parts else result["environment"]
    return f"{measured_on(where)}{other_runs(result)}\n{views[view](result)}"


def measured_on(where: Mapping[str, Any]) -> str:
    """Device, versions, commit and day on one line."""
    versions = ", ".join(f"{name} {where[name]}" for name in VERSIONS if where.get(name))
    return f"{where['device']}; {versions}; commit {where.get('commit')}, {str(where.get('date'))[:10]}.\n"


def other_runs(result: Result) -> str:
    """How many rows are of runs at other commits, where a file joins several."""
    last = result["environment"].get("commit")
    commits = [row["commit"] for row in result.get("rows") or () if row.get("commit", last) != last]
    counts = (f"{commits.count(commit)} at commit {commit}" for commit in dict.fromkeys(commits))
    return f"Rows of other runs: {', '.join(counts)}.\n" if commits else ""


STANDING = {
    "baseline": "`mma`, baseline grid",
    "mma_targets": "`mma`, targets",
    "hopper_forward": "`hopper`, forward",
    "hopper_backward": "`hopper`, {direction}",
    "triton_targets": "`triton`, targets",
    "decode": "`decode`",
}
"""Committed results of a family against its peers, and what the table of the standing calls them."""
PEERS = {
    "unfused": "plain PyTorch",
    "flash": "FlashAttention-2 (SDPA)",
    "fa2": "FlashAttention-2 (SDPA)",
    "cudnn": "cuDNN (SDPA)",
    "efficient": "SDPA efficient",
    "sdpa-efficient": "SDPA efficient",
    "flex": "FlexAttention",
    "fa4": "FlashAttention-4",
    "flash-attn-4": "FlashAttention-4",
    "ffpa": "ffpa-attn",
}


def standing(results: Path) -> str:
    """Where we lead and where we trail: times as fast as each peer, over all problems of each committed file."""
    rows, devices = [], []
    for name, family in STANDING.items():
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        ratios: dict[tuple[str, str], list[float]] = {}
        for part, parts_result in directions(result):
            for peer, ratio in pairs(parts_result):
                word = peer.strip("()")
                ratios.setdefault((family.format(direction=part), PEERS.get(word, word)), []).append(ratio)
        devices.append(f"{result['environment']['device']}, {str(result['environment'].get('date'))[:10]}")
        for who, of_peer in ratios.items():
            mean = math.exp(sum(map(math.log, of_peer)) / len(of_peer))
            figures = (marked(value) for value in (mean, min(of_peer), max(of_peer)))
            rows.append((*who, len(of_peer), sum(ratio > 1 for ratio in of_peer), *figures))
    if not rows:
        return NOT_MEASURED
    head = ("kernels", "against", "problems:", "faster in:", "geometric mean:", "least:", "most:")
    text = f"Measured on {'; '.join(dict.fromkeys(devices))}."
    absent = [name for name in dict.fromkeys(PEERS.values()) if name not in {row[1] for row in rows}]
    text += f" Not in any of these files: {', '.join(absent)}." if absent else ""
    checked = results / "correctness.json"
    if checked.is_file():
        check = json.loads(checked.read_text(encoding="utf-8"))
        text += (
            f" {check['runs']} checked runs of {len(check['kernels'])} kernels over {check['problems']} drawn problems,"
            f" {check['failures']} failed ([correctness.json](../benchmarks/results/correctness.json))."
        )
    return table(head, rows) + "\n" + wrapped(text)


def directions(result: Result) -> Iterable[tuple[str, Result]]:
    """What is timed together, and a result with its rows only."""
    names = {"backward": "backward", "both": "forward and backward"}
    given = dict.fromkeys(row.get("direction") for row in result.get("rows") or ())
    if not given or not names.keys() >= given.keys():
        yield "", result
        return
    for direction in given:
        yield names[direction], {**result, "rows": [r for r in result["rows"] if r["direction"] == direction]}


def marked(ratio: float) -> str:
    """A ratio; in bold where it is a loss."""
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


def pairs(result: Result) -> Iterable[tuple[str, float]]:
    """(peer, times as fast as it) of every problem of a family's file; nothing for a format that is not known."""
    kind = str(result.get("format"))
    if kind.startswith("flashlane-bench/"):
        for rows in by_problem(result).values():
            timed = [row for row in rows if row["status"] == "ok" and milliseconds(row)]
            ours = min((milliseconds(row) for row in timed if row["kind"] == "kernel"), default=None)
            yield from ((r["tag"], milliseconds(r) / ours) for r in timed if ours and r["kind"] == "peer")
    elif kind.startswith("flashlane-mma-targets/"):
        yield from ((target["peer"], target["ratio"]) for target in result["targets"] if target["ratio"])
    elif kind.startswith("flashlane-triton-targets/"):
        yield from (pair for target in result["targets"] for pair in (target.get("ratios") or {}).items() if pair[1])
    elif kind.startswith("flashlane-hopper-"):
        for row in result["rows"]:
            rates = row.get("tflops") or {}
            yield from (
                (n, rates["flashlane"] / x) for n, x in rates.items() if n != "flashlane" and "flashlane" in rates
            )
    elif kind.startswith("flashlane-decode/"):
        times: dict[str, dict[str, float]] = {}
        for row in result["rows"]:
            if row["check"] == "ok" and row.get("microseconds"):
                times.setdefault(row["cell"], {})[row["tag"]] = row["microseconds"]
        for cell in times.values():
            ours = min((us for tag, us in cell.items() if not tag.startswith("(")), default=None)
            yield from ((tag, us / ours) for tag, us in cell.items() if ours and tag.startswith("("))


def targets(result: Result) -> str:
    """A line a target: the ratio to the peer, and whether the target was met."""
    shares = any(target.get("mma_ceiling") for target in result["targets"])
    ratios = ("ratio, flushed:", "steady:")
    head = ("problem", "against", *ratios, "target:", "", "ms:", "TFLOP/s:", *((CEILING,) if shares else ()), "tag")
    rows = []
    for target in result["targets"]:
        verdict = "" if target["ratio"] is None else "met" if target["met"] else "**missed**"
        tag = f"`{target['tag']}`" if target["tag"] else "not run"
        figures = (significant(target["ms"]), number(target["tflops"], 1), *((share(target),) if shares else ()))
        ratios = (number(target.get(key), 3) for key in ("ratio", "steady_ratio"))
        rows.append((target["problem"], target["peer"], *ratios, target["required"], verdict, *figures, tag))
    met = sum(target["met"] for target in result["targets"])
    return table(head, rows) + f"\n{met} of {len(rows)} targets met.\n"


def triton_targets(result: Result) -> str:
    """A line a target: our time, and how many times as fast as each peer it is, flushed and steady."""
    peers = list(dict.fromkeys(peer for target in result["targets"] for peer in target.get("ratios") or {}))
    head = ("target", "ms:", "TFLOP/s:", *(f"× {PEERS.get(peer.strip('()'), peer)}:" for peer in peers), "target")
    rows = []
    for target in result["targets"]:
        ratios = (both(target, peer) for peer in peers)
        verdict = "met" if target["met"] else "**missed**" if target.get("ratios") else "not run"
        rows.append((target["name"], significant(target["ms"]), number(target["tflops"], 1), *ratios, verdict))
    return table(head, rows) + f"\n{sum(target['met'] for target in result['targets'])} of {len(rows)} targets met.\n"


def both(target: Mapping[str, Any], peer: str) -> str:
    """A target's ratio to a peer, flushed and, where it was timed, steady."""
    found = ((target.get(key) or {}).get(peer) for key in ("ratios", "steady_ratios"))
    return " / ".join(number(ratio, 3) for ratio in found if ratio is not None) or number(None, 3)


def suite(result: Result) -> str:
    """A course table (docs/suites.md explains them): our times, and how many times as fast as the others we are."""
    sizes = ("seqlen", "head_dim", "dtype", "size", "attention", "tokens", "peak")
    sizes += ("workload", "ms", "to_flash", "to_cudnn", "whole_s", "error")  # of whole models (docs/e2e.md)
    words = {c["key"]: c["title"] for c in result["columns"]}
    columns = [key for key in words if key in sizes or key.startswith(("ours_", "speedup")) or key.endswith("_avg")]

    def cell(key: str, value: object) -> str:
        if not isinstance(value, float):
            return "–" if value is None else str(value)
        if key == "tokens":
            return f"{value:,.0f}"
        return f"{marked(value)}×" if key.startswith(("speedup", "to_")) else f"{value:.4g}"

    rows = [[cell(key, row.get(key)) for key in columns] for row in result["rows"]]
    text = table([words[key].replace("_", " ") + ":" for key in columns], rows)
    return text + "".join(f"\n{message}\n" for message in result["messages"])


HOPPER_PEERS = ("cudnn", "fa4", "fa2", "flex", "flashinfer")
HOPPER_TITLES = {**PEERS, "flashinfer": "FlashInfer"}
"""FlashInfer is in a result of its own, and so not in the table of the standing."""
SQUARE = re.compile(r"D(64|128|256) (full|causal) N(\d+) B(\d+) H(\d+)")
"""A problem of the grid: as many tokens and columns whatever the length and the head dim."""


def hopper_name(row: Row) -> str:
    return str(row.get("name") or row["problem"])


def square(row: Row) -> re.Match[str] | None:
    """Head dim, mask, length, batch and heads of a problem of the grid; None of another."""
    return SQUARE.fullmatch(hopper_name(row).removesuffix(f" {row.get('direction')}"))


def hopper_grid(result: Result, direction: str | None = None) -> str:
    """A row a head dim and mask, a column a length: TFLOP/s of ours and of the peers, and the ratio to the fastest."""
    cells: dict[str, dict[int, str]] = {}
    ratios = []
    for row in result["rows"]:
        match = square(row)
        if match is None or row.get("direction") != direction or not row.get("ratio"):
            continue
        rates = [row["tflops"].get(peer) for peer in ("flashlane", *HOPPER_PEERS[:3])]
        text = " / ".join("–" if rate is None else f"{rate:.0f}" for rate in rates)
        cells.setdefault(f"D{match[1]} {match[2]}", {})[int(match[3])] = f"{text} **{row['ratio']:.2f}**"
        ratios.append(row["ratio"])
    if not ratios:
        return NOT_MEASURED
    lengths = sorted({length for row in cells.values() for length in row})
    lines = [(name, *(row.get(length, "–") for length in lengths)) for name, row in cells.items()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    text = table(("", *(f"N {length}:" for length in lengths)), lines)
    return text + f"\nGeometric mean of the {len(ratios)} ratios {mean:.3f}, the least {min(ratios):.3f}.\n"


def hopper_rows(result: Result, every: bool = False) -> str:
    """A line a problem that is not of the grid: TFLOP/s of ours and of the peers, and the ratio to the fastest.

    ``every``: also those of the grid.
    """
    rows = [row for row in result["rows"] if row.get("ratio") and (every or not square(row))]
    peers = [peer for peer in HOPPER_PEERS if any(peer in row["tflops"] for row in rows)]
    tiles = any(row.get("config") for row in rows)
    costs = any(row.get("cost") is not None for row in rows)
    titles = (f"{HOPPER_TITLES.get(peer, peer)}:" for peer in peers)
    head = ("problem", *(("tile",) if tiles else ()), "flashlane:", *titles, "ratio:")
    lines = []
    for row in rows:
        rates = (number(row["tflops"].get(peer), 0) for peer in ("flashlane", *peers))
        tile = (str(row.get("config", "")).split(",")[0],) if tiles else ()
        cost = ("" if row.get("cost") is None else f"{100 * row['cost']:.0f} %",) if costs else ()
        lines.append((hopper_name(row), *tile, *rates, marked(row["ratio"]), *cost))
    return table((*head, *(("cost of the order:",) if costs else ())), lines)


def hopper_targets(result: Result) -> str:
    """A line a target of the whole run."""
    head = ("target", "problems:", "required:", "measured:", "")
    rows = [
        (
            row["target"],
            row["cells"],
            f"{row['required']:g}",
            number(row["measured"], 3),
            "met" if row["met"] else "**missed**",
        )
        for row in result["targets"]
    ]
    return table(head, rows)


def microseconds_of(row: Row) -> list[float]:
    """A decode row's times, steady and flushed; or its one time."""
    protocols = row.get("protocols") or {}
    return [protocols[name] for name in ("steady", "flushed") if name in protocols] or [row["microseconds"]]


def decoding(result: Result) -> str:
    """A line a cell: our time and share of the copy rate, the peers' times, and whether its targets were met."""
    cells: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        if row["check"] == "ok" and row.get("microseconds"):
            cells.setdefault(row["cell"], {})[row["tag"]] = row
    targets = {target["cell"]: target for target in result["targets"]}
    peers = list(dict.fromkeys(tag for rows in cells.values() for tag in rows if tag.startswith("(")))
    head = (
        "cell",
        "µs:",
        "% of the copy rate:",
        *(f"{PEERS.get(p.strip('()'), p)}, µs:" for p in peers),
        "× the best:",
        "",
    )

    def joined(values: Iterable[float]) -> str:
        return " / ".join(number(value, 1) for value in values)

    lines = []
    for cell, rows in cells.items():
        ours = min(
            (row for tag, row in rows.items() if tag not in peers), key=lambda row: row["microseconds"], default=None
        )
        if ours is None:
            continue
        mine = microseconds_of(ours)
        shares = [100 * ours["share"] * ours["microseconds"] / time for time in mine]
        theirs = [microseconds_of(rows[peer]) for peer in peers if peer in rows]
        ratios = (
            " / ".join(marked(min(times) / time) for time, *times in zip(mine, *theirs, strict=True)) if theirs else "–"
        )
        missed = ", ".join(target.split(", wanted ")[-1] for target in targets.get(cell, {}).get("missed", ()))
        lines.append((
            cell, joined(mine), joined(shares),
            *(joined(microseconds_of(rows[peer])) if peer in rows else "–" for peer in peers), ratios,
            f"**missed** {missed}" if missed else "",
        ))  # fmt: skip
    met = sum(len(target["targets"]) - len(target["missed"]) for target in targets.values())
    every = sum(len(target["targets"]) for target in targets.values())
    rate = f"Copy rate in the same run: {result['copy_gigabytes_per_second']:.0f} GB/s.\n\n"
    return rate + table(head, lines) + f"\n{met} of {every} targets met.\n"


def lessons(result: Result) -> str:
    """A line a group: the fastest of ours, torch, and the best loop of mma.sync from registers in the same rounds."""
    head = ("lesson", "problem", "fastest one", "ms:", "TFLOP/s or TB/s:", "torch, ms:", "× torch:", "% of ceiling:")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["block"], row["group"]), []).append(row)
    lines = []
    for (block, group), rows in groups.items():
        ours = [row for row in rows if row["ok"] and row["tag"] != "torch" and not row["tag"].startswith("ceiling")]
        torch = next((row["milliseconds"] for row in rows if row["tag"] == "torch" and row["ok"]), None)
        if not ours:
            lines.append((block, group, "none passed its check", "–", "–", significant(torch), "–", ""))
            continue
        best = min(ours, key=lambda row: row["milliseconds"])
        rate = number(best["tflops"], 1) if best["tflops"] else number((best["gigabytes_per_second"] or 0) / 1e3, 2)
        figures = (rate, significant(torch), number(best["versus_torch"], 2))
        of_ceiling = number(100 * best["of_ceiling"], 0) if best["of_ceiling"] else ""
        lines.append((block, group, f"`{best['tag']}`", significant(best["milliseconds"]), *figures, of_ceiling))
    return table(head, lines)


def conflicts(result: Result) -> str:
    """A line a launch: what Nsight Compute counted."""
    head = ("D:", "layout", "ldmatrix conflicts:", "a read:", "cycles:", "tensor pipe %:", "KiB:", "tag")
    rows = []
    for launch in result["launches"]:
        counted = {name.rpartition("__")[2]: value for name, value in launch["metrics"].items()}
        total = counted["sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"]
        reads = counted.get("sass_inst_executed_op_ldsm.sum")
        tensor = counted.get("pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
        each, cycles = number(total / reads if reads else None, 2), f"{counted['cycles_elapsed.max']:.0f}"
        figures = (f"{total:.0f}", each, cycles, number(tensor, 1), number(launch["shared_bytes"] / 1024, 1))
        rows.append((launch["head_dim"], launch["layout"], *figures, f"`{launch['tag']}`"))
    return table(head, rows)


def ceilings(result: Result) -> str:
    """What the tensor cores and the memory gave: the best ceiling of each precision, and the best copy."""
    best: dict[str, float] = {}
    copied = 0.0
    for row in result["rows"]:
        if row["tag"].startswith("ceiling") and row["tflops"]:
            words = row["group"].split()
            name = " ".join(word for word in words if word.startswith(("f16", "bf16", "acc-")))
            best[name] = max(best.get(name, 0.0), row["tflops"])
        copied = max(copied, row["gigabytes_per_second"] or 0.0)
    rows = [(f"mma.sync m16n8k16, {name}", f"{value:.0f} TFLOP/s") for name, value in best.items()]
    if copied:
        rows.append(("device memory, read and write together", f"{copied / 1000:.2f} TB/s"))
    return table(("ceiling", "measured:"), rows)


def nano_vllm(result: Result) -> str:
    """A line a mode: how near the tokens are to the best ones, and the throughput."""
    head = ("mode", "greedy tokens:", "with the best logit:", "others at most below:", "requests:", "tokens a second:")
    keys = ("mode", "tokens", "best", "largest_regret", "requests", "tokens_per_second")
    return table(head, ([row[key] for key in keys] for row in result["rows"]))


def e2e_kernels(result: Result) -> str:
    """A line a workload and attention: the time of a call, and of each class of its kernels."""
    classes = ("attention", "product", "copy", "other")
    rows = [
        (row["workload"], row["attention"], number(row["ms"], 1), *(number(row["classes"].get(c), 1) for c in classes))
        for row in result["rows"]
    ]
    return table(("workload", "attention", "ms:", *(f"{name}:" for name in classes)), rows)


VIEWS = {
    "flashlane-e2e-kernels/": {"": e2e_kernels},
    two_gpus_tables.FORMAT: {"": two_gpus_tables.shares, "model": two_gpus_tables.model, "step": two_gpus_tables.step},
    "flashlane-flex-host/": {"": flex_tables.host},
    "flashlane-flex-masks/": {"": flex_tables.masks},
    "flashlane-flex-speed/": {"": flex_tables.speed},
    "flashlane-bench/": {
        "": baseline_tables.all_rows,
        "designs": baseline_tables.design_tables,
        "logs-columns": baseline_tables.logs_columns,
        "logs": baseline_tables.logs,
        "summary": baseline_tables.summary,
    },
    "flashlane-nano-vllm/": {"": nano_vllm},
    "flashlane-flash-attention-tests/": {"": foreign_tables.outcomes},
    "flashlane-torch-attention-tests/": {"": foreign_tables.outcomes},
    "flashlane-mma-targets/": {"": targets},
    "flashlane-triton-targets/": {"": triton_targets},
    "flashlane-ncu-conflicts/": {"": conflicts},
    "flashlane-suite/": {"": suite},
    "flashlane-decode/": {"": decoding},
    "flashlane-hopper-backward/": {
        "grid-backward": functools.partial(hopper_grid, direction="backward"),
        "grid-both": functools.partial(hopper_grid, direction="both"),
        "rows": hopper_rows,
        "targets": hopper_targets,
    },
    "flashlane-hopper-": {
        "grid": hopper_grid,
        "rows": hopper_rows,
        "every": functools.partial(hopper_rows, every=True),
    },
    "flashlane-lessons/": {"ceilings": ceilings, "rows": lessons},
}
"""Start of a file's format -> its views."""
