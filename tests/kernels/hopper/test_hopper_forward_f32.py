"""The Hopper forward with an output in f32, for callers that merge it with others, without a GPU.

What the compiler says of its configurations, and what its launches are given, of dense tensors and of packed sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from disassembly import disassembled
from hopper_fakes import SMS, Launches, addresses, install
from recorded_spills import check_spills
from sass_loops import LAUNCH_REGISTERS, steady_loops

from flashlane import jit
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.forward.config import HopperConfig

KERNEL = registry.get("hopper(wgmma+tma)")
ARCH = "sm_90a"
CAUSAL = AttentionProblem(
    batch=8, heads=32, kv_heads=8, seqlen_q=1024, seqlen_k=1024, head_dim=128, head_dim_v=128, dtype=torch.bfloat16,
    scale=0.1, window_right=0, arch=ARCH,
)  # fmt: skip
MASKS = {
    "causal": {},
    "full": {"window_right": -1},
    "short window": {"window_left": 300},
    "long window": {"window_left": 900},
}
MODIFIERS = {"": {}, "softcap": {"softcap": 10.0}, "ALiBi": {"alibi": True}}
LENGTHS = (64, 300, 1024)
"""Of the longest sequence: one consumer or packed heads, and the tiles of longer ones."""
PROBLEMS = [
    replace(CAUSAL, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=length, seqlen_k=length, varlen=True, **changes)
    for head_dim, length in itertools.product((64, 128, 256), LENGTHS)
    for changes in (mask | modifier for mask in MASKS.values() for modifier in MODIFIERS.values())
]
PROBLEMS += [
    replace(CAUSAL, head_dim=head_dim, head_dim_v=head_dim_v, varlen=varlen)
    for head_dim, head_dim_v in ((80, 80), (96, 96), (112, 112), (160, 160), (192, 192), (192, 128), (64, 512))
    for varlen in (False, True)
]
PROBLEMS += [replace(CAUSAL, dtype=torch.float16, varlen=True), *(replace(CAUSAL, **mask) for mask in MASKS.values())]
LONG = {"batch": 1, "heads": 40, "kv_heads": 40, "seqlen_q": 75600, "seqlen_k": 75600, "window_right": -1}
"""Without f32, two CTAs of a cluster share a tile of these."""
PROBLEMS += [replace(CAUSAL, **LONG, head_dim=head_dim, head_dim_v=head_dim) for head_dim in (64, 96, 128)]


def config_of(problem: AttentionProblem) -> HopperConfig:
    """The configuration that is compiled; heads of a section are an argument of the launch."""
    return replace(KERNEL.config(problem), heads_per_section=0).partial


CONFIGS = list(dict.fromkeys(map(config_of, PROBLEMS)))


@pytest.mark.parametrize("what", CONFIGS, ids=lambda c: f"{c.dtype}, D{c.head_dim}-{c.head_dim_v}, {c.describe()}")
def test_compiles_as_the_schedule_needs(what: HopperConfig) -> None:
    compiled = jit.compile(what.source(), ARCH)
    report = compiled.report
    assert report.registers == LAUNCH_REGISTERS[what.consumers]
    check_spills(what, what.source())
    text = disassembled(compiled.cubin)
    # A store of a lane has two floats of eight columns, in each of two rows; no semaphore counts splits.
    assert text.count("STG.E.64") >= 2 * what.columns_v // 8 and "ATOMG.E.INC.STRONG.GPU" not in text
    loops = steady_loops(text, shortest=what.deferred_max)
    assert len(loops) == (3 if what.has_left else 2)
    for loop in loops:
        assert sum(op.startswith("HGMMA") for op in loop) == -(-what.head_dim // 16) + what.block_n // 16
        assert sum(op.startswith(("LDL", "STL")) for op in loop) <= LOCAL_ACCESSES.get(what.head_dim, 0)


LOCAL_ACCESSES = {64: 5}
"""By head dim, accesses of local memory in a step, which tiles of 192 rows with ALiBi and of 256 with a window have."""


def test_clusters_have_no_output_in_f32() -> None:
    for head_dim in (64, 96, 128):
        plain = KERNEL.config(replace(CAUSAL, **LONG, head_dim=head_dim, head_dim_v=head_dim))
        partial = plain.partial
        assert (plain.cluster, partial.cluster, partial.split) == (2, 1, True)
        assert partial.cta_rows == partial.block_m == plain.cta_rows and partial.shared_memory < plain.shared_memory


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    yield from install(monkeypatch)


def packed(
    q_lengths: list[int], k_lengths: list[int], dims: tuple[int, int], rows_after: int = 0, heads: int = 8
) -> Inputs:
    """Packed sequences, with rows after the last one."""
    rows = sum(q_lengths) + rows_after
    q = torch.zeros(rows, heads, dims[0], dtype=torch.bfloat16)
    k, v = (torch.zeros(sum(k_lengths) + rows_after, 2, dim, dtype=torch.bfloat16) for dim in dims)
    starts = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in (q_lengths, k_lengths)]
    return Inputs(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
        max_seqlen_q=max(q_lengths), max_seqlen_k=max(k_lengths),
    )  # fmt: skip


def call(inputs: Inputs, **asked: object) -> tuple[AttentionProblem, bool, torch.Tensor, torch.Tensor]:
    problem = AttentionProblem.from_inputs(inputs, **asked).on(ARCH)
    *batch, rows, heads, _ = inputs.q.shape
    out, lse = torch.empty((*batch, rows, heads, inputs.v.shape[-1])), torch.empty((*batch, heads, rows))
    return problem, KERNEL.forward_f32(problem, inputs, out, lse), out, lse


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (128, 128), (256, 256), (64, 264)], ids=str)
@pytest.mark.parametrize("asked", [{"causal": True}, {}, {"window_size": (100, 0)}], ids=str)
@pytest.mark.parametrize("lengths", [[101, 0, 777, 1, 33], [3, 0, 1], [0, 0, 4000]], ids=str)
def test_a_launch_of_packed_sequences(
    launches: Launches, lengths: list[int], asked: dict[str, object], dims: tuple[int, int]
) -> None:
    """The strides are those of a contiguous output (row, head, column) in f32 and of an LSE (head, row)."""
    inputs = packed(lengths, [n + 5 * (n > 1) for n in lengths], dims, rows_after=50)
    problem, done, out, lse = call(inputs, **asked)
    ((grid, block, shared, params),) = launches  # and none that combines splits
    config, rows = launches.plans[-1].config, out.shape[0]
    assert done and (dict(config.constants())["Out"], config.split, config.combine_in_kernel) == ("float", True, False)
    assert config.seqlen.varlen and (block, shared) == ((config.threads, 1, 1), config.shared_memory)
    assert (params.out, params.lse, params.splits) == (out.data_ptr(), lse.data_ptr(), 1)
    assert (params.out_batch, params.out_row, params.out_head) == (0, *out.stride()[:2])
    assert (params.lse_batch, params.lse_head) == (0, rows) and lse.shape[1] == rows
    seqlen, counted = params.seqlen, len(lengths)
    assert (seqlen.batch, seqlen.seqlen_q) == (counted, rows)
    starts = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    assert (seqlen.cu_seqlens_q, seqlen.cu_seqlens_k) == tuple(each.data_ptr() for each in starts)
    assert addresses(params) == [t.data_ptr() for t in (inputs.q, inputs.k, inputs.v)]
    # The rows after the last sequence are one more, without keys. The grid's bound counts its tiles, too.
    needed = params.heads * sum(-(-n * config.pack_gqa // config.block_m) for n in (*lengths, 50))
    assert params.tiles >= needed and min(needed, SMS) <= grid[0] <= SMS
    # All but the output is what a launch of the operands' type is given.
    KERNEL.forward(problem, inputs, out.to(torch.bfloat16), lse)
    plain = launches[-1][3]
    for name in ("heads", "group", "window_left", "window_right", "m_blocks", "tiles", "heads_per_section"):
        assert getattr(params, name) == getattr(plain, name), name
    for name in ("out_batch", "out_row", "out_head", "lse_batch", "lse_head"):
        assert getattr(params, name) == getattr(plain, name), name


def test_a_launch_of_dense_tensors(launches: Launches) -> None:
    q, k = torch.zeros(3, 700, 8, 128, dtype=torch.bfloat16), torch.zeros(3, 900, 2, 128, dtype=torch.bfloat16)
    _, done, out, lse = call(Inputs(q, k, k), causal=True)
    ((_, _, _, params),) = launches
    assert done and (params.out, params.lse, params.splits) == (out.data_ptr(), lse.data_ptr(), 1)
    assert (params.out_batch, params.out_row, params.out_head) == out.stride()[:3]
    assert (params.lse_batch, params.lse_head) == lse.stride()[:2]


def test_other_calls_have_none(launches: Launches) -> None:
    """Nothing is launched: with sinks, whose logit is added where splits are combined, of pages, and without rows."""
    inputs = packed([10, 20], [10, 20], (64, 64))
    none, some = torch.zeros(2, 0, 8, 64).half(), torch.zeros(2, 5, 2, 64).half()
    table, used = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)
    pages, q = torch.zeros(6, 16, 2, 64).half(), torch.zeros(2, 5, 8, 64).half()
    for refused in (
        replace(inputs, sinks=torch.zeros(8)),
        Inputs(q, some, some, sinks=torch.zeros(8)),
        Inputs(q, pages, pages, block_table=table, seqused_k=used),
        Inputs(none, some, some),
    ):
        assert not call(refused)[1] and not launches
