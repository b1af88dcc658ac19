"""Named masks as objects: copies in other processes, and arguments of the wrong kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import flashlane
from flashlane.flex import masks

OFFSETS = torch.tensor([0, 3, 8, 20])
NAMED: dict[str, Callable[[], masks.Mask]] = {
    "causal": lambda: masks.causal(3),
    "sliding_window": lambda: masks.sliding_window(4, right=1, first=2),
    "documents": lambda: masks.documents(OFFSETS, causal=True),
    "block_causal_documents": lambda: masks.block_causal_documents(OFFSETS, 2),
    "prefix_lm": lambda: masks.prefix_lm(torch.tensor([5])),
    "chunks": lambda: masks.chunks(6),
    "prefix_tree": lambda: masks.prefix_tree([-1, 0, 0], [8, 7, 5]),
    "block_diffusion": lambda: masks.block_diffusion(10, 3),
    "neighbourhood": lambda: masks.neighbourhood((4, 5), (3, 3)),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    "copied", [lambda mask: pickle.loads(pickle.dumps(mask)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_a_copy_of_a_named_mask_shows_the_same_pairs(name: str, copied: Callable[[Any], Any]) -> None:
    mask = NAMED[name]()
    other = copied(mask)
    assert isinstance(other, masks.Mask) and other is not mask and other.name == mask.name
    q = torch.randn(1, 2, 20, 16)
    results = [
        flashlane.flex_attention(
            q, q, q, block_mask=flashlane.create_block_mask(each, None, None, 20, 20, device="cpu")
        )
        for each in (mask, other)
    ]
    assert torch.equal(*results) and not torch.equal(results[0], flashlane.flex_attention(q, q, q))


def test_a_mask_of_ones_own_is_pickled_as_its_function_is() -> None:
    mask = masks.Mask("all", len)
    assert pickle.loads(pickle.dumps(mask)) == mask


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.documents([0, 3]), TypeError, r"offsets is a list; it must be a torch.Tensor"),
        (lambda: masks.prefix_tree(3, [1]), TypeError, r"parents is 3; it must be a list of whole numbers"),
        (lambda: masks.prefix_tree([-1], [1.5]), TypeError, r"lengths is \[1.5\]"),
        (lambda: masks.prefix_tree([-1], [-2]), ValueError, r"lengths is \[-2\]; each may be a whole number from 0"),
        (lambda: masks.neighbourhood(3, 3), TypeError, r"shape is 3; it must be one to three whole numbers"),
        (lambda: masks.neighbourhood((4,), ("x",)), TypeError, r"window is \('x',\)"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_of_torch_func_are_refused(transform: str) -> None:
    q = torch.randn(2, 2, 8, 16)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return flashlane.flex_attention(x, x, x)

    calls: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.vmap(lambda x: attend(x[None]))(q),
        "grad": lambda: torch.func.grad(lambda x: attend(x).sum())(q),
        "jvp": lambda: torch.func.jvp(attend, (q,), (q,)),
    }
    with pytest.raises(NotImplementedError, match=r"under a transform of torch.func"):
        calls[transform]()


@pytest.mark.parametrize("which", ["the query", "a captured tensor", "a captured tensor of a known function"])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_tangent_is_refused_and_never_dropped(which: str, gradients: bool) -> None:
    """Forward-mode differentiation goes on in ``torch.no_grad()``."""
    q, slopes = torch.randn(1, 2, 8, 16), torch.randn(2)

    def attend(query: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return flashlane.flex_attention(query, q, q, lambda score, b, h, q_idx, kv_idx: score * slopes[h] + q_idx)

    if which == "a captured tensor of a known function":
        attend(q, slopes)
    with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in (q, slopes)]
        given = (duals[0], slopes) if which == "the query" else (q, duals[1])
        with pytest.raises(NotImplementedError, match="flex_attention has no forward-mode derivative"):
            attend(*given)
        assert torch.equal(attend(q, slopes), attend(forward_ad.unpack_dual(duals[0]).primal, slopes))
