"""Makes the named masks from their names and the parameters that a command line gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashlane.flex.masks import Mask


@dataclass(frozen=True)
class Parameters:
    """The parameters of a named mask. Where one is None, the mask chooses it by the number of tokens."""

    tokens: int
    window: tuple[int, ...] | None = None
    """Keys to the left and right, or the positions of a neighbourhood along each axis."""
    first: int = 0
    """Keys that every later query sees, as StreamingLLM keeps them."""
    lengths: tuple[int, ...] | None = None
    """Tokens of each document, or of each segment of a tree; their sum is ``tokens``."""
    parents: tuple[int, ...] | None = None
    """The parent of each segment of a tree, -1 for a root."""
    block: int | None = None
    """Tokens of a block or of a chunk."""
    prefix: int | None = None
    """Keys that every query sees."""
    grid: tuple[int, ...] | None = None
    """The shape of the grid of tokens of a neighbourhood."""


@dataclass(frozen=True)
class Named:
    """The entry of one mask."""

    summary: str
    takes: tuple[str, ...]
    """The fields of :class:`Parameters` that it takes besides ``tokens``."""
    make: Callable[[Parameters], Mask]


def mask_of(name: str, parameters: Parameters) -> Mask:
    """Make the mask of a name.

    Raises:
        ValueError: there is no mask of that name, it does not take what is given, or the numbers do not fit.
    """
    if name not in NAMED:
        raise ValueError(f"name is {name!r}; it may be {', '.join(NAMED)}")
    named, default = NAMED[name], Parameters(parameters.tokens)
    for field in ("window", "first", "lengths", "parents", "block", "prefix", "grid"):
        if getattr(parameters, field) != getattr(default, field) and field not in named.takes:
            takes = ", ".join(named.takes) or "no parameter"
            raise ValueError(f"{field} is {getattr(parameters, field)}; {name} takes {takes}")
    return named.make(parameters)


def _offsets(parameters: Parameters) -> list[int]:
    lengths = parameters.lengths or _shares(parameters.tokens, (5, 2, 4, 1, 4))
    if sum(lengths) != parameters.tokens or min(lengths) < 1:
        raise ValueError(f"lengths is {lengths}; they are positive, and their sum must be {parameters.tokens}")
    return [0, *itertools.accumulate(lengths)]


def _shares(total: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    """``total`` split in about these proportions; a part that would be 0 is left out."""
    ends = [round(total * end / sum(parts)) for end in itertools.accumulate(parts)]
    return tuple(b - a for a, b in itertools.pairwise([0, *ends]) if b > a)


def _causal(p: Parameters) -> Mask:
    from flashlane.flex import masks

    return masks.causal()


def _window(p: Parameters) -> Mask:
    from flashlane.flex import masks

    window = p.window or (max(1, p.tokens // 5), 0)
    if len(window) > 2:
        raise ValueError(f"window is {window}; it may be one or two numbers: keys to the left and to the right")
    if min(window) < 0:
        raise ValueError(f"window is {window}; keys to the left and to the right are numbers of at least 0")
    left, right = (*window, 0)[:2]
    return masks.sliding_window(left, right, p.first)


def _documents(causal: bool) -> Callable[[Parameters], Mask]:
    def make(p: Parameters) -> Mask:
        import torch

        from flashlane.flex import masks

        return masks.documents(torch.tensor(_offsets(p)), causal)

    return make


def _block_causal_documents(p: Parameters) -> Mask:
    import torch

    from flashlane.flex import masks

    return masks.block_causal_documents(torch.tensor(_offsets(p)), p.block or max(1, p.tokens // 16))


def _prefix_lm(p: Parameters) -> Mask:
    from flashlane.flex import masks

    return masks.prefix_lm(p.tokens // 3 if p.prefix is None else p.prefix)


def _chunks(causal: bool) -> Callable[[Parameters], Mask]:
    def make(p: Parameters) -> Mask:
        from flashlane.flex import masks

        return masks.chunks(p.block or max(1, p.tokens // 4), causal)

    return make


def _prefix_tree(p: Parameters) -> Mask:
    from flashlane.flex import masks

    if (p.parents is None) != (p.lengths is None):
        raise ValueError("parents and lengths go together: a tree's segments have both")
    lengths = p.lengths or _shares(p.tokens, (3, 2, 3, 3, 2, 3))
    parents = p.parents or (-1, 0, 1, 1, 0, 4)[: len(lengths)]  # few tokens have the first segments, a tree as well
    if sum(lengths) != p.tokens:
        raise ValueError(f"lengths is {lengths}; their sum must be {p.tokens}")
    return masks.prefix_tree(parents, lengths)


def _block_diffusion(p: Parameters) -> Mask:
    from flashlane.flex import masks

    if p.tokens % 2:
        raise ValueError(f"tokens is {p.tokens}; block diffusion has each token twice, noised and clean")
    return masks.block_diffusion(p.tokens // 2, p.block or max(1, p.tokens // 16))


def _neighbourhood(axes: int) -> Callable[[Parameters], Mask]:
    def make(p: Parameters) -> Mask:
        from flashlane.flex import masks

        grid = p.grid or _grid(p.tokens, axes)
        window = p.window or tuple(max(1, n // 2) for n in grid)
        if len(grid) != axes:
            raise ValueError(f"grid is {grid}; it must have {axes} numbers")
        if min(grid) < 1:
            raise ValueError(f"grid is {grid}; its numbers must be at least 1")
        product = 1
        for n in grid:
            product *= n
        if product != p.tokens:
            raise ValueError(f"grid is {grid}, which are {product} tokens; there are {p.tokens}")
        if len(window) != axes or any(not 1 <= w <= n for w, n in zip(window, grid)):
            of_grid = ",".join(map(str, grid))
            raise ValueError(f"window is {window}; for each axis of grid {of_grid} it has a number, 1 to the axis's")
        return masks.neighbourhood(grid, window)

    return make


def _grid(tokens: int, axes: int) -> tuple[int, ...]:
    """Factors of ``tokens``, one for each axis, of about equal size."""
    found: list[int] = []
    for left in range(axes, 1, -1):
        side = max(n for n in range(1, int(tokens ** (1 / left) + 1e-9) + 1) if tokens % n == 0)
        found.append(side)
        tokens //= side
    return (*found, tokens)


NAMED: dict[str, Named] = {
    "causal": Named("a token sees itself and all before it", (), _causal),
    "sliding-window": Named("the last tokens, and the first ones", ("window", "first"), _window),
    "documents": Named("packed documents, each sees itself", ("lengths",), _documents(False)),
    "causal-documents": Named("packed documents, causal in each", ("lengths",), _documents(True)),
    "block-causal-documents": Named(
        "packed documents, causal by blocks of tokens", ("lengths", "block"), _block_causal_documents
    ),
    "prefix-lm": Named("a prefix that all see, then causal", ("prefix",), _prefix_lm),
    "chunks": Named("chunks of equal size, each sees itself", ("block",), _chunks(False)),
    "causal-chunks": Named("chunks of equal size, causal in each", ("block",), _chunks(True)),
    "prefix-tree": Named("sequences that share prefixes: a tree, depth first", ("parents", "lengths"), _prefix_tree),
    "block-diffusion": Named("noised tokens in blocks, then clean ones", ("block",), _block_diffusion),
    "neighbourhood-1d": Named("NATTEN's neighbourhood in a line", ("grid", "window"), _neighbourhood(1)),
    "neighbourhood-2d": Named("NATTEN's neighbourhood in a picture", ("grid", "window"), _neighbourhood(2)),
    "neighbourhood-3d": Named("NATTEN's neighbourhood in a video", ("grid", "window"), _neighbourhood(3)),
}
