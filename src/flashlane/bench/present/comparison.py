"""All implementations of one problem side by side: which is fastest, which uses the least memory, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashlane.bench.measure.results import OK, UNCHECKED, Results, Row
from flashlane.bench.measure.runner import PLAIN
from flashlane.bench.present.table import NONE, Column, mib_cell, significant
from flashlane.core import registry
from flashlane.core.dispatch import select
from flashlane.core.problem import AttentionProblem


def representatives(problem: AttentionProblem) -> tuple[str, ...]:
    """The kernel that ``auto`` takes and the preferred one of every other family that can run a problem."""
    best: dict[str, tuple[float, str]] = {}
    for kernel in registry.kernels(listed_only=True):
        if kernel.supports(problem) is None:
            known = best.get(kernel.family)
            if known is None or known[0] < kernel.preference(problem):
                best[kernel.family] = (kernel.preference(problem), kernel.tag)
    chosen = select(problem)
    best[chosen.family] = (0.0, chosen.tag)
    return tuple(tag for _, tag in best.values())


@dataclass(frozen=True)
class Standing:
    """One implementation next to the others on one problem."""

    row: Row
    versus_plain: float | None
    """Time of plain PyTorch over its time, and the same of the memory of one call."""
    memory_versus_plain: float | None

    @property
    def tag(self) -> str:
        return self.row.tag


def standings(rows: Sequence[Row]) -> list[Standing]:
    """One problem's rows, the fastest first, those without a time last."""
    plain = next((row for row in rows if row.tag == PLAIN), None)
    plain_ms = plain.timing.median if plain and plain.timing else None
    plain_bytes = extra(plain) if plain else None

    def standing(row: Row) -> Standing:
        ms, taken = row.timing.median if row.timing else None, extra(row)
        return Standing(
            row,
            plain_ms / ms if plain_ms and ms else None,
            plain_bytes / taken if plain_bytes and taken else None,
        )

    return sorted(map(standing, rows), key=lambda s: s.row.timing.median if s.row.timing else float("inf"))


def extra(row: Row | None) -> int | None:
    """Bytes that a row's call allocates beyond its inputs."""
    return row.memory.extra if row is not None and row.memory is not None else None


def verdict(found: Sequence[Standing]) -> str:
    """One sentence: the fastest of the right ones, the one that uses the least memory, and by how much."""
    timed = [s for s in found if s.row.timing and s.row.status in (OK, UNCHECKED)]
    if not timed:
        return "nothing ran"
    fastest = timed[0]
    words = [f"fastest: {fastest.tag}, {significant(fastest.row.timing.median)} ms"]
    others = [s for s in timed[1:] if s.row.kind != fastest.row.kind]
    if others:
        ratio = others[0].row.timing.median / fastest.row.timing.median
        kind = "the best peer," if others[0].row.kind == "peer" else "our best kernel,"
        words.append(f"{ratio:.2f}× as fast as {kind} {others[0].tag}")
    if fastest.versus_plain and fastest.tag != PLAIN:
        words.append(f"{fastest.versus_plain:.2f}× as fast as plain PyTorch")
    measured = [s for s in timed if extra(s.row) is not None]
    text = ", ".join(words)
    if measured:
        least = min(extra(s.row) for s in measured)
        lean = [s.tag for s in measured if extra(s.row) == least]
        more = f" and {len(lean) - 1} more" if len(lean) > 1 else ""
        text += f"; lowest memory: {lean[0]}{more}, {least / 2**20:.1f} MiB a call"
    return text


def columns() -> list[Column]:
    """What ``flashlane compare`` shows of a standing."""

    def ratio(value: float | None) -> str:
        return NONE if value is None else f"{value:.2f}"

    def error(s: Standing) -> str:
        return f"{s.row.verdict.max_error:.1e}" if s.row.verdict else NONE

    return [
        Column("ms", lambda s: significant(s.row.timing and s.row.timing.median)),
        Column("±%", lambda s: f"{50 * s.row.timing.spread:.1f}" if s.row.timing else NONE, drop=1),
        Column("TFLOP/s", lambda s: significant(s.row.tflops), drop=3),
        Column("× plain", lambda s: ratio(s.versus_plain)),
        Column("× best peer", lambda s: ratio(s.row.speedup)),
        Column("MiB", lambda s: mib_cell(s.row)),
        Column("× less MiB", lambda s: ratio(s.memory_versus_plain), drop=4),
        Column("max err", error, drop=2),
        Column("/allowed", lambda s: ratio(s.row.verdict.ratio if s.row.verdict else None), drop=2),
        Column("check", lambda s: s.row.status, justify="left"),
    ]


def markdown(results: Results) -> str:
    """Every problem's standings as Markdown."""
    shown, parts = columns(), []
    for title in dict.fromkeys(row.problem for row in results.rows):
        ranked = standings([row for row in results.rows if row.problem == title])
        head = ["tag", *(column.title for column in shown)]
        lines = [head, ["---"] * len(head)]
        lines += [[f"`{s.tag}`", *(str(column.cell(s)) for column in shown)] for s in ranked]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        failed = [f"- `{s.tag}`: {s.row.message}" for s in ranked if s.row.message]
        parts.append("\n\n".join([f"**{title}**", table, *(["\n".join(failed)] if failed else []), verdict(ranked)]))
    where = results.environment
    head = f"{where.get('device')}; torch {where.get('torch')}; commit {where.get('commit')}; {where.get('date')}"
    return "\n\n".join([head, *parts]) + "\n"
