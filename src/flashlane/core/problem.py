"""A call's tensors (:class:`Inputs`) and options (:class:`CallOptions`), and the frozen AttentionProblem of both.

Every function of the public API builds these and calls :meth:`AttentionProblem.from_inputs`. Every kernel, the
dispatcher and the bench read the resulting value and never look at a caller's arguments again.

:class:`Inputs` and :class:`CallOptions` are the only list of a call's arguments. The validator, the torch operators,
autograd, the rules for ``vmap`` and the caches' keys are derived from them.

Tensors are named and shaped as FlashAttention-2 does: q ``(b, sq, h, d)``, k ``(b, sk, hk, d)``,
v ``(b, sk, hk, dv)``; packed sequences of different lengths are ``(total, h, d)`` with ``cu_seqlens``.
"""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, get_type_hints

import torch

from flashlane.core.arch import DTYPE_NAMES, DTYPES, arch_of, records_gradients
from flashlane.core.validate import (
    FARTHEST,
    MAX_HEAD_DIM,
    SMALLEST_F32,
    VECTOR_BYTES,
    check_cache,
    check_flag,
    check_modifier,
    check_no_gradient,
    check_number,
    check_seed,
    check_sizes,
    check_splits,
    check_tensors,
    check_varlen,
    rows_aligned,
    window_sides,
)
from flashlane.core.work import visible_pairs, within_rows

__all__ = [
    "ALIGNMENTS", "DTYPES", "DTYPE_NAMES", "FEATURES", "MAX_HEAD_DIM", "MAX_SPLITS", "VECTOR_BYTES",
    "Alignment", "AttentionProblem", "CallOptions", "Effect", "Gradients", "Inputs", "arch_of",
]  # fmt: skip

Alignment = Literal["bottom-right", "top-left"]
Effect = Literal["factor", "distance", "pairs", "logit"]
"""What a tensor does to scores: it multiplies those of a head, adds a slope times a distance, adds a number to each
pair, or is one more logit of each row, which has a probability but no value."""
ALIGNMENTS: tuple[Alignment, ...] = ("bottom-right", "top-left")
MAX_SPLITS = 128
"""Most splits of the keys that ``num_splits`` may ask for; a larger number counts as this one."""


class Argument(NamedTuple):
    """What the library must know of an argument of :class:`Inputs`."""

    differentiable: bool = False
    flag: str | None = None
    """The field of :class:`AttentionProblem` that says whether it is given."""
    shapes: tuple[tuple[str, ...], ...] = ()
    """The shapes that a score modifier may have, by the names of their axes."""
    broadcast: bool = False
    """Whether it need only broadcast to its shape."""
    effect: Effect | None = None
    """What a score modifier does. Code that serves every modifier asks for this and not for a name."""
    dtype: torch.dtype | None = None
    """The dtype that a score modifier must have; None for any that attention is computed of."""
    indices: bool = False
    """Whether it holds lengths or indices, whose contents are checked where that does not wait for a GPU."""
    cache: bool = False
    """Whether it describes a key/value cache; such a call has no gradients."""
    batched: int = 0
    """How many axes it has when its first one is the batch axis; 0: it has none that ``vmap`` could extend."""
    shared: bool = False
    """Whether it is the same for all batch elements, so that ``vmap`` may extend the batch around it."""


def argument(**facts: Any) -> Any:
    """A field of :class:`Inputs` that is None unless given; the keywords are those of :class:`Argument`."""
    return field(default=None, metadata={"argument": Argument(**facts)})


def operand() -> Any:
    """q, k or v."""
    return field(metadata={"argument": Argument(differentiable=True, batched=4)})


@dataclass(slots=True, eq=False)
class Inputs:
    """The tensors of one attention call; everything else about it is in :class:`AttentionProblem`.

    Nothing may change one: it is not frozen only because building a frozen one costs each call 1.5 µs.

    Shapes: ``alibi_slopes`` f32 ``(h,)`` or ``(b, h)``; ``bias`` broadcastable to ``(b, h, sq, sk)``, added to the
    scaled scores (−inf hides a key); ``sinks`` ``(h,)``, one extra logit per head that takes probability and gives
    no value; ``logit_scale`` f32 ``(h,)``, a factor of the head's scores before they are capped;
    ``cu_seqlens_*`` int32 ``(b + 1,)`` on the same device, with ``max_seqlen_*`` their longest sequence.

    A key/value cache: ``seqused_k`` int32 ``(b,)``, rows of k and v in use (all by default); ``leftpad_k`` int32
    ``(b,)``, the first of them; ``batch_idx`` int32 ``(b,)``, which row of the batch axis of k and v a sequence reads;
    ``block_table`` int32 ``(b, pages)``: k and v are ``(all_pages, page_size, hk, d)`` and row j of sequence i lies in
    page ``block_table[i, j // page_size]``. The keys of sequence i are its rows ``leftpad_k[i]`` to ``seqused_k[i]``:
    key 0 is the first of them, and masks align by their number ``seqused_k[i] - leftpad_k[i]``. With ``cu_seqlens_k``,
    which says the lengths itself, of these only ``block_table`` may be given.

    ``dropout_seed``: int64 ``(1,)`` on the same device, the key of the counter-based mask
    (:mod:`flashlane.reference.masks`).
    """

    q: torch.Tensor = operand()
    k: torch.Tensor = operand()
    v: torch.Tensor = operand()
    alibi_slopes: torch.Tensor | None = argument(
        flag="alibi", effect="distance", shapes=(("heads",), ("batch", "heads")), dtype=torch.float32, batched=2
    )
    bias: torch.Tensor | None = argument(
        flag="bias",
        effect="pairs",
        shapes=(("batch", "heads", "seqlen_q", "seqlen_k"),),
        broadcast=True,
        differentiable=True,
        batched=4,
    )
    sinks: torch.Tensor | None = argument(
        flag="sinks", effect="logit", shapes=(("heads",),), differentiable=True, shared=True
    )
    logit_scale: torch.Tensor | None = argument(
        flag="logit_scale", effect="factor", shapes=(("heads",),), dtype=torch.float32, differentiable=True, shared=True
    )
    cu_seqlens_q: torch.Tensor | None = argument(indices=True)
    cu_seqlens_k: torch.Tensor | None = argument(indices=True)
    seqused_k: torch.Tensor | None = argument(flag="seqused_k", indices=True, cache=True)
    leftpad_k: torch.Tensor | None = argument(flag="leftpad_k", indices=True, cache=True)
    batch_idx: torch.Tensor | None = argument(flag="batch_idx", indices=True, cache=True)
    block_table: torch.Tensor | None = argument(indices=True, cache=True)
    dropout_seed: torch.Tensor | None = argument()
    max_seqlen_q: int | None = argument(shared=True)
    max_seqlen_k: int | None = argument(shared=True)

    @property
    def alone(self) -> bool:
        """Whether no tensors but q, k and v are given."""
        return _alone(self)


class CallOptions(NamedTuple):
    """The options of a call: all of its arguments but tensors. The defaults are those of every function."""

    scale: float | None = None
    """Factor of the scores; None: ``d ** -0.5``."""
    causal: bool = False
    """Sets the window's right side to 0."""
    alignment: Alignment = "bottom-right"
    window_size: tuple[int, int] | torch.Tensor = (-1, -1)
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    num_splits: int = 0


_HINTS = get_type_hints(CallOptions)
NUMBERS = {name: hint is not float for name, hint in _HINTS.items() if hint in (float, float | None)}
"""The options that are numbers, and whether each may be None."""
FLAGS = tuple(name for name, hint in _HINTS.items() if hint is bool)
"""The options that are yes or no."""

ARGUMENTS: dict[str, Argument] = {each.name: each.metadata["argument"] for each in fields(Inputs)}
"""The fields of :class:`Inputs`."""
TENSORS = tuple(name for name, hint in get_type_hints(Inputs).items() if hint in (torch.Tensor, torch.Tensor | None))
"""The fields of :class:`Inputs` that are tensors, q, k and v first."""
MODIFIERS = tuple(name for name, each in ARGUMENTS.items() if each.shapes)
"""Tensors that modify scores."""
WITHOUT_GRADIENT = tuple(name for name in MODIFIERS if not ARGUMENTS[name].differentiable)
"""Those of them that may not require a gradient."""
DIFFERENTIABLE = tuple(name for name, each in ARGUMENTS.items() if each.differentiable)
Gradients = namedtuple("Gradients", DIFFERENTIABLE, defaults=[None] * len(DIFFERENTIABLE[3:]))
"""Gradients in the shapes and dtypes of their inputs; None where there is none, or none was asked for."""
CACHE_FIELDS = tuple(name for name, each in ARGUMENTS.items() if each.cache)
"""What describes a key/value cache; such a call has no gradients."""
_OTHERS = TENSORS[3:]
others_of = operator.attrgetter(*_OTHERS)
"""The tensors of :class:`Inputs` after q, k and v."""
_alone = eval("lambda inputs: " + " is ".join(f"inputs.{name}" for name in _OTHERS) + " is None")
"""A chain of comparisons, which ends at the first tensor: a loop over the names takes four times as long."""

Group = Literal["score", "bias", "dropout", "varlen", "cache", "paged"]


def feature(
    group: Group, default: Any, forms: tuple[Any, ...] = (), known_as: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """A field of :class:`AttentionProblem` that a kernel may be unable to honour when it differs from its default.

    :mod:`flashlane.kernels.features` reads the groups, so that a new field of a group touches no kernel by name.
    A modifier without a tensor has ``forms``, numbers that it is tested with, and ``known_as``, its names in other
    libraries (:mod:`flashlane.core.modifiers`).
    """
    return field(default=default, metadata={"feature": group, "forms": forms, "known_as": known_as})


@dataclass(frozen=True)
class AttentionProblem:
    """An attention problem: sizes, element type, mask and score modifiers, where it runs. Hashable; holds no tensor.

    Key j is visible to query i iff ``i + shift - window_left <= j <= i + shift + window_right`` (−1: unbounded),
    where ``shift`` is ``sk - sq`` for bottom-right alignment and 0 for top-left. Causal is ``window_right == 0``.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    scale: float
    window_left: int = -1
    window_right: int = -1
    alignment: Alignment = "bottom-right"
    softcap: float = feature("score", 0.0, forms=(1.5, 20.0), known_as={"flashinfer": "logits_soft_cap"})
    dropout_p: float = feature("dropout", 0.0)
    alibi: bool = feature("score", False)
    bias: bool = feature("bias", False)
    sinks: bool = feature("score", False)
    logit_scale: bool = feature("score", False)
    varlen: bool = feature("varlen", False)
    seqused_k: bool = feature("cache", False)
    leftpad_k: bool = feature("cache", False)
    batch_idx: bool = feature("cache", False)
    page_size: int = feature("paged", 0)
    """Rows of a page of a paged key/value cache (``block_table`` is given), or 0; ``seqlen_k`` is then its capacity."""
    num_splits: int = 0
    """Splits of the keys of a row, which are combined at the end: at most so many, or as many as the kernel
    chooses (0). With it, the results of a sequence do not depend on the other ones: see :attr:`chosen_for`."""
    deterministic: bool = False
    needs_grad: bool = False
    arch: str | None = None
    """The GPU's architecture as the compiler names it ("sm_90a"), or None on the CPU."""
    aligned: bool = True
    """Whether every row of q, k, v starts on 16 bytes and is contiguous (128-bit loads are possible)."""
    strides: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __hash__(self) -> int:
        """Kept once it is known: a call looks its problem up in several tables."""
        kept = self.__dict__.get("_hash")
        if kept is None:
            values = tuple(getattr(self, name) for name in _COMPARED)
            kept = self.__dict__["_hash"] = hash(values)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process may compute otherwise."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def causal(self) -> bool:
        """No key after the query's own position is visible."""
        return self.window_right == 0

    @property
    def shift(self) -> int:
        """Offset between a query's index and the key index it is aligned with."""
        return self.shift_of(self.seqlen_q, self.seqlen_k)

    def shift_of(self, queries: int, keys: int) -> int:
        """:attr:`shift` of a packed sequence of so many queries and keys."""
        return keys - queries if self.alignment == "bottom-right" else 0

    @property
    def paged(self) -> bool:
        """Whether k and v are the pages of a cache."""
        return self.page_size > 0

    def pages_hold_whole(self, rows: int) -> bool:
        """Whether the rows of a page are a multiple of so many; true without pages."""
        return self.page_size % rows == 0

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def rows_of_kv_head(self) -> int:
        """Query rows of a sequence that read the same keys: its queries times the heads of a group."""
        return self.seqlen_q * self.group

    @property
    def has_right_only(self) -> bool:
        """Only the right side of the window is bounded, as under a causal mask: a head's tiles are of unlike length."""
        return self.window_right >= 0 and self.window_left < 0

    @property
    def chosen_for(self) -> AttentionProblem:
        """The problem that kernels and tiles are chosen for: this one, or with ``num_splits`` one sequence of it.

        The choice then does not depend on the batch.
        """
        return replace(self, batch=1) if self.num_splits else self

    @property
    def with_hiding_sides(self) -> AttentionProblem:
        """The same problem with only the sides of its window that hide a key from a query; the others are −1.

        Of packed sequences it is the longest that decides: a window of 4096 hides nothing where all have 4000 keys.
        """
        before, after = self.seqlen_k, self.seqlen_q  # more than a query may have of keys before it and after it
        if self.alignment == "top-left":
            before, after = after, before
        left, right = self.window_left, self.window_right
        sides = -1 if left >= before - 1 else left, -1 if right >= after - 1 else right
        return self if sides == (left, right) else replace(self, window_left=sides[0], window_right=sides[1])

    def window_in_reach(self, keep_bounded: bool = False) -> tuple[int, int]:
        """Both sides of the window as kernels take them: one that reaches past every key may not fit their integers.

        Such a side is −1, or with ``keep_bounded``, for a kernel that is compiled with that side, all rows and keys.
        """
        reach = self.seqlen_q + self.seqlen_k
        if not keep_bounded and reach + max(self.seqlen_q, self.seqlen_k) > FARTHEST:
            # Kernels add a side to the number of a key: one that hides no key must not go beyond 32 bits.
            hiding = self.with_hiding_sides
            return hiding.window_left, hiding.window_right
        left, right = (min(side, reach) for side in (self.window_left, self.window_right))
        return (left, right) if keep_bounded else (left if left < reach else -1, right if right < reach else -1)

    def kv_splits(self, blocks: int) -> int:
        """How many splits of the keys ``num_splits`` asks for, of at most one for each of so many blocks of keys.

        A window may begin within one more block.
        """
        return max(1, min(self.num_splits, MAX_SPLITS, blocks + (self.window_left >= 0)))

    def visible_keys(self, row: int) -> range:
        """Keys that query ``row`` may see (of one sequence; not for varlen)."""
        low = 0 if self.window_left < 0 else max(0, row + self.shift - self.window_left)
        high = self.seqlen_k if self.window_right < 0 else min(self.seqlen_k, row + self.shift + self.window_right + 1)
        return range(low, max(low, high))

    def visible_pairs(self) -> int:
        """Visible (query, key) pairs of one head of one sequence, counted exactly."""
        return visible_pairs(self.seqlen_q, self.seqlen_k, self.window_left, self.window_right, self.shift)

    def on(self, arch: str | None) -> AttentionProblem:
        """The same problem on another architecture (or, with None, on the CPU)."""
        return replace(self, arch=arch)

    def describe(self) -> str:
        """One line for messages and table titles, such as ``B1 H8 N8192 D64 f16 causal``."""
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        length = f"N{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"N{self.seqlen_q}x{self.seqlen_k}"
        dim = f"D{self.head_dim}" if self.head_dim == self.head_dim_v else f"D{self.head_dim}/{self.head_dim_v}"
        words = [f"B{self.batch}", heads, length, dim, self.dtype_name]
        if self.causal:
            words.append("causal" if self.alignment == "bottom-right" else "causal(top-left)")
        if self.window_left >= 0 or self.window_right > 0:
            words.append(f"window({self.window_left},{self.window_right})")
        features = {name: getattr(self, name) for name in (*FEATURES, "deterministic")}
        words += [name for name, value in features.items() if value is True]
        if features.pop("page_size"):
            words.append(f"paged({self.page_size})")
        numbers = {name.removesuffix("_p"): value for name, value in features.items() if type(value) is not bool}
        words += [f"{name} {value:g}" for name, value in numbers.items() if value]
        if self.num_splits:
            words.append(f"num_splits {self.num_splits}")
        return " ".join(words)

    @classmethod
    def from_inputs(cls, inputs: Inputs, options: CallOptions | None = None, **keywords: Any) -> AttentionProblem:
        """Check a call, and return its problem.

        Args:
            inputs: the tensors.
            options: everything else; None where it is given by keywords, those of :class:`CallOptions`.
            keywords: those of :class:`CallOptions`, in its place.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: a shape, device or number is not possible; the message names the argument, what it was and
                what it may be.
        """
        options = CallOptions(**keywords) if options is None else options
        facts = facts_of(inputs, options)
        found = problem_of_facts(facts)
        if found is None:
            found = cls._checked(inputs, options)
            if facts is not None:
                _remember(facts, found)
        return found

    @classmethod
    def _checked(cls, inputs: Inputs, options: CallOptions) -> AttentionProblem:
        q, k, v = inputs.q, inputs.k, inputs.v
        return cls(
            **check_call(inputs, options),
            **{spec.flag: getattr(inputs, name) is not None for name, spec in ARGUMENTS.items() if spec.flag},
            kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            alignment=options.alignment,
            page_size=0 if inputs.block_table is None else k.shape[1],
            num_splits=options.num_splits,
            arch=arch_of(q.device),
            aligned=all(rows_aligned(t) for t in (q, k, v)),
            strides=tuple(tuple(t.stride()) for t in (q, k, v)),
        )

    @property
    def options(self) -> CallOptions:
        """Arguments that give this problem again with the same tensors."""
        same = {name: getattr(self, name) for name in _SHARED_OPTIONS}
        return CallOptions(**same, window_size=(self.window_left, self.window_right))


def check_modifiers(given: Any, names: Iterable[str], device: torch.device, sizes: Mapping[str, int]) -> None:
    """Check tensors that modify scores by what :class:`Inputs` declares of them.

    Args:
        given: what has the tensors, or None, under their names.
        names: of some of :data:`MODIFIERS`.
        device: of q.
        sizes: of the axes that their shapes name.

    Raises:
        TypeError: one is no tensor, has another dtype, or requires a gradient that there is not.
        ValueError: one has another shape or device.
    """
    for name in names:
        if (modifier := getattr(given, name)) is not None:
            spec = ARGUMENTS[name]
            if not spec.differentiable:
                check_no_gradient(name, modifier)
            check_modifier(name, modifier, device, spec.dtype, spec.shapes, sizes, spec.broadcast)


def check_call(inputs: Inputs, options: CallOptions, contents: bool = True) -> dict[str, Any]:
    """All checks of a call.

    Args:
        inputs: the tensors.
        options: everything else.
        contents: whether lengths and tables on the CPU are read. Without it no tensor needs to hold anything.

    Returns:
        The fields of the call's :class:`AttentionProblem` that the checks find.

    Raises:
        TypeError, ValueError: see :meth:`AttentionProblem.from_inputs`.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    varlen = inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None
    paged = inputs.block_table is not None
    check_tensors(q, k, v, varlen, paged)
    check_sizes(inputs, varlen, paged)
    batch, seqlen_q, seqlen_k = check_varlen(inputs, contents) if varlen else (q.shape[0], q.shape[1], k.shape[1])
    capacity = check_cache(inputs, batch, varlen, contents)
    sizes = {"batch": batch, "heads": q.shape[-2], "seqlen_q": seqlen_q, "seqlen_k": seqlen_k if varlen else capacity}
    left, right = window_sides(options.window_size, check_flag("causal", options.causal))
    if options.alignment not in ALIGNMENTS:
        raise ValueError(f"alignment is {options.alignment!r}; it may be one of {', '.join(map(repr, ALIGNMENTS))}")
    check_modifiers(inputs, MODIFIERS, q.device, sizes)
    dropout_p = check_number("dropout_p", options.dropout_p, low=0.0, below=1.0)
    needs_grad = wants_grad(inputs)
    cached = [name for name in CACHE_FIELDS if getattr(inputs, name) is not None]
    if cached and needs_grad:
        raise ValueError(
            f"{cached[0]} is given and an input requires gradients; attention over a key/value cache has none: "
            f"call it under torch.no_grad(), or with tensors that do not require them"
        )
    check_seed(inputs, dropout_p)
    check_splits(options.num_splits)
    return {
        **(within_rows(inputs, sizes, capacity, options.num_splits) if varlen else sizes),
        "scale": check_number("scale", q.shape[-1] ** -0.5 if options.scale is None else options.scale),
        "window_left": left,
        "window_right": right,
        "softcap": check_number("softcap", options.softcap, low=0.0, least=SMALLEST_F32),
        "dropout_p": dropout_p,
        "varlen": varlen,
        "deterministic": check_flag("deterministic", options.deterministic),
        "needs_grad": needs_grad,
    }


# torch.compile traces it, and checks each element of a table that a loop reads at every call of what it compiled.
_leaves = eval(f"lambda inputs: ({', '.join(f'inputs.{name}' for name in DIFFERENTIABLE)})")


def wants_grad(inputs: Inputs) -> bool:
    """Whether gradients are on and some tensor requires one."""
    return records_gradients() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in _leaves(inputs))


FEATURES: dict[str, Group] = {
    each.name: each.metadata["feature"] for each in fields(AttentionProblem) if "feature" in each.metadata
}
"""The fields that a kernel may be unable to honour, and the group of each."""
_SHARED_OPTIONS = tuple(name for name in CallOptions._fields if name in AttentionProblem.__dataclass_fields__)
_COMPARED = tuple(each.name for each in fields(AttentionProblem) if each.compare)

# --- calls that were checked before ---

_VALIDATED: dict[tuple[Any, ...], AttentionProblem] = {}
"""Calls that passed the checks, by all that the checks read: a second call like it costs 2 µs instead of 18."""
VALIDATED_SIZE = 4096
_KEY_TYPES: dict[Any, tuple[type, ...]] = {
    float | None: (float, int, NoneType),
    float: (float, int),
    int: (int,),
    bool: (bool,),
    Alignment: (str,),
    tuple[int, int] | torch.Tensor: (tuple,),
}
"""The exact types of values that can be part of a key, by the type of a field of :class:`CallOptions`."""
_PLAIN_TYPES = set(product(*(_KEY_TYPES[hint] for hint in _HINTS.values())))
_WINDOW = CallOptions._fields.index("window_size")
LENGTHS = tuple(name for name in ARGUMENTS if name not in TENSORS)
"""The fields of :class:`Inputs` that are no tensors: the greatest lengths. They are the last ones."""
lengths_of = operator.attrgetter(*LENGTHS)
"""These of :class:`Inputs`."""
tensors_of = operator.attrgetter(*TENSORS)
"""The tensors of :class:`Inputs`."""


def is_plain(options: CallOptions) -> bool:
    """Whether the options can be part of a key: exact types, and no tensor or list."""
    return tuple(map(type, options)) in _PLAIN_TYPES and tuple(map(type, options[_WINDOW])) == (int, int)


def contents_are_read(inputs: Inputs) -> bool:
    """Whether the checks read what lengths and tables hold: they do so on the CPU, where nothing waits for that."""
    if _alone(inputs):
        return False
    return any(t is not None and t.is_cpu and ARGUMENTS[name].indices for name, t in zip(_OTHERS, others_of(inputs)))


def facts_of(inputs: Inputs, options: CallOptions) -> tuple[Any, ...] | None:
    """All that :meth:`AttentionProblem.from_inputs` reads, as a key; None for what a key cannot hold.

    That is: contents that are read (lengths and tables on the CPU, a window or a scale given as a tensor), subclasses
    of tensors and numbers of other types. Those are checked again at every call.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if not (type(q) is type(k) is type(v) is torch.Tensor and is_plain(options)):
        return None
    try:
        grad = records_gradients()
        others = _facts_of_others(inputs, grad)
        if others is None:
            return None
        return (
            (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()),
            (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            (q.data_ptr() % VECTOR_BYTES, k.data_ptr() % VECTOR_BYTES, v.data_ptr() % VECTOR_BYTES),
            grad and (q.requires_grad or k.requires_grad or v.requires_grad),
            options,
            others,
        )
    except RuntimeError:  # sparse tensors have no strides, those inside vmap no address
        return None


def _facts_of_others(inputs: Inputs, grad: bool) -> tuple[Any, ...] | None:
    """What the checks read of the tensors besides q, k and v; None where they read contents, on the CPU."""
    if _alone(inputs):
        return ()
    facts: list[Any] = [*lengths_of(inputs)]
    if not all(longest is None or type(longest) is int for longest in facts):
        return None
    for name, t in zip(_OTHERS, others_of(inputs)):
        if t is None:
            continue
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or (t.is_cpu and ARGUMENTS[name].indices):
            return None
        facts.append((name, t.shape, t.stride(), t.dtype, t.device, grad and t.requires_grad))
    return tuple(facts)


def problem_of_facts(facts: tuple[Any, ...] | None) -> AttentionProblem | None:
    """The problem of a call of these facts that passed the checks before."""
    return None if facts is None else _VALIDATED.get(facts)


def _remember(facts: tuple[Any, ...], problem: AttentionProblem) -> None:
    if len(_VALIDATED) >= VALIDATED_SIZE:
        _VALIDATED.clear()
    _VALIDATED[facts] = problem
