"""The Hopper kernel's Python side without a GPU: what it refuses, which tile it picks, what a launch is given."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from hopper_fakes import SMS, Launches, addresses, install, numbers

from flashlane import jit
from flashlane.core import dispatch, registry, tuned
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import launch_pool
from flashlane.kernels.hopper.forward import kernel as forward
from flashlane.kernels.hopper.forward import launch as forward_launch
from flashlane.kernels.hopper.forward import select, tiles
from flashlane.kernels.hopper.forward.config import HopperConfig, columns_of
from flashlane.kernels.score import ScoreConfig

KERNEL = registry.get("hopper(wgmma+tma)")


def problem_of(**changes: object) -> AttentionProblem:
    fields = {"batch": 4, "heads": 16, "kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128}
    fields |= {"head_dim_v": 128, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a"}
    return AttentionProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"arch": None}, "GPU"),
        ({"arch": "sm_80"}, "sm_80"),
        ({"arch": "sm_100"}, "sm_90a"),
        ({"dtype": torch.float32}, "f16 or bf16"),
        ({"head_dim": 264}, "up to 256"),
        ({"head_dim_v": 1032}, "v is 1032; it takes up to 1024"),
        ({"aligned": False}, "16 bytes"),
        ({"head_dim": 60, "aligned": False}, "16 bytes"),
        ({"bias": True}, "bias"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"seqlen_k": 1 << 31}, "up to"),
        ({"batch": 1 << 25, "heads": 64, "kv_heads": 64, "seqlen_q": 1}, "2147483648 tiles"),
        ({"batch": 1 << 20, "heads": 16, "seqlen_q": 1, "num_splits": 200}, "2147483648 tiles"),
        ({"scale": 1e-40}, "1e-30"),
    ],
)
def test_refusals_name_the_reason(changes: dict, word: str) -> None:
    reason = KERNEL.supports(problem_of(**changes))
    assert reason is not None and word in reason


def test_q_stays_in_shared_memory_where_a_mask_and_modifiers_take_its_registers() -> None:
    window, modifier = {"window_left": 100, "window_right": 0}, {"softcap": 5.0}
    for changes, crowded in (
        (window, False),
        (modifier, False),
        (window | modifier, True),
        ({"alibi": True} | modifier, True),
    ):
        shapes = select.shapes_of(problem_of(head_dim=96, head_dim_v=96, **changes))
        assert shapes and any(shape.q_in_registers for shape in shapes) != crowded, changes


def test_what_it_takes() -> None:
    features = {"alibi": True, "sinks": True, "softcap": 5.0, "seqused_k": True, "page_size": 16, "window_left": 3}
    paged = ({"page_size": 12}, {"page_size": 1, "seqused_k": True}, {"page_size": 16, "leftpad_k": True})
    for changes in ({}, features, {"varlen": True}, {"leftpad_k": True, "batch_idx": True}, *paged):
        assert KERNEL.supports(problem_of(**changes)) is None
    for head_dim in range(8, 257, 8):
        for head_dim_v in (264 - head_dim, 256 + head_dim, 1032 - head_dim):
            assert KERNEL.supports(problem_of(head_dim=head_dim, head_dim_v=head_dim_v)) is None


def test_auto_takes_it_on_hopper_only() -> None:
    assert dispatch.select(problem_of()) is KERNEL
    assert dispatch.select(problem_of(arch="sm_80")).family == "mma"
    assert dispatch.select(problem_of(bias=True)).family != "hopper"


def test_a_few_short_tiles_of_narrow_heads_go_to_the_mma_family() -> None:
    one = {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64}
    chosen = dispatch.select(problem_of(**one))
    assert chosen.family == "mma" and chosen.priority < forward.BEHIND_MMA < chosen.preference(problem_of(**one))
    others = ({"batch": 2}, {"seqlen_k": 511}, {"seqlen_k": 1025}, {"head_dim_v": 128}, {"needs_grad": True})
    others += ({"softcap": 5.0}, {"sinks": True}, {"varlen": True})  # which that family does not take
    for changes in others:
        assert dispatch.select(problem_of(**{**one, **changes})) is KERNEL, changes


def test_tiles_follow_the_problem() -> None:
    def rows(**changes: object) -> int:
        return KERNEL.config(problem_of(**changes)).block_m

    assert rows(seqlen_q=16384, seqlen_k=16384) == 128
    for changes in ({"window_right": 0}, {"softcap": 5.0}):
        assert rows(seqlen_q=16384, seqlen_k=16384, **changes) == 192
    assert rows(head_dim=64, head_dim_v=64, seqlen_q=1024, seqlen_k=1024, batch=16, heads=32, kv_heads=32) == 256
    # 256 queries of 8 heads: two tiles of 128 rows a head are full, two of 192 are not.
    few = problem_of(batch=1, heads=8, kv_heads=8, seqlen_q=256, seqlen_k=32768)
    assert KERNEL.config(few).block_m == 128 and KERNEL.config(few).split
    decode = KERNEL.config(problem_of(batch=1, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=8192))
    assert (decode.block_m, decode.pack_gqa, decode.split) == (64, 4, True)
    assert not KERNEL.config(problem_of()).split


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_two_ctas_share_the_loads_of_launches_in_which_the_power_limit_sets_the_clock(head_dim: int) -> None:
    sizes = {"batch": 1, "heads": 40, "kv_heads": 40, "head_dim": head_dim, "head_dim_v": head_dim}
    long = problem_of(**sizes, seqlen_q=75600, seqlen_k=75600)
    assert KERNEL.config(long).cluster == 2
    assert KERNEL.config(problem_of(**sizes, seqlen_q=8192, seqlen_k=8192)).cluster == 1
    assert KERNEL.config(replace(long, window_right=0)).cluster == 1  # a causal launch's clusters wait for each other
    for launch in select._launches(long):
        assert launch.least(1) <= launch.predicted(1)


def test_only_what_is_asked_is_compiled_in() -> None:
    plain = KERNEL.config(problem_of())
    names = ("HAS_LEFT", "HAS_RIGHT", "SOFTCAP", "ALIBI", "SINKS", "VARLEN", "CACHE", "SPLIT")
    assert not any(dict(plain.constants())[name] for name in names) and plain.page_rows == 0 and plain.pack_gqa == 1
    asked = {"window_left": 7, "window_right": 0, "softcap": 2.0, "alibi": True, "sinks": True, "seqused_k": True}
    full = KERNEL.config(problem_of(**asked, page_size=48))
    assert all(dict(full.constants())[name] for name in names if name not in ("VARLEN", "SPLIT"))
    assert 48 % full.page_rows == full.block_n % full.page_rows == full.page_rows % 8 == 0


@pytest.mark.parametrize(
    ("header", "struct", "mirror"),
    [
        ("params", "Params", forward_launch.HopperParams),
        ("params", "PagedRows", forward_launch.PagedRowsParams),
        ("combine", "CombineParams", forward_launch.CombineParams),
    ],
)
def test_parameters_mirror_the_device_struct(header: str, struct: str, mirror: type[ctypes.Structure]) -> None:
    """The compiler finds each field at the offset that it has in Python."""
    source = KERNEL.config(problem_of()).source()
    checks = [
        f"static_assert(offsetof({struct}, {name}) == {getattr(mirror, name).offset});"
        for name, *_ in mirror._fields_
        if name != "padding"
    ]
    if struct == "Params":  # aligned to 64 bytes; the mirror has room for the padding
        checks.append(f"static_assert(sizeof({struct}) <= {ctypes.sizeof(mirror)});")
    else:
        checks.append(f"static_assert(sizeof({struct}) == {ctypes.sizeof(mirror)});")
    includes = f'#include "offsetof.cuh"\n#include "hopper/forward/{header}.cuh"\n'
    text = includes + "\n".join(checks) + '\nextern "C" __global__ void entry() {}\n'
    jit.compile(jit.KernelSource("mirror.cu", text, "entry", source.constants, source.headers), "sm_90a")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    yield from install(monkeypatch)


def call(
    inputs: Inputs, changes: dict[str, object] | None = None, **asked: object
) -> tuple[AttentionProblem, torch.Tensor, torch.Tensor]:
    """A call; with changes of the configuration that the heuristic chooses."""
    problem = AttentionProblem.from_inputs(inputs, **asked).on("sm_90a")
    *batch, rows, heads, _ = inputs.q.shape
    out = inputs.q.new_zeros((*batch, rows, heads, inputs.v.shape[-1]))
    lse = torch.zeros((*batch, heads, rows))
    if changes is None:
        KERNEL.forward(problem, inputs, out, lse)
    else:
        KERNEL.run(replace(KERNEL.config(problem), **changes), problem, inputs, out, lse)
    return problem, out, lse


def test_what_a_launch_is_given(launches: Launches) -> None:
    q = torch.zeros(3, 16, 4096, 64, dtype=torch.float16).transpose(1, 2)
    k, v = torch.zeros(3, 4000, 4, 64, dtype=torch.float16), torch.zeros(3, 4000, 4, 72, dtype=torch.float16)
    problem, out, lse = call(Inputs(q, k, v), causal=True, scale=0.5)
    ((grid, block, shared, params),) = launches
    config = KERNEL.config(problem)
    assert (block, shared) == ((config.threads, 1, 1), config.shared_memory)
    blocks, heads = -(-4096 * config.pack_gqa // config.block_m), 16 // config.packed_heads
    assert grid == (SMS, 1, 1) and params.tiles == 3 * heads * blocks and params.m_blocks == blocks
    assert (params.out, params.lse, params.tiles_taken) == (out.data_ptr(), lse.data_ptr(), 77)
    assert (params.out_batch, params.out_row, params.out_head) == out.stride()[:3]
    assert (params.lse_batch, params.lse_head) == lse.stride()[:2]
    seqlen = params.seqlen
    assert (seqlen.batch, params.heads, params.group, params.splits) == (3, heads, 4 // config.packed_heads, 1)
    assert (seqlen.seqlen_q, seqlen.seqlen_k, seqlen.bottom_right) == (4096, 4000, 1)
    assert params.score.scale_log2 == pytest.approx(0.5 * 1.4426950408889634)
    assert numbers(params) == [1, 2, 3] and addresses(params) == [t.data_ptr() for t in (q, k, v)]
    queries, keys, values = launches.maps
    assert queries.box == (
        64,
        config.packed_heads,
        config.block_m // config.pack_gqa,
        1,
        1,
    ) and keys.box == values.box == (64, config.block_n, 1, 1)
    assert (queries.address, keys.address, values.address) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert values.sizes == (72, 4000, 4, 3)


@pytest.mark.parametrize("batch", [None, 2])
def test_a_side_of_a_window_that_hides_nothing_costs_nothing(launches: Launches, batch: int | None) -> None:
    """What is compiled and launched is that of the causal problem; one key less to the left is a window."""
    q = torch.zeros(*(() if batch is None else (batch,)), 700, 6, 248, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 700], dtype=torch.int32) if batch is None else None
    packed = (
        {} if batch else {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 700, "max_seqlen_k": 700}
    )
    inputs = Inputs(q, q.clone(), q.clone(), **packed)
    configs, params = [], []
    for asked in ({"causal": True}, {"window_size": (699, 0)}, {"window_size": (4096, 0)}, {"window_size": (698, 0)}):
        problem, _, _ = call(inputs, **asked)
        configs.append((KERNEL.config(problem), KERNEL.sources(problem), KERNEL.predicted_configs(problem)[:1]))
        params.append((launches[-1][0], launches[-1][3].window_left))
    assert configs[0] == configs[1] == configs[2] and params[0] == params[1] == params[2]
    assert configs[3][0].has_left and configs[3][1] != configs[0][1] and params[3][1] == 698
    assert not configs[0][0].has_left and params[0][1] == -1


def test_maps_are_encoded_once_and_moved_to_each_calls_tensors(launches: Launches) -> None:
    q = torch.zeros(2, 512, 32, 128, dtype=torch.bfloat16)
    first = Inputs(q, q.clone(), q.clone())
    for inputs in (first, first, Inputs(q, q.clone(), first.v), first):
        call(inputs)
        assert addresses(launches[-1][3]) == [t.data_ptr() for t in (inputs.q, inputs.k, inputs.v)]
        assert numbers(launches[-1][3]) == [1, 2, 3]
    assert len(launches) == 4 and len(launches.maps) == 3


def test_an_address_that_tma_cannot_read_is_named(launches: Launches) -> None:
    q = torch.zeros(1, 64, 2, 64, dtype=torch.float16)
    problem, out, lse = call(Inputs(q, q, q))
    odd = torch.zeros(q.numel() + 1, dtype=torch.float16)[1:].view_as(q)
    with pytest.raises(ValueError, match=r"^k starts at address .*multiple of 16 bytes"):
        KERNEL.forward(problem, Inputs(q, odd, q), out, lse)
    assert len(launches) == 1


def test_slopes_of_another_call_leave_nothing_behind(launches: Launches) -> None:
    """One problem, one set of addresses: slopes (b, h) and then (h,)."""
    q = torch.zeros(2, 64, 4, 64, dtype=torch.float16)
    for slopes, step in ((torch.rand(2, 4), 4), (torch.rand(4), 0), (torch.rand(2, 4), 4)):
        call(Inputs(q, q, q, alibi_slopes=slopes))
        params = launches[-1][3]
        assert (params.score.alibi, params.score.alibi_batch) == (slopes.data_ptr(), step)


def test_packed_queries_are_where_the_map_says() -> None:
    """Row r of a tile is query r / pack of head r % pack: the map's arithmetic on a transposed tensor."""
    q = torch.arange(2 * 8 * 5 * 16, dtype=torch.float32).view(2, 8, 5, 16).transpose(1, 2)
    config = HopperConfig("f16", 16, 16, 64, consumers=1, packed_heads=4, pack_gqa=4)
    sizes, strides, box = forward_launch.query_map(config, tuple(q.shape), q.stride())
    assert sizes == (16, 4, 5, 2, 2) and box == (64, 4, 16, 1, 1)
    flat = q.as_strided((q.numel(),), (1,))
    for column, packed, row, tile_head, batch in ((0, 0, 0, 0, 0), (15, 3, 4, 1, 1), (2, 1, 3, 1, 0)):
        at = sum(i * s for i, s in zip((column, packed, row, tile_head, batch), strides, strict=True))
        assert flat[at] == q[batch, row, tile_head * 4 + packed, column]


def test_splits_of_the_keys_are_combined(launches: Launches) -> None:
    q, k = torch.zeros(1, 1, 32, 128, dtype=torch.bfloat16), torch.zeros(1, 8192, 8, 128, dtype=torch.bfloat16)
    sinks = torch.randn(32, dtype=torch.bfloat16)
    _, out, lse = call(Inputs(q, k, k, sinks=sinks), {"combine_in_kernel": False})
    (grid, _, _, params), (combine_grid, _, _, combining) = launches
    splits = params.splits
    assert splits > 1 and grid == (min(SMS, 8 * splits), 1, 1) and params.tiles == 8 * splits
    assert (params.out_split, params.out_row, params.out_head) == (32 * 128, 32 * 128, 128)
    assert (params.lse_split, params.lse_batch, params.lse_head) == (32, 32, 1)
    sinks_of_both = params.score.sinks, combining.score.sinks
    combining = combining.combine
    assert (combining.partial_out, combining.partial_lse) == (params.out, params.lse)
    assert (combining.out, combining.lse, combining.splits) == (out.data_ptr(), lse.data_ptr(), splits)
    assert combine_grid == (8, 1, 1) and sinks_of_both[0] and len(set(sinks_of_both)) == 1


def test_splits_of_the_keys_are_combined_in_the_kernel(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    memory = SimpleNamespace(data_ptr=lambda: 400)
    monkeypatch.setattr(launch_pool, "counters_of", lambda *given: counted.append(given[2]) or memory)
    q, k = torch.zeros(2, 3, 32, 128, dtype=torch.bfloat16), torch.zeros(2, 8192, 8, 128, dtype=torch.bfloat16)
    sinks = torch.randn(32)
    _, out, lse = call(Inputs(q, k, k, sinks=sinks), {"combine_in_kernel": True})
    ((_, _, shared, params),) = launches
    combine = params.combine
    assert params.splits > 1 and (combine.partial_out, combine.partial_lse) == (params.out, params.lse)
    assert (combine.out, combine.lse, params.score.sinks) == (out.data_ptr(), lse.data_ptr(), sinks.data_ptr())
    assert (combine.partial_out_split, combine.partial_lse_split) == (out.numel(), lse.numel())
    assert (combine.out_batch, combine.out_row, combine.out_head) == out.stride()[:3]
    assert (combine.batch, combine.rows, combine.heads, combine.splits) == (2, 3, 32, params.splits)
    # One semaphore a tile of 64 rows, behind the counter of tiles.
    assert counted == [1 + 2 * 8] and (params.tiles_taken, combine.semaphores) == (400, 404)
    call(Inputs(q, k, k, sinks=sinks), {"combine_in_kernel": False})
    assert counted[1:] == [1] and shared == launches[1][2] + 16


@pytest.mark.parametrize("rows", [1, 100])
def test_splits_are_as_many_as_are_asked_for(launches: Launches, rows: int) -> None:
    """Of the same tiles, whatever the batch; at most one an n-block."""
    plans: dict[int, set[tuple[int, HopperConfig]]] = {}
    for batch, num_splits in itertools.product((1, 3, 40), (0, 1, 3, 8, 1000)):
        q, k = torch.zeros(batch, rows, 8, 128).half(), torch.zeros(batch, 1900, 2, 128).half()
        used = torch.full((batch,), 1900, dtype=torch.int32)
        call(Inputs(q, k, k, seqused_k=used), causal=True, num_splits=num_splits)
        plan, params = launches.plans[-1], launches[0][3]
        assert params.splits == plan.splits and plan.config.split == (plan.splits > 1)
        assert len(launches) == 1 + (plan.splits > 1 and not plan.config.combine_in_kernel)
        launches.clear()
        plans.setdefault(num_splits, set()).add((plan.splits, plan.config))
    assert len(plans[0]) > 1  # without being asked for they follow the batch
    for num_splits, wanted in ((1, 1), (3, 3), (8, 8)):
        ((splits, _),) = plans[num_splits]
        assert splits == wanted
    ((splits, config),) = plans[1000]
    assert splits == -(-1900 // config.block_n)


def test_what_is_asked_to_be_split_is_chosen_for_one_sequence() -> None:
    """The kernel and its tiles, where they follow the batch otherwise."""
    narrow = {"heads": 1, "kv_heads": 1, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64}
    long = {"heads": 4, "kv_heads": 4, "seqlen_q": 500, "seqlen_k": 5000}
    for changes in (narrow | {"seqlen_q": 200}, long, long | {"arch": "sm_80"}, long | {"softcap": 3.0}):
        for num_splits in (0, 1, 5):
            problems = [problem_of(**changes, batch=batch, num_splits=num_splits) for batch in (1, 2, 9, 33, 200)]
            kernels = [dispatch.select(problem) for problem in problems]
            chosen = {(kernel.tag, kernel.config(problem)) for kernel, problem in zip(kernels, problems, strict=True)}
            assert (len(chosen) > 1) == (num_splits == 0), changes
    packed = problem_of(**long, varlen=True, num_splits=4)
    assert select.splits_of(packed, KERNEL.config(packed)) == 1  # packed sequences are not split


def test_values_wider_than_an_accumulator_have_slices(launches: Launches) -> None:
    q, k = torch.zeros(2, 4096, 16, 64, dtype=torch.float16), torch.zeros(2, 4096, 4, 64, dtype=torch.float16)
    v = torch.zeros(2, 4096, 4, 264, dtype=torch.float16)
    problem, out, _ = call(Inputs(q, k, v), causal=True)
    ((_, _, _, params),) = launches
    config = KERNEL.config(problem)
    assert (config.v_slices, config.columns_v) == (2, 136) and dict(config.constants())["HEAD_DIM_V"] == 264
    # A slice counts as a tile head; a key/value head still serves four of q's.
    assert (params.heads, params.group, params.tiles) == (32, 4, 2 * 32 * 32) and params.heads_per_section % 2 == 0
    assert params.out_row == out.stride(1) and launches.maps[2].sizes == (264, 4096, 4, 2)
    for head_dim_v in range(264, 1025, 8):
        columns, slices = columns_of(head_dim_v), -(-head_dim_v // 256)
        assert columns <= 256 and columns % 8 == 0 and columns * (slices - 1) < head_dim_v <= columns * slices


def test_pages_that_no_box_fits_are_gathered(launches: Launches) -> None:
    q = torch.zeros(2, 300, 8, 64, dtype=torch.float16)
    table, used = torch.arange(40, dtype=torch.int32).view(2, 20), torch.tensor([20, 3], dtype=torch.int32)

    def ask(page: int, **more: object) -> tuple[HopperConfig, forward_launch.HopperParams]:
        k = torch.zeros(50, page, 2, 64, dtype=torch.float16)
        v = torch.zeros(50, 2, page, 72, dtype=torch.float16).transpose(1, 2)
        problem, _, _ = call(Inputs(q, k, v, seqused_k=used, block_table=table, **more))
        params = launches[-1][3]
        if KERNEL.config(problem).gather:
            assert (params.k_rows.data, params.v_rows.data) == (k.data_ptr(), v.data_ptr())
            for rows, t in ((params.k_rows, k), (params.v_rows, v)):
                assert (rows.page, rows.row, rows.head) == t.stride()[:3]
        return KERNEL.config(problem), params

    assert not ask(16)[0].gather
    for config, _ in (ask(12), ask(1), ask(16, leftpad_k=torch.zeros(2, dtype=torch.int32))):
        constants = dict(config.constants())
        assert constants["GATHER"] and constants["PAGED"] and config.page_rows == 0 and config.consumers <= 2


def test_two_ctas_of_a_cluster_share_a_tile(launches: Launches) -> None:
    q, k = torch.zeros(4, 1300, 16, 128, dtype=torch.bfloat16), torch.zeros(4, 1300, 4, 128, dtype=torch.bfloat16)
    problem = AttentionProblem.from_inputs(Inputs(q, k, k)).on("sm_90a")
    tile = HopperConfig("bf16", 128, 128, **asdict(replace(tiles.M192N80S3, cluster=2)))
    config = select.specialise(tile, problem)
    call(Inputs(q, k, k), vars(config))
    ((grid, _, _, params),) = launches
    assert (config.cta_rows, config.block_m, config.cluster) == (192, 384, 2)
    assert params.m_blocks == 4 and params.tiles == 4 * 16 * 4 and grid == (SMS, 1, 1)
    queries, keys, values = launches.maps
    assert queries.box == (64, 1, 192, 1, 1) and keys.box == values.box == (64, 40, 1, 1)
    assert "__cluster_dims__(2, 1, 1)" in dict(config.source().headers)["hopper_clustered.cuh"]
    # Not where one CTA has all rows, where lengths differ or keys are split.
    few = {"batch": 1, "heads": 4, "num_splits": 3}
    for changes in ({"seqlen_q": 192}, {"varlen": True}, {"seqused_k": True}, {"page_size": 64}, few):
        assert select.specialise(tile, replace(problem, kv_heads=4, **changes)).cluster == 1, changes
    odd = replace(problem, batch=1, heads=1, kv_heads=1, seqlen_q=40000)
    assert select.specialise(tile, odd).cluster == 2


def test_packed_sequences(launches: Launches) -> None:
    q = torch.zeros(900, 4, 128, dtype=torch.float16)
    starts = torch.tensor([0, 100, 100, 850], dtype=torch.int32)
    inputs = Inputs(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=750, max_seqlen_k=750)
    problem, _, _ = call(inputs, causal=True)
    ((grid, _, _, params),) = launches
    config = KERNEL.config(problem)
    assert config.seqlen.varlen and not config.split
    assert (params.seqlen.cu_seqlens_q, params.seqlen.cu_seqlens_k) == (starts.data_ptr(), starts.data_ptr())
    assert (params.seqlen.seqlen_q, params.out_row, params.lse_head, params.out_batch) == (900, 4 * 128, 900, 0)
    # The 50 rows after the last sequence are a sequence too, without keys.
    needed = sum(-(-n // config.block_m) for n in (100, 0, 750, 50)) * 4
    assert grid[0] >= min(needed, SMS)


def test_a_paged_cache(launches: Launches) -> None:
    q, k = torch.zeros(2, 1, 8, 64, dtype=torch.float16), torch.zeros(50, 16, 2, 64, dtype=torch.float16)
    used, table = torch.tensor([100, 30], dtype=torch.int32), torch.arange(40, dtype=torch.int32).view(2, 20)
    call(Inputs(q, k, k, seqused_k=used, block_table=table))
    seqlen = launches[0][3].seqlen
    assert seqlen.seqused_k == used.data_ptr() and seqlen.block_table == table.data_ptr()
    assert (seqlen.table_batch, seqlen.table_page, seqlen.page_size) == (20, 1, 16)
    assert launches.maps[1].sizes == (64, 16, 2, 50) and launches.maps[1].box == (64, 16, 1, 1)


def test_empty_problems(launches: Launches) -> None:
    none, some = torch.zeros(2, 0, 1, 64, dtype=torch.float16), torch.zeros(2, 5, 1, 64, dtype=torch.float16)
    call(Inputs(none, some, some))
    assert not launches
    call(Inputs(some, none, none))  # no key: zeros are written, nothing is loaded, the queries' map serves for all
    assert len(launches) == 1 and len(set(launches.maps)) == 1
    assert addresses(launches[0][3]) == [some.data_ptr()] * 3


def test_outputs_are_checked(launches: Launches) -> None:
    q = torch.zeros(1, 64, 2, 64, dtype=torch.float16)
    inputs, lse = Inputs(q, q, q), torch.zeros(1, 2, 64)
    problem = AttentionProblem.from_inputs(inputs).on("sm_90a")
    wide = torch.zeros(1, 64, 2, 65, dtype=torch.float16)
    for out, bad_lse, word in (
        (wide[..., :64], lse, "16 bytes"),
        (torch.zeros_like(q).transpose(1, 2), lse, "out has shape"),
        (q.float(), lse, "float32"),
        (torch.zeros(q.numel() + 1, dtype=torch.float16)[1:].view_as(q), lse, "address"),
        (torch.zeros_like(q), lse.double(), "float64"),
        (torch.zeros_like(q), lse.transpose(1, 2), "lse"),
    ):
        with pytest.raises(ValueError, match=word):
            KERNEL.forward(problem, inputs, out, bad_lse)
    assert not launches


def test_the_rows_of_an_output_of_two_sequences_start_on_16_bytes(launches: Launches) -> None:
    q = torch.zeros(2, 64, 2, 64, dtype=torch.float16)
    inputs, lse = Inputs(q, q, q), torch.zeros(2, 2, 64)
    rows = 64 * 2 * 64
    out = torch.zeros(2 * rows + 4, dtype=torch.float16).as_strided(q.shape, (rows + 4, 128, 64, 1))
    with pytest.raises(ValueError, match="16 bytes"):
        KERNEL.forward(AttentionProblem.from_inputs(inputs).on("sm_90a"), inputs, out, lse)
    assert not launches


def test_a_configuration_with_splits_has_none_where_one_is_enough() -> None:
    """What would combine one split is not launched, so the kernel must write the output itself."""
    few = problem_of(batch=1, heads=8, kv_heads=8, seqlen_q=256, seqlen_k=32768)
    for apart in (False, True):
        config = replace(KERNEL.config(few), split=True, combine_in_kernel=not apart)
        split, splits = forward_launch.config_and_splits(config, few)
        assert (split, len(forward_launch.sources_of(split))) == (config, 1 + apart) and splits > 1
        whole, splits = forward_launch.config_and_splits(config, replace(few, num_splits=1))
        assert (whole.split, whole.combine_in_kernel, splits) == (False, False, 1)
        assert len(forward_launch.sources_of(whole)) == 1


def test_a_window_that_reaches_past_every_row_stays_one_where_it_is_compiled_in() -> None:
    """A side of −1 would hide every key from a kernel that has that side."""
    problem = problem_of(window_left=1 << 20, window_right=0)
    config = replace(KERNEL.config(problem), has_left=True)
    given = forward_launch.hopper_params(config, problem, (4, 4096, 16, 128), (1, 1, 1), (1, 1), 1)
    assert (given.window_left, given.window_right) == (8192, 0)


def test_the_classes_reach_every_head_dim_and_the_smallest_comes_first() -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in range(8, 257, 8):
            found = tiles.class_of(head_dim, head_dim_v)
            fitting = [one for one in tiles.CLASSES if head_dim <= one.head_dim and head_dim_v <= one.head_dim_v]
            assert found.head_dim * found.head_dim_v == min(one.head_dim * one.head_dim_v for one in fitting)


def test_shipped_configurations_cover_features_and_dtypes() -> None:
    configs = [config for config, archs in KERNEL.shipped() if archs == ("sm_90a",)]
    assert len(configs) == len(set(configs)) > 50
    constants = [dict(config.constants()) for config in configs]
    switches = ("HAS_LEFT", "HAS_RIGHT", "SOFTCAP", "ALIBI", "SINKS", "VARLEN", "CACHE", "PAGED", "GATHER", "SPLIT")
    for name in (*switches, "COMBINE_IN_KERNEL"):
        assert any(each[name] for each in constants), name
    assert any(each["PAGED"] and not each["GATHER"] for each in constants)
    assert any(config.v_slices > 1 for config in configs)
    assert any(config.split and not config.combine_in_kernel for config in configs)
    assert {config.dtype for config in configs} == {"f16", "bf16"} and any(config.pack_gqa > 1 for config in configs)


def test_candidates_of_the_tuner() -> None:
    for changes in ({}, {"seqlen_q": 1, "batch": 1}, {"head_dim": 72, "head_dim_v": 72}, {"head_dim": 192}):
        problem = problem_of(**changes)
        found = list(KERNEL.candidates(problem))
        assert len(found) == len(set(found)) > 2 and KERNEL.config(problem) in found
        assert {config.consumers for config in found} >= {1, 2}


def test_candidates_combine_splits_and_load_pages_both_ways() -> None:
    few = problem_of(batch=1, heads=8, kv_heads=8, seqlen_q=256, seqlen_k=32768)
    assert {config.combine_in_kernel for config in KERNEL.candidates(few)} == {False, True}
    paged = list(KERNEL.candidates(problem_of(page_size=64, seqused_k=True)))
    assert {config.gather for config in paged} == {False, True}
    assert all(config.consumers <= 2 for config in paged if config.gather)
    assert {config.cluster for config in KERNEL.candidates(problem_of())} == {1, 2}


def test_what_the_tuner_found_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tile; what else the problem needs is switched on again."""
    problem = problem_of(seqlen_q=5000, softcap=3.0)
    other = next(c for c in KERNEL.candidates(problem) if c.consumers != KERNEL.config(problem).consumers)
    found = tuned.plain_config(replace(other, score=ScoreConfig(), has_left=True))
    monkeypatch.setattr(forward.tuned, "lookup", lambda kernel, asked: found)
    registry.changed()
    try:
        assert KERNEL.config(problem) == other
    finally:
        monkeypatch.undo()
        registry.changed()
    assert KERNEL.config(problem) != other
