"""Attributes that a function reads of what it captures, and which are another at a later call."""

from __future__ import annotations

import collections
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import flex_oracle

import flashlane
from flashlane.flex.fingerprint import fingerprint
from flashlane.flex.guards import function_guard


def check(function: Callable[..., Any]) -> None:
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    wanted, _ = flex_oracle.attention(q, q, q, function, None)
    torch.testing.assert_close(flashlane.flex_attention(q, q, q, function), wanted)


class Settings:
    slope = 1.0

    def plus(self, number: float) -> float:
        return self.slope + number


class Whole(int):
    slope: float


class Weight(float):
    slope: float


class Listed(collections.deque):
    pass


class Array(np.ndarray):
    pass


def _of_a_tensor() -> tuple[Any, Any]:
    table = torch.tensor([1.0, 2.0])
    table.slope = 1.0
    return table, lambda s, b, h, q, kv: s * table.slope + table[h]


def _of_a_module_s_parameter() -> tuple[Any, Any]:
    layer = torch.nn.Linear(1, 2)
    layer.bias.slope = 1.0
    return layer.bias, lambda s, b, h, q, kv: s * layer.bias.slope


def _of_an_attribute_by_its_name() -> tuple[Any, Any]:
    table = torch.tensor([1.0, 2.0])
    table.slope = 1.0
    return table, lambda s, b, h, q, kv: s * getattr(table, "slope")  # noqa: B009  # the name is a word of the code


def _of_all_attributes() -> tuple[Any, Any]:
    table = torch.tensor([1.0, 2.0])
    table.slope = 1.0
    return table, lambda s, b, h, q, kv: s * table.__dict__[max(["slope"])]


def _of_an_int() -> tuple[Any, Any]:
    number = Whole(3)
    number.slope = 1.0
    return number, lambda s, b, h, q, kv: s * number.slope + number


def _of_a_float() -> tuple[Any, Any]:
    number = Weight(3)
    number.slope = 1.0
    return number, lambda s, b, h, q, kv: s * number.slope + number


def _of_a_weak_reference() -> tuple[Any, Any]:
    held = Settings()
    held.slope = 1.0
    to_it = weakref.ref(held)
    return held, lambda s, b, h, q, kv: s * to_it().slope


def _by_an_attrgetter() -> tuple[Any, Any]:
    held, read = Settings(), operator.attrgetter("slope")
    return type(held), lambda s, b, h, q, kv: s * read(held)


def _by_a_methodcaller() -> tuple[Any, Any]:
    held, read = Settings(), operator.methodcaller("plus", number=0)
    return type(held), lambda s, b, h, q, kv: s * read(held)


ATTRIBUTES = (
    _of_a_tensor,
    _of_a_module_s_parameter,
    _of_an_attribute_by_its_name,
    _of_all_attributes,
    _of_an_int,
    _of_a_float,
    _of_a_weak_reference,
    _by_an_attrgetter,
    _by_a_methodcaller,
)


@pytest.mark.parametrize("make", ATTRIBUTES, ids=lambda make: make.__name__)
def test_an_attribute_that_is_set(make: Callable[[], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, function = make()
    for slope in (1.0, 7.0, 7.0, -2.0):
        monkeypatch.setattr(owner, "slope", slope)
        check(function)
        guard = function_guard(function)
        monkeypatch.setattr(owner, "slope", slope + 1)
        assert guard is None or guard(function) is None
        monkeypatch.setattr(owner, "slope", slope)
        assert guard is None or guard(function) is not None


def test_an_attribute_that_a_tensor_gets_later() -> None:
    table = torch.tensor([1.0, 2.0])

    def function(s, b, h, q, kv):
        return s * getattr(table, "slope", 1.0) + table[h]

    guard, key = function_guard(function), fingerprint(function).key
    assert len(guard(function)) == 1
    check(function)
    table.other = 3.0
    assert guard(function) is not None and fingerprint(function).key == key, "the function does not read this one"
    table.slope = 5.0
    assert guard(function) is None and fingerprint(function).key != key
    check(function)


def test_what_an_instance_holds_besides_its_attributes() -> None:
    listed, array, error = Listed([1.0]), np.ones(1).view(Array), ValueError(1.0)
    error.note = "has attributes, too"
    functions = (
        lambda s, b, h, q, kv: s * listed[0],
        lambda s, b, h, q, kv: s * float(array[0]),
        lambda s, b, h, q, kv: s * error.args[0],
    )
    for value in (1.0, 7.0):
        listed[0], array[0], error.args = value, value, (value,)
        for function in functions:
            assert fingerprint(function) is None and function_guard(function) is None
            check(function)


def test_a_function_that_is_cached_has_a_guard() -> None:
    @functools.cache
    def slope() -> float:
        return 3.0

    def function(s, b, h, q, kv):
        return s * slope()

    guard = function_guard(function)
    assert guard(function) == () and fingerprint(function) is not None
