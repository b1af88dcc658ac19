"""The command line's options of sizes: which problems a command is about, in one grammar for all commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, get_args, get_type_hints

import typer

from flashlane.bench.measure.defaults import PAGE
from flashlane.bench.measure.presets import PRESETS, select_presets
from flashlane.bench.measure.sizes import parse_sizes
from flashlane.cli import complete
from flashlane.cli.failure import print_failure
from flashlane.cli.options import SIZES, option

if TYPE_CHECKING:
    import torch

    from flashlane.bench.measure.grid import Grid
    from flashlane.core.problem import AttentionProblem


def sizes(*names: str, help: str, panel: str) -> typer.models.OptionInfo:
    """An option of sizes. What has not their form is refused before torch is loaded, which takes seconds."""

    def check(text: str | None) -> str | None:
        try:
            _ = text is None or parse_sizes(text, names[0], low=0)
        except ValueError as error:
            raise print_failure(error) from error
        return text

    return option(*names, help=help, panel=panel, callback=check)


Batch = Annotated[str | None, sizes("--B", "--batch", help="Batch size. A value, list or sweep.", panel=SIZES)]
Heads = Annotated[str | None, sizes("--H", "--nheads", help="Query heads. A value, list or sweep.", panel=SIZES)]
Seqlen = Annotated[
    str | None,
    sizes("--N", "--seqlen", help="Queries a sequence (and keys, without --seqlen-k). The same forms.", panel=SIZES),
]
HeadDim = Annotated[str | None, sizes("--D", "--headdim", help="Head dimension. The same forms.", panel=SIZES)]
KvHeads = Annotated[
    str | None,
    sizes("--kv-heads", help="Key/value heads (GQA, MQA); must divide --H. Default: as many as --H.", panel=SIZES),
]
SeqlenK = Annotated[
    str | None, sizes("--seqlen-k", help="Keys a sequence (cross attention). Default: as many as --N.", panel=SIZES)
]
HeadDimV = Annotated[
    str | None, sizes("--Dv", "--headdim-v", help="Head dimension of V. Default: that of Q and K.", panel=SIZES)
]
Layouts = Annotated[
    str,
    option(
        "--layout",
        autocompletion=complete.list_of(("dense", "packed", "cache", "paged")),
        help="How sequences lie, one or a list: dense, packed (varlen), cache (rows in use), paged (a cache in pages).",
        panel=SIZES,
    ),
]
Page = Annotated[
    str | None,
    sizes("--page", help=f"Rows of a page, with --layout paged. The same forms. Default: {PAGE}.", panel=SIZES),
]
Window = Annotated[
    str | None,
    option("--window", help="LEFT,RIGHT: keys visible on either side of the query's position; -1: all.", panel=SIZES),
]
Causal = Annotated[
    bool | None, option("--causal/--no-causal", help="Hide keys after the query's position.", panel=SIZES)
]
AlignmentName = Annotated[
    str,
    option(
        "--alignment",
        autocompletion=complete.one_of(("bottom-right", "top-left")),
        help="Where the causal diagonal ends: bottom-right (FlashAttention) or top-left (torch).",
        panel=SIZES,
    ),
]
Dtype = Annotated[
    str | None,
    option(
        "--dtype",
        help="f16, bf16, f32, f64, or a list. Default: f16; bf16 on a CPU.",
        panel=SIZES,
        autocompletion=complete.list_of("dtypes"),
    ),
]
PresetName = Annotated[
    str | None,
    option(
        "--preset",
        help=f"Sizes of a model's layer, or of several: {', '.join(PRESETS)}; all. Other sizes given override it.",
        panel=SIZES,
        autocompletion=complete.list_of((*PRESETS, "all")),
    ),
]

DEFAULT_DTYPES = {False: "f16", True: "bf16"}
"""Where none is given: on a GPU, and on a CPU, whose matrix products in f16 are slow."""


@dataclass(frozen=True)
class Sizes:
    """The problems that a command is asked for, as the options say it."""

    batch: Batch = None
    heads: Heads = None
    seqlen: Seqlen = None
    head_dim: HeadDim = None
    kv_heads: KvHeads = None
    seqlen_k: SeqlenK = None
    head_dim_v: HeadDimV = None
    layout: Layouts = "dense"
    page: Page = None
    window: Window = None
    causal: Causal = None
    alignment: AlignmentName = "bottom-right"
    dtype: Dtype = None
    preset: PresetName = None

    def changed(self) -> dict[str, object]:
        """The options whose value is not their default, by name."""
        return {option_of(f.name): value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def options_given(self) -> dict[str, str]:
        """The sizes that are given, without mask and layout, by their fields."""
        return {name: text for name in SHAPE if (text := getattr(self, name)) is not None}

    def problems(self, device: torch.device, quick: bool = False, first: bool = False) -> list[AttentionProblem]:
        """The problems on a device, each once; without a size the usual ones, or the ``first``.

        Raises:
            ValueError: an option cannot be read; the message names it.
        """
        from flashlane.core.problem import arch_of

        arch, shapes = arch_of(device), shapes_of(device.type == "cuda", quick)[: 1 if first else None]
        grids = self.grids(on_cpu=device.type == "cpu")
        return list(dict.fromkeys(p for grid in grids for p in grid.problems(arch, shapes)))

    def grids(self, on_cpu: bool = False) -> list[Grid]:
        """One grid for each preset, whose sizes the others given override; without a preset one.

        ``on_cpu`` says where they run, which decides the dtype where none is given.

        Raises:
            ValueError: an option cannot be read; the message names it.
        """
        own = asdict(self) | {"dtype": self.dtype or DEFAULT_DTYPES[on_cpu], "preset": None}
        grids = []
        for chosen in (None,) if self.preset is None else select_presets(self.preset):
            merged = own if chosen is None else own | chosen.sizes() | self.options_given()
            if chosen is not None and self.causal is None:
                merged = merged | {"causal": chosen.causal}
            grids.append(Sizes(**merged).grid())
        return grids

    def grid(self) -> Grid:
        """The grid that the options ask for, whatever the preset.

        Raises:
            ValueError: one of them cannot be read; the message names it.
        """
        from flashlane.bench.measure.grid import LAYOUTS, Grid, parse_dtypes, parse_names, parse_window
        from flashlane.core.problem import ALIGNMENTS, MAX_HEAD_DIM

        if self.alignment not in ALIGNMENTS:
            raise ValueError(f"--alignment is {self.alignment!r}; it may be one of {', '.join(ALIGNMENTS)}")

        layouts = parse_names(self.layout, "--layout", LAYOUTS)
        if not layouts:
            raise ValueError(f"--layout is {self.layout!r}; it may be a list of {', '.join(LAYOUTS)}")
        if self.page is not None and "paged" not in layouts:
            raise ValueError(f"--page is {self.page!r} and --layout {self.layout!r}; only --layout paged has pages")

        def several(text: str | None, name: str, low: int = 1, high: int | None = None) -> tuple[int, ...] | None:
            return None if text is None else parse_sizes(text, name, low=low, high=high)

        return Grid(
            batch=several(self.batch, "--B"),
            heads=several(self.heads, "--H"),
            seqlen=several(self.seqlen, "--N", 0),
            head_dim=several(self.head_dim, "--D", 1, MAX_HEAD_DIM),
            kv_heads=several(self.kv_heads, "--kv-heads"),
            seqlen_k=several(self.seqlen_k, "--seqlen-k", 0),
            dtypes=parse_dtypes(self.dtype or DEFAULT_DTYPES[False]),
            causal=(bool(self.causal),),
            alignment=self.alignment,
            head_dim_v=several(self.head_dim_v, "--Dv", 1, MAX_HEAD_DIM),
            layouts=layouts,
            pages=several(self.page, "--page") or (PAGE,),
            window=(-1, -1) if self.window is None else parse_window(self.window),
        )


NO_SIZES = Sizes()
SHAPE = ("batch", "heads", "seqlen", "head_dim", "kv_heads", "seqlen_k")
LAYOUT = ("head_dim_v", "layout", "page", "window")
ALL_SIZES = Annotated[Sizes, (*SHAPE, *LAYOUT, "causal", "alignment", "dtype", "preset")]
SWEPT_SIZES = Annotated[Sizes, (*SHAPE, *LAYOUT, "alignment", "dtype", "preset")]
"""Without the mask."""
DENSE_SIZES = Annotated[Sizes, (*SHAPE, "causal", "alignment", "dtype", "preset")]
KERNEL_SIZES = Annotated[Sizes, (*SHAPE, "dtype")]
TILE_SIZES = Annotated[Sizes, (*SHAPE[:4], "dtype")]


def option_of(field: str) -> str:
    """What the option of a field of :class:`Sizes` is called."""
    (info,) = get_args(get_type_hints(Sizes, include_extras=True)[field])[1:]
    return str(info.default).partition("/")[0]


def shapes_of(on_gpu: bool, quick: bool) -> tuple[tuple[int, int, int, int], ...]:
    """(batch, heads, seqlen, head_dim) when no size is given."""
    from flashlane.bench.measure.grid import BASELINE_SHAPES, CPU_SHAPES

    if quick:
        return ((1, 8, 1024, 64),) if on_gpu else ((1, 2, 128, 64),)
    return BASELINE_SHAPES if on_gpu else CPU_SHAPES
