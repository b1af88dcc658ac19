"""What the documents say of files that ``flashlane bench`` and the scripts of the baseline grid wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_parts import number, significant, table

ROOT = Path(__file__).resolve().parents[2]
FLASH = "(flash)"
CEILING = "% mma ceiling:"
TIMES = ("ms, flushed:", "steady:")
"""Of rows that have both: with the L2 cache flushed, and of calls back to back."""
DESIGNS = ("naive", "split-kv", "split-q", "split-q+share-kv", "split-q+share-qkv", "split-q+tiling-qk")
DESIGNS += ("split-q+tiling-qkv",)

Result = Mapping[str, Any]
Row = Mapping[str, Any]


def by_problem(result: Result) -> dict[str, list[Row]]:
    """Rows of each problem, in their order."""
    problems: dict[str, list[Row]] = {}
    for row in result["rows"]:
        problems.setdefault(row["problem"], []).append(row)
    return problems


def all_rows(result: Result) -> str:
    """A table a problem with every row, fastest first."""
    head = ("tag", "ms:", "TFLOP/s:", "× best peer:")
    tables = []
    for problem, rows in by_problem(result).items():
        rows = sorted(rows, key=lambda row: milliseconds(row) or float("inf"))
        tables.append(f"**{problem}**\n\n" + table(head, [_cells(row) for row in rows]))
    return "\n".join(tables)


def _cells(row: Row) -> tuple[str, ...]:
    tag = row["tag"] if row["kind"] == "kernel" else f"{row['tag']} (peer)"
    if row["status"] != "ok":
        return (tag, row["status"], "", "")
    speeds = (number(row.get(key), digits) for key, digits in (("tflops", 1), ("speedup", 2)))
    return (tag, significant(milliseconds(row)), *speeds)


def design_tables(result: Result) -> str:
    """A table a problem: the fastest tag of each design that accumulates and stores in f32, padded then swizzled."""
    times = time_columns(result)
    head = ("design", "fastest tag", *times, "TFLOP/s:", "× design before:", "× SDPA flash:", "registers:", "KiB:")
    shares = any(row.get("mma_ceiling") for row in result["rows"])
    head += (CEILING,) if shares else ()
    tables = []
    for problem, rows in by_problem(result).items():
        baselines = {row["tag"]: milliseconds(row) for row in rows if row["kind"] == "peer" and milliseconds(row)}
        flash, before, lines = baselines.get(FLASH), None, []
        for name, members in designs(rows):
            timed = [row for row in members if row["status"] == "ok" and milliseconds(row)]
            if not timed:
                continue
            best = min(timed, key=milliseconds)
            ms, usage = milliseconds(best), best.get("usage") or {}
            ratios = [number(other / ms if other else None, 2) for other in (before, flash)]
            shared = usage.get("shared_bytes")
            size = (usage.get("registers") or "–", number(shared / 1024 if shared else None, 1))
            size += (share(best),) if shares else ()
            lines.append((name, f"`{best['tag']}`", *times_of(best, times), number(best["tflops"], 1), *ratios, *size))
            before = ms
        for row in rows:
            if row["tag"] in baselines:
                ms = milliseconds(row)
                ratio = number(flash / ms if flash else None, 2)
                rest = ("", "", "") if shares else ("", "")
                lines.append((row["tag"], "", *times_of(row, times), number(row["tflops"], 1), "", ratio, *rest))
        tables.append(f"**{problem}**\n\n" + table(head, lines))
    return "\n".join(tables)


def designs(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    """(name, rows) of each design, from the bottom: each design with padded tiles, then all with swizzled ones."""
    kernels = [(row, *split_words(words_of(row["tag"]))) for row in rows if row["kind"] == "kernel"]

    def of(design: str, *must: str) -> list[Row]:
        return [row for row, named, words in kernels if named == design and set(words) - {"persist-q"} == set(must)]

    yield "naive", of("naive")
    for design in DESIGNS[1:]:
        yield design, of(design, "acc-f32")
    yield "swizzle-qkv", [row for design in DESIGNS[1:] for row in of(design, "acc-f32", "swizzle-qkv")]


def logs_columns(result: Result) -> str:
    """The columns and rows of the baseline logs: f16 accumulators and padded tiles.

    The last column is the gain over the best row so far, as those logs print it.
    """
    times = time_columns(result)
    head = ("tag", "first, second, last output", *times, "TFLOP/s (all operations):", "over the best so far:")
    tables = []
    for problem, rows in by_problem(result).items():
        best, lines = None, []
        for row in rows:
            if row["kind"] == "kernel" and split_words(words_of(row["tag"]))[1]:
                continue
            ms = milliseconds(row)
            if row["status"] != "ok" or not ms:
                lines.append((row["tag"], "", row["status"], *[""] * len(times), ""))
                continue
            gain = "" if best is not None and ms >= best else f"+{100 * (best / ms - 1) if best else 0:.2f} %"
            best = ms if best is None else min(best, ms)
            values = ", ".join(f"{value:.8f}" for value in row.get("values") or ())
            lines.append((row["tag"], values, *times_of(row, times, 6), number(row.get("tflops_all"), 2), gain))
        tables.append(f"**{problem}**\n\n" + table(head, lines))
    return "\n".join(tables)


def summary(result: Result) -> str:
    """One line a problem: our fastest kernel next to SDPA flash (FlashAttention-2) and cuDNN, by both protocols."""
    times = time_columns(result)
    head = ("problem", "fastest of ours", *times, "TFLOP/s:", "× SDPA flash:", "× cuDNN:")
    lines = []
    for problem, rows in by_problem(result).items():
        timed = {row["tag"]: row for row in rows if milliseconds(row) and row["status"] == "ok"}
        ours = min((row for row in timed.values() if row["kind"] == "kernel"), key=milliseconds)
        ratios = (speeds_over(ours, timed[tag]) if tag in timed else "" for tag in (FLASH, "(cudnn)"))
        lines.append((problem, f"`{ours['tag']}`", *times_of(ours, times), number(ours.get("tflops"), 1), *ratios))
    return table(head, lines)


def time_columns(result: Result) -> tuple[str, ...]:
    """The titles of a result's times: :data:`TIMES`, or one where it has one protocol."""
    return TIMES if any(steady(row) for row in result["rows"]) else ("ms:",)


def times_of(row: Row, columns: Sequence[str], digits: int | None = None) -> list[str]:
    """A row's milliseconds for these columns, with so many digits behind the point or four in all."""
    found = (milliseconds(row), steady(row))[: len(columns)]
    return [significant(ms) if digits is None else number(ms, digits) for ms in found]


def speeds_over(ours: Row, other: Row) -> str:
    """How many times as fast as another row ours is, flushed and, where both were timed, steady."""
    pairs = ((of(other), of(ours)) for of in (milliseconds, steady))
    return " / ".join(number(theirs / mine, 2) for theirs, mine in pairs if theirs and mine)


def logs(result: Result) -> str:
    """A table a log: every line of it, our figures, and the milliseconds that it reports."""
    reported = json.loads((ROOT / "src/flashlane/bench/suites/baseline_reported.json").read_text(encoding="utf-8"))
    times = time_columns(result)
    head = ("problem", "tag", "first, second, last output", *times, "TFLOP/s (all operations):", "the log's ms:")
    measured = {(row["problem"], row["tag"]): row for row in result["rows"]}
    tables = []
    for log in reported["logs"]:
        lines = []
        for line in log["rows"]:
            title = "B{} H{} N{} D{}".format(*line["shape"]) + f" {line['dtype']}"
            for tag, theirs in line["ms"].items():
                row = measured.get((f"{title}, {log['name']}", tag), {})
                ms = milliseconds(row) if row.get("status") == "ok" else None
                values = ", ".join(f"{value:.8f}" for value in row.get("values") or ()) if ms else ""
                ours = times_of(row, times, 6) if ms else [row.get("status", "not run"), *[""] * (len(times) - 1)]
                lines.append((title, f"`{tag}`", values, *ours, number(row.get("tflops_all"), 2), f"{theirs:.6f}"))
        tables.append(f"**{log['name']}** (reported on {log['card']})\n\n" + table(head, lines))
    return "\n".join(tables)


def words_of(tag: str) -> list[str]:
    """``mma(split-q+acc-f32+stage1)``: split-q, acc-f32, stage1."""
    return tag.partition("(")[2].rstrip(")").split("+")


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """The design (where the data lives), and what else is said but the stages."""
    design = [word for word in words if word.startswith(("naive", "split", "share", "tiling"))]
    return "+".join(design), [word for word in words if word not in design and not word.startswith("stage")]


def share(row: Row) -> str:
    """Percent of what ``mma.sync`` gives from registers, where it was measured."""
    return number(100 * row["mma_ceiling"], 0) if row.get("mma_ceiling") else "–"


def milliseconds(row: Row) -> float | None:
    return row["timing"]["median"] if row.get("timing") else None


def steady(row: Row) -> float | None:
    """Milliseconds of calls back to back, where a row has them next to those with the L2 cache flushed."""
    return ((row.get("timings") or {}).get("steady") or {}).get("median")
