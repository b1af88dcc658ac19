"""One self-contained HTML page of results files: the verdict, sortable tables, pictures, what it was measured on.

Everything is in the page, and its own policy forbids it the network. Pictures are there in light and dark; without
matplotlib the page says that they are missing. A panel is a picture of its own, so that a narrow screen shows one and
a wide one several next to each other.
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
from flashlane.bench.measure.device_rates import DeviceRates, Placed, place, rates_of, sentence, stored_ceilings
from flashlane.bench.measure.results import ERROR, FAIL, Results, Row, load_results
from flashlane.bench.measure.sweep import HEAD, summary_rows
from flashlane.bench.present import figure_frame, plots
from flashlane.bench.present.points import Measured, fastest_tags, lines_of, read_results
from flashlane.bench.present.roofline import roofline_figure
from flashlane.bench.present.styles import Styles, styles_of
from flashlane.bench.present.table import NONE, significant
from flashlane.bench.present.verdict import duels, times, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXCERPT_LINES = 40
"""Lines of a notebook's page that are shown, at most."""
MACHINE = ("device", "driver", "power_limit_w", "clock_mhz", "clock_max_mhz", "torch", "cuda", "cudnn", "triton",
           "flash-attn", "flash-attn-4", "ffpa-attn", "xformers", "flashinfer-python", "flashlane", "commit", "date",
           "python", "system", "threads", "command")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What is shown, and for a figure the number that the column is sorted by."""

    shown: str
    value: float | None = None


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
    Shown("check", lambda r: r.status),
    Shown("ms", lambda r: r.timing and r.timing.median, 4),
    Shown("±%", lambda r: r.timing and 50 * r.timing.spread, 2),
    Shown("TFLOP/s", lambda r: r.tflops, 4),
    Shown("× best peer", lambda r: None if r.speedup is None else Cell(times(r.speedup), r.speedup)),
    Shown("MiB a call", lambda r: r.memory.extra / 2**20 if r.memory and r.memory.extra is not None else None, 4),
    Shown("max error", lambda r: r.verdict and r.verdict.max_error, 2),
    Shown("/ allowed", lambda r: r.verdict and r.verdict.ratio, 2),
    Shown("message", lambda r: r.message),
    Shown("min ms", lambda r: r.timing and r.timing.fastest, 4),
    Shown("max ms", lambda r: r.timing and r.timing.slowest, 4),
    Shown("peak TFLOP/s", lambda r: r.tflops_peak, 4),
    Shown("% mma.sync", lambda r: r.mma_ceiling and 100 * r.mma_ceiling, 3),
    Shown("host µs", lambda r: r.host_us, 3),
    Shown("cycles", lambda r: r.cycles, 6),
    Shown("registers", lambda r: r.usage and r.usage.registers),
)


def build(paths: Sequence[Path], notebooks: Sequence[Path] = (), title: str = "flashlane report") -> str:
    """The page.

    Args:
        paths: results files of bench, sweep or compare.
        notebooks: Markdown files, or folders of them, whose beginnings are shown.
        title: of the page.

    Raises:
        ValueError: a file cannot be read, or is not a results file; the message names it.
    """
    results = [(path, load_results(path)) for path in paths]
    styles = _styles(paths)
    pages = [{"name": path.name, "body": Markup(_rendered(text))} for path, text in _pages(notebooks)]
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    devices = ", ".join(dict.fromkeys(str(each.environment.get("device")) for _, each in results))
    page = (
        environment()
        .get_template("report.html")
        .render(
            title=title,
            made=f"{devices} · made {now} by flashlane {__version__}",
            runs=[_section(index, path, each, styles) for index, (path, each) in enumerate(results)],
            open_problems=OPEN_PROBLEMS,
            palettes={"light": figure_frame.LIGHT.lines, "dark": figure_frame.DARK.lines},
            notebook=pages,
        )
    )
    return page.strip() + "\n"


@functools.cache
def environment() -> jinja2.Environment:
    """The templates next to this file; every value in them is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters["cells"] = lambda row: [number_of(cell) for cell in row]
    templates.filters["status"] = _status
    return templates


def _styles(paths: Sequence[Path]) -> Styles:
    """The colours and markers of the whole page; files without a timed row add none."""
    return styles_of(measured for measured in map(_timed, paths) if measured is not None)


def _timed(path: Path) -> Measured | None:
    try:
        return read_results(path)
    except ValueError:
        return None


def _drawn(path: Path) -> list[str]:
    """The kernels that the pictures of a file draw."""
    measured = _timed(path)
    return [] if measured is None else fastest_tags(measured.points, plots.MOST_LINES)


def _section(index: int, path: Path, results: Results, styles: Styles) -> dict[str, object]:
    """What the template shows of one results file."""
    columns = [c for c in COLUMNS if any(c.value(row) not in (None, "") for row in results.rows)]
    notes, bounds, pictures = _pictures(path, results, styles)
    summary = [dict(zip(HEAD, row, strict=True)) for row in summary_rows(results)]
    order = ("problem", "× best peer", *HEAD[1:])  # the ratio first, so that a narrow screen shows it
    head = [name for name in dict.fromkeys(order) if any(row[name] not in ("", NONE) for row in summary)]
    return {
        "anchor": f"run-{index}",
        "name": path.stem,
        "head": f"{results.environment.get('device')} · {path.name}",
        "verdict": verdict_words(results),
        "verdicts": _by_direction(results),
        "bars": _bars(path, results, styles),
        "machine": _machine(results),
        "notes": [*results.notes, *notes],
        "bounds": bounds,
        "pictures": pictures,
        "summary_head": head,
        "summary": [[row[name] for name in head] for row in summary],
        "columns": [column.title for column in columns],
        "rows": [[_cell(column, row) for column in columns] for row in results.rows],
        "failed": sum(row.status in (FAIL, ERROR) for row in results.rows),
        "skipped": [(s.problem, s.tag, s.reason) for s in results.skipped],
    }


def _machine(results: Results) -> list[tuple[str, object]]:
    where = results.environment
    lines = [(name, where[name]) for name in MACHINE if where.get(name) not in (None, "")]
    keys = ("rounds", "check", "rule", "seed", "inputs", "order", "protocol", "calls", "directions")
    settings = "; ".join(f"{key}: {_words(results.settings[key])}" for key in keys if key in results.settings)
    return [*lines, ("measured", settings)]


def _words(value: object) -> str:
    """A setting as a reader has it: yes and no, lists without brackets."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# --- who is ahead


def verdict_words(results: Results) -> str:
    """The first sentences of a file: ahead in how many problems, by how much, least, and what failed."""
    by_problem = duels(results)
    total = verdict(by_problem)
    if total is None:
        text = "No problem has both a kernel and a peer that were timed, so there is nothing to compare."
    else:
        text = (
            f"Our fastest kernel is ahead of the fastest peer in {total.ahead} of {total.problems} problems; geometric "
            f"mean {times(total.mean)}×, least {times(total.least.ratio)}× ({total.least.problem} against "
            f"{total.least.peer.tag}), most {times(total.most.ratio)}× ({total.most.problem})."
        )
        if total.alone:
            text += f" {_counted(total.alone, 'further problem')} had no kernel or no peer to compare."
    failed = [row for row in results.rows if row.status in (FAIL, ERROR)]
    kernels = sum(row.kind == "kernel" for row in failed)
    if failed:
        text += f" {_counted(len(failed), 'row')} failed: {kernels} of kernels, {len(failed) - kernels} of peers."
    return text


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _by_direction(results: Results) -> list[tuple[object, ...]]:
    """A line for each direction, where there is more than one."""
    directions = dict.fromkeys(row.direction for row in results.rows)
    of = {row.problem: row.direction for row in results.rows}
    lines = []
    for direction in directions if len(directions) > 1 else ():
        found = verdict([duel for duel in duels(results) if of.get(duel.problem) == direction])
        if found is not None:
            name = "forward and backward" if direction == "both" else direction
            ratios = (found.mean, found.least.ratio, found.most.ratio)
            lines.append((name, found.problems, found.ahead, *(Cell(times(x), x) for x in ratios)))
    return lines


OPEN_PROBLEMS = 12
"""Problems whose bars are open when the page opens; those of the others open on a click."""


def _bars(path: Path, results: Results, styles: Styles) -> list[dict[str, object]]:
    """Each problem's fastest kernels and all its peers as bars: how many times as fast as the best peer."""
    drawn = _drawn(path)
    problems: dict[str, list[Row]] = {}
    for row in results.rows:
        if row.timing and row.speedup:
            problems.setdefault(row.problem, []).append(row)
    panels = []
    for problem, rows in problems.items():
        rows = sorted(rows, key=lambda row: -row.speedup)
        ours = [row for row in rows if row.kind == "kernel"]
        chosen = [row for row in rows if row.kind != "kernel" or row in ours[: plots.MOST_BARS]]
        widest = max(1.0, *(row.speedup for row in chosen))
        bars = [
            {
                "tag": row.tag,
                "peer": row.kind != "kernel",
                "colour": _colour(row.tag, styles, drawn),
                "width": f"{100 * row.speedup / widest:.1f}",
                "label": f"{times(row.speedup)}× · {significant(row.tflops)}",
            }
            for row in chosen
        ]
        left_out = len(ours) - min(len(ours), plots.MOST_BARS)
        panels.append({"problem": problem, "bars": bars, "one": f"{100 / widest:.1f}", "left_out": left_out})
    return panels


def _colour(tag: str, styles: Styles, drawn: Sequence[str]) -> str:
    """The name of the style sheet's colour: of a kernel that the pictures draw, a peer, or another kernel."""
    if tag in styles.peers:
        return "peer"
    return f"line-{styles.kernels.index(tag) % len(figure_frame.LIGHT.lines)}" if tag in drawn else "other"


# --- tables


def _cell(column: Shown, row: Row) -> object:
    value = column.value(row)
    if isinstance(value, Cell):
        return value
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
        return Cell(str(cell), float(str(cell).removeprefix("<")))
    except ValueError:
        return Cell(str(cell))


def table(head: Sequence[str], rows: Sequence[Sequence[object]], search: bool = False) -> str:
    """One table of the page as HTML."""
    return str(environment().get_template("report_table.html").module.table(head, rows, search))


def _status(row: Sequence[object]) -> str:
    """The style of a row: that of its status when it failed."""
    return next((str(cell).lower() for cell in row if str(cell) in (FAIL, ERROR)), "")


# --- pictures


def _pictures(path: Path, results: Results, styles: Styles) -> tuple[list[str], list[str], list[dict[str, object]]]:
    """Why there are no pictures, what bounds each problem, and groups of pictures or why one is missing."""
    try:
        figure_frame.need_matplotlib()
        measured = read_results(path)
    except (ImportError, ValueError) as error:
        return [f"No pictures: {error}"], [], []
    ceilings = _ceilings(results, path)
    lines = ({}, None) if ceilings is None else (lines_of(ceilings), ceilings.copy)
    most = plots.MOST_LINES
    kinds: dict[str, Callable[[], dict[str, object]]] = {
        "Our fastest kernel against the best peer": lambda: {
            "wide": [_both("heat map", lambda t: plots.heatmap_figure(measured, theme=t))]
        },
        "TFLOP/s against sequence length": lambda: _panels(
            plots.throughput_lines(measured, plots.MOST_LINES, *lines, styles=styles)
        ),
        "Memory of a call": lambda: _panels(plots.memory_lines(measured, most, styles)),
    }
    bounds: list[str] = []
    points = place(results.rows, ceilings) if ceilings is not None else []
    if points:
        dtypes = list(dict.fromkeys(p.dtype for p in points))
        look = {"styles": styles, "kernels": fastest_tags(measured.points, plots.MOST_LINES)}
        kinds["Roofline"] = lambda: {
            "panels": [_roofline(points, ceilings, results.environment, dtype, look) for dtype in dtypes]
        }
        bounds = [sentence([p for p in points if p.problem == x]) for x in dict.fromkeys(p.problem for p in points)]
    groups = []
    for name, draw in kinds.items():
        group: dict[str, object] = {"name": name, "missing": "", "panels": [], "wide": []}
        try:
            group |= draw()
        except ValueError as error:  # this file has nothing to draw of that kind
            group["missing"] = str(error)
        groups.append(group)
    return [], bounds, groups


def _panels(lines: plots.Lines) -> dict[str, object]:
    """The legend, and a picture for each panel."""
    legend = _both("legend", lambda t: plots.legend_figure(lines.tags, lines.styles, theme=t))
    panels = [_both(f"{lines.quantity}: {title}", functools.partial(_panel, lines, title)) for title in lines.panels]
    return {"name": lines.heading, "panels": [legend, *panels]}


def _panel(lines: plots.Lines, title: str, theme: figure_frame.Theme) -> Figure:
    return plots.panel_figure(lines, title, theme=theme)


def _roofline(
    points: Sequence[Placed], ceilings: DeviceRates, where: dict[str, Any], dtype: str, look: dict[str, Any]
) -> dict[str, str]:
    few = [p for p in points if p.dtype == dtype]
    draw = functools.partial(roofline_figure, few, ceilings, where, width=plots.PANEL[0], **look)
    return _both(f"roofline, {dtype}", lambda t: draw(theme=t))


def _both(alt: str, draw: Callable[[figure_frame.Theme], Figure]) -> dict[str, str]:
    """A picture in light and dark."""
    return {"alt": alt, "light": _uri(draw(figure_frame.LIGHT)), "dark": _uri(draw(figure_frame.DARK))}


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
