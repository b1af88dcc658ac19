"""Draw README's chart: the Hopper kernels' speed over the fastest peer of each drawn problem of a judging seed, sorted.

    python benchmarks/scripts/peers_chart.py           # writes docs/images/speed-over-peers.svg
    python benchmarks/scripts/peers_chart.py --check   # exit 1 when the picture is not of the committed results

The data are the files of drawn.py in benchmarks/results: one point a dense problem, a panel for each direction
and protocol. The picture holds a digest of its data, so that ``--check`` does not depend on the version of matplotlib.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from picture_digest import digest, status_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "speed-over-peers.svg"
AHEAD, BEHIND, INK = "#2a6fb0", "#d1603d", "#333333"


LOW, HIGH = 0.88, 2.0
"""The least span of the ratios' axis; ratios beyond it widen it."""
TICKS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 1.8, 2.5, 3.5, 5.0, 8.0)
COLUMNS = 4


def draw(panels: dict[str, list[float]], target: Path) -> None:
    """Write an SVG with a panel for each title: its ratios, sorted."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    style = {"svg.hashsalt": "flashlane", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    style |= {"text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with plt.rc_context(style):
        columns = min(COLUMNS, len(panels))
        lines = -(-len(panels) // columns)
        size = (max(4.6, 9.2 / 3 * columns), 3.0 * lines)
        figure, axes = plt.subplots(
            lines, columns, figsize=size, sharey=True, layout="constrained", squeeze=False
        )  # fmt: skip
        every = [value for values in panels.values() for value in values]
        low, high = min(LOW, 0.98 * min(every)), max(HIGH, 1.02 * max(every))
        ticks = [tick for tick in TICKS if low <= tick <= high]
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (title, values) in zip(axes.flat, panels.items()):
            mean = math.exp(sum(map(math.log, values)) / len(values))
            ahead = sum(value > 1 for value in values)
            colours = [AHEAD if value > 1 else BEHIND for value in values]
            axis.axhline(1, color=INK, linewidth=0.8)
            axis.vlines(range(1, len(values) + 1), 1, values, color=colours, linewidth=1.2, alpha=0.5)
            axis.scatter(range(1, len(values) + 1), values, c=colours, s=11, zorder=3)
            axis.set_title(f"{title}\nahead in {ahead} of {len(values)}, geometric mean {mean:.2f}", fontsize=9)
            axis.set_xlabel("problems, sorted")
            axis.set_yscale("log")
            axis.set_ylim(low, high)
            axis.yaxis.set_major_locator(FixedLocator(ticks))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.set_yticklabels([f"{tick:.1f}×" for tick in ticks])
            axis.set_xticks([])
            axis.spines[["top", "right"]].set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel("speed over the fastest peer")
        figure.savefig(target, format="svg", facecolor="white", metadata={"Date": None, "Description": digest(panels)})
        plt.close(figure)
    text = target.read_text(encoding="utf-8")
    target.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 when the picture is out of date")
    check = parser.parse_args().check
    from drawn_tables import dense_panels  # which draws with this module

    panels = dict(dense_panels(RESULTS))
    if not check:
        draw(panels, PICTURE)
        return 0
    return status_of(PICTURE, panels, "peers_chart.py")


if __name__ == "__main__":
    sys.exit(main())
