"""Lists of blocks without a score on Hopper: full blocks take no row maximum where rows have one already."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flashlane import create_block_mask, flex_attention
from flashlane.core.arch import arch_of
from flashlane.kernels.hopper.arch import ARCH

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(arch_of(HERE) != ARCH, reason="needs an sm_90 GPU")]
GROWTHS = {"as drawn": 0.0, "slowly": 0.35, "beyond all exponents": 5.0, "in the other order": -0.35}
"""How the scores of a row grow with the key, from block to block."""
QUERIES, KEYS = 1000, 1700


def lists(table: torch.Tensor, size: int) -> BlockMask:
    """The mask of a table ``(1, heads, rows, columns)`` of full blocks."""
    counts = table.sum(-1, dtype=torch.int32)
    indices = torch.argsort(table.int(), dim=-1, descending=True, stable=True).int()
    none = torch.zeros_like(counts)
    return BlockMask.from_kv_blocks(none, indices, counts, indices, BLOCK_SIZE=size, seq_lengths=(QUERIES, KEYS))


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in f64 of ``(b, h, s, d)``."""
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]).nan_to_num(0.0) @ v.double(), lse


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("by_bits", [False, True], ids=["by hand", "partial blocks"])
def test_maxima_that_grow(head_dim: int, size: int, growth: str, by_bits: bool) -> None:
    dtype = torch.bfloat16 if size == 128 else torch.float16
    q = torch.randn(2, 3, QUERIES, head_dim, device=HERE, dtype=dtype)
    k, v = (torch.randn(2, 3, KEYS, head_dim, device=HERE, dtype=dtype) for _ in range(2))
    if growth != "as drawn":
        q.abs_(), k.abs_()
        at, factor = torch.arange(KEYS, device=HERE) // 64, GROWTHS[growth]
        at = at if factor > 0 else KEYS // 64 - at
        k.mul_((1 + at * abs(factor)).to(dtype)[None, None, :, None])
    rows, columns = -(-QUERIES // size), -(-KEYS // size)
    table = torch.rand(1, 3, rows, columns, device=HERE) < 0.6
    table[:, 0, ::3] = False
    seen = table.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :QUERIES, :KEYS]
    block_mask = lists(table, size)
    if by_bits:
        document = (torch.arange(max(QUERIES, KEYS), device=HERE) * 7 // 3500).int()

        def alike(b: object, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (document[i] <= document[j]) & ((i + j + h) % 97 != 0)

        block_mask = create_block_mask(alike, None, 3, QUERIES, KEYS, device=HERE, BLOCK_SIZE=size)
        i, j = torch.arange(QUERIES, device=HERE)[:, None], torch.arange(KEYS, device=HERE)
        seen = torch.stack([alike(0, torch.tensor(h, device=HERE), i, j) for h in range(3)])[None]
    out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    expected, expected_lse = reference(q, k, v, seen)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=1e-4)
    allowed = 4e-3 if dtype == torch.bfloat16 else 8e-4
    assert (out.double() - expected).norm() <= allowed * expected.norm()
    again = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_nan_reaches_the_rows_that_see_it_and_no_others(head_dim: int) -> None:
    q = torch.randn(1, 3, QUERIES, head_dim, device=HERE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 3, KEYS, head_dim, device=HERE, dtype=torch.bfloat16) for _ in range(2))
    k[:, :, 700] = math.nan
    table = torch.rand(1, 3, 8, 14, device=HERE) < 0.6
    table[..., 2], table[..., 9] = True, True
    table[:, :, ::2, 5] = False
    out = flex_attention(q, k, v, block_mask=lists(table, 128))
    sees = table[..., 5].repeat_interleave(128, 2)[:, :, :QUERIES]
    assert (out.isnan().all(-1) == sees).all() and (out.isnan().any(-1) == sees).all()


def test_bits_of_a_row_do_not_depend_on_rows_whose_maximum_is_raised() -> None:
    q, k, v = (torch.randn(1, 3, 1024, 128, device=HERE, dtype=torch.bfloat16) for _ in range(3))
    table = torch.rand(1, 3, 8, 8, device=HERE) < 0.7
    counts = table.sum(-1, dtype=torch.int32)
    indices = torch.argsort(table.int(), dim=-1, descending=True, stable=True).int()
    none = torch.zeros_like(counts)
    mask = BlockMask.from_kv_blocks(none, indices, counts, indices, BLOCK_SIZE=128, seq_lengths=(1024, 1024))
    steep = q.clone()
    steep[:, :, ::2] *= 60
    one, other = (flex_attention(t, k, v, block_mask=mask) for t in (q, steep))
    assert torch.equal(one[:, :, 1::2], other[:, :, 1::2])
    assert not torch.equal(one[:, :, ::2], other[:, :, ::2])
