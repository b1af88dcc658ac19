"""create_block_mask against torch's, list by list; named masks against their functions; device kernels."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.programs import SIZES, draw
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane import jit
from flashlane.flex import block_mask as module
from flashlane.flex import blocks, device_blocks, masks, windows
from flashlane.flex.bind import bind
from flashlane.flex.intervals import Intervals, interval_mask_mod
from flashlane.jit.launch import MAX_GRID

OFFSETS = torch.tensor([0, 70, 71, 300, 420, 500])
GAPS = [-1, *(parent for i in range(0, 24, 2) for parent in (i, i))]
"""Each second segment has two children, so that a path passes by twelve others."""
NAMED = {
    "causal": (masks.causal(), (500, 500)),
    "causal shifted back": (masks.causal(-30), (500, 500)),
    "causal of more keys": (masks.causal(20), (300, 500)),
    "window": (masks.sliding_window(40), (500, 500)),
    "window of both sides and sinks": (masks.sliding_window(40, 10, 30), (500, 500)),
    "documents": (masks.documents(OFFSETS), (500, 500)),
    "causal documents": (masks.documents(OFFSETS, causal=True), (500, 500)),
    "block-causal documents": (masks.block_causal_documents(OFFSETS, 16), (500, 500)),
    "prefix-lm": (masks.prefix_lm(100), (500, 500)),
    "prefixes of batches": (masks.prefix_lm(torch.tensor([100, 0, 333], dtype=torch.int32)), (500, 500)),
    "chunks": (masks.chunks(33), (500, 500)),
    "causal chunks": (masks.chunks(128, causal=True), (512, 512)),
    "prefix tree": (masks.prefix_tree([-1, 0, 1, 1, 0, 4, -1], [100, 50, 60, 70, 80, 90, 50]), (500, 500)),
    "prefix tree with gaps": (masks.prefix_tree(GAPS, [20] * len(GAPS)), (500, 500)),
    "block diffusion": (masks.block_diffusion(250, 32), (500, 500)),
    "neighbourhood 1d": (masks.neighbourhood((500,), (33,)), (500, 500)),
    "neighbourhood 2d": (masks.neighbourhood((20, 25), (3, 7)), (500, 500)),
    "neighbourhood 2d, many intervals": (masks.neighbourhood((20, 25), (7, 7)), (500, 500)),
    "neighbourhood 3d": (masks.neighbourhood((4, 5, 25), (2, 2, 25)), (500, 500)),
    "neighbourhood 3d, many intervals": (masks.neighbourhood((4, 5, 25), (3, 3, 5)), (500, 500)),
    "neighbourhood 3d, a whole axis inside": (masks.neighbourhood((5, 4, 25), (2, 4, 5)), (500, 500)),
    "neighbourhood of short lines": (masks.neighbourhood((10, 25, 2), (4, 6, 1)), (500, 500)),
    "neighbourhood of fewer tokens": (masks.neighbourhood((10, 25), (3, 7)), (500, 500)),
    "neighbourhood of everything": (masks.neighbourhood((4, 5), (4, 5)), (20, 20)),
}


WITHOUT_INTERVALS = {
    f"neighbourhood {kind}" for kind in ("3d, a whole axis inside", "of short lines", "of fewer tokens")
}
WITHOUT_INTERVALS |= {name for name in NAMED if name.endswith("many intervals")}


def batches_of(name: str) -> int:
    return 3 if name == "prefixes of batches" else 1


def same_lists(found: torch_flex.BlockMask, wanted: torch_flex.BlockMask) -> None:
    assert found.seq_lengths == wanted.seq_lengths and found.BLOCK_SIZE == wanted.BLOCK_SIZE
    for name in blocks.LISTS:
        a, b = getattr(found, name), getattr(wanted, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype == torch.int32 and torch.equal(a, b)), name


@pytest.mark.parametrize("size", [16, (64, 32), 128])
@pytest.mark.parametrize("name", NAMED)
def test_named_masks_have_torchs_lists(name: str, size: int | tuple[int, int]) -> None:
    mask, lengths = NAMED[name]
    wanted = torch_flex.create_block_mask(mask, batches_of(name), 2, *lengths, "cpu", BLOCK_SIZE=size)
    found = flashlane.create_block_mask(mask, batches_of(name), 2, *lengths, "cpu", BLOCK_SIZE=size)
    same_lists(found, wanted)
    plain = flashlane.create_block_mask(mask.function, batches_of(name), 2, *lengths, "cpu", BLOCK_SIZE=size)
    same_lists(plain, wanted)


@pytest.mark.parametrize("name", NAMED)
def test_intervals_show_what_the_function_shows(name: str) -> None:
    mask, lengths = NAMED[name]
    intervals = mask.intervals(*lengths, torch.device("cpu"))
    assert (intervals is None) == (name in WITHOUT_INTERVALS)
    if intervals is None:
        return
    dense = torch_flex.create_mask(mask, batches_of(name), 1, *lengths, "cpu")
    assert torch.equal(
        torch_flex.create_mask(interval_mask_mod(intervals), batches_of(name), 1, *lengths, "cpu"), dense
    )
    assert (intervals.starts.diff(dim=2) >= 0).all() and intervals.starts.shape[2] <= masks.MOST_INTERVALS


@pytest.mark.parametrize("seed", range(40))
def test_drawn_masks_have_torchs_lists(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when few blocks and few pairs are looked at in one step."""
    monkeypatch.setattr(module, "MOST_BLOCKS", [1 << 20, 7][seed % 2])
    monkeypatch.setattr(module, "MOST_PAIRS", [1 << 21, 100][seed // 2 % 2])
    drawn, size = draw(seed, "mask_mod"), [4, (8, 4), 16][seed % 3]

    def of_i32(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """torch's function makes lists of i64 positions; its compiled kernels, and ours, have i32."""
        return drawn.function(b.int(), h.int(), q.int(), kv.int())

    wanted = torch_flex.create_block_mask(of_i32, *SIZES, "cpu", BLOCK_SIZE=size)
    same_lists(flashlane.create_block_mask(drawn.function, *SIZES, "cpu", BLOCK_SIZE=size), wanted)
    if "separate_full_blocks" not in inspect.signature(torch_flex.create_block_mask).parameters:
        return  # torch before 2.13
    whole = torch_flex.create_block_mask(of_i32, *SIZES, "cpu", BLOCK_SIZE=size, separate_full_blocks=False)
    same_lists(
        flashlane.create_block_mask(drawn.function, *SIZES, "cpu", BLOCK_SIZE=size, separate_full_blocks=False), whole
    )


@pytest.mark.parametrize("factor", [30_000_000, 1103515245])
def test_products_that_wrap_have_no_bounds(factor: int) -> None:
    """Between positive ends a product of a block may be negative."""
    made = flashlane.create_block_mask(lambda b, h, q, kv: q * factor > 0, None, None, 320, 64, "cpu", BLOCK_SIZE=32)
    rows = (torch.arange(320, dtype=torch.int32) * factor > 0).split(32)
    assert made.kv_num_blocks[0, 0].tolist() == [2 * bool(part.any() and not part.all()) for part in rows]
    assert made.full_kv_num_blocks[0, 0].tolist() == [2 * bool(part.all()) for part in rows]


def test_most_blocks_are_settled_without_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """64k tokens in bounded memory: only blocks that the mask cuts are evaluated."""
    evaluated = []
    original = module._evaluated
    monkeypatch.setattr(
        module, "_evaluated", lambda p, a, at, *r: (evaluated.append(len(at)), original(p, a, at, *r))[1]
    )
    n = 65536
    documents = torch.arange(n) // 3000
    mask = flashlane.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv]), None, None, n, n, "cpu"
    )
    assert sum(evaluated) < 2000 and max(evaluated) <= module.MOST_PAIRS // 128**2
    causal = flashlane.create_block_mask(masks.causal(), None, None, n, n, "cpu")
    assert torch.equal(causal.full_kv_num_blocks[0, 0], torch.arange(512, dtype=torch.int32))
    offsets = torch.tensor([*range(0, n, 3000), n])
    same_lists(mask, flashlane.create_block_mask(masks.documents(offsets, causal=True), None, None, n, n, "cpu"))


def test_blocks_are_settled_by_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding widens their bounds by little: of 32 x 32 blocks only those of the diagonal are evaluated."""
    evaluated = []
    original = module._evaluated
    monkeypatch.setattr(
        module, "_evaluated", lambda p, a, at, *r: (evaluated.append(len(at)), original(p, a, at, *r))[1]
    )
    for function in (
        lambda b, h, q, kv: q.float() >= kv,
        lambda b, h, q, kv: 0.7 * q - 0.7 * kv >= 0.0,
        lambda b, h, q, kv: (q * 0.5).int() >= (kv * 0.5).int(),
    ):
        del evaluated[:]
        flashlane.create_block_mask(function, None, None, 4096, 4096, "cpu")
        assert 0 < sum(evaluated) <= 32


@pytest.mark.parametrize("kind", ["product", "product of floats", "difference of products", "product and sum"])
def test_pairs_that_just_reach_a_limit_are_visible(kind: str) -> None:
    """Products are rounded to f32, and may reach a limit that they would exceed by less than that."""
    chance = random.Random(kind)
    for factor, first in [(2.95, 896), (0.65, 768), (0.05, 768), (2.68, 384)] + [
        (round(chance.uniform(0.01, 3), 2), 128 * chance.randint(1, 6)) for _ in range(16)
    ]:
        q0, kv0, other = torch.tensor(first), torch.tensor(128 * chance.randint(0, 6)), round(chance.random(), 2)
        function, limit = {
            "product": (lambda q, kv, f=factor: q * f, q0 * factor),
            "product of floats": (lambda q, kv, f=factor: f * q.float(), q0 * factor),
            "difference of products": (
                lambda q, kv, f=factor, o=other: q * f - kv * o, q0 * factor - (kv0 + 127) * other
            ),
            "product and sum": (lambda q, kv, f=factor, o=other: (q - kv) * f + o, (q0 - kv0 - 127) * factor + other),
        }[kind]  # fmt: skip
        most = float(limit)

        def mask(b, h, q, kv, function=function, most=most):
            return function(q, kv) <= most

        same_lists(
            flashlane.create_block_mask(mask, None, None, 1024, 1024, "cpu"),
            torch_flex.create_block_mask(mask, None, None, 1024, 1024, "cpu"),
        )


def test_bounds_of_numbers_that_are_infinite_or_not_numbers() -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0, 5.0, -2.0, float("nan")]).repeat(4)

    def mask(b, h, q, kv):
        return (values[q] - values[kv] < 3.0) | (values[q] * values[kv] != values[kv])

    same_lists(
        flashlane.create_block_mask(mask, None, None, 32, 32, "cpu", 4),
        torch_flex.create_block_mask(mask, None, None, 32, 32, "cpu", 4),
    )


_rows = torch.randint(0, 2, (6, 4), generator=torch.Generator().manual_seed(3)).bool().repeat_interleave(16, 1)
_with_nan = torch.linspace(-2, 2, 64).index_fill_(0, torch.tensor([5, 40]), float("nan"))
HARD_TO_BOUND = {
    "a float as index": lambda b, h, q, kv: _rows[(h + 1.0).int(), kv],
    "half a head": lambda b, h, q, kv: _rows[(h * 0.5 + 1).int(), kv],
    "a bit of a head": lambda b, h, q, kv: _rows[h & 1, kv],
    "a shifted head": lambda b, h, q, kv: _rows[h >> 1, kv],
    "another bit": lambda b, h, q, kv: _rows[h ^ 1, kv],
    "fmod": lambda b, h, q, kv: _rows[torch.fmod(h + 1, 3), kv],
    "a truncated half": lambda b, h, q, kv: _rows[torch.div(h, 2, rounding_mode="trunc"), kv],
    "documents by hashes": lambda b, h, q, kv: _ids[q] == _ids[kv],
    "an order of hashes": lambda b, h, q, kv: _ids[q] >= _ids[kv],
    "ids just above f64": lambda b, h, q, kv: _ids[q] - 2**60 + 2**53 == _ids[kv] - 2**60 + 2**53,
    "clamped NaN": lambda b, h, q, kv: _with_nan[kv].clamp(-3, 3) <= 3,
    "absolute NaN": lambda b, h, q, kv: _with_nan[kv].abs() >= 0,
    "NaN in a minimum": lambda b, h, q, kv: torch.minimum(_with_nan[kv], _with_nan[q] * 0 + 3) <= 3,
    "tanh of NaN": lambda b, h, q, kv: torch.tanh(_with_nan[kv]) <= 1,
    "sigmoid of NaN": lambda b, h, q, kv: torch.sigmoid(_with_nan[kv]) >= 0,
    "NaN is not itself": lambda b, h, q, kv: _with_nan[kv] == _with_nan[kv],
    "NaN times 0": lambda b, h, q, kv: _with_nan[kv] * 0 == 0,
    "NaN as a bool": lambda b, h, q, kv: (_with_nan[kv] * 0).bool(),
    "a choice by NaN": lambda b, h, q, kv: torch.where(_with_nan[kv] > -9, 1, 2) == 2,
    "infinity less itself": lambda b, h, q, kv: (_infinite[kv] - _infinite[q]).abs() >= 0,
    "a clamped logarithm": lambda b, h, q, kv: torch.log(kv - 5.0).clamp(-3, 3) <= 3,
    "not unlike": lambda b, h, q, kv: _with_nan[kv].clamp(0, 0) != 0,
}
_ids = 2**60 + torch.arange(64) // 16 * 3
_infinite = torch.zeros(64).index_fill_(0, torch.tensor([7]), float("inf"))


@pytest.mark.parametrize("name", HARD_TO_BOUND)
def test_blocks_are_full_or_empty_only_where_all_pairs_are(name: str) -> None:
    mask = HARD_TO_BOUND[name]
    sizes = 2, 4, 64, 64
    found = flashlane.create_block_mask(mask, *sizes, "cpu", BLOCK_SIZE=16)
    b, h, q, kv = (torch.arange(n).view([-1 if axis == i else 1 for i in range(4)]) for axis, n in enumerate(sizes))
    wanted = mask(b, h, q, kv).expand(sizes).unflatten(3, (4, 16)).unflatten(2, (4, 16))
    states = blocks.states(found).expand(2, 4, 4, 4)
    assert torch.equal(states == blocks.FULL, wanted.all(5).all(3))
    assert torch.equal(states == blocks.HIDDEN, ~wanted.any(5).any(3))


FAR = {
    "causal": masks.causal(2**31 - 1),
    "nothing": masks.causal(-(2**40)),
    "window": masks.sliding_window(2**31 - 1, 2**31 - 1),
    "left": masks.sliding_window(2**63 - 1),
    "chunks": masks.chunks(2**31),
    "prefix": masks.prefix_lm(2**31),
    "first": masks.sliding_window(1, 0, 2**40),
}


@pytest.mark.parametrize("name", FAR)
def test_numbers_that_no_sequence_reaches_do_not_wrap(name: str) -> None:
    mask, at = FAR[name], torch.arange(40)
    wanted = mask.function(0, 0, at[:, None], at[None]).expand(40, 40)
    found = flashlane.create_block_mask(mask, 1, 1, 40, 40, "cpu", BLOCK_SIZE=8)
    seen = torch_flex.create_mask(found.mask_mod, 1, 1, 40, 40, "cpu")[0, 0]
    assert torch.equal(seen, wanted) and (name == "nothing") == (not wanted.any())
    assert torch.equal(blocks.states(found)[0, 0] == blocks.HIDDEN, ~wanted.view(5, 8, 5, 8).any(3).any(1))


def test_masks_of_so_many_tokens_are_their_functions_at_other_lengths() -> None:
    """``block_diffusion`` has a meaning at any length; documents and trees have at most their own."""
    documents, tree = masks.documents(torch.tensor([0, 3, 6])), masks.prefix_tree([-1, 0, 0], [2, 2, 2])
    for mask, n in ((masks.block_diffusion(4, 2), 10), (masks.block_diffusion(4, 2), 6), (documents, 4), (tree, 5)):
        found = flashlane.create_block_mask(mask, 1, 1, n, n, "cpu", BLOCK_SIZE=2)
        same_lists(found, torch_flex.create_block_mask(mask.function, 1, 1, n, n, "cpu", BLOCK_SIZE=2))
    for mask in (masks.documents(torch.tensor([0, 3, 6])), masks.block_causal_documents(torch.tensor([0, 3, 6]), 2),
                 masks.prefix_tree([-1, 0, 0], [2, 2, 2])):  # fmt: skip
        for lengths in ((9, 6), (6, 9)):
            with pytest.raises(ValueError, match="is of 6 tokens"):
                flashlane.create_block_mask(mask, 1, 1, *lengths, "cpu")


def test_named_masks_of_no_tokens_have_no_blocks() -> None:
    for lengths in ((0, 6), (6, 0), (0, 0)):
        found = flashlane.create_block_mask(masks.causal(), 1, 1, *lengths, "cpu", BLOCK_SIZE=2)
        assert not found.kv_num_blocks.any() and found.seq_lengths == lengths


@pytest.mark.parametrize("most_copied", [0, 4 * 3 * 3 * 3])
def test_lists_of_batches_and_heads_that_do_not_matter_are_views(
    most_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All counts, by which heads are known to share their lists, and long lists of indices; short ones are copies."""
    monkeypatch.setattr(module, "MOST_COPIED", most_copied)
    mask = flashlane.create_block_mask(lambda b, h, q, kv: q >= kv + h, 4, 3, 300, 300, "cpu")
    narrow = blocks.narrowed(mask)
    assert narrow is blocks.narrowed(mask) and narrow.kv_indices.shape == narrow.q_indices.shape == (1, 3, 3, 3)
    assert blocks.narrowed(narrow) is narrow and torch.equal(blocks.states(narrow), blocks.states(mask)[:1])
    assert mask.kv_indices.shape == (4, 3, 3, 3) and mask.kv_indices.stride(1) != 0
    assert mask.kv_num_blocks.stride(0) == 0
    for each in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
        assert (each.stride(0) == 0) == (most_copied == 0) != each.is_contiguous()


def test_intervals_that_touch_are_one() -> None:
    starts = torch.tensor([0, 8, 5, 20], dtype=torch.int32).view(1, 1, 4, 1).expand(1, 1, 4, 8).contiguous()
    ends = torch.tensor([8, 8, 16, 24], dtype=torch.int32).view(1, 1, 4, 1).expand(1, 1, 4, 8).contiguous()
    assert Intervals(starts, ends).states((8, 32), (8, 8)).tolist() == [
        [[[blocks.FULL, blocks.FULL, blocks.PARTIAL, 0]]]
    ]
    with pytest.raises(ValueError, match=r"starts is torch\.int64"):
        Intervals(starts.long(), ends)


@pytest.mark.parametrize("seed", range(12))
def test_drawn_intervals_have_the_lists_of_their_pairs(seed: int) -> None:
    """Empty, touching, overlapping and out-of-range ones, for each batch and head or for all."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    shape = number(1, 3), number(1, 3), number(1, 4), number(1, 70)
    keys, size = number(1, 90), (number(1, 20), number(1, 20))
    starts = torch.randint(-5, keys + 5, shape, generator=generator, dtype=torch.int32).sort(2).values
    lengths = torch.randint(-3, 40, shape, generator=generator, dtype=torch.int32)
    intervals = Intervals(starts, (starts + lengths).contiguous())
    visible = torch_flex.create_mask(interval_mask_mod(intervals), *shape[:2], shape[3], keys, "cpu")
    at = torch.arange(keys)
    expected = ((starts.unsqueeze(-1) <= at) & (at < intervals.ends.unsqueeze(-1))).any(2)
    assert torch.equal(visible, expected)
    table = torch_flex._convert_mask_to_block_mask(visible, *size, separate_full_blocks=True)
    states = torch.where(table[1] > 0, blocks.FULL, table[0]).to(torch.int8)
    assert torch.equal(intervals.states((shape[3], keys), size), states)
    of_keys = Intervals(starts, intervals.ends, of_keys=True)
    assert torch.equal(of_keys.states((keys, shape[3]), size[::-1]), states.mT)
    transposed = torch_flex.create_mask(interval_mask_mod(of_keys), *shape[:2], keys, shape[3], "cpu")
    assert torch.equal(transposed, expected.mT)


def test_masks_with_as_many_intervals_are_one_program() -> None:
    """So a mask or a length that was not seen before compiles nothing."""
    programs = set()
    for mask, n in ((masks.causal(), 500), (masks.sliding_window(9), 300), (masks.documents(OFFSETS), 500)):
        made = flashlane.create_block_mask(mask, None, None, n, n, "cpu")
        programs.add(bind(None, made.mask_mod, torch.device("cpu"))[0])
    assert len(programs) == 1


WRONG = {
    "left is -1": lambda: masks.sliding_window(-1),
    "left is True": lambda: masks.sliding_window(True),
    "size is 0": lambda: masks.chunks(0),
    "prefix is -1": lambda: masks.prefix_lm(-1),
    r"prefix is torch.float32 \(3,\)": lambda: masks.prefix_lm(torch.ones(3)),
    "offsets is torch.float32": lambda: masks.documents(torch.ones(3)),
    r"shape is \(4, 5\) and window \(5, 5\)": lambda: masks.neighbourhood((4, 5), (5, 5)),
    "segment 3 is not in depth-first order": lambda: masks.prefix_tree([-1, 0, 0, 1], [1, 1, 1, 1]),
    "a parent is -1 or an earlier": lambda: masks.prefix_tree([0, -1], [1, 1]),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_masks_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def sources() -> dict[str, jit.KernelSource]:
    program, _ = bind(None, NAMED["block-causal documents"][0].function, torch.device("cpu"))
    return {
        "intervals": device_blocks.interval_source(),
        "neighbourhoods": device_blocks.neighbourhood_source(),
        "lists": device_blocks.list_source(),
        "program 128": device_blocks.program_source(program, (128, 128)),
        "program 64": device_blocks.program_source(program, (64, 64)),
        "program 16": device_blocks.program_source(program, (16, 16)),
    }


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", sources())
def test_device_kernels_compile_without_spills(name: str, arch: str) -> None:
    assert jit.compile(sources()[name], arch).report.spill_stores == 0


def test_every_device_file_has_a_source() -> None:
    files = {path.stem for path in Path(device_blocks.__file__).parent.glob("*.cu")}
    assert files == {source.entry for source in sources().values()}


def test_more_matrices_than_an_axis_of_a_grid_has_are_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mask of 1024 batch rows and 64 heads of their own has: the launch was refused."""
    launched: list[tuple[int, Any]] = []

    def launch(grid: tuple[int, int, int], block: Any, shared: int, params: Any) -> None:
        assert all(size <= most for size, most in zip(grid, MAX_GRID, strict=True))
        launched.append((grid[1], params))

    monkeypatch.setattr(device_blocks, "_function", lambda *_: SimpleNamespace(launch=launch))
    monkeypatch.setattr(device_blocks, "on_device", lambda index: contextlib.nullcontext())
    table = torch.full((1024, 64, 2, 3), blocks.PARTIAL, dtype=torch.int8)
    made = device_blocks.block_mask(table, None, (256, 384), (128, 128), False)
    assert [count for count, _ in launched] == [65535, 1]
    first, second = (params for _, params in launched)
    assert [first.states, second.states] == [table.data_ptr(), table[1023, 63].data_ptr()]
    for side, counts, indices in (
        ("of_rows", made.kv_num_blocks, made.kv_indices),
        ("of_columns", made.q_num_blocks, made.q_indices),
    ):
        for params, at in ((first, (0, 0)), (second, (1023, 63))):
            lists = getattr(params, side)
            assert [lists.counts, lists.indices] == [counts[at].data_ptr(), indices[at].data_ptr()]
            assert lists.full_counts is None and lists.full_indices is None
    launched.clear()
    starts = torch.zeros(65536, 1, 1, 4, dtype=torch.int32)
    states = device_blocks.interval_states(starts, starts, (4, 4), (2, 4))
    assert [count for count, _ in launched] == [65535, 1] and states.shape == (65536, 1, 2, 1)
    assert launched[1][1].starts == starts[-1].data_ptr() and launched[1][1].states == states[-1].data_ptr()


def moved(mask: masks.Mask | object) -> object:
    """A function that captures CPU tensors cannot run on a GPU: masks of tensors are made there."""
    return {
        "documents": lambda: masks.documents(OFFSETS.cuda()),
        "causal documents": lambda: masks.documents(OFFSETS.cuda(), causal=True),
        "block-causal documents": lambda: masks.block_causal_documents(OFFSETS.cuda(), 16),
        "prefixes of batches": lambda: masks.prefix_lm(torch.tensor([100, 0, 333], dtype=torch.int32, device="cuda")),
        "prefix tree": lambda: masks.prefix_tree([-1, 0, 1, 1, 0, 4, -1], [100, 50, 60, 70, 80, 90, 50], "cuda"),
        "prefix tree with gaps": lambda: masks.prefix_tree(GAPS, [20] * len(GAPS), "cuda"),
    }.get(mask, lambda: NAMED[mask][0])()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, (64, 32), 128])
@pytest.mark.parametrize("name", NAMED)
def test_lists_of_a_gpu_are_those_of_the_cpu(name: str, size: int | tuple[int, int]) -> None:
    mask, lengths = NAMED[name]
    on_gpu = moved(name)
    for function, given in ((mask, on_gpu), (mask.function, on_gpu.function)):
        wanted = flashlane.create_block_mask(function, batches_of(name), 2, *lengths, "cpu", BLOCK_SIZE=size)
        found = flashlane.create_block_mask(given, batches_of(name), 2, *lengths, "cuda", BLOCK_SIZE=size).to("cpu")
        assert torch.equal(blocks.states(found), blocks.states(wanted))
        for lists in blocks.LISTS[::2]:
            assert torch.equal(getattr(found, lists), getattr(wanted, lists)), lists
        order = found.q_indices.sort(-1).values
        assert torch.equal(order, torch.arange(order.shape[-1], dtype=torch.int32).expand(order.shape))


def test_a_number_that_no_distance_reaches_is_no_window() -> None:
    """The mask is then the rest of it, and a window that kernels are given has room in their 32 bits."""

    def within(far: int):
        return lambda b, h, q, kv: (q >= kv) & (q - kv < far)

    for far, window in ((sys.maxsize, (-1, 0)), (2**31, (-1, 0)), (2**31 - 1, (1 << 30, 0)), (30, (29, 0))):
        mask = flashlane.create_block_mask(within(far), None, None, 100, 100, "cpu", BLOCK_SIZE=16)
        same_lists(mask, torch_flex.create_block_mask(within(far), None, None, 100, 100, "cpu", BLOCK_SIZE=16))
        assert windows.NOTES.of(mask) == window
    wraps = flashlane.create_block_mask(lambda b, h, q, kv: q + (2**31 - 1) >= kv, 1, 1, 100, 100, "cpu")
    assert windows.NOTES.of(wraps) is None, "the sum is below 0 for all q but 0"


def test_every_second_key_before_a_query_within_a_distance_that_nothing_exceeds() -> None:
    mask = lambda b, h, q, kv: (q >= kv) & (q - kv < sys.maxsize) & (kv % 2 == 0)  # noqa: E731
    found = flashlane.create_block_mask(mask, None, None, 256, 256, device="cpu")
    same_lists(found, torch_flex.create_block_mask(mask, None, None, 256, 256, device="cpu"))
    q = torch.randn(1, 1, 256, 8, dtype=torch.float64)
    shown = torch_flex.create_mask(mask, None, None, 256, 256, "cpu")
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, shown)
    torch.testing.assert_close(flashlane.flex_attention(q, q, q, None, found), out)


@pytest.mark.parametrize("prefixes", [[3, 50], [3], [3, 50, 20, 1]])
def test_a_mask_of_batch_rows_is_made_for_these(prefixes: list[int]) -> None:
    mask, n = masks.prefix_lm(torch.tensor(prefixes)), len(prefixes)
    same_lists(
        flashlane.create_block_mask(mask, n, None, 100, 100, "cpu"),
        torch_flex.create_block_mask(mask, n, None, 100, 100, "cpu"),
    )
    for batch in {None, 1, 3} - ({None, n} if n == 1 else {n}):
        with pytest.raises(ValueError, match=f"B is {batch}; .* of {n} batch rows, so that it must be {n}"):
            flashlane.create_block_mask(mask, batch, None, 100, 100, "cpu")


OUTSIDE = {
    "a table of keys": (lambda b, h, q, kv: torch.ones(10).bool()[kv], (64, 64)),
    "a hidden half": (lambda b, h, q, kv: (q < 0) & torch.ones(10).bool()[kv], (64, 64)),
    "a table of heads": (lambda b, h, q, kv: torch.ones(2).bool()[h] | (q >= 0), (64, 64)),
    "the last query": (lambda b, h, q, kv: torch.ones(63).bool()[q], (64, 64)),
    "an index that is computed": (lambda b, h, q, kv: torch.ones(40).bool()[q - kv // 2], (64, 64)),
    "too far from the end": (lambda b, h, q, kv: torch.ones(40).bool()[q - kv] | (q >= 0), (32, 64)),
    "an index that is read": (lambda b, h, q, kv: torch.ones(4).bool()[torch.arange(64)[q] // 2], (64, 64)),
}


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("way", OUTSIDE)
def test_an_index_outside_of_a_captured_tensor_raises_on_a_cpu(way: str, size: int) -> None:
    """Also where bounds tell what a block is without it."""
    mask, lengths = OUTSIDE[way]
    for make in (torch_flex.create_block_mask, flashlane.create_block_mask):
        with pytest.raises(IndexError):
            make(mask, 1, 3, *lengths, device="cpu", BLOCK_SIZE=size)


@pytest.mark.parametrize("length", [64, 50])
def test_an_index_that_bounds_hold_inside_of_a_tensor_is_not_evaluated(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_evaluated", None)
    table, of_half = torch.ones(length).bool(), torch.ones(length).bool()
    mask = lambda b, h, q, kv: table[q] & table[-1 - kv] & of_half[kv // 2] & of_half[(q - kv).clamp(-3, 3)]  # noqa: E731
    found = flashlane.create_block_mask(mask, 1, 1, length, length, "cpu", BLOCK_SIZE=16)
    assert (blocks.states(found)[:, :, :3, :3] == blocks.FULL).all()


@pytest.mark.parametrize("full", [False, True], ids=["partial blocks", "full blocks, too"])
def test_heads_with_as_many_blocks_as_the_others_have_their_own(full: bool) -> None:
    """The counts of lists of a given length are one number, expanded as a view; the indices are each head's."""
    batch, heads, n, size = 2, 3, 4, 16
    order = torch.rand(batch, heads, n, n).argsort(-1).int()
    counts = torch.full((1, 1, 1), 1 if full else 2, dtype=torch.int32).expand(batch, heads, n)
    lists = (counts, order, counts, order.roll(-1, -1)) if full else (counts, order)
    table = torch.zeros(batch, heads, n, n, dtype=torch.bool).scatter_(-1, order[..., :2].long(), True)
    mask = torch_flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size)
    visible = table.repeat_interleave(size, 2).repeat_interleave(size, 3)
    q = torch.randn(batch, heads, n * size, 8, dtype=torch.float64)
    wanted = torch.where(visible, q @ q.mT * 8**-0.5, -torch.inf).softmax(-1) @ q
    torch.testing.assert_close(flashlane.flex_attention(q, q, q, None, mask), wanted)
    same = torch_flex.BlockMask.from_kv_blocks(*(t[:1, :1].expand(t.shape) for t in lists), BLOCK_SIZE=size)
    assert blocks.narrowed(mask) is mask and blocks.narrowed(same).kv_indices.shape == (1, 1, n, n)


def test_a_mask_whose_lists_of_indices_are_replaced_has_those_of_each_head() -> None:
    mask = flashlane.create_block_mask(lambda b, h, q, kv: (q - kv) % 48 < 16, 1, 2, 48, 48, "cpu", BLOCK_SIZE=16)
    assert blocks.narrowed(mask).kv_indices.shape[1] == 1
    mask.kv_indices = torch.stack((mask.kv_indices[:, 0], mask.kv_indices[:, 0].flip(-1)), 1)
    assert blocks.narrowed(mask) is mask


@pytest.mark.parametrize("large", [2**31, 2**40, 2**70])
@pytest.mark.parametrize("name", ["BLOCK_SIZE", "Q_LEN", "KV_LEN", "B", "H"])
def test_what_exceeds_32_bits_is_refused(name: str, large: int) -> None:
    """An error of torch named no argument, or memory of the size was asked for."""
    given = {"B": None, "H": None, "Q_LEN": 8, "KV_LEN": 8, "device": "cpu", name: large}
    with pytest.raises(ValueError, match=rf"^{name} is {large}; it may be .* (to|up to) 2147"):
        flashlane.create_block_mask(lambda b, h, i, j: i >= j, **given)


def test_a_block_may_be_longer_than_what_it_holds() -> None:
    found = flashlane.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, "cpu", BLOCK_SIZE=2**31 - 1)
    assert found.BLOCK_SIZE == (2**31 - 1, 2**31 - 1) and found.kv_num_blocks.tolist() == [[[1]]]
