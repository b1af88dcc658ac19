"""The roofline picture: each timed row by its operations a byte and its rate, under the ceilings of the device."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashlane.bench.measure.device_rates import DeviceRates, Placed
from flashlane.bench.present.figure_frame import LIGHT, Theme, new_figure, themed
from flashlane.bench.present.styles import MOST_LINES, Styles, styles_of_tags

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@themed
def roofline_figure(
    points: Sequence[Placed],
    ceilings: DeviceRates,
    environment: dict[str, Any],
    *,
    styles: Styles | None = None,
    kernels: Sequence[str] | None = None,
    width: float = 8.4,
    theme: Theme = LIGHT,
) -> Figure:
    """A panel for each dtype, both axes logarithmic.

    Args:
        points: at least one.
        ceilings: with a matrix rate of each point's dtype.
        environment: of the results, for the title.
        styles: of all tags, where other pictures share them; else by how near each tag comes to the ceilings.
        kernels: those with a marker of their own; else the first few of the styles.
        width: inches.
    """
    dtypes = list(dict.fromkeys(p.dtype for p in points))
    styles = styles or _styles(points)
    shown = styles.kernels[:MOST_LINES] if kernels is None else kernels
    figure, axes = new_figure(environment, "Roofline", len(dtypes), 1, (width, 4.8 * len(dtypes)), theme)
    for axis, dtype in zip(axes, dtypes):
        _panel(axis, [p for p in points if p.dtype == dtype], ceilings, dtype, styles, shown, theme)
    return figure


def _styles(points: Sequence[Placed]) -> Styles:
    """The tags that come nearest to the ceilings first."""
    order = [p.tag for p in sorted(points, key=lambda p: -p.share)]
    peers = {p.tag for p in points if p.kind != "kernel"}
    return styles_of_tags([tag for tag in order if tag not in peers], [tag for tag in order if tag in peers])


def _panel(
    axis: Axes,
    points: list[Placed],
    ceilings: DeviceRates,
    dtype: str,
    styles: Styles,
    kernels: Sequence[str],
    theme: Theme,
) -> None:
    seen = [p.intensity for p in points] + [ceilings.matrix[dtype] / (ceilings.copy * 1e-3)]
    low, high = min(seen) / 3, max(seen) * 3  # both sides of the ridge
    xs = [low * (high / low) ** (step / 200) for step in range(201)]
    axis.plot(xs, [ceilings.attainable(x, dtype) for x in xs], color=theme.ceiling, linewidth=1.6, zorder=2)
    label = f"copy {ceilings.copy / 1000:.3g} TB/s, then matrix product {ceilings.matrix[dtype]:.3g} TFLOP/s"
    if dtype in ceilings.mma:
        ys = [ceilings.attainable(x, dtype, "mma(") for x in xs]
        axis.plot(xs, ys, color=theme.ceiling, linewidth=1.1, linestyle="--", zorder=2)
        label += f"; dashed: mma.sync {ceilings.mma[dtype]:.3g}"
    here = {p.tag for p in points}
    legend_tags = [tag for tag in (*kernels, *styles.peers) if tag in here]
    rest = [p for p in points if p.tag not in legend_tags]
    if rest:
        label_rest = f"{len({p.tag for p in rest})} further kernels"
        dots = {"color": theme.peer, "marker": ".", "linestyle": "none", "markersize": 3, "zorder": 2}
        axis.plot([p.intensity for p in rest], [p.tflops for p in rest], label=label_rest, **dots)
    for tag in legend_tags:
        members = [p for p in points if p.tag == tag]
        style = styles.point(tag, theme) | {"linestyle": "none", "zorder": 3}
        axis.plot([p.intensity for p in members], [p.tflops for p in members], label=tag, **style)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("operations a byte (each input read once, each output written once)")
    axis.set_ylabel("TFLOP/s")
    wide = int(axis.figure.get_size_inches()[0] * 11)
    axis.set_title("\n".join(textwrap.wrap(f"{dtype}: {label}", wide)), fontsize=9.5, loc="left")
    axis.grid(which="major")
    axis.legend(loc="lower right", fontsize=7.5, frameon=False)
