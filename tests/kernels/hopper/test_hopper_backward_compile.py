"""The Hopper backward without a GPU: what the compiler and the SASS say of its configurations, and which is picked."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from disassembly import disassembled
from recorded_spills import check_spills, name_of
from sass_loops import families, loops, steady_loops

from flashlane import jit
from flashlane.core import registry
from flashlane.core.dispatch import select_backward
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource, sass, tensormap
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.block_lists import BlockListParams
from flashlane.kernels.score import ScoreConfig, ScoreParams
from flashlane.kernels.seqlen import SeqlenParams

ARCH = "sm_90a"
ONE_CTA = "hopper_backward"
"""The kernel that makes all three gradients."""
LAUNCH_REGISTERS = {2: 168}
"""What ``__launch_bounds__`` leaves a thread, by consumers; ``setmaxnreg`` moves registers from there."""
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
COMMON = (64, 128, 256)
EVERYTHING = {"alibi": True, "softcap": 10.0, "sinks": True, "varlen": True, "deterministic": True}
MASKS = {"full": {}, "causal": {"window_right": 0}, "window": {"window_left": 100, "window_right": 9}}


def asked(head_dim: int, head_dim_v: int, **more: object) -> AttentionProblem:
    return AttentionProblem(
        batch=2, heads=8, kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=head_dim, head_dim_v=head_dim_v,
        **{"dtype": torch.bfloat16, "scale": 0.1, "arch": ARCH, "needs_grad": True, **more},
    )  # fmt: skip


def problems() -> Iterator[AttentionProblem]:
    """Problems that lead through the table, and through each feature at the common head dims."""
    for head_dims in HEAD_DIMS:
        yield asked(*head_dims)
        yield asked(*head_dims, dtype=torch.float16, **MASKS["causal"])
    for head_dim in COMMON:
        both = asked(head_dim, head_dim, **MASKS["window"])
        yield replace(both, varlen=True, deterministic=True)
        yield replace(asked(head_dim, head_dim), deterministic=True)
        yield replace(both, softcap=10.0)
        yield replace(both, **EVERYTHING)
    for more in ({}, {"varlen": True}, MASKS["causal"]):  # these acquire the semaphore of dQ with dQ in registers
        yield replace(asked(96, 96, **more), deterministic=True)
    for head_dim in (64, 96, 128):  # the last tiles of many equal ones are split, and all of few
        heads = 2048 // head_dim
        many = replace(asked(head_dim, head_dim), heads=heads, kv_heads=heads, batch=4)
        yield many
        yield replace(many, batch=1, heads=2, kv_heads=2, **MASKS["causal"])
    for head_dims in ((128, 128), (104, 64)):  # idle warps zero dq_accum and write dQ of few steps
        yield replace(
            asked(*head_dims, **MASKS["causal"]), heads=16, kv_heads=16, batch=16, seqlen_q=1024, seqlen_k=1024
        )
    yield replace(many, softcap=10.0)
    yield replace(many, alibi=True, dtype=torch.float16)


def taken() -> list[AttentionProblem]:
    return [problem for problem in problems() if backward.supports(problem) is None]


CONFIGS = tuple(dict.fromkeys(backward.config_of(problem) for problem in taken()))
MAIN = [(config, source) for config in CONFIGS for source in config.gradient_sources()]


def steps_of_consumers(config: OneCtaConfig) -> list[tuple[int, int]]:
    """wgmma of 16 and additions to dQ of a step of each consumer that has a loop of its own.

    The products are S and dP over the head dims and statistics, dV and dK over the queries, dQ over the keys. Additions
    are of eight queries and 64 columns, or of 64 queries and eight columns.
    """
    over_dims = -(-config.head_dim // 16) + -(-config.head_dim_v // 16)
    of_statistics = 2 * config.product_statistics
    products = over_dims + of_statistics + 2 * (config.block_m // 16) + config.block_n // 16
    first = products, config.block_m // (8 if config.split_columns else 16)
    loops = [first] * (1 + config.own_loops)
    if config.mixed_dq:
        loops = [first, (products, (config.head_dim - 64) // 8)]
    if config.skips_hidden:  # a step of hidden keys has the dQ of the step before, and nothing else
        loops = [(products + config.block_n // 16, 2 * additions) for products, additions in loops]
    return loops


@pytest.mark.parametrize("config_and_source", MAIN, ids=lambda pair: name_of(*pair))
def test_the_gradients_compile_as_the_schedule_needs(config_and_source: tuple[Any, KernelSource]) -> None:
    config, source = config_and_source
    constants = dict(source.constants)
    compiled = jit.compile(source, ARCH)
    report = compiled.report
    assert report.registers == LAUNCH_REGISTERS[config.threads // 128 - 1]
    # C75xx would warn: wgmma serialised, or setmaxnreg ignored. The formula of shared memory is asserted in the source.
    check_spills(config, source)
    assert dict(source.constants)["SHARED_BYTES"] + report.static_shared <= jit.shared_limit(ARCH)
    text = disassembled(compiled.cubin)
    counts = sass.count_instructions(text)
    assert counts["HGMMA"] > 0 and counts["UTMALDG"] > 0 and counts["USETMAXREG"] == 2
    # More products than the last dQ of a CTA: between a branch back and its target that may lie by chance.
    steady = [inside for loop in steady_loops(text) if (inside := families(loop))["HGMMA"] > 128 // 16]
    assert steady
    for inside in steady:  # nothing in them goes to local memory; from there comes at most the number of steps
        # With a cap and slopes one value of the narrow heads' tile goes there and back, and two of D 128 after a peeled
        # first step.
        stores = constants["SOFTCAP"] and constants["ALIBI"] and config.head_dim == 64
        stores += 2 * getattr(config, "peels", False)
        assert inside["STL"] <= stores and inside["LDL"] <= 1 + stores
        assert not inside["F2I"], "a division by what the compiler does not know"
    if source.entry == ONE_CTA:
        atomics = config.from_registers
        assert ("UBLKRED" in counts) != atomics, "dQ is added by TMA"
        assert ("UTMASTG" in counts) == config.stores_by_tma, "dK and dV are stored by TMA"
        # Loops over the rows of a slice of dQ: all loads of a row at once, and nothing in local memory.
        fragments = min(4, -(-config.head_dim // 16))
        finishing = [
            inside for loop in loops(text) if (inside := families(loop))["MOVM"] and inside["LDG"] == fragments
        ]
        if config.in_kernel_dq:  # in loops over slices, m-blocks and tiles
            finishing = [min(finishing, key=Counter.total)]
        assert len(finishing) == config.in_kernel_dq
        for inside in finishing:
            assert inside["MOVM"] == 2 * fragments and not inside["STL"] and not inside["LDL"]
        wanted = steps_of_consumers(config)
        steps = [loop for loop in steady if loop["HGMMA"] >= min(products for products, _ in wanted)]
        assert all(inside["STSM"] == config.block_m // 16 for inside in steps), "dS of a warp, transposed on its way"
        added = "REDG" if atomics else "STS"
        if not atomics and config.varlen:  # rows past the end of a packed sequence are cleared
            wanted, added = [(products, 0) for products, _ in wanted], "none"
        assert sorted((inside["HGMMA"], inside[added]) for inside in steps) == sorted(wanted)


def test_the_kernels_before_and_after_compile() -> None:
    sources = (source for config in CONFIGS for source in config.sources())
    others = [source for source in dict.fromkeys(sources) if source not in {source for _, source in MAIN}]
    assert {source.entry for source in others} == {"hopper_backward_preprocess", "hopper_backward_postprocess"}
    for source in others:
        report = jit.compile(source, ARCH).report
        assert report.spills == 0 and not report.warnings, source.constants
        # Dynamic shared memory is asked for by the gradients only: what these have must fit without.
        assert report.static_shared <= 48 << 10, source.constants


def test_registers_fit_the_file() -> None:
    for config, source in MAIN:
        producer, consumer = (dict(source.constants)[f"{who}_REGISTERS"] for who in ("PRODUCER", "CONSUMER"))
        consumers = config.threads // 128 - 1
        assert producer % 8 == consumer % 8 == 0 and 24 <= producer <= consumer <= 240
        # setmaxnreg only moves what the launch allocated.
        assert producer + consumers * consumer <= (consumers + 1) * LAUNCH_REGISTERS[consumers] // 8 * 8


def test_every_head_dim_has_a_tile_that_fits() -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            for more in (MASKS["full"], MASKS["causal"], {**MASKS["window"], **EVERYTHING}):
                problem = asked(head_dim, head_dim_v, **more)
                assert backward.supports(problem) is None, problem.describe()
                config = backward.config_of(problem)
                assert config.shared_memory <= jit.shared_limit(ARCH), (problem.describe(), config)
                assert (config.head_dim, config.head_dim_v, config.dtype) == (head_dim, head_dim_v, "bf16")


def test_a_configuration_has_what_its_problem_needs_and_no_more() -> None:
    for problem in taken():
        config = backward.config_of(problem)
        want = {"score": ScoreConfig.of(problem), "varlen": problem.varlen}
        want |= {"has_left": problem.window_left >= 0, "has_right": problem.window_right >= 0}
        if config.dq_accum_floats:  # what is summed in registers always has one order
            want |= {"deterministic": problem.deterministic}
        assert {name: getattr(config, name) for name in want} == want, problem.describe()


def test_it_follows_the_hopper_forward() -> None:
    kernel = registry.get("hopper(wgmma+tma)")
    for problem in taken():
        assert select_backward(problem, kernel).tag == "hopper", problem.describe()
    elsewhere = asked(64, 64, arch="sm_80")
    assert select_backward(elsewhere, registry.get("tiled")).tag != "hopper"


class ProgramArgument(ctypes.Structure):
    """What a program might read."""

    _fields_ = (("value", ctypes.c_float),)


DECLARED = {"void": "pointer", "float": "float", "int": "int", "long long": "long", "TensorMap": "map"}
DECLARED |= {"SeqlenParams": "seqlen", "ScoreParams": "score", "DqSemaphore": "pointer"}
DECLARED |= {"BlockLists": "lists", "ProgramParams": "program"}
MIRRORED = {
    ctypes.c_void_p: "pointer",
    ctypes.c_float: "float",
    ctypes.c_int: "int",
    ctypes.c_longlong: "long",
    ctypes.c_ubyte * tensormap.MAP_BYTES: "map",
    SeqlenParams: "seqlen",
    ScoreParams: "score",
    BlockListParams: "lists",
    ProgramArgument: "program",
}


def members(text: str) -> list[tuple[str, str]]:
    """Name and kind of each member of ``struct PlainParams``, a kernel's parameters, in a device file."""
    found = re.search(r"struct PlainParams \{(.*?)\n\};", text, re.S)
    assert found, "no struct PlainParams"
    listed = []
    for line in re.sub(r"//[^\n]*", "", found[1]).split(";"):
        if not line.strip():
            continue
        kind, names = re.fullmatch(r"\s*(?:const )?(long long|\w+)(.*)", line, re.S).groups()
        for name in names.split(","):
            listed.append((name.strip(" *\n"), "pointer" if "*" in name else DECLARED[kind]))
    return listed


@pytest.mark.parametrize(
    ("mirror", "file"),
    [
        (backward_launch.params_with(ProgramArgument), "params.cuh"),
        (backward_launch.PreprocessParams, "preprocess.cu"),
        (backward_launch.PostprocessParams, "postprocess.cu"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_parameters_mirror_the_device_s(mirror: type[ctypes.Structure], file: str) -> None:
    fields = [(name, MIRRORED[kind]) for name, kind in mirror._fields_ if name != "padding"]
    assert fields == members(device_code(f"kernels/hopper/backward/{file}"))


def test_a_kernel_without_a_program_takes_the_parameters_before_it() -> None:
    plain, with_program = (
        [field for field in mirror._fields_ if field[0] != "padding"]
        for mirror in (backward_launch.BackwardParams, backward_launch.params_with(ProgramArgument))
    )
    assert with_program == [*plain, ("program", ProgramArgument)]


def test_for_racecheck_every_lane_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It orders threads by their own arrivals; else lane 0 arrives for its warp, whose lanes run in step."""
    (source,) = backward.config_of(asked(64, 64)).gradient_sources()
    plain = jit.compile(source, ARCH)
    monkeypatch.setenv("FLASHLANE_RACECHECK", "1")
    checked = jit.compile(source, ARCH)
    assert checked.key != plain.key and not [line for line in checked.report.warnings if "spill" not in line]
    text, all_lanes = disassembled(plain.cubin), disassembled(checked.cubin)
    arrivals = [len(re.findall(r"@!?P\d SYNCS\.ARRIVE", code)) for code in (text, all_lanes)]
    assert arrivals[0] >= 8 and arrivals[1] < arrivals[0] // 2
