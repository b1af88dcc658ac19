"""The first calls of a process: what they import, that they compile at once, and what they take from the disk cache."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import KERNELS, ROOT, process

from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem

OTHERS = {
    "flashlane.api.attn_probs": "asks for probabilities",
    "flashlane.reference": "asks for probabilities",
    "flashlane.core.explanation": "is explained",
    "flashlane.core.ranges": "is a rank's share of another one",
    "flashlane.kernels.hopper.forward.ranged": "is a rank's share of another one",
    "flashlane.kernels.hopper.backward.parts": "is a rank's share of another one",
    "flashlane.jit.sass": "is disassembled",
    "flashlane.kernels.hopper.backward.two_cta": "has head dims above 128",
    "flashlane.kernels.hopper.backward.split_dkdv_dq": "has head dims above 128",
}
"""Modules that only a call needs which does this, and which others do not wait for."""
MOST_MODULES = {"imported": 36, "called": 40}
"""Of flashlane itself: what importing its functions imports, and a first call with its backward besides."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first_call")


@pytest.fixture(scope="module")
def empty(cache: Path) -> dict[str, Any]:
    """What a process with an empty cache says."""
    return process(cache)


def test_an_empty_cache_is_filled_with_what_is_launched(empty: dict[str, Any]) -> None:
    assert empty["entries"] == KERNELS and empty["cached"] == [False] * 4
    assert empty["launched"] == [1, 4]


def test_a_call_imports_nothing_that_it_does_not_need(cache: Path, empty: dict[str, Any]) -> None:
    """Of other packages nothing at all, of this one no other family of kernels; and the compiler is not loaded."""
    full = process(cache)
    assert full["cached"] == [True] * 4 and full["launched"] == [1, 4]
    assert not full["nvrtc"] and empty["nvrtc"]
    imported, called = full["imported"], full["called"]
    assert {name.split(".")[0] for name in (*imported, *called)} == {"flashlane"}
    assert not any(name.startswith("flashlane.kernels") for name in imported)
    kernels = [name.split(".")[2] for name in called if name.count(".") > 1 and name.startswith("flashlane.kernels.")]
    families = {name for name in kernels if (ROOT / "src/flashlane/kernels" / name).is_dir()}
    assert families == {"hopper"}, "decode is preferred to hopper for few rows only"
    assert not any(name.startswith("flashlane.tuning") for name in called), "nothing is stored"
    for other, what in OTHERS.items():
        assert importlib.util.find_spec(other) is not None, other
        assert other not in {*imported, *called}, f"no call of this process {what}"
    counts = {"imported": len(imported), "called": len(called)}
    assert all(counts[what] <= most for what, most in MOST_MODULES.items()), counts


def test_no_kernel_is_preferred_more_than_its_module_says() -> None:
    """Else a choice would stop before the module that wins it."""
    most = {each.module: each for each in registry.MODULES}
    base = AttentionProblem(2, 8, 8, 1024, 1024, 128, 128, torch.bfloat16, 0.1, arch="sm_90a")
    changes: list[dict[str, Any]] = [
        {},
        {"seqlen_q": 1},
        {"batch": 1, "heads": 1, "kv_heads": 1},
        {"seqlen_q": 8, "seqlen_k": 8},
    ]
    problems = [replace(base, arch=arch, **change) for arch in ("sm_80", "sm_90a", None) for change in changes]
    highest: dict[str, float] = {}
    for kernel in registry.kernels(listed_only=True):
        module = type(kernel).__module__
        highest[module] = max(highest.get(module, -9.0), *(kernel.preference(problem) for problem in problems))
        assert kernel.priority <= most[module].forward, kernel
        for problem in problems:
            assert kernel.preference(problem) <= most[module].most(problem), (kernel, problem)
    assert highest == {name: each.forward for name, each in most.items() if each.forward is not None}
    for kernel in registry.backward_kernels():
        assert kernel.priority == most[type(kernel).__module__].backward, kernel


def test_kernels_that_cannot_win_are_not_asked_when_all_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is chosen for each other length, and the ``mma`` family has a hundred kernels."""
    base = AttentionProblem(2, 8, 8, 1024, 1024, 128, 128, torch.bfloat16, 0.1, arch="sm_90a")
    changes: list[dict[str, Any]] = [{}, {"arch": "sm_80"}, {"arch": None}, {"seqlen_q": 1}, {"dtype": torch.float32}]
    changes += [{"head_dim": dim, "head_dim_v": dim, "dtype": torch.float16} for dim in (64, 320)]
    for problem in (replace(base, seqlen_k=seqlen_k, **change) for change in changes for seqlen_k in (16, 1024)):
        able = [kernel for kernel in registry.kernels(listed_only=True) if kernel.supports(problem) is None]
        assert dispatch.select(problem) is max(able, key=lambda kernel: kernel.preference(problem)), problem
    asked: list[str] = []
    for kind in {type(kernel) for kernel in registry.kernels()}:
        supports = kind.supports
        monkeypatch.setattr(kind, "supports", lambda self, p, s=supports: asked.append(self.tag) or s(self, p))
    assert dispatch.select(replace(base, seqlen_k=1032)).family == "hopper"
    assert {registry.get(tag).family for tag in asked} == {"hopper"}, asked


CHOICES = """
import json, sys
import torch
from dataclasses import replace
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem
base = AttentionProblem(2, 8, 8, 1024, 1024, 128, 128, torch.bfloat16, 0.1, arch="sm_90a")
problems = [
    replace(base, **change, head_dim=dim, head_dim_v=dim, dtype=dtype, needs_grad=grad)
    for dim in (64, 128, 320) for dtype in (torch.float16, torch.float32) for grad in (False, True)
    for change in (
        {}, {"seqlen_q": 1}, {"batch": 1, "heads": 1, "kv_heads": 1}, {"arch": "sm_80"}, {"arch": None},
        {"arch": None, "seqlen_q": 8, "seqlen_k": 8}, {"aligned": False}, {"arch": "sm_80", "seqlen_q": 1},
    )
]
if sys.argv[1:]:
    registry.kernels(), registry.backward_kernels()
found = []
for problem in problems:
    kernel = dispatch.select(problem)
    found.append([kernel.tag, dispatch.select_backward(problem, kernel).tag])
print(json.dumps({"found": found}))
"""


def test_a_choice_does_not_depend_on_what_was_imported(tmp_path: Path) -> None:
    lazily, whole = process(tmp_path, CHOICES)["found"], process(tmp_path, CHOICES, "whole")["found"]
    assert lazily == whole
    assert len({tuple(pair) for pair in lazily}) >= 6


@pytest.mark.parametrize("before", [True, False])
def test_the_flop_counter_knows_the_operators_whenever_it_is_imported(tmp_path: Path, before: bool) -> None:
    counter, ours = "import torch.utils.flop_counter as counter", "import flashlane.ops.library"
    first, second = (counter, ours) if before else (ours, counter)
    program = f"""
import json, sys, torch
{first}
there = "torch.utils.flop_counter" in sys.modules
{second}
found = [packet in counter.flop_registry for packet in (torch.ops.flashlane.forward, torch.ops.flashlane.backward)]
print(json.dumps({{"there": there, "found": found}}))
"""
    assert process(tmp_path, program) == {"there": before, "found": [True, True]}
