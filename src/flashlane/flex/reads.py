"""Watches a function while it is traced: what it reads into Python, how it indexes tensors, where gradients are off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flashlane.flex.fingerprint import SHAPES

_READING = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
"""Functions of tensors that give Python an element; what they read may be different at the next call."""
_READING_OPERATORS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item", "aten::allclose")
_LAYOUTS = {*SHAPES, "__len__", "nbytes"}
"""Functions and attributes of tensors that give Python a shape, or what follows from one and from strides."""
_KINDS = {"dtype", "device", "layout", "requires_grad", "dim", "ndim", "element_size", "itemsize", "get_device", "type"}
_KINDS |= {"is_floating_point", "is_complex", "is_signed", "is_cuda", "is_cpu", "is_meta", "is_nested", "is_sparse"}
_KINDS |= {"is_quantized", "result_type", "can_cast", "__setitem__"}
"""Those that give what the fingerprint of a function has of each tensor, or nothing."""
_USUAL_FUNCTIONS = (vars(torch.Tensor)["__torch_function__"].__func__, torch.nn.Parameter.__torch_function__)
"""What a class of tensors has that leaves torch's functions as they are."""


def _is_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that leaves torch's operators as they are."""
    kind = type(tensor)
    of_torch = kind in (torch.Tensor, torch.nn.Parameter)
    return not of_torch and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _has_own_functions(tensor: torch.Tensor) -> bool:
    function = type(tensor).__torch_function__
    return getattr(function, "__func__", function) not in _USUAL_FUNCTIONS


class Reads:
    """What a function reads of tensors while it is traced."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.values = False
        """Whether it read an element into Python."""
        self.layouts = False
        """Whether it read a shape or strides."""
        self.others = False
        """Whether it read something else of a tensor that others may not have, such as its text or ``is_leaf``."""
        self.last = ""
        """The last operator that it called."""
        self.gradients_off = False
        """Whether it is in a ``torch.no_grad()`` of its own."""
        self.plain: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of a captured tensor of a subclass, that tensor, and the one that is traced in its place."""

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, watched where it is called."""
        reads = self

        class OfFunctions(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                args, kwargs = pytree.tree_map_only(torch.Tensor, reads.traceable, (args, kwargs or {}))
                name = getattr(func, "__name__", "")
                reads.values |= name in _READING
                if name == "_set_grad_enabled":  # of torch.no_grad, enable_grad and set_grad_enabled
                    reads.gradients_off = not args[0]
                if func is torch.Tensor.__getitem__:
                    args = args[0], reads.index(*args)
                    if (parts := reads.parts(*args)) is not None:
                        return torch.ops.aten.index.Tensor(*parts)
                if func in (torch.take, torch.Tensor.take) and len(args) == 2:  # by an i32 index, too
                    return args[0].reshape(-1)[args[1]]
                found = func(*args, **kwargs)
                reads.note(func, args, found)
                return found

        class OfOperators(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                reads.last = str(func)
                pytree.tree_map_only(torch.Tensor, reads.refuse_own_functions, (args, kwargs or {}))
                reads.values |= getattr(func, "name", str)().split(".")[0] in _READING_OPERATORS
                found = func(*args, **(kwargs or {}))
                return reads.without_gradients(func, args, found) if reads.are_gradients_off() else found

        def watched(*arguments: torch.Tensor) -> torch.Tensor:
            with OfFunctions(), OfOperators():
                return function(*arguments)

        return watched

    def traceable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a plain one of its elements if its class is a subclass, which torch's tracing does not take.

        Classes that have functions of their own stay: a plain tensor would not do what they do.
        """
        if not _is_subclass(tensor) or _has_own_functions(tensor):
            return tensor
        if id(tensor) not in self.plain:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                plain = tensor.detach().as_subclass(torch.Tensor).requires_grad_(tensor.requires_grad)
            self.plain[id(tensor)] = tensor, plain
        return self.plain[id(tensor)][1]

    def refuse_own_functions(self, tensor: torch.Tensor) -> None:
        """Raise a NotImplementedError for an operand whose class has functions of its own."""
        if _is_subclass(tensor) and _has_own_functions(tensor):
            raise NotImplementedError(
                f"{self.kind} captures a tensor of the class {type(tensor).__qualname__}, whose __torch_function__ is "
                "its own; t.as_subclass(torch.Tensor), made before the call, is one that programs read"
            )

    def captured(self, leaf: torch.Tensor) -> torch.Tensor:
        """The tensor that the function captures, of which a leaf of its graph is the plain one."""
        return next((tensor for tensor, plain in self.plain.values() if plain is leaf), leaf)

    def note(self, func: Any, args: Sequence[Any], found: Any) -> None:
        """Note a call of the function whose result is no tensor: what it is may be part of the translation."""
        if isinstance(found, torch.Tensor) or not any(isinstance(a, torch.Tensor) for a in args):
            return
        name = getattr(func, "__name__", "").split(".")[0]  # of an operator without its overload
        if name == "__get__":  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        several = isinstance(found, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in found)
        if name in _KINDS:
            return
        if name in _LAYOUTS or several:
            self.layouts = True
        else:
            self.others = True

    def are_gradients_off(self) -> bool:
        """Whether autograd would not record an operation that the function calls now.

        In the ``forward`` of an autograd.Function it records none either, but what the Function returns has a gradient.
        That one turns forward-mode differentiation off, too.
        """
        if self.kind != "score_mod":  # a mask has no gradient
            return False
        off = not torch.is_grad_enabled() and torch._C._is_fwd_grad_enabled()
        return off or self.gradients_off or torch.is_inference_mode_enabled()

    def without_gradients(self, func: Any, args: Sequence[Any], found: Any) -> Any:
        """The results of an operation, as nodes of the graph that have no gradient.

        Raises:
            NotImplementedError: it writes to a tensor that has a gradient, which autograd would leave as it was.
        """
        if getattr(func, "_schema", None) is not None and func._schema.is_mutable:
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in args[:1]):
                raise NotImplementedError(
                    f"{self.kind} writes to a tensor that has a gradient ({func}) where gradients are off, as in "
                    "torch.no_grad(); it may make another tensor there"
                )
            return found

        def detached(t: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.detach.default(t) if t.is_floating_point() else t

        return pytree.tree_map_only(torch.Tensor, detached, found)

    def index(self, tensor: torch.Tensor, at: Any) -> Any:
        """An index whose lists of numbers are tensors, as torch without tracing takes them.

        ``TransformGetItemToIndex`` takes each number of a list, and True, for the index of an axis of its own.

        Raises:
            NotImplementedError: a part of the index is True or False, or the index is a list of lists.
        """
        items = at if isinstance(at, tuple) else (at,)
        lists = isinstance(at, list) and any(isinstance(item, (list, tuple, range)) for item in at)
        if lists or any(isinstance(item, bool) for item in items):
            what = "a list of lists; a tuple or a tensor" if lists else "True or False; None, which makes a new axis,"
            raise NotImplementedError(f"{self.kind} indexes a tensor by {what} may stand there")
        found = [self._of_numbers(item, tensor.device) for item in items]
        tensors = [item for item in found if isinstance(item, torch.Tensor)]
        if any(t.ndim for t in tensors) and all(isinstance(item, (int, torch.Tensor)) for item in found):
            # Fake tensors have no shape for a number next to a tensor of one dimension, of which it has the shape then.
            found = [torch.tensor([item], device=tensor.device) if isinstance(item, int) else item for item in found]
        return tuple(found) if isinstance(at, tuple) else found[0]

    def _of_numbers(self, item: Any, device: torch.device) -> Any:
        """A tensor of a list of whole numbers or of bools; anything else is returned."""
        if not isinstance(item, (list, tuple, range)) or not all(isinstance(i, int) for i in item):
            return item
        return torch.tensor(item, dtype=None if item else torch.int64, device=device)

    def parts(self, tensor: torch.Tensor, at: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]] | None:
        """A view by the slices, numbers and new axes of an index, and its scalar tensors; None without either kind.

        torch itself reads a scalar tensor into Python if it stands next to a slice.

        Raises:
            NotImplementedError: an end of a slice is a tensor.
        """
        items = list(at) if isinstance(at, tuple) else [at]
        for item in items:
            ends = (item.start, item.stop, item.step) if isinstance(item, slice) else ()
            if any(isinstance(end, torch.Tensor) for end in ends):
                raise NotImplementedError(
                    f"{self.kind} takes a slice of a tensor whose end, or step, is a tensor; it may be a number, and "
                    "t[i] reads one element"
                )
        scalars = [_is_scalar(item) for item in items]
        rest = [item for item, scalar in zip(items, scalars, strict=True) if not scalar]
        basic = all(item is None or item is ... or type(item) in (int, slice) for item in rest)
        if not any(scalars) or not basic or not rest:
            return None
        if ... in rest:
            where = next(i for i, item in enumerate(items) if item is ...)
            left = tensor.ndim - sum(item is not None and item is not ... for item in items)
            items[where : where + 1] = [slice(None)] * left
        view = [slice(None) if _is_scalar(item) else item for item in items]
        indices = [item if _is_scalar(item) else None for item in items if type(item) is not int]
        whole = all(item == slice(None) for item in view)
        return tensor if whole else tensor[tuple(view)], indices


def _is_scalar(item: Any) -> bool:
    return (
        isinstance(item, torch.Tensor) and item.ndim == 0 and not item.is_floating_point() and item.dtype != torch.bool
    )
