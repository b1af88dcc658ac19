"""FlashAttention-2's functions: names, argument order, defaults and semantics as its users know them.

Tensors are ``(batch, seqlen, heads, head_dim)``; causal masks and windows are bottom-right aligned. Keyword-only
arguments are flashlane's own additions. Source of the contract: Dao-AILab/flash-attention, ``flash_attn_interface.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flashlane.api import kvcache
from flashlane.core import dispatch
from flashlane.core.arch import records_gradients
from flashlane.core.problem import MODIFIERS, TENSORS, CallOptions, Inputs
from flashlane.core.validate import check_flag, check_strided, contiguous, kind_of, whole_number
from flashlane.ops import call as ops
from flashlane.ops.call import Result
from flashlane.ops.schema import replaced

_NAMES = {"scale": "softmax_scale", "bias": "attn_bias"}
"""What this module's signatures call the validator's arguments."""

_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv", "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}
_OF_QKV |= {"max_seqlen_q": "max_seqlen", "max_seqlen_k": "max_seqlen"}
_OF_KV = {"k": "kv", "v": "kv"}
"""What the packed functions call the arguments of the others."""

_FLOATS = (*TENSORS[:3], *MODIFIERS)
"""The arguments of which a gradient could be asked."""

T = TypeVar("T")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """Exact attention: softmax(q·kᵀ·softmax_scale) · v, differentiable in q, k, v, sinks, attn_bias and
    logit_scale.

    Args:
        q: ``(b, sq, h, d)``, f16, bf16, f32 or f64, any strides.
        k: ``(b, sk, hk, d)``; h is a multiple of hk, and query head i reads KV head ``i // (h / hk)``.
        v: ``(b, sk, hk, dv)``; dv may differ from d.
        dropout_p: share of the probabilities that is dropped, 0 to below 1; the rest is divided by 1 − dropout_p. The
            mask follows torch's generator of the device (:mod:`flashlane.reference.masks` defines it).
        softmax_scale: ``d ** -0.5`` by default.
        causal: key j is visible to query i iff ``j <= i + sk - sq``.
        window_size: (left, right): key j is visible iff ``i + sk - sq - left <= j <= i + sk - sq + right``; −1 is
            unbounded, and causal makes right 0. A tensor of two is read, for which a call waits if a GPU holds it.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)`` before the mask. Of bf16 tensors the
            tanh may have a relative error of 2^-11, a quarter of bf16's.
        alibi_slopes: f32 ``(h,)`` or ``(b, h)``: ``-slope * |i + sk - sq - j|`` is added to the scores. They get no
            gradient and may not require one.
        deterministic: ask for a backward pass that gives the same bits every time.
        return_attn_probs: also return the LSE and S_dmask, for tests: empty when dropout_p is 0, else as
            FlashAttention-2 has it (:func:`flashlane.api.attn_probs.signed_probabilities`), in O(sq·sk) memory.
        kernel: the tag of the kernel to run; it runs or raises. None lets the dispatcher choose, see :func:`explain`.
        return_lse: also return the LSE.
        sinks: ``(h,)``, f16, bf16, f32 or f64: one more logit for every row of a head, which takes probability
            and gives no value.
        attn_bias: f16, bf16, f32 or f64, broadcastable to ``(b, h, sq, sk)``, added to the scores; −inf hides a
            key.
        logit_scale: f32 ``(h,)``: a factor of every score of a head, of any sign, before the soft cap. A model that
            learns one temperature a head (QK-norm) needs no scaled copy of q for it.

    Returns:
        out ``(b, sq, h, dv)``; with ``return_lse`` (out, lse); with ``return_attn_probs`` (out, lse, S_dmask). The
        LSE is ``(b, h, sq)``, natural logarithm, f32 (f64 for f64 inputs). A row that sees no key has output 0, LSE
        −inf (with sinks: the sink) and gradients 0.

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it.
        NotImplementedError: the kernel named cannot run this, or no kernel can; the message says why.
    """
    if return_lse is not False and return_lse is not True:
        return_lse = check_flag("return_lse", return_lse)
    if return_attn_probs is not False and return_attn_probs is not True:
        return_attn_probs = check_flag("return_attn_probs", return_attn_probs)
    # The tag and the fields of CallOptions, built here because another function call would show in the cost of a call.
    tag_and_options = kernel, softmax_scale, causal, "bottom-right", window_size, softcap, dropout_p, deterministic, 0
    if alibi_slopes is attn_bias is sinks is logit_scale is None and not return_attn_probs:
        found = ops.run_cached(q, k, v, tag_and_options, return_lse)
        if found is not None:
            return found if return_lse else found[0]
    inputs = Inputs(q, k, v, alibi_slopes, attn_bias, sinks, logit_scale)  # keywords take a microsecond
    return _attend(inputs, tag_and_options, return_lse, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of one tensor ``(b, s, 3, h, d)`` that holds q, k and v; all else is as there."""
    q, k, v = _unpack("qkv", qkv, 3)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    ours: dict[str, Any] = {"kernel": kernel, "return_lse": return_lse, "sinks": sinks, "attn_bias": attn_bias}
    return by_callers_names(_OF_QKV, flash_attn_func, q, k, v, *tail, **ours, logit_scale=logit_scale)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of q and one tensor ``(b, sk, 2, hk, d)`` that holds k and v; all else is as there."""
    k, v = _unpack("kv", kv, 2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    ours: dict[str, Any] = {"kernel": kernel, "return_lse": return_lse, "sinks": sinks, "attn_bias": attn_bias}
    return by_callers_names(_OF_KV, flash_attn_func, q, k, v, *tail, **ours, logit_scale=logit_scale)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of sequences of different lengths, packed one after another.

    Args:
        q: ``(total_q, h, d)``.
        k: ``(total_k, hk, d)``.
        v: ``(total_k, hk, dv)``.
        cu_seqlens_q: int32 ``(b + 1,)``: sequence i is rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of q.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: length of the longest sequence of q. It may be a NumPy integer or an integer tensor without axes;
            a call waits for a GPU that holds such a tensor.
        max_seqlen_k: length of the longest sequence of k, of the same types.
        block_table: int32 ``(b, pages)``: k and v are the pages of a cache, ``(all_pages, page_size, hk, d)`` with any
            page size, and row j of sequence i lies in page ``block_table[i, j // page_size]``; ``cu_seqlens_k``
            gives the lengths. Such a call has no gradients: to ask for one raises NotImplementedError.
        attn_bias: broadcastable to ``(b, h, max_seqlen_q, max_seqlen_k)``; a sequence reads its top-left corner.

    The other arguments are those of :func:`flash_attn_func`, with sk and sq those of each sequence.

    Returns:
        out ``(total_q, h, dv)``, and where asked the LSE ``(h, total_q)``.

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it.
        NotImplementedError: the kernel named cannot run this, or no kernel can; the message says why. Lengths that a
            GPU holds are not read, so ``cu_seqlens`` that decrease are not found there.
    """
    if return_lse is not False and return_lse is not True:
        return_lse = check_flag("return_lse", return_lse)
    if return_attn_probs is not False and return_attn_probs is not True:
        return_attn_probs = check_flag("return_attn_probs", return_attn_probs)
    if not (isinstance(cu_seqlens_q, torch.Tensor) and isinstance(cu_seqlens_k, torch.Tensor)):
        cu = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        name = next(name for name, given in cu.items() if not isinstance(given, torch.Tensor))
        raise TypeError(f"{name} is {kind_of(cu[name])}; it must be an int32 torch.Tensor of shape (batch + 1,)")
    modifiers = alibi_slopes, attn_bias, sinks, logit_scale
    longest = whole_number(max_seqlen_q), whole_number(max_seqlen_k)
    inputs = Inputs(q, k, v, *modifiers, cu_seqlens_q, cu_seqlens_k, None, None, None, block_table, None, *longest)
    tag_and_options = kernel, softmax_scale, causal, "bottom-right", window_size, softcap, dropout_p, deterministic, 0
    return _attend(inputs, tag_and_options, return_lse, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` of one tensor ``(total, 3, h, d)`` that holds q, k and v of the same lengths.

    All else is as there.
    """
    q, k, v = _unpack("qkv", qkv, 3, ("total",))
    where = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    ours: dict[str, Any] = {"kernel": kernel, "return_lse": return_lse, "sinks": sinks, "attn_bias": attn_bias}
    return by_callers_names(_OF_QKV, flash_attn_varlen_func, q, k, v, *where, *tail, **ours, logit_scale=logit_scale)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` of q and one tensor ``(total_k, 2, hk, d)`` that holds k and v.

    All else is as there.
    """
    k, v = _unpack("kv", kv, 2, ("total",))
    where = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    ours: dict[str, Any] = {"kernel": kernel, "return_lse": return_lse, "sinks": sinks, "attn_bias": attn_bias}
    return by_callers_names(_OF_KV, flash_attn_varlen_func, q, k, v, *where, *tail, **ours, logit_scale=logit_scale)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> Result:
    """Attention of new queries over a key/value cache, to which new rows are appended in place first.

    The keys of sequence i are its rows ``cache_leftpad[i]`` to ``cache_seqlens[i]`` plus the new ones; masks and ALiBi
    count from the first of them and align the last query with the last key. Nothing waits for the GPU, so that a step
    can be captured in a CUDA graph; everything but what a GPU holds is checked before the cache is written to. There,
    rows past the end of the cache are not stored and lengths past it count as full; pages of a table and
    cache_batch_idx are taken as they are, and must be those of the cache.

    Args:
        q: ``(b, sq, h, d)``.
        k_cache: ``(b_cache, capacity, hk, d)``, or with ``block_table`` ``(all_pages, page_size, hk, d)`` with any page
            size; its batch axis may be longer than that of q.
        v_cache: ``(b_cache, capacity, hk, dv)``, or pages as those of k_cache.
        k: new keys ``(b, seqlen_new, hk, d)``, stored at rows ``cache_seqlens[i]`` on; needs v and cache_seqlens.
        v: new values ``(b, seqlen_new, hk, dv)``, stored bit by bit.
        rotary_cos: ``(seqlen_ro, rotary_dim / 2)`` in the dtype of q or f32, with seqlen_ro at least the capacity and
            beyond the last position of q (a GPU's lengths are not read: there, positions from seqlen_ro on count as
            the last): the first rotary_dim columns of q and the new k are rotated. Row j of the new k is at position
            ``cache_seqlens + j``; row j of q too with causal or a window, else at ``cache_seqlens``.
        rotary_sin: of the same shape.
        cache_seqlens: rows in use before the new ones, int32 ``(b,)`` or one int; all of them by default.
        cache_batch_idx: int32 ``(b,)``: the row of the batch axis of the cache that a sequence has; not with pages.
        cache_leftpad: int32 ``(b,)``: the first row in use of each sequence, 0 by default.
        block_table: int32 ``(b, pages)``: row j of sequence i lies in page ``block_table[i, j // page_size]``.
        softmax_scale: ``d ** -0.5`` by default.
        causal: see :func:`flash_attn_func`, with sk the number of keys of each sequence; so too window_size, softcap.
        window_size: (left, right), −1 for unbounded.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)`` before the mask.
        rotary_interleaved: whether columns 2i and 2i + 1 are a pair that is rotated, or else i and i + rotary_dim / 2.
        alibi_slopes: f32 ``(h,)`` or ``(b, h)``.
        num_splits: splits of the keys of a sequence, which are computed at once and then combined: 0 for
            as many as the kernel likes, 1 for no splitting, n for at most n and at most 128 (fewer where the steps that
            a kernel takes over the keys do not give n shares). A kernel that never splits keys takes any number. With 1
            or more, kernel and tiles are chosen without regard to the batch: a sequence gives the same bits, whatever
            the batch around it (but from ``reference`` and ``tiled``, whose products are torch's).
        return_softmax_lse: also return the LSE.
        kernel: the tag of the kernel to run; it runs or raises. None lets the dispatcher choose.
        return_lse: the same as return_softmax_lse.
        sinks: ``(h,)``: one more logit for every row of a head, which takes probability and gives no value.
        attn_bias: broadcastable to ``(b, h, sq, capacity)``; a sequence reads its top-left corner.
        logit_scale: f32 ``(h,)``: a factor of every score of a head, of any sign.

    Returns:
        out ``(b, sq, h, dv)``, and where asked the LSE ``(b, h, sq)``. Autocast changes nothing. There are no
        gradients: to ask for one raises NotImplementedError.

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it.
        NotImplementedError: the kernel named cannot run this, or no kernel can; the message says why.
    """
    if not (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor)):
        cache_seqlens = kvcache.lengths_tensor(whole_number(cache_seqlens), q, k_cache, v_cache, block_table)
    if return_lse is not False and return_lse is not True:
        return_lse = check_flag("return_lse", return_lse)
    if return_softmax_lse is not False and return_softmax_lse is not True:
        return_softmax_lse = check_flag("return_softmax_lse", return_softmax_lse)
    wants_lse, lengths_given = return_softmax_lse or return_lse, cache_seqlens is not None
    modifiers, cache = (alibi_slopes, attn_bias, sinks, logit_scale), (cache_leftpad, cache_batch_idx, block_table)
    inputs = Inputs(q, k_cache, v_cache, *modifiers, None, None, cache_seqlens, *cache)
    if lengths_given and k is v is rotary_cos is rotary_sin is None and type(num_splits) is int:
        # With lengths, no call is remembered that has gradients; and none whose tensors had to be copied or cut first.
        tag_and_options = kernel, softmax_scale, causal, "bottom-right", window_size, softcap, 0.0, False, num_splits
        found = ops.run_cached(q, k_cache, v_cache, tag_and_options, wants_lse, inputs)
        if found is not None:
            return found if wants_lse else found[0]
    out, lse = kvcache.attend_cache(
        inputs,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        kernel=kernel,
        num_splits=whole_number(num_splits),
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )
    out, lse = _undifferentiable("flash_attn_with_kvcache", out, lse, inputs, (k, v, rotary_cos, rotary_sin))
    return (out, lse) if wants_lse else out


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    logit_scale: torch.Tensor | None = None,
) -> dispatch.Explanation:
    """Which kernel :func:`flash_attn_func` would run for these arguments, and why each other one would not.

    Args:
        q: of which, as of k and v, only shape, strides, dtype, device and ``requires_grad`` are read.
        k: the keys.
        v: the values.
        return_attn_probs: not read, as what is returned along with the output changes no choice.
        kernel: the tag of a kernel, of which the text also says what would run in its place; or None.
        return_lse: not read.

    The other arguments are those of :func:`flash_attn_func`.

    Returns:
        An object that prints as text, with the chosen kernel, its configurations and their predicted times, and each
        other kernel's reason (:class:`flashlane.core.explanation.Explanation`).

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it.
        NotImplementedError: the kernel named cannot run this, or no kernel can; the message says why.
    """
    problem = ops.problem_of(
        Inputs(q, k, v, alibi_slopes=alibi_slopes, bias=attn_bias, sinks=sinks, logit_scale=logit_scale),
        names=_NAMES,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    return dispatch.explain_problem(problem, kernel)


def by_callers_names(names: dict[str, str], function: Callable[..., T], *arguments: Any, **ours: Any) -> T:
    """A call of a function whose arguments have other names than those of its caller: errors have the caller's."""
    try:
        return function(*arguments, **ours)
    except (TypeError, ValueError) as error:
        raise ops.renamed(error, names) from None


def _unpack(
    name: str, packed: torch.Tensor, count: int, outer: tuple[str, ...] = ("batch", "seqlen")
) -> tuple[torch.Tensor, ...]:
    check_strided(name, packed)
    at = len(outer)
    if packed.dim() != at + 3 or packed.shape[at] != count:
        axes = ", ".join((*outer, str(count), "heads", "head_dim"))
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be ({axes})")
    return packed.unbind(at)


def _attend(inputs: Inputs, tag_and_options: tuple[Any, ...], return_lse: bool, return_attn_probs: bool) -> Result:
    """A call that :func:`ops.run_cached` has not been asked for yet, unless q, k and v are all of its tensors."""
    if not return_attn_probs and (inputs.cu_seqlens_q is not None or not inputs.alone):
        found = ops.run_cached(inputs.q, inputs.k, inputs.v, tag_and_options, return_lse, inputs)
        if found is not None:
            return found if return_lse else found[0]
    if (table := contiguous(inputs.block_table)) is not inputs.block_table:
        return _attend(replaced(inputs, block_table=table), tag_and_options, return_lse, return_attn_probs)
    kernel, options = tag_and_options[0], CallOptions(*tag_and_options[1:])
    if return_attn_probs and options.dropout_p and isinstance(inputs.q, torch.Tensor):
        # The mask is wanted as well, so that the seed must be known here.
        seed = torch.randint(ops.SEEDS, (1,), dtype=torch.int64, device=inputs.q.device)
        inputs = replaced(inputs, dropout_seed=seed)
    if inputs.block_table is None:
        out, lse = ops.check_and_run(inputs, kernel, _NAMES, options)
    else:
        with torch.no_grad():
            out, lse = ops.check_and_run(inputs, kernel, _NAMES, options)
        out, lse = _undifferentiable("flash_attn_varlen_func with block_table", out, lse, inputs)
    if return_attn_probs:
        if not options.dropout_p:
            return out, lse, out.new_empty(0)
        from flashlane.api import attn_probs

        return out, lse, attn_probs.signed_probabilities(inputs, _NAMES, options)
    return (out, lse) if return_lse else out


_library = torch.library.Library("flashlane", "FRAGMENT")
_library.define("no_gradient(Tensor grad, SymInt[] size, str what) -> Tensor")


def _no_gradient(grad: torch.Tensor, size: list[int], what: str) -> torch.Tensor:
    raise NotImplementedError(f"{what} has no gradients; its inputs may not require any that are asked for")


_library.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("flashlane::no_gradient", lambda grad, size, what: grad.new_empty(size), lib=_library)
torch.library.register_vmap(
    "flashlane::no_gradient", lambda info, dims, *args: (_no_gradient(*args), None), lib=_library
)


class _Undifferentiable(torch.autograd.Function):
    """Results without a backward pass, for inputs that want one: the error comes when it is asked for, as forward-only
    calls with such tensors are common. It comes from an operator, so that a backward that is never run can be traced.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        what: str, out: torch.Tensor, lse: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.what, ctx.sizes = inputs[0], tuple(t.shape for t in inputs[3:])

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *(torch.ops.flashlane.no_gradient(do, size, ctx.what) for size in ctx.sizes)


def _undifferentiable(
    what: str, out: torch.Tensor, lse: torch.Tensor, inputs: Inputs, more: tuple[torch.Tensor | None, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    if not records_gradients():
        return out, lse
    wanting = [t for name in _FLOATS if (t := getattr(inputs, name)) is not None and t.requires_grad]
    wanting += [t for t in more if t is not None and t.requires_grad]
    return _Undifferentiable.apply(what, out, lse, *wanting) if wanting else (out, lse)
