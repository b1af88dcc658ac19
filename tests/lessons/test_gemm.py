"""The matrix product of the lessons: schedule, index maps, what the compiler makes of it, results on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from disassembly import needs_disassembler
from lesson_checks import ARCHITECTURES, loop_of, opcode_count, randn

from flashlane import jit, lessons
from flashlane.kernels.tile_layout import CHUNK
from flashlane.lessons import comparison, gemm, launch

WAVE = """
#include "attention/tile_scheduler.cuh"
// How many rows and columns of C the first CTAs have.
__device__ constexpr int unlike(bool rows, int ctas, int blocks_m, int blocks_n, int group) {
    bool seen[64] = {};
    int count = 0;
    for (int index = 0; index < ctas; ++index) {
        const SwizzledTile tile = swizzled_tile<false>(index, blocks_m, blocks_n, group);
        bool& there = seen[rows ? tile.head : tile.block];
        count += !there, there = true;
    }
    return count;
}
static_assert(unlike(true, 132, 64, 32, 16) == 16 && unlike(false, 132, 64, 32, 16) == 9);
extern "C" __global__ void checked() {}
"""


def test_ctas_that_run_at_one_time_read_the_same_operands():
    """132 CTAs of 64 x 32 tiles; that each tile comes once is tests/cuda's."""
    jit.compile(jit.KernelSource("wave.cu", WAVE, "checked"), "sm_90a")


def pipeline(tiles: int, stages: int, steps: int, passes: int):
    """What one thread of ``hgemm`` does, in order; a barrier comes with every wait.

    (copy, tile, pass, stage), (commit,), (wait, groups that may be in flight), (read, tile, stage).
    """

    def shares(tile: int, stage: int, step: int):
        mine = [i for i in range(passes) if i * steps // passes == step]
        return [("copy", tile, i, stage) for i in mine]

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
def test_a_stage_is_read_after_it_is_written_and_written_after_it_is_read(stages, steps, passes):
    for tiles in range(1, 3 * stages):
        tile_of_stage, pending, groups, arrived, read_since_barrier = {}, [], [], set(), set()
        for what, *event in pipeline(tiles, stages, steps, passes):
            if what == "copy":
                tile, index, stage = event
                old = tile_of_stage.get(stage, tile)
                assert old == tile or old not in read_since_barrier, f"tile {old} is overwritten while a warp reads it"
                tile_of_stage[stage] = tile
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
                tile, stage = event
                read_since_barrier.add(tile)
                if tile < tiles:
                    assert tile in arrived, f"tile {tile} is read before it has arrived"
                    assert tile_of_stage[stage] == tile, f"stage {stage} holds tile {tile_of_stage[stage]}, not {tile}"
        assert {tile for group in groups for tile, _ in group} == set(range(tiles))


def tma_pipeline(warp: int, warps: int, blocks: int, stages: int, lag: int):
    """What one warp of ``gemm_tma.cu`` does, in order: (event, k-block, stage); a wait names the k-block it waits for.

    The warp of number 0 loads the first stages, and in each k-block another one loads.
    """
    if warp == 0:
        yield from (("load", block, block) for block in range(min(stages - lag, blocks)))
    yield ("full", 0, 0)
    yield ("read", 0, 0)
    for block in range(blocks):
        loaded = block + stages - lag
        if loaded < blocks and warp == block % warps:
            if loaded >= stages:
                yield ("empty", loaded - stages, loaded % stages)
            yield ("load", loaded, loaded % stages)
        if block + 1 < blocks:
            yield ("full", block + 1, (block + 1) % stages)
            yield ("read", block + 1, (block + 1) % stages)
        yield ("release", block, block % stages)


@pytest.mark.parametrize(("stages", "lag"), ((3, 2), (4, 2), (5, 2)))
@pytest.mark.parametrize("order", ("in turn", "first warp first", "last warp first"))
def test_stages_of_tma_are_filled_after_all_warps_have_read_them_and_no_warp_waits_for_ever(stages, lag, order):
    warps = 8
    for blocks in range(1, 4 * stages):
        programs = [list(tma_pipeline(warp, warps, blocks, stages, lag)) for warp in range(warps)]
        position, held, released = [0] * warps, {}, {}
        turns = itertools.count()
        while any(at < len(program) for at, program in zip(position, programs, strict=True)):
            ready = []
            for warp, (at, program) in enumerate(zip(position, programs, strict=True)):
                if at == len(program):
                    continue
                event, block, stage = program[at]
                waits = (event == "full" and held.get(stage) != block) or (
                    event == "empty" and released.get((stage, block), 0) < warps
                )
                if not waits:
                    ready.append(warp)
            assert ready, f"{blocks} k-blocks: every warp waits"
            warp = {"in turn": ready[next(turns) % len(ready)], "first warp first": ready[0]}.get(order, ready[-1])
            event, block, stage = programs[warp][position[warp]]
            position[warp] += 1
            if event == "load":
                old = held.get(stage)
                assert old is None or released[stage, old] == warps, f"k-block {old} is overwritten while it is read"
                held[stage] = block
            elif event == "read":
                assert held[stage] == block, f"stage {stage} holds k-block {held[stage]}, not {block}"
            elif event == "release":
                released[stage, block] = released.get((stage, block), 0) + 1


@pytest.mark.parametrize("tiles, held, blocks, expected", ((1376, 132, 128, 56), (688, 66, 128, 28), (132, 132, 8, 0)))
def test_tiles_of_the_last_wave_are_split_where_they_fill_at_most_half_of_it(tiles, held, blocks, expected):
    assert gemm.split_tiles(tiles, held, blocks) == expected
    assert gemm.split_tiles(tiles, held, 1) == 0
    assert gemm.split_tiles(held + held // 2 + 1, held, blocks) == 0
    assert gemm.split_tiles(held // 2, held, blocks) == held // 2


CURSORS = """
#include "swizzle.cuh"
// A cursor's addresses are the layout's, from a first row and chunk on: `rows` rows by 16, `chunks` chunks by 2.
template <typename Layout>
__device__ constexpr bool steps_right(int row, int chunk, int rows, int chunks) {
    const FragmentCursor<Layout> cursor(0, row, chunk);
    for (int i = 0; i < rows; i += 16)
        for (int j = 0; j < chunks; j += 2)
            if (cursor.at(0, i, j) != Layout::offset(row + i, chunk + j)) return false;
    return true;
}
// A and B of `warps` warps, each with `size` rows of A, or columns of B; TN: B lies by columns.
template <int K>
__device__ constexpr bool a_is_right(int warps, int size) {
    for (int at = 0; at < warps * 32; ++at)
        if (!steps_right<TileLayout<K, true>>(at / 32 * size + at % 16, at % 32 / 16, size, K / 8)) return false;
    return true;
}
template <int K, int N, bool TN>
__device__ constexpr bool b_is_right(int warps, int size) {
    for (int at = 0; at < warps * 32; ++at) {
        const int warp = at / 32, lane = at % 32;
        if (TN && !steps_right<TileLayout<K, true>>(warp * size + lane % 8 + lane / 16 * 8, lane / 8 % 2, size, K / 8))
            return false;
        if (!TN && !steps_right<TileLayout<N, true>>(lane % 16, warp * size / 8 + lane / 16, K, size / 8)) return false;
    }
    return true;
}
"""


def test_fragments_are_read_where_they_were_written():
    """The compiler evaluates the device's own cursor and layout for every lane."""
    checks = []
    for config in gemm.CONFIGS.values():
        if config.tma:
            continue  # its device file says so itself
        warp_m, warp_n = config.block_m // config.warps_m, config.block_n // config.warps_n
        checks.append(f"static_assert(a_is_right<{config.block_k}>({config.warps_m}, {warp_m}));")
        for layout in ("true", "false"):
            sizes = f"{config.block_k}, {config.block_n}, {layout}"
            checks.append(f"static_assert(b_is_right<{sizes}>({config.warps_n}, {warp_n}));")
    text = CURSORS + "\n".join(dict.fromkeys(checks)) + '\nextern "C" __global__ void entry() {}\n'
    jit.compile(jit.KernelSource("cursors.cu", text, "entry"), "sm_80")


@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_tiles_are_read_without_conflicts(layout):
    for tile in {tile for config in gemm.CONFIGS.values() for tile in config.layouts(layout)}:
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
        assert config == gemm.CONFIGS[gemm.SMALL] or gemm.ctas_of(config, size, size) >= 132
    assert gemm.default_config(8192, 8192, accumulate, "sm_90a", 132).name == gemm.PREFERENCE[accumulate][0]


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


@needs_disassembler
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
    assert occupied.ctas >= config.min_blocks
    assert config.shared_memory(layout) <= jit.shared_limit(arch)
    loop = loop_of(compiled.cubin)
    m_tiles, n_tiles = config.block_m // config.warps_m // 16, config.block_n // config.warps_n // 8
    steps = config.block_k // 16
    copies = (config.block_m + config.block_n) * config.block_k // CHUNK // config.threads
    loads = 2 if layout == "tn" else 4  # of A and B; NN: where B is one box, and where a loop loads its planes
    assert opcode_count(loop, "HMMA") == m_tiles * n_tiles * steps
    assert opcode_count(loop, "LDSM") == (m_tiles + n_tiles // 2) * steps
    assert opcode_count(loop, "LDGSTS") == (0 if config.tma else copies)
    assert opcode_count(loop, "UTMALDG") == (loads if config.tma else 0)
    assert opcode_count(loop, "BAR") == (0 if config.tma else 1)
    assert not any(opcode_count(loop, other) for other in ("LDL", "STL", "LDG", "STS"))


def gpu_configs(accumulate: str) -> list[gemm.HgemmConfig]:
    arch = launch.device_arch(torch.device("cuda", 0))
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
        (2309, 3072, 136),
        (1920, 2560, 192),
    )
    for m, n, k in shapes:
        a, b = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype)
        expected, allowed = a.double() @ b.double(), comparison.product_error(a, b, accumulate)
        given = b if layout == "nn" else b.t().contiguous()
        for config in gpu_configs(accumulate):
            guarded = torch.full((m + 2, n + 8), float("nan"), device="cuda", dtype=a.dtype)
            out = guarded[1 : m + 1, :n]
            lessons.hgemm(a, given, layout=layout, accumulate=accumulate, config=config, out=out)
            message = comparison.beyond(out, expected, allowed)
            assert message is None, f"{config.name} {(m, n, k)}: {message}"
            assert guarded[0].isnan().all() and guarded[-1].isnan().all() and guarded[:, n:].isnan().all()


@pytest.mark.gpu
def test_hgemm_takes_strided_operands_and_its_default():
    a, b = randn(200, 512, dtype="bf16")[:, 64:320], randn(256, 640, dtype="bf16")[:, 8:400]
    expected, allowed = a.double() @ b.double(), comparison.product_error(a, b, "f32")
    assert comparison.beyond(lessons.hgemm(a, b), expected, allowed) is None
    assert (
        comparison.beyond(lessons.hgemm(a, b.t().contiguous(), layout="tn", config=gemm.SMALL), expected, allowed)
        is None
    )
    big = randn(2048, 2048, dtype="f16")
    assert (
        comparison.beyond(
            lessons.hgemm(big, big), big.double() @ big.double(), comparison.product_error(big, big, "f32")
        )
        is None
    )


@pytest.mark.gpu
def test_hgemm_of_nothing_and_refusals():
    x = randn(16, 16, dtype="f16")
    assert torch.equal(lessons.hgemm(x[:, :0], x[:0]), torch.zeros_like(x))
    assert lessons.hgemm(x[:0], x).shape == (0, 16)
    with pytest.raises(ValueError, match=r"accumulate is 'f16'; for torch\.bfloat16 operands it may be 'f32'"):
        lessons.hgemm(x.bfloat16(), x.bfloat16(), accumulate="f16")
    with pytest.raises(ValueError, match="config is '3x3'"):
        lessons.hgemm(x, x, config="3x3")
    with pytest.raises(ValueError, match="too few registers"):
        lessons.hgemm(x, x, config="256x256x32 4x2 s4")
    with pytest.raises(ValueError, match=r"out is torch\.float16"):
        lessons.hgemm(x, x, out=torch.empty(8, 16, device="cuda", dtype=torch.float16))
    with pytest.raises(TypeError, match=r"b is torch\.bfloat16"):
        lessons.hgemm(x, x.bfloat16())
