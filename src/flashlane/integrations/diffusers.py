"""An attention backend for Hugging Face ``diffusers``: ``flashlane.register_diffusers()``.

Then ``model.set_attention_backend("flashlane")`` selects it for a model, and ``with attention_backend("flashlane")``
for a block of code. The keys of the library's registry are an enumeration, to which this module adds a member.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlane.api.sdpa import bias_of
from flashlane.core.problem import Inputs
from flashlane.core.validate import check_flag, kind_of
from flashlane.ops import call as ops

NAME = "flashlane"
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "causal": "is_causal"}


def register_diffusers(name: str = NAME) -> str:
    """Make flashlane's attention known to ``diffusers``, for ``model.set_attention_backend(name)``.

    Args:
        name: its name there: a new identifier in lower case.

    Returns:
        The name.

    Raises:
        ImportError: diffusers is not installed, or has no registry of attention backends.
        ValueError: the name cannot be used, or is one of the library's own.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ImportError('register_diffusers needs diffusers: pip install "flashlane[diffusers]"') from error
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        raise ValueError(f"name is {name!r}; it must be an identifier of lower case, such as {NAME!r}")
    known = AttentionBackendName._value2member_map_.get(name)
    if known is not None and _AttentionBackendRegistry._backends.get(known) is not attention:
        raise ValueError(f"name is {name!r}, which is one of diffusers' own; it must be a new one, such as {NAME!r}")
    if known is None:
        known = _member(AttentionBackendName, name)
    _AttentionBackendRegistry.register(known)(attention)
    return name


def _member(names: Any, value: str) -> Any:
    """Add a member to an enumeration of strings, for which the language has no public way."""
    member = str.__new__(names, value)
    member._name_, member._value_ = value.upper(), value
    names._member_map_[member._name_] = names._value2member_map_[value] = member
    names._member_names_.append(member._name_)
    return member


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention as diffusers calls it; differentiable in query, key, value and a float attn_mask.

    It takes no ``_parallel_config``, so that diffusers itself refuses context parallelism with this backend.

    Args:
        query: ``(b, sq, h, d)``.
        key: ``(b, sk, hk, d)``; hk is h, or with ``enable_gqa`` a divisor of it.
        value: ``(b, sk, hk, dv)``.
        attn_mask: broadcastable to ``(b, h, sq, sk)``, or of keys alone, ``(b, sk)``: bool, True where a key takes
            part, or added to the scores.
        dropout_p: the probability with which each attention weight is dropped.
        is_causal: key j is visible to query i iff ``j <= i``, as in torch.
        scale: ``d ** -0.5`` by default.
        enable_gqa: allow fewer heads in key and value.
        window_size: (left, right), −1 for unbounded.
        return_lse: also return the LSE ``(b, sq, h)``, as the library's FlashAttention backends do.

    Returns:
        The output ``(b, sq, h, dv)``; with ``return_lse`` (output, LSE).

    Raises:
        TypeError: query, key or value is no tensor of four dimensions, or a flag is neither True nor False.
        ValueError: ``is_causal`` and ``attn_mask`` are both given, or the heads differ without ``enable_gqa``.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, torch.Tensor) or t.dim() != 4:
            found = f"a tensor of {t.dim()} dimensions" if isinstance(t, torch.Tensor) else kind_of(t)
            raise TypeError(f"{name} is {found}; it must be a torch.Tensor (batch, seqlen, heads, head_dim)")
    is_causal, enable_gqa = check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)
    return_lse = check_flag("return_lse", return_lse)
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal is True and attn_mask is given; only one of them may be")
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key has {key.shape[2]} heads and query has {query.shape[2]}; they may differ only when enable_gqa is True"
        )
    if isinstance(attn_mask, torch.Tensor) and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    inputs = Inputs(query, key, value, bias=bias_of(attn_mask, query))
    options = {"causal": is_causal, "scale": scale, "window_size": window_size, "dropout_p": dropout_p}
    out, lse = ops.attend(inputs, names=_NAMES, alignment="top-left", **options)
    return (out, lse.transpose(1, 2)) if return_lse else out
