"""The tile layouts: the formulas against the device header and against a bank simulator of the tests' own."""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import flashlane
from flashlane.cli import main as cli
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import DeviceKernel
from flashlane.inspect import layout_view
from flashlane.kernels.tile_layout import (
    PlainLayout,
    Tile,
    TileLayout,
    XorRow4Layout,
    alternatives,
    bank_passes,
    fragment_a,
    fragment_b,
    kernel_tiles,
    schemes,
)

HEADER = Path(flashlane.__file__).parent / "cuda" / "swizzle.cuh"
COLUMNS = (*range(16, 257, 16), 512, 1024)
ROWS = 48


def invoke(*arguments: object, columns: int = 80) -> str:
    """What a command prints; it must end with status 0."""
    done = CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    return done.stderr


def problem(head_dim: int, batch: int = 1, arch: str = "sm_90a") -> AttentionProblem:
    return AttentionProblem(
        batch=batch, heads=8, kv_heads=8, seqlen_q=2048, seqlen_k=2048, head_dim=head_dim, head_dim_v=head_dim,
        dtype=torch.float16, scale=1.0, arch=arch,
    )  # fmt: skip


PROGRAM = """
#include <cstdio>
using u32 = unsigned int;
{header}
template <int COLUMNS, bool SWIZZLED> void layout() {{
  using L = TileLayout<COLUMNS, SWIZZLED>;
  printf("stride %d %d %d\\n", COLUMNS, SWIZZLED, L::STRIDE);
  for (int row = 0; row < {rows}; ++row)
    for (int chunk = 0; chunk < L::CHUNKS; ++chunk)
      printf("offset %d %d %d %d %u\\n", COLUMNS, SWIZZLED, row, chunk, L::offset(row, chunk));
  for (int lane = 0; lane < 32; ++lane)
    for (int rows = 0; rows < {rows} - 16; rows += 8)
      for (int chunks = 0; chunks < L::CHUNKS; chunks += 2) {{
        const FragmentCursor<L> a(4096, lane % 16, lane / 16);
        const FragmentCursor<L> b(4096, lane % 8 + lane / 16 * 8, lane / 8 % 2);
        printf("cursor %d %d %d %d %d %u %u\\n", COLUMNS, SWIZZLED, lane, rows, chunks, a.at(512, rows, chunks),
               b.at(512, rows, chunks));
      }}
}}
template <int COLUMNS, bool SWIZZLED, int WARPS> void columns_of_warps() {{
  using L = TileLayout<COLUMNS, SWIZZLED>;
  constexpr int OWN = COLUMNS / 8 / WARPS;
  for (int warp = 0; warp < WARPS; ++warp)
    for (int lane = 0; lane < 32; ++lane)
      for (int n = 0; n < OWN; n += 2) {{
        const FragmentCursor<L, true> v(0, lane % 16, warp * OWN + lane / 16);
        printf("warps %d %d %d %d %d %u\\n", COLUMNS, SWIZZLED, WARPS, lane, warp * OWN + n, v.at(0, 0, n));
      }}
}}
int main() {{ {calls} }}
"""


@pytest.fixture(scope="module")
def device_header(tmp_path_factory) -> list[list[str]]:
    """What ``cuda/swizzle.cuh`` computes, compiled for the host: lines of words."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the host")
    lines = [line for line in HEADER.read_text().splitlines() if not line.startswith(("#include", "#pragma once"))]
    header = "\n".join(lines).replace("__device__", "").replace("__forceinline__", "inline")
    calls = "".join(f"layout<{c}, {s}>();" for c in COLUMNS for s in ("false", "true"))
    calls += "".join(
        f"columns_of_warps<{c}, {s}, {w}>();"
        for w in (2, 4)
        for c in COLUMNS
        for s in ("false", "true")
        if c % (16 * w) == 0
    )
    folder = tmp_path_factory.mktemp("swizzle")
    (folder / "swizzle.cpp").write_text(PROGRAM.format(header=header, rows=ROWS, calls=calls))
    program = folder / "swizzle"
    build = [compiler, "-std=c++17", "-O1", str(folder / "swizzle.cpp"), "-o", str(program)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in subprocess.run([program], capture_output=True, text=True).stdout.splitlines()]


def test_formulas_are_the_device_headers(device_header):
    layouts = set()
    for kind, columns, swizzled, *rest in device_header:
        layout = TileLayout(int(columns), swizzled == "1")
        if kind == "stride":
            assert layout.stride == int(rest[0])
        elif kind == "offset":
            row, chunk, offset = map(int, rest)
            assert layout.offset(row, chunk) == offset, (layout, row, chunk)
            layouts.add(layout)
    assert layouts == {TileLayout(c, s) for c in COLUMNS for s in (False, True)}


def test_cursors_step_to_the_right_chunk(device_header):
    """What a fragment cursor reaches by an XOR and an addition is what the whole formula says."""
    layouts = set()
    for kind, columns, swizzled, *rest in device_header:
        if kind == "cursor":
            layout = TileLayout(int(columns), swizzled == "1")
            lane, rows, chunks, a, b = map(int, rest)
            assert a == 4096 + 512 + fragment_a(layout, rows, chunks)[lane], (layout, lane, rows, chunks)
            assert b == 4096 + 512 + fragment_b(layout, rows, chunks)[lane], (layout, lane, rows, chunks)
            layouts.add(layout)
    assert len(layouts) == 2 * len(COLUMNS)


@pytest.mark.parametrize("warps", [2, 4])
def test_cursors_of_warps_that_share_columns(device_header, warps):
    """split-kv's V: warp w starts at chunk w · (chunks / warps), whatever that is; the plain cursor would miss."""
    wrong, layouts = set(), set()
    for kind, columns, swizzled, *rest in device_header:
        if kind == "warps" and int(rest[0]) == warps:
            layout = TileLayout(int(columns), swizzled == "1")
            _, lane, chunk, address = map(int, rest)
            layouts.add(layout)
            if address != fragment_a(layout, 0, chunk)[lane]:
                wrong.add((layout.columns, layout.scheme))
    assert layouts and not wrong, sorted(wrong)


@pytest.mark.parametrize("columns", COLUMNS)
def test_layouts_are_permutations(columns):
    for layout in schemes(columns)[:3]:
        assert layout.collisions(64) == 0
        offsets = [layout.offset(r, c) for r in range(64) for c in range(layout.chunks)]
        assert all(0 <= at <= layout.bytes(64) - 16 and at % 16 == 0 for at in offsets)


def brute_force_passes(addresses: list[int], width: int) -> int:
    """Passes by serving words one after another: each takes the first pass in which its bank is free."""
    passes: list[dict[int, int]] = []
    for byte in (b for address in addresses for b in range(address, address + width)):
        word = byte // 4
        if not any(p.get(word % 32) == word for p in passes):
            free = next((p for p in passes if word % 32 not in p), None)
            if free is None:
                passes.append(free := {})
            free[word % 32] = word
    return len(passes)


def test_bank_passes_against_brute_force():
    dice = random.Random(torch.initial_seed())
    for _ in range(300):
        width = dice.choice([4, 8, 16])
        addresses = [dice.randrange(256) * width for _ in range(dice.randint(1, 128 // width))]
        assert bank_passes(addresses, width) == brute_force_passes(addresses, width), (addresses, width)


def reads(layout) -> list[tuple[int, int]]:
    return [(a.ways, a.extra) for a in Tile(layout, 64).accesses() if a.instruction.startswith("ldmatrix")]


@pytest.mark.parametrize("columns", COLUMNS)
def test_padded_and_swizzled_rows_are_read_without_conflicts(columns):
    for swizzled in (False, True):
        layout = TileLayout(columns, swizzled)
        assert reads(layout) == [(1, 0)] * 3
        assert {layout.conflicts(row, c) for row in (0, 8) for c in range(layout.chunks)} == {0}


@pytest.mark.parametrize("columns, ways", [(16, 2), (32, 4), (48, 2), (64, 8), (96, 4), (128, 8), (192, 8), (1024, 8)])
def test_plain_rows_conflict(columns, ways):
    """A power of two of chunks in the row's stride is what the eight rows of a matrix fall upon: 8-way from 64 on."""
    fragments = 64 * columns // 256
    assert reads(PlainLayout(columns)) == [(ways, fragments * 4 * (ways - 1))] * 3
    assert PlainLayout(columns).conflicts(0, 0) == ways - 1


@pytest.mark.parametrize("columns", COLUMNS)
def test_copies_of_swizzled_rows_have_no_conflicts(columns):
    copies = {s.scheme: Tile(s, 64).accesses()[-1] for s in schemes(columns)}
    assert copies["plain"].extra == copies["swizzled"].extra == 0
    assert copies["swizzled"].instruction == "cp.async 16 B"
    assert copies["padded"].ways == (1 if columns % 64 == 0 else 2)


@pytest.mark.parametrize("rows, columns, threads", [(64, 64, 128), (16, 48, 128), (32, 112, 256), (16, 1024, 128)])
def test_a_copy_moves_every_chunk_once(rows, columns, threads):
    tile = Tile(TileLayout(columns, True), rows, threads)
    moved = [address for lanes in tile._copied_chunks() for address in lanes]
    assert sorted(moved) == list(range(0, tile.layout.bytes(rows), 16))


def test_xor_row4_swizzle_is_right_for_16_columns_only():
    ours, other = TileLayout(16, True), XorRow4Layout(16)
    assert all(ours.offset(r, c) == other.offset(r, c) for r in range(64) for c in range(2))
    assert reads(other) == [(1, 0)] * 3
    assert reads(XorRow4Layout(32))[0][0] == 2 and reads(XorRow4Layout(64))[0][0] == 4
    assert XorRow4Layout(64).collisions(64) == 0
    assert XorRow4Layout(48).collisions(16) == 16, "six chunks: the remainder sends two to one place"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: TileLayout(60, True), "columns is 60"),
        (lambda: PlainLayout(0), "columns is 0"),
        (lambda: Tile(TileLayout(40, True)), "columns is 40; fragments are 16 wide"),
        (lambda: Tile(TileLayout(64, True), rows=24), "rows is 24"),
        (lambda: Tile(TileLayout(64, True), threads=40), "threads is 40"),
        (lambda: Tile(TileLayout(64, True), threads=2048), "threads is 2048; .* at most 1024, those of a CTA"),
        (lambda: Tile(TileLayout(1024, True), threads=64), "the 128 chunks of a row"),
    ],
)
def test_bad_tiles(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 192, 256])
def test_compiled_tiles_of_every_kernel_are_read_without_conflicts(head_dim):
    small, compiled_tiles = problem(head_dim), 0
    for kernel in registry.kernels(listed_only=True):
        if not isinstance(kernel, DeviceKernel) or kernel.supports(small) is not None:
            continue
        if not hasattr(kernel.config(small), "layouts"):
            continue
        tiles = kernel_tiles(kernel, small)
        compiled_tiles += 1
        assert {"q", "k", "v"} <= {tile.operand for tile in tiles}, kernel.tag
        assert ("p" in {tile.operand for tile in tiles}) == (kernel.config(small).warps_kv > 1), kernel.tag
        for tile in tiles:
            swizzles = kernel.tag.split("swizzle-")[1].split("+")[0] if "swizzle" in kernel.tag else ""
            assert tile.layout.swizzled == (tile.operand in swizzles), kernel.tag
            for access in tile.accesses():
                if access.name != "copy":
                    assert access.extra == 0, (kernel.tag, tile, access)
    assert compiled_tiles > 20


def test_alternatives_keep_the_tile():
    tile = Tile(TileLayout(64, True), 32, 256, "k")
    others = alternatives(tile)
    assert others[0] is tile and [o.layout.scheme for o in others] == ["swizzled", "plain", "padded", "xor-row4"]
    assert {(o.rows, o.threads, o.operand) for o in others} == {(32, 256, "k")}


def test_kernels_without_tiles():
    with pytest.raises(ValueError, match="reference does not say how it lays out tiles"):
        kernel_tiles(registry.get("reference"), problem(64))
    with pytest.raises(NotImplementedError, match="head_dim is 512"):
        kernel_tiles(registry.get("mma(split-q+stage1)"), problem(512))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("columns", [16, 48, 64, 128, 256, 1024])
def test_grids_fit_and_are_right(width, columns):
    """Every printed cell is the physical column of its chunk; no line is wider than the terminal."""
    for layout in schemes(columns):
        console = Console(width=width, color_system=None, file=io.StringIO())
        console.print(layout_view.grid(layout, 16, width))
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        cells = [line.split() for line in lines]
        starts = [words for words in cells if words[:1] == ["row"]]
        firsts = [[int(word.split("–")[0]) for word in words[1:]] for words in starts]
        per_row = 2 if "–" in starts[0][1] else 1
        rows = [words for words in cells if words[0].isdigit()]
        assert len(rows) == 16 * len(starts)
        for index, words in enumerate(rows):
            shown, row = firsts[index // 16], int(words[0])
            assert [int(w) for w in words[1::per_row]] == [8 * layout.place(row, f // 8) for f in shown]
            if per_row == 2:
                assert words[2::2] == [layout_view.banks(layout.slot(row, f // 8)) for f in shown]


def test_command_shows_conflicts():
    plain = invoke("layout", "--columns", 64, "--rows", 16, "--plain")
    assert "plain: 64 columns, 128 bytes a row" in plain and plain.count("8-way") == 3 and " 112 " in plain
    swizzled = invoke("layout")
    assert "-way" not in swizzled and "56 28–31" in swizzled
    compared = invoke("layout", "--compare")
    assert [compared.count(word) for word in ("8-way", "4-way", "none")] == [3, 3, 10]
    assert "not a permutation: 16 of 96 chunks" in invoke("layout", "--columns", 48, "--xor-row4")
    old, new = (invoke("layout", "--columns", 48, name) for name in ("--founding", "--xor-row4"))
    assert old == new  # the option's name of earlier versions


def test_command_shows_what_a_tag_is_compiled_with():
    text = invoke("layout", "--tag", "mma(split-kv+acc-f32+swizzle-qk+stage1)", "--D", 128)
    assert "Q K swizzled: 128 columns, 256 bytes a row" in text
    assert "V padded: 128 columns, 272 bytes a row" in text
    assert "st.shared.b32" in text and "-way" not in text
    assert invoke("layout", "--tag", "mma(split-q+stage1)", "--compare").count("8-way") == 3


def test_a_layout_is_shown_once_with_each_operand_that_has_it():
    swizzled, padded = TileLayout(64, swizzled=True), TileLayout(64, swizzled=False)
    operands = [("q", swizzled), ("k", swizzled), ("v", padded), ("k", swizzled), ("v", padded)]
    tiles = [Tile(layout, 16, operand=operand) for operand, layout in operands]
    assert layout_view.distinct(tiles) == [(swizzled, "Q K"), (padded, "V")]


def test_table_lists_every_chunk():
    text = invoke("layout", "--table", "--rows", 16)
    assert ["3", "8–15", "16–23", "416", "8–11"] in [line.split() for line in text.splitlines()]
    assert sum(1 for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()) == 16 * 8


def test_json(tmp_path):
    file = tmp_path / "layout.json"
    invoke("layout", "--compare", "--json", file)
    written = json.loads(file.read_text())
    assert written == json.loads(invoke("layout", "--compare", "--json", "-"))
    for layout, expected in zip(written["layouts"], schemes(64), strict=True):
        assert layout["scheme"] == expected.scheme and layout["stride_bytes"] == expected.stride
        for row, cells in enumerate(layout["rows"]):
            assert [cell["offset"] for cell in cells] == [expected.offset(row, c) for c in range(8)]
    assert [t["accesses"][0]["extra"] for t in written["tiles"]] == [112, 0, 0, 48]


def test_png_has_the_colours_of_the_banks(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    file = tmp_path / "layout.png"
    invoke("layout", "--columns", 64, "--plain", "--png", file)
    pixels = torch.from_numpy(imread(file)[..., :3].copy()).reshape(-1, 3)
    shares = [(pixels - torch.tensor(to_rgb(c))).abs().amax(1).lt(0.01).float().mean() for c in layout_view.COLOURS]
    assert min(shares) > 0.04 and max(shares) < 1.3 * min(shares), "plain rows: eight columns, one colour each"
    assert pixels[0].eq(1).all(), "a light background"


def test_png_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'pip install "flashlane[plots]"' in refused("layout", "--png", tmp_path / "a.png")
    assert "swizzled" in invoke("layout")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--columns", 60), "columns is 60"),
        (("--columns", 0), "columns is 0"),
        (("--rows", 12), "error: --rows is 12"),
        (("--rows", 0), "rows is 0"),
        (("--D", 64), "--D goes with --tag"),
        (("--tag", "mma(split-q+stage1)", "--columns", 64), "--columns goes without --tag"),
        (("--tag", "mma(split-q+stage1)", "--xor-row4"), "--xor-row4 goes without --tag"),
        (("--tag", "mma(split-q+stage9)"), "did you mean 'mma(split-q+stage"),
        (("--tag", "mma(split-q+stage1)", "--D", "64,128"), "the sizes name 2 problems"),
        (("--tag", "mma(split-q+stage1)", "--arch", "sm_1"), "--arch is 'sm_1'"),
        (("--png", "."), "--png is '.', which is a folder"),
    ],
)
def test_bad_input_is_explained(arguments, words):
    assert words in refused("layout", *arguments)
