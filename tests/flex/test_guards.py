"""Guards of functions: they give the tensors of a function like the first one, and nothing of any other."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

import flashlane
from flashlane.flex.fingerprint import fingerprint
from flashlane.flex.guards import function_guard

NUMBER, TABLE, absent = 3, torch.arange(4.0), None
del absent


def helper(x: Any) -> Any:
    return x * NUMBER


def made(captured: Any, default: Any = 1, *, named: Any = 2) -> Callable[..., Any]:
    def score_mod(score, b, h, q, kv, default=default, *, named=named):
        return helper(score) + captured + default + named

    return score_mod


class Bias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.slope = torch.nn.Parameter(torch.randn(4)), 0.5

    def score(self, score, b, h, q, kv):
        return score + self.table[h] * self.slope


def unlike(first: Any, second: Any) -> None:
    """The guard of the first refuses the second, as their fingerprints differ."""
    guard = function_guard(first)
    assert guard is not None and guard(first) is not None
    assert fingerprint(first).key != fingerprint(second).key
    assert guard(second) is None


VALUES = [
    (1, 2), (1, True), (1, 1.0), (0.0, -0.0), (1.5, 2.5), ("a", "b"), (None, 0), ((1, 2), (1, 3)), ((1, 2), [1, 2]),
    ([1], [1, 1]), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({"a", "b"}, {"a"}), (torch.float32, torch.float64),
    (math.sin, math.cos), (torch.exp, torch.log), (int, float), (math, torch), (made(1), made(2)),
    (functools.partial(helper, 1), functools.partial(helper, 2)), (torch.zeros(3), 3.0), ([torch.zeros(1)], [1.0]),
]  # fmt: skip


def shown(value: Any) -> str:
    """The same in every process: the order of a set of words is not."""
    return f"{sorted(value) if isinstance(value, set) else value}"[:20]


@pytest.mark.parametrize("place", ["a closure", "a default", "a named default"])
@pytest.mark.parametrize("pair", VALUES, ids=lambda pair: f"{shown(pair[0])} {shown(pair[1])}")
def test_another_value_is_another_function(pair: tuple[Any, Any], place: str) -> None:
    first, second = (
        made(value) if place == "a closure" else made(0, value) if place == "a default" else made(0, named=value)
        for value in pair
    )
    unlike(first, second)
    unlike(second, first)


def test_equal_values_are_the_same_function() -> None:
    for value in (1, 1.5, float("nan"), "text", (1, [2.5, "x"]), {"a": (1,)}, {"a", "b"}, None, torch.exp, made(7)):
        guard = function_guard(made(value))
        assert guard(made(value)) == ()
    assert function_guard(made(10**9))(made(int("1000000000"))) == (), "an equal number that is another object"


def test_a_closure_a_default_and_a_global_that_are_changed_in_place_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [1.0]
    function = made(held)
    guard = function_guard(function)
    assert guard(function) == ()
    held[0] = 2.0
    assert guard(function) is None
    held[0] = 1.0
    function.__closure__[0].cell_contents = [1.0]
    assert guard(function) == ()
    function.__defaults__ = (5,)
    assert guard(function) is None
    function.__defaults__ = (1,)
    function.__kwdefaults__["named"] = 3
    assert guard(function) is None
    function.__kwdefaults__["named"] = 2
    assert guard(function) == ()
    monkeypatch.setitem(globals(), "NUMBER", 4)  # which the function that it calls reads
    assert guard(function) is None
    monkeypatch.setitem(globals(), "NUMBER", 3)
    assert guard(function) == ()
    monkeypatch.setitem(globals(), "helper", lambda x: x * NUMBER)
    assert guard(function) is None


def test_a_global_that_appears_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def score_mod(score, b, h, q, kv):
        return abs(score) + len((1, 2))

    guard = function_guard(score_mod)
    assert guard(score_mod) == ()
    monkeypatch.setitem(globals(), "len", lambda x: 7)
    assert guard(score_mod) is None


def test_other_code_and_code_in_another_module_are_seen() -> None:
    first, second = (eval(text) for text in ("lambda s, b, h, q, kv: s + 1", "lambda s, b, h, q, kv: s + 2"))
    unlike(first, second)
    elsewhere = FunctionType(made(0).__code__, {"helper": abs}, closure=made(0).__closure__, argdefs=(1,))
    elsewhere.__kwdefaults__ = {"named": 2}
    unlike(made(0), elsewhere)


def test_tensors_come_in_the_order_of_the_fingerprint() -> None:
    a, b = torch.zeros(2), torch.ones(3)
    function = made((a, {"x": b, "y": a}), b)
    guard = function_guard(function)
    found = guard(function)
    assert len(found) == 2 and all(x is y for x, y in zip(found, fingerprint(function).tensors, strict=True))
    other = torch.ones(4)
    assert [t is u for t, u in zip(guard(made((a, {"x": other, "y": a}), other)), (a, other), strict=True)] == [
        True
    ] * 2
    assert guard(made((a, {"x": b, "y": b}), b)) is None, "a tensor in the place of another"
    assert guard(made((a, {"x": a, "y": a}), a)) is None, "one tensor in two places that had two"


def test_modules_methods_and_partials() -> None:
    module = Bias()
    for function in (module.score, functools.partial(lambda m, s, *at: m.score(s, *at), module)):
        guard = function_guard(function)
        assert guard(function) == (module.table,)
        module.slope = 0.25
        assert guard(function) is None
        module.slope = 0.5
        assert guard(function) == (module.table,)
    old, module.table = module.table, torch.nn.Parameter(torch.randn(4))
    assert guard(function) == (module.table,) and module.table is not old
    module.register_buffer("more", torch.zeros(1))
    assert guard(function) is None


def test_what_has_no_fingerprint_or_is_not_compared_here_has_no_guard() -> None:
    def calls_itself(score, b, h, q, kv):
        return calls_itself if score is None else score

    for value in (object.__new__(type("Slotted", (), {"__slots__": ()})), {1, 2}, {1: 2}, [0] * 1000):
        assert function_guard(made(value)) is None
    assert function_guard(calls_itself) is None


def test_a_guard_takes_anything() -> None:
    guard = function_guard(made((torch.zeros(2), [1])))
    for other in (None, 3, "text", helper, made(1), made((1, [1])), made(None), functools.partial(helper), Bias()):
        assert guard(other) is None


def test_a_guard_keeps_no_tensor() -> None:
    import gc
    import weakref

    tensor = torch.zeros(2)
    gone, guard = weakref.ref(tensor), function_guard(made([tensor]))
    del tensor
    gc.collect()
    assert gone() is None and guard is not None


class Scale:
    """A score whose factor comes from the class, by a way that has a name."""

    factor: float = 1.0
    offset = torch.zeros(())

    @property
    def doubled(self) -> float:
        return 2 * Scale.factor

    @staticmethod
    def given() -> float:
        return Scale.factor

    @classmethod
    def own(cls) -> float:
        return cls.factor

    def __call__(self, score, b, h, q, kv):
        return score * self.factor

    def __float__(self) -> float:
        return self.factor


class Wider(Scale):
    pass


class Scaled(torch.nn.Module):
    factor = 1.0

    def forward(self, score, b, h, q, kv):
        return score * self.factor


THROUGH_A_CLASS = {
    "the class": lambda s, *_: s * Scale.factor,
    "a property": lambda s, *_: s * _scale.doubled,
    "a static method": lambda s, *_: s * Scale.given(),
    "a method of the class": lambda s, *_: s * Wider.own(),
    "a call": Scale(),
    "a base class": Wider(),
    "a special method": lambda s, *_: s * float(_scale),
    "its name": lambda s, *_: s * getattr(_scale, "factor"),  # noqa: B009
    "an instance of its own": lambda s, *_: s * Scale().factor,
}
_scale = Scale()


@pytest.mark.parametrize("way", THROUGH_A_CLASS)
def test_an_attribute_of_a_class_that_changes_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = THROUGH_A_CLASS[way]
    key, guard = fingerprint(function).key, function_guard(function)
    assert fingerprint(function).key == key and guard(function) is not None
    monkeypatch.setattr(Scale, "factor", 3.0)
    assert fingerprint(function).key != key and guard(function) is None
    monkeypatch.undo()
    assert fingerprint(function).key == key and guard(function) is not None


def test_a_method_that_is_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name, function in ((Scale, "__call__", Scale()), (Scaled, "forward", Scaled())):
        key, guard = fingerprint(function).key, function_guard(function)
        monkeypatch.setattr(kind, name, lambda self, score, *at: score)
        assert fingerprint(function).key != key and guard(function) is None


def test_a_tensor_of_a_class_is_one_that_the_function_captures() -> None:
    function = lambda s, *_: s + Scale.offset  # noqa: E731
    assert fingerprint(function).tensors == [Scale.offset] and function_guard(function)(function) == (Scale.offset,)


def test_a_builtin_method_is_compared_with_its_object() -> None:
    settings = {"factor": 1.0}
    get = settings.get
    function = lambda s, *_: s * get("factor")  # noqa: E731
    key, guard = fingerprint(function).key, function_guard(function)
    settings["factor"] = 3.0
    assert fingerprint(function).key != key and guard(function) is None


def test_objects_that_equal_themselves_alone_never_share_a_key() -> None:
    """Not even where one gets the address of another one that is gone."""
    keys = [fingerprint(made(operator.methodcaller("mul", factor))).key for factor in range(20)]
    assert len(set(keys)) == 20


def test_attributes_that_no_code_reads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Wider()
    key = fingerprint(function).key
    monkeypatch.setattr(Scale, "unread", object(), raising=False)
    assert fingerprint(function).key == key


def test_attributes_of_functions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def score_mod(score, b, h, q, kv):
        return helper(score) + score_mod.factor

    monkeypatch.setattr(score_mod, "factor", 1.0, raising=False)
    monkeypatch.setattr(helper, "factor", 1.0, raising=False)
    by_helper = lambda score, *_: helper(score) * helper.factor  # noqa: E731
    for function, of in ((score_mod, score_mod), (by_helper, helper), (score_mod, helper)):
        key, guard = fingerprint(function).key, function_guard(function)
        assert guard is None or guard(function) == ()  # a function that refers to itself has no guard
        monkeypatch.setattr(of, "factor", 2.0)
        assert fingerprint(function).key != key and (guard is None or guard(function) is None)
        monkeypatch.setattr(of, "factor", 1.0)
        assert fingerprint(function).key == key and (guard is None or guard(function) == ())
    assert function_guard(by_helper) is not None


def test_an_attribute_that_a_function_gets_later_is_seen() -> None:
    function = lambda score, *_: helper(score)  # noqa: E731
    key, guard = fingerprint(function).key, function_guard(function)
    helper.later = torch.zeros(2)
    try:
        assert fingerprint(function).key != key and guard(function) is None
        assert fingerprint(function).tensors == [helper.later] and function_guard(function)(function) == (helper.later,)
    finally:
        del helper.later
    assert fingerprint(function).key == key and guard(function) == ()


def test_a_function_with_another_attribute_gives_another_result() -> None:
    def score_mod(score, b, h, q, kv):
        return score * score_mod.factor

    q = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    for factor in (2.0, 5.0):
        score_mod.factor = factor
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=factor / 8**0.5)
        torch.testing.assert_close(flashlane.flex_attention(q, q, q, score_mod), expected)
