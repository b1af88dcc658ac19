"""Which backward pass follows a forward kernel, what is said about it, and that another is one line in the table."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import flashlane
from flashlane.core import backward_table as backwards
from flashlane.core import registry
from flashlane.core.backward_table import Backward, select_backward
from flashlane.core.dispatch import explain_problem
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.reference.tiled import TiledKernel, tiled_backward

pytestmark = pytest.mark.usefixtures("torch_kernels")


def problem(arch: str | None = None) -> AttentionProblem:
    q, k = torch.randn(2, 9, 4, 16, requires_grad=True), torch.randn(2, 7, 2, 16)
    return AttentionProblem.from_inputs(Inputs(q, k, k)).on(arch)


class Family(TiledKernel):
    """The tiled kernel in the name of another family."""

    def __init__(self, family: str) -> None:
        self.tag = self.family = family


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the Triton backward, which refuses deterministic problems; the keywords of its calls."""
    calls: list[dict[str, Any]] = []

    def triton_backward(*args: Any, precision: str, **keywords: Any) -> Any:
        calls.append({"precision": precision, **keywords})
        grads = tiled_backward(*args, **keywords)
        return grads._replace(q=2 * grads.q)

    module = types.ModuleType(backwards.TRITON)
    module.supports_backward = lambda p: "deterministic is True; it may only be False" if p.deterministic else None
    module.triton_backward = triton_backward
    monkeypatch.setitem(sys.modules, backwards.TRITON, module)
    monkeypatch.setattr(backwards, "_missing", lambda name: None)
    registry.changed()
    yield calls
    registry.changed()


def dq(kernel: str, **asked: Any) -> torch.Tensor:
    torch.manual_seed(0)
    q, k = torch.randn(2, 9, 4, 16, requires_grad=True), torch.randn(2, 7, 2, 16)
    out = flashlane.flash_attn_func(q, k, k, kernel=kernel, **asked)
    return torch.autograd.grad(out.square().sum(), q)[0]


@pytest.mark.parametrize(("family", "precision"), [("triton", "ieee"), ("triton-tf32", "tf32")])
def test_triton_follows_its_own_forward_with_its_precision(
    triton: list[dict[str, Any]], family: str, precision: str
) -> None:
    registry.register(Family(family))
    want = dq("tiled")
    assert not triton, "on the CPU another forward is followed by tiled"
    torch.testing.assert_close(dq(family), 2 * want)
    torch.testing.assert_close(dq(family, deterministic=True), want)
    assert triton == [{"precision": precision, "bias_grad": False}]


def test_triton_follows_every_forward_on_a_gpu(triton: list[dict[str, Any]]) -> None:
    tiled = registry.get("tiled")
    assert select_backward(problem("sm_90a"), tiled).name == "triton"
    assert select_backward(problem(), tiled).name == "tiled"


def test_without_triton_tiled_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backwards, "_missing", lambda name: "triton is not installed")
    registry.changed()
    said = explain_problem(problem("sm_90a"), "tiled")
    assert said.backward == "tiled"
    assert "backward triton: triton is not installed" in str(said) and "backward tiled: runs" in str(said)
    registry.changed()


def test_explain_tells_the_backward_where_a_gradient_is_wanted(triton: list[dict[str, Any]]) -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    said = flashlane.explain(q, q, q, dropout_p=0.5)
    assert said.backward == "tiled" and {choice.name for choice in said.backwards} >= {"tiled", "triton"}
    assert "backward triton: the tensors are on the CPU" in str(said)
    with torch.no_grad():
        said = flashlane.explain(q, q, q)
    assert said.backward is None and "backward" not in str(said)


def test_another_backward_is_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_reference(problem: AttentionProblem, kernel: Kernel) -> str | None:
        return None if kernel.tag == "reference" else "it follows the reference only"

    def run(*args: Any, kernel: Kernel, **keywords: Any) -> Any:
        grads = tiled_backward(*args, **keywords)
        return grads._replace(q=3 * grads.q)

    want = dq("tiled")
    mine = Backward("mine", "three times", 99, only_the_reference, run)
    monkeypatch.setattr(backwards, "BACKWARDS", [*backwards.BACKWARDS, mine])
    registry.changed()
    torch.testing.assert_close(dq("reference"), 3 * want)
    torch.testing.assert_close(dq("tiled"), want)
    registry.changed()


def test_a_problem_that_no_backward_can_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Backward("never", "nothing", 1, lambda problem, kernel: "it never does", lambda *args, **keywords: None)
    monkeypatch.setattr(backwards, "BACKWARDS", [never])
    registry.changed()
    with pytest.raises(NotImplementedError, match=r"no backward can run .*: never: it never does"):
        select_backward(problem(), registry.get("tiled"))
    registry.changed()
