"""What a backward reads of its forward is checked by one rule, whichever kernel runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.validate import check_results, results_agree
from flashlane.reference.tiled import tiled_backward, tiled_forward

WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "out of fewer rows": (ValueError, "out has shape (2, 1, 4, 8); it must be (2, 5, 4, 8)", ("out", (2, 1, 4, 8))),
    "out of one column": (ValueError, "out has shape (2, 5, 4, 1); it must be (2, 5, 4, 8)", ("out", (2, 5, 4, 1))),
    "do of one head": (ValueError, "do has shape (2, 5, 1, 8); it must be (2, 5, 4, 8)", ("do", (2, 5, 1, 8))),
    "lse of fewer rows": (ValueError, "lse has shape (2, 4, 1); it must be (2, 4, 5)", ("lse", (2, 4, 1))),
    "dlse of one head": (ValueError, "dlse has shape (2, 1, 5); it must be (2, 4, 5)", ("dlse", (2, 1, 5))),
    "integers": (TypeError, "out has dtype torch.int32", ("out", torch.int32)),
    "integer lse": (TypeError, "lse has dtype torch.int32", ("lse", torch.int32)),
    "out elsewhere": (ValueError, "out is on meta and q is on cpu; they must agree", ("out", "meta")),
    "lse elsewhere": (ValueError, "lse is on meta and q is on cpu; they must agree", ("lse", "meta")),
    "do elsewhere": (ValueError, "do is on meta and q is on cpu; they must agree", ("do", "meta")),
    "dlse elsewhere": (ValueError, "dlse is on meta and q is on cpu; they must agree", ("dlse", "meta")),
}
"""Of any backward: the kind of error, how it begins, and which tensor has which shape, dtype or device."""
OTHER_DTYPES: dict[str, tuple[type[Exception], str, Any]] = {
    "wide out": (TypeError, "out has dtype torch.float64; it must be torch.float32, as q", ("out", torch.float64)),
    "narrow do": (TypeError, "do has dtype torch.float16; it must be torch.float32, as q", ("do", torch.float16)),
    "wide lse": (TypeError, "lse has dtype torch.float64; it must be torch.float32, as q", ("lse", torch.float64)),
    "wide dlse": (TypeError, "dlse has dtype torch.float64; it must be torch.float32", ("dlse", torch.float64)),
}
"""The same of the registered kernels; the algorithm itself takes any float type."""


def a_call(varlen: bool = False) -> tuple[AttentionProblem, Inputs, dict[str, torch.Tensor]]:
    """A problem, its inputs, and what its backward reads: out, lse, do and dlse."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    inputs = Inputs(q, k, v)
    if varlen:
        cu_q, cu_k = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 7, 14]).int()
        inputs = Inputs(
            *(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=7
        )
    problem = AttentionProblem.from_inputs(inputs)
    out, lse = torch.empty_like(inputs.q), torch.empty((4, 10) if varlen else (2, 4, 5))
    tiled_forward(problem, inputs, out, lse)
    return problem, inputs, {"out": out, "lse": lse, "do": torch.randn_like(out), "dlse": torch.randn_like(lse)}


def spoiled(what: dict[str, torch.Tensor], name: str, to: Any) -> dict[str, torch.Tensor]:
    t = what[name]
    return {**what, name: t[tuple(map(slice, to))] if isinstance(to, tuple) else t.to(to)}


@pytest.mark.parametrize(
    ("kind", "message", "wrong"), [*WRONG.values(), *OTHER_DTYPES.values()], ids=[*WRONG, *OTHER_DTYPES]
)
@pytest.mark.parametrize("tag", ["tiled", "triton", "hopper"])
def test_every_backward_refuses_what_is_not_of_its_forward(
    tag: str, kind: type[Exception], message: str, wrong: Any
) -> None:
    """No kernel is launched for such a call, so that each can be asked without its GPU."""
    problem, inputs, what = a_call()
    with pytest.raises(kind, match="^" + re.escape(message)):
        registry.get_backward(tag).run(problem, inputs, *spoiled(what, *wrong).values())


@pytest.mark.parametrize("tag", ["tiled", "hopper"])
def test_so_does_a_backward_in_f32(tag: str) -> None:
    problem, inputs, what = a_call()
    kind, message, wrong = WRONG["lse of fewer rows"]
    with pytest.raises(kind, match="^" + re.escape(message)):
        registry.get_backward(tag).run_f32(problem, inputs, *spoiled(what, *wrong).values(), f32_dq=True)


@pytest.mark.parametrize(("kind", "message", "wrong"), WRONG.values(), ids=WRONG)
def test_the_algorithm_takes_any_float_type_but_no_other_shape(kind: type[Exception], message: str, wrong: Any) -> None:
    """A tensor of one row would broadcast, and the gradients would be wrong without a word."""
    problem, inputs, what = a_call()
    with pytest.raises(kind, match="^" + re.escape(message)):
        tiled_backward(problem, inputs, *spoiled(what, *wrong).values())
    want = tiled_backward(problem, inputs, *what.values())
    wide = tiled_backward(problem, inputs, *(t.double() for t in what.values()))
    torch.testing.assert_close(want[:3], wide[:3])


@pytest.mark.parametrize(
    ("kind", "message", "wrong"), [*WRONG.values(), *OTHER_DTYPES.values()], ids=[*WRONG, *OTHER_DTYPES]
)
def test_what_agrees_is_what_is_not_refused(kind: type[Exception], message: str, wrong: Any) -> None:
    """The fast answer, by which a repeated call is recognised, and the check have one meaning."""
    _, inputs, what = a_call()
    assert results_agree(inputs.q, inputs.v, **what)
    check_results(inputs, **what)
    assert not results_agree(inputs.q, inputs.v, **spoiled(what, *wrong))
    with pytest.raises(kind):
        check_results(inputs, **spoiled(what, *wrong))


def test_packed_sequences_have_shapes_of_their_own() -> None:
    _, inputs, what = a_call(varlen=True)
    check_results(inputs, **what)
    with pytest.raises(ValueError, match=r"^lse has shape \(10, 4\); it must be \(4, 10\)"):
        check_results(inputs, **{**what, "lse": what["lse"].T})


ON_THE_CPU = {name: each for name, each in WRONG.items() if each[2][1] != "meta"}
"""The dispatcher gives a call with a tensor on the meta device to the fake kernel."""


@pytest.mark.parametrize(("kind", "message", "wrong"), ON_THE_CPU.values(), ids=ON_THE_CPU)
def test_the_operator_refuses_them_of_a_repeated_call_too(kind: type[Exception], message: str, wrong: Any) -> None:
    from flashlane.ops import library, schema  # noqa: F401  # defines the operators

    problem, inputs, what = a_call()
    operands = schema.operands(inputs, problem.options, True, "tiled")
    for _ in range(2):
        torch.ops.flashlane.backward(*what.values(), False, *operands)
        with pytest.raises(kind, match="^" + re.escape(message)):
            torch.ops.flashlane.backward(*spoiled(what, *wrong).values(), False, *operands)
