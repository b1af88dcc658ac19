"""The printed side of a run: one table a problem, what was skipped and why, and the compile report."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from flashlane.bench.measure.flops import Convention
from flashlane.bench.measure.results import ERROR, FAIL, OK, Results, Row, unlisted_note
from flashlane.bench.measure.runner import PLAIN
from flashlane.inspect.compile_report import Usage
from flashlane.inspect.fitted_table import IN_THE_FILE, NONE, Column, make_console, make_table, say, significant

__all__ = [
    "NONE",
    "STYLES",
    "Column",
    "header",
    "kib_cell",
    "make_console",
    "make_table",
    "mib_cell",
    "print_compiled",
    "print_families",
    "print_reasons",
    "print_results",
    "print_unlisted",
    "results_table",
    "significant",
    "spill_cell",
]  # fmt: skip

COUNTED = {"gemm": "4·B·H·N·M·D over unmasked pairs", "all": "every operation, over unmasked pairs"}
"""What each convention counts."""
MOST_TAGS, FEW_TAGS = 12, 3
"""Tags printed with one reason; of more, so many."""
STYLES = {OK: "green", FAIL: "bold red", ERROR: "bold red"}
INSTRUCTIONS = ("HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "MUFU.EX2", "FFMA", "SHFL", "BAR", "LDL", "STL")
"""Opcodes with a column of their own in the compile report, where any kernel has them."""


def print_results(
    results: Results, console: Console, convention: Convention = "gemm", full_report: bool = True
) -> None:
    """The compile report, what did not run and why, and last each problem's rows.

    Args:
        results: what a run found.
        console: where to.
        convention: how operations are counted.
        full_report: each kernel of the compile report; else a row a family.
    """
    if results.compiled:
        (print_compiled if full_report or not results.rows else print_families)(results.compiled, console)
    _print_skipped(results, console)
    titles = dict.fromkeys(r.problem for r in results.rows)
    where = f"{results.environment['device']}, torch {results.environment['torch']}"
    if titles:
        say(console, header(results), "dim")
        load, cores = results.environment.get("load"), results.environment.get("cores")
        if load and cores and load > cores:
            text = f"The load average is {load:.1f} on {cores} cores: other processes disturb these times."
            say(console, text, "yellow")
    for title in titles:
        rows = [r for r in results.rows if r.problem == title]
        console.print(results_table(rows, f"{title} · {where}", console.width, convention))
        for row in rows:
            if row.message:
                label = Text(f"{row.status} {row.tag}: ", STYLES.get(row.status, ""))
                say(console, label.append(row.message, "default"))
        console.print()
    for note in results.notes:
        say(console, note, "yellow")
    _print_footer(results, console, convention)
    print_unlisted(results.unlisted, "runs", console)


def header(results: Results) -> str:
    """How a run measured: seed, warm-up, rounds and the check, in one line."""
    settings = results.settings
    parts = [f"seed {settings.get('seed')}"]
    if settings.get("warmup") is not None:
        calls = "1 call" if settings["warmup"] == 1 else f"{settings['warmup']} calls"
        parts.append(f"warm-up {calls} and {settings.get('warmup_ms', 0):g} ms at least")
    if settings.get("rounds") is not None:
        iterations = sorted({row.timing.iterations for row in results.rows if row.timing})
        calls = f" of {_counted(iterations, 'iteration')}" if iterations else ""
        parts.append(f"{_counted([settings['rounds']], 'round')}{calls}, interleaved")
    parts.append(f"check {settings['rule']}" if settings.get("check") else "no check")
    return " · ".join(parts)


def _counted(numbers: Sequence[int], what: str) -> str:
    """``1 round``, ``5 rounds``, ``51 to 85 iterations``."""
    return f"{_range(numbers)} {what}{'' if max(numbers) == 1 else 's'}"


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _print_skipped(results: Results, console: Console) -> None:
    """What did not run, each reason once: with the problem where it holds for one of several only."""
    problems = dict.fromkeys([r.problem for r in results.rows] + [s.problem for s in results.skipped])
    groups: dict[str, dict[str, list[str]]] = {}
    for skipped in results.skipped:
        groups.setdefault(skipped.reason, {}).setdefault(skipped.problem, []).append(skipped.tag)
    listed = {usage.tag for usage in results.compiled}
    pairs = []
    for reason, found in groups.items():
        tags = dict.fromkeys(tag for each in found.values() for tag in each)
        where = ""
        if len(found) < len(problems):
            first = next(iter(found))
            where = f" ({first})" if len(found) == 1 else f" ({len(found)} of {len(problems)} problems)"
        pairs += [(tag, reason + where) for tag in tags]
    print_reasons(pairs, "not run", console, listed=listed)
    if pairs:
        console.print()


def print_families(usages: Sequence[Usage], console: Console) -> None:
    """The compile report in short: a row for each family of kernels."""
    from flashlane.core import registry

    family = {kernel.tag: kernel.family for kernel in registry.kernels()}
    groups: dict[tuple[str, str], dict[str, list[Usage]]] = {}
    for usage in usages:
        name = family.get(usage.tag, usage.tag) + (" backward" if usage.direction == "backward" else "")
        groups.setdefault((usage.arch, usage.problem), {}).setdefault(name, []).append(usage)

    def compiled(item: tuple[str, list[Usage]]) -> list[Usage]:
        return [usage for usage in item[1] if usage.registers is not None]

    def span(field: str) -> Any:
        def cell(item: tuple[str, list[Usage]]) -> str:
            values = [value for usage in compiled(item) if (value := getattr(usage, field)) is not None]
            return _range(values).replace(" to ", "–") if values else NONE

        return cell

    columns = [
        Column("compiled", lambda item: str(len(compiled(item)))),
        Column("failed", lambda item: str(sum(bool(usage.error) for usage in item[1]))),
        Column("spilling", lambda item: str(sum(usage.spilled for usage in compiled(item)))),
        Column("regs", span("registers")),
        Column("KiB", lambda item: _kib_span(compiled(item)), drop=1),
        Column("CTA/SM", span("blocks"), drop=2),
        Column("left out", lambda item: str(sum(bool(usage.reason) for usage in item[1])), drop=3),
    ]
    for (arch, problem), by_family in groups.items():
        title = f"compiled for {arch}" + (f": {problem}" if problem else "")
        items, name = list(by_family.items()), (lambda item: item[0])
        console.print(make_table(items, columns, title, console.width, head="family", name=name))
        errors = [(usage.name, usage.error) for usage in usages if usage.error and usage.arch == arch]
        print_reasons(errors, "error", console, "bold red")
        reasons = {u.reason for u in usages if u.reason and u.arch == arch and u.problem == problem}
        if len(reasons) == 1:
            say(console, f"left out: {reasons.pop()}", "yellow")
    say(console, "flashlane compile shows each kernel; the JSON file has them too.", "dim")
    console.print()


def _kib_span(usages: Sequence[Usage]) -> str:
    found = [usage.shared_bytes / 1024 for usage in usages if usage.shared_bytes is not None]
    if not found:
        return NONE
    low, high = f"{min(found):.0f}", f"{max(found):.0f}"
    return low if low == high else f"{low}–{high}"


def results_table(rows: Sequence[Row], title: str, width: int, convention: Convention = "gemm") -> Group:
    """One problem's rows; kernels first, peers after a line, the fastest of each kind in bold."""
    columns = [*_columns(rows, convention), Column("check", _status, justify="left")]
    gains = gains_of(rows)
    if len(gains) > 1:
        at = next(i for i, c in enumerate(columns) if c.title == "×best")
        columns.insert(at, Column("gain", lambda r: gains.get(r.tag, ""), drop=2))
    fastest = {_fastest(rows, kind) for kind in ("kernel", "peer")}
    return make_table(rows, columns, title, width, lambda r: "bold" if r.tag in fastest else None)


def gains_of(rows: Sequence[Row]) -> dict[str, str]:
    """``+12.3%`` by tag: how much faster a kernel is than every kernel of the rows above it; others have none."""
    gains, best = {}, None
    for row in rows:
        if row.kind == "kernel" and row.timing and row.timing.median:
            if best is None or row.timing.median < best:
                gains[row.tag] = "" if best is None else f"+{100 * (best / row.timing.median - 1):.1f}%"
                best = row.timing.median
    return gains


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
            Column("CTA/SM", lambda r: _usage(r, "blocks"), drop=7),
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


def print_compiled(usages: Sequence[Usage], console: Console, elsewhere: str = IN_THE_FILE) -> None:
    """The compile report: one table for each architecture and problem; ``elsewhere`` says where the rest is."""
    groups: dict[tuple[str, str], list[Usage]] = {}
    for usage in usages:
        groups.setdefault((usage.arch, usage.problem), []).append(usage)
    for (arch, problem), group in groups.items():
        made = [u for u in group if not u.reason]
        if made:
            title = f"compiled for {arch}" + (f": {problem}" if problem else "")
            console.print(_compiled_table(made, title, console, elsewhere))
        warnings = [(u.name, line) for u in group for line in u.unexpected_warnings]
        print_reasons([(u.name, u.error) for u in group if u.error], "error", console, "bold red", elsewhere=elsewhere)
        print_reasons(warnings, "compiler", console, elsewhere=elsewhere)
        print_reasons([(u.name, u.reason) for u in group if u.reason], "not compiled", console, elsewhere=elsewhere)
        console.print()


def _compiled_table(usages: Sequence[Usage], title: str, console: Console, elsewhere: str) -> Group:
    columns = [
        Column("configuration", lambda u: u.config, drop=12, justify="left"),
        Column("regs", lambda u: _plain(u.registers)),
        Column("spill", lambda u: spill_cell(u)),
        Column("KiB", lambda u: kib_cell(u)),
        Column("threads", lambda u: _plain(u.threads), drop=10),
        Column("CTA/SM", lambda u: _plain(u.blocks)),
        Column("occ", lambda u: _percent(u), drop=3),
        Column("limit", lambda u: u.limit or NONE, drop=11, justify="left"),
        *(_opcode(name) for name in INSTRUCTIONS if any((u.instructions or {}).get(name) for u in usages)),
        Column("s", lambda u: NONE if u.seconds is None else ("cache" if u.cached else f"{u.seconds:.2f}"), drop=4),
    ]
    return make_table(usages, columns, title, console.width, lambda u: "red" if u.error else None, elsewhere=elsewhere)


def _opcode(name: str) -> Column:
    rank = 5 if name in ("FFMA", "SHFL", "BAR") else 2
    return Column(
        name.removeprefix("MUFU."),
        lambda u: NONE if u.instructions is None else str(u.instructions.get(name, 0)),
        drop=rank,
    )


def print_reasons(
    pairs: Iterable[tuple[str, str]],
    what: str,
    console: Console,
    style: str = "yellow",
    listed: Container[str] = (),
    elsewhere: str = IN_THE_FILE,
) -> None:
    """Each reason once, with every tag that it holds for; many tags that the compile report lists are only counted."""
    groups: dict[str, list[str]] = {}
    for tag, reason in pairs:
        groups.setdefault(reason, []).append(tag)
    for reason, tags in groups.items():
        below = len(tags) > 6 and all(tag in listed for tag in tags)
        names = (
            "the GPU kernels of the compile report"
            if below
            else " ".join(tags if len(tags) <= MOST_TAGS else tags[:FEW_TAGS])
        )
        names += f" and {len(tags) - FEW_TAGS} more ({elsewhere})" if len(tags) > MOST_TAGS and not below else ""
        console.print(Text(f"{what} ({len(tags)}) · {reason}: ", style).append(names, "dim"))


def print_unlisted(unlisted: int, verb: str, console: Console) -> None:
    """How many kernels of the table nobody asked for, and how to ask."""
    if unlisted:
        say(console, unlisted_note(unlisted, verb), "dim")


def _print_footer(results: Results, console: Console, convention: Convention) -> None:
    timed = next((r.timing for r in results.rows if r.timing), None)
    if timed is None:
        return
    notes = [
        f"ms: median of the rounds ({timed.method}), interleaved; ±%: half the interquartile range",
        f"TFLOP/s: {COUNTED[convention]}; ×best: times as fast as the best peer",
    ]
    if any(
        len(gains_of([r for r in results.rows if r.problem == name])) > 1 for name in {r.problem for r in results.rows}
    ):
        notes[-1] += "; gain: over the fastest kernel above"
    if any(r.mma_ceiling for r in results.rows):
        notes.append("% mma ceiling: of what mma.sync gives from registers alone, measured on this card in this run")
    if any(r.memory for r in results.rows):
        notes.append("MiB: what one call takes beyond its inputs, at the peak, output and LSE included")
    if any(r.tag == PLAIN and r.status == FAIL and r.timing for r in results.rows):
        notes.append(
            f"{PLAIN} FAIL: the rule allows twice the error that plain PyTorch usually has, and it passed that by "
            "chance; it is timed all the same, and is no best peer"
        )
    if any(r.verdict for r in results.rows):
        notes.append(f"max err: against the reference; /allowed: over what rule {results.settings['rule']} allows")
    say(console, "\n".join(notes), "dim")


def _fastest(rows: Sequence[Row], kind: str) -> str | None:
    timed = [(r.timing.median, r.tag) for r in rows if r.kind == kind and r.timing]
    return min(timed)[1] if timed else None


def _values(row: Row, digits: int) -> str:
    """The three output values, aligned at their points."""
    return " ".join(f"{value:{digits + 3}.{digits}f}" for value in row.values) if row.values else NONE


def spill_cell(usage: Usage | None) -> Text:
    spills = None if usage is None else usage.spills
    return Text(_plain(spills), "bold red" if usage is not None and usage.spilled else "")


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
