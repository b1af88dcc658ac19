"""What the documents say of the files of drawn.py at judging seeds: tables, and sentences with figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import drawn_summary
from markdown_parts import item, table, wrapped
from result_tables import NOT_MEASURED, Result

PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa4": "FlashAttention-4", "flashinfer": "FlashInfer"}
"""Peers of the rows, and their names."""
PROTOCOLS = ("steady", "flushed")
"""In the order of the tables' figures."""
KINDS = ("dense", "packed", "window", "deterministic", "decode", "cache")
HEAD_DIMS = (64, 96, 128, 192, 256)
"""The largest head dim of each column of the table by head dim."""


def judged(results: Path) -> list[tuple[str, Result]]:
    """Name and body of each file at a judging seed: the forward first, dense problems first."""
    bodies = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in results.glob("drawn_*.json")]

    found = [(name, body) for name, body in bodies if body["role"] == "judging"]
    main = main_device(body for _, body in found if body["peers"])

    def place(named: tuple[str, Result]) -> tuple[Any, ...]:
        name, body = named
        return body["direction"] != "forward", KINDS.index(body["kind"]), _device(body) != main, name

    return sorted(found, key=place)


def with_peers(results: Path) -> list[tuple[str, Result]]:
    """Those of :func:`judged` that peers were timed in."""
    return [(name, body) for name, body in judged(results) if body["peers"]]


def main_device(bodies: Iterable[Result]) -> str:
    """The device of the newest dense file: figures that name no device are of it."""
    dense = [body for body in bodies if body["kind"] == "dense"]
    return max(((body["environment"]["date"], _device(body)) for body in dense), default=("", ""))[1]


def _device(body: Result) -> str:
    return str(body["environment"]["device"])


def _lines(results: Path) -> tuple[str, dict[str, list[Result]]]:
    """The main device; and the rows of all files of a direction, kind and device, by what tables call them."""
    found = with_peers(results)
    main, lines = main_device(body for _, body in found), {}
    for _, body in found:
        what = f"{body['direction']}, {body['kind']}" + f", {_device(body)}" * (_device(body) != main)
        lines[what] = lines.get(what, []) + body["rows"]
    return main, lines


def summary_table(results: Path) -> str:
    """How the problems compare with the fastest peer, a line for each direction and kind."""
    rows = []
    for what, problems in _lines(results)[1].items():
        found = [drawn_summary.figures(problems, protocol) for protocol in PROTOCOLS]
        if all(found):
            ahead = " / ".join(f"{100 * each['ahead']:.0f}" for each in found)
            numbers = (" / ".join(f"{each[name]:.2f}" for each in found) for name in ("least", "mean"))
            rows.append((what, int(found[0]["problems"]), f"{ahead} %", *numbers))
    head = ("drawn problems, steady / flushed", "count", "at the fastest peer's speed or above", "least")
    return table((*head, "geometric mean"), rows) if rows else NOT_MEASURED


def worst_table(results: Path) -> str:
    """The problems that are furthest behind, ten of each direction and kind."""
    rows = [
        (what, row["problem"], protocol, f"{ratio:.3f}", row["best_peer"][protocol])
        for what, problems in _lines(results)[1].items()
        for ratio, protocol, row in drawn_summary.worst(problems)
        if ratio < 1
    ]
    return table(("drawn", "problem", "protocol", "ratio", "fastest peer"), rows) if rows else NOT_MEASURED


def regret_table(results: Path) -> str:
    """How much longer what is chosen takes than the best of our other configurations, where those were timed."""
    rows = []
    for _, body in judged(results):
        found = {way: drawn_summary.regrets(body["rows"], way) for way in body["protocols"]}
        for way, losses in found.items():
            if losses:
                figures = (sum(losses) / len(losses), drawn_summary.percentile(losses, 0.95), losses[-1])
                what = f"{body['direction']}, {body['kind']}" + f", {way}" * (len(found) > 1)
                rows.append((what, len(losses), *(f"{100 * each:.1f} %" for each in figures)))
    head = ("drawn problems", "count", "mean", "95th percentile", "worst")
    return table(head, rows) if rows else NOT_MEASURED


def head_dims_table(results: Path) -> str:
    """How many problems of each head dim are at the fastest peer's speed or above under both protocols."""
    rows = []
    for what, problems in _lines(results)[1].items():
        ahead: dict[int, list[bool]] = {largest: [] for largest in HEAD_DIMS}
        for row in problems:
            if row.get("ratio"):
                largest = next(each for each in HEAD_DIMS if row["sizes"]["head_dim"] <= each)
                ahead[largest].append(min(row["ratio"].values()) >= 1)
        if any(ahead.values()):
            rows.append((what, *(f"{sum(each)} of {len(each)}" if each else "–" for each in ahead.values())))
    bounds = zip((0, *HEAD_DIMS), HEAD_DIMS, strict=False)
    head = [f"D {low + 8} to {high}" if low else f"D {high}" for low, high in bounds]
    return table(("drawn, ahead in both protocols", *head), rows) if rows else NOT_MEASURED


def absent_text(results: Path) -> str:
    """Where FlashAttention-4 is absent, and why; and which peers ran in no problem of a kind."""
    parts = [text for text in (_fa4_sentence(results), _never_ran(results)) if text]
    return "\n".join(parts) or NOT_MEASURED


def _fa4_sentence(results: Path) -> str:
    reasons: dict[str, set[int]] = {"gave a wrong result": set(), "did not run": set()}
    count = 0
    for _, body in with_peers(results):
        for row in body["rows"]:
            if why := row.get("absent", {}).get("fa4"):
                count += 1
                reasons["gave a wrong result" if why.startswith("WRONG") else "did not run"].add(
                    row["sizes"]["head_dim"]
                )
    told = [f"it {what} at D {', '.join(map(str, sorted(dims)))}" for what, dims in reasons.items() if dims]
    return wrapped(f"FlashAttention-4 is absent from {count} problems: {'; '.join(told)}.") if count else ""


def _never_ran(results: Path) -> str:
    """An item for each reason why a peer ran in no problem of some lists, and one for problems without any peer."""
    never: dict[tuple[str, str], list[str]] = {}
    alone = []
    for what, rows in _lines(results)[1].items():
        for peer, name in PEERS.items():
            reasons = Counter(row["absent"][peer] for row in rows if peer in row.get("absent", {}))
            if reasons and reasons.total() == len(rows):
                never.setdefault((name, reasons.most_common(1)[0][0]), []).append(f"*{what}*")
        if without := sum(not row.get("ratio") for row in rows):
            alone.append(f"{without} of {len(rows)} in *{what}*")
    told = [f"{name} ran in no problem of {', '.join(kinds)}: {why}." for (name, why), kinds in never.items()]
    told += [f"Problems that no peer ran are not counted above: {', '.join(alone)}."] if alone else []
    return "".join(map(item, told))


def files_list(results: Path) -> str:
    """A line for each file: how many problems it has of those that were asked for, where, when and of which commit."""
    lines = []
    for name, body in judged(results):
        where, absences = body["environment"], "" if body["peers"] else "; without peers, with our other configurations"
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


def _dense(results: Path) -> tuple[str, dict[str, list[Result]]]:
    """The main device; and the rows of its dense problems by direction."""
    main, lines = _lines(results)
    directions = {direction: lines.get(f"{direction}, dense", []) for direction in ("forward", "backward")}
    return main, {direction: rows for direction, rows in directions.items() if rows}


def behind_sentence(results: Path) -> str:
    """A sentence that says in how many dense problems the fastest peer is ahead."""
    parts = []
    main, dense = _dense(results)
    for direction, rows in dense.items():
        found = [drawn_summary.ratios(rows, protocol) for protocol in PROTOCOLS]
        if not all(found):
            continue
        behind = " or ".join(f"{sum(r < 1 for r in each)} ({way})" for way, each in zip(PROTOCOLS, found, strict=True))
        parts.append(f"the {direction} is behind the fastest peer in {behind} of {len(found[0])}")
    if not parts:
        return NOT_MEASURED
    told = (
        f"On problems drawn at random ({main}), {', and '.join(parts)}: [the figures](performance.md#drawn-problems)."
    )
    return item(told)


def run_sentence(results: Path) -> str:
    """On what the dense problems were measured."""
    found = [body for _, body in with_peers(results)]
    main = main_device(found)
    bodies = [body for body in found if body["kind"] == "dense" and _device(body) == main]
    if not bodies:
        return NOT_MEASURED
    where = bodies[0]["environment"]
    torch, cuda = (where["torch"].split("+") + [""])[0], where.get("cuda")
    cudnn = re.sub(r"^(\d+)(\d\d)(\d\d)$", lambda m: f"{int(m[1])}.{int(m[2])}", str(where["cudnn"]))
    dates = sorted({body["environment"]["date"][:10] for body in bodies})
    versions = f"torch {torch} for CUDA {cuda}, cuDNN {cudnn} and FlashAttention-4 {where['flash-attn-4']}"
    share = re.search(r"--share \d+/(\d+)", str(where.get("command")))
    where_run = f"one of {share[1]} {main} of a host" if share else f"one {main}"
    return wrapped(f"Each problem was measured on {where_run} with {versions} ({', '.join(dates)}).")


SHORT_MS = 0.2
"""Backwards that take less wait for the host."""


def short_sentence(results: Path) -> str:
    """How often FlashAttention-2 is ahead in short backwards."""
    found = [body for _, body in with_peers(results)]
    main = main_device(found)
    rows = [row for body in found if body["direction"] == "backward" and _device(body) == main for row in body["rows"]]
    if not rows:
        return NOT_MEASURED
    counts = []
    for protocol in PROTOCOLS:
        ratios = [row["ms"]["fa2"][protocol] / row["ms"]["flashlane"][protocol] for row in rows
                  if "fa2" in row["ms"] and row["ms"]["flashlane"][protocol] < SHORT_MS]  # fmt: skip
        counts.append(f"in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} ({protocol})")
    told = f"Backwards that take less than {SHORT_MS} ms wait for the host: FlashAttention-2 is ahead"
    return wrapped(f"{told} {' and '.join(counts)} of those in which it was timed.")


PARTS: Mapping[str, Callable[[Path], str]] = {
    "drawn": summary_table,
    "drawn-worst": worst_table,
    "drawn-regret": regret_table,
    "drawn-dims": head_dims_table,
    "drawn-absent": absent_text,
    "drawn-files": files_list,
    "drawn-behind": behind_sentence,
    "drawn-run": run_sentence,
    "drawn-short": short_sentence,
}
"""The generated part of each name."""


def dense_panels(results: Path) -> Iterator[tuple[str, list[float]]]:
    """Title and sorted ratios of each panel of README's chart."""
    for direction, rows in _dense(results)[1].items():
        for protocol in PROTOCOLS:
            yield f"{direction}, {protocol}", drawn_summary.ratios(rows, protocol)
