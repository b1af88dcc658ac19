"""Rotary embedding in place of leaves, its tables under transforms, and what its module cannot take."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashlane.integrations.flash_attn import rotary

COS, SIN = (
    f(torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))).double() for f in (torch.cos, torch.sin)
)
IN_PLACE: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "x": ((2, 5, 2, 8), lambda x: rotary.apply_rotary_emb(x, COS, SIN, inplace=True)),
    "qkv": ((2, 5, 3, 2, 8), lambda qkv: rotary.apply_rotary_emb_qkv_(qkv, COS, SIN)),
    "heads": ((2, 5, 8, 8), lambda qkv: rotary.apply_rotary_emb_qkv_(qkv, COS, SIN, num_heads_q=4)),
    "kv": ((2, 5, 2, 2, 8), lambda kv: rotary.apply_rotary_emb_kv_(kv, COS, SIN)),
    "module": ((2, 5, 3, 2, 8), lambda qkv: rotary.RotaryEmbedding(8)(qkv)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_leaf_that_requires_gradients_is_rotated(kind: str) -> None:
    """As in FlashAttention: its numbers become the rotated ones, and gradients flow through what is returned."""
    shape, turn = IN_PLACE[kind]
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    other = leaf.detach().clone().requires_grad_()
    weights = torch.randn(shape, dtype=torch.float64)
    got, want = turn(leaf), turn(other * 1)
    assert torch.equal(got, want) and torch.equal(leaf, want)
    grads = [torch.autograd.grad((out * weights).sum(), x)[0] for out, x in ((got, leaf), (want, other))]
    torch.testing.assert_close(*grads)


def test_a_transform_leaves_no_tables() -> None:
    module, x = rotary.RotaryEmbedding(8), torch.randn(2, 5, 3, 2, 8)
    torch.func.grad(lambda x: module(x * 1).sum())(x)
    assert copy.deepcopy(module)(x.clone()).equal(pickle.loads(pickle.dumps(module))(x.clone()))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"seqlen_offset": "a"}, TypeError, "^seqlen_offset is a str; it must be a whole number or a tensor"),
        ({"seqlen_offset": -1}, ValueError, "^seqlen_offset is -1; it must be at least 0$"),
        ({"seqlen_offset": torch.tensor([1, 2, 3]), "max_seqlen": 9}, ValueError, r"^seqlen_offset has shape \(3,\)"),
        ({"max_seqlen": 3}, ValueError, r"^max_seqlen is 3; it must be at least 5, seqlen_offset \+ seqlen$"),
        ({"max_seqlen": "x"}, TypeError, "^max_seqlen is 'x'; it must be a whole number"),
        ({"qkv": None}, TypeError, "^qkv is None"),
        ({"qkv": torch.randn(2, 5)}, ValueError, r"^qkv has shape \(2, 5\)"),
    ],
)
def test_what_the_module_cannot_take_is_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rotary.RotaryEmbedding(8)(**{"qkv": torch.randn(2, 5, 3, 2, 8)} | given)
