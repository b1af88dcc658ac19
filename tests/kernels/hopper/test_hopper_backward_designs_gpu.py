"""The one-CTA backward's ways of making dQ and of splitting tiles on a GPU: each makes what the others make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_rule import backward_inputs, complaints, logs_of
from hopper_gradients import (
    BF16,
    DRAWS,
    F16,
    HERE,
    Drawn,
    Variant,
    assert_right,
    dense,
    draw,
    drawn_problems,
    equal,
    forwarded,
    needs_hopper,
    on_four_streams,
    repeats,
    run,
)

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.backward import design_cost, split_q
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.kernel import config_of, prepared_of
from flashlane.kernels.hopper.backward.launch import Workspace
from flashlane.kernels.hopper.backward.one_cta import in_kernel_dq
from flashlane.kernels.hopper.backward.one_cta import launch as one_cta_launch
from flashlane.kernels.hopper.backward.one_cta import tiles as one_cta_tiles

GAP = 4096
"""Words between the parts of a call's memory in the fixture below, more than a tile's rows of dq_accum have."""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, Workspace]]]:
    """Keeps the parts of each call's memory apart; gives that memory, every word of which was 1, and where they lie.

    As a float, 1 is so small that an addition of 0 to it in device memory makes it 0.
    """
    spaces, made = {}, []

    packing = backward_launch.workspace_of

    def workspace_of(*asked: Any) -> Workspace:
        packed = packing(*asked)
        order = enumerate(packed.offsets.items(), start=1)
        space = Workspace(packed.words + (len(packed.offsets) + 1) * GAP, {n: at + i * GAP for i, (n, at) in order})
        spaces[space.words] = space
        return space

    def allocator(device: torch.device) -> Any:
        def make(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if shape[0] in spaces and len(shape) == 1:
                made.append((tensor, spaces[shape[0]]))
                tensor.view(torch.int32).fill_(1)
            return tensor

        return make

    registry.changed()  # plans that were made before know other places
    with monkeypatch.context() as patch:
        patch.setattr(backward_launch, "workspace_of", workspace_of)
        patch.setattr(backward_launch.launch, "allocator", allocator)
        yield made
    registry.changed()


@pytest.fixture
def always_split(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles are split wherever they may be, as if that cost nothing."""
    registry.changed()
    with monkeypatch.context() as patch:
        costs = ("START", "CLUSTER_START", "WAIT", "ADD")
        for cost in (*costs, "LEAST_SAVING", "LEAST_OF_MASKED", "LEAST_OF_MORE", "LEAST_OF_PACKED"):
            patch.setattr(split_q, cost, 0.0)
        yield
    registry.changed()


@pytest.fixture
def always_in_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Idle warps zero dq_accum and write dQ of all but the first heads, wherever that may be."""
    registry.changed()
    with monkeypatch.context() as patch:
        patch.setattr(in_kernel_dq, "ZEROED_AHEAD", 0)
        patch.setattr(in_kernel_dq, "LAST_ROUNDS", 0)
        patch.setattr(one_cta_tiles, "worth_it", lambda *asked: True)
        patch.setattr(one_cta_tiles, "IDLE_WARPS_BLOCKS", (0.0, 0.0))
        for module in (one_cta_launch, one_cta_tiles):
            patch.setattr(module, "heads_per_section", lambda *asked: 1)
        patch.setattr(one_cta_launch, "fastest_section", lambda *asked: 1)
        yield
    registry.changed()


@pytest.fixture
def always_clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clusters make the gradients above D 128 under windows of any width."""
    registry.changed()
    with monkeypatch.context() as patch:
        patch.setattr(design_cost, "two_kernels_are_faster", lambda problem: False)
        yield
    registry.changed()


WINDOWS = (Variant(BF16, 256, mask="both"), Variant(F16, 168, mask="left"), Variant(BF16, 192, 128, "both"))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", WINDOWS, ids=str)
def test_clusters_make_the_gradients_of_narrow_windows_too(variant: Variant, always_clusters: None) -> None:
    windows = 0
    for _, item, problem, inputs in drawn_problems(variant):
        config = config_of(problem.with_hiding_sides)
        assert config.design == "two_cta"
        windows += config.has_left
        rows, what = item.backward_inputs(problem, inputs)
        assert_right(item, rows, what, run(problem, rows, what))
    assert windows >= DRAWS // 4


IN_KERNEL = tuple(Variant(BF16, 128, mask=mask) for mask in ("full", "right", "both"))
IN_KERNEL += (
    Variant(F16, 104, mask="left"),
    Variant(F16, 120, 40),
    Variant(BF16, 64, 128),
    Variant(F16, 128, 64, "full"),
)
IN_KERNEL += (Variant(F16, 128, features=("sinks",)),)


def with_seven_times_the_heads(variant: Variant, number: int) -> Drawn:
    """The drawn problem of a number with more heads than SMs have tiles: else the launch before writes all zeros."""
    item = draw(variant, number)
    return replace(item, case=replace(item.case, kv_heads=7 * item.case.kv_heads))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", IN_KERNEL, ids=str)
def test_idle_warps_make_the_dq_that_other_launches_make(variant: Variant, always_in_kernel: None) -> None:
    in_kernel = 0
    for _, item, problem, inputs in drawn_problems(variant, drawing=with_seven_times_the_heads):
        in_kernel += config_of(problem).in_kernel_dq
        rows, what = item.backward_inputs(problem, inputs)
        for _ in range(3):
            assert_right(item, rows, what, run(problem, rows, what))
    assert in_kernel >= DRAWS // 4


@pytest.mark.gpu
@needs_hopper
def test_in_kernel_dq_on_several_streams_at_once(always_in_kernel: None) -> None:
    problem, inputs = dense(1000, 128, batch=3, heads=50, kv_heads=50, causal=True)
    assert config_of(problem).in_kernel_dq
    what = forwarded(problem, inputs)
    right = run(problem, inputs, what)
    for again in on_four_streams(problem, inputs, what, 40):
        assert equal(right, again, repeats(problem))
        # Another order, rounded to bf16.
        assert float((again.q.float() - right.q.float()).norm() / right.q.float().norm()) < 3e-3


MASKS = ("full", "right", "both")
STAGED = tuple(Variant(BF16, head_dim, mask=mask) for head_dim in (64, 128) for mask in MASKS)
STAGED += (Variant(F16, 40, mask="right"), Variant(BF16, 104, mask="left"), Variant(F16, 120, mask="right"))
STAGED += (Variant(BF16, 96), Variant(BF16, 72, mask="both"), Variant(F16, 64, 40), Variant(BF16, 128, 64))
STAGED += tuple(Variant(BF16, 64, features=(feature,)) for feature in ("softcap", "alibi", "sinks"))
STAGED += (Variant(F16, 128, features=("deterministic",)), Variant(F16, 136), Variant(BF16, 192, mask="full"))
STAGED += (Variant(F16, 192, 128), Variant(BF16, 160, features=("alibi",)))
STAGED += tuple(Variant(BF16, head_dim, mask=mask, features=("varlen",)) for head_dim in (136, 192) for mask in MASKS)
STAGED += (Variant(F16, 168, features=("varlen",)), Variant(F16, 176, 128, "full", ("varlen",)))
LENGTHS = ((534, 534), (777, 1111), (640, 129), (333, 1500))
"""Queries and keys of several sequences, the last tiles of which have 22, 87, 1 and 92 keys."""


def with_tma_stores(problem: AttentionProblem, long_steps: bool) -> Any:
    """The table's configuration, or one with room for dK and dV in shared memory; with long steps it has no room but
    where dS and dQ were, and its first steps are peeled where they may be."""
    config: Any = replace(config_of(problem).specialised(problem), tma_stores=True)
    if config.design == "two_cta":
        return config
    if long_steps and max(problem.head_dim, problem.head_dim_v) > 64 and not problem.deterministic:
        rows, dq = (80, "tma_reduce_add") if problem.head_dim > 96 else (96, "register_atomics")
        long = replace(config, block_m=rows, k_stages=1, dq=dq, postprocess="own_launch", skips_hidden=False)
        peeled = not (config.score.words() or problem.varlen)
        return replace(long, peeled=peeled, ping_pong="until_complete" if peeled else "off").specialised(problem)
    if config.staging != "registers":
        return config
    if problem.deterministic:
        return replace(config, block_m=64)
    few_steps = replace(config, block_m=64, k_stages=2, dq="register_atomics", postprocess="own_launch")
    return replace(few_steps, ping_pong="until_issued", split_q=False).specialised(problem)


def one_or_several_tiles(variant: Variant, number: int) -> Drawn:
    """The drawn problem of a number; odd ones have several tiles on each SM."""
    item = draw(variant, number)
    if number % 2 == 0:
        return item
    lengths, group = LENGTHS[number // 2 % len(LENGTHS)], 1 + number % 3
    return replace(item, case=replace(item.case, lengths=(lengths,) * 5, kv_heads=9, group=group))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", STAGED, ids=str)
def test_tma_stores_the_bits_that_consumers_store(variant: Variant) -> None:
    """Odd lengths, grouped heads and last tiles that end within the tile; a row of another sequence would differ."""
    staged = 0
    for number, item, problem, inputs in drawn_problems(variant, drawing=one_or_several_tiles):
        config = with_tma_stores(problem, long_steps=number % 4 > 1)
        staged += config.stores_by_tma
        rows, what = item.backward_inputs(problem, inputs)
        by_tma = run(problem, rows, what, config)
        assert_right(item, rows, what, by_tma)
        plain: dict[str, Any] = {}
        if config.design == "one_cta":  # which may have room for the columns of statistics only without these stores
            plain = {"peeled": False, "subtracts_in_products": config.product_statistics}
        by_consumers = run(problem, rows, what, replace(config, tma_stores=False, **plain))
        assert equal(by_tma, by_consumers, ("k", "v")), str(item)
    assert staged >= DRAWS // 4


SKIPPED = tuple(
    Variant(BF16, head_dim, mask=mask) for head_dim in (64, 96, 128) for mask in ("full", "right", "left", "both")
)
SKIPPED += (Variant(F16, 40), Variant(F16, 104), Variant(F16, 64, 128), Variant(BF16, 88, mask="both"))
SKIPPED += tuple(
    Variant(F16, head_dim, mask=mask, features=("varlen",)) for head_dim in (64, 128) for mask in ("full", "right")
)
SKIPPED += tuple(Variant(BF16, 128, mask="both", features=(feature,)) for feature in ("softcap", "alibi", "sinks"))
SKIPPED += tuple(Variant(F16, head_dim, features=("deterministic",)) for head_dim in (64, 128))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", SKIPPED, ids=str)
def test_steps_whose_keys_are_hidden_are_skipped_with_the_same_bits(variant: Variant) -> None:
    """A hidden step adds zeros to dK and dV, so that their bits are those of a kernel that makes its products."""
    compared = 0
    for _, item, problem, inputs in drawn_problems(variant, drawing=one_or_several_tiles):
        rows, what = item.backward_inputs(problem, inputs)
        config = config_of(problem).specialised(problem)
        skipping = run(problem, rows, what, replace(config, skips_hidden=True))
        assert_right(item, rows, what, skipping)
        making = run(problem, rows, what, replace(config, skips_hidden=False))
        assert equal(skipping, making, repeats(problem)), str(item)
        compared += 1
    assert compared >= DRAWS // 4


SPLIT = tuple(Variant(BF16, head_dim, mask=mask) for head_dim in (64, 96, 128) for mask in ("full", "right"))
SPLIT += (Variant(F16, 192), Variant(BF16, 256, mask="full"))
SPLIT += (Variant(F16, 24), Variant(F16, 112, mask="full"), Variant(BF16, 128, 64, "full"), Variant(BF16, 40, 128))
SPLIT += tuple(Variant(F16, 128, mask="full", features=(feature,)) for feature in ("softcap", "alibi", "sinks"))
SPLIT += tuple(
    Variant(BF16, head_dim, mask=mask, features=("varlen",)) for head_dim in (64, 96, 128) for mask in ("full", "right")
)
SPLIT += (Variant(F16, 192, features=("varlen",)), Variant(BF16, 256, 136, "full", ("varlen",)))
SPLIT += (Variant(F16, 128, features=("varlen", "softcap", "alibi", "sinks")),)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", SPLIT, ids=str)
def test_splits_of_tiles_make_what_whole_tiles_make(variant: Variant, always_split: None) -> None:
    split = 0
    for _, item, problem, inputs in drawn_problems(variant):
        split += config_of(problem).split_q
        rows, what = item.backward_inputs(problem, inputs)
        found = run(problem, rows, what)
        assert_right(item, rows, what, found)
        for _ in range(3):
            assert equal(found, run(problem, rows, what), repeats(problem)), f"{item}: other bits in another run"
    assert split >= DRAWS // 4


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_are_split_that_are_more_than_sms(head_dim: int, causal: bool, always_split: None) -> None:
    """Of 136 tiles the last four, four more than SMs; under a causal mask all, as the longest take longest."""
    problem, inputs = dense(1023, head_dim, batch=1, heads=17, kv_heads=17, causal=causal)
    assert config_of(problem).split_q
    what = backward_inputs(
        problem, inputs, torch.randn_like(inputs.q), torch.randn(logs_of(problem, inputs), device=HERE)
    )
    found = run(problem, inputs, what)
    assert not (wrong := complaints(inputs, what, found)), wrong
    for _ in range(20):
        assert equal(found, run(problem, inputs, what), repeats(problem))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("longest", [2100, 2600])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_the_longest_packed_sequences_are_split(head_dim: int, causal: bool, longest: int) -> None:
    """Eight query heads share keys, so that one tile would take longer than an SM's share of all others.

    The caller may take the longest sequence for longer than it is: more tiles are then split.
    """
    cu_seqlens = torch.tensor([0, 400, 400, 2500, 2501, 2697], dtype=torch.int32, device=HERE)
    q, k, v = (torch.randn(2705, h, head_dim, device=HERE, dtype=BF16) for h in (8, 1, 1))
    inputs = Inputs(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest
    )
    problem = AttentionProblem.from_inputs(inputs, causal=causal)
    split = prepared_of(None, problem, q.shape, k.shape, q.device.index).schedule.split_q
    assert split.splits > 1 and split.tiles >= 9, split
    what = backward_inputs(problem, inputs, torch.randn_like(q), torch.randn(logs_of(problem, inputs), device=HERE))
    found = run(problem, inputs, what)
    assert not (wrong := complaints(inputs, what, found)), wrong
    for _ in range(20):
        assert equal(found, run(problem, inputs, what), repeats(problem))


@pytest.mark.gpu
@needs_hopper
def test_splits_on_several_streams_at_once(always_split: None) -> None:
    """Launches share SMs, so that parts of one tile start far apart."""
    problem, inputs = dense(1500, 64, batch=1, heads=3, kv_heads=3)
    what = forwarded(problem, inputs)
    right = run(problem, inputs, what)
    assert all(equal(right, again, repeats(problem)) for again in on_four_streams(problem, inputs, what, 80))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24, 40, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256])
def test_no_part_of_a_calls_memory_is_written_past_its_end(
    head_dim: int, deterministic: bool, apart: list[tuple[torch.Tensor, Workspace]], always_split: None
) -> None:
    problem, inputs = dense(300, head_dim, causal=True, deterministic=deterministic)
    run(problem, inputs, forwarded(problem, inputs))
    ((words, space),) = apart
    starts = sorted(space.offsets.values())
    for end in (*starts, len(words)):  # each part ends a gap or less before what follows it
        gap = words[end - GAP : end].view(torch.int32)
        assert bool((gap == 1).all()), f"{int((gap != 1).sum())} words before {end} of {space}"
