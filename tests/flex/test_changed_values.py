"""Functions that read, at a later call, another value in a way that their code and their globals do not show."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import flex_oracle

import flashlane
from flashlane.flex import bind as bind_module
from flashlane.flex.bind import binding_of
from flashlane.flex.fingerprint import fingerprint
from flashlane.flex.guards import function_guard

CPU = torch.device("cpu")
scale_of_globals, named_globals = 1.0, globals


def _imports(s, b, h, q, kv):
    import settings_of_a_test

    return s * settings_of_a_test.SCALE


def _imports_a_name(s, b, h, q, kv):
    from settings_of_a_test import SCALE

    return s * SCALE


def _imports_inside(s, b, h, q, kv):
    def scale():
        from settings_of_a_test import SCALE

        return SCALE

    return s * scale()


def _by_globals(s, b, h, q, kv):
    return s * globals()["scale_of_" + "globals"]


def _by_another_name(s, b, h, q, kv):
    return s * named_globals()["scale_of_" + "globals"]


def _by_eval(s, b, h, q, kv):
    return s * eval("scale_of_" + "globals")


def _by_import(s, b, h, q, kv):
    return s * __import__("settings_of_a_" + "test").SCALE


BY_NAME = (
    _imports,
    _imports_a_name,
    _imports_inside,
    _by_globals,
    _by_another_name,
    _by_eval,
    _by_import,
)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what the functions read."""
    module: Any = types.ModuleType("settings_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def set_to(scale: float) -> None:
        module.SCALE = scale
        monkeypatch.setitem(globals(), "scale_of_globals", scale)

    return set_to


@pytest.mark.parametrize("function", BY_NAME, ids=lambda function: function.__name__)
def test_a_value_that_is_found_by_name_when_the_function_runs(
    function: Callable[..., Any], settings: Callable[[float], None]
) -> None:
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    for scale in (1.0, 7.0, 7.0, -2.0):
        settings(scale)
        wanted = torch.softmax(q @ q.mT * (8**-0.5 * scale), -1) @ q
        torch.testing.assert_close(flashlane.flex_attention(q, q, q, function), wanted)
    assert fingerprint(function) is None and function_guard(function) is None
    assert binding_of(function, None, CPU) is None


def test_a_mask_that_imports(settings: Callable[[float], None]) -> None:
    def near(b, h, q, kv):
        import settings_of_a_test

        return q - kv <= settings_of_a_test.SCALE

    for number in (3, 1):
        settings(number)
        mask = flashlane.create_block_mask(near, None, None, 8, 8, "cpu", 1)
        table = torch.arange(8)[:, None] - torch.arange(8) <= number
        assert torch.equal(mask.to_dense()[0, 0].bool(), table)


def test_modules_that_do_not_change_may_be_imported() -> None:
    def score(s, b, h, q, kv):
        import math
        from math import log

        import torch.nn.functional as F

        return F.softplus(s) * math.sqrt(2) + log(2)

    assert fingerprint(score) is not None and function_guard(score) is not None


Read = Callable[[torch.Tensor], float]
OF_LAYOUTS: dict[str, Read] = {
    "a count": lambda w: sum(1 for _ in w) * 0.1,
    "numbers of elements": lambda w: float(sum(i for i, _ in enumerate(w))),
    "a word": lambda w: float(getattr(w, "sh" + "ape")[0]),
    "bytes": lambda w: w.nbytes / 16,
}
OF_ONE: dict[str, Read] = {
    "a leaf": lambda w: 2.0 if w.is_leaf else 3.0,
    "close": lambda w: 2.0 if torch.allclose(w, _ones) else 3.0,
    "repr": lambda w: float(len(repr(w))),
    "str": lambda w: float(len(str(w))),
    "format": lambda w: float(len(f"{w}")),
}
_ones = torch.ones(3)


@pytest.mark.parametrize("way", [*OF_LAYOUTS, *OF_ONE])
def test_what_is_read_of_a_captured_tensor_but_no_element(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout is part of the key; what may differ between tensors of one layout is read again at each call."""
    traced: list[object] = []
    original = bind_module.trace
    monkeypatch.setattr(bind_module, "_traced", {})
    monkeypatch.setattr(bind_module, "trace", lambda f, *a: (traced.append(f), original(f, *a))[1])
    read = {**OF_LAYOUTS, **OF_ONE}[way]

    def of(w: torch.Tensor) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s * read(w)

    q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    short = torch.ones(3) if way in OF_ONE else torch.ones(2)
    tensors = [torch.ones(3), short * 1000.5, (torch.ones(3, requires_grad=True) * 1).detach(), torch.ones(3)]
    if way == "a leaf":
        tensors = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 1] * 2
    for w in tensors:
        found = flashlane.flex_attention(q, q, q, of(w))
        torch.testing.assert_close(found, flex_oracle.attention(q, q, q, of(w), None)[0])
    assert len(traced) == (2 if way in OF_LAYOUTS else 4)
