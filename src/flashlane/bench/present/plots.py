"""Pictures of a bench's results file: rates and memory against length, speed-up bars, ratios to the best peer.

From a file that :meth:`flashlane.bench.measure.results.Results.write` wrote to a matplotlib figure; nothing is
measured here.
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlane.bench.present.figure_frame import (
    DARK,
    LIGHT,
    Theme,
    need_matplotlib,
    new_figure,
    provenance,
    save,
    themed,
)
from flashlane.bench.present.points import Measured, Point, fastest_tags, read_matrix_rates, read_results
from flashlane.bench.present.styles import MOST_LINES, Styles, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DARK",
    "LIGHT",
    "Lines",
    "Measured",
    "Point",
    "Theme",
    "fastest_tags",
    "heatmap_figure",
    "legend_figure",
    "memory_figure",
    "memory_lines",
    "need_matplotlib",
    "panel_figure",
    "provenance",
    "read_matrix_rates",
    "read_results",
    "save",
    "speedup_figure",
    "styles_of",
    "throughput_figure",
    "throughput_lines",
]

FAR = 4.0
"""A ceiling so many times as high as all that was measured is named, not drawn."""
MOST_BARS, MOST_PROBLEMS = 12, 120
"""Kernels whose bars are drawn without being asked for; problems that one picture holds."""
TITLE = 48
"""Letters of a line of a panel's title."""
PANEL = (4.9, 3.6)
"""Inches of one panel that stands alone: as wide as a phone shows with letters that can be read."""


# --- Throughput


@themed
def throughput_figure(
    measured: Measured,
    most: int = MOST_LINES,
    ceilings: dict[str, float] | None = None,
    copy: float | None = None,
    *,
    styles: Styles | None = None,
    theme: Theme = LIGHT,
) -> Figure:
    """TFLOP/s against sequence length: a panel for each head dim (and dtype, mask), a line for each tag.

    Args:
        measured: the results of a file.
        most: kernels drawn, the fastest over all problems; every peer is.
        ceilings: TFLOP/s by name; a name that begins with a dtype is drawn in that dtype's panels alone.
        copy: GB/s of a copy: the ceiling that it puts over each length, by the least bytes that the problem moves.
        styles: of all tags, where other pictures share them; else those of this file.

    Raises:
        ValueError: more problems than a picture holds.
    """
    return _lines_figure(throughput_lines(measured, most, ceilings, copy, styles), theme)


@themed
def memory_figure(
    measured: Measured, most: int = MOST_LINES, *, styles: Styles | None = None, theme: Theme = LIGHT
) -> Figure:
    """MiB that one call takes beyond its inputs against sequence length: panels and lines as in the throughput.

    Raises:
        ValueError: no row says what it took, or more problems than a picture holds.
    """
    return _lines_figure(memory_lines(measured, most, styles), theme)


@dataclass(frozen=True)
class Lines:
    """A quantity against sequence length: a panel for each head dim and variant, a line for each tag."""

    measured: Measured
    quantity: str
    value: Callable[[Point], float]
    finish: Callable[[Axes, list[Point], Theme], object]
    tags: tuple[str, ...]
    """The tags that are drawn, kernels first."""
    kernels: tuple[int, int]
    """How many kernels are drawn, of how many."""
    panels: dict[str, list[Point]]
    styles: Styles

    @property
    def heading(self) -> str:
        return f"{self.quantity} against sequence length" + _of(*self.kernels)


def throughput_lines(
    measured: Measured,
    most: int = MOST_LINES,
    ceilings: dict[str, float] | None = None,
    copy: float | None = None,
    styles: Styles | None = None,
) -> Lines:
    """What :func:`throughput_figure` draws."""

    def finish(axis: Axes, points: list[Point], theme: Theme) -> None:
        _draw_ceilings(axis, points, ceilings or {}, copy, theme)
        axis.set_ylim(bottom=0)

    return _lines(measured, most, "TFLOP/s", lambda p: p.tflops, finish, styles, measured.points)


def memory_lines(measured: Measured, most: int = MOST_LINES, styles: Styles | None = None) -> Lines:
    """What :func:`memory_figure` draws.

    Raises:
        ValueError: no row says what a call allocates.
    """
    with_memory = tuple(p for p in measured.points if p.extra_bytes)
    if not with_memory:
        raise ValueError(f"{measured.path} does not say what a call allocates (flashlane bench --memory)")

    def finish(axis: Axes, points: list[Point], theme: Theme) -> None:
        axis.set_yscale("log", base=2)
        low, high = (round(math.log2(v)) for v in axis.get_ylim())
        steps = [2.0**e for e in range(low, high + 1, max(1, -(-(high - low) // 8)))]
        axis.set_yticks(steps, [f"{x:g}" if x >= 1 else f"{x:.2g}" for x in steps])
        axis.minorticks_off()

    few = Measured(measured.path, measured.environment, with_memory)
    styles = styles or styles_of([measured])
    return _lines(
        few, most, "MiB a call, beyond its inputs", lambda p: p.extra_bytes / 2**20, finish, styles, measured.points
    )


def _lines(
    measured: Measured,
    most: int,
    quantity: str,
    value: Callable[[Point], float],
    finish: Callable[[Axes, list[Point], Theme], object],
    styles: Styles | None,
    fastest_of: Sequence[Point],
) -> Lines:
    """Lines of the fastest kernels of some points, and of every peer."""
    styles = styles or styles_of([measured])
    timed = {p.tag for p in measured.points}
    kernels = fastest_tags(fastest_of, len(timed))
    tags = (*(tag for tag in kernels[:most] if tag in timed), *(tag for tag in styles.peers if tag in timed))
    panels = _panels(measured.path, [p for p in measured.points if p.tag in tags])
    return Lines(measured, quantity, value, finish, tags, (min(most, len(kernels)), len(kernels)), panels, styles)


def _lines_figure(lines: Lines, theme: Theme) -> Figure:
    """All panels in one picture, one legend below."""
    across = min(3, len(lines.panels))
    columns = 2 if across > 1 and max(map(len, lines.tags)) < 28 * across else 1
    below = 0.24 * -(-len(lines.tags) // columns) + 0.3
    widest = 0.08 * max(map(len, lines.tags)) * columns + 0.9
    size = (max(4.7 * across + 0.4, widest), 3.9 * -(-len(lines.panels) // across) + below)
    figure, axes = new_figure(lines.measured.environment, lines.heading, len(lines.panels), across, size, theme)
    for axis, (title, points) in zip(axes, lines.panels.items()):
        _draw_lines(axis, points, lines, title, theme)
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    drawn = [tag for tag in lines.tags if tag in handles]
    figure.legend([handles[t] for t in drawn], drawn, loc="outside lower center", ncols=columns, frameon=False)
    return figure


@themed
def panel_figure(lines: Lines, title: str, *, theme: Theme = LIGHT) -> Figure:
    """One panel alone, without a legend: for a page that arranges panels by its width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=PANEL)
    bottom = 0.15 if len({p.extent for p in lines.panels[title]}) == 1 else 0.2  # ticks of one line or of two
    top = 0.95 - 0.05 * len(textwrap.wrap(title, TITLE))
    axis = figure.add_axes((0.135, bottom, 0.84, top - bottom))
    _draw_lines(axis, lines.panels[title], lines, title, theme)
    _make_room_on_the_left(figure, axis)
    return figure


def _make_room_on_the_left(figure: Figure, axis: Axes) -> None:
    """Move the left edge of the axes by what its numbers and its title lack: tiny rates have many digits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    lacking = 4 - axis.get_tightbbox(FigureCanvasAgg(figure).get_renderer()).x0
    if lacking > 0:
        left, bottom, width, height = axis.get_position().bounds
        share = lacking / figure.bbox.width
        axis.set_position((left + share, bottom, width - share, height))


@themed
def legend_figure(tags: Sequence[str], styles: Styles, *, theme: Theme = LIGHT) -> Figure:
    """The legend of panels that stand alone."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(PANEL[0], 0.22 * len(tags) + 0.15))
    handles = [Line2D([], [], **styles.line(tag, theme)) for tag in tags]
    size = min(9.0, 450 / max(map(len, tags)))  # the longest tag fits
    figure.legend(handles, tags, loc="upper left", frameon=False, borderpad=0.1, fontsize=size, handlelength=3.2)
    return figure


def _panels(path: Path, points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by title. Batch and heads may change along a line, but where two share a length each gets a panel."""
    groups: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    for point in points:
        groups[point.head_dim, point.variant, point.queries].append(point)
    panels: dict[str, list[Point]] = {}
    for key in sorted(groups, key=lambda k: (*map(int, k[0].split("/")), *k[1:])):
        title = " · ".join(filter(None, (f"head dim {key[0]}", *key[1:])))
        group = groups[key]
        extents = list(dict.fromkeys(p.extent for p in group))
        shared = len({(p.extent, p.seqlen_k) for p in group}) > len({p.seqlen_k for p in group})
        if shared or len(extents) == 1:
            panels |= {f"{title} · {each}": [p for p in group if p.extent == each] for each in extents}
        else:
            panels[title] = group
    _check_number(path, len(panels))
    return panels


def _draw_lines(axis: Axes, points: list[Point], lines: Lines, title: str, theme: Theme) -> None:
    joined = {} if _alike(points) else {"linestyle": "none"}
    for tag in lines.tags:
        line = sorted((p.seqlen_k, lines.value(p)) for p in points if p.tag == tag)
        if line:
            axis.plot(*zip(*line), label=tag, **lines.styles.line(tag, theme) | joined)
    extents = {p.seqlen_k: p.extent for p in points}
    lengths, vary = sorted(extents), len(set(extents.values())) > 1
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n}\n{extents[n]}" if vary else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlim(lengths[0] / 1.4, lengths[-1] * 1.4)
    axis.set_xlabel("keys a sequence" if points[0].queries else "sequence length")
    axis.set_ylabel(lines.quantity)
    axis.set_title("\n".join(textwrap.wrap(title, TITLE)), fontsize=10, loc="left")
    axis.grid(axis="y")
    lines.finish(axis, points, theme)


def _alike(points: Sequence[Point]) -> bool:
    """Whether a line may join points: of equal heads, and of equal batch or equal batch times length."""
    equal = [len({f(p) for p in points}) == 1 for f in (lambda p: p.batch, lambda p: p.batch * p.seqlen_k)]
    return len({p.heads for p in points}) == 1 and any(equal)


def _draw_ceilings(
    axis: Axes, points: list[Point], ceilings: dict[str, float], copy: float | None, theme: Theme
) -> None:
    dtype = re.split(r"[ ,]", points[0].variant)[0]
    drawn: dict[str, list[str]] = defaultdict(list)
    for name, rate in ceilings.items():
        first, _, rest = name.partition(" ")
        if first == dtype or not re.fullmatch(r"b?f\d+", first):
            drawn[_rate(rate)].append(rest if first == dtype else name)
    highest = max(line.get_ydata().max() for line in axis.lines)
    near = [float(rate) for rate in drawn if float(rate) < FAR * highest]
    labels = []
    for rate in sorted(drawn, key=float, reverse=True):
        far = "" if float(rate) in near else "↑ "  # its line would leave little height to the measured ones
        labels.append(f"{far}{' and '.join(filter(None, drawn[rate]))}: {rate} TFLOP/s")
        if not far:
            axis.axhline(float(rate), color=theme.ceiling, linewidth=1.3, zorder=1)
    if copy is not None:
        labels += _draw_copy_ceiling(axis, points, copy, max([highest, *near]), theme)
    for row, label in enumerate(labels):
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (4, -11 - 12 * row)}
        axis.annotate(label, (0, 1), color=theme.ceiling, fontsize=8, **place)
    if labels:  # the labels are above all that is drawn
        axis.set_ylim(top=max(highest, *near) * (1.08 + 0.055 * len(labels)) if near else highest * 1.2)


def _draw_copy_ceiling(axis: Axes, points: list[Point], copy: float, top: float, theme: Theme) -> list[str]:
    """What the copy rate leaves at each length, cut off above the other ceilings; its label."""
    over = sorted({(p.seqlen_k, p.intensity * copy * 1e-3) for p in points if p.intensity})
    if not over:
        return []
    inside = [(n, rate) for n, rate in over if rate < FAR * top]
    if inside:
        axis.plot(*zip(*inside), color=theme.ceiling, linewidth=1.3, linestyle=":", zorder=1, label="_copy")
    return [f"{'' if inside else '↑ '}copy: {copy / 1000:.3g} TB/s" + (" (dotted)" if inside else "")]


# --- Speed-up


@themed
def speedup_figure(
    measured: Measured, most: int = MOST_BARS, *, styles: Styles | None = None, theme: Theme = LIGHT
) -> Figure:
    """Bars of each problem's fastest kernels and all its peers: how many times as fast as the best peer.

    Raises:
        ValueError: no problem has a timed peer, or more problems than a picture holds.
    """
    styles = styles or styles_of([measured])
    panels: dict[str, list[Point]] = defaultdict(list)
    for point in _compared(measured):
        panels[point.problem].append(point)
    _check_number(measured.path, len(panels))
    bars = {problem: _bars(points, most) for problem, points in panels.items()}
    across = min(2, len(panels))
    rows = max(map(len, bars.values()))
    size = (7.4 * across, (0.9 + 0.21 * rows) * -(-len(panels) // across))
    figure, axes = new_figure(measured.environment, "Speed against the best peer", len(panels), across, size, theme)
    for axis, (problem, points) in zip(axes, bars.items()):
        total = sum(p.ours for p in panels[problem])
        _draw_bars(axis, points, problem + _of(sum(p.ours for p in points), total), styles, theme)
    return figure


def _bars(points: list[Point], most: int) -> list[Point]:
    ours = sorted((p for p in points if p.ours), key=lambda p: -(p.speedup or 0))[:most]
    return sorted([*ours, *(p for p in points if not p.ours)], key=lambda p: -(p.speedup or 0))


def _draw_bars(axis: Axes, points: list[Point], title: str, styles: Styles, theme: Theme) -> None:
    widths = [p.speedup or 0.0 for p in points]
    colours = [styles.colour(p.tag, theme) for p in points]
    axis.barh(range(len(points)), widths, color=colours, height=0.74)
    for row, point in enumerate(points):
        label = f"{point.speedup:.2f}×  {_rate(point.tflops)} TFLOP/s"
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(label, (max(1.0, widths[row]), row), fontsize=7, **place)  # right of the line at 1
    axis.axvline(1.0, color=theme.ceiling, linewidth=1.1, linestyle="--", zorder=3)
    axis.set_yticks(range(len(points)), [p.tag for p in points], fontsize=7)
    for tick, point in zip(axis.get_yticklabels(), points):
        tick.set_fontweight("normal" if point.ours else "bold")
    axis.invert_yaxis()
    axis.set_xlim(0, 1.45 * max(1.0, *widths))  # room for the figures
    axis.set_xlabel("× best peer (peers grey and bold)", fontsize=8)
    room = max(24, int(80 - 0.65 * max(len(p.tag) for p in points)))  # what the names of the bars leave
    axis.set_title("\n".join(textwrap.wrap(title, room)), fontsize=9.5, loc="left")


# --- Heat map


@themed
def heatmap_figure(measured: Measured, *, theme: Theme = LIGHT) -> Figure:
    """Our fastest kernel's speed over the best peer's: batch, heads and kind down, head dim and length across.

    Raises:
        ValueError: no problem has both a kernel and a timed peer, or more problems than a picture holds.
    """
    from matplotlib.colors import LinearSegmentedColormap

    cells: dict[tuple[Any, ...], dict[tuple[Any, ...], Point]] = defaultdict(dict)
    for point in (p for p in _compared(measured) if p.ours):
        heads = tuple(map(int, point.heads.split("/")))
        row = (point.variant, point.queries, point.batch, heads, point.extent)
        column = (tuple(map(int, point.head_dim.split("/"))), point.seqlen_k)
        best = cells[row].get(column)
        if best is None or best.tflops < point.tflops:
            cells[row][column] = point
    if not cells:
        raise ValueError(f"{measured.path} has no problem with both a kernel and a checked peer")
    rows, columns = sorted(cells), sorted({column for by_column in cells.values() for column in by_column})
    _check_number(measured.path, max(len(rows), len(columns)))
    size = (max(8.4, 3.3 + 1.05 * len(columns)), 1.5 + 0.52 * len(rows))
    figure, (axis,) = new_figure(measured.environment, "Our fastest kernel against the best peer", 1, 1, size, theme)
    grid = [[cells[r][c].speedup if c in cells[r] else math.nan for c in columns] for r in rows]
    reach = max(0.5, *(abs(math.log2(x)) for line in grid for x in line if not math.isnan(x)))
    colours = LinearSegmentedColormap.from_list("ratio", theme.ratio)
    logs = [[math.log2(x) for x in line] for line in grid]
    image = axis.imshow(logs, cmap=colours, vmin=-reach, vmax=reach, aspect="auto")
    _label_cells(axis, [[cells[r].get(c) for c in columns] for r in rows], functools.partial(_ink, image))
    axis.set_xticks(range(len(columns)), [f"D{'/'.join(map(str, dim))}\nN{length}" for dim, length in columns])
    names = [" · ".join(filter(None, (row[4], row[0], row[1]))) for row in rows]
    axis.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(name, 36)) for name in names])
    axis.set_xlabel("head dim and sequence length\nin a cell: × best peer, below it TFLOP/s")
    axis.set_ylabel("problem")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axis, pad=0.02)
    marks = (0.5, 0.7, 1.0, 1.4, 2.0) if reach < 2 else (0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0)
    steps = [x for x in marks if abs(math.log2(x)) <= reach + 1e-9]
    bar.set_ticks([math.log2(x) for x in steps], labels=[f"{x:g}×" for x in steps])
    bar.set_label("× best peer")
    bar.outline.set_visible(False)
    return figure


def _label_cells(axis: Axes, cells: list[list[Point | None]], ink: Callable[[float], str]) -> None:
    for y, line in enumerate(cells):
        for x, point in enumerate(line):
            if point is None:
                axis.text(x, y, "–", ha="center", va="center")
            else:
                label = f"{point.speedup:.2f}×\n{_rate(point.tflops)}"
                axis.text(x, y, label, ha="center", va="center", fontsize=8, color=ink(math.log2(point.speedup or 1)))


def _ink(image: Any, value: float) -> str:
    """Black or white, whichever stands out on the colour of a value (relative luminance, WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in image.to_rgba(value)[:3]]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))
    return "#000000" if luminance > 0.18 else "#ffffff"


def _compared(measured: Measured) -> list[Point]:
    points = [p for p in measured.points if p.speedup]
    if not points:
        raise ValueError(f"{measured.path} has no problem with a checked peer, so no speed-up to draw")
    return points


def _check_number(path: Path, panels: int) -> None:
    if panels > MOST_PROBLEMS:
        raise ValueError(f"{path} asks for {panels} problems in one picture; at most {MOST_PROBLEMS} fit")


def _of(shown: int, total: int) -> str:
    return f" · fastest {shown} of {total}" if shown < total else ""


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"
