"""What all pictures share: themes, the frame with what a figure was measured with, files."""

from __future__ import annotations

import functools
import io
import os
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlane.core.files import refusal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colours of a picture. Lines use Okabe and Ito's palette, which colour-blind readers tell apart (2008)."""

    background: str
    text: str
    faint: str
    peer: str
    ceiling: str
    lines: tuple[str, ...]
    ratio: tuple[str, str, str]
    """Slower than the best peer, as fast, faster."""


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


def themed(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A drawing function all of whose text and lines have the colours of its keyword ``theme``.

    A notebook shows its figure by itself, without a backend of pyplot.
    """

    @functools.wraps(draw)
    def inside(*args: Any, theme: Theme = LIGHT, **keywords: Any) -> Figure:
        from matplotlib import rc_context

        with rc_context(theme_settings(theme)):
            figure = draw(*args, theme=theme, **keywords)
        figure._repr_png_ = functools.partial(_png, figure)
        return figure

    return inside


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


def new_figure(
    environment: dict[str, Any], heading: str, panels: int, across: int, size: tuple[float, float], theme: Theme
) -> tuple[Figure, list[Axes]]:
    """An empty figure with its title, and its axes."""
    from matplotlib.figure import Figure

    width = size[0]
    below = textwrap.wrap(provenance(environment), int(width * 15))
    title = textwrap.wrap(f"{heading} · {environment.get('device') or 'unknown device'}", int(width * 9))
    head = 0.15 + 0.23 * len(title) + 0.17 * len(below)
    height = size[1] + head
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height), w_pad=0.08, h_pad=0.08)
    axes = figure.subplots(-(-panels // across), across, squeeze=False).ravel()
    left, top = 0.12 / width, 1 - 0.1 / height
    figure.text(left, top, "\n".join(title), va="top", fontsize=12, fontweight="bold", color=theme.text)
    top -= 0.23 * len(title) / height
    figure.text(left, top, "\n".join(below), va="top", fontsize=8, color=theme.peer)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, list(axes[:panels])


def theme_settings(theme: Theme) -> dict[str, Any]:
    """Matplotlib's settings of a theme."""
    names = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    colours = dict.fromkeys(names, theme.text) | dict.fromkeys(("xtick.color", "ytick.color"), theme.peer)
    surfaces = dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.background)
    lines = {"axes.edgecolor": theme.peer, "grid.color": theme.faint, "axes.axisbelow": True}
    spines = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    return {**colours, **surfaces, **lines, **spines}


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the format of the path's suffix; an SVG keeps its text as text."""
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashlane"}):
        figure.savefig(path, format=path.suffix[1:], dpi=110, facecolor=figure.get_facecolor(), metadata=metadata)


def _png(figure: Figure) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110, facecolor=figure.get_facecolor())
    return target.getvalue()


def replace(figure: Figure, path: Path) -> None:
    """:func:`save` next to the place and move over it, so that no half picture is ever there.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        save(figure, Path(scratch) / path.name)
        os.replace(Path(scratch) / path.name, path)


def write(figure: Figure, path: Path) -> None:
    """:func:`replace` a picture that an option names.

    Raises:
        NotWritten: there is no room for it; the message names it.
        ValueError: it cannot be written for another reason.
    """
    try:
        replace(figure, path)
    except OSError as error:
        raise refusal(error, f"{path} cannot be written") from error
