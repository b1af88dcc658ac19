"""An attention implementation for Hugging Face ``transformers``: ``flashlane.register_transformers()``.

It is registered in two tables of the library: AttentionInterface, whose function a model's layers call, and
AttentionMaskInterface, whose function makes one mask for all layers. Ours makes no mask where the kernel's own causal
mask or sliding window is equivalent, and transformers' boolean mask otherwise: for padding, packed sequences, chunks
and static caches. If that mask hides padding on one side or the unused rows of a static cache, the lengths are stored
with it (:mod:`flashlane.integrations.transformers_padding`); layers that need no gradient use them in place of the
mask.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashlane.core import registry
from flashlane.core.problem import Inputs, wants_grad
from flashlane.core.validate import (
    SMALLEST_F32,
    check_cu_seqlens,
    check_number,
    check_starts,
    check_strided,
    contiguous,
)
from flashlane.integrations import transformers_padding as padded
from flashlane.ops import call as ops
from flashlane.ops.watched import holds_numbers, is_observed

_log = logging.getLogger(__name__)
NAME = "lane_attention"
MODIFIERS = ("position_bias", "softcap", "s_aux")
"""Arguments of a layer's attention that modify scores."""
WITH_SINKS = (
    "deepseek_v4",
    "flint",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "hy_v4",
    "hy_v4_vl_text",
    "openai_privacy_filter",
)
"""Types of models of which all layers pass ``s_aux``; no entry of their configuration says so."""
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "scale": "scaling",
    "dropout_p": "dropout",
    "sinks": "s_aux",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q",
    "max_seqlen_k": "max_length_k",
}
MASK_READERS = ("doge", "pegasus_x")
"""Types of models whose layers see later keys without the causal mask: Doge's make a mask of their own out of it, and
those of Pegasus-X's decoder say that they are not causal."""
_TAKEN_ELSEWHERE = {"block_indices": '"sdpa" or "eager"', "sinks": '"eager"'}
"""Arguments that change the result and have no counterpart here: MiniMax M3's blocks, Inkling 2's sinks of tokens."""
_BIAS = "_flashlane_bias"
"""The attribute of a mask that keeps it in additive form for the layers after the first."""
_APART = "_flashlane_apart"
"""The attribute of a mask that keeps it with packed sequences apart for the layers after the first."""


def register_transformers(name: str = NAME, kernel: str | None = None) -> str:
    """Make flashlane's attention known to ``transformers``, for ``model.set_attn_implementation(name)``.

    Args:
        name: its name there. It must not contain "flash", because transformers looks for a FlashAttention package of
            such a name; and it must not be "eager" or "sdpa", which are transformers' own.
        kernel: the tag of the kernel that every layer runs; the kernel runs or raises. None lets the dispatcher choose.

    Returns:
        The name.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the name cannot be used, or no kernel has that tag.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError('register_transformers needs transformers: pip install "flashlane[hf]"') from error
    if not isinstance(name, str) or not name.isidentifier() or "flash" in name or name in ("eager", "sdpa"):
        raise ValueError(
            f'name is {name!r}; it must be an identifier without "flash" in it (transformers would take it for a '
            f'FlashAttention package) and neither "eager" nor "sdpa", such as {NAME!r}'
        )
    if kernel is not None:
        registry.get(kernel)
    AttentionInterface.register(name, functools.partial(attention, kernel=kernel))
    AttentionMaskInterface.register(name, mask)
    return name


def modifiers_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The score modifiers of a model's layers, as fields of ``AttentionProblem``, from its ``config.json``.

    Raises:
        TypeError, ValueError: one is no number, or not one that it may be.
    """
    name = "attn_logit_softcapping"
    cap = check_number(name, config.get(name) or 0.0, 0.0, least=SMALLEST_F32)
    return {"softcap": cap, "sinks": config.get("model_type") in WITH_SINKS}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    kernel: str | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as a layer of a transformers model calls it.

    It is differentiable in query, key, value, s_aux and position_bias.

    Args:
        module: the layer, of which only ``is_causal`` is read.
        query: ``(b, h, sq, d)``.
        key: ``(b, hk, sk, d)``, its heads not expanded.
        value: ``(b, hk, sk, dv)``.
        attention_mask: None, or broadcastable to ``(b, h, sq, sk)``: bool, True where visible, or added to the scores.
            It alone decides what is visible; without it ``is_causal`` and ``sliding_window`` do.
        dropout: the probability with which each attention weight is dropped.
        scaling: softmax scale; ``d ** -0.5`` by default.
        is_causal: overrides that of the module.
        sliding_window: a query sees itself and ``sliding_window - 1`` keys before it (if not causal, also after it).
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: ``(h,)``, learnable sinks.
        position_bias: added to the scores, ``(1 or b, h, sq, sk)``.
        kernel: see :func:`register_transformers`.
        others: further arguments that transformers passes to every implementation, which are ignored; except
            ``cu_seq_lens_q``, … of packed sequences in one row of the batch, which a mask keeps apart, too, and
            ``indices`` ``(b, sq, n)`` of sparse attention (DeepSeek-V3.2), the only keys that each query may see.

    Returns:
        The output ``(b, sq, h, dv)``, contiguous, and None in place of the probabilities.

    Raises:
        NotImplementedError: probabilities (``output_attentions``), a ``head_mask``, ``block_indices`` or ``sinks`` of
            each token are given.
        TypeError, ValueError: an argument cannot be; the message names it.
    """
    for name in ("output_attentions", "head_mask"):
        wanted = others.get(name)
        if wanted is not None and wanted is not False:
            raise NotImplementedError(f'{name} is given; only set_attn_implementation("eager") has such a thing')
    for name, takes in _TAKEN_ELSEWHERE.items():
        if others.get(name) is not None:
            raise NotImplementedError(f"{name} is given; only set_attn_implementation({takes}) takes it")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout, "kernel": kernel}
    if attention_mask is None:
        # torch's rule, which transformers follows: one query is the last of the sequence, many are its first.
        last = query.shape[2] == 1 or _sees_last_queries(module)
        options["alignment"] = "bottom-right" if last else "top-left"
        options["causal"] = causal
        if sliding_window is not None:
            options["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if attention_mask is None and others.get("cu_seq_lens_q") is not None:
        if others.get("indices") is not None:
            raise NotImplementedError(
                "indices is given with cu_seq_lens_q; chosen keys of packed sequences need a mask"
            )
        return _packed(query, key, value, s_aux, position_bias, others, options), None
    if attention_mask is not None and others.get("cu_seq_lens_q") is not None and query.shape[0] == 1:
        attention_mask = _apart(attention_mask, others, query.shape[2], key.shape[2])
    if others.get("indices") is not None:
        attention_mask = _chosen(attention_mask, others["indices"], query, key.shape[2])
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    ranges = padded.attached(attention_mask, query, key) if position_bias is None else None
    if ranges is not None and dropout and ranges.first is not None:
        ranges = None  # dropout counts keys from the first of a range: a checkpoint's recomputation would draw others
    if ranges is not None and not wants_grad(Inputs(q, k, v, sinks=s_aux)):  # keys of a cache have no gradients
        inputs = Inputs(q, k, v, sinks=s_aux, seqused_k=ranges.stop, leftpad_k=ranges.first)
        options |= {"causal": ranges.causal, "alignment": ranges.alignment}
        if ranges.window is not None:
            options["window_size"] = (ranges.window - 1, 0)
    else:
        inputs = Inputs(q, k, v, bias=_bias(attention_mask, position_bias, query, key.shape[2]), sinks=s_aux)
    bias = "attention_mask" if position_bias is None else "position_bias"
    if attention_mask is not None and position_bias is not None:
        bias = "position_bias + attention_mask"
    out, _ = ops.attend(inputs, names={**_NAMES, "bias": bias}, **options)
    return out.contiguous(), None


def _chosen(mask: torch.Tensor | None, indices: torch.Tensor, query: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """A mask that also hides all keys but the chosen ones, which models make themselves for ``sdpa`` and ``eager``."""
    check_strided("indices", indices)
    if indices.dim() != 3 or indices.shape[:2] != (query.shape[0], query.shape[2]):
        wanted = f"({query.shape[0]}, {query.shape[2]}, chosen keys)"
        raise ValueError(f"indices has shape {tuple(indices.shape)}; it must be (batch, seqlen_q, n), {wanted}")
    seen = torch.zeros(*indices.shape[:2], seqlen_k, dtype=torch.bool, device=indices.device)
    seen = seen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return seen
    check_strided("attention_mask", mask)
    mask = mask[..., :seqlen_k]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


PACKED = ("cu_seq_lens_k", "max_length_q", "max_length_k")
"""What comes with ``cu_seq_lens_q``."""


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    others: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """Sequences packed into one row of the batch, as transformers' padding-free collator gives them."""
    if query.shape[0] != 1 or position_bias is not None:
        raise NotImplementedError(
            f"cu_seq_lens_q is given with a batch of {query.shape[0]}"
            + (" and a position_bias" if position_bias is not None else "")
            + "; packed sequences may only come in one row without one"
        )
    _check_packed(others)
    q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
    inputs = Inputs(
        q,
        k,
        v,
        sinks=sinks,
        cu_seqlens_q=others["cu_seq_lens_q"].int(),
        cu_seqlens_k=others["cu_seq_lens_k"].int(),
        max_seqlen_q=int(others["max_length_q"]),
        max_seqlen_k=int(others["max_length_k"]),
    )
    out, _ = ops.attend(inputs, names=_NAMES, **{**options, "alignment": "bottom-right"})
    return out.unsqueeze(0).contiguous()


def _check_packed(others: dict[str, Any]) -> None:
    missing = [name for name in PACKED if others.get(name) is None]
    if missing:
        raise ValueError(f"cu_seq_lens_q is given without {' and '.join(missing)}; packed sequences need all of them")
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        check_strided(name, others[name])


def _apart(mask: torch.Tensor, others: dict[str, Any], seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """A mask that also hides the keys of other packed sequences, made once for all layers.

    transformers does not read their lengths when it makes a mask, as it does of chunks, and under ``torch.compile`` of
    windows or, in some versions, always.
    """
    check_strided("attention_mask", mask)
    _check_packed(others)
    ends = others["cu_seq_lens_q"], others["cu_seq_lens_k"]
    for name, end in zip(("cu_seq_lens_q", "cu_seq_lens_k"), ends, strict=True):
        check_cu_seqlens(name, contiguous(end).int(), mask)
    tensors = mask, *ends
    if is_observed() or not holds_numbers(*tensors) or any(t.is_inference() for t in tensors):
        return _apart_now(mask, ends, seqlen_q, seqlen_k)
    state = *(padded.state_of(t) for t in tensors), seqlen_q, seqlen_k
    known, kept, _ = getattr(mask, _APART, (None, None, None))
    if known != state:
        for name, end, rows in (("cu_seq_lens_q", ends[0], seqlen_q), ("cu_seq_lens_k", ends[1], seqlen_k)):
            if end.is_cpu:
                check_starts(name, end, rows, "query" if name == "cu_seq_lens_q" else "key")
        with torch.inference_mode(False):
            kept = _apart_now(mask, ends, seqlen_q, seqlen_k)
        setattr(mask, _APART, (state, kept, ends))  # with the lengths, lest another tensor gets the id of one
    return kept


def _apart_now(
    mask: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor], seqlen_q: int, seqlen_k: int
) -> torch.Tensor:
    mask = mask[..., :seqlen_k]
    fits = mask.dim() > 1 and mask.shape[-2] in (1, seqlen_q) and mask.shape[-1] in (1, seqlen_k)
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return mask  # which is refused where all that is added to the scores is checked
    of_query, of_key = (
        torch.bucketize(torch.arange(length, device=mask.device), end[1:].int(), right=True)
        for length, end in zip((seqlen_q, seqlen_k), ends, strict=True)
    )
    same = (of_query[:, None] == of_key) & (of_query < ends[0].shape[0] - 1)[:, None]
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, -torch.inf)


def _bias(
    mask: torch.Tensor | None, position_bias: torch.Tensor | None, query: torch.Tensor, seqlen_k: int
) -> torch.Tensor | None:
    """The tensor that is added to the scores for a mask and a position bias; None for neither."""
    if mask is None:
        return position_bias
    check_strided("attention_mask", mask)
    if mask.shape[-1] > seqlen_k:  # some models pass a mask for more keys than exist so far
        mask = mask[..., :seqlen_k]
    if mask.dtype == torch.bool:
        if position_bias is not None:
            return position_bias.masked_fill(~mask, -torch.inf)
        return _additive(mask, query.dtype)
    return mask if position_bias is None else position_bias + mask


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as 0 (True) and −inf, made once for all layers; axes along which it is expanded stay of size 1.

    A graph that is recorded must compute it of the mask that it is given, and nothing says when one that was made in
    inference mode has changed: there, each layer makes it.
    """
    if is_observed() or not holds_numbers(mask) or mask.is_inference():
        return _additive_now(mask, dtype)
    known, kept = getattr(mask, _BIAS, (None, None))
    state = dtype, padded.state_of(mask)
    if known != state:
        with torch.inference_mode(False):  # autograd saves no tensor of that mode, and a later call may need it to
            kept = _additive_now(mask, dtype)
        setattr(mask, _BIAS, (state, kept))
    return kept


def _additive_now(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    small = mask
    for axis in range(mask.dim()):
        if small.stride(axis) == 0 and small.shape[axis] > 1:
            small = small.narrow(axis, 0, 1)
    return torch.zeros(small.shape, dtype=dtype, device=mask.device).masked_fill_(~small, -torch.inf)


# --- masks ---

_SKIPS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
"""The options that allow to make no mask."""


def mask(**options: Any) -> torch.Tensor | None:
    """The mask of a model's layers: None where the kernel's own causal mask and window are equivalent, else ``sdpa``'s.

    transformers calls it with keywords (``q_length``, ``kv_length``, ``mask_function``, …). For an encoder's padding it
    makes one row for all queries. Models that support ``eager`` alone get its mask. A model whose layers do not call
    the registered function is reported at debug level.
    """
    config = options.get("config")
    if config is not None and not torch.compiler.is_compiling() and _attends_by_itself(type(config)):
        _log.debug("%s runs attention of its own: its layers call no registered function", config.model_type)
    if config is not None and _knows_eager_alone(type(config)):
        from transformers import AttentionMaskInterface

        return AttentionMaskInterface()["eager"](**options | {name: False for name in _SKIPS if name in options})
    if _none_is_not_causal(config) or (_shares_keys(config) and _has_other_rows(options)):
        options["allow_is_causal_skip"] = False
    ranges = _ranges(options)
    if ranges is not None and ranges.whole:
        options["attention_mask"] = None  # no other function needs to test it again
    elif ranges is not None:
        if ranges.prefill and options.get("allow_is_causal_skip"):
            return None
        options |= {name: False for name in _SKIPS if name in options}
    if (
        options.get("allow_is_causal_skip", True)
        and options.get("local_size") is not None
        and _window_says_all(options)
    ):
        return None
    found = _sdpa_mask(options)
    if ranges is not None and found is not None:
        if options.get("attention_mask") is None and (not ranges.whole or options["q_length"] == 1):
            found = found.contiguous()  # of a static cache: generate of transformers 5.24 copies an expanded one
        padded.attach(found, ranges)
    return found


def _none_is_not_causal(config: Any) -> bool:
    """Whether a model's layers do not see causally where they get no mask, though its mask function is causal.

    Those of PaliGemma's decoder see both ways then, as ``sdpa``'s do; padded batches and static caches are causal.
    """
    both_ways = getattr(config, "use_bidirectional_attention", None) is True
    return both_ways or getattr(config, "model_type", None) in MASK_READERS


def _shares_keys(config: Any) -> bool:
    """Whether the last layers of a model reuse the keys of earlier ones.

    Those of Gemma 4 get the last queries alone (``logits_to_keep``), and these rows of a mask if there is one.
    """
    return bool(getattr(config, "num_kv_shared_layers", 0))


def _sees_last_queries(module: torch.nn.Module) -> bool:
    """Whether fewer queries than keys, without a mask, are the last ones: :func:`mask` makes one for other cases."""
    return bool(getattr(module, "is_kv_shared_layer", False)) and _shares_keys(getattr(module, "config", None))


def _has_other_rows(options: dict[str, Any]) -> bool:
    """Whether there are several queries and other keys than theirs, such as the unused rows of a static cache."""
    return options.get("q_length") not in (1, options.get("kv_length"))


def _sdpa_mask(options: dict[str, Any]) -> torch.Tensor | None:
    """The mask that ``sdpa`` gets; where it depends on keys alone, one row expanded to all queries.

    It is not made in inference mode, where a tensor does not count its changes: what is stored with it would be of no
    use.
    """
    from transformers import AttentionMaskInterface, masking_utils

    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _sdpa_mask(options)
    make, queries = AttentionMaskInterface()["sdpa"], options.get("q_length")
    of_keys_alone = getattr(masking_utils, "bidirectional_mask_function", None)
    if type(queries) is not int or of_keys_alone is None or options.get("mask_function") is not of_keys_alone:
        return make(**options)
    row = make(**{**options, "q_length": 1})
    return None if row is None else row.expand(-1, -1, queries, -1)


def _ranges(options: dict[str, Any]) -> padded.KeyRanges | None:
    """The keys of each sequence as ranges; None unless the mask is causal, a causal window, or of keys alone."""
    from transformers import masking_utils

    queries, keys, first = options.get("q_length"), options.get("kv_length"), options.get("kv_offset", 0)
    device, function = torch.device(options.get("device", "cpu")), options.get("mask_function")
    if device.type not in padded.DEVICES or not all(type(number) is int for number in (queries, keys, first)):
        return None
    padding = options.get("attention_mask")
    if options.get("use_vmap") or type(options.get("batch_size")) is not int or _observed(padding, device):
        return None
    window = _window_of(function)
    causal = window is not None or function is masking_utils.causal_mask_function
    if not causal and (function is not getattr(masking_utils, "bidirectional_mask_function", ...)):
        return None
    if padding is not None:
        if padding.dim() != 2 or padding.shape[0] != options["batch_size"]:
            return None
        absent = max(0, first + keys - padding.shape[-1])
        padding = torch.nn.functional.pad(padding, (0, absent))[:, first : first + keys]
    end = options.get("q_offset", 0) + queries - first if causal else keys
    return padded.key_ranges(padding, options["batch_size"], queries, keys, end, causal, window, device)


def _observed(padding: torch.Tensor | None, device: torch.device) -> bool:
    """Whether the code is traced or captured in a graph, so that it must not wait for the device."""
    from transformers import masking_utils

    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    is_tracing = getattr(masking_utils, "is_tracing", None)  # of transformers 5, which knows fake tensors too
    return torch.compiler.is_compiling() if is_tracing is None else bool(is_tracing(padding))


def _window_says_all(options: dict[str, Any]) -> bool:
    """Whether the mask is exactly the causal sliding window that the layers pass to :func:`attention`."""
    queries, keys = options.get("q_length"), options.get("kv_length")
    first, last = options.get("kv_offset", 0), options.get("q_offset", 0)
    padding = options.get("attention_mask")
    if not all(type(number) is int for number in (queries, keys, first, last)) or torch.compiler.is_compiling():
        return False
    if queries not in (1, keys) or last + queries != first + keys:
        return False
    if _window_of(options.get("mask_function")) != options["local_size"] or not _hands_over_windows(
        type(options["config"])
    ):
        return False
    return padding is None or (padding.shape[-1] == first + keys and bool(padding.all()))


def _window_of(function: Any) -> int | None:
    """The window of a mask function with the code of transformers' own causal sliding window; else None."""
    from transformers import masking_utils

    try:
        pattern = masking_utils.sliding_window_causal_mask_function(1)
        overlay, causal = _captured(function, pattern)["mask_functions"]
        if causal is not masking_utils.causal_mask_function:
            return None
        return _captured(overlay, masking_utils.sliding_window_overlay(1))["sliding_window"]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # another function, or a transformers that builds it differently: the whole mask is then made


def _captured(function: Callable[..., Any], like: Callable[..., Any]) -> dict[str, Any]:
    """The variables in a function's closure, by name, if it has the code of another function; else nothing."""
    if function.__code__ is not like.__code__:
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


@functools.cache
def _hands_over_windows(config: type) -> bool:
    """Whether the layers of a model of that configuration pass ``sliding_window`` to attention.

    Models that support FlashAttention should, since it learns of a window in no other way; but some do not. The code of
    their layers shows it.
    """
    from transformers import MODEL_MAPPING

    try:
        model = MODEL_MAPPING[config]
    except KeyError:
        return False
    models = model if isinstance(model, tuple | list) else (model,)
    return all(getattr(m, "_supports_flash_attn", False) and _passes_windows(m.__module__) for m in models)


def _passes_windows(module: str) -> bool:
    try:
        return re.search(r"(?<![.\w])sliding_window=", inspect.getsource(sys.modules[module])) is not None
    except (KeyError, OSError, TypeError):  # a module without a source: then the mask is made
        return False


@torch.compiler.assume_constant_result
def _knows_eager_alone(config: type) -> bool:
    """Whether the models of a configuration support neither sdpa nor FlashAttention, as far as they are found.

    Their layers count on eager's mask: ``is_causal`` can be wrong where there is none, and some add the mask to scores
    of their own.
    """
    return _supports_eager_alone(config)


@functools.cache
def _supports_eager_alone(config: type) -> bool:
    from transformers import PreTrainedModel

    for each in config.__mro__:
        found = sys.modules.get(each.__module__.replace("configuration_", "modeling_"))
        models = [model for model in vars(found).values() if isinstance(model, type)] if found else []
        models = [m for m in models if issubclass(m, PreTrainedModel) and m.__module__ == found.__name__]
        if models:
            return not any(m._supports_sdpa or m._supports_flash_attn for m in models)
    return False


@functools.cache
def _attends_by_itself(config: type) -> bool:
    """Whether the layers of a model of that configuration never call a function of AttentionInterface.

    The module of a model that does has the library's table of these functions. One without attention of its own is a
    model that is built of others.
    """
    from transformers import MODEL_MAPPING

    try:
        model = MODEL_MAPPING[config]
    except KeyError:
        return False
    first = model[0] if isinstance(model, tuple | list) else model
    names = vars(sys.modules[first.__module__])
    return "ALL_ATTENTION_FUNCTIONS" not in names and any(
        isinstance(found, type) and "Attention" in name and found.__module__ == first.__module__
        for name, found in names.items()
    )
