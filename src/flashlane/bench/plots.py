"""Pictures of a bench's results file: rates against length, speed-up bars, ratios to the best baseline.

From a file that :meth:`flashlane.bench.results.Results.write` wrote to a matplotlib figure; nothing is measured here.
"""

from __future__ import annotations

import functools
import json
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlane.bench.results import FORMAT, OK, UNCHECKED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAR = 4.0
"""A roof so many times as high as all that was measured is named, not drawn."""
MOST_LINES, MOST_BARS, MOST_PROBLEMS = 5, 12, 120
"""Kernels drawn without being asked for; problems that one picture holds."""
MARKERS = "osD^vPX<>*"
DASHES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (2, 1)))


@dataclass(frozen=True)
class Theme:
    """Colours of a picture. Lines use Okabe and Ito's palette, which colour-blind readers tell apart (2008)."""

    background: str
    text: str
    faint: str
    baseline: str
    roof: str
    lines: tuple[str, ...]
    ratio: tuple[str, str, str]
    """Slower than the best baseline, as fast, faster."""


LIGHT = Theme(
    *("#ffffff", "#1a1a1a", "#d9d9d9", "#767676", "#a00000"),
    lines=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    ratio=("#b35806", "#f7f7f7", "#2166ac"),
)
DARK = Theme(
    *("#14171c", "#e8e8e8", "#3a3f47", "#a6a6a6", "#ff8a80"),
    lines=("#56b4e9", "#e69f00", "#2fc79b", "#e59cc4", "#f0e442", "#d55e00"),
    ratio=("#fdae61", "#2a2e35", "#74b9f0"),
)


@dataclass(frozen=True)
class Point:
    """One timed implementation on one problem."""

    problem: str
    tag: str
    ours: bool
    tflops: float
    speedup: float | None
    """Time of the problem's best baseline over this one's; None where no baseline was timed."""
    batch: int
    heads: str
    seqlen_q: int
    seqlen_k: int
    head_dim: str
    variant: str
    """What else the problem's name says: ``bf16 causal, graph replay``."""

    @property
    def extent(self) -> str:
        return f"B{self.batch} H{self.heads}"

    @property
    def queries(self) -> str:
        """The number of queries, where it is not that of keys."""
        return "" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q} queries"


@dataclass(frozen=True)
class Measured:
    """A results file, as far as it is drawn."""

    path: Path
    environment: dict[str, Any]
    points: tuple[Point, ...]

    def choose(self, words: Sequence[str]) -> Measured:
        """Baselines, and the kernels whose tag contains one of the words (every kernel without words).

        Raises:
            ValueError: no timed kernel of the file has such a tag.
        """
        kept = [p for p in self.points if not p.ours or not words or any(word in p.tag for word in words)]
        if words and not any(p.ours for p in kept):
            raise ValueError(f"--tags is {','.join(words)}; no timed kernel of {self.path} has such a tag")
        return Measured(self.path, self.environment, tuple(kept))


def read_results(path: Path) -> Measured:
    """Read a results file of the bench; rows without a time (failed, in error) are left out.

    Raises:
        ValueError: it cannot be read, is no results file, or holds no timed row; the message names it.
    """
    body = _read_json(path)
    if body.get("format") != FORMAT:
        raise ValueError(f"{path} is no results file of flashlane bench: format {body.get('format')!r}, not {FORMAT!r}")
    try:
        rows = [row for row in body["rows"] if row["status"] in (OK, UNCHECKED) and row["tflops"] is not None]
        points = tuple(_point(row) for row in rows)
        environment = dict(body["environment"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error} in its rows or environment") from None
    if not points:
        raise ValueError(f"{path} has no timed row")
    return Measured(path, environment, points)


def read_roofs(path: Path, device: str) -> dict[str, float]:
    """The matrix rates that ``benchmarks/blocks_gpu.py`` measured, TFLOP/s by ``f16 acc-f32``.

    Raises:
        ValueError: no such file, it has no such rate, or it was measured on another device; the message names it.
    """
    body = _read_json(path)
    roofs: dict[str, float] = {}
    try:
        for row in body["rows"]:
            if row["block"] == "hgemm" and row["ok"] and row["of_ceiling"]:
                name = " ".join(row["group"].split()[1:3])
                roofs[name] = max(roofs.get(name, 0.0), row["tflops"] / row["of_ceiling"])
        measured_on = body["environment"]["device"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--roofs: {path} is no file of blocks_gpu.py: {type(error).__name__} {error}") from None
    if not roofs:
        raise ValueError(f"--roofs: {path} has no rate of the matrix units (of_ceiling of a block hgemm)")
    if measured_on != device:
        raise ValueError(f"--roofs: {path} was measured on {measured_on}, the results on {device}")
    return roofs


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path} is no results file: a JSON {type(body).__name__}, not an object")
    return body


def _point(row: dict[str, Any]) -> Point:
    sizes, name = row["sizes"], str(row["problem"])
    heads, kv_heads = int(sizes["heads"]), int(sizes["kv_heads"])
    named = re.fullmatch(r"B\S+ H\S+ N\S+ D(\S+) (.+)", name)
    head_dim, variant = named.groups() if named else (str(sizes["head_dim"]), name)
    return Point(
        problem=name,
        tag=str(row["tag"]),
        ours=row["kind"] == "kernel",
        tflops=_positive(row["tflops"]),
        speedup=None if row["speedup"] is None else _positive(row["speedup"]),
        batch=int(sizes["batch"]),
        heads=str(heads) if heads == kv_heads else f"{heads}/{kv_heads}",
        seqlen_q=int(sizes["seqlen_q"]),
        seqlen_k=int(sizes["seqlen_k"]),
        head_dim=head_dim,
        variant=variant,
    )


def _positive(figure: Any) -> float:
    if not 0 < float(figure) < math.inf:
        raise ValueError(f"{figure} is no speed")
    return float(figure)


def fastest_tags(points: Iterable[Point], most: int) -> list[str]:
    """The kernels nearest to the fastest one, by the mean over all problems; one that misses a problem has 0 there."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for point in points:
        if point.ours:
            rates[point.problem][point.tag] = point.tflops
    score: dict[str, float] = defaultdict(float)
    for by_tag in rates.values():
        for tag, rate in by_tag.items():
            score[tag] += rate / max(by_tag.values())
    return sorted(score, key=lambda tag: -score[tag])[:most]


def _themed(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A drawing function all of whose text and lines have the colours of its keyword ``theme``."""

    @functools.wraps(draw)
    def themed(*args: Any, theme: Theme = LIGHT, **keywords: Any) -> Figure:
        from matplotlib import rc_context

        with rc_context(_settings(theme)):
            return draw(*args, theme=theme, **keywords)

    return themed


# --- Throughput


@_themed
def throughput_figure(
    measured: Measured, most: int = MOST_LINES, roofs: dict[str, float] | None = None, *, theme: Theme = LIGHT
) -> Figure:
    """TFLOP/s against sequence length: a panel for each head dim (and dtype, mask), a line for each tag.

    Args:
        most: kernels drawn, the fastest over all problems; every baseline is.
        roofs: TFLOP/s by name; a name that begins with a dtype is drawn in that dtype's panels alone.

    Raises:
        ValueError: more problems than a picture holds.
    """
    tags = fastest_tags(measured.points, most)
    baselines = list(dict.fromkeys(p.tag for p in measured.points if not p.ours))
    styles = {tag: _line_style(index, theme) for index, tag in enumerate(tags)}
    styles |= {tag: _baseline_style(index, theme) for index, tag in enumerate(baselines)}
    panels = _panels(measured.path, [p for p in measured.points if p.tag in styles])
    across = min(3, len(panels))
    kernels = len({p.tag for p in measured.points if p.ours})
    heading = "TFLOP/s against sequence length" + _of(len(tags), kernels)
    legend_columns = 2 if across > 1 else 1
    size = (4.7 * across + 0.4, 3.9 * -(-len(panels) // across) + 0.24 * -(-len(styles) // legend_columns) + 0.3)
    figure, axes = _figure(measured, heading, len(panels), across, size, theme)
    for axis, (title, points) in zip(axes, panels.items()):
        _draw_lines(axis, points, styles, title)
        _draw_roofs(axis, points[0], roofs or {}, theme)
        axis.set_ylim(bottom=0)
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    ordered = [tag for tag in styles if tag in handles]
    figure.legend(
        [handles[t] for t in ordered], ordered, loc="outside lower center", ncols=legend_columns, frameon=False
    )
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


def _draw_lines(axis: Axes, points: list[Point], styles: dict[str, dict[str, Any]], title: str) -> None:
    for tag, style in styles.items():
        line = sorted((p.seqlen_k, p.tflops) for p in points if p.tag == tag)
        if line:
            axis.plot(*zip(*line), label=tag, **style)
    extents = {p.seqlen_k: p.extent for p in points}
    lengths, vary = sorted(extents), len(set(extents.values())) > 1
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n}\n{extents[n]}" if vary else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlim(lengths[0] / 1.4, lengths[-1] * 1.4)
    axis.set_xlabel("keys a sequence" if points[0].queries else "sequence length")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(axis="y")


def _draw_roofs(axis: Axes, point: Point, roofs: dict[str, float], theme: Theme) -> None:
    dtype = re.split(r"[ ,]", point.variant)[0]
    kept: dict[str, list[str]] = defaultdict(list)
    for name, rate in roofs.items():
        first, _, rest = name.partition(" ")
        if first == dtype or not re.fullmatch(r"b?f\d+", first):
            kept[f"{rate:.0f}"].append(rest if first == dtype else name)
    highest = max(line.get_ydata().max() for line in axis.lines)
    near = [float(rate) for rate in kept if float(rate) < FAR * highest]
    for row, rate in enumerate(sorted(kept, key=float, reverse=True)):
        far = "" if float(rate) in near else "↑ "  # its line would press the measured ones flat
        label = f"{far}{' and '.join(filter(None, kept[rate]))}: {rate} TFLOP/s"
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (4, -11 - 12 * row)}
        axis.annotate(label, (0, 1), color=theme.roof, fontsize=8, **place)
        if not far:
            axis.axhline(float(rate), color=theme.roof, linewidth=1.3, zorder=1)
    if kept:  # the labels are above all that is drawn
        axis.set_ylim(top=max(highest, *near) * (1.08 + 0.055 * len(kept)) if near else highest * 1.2)


def _line_style(index: int, theme: Theme) -> dict[str, Any]:
    return {
        "color": theme.lines[index % len(theme.lines)],
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 1.8,
        "markersize": 5.5,
        "zorder": 3,
    }


def _baseline_style(index: int, theme: Theme) -> dict[str, Any]:
    return {
        "color": theme.baseline,
        "marker": MARKERS[index % len(MARKERS)],
        "markerfacecolor": theme.background,
        "linestyle": DASHES[index % len(DASHES)],
        "linewidth": 1.4,
        "markersize": 5.5,
        "zorder": 2,
    }


# --- Speed-up


@_themed
def speedup_figure(measured: Measured, most: int = MOST_BARS, *, theme: Theme = LIGHT) -> Figure:
    """Bars of each problem's fastest kernels and all its baselines: how many times as fast as the best baseline.

    Raises:
        ValueError: no problem has a timed baseline, or more problems than a picture holds.
    """
    panels: dict[str, list[Point]] = defaultdict(list)
    for point in _compared(measured):
        panels[point.problem].append(point)
    _check_number(measured.path, len(panels))
    bars = {problem: _bars(points, most) for problem, points in panels.items()}
    across = min(2, len(panels))
    rows = max(map(len, bars.values()))
    size = (7.4 * across, (0.9 + 0.21 * rows) * -(-len(panels) // across))
    figure, axes = _figure(measured, "Speed against the best baseline", len(panels), across, size, theme)
    for axis, (problem, points) in zip(axes, bars.items()):
        total = sum(p.ours for p in panels[problem])
        _draw_bars(axis, points, problem + _of(sum(p.ours for p in points), total), theme)
    return figure


def _bars(points: list[Point], most: int) -> list[Point]:
    ours = sorted((p for p in points if p.ours), key=lambda p: -(p.speedup or 0))[:most]
    return sorted([*ours, *(p for p in points if not p.ours)], key=lambda p: -(p.speedup or 0))


def _draw_bars(axis: Axes, points: list[Point], title: str, theme: Theme) -> None:
    widths = [p.speedup or 0.0 for p in points]
    colours = [theme.lines[0] if p.ours else theme.baseline for p in points]
    axis.barh(range(len(points)), widths, color=colours, height=0.74)
    for row, point in enumerate(points):
        label = f"{point.speedup:.2f}×  {_rate(point.tflops)} TFLOP/s"
        box = {"facecolor": theme.background, "edgecolor": "none", "pad": 0.6}
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "zorder": 4}
        axis.annotate(label, (widths[row], row), fontsize=7, bbox=box, **place)
    axis.axvline(1.0, color=theme.roof, linewidth=1.1, linestyle="--", zorder=3)
    axis.set_yticks(range(len(points)), [p.tag for p in points], fontsize=7)
    for tick, point in zip(axis.get_yticklabels(), points):
        tick.set_fontweight("normal" if point.ours else "bold")
    axis.invert_yaxis()
    axis.set_xlim(0, 1.45 * max(1.0, *widths))  # room for the figures
    axis.set_xlabel("× best baseline (baselines grey and bold)", fontsize=8)
    axis.set_title("\n".join(textwrap.wrap(title, 54)), fontsize=9.5, loc="left")


# --- Heat map


@_themed
def heatmap_figure(measured: Measured, *, theme: Theme = LIGHT) -> Figure:
    """Our fastest kernel's speed over the best baseline's: batch, heads and kind down, head dim and length across.

    Raises:
        ValueError: no problem has both a kernel and a timed baseline, or more problems than a picture holds.
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
        raise ValueError(f"{measured.path} has no problem with both a kernel and a checked baseline")
    rows, columns = sorted(cells), sorted({column for by_column in cells.values() for column in by_column})
    _check_number(measured.path, max(len(rows), len(columns)))
    size = (max(8.4, 3.3 + 1.05 * len(columns)), 1.5 + 0.52 * len(rows))
    figure, (axis,) = _figure(measured, "Our fastest kernel against the best baseline", 1, 1, size, theme)
    grid = [[cells[r][c].speedup if c in cells[r] else math.nan for c in columns] for r in rows]
    reach = max(0.5, *(abs(math.log2(x)) for line in grid for x in line if not math.isnan(x)))
    colours = LinearSegmentedColormap.from_list("ratio", theme.ratio)
    logs = [[math.log2(x) for x in line] for line in grid]
    image = axis.imshow(logs, cmap=colours, vmin=-reach, vmax=reach, aspect="auto")
    _label_cells(axis, [[cells[r].get(c) for c in columns] for r in rows], functools.partial(_ink, image))
    axis.set_xticks(range(len(columns)), [f"D{'/'.join(map(str, dim))}\nN{length}" for dim, length in columns])
    names = [" · ".join(filter(None, (row[4], row[0], row[1]))) for row in rows]
    axis.set_yticks(range(len(rows)), names)
    axis.set_xlabel("head dim and sequence length")
    axis.set_ylabel("problem")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axis, pad=0.02)
    steps = [x for x in (0.1, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 10.0) if abs(math.log2(x)) <= reach + 1e-9]
    bar.set_ticks([math.log2(x) for x in steps], labels=[f"{x:g}×" for x in steps])
    bar.set_label("× best baseline")
    bar.outline.set_visible(False)
    return figure


def _label_cells(axis: Axes, cells: list[list[Point | None]], ink: Callable[[float], str]) -> None:
    for y, line in enumerate(cells):
        for x, point in enumerate(line):
            if point is None:
                axis.text(x, y, "–", ha="center", va="center")
            else:
                label = f"{point.speedup:.2f}×\n{_rate(point.tflops)} TFLOP/s"
                axis.text(x, y, label, ha="center", va="center", fontsize=8, color=ink(math.log2(point.speedup or 1)))


def _ink(image: Any, value: float) -> str:
    """Black or white, whichever stands out on the colour of a value (relative luminance, WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in image.to_rgba(value)[:3]]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))
    return "#000000" if luminance > 0.18 else "#ffffff"


# --- Common to all


def need_matplotlib() -> None:
    """Raise an ImportError that says what to install, when there is no matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "flashlane[plots]"') from error


def provenance(environment: dict[str, Any]) -> str:
    """What a picture's figures were measured with: versions, driver, commit and date, each where it is known."""
    names = {"torch": "torch", "cuda": "CUDA", "cudnn": "cuDNN", "triton": "Triton", "nvidia-cuda-nvrtc": "NVRTC"}
    names |= {"driver": "driver", "commit": "commit"}
    known = [f"{label} {environment[name]}" for name, label in names.items() if environment.get(name)]
    return " · ".join([*known, *filter(None, [str(environment.get("date") or "")[:10]])])


def _figure(
    measured: Measured, heading: str, panels: int, across: int, size: tuple[float, float], theme: Theme
) -> tuple[Figure, list[Axes]]:
    """An empty figure with its title, and its axes."""
    from matplotlib.figure import Figure

    width = size[0]
    below = textwrap.wrap(provenance(measured.environment), int(width * 15))
    title = textwrap.wrap(f"{heading} · {measured.environment.get('device') or 'unknown device'}", int(width * 9))
    head = 0.15 + 0.23 * len(title) + 0.17 * len(below)
    height = size[1] + head
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height), w_pad=0.08, h_pad=0.08)
    axes = figure.subplots(-(-panels // across), across, squeeze=False).ravel()
    left, top = 0.12 / width, 1 - 0.1 / height
    figure.text(left, top, "\n".join(title), va="top", fontsize=12, fontweight="bold", color=theme.text)
    top -= 0.23 * len(title) / height
    figure.text(left, top, "\n".join(below), va="top", fontsize=8, color=theme.baseline)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, list(axes[:panels])


def _settings(theme: Theme) -> dict[str, Any]:
    names = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    colours = dict.fromkeys(names, theme.text) | dict.fromkeys(("xtick.color", "ytick.color"), theme.baseline)
    surfaces = dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.background)
    lines = {"axes.edgecolor": theme.baseline, "grid.color": theme.faint, "axes.axisbelow": True}
    spines = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    return {**colours, **surfaces, **lines, **spines}


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the format of the path's suffix; an SVG keeps its text as text."""
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashlane"}):
        figure.savefig(path, format=path.suffix[1:], dpi=110, facecolor=figure.get_facecolor(), metadata=metadata)


def _compared(measured: Measured) -> list[Point]:
    points = [p for p in measured.points if p.speedup]
    if not points:
        raise ValueError(f"{measured.path} has no problem with a checked baseline, so no speed-up to draw")
    return points


def _check_number(path: Path, panels: int) -> None:
    if panels > MOST_PROBLEMS:
        raise ValueError(f"{path} asks for {panels} problems in one picture; at most {MOST_PROBLEMS} fit")


def _of(shown: int, total: int) -> str:
    return f" · fastest {shown} of {total}" if shown < total else ""


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"
