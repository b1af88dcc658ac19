"""No letter of a picture lies outside it, however long the tags and the headings are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flashlane.bench.measure.device_rates import DeviceRates, Placed
from flashlane.bench.present import figure_frame, plots
from flashlane.bench.present.points import Measured, Point
from flashlane.bench.present.roofline import roofline_figure
from flashlane.inspect import layout_view
from flashlane.kernels.tile_layout import Tile, schemes

pytest.importorskip("matplotlib")

LONG = "mma(split-q+tiling-qkv+acc-f32+persist-q+swizzle-qkv+store-shared+stage2)"
ENVIRONMENT = {
    "device": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "torch": "2.99.1+cu130",
    "cuda": "13.7",
    "cudnn": "91900",
    "triton": "3.6.0",
    "driver": "600.100.04",
    "commit": "abcdef012345",
    "date": "2026-01-02T03:04:05+00:00",
}


@pytest.fixture
def measured() -> Measured:
    points = []
    for n, heads in ((512, "8"), (1024, "64/8"), (16384, "16")):
        variant = "bf16 causal, window 512,0, forward and backward, graph replay"
        for tag, rate in ((LONG, 5.0), ("(flash-attn-4)", 9.0), ("k", 7.0)):
            name = f"B2 H{heads} N{n} D128 {variant}"
            sizes = (2, heads, n, n, "128", variant, n << 12, 99.0 + n)
            points.append(Point(name, tag, tag[0] != "(", rate, rate / 9, *sizes))
    return Measured(Path("x.json"), ENVIRONMENT, tuple(points))


def outside(figure) -> list[str]:
    """Texts that are shown and do not lie within the figure (one pixel is granted).

    Numbers are left out: ticks beyond an axis are there and not drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    texts = []
    for text in figure.findobj(Text):
        hidden = text.axes is not None and not text.axes.get_visible()
        if (
            re.fullmatch(r"[\d.]*|\$.*\$", text.get_text())
            or not text.get_visible()
            or hidden
            or not text.get_in_layout()
        ):
            continue
        box = text.get_window_extent()
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        texts += [] if inside else [text.get_text()]
    return texts


@pytest.mark.parametrize("kind", ["throughput", "memory", "speedup", "heatmap"])
def test_plots(measured, kind):
    assert outside(getattr(plots, f"{kind}_figure")(measured)) == []


@pytest.mark.parametrize("unit", [1.0, 2.6e-5, 1.3e4], ids=["a GPU's rates", "a CPU's rates", "large rates"])
def test_panels_and_the_legend_of_the_report(measured, unit):
    points = tuple(replace(point, tflops=point.tflops * unit) for point in measured.points)
    lines = plots.throughput_lines(replace(measured, points=points), ceilings={"bf16 mma.sync": 6.0 * unit})
    for title in lines.panels:
        assert outside(plots.panel_figure(lines, title)) == []
    assert outside(plots.legend_figure(lines.tags, lines.styles, theme=figure_frame.DARK)) == []


@pytest.mark.parametrize("width", [plots.PANEL[0], 8.4])
def test_roofline(measured, width):
    places = [Placed(p.problem, p.tag, "kernel", "bf16", p.intensity, p.tflops, 36.0, 175.0) for p in measured.points]
    rates = DeviceRates(4023.7, {"bf16": 723.4}, {"bf16": 586.1})
    assert outside(roofline_figure(places, rates, ENVIRONMENT, width=width)) == []


@pytest.mark.parametrize("columns", [64, 128])
def test_layout(columns):
    tiles = [Tile(schemes(columns)[0], operand="Q K V")]
    figure = layout_view.layout_figure(tiles, heading=f"{LONG} · B1 H8 N8192 D{columns} bf16 causal · sm_90a")
    assert outside(figure) == []
