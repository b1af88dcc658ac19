"""Named masks for flex_attention. A mask whose rows are a few column intervals also gives these intervals.

Indices are those of one sequence: query i and key i are the same token. A mask is called as torch calls a ``mask_mod``,
so torch's own FlexAttention takes it as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

import torch

from flashlane.core.validate import kind_of
from flashlane.flex.intervals import Intervals
from flashlane.flex.neighbourhoods import Neighbourhood
from flashlane.flex.packed import Documents
from flashlane.flex.windows import FARTHEST, Window

MOST_INTERVALS = 4
"""The largest number of intervals of a row; a mask that needs more is treated as any other function."""

Sides = list[tuple[torch.Tensor, torch.Tensor]]
Bounds = Callable[[torch.Tensor, int], Sides]
"""From query indices ``(queries,)`` and the number of keys to the starts and ends of each interval, of that shape or
``(batch, queries)``; or from key indices and the number of queries."""


@dataclass(frozen=True)
class Mask:
    """A mask function with a name; :func:`flashlane.create_block_mask` and torch's take it."""

    name: str
    function: Callable[..., Any]
    bounds: Bounds | None = None
    """The rows' intervals, ascending; None where rows are not a few intervals."""
    window: Window | None = None
    """The window, where the mask is nothing else."""
    documents: Documents | None = None
    """The packed documents, where a token sees its own document, or that up to itself, and nothing else."""
    neighbourhood: Neighbourhood | None = None
    """The neighbourhood, where the mask is one."""
    bounds_of_keys: bool = False
    """Whether ``bounds`` gives the intervals of queries that see each key."""
    tokens: int = 0
    """The number of queries and of keys for which ``bounds`` holds; 0: any."""
    reads_tokens: bool = False
    """Whether the function reads something of each of these tokens, so that there may not be more."""
    batch: int | None = None
    """The number of batch rows of which the function reads something of each; None: any."""
    made_by: tuple[str, tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    """The function of this module that made it, and its arguments, of which a copy in another process is made.

    Where the function keeps a copy of an argument, this is the copy: the caller may write the argument afterwards."""

    def __reduce__(self) -> Any:
        if self.made_by is None:
            return super().__reduce__()
        return _made, self.made_by

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(b, h, q_idx, kv_idx)

    def has_intervals(self, queries: int, keys: int) -> bool:
        """Whether the rows, or the columns, of so many queries and keys are a few intervals."""
        if self.bounds is None or not queries or not keys:
            return False
        if self.tokens and (queries, keys) != (self.tokens, self.tokens):
            return False
        return self.neighbourhood is None or self.neighbourhood.holds_for(queries, keys)

    def intervals(self, queries: int, keys: int, device: torch.device) -> Intervals | None:
        """The intervals of the rows, or of the columns, on a device; None where these are not a few intervals.

        Raises:
            ValueError: there are more queries or keys than the mask knows of.
        """
        if self.reads_tokens and max(queries, keys) > self.tokens:
            raise ValueError(
                f"Q_LEN is {queries} and KV_LEN {keys}; the mask {self.name} is of {self.tokens} tokens, and no more"
            )
        if not self.has_intervals(queries, keys):
            return None
        length, other = (keys, queries) if self.bounds_of_keys else (queries, keys)
        sides = self.bounds(torch.arange(length, dtype=torch.int32, device=device), other)
        flat = torch.broadcast_tensors(*(pair[i] for i in (0, 1) for pair in sides))
        # Of each batch row the intervals; starts and ends are two halves of one tensor, so that one operation makes it.
        joined = torch.stack([t.reshape(-1, length) for t in flat]).to(torch.int32).view(2, len(sides), -1, length)
        starts, ends = (t.transpose(0, 1).unsqueeze(1).contiguous() for t in joined.unbind())
        return Intervals(starts, ends, of_keys=self.bounds_of_keys)


P = ParamSpec("P")


def _named(make: Callable[P, Mask]) -> Callable[P, Mask]:
    """A function whose masks can be pickled, which functions that close over values cannot be."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Mask:
        with torch.inference_mode(False):  # autograd keeps no tensor that is made in that mode
            mask = make(*args, **kwargs)
        return mask if mask.made_by is not None else replace(mask, made_by=(make.__name__, args, kwargs))

    return made


def _reading(make: Callable[P, Mask]) -> Callable[P, Mask]:
    """A function that reads elements of a tensor into Python: torch.compile breaks the graph at the whole of it."""
    apart = torch._dynamo.disable(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Mask:
        return (apart if torch.compiler.is_dynamo_compiling() else make)(*args, **kwargs)

    return made


def _made(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mask:
    """The mask that a function of this module makes."""
    return globals()[name](*args, **kwargs)


@_named
def causal(offset: int = 0) -> Mask:
    """Key j is visible to query i where ``j <= i + offset``.

    Raises:
        ValueError: ``offset`` is not a whole number.
    """
    _check(least=None, offset=offset)
    offset = max(-FARTHEST, min(offset, FARTHEST))

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q + offset >= kv

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        return [(torch.zeros_like(q), (q + offset + 1).clamp(0, keys))]

    return Mask("causal", visible, bounds, (-1, offset) if offset >= 0 else None)


@_named
def sliding_window(left: int, right: int = 0, first: int = 0) -> Mask:
    """Key j is visible to query i where ``i - left <= j <= i + right``, or where ``j < first`` and ``j <= i + right``.

    Raises:
        ValueError: a number is negative or not an integer.
    """
    _check(left=left, right=right, first=first)
    left, right, first = (min(number, FARTHEST) for number in (left, right, first))

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv <= left) & (kv - q <= right)

    def visible_with_first(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q - kv <= left) | (kv < first)) & (kv - q <= right)

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        end = (q + right + 1).clamp(0, keys)
        window = [((q - left).clamp_min(0), end)]
        return [(torch.zeros_like(q), end.clamp_max(first)), *window] if first else window

    return Mask("sliding-window", visible_with_first if first else visible, bounds, None if first else (left, right))


def _documents_of(offsets: torch.Tensor, causal: bool = False) -> tuple[Documents, torch.Tensor]:
    """Packed documents, and the document of each token, i32."""
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"offsets is {kind_of(offsets)}; it must be a torch.Tensor of int32 or int64 (documents + 1)")
    if offsets.ndim != 1 or offsets.numel() < 2 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"offsets is {offsets.dtype} {tuple(offsets.shape)}; it must be int32 or int64 (documents + 1), from 0 to "
            f"the length"
        )
    ids = torch.arange(offsets.numel() - 1, dtype=torch.int32, device=offsets.device)
    found = Documents.of(offsets, causal)
    return found, torch.repeat_interleave(ids, found.offsets.diff(), output_size=found.tokens)


@_reading
@_named
def documents(offsets: torch.Tensor, causal: bool = False) -> Mask:
    """Packed documents: a token sees its own document, with ``causal`` up to itself.

    Args:
        offsets: the documents' first tokens and the length, as ``cu_seqlens``: int32 or int64 ``(documents + 1,)``, on
            the device of the call.
        causal: hide later tokens.

    Raises:
        TypeError: ``offsets`` is no tensor.
        ValueError: ``offsets`` has another shape or type, does not begin with 0, or descends.
    """
    document_set, ids = _documents_of(offsets, causal)
    offsets = document_set.offsets

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ids[q] == ids[kv]

    def visible_before(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (ids[q] == ids[kv]) & (q >= kv)

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        own = ids.index_select(0, q)
        return [(offsets.index_select(0, own), q + 1 if causal else offsets[1:].index_select(0, own))]

    name, function = ("causal-documents", visible_before) if causal else ("documents", visible)
    tokens = document_set.tokens
    made_by = "documents", (offsets, causal), dict[str, Any]()
    return Mask(name, function, bounds, documents=document_set, tokens=tokens, reads_tokens=True, made_by=made_by)


@_reading
@_named
def block_causal_documents(offsets: torch.Tensor, block: int) -> Mask:
    """Packed documents of blocks of tokens: a token sees its own block and all earlier ones of its document.

    Raises:
        TypeError, ValueError: ``offsets`` is none of :func:`documents`, or ``block`` is not a whole number from 1.
    """
    _check(least=1, block=block)
    found, ids = _documents_of(offsets)
    offsets = found.offsets
    places = torch.arange(len(ids), dtype=torch.int32, device=ids.device) - offsets[ids.long()]

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (ids[q] == ids[kv]) & (places[q] // block >= places[kv] // block)

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        own = ids.index_select(0, q)
        start = offsets.index_select(0, own)
        end = start + ((q - start) // block + 1) * block
        return [(start, end.minimum(offsets[1:].index_select(0, own)))]

    made_by = "block_causal_documents", (offsets, block), dict[str, Any]()
    return Mask("block-causal-documents", visible, bounds, tokens=found.tokens, reads_tokens=True, made_by=made_by)


@_named
def prefix_lm(prefix: int | torch.Tensor) -> Mask:
    """Every token sees the first ``prefix`` keys (a number, or integers ``(B,)``) and all tokens up to itself.

    Block lists of a tensor have a batch row for each of its numbers.

    Raises:
        ValueError: ``prefix`` is a negative number, or a tensor of another shape or type.
    """
    if isinstance(prefix, torch.Tensor):
        if prefix.ndim != 1 or prefix.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"prefix is {prefix.dtype} {tuple(prefix.shape)}; it may be int32 or int64 (batch,)")

        def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (kv < prefix[b]) | (q >= kv)

    else:
        _check(prefix=prefix)
        prefix = min(prefix, FARTHEST)

        def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (kv < prefix) | (q >= kv)

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        if isinstance(prefix, torch.Tensor):
            end = (q + 1).maximum(prefix.to(torch.int32).unsqueeze(1))
        else:
            end = (q + 1).clamp_min(prefix)
        return [(torch.zeros_like(end), end.clamp_max(keys))]

    return Mask("prefix-lm", visible, bounds, batch=len(prefix) if isinstance(prefix, torch.Tensor) else None)


@_named
def chunks(size: int, causal: bool = False) -> Mask:
    """A token sees its own chunk of ``size`` tokens, with ``causal`` up to itself.

    Raises:
        ValueError: ``size`` is not a whole number from 1.
    """
    _check(least=1, size=size)
    size = min(size, FARTHEST)

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q // size == kv // size

    def visible_before(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // size == kv // size) & (q >= kv)

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        start = q // size * size
        return [(start, (q + 1 if causal else start + size).clamp(0, keys))]

    return Mask("causal-chunks" if causal else "chunks", visible_before if causal else visible, bounds)


@_named
def prefix_tree(parents: Sequence[int], lengths: Sequence[int], device: Any = "cpu") -> Mask:
    """Sequences that share prefixes, packed as the segments of a tree in depth-first order.

    A token sees the tokens of its own segment up to itself, and all tokens of the segments above it.

    Args:
        parents: the parent of each segment, -1 for a root; a parent comes before its children.
        lengths: tokens of each segment.
        device: the device of the call.

    Raises:
        TypeError: parents or lengths are no list of whole numbers.
        ValueError: the segments are not a tree in depth-first order, or there are not as many lengths as parents.
    """
    for name, given in (("parents", parents), ("lengths", lengths)):
        if not isinstance(given, Sequence) or any(type(each) is not int for each in given):
            raise TypeError(f"{name} is {given!r}; it must be a list of whole numbers")
    if any(each < 0 for each in lengths):
        raise ValueError(f"lengths is {lengths}; each may be a whole number from 0")
    n = len(parents)
    if len(lengths) != n or any(not -1 <= p < i for i, p in enumerate(parents)):
        raise ValueError(f"parents is {parents} and lengths {lengths}; a parent is -1 or an earlier segment's number")
    last = list(range(1, n + 1))
    for i in reversed(range(n)):
        if parents[i] >= 0:
            last[parents[i]] = max(last[parents[i]], last[i])
    for i, p in enumerate(parents):
        above = i - 1
        while above >= 0 and above != p:
            above = parents[above]
        if above != p:
            raise ValueError(f"parents is {parents}; segment {i} is not in depth-first order")
    offsets = [0, *itertools.accumulate(lengths)]
    # In depth-first order, those who see a token are those from it to the last one of the segments below its own.
    stops = [offsets[end] for end, length in zip(last, lengths, strict=True) for _ in range(length)]
    stop = torch.tensor(stops, dtype=torch.int32, device=device)

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (q < stop[kv])

    def bounds(kv: torch.Tensor, queries: int) -> Sides:
        return [(kv, stop.clamp_max(queries))]

    made_by = "prefix_tree", (tuple(parents), tuple(lengths), device), dict[str, Any]()
    tokens = len(stops)
    return Mask("prefix-tree", visible, bounds, bounds_of_keys=True, tokens=tokens, reads_tokens=True, made_by=made_by)


@_named
def block_diffusion(length: int, block: int) -> Mask:
    """Training of block diffusion models: ``length`` noised tokens, then the same tokens clean.

    A noised token sees its own noised block and the clean blocks before it; a clean token sees its own clean block and
    those before it.

    Raises:
        ValueError: ``length`` or ``block`` is not a whole number from 1, or ``length`` is above 2²⁹.
    """
    _check(least=1, length=length, block=block)
    block = min(block, FARTHEST)
    if length > FARTHEST // 2:
        raise ValueError(f"length is {length}; it may be at most {FARTHEST // 2}")

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_clean, kv_clean = q >= length, kv >= length
        q_block = torch.where(q_clean, q - length, q) // block
        kv_block = torch.where(kv_clean, kv - length, kv) // block
        own = (q_block == kv_block) & (q_clean == kv_clean)
        before = kv_clean & ((q_block > kv_block) | (q_clean & (q_block >= kv_block)))
        return own | before

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        clean = q >= length
        at = torch.where(clean, q - length, q) // block
        noised = torch.where(clean, 0, at * block), torch.where(clean, 0, ((at + 1) * block).clamp_max(length))
        end = length + torch.where(clean, at + 1, at) * block
        return [noised, (torch.full_like(q, length), end.clamp_max(2 * length))]

    return Mask("block-diffusion", visible, bounds, tokens=2 * length)


@_named
def neighbourhood(shape: Sequence[int], window: Sequence[int]) -> Mask:
    """NATTEN's neighbourhood attention in one to three dimensions, tokens in row-major order.

    Along each axis a token sees ``window`` positions around its own, moved inside where they would leave the grid.

    Args:
        shape: tokens of the grid along each axis.
        window: positions that are seen along each axis, at most the axis's length.

    Raises:
        TypeError: ``shape`` or ``window`` is no list of whole numbers.
        ValueError: there are not 1 to 3 axes, or a window is not from 1 to its axis's length.
    """
    for name, given in (("shape", shape), ("window", window)):
        if not isinstance(given, Sequence) or any(type(each) is not int for each in given):
            raise TypeError(f"{name} is {given!r}; it must be one to three whole numbers, one for each axis")
    shape, window = tuple(shape), tuple(window)
    if not 1 <= len(shape) <= 3 or len(shape) != len(window) or any(not 1 <= w <= n for n, w in zip(shape, window)):
        raise ValueError(f"shape is {shape} and window {window}; both have 1 to 3 numbers, and no window is longer")
    geometry = Neighbourhood.of(shape, window)

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        visible_so_far = None
        for start, at, (n, w) in zip(geometry.starts(q), geometry.places(kv), geometry.axes, strict=True):
            if w == n:
                continue
            inside = (at - start >= 0) & (at - start < w)
            visible_so_far = inside if visible_so_far is None else visible_so_far & inside
        return q >= 0 if visible_so_far is None else visible_so_far

    def bounds(q: torch.Tensor, keys: int) -> Sides:
        return geometry.intervals(q)

    few = geometry.window <= MOST_INTERVALS
    made_by = "neighbourhood", (shape, window), dict[str, Any]()
    name = f"neighbourhood-{len(shape)}d"
    return Mask(name, visible, bounds if few else None, neighbourhood=geometry, made_by=made_by)


def _check(least: int | None = 0, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or (least is not None and number < least):
            raise ValueError(f"{name} is {number!r}; it may be a whole number{f' from {least}' * (least is not None)}")
