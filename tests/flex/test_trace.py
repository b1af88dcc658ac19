"""What functions may do, what is refused and how, and when a function is traced again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.flex_oracle import mapped, places

import flashlane
from flashlane.flex import bind as bind_module
from flashlane.flex.bind import bind, binding_of
from flashlane.flex.evaluate import evaluate

CPU = torch.device("cpu")
SIZES = (2, 2, 6, 7)


def check(function: Callable[..., Any]) -> None:
    score = torch.randn(SIZES, dtype=torch.float64)
    program, arguments = bind(function, None, CPU, "f64")
    found = evaluate([program.score], {"score": score, **places(SIZES)}, arguments.tensors, arguments.integers)[0]
    expected = mapped(function, score, SIZES)
    torch.testing.assert_close(found.expand(SIZES).double(), expected.double(), rtol=1e-12, atol=1e-12)


def test_what_depends_on_captured_tensors_alone_is_computed_before() -> None:
    bias, scale = torch.randn(6, 7), torch.randn(2, requires_grad=True)

    def score_mod(score, b, h, q, kv):
        return score * scale.exp()[h] + torch.softmax(bias, -1)[q, kv] + bias.T[kv][q]

    check(score_mod)
    program, arguments = bind(score_mod, None, CPU, "f64")
    assert [t.shape for t in arguments.tensors] == [(2,), (6, 7), (7, 6)]
    assert torch.equal(arguments.tensors[0], scale.exp()) and arguments.tensors[0].requires_grad
    assert [t.differentiable for t in program.captured] == [True, False, False]


def test_indexing_by_numbers_rows_and_negative_indices() -> None:
    table = torch.randn(3, 8, 9)
    check(lambda score, b, h, q, kv: score + table[1][q][kv] + table[-1, q, 2] + table[b, h - 1, kv - 7])
    check(lambda score, b, h, q, kv: score + table[2, :, 1][q] + table.select(0, 1)[q, kv])


def test_in_place_operations_and_methods() -> None:
    def score_mod(score, b, h, q, kv):
        changed = score.clone()
        changed *= 2
        changed += q.to(score.dtype)
        changed.sub_(kv)
        return changed.masked_fill(q < kv, -5.0).clamp(min=-3)

    check(score_mod)


def test_shifts_leave_their_operand_as_it_is() -> None:
    """Torch names them __rshift__ and __lshift__, as if they were in place; in place they are __irshift__."""

    def interleaved(score, b, h, q, kv):
        spread = (kv | (kv << 4)) & 0x0F0F
        spread = (spread | (spread << 2)) & 0x3333
        return score + (spread ^ (spread >> 1)) - (q >> 1) * q

    def in_place(score, b, h, q, kv):
        changed = kv.clone()
        changed <<= 2
        changed |= 3
        return score + changed + kv

    check(interleaved)
    check(in_place)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_division_rounds_as_torch_does(mode: str | None) -> None:
    """Of negative quotients floor and trunc differ, of numbers and of integers."""
    check(lambda score, b, h, q, kv: torch.div(3.7 * score, 0.9, rounding_mode=mode) + (q - kv))
    check(lambda score, b, h, q, kv: score + torch.div(2 * (q - kv), 3, rounding_mode=mode))


def test_short_types_round_and_wrap_as_torch() -> None:
    halves, bytes_ = torch.randn(7).bfloat16(), torch.randint(0, 255, (7,), dtype=torch.uint8)
    check(lambda score, b, h, q, kv: (halves[kv] * halves[q] + 0.125).float() + (bytes_[q] + bytes_[kv]))
    check(lambda score, b, h, q, kv: score.bfloat16() * 1.5)


def test_a_module_a_partial_and_a_method_are_functions_too() -> None:
    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(2, 7))

        def score(self, score, b, h, q, kv):
            return score + self.table[h, kv]

    check(Bias().score)

    def scaled(factor, score, b, h, q, kv):
        return score * factor

    program, _ = bind(functools.partial(scaled, 3.0), None, CPU, "f64")
    assert program.score is not None and program != bind(functools.partial(scaled, 4.0), None, CPU, "f64")[0]


def test_the_identity_and_a_mask_of_everything_are_no_programs() -> None:
    program, _ = bind(lambda score, b, h, q, kv: score, lambda b, h, q, kv: b.new_ones((), dtype=torch.bool), CPU)
    assert program.score is None and program.mask is None


def _branching(score, b, h, q, kv):
    return score if q > kv else -score


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


_table = torch.randn(4, 5)
REFUSED = {
    "branch": (_branching, "torch.where"),
    "own backward": (lambda score, b, h, q, kv: _Own.apply(score), "_Own"),
    "a long row's sum": (
        lambda score, b, h, q, kv: score + torch.zeros(4, 9)[h].sum() + torch.zeros(4, 65)[0].sum(),
        "node %sum.* a row of a score_mod has up to 8 elements, this one has 9",
    ),
    "a row in order": (lambda score, b, h, q, kv: score + _table[h].sort().values[0], "sort"),
    "a table's sum": (lambda score, b, h, q, kv: score + (_table * score).sum(), "mul"),
    "search": (lambda score, b, h, q, kv: score + torch.searchsorted(_table[0], score), "searchsorted"),
    "the bits": (lambda score, b, h, q, kv: score + (score.view(torch.int32) & 1), "view"),
    "a list of a part": (lambda score, b, h, q, kv: score + _table[0].exp().tolist()[1], "_local_scalar_dense"),
    "numpy": (lambda score, b, h, q, kv: score + float(_table.numpy()[0, 0]), "reads a value of a tensor"),
    "a comparison": (lambda score, b, h, q, kv: score * torch.equal(_table[0] + 1, _table[1]), "reads a value"),
    "lists next to a scalar": (
        lambda score, b, h, q, kv: score + torch.zeros(4, 4, 4)[[0, 1], [1, 0], h].sum(),
        "node %index",
    ),
    "random": (lambda score, b, h, q, kv: torch.nn.functional.dropout(score, 0.5), "bernoulli"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_translated_is_named(name: str) -> None:
    function, word = REFUSED[name]
    with pytest.raises(NotImplementedError, match=word):
        bind(function, None, CPU)


def test_a_result_that_is_no_scalar_is_named() -> None:
    with pytest.raises(TypeError, match="score_mod returned None; it must return a scalar tensor"):
        bind(lambda *_: None, None, CPU)
    with pytest.raises(TypeError, match=r"score_mod returned a tensor of shape \(4, 5\)"):
        bind(lambda score, b, h, q, kv: _table * score, None, CPU)


def test_a_function_of_other_arguments_is_named() -> None:
    """A mask_mod in the place of a score_mod is the common case; an error within the function stays as it is."""
    with pytest.raises(TypeError, match=r"^score_mod is a function of \(b, h, q, kv\); it must be a function of score"):
        bind(lambda b, h, q, kv: q >= kv, None, CPU)
    with pytest.raises(TypeError, match=r"^mask_mod is a function of \(score, .*; it must be a function of b, h"):
        bind(None, lambda score, b, h, q, kv: score, CPU)
    with pytest.raises(TypeError, match="unsupported operand"):
        bind(lambda score, b, h, q, kv: score + None, None, CPU)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The functions that are traced."""
    seen: list[object] = []
    original = bind_module.trace
    monkeypatch.setattr(bind_module, "_traced", {})
    monkeypatch.setattr(bind_module, "trace", lambda f, *a: (seen.append(f), original(f, *a))[1])
    return seen


def test_a_function_is_traced_once_for_all_its_tensors_and_lengths(traces: list[object]) -> None:
    def of(table: torch.Tensor):
        return lambda score, b, h, q, kv: score + table[q]

    for n in (5, 5, 9):
        table = torch.randn(n)
        _, arguments = bind(of(table), None, CPU)
        assert arguments.tensors[0] is table
    assert len(traces) == 1
    bind(of(torch.randn(5).half()), None, CPU)
    bind(of(torch.randn(5, requires_grad=True)), None, CPU)
    assert len(traces) == 3


_window = 5


def test_a_function_that_reads_another_value_is_traced_again(
    traces: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mask(b, h, q, kv):
        return q - kv < _window

    bind(None, mask, CPU)
    assert bind(None, mask, CPU)[1].integers == (5,)
    monkeypatch.setattr(f"{__name__}._window", 6)
    assert bind(None, mask, CPU)[1].integers == (6,)
    assert len(traces) == 2


READS = {
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t[0]),
    "a branch": lambda t: 3.0 if t[0] > 2 else 1.0,
    "a list": lambda t: t.tolist()[0],
}


@pytest.mark.parametrize("way", READS)
def test_a_function_that_reads_an_element_into_python_is_traced_at_each_call(way: str, traces: list[object]) -> None:
    """What it read holds for one call: the tensor may hold another number at the next one."""
    factors = torch.tensor([1.0, 0.0])

    def score_mod(score, b, h, q, kv):
        return score * READS[way](factors)

    at = {"score": torch.ones(()), **{name: torch.zeros((), dtype=torch.int32) for name in ("b", "h", "q", "kv")}}
    for number in (1.0, 3.0, 1.0):
        factors[0] = number
        program, arguments = bind(score_mod, None, CPU)
        given = at, arguments.tensors, arguments.integers
        assert float(torch.ones(()) if program.score is None else evaluate([program.score], *given)[0]) == number
        assert binding_of(score_mod, None, CPU) is None
    assert len(traces) == 3


def test_integers_but_minus_one_to_one_are_launch_parameters() -> None:
    def after(n: int):
        return lambda b, h, q, kv: q - kv >= n

    found = {n: bind(None, after(n), CPU)[1].integers for n in (-(2**31) - 1, -2, -1, 0, 1, 2, 2**31)}
    assert found == {-(2**31) - 1: (), -2: (-2,), -1: (), 0: (), 1: (), 2: (2,), 2**31: ()}


def test_a_function_that_reads_a_shape_is_traced_for_each(traces: list[object]) -> None:
    def of(table: torch.Tensor):
        return lambda b, h, q, kv: kv < table.shape[0]

    assert [bind(None, of(torch.randn(n)), CPU)[1].integers for n in (5, 9, 5)] == [(5,), (9,), (5,)]
    assert len(traces) == 2


def test_a_graph_with_torch_operations_is_traced_for_each_shape(traces: list[object]) -> None:
    def of(table: torch.Tensor):
        return lambda score, b, h, q, kv: score + table.flatten()[q]

    for n in (2, 3, 2):
        table = torch.randn(n, 4)
        assert torch.equal(bind(of(table), None, CPU)[1].tensors[0], table.flatten())
    assert len(traces) == 2


FAR = {
    "larger": lambda q, n: q < n,
    "smaller": lambda q, n: q - 3 > -n,
    "the number first": lambda q, n: n >= q,
    "equal": lambda q, n: q == n,
    "unequal": lambda q, n: q != -n,
}


@pytest.mark.parametrize("number", [2**31, 2**32 + 2, 2**40, 2**63 - 1])
@pytest.mark.parametrize("way", FAR)
def test_an_index_is_compared_exactly_with_a_number_of_more_than_32_bits(way: str, number: int) -> None:
    function = lambda b, h, q, kv: FAR[way](q, number) | (kv == 2)  # noqa: E731
    program, arguments = bind(None, function, CPU)
    at = places(SIZES)
    found = torch.ones(()).bool()
    if program.mask is not None:
        (found,) = evaluate([program.mask], at, arguments.tensors, arguments.integers)
    wide = {name: t.long() for name, t in at.items()}
    assert torch.equal(found.expand(SIZES), function(**wide).expand(SIZES))


def test_a_number_of_more_than_32_bits_has_no_place_in_i32_but_in_i64() -> None:
    far = 2**31
    for function in (
        lambda score, b, h, q, kv: score + (q + far),
        lambda score, b, h, q, kv: score + (kv * (far + 7)) % 5,
        lambda score, b, h, q, kv: score + torch.clamp(q - kv, max=far),
        lambda score, b, h, q, kv: score + (q & 0xFFFFFFFF),
    ):
        with pytest.raises(NotImplementedError, match=r"node %.*number \d+ is outside of i32.*long\(\)"):
            bind(function, None, CPU)
    check(lambda score, b, h, q, kv: score + (q.long() + far) + (kv.long() * (far + 7)) % 5)
    check(lambda score, b, h, q, kv: score + (torch.tensor(far).int() + q))
    least = torch.tensor(-far, dtype=torch.int32)
    check(lambda score, b, h, q, kv: score + -least + (torch.tensor([5, 2], dtype=torch.int32)[h] + (far + 7)))


def test_a_graph_with_torch_operations_is_traced_for_each_layout(traces: list[object]) -> None:
    """A view of contiguous rows is a copy of others."""

    def of(table: torch.Tensor):
        return lambda score, b, h, q, kv: score + table.reshape(-1)[h * 7 + kv]

    for table in (torch.randn(2, 7), torch.randn(7, 2).T, torch.randn(2, 1).expand(2, 7), torch.randn(2, 7)):
        check(of(table))
    assert len(traces) == 3


LAYOUTS = {
    "contiguity": lambda t: 2.0 if t.is_contiguous() else 3.0,
    "a stride": lambda t: float(t.stride(0)),
    "an offset": lambda t: float(t.storage_offset()),
}


@pytest.mark.parametrize("way", LAYOUTS)
def test_a_function_that_reads_a_layout_is_traced_for_each(way: str) -> None:
    def of(table: torch.Tensor):
        return lambda score, b, h, q, kv: score * LAYOUTS[way](table) - q

    whole = torch.randn(3, 4)
    for table in (torch.randn(4, 4)[1:], torch.randn(4, 3).T, whole, torch.randn(5, 4)[1:4]):
        check(of(table))


_four = torch.randn(4)


def _written(score: torch.Tensor) -> torch.Tensor:
    changed = score * 1
    first = changed.view(()) * 2
    changed[...] = changed + first
    changed.fill_(changed.ndim).copy_(score).neg_()
    return changed


def _shifted(score: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    table = (_four * 10).int()
    table <<= 1
    return score + (table + 1)[h]


def _read_before_and_after(score: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    table = _four.clone()
    before = table[h] * score
    table.mul_(3).add_(1)
    return before + table[h]


IN_PLACE = {
    "a score": lambda score, b, h, q, kv: _written(score),
    "a copy of a table": lambda score, b, h, q, kv: score * _four.clone().mul_(2).clamp_(min=-1)[h],
    "a shift of a table": lambda score, b, h, q, kv: _shifted(score, h),
    "reads before and after": lambda score, b, h, q, kv: _read_before_and_after(score, h),
    "a view that is used no more": lambda score, b, h, q, kv: (score * 2).view(()).add_(kv).squeeze_().relu_(),
}


@pytest.mark.parametrize("way", IN_PLACE)
def test_what_is_written_in_place_is_read_afterwards(way: str) -> None:
    check(IN_PLACE[way])


def _by_element(score: torch.Tensor, h: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    table[0] = 3.0
    return score * table[h]


def _through_a_view(score: torch.Tensor) -> torch.Tensor:
    changed = score * 1
    view = changed.view(())
    changed += 3 * changed
    return view


def _under_a_view(score: torch.Tensor) -> torch.Tensor:
    changed = score * 1
    changed.detach().mul_(2)
    return changed


def _own_row(score: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    row = _table[h].clone()
    row[0] = 7.0
    return score + row.sum()


WRITES = {
    "an element of a copy": (lambda score, b, h, q, kv: _by_element(score, h, _four.clone()), "copy_.*shares"),
    "an element of zeros": (lambda score, b, h, q, kv: _by_element(score, h, torch.zeros(4)), "copy_.*shares"),
    "an element of a row": (lambda score, b, h, q, kv: _own_row(score, h), "copy_.*shares"),
    "what a view shows": (lambda score, b, h, q, kv: _through_a_view(score), "add_.*view shares"),
    "a detached score": (lambda score, b, h, q, kv: _under_a_view(score), "mul_.*shares"),
    "a captured tensor": (lambda score, b, h, q, kv: score * _four.mul_(1)[h], "captures"),
    "an output": (lambda score, b, h, q, kv: score * torch.mul(_four, 2, out=torch.zeros(4))[h], "another operand"),
}


@pytest.mark.parametrize("way", WRITES)
def test_what_is_written_in_place_and_used_by_another_name_is_refused(way: str) -> None:
    function, reason = WRITES[way]
    with pytest.raises(NotImplementedError, match=f"node %.*{reason}"):
        bind(function, None, CPU)


def test_a_long_chain_of_torch_operations_on_captured_tensors_is_copied_once() -> None:
    """Each of its results is used twice; a walk along all paths would have 2^100 steps."""
    table = torch.randn(2, dtype=torch.float64)

    def score_mod(score, b, h, q, kv):
        x = table
        for _ in range(100):
            x = x * 0.5 + x * x * 0.01
        return score + x[h]

    check(score_mod)


@pytest.mark.parametrize("result", [1.0, 1, "q - kv", "q * 0.5"])
def test_a_mask_that_is_no_bool_is_refused(result: Any) -> None:
    named = repr(result) if not isinstance(result, str) else "a tensor of torch"
    with pytest.raises(TypeError, match=f"mask_mod returned {named}.*must return a bool"):
        bind(None, lambda b, h, q, kv: eval(result, {"q": q, "kv": kv}) if isinstance(result, str) else result, CPU)
    assert bind(None, lambda b, h, q, kv: True, CPU)[0].mask is None


_cube = torch.randn(2, 9, 11, dtype=torch.float64)
MIXED = {
    "a slice after a scalar": lambda score, b, h, q, kv: score + _cube[h, 3:][q][kv],
    "a slice before a scalar": lambda score, b, h, q, kv: score + _cube[:, kv][h, q],
    "a slice of a row": lambda score, b, h, q, kv: score + _cube[0][q, 2:][kv],
    "a slice with steps": lambda score, b, h, q, kv: score + _cube[h, q, ::2].sum() * _cube[h, 1:6, q][2],
    "an ellipsis after": lambda score, b, h, q, kv: score + _cube[h, ...][q, kv],
    "an ellipsis before": lambda score, b, h, q, kv: score + _cube[..., kv][h][q],
    "an ellipsis for nothing": lambda score, b, h, q, kv: score + _cube[h, q, kv, ...],
    "a number and a slice": lambda score, b, h, q, kv: score + _cube[1, 2:, kv][q],
    "a new axis": lambda score, b, h, q, kv: score + _cube[h][None][0][q][kv] + _cube[h, None, q][0, kv],
    "a new axis of a row": lambda score, b, h, q, kv: score + _cube[h][q].unsqueeze(-1)[kv][-1],
    "a new axis of an element": lambda score, b, h, q, kv: score + _cube[h, q, kv][None].sum(),
    "take": lambda score, b, h, q, kv: score + torch.take(_cube, q * 11 + kv) + _cube.take(h),
}


def _by_tensors_alone(function: Callable[..., Any], score: torch.Tensor, *at: int) -> torch.Tensor:
    return function(score, *(torch.tensor(i) for i in at))


@pytest.mark.parametrize("way", MIXED)
def test_indices_of_scalars_next_to_slices(way: str) -> None:
    score = torch.randn(SIZES, dtype=torch.float64)
    program, arguments = bind(MIXED[way], None, CPU, "f64")
    (found,) = evaluate([program.score], {"score": score, **places(SIZES)}, arguments.tensors, arguments.integers)
    for at in ((0, 0, 0, 0), (1, 1, 5, 6), (0, 1, 2, 3), (1, 0, 4, 2)):
        torch.testing.assert_close(found[at], _by_tensors_alone(MIXED[way], score[at], *at))


def test_a_captured_tensor_gets_its_gradient_through_a_slice() -> None:
    table = torch.randn(2, 9, 11, dtype=torch.float64, requires_grad=True)
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    grads = []
    for score_mod in (lambda s, b, h, q, kv: s + table[h, 3:][q][kv], lambda s, b, h, q, kv: s + table[h, q + 3, kv]):
        out = flashlane.flex_attention(q, q, q, score_mod)
        grads += torch.autograd.grad((out * q).sum(), table)
    torch.testing.assert_close(*grads)
    assert grads[0][:, 3:, :6].all() and not grads[0][:, :3].any()


def test_reasons_of_refusals_are_those_of_the_function() -> None:
    x = torch.tensor([0.5, 2.0])
    not_known = "none is known yet where torch operations make it of captured tensors"
    for function, reason in (
        (lambda score, b, h, q, kv: score + _cube[0][q > kv].sum(), "operation aten.index.Tensor.*tracing"),
        (
            lambda score, b, h, q, kv: score + _cube[h][q : q + 1, kv][0],
            "slice of a tensor whose end, or step, is a tensor; it may be a number",
        ),
        (lambda score, b, h, q, kv: score if x.max() > 1 else -score, not_known),
        (lambda score, b, h, q, kv: score if x.any() else -score, not_known),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            bind(function, None, CPU)


def test_threads_translate_functions_at_the_same_time() -> None:
    """torch.fx, which records the functions, has state of the whole process."""
    score = torch.randn(SIZES, dtype=torch.float64)

    def found(number: int) -> torch.Tensor:
        space: dict[str, Any] = {}
        exec(f"def function(score, b, h, q, kv): return score * {number}.0 + (q - kv) * {number}.5", space)
        program, arguments = bind(space["function"], None, CPU, "f64")
        inputs = {"score": score, **places(SIZES)}
        return evaluate([program.score], inputs, arguments.tensors, arguments.integers)[0]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(found, range(2, 50)))
    distance = places(SIZES)["q"] - places(SIZES)["kv"]
    for number, result in enumerate(results, 2):
        torch.testing.assert_close(result, score * number + distance * (number + 0.5))


class OfALibrary(torch.nn.Parameter):
    """A parameter with a method of a library."""


class OfAnother(torch.Tensor):
    """A tensor whose results have its class, too."""


class WithItsOwn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", [OfALibrary, OfAnother])
def test_a_captured_tensor_of_a_subclass_is_read_and_has_its_gradient(
    kind: type[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bind_module, "_traced", {})
    bias = torch.randn(2, 6, dtype=torch.float64)
    plain, held = bias.clone().requires_grad_(), bias.clone().as_subclass(kind).requires_grad_()
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    grads = []
    for each in (plain, held, held):

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any, each: torch.Tensor = each) -> Any:
            return score + each.exp()[h, i] * each[0, j]

        out = flashlane.flex_attention(q, q, q, score_mod)
        grads += torch.autograd.grad((out * q).sum(), each)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert len(bind_module._traced) == 2


def test_a_captured_tensor_whose_class_has_functions_of_its_own_is_refused() -> None:
    bias = torch.randn(6).as_subclass(WithItsOwn)
    with pytest.raises(NotImplementedError, match=r"captures a tensor of the class WithItsOwn.*as_subclass"):
        bind(lambda score, b, h, q, kv: score + bias[q], None, CPU)


_of_three = torch.randn(3, 3, 3)
OF_LISTS = {
    "rows": lambda t: t[[0, 1]].sum(),
    "rows from the end, as a tuple in one": lambda t: t[(-1, 0), :][1].sum() + t[(-1, 0),].sum(),
    "one row": lambda t: t[[1]][0, 2, 1],
    "no row": lambda t: t[[]].sum() + 3,
    "a range": lambda t: t[range(2), 1].sum(),
    "bools": lambda t: t[[True, False, True]].amax(),
    "pairs": lambda t: t[[0, 1], [1, 0]].sum() + t[[0, 1], 2, [1, 0]][0],
    "a number and a tensor": lambda t: t[torch.tensor([0, 1]), torch.tensor([1, 0]), 2][1],
    "columns": lambda t: t[..., [2, 0]].sum() + t[0, :, [1, 2]][2, 1] + t[None, [1]].sum(),
}


@pytest.mark.parametrize("way", OF_LISTS)
def test_a_list_of_numbers_is_one_index(way: str) -> None:
    """torch's mode for functions of scalars takes each of its numbers for an index of an axis."""
    number = OF_LISTS[way](_of_three)
    program, arguments = bind(lambda score, b, h, q, kv: score * OF_LISTS[way](_of_three) + q, None, CPU, "f64")
    at = {"score": torch.ones(SIZES, dtype=torch.float64), **places(SIZES)}
    found = evaluate([program.score], at, arguments.tensors, arguments.integers)[0]
    torch.testing.assert_close(found, (number + at["q"]).double().expand(SIZES))


def test_indices_that_may_mean_two_things_are_named() -> None:
    for at, what in (([[0, 1], [1, 0]], "a list of lists; a tuple"), (True, "True or False; None, which")):
        with pytest.raises(NotImplementedError, match=f"mask_mod indexes a tensor by {what}"):
            bind(None, lambda b, h, q, kv: _of_three[at].sum() > q, CPU)  # noqa: B023
