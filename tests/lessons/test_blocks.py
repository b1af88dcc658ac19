"""The building blocks: index maps and schedules in Python, what the compiler makes of them, numbers on a GPU."""

from __future__ import annotations

import functools
import itertools
import json
import re

import pytest
import torch

from flashlane import jit
from flashlane import lessons as blocks
from flashlane.kernels.tile_layout import CHUNK, TileLayout
from flashlane.lessons import activation, bench, ceiling, common, gemm, row_softmax

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
SIZES = (1, 7, 63, 65, 127, 1023)
needs_sass = pytest.mark.skipif(jit.sass.disassemblers() == (), reason="no disassembler")


@functools.cache
def loop_of(cubin: bytes) -> list[str]:
    """The instructions of the loop with the most matrix products."""
    lines = [
        line.strip() for line in jit.disassemble(cubin).splitlines() if re.match(r"\s*(/\*[0-9a-f]{4,}|\.L)", line)
    ]
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if line.startswith(".L")}
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA.*?`\((\.L\w+)\)", line)
        if target and labels.get(target[1], at) < at:
            loops.append([x for x in lines[labels[target[1]] : at + 1] if not x.startswith(".L")])
    return max(loops, key=lambda loop: sum("HMMA" in line for line in loop))


def opcode_count(lines: list[str], opcode: str) -> int:
    return sum(re.search(rf"\b{opcode}\b", line) is not None for line in lines)


# Index maps and schedules


@pytest.mark.parametrize("itemsize", (2, 4))
def test_cut_covers_an_array_and_aligns_its_packs(itemsize):
    count = 16 // itemsize
    for address in range(0, 64, itemsize):
        for size in range(0, 40):
            head, packs, tail = common.cut(address, size, itemsize)
            assert head + packs * count + tail == size
            assert head < count and tail < count and min(head, packs, tail) >= 0
            assert packs == 0 or (address + head * itemsize) % 16 == 0


@pytest.mark.parametrize(("blocks_m", "blocks_n", "group"), ((64, 32, 16), (1, 5, 16), (43, 32, 10), (17, 3, 16)))
def test_every_block_of_c_is_computed_once(blocks_m, blocks_n, group):
    found = [gemm.block_of(i, blocks_m, blocks_n, group) for i in range(blocks_m * blocks_n)]
    assert sorted(found) == [(m, n) for m in range(blocks_m) for n in range(blocks_n)]


def test_blocks_that_run_together_share_operands():
    wave = [gemm.block_of(i, 64, 32, 16) for i in range(132)]
    assert len({m for m, _ in wave}) == 16 and len({n for _, n in wave}) == 9


def pipeline(tiles: int, stages: int, steps: int, passes: int):
    """What one thread of ``hgemm`` does, in order; a barrier comes with every wait.

    (copy, tile, pass, slot), (commit,), (wait, groups that may be in flight), (read, tile, slot).
    """

    def shares(tile: int, slot: int, step: int):
        mine = [i for i in range(passes) if gemm.share_of(i, passes, steps) == step]
        return [("copy", tile, i, slot) for i in mine]

    for tile in range(stages):
        for step in range(steps if tile < stages - 1 else 1):
            if tile < tiles:
                yield from shares(tile, tile, step)
        if tile < stages - 1:
            yield ("commit",)
    yield ("wait", stages - 2)
    yield ("read", 0, 0)
    reading, writing = 0, stages - 1
    for tile in range(tiles):
        following = (reading + 1) % stages
        for step in range(steps):
            last = step == steps - 1
            if last:
                yield ("wait", stages - 2)
                writing = reading
            yield ("read", tile + last, following if last else reading)
            loading = tile + (stages if last else stages - 1)
            if loading < tiles:
                yield from shares(loading, writing, (step + 1) % steps)
            if step == steps - 2:
                yield ("commit",)
        reading = following


@pytest.mark.parametrize("stages", (2, 3, 4))
@pytest.mark.parametrize(("steps", "passes"), ((2, 6), (4, 12), (4, 3), (2, 7)))
def test_the_ring_of_tiles_is_read_after_it_is_written_and_written_after_it_is_read(stages, steps, passes):
    for tiles in range(1, 3 * stages):
        held, pending, groups, arrived, read_since_barrier = {}, [], [], set(), set()
        for what, *event in pipeline(tiles, stages, steps, passes):
            if what == "copy":
                tile, index, slot = event
                old = held.get(slot, tile)
                assert old == tile or old not in read_since_barrier, f"tile {old} is overwritten while a warp reads it"
                held[slot] = tile
                pending.append((tile, index))
            elif what == "commit":
                groups.append(pending)
                pending = []
            elif what == "wait":
                landed = [copy for group in groups[: len(groups) - event[0]] for copy in group]
                arrived = {tile for tile in range(tiles) if {i for t, i in landed if t == tile} == set(range(passes))}
                assert len(landed) == len(set(landed)), "a pass was copied twice"
                read_since_barrier = set()
            else:
                tile, slot = event
                read_since_barrier.add(tile)
                if tile < tiles:
                    assert tile in arrived, f"tile {tile} is read before it has arrived"
                    assert held[slot] == tile, f"slot {slot} holds tile {held[slot]}, not {tile}"
        assert {tile for group in groups for tile, _ in group} == set(range(tiles))


def cursor_address(layout: TileLayout, row: int, first_chunk: int, rows: int, chunks: int) -> int:
    """Mirror of ``FragmentCursor`` in swizzle.cuh."""
    low = layout.span - 1
    chunk = first_chunk ^ layout.key(row)
    return row * layout.stride + rows * layout.stride + ((chunk ^ (chunks & low)) + (chunks & ~low)) * 16


@pytest.mark.parametrize("config", gemm.CONFIGS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_fragments_are_read_where_they_were_written_without_conflicts(config, layout):
    a, b = config.layouts(layout)
    warp_m, warp_n = config.block_m // config.warps_m, config.block_n // config.warps_n
    for lane in range(32):
        for warp in range(config.warps_m):
            row, chunk = warp * warp_m + lane % 16, lane // 16
            for m in range(0, warp_m, 16):
                for k in range(0, config.block_k // 8, 2):
                    assert cursor_address(a, row, chunk, m, k) == a.offset(row + m, chunk + k)
        for warp in range(config.warps_n):
            if layout == "tn":
                row, chunk = warp * warp_n + lane % 8 + lane // 16 * 8, lane // 8 % 2
                steps = [(n, k) for n in range(0, warp_n, 16) for k in range(0, config.block_k // 8, 2)]
            else:
                row, chunk = lane % 16, warp * warp_n // 8 + lane // 16
                steps = [(k, n) for k in range(0, config.block_k, 16) for n in range(0, warp_n // 8, 2)]
            for rows, chunks in steps:
                assert cursor_address(b, row, chunk, rows, chunks) == b.offset(row + rows, chunk + chunks)
    for tile in (a, b):
        assert all(tile.conflicts(row, chunk) == 0 for row in (0, 8) for chunk in range(tile.chunks))


@pytest.mark.parametrize("config", gemm.CONFIGS.values(), ids=lambda c: c.name)
def test_a_configuration_divides_into_whole_tiles_and_passes(config):
    assert config.block_m % (16 * config.warps_m) == 0 and config.block_n % (32 * config.warps_n) == 0
    assert config.block_k % 32 == 0 and config.stages >= 2 and config.threads <= 1024
    for rows, columns in (
        (config.block_m, config.block_k),
        (config.block_n, config.block_k),
        (config.block_k, config.block_n),
    ):
        assert config.threads % (columns // CHUNK) == 0 and rows % (config.threads // (columns // CHUNK)) == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("accumulate", ("f32", "f16"))
def test_there_is_a_default_configuration(arch, accumulate):
    for size in (1, 128, 1024, 8192):
        config = gemm.default_config(size, size, accumulate, arch, 132)
        assert config.shared_memory() <= jit.shared_limit(arch)
        assert config == gemm.CONFIGS[gemm.SMALL] or gemm.blocks_of(config, size, size) >= 132
    assert gemm.default_config(8192, 8192, accumulate, "sm_90a", 132).name == gemm.PREFERENCE[accumulate][0]


def test_softmax_configurations_hold_the_row():
    variant = row_softmax.VARIANTS["online+packed+registers"]
    for dtype, torch_dtype in common.DTYPES.items():
        count = 16 // torch_dtype.itemsize
        for columns in (1, 64, 1024, 2049, row_softmax.longest_row(dtype)):
            config = row_softmax.softmax_config(variant, dtype, columns)
            assert columns // count <= config.keep * 32 * config.warps_per_row
        with pytest.raises(ValueError, match=r"x has rows of \d+; 'online\+packed\+registers' takes up to"):
            row_softmax.softmax_config(variant, dtype, row_softmax.longest_row(dtype) + count)


def test_dense_tensors():
    x = torch.empty(4, 6, 8)
    assert all(activation.is_dense(t) for t in (x, x.transpose(0, 2), x[1:2], x[0, 0, 0], torch.empty(0, 3)))
    assert not any(activation.is_dense(t) for t in (x[:, :3], x[..., ::2], x[:1].expand(4, 6, 8)))


def test_rows_alike():
    base = torch.empty(64, 64, dtype=torch.float16)
    assert row_softmax.rows_alike(base, torch.empty_like(base))
    assert row_softmax.rows_alike(base[:, :40], torch.empty(64, 40, dtype=torch.float16))
    assert not row_softmax.rows_alike(base[:, :41], torch.empty(64, 41, dtype=torch.float16))
    assert row_softmax.rows_alike(base[:1, :41], torch.empty(1, 41, dtype=torch.float16))
    assert not row_softmax.rows_alike(base[:, 1:41], torch.empty(64, 40, dtype=torch.float16))


# Errors


def test_the_blocks_say_that_they_need_a_gpu():
    x = torch.randn(8, 8)
    for call in (blocks.softmax, blocks.elu, blocks.hard_shrink, blocks.hard_swish):
        with pytest.raises(ValueError, match="x is on cpu; the blocks run on CUDA"):
            call(x)
    with pytest.raises(ValueError, match="a is on cpu"):
        blocks.hgemm(x.half(), x.half())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_ceiling_needs_a_gpu():
    with pytest.raises(ValueError, match="no CUDA device"):
        blocks.mma_ceiling()


def test_errors_name_the_argument():
    x = torch.randn(8, 8)
    with pytest.raises(TypeError, match=r"x is torch\.int64; it may be torch\.float32"):
        blocks.softmax(x.long())
    with pytest.raises(TypeError, match="x is a list"):
        blocks.elu([1.0])
    with pytest.raises(ValueError, match="variant is 'fast'; it may be None, 'naive"):
        blocks.softmax(x, variant="fast")
    with pytest.raises(ValueError, match="access is 'wide'"):
        blocks.hard_swish(x, access="wide")
    with pytest.raises(ValueError, match="layout is 'nt'; it may be 'nn', 'tn'"):
        blocks.hgemm(x.half(), x.half(), layout="nt")
    with pytest.raises(TypeError, match=r"a is torch\.float32; it may be torch\.float16"):
        blocks.hgemm(x, x)
    with pytest.raises(ValueError, match=r"\(dtype, accumulate\) is \('bf16', 'f16'\)"):
        ceiling.ceiling_call("bf16", "f16", 8, 1e9)
    with pytest.raises(ValueError, match="warps is 3"):
        ceiling.ceiling_call("f16", "f32", 3, 1e9)


@pytest.mark.parametrize(
    ("a", "b", "layout", "message"),
    (
        ((8, 16), (24, 8), "nn", r"b is \(24, 8\); with a \(8, 16\) and layout 'nn' its K must be 16"),
        ((8, 16), (16, 8), "tn", "its K must be 16"),
        ((8, 12), (12, 8), "nn", "a has K = 12; K must be a multiple of 8"),
        ((8, 16), (16, 9), "nn", "b has N = 9; N must be a multiple of 8"),
        ((8, 16, 1), (16, 8), "nn", r"a is \(8, 16, 1\); it must have two dimensions"),
    ),
)
def test_product_sizes_are_checked(a, b, layout, message):
    with pytest.raises(ValueError, match=message):
        gemm._sizes(torch.empty(a), torch.empty(b), layout)


def test_product_strides_are_checked():
    x = torch.empty(16, 32, dtype=torch.float16)
    gemm._check_rows("a", x)
    gemm._check_rows("a", x[:, 8:16])
    for bad in (x.t(), x[:, 1:9], torch.empty(16, 20, dtype=torch.float16)[:, :8]):
        with pytest.raises(ValueError, match=r"b has strides .* its rows start on 16 bytes"):
            gemm._check_rows("b", bad)


# What the compiler makes of it


def gemm_points():
    for turn, (operands, layout) in enumerate(itertools.product(gemm.OPERANDS, gemm.LAYOUTS)):
        for arch in {"sm_90a", ARCHITECTURES[turn % len(ARCHITECTURES)]}:
            yield gemm.default_config(8192, 8192, operands[1], arch, 132), operands, layout, arch
    for config in gemm.CONFIGS.values():
        for operands in gemm.OPERANDS[:2]:
            if gemm.fits(config, operands[1], "sm_90a"):
                yield config, operands, "nn", "sm_90a"
        if gemm.fits(config, "f32", "sm_90a"):
            yield config, gemm.OPERANDS[0], "tn", "sm_90a"


@needs_sass
@pytest.mark.parametrize(
    ("config", "operands", "layout", "arch"),
    sorted(set(gemm_points()), key=str),
    ids=lambda x: getattr(x, "name", None),
)
def test_hgemm_compiles_without_spills_to_the_products_it_should(config, operands, layout, arch):
    compiled = jit.compile(gemm.gemm_source(config, *operands, layout), arch)
    found = compiled.report
    assert (found.spills, found.stack, found.static_shared, found.warnings) == (0, 0, 0, ())
    occupied = jit.occupancy(arch, config.threads, found.registers, config.shared_memory(layout))
    assert occupied.blocks >= config.min_blocks
    assert config.shared_memory(layout) <= jit.shared_limit(arch)
    loop = loop_of(compiled.cubin)
    m_tiles, n_tiles = config.block_m // config.warps_m // 16, config.block_n // config.warps_n // 8
    steps = config.block_k // 16
    copies = (config.block_m + config.block_n) * config.block_k // CHUNK // config.threads
    assert opcode_count(loop, "HMMA") == m_tiles * n_tiles * steps
    assert opcode_count(loop, "LDSM") == (m_tiles + n_tiles // 2) * steps
    assert opcode_count(loop, "LDGSTS") == copies
    assert opcode_count(loop, "BAR") == 1
    assert not any(opcode_count(loop, other) for other in ("LDL", "STL", "LDG", "STS"))


@needs_sass
@pytest.mark.parametrize("config", ceiling.CONFIGS.values(), ids=lambda c: f"{c.warps}warps")
@pytest.mark.parametrize("operands", gemm.OPERANDS, ids="-".join)
def test_the_ceiling_loop_is_products_and_a_counter(config, operands):
    for arch in ARCHITECTURES:
        compiled = jit.compile(ceiling.ceiling_source(config, *operands), arch)
        assert (compiled.report.spills, compiled.report.stack) == (0, 0)
        assert jit.occupancy(arch, config.warps * 32, compiled.report.registers, 0).blocks >= 1
    loop = loop_of(jit.compile(ceiling.ceiling_source(config, *operands), "sm_90a").cubin)
    products = 2 * config.m_tiles * config.n_tiles
    assert opcode_count(loop, "HMMA") == products
    assert len([line for line in loop if "NOP" not in line]) <= products + 6


@needs_sass
@pytest.mark.parametrize("config", activation.CONFIGS.values(), ids=lambda c: c.tag)
def test_activations_compile_to_wide_accesses(config):
    for arch in ARCHITECTURES:
        report = jit.compile(activation.activation_source(config), arch).report
        assert (report.spills, report.stack, report.warnings) == (0, 0, ())
        assert jit.occupancy(arch, common.THREADS, report.registers, 0).fraction >= 0.75
    text = jit.disassemble(jit.compile(activation.activation_source(config), "sm_90a").cubin)
    wide = config.unroll if config.packed else 0
    assert len(re.findall(r"\bLDG\.E\.128\b", text)) == len(re.findall(r"\bSTG\.E\.128\b", text)) == wide


def softmax_points():
    found = {
        row_softmax.softmax_config(variant, dtype, columns)
        for variant in row_softmax.VARIANTS.values()
        for dtype in common.DTYPES
        for columns in ((100, 2100) if dtype == "f16" else (1000, 8000))
    }
    return sorted(found, key=str)


@needs_sass
@pytest.mark.parametrize(
    "config", softmax_points(), ids=lambda c: f"{c.variant.tag}-{c.dtype}-{c.warps_per_row}w-keep{c.keep}"
)
def test_softmax_compiles(config):
    for arch in ARCHITECTURES:
        compiled = jit.compile(row_softmax.softmax_source(config), arch)
        assert (compiled.report.spills, compiled.report.stack, compiled.report.warnings) == (0, 0, ())
        assert compiled.report.static_shared == (64 if config.warps_per_row > 1 else 0)
    text = jit.disassemble(jit.compile(row_softmax.softmax_source(config), "sm_90a").cubin)
    loads, stores = (len(re.findall(rf"\b{word}\.E\.128\b", text)) for word in ("LDG", "STG"))
    assert (loads > 0) == (stores > 0) == config.variant.packed
    if config.keep:
        assert loads == stores == config.keep


# The bench


def item(tag, call, verify=lambda: None):
    return bench.Item(tag, call, verify)


def broken():
    raise RuntimeError("no such instruction")


def test_one_failing_variant_does_not_stop_the_others():
    group = bench.Group(
        "softmax",
        "4x4 f32",
        (
            item(bench.TORCH, lambda: torch.ones(100).sum()),
            item("good", lambda: torch.ones(10).sum()),
            item("wrong", lambda: None, lambda: "3 of 16 elements differ"),
            item("raises", broken, broken),
            item("raises when timed", broken),
            item("ceiling 8 warps", lambda: None),
        ),
        flops=1e6,
    )
    settings = bench.Settings(rounds=2, round_ms=0.05, warmup_ms=0.05, max_iterations=3)
    rows = {row.tag: row for row in bench.run_group(group, settings, torch.device("cpu"))}
    assert [row.ok for row in rows.values()] == [True, True, False, False, False, True]
    assert rows["good"].versus_torch > 0 and rows["good"].of_ceiling > 0 and rows["good"].tflops > 0
    assert rows["wrong"].milliseconds is None and "3 of 16" in rows["wrong"].message
    assert "no such instruction" in rows["raises"].message and "no such" in rows["raises when timed"].message
    text = bench.table(list(rows.values()))
    assert text.count("FAILED") == 3 and "6 rows, 3 failed" in text
    assert bench.best_by_group(list(rows.values())) == {"softmax 4x4 f32": "good"}
    again = [bench.Row(**row) for row in json.loads(json.dumps([row.to_dict() for row in rows.values()]))]
    assert bench.table(again) == text


def test_the_checks_can_fail():
    expected = torch.rand(4, 5, dtype=torch.float64)
    for dtype in common.DTYPES.values():
        assert bench.wrong(expected.to(dtype), expected) is None
        off = expected.to(dtype)
        off[2, 3] *= 1.05
        assert "1 of 20 elements differ, first (2, 3)" in bench.wrong(off, expected)
        off[2, 3] = float("nan")
        assert bench.wrong(off, expected) is not None
        assert bench.beyond(off, expected, 1.0) is not None
    out = torch.zeros(4, 5)
    assert bench.verify(lambda: None, out, slice(None), expected) is not None  # poison stays
    assert bench.verify(lambda: out.copy_(expected), out, slice(1, 3), expected[1:3]) is None


def test_honest_products_have_small_errors():
    a, b = torch.randn(32, 256).half(), torch.randn(256, 24).half()
    assert 1e-3 < bench.product_error(a, b, "f32") < bench.product_error(a, b, "f16") < 1


# On a GPU


def randn(*shape: int, dtype: str) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=common.DTYPES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize("variant", row_softmax.VARIANTS)
def test_softmax_agrees_with_float64(variant, dtype):
    for rows, columns in ((1, 1), (5, 7), (3, 63), (9, 65), (17, 127), (8, 256), (3, 1023), (2, 1025), (3, 4099)):
        x = 3 * randn(rows, columns, dtype=dtype)
        out = torch.full_like(x, float("nan"))
        assert blocks.softmax(x, variant=variant, out=out) is out
        message = bench.wrong(out, torch.softmax(x.double(), -1))
        assert message is None, f"{rows}x{columns}: {message}"


@pytest.mark.gpu
def test_softmax_of_long_rows_shapes_strides_and_in_place():
    x = 3 * randn(2, 100003, dtype="f16")
    assert bench.wrong(blocks.softmax(x), torch.softmax(x.double(), -1)) is None
    y = 3 * randn(2, 3, 5, 77, dtype="f32")
    assert bench.wrong(blocks.softmax(y), torch.softmax(y.double(), -1)) is None
    wide = 3 * randn(33, 301, dtype="f16")
    for view in (wide[:, :128], wide[:, 3:130], wide[::2, 1:]):
        assert bench.wrong(blocks.softmax(view), torch.softmax(view.double(), -1)) is None
    with pytest.raises(ValueError, match=r"variant is 'online\+packed', but rows of x"):
        blocks.softmax(wide[:, 3:130], variant="online+packed")
    with pytest.raises(ValueError, match="x has strides"):
        blocks.softmax(wide.t())
    expected = torch.softmax(y.double(), -1)
    for variant in row_softmax.VARIANTS:
        z = y.clone()
        assert bench.wrong(blocks.softmax(z, variant=variant, out=z), expected) is None, variant
    assert blocks.softmax(y[:0]).shape == (0, 3, 5, 77)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", (40, 2000))
@pytest.mark.parametrize("variant", row_softmax.VARIANTS)
def test_softmax_of_special_rows(variant, columns):
    inf, nan = float("inf"), float("nan")
    x = randn(7, columns, dtype="f32")
    x[0] = -inf
    x[1, : columns - 1] = -inf  # one finite value, last
    x[2, 0] = -inf
    x[3, 5] = inf
    x[4, columns // 2] = nan
    x[5] = x[5] * 1e-3 + 60
    x[6, 3] = 1000
    out, expected = blocks.softmax(x, variant=variant), torch.softmax(x.double(), -1)
    rows = slice(0, 6) if variant.startswith("naive") else slice(0, 7)
    expected[3] = nan  # float64 of torch says the same; stated here as it is our promise
    if variant.startswith("naive"):
        assert out[3].isnan().any() and out[6, 3].isnan() and not out[6, 4] > 0  # overflow
        out[3] = nan
    assert bench.wrong(out[rows], expected[rows]) is None
    assert out[0].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("access", activation.ACCESSES)
@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    (
        (blocks.elu, torch.nn.functional.elu),
        (lambda x, **kw: blocks.elu(x, 0.3, **kw), lambda x: torch.nn.functional.elu(x, 0.3)),
        (blocks.hard_shrink, torch.nn.functional.hardshrink),
        (lambda x, **kw: blocks.hard_shrink(x, 1.25, **kw), lambda x: torch.nn.functional.hardshrink(x, 1.25)),
        (blocks.hard_swish, torch.nn.functional.hardswish),
    ),
    ids=("elu", "elu0.3", "hard_shrink", "hard_shrink1.25", "hard_swish"),
)
def test_activations_agree_with_float64(ours, theirs, dtype, access):
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 0.5, -0.5, 3.0, -3.0, 1e-4, -1e-4, -0.015, -0.0157]
    for size in (*SIZES, 4096, 100001):
        for start in (0, 1, 3):
            base = 3 * randn(size + start, dtype=dtype)
            base[: len(special)] = torch.tensor(special, device="cuda")[: size + start].to(base.dtype)
            x = base[start:]
            out = torch.full_like(base, float("nan"))[start:]  # as far past 16 bytes as x
            assert ours(x, access=access, out=out) is out
            message = bench.wrong(out, theirs(x.double()))
            assert message is None, f"size {size}, start {start}: {message}"


@pytest.mark.gpu
def test_activations_keep_neighbours_strides_and_refuse_misfits():
    base = randn(300, dtype="f16")
    kept = base.clone()
    blocks.hard_swish(base[13:277], out=base[13:277])
    assert torch.equal(base[:13], kept[:13]) and torch.equal(base[277:], kept[277:])
    assert bench.wrong(base[13:277], torch.nn.functional.hardswish(kept[13:277].double())) is None
    x = randn(6, 10, 4, dtype="f32").permute(2, 0, 1)
    y = blocks.elu(x)
    assert y.stride() == x.stride() and bench.wrong(y, torch.nn.functional.elu(x.double())) is None
    with pytest.raises(ValueError, match="it must be dense in memory"):
        blocks.elu(x[..., ::2])
    with pytest.raises(ValueError, match="access is 'packed', but x starts"):
        blocks.elu(base[1:], access="packed", out=torch.empty(299, dtype=torch.float16, device="cuda"))
    assert blocks.elu(base[:0]).numel() == 0


def gpu_configs(accumulate: str) -> list[gemm.HgemmConfig]:
    arch = common.device_arch(torch.device("cuda", 0))
    return [config for config in gemm.CONFIGS.values() if gemm.fits(config, accumulate, arch)]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", gemm.LAYOUTS)
@pytest.mark.parametrize("operands", gemm.OPERANDS, ids="-".join)
def test_hgemm_agrees_with_float64(operands, layout):
    dtype, accumulate = operands
    shapes = (
        (1, 8, 8),
        (63, 72, 40),
        (65, 264, 8),
        (127, 256, 200),
        (300, 520, 1032),
        (1023, 1016, 256),
        (257, 136, 32),
    )
    for m, n, k in shapes:
        a, b = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype)
        expected, allowed = a.double() @ b.double(), bench.product_error(a, b, accumulate)
        given = b if layout == "nn" else b.t().contiguous()
        for config in gpu_configs(accumulate):
            guarded = torch.full((m + 2, n + 8), float("nan"), device="cuda", dtype=a.dtype)
            out = guarded[1 : m + 1, :n]
            blocks.hgemm(a, given, layout=layout, accumulate=accumulate, config=config, out=out)
            message = bench.beyond(out, expected, allowed)
            assert message is None, f"{config.name} {(m, n, k)}: {message}"
            assert guarded[0].isnan().all() and guarded[-1].isnan().all() and guarded[:, n:].isnan().all()


@pytest.mark.gpu
def test_hgemm_takes_strided_operands_and_its_default():
    a, b = randn(200, 512, dtype="bf16")[:, 64:320], randn(256, 640, dtype="bf16")[:, 8:400]
    expected, allowed = a.double() @ b.double(), bench.product_error(a, b, "f32")
    assert bench.beyond(blocks.hgemm(a, b), expected, allowed) is None
    assert bench.beyond(blocks.hgemm(a, b.t().contiguous(), layout="tn", config=gemm.SMALL), expected, allowed) is None
    big = randn(2048, 2048, dtype="f16")
    assert (
        bench.beyond(blocks.hgemm(big, big), big.double() @ big.double(), bench.product_error(big, big, "f32")) is None
    )


@pytest.mark.gpu
def test_hgemm_of_nothing_and_refusals():
    x = randn(16, 16, dtype="f16")
    assert torch.equal(blocks.hgemm(x[:, :0], x[:0]), torch.zeros_like(x))
    assert blocks.hgemm(x[:0], x).shape == (0, 16)
    with pytest.raises(ValueError, match=r"accumulate is 'f16'; for torch\.bfloat16 operands it may be 'f32'"):
        blocks.hgemm(x.bfloat16(), x.bfloat16(), accumulate="f16")
    with pytest.raises(ValueError, match="config is '3x3'"):
        blocks.hgemm(x, x, config="3x3")
    with pytest.raises(ValueError, match="too few registers"):
        blocks.hgemm(x, x, config="256x256x32 4x2 s4")
    with pytest.raises(ValueError, match=r"out is torch\.float16"):
        blocks.hgemm(x, x, out=torch.empty(8, 16, device="cuda", dtype=torch.float16))
    with pytest.raises(TypeError, match=r"b is torch\.bfloat16"):
        blocks.hgemm(x, x.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("operands", gemm.OPERANDS, ids="-".join)
def test_the_ceiling_is_a_plausible_figure(operands):
    for warps in ceiling.CONFIGS:
        call, flops = ceiling.ceiling_call(*operands, warps, 1e11)
        assert bench.verify_ceiling(call) is None
        assert flops == pytest.approx(1e11, rel=0.1)
    short = blocks.mma_ceiling(*operands, warps=8, milliseconds=0.5, repeats=8)
    long = blocks.mma_ceiling(*operands, warps=8, milliseconds=2.0, repeats=8)
    assert 10 < short < 5000 and long == pytest.approx(short, rel=0.25)  # time grows with the work


@pytest.mark.gpu
def test_the_blocks_run_on_the_current_stream():
    x = randn(512, 512, dtype="f16")
    blocks.softmax(blocks.hgemm(blocks.hard_swish(x), x))  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        y = blocks.hard_swish(x)
        z = blocks.hgemm(y, y)
        w = blocks.softmax(z)
        done = stream.query()
    assert not done, "the blocks did not queue behind the work on the current stream"
    stream.synchronize()
    assert bench.wrong(w, torch.softmax(z.double(), -1)) is None
