"""One colour and one marker for a tag, in every picture of a page or of a command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flashlane.bench.present.figure_frame import Theme
from flashlane.bench.present.points import Measured, fastest_tags

MARKERS = "osD^vPX<>*"
DASHES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (2, 1)))
MOST_LINES = 5
"""Kernels that a picture of lines or of points draws without being asked for more."""


@dataclass(frozen=True)
class Styles:
    """Tags in the order of their styles. Sixty kernels differ in colour or marker; peers are grey and hollow."""

    kernels: tuple[str, ...]
    peers: tuple[str, ...]

    def colour(self, tag: str, theme: Theme) -> str:
        """The colour of a tag's lines, points and bars."""
        return theme.peer if tag in self.peers else theme.lines[self.kernels.index(tag) % len(theme.lines)]

    def point(self, tag: str, theme: Theme) -> dict[str, Any]:
        """Matplotlib's keywords of a tag's markers."""
        if tag in self.peers:
            index, inside = self.peers.index(tag), theme.background
        else:
            index, inside = self.kernels.index(tag), self.colour(tag, theme)
            index += index // 30  # six colours and ten markers: the second thirty pairs differ from the first
        marker = MARKERS[index % len(MARKERS)]
        return {"color": self.colour(tag, theme), "marker": marker, "markerfacecolor": inside, "markersize": 5.5}

    def line(self, tag: str, theme: Theme) -> dict[str, Any]:
        """Matplotlib's keywords of a tag's line."""
        if tag in self.peers:
            dash = DASHES[self.peers.index(tag) % len(DASHES)]
            return self.point(tag, theme) | {"linestyle": dash, "linewidth": 1.4, "zorder": 2}
        return self.point(tag, theme) | {"linestyle": "-", "linewidth": 1.8, "zorder": 3}


def styles_of(files: Iterable[Measured]) -> Styles:
    """The styles of all tags of some results files, which every picture of them shares.

    The kernels that a picture of one file draws come first, so that they differ most.
    """
    files = list(files)
    points = [point for measured in files for point in measured.points]
    drawn = [tag for measured in files for tag in fastest_tags(measured.points, MOST_LINES)]
    peers = dict.fromkeys(p.tag for p in points if not p.ours)
    return styles_of_tags([*drawn, *fastest_tags(points, len(points))], list(peers))


def styles_of_tags(kernels: Sequence[str], peers: Sequence[str]) -> Styles:
    """The styles of tags in this order."""
    return Styles(tuple(dict.fromkeys(kernels)), tuple(dict.fromkeys(peers)))
