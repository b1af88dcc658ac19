"""An attention implementation for Hugging Face ``transformers``: ``flashlane.register_transformers()``.

It goes into the library's two tables: AttentionInterface, whose function a model's layers call, and
AttentionMaskInterface, whose function makes the mask once for all layers. Ours makes none where the kernel's own causal
mask or sliding window says the same, and transformers' boolean mask for all else: padding, packed sequences, chunks,
static caches. Where that is padding on one side or the rest of a static cache, the lengths are kept with it
(:mod:`flashlane.integrations.transformers_padding`), and layers that need no gradient read these and no mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from flashlane.core import registry
from flashlane.core.problem import Inputs, wants_grad
from flashlane.integrations import transformers_padding as padded
from flashlane.ops import call as ops

NAME = "lane_attention"
MODIFIERS = ("position_bias", "softcap", "s_aux")
"""What a layer may pass to attention that modifies scores."""
WITH_SINKS = ("gpt_oss",)
"""Types of models whose layers pass ``s_aux``; no entry of their configuration says so."""
_BIAS = "_flashlane_bias"
"""The attribute of a mask that keeps it in additive form for the layers after the first."""


def register_transformers(name: str = NAME, kernel: str | None = None) -> str:
    """Make flashlane's attention known to ``transformers``, for ``model.set_attn_implementation(name)``.

    Args:
        name: what it is called there. It must not contain "flash": transformers takes such a name for a
            FlashAttention package and looks for that; nor "eager" or "sdpa", which are its own.
        kernel: the tag of the kernel that every layer runs; it runs or raises. None lets the dispatcher choose.

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
    """The score modifiers of a model's layers, as fields of ``AttentionProblem``, from its ``config.json``."""
    cap = float(config.get("attn_logit_softcapping") or 0.0)
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
    """What a layer of a transformers model calls; differentiable in query, key, value, s_aux and position_bias.

    Args:
        module: the layer, of which only ``is_causal`` is read.
        query: ``(b, h, sq, d)``.
        key: ``(b, hk, sk, d)``, its heads not expanded.
        value: ``(b, hk, sk, dv)``.
        attention_mask: None, or broadcastable to ``(b, h, sq, sk)``: bool, True where visible, or added to the scores.
            It says all about visibility: without it the layer is causal, if it is, within ``sliding_window`` keys.
        dropout: share of the probabilities that is dropped.
        scaling: softmax scale; ``d ** -0.5`` by default.
        is_causal: overrides that of the module.
        sliding_window: a query sees itself and so many keys less one before it (if not causal, also after it).
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: ``(h,)``, learnable sinks.
        position_bias: added to the scores, ``(1 or b, h, sq, sk)``.
        kernel: see :func:`register_transformers`.
        others: what transformers passes to every implementation and none needs here; packed sequences
            (``cu_seq_lens_q``, …) are followed where there is no mask.

    Returns:
        The output ``(b, sq, h, dv)``, contiguous, and None in place of the probabilities.

    Raises:
        NotImplementedError: probabilities (``output_attentions``) or a ``head_mask`` are asked for.
    """
    for name in ("output_attentions", "head_mask"):
        wanted = others.get(name)
        if wanted is not None and wanted is not False:
            raise NotImplementedError(f'{name} is given; only set_attn_implementation("eager") has such a thing')
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    asked = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout, "kernel": kernel}
    if attention_mask is None:
        # torch's rule, which transformers follows: one query is the last of the sequence, many are its first.
        asked["alignment"] = "bottom-right" if query.shape[2] == 1 else "top-left"
        asked["causal"] = causal
        if sliding_window is not None:
            asked["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if attention_mask is None and others.get("cu_seq_lens_q") is not None:
        return _packed(query, key, value, s_aux, position_bias, others, asked), None
    inputs = Inputs(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), sinks=s_aux)
    ranges = padded.attached(attention_mask, query, key) if position_bias is None else None
    if ranges is not None and not wants_grad(inputs):  # keys of a cache have no gradients
        inputs = replace(inputs, seqused_k=ranges.stop, leftpad_k=ranges.first)
        asked |= {"causal": ranges.causal, "alignment": ranges.alignment}
        if ranges.window is not None:
            asked["window_size"] = (ranges.window - 1, 0)
    else:
        inputs = replace(inputs, bias=_bias(attention_mask, position_bias, query, key.shape[2]))
    out, _ = ops.attend(inputs, **asked)
    return out.contiguous(), None


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    others: dict[str, Any],
    asked: dict[str, Any],
) -> torch.Tensor:
    """Sequences packed into one row of the batch, as transformers' padding-free collator gives them."""
    if query.shape[0] != 1 or position_bias is not None:
        raise NotImplementedError(
            f"cu_seq_lens_q is given with a batch of {query.shape[0]}"
            + (" and a position_bias" if position_bias is not None else "")
            + "; packed sequences may only come in one row without one"
        )
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
    out, _ = ops.attend(inputs, **{**asked, "alignment": "bottom-right"})
    return out.unsqueeze(0).contiguous()


def _bias(
    mask: torch.Tensor | None, position_bias: torch.Tensor | None, query: torch.Tensor, seqlen_k: int
) -> torch.Tensor | None:
    """A mask and a position bias as what is added to the scores."""
    if mask is None:
        return position_bias
    if mask.shape[-1] > seqlen_k:  # some models give a mask of more keys than there are yet
        mask = mask[..., :seqlen_k]
    if mask.dtype == torch.bool:
        if position_bias is not None:
            return position_bias.masked_fill(~mask, -torch.inf)
        return _additive(mask, query.dtype)
    return mask if position_bias is None else position_bias + mask


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a boolean mask is True, else −inf; axes that it was expanded along stay 1. Made once for all layers."""
    keeps = not torch.compiler.is_compiling()
    kept = getattr(mask, _BIAS, None) if keeps else None
    version = None if mask.is_inference() else mask._version
    if kept is not None and kept[0] == (dtype, version):
        return kept[1]
    small = mask
    for axis in range(mask.dim()):
        if small.stride(axis) == 0 and small.shape[axis] > 1:
            small = small.narrow(axis, 0, 1)
    made = torch.zeros(small.shape, dtype=dtype, device=mask.device).masked_fill_(~small, -torch.inf)
    if keeps:
        setattr(mask, _BIAS, ((dtype, version), made))
    return made


# --- masks ---


def mask(**asked: Any) -> torch.Tensor | None:
    """The mask of a model's layers: None where the kernel's own causal mask and window say the same, else as ``sdpa``.

    Called by transformers with keywords (``q_length``, ``kv_length``, ``mask_function``, …). Of an encoder's padding
    one row is made for all queries.
    """
    ranges = _ranges(asked)
    if ranges is not None and ranges.whole:
        asked["attention_mask"] = None  # nobody needs to look at it again
    elif ranges is not None:
        if ranges.prefill and asked.get("allow_is_causal_skip"):
            return None
        asked |= {name: False for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip") if name in asked}
    if asked.get("allow_is_causal_skip", True) and asked.get("local_size") is not None and _window_says_all(asked):
        return None
    made = _made(asked)
    if ranges is not None and made is not None:
        padded.attach(made, ranges)
    return made


def _made(asked: dict[str, Any]) -> torch.Tensor | None:
    """The mask as ``sdpa`` has it; of what depends on keys alone, one row for all queries."""
    from transformers import AttentionMaskInterface, masking_utils

    make, queries = AttentionMaskInterface()["sdpa"], asked.get("q_length")
    of_keys_alone = getattr(masking_utils, "bidirectional_mask_function", None)
    if type(queries) is not int or of_keys_alone is None or asked.get("mask_function") is not of_keys_alone:
        return make(**asked)
    row = make(**{**asked, "q_length": 1})
    return None if row is None else row.expand(-1, -1, queries, -1)


def _ranges(asked: dict[str, Any]) -> padded.KeyRanges | None:
    """The stretches of keys that a mask is asked to say, where it is causal, a causal window, or of keys alone."""
    from transformers import masking_utils

    queries, keys, first = asked.get("q_length"), asked.get("kv_length"), asked.get("kv_offset", 0)
    device, function = torch.device(asked.get("device", "cpu")), asked.get("mask_function")
    if device.type not in padded.DEVICES or not all(type(number) is int for number in (queries, keys, first)):
        return None
    padding = asked.get("attention_mask")
    if asked.get("use_vmap") or type(asked.get("batch_size")) is not int or _observed(padding, device):
        return None
    window = _window_of(function)
    causal = window is not None or function is masking_utils.causal_mask_function
    if not causal and (function is not getattr(masking_utils, "bidirectional_mask_function", ...)):
        return None
    if padding is not None:
        if padding.dim() != 2 or padding.shape[0] != asked["batch_size"]:
            return None
        absent = max(0, first + keys - padding.shape[-1])
        padding = torch.nn.functional.pad(padding, (0, absent))[:, first : first + keys]
    end = asked.get("q_offset", 0) + queries - first if causal else keys
    return padded.key_ranges(padding, asked["batch_size"], queries, keys, end, causal, window, device)


def _observed(padding: torch.Tensor | None, device: torch.device) -> bool:
    """Whether something traces this code or captures it in a graph, so that nothing may wait for the device."""
    from transformers import masking_utils

    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    is_tracing = getattr(masking_utils, "is_tracing", None)  # of transformers 5, which knows fake tensors too
    return torch.compiler.is_compiling() if is_tracing is None else bool(is_tracing(padding))


def _window_says_all(asked: dict[str, Any]) -> bool:
    """Whether what is visible is just a causal sliding window, which the layers hand to :func:`attention`."""
    queries, keys = asked.get("q_length"), asked.get("kv_length")
    first, last = asked.get("kv_offset", 0), asked.get("q_offset", 0)
    padding = asked.get("attention_mask")
    if not all(type(number) is int for number in (queries, keys, first, last)) or torch.compiler.is_compiling():
        return False
    if queries not in (1, keys) or last + queries != first + keys:
        return False
    if _window_of(asked.get("mask_function")) != asked["local_size"] or not _hands_over_windows(type(asked["config"])):
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
        return None  # not that function, or a transformers that makes it otherwise: the mask is then made in full


def _captured(function: Callable[..., Any], like: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over, by name, if it has the code of another."""
    if function.__code__ is not like.__code__:
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


@functools.cache
def _hands_over_windows(config: type) -> bool:
    """Whether the layers of a model of that configuration pass ``sliding_window`` to attention.

    Those that support FlashAttention must: it has no other way to learn of a window.
    """
    from transformers import MODEL_MAPPING

    try:
        model = MODEL_MAPPING[config]
    except KeyError:
        return False
    models = model if isinstance(model, tuple | list) else (model,)
    return all(getattr(m, "_supports_flash_attn", False) for m in models)
