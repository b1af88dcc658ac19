"""AttentionProblem: one frozen value that says what is asked, and the only validator of what callers pass.

Every face builds an :class:`Inputs` and calls :meth:`AttentionProblem.from_inputs`; every kernel, the
dispatcher and the bench read the resulting value and never look at a caller's arguments again.

Tensors are named and shaped as FlashAttention-2 does: q ``(b, sq, h, d)``, k ``(b, sk, hk, d)``,
v ``(b, sk, hk, dv)``; packed sequences of different lengths are ``(total, h, d)`` with ``cu_seqlens``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

Alignment = Literal["bottom-right", "top-left"]
ALIGNMENTS: tuple[Alignment, ...] = ("bottom-right", "top-left")
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEAD_DIM = 1024
MAX_SPLITS = 128
"""Most parts that keys are split into because ``num_splits`` says so; more count as so many."""
VECTOR_BYTES = 16


@dataclass(slots=True, eq=False)
class Inputs:
    """The tensors of one attention call; everything else about it is in :class:`AttentionProblem`.

    Nothing may change one: it is not frozen only because building a frozen one costs each call 1.5 µs.

    Shapes: ``alibi_slopes`` f32 ``(h,)`` or ``(b, h)``; ``bias`` broadcastable to ``(b, h, sq, sk)``, added to the
    scaled scores (−inf hides a key); ``sinks`` ``(h,)``, one extra logit per head that takes probability and gives
    no value; ``cu_seqlens_*`` int32 ``(b + 1,)`` on the same device, with ``max_seqlen_*`` their longest sequence.

    A key/value cache: ``seqused_k`` int32 ``(b,)``, rows of k and v in use (all by default); ``leftpad_k`` int32
    ``(b,)``, the first of them; ``batch_idx`` int32 ``(b,)``, which row of the batch axis of k and v a sequence reads;
    ``block_table`` int32 ``(b, pages)``: k and v are ``(all_pages, page_size, hk, d)`` and row j of sequence i lies in
    page ``block_table[i, j // page_size]``. The keys of sequence i are its rows ``leftpad_k[i]`` to ``seqused_k[i]``:
    key 0 is the first of them, and masks align by their number ``seqused_k[i] - leftpad_k[i]``. With ``cu_seqlens_k``,
    which tells the lengths itself, of these only ``block_table`` may be given.

    ``dropout_seed``: int64 ``(1,)`` on the same device, the key of the counter-based mask
    (:mod:`flashlane.reference.masks`).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    batch_idx: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    @property
    def alone(self) -> bool:
        """Whether no tensors but q, k and v are given."""
        return (
            self.cu_seqlens_q is self.cu_seqlens_k is self.alibi_slopes is self.bias is self.sinks is None
            and self.seqused_k is self.leftpad_k is self.batch_idx is self.block_table is None
            and self.dropout_seed is None
        )


CACHE_FIELDS = ("seqused_k", "leftpad_k", "batch_idx", "block_table")
"""The fields of :class:`Inputs` that describe a key/value cache; without gradients."""

Group = Literal["score", "bias", "dropout", "varlen", "cache", "paged"]


def feature(group: Group, default: Any) -> Any:
    """A field of :class:`AttentionProblem` that a kernel may be unable to honour when it differs from its default.

    :mod:`flashlane.kernels.features` reads the groups, so that a new field of a group touches no kernel by name.
    """
    return field(default=default, metadata={"feature": group})


@dataclass(frozen=True)
class AttentionProblem:
    """What is asked: sizes, element type, mask and score modifiers, where it runs. Hashable; holds no tensor.

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
    softcap: float = feature("score", 0.0)
    dropout_p: float = feature("dropout", 0.0)
    alibi: bool = feature("score", False)
    bias: bool = feature("bias", False)
    sinks: bool = feature("score", False)
    varlen: bool = feature("varlen", False)
    seqused_k: bool = feature("cache", False)
    leftpad_k: bool = feature("cache", False)
    batch_idx: bool = feature("cache", False)
    page_size: int = feature("paged", 0)
    """Rows of a page of a paged key/value cache (``block_table`` is given), or 0; ``seqlen_k`` is then its capacity."""
    num_splits: int = 0
    """Parts that the keys of a row are split into, to be added up at the end: at most so many, or as many as the kernel
    likes (0). With it, what a sequence gives depends on no other one: see :attr:`chosen_for`."""
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
        return self.seqlen_k - self.seqlen_q if self.alignment == "bottom-right" else 0

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def chosen_for(self) -> AttentionProblem:
        """What kernels and tiles are chosen for: the problem, or with ``num_splits`` one sequence of it, whatever the
        batch around that."""
        return replace(self, batch=1) if self.num_splits else self

    def parts(self, blocks: int) -> int:
        """Parts into which ``num_splits`` splits so many blocks of keys; a window may begin within one more."""
        return max(1, min(self.num_splits, MAX_SPLITS, blocks + (self.window_left >= 0)))

    def visible_keys(self, row: int) -> range:
        """Keys that query ``row`` may see (of one sequence; not for varlen)."""
        low = 0 if self.window_left < 0 else max(0, row + self.shift - self.window_left)
        high = self.seqlen_k if self.window_right < 0 else min(self.seqlen_k, row + self.shift + self.window_right + 1)
        return range(low, max(low, high))

    def visible_pairs(self) -> int:
        """Visible (query, key) pairs of one head of one sequence, counted exactly."""
        if self.window_left < 0 and self.window_right < 0:
            return self.seqlen_q * self.seqlen_k
        rows = torch.arange(self.seqlen_q, dtype=torch.int64) + self.shift
        low = torch.zeros_like(rows) if self.window_left < 0 else (rows - self.window_left).clamp(min=0)
        high = (
            torch.full_like(rows, self.seqlen_k)
            if self.window_right < 0
            else (rows + self.window_right + 1).clamp(max=self.seqlen_k)
        )
        return int((high - low).clamp(min=0).sum())

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
        asked = {name: getattr(self, name) for name in (*FEATURES, "deterministic")}
        words += [name for name, value in asked.items() if value is True]
        if asked.pop("page_size"):
            words.append(f"paged({self.page_size})")
        numbers = {name.removesuffix("_p"): value for name, value in asked.items() if type(value) is not bool}
        words += [f"{name} {value:g}" for name, value in numbers.items() if value]
        if self.num_splits:
            words.append(f"num_splits {self.num_splits}")
        return " ".join(words)

    @classmethod
    def from_inputs(
        cls,
        inputs: Inputs,
        *,
        scale: float | None = None,
        causal: bool = False,
        alignment: Alignment = "bottom-right",
        window_size: tuple[int, int] | torch.Tensor = (-1, -1),
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        num_splits: int = 0,
    ) -> AttentionProblem:
        """Check a call and say what it asks.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: a shape, device or number is not possible; the message names the argument, what it was and
                what it may be.
        """
        asked = (scale, causal, alignment, window_size, softcap, dropout_p, deterministic, num_splits)
        facts = facts_of(inputs, *asked)
        found = known(facts)
        if found is None:
            found = cls._checked(inputs, *asked)
            if facts is not None:
                _remember(facts, found)
        return found

    @classmethod
    def _checked(
        cls,
        inputs: Inputs,
        scale: float | None,
        causal: bool,
        alignment: Alignment,
        window_size: tuple[int, int] | torch.Tensor,
        softcap: float,
        dropout_p: float,
        deterministic: bool,
        num_splits: int,
    ) -> AttentionProblem:
        q, k, v = inputs.q, inputs.k, inputs.v
        varlen = inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None
        paged = inputs.block_table is not None
        _check_tensors(q, k, v, varlen, paged)
        heads, kv_heads = q.shape[-2], k.shape[-2]
        _check_sizes(inputs, varlen, paged)
        if varlen:
            batch, seqlen_q, seqlen_k = _check_varlen(inputs)
        else:
            batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        capacity = _check_cache(inputs, batch, varlen)
        seqlen_k = seqlen_k if varlen else capacity
        left, right = window_sides(window_size, causal)
        if alignment not in ALIGNMENTS:
            raise ValueError(f"alignment is {alignment!r}; it may be one of {', '.join(map(repr, ALIGNMENTS))}")
        _check_score_modifiers(inputs, batch, heads, seqlen_q, seqlen_k)
        tensors = [q, k, v] + [t for t in (inputs.bias, inputs.sinks) if t is not None]
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        cached = [name for name in CACHE_FIELDS if getattr(inputs, name) is not None]
        if cached and needs_grad:
            raise ValueError(
                f"{cached[0]} is given and an input requires gradients; attention over a key/value cache has none: "
                f"call it under torch.no_grad(), or with tensors that do not require them"
            )
        dropout_p = _number("dropout_p", dropout_p, low=0.0, below=1.0)
        _check_seed(inputs, dropout_p)
        check_splits(num_splits)
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            scale=_number("scale", q.shape[-1] ** -0.5 if scale is None else scale),
            window_left=left,
            window_right=right,
            alignment=alignment,
            softcap=_number("softcap", softcap, low=0.0),
            dropout_p=dropout_p,
            alibi=inputs.alibi_slopes is not None,
            bias=inputs.bias is not None,
            sinks=inputs.sinks is not None,
            varlen=varlen,
            seqused_k=inputs.seqused_k is not None,
            leftpad_k=inputs.leftpad_k is not None,
            batch_idx=inputs.batch_idx is not None,
            page_size=k.shape[1] if paged else 0,
            num_splits=num_splits,
            deterministic=bool(deterministic),
            needs_grad=needs_grad,
            arch=arch_of(q.device),
            aligned=all(_rows_aligned(t) for t in (q, k, v)),
            strides=tuple(tuple(t.stride()) for t in (q, k, v)),
        )


FEATURES: dict[str, Group] = {
    each.name: each.metadata["feature"] for each in fields(AttentionProblem) if "feature" in each.metadata
}
"""The fields that a kernel may be unable to honour, and the group of each."""
_COMPARED = tuple(each.name for each in fields(AttentionProblem) if each.compare)
_VALIDATED: dict[tuple[Any, ...], AttentionProblem] = {}
"""Calls that passed the checks, by all that the checks read: a second call like it costs 2 µs instead of 18."""
VALIDATED_SIZE = 4096
_NUMBERS = (float, int)
_INDICES = ("cu_seqlens_q", "cu_seqlens_k", *CACHE_FIELDS)
"""Tensors of indices and lengths, whose contents are checked where that does not wait for a GPU."""
_OTHERS = ("alibi_slopes", "bias", "sinks", "dropout_seed", *_INDICES)


def facts_of(
    inputs: Inputs,
    scale: Any,
    causal: Any,
    alignment: Any,
    window_size: Any,
    softcap: Any,
    dropout_p: Any,
    deterministic: Any,
    num_splits: Any,
) -> tuple[Any, ...] | None:
    """All that :meth:`AttentionProblem.from_inputs` reads, as a key; None for what a key cannot hold.

    That is: contents that are read (lengths and tables on the CPU, a window or a scale given as a tensor), subclasses
    of tensors and numbers of other types. Those are checked anew at every call.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    plain = (
        type(q) is type(k) is type(v) is torch.Tensor
        and type(causal) is type(deterministic) is bool
        and (scale is None or type(scale) in _NUMBERS)
        and type(softcap) in _NUMBERS
        and type(dropout_p) in _NUMBERS
        and type(alignment) is str
        and type(num_splits) is int
        and type(window_size) is tuple
        and len(window_size) == 2
        and type(window_size[0]) is type(window_size[1]) is int
    )
    if not plain:
        return None
    try:
        grad = torch.is_grad_enabled()
        others = _facts_of_others(inputs, grad)
        if others is None:
            return None
        return (
            (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()),
            (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            (q.data_ptr() % VECTOR_BYTES, k.data_ptr() % VECTOR_BYTES, v.data_ptr() % VECTOR_BYTES),
            grad and (q.requires_grad or k.requires_grad or v.requires_grad),
            (scale, causal, alignment, window_size, softcap, dropout_p, deterministic, num_splits),
            others,
        )
    except RuntimeError:  # sparse tensors have no strides, those inside vmap no address
        return None


def _facts_of_others(inputs: Inputs, grad: bool) -> tuple[Any, ...] | None:
    """What the checks read of the tensors beside q, k and v; None where they read contents, on the CPU."""
    if inputs.alone:
        return ()
    facts: list[Any] = [inputs.max_seqlen_q, inputs.max_seqlen_k]
    if not all(longest is None or type(longest) is int for longest in facts):
        return None
    for name in _OTHERS:
        t = getattr(inputs, name)
        if t is None:
            continue
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or (name in _INDICES and t.is_cpu):
            return None
        facts.append((name, t.shape, t.stride(), t.dtype, t.device, grad and t.requires_grad))
    return tuple(facts)


def known(facts: tuple[Any, ...] | None) -> AttentionProblem | None:
    """The problem of a call of these facts that passed the checks before."""
    return None if facts is None else _VALIDATED.get(facts)


def _remember(facts: tuple[Any, ...], problem: AttentionProblem) -> None:
    if len(_VALIDATED) >= VALIDATED_SIZE:
        _VALIDATED.clear()
    _VALIDATED[facts] = problem


def arch_of(device: torch.device) -> str | None:
    """The compiler's name of a CUDA device's architecture ("sm_90a"), or None for the CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _rows_aligned(t: torch.Tensor) -> bool:
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


def _check_tensors(q: Any, k: Any, v: Any, varlen: bool, paged: bool) -> None:
    for name, t in _named(q, k, v):
        axes = _axes(name, varlen, paged)
        rank = len(axes)
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a torch.Tensor")
        if t.dtype not in DTYPE_NAMES:
            allowed = ", ".join(str(d) for d in DTYPE_NAMES)
            raise TypeError(f"{name} has dtype {t.dtype}; it may be one of {allowed}")
        if t.dim() != rank:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, rank {t.dim()}; it must have rank {rank}: ({', '.join(axes)})"
            )
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} and q has {q.dtype}; q, k and v must share one dtype")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q is on {q.device}; q, k and v must be on one device")


def _axes(name: str, varlen: bool, paged: bool) -> tuple[str, ...]:
    """What the axes of q, k or v are called."""
    if paged and name != "q":
        return ("pages", "page_size", "heads", "head_dim")
    return ("total", "heads", "head_dim") if varlen else ("batch", "seqlen", "heads", "head_dim")


def _check_sizes(inputs: Inputs, varlen: bool, paged: bool) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, t in _named(q, k, v):
        for axis, size in zip(_axes(name, varlen, paged), t.shape, strict=True):
            if size == 0 and axis not in ("seqlen", "total"):
                raise ValueError(f"{name} has shape {tuple(t.shape)}: its {axis} is 0; it must be at least 1")
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
    if not (varlen or paged) and inputs.batch_idx is None:
        if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
            raise ValueError(
                f"q, k, v have batch sizes {q.shape[0]}, {k.shape[0]}, {v.shape[0]}; all three must be equal"
            )
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"v has shape {tuple(v.shape)} and k has {tuple(k.shape)}; their lengths must be equal")


def _check_indices(name: str, t: Any, shape: str, fits: Callable[[torch.Size], bool], q: torch.Tensor) -> None:
    """A tensor of indices as kernels read it: int32, contiguous, on the device of q."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}; it must be an int32 torch.Tensor of shape {shape}")
    if t.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {t.dtype}; it must be torch.int32")
    if not fits(t.shape):
        raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be {shape}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device} and q is on {q.device}; they must agree")
    if not t.is_contiguous():
        raise ValueError(f"{name} has strides {t.stride()}; it must be contiguous")


def _check_varlen(inputs: Inputs) -> tuple[int, int, int]:
    sizes = []
    for side in ("q", "k"):
        cu: torch.Tensor | None = getattr(inputs, f"cu_seqlens_{side}")
        longest: int | None = getattr(inputs, f"max_seqlen_{side}")
        if cu is None:
            raise ValueError(f"cu_seqlens_{side} is None; give both cu_seqlens_q and cu_seqlens_k, or neither")
        name, shape = f"cu_seqlens_{side}", "(batch + 1,) with batch >= 1"
        _check_indices(name, cu, shape, lambda found: len(found) == 1 and found[0] >= 2, inputs.q)
        if not isinstance(longest, int) or longest < 0:
            raise ValueError(f"max_seqlen_{side} is {longest!r}; it must be a whole number of at least 0")
        if cu.is_cpu:
            total = getattr(inputs, side).shape[0]
            if side == "k" and inputs.block_table is not None:
                total = 2**31 - 1  # the lengths of pages, which are checked with the table
            if int(cu[0]) != 0 or int(cu[-1]) > total or bool((cu.diff() < 0).any()) or int(cu.diff().max()) > longest:
                raise ValueError(
                    f"cu_seqlens_{side} is {cu.tolist()}; it must start at 0, never fall, end by {total} (the total "
                    f"of {side}), with no sequence longer than max_seqlen_{side} {longest}"
                )
        sizes.append((cu.numel() - 1, longest))
    if sizes[0][0] != sizes[1][0]:
        raise ValueError(f"cu_seqlens_q describes {sizes[0][0]} sequences and cu_seqlens_k {sizes[1][0]}")
    return sizes[0][0], sizes[0][1], sizes[1][1]


def _check_cache(inputs: Inputs, batch: int, varlen: bool) -> int:
    """Check the fields of a key/value cache; returns how many rows a sequence may have (not for plain varlen)."""
    q, k, table = inputs.q, inputs.k, inputs.block_table
    each = {name: t for name in CACHE_FIELDS[:3] if (t := getattr(inputs, name)) is not None}
    for name, t in each.items():
        if varlen:
            raise ValueError(f"{name} is given with cu_seqlens_k, which tells the lengths; only one of them may be")
        _check_indices(name, t, f"(batch,), ({batch},)", lambda shape: tuple(shape) == (batch,), q)
    if table is not None:
        if inputs.batch_idx is not None:
            raise ValueError("batch_idx is given with block_table, which tells where sequences lie; give one of them")
        shape = f"(batch, pages) with batch {batch} and at least one page"
        _check_indices("block_table", table, shape, lambda found: len(found) == 2 and found[0] == batch and found[1], q)
    capacity = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    if (each or table is not None) and q.is_cpu:
        _check_cache_contents(inputs, each, capacity, varlen)
    return capacity


def _check_cache_contents(inputs: Inputs, each: dict[str, torch.Tensor], capacity: int, varlen: bool) -> None:
    used, table = each.get("seqused_k"), inputs.block_table
    if used is not None and not _within(used, 0, capacity):
        raise ValueError(f"seqused_k is {used.tolist()}; it may be 0 to {capacity}, the rows of k")
    leftpad, most = each.get("leftpad_k"), capacity if used is None else used
    if leftpad is not None and not _within(leftpad, 0, most):
        bound = f"{capacity}, the rows of k" if used is None else f"seqused_k {used.tolist()}"
        raise ValueError(f"leftpad_k is {leftpad.tolist()}; it may be 0 to {bound}")
    where, rows = each.get("batch_idx"), inputs.k.shape[0]
    if where is not None and not _within(where, 0, rows - 1):
        raise ValueError(f"batch_idx is {where.tolist()}; it may be 0 to {rows - 1}, the batch axis of k")
    if table is None:
        return
    lengths = inputs.cu_seqlens_k.diff() if varlen else used
    if lengths is not None and not _within(lengths, 0, capacity):
        raise ValueError(
            f"block_table has {table.shape[1]} pages of {inputs.k.shape[1]} rows for sequences of {lengths.tolist()}; "
            f"they must hold the longest of them"
        )
    lengths = torch.full((len(table),), capacity) if lengths is None else lengths
    read = torch.arange(table.shape[1]) * inputs.k.shape[1] < lengths[:, None]
    if not _within(table.masked_fill(~read, 0), 0, rows - 1):
        raise ValueError(f"block_table is {table.tolist()}; a page in use may be 0 to {rows - 1}, the pages of k")


def _within(t: torch.Tensor, low: int, high: int | torch.Tensor) -> bool:
    return bool(((t >= low) & (t <= high)).all())


def _check_seed(inputs: Inputs, dropout_p: float) -> None:
    seed, shape = inputs.dropout_seed, "an int64 torch.Tensor of shape (1,)"
    if seed is None:
        if dropout_p:
            raise ValueError(f"dropout_seed is None and dropout_p is {dropout_p:g}; it must then be {shape}")
        return
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64:
        what = seed.dtype if isinstance(seed, torch.Tensor) else type(seed).__name__
        raise TypeError(f"dropout_seed is {what}; it must be {shape}")
    if tuple(seed.shape) != (1,):
        raise ValueError(f"dropout_seed has shape {tuple(seed.shape)}; it must be {shape}")
    if seed.device != inputs.q.device:
        raise ValueError(f"dropout_seed is on {seed.device} and q is on {inputs.q.device}; they must agree")


def check_splits(num_splits: Any) -> None:
    """Raise ValueError for what cannot be a number of parts."""
    if type(num_splits) is not int or num_splits < 0:
        raise ValueError(f"num_splits is {num_splits!r}; it must be a whole number of at least 0")


def _check_score_modifiers(inputs: Inputs, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> None:
    q = inputs.q
    for name in ("alibi_slopes", "bias", "sinks"):
        t = getattr(inputs, name)
        if t is None:
            continue
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            what = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
            raise TypeError(f"{name} is {what}; it must be a floating-point torch.Tensor")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q is on {q.device}; they must be on one device")
    slopes, bias, sinks = inputs.alibi_slopes, inputs.bias, inputs.sinks
    if slopes is not None:
        if slopes.dtype != torch.float32:
            raise TypeError(f"alibi_slopes has dtype {slopes.dtype}; it must be torch.float32")
        if tuple(slopes.shape) not in ((heads,), (batch, heads)):
            raise ValueError(
                f"alibi_slopes has shape {tuple(slopes.shape)}; it may be ({heads},) or ({batch}, {heads})"
            )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it must be ({heads},)")
    if bias is not None:
        full = (batch, heads, seqlen_q, seqlen_k)
        shape = tuple(bias.shape)
        fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False))
        if not fits:
            raise ValueError(f"bias has shape {shape}; it must broadcast to (batch, heads, seqlen_q, seqlen_k) {full}")


def window_sides(window_size: tuple[int, int] | torch.Tensor, causal: bool) -> tuple[int, int]:
    """Left and right side of the window as a problem holds them: causal makes the right one 0."""
    values = window_size.tolist() if isinstance(window_size, torch.Tensor) else window_size
    try:
        left, right = (int(x) for x in values)
    except (TypeError, ValueError):
        raise ValueError(f"window_size is {window_size!r}; it must be two whole numbers (left, right)") from None
    if min(left, right) < -1:
        raise ValueError(f"window_size is ({left}, {right}); each side must be at least 0, or -1 for unbounded")
    return left, (0 if causal else right)


def _number(name: str, value: float, low: float = -math.inf, below: float = math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; it must be a number") from None
    if not math.isfinite(number) or number < low or number >= below:
        bounds = "finite" + (f", at least {low:g}" if low > -math.inf else "")
        bounds += f" and below {below:g}" if below < math.inf else ""
        raise ValueError(f"{name} is {value!r}; it must be {bounds}")
    return number
