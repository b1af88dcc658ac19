"""Device code without a GPU: what the compiler and the SASS say of every registered kernel."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from disassembly import counted

from flashlane import jit
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel
from flashlane.kernels.mma import attention as mma_attention
from flashlane.kernels.mma import tiles as shapes
from flashlane.kernels.mma.attention import MmaAttention
from flashlane.kernels.mma.config import MmaConfig
from flashlane.kernels.params import attention_params

GRID = [k for k in registry.kernels() if isinstance(k, DeviceKernel)]
KERNELS = [k for k in GRID if k.listed]
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
ENDS_OF_THE_SWIZZLES = [k for k in KERNELS if "swizzle" not in k.tag or "swizzle-qkv" in k.tag]


def elsewhere(kernel: DeviceKernel, number: int) -> tuple[str, ...]:
    """Architectures besides Hopper that a kernel is compiled for here: every third kernel for one."""
    others = tuple(arch for arch in ARCHITECTURES if arch != "sm_90a")
    return others if kernel.tag in shapes.FASTEST else others[number // 3 % len(others) :][: number % 3 == 0]


def problem_of(kernel: DeviceKernel, arch: str, head_dim: int, batch: int = 64) -> AttentionProblem:
    """A problem of a dtype that the kernel takes."""
    dtype = torch.float32 if kernel.family == "fa1" else torch.float16
    return AttentionProblem(batch, 8, 8, 1024, 1024, head_dim, head_dim, dtype, head_dim**-0.5, arch=arch)


def check(kernel: DeviceKernel, problem: AttentionProblem) -> None:
    """Compile what the heuristic picks, and read the compiler's report and the SASS."""
    assert kernel.supports(problem) is None
    config = kernel.config(problem)
    needs = kernel.resources(config)
    assert needs.shared_memory <= jit.shared_limit(problem.arch)
    compiled = kernel.compile(config, problem.arch)
    report = compiled.report
    assert report.spills <= kernel.spills_allowed(config, problem.arch), f"{report.spills} bytes of spills"
    assert not [w for w in report.warnings if "spill" not in w]
    occupancy = jit.occupancy(problem.arch, needs.threads, report.registers, needs.shared_memory)
    assert occupancy.ctas >= getattr(config, "min_blocks", 1) or occupancy.limit == "shared memory"
    if kernel.family != "mma" or problem.arch != "sm_90a":
        return  # disassembling takes as long as compiling; the instructions are the same on every architecture
    counts = counted(compiled.cubin)
    assert counts["HMMA"] > 0 and counts["LDSM"] > 0 and counts["MUFU.EX2"] > 0
    if isinstance(config, MmaConfig):
        assert (counts.get("LDGSTS", 0) > 0) == config.vector
    if report.spill_stores == 0:
        assert counts.get("STL", 0) == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.tag)
def test_compiles(kernel: DeviceKernel) -> None:
    check(kernel, problem_of(kernel, "sm_90a", 128))


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [(k, arch) for k, number in zip(ENDS_OF_THE_SWIZZLES, itertools.count()) for arch in elsewhere(k, number)],
    ids=lambda x: x if isinstance(x, str) else x.tag,
)
def test_compiles_elsewhere(kernel: DeviceKernel, arch: str) -> None:
    """The fastest on every architecture, a third of the others on one after another (``make compile`` does them all).

    Padded and fully swizzled; between them only constants of addresses differ.
    """
    if arch not in kernel.architectures:
        assert kernel.supports(problem_of(kernel, arch, 128)) is not None
        return
    check(kernel, problem_of(kernel, arch, 128))


@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        (kernel, head_dim)
        for number, kernel in enumerate(k for k in KERNELS if k.tag in shapes.FASTEST or "swizzle" not in k.tag)
        for head_dim in (
            (32, 64, 256) if kernel.tag in shapes.FASTEST else ((32, 64, 256)[number // 2 % 3],)[number % 2 :]
        )
    ],
    ids=lambda x: str(x) if isinstance(x, int) else x.tag,
)
def test_compiles_at_other_head_dims(kernel: DeviceKernel, head_dim: int) -> None:
    problem = problem_of(kernel, "sm_90a", head_dim)
    if kernel.supports(problem) is None:
        check(kernel, problem)
    else:
        assert kernel.tag in ("mma(naive)",) and head_dim == 256


@pytest.mark.parametrize("tag", sorted(shapes.FASTEST))
def test_few_blocks_bf16_and_odd_rows_compile(tag: str) -> None:
    """The other ways the heuristic goes: a problem with few blocks, bf16, rows off 16 bytes."""
    kernel = registry.get(tag)
    base = problem_of(kernel, "sm_90a", 64, batch=1)
    for change in ({}, {"dtype": torch.bfloat16}, {"aligned": False, "head_dim": 59, "head_dim_v": 59}):
        problem = AttentionProblem(**{**base.__dict__, **change})
        config = kernel.config(problem)
        assert config.vector == problem.aligned and config.dtype == problem.dtype_name
        assert kernel.compile(config, "sm_90a").report.spills <= kernel.spills_allowed(config, "sm_90a")


def test_every_tag_is_a_point_of_the_grid() -> None:
    """families × accumulators × O storage × swizzles × stores × stages without a hole, named as in the logs."""
    tags = {k.tag for k in GRID if isinstance(k, MmaAttention)}
    points = 4 * 2 * 4 * 3  # accumulators of QK and PV, O storage, swizzles, stores
    assert len(tags) == 4 * 2 * points + 2 * 4 * 2 * points  # tiling: four stages, Q kept or streamed
    named = ("mma(split-kv+stage1)", "mma(split-q+stage2)", "mma(split-q+share-kv+stage1)", "mma(naive)")
    named += ("mma(split-q+share-qkv+swizzle-qk+stage2)", "mma(split-q+share-qkv+acc-f32+stage1)")
    named += ("mma(split-q+tiling-qk+stage1)", "mma(split-q+tiling-qkv+acc-f32+swizzle-qkv+stage2)")
    assert set(named) <= {k.tag for k in GRID}
    assert {k.tag for k in KERNELS} >= shapes.FASTEST


@pytest.mark.parametrize("number", range(12))
def test_unlisted_points_compile(number: int) -> None:
    """A few of the rest of the grid, different ones in each position: ``make compile`` does them all."""
    unlisted = [k for k in GRID if not k.listed]
    kernel = random.Random(number).choice(unlisted)
    check(kernel, problem_of(kernel, "sm_90a", (64, 128)[number % 2]))


LARGE = ("mma(split-q+tiling-qk+acc-f32+persist-q+swizzle-qkv+stage2)", "mma(split-q+tiling-qkv+acc-f32+stage1)")


@pytest.mark.parametrize(
    ("arch", "head_dim", "tag"),
    [
        (arch, head_dim, LARGE[(row + column) % 2])  # alternately
        for row, arch in enumerate(("sm_80", "sm_86", "sm_90a"))
        for column, head_dim in enumerate((320, 328, 512, 1024))
    ],
)
def test_large_head_dims_compile(arch: str, head_dim: int, tag: str) -> None:
    check(registry.get(tag), problem_of(registry.get(tag), arch, head_dim))


def test_tiling_qkv_needs_no_more_shared_memory_for_larger_heads() -> None:
    kernel = registry.get("mma(split-q+tiling-qkv+stage2)")
    shape = shapes.Shape(128, 128, 8, k_slice=16)
    sizes = {kernel.variant.at(problem_of(kernel, "sm_90a", d), shape).shared_memory for d in (128, 256, 512)}
    assert sizes == {24 * 1024}


def test_shared_memory_is_that_of_the_baseline_logs() -> None:
    """MMA tiles of the table, padded, f16: 27 and 36 KiB for split-q, 18 KiB for share-qkv at D 64; 34 at D 128."""
    rows = [
        ("split-q", 1, 64, shapes.Shape(64, 64, 4), 27),
        ("split-q", 2, 64, shapes.Shape(64, 64, 4), 36),
        ("split-q+share-kv", 1, 64, shapes.Shape(128, 64, 4), 27),
        ("split-q+share-kv", 2, 64, shapes.Shape(128, 64, 4), 36),
        ("split-q+share-qkv", 1, 64, shapes.Shape(128, 64, 4), 18),
        ("split-q+share-qkv", 2, 64, shapes.Shape(128, 64, 4), 18),
        ("split-q+share-qkv", 2, 128, shapes.Shape(128, 64, 8), 34),
    ]
    for split, stage, head_dim, shape, kib in rows:
        kernel = registry.get(f"mma({split}+stage{stage})")
        config = kernel.variant.at(problem_of(kernel, "sm_90a", head_dim), shape)
        assert config.shared_memory == kib * 1024, (split, stage, head_dim)


def test_refusals_name_the_reason() -> None:
    kernel = registry.get("mma(split-q+acc-f32+stage1)")
    base = problem_of(kernel, "sm_90a", 64)
    for change, words in (
        ({"arch": None}, "GPU"),
        ({"dtype": torch.float32}, "f16 or bf16"),
        ({"head_dim": 264}, "up to 256"),
        ({"softcap": 30.0}, "softcap"),
        ({"alibi": True, "sinks": True}, "alibi, sinks"),
        ({"scale": -1.0}, "scale"),
        ({"scale": 0.0}, "scale"),
        ({"scale": 1e-40}, "1e-30"),
        ({"scale": 1e39}, "1e+30"),
        ({"arch": "sm_75"}, "sm_75"),
    ):
        reason = kernel.supports(AttentionProblem(**{**base.__dict__, **change}))
        assert reason is not None and words in reason, change


def test_windows_past_every_key_are_unbounded_in_the_kernel() -> None:
    """Sides beyond 32 bits must not wrap; a side that cuts nothing is passed as -1."""
    q = torch.zeros(1, 5, 1, 64, dtype=torch.float16)
    k = torch.zeros(1, 9, 1, 64, dtype=torch.float16)
    out, lse = torch.zeros_like(q), torch.zeros(1, 1, 5)
    for window, expected in (((2**40, 2**33), (-1, -1)), ((14, 13), (-1, 13)), ((3, 0), (3, 0)), ((-1, -1), (-1, -1))):
        inputs = Inputs(q, k, k)
        problem = AttentionProblem.from_inputs(inputs, window_size=window)
        params = attention_params(problem, inputs, out, lse, q_blocks=1, heads_per_section=1)
        assert (params.window_left, params.window_right) == expected


@pytest.mark.parametrize("tag", ["mma(split-q+acc-f32+stage1)", "mma(split-q+stage2)", "mma(naive)", "fa1(f32)"])
def test_what_a_launch_is_given(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, block, shared memory and parameters, with the driver replaced by a list."""
    launches = []

    class Fake:
        def launch(self, grid, block, shared, params):
            launches.append((grid, block, shared, params))

    monkeypatch.setattr(jit, "load", lambda compiled, device: Fake())
    mma_attention._loaded.cache_clear()
    kernel = registry.get(tag)
    dtype = torch.float32 if kernel.family == "fa1" else torch.float16
    q, k = torch.zeros(3, 4, 300, 64, dtype=dtype).transpose(1, 2), torch.zeros(3, 200, 2, 64, dtype=dtype)
    inputs = Inputs(q, k, k)
    problem = AttentionProblem.from_inputs(inputs, causal=True).on("sm_90a")
    out, lse = torch.empty(3, 300, 4, 64, dtype=dtype), torch.empty(3, 4, 300)
    kernel.forward(problem, inputs, out, lse)
    mma_attention._loaded.cache_clear()
    ((grid, block, shared, params),) = launches
    params = getattr(params, "attention", params)
    config = kernel.config(problem)
    needs = kernel.resources(config)
    assert (block, shared) == ((needs.threads, 1, 1), needs.shared_memory)
    rows = getattr(config, "block_m", None)
    assert grid == {"mma(naive)": (1, 4, 3), "fa1(f32)": (4, 3, 1)}.get(
        tag, (-(-300 // rows) * 12 if rows else 0, 1, 1)
    )
    assert (params.q, params.out, params.lse) == (q.data_ptr(), out.data_ptr(), lse.data_ptr())
    assert (params.q_batch, params.q_row, params.q_head, params.q_column) == q.stride()
    assert (params.batch, params.heads, params.group, params.shift) == (3, 4, 2, -100)
    assert (params.window_left, params.window_right) == (-1, 0)
    assert params.scale_log2 * params.q_fold == pytest.approx(64**-0.5 * math.log2(math.e), rel=1e-6)
    assert params.q_fold == (0.125 if tag == "mma(split-q+stage2)" else 1.0)


def test_batches_past_the_grid_are_refused_with_a_reason() -> None:
    for tag in ("mma(naive)", "fa1(f32)"):
        base = problem_of(registry.get(tag), "sm_90a", 64)
        reason = registry.get(tag).supports(AttentionProblem(**{**base.__dict__, "batch": 65536}))
        assert reason is not None and "65536" in reason and "65535" in reason
