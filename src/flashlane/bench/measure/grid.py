"""Sizes as they are written on the command line, and the grid of problems that they span."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flashlane.bench.measure.defaults import PAGE
from flashlane.bench.measure.sizes import of_list
from flashlane.core.problem import ALIGNMENTS, DTYPE_NAMES, DTYPES, MAX_HEAD_DIM, Alignment, AttentionProblem
from flashlane.core.suggestions import suggest
from flashlane.core.validate import check_flag, whole_number
from flashlane.kernels.features import PAGED

BASELINE_SHAPES = ((1, 8, 8192, 64), (2, 2, 4096, 64), (2, 2, 4096, 128), (4, 8, 2048, 128), (1, 1, 1024, 64))
"""(batch, heads, seqlen, head_dim) of the baseline grid, which is the default on a GPU."""
Layout = Literal["dense", "packed", "cache", "paged"]
LAYOUTS: tuple[Layout, ...] = ("dense", "packed", "cache", "paged")
CPU_SHAPES = ((1, 4, 512, 64),)
"""The default without a GPU, so small that every implementation takes a few seconds at most."""
DTYPE_ALIASES = {
    **DTYPES,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
}
_WINDOW = re.compile(r"^(-1|\d+),(-1|\d+)$")


def parse_dtypes(text: str, name: str = "--dtype") -> tuple[torch.dtype, ...]:
    """Element types from a comma list of f16, bf16, f32, f64 (or torch's names for them).

    Raises:
        ValueError: a word is none of them; the message has ``name``.
    """
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in DTYPE_ALIASES:
            raise ValueError(f"{name} has {word!r}{of_list(word, text)}; it may be a list of {', '.join(DTYPES)}")
    return tuple(dict.fromkeys(DTYPE_ALIASES[word] for word in words))


def parse_names(text: str, name: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Names from a comma list.

    Raises:
        ValueError: one is not in ``allowed``; the message has ``name``, and the nearest names that are.
    """
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in names:
        if word not in allowed:
            raise ValueError(
                f"{name} has {word!r}{of_list(word, text)}, which is unknown; {suggest(word, tuple(allowed))}"
            )
    return names


def parse_window(text: str) -> tuple[int, int]:
    """Keys visible to the left and to the right of a query's position, from ``LEFT,RIGHT``; -1 is all.

    Raises:
        ValueError: it is not of that form; the message names ``--window``.
    """
    match = _WINDOW.match(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"--window is {text!r}; it may be LEFT,RIGHT, each -1 (all) or a number of keys: 512,0")
    return int(match[1]), int(match[2])


def size(name: str, value: int, low: int = 1) -> int:
    """A size that an argument gives.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than ``low``. The message has ``name``.
    """
    number = whole_number(value)
    if type(number) is not int:
        raise TypeError(f"{name} is {value!r}; it must be a whole number of at least {low}")
    if number < low:
        raise ValueError(f"{name} is {number}; it must be at least {low}")
    return number


def make_problem(
    batch: int,
    heads: int,
    seqlen_q: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    *,
    kv_heads: int | None = None,
    seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    alignment: Alignment = "bottom-right",
    scale: float | None = None,
    layout: Layout = "dense",
    page: int = 0,
    deterministic: bool = False,
    arch: str | None = None,
) -> AttentionProblem:
    """The problem of contiguous tensors of these sizes.

    ``layout`` says how sequences lie: ``dense`` (all of one length), ``packed`` (one after another; the sizes are those
    of the longest), ``cache`` (a key/value cache with rows in use) or ``paged`` (such a cache in pages of ``page``
    rows). The lengths themselves belong to a :class:`~flashlane.bench.measure.inputs.Case`.

    Raises:
        TypeError: a size is no whole number, ``causal`` no yes or no, or ``dtype`` none that attention is computed of.
        ValueError: a size or the alignment is not possible. The message names it.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    dim_v = head_dim if head_dim_v is None else head_dim_v
    batch, heads, kv_heads = size("batch", batch), size("heads", heads), size("kv_heads", kv_heads)
    seqlen_q, seqlen_k = size("seqlen_q", seqlen_q, 0), size("seqlen_k", seqlen_k, 0)
    head_dim, dim_v = size("head_dim", head_dim), size("head_dim_v", dim_v)
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"dtype is {dtype!r}; it may be one of {', '.join(map(str, DTYPE_NAMES))}")
    causal = check_flag("causal", causal)
    for name, dim in (("head_dim", head_dim), ("head_dim_v", dim_v)):
        if dim > MAX_HEAD_DIM:
            raise ValueError(f"{name} is {dim}; it may be 1 to {MAX_HEAD_DIM}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads is {kv_heads}, which does not divide heads {heads}; heads must be a multiple of it")
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment is {alignment!r}; it may be one of {', '.join(map(repr, ALIGNMENTS))}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it may be one of {', '.join(map(repr, LAYOUTS))}")
    if page and layout != "paged":
        raise ValueError(f"page is {page} and layout {layout!r}; only layout 'paged' has pages")
    if layout == "paged" and (page < 1 or seqlen_k % page):
        raise ValueError(f"page is {page}; with layout 'paged' it must divide seqlen_k {seqlen_k}")
    return AttentionProblem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=dim_v,
        dtype=dtype,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window_left=window[0],
        window_right=0 if causal else window[1],
        alignment=alignment,
        varlen=layout == "packed",
        seqused_k=layout in ("cache", "paged"),
        deterministic=deterministic,
        arch=arch,
        **dict.fromkeys(PAGED, page),
        aligned=all((dim * dtype.itemsize) % 16 == 0 for dim in (head_dim, dim_v)),
    )


def problems(
    *,
    batch: int | Sequence[int] = 1,
    heads: int | Sequence[int] = 8,
    seqlen: int | Sequence[int] = 1024,
    head_dim: int | Sequence[int] = 64,
    kv_heads: int | Sequence[int] | None = None,
    seqlen_k: int | Sequence[int] | None = None,
    dtype: str | torch.dtype | Sequence[str | torch.dtype] = "f16",
    causal: bool | Sequence[bool] = False,
) -> list[AttentionProblem]:
    """The problems of every combination of sizes, for :func:`flashlane.bench.run`; each size is one number or several.

    ``dtype`` is f16, bf16, f32, f64 or one of torch's dtypes; ``kv_heads`` and ``seqlen_k`` default to those of the
    queries.

    Raises:
        TypeError: a size is no whole number, ``causal`` no yes or no, or ``dtype`` none that attention is computed of.
        ValueError: a size is not possible, or a dtype is unknown. The message names the argument.
    """

    def several(value: object) -> tuple:
        return tuple(value) if isinstance(value, list | tuple | range) else (value,)

    def sizes(name: str, value: object, low: int = 1) -> tuple[int | None, ...]:
        as_queries = name in ("kv_heads", "seqlen_k")
        return tuple(None if each is None and as_queries else size(name, each, low) for each in several(value))

    dtypes = tuple(d if isinstance(d, torch.dtype) else parse_dtypes(str(d), "dtype")[0] for d in several(dtype))
    axes: list[tuple] = [sizes("batch", batch), sizes("heads", heads), sizes("seqlen", seqlen, 0)]
    axes += [sizes("head_dim", head_dim), sizes("kv_heads", kv_heads), sizes("seqlen_k", seqlen_k, 0), several(causal)]
    return [
        make_problem(b, h, n, d, kind, kv_heads=hk, seqlen_k=nk, causal=masked)
        for kind in dtypes
        for b, h, n, d, hk, nk, masked in itertools.product(*axes)
    ]


OPTIONS = {"heads": "--H", "kv_heads": "--kv-heads", "seqlen_k": "--seqlen-k", "page": "--page", "layout": "--layout"}
"""What the command line calls sizes that may not go together."""
OPTIONS_READ = re.compile(rf"\b({'|'.join(OPTIONS)})\b(?= (is|'paged'|\d|must))")


@dataclass(frozen=True)
class Grid:
    """The axes of a grid of problems; None takes the value of the shapes, or (of keys and values) of the queries."""

    batch: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    seqlen: tuple[int, ...] | None = None
    head_dim: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    seqlen_k: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float16,)
    causal: tuple[bool, ...] = (False,)
    alignment: Alignment = "bottom-right"
    head_dim_v: tuple[int, ...] | None = None
    layouts: tuple[Layout, ...] = ("dense",)
    pages: tuple[int, ...] = (PAGE,)
    """Rows of a page, for the layout ``paged``."""
    window: tuple[int, int] = (-1, -1)

    def problems(self, arch: str | None, shapes: Sequence[tuple[int, int, int, int]]) -> list[AttentionProblem]:
        """The problems of every combination, for an architecture.

        If no size is given, the sizes are ``shapes``. If some are given, the others are those of the first shape.

        Raises:
            ValueError: sizes do not go together; the message names the options that gave them.
        """
        try:
            return self._problems(arch, shapes)
        except ValueError as error:
            raise ValueError(OPTIONS_READ.sub(lambda found: OPTIONS[found[0]], str(error))) from None

    def _problems(self, arch: str | None, shapes: Sequence[tuple[int, int, int, int]]) -> list[AttentionProblem]:
        given = (self.batch, self.heads, self.seqlen, self.head_dim)
        if any(given):
            given = tuple(sizes or (default,) for sizes, default in zip(given, shapes[0], strict=True))
            shapes = list(itertools.product(*given))
        return [
            make_problem(
                *shape,
                dtype,
                kv_heads=kv_heads,
                seqlen_k=seqlen_k,
                causal=causal,
                alignment=self.alignment,
                head_dim_v=head_dim_v,
                window=self.window,
                layout=layout,
                page=page,
                arch=arch,
            )
            for layout in self.layouts
            for page in (self.pages if layout == "paged" else (0,))
            for dtype in self.dtypes
            for causal in self.causal
            for shape in shapes
            for kv_heads in (self.kv_heads or (None,))
            for seqlen_k in (self.seqlen_k or (None,))
            for head_dim_v in (self.head_dim_v or (None,))
        ]
