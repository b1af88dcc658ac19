"""The command line's options that say which problems and which implementations, shared by bench, compile, explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashlane.bench.flops import CONVENTIONS
from flashlane.bench.grid import CPU_SHAPES, FOUNDING_SHAPES, Grid, parse_dtypes, parse_names, parse_sizes
from flashlane.problem import ALIGNMENTS, MAX_HEAD_DIM

SIZES, WHICH, INPUT, MEASURE, OUTPUT = "Sizes", "Which implementations", "Input", "Checking and timing", "Output"


def option(*names: str, help: str, panel: str, **extra: object) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=panel, **extra)


Batch = Annotated[str | None, option("--B", "--batch", help="Batch size. A value, list or sweep.", panel=SIZES)]
Heads = Annotated[str | None, option("--H", "--nheads", help="Query heads. A value, list or sweep.", panel=SIZES)]
Seqlen = Annotated[
    str | None,
    option("--N", "--seqlen", help="Queries a sequence (and keys, without --seqlen-k). Likewise.", panel=SIZES),
]
HeadDim = Annotated[str | None, option("--D", "--headdim", help="Head dimension. Likewise.", panel=SIZES)]
KvHeads = Annotated[
    str | None,
    option("--kv-heads", help="Key/value heads (GQA, MQA); must divide --H. Default: as many as --H.", panel=SIZES),
]
SeqlenK = Annotated[
    str | None, option("--seqlen-k", help="Keys a sequence (cross attention). Default: as many as --N.", panel=SIZES)
]
Causal = Annotated[
    bool | None, option("--causal/--no-causal", help="Hide keys after the query's position.", panel=SIZES)
]
AlignmentName = Annotated[
    str,
    option(
        "--alignment",
        help="Where the causal diagonal ends: bottom-right (FlashAttention) or top-left (torch).",
        panel=SIZES,
    ),
]
Dtype = Annotated[str | None, option("--dtype", help="f16, bf16, f32, f64, or a list. Default: f16.", panel=SIZES)]
Tags = Annotated[
    str,
    option(
        "--tags",
        help="Kernels whose tag contains one of these words: split-q,share-kv. Default: the listed ones.",
        panel=WHICH,
    ),
]
Kernels = Annotated[
    str, option("--kernels", help="Kernels with exactly these tags, in a list; adds to --tags.", panel=WHICH)
]
ShowAll = Annotated[
    bool,
    option("--show-all", help="Every kernel of the grid; without it and without --tags the listed ones.", panel=WHICH),
]


def grid_of(
    batch: str | None,
    heads: str | None,
    seqlen: str | None,
    head_dim: str | None,
    kv_heads: str | None,
    seqlen_k: str | None,
    dtype: str | None,
    causal: bool | None,
    alignment: str,
) -> Grid:
    """The grid that the options ask for.

    Raises:
        ValueError: one of them cannot be read; the message names it.
    """
    if alignment not in ALIGNMENTS:
        raise ValueError(f"--alignment is {alignment!r}; it may be one of {', '.join(ALIGNMENTS)}")

    def sizes(text: str | None, name: str, low: int = 1, high: int | None = None) -> tuple[int, ...] | None:
        return None if text is None else parse_sizes(text, name, low=low, high=high)

    return Grid(
        batch=sizes(batch, "--B"),
        heads=sizes(heads, "--H"),
        seqlen=sizes(seqlen, "--N", 0),
        head_dim=sizes(head_dim, "--D", 1, MAX_HEAD_DIM),
        kv_heads=sizes(kv_heads, "--kv-heads"),
        seqlen_k=sizes(seqlen_k, "--seqlen-k", 0),
        dtypes=parse_dtypes(dtype or "f16"),
        causal=(bool(causal),),
        alignment=alignment,
    )


def words_of(text: str) -> tuple[str, ...]:
    """The words of a comma list."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def convention_of(text: str) -> str:
    """The FLOP convention asked for."""
    names = parse_names(text, "--flops", CONVENTIONS)
    if len(names) != 1:
        raise ValueError(f"--flops is {text!r}; it may be one of {', '.join(CONVENTIONS)}")
    return names[0]


def shapes_of(on_gpu: bool, quick: bool) -> tuple[tuple[int, int, int, int], ...]:
    """(batch, heads, seqlen, head_dim) when no size is given."""
    if quick:
        return ((1, 8, 1024, 64),) if on_gpu else ((1, 2, 128, 64),)
    return FOUNDING_SHAPES if on_gpu else CPU_SHAPES


def check_file(path: Path, name: str) -> Path:
    """A file that is there.

    Raises:
        ValueError: it is not; the message names the option.
    """
    if not path.is_file():
        raise ValueError(f"{name} is {str(path)!r}, which {'is a folder' if path.is_dir() else 'does not exist'}")
    return path
