"""Which backward kernel follows a forward kernel, what is said about it, and that another one is one registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backward_kernels import StandIn

import flashlane
from flashlane.core import registry
from flashlane.core.dispatch import explain_problem, select_backward
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.kernels.triton import backward as triton_module
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

    def triton_backward(*args: Any, precision: str, config: None, **keywords: Any) -> Any:
        calls.append({"precision": precision, **keywords})
        grads = tiled_backward(*args, **keywords)
        return grads._replace(q=2 * grads.q)

    def supports(problem: AttentionProblem) -> str | None:
        return "deterministic is True; it may only be False" if problem.deterministic else None

    monkeypatch.setattr(triton_module, "supports_backward", supports)
    monkeypatch.setattr(triton_module, "triton_backward", triton_backward)
    portable = map(registry.get_backward, ("tiled", "triton"))
    with registry.backward_table_of(*portable):
        yield calls


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
    assert select_backward(problem("sm_90a"), tiled).tag == "triton"
    assert select_backward(problem(), tiled).tag == "tiled"


def test_without_triton_tiled_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashlane.kernels.triton.attention.missing", lambda: "Triton is not installed")
    registry.changed()
    said = explain_problem(problem("sm_90a"), "tiled")
    assert said.backward == "tiled"
    assert "backward triton: Triton is not installed" in str(said) and "backward tiled: runs" in str(said)
    monkeypatch.undo()
    registry.changed()


def test_explain_tells_the_backward_where_a_gradient_is_wanted(triton: list[dict[str, Any]]) -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    said = flashlane.explain(q, q, q, dropout_p=0.5)
    assert said.backward == "tiled" and {choice.tag for choice in said.backwards} >= {"tiled", "triton"}
    assert "backward triton: the tensors are on the CPU" in str(said)
    assert max(map(len, str(said).splitlines())) <= 80, "a long reason has more than one line"
    with torch.no_grad():
        said = flashlane.explain(q, q, q)
    assert said.backward is None and "backward" not in str(said)


def test_another_backward_kernel_is_one_registration() -> None:
    def only_the_reference(problem: AttentionProblem, kernel: Kernel | None) -> str | None:
        return None if kernel is not None and kernel.tag == "reference" else "it follows the reference only"

    def run(*args: Any, forward: Kernel, config: Any = None, **keywords: Any) -> Any:
        grads = tiled_backward(*args, **keywords)
        return grads._replace(q=3 * grads.q)

    want = dq("tiled")
    with registry.backward_table_of(*registry.backward_kernels()):
        registry.register(StandIn("mine", run, only_the_reference, priority=99))
        torch.testing.assert_close(dq("reference"), 3 * want)
        torch.testing.assert_close(dq("tiled"), want)
    assert "mine" not in {kernel.tag for kernel in registry.backward_kernels()}


def test_a_problem_that_no_backward_can_run_is_refused() -> None:
    never = StandIn("never", reason=lambda problem, kernel: "it never does")
    with (
        registry.backward_table_of(never),
        pytest.raises(NotImplementedError, match=r"no backward can run .*: never: it never does"),
    ):
        select_backward(problem(), registry.get("tiled"))


def test_forward_and_backward_kernels_of_one_tag_are_two_kernels() -> None:
    assert {kernel.tag for kernel in registry.backward_kernels()} == {"tiled", "triton", "hopper"}
    assert registry.get("tiled") is not registry.get_backward("tiled")
    with pytest.raises(
        ValueError, match="kernel is 'hoper', which no backward kernel is called; did you mean 'hopper'"
    ):
        registry.get_backward("hoper")
