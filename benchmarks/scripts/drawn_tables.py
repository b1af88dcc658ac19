"""What the documents say of the files of drawn.py at judging seeds: tables, and sentences with figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import drawn_summary
from markdown_parts import item, table, wrapped
from result_tables import NOT_MEASURED, Result

PROTOCOLS = ("steady", "flushed")
"""In the order of the tables' figures."""
DEVICE = "NVIDIA H200"
"""What figures are of that name no device."""
KINDS = ("dense", "packed", "window", "decode")


def judged(results: Path) -> list[tuple[str, Result]]:
    """Name and body of each file at a judging seed: the forward first, dense problems first."""
    bodies = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in results.glob("drawn_*.json")]

    def place(named: tuple[str, Result]) -> tuple[Any, ...]:
        name, body = named
        return body["direction"] != "forward", KINDS.index(body["kind"]), _device(body) != DEVICE, name

    return sorted(((name, body) for name, body in bodies if body["role"] == "judging"), key=place)


def _device(body: Result) -> str:
    return str(body["environment"]["device"])


def _what(body: Result) -> str:
    """Direction and kind, and the device where it is another one."""
    return f"{body['direction']}, {body['kind']}" + (f", {_device(body)}" if _device(body) != DEVICE else "")


def summary_table(results: Path) -> str:
    """How the problems compare with the fastest peer, a line for each file."""
    rows = []
    for _, body in judged(results):
        found = [drawn_summary.figures(body["rows"], protocol) for protocol in PROTOCOLS]
        if all(found):
            ahead = " / ".join(f"{100 * each['ahead']:.0f}" for each in found)
            numbers = (" / ".join(f"{each[name]:.2f}" for each in found) for name in ("least", "mean"))
            rows.append((_what(body), int(found[0]["problems"]), f"{ahead} %", *numbers))
    head = ("drawn problems, steady / flushed", "count", "at the fastest peer's speed or above", "least")
    return table((*head, "geometric mean"), rows) if rows else NOT_MEASURED


def worst_table(results: Path) -> str:
    """The problems that are furthest behind, ten of each file."""
    rows = [
        (_what(body), row["problem"], protocol, f"{ratio:.3f}", row["best_peer"][protocol])
        for _, body in judged(results)
        for ratio, protocol, row in drawn_summary.worst(body["rows"])
        if ratio < 1
    ]
    return table(("drawn", "problem", "protocol", "ratio", "fastest peer"), rows) if rows else NOT_MEASURED


def files_list(results: Path) -> str:
    """A line for each file: how many problems it has of those that were asked for, where, when and of which commit."""
    lines = []
    for name, body in judged(results):
        where, absences = body["environment"], ""
        absent = sum(bool(row.get("absent", {}).get("fa4")) for row in body["rows"])
        if absent:
            absences = f"; FlashAttention-4 is absent from {absent}"
        problems = f"{len(body['rows'])} of {body['count']} problems of seed {body['seed']}"
        lines.append(
            item(
                f"[`{name}`](../benchmarks/results/{name}): {body['direction']}, {body['kind']}, {problems},"
                f" {_device(body)}, commit {where['commit']}, {where['date'][:10]}{absences}"
            )
        )
    return "".join(lines) if lines else NOT_MEASURED


def behind_sentence(results: Path) -> str:
    """In how many dense problems the fastest peer is ahead."""
    parts = []
    for _, body in judged(results):
        if body["kind"] != "dense" or _device(body) != DEVICE:
            continue
        found = [drawn_summary.ratios(body["rows"], protocol) for protocol in PROTOCOLS]
        if not all(found):
            continue
        behind = " or ".join(f"{sum(r < 1 for r in each)} ({way})" for way, each in zip(PROTOCOLS, found, strict=True))
        parts.append(f"the {body['direction']} is behind the fastest peer in {behind} of {len(found[0])}")
    if not parts:
        return NOT_MEASURED
    return item(f"On problems drawn at random, {', and '.join(parts)}: [the figures](performance.md#drawn-problems).")


def run_sentence(results: Path) -> str:
    """On what the dense problems were measured."""
    bodies = [body for _, body in judged(results) if body["kind"] == "dense" and _device(body) == DEVICE]
    if not bodies:
        return NOT_MEASURED
    where = bodies[0]["environment"]
    torch, cuda = (where["torch"].split("+") + [""])[0], where.get("cuda")
    cudnn = re.sub(r"^(\d+)(\d\d)(\d\d)$", lambda m: f"{int(m[1])}.{int(m[2])}", str(where["cudnn"]))
    dates = sorted({body["environment"]["date"][:10] for body in bodies})
    versions = f"torch {torch} for CUDA {cuda}, cuDNN {cudnn} and FlashAttention-4 {where['flash-attn-4']}"
    return wrapped(f"Measured on one {_device(bodies[0])} with {versions} ({', '.join(dates)}).")


PARTS: Mapping[str, Callable[[Path], str]] = {
    "drawn": summary_table,
    "drawn-worst": worst_table,
    "drawn-files": files_list,
    "drawn-behind": behind_sentence,
    "drawn-run": run_sentence,
}
"""The generated part of each name."""


def dense_panels(results: Path) -> Iterator[tuple[str, list[float]]]:
    """Title and sorted ratios of each panel of README's chart."""
    for _, body in judged(results):
        if body["kind"] == "dense" and _device(body) == DEVICE:
            for protocol in PROTOCOLS:
                yield f"{body['direction']}, {protocol}", drawn_summary.ratios(body["rows"], protocol)
