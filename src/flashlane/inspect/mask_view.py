"""Masks as pictures: in a terminal, and as PNG."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlane.core.files import write_named

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

    from flashlane.flex.masks import Mask

MOST_CELLS = 72
"""The most cells of a line, which with a margin fits 80 columns."""
SHADES = " ░▒▓█"
MOST_DENSE = 4096
"""The most tokens of a mask whose pairs are all evaluated."""


def dense(mask: Mask, tokens: int) -> torch.Tensor:
    """Which pairs a mask makes visible, bool ``(queries, keys)``.

    Raises:
        ValueError: ``tokens`` is below 1 or above :data:`MOST_DENSE`.
    """
    import torch

    from flashlane.flex.bind import bind
    from flashlane.flex.evaluate import evaluate

    if not 1 <= tokens <= MOST_DENSE:
        raise ValueError(f"tokens is {tokens}; a picture may have 1 to {MOST_DENSE}")
    program, arguments = bind(None, mask.function, torch.device("cpu"))
    if program.mask is None:
        return torch.ones(tokens, tokens, dtype=torch.bool)
    index, zero = torch.arange(tokens, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
    places = {"b": zero, "h": zero, "q": index.view(-1, 1), "kv": index}
    return evaluate([program.mask], places, arguments.tensors, arguments.integers)[0].expand(tokens, tokens)


def lines_of(pairs: torch.Tensor) -> list[str]:
    """A mask as lines of characters.

    Up to :data:`MOST_CELLS` tokens every pair is drawn, two queries in a line. With more tokens a cell stands for
    several pairs, and its shade is the share of them that is visible.
    """
    tokens = pairs.shape[0]
    if tokens <= MOST_CELLS:
        rows = [*pairs.tolist(), [False] * tokens]
        return [
            "".join(" ▄▀█"[2 * upper + lower] for upper, lower in zip(rows[i], rows[i + 1], strict=True)).rstrip()
            for i in range(0, tokens, 2)
        ]
    shares = _shares(_shares(pairs.double(), 0, MOST_CELLS // 2), 1, MOST_CELLS)
    top = len(SHADES) - 1

    def shade(share: float) -> str:
        return SHADES[top if share == 1 else 0 if share == 0 else min(top - 1, 1 + int(share * (top - 1)))]

    return ["".join(map(shade, row)).rstrip() for row in shares.tolist()]


def _shares(pairs: torch.Tensor, axis: int, cells: int) -> torch.Tensor:
    """The means over ``cells`` nearly equal parts of an axis."""
    import torch

    n = pairs.shape[axis]
    ends = [round(n * i / cells) for i in range(cells + 1)]
    parts = [pairs.narrow(axis, a, max(1, b - a)).mean(axis) for a, b in itertools.pairwise(ends)]
    return torch.stack(parts, axis)


def facts(mask: Mask, tokens: int, block: int) -> dict[str, Any]:
    """Figures of a mask's block lists: the blocks of each state, and the intervals of a row, or of a key.

    ``intervals`` is None where there are none, and ``intervals_of`` says of what they are.
    """
    import torch

    from flashlane.flex import blocks
    from flashlane.flex.block_mask import create_block_mask

    found = create_block_mask(mask, None, None, tokens, tokens, "cpu", BLOCK_SIZE=block)
    table = blocks.states(found)
    intervals = mask.intervals(tokens, tokens, torch.device("cpu"))
    return {
        "mask": mask.name,
        "tokens": tokens,
        "block": block,
        "full": int((table == blocks.FULL).sum()),
        "partial": int((table == blocks.PARTIAL).sum()),
        "hidden": int((table == blocks.HIDDEN).sum()),
        "intervals": None if intervals is None else intervals.starts.shape[2],
        "intervals_of": "key" if intervals is not None and intervals.of_keys else "row",
    }


def save_png(pictures: Sequence[tuple[str, Mask, int]], path: Path, block: int) -> None:
    """Draw masks, each with a heading and its number of tokens, as panels of one picture; blocks have a grid.

    Raises:
        ImportError: matplotlib is not installed.
        NotWritten: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise ImportError('a PNG needs matplotlib: pip install "flashlane[plots]"') from error
    across = min(4, len(pictures))
    down = -(-len(pictures) // across)
    size = 2.6 if len(pictures) > 1 else 5.0
    figure = Figure(figsize=(across * size, down * (size + 0.35)), facecolor="white", layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis, (heading, mask, tokens) in zip(axes, pictures, strict=False):
        _draw(axis, heading, dense(mask, tokens), block)
    for axis in axes[len(pictures) :]:
        axis.set_visible(False)
    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    Image.open(picture).convert("RGB").quantize(32).save(small, format="PNG", optimize=True)
    write_named(path, small.getvalue(), "--png")


def _draw(axis: Axes, heading: str, pairs: torch.Tensor, block: int) -> None:
    from matplotlib.colors import ListedColormap

    tokens = pairs.shape[0]
    axis.imshow(pairs.numpy(), cmap=ListedColormap(["#f3f3f3", "#0072b2"]), vmin=0, vmax=1, interpolation="nearest")
    for line in range(block, tokens, block) if tokens / block <= 32 else ():
        axis.axhline(line - 0.5, color="white", linewidth=0.5)
        axis.axvline(line - 0.5, color="white", linewidth=0.5)
    axis.set_title(heading, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("keys", fontsize=8)
    axis.set_ylabel("queries", fontsize=8)
