"""Rows of captured tensors on a GPU: the Hopper kernels against torch operations in f32 on the same operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rows import EQUAL, SCORES
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane.core.arch import arch_of
from flashlane.flex import repeats
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.flex import masks as kernel_masks

pytestmark = pytest.mark.gpu
TOKENS, HEADS = 300, 2
LARGEST_ERROR = {torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""By the largest value of an output or a gradient."""
SUMS = {
    "amax and the score": lambda t, score, h, q, kv: score + (t[h] + 0.1 * score).amax(),
    "tanh and the score": lambda t, score, h, q, kv: score + 0.1 * (t[h] * score).tanh().sum(),
}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or arch_of(torch.device("cuda", 0)) != ARCH:
        pytest.skip("no Hopper GPU")
    repeats.forget()


def operands(head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = 2, HEADS, TOKENS, head_dim
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def compare(tensors: list[torch.Tensor], captured: list[torch.Tensor], score_mod: Any, mask: Any = None) -> None:
    """Outputs, LSEs and gradients of three calls, of which the third runs as the second, against the reference's."""
    dout, wide = torch.randn_like(tensors[0]), [t.detach().float().requires_grad_() for t in tensors]
    found = []
    for leaves, backend in ((wide, "REFERENCE"), *[(tensors, "FLASHLANE")] * 3):
        out, lse = flashlane.flex_attention(
            *leaves, score_mod, mask, return_lse=True, kernel_options={"BACKEND": backend}
        )
        loss = (out.float() * dout.float()).sum() + lse.where(lse.isfinite(), 0).sum()
        found.append((out, lse, *torch.autograd.grad(loss, [*leaves, *captured], allow_unused=True)))
    for ours in found[1:]:
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "captured"), ours, found[0], strict=False):
            if b is None:
                assert a is None or not a.any(), name
                continue
            finite = b.isfinite()
            assert torch.equal(a.isfinite(), finite), name
            error = (a.float() - b.float())[finite].abs().max() / (1e-3 + b[finite].abs().max())
            assert error < LARGEST_ERROR[tensors[0].dtype], (name, error.item())


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)], ids=["64", "128"])
@pytest.mark.parametrize("name", [*SCORES, *EQUAL, *SUMS])
def test_scores_of_rows_and_their_gradients(name: str, head_dim: int, dtype: torch.dtype) -> None:
    tensors, function = operands(head_dim, dtype), (SCORES | EQUAL | SUMS)[name]
    table = torch.randn(HEADS, 5, device="cuda")
    table = (table * (torch.arange(5, device="cuda") % 2 if name in EQUAL else 1)).requires_grad_()
    mask = flashlane.create_block_mask(lambda b, h, q, kv: (q * 7 + kv) % 5 != 0, None, None, TOKENS, TOKENS, "cuda")
    for block_mask in (None, mask):
        compare(tensors, [table], lambda score, b, h, q, kv: function(table, score, h, q, kv), block_mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool])
def test_rows_of_every_kind_of_type(dtype: torch.dtype) -> None:
    table = (torch.randn(HEADS, 8, device="cuda") * 3).to(dtype)
    compare(operands(64, torch.float16), [], lambda score, b, h, q, kv: score + 0.1 * table[h].sum().float())


@pytest.mark.parametrize("asked", ["of bits", "in the kernel"])
@pytest.mark.parametrize("most", [1, 8, 64])
def test_masks_of_chosen_tiles(most: int, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile of queries lists the tiles of keys that it sees; without room for bits a kernel asks the function."""
    if asked == "in the kernel":
        monkeypatch.setattr(kernel_masks, "MOST_BYTES", 0)
    tile, tokens = 16, 1024
    tiles = tokens // tile
    chosen = torch.stack([torch.randperm(tiles)[:most] for _ in range(HEADS * tiles)]).view(1, HEADS, tiles, most)
    chosen = torch.where(torch.rand(chosen.shape) < 0.3, -1, chosen).cuda()

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return (chosen[b, h, q // tile] == (kv // tile).unsqueeze(-1)).any(dim=-1)

    mask = flashlane.create_block_mask(mask_mod, 1, HEADS, tokens, tokens, "cuda")
    right = torch_flex.create_block_mask(mask_mod, 1, HEADS, tokens, tokens, "cuda")
    assert torch.equal(mask.to_dense(), right.to_dense())
    tensors = [torch.randn(1, HEADS, tokens, 64, device="cuda", dtype=torch.float16).requires_grad_() for _ in range(3)]
    compare(tensors, [], None, mask)


def test_a_repeated_call_with_rows_of_another_length_is_right() -> None:
    def of(table: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda score, b, h, q, kv: score * table[h].sum()

    q, k, v = (t.detach() for t in operands(64, torch.float16))
    for length in (3, 3, 3, 5, 5, 5, 3, 8):
        table = torch.rand(HEADS, length, device="cuda")
        expected = (q.float() @ k.float().mT / 8 * table.sum(-1)[None, :, None, None]).softmax(-1) @ v.float()
        error = flashlane.flex_attention(q, k, v, of(table)).float() - expected
        assert error.abs().max() < LARGEST_ERROR[torch.float16] * expected.abs().max()
