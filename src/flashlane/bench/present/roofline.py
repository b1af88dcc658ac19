"""The roofline picture: each timed row by its operations a byte and its rate, under the ceilings of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashlane.bench.measure.device_rates import DeviceRates, Placed
from flashlane.bench.present.figure_frame import LIGHT, Theme, new_figure, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX<>*"
MOST = 8
"""Tags with a marker of their own, those that come highest; the others share one."""


@themed
def roofline_figure(
    points: Sequence[Placed], ceilings: DeviceRates, environment: dict[str, Any], *, theme: Theme = LIGHT
) -> Figure:
    """A panel for each dtype, both axes logarithmic.

    Args:
        points: at least one.
        ceilings: with a matrix rate of each point's dtype.
        environment: of the results, for the title.
    """
    dtypes = list(dict.fromkeys(p.dtype for p in points))
    figure, axes = new_figure(environment, "Roofline", len(dtypes), 1, (8.4, 4.8 * len(dtypes)), theme)
    for axis, dtype in zip(axes, dtypes):
        _panel(axis, [p for p in points if p.dtype == dtype], ceilings, dtype, theme)
    return figure


def _panel(axis: Axes, points: list[Placed], ceilings: DeviceRates, dtype: str, theme: Theme) -> None:
    seen = [p.intensity for p in points] + [ceilings.matrix[dtype] / (ceilings.copy * 1e-3)]
    low, high = min(seen) / 3, max(seen) * 3  # both sides of the ridge
    xs = [low * (high / low) ** (step / 200) for step in range(201)]
    axis.plot(xs, [ceilings.attainable(x, dtype) for x in xs], color=theme.ceiling, linewidth=1.6, zorder=2)
    label = f"copy {ceilings.copy / 1000:.3g} TB/s, then matrix product {ceilings.matrix[dtype]:.3g} TFLOP/s"
    if dtype in ceilings.mma:
        ys = [ceilings.attainable(x, dtype, "mma(") for x in xs]
        axis.plot(xs, ys, color=theme.ceiling, linewidth=1.1, linestyle="--", zorder=2)
        label += f"; dashed: mma.sync {ceilings.mma[dtype]:.3g}"
    best = sorted({p.tag for p in points}, key=lambda tag: -max(p.share for p in points if p.tag == tag))
    for index, tag in enumerate(best):
        members = [p for p in points if p.tag == tag]
        ours = members[0].kind == "kernel"
        shown = index < MOST
        style = {"color": theme.lines[index % len(theme.lines)] if ours and shown else theme.peer}
        style |= {"marker": MARKERS[index % len(MARKERS)] if shown else ".", "linestyle": "none", "markersize": 6}
        style |= {"markerfacecolor": style["color"] if ours else theme.background, "zorder": 3}
        more = f"{len(best) - MOST} further tags" if index == MOST else "_" if not shown else tag
        axis.plot([p.intensity for p in members], [p.tflops for p in members], label=more, **style)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("operations a byte (each input read once, each output written once)")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{dtype}: {label}", fontsize=9.5, loc="left")
    axis.grid(which="major")
    axis.legend(loc="lower right", fontsize=7.5, frameon=False)
