"""Block masks that were pickled, copied, saved or sent to another process compute what the original computes."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.flex_kernels import Kernels, install
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.data import DataLoader, Dataset

import flashlane
from flashlane.flex import blocks, masks, packed, repeats, windows

N = 40
OFFSETS = torch.tensor([0, 9, 9, 30, 40])
IDS = torch.tensor([3] * 9 + [1] * 21 + [7] * 10)


def before(b, h, q, kv):
    return q >= kv


def near(b, h, q, kv):
    return ((q * 7 + kv) % 5 != h) | (q == kv)


def same(ids, b, h, q, kv):
    return ids[q] == ids[kv]


def same_of_a_global(b, h, q, kv):
    return IDS[q] == IDS[kv]


def score_mod(score, b, h, q, kv):
    return score * 0.5 - 0.1 * (q - kv) * (h + 1)


class Nearby:
    """A mask function that is an object."""

    def __init__(self, reach: torch.Tensor) -> None:
        self.reach = reach

    def __call__(self, b, h, q, kv):
        return (q - kv).abs() <= self.reach[b]


MASKS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masks.causal(),
    "nothing before": lambda: masks.causal(-3),
    "sliding window": lambda: masks.sliding_window(4, right=1),
    "window and first keys": lambda: masks.sliding_window(4, right=1, first=2),
    "documents": lambda: masks.documents(OFFSETS),
    "causal documents": lambda: masks.documents(OFFSETS, causal=True),
    "documents of more tokens": lambda: masks.documents(torch.tensor([0, 20, 60])),
    "block-causal documents": lambda: masks.block_causal_documents(OFFSETS, 4),
    "prefix": lambda: masks.prefix_lm(7),
    "prefixes of batch rows": lambda: masks.prefix_lm(torch.tensor([5, 31])),
    "chunks": lambda: masks.chunks(6),
    "prefix tree": lambda: masks.prefix_tree([-1, 0, 0], [18, 12, 10]),
    "block diffusion": lambda: masks.block_diffusion(20, 3),
    "neighbourhood": lambda: masks.neighbourhood((5, 8), (3, 4)),
    "neighbourhood with many intervals": lambda: masks.neighbourhood((5, 4, 2), (3, 3, 1)),
    "a function that is a window": lambda: before,
    "a function": lambda: near,
    "a function of a global": lambda: same_of_a_global,
    "a partial": lambda: functools.partial(same, IDS.clone()),
    "an object": lambda: Nearby(torch.tensor([3, 8])),
}


def saved_and_loaded(mask: BlockMask) -> BlockMask:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED: dict[str, Callable[[BlockMask], BlockMask]] = {
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": saved_and_loaded,
}


def block_mask(function: Any, batch: int | None = 2, heads: int | None = 2, n: int = N) -> BlockMask:
    return flashlane.create_block_mask(function, batch, heads, n, n, "cpu", 8)


def operands(batch: int = 2) -> list[torch.Tensor]:
    return [torch.randn(batch, 2, N, 16, requires_grad=True) for _ in range(3)]


def results(tensors: list[torch.Tensor], mask: BlockMask | None, score: Any = score_mod) -> tuple[torch.Tensor, ...]:
    """The output, the LSE and the gradients."""
    out, lse = flashlane.flex_attention(*tensors, score, mask, return_lse=True)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return out.detach(), lse.detach(), *torch.autograd.grad((out * weights).sum(), tensors)


def check_equal(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for each, other in zip(found, wanted, strict=True):
        assert torch.equal(each, other)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return install(monkeypatch)


@pytest.mark.parametrize("way", COPIED)
@pytest.mark.parametrize("name", MASKS)
def test_a_copy_gives_the_same_outputs_and_gradients(name: str, way: str) -> None:
    mask, tensors = block_mask(MASKS[name]()), operands()
    wanted, everything = results(tensors, mask), results(tensors, None)
    other = COPIED[way](mask)
    assert other is not mask and other.BLOCK_SIZE == mask.BLOCK_SIZE and other.seq_lengths == mask.seq_lengths
    check_equal(results(tensors, other), wanted)
    check_equal(results(tensors, COPIED[way](other)), wanted)  # a copy of the copy
    assert not torch.equal(wanted[0], everything[0]), "the mask hides something"
    for lists in blocks.LISTS:
        assert torch.equal(getattr(other, lists), getattr(mask, lists)), lists


@pytest.mark.parametrize("way", COPIED)
def test_a_copy_has_the_order_of_writes_and_narrow_lists_of_its_own(way: str) -> None:
    """Lists that were expanded as views stay views, and a table by a mask's identity is not that of another mask."""
    mask = block_mask(near, 3, 2)
    mask.dq_kv_order_spt = True
    narrow = blocks.narrowed(mask)
    other = COPIED[way](mask)
    assert other.dq_kv_order_spt is True
    assert other.kv_indices.shape == (3, 2, 5, 5) and other.kv_num_blocks.stride(0) == 0
    own = blocks.narrowed(other)
    assert own is blocks.narrowed(other) and own is not narrow and own.kv_indices.shape == (1, 2, 5, 5)
    assert torch.equal(blocks.states(own), blocks.states(narrow))


WITHOUT_LISTS = {
    "causal": lambda: masks.causal(),
    "sliding window": lambda: masks.sliding_window(4, right=1),
    "a function that is a window": lambda: before,
    "documents": lambda: masks.documents(OFFSETS),
    "causal documents": lambda: masks.documents(OFFSETS, causal=True),
    "a partial": lambda: functools.partial(same, IDS.clone()),
}


@pytest.mark.parametrize("way", COPIED)
@pytest.mark.parametrize("name", WITHOUT_LISTS)
def test_kernels_are_given_no_lists_of_a_copy_either(kernels: Kernels, name: str, way: str) -> None:
    """A copied mask is still known to be a window or documents, and its calls are remembered apart."""
    mask, tensors = block_mask(WITHOUT_LISTS[name](), None, None), operands(1)
    for _ in range(3):
        wanted = results(tensors, mask, None)
    assert ("forward", None) in kernels.called and "forward again" in dict(kernels.called)
    other = COPIED[way](mask)
    assert windows.NOTES.of(other) == windows.NOTES.of(mask)
    assert (packed.NOTES.of(other) is None) == (packed.NOTES.of(mask) is None)
    for again in (False, False, True):
        kernels.called.clear()
        check_equal(results(tensors, other, None), wanted)
        assert "forward again" in dict(kernels.called) if again else ("forward", None) in kernels.called


def test_a_remembered_call_is_not_that_of_a_copy(kernels: Kernels) -> None:
    mask, tensors = block_mask(before), operands()
    other = copy.deepcopy(mask)
    for _ in range(2):
        results(tensors, mask)
    assert repeats.find(*tensors, score_mod, mask, None, False) is not None
    assert repeats.find(*tensors, score_mod, other, None, False) is None


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_a_copy_with_another_function_or_other_lists_is_no_window(way: str) -> None:
    for attribute, value in (("mask_mod", near), ("kv_num_blocks", torch.zeros(2, 2, 5, dtype=torch.int32))):
        mask = block_mask(masks.causal())
        other = COPIED[way](mask)
        setattr(other, attribute, value)
        assert windows.NOTES.of(other) is None and windows.NOTES.of(mask) == (-1, 0)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_documents_whose_tensor_was_written_are_lists(kernels: Kernels, way: str) -> None:
    """Before the copy, and after it; what the function now reads decides, as in the original."""
    kernels.repeats = False
    tensors = operands(1)
    for when in ("before", "after"):
        ids = IDS.clone()
        mask = block_mask(functools.partial(same, ids), None, None)
        if when == "before":
            ids[3] = 1
            wanted = results(tensors, mask, None)
        other = COPIED[way](mask)
        if when == "after":
            other.mask_mod.args[0][3] = 1
            assert packed.NOTES.of(mask) is not None and results(tensors, mask, None)
            ids[3] = 1
            wanted = results(tensors, mask, None)
        kernels.called.clear()
        check_equal(results(tensors, other, None), wanted)
        assert dict(kernels.called)["forward"] is not None


def test_a_deep_copy_of_a_closure_reads_the_same_tensor(kernels: Kernels) -> None:
    """copy does not copy functions, so what was known of the tensor holds until it is written."""
    kernels.repeats = False
    ids, tensors = IDS.clone(), operands(1)
    mask = block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None)
    other = copy.deepcopy(mask)
    for lists in (False, True):
        kernels.called.clear()
        check_equal(results(tensors, other, None), results(tensors, mask, None))
        shown = [block_mask for word, block_mask in kernels.called if word == "forward"]
        assert len(shown) == 2 and all((each is not None) is lists for each in shown)
        ids[3] = 1


@pytest.mark.parametrize("way", COPIED)
def test_documents_of_a_global_tensor_are_lists_once_they_were_pickled(kernels: Kernels, way: str) -> None:
    """In another process the function may read another tensor; a copy in this process still reads the same one."""
    mask, tensors = block_mask(same_of_a_global, None, None), operands(1)
    wanted = results(tensors, mask, None)
    assert ("forward", None) in kernels.called
    kernels.called.clear()
    check_equal(results(tensors, COPIED[way](mask), None), wanted)
    assert (dict(kernels.called)["forward"] is None) == (way in ("copy", "deepcopy"))


def test_documents_that_are_loaded_in_inference_mode_are_lists() -> None:
    """Such tensors do not count how often they were written."""
    mask = block_mask(functools.partial(same, IDS.clone()), None, None)
    data, tensors = pickle.dumps(mask), [t.detach() for t in operands(1)]
    with torch.inference_mode():
        other = pickle.loads(data)
        assert packed.NOTES.of(other) is None
        found = flashlane.flex_attention(*tensors, None, other)
    assert torch.equal(found, flashlane.flex_attention(*tensors, None, mask))


@pytest.mark.parametrize("name", ["causal", "documents", "neighbourhood", "a partial"])
def test_all_tensors_of_a_loaded_mask_are_on_the_device_that_is_asked_for(name: str) -> None:
    file = io.BytesIO()
    torch.save(block_mask(MASKS[name](), None, None), file)
    file.seek(0)
    mask = torch.load(file, weights_only=False, map_location="meta")
    documents = packed.NOTES.of(mask)
    tensors = [getattr(mask, lists) for lists in blocks.LISTS]
    tensors += [each for each in mask.mask_mod.args if isinstance(each, torch.Tensor)]
    tensors += [documents.offsets] if documents is not None else []
    assert len(tensors) == {"causal": 10, "documents": 11, "neighbourhood": 10, "a partial": 10}[name]
    assert all(t.is_meta for t in tensors)


@pytest.mark.parametrize("function", [lambda b, h, q, kv: q >= kv, lambda b, h, q, kv, n=3: q - kv <= n])
def test_a_function_that_cannot_be_pickled_gives_pickles_error(function: Any) -> None:
    mask = block_mask(function)
    for write in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises((AttributeError, pickle.PicklingError), match=r"[Cc]an't pickle .*<lambda>"):
            write(mask)


ARGUMENTS_THAT_CHANGE: dict[str, tuple[Callable[[Any], masks.Mask], Any, int, int]] = {
    "documents": (masks.documents, torch.tensor([0, 9, 30, 40]), 1, 20),
    "documents in i32": (masks.documents, torch.tensor([0, 9, 30, 40], dtype=torch.int32), 1, 20),
    "block-causal documents": (lambda at: masks.block_causal_documents(at, 4), torch.tensor([0, 9, 30, 40]), 1, 20),
    "prefix tree": (lambda at: masks.prefix_tree(at, [18, 12, 10]), [-1, 0, 0], 2, 1),
    "neighbourhood": (lambda at: masks.neighbourhood((5, 8), at), [3, 4], 0, 5),
}


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ARGUMENTS_THAT_CHANGE)
def test_a_copy_of_a_named_mask_is_that_of_its_making(name: str, way: str) -> None:
    """A mask keeps a copy of what its caller may write later; a pickled one is made from that copy."""
    make, argument, place, value = ARGUMENTS_THAT_CHANGE[name]
    argument = copy.deepcopy(argument)
    mask, tensors = make(argument), operands()
    wanted = results(tensors, block_mask(mask))
    argument[place] = value
    other = COPIED[way](mask)
    check_equal(results(tensors, block_mask(other)), wanted)
    assert not torch.equal(results(tensors, block_mask(make(argument)))[0], wanted[0])


class Attended(Dataset):
    """Of each block mask the mask itself, and what another process computes with it."""

    def __init__(self, held: list[BlockMask], tensors: list[torch.Tensor]) -> None:
        self.held, self.tensors = held, tensors

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, place: int) -> tuple[BlockMask, tuple[torch.Tensor, ...]]:
        torch.set_num_threads(1)
        return self.held[place], results([t.requires_grad_() for t in self.tensors], self.held[place])


def first(items: list[Any]) -> Any:
    return items[0]


@pytest.mark.slow
def test_a_data_loader_sends_masks_to_its_processes_and_back(one_thread: None) -> None:
    """A process that is spawned has none of this one's objects."""
    names = ["causal", "documents of more tokens", "window and first keys", "neighbourhood", "a function", "an object"]
    held, tensors = [block_mask(MASKS[name]()) for name in names], operands()
    given = Attended(held, [t.detach().clone() for t in tensors])
    loader = DataLoader(given, batch_size=1, num_workers=1, multiprocessing_context="spawn", collate_fn=first)
    for mask, (other, found) in zip(held, loader, strict=True):
        wanted = results(tensors, mask)
        assert windows.NOTES.of(other) == windows.NOTES.of(mask)
        for each, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, expected)
        check_equal(results(tensors, other), wanted)
