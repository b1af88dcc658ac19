"""Rows of captured tensors inside functions: element by element, and reduced to scalars, as torch computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.flex_oracle import places
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane.flex.bind import bind
from flashlane.flex.evaluate import evaluate

CPU = torch.device("cpu")
SCORES: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda t, score, h, q, kv: score + t[h].sum(),
    "mean of a product": lambda t, score, h, q, kv: score + (t[h] * t[h].sin()).mean(-1),
    "amax": lambda t, score, h, q, kv: score * t[h].exp().amax(),
    "amin": lambda t, score, h, q, kv: score + (t[h] - 0.01 * (q - kv)).abs().amin(dim=0),
    "prod": lambda t, score, h, q, kv: score + t[h].prod(0),
    "a comparison": lambda t, score, h, q, kv: torch.where((t[h] > score).any(), score, 0.5 * score),
    "all": lambda t, score, h, q, kv: torch.where((t[h] * 10 > score).all(dim=-1), score + 1, score),
    "where": lambda t, score, h, q, kv: score + torch.where(t[h] > 0, t[h], score.unsqueeze(0)).sum(),
    "an element of a row": lambda t, score, h, q, kv: score + (t[h] * score)[2] - (t[h] + 1)[-1],
    "a whole captured row": lambda t, score, h, q, kv: score + (t[0] * score).sum() * 0.1,
    "kept": lambda t, score, h, q, kv: score + (t[h] / (1 + t[h].square().sum(-1, keepdim=True))).sum(),
    "counted": lambda t, score, h, q, kv: score + 0.1 * (t[h] > 0).sum(),
}


EQUAL = {
    "amax of equal elements": lambda t, score, h, q, kv: score + (t[h].round() + 0.1 * t[h].detach()[0]).amax(),
    "amin of equal elements": lambda t, score, h, q, kv: score * (1 + (t[h] * 0.1).clamp(min=0).amin()),
    "amax of infinite elements": lambda t, score, h, q, kv: torch.where(
        torch.where(t[h] > 9, t[h], -torch.inf).amax() > kv, score + t[h].amax(), score
    ),
}
"""Functions of rows with several largest elements; their table is 0 in some places."""


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The formula for one batch row, with every score of a head at once."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5)[0]
    rows, columns = (torch.arange(n) for n in scores.shape[1:])

    def of_head(h: int) -> torch.Tensor:
        def one(score: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return score_mod(score, 0, h, i, j)

        return torch.vmap(torch.vmap(one, (0, None, 0)), (0, 0, None))(scores[h], rows, columns)

    return torch.stack([of_head(h) for h in range(len(scores))])[None].softmax(-1) @ v


@pytest.mark.parametrize("name", [*SCORES, *EQUAL])
def test_scores_and_gradients_are_those_of_torch(name: str) -> None:
    found = []
    for attention in (dense, flashlane.flex_attention):
        torch.manual_seed(3)
        q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
        table = torch.randn(2, 5, dtype=torch.float64)
        table = (table * (torch.arange(5) % 2 if name in EQUAL else 1)).requires_grad_()

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any = table) -> torch.Tensor:
            return (SCORES | EQUAL)[name](table, score, h, q_idx, kv_idx)

        out = attention(q, k, v, score_mod)
        loss = (out * torch.arange(16, dtype=torch.float64)).sum() + 0 * table.sum()
        found.append((out, *torch.autograd.grad(loss, (q, k, v, table))))
    for right, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-11)


def test_the_gradient_of_an_extreme_costs_its_value_nothing() -> None:
    table = torch.randn(2, 5)
    program, _ = bind(lambda score, b, h, q, kv: score + (table[h] + score).amax(), None, CPU)
    value = program.header().split("float score(const ProgramParams")[1].split("static __device__")[0]
    assert value.count("program::maximum") == 4 and "==" not in value and "?" not in value


@pytest.mark.parametrize("most", [1, 4, 64])
def test_keys_of_chosen_tiles_are_visible(most: int) -> None:
    """As of sparse video attention: each tile of queries lists the tiles of keys that it sees."""
    torch.manual_seed(most)
    tile, n = 16, 512
    chosen = torch.stack([torch.randperm(n // tile)[:most] for _ in range(2 * 32)]).view(1, 2, 32, -1)
    chosen = torch.nn.functional.pad(chosen, (0, most - chosen.shape[-1]), value=-1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return (chosen[b, h, q_idx // tile] == (kv_idx // tile).unsqueeze(-1)).any(dim=-1)

    right = torch_flex.create_block_mask(mask_mod, 1, 2, n, n, device="cpu", BLOCK_SIZE=64)
    ours = flashlane.create_block_mask(mask_mod, 1, 2, n, n, device="cpu", BLOCK_SIZE=64)
    assert torch.equal(ours.to_dense(), right.to_dense())
    q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
    torch.testing.assert_close(
        flashlane.flex_attention(q, k, v, block_mask=ours), torch_flex.flex_attention(q, k, v, block_mask=right)
    )


def test_a_function_is_traced_again_for_rows_of_another_length() -> None:
    def of(table: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda score, b, h, q, kv: score + table[h].sum()

    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float64) for _ in range(3))
    for length in (3, 5, 3, 8):
        table = torch.randn(2, length, dtype=torch.float64)
        score = q @ k.mT / 4 + table.sum(-1)[None, :, None, None]
        torch.testing.assert_close(flashlane.flex_attention(q, k, v, of(table)), score.softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "amax"])
def test_rows_of_16_bits_are_reduced_in_f32(dtype: torch.dtype, name: str) -> None:
    """Their sums are rounded once: of 1 and seven halves of a unit in the last place nothing is lost."""
    half = torch.finfo(dtype).eps / 2
    table = torch.tensor([[1.0, *[half] * 7], [1 + 2 * half] * 8]).to(dtype)
    program, arguments = bind(lambda score, b, h, q, kv: score * 0 + getattr(table[h], name)(-1).float(), None, CPU)
    inputs = {"score": torch.zeros(1, 2, 1, 1), **places((1, 2, 1, 1))}
    found = evaluate([program.score], inputs, arguments.tensors, arguments.integers)[0]
    assert torch.equal(found.flatten(), getattr(table.float(), name)(-1).to(dtype).float())


def test_an_empty_row_is_named() -> None:
    with pytest.raises(NotImplementedError, match="node %sum"):
        bind(lambda score, b, h, q, kv: score + torch.zeros(3, 0)[h].sum(), None, CPU)


@pytest.mark.parametrize("columns", [4, 100])
def test_what_no_input_decides_is_computed_before(columns: int) -> None:
    table = torch.randn(3, columns)
    _, arguments = bind(lambda score, b, h, q, kv: score + table.sum(-1)[h] * table[0].amax(), None, CPU)
    assert [tuple(t.shape) for t in arguments.tensors] == [(3,), ()]
