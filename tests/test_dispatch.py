"""Which kernel is picked, what is said about the others, and that a named kernel never becomes another."""

from __future__ import annotations

import pytest
import torch

import flashlane
from flashlane import dispatch, registry
from flashlane.problem import AttentionProblem, Inputs
from flashlane.registry import Kernel

pytestmark = pytest.mark.usefixtures("torch_kernels")


def problem(n: int = 16, **asked: float) -> AttentionProblem:
    return AttentionProblem.from_inputs(Inputs(*(torch.randn(1, n, 2, 8) for _ in range(3))), **asked)


class Picky(Kernel):
    tag, family, summary, source, priority = "picky", "test", "only head dimension 8", "here", 9

    def supports(self, problem: AttentionProblem) -> str | None:
        return None if problem.head_dim == 8 else f"head_dim is {problem.head_dim}; it may only be 8"

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        out.fill_(3.0)
        lse.fill_(4.0)


def test_few_scores_go_to_the_reference_and_many_to_the_tiled_kernel() -> None:
    assert dispatch.select(problem(16)).tag == "reference"
    assert dispatch.select(problem(1024)).tag == "tiled"


def test_the_most_preferred_supporting_kernel_is_picked() -> None:
    registry.register(Picky())
    assert dispatch.select(problem()).tag == "picky"
    other = AttentionProblem.from_inputs(Inputs(*(torch.randn(1, 4, 2, 16) for _ in range(3))))
    assert dispatch.select(other).tag == "reference"
    with pytest.raises(NotImplementedError, match=r"kernel 'picky' cannot run .*head_dim is 16; it may only be 8"):
        dispatch.select(other, "picky")


def test_a_named_kernel_is_the_one_that_runs() -> None:
    registry.register(Picky())
    q = torch.randn(1, 4, 2, 8)
    assert torch.equal(flashlane.flash_attn_func(q, q, q, kernel="picky"), torch.full_like(q, 3.0))
    wide = torch.randn(1, 4, 2, 16)
    with pytest.raises(NotImplementedError, match="head_dim is 16"):
        flashlane.flash_attn_func(wide, wide, wide, kernel="picky")


def test_an_unknown_tag_names_near_ones() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"kernel is 'tilde', .*did you mean 'tiled'\?"):
        flashlane.flash_attn_func(q, q, q, kernel="tilde")


def test_dropout_is_refused_with_every_reason() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=r"reference: dropout_p is 0.5.*tiled: dropout_p is 0.5"):
        flashlane.flash_attn_func(q, q, q, 0.5)


def test_explain_says_what_runs_and_why_the_others_do_not() -> None:
    registry.register(Picky())
    q = torch.randn(1, 4, 2, 16)
    said = flashlane.explain(q, q, q, causal=True)
    assert said.chosen == "reference" and said.problem.causal
    reasons = {choice.tag: choice.reason for choice in said.choices}
    assert reasons == {"reference": None, "tiled": None, "picky": "head_dim is 16; it may only be 8"}
    text = str(said)
    assert "B1 H2 N4 D16 f32 causal on cpu: reference" in text and "head_dim is 16" in text and "preferred less" in text


def test_a_tag_is_registered_once() -> None:
    registry.register(Picky())
    with pytest.raises(ValueError, match="'picky' is registered already"):
        registry.register(Picky())
