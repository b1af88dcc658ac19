"""Translates a Python function of a score or of a pair to an expression, through a torch.fx graph.

torch's ``make_fx`` records what the function does with scalars. A part of the graph that depends on captured tensors
alone (``slopes.exp()``) is not translated: it runs as torch operations at each call, with their gradients, and its
result is what the program reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.convert_frame import compile_lock
from torch.fx.experimental.proxy_tensor import make_fx

from flashlane.core.arch import no_autocast
from flashlane.core.validate import kind_of
from flashlane.flex import aten, in_place, rows
from flashlane.flex.expression import Expression, cast, input, is_constant, make
from flashlane.flex.integer_range import SMALL
from flashlane.flex.program import short_name
from flashlane.flex.reads import Reads
from flashlane.flex.rows import Row

MOST_INTEGERS = 32
"""The largest number of a function's integers that become launch parameters; further ones are constants of its code."""
NO_TANGENTS = (
    "flex_attention has no forward-mode derivative (make_dual, jvp), of captured tensors neither; reverse mode "
    "(backward, grad) works"
)
"""The error of a call, or of a function, that reads a tensor which carries a tangent."""
_OF_TRACING = ("torch.fx", "torch._subclasses", "torch._dynamo")
"""Modules whose errors are those of tracing a function that torch runs otherwise."""
_OWN_GRADIENTS_ALLOWED = ("ModIndex", "_TanhApprox")
"""autograd.Functions whose backward is the derivative of their forward: torch's indexing, attention-gym's tanh."""


@dataclass(frozen=True)
class Traced:
    """A translated function."""

    expression: Expression
    """Its ``load`` and ``integer`` leaves count from 0."""
    leaves: tuple[torch.Tensor, ...]
    """The tensors that the function captures and that the program, or ``prelude``, reads."""
    prelude: torch.fx.GraphModule | None
    """It computes the tensors that the program reads from ``leaves``; None where the program reads the leaves."""
    integers: tuple[int, ...]
    """The values of the ``integer`` leaves."""
    device: torch.device
    """That of the call."""
    reads_values: bool = False
    """Whether the function read of a tensor what others may not have, so that the translation holds for this one."""
    of_layouts: bool = False
    """Whether it has code for each element of a row, or read a shape, so that it holds for these layouts."""

    def tensors(self, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors that the program reads, for these leaves; they are differentiable with respect to the leaves."""
        if self.prelude is None:
            return tuple(leaves)
        with no_autocast(self.device):
            return tuple(self.prelude(*leaves))


@torch.inference_mode(False)  # autograd keeps no tensor that is made in that mode
def trace(function: Callable[..., Any], kind: str, device: torch.device, score_type: str = "f32") -> Traced:
    """Translate a function to an expression.

    Args:
        function: ``score_mod(score, b, h, q_idx, kv_idx)`` or ``mask_mod(b, h, q_idx, kv_idx)``.
        kind: ``score_mod`` or ``mask_mod``.
        device: the device of its captured tensors.
        score_type: ``f32`` or ``f64``, the type of the scores.

    Raises:
        NotImplementedError: the function does what no program does; the message names the node of the graph.
        TypeError: its result is not a scalar tensor, or that of a mask is no bool.
    """
    scored = kind == "score_mod"
    names = (["score"] if scored else []) + ["b", "h", "q", "kv"]
    place = {"device": device}
    examples = [torch.zeros((), dtype=torch.int32, **place) for _ in range(4)]
    if scored:
        dtype = torch.float64 if score_type == "f64" else torch.float32
        examples.insert(0, torch.zeros((), dtype=dtype, requires_grad=True, **place))

    reads = Reads(kind)
    watched = reads.seen(function)

    def called(*arguments: torch.Tensor) -> torch.Tensor:
        result = watched(*arguments)
        if not scored and isinstance(result, (torch.Tensor, int, float)):
            returned = f"a tensor of {result.dtype}" if isinstance(result, torch.Tensor) else f"{result!r}"
            if not isinstance(result, bool) and returned != f"a tensor of {torch.bool}":
                raise TypeError(f"mask_mod returned {returned}; it must return a bool, as a comparison does")
        if isinstance(result, (bool, int, float)):
            result = torch.full((), result, device=device)
        if not isinstance(result, torch.Tensor) or result.ndim:
            of_shape = isinstance(result, torch.Tensor)
            what = f"a tensor of shape {tuple(result.shape)}" if of_shape else kind_of(result)
            raise TypeError(f"{kind} returned {what}; it must return a scalar tensor")
        _refuse_own_gradients(result, kind)
        return result

    with no_autocast(device):  # as torch's function, which leaves the operations of its functions as they are
        try:
            graph = _graph(called, examples, kind, reads)
        except TypeError as error:
            _refuse_other_arguments(function, kind, examples, error)
            raise
    found = _Translation(graph, names, kind, score_type, device).traced()
    of_this = reads.values or reads.others
    leaves = tuple(map(reads.captured, found.leaves))
    return replace(found, leaves=leaves, reads_values=of_this, of_layouts=found.of_layouts or reads.layouts)


def _graph(called: Callable[..., Any], examples: list[torch.Tensor], kind: str, reads: Reads) -> torch.fx.GraphModule:
    # torch.fx patches modules while it traces, so that threads take turns, as those of torch.compile do with this lock.
    # What torch.compile made of a function is traced as the function itself.
    inlined = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with compile_lock, torch.enable_grad(), TransformGetItemToIndex(), inlined:
        try:
            tracer = make_fx(called, aten.decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True)
            return tracer(*examples)
        except TypeError:
            raise
        except NotImplementedError as error:
            if "jvp" in str(error):  # of torch's own indexing, by which a tensor that carries a tangent is read
                raise NotImplementedError(NO_TANGENTS) from error
            raise
        except Exception as error:
            if reads.values or "data-dependent" in str(error).lower():
                raise NotImplementedError(
                    f"{kind} reads a value of a tensor in Python, as an `if` and float() do: each pair may have its "
                    "own, and none is known yet where torch operations make it of captured tensors; torch.where "
                    "chooses between two values, t[i] reads a captured tensor, and a value that is read before the "
                    f"call is a number ({reads.last}: {type(error).__name__}: {str(error).splitlines()[0]})"
                ) from error
            if type(error).__module__.startswith(_OF_TRACING):
                raise NotImplementedError(
                    f"{kind}: programs do not have the operation {reads.last}, whose result torch's tracing does not "
                    f"know ({type(error).__name__}: {str(error).splitlines()[0]})"
                ) from error
            raise


def _refuse_other_arguments(
    function: Callable[..., Any], kind: str, examples: list[torch.Tensor], error: TypeError
) -> None:
    """Say so where a call failed because the function takes other arguments: Python's own message names no ``kind``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Python knows no signature of some functions that are not written in it
        return
    try:
        signature.bind(*examples)
    except TypeError:
        names = ("score, " if kind == "score_mod" else "") + "b, h, q_idx and kv_idx"
        parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        given = signature.replace(parameters=parameters, return_annotation=signature.empty)
        raise TypeError(f"{kind} is a function of {given}; it must be a function of {names}") from error


def _refuse_own_gradients(result: torch.Tensor, kind: str) -> None:
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            if name not in _OWN_GRADIENTS_ALLOWED:
                raise NotImplementedError(
                    f"{kind} calls the autograd.Function {name}, whose backward is its own; programs derive theirs"
                )


@dataclass
class _View:
    """A view of a tensor that the function captures."""

    source: torch.fx.Node
    indices: list[Expression | None]
    """The scalar that indexes each axis of the tensor; None where none does yet."""
    axes: list[int | None]
    """The axis of the tensor that each dimension of the view is; None: a new one of size 1."""

    @classmethod
    def whole(cls, source: torch.fx.Node, ndim: int) -> _View:
        return cls(source, [None] * ndim, list(range(ndim)))


class _Translation:
    """The translation of one graph to an expression."""

    def __init__(
        self, module: torch.fx.GraphModule, names: list[str], kind: str, score_type: str, device: torch.device
    ) -> None:
        self.module, self.kind, self.device = module, kind, device
        self.names, self.score_type = iter(names), score_type
        self.values: dict[torch.fx.Node, Expression | Row | _View] = {}
        self.varies: dict[torch.fx.Node, bool] = {}
        """Whether a node depends on an input."""
        self.read: dict[torch.fx.Node, int] = {}
        """The index of the captured tensor, by node."""
        self.first: dict[str, torch.fx.Node] = {}
        """The first node of each captured tensor: a graph has one for each use."""
        self.integers: list[int] = []
        self.of_layouts = False
        self.long_row = 0
        """Elements of a row of this node that is too long to be code."""

    def traced(self) -> Traced:
        in_place.resolve(self.module.graph, self.refuse)
        for node in self.module.graph.nodes:
            if node.op == "output":
                (result,) = node.all_input_nodes
            else:
                self.varies[node] = node.op == "placeholder" or any(self.varies[n] for n in node.all_input_nodes)
                self.translate(node)
        value = self.scalar(result)
        expression = cast(value, "bool" if self.kind == "mask_mod" else self.score_type)
        return Traced(expression, *self.captured(), tuple(self.integers), self.device, of_layouts=self.of_layouts)

    # --- nodes ---

    def translate(self, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            name = next(self.names)
            self.values[node] = input(name, self.score_type if name == "score" else None)
        elif node.op == "get_attr":
            if isinstance(tensor := _attribute(self.module, node), torch.Tensor):
                first = self.first.setdefault(str(node.target), node)
                self.values[node] = _View.whole(first, tensor.ndim)
        elif node.op == "call_function":
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                self.refuse(node)
            self.long_row = 0
            try:
                found = self.operation(node)
            except aten.Untranslatable as error:
                if self.varies[node]:
                    self.refuse(node, str(error))
                found = None
            if found is not None:
                self.values[node] = found
            elif self.varies[node]:
                self.refuse(node)
            # What depends on captured tensors alone is computed before the kernel: see captured().
            elif isinstance(node.meta.get("val"), torch.Tensor):
                self.values[node] = _View.whole(node, node.meta["val"].ndim)
        else:
            self.refuse(node)

    def operation(self, node: torch.fx.Node) -> Expression | Row | _View | None:
        """The result of an operation; None where programs have no such operation."""
        name = str(node.target).split(".")
        if name[0] == "aten" and name[1] == "lift_fresh_copy":
            tensor = _attribute(self.module, node.args[0])  # a number that the function's code holds
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 0:
                return aten.number(tensor.item(), short_name(tensor.dtype))
        if name[0] == "aten" and name[1] in ("index", "select"):
            return self.indexed(node, name[1])
        if name[0] == "aten" and name[1] == "unsqueeze" and self.is_part(node.args[0]) and self.varies[node]:
            view, dim = self.values[node.args[0]], int(node.args[1])  # type: ignore[index, call-overload, arg-type]
            axes = list(view.axes)  # type: ignore[union-attr]
            axes.insert(dim + len(axes) + 1 if dim < 0 else dim, None)
            return replace(view, axes=axes)  # type: ignore[type-var]
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.ndim > 1:
            return None
        if not self.varies[node] and (value.ndim or any(map(self.is_part, node.all_input_nodes))):
            return None  # rows that depend on captured tensors alone are computed before the kernel
        arguments = [self.argument(a) for a in node.args]
        keywords = {key: self.argument(a) for key, a in node.kwargs.items()}
        if any(a is None for a, given in zip(arguments, node.args, strict=True) if given is not None):
            return None
        target, kind = (name[0], name[1], name[2] if len(name) > 2 else ""), short_name(value.dtype)
        if value.ndim or rows.has_row(*arguments, *keywords.values()):
            size = value.shape[0] if value.ndim else None
            return rows.translate(target, arguments, keywords, kind, size, self.integer)
        return aten.translate(*target, arguments, keywords, kind, self.integer)

    def is_part(self, node: Any) -> bool:
        """Whether a node is a view of a captured tensor that has at least one dimension left."""
        view = self.values.get(node)
        return isinstance(view, _View) and bool(view.axes)

    def argument(self, given: Any) -> Any:
        """A node's expression or row, or None where it has none; anything but a node stays as it is."""
        if not isinstance(given, torch.fx.Node):
            return given
        value = self.values.get(given)
        return self.loaded(value) if isinstance(value, _View) else value

    def row(self, view: _View, size: int) -> Row | None:
        """The elements of a captured tensor of which one axis has no index."""
        if not 0 < size <= rows.MOST_IN_ROW[self.kind]:
            self.long_row = size
            return None
        self.of_layouts, loaded = True, []
        for element in range(size):
            at = [aten.number(element, "i32") if index is None else index for index in view.indices]
            loaded.append(self.loaded(_View(view.source, at, [])))
        return Row(tuple(loaded))  # type: ignore[arg-type]

    def indexed(self, node: torch.fx.Node, name: str) -> Expression | Row | _View | None:
        view = self.values.get(node.args[0])  # type: ignore[call-overload]
        if isinstance(view, Row):
            return view.element(node.args[2] if name == "select" else self.argument(node.args[1][0]))  # type: ignore[index]
        if not isinstance(view, _View):
            return None
        given: list[Any] = [None] * len(view.axes)
        if name == "select":
            _, dim, at = node.args
            if not isinstance(at, int):
                return None
            given[dim] = aten.number(at, "i32")  # type: ignore[index]
        else:
            for dim, index_node in enumerate(node.args[1]):  # type: ignore[arg-type]
                if index_node is None:
                    continue
                index = self.argument(index_node)
                if not isinstance(index, Expression) or index.dtype in ("bool", "f16", "bf16", "f32", "f64"):
                    return None
                given[dim] = index if index.dtype == "i64" else cast(index, "i32")
        if any(
            axis is None and at is not None and not is_constant(at) for axis, at in zip(view.axes, given, strict=True)
        ):
            return None  # such an index may lie outside of the new axis, which no load would notice
        indices = list(view.indices)
        for axis, at in zip(view.axes, given, strict=True):
            if axis is not None and at is not None:
                indices[axis] = at
        left = [axis for axis, at in zip(view.axes, given, strict=True) if at is None]
        indexed = _View(view.source, indices, left)
        return indexed if left else self.loaded(indexed)

    def loaded(self, view: _View) -> Expression | Row | None:
        """What a captured tensor has at its indices: an element; a row, if an index is missing; None if several are."""
        value = view.source.meta["val"] if "val" in view.source.meta else _attribute(self.module, view.source)
        if len(view.axes) == 1:
            return self.row(view, 1 if view.axes[0] is None else value.shape[view.axes[0]])
        if view.axes:
            return None
        number = self.read.setdefault(view.source, len(self.read))
        return make("load", short_name(value.dtype), view.indices, number)  # type: ignore[arg-type]

    def integer(self, number: int) -> Expression:
        """An integer as a launch parameter; a constant for −1, 0, 1, large numbers, and beyond the limit."""
        if abs(number) < 2 or abs(number) >= SMALL or len(self.integers) == MOST_INTEGERS:
            return aten.number(number, "i32" if -(2**31) <= number < 2**31 else "i64")
        self.integers.append(number)
        return make("integer", "i32", value=(len(self.integers) - 1, number < 0))

    def scalar(self, node: torch.fx.Node) -> Expression:
        value = self.argument(node)
        if not isinstance(value, Expression):
            self.refuse(node)
        return value

    def refuse(self, node: torch.fx.Node, why: str = "") -> NoReturn:
        if self.long_row and not why:
            most = rows.MOST_IN_ROW[self.kind]
            why = f"a row of a {self.kind} has up to {most} elements, this one has {self.long_row}"
        reason = f"; {why}" if why else ""
        raise NotImplementedError(f"{self.kind}: programs do not have the node {node.format_node()}{reason}")

    # --- captured tensors ---

    def captured(self) -> tuple[tuple[torch.Tensor, ...], torch.fx.GraphModule | None]:
        """The leaves, and the graph that computes from them what the program reads; None where that is the leaves."""
        if all(node.op == "get_attr" for node in self.read):
            return tuple(_attribute(self.module, node) for node in self.read), None
        needed = in_place.with_operands(self.read)
        copied = [node for node in self.module.graph.nodes if node in needed]
        graph, new, leaves = torch.fx.Graph(), {}, []
        for node in copied:  # a graph's placeholders must come first
            if node.op == "get_attr":
                leaves.append(_attribute(self.module, node))
                new[node] = graph.placeholder(f"leaf{len(leaves)}")
        for node in copied:
            if node.op == "get_attr":
                continue
            new[node] = graph.node_copy(node, new.__getitem__)
            if in_place.is_in_place(node):  # what was read before it was written keeps its value
                with graph.inserting_before(new[node]):
                    own = graph.call_function(torch.ops.aten.clone.default, (new[node].args[0],))
                new[node].update_arg(0, own)
        graph.output(tuple(new[node] for node in self.read))
        return tuple(leaves), torch.fx.GraphModule({}, graph)


def _attribute(module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found
