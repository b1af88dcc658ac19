"""``flashlane layout``: where tiles lie in shared memory, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem
    from flashlane.kernels.tile_layout import Tile

TILE, KERNEL = "A tile of any size", "The tiles of a kernel"
COLUMNS, THREADS, ARCH = 64, 128, "sm_90a"
MOST_BYTES = 227 * 1024
"""Of shared memory, the most that a CTA may have on any architecture."""


@spread
def layout_command(
    columns: Annotated[
        int | None, o.option("--columns", help=f"16-bit elements of a row. Default: {COLUMNS}.", panel=TILE)
    ] = None,
    rows: Annotated[int, o.option("--rows", help="Rows (with --tag: rows to draw).", panel=TILE)] = 16,
    threads: Annotated[
        int | None, o.option("--threads", help=f"Threads that copy the tile. Default: {THREADS}.", panel=TILE)
    ] = None,
    plain: Annotated[bool, o.option("--plain", help="Row after row.", panel=TILE)] = False,
    pad: Annotated[bool, o.option("--pad", help="Each row followed by 16 unused bytes.", panel=TILE)] = False,
    swizzle: Annotated[bool, o.option("--swizzle", help="XOR swizzle, no padding (the default).", panel=TILE)] = False,
    xor_row4: Annotated[
        bool, o.option("--xor-row4", help="The swizzle of the baseline logs' kernels, made for 16 columns.", panel=TILE)
    ] = False,
    old_xor_row4: Annotated[bool, typer.Option("--founding", hidden=True)] = False,
    tag: Annotated[
        str | None,
        o.option(
            "--tag",
            help="The layouts that this kernel is compiled with.",
            panel=KERNEL,
            autocompletion=complete.one_of("tags"),
        ),
    ] = None,
    sizes: s.TILE_SIZES = s.NO_SIZES,
    arch: Annotated[str | None, o.one_arch(f"Architecture to compile for. Default: {ARCH}.", panel=KERNEL)] = None,
    compare: Annotated[
        bool, o.option("--compare", help="Show every scheme, one after another.", panel=o.OUTPUT)
    ] = False,
    full: Annotated[
        bool, o.option("--table", help="Every chunk on a line of its own instead of the grid.", panel=o.OUTPUT)
    ] = False,
    png: Annotated[Path | None, o.option("--png", help="Draw the layouts into this file.", panel=o.OUTPUT)] = None,
    json_: Annotated[
        Path | None, o.option("--json", help="Write all figures to this file; - prints only them.", panel=o.OUTPUT)
    ] = None,
) -> None:
    """Show where tiles of 16-bit elements lie in shared memory, and count bank conflicts by simulation; needs no GPU.

    A grid of chunks of 8 elements at their logical places, coloured by the banks that hold them, with the physical
    column in each cell; then the passes of every read and write that the kernels do.

    Exit status: 0 done, 2 bad input, 3 there is no room for a file.

    Examples:

      flashlane layout --columns 128 --swizzle --compare

      flashlane layout --tag "mma(split-q+acc-f32+swizzle-qkv+stage1)" --D 64 --png layout.png
    """
    from flashlane.core.registry import get
    from flashlane.kernels.tile_layout import alternatives, kernel_tiles

    if rows < 1:
        raise ValueError(f"--rows is {rows}; it must be at least 1")
    xor_row4 = xor_row4 or old_xor_row4  # --founding is what the option was called before
    flags = {"plain": plain, "padded": pad, "swizzled": swizzle, "xor-row4": xor_row4}
    flags_on = [name for name, on in flags.items() if on]
    of_tile = {"--columns": columns, "--threads": threads, "--plain": plain, "--pad": pad, "--swizzle": swizzle}
    of_kernel = {s.option_of(name): getattr(sizes, name) for name in (*s.SHAPE[:4], "dtype")} | {"--arch": arch}
    heading = ""
    width = COLUMNS if columns is None else columns
    most = MOST_BYTES // (2 * max(width, 8))
    if rows > max(16, most):
        raise ValueError(f"--rows is {rows}; of {width} columns it may be 1 to {most}, which shared memory can hold")
    if tag is None:
        o.refuse(of_kernel, "goes with --tag; the width of a tile is --columns")
        with o.named("--columns", "columns"), o.named("--rows", "rows"), o.named("--threads", "threads"):
            tiles = free_tiles(
                width,
                rows,
                THREADS if threads is None else threads,
                list(flags) if compare else flags_on,
            )
    else:
        o.refuse({**of_tile, "--xor-row4": xor_row4}, "goes without --tag; the kernel says how its tiles lie")
        problem = _problem(sizes, arch or ARCH)
        with o.named("--tag"):
            tiles = kernel_tiles(get(tag), problem)
        tiles = tuple(other for tile in tiles for other in alternatives(tile)) if compare else tiles
        heading = f"{tag} · {problem.describe()} · {problem.arch}"
    _show(tiles, rows, heading, full, png, json_)


def free_tiles(columns: int, rows: int, threads: int, schemes: list[str]) -> tuple[Tile, ...]:
    """A tile in each of the named schemes (swizzled, when none is named), in the order of the table of schemes."""
    from flashlane.kernels import tile_layout as layout

    wanted = schemes or ["swizzled"]
    return tuple(layout.Tile(each, rows, threads) for each in layout.schemes(columns) if each.scheme in wanted)


def _problem(sizes: s.Sizes, arch: str) -> AttentionProblem:
    from flashlane.inspect.compile_report import check_arch

    problems = list(sizes.grid().problems(check_arch(arch), s.shapes_of(on_gpu=True, quick=False)[:1]))
    if len(problems) != 1:
        raise ValueError(f"the sizes name {len(problems)} problems; --tag shows the layouts of one")
    return problems[0]


def _show(
    tiles: tuple[Tile, ...], rows: int, heading: str, full: bool, png: Path | None, json_path: Path | None
) -> None:
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.present.table import make_console
    from flashlane.core.files import write_named
    from flashlane.inspect import layout_view

    o.check_apart({"--png": png, "--json": json_path})
    for name, path in (("--png", png), ("--json", json_path)):
        if path is not None and str(path) != "-":
            if path.is_dir():
                raise ValueError(f"{name} is {str(path)!r}, which is a folder; it names a file")
            check_writable(path.parent, name)
    if png is not None and png.suffix != ".png":
        raise ValueError(f"--png is {str(png)!r}; it names a file that ends in .png")
    if png is not None:
        layout_view.save_png(tiles, png, rows, heading)
    if json_path is not None:
        text = json.dumps(layout_view.as_dict(tiles, rows), indent=1)
        if str(json_path) == "-":
            typer.echo(text)
            return
        write_named(json_path, text + "\n", "--json")
    console = make_console()
    if heading:
        console.print(heading, style="bold", markup=False)
    layout_view.print_layouts(tiles, console, rows, full)
