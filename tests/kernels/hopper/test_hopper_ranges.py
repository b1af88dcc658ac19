"""Ranges of keys in one launch, and keys that arrive while it runs: what the device code reads, and on a GPU that it is
right."""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sass_loops import steady_loops

from flashlane import jit
from flashlane.core.arch import arch_of
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import EDGE, MOST_CHUNKS, OWN, Arriving, Chunk, Range, Ranges
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.forward import tiles
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.kernel import KERNEL
from flashlane.kernels.hopper.forward.launch import HopperParams
from flashlane.kernels.hopper.forward.ranged import ArrivalParams, as_dense
from flashlane.kernels.seqlen import SeqlenConfig

ARCH = "sm_90a"
SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "scripts"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(arch_of(HERE) != ARCH, reason="needs an sm_90 GPU")
PLAIN = HopperConfig(
    "bf16", 128, 128, **asdict(tiles.M128N128S3), has_right=True, seqlen=SeqlenConfig(varlen=True), ranges=True
)
ARRIVING = replace(PLAIN, arrivals=True)
LARGEST = HopperConfig(
    "f16", 256, 256, **asdict(tiles.M128N64S2), has_left=True, has_right=True, seqlen=SeqlenConfig(varlen=True),
    ranges=True, arrivals=True,
)  # fmt: skip


@pytest.fixture
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("arriving_keys")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(
    "config, mirror", [(PLAIN, HopperParams), (ARRIVING, ArrivalParams)], ids=["plain", "arriving"]
)
def test_the_mirror_of_the_parameters_has_their_offsets(config: HopperConfig, mirror: type[ctypes.Structure]) -> None:
    source = config.source()
    names = [name for name, *_ in mirror._fields_ if name not in ("padding", "before_arrivals")]
    checks = [f'static_assert(offsetof(Params, {name}) == {getattr(mirror, name).offset}, "{name}");' for name in names]
    checks.append(f"static_assert(sizeof(Params) <= {ctypes.sizeof(mirror)});")
    text = '#include "hopper/forward/params.cuh"\n' + "\n".join(checks) + '\nextern "C" __global__ void entry() {}\n'
    jit.compile(KernelSource("mirror.cu", text, "entry", source.constants, source.headers), ARCH)


@pytest.mark.parametrize("config", [PLAIN, ARRIVING, LARGEST], ids=lambda config: config.describe())
def test_the_steady_loop_is_as_without(config: HopperConfig) -> None:
    compiled = jit.compile(config.source(), ARCH)
    text, counts = _disassembled(compiled.cubin)
    assert not compiled.report.spills and not [line for line in compiled.report.warnings if "spill" not in line]
    assert counts["HGMMA"] > 0 and counts["UTMALDG"] > 0
    # A flag is loaded past the caches of the SM. Who waits too long for it ends the kernel, also in release builds.
    assert ("LDG.E.STRONG.SYS" in text) == ("BPT" in counts) == config.arrivals
    plain = jit.compile(replace(config, ranges=False, arrivals=False).source(), ARCH)
    loops, before = steady_loops(text), steady_loops(_disassembled(plain.cubin)[0])
    for loop, other in zip(loops, before, strict=True):
        assert abs(len(loop) - len(other)) <= len(other) // 100 + 1
        memory = ("HGMMA", "LDL", "STL", "LDG", "MEMBAR", "CCTL")
        one, same = ([op.split(".")[0] for op in each if op.startswith(memory)] for each in (loop, other))
        assert one == same


def _disassembled(cubin: bytes) -> tuple[str, dict[str, int]]:
    text = jit.disassemble(cubin)
    if text is None:
        pytest.skip("no disassembler")
    return text, jit.sass.count_instructions(text)


def test_a_flag_is_acquired_before_tma_may_read() -> None:
    """After the load of the flag, and before the first load by TMA: the fence of the other proxy."""
    text = (Path(jit.__file__).parents[1] / "cuda" / "attention" / "arrivals.cuh").read_text()
    wait = text[text.index("int wait(") : text.index("private:")]
    assert wait.index("spin(p)") < wait.index("__syncwarp()") < wait.index("fence_proxy_async_global()")
    text, _ = _disassembled(jit.compile(ARRIVING.source(), ARCH).cubin)
    last = text.rindex("LDG.E.STRONG.SYS")
    fence, load = text.index("FENCE.VIEW.ASYNC.G", last), text.index("UTMALDG", last)
    assert text.index("CCTL.IVALL", last) < fence < load


@pytest.mark.parametrize(
    "sequences, chunks, message",
    [
        (((0, 0, 0, 5),), (), "is empty"),
        (((0, 5, 3, 3),), (), "is empty"),
        (((0, 5, 0, 5), (4, 8, 0, 5)), (), "overlap"),
        (((0, 5, 0, 9),), ((0, 4, OWN, 0), (3, 9, 1, 0)), "overlap"),
        (((0, 5, 0, 99),), tuple((i, i + 1, i, 0) for i in range(MOST_CHUNKS + 1)), "takes up to 32"),
    ],
)
def test_impossible_ranges_raise(sequences: tuple, chunks: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranges(tuple(Range(*each) for each in sequences), tuple(Chunk(*each) for each in chunks))


def _call() -> tuple[AttentionProblem, Inputs, torch.Tensor]:
    q, kv = torch.randn(96, 4, 64, dtype=torch.bfloat16), torch.randn(160, 2, 64, dtype=torch.bfloat16)
    problem = AttentionProblem(
        batch=2, heads=4, kv_heads=2, seqlen_q=64, seqlen_k=160, head_dim=64, head_dim_v=64, dtype=torch.bfloat16,
        scale=0.125, window_right=0, varlen=True, arch=ARCH,
    )  # fmt: skip
    return problem, Inputs(q, kv, kv), torch.empty_like(q)


def test_what_arrives_is_given_exactly_where_ranges_have_chunks() -> None:
    problem, inputs, out = _call()
    sequences = Range(32, 96, 0, 160), Range(0, 32, 0, 32)
    arriving = Arriving((inputs.k, inputs.v), 0, 1, 0, 1.0)
    with pytest.raises(ValueError, match="arriving must be given"):
        KERNEL.prepare_ranges(problem, Ranges(sequences), inputs, out, arriving)
    with pytest.raises(ValueError, match="arriving must be given"):
        KERNEL.prepare_ranges(problem, Ranges(sequences, (Chunk(32, 64, 3),)), inputs, out)


def test_a_block_of_keys_is_no_taller_than_the_edges_that_are_copied() -> None:
    shapes = [shape for one in tiles.CLASSES for shape in (*one.shapes, *one.loaded, one.few_rows)]
    assert max(shape.block_n for shape in shapes) <= EDGE


def test_one_range_of_all_rows_and_the_first_keys_is_a_dense_call() -> None:
    """Rows that a dense tile loads past the last key must lie past the end of a tensor, that of the own keys too."""
    problem = AttentionProblem(
        batch=2, heads=4, kv_heads=2, seqlen_q=100, seqlen_k=300, head_dim=128, head_dim_v=128, dtype=torch.bfloat16,
        scale=0.1, varlen=True, arch=ARCH,
    )  # fmt: skip
    q, kv = torch.empty(100, 4, 128), torch.empty(300, 2, 128)
    inputs = Inputs(q, kv, kv)

    def dense(*sequences: Range, chunks: tuple[Chunk, ...] = (), own_rows: int = 0) -> AttentionProblem | None:
        own = torch.empty(own_rows, 2, 128)
        arriving = SimpleNamespace(own=(own, own)) if own_rows else None
        return as_dense(problem, Ranges(sequences, chunks), inputs, arriving)

    assert dense(Range(0, 100, 0, 250)) == replace(problem, batch=1, varlen=False, seqlen_q=100, seqlen_k=250)
    assert dense(Range(0, 99, 0, 250)) is None and dense(Range(0, 100, 1, 250)) is None
    assert dense(Range(0, 60, 0, 250), Range(60, 100, 0, 250)) is None
    chunks = Chunk(0, 150, 0, 0), Chunk(150, 260, OWN, 40)  # key 250 would be row 140 of the own keys
    assert dense(Range(0, 100, 0, 250), chunks=chunks, own_rows=140) is not None
    assert dense(Range(0, 100, 0, 250), chunks=chunks, own_rows=141) is None
    assert dense(Range(0, 100, 0, 250), chunks=chunks) is not None


@pytest.mark.gpu
@needs_hopper
def test_one_launch_has_the_bits_of_packed_sequences(script: ModuleType) -> None:
    for case in script.ONE_LAUNCH:
        found = script.check_one_launch(case)
        assert found["ok"], found


@pytest.mark.gpu
@needs_hopper
def test_keys_that_arrive_meanwhile_give_the_same_bits(script: ModuleType) -> None:
    for case in script.ARRIVE:
        found = script.check_arrivals(case, 20, time.monotonic() + 60)
        assert found["ok"] and found["repeats"] == 20, found


@pytest.mark.gpu
@needs_hopper
def test_five_hundred_repeats_have_the_same_bits(script: ModuleType) -> None:
    found = script.check_arrivals(script.ARRIVE[1], 500, time.monotonic() + 120)
    assert found["ok"] and found["repeats"] == 500, found


@pytest.mark.gpu
@needs_hopper
def test_a_chunk_that_never_comes_is_an_error_that_names_it(script: ModuleType) -> None:
    found = script.apart("lost")
    assert found["ok"], found
