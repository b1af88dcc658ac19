"""flashlane under torch's own attention: ``flashlane.integrations.torch.enable()``.

torch has a registry of flash attention implementations (``torch.nn.attention.register_flash_attention_impl``), whose
kernels run torch's flash operators. flashlane is :data:`NAME` there. These then run flashlane's kernels, compiled or
not: ``F.scaled_dot_product_attention`` where it takes its flash backend, ``torch.nn.attention.varlen.varlen_attn``,
``nn.MultiheadAttention``, ``nn.TransformerEncoder``, nested tensors and torch's context parallel.

FlexAttention is not in that registry: :mod:`flashlane.integrations.torch_flex` replaces its functions.

Calls that flashlane does not support (dropout, debug masks) run torch's own kernel; this module's logger reports each
at debug level. Calls for which torch takes another backend do not reach flashlane: :func:`explain` says which.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, varlen
from torch.nn.attention.bias import CausalVariant

from flashlane.api import functional
from flashlane.core import dispatch
from flashlane.core.arch import autocast
from flashlane.core.problem import CallOptions, Inputs
from flashlane.core.validate import is_causal_bias, rows_aligned, whole_number
from flashlane.integrations.flash_attn import lengths
from flashlane.ops import call as ops
from flashlane.ops import call_cache, schema
from flashlane.ops.watched import is_watched

__all__ = ["NAME", "disable", "enable", "enabled", "explain", "is_enabled"]

NAME = "flashlane"
"""The name of the implementation in torch's registry."""
_log = logging.getLogger(__name__)


def enable(*, prefer: bool = True) -> None:
    """Run flashlane's kernels under torch's flash attention operators on CUDA, until :func:`disable`.

    It deactivates another implementation of torch's registry (FlashAttention-3 or -4), which :func:`disable` activates
    again. Where flashlane is active already, ``prefer`` still takes effect.

    Args:
        prefer: also make SDPA try its flash backend first, and ``varlen_attn``: on Hopper, recent versions of torch try
            cuDNN first. A backend that is disabled (``sdpa_kernel``, ``torch.backends.cuda``) stays disabled.

    Raises:
        RuntimeError: torch finds no CUDA device; its registry has operators for CUDA only.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device; its flash attention implementations exist for CUDA only")
    before = is_enabled()
    if not before:
        _activate()
    try:
        if prefer and not _order_before:
            _prefer_flash()
    except BaseException:
        if not before:
            disable()
        raise


def disable() -> None:
    """Undo :func:`enable`; leaves another implementation that has taken its place."""
    global _without_registry, _replaced
    _restore_order()
    replaced, _replaced = _replaced, None
    if _without_registry is not None:
        _without_registry.remove()
        _without_registry = None
    elif is_enabled():
        torch.nn.attention.restore_flash_attention_impl()
        if replaced is not None:
            torch.nn.attention.activate_flash_attention_impl(replaced)


def is_enabled() -> bool:
    """Whether torch's flash attention operators are flashlane's now."""
    if not _has_registry():
        return _without_registry is not None
    return torch.nn.attention.current_flash_attention_impl() == NAME


def _has_registry() -> bool:
    """Whether torch has a registry whose implementations can be deactivated; in that of torch 2.10 they stay."""
    return hasattr(torch.nn.attention, "restore_flash_attention_impl")


@contextlib.contextmanager
def enabled(*, prefer: bool = True) -> Iterator[None]:
    """:func:`enable` for a block of code; what was active and preferred before is so again after it."""
    before, preferred = is_enabled(), bool(_order_before)
    enable(prefer=prefer)
    try:
        yield
    finally:
        if not before:
            disable()
        elif not preferred:
            _restore_order()


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """What ``F.scaled_dot_product_attention`` of these arguments runs now: flashlane, or torch's own kernel, and why.

    It asks torch for its choice among its backends, so that ``sdpa_kernel`` and the switches of ``torch.backends.cuda``
    count. The arguments are those of that function, a ``torch.nn.attention.bias.CausalBias`` among them.

    Returns:
        One line; where flashlane runs, followed by the text of :func:`flashlane.explain`.

    Raises:
        ValueError: ``is_causal`` is True, and ``attn_mask`` is a ``CausalBias``.
    """
    query, key, value = (autocast(t) for t in (query, key, value))
    lower_right = False
    if is_causal_bias(attn_mask):
        if is_causal:
            raise ValueError("is_causal is True and attn_mask is a CausalBias; only one of them may be")
        square = attn_mask.seq_len_q == attn_mask.seq_len_kv
        lower_right = attn_mask.variant is CausalVariant.LOWER_RIGHT and not square
        is_causal, attn_mask = not lower_right, attn_mask if lower_right else None
    if lower_right:  # torch asks for each backend itself, in an order of its own
        backend = _backend_of_lower_right(query, key, value, attn_mask, dropout_p, enable_gqa)
    else:
        mask_and_more = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        choice = torch._fused_sdp_choice(query, key, value, **mask_and_more, scale=scale, enable_gqa=enable_gqa)
        backend = SDPBackend(choice)
    reason = _not_under_flashlane(query, key, value, attn_mask, dropout_p, is_causal, backend)
    if reason is not None:
        return f"torch's own kernel, of its backend {backend.name}: {reason}"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    missing = -query.shape[-1] % FLASH_ALIGNMENT
    q, k, v = (torch.nn.functional.pad(t, (0, missing)) if missing else t for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    deterministic = torch.are_deterministic_algorithms_enabled()
    causal = is_causal or lower_right
    found = functional.explain(q, k, v, softmax_scale=scale, causal=causal, deterministic=deterministic)
    return f"flashlane, under torch's backend {backend.name}\n{found}"


def _backend_of_lower_right(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    dropout_p: float,
    enable_gqa: bool,
) -> SDPBackend:
    """What a ``CausalBias`` of fewer or more queries than keys, aligned at the last ones, runs in torch.

    It is flash where flash can run without a mask, then the efficient one, else what takes the mask as a tensor.
    """
    params = SDPAParams(query, key, value, None, dropout_p, False, enable_gqa)
    if can_use_flash_attention(params):
        return SDPBackend.FLASH_ATTENTION
    if can_use_efficient_attention(params):
        return SDPBackend.EFFICIENT_ATTENTION
    mask = attn_mask._materialize(query.device)
    return SDPBackend(torch._fused_sdp_choice(query, key, value, mask, dropout_p, False, enable_gqa=enable_gqa))


def _not_under_flashlane(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    backend: SDPBackend,
) -> str | None:
    """Why flashlane does not run a call for which torch chose that backend; None: it does."""
    if not is_enabled():
        return "flashlane is not enabled"
    if query.device.type != DEVICE:
        return f"query is on {query.device}; flashlane is under torch's operators for CUDA only"
    if backend == SDPBackend.FLASH_ATTENTION:
        try:
            return _refuse(dropout_p)
        except NotImplementedError as error:
            return str(error)
    if not torch.backends.cuda.flash_sdp_enabled():
        return "the flash backend is disabled"
    lower_right = is_causal_bias(attn_mask)  # for which torch takes flash first, whatever its order is
    if attn_mask is not None and not lower_right:
        return "attn_mask is given, which torch's flash backend does not take"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"query has dtype {query.dtype}; torch's flash backend takes float16 and bfloat16"
    if query.shape[-1] > FLASH_HEAD_DIM:
        return f"query has head dim {query.shape[-1]}; torch's flash backend takes at most {FLASH_HEAD_DIM}"
    if len({t.shape[-1] for t in (query, key, value)}) > 1:
        return "query, key and value have different head dims, which torch's flash backend does not take"
    if is_causal and query.shape[-2] != key.shape[-2]:
        counts = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
        return f"is_causal is True with {counts}; torch's flash backend takes as many queries as keys"
    first = SDPBackend(torch._C._get_sdp_priority_order()[0])
    if first != SDPBackend.FLASH_ATTENTION and not lower_right:
        return f"torch tries {first.name} first; enable(prefer=True) puts its flash backend first"
    return "torch's flash backend refuses it; torch.backends.cuda.can_use_flash_attention(..., debug=True) says why"


DEVICE = "cuda"
"""The type of device whose operators in torch run flashlane."""
FLASH_HEAD_DIM = 256
"""The largest head dim that torch's flash backend takes."""
FLASH_ALIGNMENT = 8
"""torch pads head dims to a multiple of it before its flash backend gets them."""
_order_before: list[list[int]] = []
"""torch's order of SDPA's backends before :func:`enable`, if that changed it."""
_varlen_before: dict[str, Callable[..., Any]] = {}
"""The functions of torch's varlen module that :func:`enable` replaced, by name."""
_replaced: str | None = None
"""The implementation of torch's registry that :func:`enable` deactivated."""


def _activate() -> None:
    global _without_registry, _replaced
    if not _has_registry():
        _without_registry = _register()
        return
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_register)
    before = torch.nn.attention.current_flash_attention_impl()
    try:
        torch.nn.attention.activate_flash_attention_impl(NAME)
    except BaseException:  # torch has deactivated the other one by then
        if before is not None:
            torch.nn.attention.activate_flash_attention_impl(before)
        raise
    _replaced = before


def _prefer_flash() -> None:
    _let_torch_order()
    before = [int(backend) for backend in torch._C._get_sdp_priority_order()]
    first = int(SDPBackend.FLASH_ATTENTION)
    torch._C._set_sdp_priority_order([first, *(backend for backend in before if backend != first)])
    _order_before.append(before)
    _prefer_flash_in_varlen()


def _prefer_flash_in_varlen() -> None:
    """Make ``varlen_attn`` take its flash operator, where torch has a choice.

    Since torch 2.14 it takes cuDNN for long sequences on Hopper, whatever SDPA's order is: that version asks
    ``_can_use_cudnn`` alone, and later ones follow SDPA's order only within ``sdpa_kernel(..., set_priority=True)``.
    The LSE of both operators has one layout, so that the backward of either takes the forward's of the other.
    """
    follows_order = getattr(varlen, "_is_sdp_priority_order_active", None)
    flash_first = [int(SDPBackend.FLASH_ATTENTION), int(SDPBackend.CUDNN_ATTENTION)]
    if follows_order is None:
        name, function = "_can_use_cudnn", lambda *args, **kwargs: False
    else:
        name = "_get_sdp_priority_order"
        function = torch.compiler.assume_constant_result(
            lambda: torch._C._get_sdp_priority_order() if follows_order() else flash_first
        )
    if hasattr(varlen, name):
        _varlen_before[name] = getattr(varlen, name)
        setattr(varlen, name, function)


def _let_torch_order() -> None:
    """Make a first choice of a backend, at which torch sets its own order, which would replace ours."""
    t = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
    torch._fused_sdp_choice(t, t, t)


def _restore_order() -> None:
    if _order_before:
        torch._C._set_sdp_priority_order(_order_before.pop())
    while _varlen_before:
        setattr(varlen, *_varlen_before.popitem())


# --- the operators ---


class Handle:
    """The operators' implementations, until :meth:`remove`."""

    def __init__(self, key: str = "CUDA") -> None:
        self.library = torch.library.Library("aten", "IMPL", key)
        self.before: dict[str, Any] = {}
        """The kernel that each operator had."""
        for name, implementation in OPERATORS.items():
            if not hasattr(torch.ops.aten, name):
                continue
            with contextlib.suppress(AttributeError, RuntimeError):  # a torch without that function, or that kernel
                self.before[name] = torch.library.get_kernel(f"aten::{name}", key)
            function = self._falling_back(name, implementation)
            with warnings.catch_warnings():  # torch warns that a kernel is overridden, which is intended
                warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
                self.library.impl(name, function, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None

    def _falling_back(self, name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                with torch.no_grad():
                    return implementation(*args, **kwargs)
            except NotImplementedError as error:
                before = self.before.get(name)
                if before is None:
                    raise
                _log.debug("aten::%s runs torch's own kernel: %s", name, error)
            return before.call_boxed(keyset, *args, **kwargs)

        return run


def _register() -> Handle:
    return Handle()


_without_registry: Handle | None = None
"""The operators of :func:`enable` in a torch without the registry."""

Forward = tuple[torch.Tensor, torch.Tensor]


def _refuse(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p:
        # The backward gets the state of torch's generator, which does not say whose kernel drew the mask.
        raise NotImplementedError(f"dropout_p is {dropout_p:g}; torch's kernels draw their own mask")
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask is True; only torch's kernels have that mask")


def _options(
    is_causal: bool,
    scale: float | None,
    left: int | None = None,
    right: int | None = None,
    num_splits: int | None = None,
) -> CallOptions:
    window = tuple(-1 if side is None else int(side) for side in (left, right))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return CallOptions(
        scale,
        is_causal,
        window_size=window,
        deterministic=deterministic,
        num_splits=0 if num_splits is None else num_splits,
    )


def _attend(inputs: Inputs, options: CallOptions, out: torch.Tensor | None) -> Forward:
    """The output, written into ``out`` if that is given (with any strides), and the LSE.

    Kernels write vectors of 16 bytes, on which the rows of ``out`` may not start.
    """
    if out is None or is_watched(inputs) or not rows_aligned(out):
        found, lse = ops.attend(inputs, **options._asdict())
        return found if out is None else out.copy_(found), lse
    problem = ops.problem_of(inputs, **options._asdict())
    _, lse = call_cache.allocate(inputs.q, inputs.v)
    dispatch.select(problem).forward(problem, inputs, out, lse)
    return out, lse


def _sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: Any,
    max_k: Any,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    **modifiers: torch.Tensor | None,
) -> tuple[Inputs, lengths.Side | None]:
    """The tensors of a call, and, if k and v must be packed first, how. Modifiers have the names of ``Inputs``."""
    if cum_seq_q is None:
        return Inputs(q, k, v, seqused_k=seqused_k, block_table=block_table, **modifiers), None
    packed = {"cu_seqlens_q": cum_seq_q, "max_seqlen_q": whole_number(max_q), **modifiers}
    if block_table is not None:
        if seqused_k is None:
            raise ValueError("seqused_k is None and block_table is given; it must be the lengths, int32 (batch,)")
        cu_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        longest = min(whole_number(max_k), block_table.shape[1] * k.shape[1])
        packed |= {"cu_seqlens_k": cu_k, "max_seqlen_k": longest, "block_table": block_table.contiguous()}
        return Inputs(q, k, v, **packed), None
    if seqused_k is None:
        return Inputs(q, k, v, **packed, cu_seqlens_k=cum_seq_k, max_seqlen_k=whole_number(max_k)), None
    keys = lengths.side("k", k, cum_seq_k, seqused_k, whole_number(max_k))
    packed |= {"cu_seqlens_k": keys.cu_seqlens, "max_seqlen_k": keys.longest}
    return Inputs(q, keys.packed(k), keys.packed(v), **packed), keys


def _unused(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Placeholders for the generator's state and the debug mask, which nothing reads without dropout."""
    state = q.new_empty((2,), dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    return *state, q.new_empty(0)


def _flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    **tensors: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Rows ``(b, s, h, d)``, or with ``cum_seq_q`` packed ``(total, h, d)``; causal is bottom-right aligned.

    ``tensors`` are the operator's optional ones, which have the names of ``Inputs`` in torch's schema.
    """
    _refuse(dropout_p, return_debug_mask)
    options = _options(is_causal, scale, window_size_left, window_size_right, num_splits)
    inputs, _ = _sequences(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, **tensors)
    if out is None and not query.is_contiguous():
        out = torch.empty_like(query)
    found, lse = _attend(inputs, options, out)
    return found, lse, *_unused(query)


def _flash_attention_forward_no_dropout_inplace(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _flash_attention_forward(*args, **kwargs, out=out)[1]


def _flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    _refuse(dropout_p)
    options = _options(is_causal, scale, window_size_left, window_size_right)
    inputs, _ = _sequences(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    return _gradients(inputs, options, grad_out, out, logsumexp)


def _gradients(
    inputs: Inputs, options: CallOptions, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    operands = schema.operands(inputs, options, True, None)
    found = torch.ops.flashlane.backward(out, lse, grad_out, None, False, *operands)
    return tuple(_laid_out(grad, t) for grad, t in zip(found, (inputs.q, inputs.k, inputs.v), strict=False))


def _laid_out(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient with the strides that torch gives it, on which compiled graphs rely."""
    wanted = torch.empty_like(like)
    same = all(a == b for a, b, n in zip(t.stride(), wanted.stride(), t.shape, strict=True) if n > 1)
    return t if same else wanted.copy_(t)


def _scaled_dot_product_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Attention of tensors ``(b, h, s, d)``, whose heads come before their rows."""
    _refuse(dropout_p, return_debug_mask)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    rows_outside = query.stride(0) >= query.stride(2) >= query.stride(1)  # the order that flashlane's outputs have
    out = None if rows_outside else torch.empty_like(query).transpose(1, 2)
    found, lse = _attend(Inputs(q, k, v), _options(is_causal, scale), out)
    return found.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _scaled_dot_product_flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    _refuse(dropout_p)
    q, k, v, of_out, of_grad = (t.transpose(1, 2) for t in (query, key, value, out, grad_out))
    found = _gradients(Inputs(q, k, v), _options(is_causal, scale), of_grad, of_out, logsumexp)
    return tuple(grad.transpose(1, 2) for grad in found)


OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        _flash_attention_forward,
        _flash_attention_forward_no_dropout_inplace,
        _flash_attention_backward,
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
    )
}
"""The implementations by the names of their operators in ``torch.ops.aten``, which an older torch may lack."""
