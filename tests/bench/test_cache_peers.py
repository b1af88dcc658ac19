"""What the peers are given of a key/value cache whose lengths are on the device, and why some are not given one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cache_libraries
import pytest
import torch

from flashlane.bench.measure.grid import make_problem
from flashlane.bench.measure.inputs import Case
from flashlane.bench.measure.peers import PEERS
from flashlane.bench.measure.peers_flashinfer import pages_of
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention

PEER = {peer.tag: peer for peer in PEERS}
GPU = "sm_90a"
LIBRARIES = ("(flash-attn-2)", "(flash-attn-3)", "(flash-attn-4)", "(flashinfer)", "(flash)")
USED = (1, 0, 256, 512, 300)
"""Rows in use of the caches below, whose capacity is 512: edges of pages of 256 and 16 rows, and none."""


def cache(page: int = 0, queries: int = 1, group: int = 2, capacity: int = 512, **sizes: Any) -> tuple[Any, Inputs]:
    """The problem of a cache of five sequences, for a GPU, and its tensors."""
    layout = {"layout": "paged", "page": page} if page else {"layout": "cache"}
    sizes = {"head_dim": 64, "dtype": torch.bfloat16} | sizes
    problem = make_problem(len(USED), 2 * group, queries, kv_heads=2, seqlen_k=capacity, arch=GPU, **layout, **sizes)
    used = tuple(min(each, capacity) for each in USED)
    return problem, Case(problem, lengths=used).materialise(torch.device("cpu"), 0)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_libraries.install(monkeypatch)
    real = torch.ops.aten._flash_attention_forward.default
    operator = mock.Mock(default=real, side_effect=cache_libraries.flash_attention_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)


def takes_pages() -> bool:
    """Whether the operator of the torch that is installed has block tables."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return any(argument.name == "block_table" for argument in schema.arguments)


def check(tag: str, problem: AttentionProblem, inputs: Inputs) -> None:
    found = PEER[tag].prepare(problem, inputs)()
    right = reference_attention(problem.on(None), inputs)[0]
    assert found.shape == inputs.q.shape
    torch.testing.assert_close(found.float(), right.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page", [0, 16, 256])
@pytest.mark.parametrize("queries, causal", [(1, False), (1, True), (4, False), (4, True)])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tag", LIBRARIES)
@pytest.mark.usefixtures("libraries")
def test_a_peer_reads_the_rows_in_use(tag: str, group: int, queries: int, causal: bool, page: int) -> None:
    problem, inputs = cache(page, queries, group, causal=causal)
    if tag == "(flash)" and (page == 16 or (page and not takes_pages())):
        assert "pages" in PEER[tag].supports(problem)
        return
    assert PEER[tag].supports(problem) is None
    check(tag, problem, inputs)


@pytest.mark.parametrize("tag", LIBRARIES)
@pytest.mark.usefixtures("libraries")
def test_a_contiguous_cache_has_any_capacity(tag: str) -> None:
    """327 rows are pages of one row to FlashInfer."""
    problem, inputs = cache(capacity=327)
    check(tag, problem, inputs)
    if tag == "(flashinfer)":
        assert cache_libraries.BatchDecodeWithPagedKVCacheWrapper.planned == (True, 1)


@pytest.mark.usefixtures("libraries")
def test_a_scale_is_passed_on() -> None:
    for tag in LIBRARIES:
        problem, inputs = cache(scale=0.4)
        check(tag, problem, inputs)


@pytest.mark.parametrize(
    "head_dim, group, tensor_cores", [(64, 1, False), (256, 1, False), (192, 1, True), (64, 2, True), (128, 6, True)]
)
@pytest.mark.usefixtures("libraries")
def test_flashinfer_decodes_groups_with_tensor_cores(head_dim: int, group: int, tensor_cores: bool) -> None:
    problem, inputs = cache(16, group=group, head_dim=head_dim)
    check("(flashinfer)", problem, inputs)
    assert cache_libraries.BatchDecodeWithPagedKVCacheWrapper.planned == (tensor_cores, 16)


def test_flashinfer_lists_the_pages_in_use_where_they_lie() -> None:
    problem, inputs = cache(256)
    pages = pages_of(problem, inputs)
    assert pages.k is inputs.k and pages.v is inputs.v
    assert pages.indptr.tolist() == [0, 1, 1, 2, 4, 6] and pages.last_page_len.tolist() == [1, 0, 256, 256, 44]
    table = inputs.block_table.tolist()
    assert pages.indices.tolist() == [table[0][0], table[2][0], *table[3], *table[4]]
    problem, inputs = cache(capacity=40)
    pages = pages_of(problem, inputs)
    assert pages.k.shape == (25, 8, 2, 64) and pages.k.data_ptr() == inputs.k.data_ptr()
    assert pages.indices.tolist() == [0, *range(10, 25)] and pages.last_page_len.tolist() == [1, 0, 8, 8, 8]
    whole = pages_of(replace(problem, seqused_k=False), replace(inputs, seqused_k=None))
    assert whole.indices.tolist() == list(range(25)) and whole.last_page_len.tolist() == [8] * 5


@pytest.mark.parametrize("tag", ["(flash-attn-2)", "(flash-attn-3)"])
@pytest.mark.usefixtures("libraries")
def test_places_in_a_larger_cache_are_given_where_a_library_takes_them(tag: str) -> None:
    problem, inputs = cache()
    order = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    moved = [t[order.argsort()] for t in (inputs.k, inputs.v)]
    placed = replace(inputs, k=moved[0], v=moved[1], batch_idx=order)
    problem = replace(problem, batch_idx=True)
    assert PEER[tag].supports(problem) is None
    check(tag, problem, placed)
    for other in ("(flash-attn-4)", "(flashinfer)", "(flash)"):
        assert PEER[other].supports(problem) == "the bench does not give it batch_idx"


def test_the_reason_that_a_peer_is_absent_names_what_it_lacks() -> None:
    problem, _ = cache(16)
    for tag in ("(cudnn)", "(sdpa-efficient)", "(sdpa-math)"):
        assert PEER[tag].supports(problem) == "SDPA takes no lengths of sequences and no pages"
        assert PEER[tag].supports(cache()[0]) == "SDPA takes no lengths of sequences and no pages"
    assert PEER["(flash)"].supports(cache()[0].on(None)) == "SDPA takes no lengths of sequences and no pages"
    for tag in ("(unfused)", "(flex)", "(xformers)", "(ffpa)"):
        assert PEER[tag].supports(problem) == "the bench does not give it seqused_k", tag
    assert "multiples of 64" in PEER["(flashinfer)"].supports(cache(head_dim=80)[0])
    assert "multiples of 64" in PEER["(flashinfer)"].supports(cache(head_dim_v=128)[0])
    assert "f16 and bf16" in PEER["(flash-attn-4)"].supports(cache(dtype=torch.float32)[0])
    # Lengths differ even where there are as many queries as the cache has rows.
    square = cache(queries=16, capacity=16, causal=True, alignment="top-left")[0]
    assert PEER["(flash-attn-4)"].supports(square) == "its masks are bottom-right aligned"
    packed = replace(problem, varlen=True, seqused_k=False)
    for tag in LIBRARIES:
        assert PEER[tag].supports(packed) == "the bench does not give it packed queries of a cache", tag


def test_torch_without_block_tables_takes_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("query", "key", "value", "seqused_k")
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in names])
    monkeypatch.setattr(
        torch.ops.aten, "_flash_attention_forward", SimpleNamespace(default=SimpleNamespace(_schema=schema))
    )
    assert f"pages, which torch {torch.__version__} does not take" in PEER["(flash)"].supports(cache(256)[0])
    assert PEER["(flash)"].supports(cache()[0]) is None


@pytest.mark.parametrize("page", [0, 256])
def test_torch_s_operator_has_the_arguments(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, whether it takes them can be asked of the meta device."""
    if page and not takes_pages():
        pytest.skip(f"torch {torch.__version__} has no block_table")
    problem, inputs = cache(page, 4, causal=True)
    real, given = torch.ops.aten._flash_attention_forward.default, []

    def operator(*positional: Any, **named: Any) -> Any:
        given.append((positional, named))
        moved = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in (*positional, *named.values())]
        return real(*moved[: len(positional)], **dict(zip(named, moved[len(positional) :], strict=True)))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", mock.Mock(default=real, side_effect=operator))
    assert PEER["(flash)"].prepare(problem, inputs)().shape == inputs.q.shape
    ((q, k, v, q_ends, k_ends, *numbers), named), *more = given
    assert not more and numbers == [4, 512, 0.0, True, False], "the longest, dropout_p, is_causal, return_debug_mask"
    assert torch.equal(q, inputs.q.reshape(20, 4, 64))
    assert q_ends.tolist() == [0, 4, 8, 12, 16, 20] and k_ends.tolist() == [0, 512, 1024, 1536, 2048, 2560]
    assert q_ends.dtype == k_ends.dtype == torch.int32
    wanted = {"scale": problem.scale, "seqused_k": inputs.seqused_k}
    if page:
        assert k is inputs.k and v is inputs.v
        wanted["block_table"] = inputs.block_table
    else:
        assert torch.equal(k, inputs.k.reshape(2560, 2, 64)) and torch.equal(v, inputs.v.reshape(2560, 2, 64))
    assert named.keys() == wanted.keys() and all(named[name] is wanted[name] for name in wanted)
