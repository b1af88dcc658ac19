"""The checks of a call's arguments. Each error names the argument, what it was and what it may be.

:meth:`flashlane.core.problem.AttentionProblem.from_inputs` calls them, and no kernel checks a caller's arguments again;
what a backward reads of its forward is checked by the kernel that reads it (:func:`check_results`).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashlane.core.arch import DTYPE_NAMES, compute_dtype, records_gradients

if TYPE_CHECKING:
    from flashlane.core.problem import Inputs

MAX_HEAD_DIM = 1024
VECTOR_BYTES = 16
"""The bytes of the widest load; its address is a multiple of them."""
LARGEST_F32, SMALLEST_F32 = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
"""The largest number that kernels compute with, and the smallest whose inverse is finite: others are flushed to 0."""
FARTHEST = 2**31 - 1
"""A side of a window, or a number of rows, that no sequence is longer than; a larger one counts as this."""
MAX_SIZE = 2**31 - 2**12
"""The longest axis of q, k and v, but for the pages of a cache: kernels count in 32 bits, and round up to tiles."""


def kind_of(value: Any) -> str:
    """What a message says that an argument is: ``None``, ``an int``, ``a numpy.ndarray``, of a tensor its dtype."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a torch.Tensor of {value.dtype}"
    name, module = type(value).__qualname__, type(value).__module__
    shown = name if module == "builtins" else f"{module}.{name}"
    return f"{'an' if shown[0] in 'aeiou' else 'a'} {shown}"


def check_flag(name: str, value: Any) -> bool:
    """A yes or no: a bool of Python, NumPy or torch, or 0 or 1.

    Raises:
        TypeError: it is something else, such as a word, which would count as yes.
    """
    if type(value) is bool:
        return value
    try:
        if not isinstance(value, str | bytes) and value in (True, False):
            return bool(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several
        pass
    raise TypeError(f"{name} is {value!r}; it must be True or False")


def check_strided(name: str, t: Any) -> None:
    """Check that an argument is a tensor with strides, as everything that reads one needs.

    Raises:
        TypeError: it is no tensor, or a nested, sparse or otherwise stored one.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {kind_of(t)}; it must be a torch.Tensor")
    if t.is_nested:
        raise TypeError(f"{name} is a nested tensor; flash_attn_varlen_func takes packed sequences")
    if t.layout is not torch.strided:
        raise TypeError(f"{name} has layout {t.layout}; it must be torch.strided")
    if is_causal_bias(t):
        raise TypeError(f"{name} is torch's CausalBias, which holds no numbers; it must be a tensor that does")


def is_causal_bias(t: Any) -> bool:
    """Whether it is torch's CausalBias: a mask's name and sizes, in a tensor of memory that nothing wrote."""
    return type(t).__module__ == "torch.nn.attention.bias"


def rows_aligned(t: torch.Tensor) -> bool:
    """Whether every row of a tensor is contiguous, starts on :data:`VECTOR_BYTES` and has a multiple of them."""
    size = t.element_size()
    if t.numel() == 0:
        return True
    outer = (stride for length, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if length > 1)
    return (
        t.stride(-1) == 1
        and (t.shape[-1] * size) % VECTOR_BYTES == 0
        and t.data_ptr() % VECTOR_BYTES == 0
        and all((stride * size) % VECTOR_BYTES == 0 for stride in outer)
    )


def _named(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (("q", q), ("k", k), ("v", v))


def check_tensors(q: Any, k: Any, v: Any, varlen: bool, paged: bool) -> None:
    """Check that q, k and v are tensors of the right rank, of one dtype and on one device.

    Raises:
        TypeError: one is no tensor, or has a dtype that is unknown or not that of q.
        ValueError: one has another rank, or is on another device than q.
    """
    for name, t in _named(q, k, v):
        axes = axes_of(name, varlen, paged)
        rank = len(axes)
        check_strided(name, t)
        check_dtype(name, t.dtype)
        if t.dim() != rank:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, rank {t.dim()}; it must have rank {rank}: ({', '.join(axes)})"
            )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} and q has {q.dtype}; they must be equal")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q is on {q.device}; they must be on one device")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for a dtype that attention is not computed of."""
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"{name} has dtype {dtype}; it may be one of {', '.join(map(str, DTYPE_NAMES))}")


def axes_of(name: str, varlen: bool, paged: bool) -> tuple[str, ...]:
    """The names of the axes of q, k or v, for messages."""
    if paged and name != "q":
        return ("pages", "page_size", "heads", "head_dim")
    return ("total", "heads", "head_dim") if varlen else ("batch", "seqlen", "heads", "head_dim")


def check_sizes(inputs: Inputs, varlen: bool, paged: bool, batch: bool = True) -> None:
    """Check that the shapes of q, k and v agree: head dims, numbers of heads, batch sizes, lengths of k and v.

    Without ``batch`` k and v may have more batch elements than q; so they may where ``batch_idx`` chooses among them.

    Raises:
        ValueError: two sizes do not agree, one is 0 that may not be, or one exceeds :data:`MAX_HEAD_DIM` or
            :data:`MAX_SIZE`.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, t in _named(q, k, v):
        for axis, size in zip(axes_of(name, varlen, paged), t.shape, strict=True):
            if size == 0 and axis not in ("seqlen", "total"):
                raise ValueError(f"{name} has size 0 in its {axis} axis; it must be at least 1")
            if type(size) is int and size > MAX_SIZE and axis != "pages":  # of a symbol it would be fixed
                raise ValueError(f"{name} has size {size} in its {axis} axis; it may be up to {MAX_SIZE}")
        if t.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"{name} has head_dim {t.shape[-1]}; it may be 1 to {MAX_HEAD_DIM}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]} and q has {q.shape[-1]}; they must be equal")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"v has {v.shape[-2]} heads and k has {k.shape[-2]}; they must be equal")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"k has {k.shape[-2]} heads and q has {q.shape[-2]}; the heads of q must be a multiple of those of k"
        )
    if batch and not (varlen or paged) and inputs.batch_idx is None:
        for name, t in (("k", k), ("v", v)):
            if t.shape[0] != q.shape[0]:
                raise ValueError(f"{name} has batch size {t.shape[0]} and q has {q.shape[0]}; they must be equal")
    check_equal_lengths(k, v, "page size" if paged else "length")


def check_equal_lengths(k: torch.Tensor, v: torch.Tensor, axis: str = "length") -> None:
    """Raise ValueError unless k and v have the same axes before the heads; messages call the last of them ``axis``."""
    if k.shape[:-2] != v.shape[:-2]:
        if k.shape[:-3] == v.shape[:-3]:
            raise ValueError(f"v has {axis} {v.shape[-3]} and k has {k.shape[-3]}; they must be equal")
        raise ValueError(f"v has shape {tuple(v.shape)} and k has {tuple(k.shape)}; their lengths must be equal")


def result_shapes(q: torch.Tensor, v: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shapes of the output and the LSE: (b, sq, h, dv) and (b, h, sq), or without b for varlen."""
    *batch, seqlen, heads, _ = q.shape
    return (*batch, seqlen, heads, v.shape[-1]), (*batch, heads, seqlen)


def results_agree(
    q: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> bool:
    """Whether tensors are what a forward of q and v gives, and the gradients of that: see :func:`check_results`."""
    of_out, of_lse = result_shapes(q, v)
    device, single = q.device, compute_dtype(q.dtype)
    return (
        out.shape == of_out == do.shape
        and lse.shape == of_lse
        and out.dtype is q.dtype is do.dtype
        and lse.dtype is single
        and out.device == lse.device == do.device == device
        and (dlse is None or (dlse.shape == of_lse and dlse.dtype is single and dlse.device == device))
    )


def check_results(
    inputs: Inputs, out: Any, lse: Any, do: Any, dlse: Any | None = None, *, any_float: bool = False
) -> None:
    """Check what a backward reads of its forward: the output, the LSE, and the gradients of both.

    Args:
        inputs: the tensors of the call, which were checked.
        out: of shape (b, sq, h, dv), or (total_q, h, dv) for varlen, with the dtype of q.
        lse: of shape (b, h, sq), or (h, total_q) for varlen; f32, and f64 of f64 inputs.
        do: as ``out``.
        dlse: as ``lse``, or None.
        any_float: whether they may have any floating-point dtype, as the reference algorithms take them.

    Raises:
        TypeError: one is no tensor with strides, or has another dtype.
        ValueError: one has another shape, or is on another device than q.
    """
    q, v = inputs.q, inputs.v
    of_out, of_lse = result_shapes(q, v)
    single = compute_dtype(q.dtype)
    given = (("out", out, of_out, q.dtype), ("lse", lse, of_lse, single), ("do", do, of_out, q.dtype))
    for name, t, shape, dtype in (*given, ("dlse", dlse, of_lse, single)):
        if t is None and name == "dlse":
            continue
        check_strided(name, t)
        if any_float and not t.is_floating_point():
            raise TypeError(f"{name} has dtype {t.dtype}; it must be a floating-point one")
        if not any_float and t.dtype != dtype:
            raise TypeError(f"{name} has dtype {t.dtype}; it must be {dtype}, as q is {q.dtype}")
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be {shape}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q is on {q.device}; they must agree")


def check_indices(
    name: str, t: Any, shape: Callable[[], str], fits: Callable[[torch.Size], bool], q: torch.Tensor
) -> None:
    """Raise unless a tensor of indices is as kernels read it: int32, contiguous, on the device of q.

    ``shape`` gives the text of an error only: torch.compile makes a constant of a symbol that is formatted.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is {kind_of(t)}; it must be an int32 torch.Tensor of shape {shape()}")
    check_strided(name, t)
    if t.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {t.dtype}; it must be torch.int32")
    if not fits(t.shape):
        raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be {shape()}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device} and q is on {q.device}; they must agree")
    if not t.is_contiguous():
        raise ValueError(f"{name} has strides {t.stride()}; it must be contiguous")


def check_one_each(name: str, t: Any, batch: int, q: torch.Tensor) -> None:
    """:func:`check_indices` of one number for each sequence."""
    check_indices(name, t, lambda: f"(batch,), ({batch},)", lambda found: tuple(found) == (batch,), q)


def check_cu_seqlens(name: str, cu: Any, q: torch.Tensor) -> int:
    """Check that ``cu_seqlens`` is a tensor that kernels read, but not what it holds.

    Returns:
        The number of sequences.
    """
    shape = "(batch + 1,) with batch >= 1"
    check_indices(name, cu, lambda: shape, lambda found: len(found) == 1 and found[0] >= 2, q)
    return cu.numel() - 1


def check_longest(name: str, longest: Any) -> None:
    """Check the length of the longest sequence, of which :func:`whole_number` was taken; a symbol may be any.

    Raises:
        TypeError: it is no int; True counts as 1, as in FlashAttention-2.
        ValueError: it is negative.
    """
    if torch.compiler.is_dynamo_compiling() and isinstance(longest, int):  # so a symbol's type is called there
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        if not guard_or_false(longest < 0):
            return
    if not isinstance(longest, torch.SymInt):
        _check_count(name, longest, isinstance(longest, int))


def _check_count(name: str, value: Any, whole: bool) -> None:
    if not whole or value < 0:
        kind = ValueError if whole else TypeError
        raise kind(f"{name} is {value!r}; it must be a whole number of at least 0")


def check_varlen(inputs: Inputs, contents: bool = True) -> tuple[int, int, int]:
    """Check the lengths of packed sequences; with ``contents`` what they are, where they are on the CPU.

    Returns:
        The number of sequences, the largest number of queries of one, and the largest number of keys of one.

    Raises:
        TypeError: ``cu_seqlens_q`` or ``cu_seqlens_k`` is no int32 tensor.
        ValueError: one is missing, has another shape or device, or describes sequences that cannot be.
    """
    sizes = []
    for side in ("q", "k"):
        cu: torch.Tensor | None = getattr(inputs, f"cu_seqlens_{side}")
        longest: int | None = getattr(inputs, f"max_seqlen_{side}")
        if cu is None:
            raise ValueError(f"cu_seqlens_{side} is None; give both cu_seqlens_q and cu_seqlens_k, or neither")
        batch = check_cu_seqlens(f"cu_seqlens_{side}", cu, inputs.q)
        check_longest(f"max_seqlen_{side}", longest)
        if contents and cu.is_cpu and not holds_nothing(cu):
            _check_starts_of(inputs, side)
        sizes.append((batch, longest if isinstance(longest, torch.SymInt) else min(longest, MAX_SIZE)))
    if sizes[0][0] != sizes[1][0]:
        raise ValueError(f"cu_seqlens_q describes {sizes[0][0]} sequences and cu_seqlens_k {sizes[1][0]}")
    return sizes[0][0], sizes[0][1], sizes[1][1]


def _check_starts_of(inputs: Inputs, side: str) -> None:
    cu, longest, total = (getattr(inputs, name) for name in (f"cu_seqlens_{side}", f"max_seqlen_{side}", side))
    total = total.shape[0]
    if side == "k" and inputs.block_table is not None:
        total = 2**31 - 1  # the lengths of pages, which are checked with the table
    check_starts(f"cu_seqlens_{side}", cu, total, side, longest)


def check_starts(name: str, cu: torch.Tensor, total: int, of: str, longest: int | None = None) -> None:
    """Check the contents of ``cu_seqlens``, which this reads.

    Args:
        name: what the caller calls it.
        cu: int32 ``(b + 1,)``.
        total: the packed rows.
        of: the tensor that has them.
        longest: ``max_seqlen`` of this tensor; None where the sequences may have any length.

    Raises:
        ValueError: it describes sequences that cannot be.
    """
    lengths = cu.diff()
    right = int(cu[0]) == 0 and int(cu[-1]) <= total and not bool((lengths < 0).any())
    if not right or (longest is not None and int(lengths.max()) > longest):
        bound = "" if longest is None else f", with no sequence longer than max_seqlen_{of} {longest}"
        raise ValueError(
            f"{name} is {cu.tolist()}; it must start at 0, never fall, end by {total} (the total of {of}){bound}"
        )


def holds_nothing(t: torch.Tensor) -> bool:
    """Whether a tensor has no contents: it is fake, or on the meta device."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # where nothing imported it, nothing is
    return t.is_meta or (fake is not None and isinstance(t, fake.FakeTensor))


def check_cache(inputs: Inputs, batch: int, varlen: bool, contents: bool = True) -> int:
    """Check the fields of a key/value cache; with ``contents`` what they hold, where they are on the CPU.

    Returns:
        The number of rows that a sequence may have; it means nothing for packed keys without pages.

    Raises:
        TypeError: ``seqused_k``, ``leftpad_k``, ``batch_idx`` or ``block_table`` is no int32 tensor.
        ValueError: one has another shape or device, cannot be together with another, or points outside the cache.
    """
    q, k, table = inputs.q, inputs.k, inputs.block_table
    indices = _indices_of(inputs)
    for name, t in indices.items():
        if varlen:
            raise ValueError(f"{name} is given with cu_seqlens_k, which gives the lengths; only one of them may be")
        check_one_each(name, t, batch, q)
    if table is not None:
        if inputs.batch_idx is not None:
            raise ValueError("batch_idx is given with block_table, which says where sequences lie; give one of them")
        check_indices(
            "block_table",
            table,
            lambda: f"(batch, pages) with batch {batch} and at least one page",
            lambda found: len(found) == 2 and found[0] == batch and found[1],
            q,
        )
    capacity = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    if table is not None and type(capacity) is int and capacity > MAX_SIZE:
        raise ValueError(
            f"block_table has {table.shape[1]} pages of {k.shape[1]} rows for a sequence; together they may have up to "
            f"{MAX_SIZE} rows"
        )
    if contents and (indices or table is not None) and q.is_cpu and not holds_nothing(q):
        _check_cache_contents(inputs, indices, capacity, varlen)
    return capacity


def _indices_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """What is given of a cache besides its block table."""
    return {name: t for name in ("seqused_k", "leftpad_k", "batch_idx") if (t := getattr(inputs, name)) is not None}


def check_contents(inputs: Inputs) -> None:
    """Check the contents of lengths and tables on the CPU, for a call that is otherwise like one that was checked.

    Raises:
        ValueError: they describe sequences that cannot be, or point outside the cache.
    """
    varlen, indices = inputs.cu_seqlens_q is not None, _indices_of(inputs)
    if varlen:
        for side in ("q", "k"):
            _check_starts_of(inputs, side)
    if indices or inputs.block_table is not None:
        capacity = inputs.k.shape[1] * (1 if inputs.block_table is None else inputs.block_table.shape[1])
        _check_cache_contents(inputs, indices, capacity, varlen)


def _check_cache_contents(inputs: Inputs, indices: dict[str, torch.Tensor], capacity: int, varlen: bool) -> None:
    used, table = indices.get("seqused_k"), inputs.block_table
    if used is not None and not _within(used, capacity):
        raise ValueError(f"seqused_k is {used.tolist()}; it may be 0 to {capacity}, the rows of k")
    leftpad, most = indices.get("leftpad_k"), capacity if used is None else used
    if leftpad is not None and not _within(leftpad, most):
        bound = f"{capacity}, the rows of k" if used is None else f"seqused_k {used.tolist()}"
        raise ValueError(f"leftpad_k is {leftpad.tolist()}; it may be 0 to {bound}")
    where, rows = indices.get("batch_idx"), inputs.k.shape[0]
    if where is not None and not _within(where, rows - 1):
        raise ValueError(f"batch_idx is {where.tolist()}; it may be 0 to {rows - 1}, the batch axis of k")
    if table is None:
        return
    lengths = inputs.cu_seqlens_k.diff() if varlen else used
    if lengths is not None and not _within(lengths, capacity):
        raise ValueError(
            f"block_table has {table.shape[1]} pages of {inputs.k.shape[1]} rows for sequences of {lengths.tolist()}; "
            f"they must hold the longest of them"
        )
    lengths = table.new_full((len(table),), capacity) if lengths is None else lengths
    read = torch.arange(table.shape[1], device=table.device) * inputs.k.shape[1] < lengths[:, None]
    if not _within(table.masked_fill(~read, 0), rows - 1):
        raise ValueError(f"block_table is {table.tolist()}; a page in use may be 0 to {rows - 1}, the pages of k")


def _within(t: torch.Tensor, most: int | torch.Tensor) -> bool:
    return bool(((t >= 0) & (t <= most)).all())


def check_seed(inputs: Inputs, dropout_p: float) -> None:
    """Raise TypeError or ValueError for a dropout seed that is missing, or no int64 tensor (1,) on the device of q."""
    seed, shape = inputs.dropout_seed, "an int64 torch.Tensor of shape (1,)"
    if seed is None:
        if dropout_p:
            raise ValueError(f"dropout_seed is None and dropout_p is {dropout_p:g}; it must then be {shape}")
        return
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64:
        raise TypeError(f"dropout_seed is {kind_of(seed)}; it must be {shape}")
    if tuple(seed.shape) != (1,):
        raise ValueError(f"dropout_seed has shape {tuple(seed.shape)}; it must be {shape}")
    if seed.device != inputs.q.device:
        raise ValueError(f"dropout_seed is on {seed.device} and q is on {inputs.q.device}; they must agree")


def contiguous(t: Any) -> Any:
    """A tensor of indices as kernels read it; what is no such tensor as it is, for the checks to judge."""
    return t.contiguous() if isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested else t


def check_splits(num_splits: Any) -> None:
    """Raise TypeError or ValueError for what cannot be a number of splits."""
    _check_count("num_splits", num_splits, type(num_splits) is int)


def check_modifier(
    name: str,
    t: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    shapes: Iterable[tuple[str, ...]],
    sizes: Mapping[str, int],
    broadcast: bool = False,
) -> None:
    """Raise for a tensor that cannot modify scores.

    Args:
        name: what the caller calls it.
        t: whatever was given.
        device: of q.
        dtype: the one that it must have; None for any that attention is computed of.
        shapes: by the names of the axes, each that it may have.
        sizes: of the axes.
        broadcast: whether it need only broadcast to the shape.
    """
    if not isinstance(t, torch.Tensor) or not t.is_floating_point():
        raise TypeError(f"{name} is {kind_of(t)}; it must be a floating-point torch.Tensor")
    check_strided(name, t)
    check_dtype(name, t.dtype)
    if t.device != device:
        raise ValueError(f"{name} is on {t.device} and q is on {device}; they must be on one device")
    if dtype is not None and t.dtype != dtype:
        raise TypeError(f"{name} has dtype {t.dtype}; it must be {dtype}")
    shape = tuple(t.shape)
    possible = [tuple(sizes[axis] for axis in axes) for axes in shapes]
    if broadcast:
        (full,), (axes,) = possible, shapes
        if len(shape) > len(full) or not all(a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)):
            raise ValueError(f"{name} has shape {shape}; it must broadcast to ({', '.join(axes)}) {full}")
    elif shape not in possible:
        verb = "may" if len(possible) > 1 else "must"
        raise ValueError(f"{name} has shape {shape}; it {verb} be {' or '.join(map(str, possible))}")


def window_sides(window_size: tuple[int, int] | torch.Tensor, causal: bool) -> tuple[int, int]:
    """Left and right side of the window as a problem holds them: causal makes the right one 0.

    Raises:
        TypeError: it is of no numbers.
        ValueError: it has not two, or they are no sides of a window.
    """
    if isinstance(window_size, torch.Tensor):
        check_strided("window_size", window_size)
    try:
        if isinstance(window_size, torch.Tensor):
            left, right = map(operator.index, window_size.tolist())
        else:
            left, right = [_whole(side) for side in window_size]
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:  # the last: one that holds nothing
        kind = ValueError if isinstance(error, ValueError | OverflowError) else TypeError
        raise kind(f"window_size is {window_size!r}; it must be two whole numbers (left, right)") from None
    if min(left, right) < -1:
        raise ValueError(f"window_size is ({left}, {right}); each side must be at least 0, or -1 for unbounded")
    return min(left, FARTHEST), (0 if causal else min(right, FARTHEST))


def _whole(value: Any) -> int:
    """What equals a whole number as an int: a call that is like an earlier one is found by what equals its options.

    Raises:
        TypeError: it is no number.
        ValueError, OverflowError: it is none that is whole.
    """
    try:
        return operator.index(value)
    except TypeError:
        real = _real(value)
        if isinstance(real, str | bytes):  # int() would read one
            raise
        if int(real) != real:
            raise ValueError from None
        return int(real)


def _real(value: Any) -> Any:
    """A number without its imaginary part, which must be 0; a tensor, and what is no number, as it is."""
    if isinstance(value, torch.Tensor):
        return value
    if getattr(value, "imag", 0) != 0:
        raise TypeError
    return getattr(value, "real", value)


def whole_number(value: Any) -> Any:
    """A NumPy integer or an integer tensor without axes as an int (which waits for a GPU that holds it); all else as it
    is, for the checks to judge."""
    if value is None or type(value) is int or isinstance(value, torch.SymInt | float):
        return value  # torch.compile of torch 2.10 cannot ask None or a float for an index
    if isinstance(value, torch.Tensor):
        whole = value.dim() == 0 and value.dtype != torch.bool and not (value.is_floating_point() or value.is_complex())
        return value.item() if whole and not value.is_meta else value
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def check_no_gradient(name: str, value: Any, wanted: str = "detach it") -> None:
    """Raise TypeError for a tensor that requires a gradient where there is none: it would be dropped silently."""
    if isinstance(value, torch.Tensor) and value.requires_grad and records_gradients():
        raise TypeError(f"{name} is a tensor that requires gradients, and gets none; {wanted}")


def check_number(name: str, value: float, low: float = -math.inf, below: float = math.inf, least: float = 0.0) -> float:
    """A finite number of at least ``low`` and less than ``below``, as a float; above 0 it is at least ``least``.

    Raises:
        TypeError: it is no number, or a tensor whose gradient would be lost.
        ValueError: it is not finite or out of range.
    """
    check_no_gradient(name, value, "it must be a number")
    try:
        if isinstance(value, str | bytes):  # float() would read one
            raise TypeError
        number = float(_real(value))
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # a tensor of several, or of a complex number
        raise TypeError(f"{name} is {value!r}; it must be a number") from None
    if not abs(number) <= LARGEST_F32 or number < low or number >= below or 0 < number < least:
        beyond = LARGEST_F32 < abs(number) < math.inf
        bounds = "finite in f32, at most 3.4e38" if beyond else "finite"
        bounds += f", at least {low:g}" if low > -math.inf else ""
        bounds += f" and below {below:g}" if below < math.inf else f", and {least:.2g} if above 0" if least else ""
        raise ValueError(f"{name} is {value!r}; it must be {bounds}")
    return number
