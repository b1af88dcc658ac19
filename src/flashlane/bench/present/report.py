"""One self-contained HTML page of results files: sortable tables, pictures inside, what it was measured on.

Everything is in the page, and its own policy forbids it the network. Pictures are there in light and dark; without
matplotlib the page says that they are missing.
"""

from __future__ import annotations

import base64
import datetime
import functools
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from flashlane import __version__
from flashlane.bench.measure.device_rates import DeviceRates, place, rates_of, sentence, stored_ceilings
from flashlane.bench.measure.results import ERROR, FAIL, Results, Row, load_results
from flashlane.bench.measure.sweep import HEAD, summary_rows
from flashlane.bench.present import figure_frame, plots
from flashlane.bench.present.points import Measured, lines_of, read_results
from flashlane.bench.present.roofline import roofline_figure

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
    pages = [{"name": path.name, "body": Markup(_rendered(text))} for path, text in _pages(notebooks)]
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    devices = ", ".join(dict.fromkeys(str(found.environment.get("device")) for _, found in results))
    page = (
        environment()
        .get_template("report.html")
        .render(
            title=title,
            made=f"{devices} · made {now} by flashlane {__version__}",
            runs=[_section(index, path, found) for index, (path, found) in enumerate(results)],
            notebook=pages,
        )
    )
    return page.strip() + "\n"


@functools.cache
def environment() -> jinja2.Environment:
    """The templates beside this file; every value in them is escaped."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["cells"] = lambda row: [number_of(cell) for cell in row]
    made.filters["status"] = _status
    return made


def _section(index: int, path: Path, results: Results) -> dict[str, object]:
    """What the template shows of one results file."""
    shown = [c for c in COLUMNS if any(c.value(row) not in (None, "") for row in results.rows)]
    notes, bounds, pictures = _pictures(path, results)
    return {
        "anchor": f"run-{index}",
        "name": path.stem,
        "head": f"{results.environment.get('device')} · {path.name}",
        "machine": _machine(results),
        "notes": [*results.notes, *notes],
        "bounds": bounds,
        "pictures": pictures,
        "summary_head": HEAD,
        "summary": list(summary_rows(results)),
        "columns": [column.title for column in shown],
        "rows": [[_cell(column, row) for column in shown] for row in results.rows],
        "failed": sum(row.status in (FAIL, ERROR) for row in results.rows),
        "skipped": [(s.problem, s.tag, s.reason) for s in results.skipped],
    }


def _machine(results: Results) -> list[tuple[str, object]]:
    where = results.environment
    lines = [(name, where[name]) for name in MACHINE if where.get(name) not in (None, "")]
    keys = ("rounds", "check", "rule", "seed", "inputs", "order", "protocol", "calls", "directions")
    settings = ", ".join(f"{key} {results.settings[key]}" for key in keys if key in results.settings)
    return [*lines, ("measured", settings)]


# --- tables


@dataclass(frozen=True)
class Cell:
    """What is shown, and for a figure the number that the column is sorted by."""

    shown: str
    value: float | None = None


def _cell(column: Shown, row: Row) -> object:
    value = column.value(row)
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:.{column.digits}g}" if column.digits else f"{value:g}"
        return Cell(_plain(text), float(value))
    return "" if value is None else value


def _plain(text: str) -> str:
    """1.2e+03 as 1200; a small number keeps its exponent."""
    if "e+" in text:
        return f"{float(text):.0f}"
    return text


def number_of(cell: object) -> Cell:
    """A cell as the table has it: text that reads as a number is one."""
    if isinstance(cell, Cell):
        return cell
    try:
        return Cell(str(cell), float(str(cell)))
    except ValueError:
        return Cell(str(cell))


def table(head: Sequence[str], rows: Sequence[Sequence[object]], search: bool = False) -> str:
    """One table of the page as HTML."""
    return str(environment().get_template("report_table.html").module.table(head, rows, search))


def _status(row: Sequence[object]) -> str:
    """The style of a row: that of its status when it failed."""
    return next((str(cell).lower() for cell in row if str(cell) in (FAIL, ERROR)), "")


# --- pictures


def _pictures(path: Path, results: Results) -> tuple[list[str], list[str], list[dict[str, str]]]:
    """Why there are no pictures, what bounds each problem, and the pictures or why one is missing."""
    try:
        figure_frame.need_matplotlib()
        measured = read_results(path)
    except (ImportError, ValueError) as error:
        return [f"No pictures: {error}"], [], []
    ceilings = _ceilings(results, path)
    lines = ({}, None) if ceilings is None else (lines_of(ceilings), ceilings.copy)
    kinds: dict[str, Callable[[figure_frame.Theme], Figure]] = {
        "TFLOP/s against sequence length": lambda t: plots.throughput_figure(measured, 5, *lines, theme=t),
        "Our fastest kernel against the best peer": lambda t: plots.heatmap_figure(measured, theme=t),
        "Speed against the best peer": lambda t: plots.speedup_figure(_first(measured), theme=t),
        "Memory of a call": lambda t: plots.memory_figure(measured, 5, theme=t),
    }
    bounds: list[str] = []
    points = place(results.rows, ceilings) if ceilings is not None else []
    if points:
        kinds["Roofline"] = lambda t: roofline_figure(points, ceilings, results.environment, theme=t)
        bounds = [sentence([p for p in points if p.problem == x]) for x in dict.fromkeys(p.problem for p in points)]
    pictures = []
    for name, draw in kinds.items():
        picture = {"name": name, "missing": ""}
        try:
            picture |= {"light": _uri(draw(figure_frame.LIGHT)), "dark": _uri(draw(figure_frame.DARK))}
        except ValueError as error:  # this file has nothing to draw of that kind
            picture["missing"] = str(error)
        pictures.append(picture)
    return [], bounds, pictures


MOST_PANELS = 8
"""Problems whose bars are in the page, so that it stays readable; ``flashlane plot`` draws them all."""


def _first(measured: Measured) -> Measured:
    problems = list(dict.fromkeys(p.problem for p in measured.points if p.speedup))[:MOST_PANELS]
    points = tuple(p for p in measured.points if p.problem in problems)
    return Measured(measured.path, measured.environment, points)


def _ceilings(results: Results, path: Path) -> DeviceRates | None:
    body: Any = stored_ceilings(results.environment)
    return None if body is None else rates_of(body, str(path))


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


def _rendered(text: str) -> str:
    """The beginning of a page as HTML, in which the page's own HTML is text."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table").disable("image").render(excerpt(text))
