"""Score and mask functions of the kinds that torch's own tests and helpers have, on the CPU against torch's formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import flex_oracle
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.experimental._paged_attention import PagedAttention

import flashlane
from flashlane.flex import bind as bind_module

B, H, S, D = 2, 4, 40, 8
Mod = Callable[..., Any]


def operands(kv_heads: int = H) -> list[torch.Tensor]:
    return [torch.randn(B, h, S, D, dtype=torch.float64, requires_grad=True) for h in (H, kv_heads, kv_heads)]


def same(score_mod: Mod | None, mask: Any = None, captured: tuple[torch.Tensor, ...] = ()) -> None:
    tensors = operands()
    found = flashlane.flex_attention(*tensors, score_mod, mask)
    wanted, _ = flex_oracle.attention(*tensors, score_mod, mask)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    inputs = [*tensors, *(t for t in captured if t.requires_grad)]
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


SCORES: dict[str, Mod] = {
    "identity": lambda score, b, h, m, n: score,
    "causal": lambda score, b, h, m, n: torch.where(m >= n, score, float("-inf")),
    "inverse causal": lambda score, b, h, m, n: torch.where(m <= n, score, float("-inf")),
    "relative bias": lambda score, b, h, m, n: score + (m - n),
    "relative, causal": lambda score, b, h, m, n: torch.where(m >= n, score + (m - n), float("-inf")),
    "alibi": lambda score, b, h, m, n: score + (n - m) * torch.exp2(-((h + 1) * 8.0 / H)),
    "doubled": lambda score, b, h, m, n: score * 2,
    "squared": lambda score, b, h, m, n: score * score,
    "sine of cosine": lambda score, b, h, m, n: torch.sin(torch.cos(score)) + torch.tan(b),
    "two branches": lambda score, b, h, m, n: torch.cos(score) * torch.sin(score) + torch.tan(b),
    "clamped": lambda score, b, h, m, n: score.clamp(-0.5, 0.5) + torch.where(h % 2 == 0, score, score.abs()),
    "silu, then a power": lambda score, b, h, m, n: torch.nn.functional.silu(score) ** 3 + score.sigmoid().log(),
    "a logical chain": lambda score, b, h, m, n: torch.where(((m // 8) == (n // 8)) | ~(m > n), score, score - 4),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    same(SCORES[name])


def test_captured_tensors_of_every_shape_with_gradients() -> None:
    heads, rows, pairs = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((H,), (B, S), (H, S, S)))
    numbers, buckets = torch.randn(9, dtype=torch.float64, requires_grad=True), torch.randint(0, 9, (S, S))

    def score_mod(score, b, h, m, n):
        return score * heads[h] + rows[b, m] * rows[b, n] + pairs[h, m, n] + numbers[buckets[m, n]]

    same(score_mod, captured=(heads, rows, pairs, numbers))
    same(lambda score, b, h, m, n: score + heads[-1] * heads[h], captured=(heads,))


def test_masks_are_joined_by_torchs_helpers() -> None:
    causal: Mod = lambda b, h, m, n: m >= n  # noqa: E731
    window: Mod = lambda b, h, m, n: m - n <= 9  # noqa: E731
    first: Mod = lambda b, h, m, n: n < 3  # noqa: E731
    joined = torch_flex.and_masks(causal, torch_flex.or_masks(window, first))
    found = flashlane.create_block_mask(joined, None, None, S, S, "cpu", 8)
    wanted = torch_flex.create_block_mask(joined, None, None, S, S, "cpu", 8)
    assert torch.equal(found.to_dense(), wanted.to_dense()) and torch.equal(found.kv_indices, wanted.kv_indices)
    same(None, found)
    same(SCORES["alibi"], wanted)
    same(None, torch_flex.create_block_mask(torch_flex.noop_mask, B, H, S, S, "cpu"))


def test_a_mask_that_was_sliced_or_cut() -> None:
    mask = flashlane.create_block_mask(lambda b, h, m, n: (m >= n) & (h < 3), B, H, S, S, "cpu", 8)
    with pytest.raises(RuntimeError, match="block_mask was sliced"):
        flashlane.flex_attention(*operands(), None, mask[:, :, 2:])
    cut = mask._adjust(S - 8, S)
    q, k, v = operands()
    q = q[:, :, : S - 8]
    wanted, _ = flex_oracle.attention(q, k, v, None, cut)
    torch.testing.assert_close(flashlane.flex_attention(q, k, v, None, cut), wanted)


def test_paged_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in pages of one cache; the functions read the page table of an object, and are translated once."""
    page = 8
    pages = PagedAttention(B * S // page + 3, page, B, device="cpu")
    for b in (1, 0):
        pages.reserve(torch.tensor(b), torch.tensor(S))
    q, k, v = (t.detach() for t in operands())
    caches = [torch.zeros(1, H, pages.n_pages * page, D, dtype=torch.float64) for _ in range(2)]
    where = torch.arange(S).expand(B, S)
    pages.assign(torch.arange(B), where, k, v, *caches)
    causal = flashlane.create_block_mask(lambda b, h, m, n: m >= n, B, 1, S, S, "cpu", page)
    physical = pages.convert_logical_block_mask(causal)
    traced = []
    original = bind_module.trace
    monkeypatch.setattr(bind_module, "trace", lambda f, *rest: (traced.append(f), original(f, *rest))[1])
    score_mod = pages.get_score_mod(SCORES["relative bias"])
    for _ in range(2):
        found = flashlane.flex_attention(q, *caches, score_mod, physical)
    wanted, _ = flex_oracle.attention(q, k, v, SCORES["relative bias"], causal)
    torch.testing.assert_close(found, wanted)
    assert len(traced) == 2


def test_paged_attention_takes_a_mask_whose_heads_share_their_lists() -> None:
    """torch views the lists in another shape, which an expanded view has not."""
    page = 8
    pages = PagedAttention(B * S // page + 3, page, B, device="cpu")
    for b in range(B):
        pages.reserve(torch.tensor(b), torch.tensor(S))
    of_heads, of_one = (flashlane.create_block_mask(lambda b, h, m, n: m >= n, B, n, S, S, "cpu", page) for n in (H, 1))
    found, wanted = (pages.convert_logical_block_mask(mask).kv_indices for mask in (of_heads, of_one))
    assert torch.equal(found, wanted.expand(B, H, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_captured_tensors_in_16_bits_are_sums_in_f32(dtype: torch.dtype) -> None:
    """Of one gate a head, as in PyTorch's test_head_specific_gate: its own formula sums in 16 bits and is far off."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, H, 277, 16, dtype=dtype) for _ in range(4))
    gate = torch.randn(H, dtype=dtype, requires_grad=True)
    exact_gate = gate.detach().double().requires_grad_()

    def score_mod(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return score * torch.sigmoid(gate[h].float())

    found = torch.autograd.grad(flashlane.flex_attention(q, k, v, score_mod), gate, dout)[0]
    scores = (q.double() @ k.double().mT) / 4 * exact_gate.sigmoid()[:, None, None]
    exact = torch.autograd.grad(scores.softmax(-1) @ v.double(), exact_gate, dout.double())[0]
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert error < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("largest", [1.0, 2.0**20, 2.0**31, -(2.0**31)])
def test_outputs_of_large_scores_are_those_of_their_softmax(largest: float) -> None:
    """An LSE in f32 has no room for the sum next to such a score."""
    added = torch.randint(-3, 4, (9, 13)) + largest
    q, k, v = torch.zeros(1, 1, 9, 8), torch.zeros(1, 1, 13, 8), torch.randn(1, 1, 13, 8)
    found = flashlane.flex_attention(q, k, v, lambda s, b, h, i, j: s + added[i, j])
    wanted = added.double().softmax(-1) @ v[0, 0].double()
    torch.testing.assert_close(found[0, 0], wanted.float())


def test_functions_that_torch_compiled_are_traced_as_they_are() -> None:
    """Also those that a function calls, and modules; torch's own function takes them, too."""
    slopes = torch.randn(H, dtype=torch.float64, requires_grad=True)

    class Sloped(torch.nn.Module):
        def forward(self, score, b, h, m, n):
            return score * slopes[h]

    compiled = lambda function: torch.compile(function, backend="eager")  # noqa: E731
    scores = [Sloped(), lambda score, b, h, m, n: score + slopes[h] * (m - n)]
    helper = compiled(scores[1])
    mask = lambda b, h, m, n: m >= n + b  # noqa: E731
    found = flashlane.create_block_mask(compiled(mask), B, None, S, S, "cpu", BLOCK_SIZE=16)
    wanted = flashlane.create_block_mask(mask, B, None, S, S, "cpu", BLOCK_SIZE=16)
    assert torch.equal(found.kv_num_blocks, wanted.kv_num_blocks) and torch.equal(found.kv_indices, wanted.kv_indices)
    pairs = [(compiled(score), score) for score in scores] + [
        (lambda *at: 2 * helper(*at), lambda *at: 2 * scores[1](*at))
    ]
    for score, plain in pairs:
        tensors = operands()
        outs = [flashlane.flex_attention(*tensors, *call) for call in ((score, found), (plain, wanted))]
        a, b = (torch.autograd.grad(out.square().sum(), [*tensors, slopes]) for out in outs)
        assert torch.equal(*outs) and all(map(torch.equal, a, b))
    assert torch._dynamo.config.error_on_nested_fx_trace, "torch's setting is as it was"
