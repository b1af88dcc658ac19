"""The Hopper kernel without a GPU: what the compiler and the SASS say of its configurations."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from disassembly import disassembled
from recorded_spills import check_spills, compiled_by_tests, name_of, recorded
from sass_loops import LAUNCH_REGISTERS, families, steady_loops

from flashlane import jit
from flashlane.jit import sass
from flashlane.kernels.hopper.forward import tiles
from flashlane.kernels.hopper.forward.config import REGISTERS, HopperConfig, combine_source
from flashlane.kernels.hopper.forward.kernel import KERNEL
from flashlane.kernels.hopper.wgmma import wgmma_header
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.seqlen import SeqlenConfig

ARCH = "sm_90a"


def config(head_dim: int, shape: tiles.TileShape, **features: object) -> HopperConfig:
    return HopperConfig("bf16", head_dim, head_dim, **asdict(shape), **features)


EVERY_MODIFIER = ScoreConfig(softcap=True, alibi=True, sinks=True)
LARGEST = {"has_left": True, "has_right": True, "score": EVERY_MODIFIER}
CACHED = {"seqlen": SeqlenConfig(cache=True, paged=True), "gather": True, "split": True, "combine_in_kernel": True}
WIDEST = replace(config(64, tiles.M128N80S3, has_right=True), head_dim_v=1016)
ALIBI, SOFTCAP = ScoreConfig(alibi=True), ScoreConfig(softcap=True)
DEFERRED = [
    (64, tiles.class_of(64, 64).plain[0], ALIBI),
    (64, tiles.class_of(64, 64).plain[3], ALIBI),
    *((64, shape, SOFTCAP) for shape in tiles.class_of(64, 64).capped_plain),
    *((128, tiles.class_of(128, 128).plain[i], ALIBI) for i in (0, 2, 3)),
    *((128, shape, SOFTCAP) for shape in tiles.class_of(128, 128).capped_plain[:2]),
    *((160, tiles.class_of(160, 160).plain[i], SOFTCAP) for i in (1, 2)),
    *((192, tiles.class_of(192, 192).plain[0], score) for score in (ALIBI, SOFTCAP)),
]
"""Deferred maxima of modified scores, in the shapes that have the fewest registers to spare."""
BOUNDED = [
    config(64, tiles.M256N64S4, has_right=True, score=SOFTCAP, bounded_score=True, polynomials=tiles.POLYNOMIALS),
    *(config(d, tiles.M192N64S3, has_right=True, score=SOFTCAP, bounded_score=True) for d in (96, 128)),
]
"""Constants in the place of a row maximum."""
SHIPPED = [what for what, _ in KERNEL.shipped()]
OTHERS = [
    config(128, tiles.M128N128S3, **LARGEST, seqlen=SeqlenConfig(varlen=True)),
    config(128, tiles.TileShape(128, 1, 3), **LARGEST, **CACHED, packed_heads=3, pack_gqa=4),
    config(256, tiles.M128N64S2, **CACHED),
    WIDEST,
    *(config(head_dim, shape, has_right=True, score=score) for head_dim, shape, score in DEFERRED),
    *BOUNDED,
]


@pytest.mark.parametrize("what", dict.fromkeys(SHIPPED + OTHERS), ids=lambda c: f"D{c.head_dim}, {c.describe()}")
def test_compiles_as_the_schedule_needs(what: HopperConfig) -> None:
    compiled = jit.compile(what.source(), ARCH)
    report = compiled.report
    assert report.registers == LAUNCH_REGISTERS[what.consumers]
    # C75xx would warn: wgmma serialised, or setmaxnreg ignored. The formula of shared memory is asserted in the source.
    check_spills(what, what.source())
    assert what.shared_memory + report.static_shared <= jit.shared_limit(ARCH)
    text = disassembled(compiled.cubin)
    counts = sass.count_instructions(text)
    assert counts["HGMMA"] > 0 and counts["UTMALDG"] > 0 and counts["USETMAXREG"] == 2
    assert ("LDGSTS" in counts) == what.gather == ("ARRIVES.LDGSTSBAR" in text)
    assert (".MULTICAST" in text) == (what.cluster > 1) == ("UCGABAR_WAIT" in counts)
    # The semaphore that counts the splits of a tile.
    assert ("ATOMG.E.INC.STRONG.GPU" in text) == what.combine_in_kernel
    # With a deferred maximum, what raises it is inside the loop, and hardly ever runs.
    loops = steady_loops(text, shortest=what.deferred_max)
    assert len(loops) == (3 if what.has_left else 2)  # masked and not; with a left bound masked at both ends
    for loop in loops:
        products = sum(op.startswith("HGMMA") for op in loop)
        assert products == -(-what.head_dim // 16) + what.block_n // 16
        assert not [op for op in loop if op.startswith("F2I")], "a division by what the compiler does not know"
        # Nothing in the steady loop goes to local memory, and descriptors stay in uniform registers (but for one of the
        # many that 12 steps over D 192 take).
        assert not [op for op in loop if op.startswith(("LDL", "STL"))]
        assert sum(op.startswith("R2UR") for op in loop) <= (what.head_dim == 192)
        assert sum(op.startswith("MUFU.TANH") for op in loop) == what.score.softcap * what.block_n // 2
        # A consumer waits for no memory but that of its own CTA.
        assert not [op for op in loop if op.startswith(("MEMBAR.ALL.GPU", "CCTL", "ERRBAR"))]


@pytest.mark.parametrize(("head_dim", "shape"), [(64, tiles.M256N64S4), (128, tiles.M128N128S3)])
def test_blocks_without_a_mask_take_no_maximum(head_dim: int, shape: tiles.TileShape) -> None:
    maxima = []
    for what in (config(head_dim, shape), config(head_dim, replace(shape, deferred_max=True))):
        text = disassembled(jit.compile(what.source(), ARCH).cubin)
        loops = [families(loop) for loop in steady_loops(text, shortest=True)]
        assert len(loops) == 2 and all(loop["MUFU"] >= shape.block_n // 2 for loop in loops)
        assert not any(loop["LDS"] for loop in loops)  # of the maxima of rows with large scores
        maxima.append([loop["FMNMX"] for loop in loops])
    before, (masked, unmasked) = maxima
    assert min(before) >= shape.block_n // 2 and masked == before[0] and unmasked == 0


def test_a_debug_build_bounds_every_wait() -> None:
    """Each wait for a barrier has a trap behind it, so that a hang is an error."""
    for what in (config(128, tiles.M128N128S3), config(128, replace(tiles.M128N128S3, cluster=2), has_right=True)):
        source = what.source()
        text, debug = (disassembled(jit.compile(source, ARCH, debug=mode).cubin) for mode in (False, True))
        plain, bounded = sass.count_instructions(text), sass.count_instructions(debug)
        # A wait tries once, and then again and again.
        assert "BPT" not in plain and 2 * bounded["BPT"] >= debug.count(".TRYWAIT") > 10


def test_registers_fit_the_file() -> None:
    for consumers, (producer, consumer) in REGISTERS.items():
        assert producer % 8 == consumer % 8 == 0
        assert 128 * (producer + consumers * consumer) <= 65536
        # setmaxnreg only moves what the launch allocated.
        assert producer + consumers * consumer <= (consumers + 1) * LAUNCH_REGISTERS[consumers] // 8 * 8


@pytest.mark.parametrize("one", tiles.CLASSES, ids=lambda one: f"D{one.head_dim}/{one.head_dim_v}")
def test_every_shape_of_a_class_fits_shared_memory(one: tiles.ShapeClass) -> None:
    for shape in (one.few_rows, one.few_rows_without_modifier, *one.shapes, *one.plain, *one.loaded):
        what = HopperConfig("f16", one.head_dim, one.head_dim_v, **asdict(shape))
        assert what.shared_memory <= jit.shared_limit(ARCH), shape
        assert what.consumers > 1 or not what.pingpong  # ping-pong needs two
    assert one.loaded[-1].consumers <= 2, "score modifiers and gathered pages need the registers"


@pytest.mark.parametrize("sinks", [False, True])
def test_combining_compiles(sinks: bool) -> None:
    report = jit.compile(combine_source("f16", 72, ScoreConfig(sinks=sinks)), ARCH).report
    assert report.spills == 0 and not report.warnings


def test_wgmma_wrappers_name_every_register() -> None:
    text = wgmma_header("bf16", (8, 80, 80))
    assert text.count("struct Wgmma<80>") == text.count("struct Wgmma<8>") == 1
    assert text.count("m64n80k16.f32.bf16.bf16") == text.count("float (&d)[40]") >= 3
    for wrong in (0, 12, 264):
        with pytest.raises(ValueError, match=f"columns is {wrong}"):
            wgmma_header("f16", (wrong,))


def test_generated_headers_are_found_and_are_part_of_the_key() -> None:
    text = '#include "generated.cuh"\nextern "C" __global__ void k(int* p) { *p = GENERATED; }'
    one, two = (jit.KernelSource("k.cu", text, "k", (), (("generated.cuh", f"#define GENERATED {n}"),)) for n in (1, 2))
    assert jit.compile(one, ARCH).key != jit.compile(two, ARCH).key
    with pytest.raises(jit.CompileError, match=r"generated\.cuh"):
        jit.compile(replace(one, headers=()), ARCH)


def test_all_that_is_recorded_of_spills_is_within_what_configurations_allow() -> None:
    """Each bound is the most that is recorded of a configuration that has it: none is looser than it must be."""
    most: dict[tuple[str, int], int] = {}
    spilled = recorded()["bytes"]
    for config, source in compiled_by_tests():
        bound = getattr(config, "design", "forward"), config.spills_allowed
        most[bound] = max(most.get(bound, 0), spilled.get(name_of(config, source), 0))
    assert {bound: found for bound, found in most.items() if found != bound[1]} == {}
