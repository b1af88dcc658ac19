"""One self-contained HTML page of results files: sortable tables, pictures inside, what it was measured on.

Everything is in the page, and its own policy forbids it the network. Pictures are there in light and dark; without
matplotlib the page says that they are missing.
"""

from __future__ import annotations

import base64
import datetime
import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlane import __version__
from flashlane.bench.measure.measured import Measured, lines_of, read_results
from flashlane.bench.measure.results import Results, Row, load_results
from flashlane.bench.measure.roofline import roofline_figure
from flashlane.bench.measure.roofs import Roofs, place, roofs_of, sentence
from flashlane.bench.measure.sweep import HEAD, summary_rows
from flashlane.bench.present import figure, plots
from flashlane.bench.present.report_page import PAGE, SCRIPT, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXCERPT_LINES = 40
"""Lines of a notebook's page that are shown, at most."""
MACHINE = ("device", "driver", "power_limit_w", "clock_mhz", "clock_max_mhz", "torch", "cuda", "cudnn", "triton",
           "flash-attn", "flash-attn-4", "ffpa-attn", "xformers", "flashlane", "commit", "date", "python", "system",
           "threads", "command")  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """One column of the table of rows."""

    title: str
    value: Callable[[Row], object]
    digits: int | None = None
    """Significant digits of a number; None shows it as it is."""


COLUMNS = (
    Shown("problem", lambda r: r.problem),
    Shown("tag", lambda r: r.tag),
    Shown("kind", lambda r: r.kind),
    Shown("check", lambda r: r.status),
    Shown("ms", lambda r: r.timing and r.timing.median, 4),
    Shown("±%", lambda r: r.timing and 50 * r.timing.spread, 2),
    Shown("min ms", lambda r: r.timing and r.timing.fastest, 4),
    Shown("max ms", lambda r: r.timing and r.timing.slowest, 4),
    Shown("TFLOP/s", lambda r: r.tflops, 4),
    Shown("peak", lambda r: r.tflops_peak, 4),
    Shown("× best peer", lambda r: r.speedup, 3),
    Shown("% mma.sync", lambda r: r.mma_ceiling and 100 * r.mma_ceiling, 3),
    Shown("MiB a call", lambda r: r.memory.extra / 2**20 if r.memory and r.memory.extra is not None else None, 4),
    Shown("host µs", lambda r: r.host_us, 3),
    Shown("cycles", lambda r: r.cycles, 6),
    Shown("max error", lambda r: r.verdict and r.verdict.max_error, 2),
    Shown("/ allowed", lambda r: r.verdict and r.verdict.ratio, 2),
    Shown("registers", lambda r: r.usage and r.usage.registers),
    Shown("message", lambda r: r.message),
)


def build(paths: Sequence[Path], notebooks: Sequence[Path] = (), title: str = "flashlane report") -> str:
    """The page.

    Args:
        paths: results files of bench, sweep or compare.
        notebooks: Markdown files, or folders of them, whose beginnings are shown.
        title: of the page.

    Raises:
        ValueError: a file cannot be read, or is no results file; the message names it.
    """
    results = [(path, load_results(path)) for path in paths]
    pages = list(_pages(notebooks))
    sections = [_section(index, path, found) for index, (path, found) in enumerate(results)]
    links = [(f"run-{index}", path.stem) for index, (path, _) in enumerate(results)]
    if pages:
        sections.append(_notebook(pages))
        links.append(("notebook", "notebook"))
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    devices = ", ".join(dict.fromkeys(str(found.environment.get("device")) for _, found in results))
    return PAGE.format(
        title=_text(title),
        style=STYLE,
        script=SCRIPT,
        made=_text(f"{devices} · made {now} by flashlane {__version__}"),
        links=" ".join(f'<a href="#{anchor}">{_text(name)}</a>' for anchor, name in links),
        body="\n".join(sections),
    )


def _section(index: int, path: Path, results: Results) -> str:
    where = results.environment
    head = f"{where.get('device')} · {path.name}"
    parts = [f'<section id="run-{index}"><h2>{_text(head)}</h2>', _machine(results)]
    parts += [f'<p class="note">{_text(note)}</p>' for note in results.notes]
    parts += [_pictures(path, results), "<h3>Fastest of ours against the best peer</h3>"]
    parts.append(table(HEAD, summary_rows(results)))
    shown = [c for c in COLUMNS if any(c.value(row) not in (None, "") for row in results.rows)]
    failed = [row for row in results.rows if row.status in ("FAIL", "error")]
    parts.append(f"<h3>Every row ({len(results.rows)}, {len(failed)} failed)</h3>")
    parts.append(table([c.title for c in shown], [[_cell(c, row) for c in shown] for row in results.rows], search=True))
    if results.skipped:
        lines = [(s.problem, s.tag, s.reason) for s in results.skipped]
        parts.append(f"<details><summary>{len(lines)} did not run, and why</summary>")
        parts += [table(("problem", "tag", "reason"), lines), "</details>"]
    return "\n".join([*parts, "</section>"])


def _machine(results: Results) -> str:
    where = results.environment
    lines = [(name, where[name]) for name in MACHINE if where.get(name) not in (None, "")]
    keys = ("rounds", "check", "rule", "seed", "inputs", "order", "directions")
    settings = ", ".join(f"{key} {results.settings[key]}" for key in keys if key in results.settings)
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in [*lines, ("measured", settings)])
    return f'<details class="machine"><summary>Device, versions, how it was measured</summary><dl>{rows}</dl></details>'


# --- tables


@dataclass(frozen=True)
class Number:
    """A figure: what is shown, and what is sorted by."""

    shown: str
    value: float


def _cell(column: Shown, row: Row) -> object:
    value = column.value(row)
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:.{column.digits}g}" if column.digits else f"{value:g}"
        return Number(_plain(text), float(value))
    return "" if value is None else value


def _plain(text: str) -> str:
    """1.2e+03 as 1200; a small number keeps its exponent."""
    if "e+" in text:
        return f"{float(text):.0f}"
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[object]], search: bool = False) -> str:
    """A table whose columns sort by a click on their title; with ``search`` a field above it filters the rows."""
    titles = "".join(f'<th><button type="button">{_text(name)}</button></th>' for name in head)
    lines = []
    for row in rows:
        status = next((str(cell) for cell in row if str(cell) in ("FAIL", "error")), "")
        cells = "".join(_td(cell) for cell in row)
        lines.append(f'<tr class="{status.lower()}">{cells}</tr>')
    field = '<input type="search" placeholder="filter rows" aria-label="filter rows">' if search else ""
    body = "\n".join(lines)
    return f'<div class="table">{field}<table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _td(cell: object) -> str:
    if isinstance(cell, Number):
        return f'<td class="n" data-v="{cell.value!r}">{_text(cell.shown)}</td>'
    try:
        value = float(str(cell))
    except ValueError:
        return f"<td>{_text(cell)}</td>"
    return f'<td class="n" data-v="{value!r}">{_text(cell)}</td>'


def _text(value: object) -> str:
    return html.escape(str(value))


# --- pictures


def _pictures(path: Path, results: Results) -> str:
    try:
        figure.need_matplotlib()
    except ImportError as error:
        return f'<p class="note">No pictures: {_text(error)}</p>'
    try:
        measured = read_results(path)
    except ValueError as error:
        return f'<p class="note">No pictures: {_text(error)}</p>'
    roofs = _roofs(results, path)
    lines = ({}, None) if roofs is None else (lines_of(roofs), roofs.copy)
    kinds: dict[str, Callable[[figure.Theme], Figure]] = {
        "TFLOP/s against sequence length": lambda t: plots.throughput_figure(measured, 5, *lines, theme=t),
        "Our fastest kernel against the best baseline": lambda t: plots.heatmap_figure(measured, theme=t),
        "Speed against the best baseline": lambda t: plots.speedup_figure(_first(measured), theme=t),
        "Memory of a call": lambda t: plots.memory_figure(measured, 5, theme=t),
    }
    parts = []
    if roofs is not None:
        points = place(results.rows, roofs)
        if points:
            kinds["Roofline"] = lambda t: roofline_figure(points, roofs, results.environment, theme=t)
            titles = dict.fromkeys(p.problem for p in points)
            said = "".join(f"<li>{_text(sentence([p for p in points if p.problem == x]))}</li>" for x in titles)
            parts.append(f"<details><summary>What bounds each problem</summary><ul>{said}</ul></details>")
    for name, draw in kinds.items():
        try:
            images = [(draw(theme), css) for theme, css in ((figure.LIGHT, "light"), (figure.DARK, "dark"))]
        except ValueError as error:  # this file has nothing to draw of that kind
            parts.append(f'<p class="note">{_text(name)}: {_text(error)}</p>')
            continue
        shown = "".join(f'<img class="{css}" alt="{_text(name)}" src="{_uri(picture)}">' for picture, css in images)
        parts.append(f"<figure>{shown}</figure>")
    return "\n".join(parts)


MOST_PANELS = 8
"""Problems whose bars are in the page, so that it stays readable; ``flashlane plot`` draws them all."""


def _first(measured: Measured) -> Measured:
    problems = list(dict.fromkeys(p.problem for p in measured.points if p.speedup))[:MOST_PANELS]
    points = tuple(p for p in measured.points if p.problem in problems)
    return Measured(measured.path, measured.environment, points)


def _roofs(results: Results, path: Path) -> Roofs | None:
    body: Any = results.environment.get("roofs")
    return None if body is None else roofs_of(body, str(path))


def _uri(picture: Figure) -> str:
    """A figure as an SVG inside an address."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashlane"}):
        picture.savefig(file, format="svg", facecolor=picture.get_facecolor(), metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


# --- notebook


def _pages(paths: Sequence[Path]) -> Iterable[tuple[Path, str]]:
    for path in paths:
        if not path.exists():
            raise ValueError(f"--notebook is {str(path)!r}, which does not exist")
        for page in sorted(path.glob("*.md")) if path.is_dir() else [path]:
            try:
                yield page, page.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--notebook: {page} cannot be read: {error}") from None


def excerpt(text: str) -> str:
    """The beginning of a page: up to its second ``##`` heading, and no more than so many lines."""
    lines, headings = [], 0
    for line in text.splitlines():
        headings += line.startswith("## ")
        if headings > 1 or len(lines) >= EXCERPT_LINES:
            lines += ["", "…"]
            break
        lines.append(line)
    return "\n".join(lines)


def _notebook(pages: Sequence[tuple[Path, str]]) -> str:
    from markdown_it import MarkdownIt

    render = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image").render
    shown = [
        f'<article><p class="file">{_text(path.name)}</p>{render(excerpt(text))}</article>' for path, text in pages
    ]
    return '<section id="notebook"><h2>Notebook</h2>' + "\n".join(shown) + "</section>"
