"""The printed side of a run: one table a problem, what was skipped and why, and the compile report."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashlane.bench.measure.flops import Convention
from flashlane.bench.measure.results import ERROR, FAIL, OK, Results, Row, unlisted_note
from flashlane.inspect.compile_report import Usage

PIPED_WIDTH = 200
"""Columns when the output is not a terminal and COLUMNS does not say."""
NONE = "–"
MOST_TAGS = 12
"""Tags printed with one reason."""
FOLD = 24
"""Longest line of a tag in a narrow table."""
STYLES = {OK: "green", FAIL: "bold red", ERROR: "bold red"}
INSTRUCTIONS = ("HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "MUFU.EX2", "FFMA", "SHFL", "BAR", "LDL", "STL")
"""Opcodes with a column of their own in the compile report, where any kernel has them."""


@dataclass(frozen=True)
class Column:
    """One column of a table: what it shows of a row (or of a line of the compile report)."""

    title: str
    cell: Callable[[Any], str | Text]
    drop: int = 0
    """Columns with the highest number go first where the terminal is narrow; 0 always stays."""
    justify: Literal["left", "right"] = "right"
    replaces: str = ""
    """Title of the column that this one is shown in place of, when both would fit."""


def make_console(width: int | None = None, stderr: bool = False) -> Console:
    """A console on stdout (or stderr) that does not squeeze tables into 80 columns when piped."""
    console = Console(width=width, highlight=False, stderr=stderr)
    if width is None and not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=PIPED_WIDTH, highlight=False, stderr=stderr)
    return console


def print_results(results: Results, console: Console, convention: Convention = "gemm") -> None:
    """Every row and every skipped implementation of every problem, then the compile report."""
    titles = dict.fromkeys([r.problem for r in results.rows] + [s.problem for s in results.skipped])
    where = f"{results.environment['device']}, torch {results.environment['torch']}"
    for title in titles:
        rows = [r for r in results.rows if r.problem == title]
        if rows:
            console.print(results_table(rows, f"{title} · {where}", console.width, convention))
        for row in rows:
            if row.message:
                label = Text(f"{row.status} {row.tag}: ", STYLES.get(row.status, ""))
                console.print(label.append(row.message, "default"), soft_wrap=True)
        skipped = [(s.tag, s.reason) for s in results.skipped if s.problem == title]
        listed = {usage.tag for usage in results.compiled}
        print_reasons(skipped, "not run", console, listed=listed)
        console.print()
    if results.compiled:
        print_compiled(results.compiled, console)
    for note in results.notes:
        console.print(Text(note, "yellow"), soft_wrap=True)
    _print_footer(results, console, convention)
    print_unlisted(results.unlisted, "runs", console)


def results_table(rows: Sequence[Row], title: str, width: int, convention: Convention = "gemm") -> Table:
    """One problem's rows; kernels first, peers after a line, the fastest of each kind in bold."""
    columns = [*_columns(rows, convention), Column("check", _status, justify="left")]
    fastest = {_fastest(rows, kind) for kind in ("kernel", "peer")}
    return make_table(rows, columns, title, width, lambda r: "bold" if r.tag in fastest else None)


def make_table(
    rows: Sequence[Any], columns: Sequence[Column], title: str, width: int, style: Callable[[Any], str | None]
) -> Table:
    """Rows under their tags; where they do not fit, tags fold first and then columns go, the least needed first."""
    widest = max(len(_name(row)) for row in rows)
    room = width - min(widest, FOLD)
    shown, dropped = _fitting(columns, rows, room)
    fold = widest if widest + _width(shown, rows) <= width else FOLD
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    if dropped:
        table.caption = f"{', '.join(dropped)}: in a wider terminal, and in the JSON file"
        table.caption_justify, table.caption_style = "left", "dim"
    table.add_column("tag", no_wrap=True)
    for column in shown:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    for row in rows:
        cells = [Text(c) if isinstance(c, str) else c for c in (column.cell(row) for column in shown)]
        table.add_row(Text(_fold(_name(row), fold)), *cells, style=style(row))
    return table


def _name(row: Any) -> str:
    """What the first column says of a row: its name, where it has a longer one than its tag."""
    return getattr(row, "name", row.tag)


def _fitting(columns: Sequence[Column], rows: Sequence[Any], room: int) -> tuple[list[Column], list[str]]:
    """The columns that fit, taken in the order of their need, and the titles of those that do not."""

    def visible(kept: Container[Column]) -> list[Column]:
        taken = {c.replaces for c in columns if c in kept} - {""}
        return [c for c in columns if c in kept and c.title not in taken]

    kept = [c for c in columns if not c.drop]
    for column in sorted((c for c in columns if c.drop), key=lambda c: c.drop):
        if _width(visible([*kept, column]), rows) <= room:
            kept.append(column)
    shown = visible(kept)
    present = {c.title for c in shown}
    return shown, [c.title for c in columns if c not in kept and c.replaces not in present]


def _width(columns: Sequence[Column], rows: Sequence[Any]) -> int:
    return sum(2 + max(len(c.title), *(len(c.cell(row)) for row in rows)) for c in columns)


def _columns(rows: Sequence[Row], convention: Convention) -> list[Column]:
    columns = [
        Column("out[0, 1, -1]", lambda r: _values(r, 3), drop=3),
        Column("out[0,1,-1]", lambda r: _values(r, 6), drop=8, replaces="out[0, 1, -1]"),
        Column("ms", lambda r: significant(r.timing and r.timing.median)),
        Column("±%", lambda r: f"{50 * r.timing.spread:.1f}" if r.timing else NONE, drop=2),
        Column("min", lambda r: significant(r.timing and r.timing.fastest), drop=12),
        Column("max", lambda r: significant(r.timing and r.timing.slowest), drop=13),
        Column("TFLOP/s", lambda r: significant(r.tflops if convention == "gemm" else r.tflops_all)),
        Column("peak", lambda r: significant(r.tflops_peak), drop=14),
        Column("mean", lambda r: significant(r.tflops_mean), drop=15),
        Column("×best", lambda r: NONE if r.speedup is None else f"{r.speedup:.2f}"),
    ]
    optional = [
        Column("% mma ceiling", lambda r: NONE if r.mma_ceiling is None else f"{100 * r.mma_ceiling:.0f}", drop=1),
        Column("host µs", lambda r: NONE if r.host_us is None else f"{r.host_us:.1f}", drop=1),
        Column("cycles", lambda r: NONE if r.cycles is None else f"{r.cycles:.0f}", drop=1),
        Column("MiB", lambda r: mib_cell(r), drop=3),
    ]
    columns += [c for c in optional if any(c.cell(r) != NONE for r in rows)]
    if any(r.usage for r in rows):
        columns += [
            Column("regs", lambda r: _usage(r, "registers"), drop=4),
            Column("spill", lambda r: spill_cell(r.usage), drop=5),
            Column("KiB", lambda r: kib_cell(r.usage), drop=6),
            Column("blk/SM", lambda r: _usage(r, "blocks"), drop=7),
            Column("occ", lambda r: _percent(r.usage), drop=9),
        ]
    if any(r.verdict for r in rows):
        columns += [
            Column("max err", lambda r: f"{r.verdict.max_error:.1e}" if r.verdict else NONE, drop=1),
            Column("/allowed", lambda r: f"{r.verdict.ratio:.2f}" if r.verdict else NONE),
            Column("rel L2", lambda r: f"{r.verdict.relative_l2:.1e}" if r.verdict else NONE, drop=10),
            Column("LSE err", lambda r: _lse(r), drop=11),
        ]
    return columns


def _status(row: Row) -> Text:
    return Text(row.status, STYLES.get(row.status, "yellow"))


def print_compiled(usages: Sequence[Usage], console: Console) -> None:
    """The compile report: one table for each architecture and problem."""
    groups: dict[tuple[str, str], list[Usage]] = {}
    for usage in usages:
        groups.setdefault((usage.arch, usage.problem), []).append(usage)
    for (arch, problem), group in groups.items():
        made = [u for u in group if not u.reason]
        if made:
            console.print(_compiled_table(made, f"compiled for {arch}" + (f": {problem}" if problem else ""), console))
        print_reasons([(u.name, u.error) for u in group if u.error], "error", console, "bold red")
        print_reasons([(u.name, line) for u in group for line in u.unexpected_warnings], "compiler", console)
        print_reasons([(u.name, u.reason) for u in group if u.reason], "not compiled", console)
        console.print()


def _compiled_table(usages: Sequence[Usage], title: str, console: Console) -> Table:
    columns = [
        Column("configuration", lambda u: u.config, drop=12, justify="left"),
        Column("regs", lambda u: _plain(u.registers)),
        Column("spill", lambda u: spill_cell(u)),
        Column("KiB", lambda u: kib_cell(u)),
        Column("threads", lambda u: _plain(u.threads), drop=10),
        Column("blk/SM", lambda u: _plain(u.blocks)),
        Column("occ", lambda u: _percent(u), drop=3),
        Column("limit", lambda u: u.limit or NONE, drop=11, justify="left"),
        *(_opcode(name) for name in INSTRUCTIONS if any((u.instructions or {}).get(name) for u in usages)),
        Column("s", lambda u: NONE if u.seconds is None else ("cache" if u.cached else f"{u.seconds:.2f}"), drop=4),
    ]
    return make_table(usages, columns, title, console.width, lambda u: "red" if u.error else None)


def _opcode(name: str) -> Column:
    rank = 5 if name in ("FFMA", "SHFL", "BAR") else 2
    return Column(
        name.removeprefix("MUFU."),
        lambda u: NONE if u.instructions is None else str(u.instructions.get(name, 0)),
        drop=rank,
    )


def print_reasons(
    pairs: Iterable[tuple[str, str]], what: str, console: Console, style: str = "yellow", listed: Container[str] = ()
) -> None:
    """Each reason once, with every tag that it holds for; many tags that a table below lists are only counted."""
    groups: dict[str, list[str]] = {}
    for tag, reason in pairs:
        groups.setdefault(reason, []).append(tag)
    for reason, tags in groups.items():
        below = len(tags) > 6 and all(tag in listed for tag in tags)
        names = "the GPU kernels of the compile report below" if below else " ".join(tags[:MOST_TAGS])
        names += f" and {len(tags) - MOST_TAGS} more (all in the files)" if len(tags) > MOST_TAGS and not below else ""
        console.print(Text(f"{what} ({len(tags)}) · {reason}: ", style).append(names, "dim"))


def print_unlisted(unlisted: int, verb: str, console: Console) -> None:
    """How many kernels of the table nobody asked for, and how to ask."""
    if unlisted:
        console.print(unlisted_note(unlisted, verb), style="dim", soft_wrap=True)


def _print_footer(results: Results, console: Console, convention: Convention) -> None:
    timed = next((r.timing for r in results.rows if r.timing), None)
    if timed is None:
        return
    notes = [
        f"ms: median of the rounds ({timed.method}), interleaved; ±%: half the distance of the quartiles",
        f"TFLOP/s: {convention} count of visible pairs; ×best: times as fast as the best peer",
    ]
    if any(r.mma_ceiling for r in results.rows):
        notes.append("% mma ceiling: of what mma.sync gives from registers alone, measured on this card in this run")
    if any(r.memory for r in results.rows):
        notes.append("MiB: what one call takes beyond its inputs, at the peak, output and LSE included")
    if any(r.verdict for r in results.rows):
        notes.append(f"max err: against the reference; /allowed: over what rule {results.settings['rule']} allows")
    console.print("\n".join(notes), style="dim")


def _fastest(rows: Sequence[Row], kind: str) -> str | None:
    timed = [(r.timing.median, r.tag) for r in rows if r.kind == kind and r.timing]
    return min(timed)[1] if timed else None


def _fold(tag: str, width: int) -> str:
    """A tag, broken before one of its ``+`` where it is longer than ``width``."""
    if len(tag) <= width:
        return tag
    lines, line = [], ""
    for index, piece in enumerate(tag.split("+")):
        piece = piece if index == 0 else "+" + piece
        if line and len(line) + len(piece) > width:
            lines.append(line)
            line = "  "
        line += piece
    return "\n".join([*lines, line])


def _values(row: Row, digits: int) -> str:
    """The three output values, aligned at their points."""
    return " ".join(f"{value:{digits + 3}.{digits}f}" for value in row.values) if row.values else NONE


def spill_cell(usage: Usage | None) -> Text:
    spills = None if usage is None else usage.spills
    return Text(_plain(spills), "bold red" if usage is not None and usage.spilled else "")


def significant(number: float | None) -> str:
    """Four significant digits without an exponent, as far as that goes."""
    if number is None:
        return NONE
    if number >= 1000:
        return f"{number:.0f}"
    for limit, digits in ((100, 1), (10, 2), (1, 3), (0.1, 4)):
        if number >= limit:
            return f"{number:.{digits}f}"
    return f"{number:.5f}"


def _usage(row: Row, name: str) -> str:
    return _plain(getattr(row.usage, name)) if row.usage else NONE


def kib_cell(usage: Usage | None) -> str:
    return NONE if usage is None or usage.shared_bytes is None else f"{usage.shared_bytes / 1024:.1f}"


def mib_cell(row: Row) -> str:
    """MiB that one call takes beyond its inputs, at the peak."""
    extra = row.memory.extra if row.memory else None
    return NONE if extra is None else f"{extra / 2**20:.1f}"


def _percent(usage: Usage | None) -> str:
    return NONE if usage is None or usage.occupancy is None else f"{100 * usage.occupancy:.0f}%"


def _lse(row: Row) -> str:
    return NONE if row.verdict is None or row.verdict.lse_error is None else f"{row.verdict.lse_error:.1e}"


def _plain(value: Any) -> str:
    return NONE if value is None else str(value)
