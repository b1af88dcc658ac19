"""The picture of ``flashlane e2e``: how many times as fast as the default each attention makes each model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlane.bench.present.figure_frame import LIGHT, Theme, new_figure, themed
from flashlane.core.files import parse_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, DEFAULT = "flashlane", "default"


@themed
def e2e_figure(rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any], *, theme: Theme = LIGHT) -> Figure:
    """Bars of every workload, the default's first.

    Args:
        rows: of the results of :class:`flashlane.bench.suites.e2e.E2ESuite`; those without a time are left out.
        environment: of the results, for the title.

    Raises:
        ValueError: no row has a time.
    """
    workloads: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if isinstance(row["ms"], float) and isinstance(row["speedup"], float):
            workloads[row["workload"]].append(row)
    if not workloads:
        raise ValueError("no workload has a time: there is nothing to draw")
    lines = [(name, row) for name, members in workloads.items() for row in members]
    places, at = [], 0.0
    for number, (name, _) in enumerate(lines):
        at += 0.0 if not number else 1.0 if name == lines[number - 1][0] else 1.6
        places.append(at)
    size = (8.4, 0.7 + 0.23 * (at + 1))
    figure, (axis,) = new_figure(dict(environment), "Whole models, attention swapped by name", 1, 1, size, theme)
    colours = {OURS: theme.lines[0], DEFAULT: theme.faint}
    widths = [row["speedup"] for _, row in lines]
    axis.barh(places, widths, color=[colours.get(row["attention"], theme.peer) for _, row in lines], height=0.8)
    for place, width, (_, row) in zip(places, widths, lines, strict=True):
        label = f"{width:.2f}×  {_duration(row['ms'])}"
        offset = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(label, (max(1.0, width), place), fontsize=7.5, **offset)  # right of the line at 1
    axis.axvline(1.0, color=theme.ceiling, linewidth=1.1, linestyle="--", zorder=3)
    axis.set_yticks(places, [f"{name} · {row['attention']}" for name, row in lines], fontsize=8)
    for tick, (_, row) in zip(axis.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("bold" if row["attention"] == OURS else "normal")
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(1.0, *widths))
    axis.set_xlabel("× the library's default attention", fontsize=8)
    return figure


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1e3 else f"{milliseconds:.3g} ms"


def figure_of(path: Path) -> Figure:
    """The picture of a results file of the suite."""
    body = parse_json(path.read_text(encoding="utf-8"))
    return e2e_figure(body["rows"], body["environment"])
