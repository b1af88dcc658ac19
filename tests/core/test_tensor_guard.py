"""Guards of tensors: they hold for tensors like the first ones, and for nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flashlane.core.tensor_guard import tensor_guard


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(4)[::2], torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2), requires_grad=False), torch.zeros(1, 2), torch.zeros(2).to_sparse(), None,
        torch.zeros(2).numpy(),
    ],
    ids=["shape", "dtype", "strides", "gradient", "type", "dimensions", "layout", "none", "array"],
)  # fmt: skip
def test_tensors_that_are_unlike(other: torch.Tensor | None) -> None:
    first = torch.ones(2)
    guard = tensor_guard(first)
    assert guard(torch.randn(2)) is True and guard(other) is False
    both = tensor_guard(first, torch.ones(5))
    assert both(first, torch.zeros(5)) and not both(other, torch.zeros(5)) and not both(torch.zeros(5), first)
    assert not both(first, other)


def test_gradients_must_be_on_as_they_were() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    guard, of_both = tensor_guard(leaf), tensor_guard(torch.zeros(3), leaf)
    with torch.no_grad():
        without = tensor_guard(leaf)
        assert without(leaf) and not guard(leaf) and not of_both(torch.zeros(3), leaf)
    assert guard(leaf) and of_both(torch.zeros(3), leaf) and not without(leaf)


def test_gradients_do_not_matter_to_tensors_that_require_none() -> None:
    guard = tensor_guard(torch.zeros(2))
    with torch.no_grad():
        assert guard(torch.ones(2))


def test_nested_tensors_are_unlike_and_do_not_end_the_process() -> None:
    """This runs in a process of its own, which torch's guard would end."""
    code = """
import torch
from flashlane.core.tensor_guard import tensor_guard
t = torch.zeros(2, 3)
grad = torch.zeros(2, 3, requires_grad=True)
nested = torch.nested.nested_tensor([t[0], t[1]])
jagged = torch.nested.nested_tensor([t[0], t[1]], layout=torch.jagged)
guard, recorded = tensor_guard(t, t.clone()), tensor_guard(t, grad)
print([guard(t, other) or guard(other, t) or recorded(other, grad) for other in (nested, jagged)])
print(tensor_guard(t, nested), guard(t, t.clone()))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[False, False]", "None True"]
