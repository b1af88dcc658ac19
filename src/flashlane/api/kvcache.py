"""Attention over a key/value cache: rows are appended in place, rotated where asked, and then read.

Source of the semantics: Dao-AILab/flash-attention, ``flash_attn_with_kvcache``. Nothing here waits for a GPU, so that
a decoding step can be captured in a CUDA graph. What that leaves unchecked there are lengths and tables, which the host
does not read. Lengths read and write nothing outside the cache: rows past its end are not stored, lengths past it count
as full. Pages and rows of the batch axis are taken as they are: a number that k_cache does not have is an address
outside of it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from flashlane.api.rotary import rotate
from flashlane.core import dispatch, registry
from flashlane.core.arch import no_autocast
from flashlane.core.problem import Inputs, tensors_of
from flashlane.core.validate import (
    axes_of,
    check_flag,
    check_one_each,
    check_sizes,
    check_splits,
    check_strided,
    contiguous,
    kind_of,
    window_sides,
)
from flashlane.ops import call as ops
from flashlane.ops import torch_rules
from flashlane.ops.schema import replaced
from flashlane.ops.watched import holds_numbers, is_observed

if TYPE_CHECKING:
    from flashlane.core.cache_update import CacheUpdate

NAMES = {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad",
    "batch_idx": "cache_batch_idx",
    "scale": "softmax_scale",
    "bias": "attn_bias",
}
"""What ``flash_attn_with_kvcache`` calls the validator's arguments."""
_NAMES_AFTER = NAMES | {"seqused_k": "cache_seqlens with the new rows"}
"""The same where the validator sees the lengths after the new rows were appended."""

_library = torch.library.Library("flashlane", "FRAGMENT")
_library.define(
    "update_cache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens,"
    " Tensor? rotary_cos, Tensor? rotary_sin, Tensor? batch_idx, Tensor? block_table, bool interleaved, bool advance)"
    " -> (Tensor q, Tensor seqused)"
)


def _appended(*values: Any) -> CacheUpdate:
    """What a step appends, as a class that the first call which appends imports."""
    from flashlane.core.cache_update import CacheUpdate

    return CacheUpdate(*values)


def run_update(update: CacheUpdate, q_out: torch.Tensor, seqused: torch.Tensor) -> None:
    """Append to the cache in place, and fill what :meth:`CacheUpdate.allocate` gave.

    One launch on a GPU that has Triton, where no tensor has its negative bit set.
    """
    # The kernel reads and writes memory, which has the other sign where a tensor's negative bit is set.
    if update.q.is_cuda and _has_triton() and not update.has_negative_bit:
        from flashlane.kernels.triton import cache_update

        cache_update.launch(update, q_out, seqused)
    else:
        update_in_torch(update, q_out, seqused)


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@torch.no_grad()
def update_in_torch(update: CacheUpdate, q_out: torch.Tensor, seqused: torch.Tensor) -> None:
    """:func:`run_update` in torch operations, on any device."""
    lengths, count = update.cache_seqlens.long(), update.k.shape[1]
    torch.clamp(update.cache_seqlens + count, max=update.capacity, out=seqused)
    rows = lengths[:, None] + torch.arange(count, device=lengths.device)
    k = update.k
    if update.cos is not None:
        k = rotate(k, update.cos, update.sin, rows, interleaved=update.interleaved)
        steps = torch.arange(update.q.shape[1], device=lengths.device) if update.advance else 0
        q_out.copy_(rotate(update.q, update.cos, update.sin, lengths[:, None] + steps, interleaved=update.interleaved))
    if not count:
        return
    # A row past the end is written where the first row goes, with what that row gets (or stays): nothing is skipped,
    # as to skip would need the host to know how many there are.
    inside = (rows >= 0) & (rows < update.capacity)
    first = torch.where(inside[:, :1], rows[:, :1], update.capacity - 1)
    rows = torch.where(inside, rows, first)
    both = [
        (cache, new, _places(update, cache, rows)) for cache, new in ((update.k_cache, k), (update.v_cache, update.v))
    ]
    _check_places(update, both[0][2][0])
    for cache, new, at in both:
        kept = torch.where(inside[:, :1, None, None], new[:, :1], cache[at[0][:, :1], at[1][:, :1]])
        cache[at] = torch.where(inside[:, :, None, None], new, kept)


def _places(update: CacheUpdate, cache: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the first two axes of a cache for rows ``(b, n)`` of its sequences."""
    if update.block_table is not None:
        size = cache.shape[1]
        return update.block_table.long().gather(1, rows // size), rows % size
    if update.batch_idx is not None:
        return update.batch_idx.long()[:, None].expand_as(rows), rows
    return torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows), rows


def _check_places(update: CacheUpdate, sequences: torch.Tensor) -> None:
    """Raise ValueError unless the rows to be written lie in the cache; only where nothing waits for a GPU to know."""
    most = update.k_cache.shape[0]
    if type(sequences) is torch.Tensor and sequences.is_cpu and bool(((sequences < 0) | (sequences >= most)).any()):
        name = "cache_batch_idx" if update.block_table is None else "block_table"
        raise ValueError(f"{name} has {sequences.unique().tolist()}; it may have 0 to {most - 1}, as k_cache does")


def _operator(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    update = _appended(*args)
    _check_lengths(update)
    made = update.allocate()
    run_update(update, *made)
    return made


def _vmap_update(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """One call after another, each on its own slices of the caches, which are written in place."""
    for name, dim in zip(("k_cache", "v_cache"), in_dims[1:3], strict=True):
        if dim is None:
            raise ValueError(f"{name} is the same for every call of torch.vmap, and all would append to it; map it too")
    return torch_rules.one_by_one(torch.ops.flashlane.update_cache, info.batch_size, in_dims, args)


def _above_autograd(keyset: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's autograd kernel: its results and the caches would lose a tangent of any of its tensors."""
    if forward_ad._current_level >= 0 and torch_rules.has_tangent([t for t in args if isinstance(t, torch.Tensor)]):
        raise NotImplementedError(
            "flash_attn_with_kvcache has no derivative, forward-mode (jvp, jacfwd, hessian) or reverse"
        )
    with torch._C._AutoDispatchBelowAutograd():
        behind = keyset & torch._C._after_autograd_keyset
        return torch.ops.flashlane.update_cache.default.redispatch(behind, *args)


_BEHIND_NEGATIVE = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Negative)


def _above_negative(keyset: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's kernel for negative bits: torch's own takes no operator that writes to one tensor and returns
    another."""
    plain = [t.resolve_neg() if isinstance(t, torch.Tensor) else t for t in args]
    made = torch.ops.flashlane.update_cache.default.redispatch(keyset & _BEHIND_NEGATIVE, *plain)
    for cache, written in zip(args[1:3], plain[1:3], strict=True):
        if written is not cache:
            cache.copy_(written)
    return made


_library.impl("update_cache", _operator, "CompositeExplicitAutograd")
_library.impl("update_cache", _above_autograd, "Autograd", with_keyset=True)
_library.impl("update_cache", _above_negative, "Negative", with_keyset=True)
torch.library.register_fake("flashlane::update_cache", lambda *args: _appended(*args).allocate(), lib=_library)
torch.library.register_vmap("flashlane::update_cache", _vmap_update, lib=_library)


def attend_cache(
    inputs: Inputs,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_interleaved: bool,
    kernel: str | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`flashlane.flash_attn_with_kvcache` does, whose arguments these are; returns out and LSE.

    ``inputs`` has q, the caches as k and v, and all other tensors of the attention; ``options`` has the fields of
    :class:`~flashlane.core.problem.CallOptions`. Everything is checked before the cache is written to.
    """
    q, k_cache, v_cache = inputs.q, inputs.k, inputs.v
    check_splits(options["num_splits"])
    if not (kernel is None or isinstance(kernel, str)):
        registry.get(kernel)  # which refuses it; it may be no key of the choices that were made before
    options["causal"] = check_flag("causal", options["causal"])
    capacity = _check_caches(q, k_cache, v_cache, inputs.block_table)
    seqused, batch_idx = contiguous(inputs.seqused_k), contiguous(inputs.batch_idx)
    leftpad, table = contiguous(inputs.leftpad_k), contiguous(inputs.block_table)
    if k_cache.shape[1:3] != v_cache.shape[1:3] or k_cache.shape[-1] != q.shape[-1]:
        with ops.errors_by(NAMES):
            check_sizes(inputs, varlen=False, paged=table is not None, batch=False)
    if table is None and batch_idx is None:
        k_cache, v_cache = _rows_of_batch(inputs)
    inputs = replaced(
        inputs, k=k_cache, v=v_cache, seqused_k=seqused, leftpad_k=leftpad, batch_idx=batch_idx, block_table=table
    )
    with torch.no_grad(), no_autocast(q.device):
        rotary_interleaved = check_flag("rotary_interleaved", rotary_interleaved)
        new = _check_new(inputs, k, v, rotary_cos, rotary_sin, capacity)
        if not new:
            return ops.attend(inputs, kernel=kernel, names=NAMES, **options)
        advance = any(side >= 0 for side in window_sides(options["window_size"], options["causal"]))
        rotary = (_rows_contiguous(rotary_cos), _rows_contiguous(rotary_sin))
        update = _appended(q, k_cache, v_cache, k, v, seqused, *rotary, batch_idx, table, rotary_interleaved, advance)
        if not torch.compiler.is_compiling() and holds_numbers(seqused):
            _check_lengths(update)
        return _append_and_attend(update, inputs, kernel, options)


def _append_and_attend(
    update: CacheUpdate, inputs: Inputs, kernel: str | None, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    if is_observed() or not holds_numbers(update.q, update.k_cache, update.v_cache, update.cache_seqlens):
        if not torch.compiler.is_compiling():
            _check_before(update, inputs, kernel, options)
        values = (getattr(update, name) for name in type(update).__dataclass_fields__)
        q_out, seqused = torch.ops.flashlane.update_cache(*values)
        q_out = update.q if update.cos is None else q_out
        return ops.attend(replaced(inputs, q=q_out, seqused_k=seqused), kernel=kernel, names=_NAMES_AFTER, **options)
    q_out, seqused = update.allocate()
    if seqused.is_cpu:  # where the lengths are checked, they must be known before
        torch.add(update.cache_seqlens, update.k.shape[1], out=seqused)
    inputs = replaced(inputs, q=update.q if update.cos is None else q_out, seqused_k=seqused)
    problem = ops.problem_of(inputs, names=_NAMES_AFTER, **options)
    dispatch.select(problem, kernel)
    run_update(update, q_out, seqused)
    return ops.attend(inputs, kernel=kernel, names=_NAMES_AFTER, **options)


def _check_before(update: CacheUpdate, inputs: Inputs, kernel: str | None, options: dict[str, Any]) -> None:
    """Check an observed call before the cache is written to: as a whole, or all but contents where there are none."""
    if not holds_numbers(*(t for t in tensors_of(inputs) if t is not None)):
        ops.check(inputs, kernel, names=_NAMES_AFTER, **options)
        return
    with _disable_current_modes():  # nothing of this is the call's own work
        inputs = replaced(inputs, seqused_k=update.cache_seqlens + update.k.shape[1])
        dispatch.select(ops.problem_of(inputs, names=_NAMES_AFTER, **options), kernel)


# --- checks of what the validator of attention does not see ---


def _rows_of_batch(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches without what is beyond the batch of q."""
    batch, k_cache, v_cache = inputs.q.shape[0], inputs.k, inputs.v
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.shape[0] < batch:
            raise ValueError(f"{name} has batch size {t.shape[0]} and q has {batch}; it must be at least that of q")
    if k_cache.shape[0] == v_cache.shape[0] == batch:
        return k_cache, v_cache
    return k_cache[:batch], v_cache[:batch]


def _rows_contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def lengths_tensor(cache_seqlens: Any, q: Any, k_cache: Any, v_cache: Any, block_table: Any) -> torch.Tensor:
    """One length for all sequences as a tensor; the arguments are those of ``flash_attn_with_kvcache``.

    Raises:
        TypeError, ValueError: it is no int, or is more than a sequence may have; or the caches are no caches.
    """
    check_length(cache_seqlens, _check_caches(q, k_cache, v_cache, block_table))
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def check_length(cache_seqlens: Any, capacity: int) -> None:
    """Check one length for all sequences, of which :func:`whole_number` was taken.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative, or more than the rows that a sequence may have.
    """
    if type(cache_seqlens) is not int:
        raise TypeError(
            f"cache_seqlens is {kind_of(cache_seqlens)}; it may be an int or an int32 torch.Tensor (batch,)"
        )
    if not 0 <= cache_seqlens <= capacity:
        raise ValueError(f"cache_seqlens is {cache_seqlens}; it may be 0 to {capacity}, the rows of k_cache")


def _check_caches(q: Any, k_cache: Any, v_cache: Any, block_table: Any) -> int:
    """Rank, so that the rest may read shapes; returns how many rows a sequence may have."""
    _check_rank("q", q, paged=False)
    return capacity_of(k_cache, v_cache, block_table)


def capacity_of(k_cache: Any, v_cache: Any, block_table: Any) -> int:
    """How many rows of a cache a sequence may have.

    Raises:
        TypeError, ValueError: these are no caches, or the table is none.
    """
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_rank(name, t, paged=block_table is not None)
    if block_table is None:
        return k_cache.shape[1]
    if not isinstance(block_table, torch.Tensor):
        raise TypeError(
            f"block_table is {kind_of(block_table)}; it must be an int32 torch.Tensor of shape (batch, pages)"
        )
    check_strided("block_table", block_table)
    if block_table.dim() != 2:
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}; it must be (batch, pages)")
    return k_cache.shape[1] * block_table.shape[1]


def _check_rank(name: str, t: Any, paged: bool) -> None:
    check_strided(name, t)
    if t.dim() != 4:
        axes = ", ".join(axes_of(name[:1], varlen=False, paged=paged))
        raise ValueError(f"{name} has shape {tuple(t.shape)}, rank {t.dim()}; it must have rank 4: ({axes})")


def _check_new(inputs: Inputs, k: Any, v: Any, cos: Any, sin: Any, capacity: int) -> bool:
    """Check what is appended and how it is rotated; returns whether anything is."""
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} is None and {given} is given; give both or neither")
    if (cos is None) != (sin is None):
        missing, given = ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{missing} is None and {given} is given; give both or neither")
    if k is None:
        if cos is not None:
            raise ValueError("k is None and rotary_cos is given; k and v must be given to be rotated and appended")
        return False
    q, seqused = inputs.q, inputs.seqused_k
    for name, t in (("k_cache", inputs.k), ("v_cache", inputs.v)):
        if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(
                f"{name} is expanded, with strides {t.stride()}; rows that are appended need their own memory"
            )
        if not torch.compiler.is_compiling() and t.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name} was made under torch.inference_mode; outside of it nothing may be appended to it")
    if seqused is None:
        raise ValueError("cache_seqlens is None and k is given; it must say where the new rows go")
    check_one_each("cache_seqlens", seqused, q.shape[0], q)
    for name, t, cache in (("k", k, inputs.k), ("v", v, inputs.v)):
        shape = (q.shape[0], k.shape[1] if name == "v" else "seqlen_new", *cache.shape[2:])
        _check_tensor(name, t, (q.dtype,), q)
        if t.dim() != 4 or (t.shape[0], *t.shape[2:]) != (q.shape[0], *cache.shape[2:]) or t.shape[1] != k.shape[1]:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be ({', '.join(map(str, shape))})")
    if k.shape[1] > capacity:
        raise ValueError(f"k has {k.shape[1]} rows; it may have at most {capacity}, the rows of k_cache")
    if cos is not None:
        _check_rotary(q, cos, sin, capacity)
    return True


def _check_lengths(update: CacheUpdate) -> None:
    """Raise ValueError unless the new rows fit and the tables have the positions of q; only of lengths on the CPU."""
    lengths, count, rows = update.cache_seqlens, update.k.shape[1], update.q.shape[1]
    if not lengths.is_cpu:
        return
    most = update.capacity - count
    if bool(((lengths < 0) | (lengths > most)).any()):
        raise ValueError(
            f"cache_seqlens is {lengths.tolist()}; with {count} new rows it may be 0 to {most}, as "
            f"{'k_cache' if update.block_table is None else 'block_table'} holds {update.capacity}"
        )
    if update.cos is not None and rows:
        needed = int(lengths.max()) + (rows if update.advance else 1)
        if update.cos.shape[0] < needed:
            raise ValueError(
                f"rotary_cos has {update.cos.shape[0]} positions; it must have at least {needed}, those of the "
                f"{rows} rows of q from cache_seqlens {lengths.tolist()} on"
            )


def _check_tensor(name: str, t: Any, dtypes: tuple[torch.dtype, ...], q: torch.Tensor) -> None:
    check_strided(name, t)
    if t.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {t.dtype}; it may be {' or '.join(map(str, dtypes))}, as q is {q.dtype}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device} and q is on {q.device}; they must agree")


def _check_rotary(q: torch.Tensor, cos: Any, sin: Any, capacity: int) -> None:
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check_tensor(name, t, tuple(dict.fromkeys((q.dtype, torch.float32))), q)
        fits = t.dim() == 2 and t.shape[0] >= capacity and 0 < 2 * t.shape[1] <= q.shape[-1]
        if not fits:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must be (seqlen_ro, rotary_dim / 2) with seqlen_ro at least "
                f"{capacity}, the rows of k_cache, and rotary_dim 2 to {q.shape[-1]}, the head_dim"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"rotary_sin is {sin.dtype} {tuple(sin.shape)} and rotary_cos {cos.dtype} {tuple(cos.shape)}; "
            f"they must be alike"
        )
