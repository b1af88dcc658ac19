"""Drawings of shared-memory layouts: a coloured grid in the terminal and as PNG, and a table of bank conflicts.

A cell is one chunk of 8 elements, at its row and *logical* column; its colour is the group of four banks that holds
it. Eight rows of one column are read at once, so a column whose eight rows show eight colours has no conflict.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashlane.core.files import write_named
from flashlane.kernels.tile_layout import BANK_BYTES, CHUNK, CHUNK_BYTES, SLOTS, Access, Layout, Tile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#77AADD", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00", "#EEDD88", "#EE8866", "#FFAABB")
"""The colours of the eight bank groups: Paul Tol's "light" scheme, which colour-blind readers can tell apart."""
BANKS_OF_SLOT = CHUNK_BYTES // BANK_BYTES
ROWS_SHOWN = 16
PANEL_CHUNKS = 16
"""The most chunks of a row in one panel of a PNG."""


AT_ONCE = {"fill": False, "edgecolor": "#111111", "linewidth": 2.0}
UNUSED = {"facecolor": "#f4f4f4", "edgecolor": "#bbbbbb", "linewidth": 0.5, "hatch": "///"}


def banks(slot: int) -> str:
    """The banks of a group: ``12–15``."""
    return f"{slot * BANKS_OF_SLOT}–{slot * BANKS_OF_SLOT + BANKS_OF_SLOT - 1}"


def title(layout: Layout) -> str:
    """``padded: 64 columns, 144 bytes a row``."""
    return f"{layout.scheme}: {layout.columns} columns, {layout.stride} bytes a row"


def distinct(tiles: Sequence[Tile]) -> list[tuple[Layout, str]]:
    """Each layout once, with the operands that have it: ``K V``."""
    operands: dict[Layout, list[str]] = {}
    for tile in tiles:
        operands.setdefault(tile.layout, []).append(tile.operand.upper())
    return [(layout, " ".join(dict.fromkeys(names)).strip()) for layout, names in operands.items()]


def verdict(access: Access) -> str:
    """``none``, or the worst conflict of a group of lanes: ``8-way``."""
    return "none" if access.extra == 0 else f"{access.ways}-way"


def warning(layout: Layout, rows: int) -> str:
    """A defect of a layout other than bank conflicts; empty if there is none."""
    lost = layout.collisions(rows)
    return f"not a permutation: {lost} of {rows * layout.chunks} chunks lie on another one" if lost else ""


def print_layouts(tiles: Sequence[Tile], console: Console, rows: int = ROWS_SHOWN, full: bool = False) -> None:
    """The grid of every different layout, the legend, and what each access costs.

    Args:
        tiles: the tiles whose layouts are shown.
        console: where they are printed.
        rows: rows of a grid.
        full: list every chunk on a line of its own instead of the grid.
    """
    for layout, operands in distinct(tiles):
        console.print(Text(f"{operands} {title(layout)}".strip(), "bold"))
        console.print(chunk_table(layout, rows) if full else grid(layout, rows, console.width))
        if warning(layout, rows):
            console.print(Text(warning(layout, rows), "bold red"))
        console.print()
    if not full:
        console.print(legend())
        console.print()
    console.print(access_table(tiles))


def grid(layout: Layout, rows: int, width: int) -> RenderableType:
    """A coloured cell for each chunk; next to the physical column, its banks where ``width`` columns allow."""
    room = width - len("row  ")
    digits = len(str(layout.columns))
    detailed = digits + len(" 28–31") + 1
    fits = room // detailed >= min(SLOTS, layout.chunks)
    cell = detailed if fits else digits + 1
    block = min(layout.chunks, max(1, room // cell))
    if SLOTS < block < layout.chunks:
        block -= block % SLOTS
    if block < layout.chunks and repeats(layout):
        rest = (
            f"Columns {block * CHUNK}–{layout.columns - 1} lie in the same way, each {SLOTS * CHUNK} in the same banks."
        )
        return Group(_block(layout, rows, range(block), cell, fits), Text(rest, "dim"))
    starts = range(0, layout.chunks, block)
    return Group(*(_block(layout, rows, range(s, min(s + block, layout.chunks)), cell, fits) for s in starts))


def repeats(layout: Layout) -> bool:
    """Whether each 64 columns lie as the 64 before them do."""
    chunks = range(SLOTS, layout.chunks)
    return all(layout.place(r, c) == layout.place(r, c - SLOTS) + SLOTS for r in range(ROWS_SHOWN) for c in chunks)


def _block(layout: Layout, rows: int, chunks: range, cell: int, detailed: bool) -> Table:
    table = Table(box=None, padding=0, pad_edge=False, header_style="dim")
    table.add_column("row  ", style="dim", no_wrap=True)
    for chunk in chunks:
        heading = _columns(chunk) if detailed else str(chunk * CHUNK)
        table.add_column(heading.center(cell) if detailed else heading.rjust(cell - 1), width=cell, no_wrap=True)
    for row in range(rows):
        table.add_row(f"{row:>3}  ", *(_cell(layout, row, chunk, cell, detailed) for chunk in chunks))
    return table


def _cell(layout: Layout, row: int, chunk: int, width: int, detailed: bool) -> Text:
    slot, column = layout.slot(row, chunk), layout.place(row, chunk) * CHUNK
    digits = len(str(layout.columns))
    text = f"{column:>{digits}} {banks(slot):<5}" if detailed else f"{column:>{digits}}"
    return Text(text.ljust(width), f"black on {COLOURS[slot]}")


def legend() -> Text:
    """Which colour is which banks, and how to read the grid."""
    text = Text("banks ")
    for slot in range(SLOTS):
        text.append(f" {banks(slot)} ", f"black on {COLOURS[slot]}")
    text.append("\nAcross: logical columns. In a cell: the physical column (and its banks).", "dim")
    text.append("\nEight rows of one column are read at once: eight colours, no conflict.", "dim")
    return text


def chunk_table(layout: Layout, rows: int) -> Table:
    """Every chunk on a line: row, logical columns, physical columns, byte offset in the tile, banks."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("row", "columns", "→ columns", "offset", "banks"):
        table.add_column(name, justify="right")
    for row in range(rows):
        for chunk in range(layout.chunks):
            at, slot = layout.place(row, chunk), layout.slot(row, chunk)
            coloured = Text(f"{banks(slot):>5}", f"black on {COLOURS[slot]}")
            table.add_row(str(row), _columns(chunk), _columns(at), str(layout.offset(row, chunk)), coloured)
    return table


def _columns(chunk: int) -> str:
    return f"{chunk * CHUNK}–{chunk * CHUNK + CHUNK - 1}"


def access_table(tiles: Sequence[Tile]) -> Table:
    """The simulated shared-memory passes that read and write each whole tile once, and how many are extra."""
    table = Table(title="Bank conflicts, simulated", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("tile", no_wrap=True)
    table.add_column("access", no_wrap=True)
    table.add_column("instruction", style="dim", no_wrap=True)
    for name in ("passes", "extra"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("conflicts", no_wrap=True)
    for tile in tiles:
        accesses = tile.accesses()
        for access in accesses:
            name = _tile_name(tile) if access is accesses[0] else ""
            style = "green" if access.extra == 0 else "bold red"
            figures = (str(access.passes), str(access.extra), Text(verdict(access), style))
            table.add_row(name, access.name, access.instruction, *figures, end_section=access is accesses[-1])
    return table


def _tile_name(tile: Tile) -> str:
    size = f"{tile.rows}x{tile.layout.columns}"
    return f"{tile.operand.upper()} {size} {tile.layout.scheme}".strip()


def as_dict(tiles: Sequence[Tile], rows: int = ROWS_SHOWN) -> dict[str, Any]:
    """The tables for JSON: ``layouts`` with a list of chunks for each row, and ``tiles`` with their accesses."""

    def chunk_of(layout: Layout, row: int, chunk: int) -> dict[str, int]:
        return {
            "column": chunk * CHUNK,
            "physical_column": layout.place(row, chunk) * CHUNK,
            "offset": layout.offset(row, chunk),
            "first_bank": layout.slot(row, chunk) * BANKS_OF_SLOT,
        }

    layouts = [
        {
            "scheme": layout.scheme,
            "columns": layout.columns,
            "stride_bytes": layout.stride,
            "operands": operands.lower().split(),
            "collisions": layout.collisions(rows),
            "rows": [[chunk_of(layout, row, chunk) for chunk in range(layout.chunks)] for row in range(rows)],
        }
        for layout, operands in distinct(tiles)
    ]
    return {"layouts": layouts, "tiles": [_tile_dict(tile) for tile in tiles]}


def _tile_dict(tile: Tile) -> dict[str, Any]:
    return {
        "operand": tile.operand,
        "scheme": tile.layout.scheme,
        "columns": tile.layout.columns,
        "rows": tile.rows,
        "threads": tile.threads,
        "bytes": tile.layout.bytes(tile.rows),
        "accesses": [{**asdict(access), "extra": access.extra} for access in tile.accesses()],
    }


def save_png(tiles: Sequence[Tile], path: Path, rows: int = ROWS_SHOWN, heading: str = "") -> None:
    """Draw every different layout as a panel of one picture.

    Raises:
        ImportError: matplotlib is not installed.
        NotWritten: the file cannot be written.
    """
    try:
        from PIL import Image

        figure = layout_figure(tiles, rows, heading)
    except ImportError as error:
        raise ImportError('a PNG needs matplotlib: pip install "flashlane[plots]"') from error
    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    # With a palette the file has a quarter of the bytes; there are few colours.
    Image.open(picture).convert("RGB").quantize(64).save(small, format="PNG", optimize=True)
    write_named(path, small.getvalue(), "--png")


def layout_figure(tiles: Sequence[Tile], rows: int = ROWS_SHOWN, heading: str = "") -> Figure:
    """The picture of :func:`save_png`; headings and the legend wrap at its width."""
    from matplotlib.figure import Figure

    layouts = distinct(tiles)
    across = 2 if len(layouts) > 1 else 1
    down = -(-len(layouts) // across)
    chunks = min(PANEL_CHUNKS, max(layout.chunks for layout, _ in layouts))
    panel = (max(5.2, 0.9 + 0.62 * chunks), 1.5 + 0.27 * rows)
    figure = Figure(figsize=(across * panel[0], down * panel[1] + 1.0), facecolor="white", layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    widest = max(min(PANEL_CHUNKS, layout.chunks) + _padding(layout) for layout, _ in layouts)
    for axis, (layout, operands) in zip(axes, layouts):
        _draw(axis, layout, operands, [t for t in tiles if t.layout == layout], rows)
        axis.set_xlim(-0.05, widest + 0.05)
    for axis in axes[len(layouts) :]:
        axis.set_visible(False)
    width = figure.get_size_inches()[0]
    if heading:
        wrapped = textwrap.wrap(heading, int(width * 8))
        figure.suptitle("\n".join(wrapped), fontsize=12, fontweight="bold", x=0.1 / width, ha="left")
    _draw_legend(figure)
    return figure


def _draw(axis: Axes, layout: Layout, operands: str, tiles: Sequence[Tile], rows: int) -> None:
    from matplotlib.patches import Rectangle

    chunks = min(layout.chunks, PANEL_CHUNKS)
    for row in range(rows):
        for chunk in range(chunks):
            slot, column = layout.slot(row, chunk), layout.place(row, chunk) * CHUNK
            axis.add_patch(Rectangle((chunk, row), 1, 1, facecolor=COLOURS[slot], edgecolor="white", linewidth=0.8))
            label = f"{column} · {banks(slot)}" if chunks <= SLOTS else str(column)
            axis.text(chunk + 0.5, row + 0.52, label, ha="center", va="center", fontsize=6.5, color="#222222")
    for row in range(rows if _padding(layout) else 0):
        axis.add_patch(Rectangle((chunks, row), 1, 1, **UNUSED))
    axis.add_patch(Rectangle((0, 0), 1, min(8, rows), **AT_ONCE))
    axis.set(ylim=(rows + 0.05, -0.05), ylabel="row")
    shown = range(0, chunks, 1 if chunks <= 16 else 2)
    axis.set_xticks([c + 0.5 for c in shown], [str(c * CHUNK) for c in shown], fontsize=7)
    axis.set_yticks([r + 0.5 for r in range(rows)], [str(r) for r in range(rows)], fontsize=7)
    axis.tick_params(length=0)
    rest = f" (first {chunks * CHUNK} shown)" if chunks < layout.chunks else ""
    axis.set_xlabel(f"logical column{rest}", fontsize=8, loc="left")
    axis.spines[:].set_visible(False)
    axis.set_title(f"{operands} {title(layout)}\n".lstrip(), fontsize=10, fontweight="bold", loc="left")
    reads = [access for tile in tiles for access in tile.accesses() if access.instruction.startswith("ldmatrix")]
    worst = max(reads, key=lambda access: access.ways)
    text = warning(layout, rows) or f"ldmatrix conflicts: {verdict(worst)}"
    good = worst.extra == 0 and not warning(layout, rows)
    axis.text(0, -0.25, text, fontsize=8.5, color="#1a7f37" if good else "#b42318", va="bottom")


def _padding(layout: Layout) -> int:
    """Chunks of padding that a panel shows behind a row."""
    return (layout.stride - 2 * layout.columns) // CHUNK_BYTES if layout.chunks <= PANEL_CHUNKS else 0


def _draw_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLOURS[slot], label=f"banks {banks(slot)}") for slot in range(SLOTS)]
    handles += [Patch(**AT_ONCE, label="read at once"), Patch(**UNUSED, label="padding")]
    note = "In a cell: the physical column (· its banks). Eight rows in eight colours are read without conflict."
    width = figure.get_size_inches()[0]
    place = {"loc": "outside lower center", "ncols": 5 if width > 7 else 3, "frameon": False}
    title = "\n".join(textwrap.wrap(note, int(width * 13)))
    figure.legend(handles=handles, fontsize=8, title=title, title_fontsize=9, **place)
