"""``F.scaled_dot_product_attention`` as context-parallel attention, as under torch's own ``context_parallel``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from flashlane.core.validate import kind_of
from flashlane.distributed.agree import raise_on_all
from flashlane.distributed.comm import Grid, Group
from flashlane.distributed.functional import Method, check_method, context_parallel_attn_func
from flashlane.distributed.layout import Layout, check_layout


@contextlib.contextmanager
def context_parallel_sdpa(
    group: Group = None, *, method: Method = "auto", layout: Layout | None = None, seqlen: int | None = None
) -> Iterator[None]:
    """A context in which ``F.scaled_dot_product_attention`` of torch is exact attention over the tokens of all ranks.

    Enter it inside torch's ``context_parallel``, which divides the buffers and whose attention it replaces::

        with context_parallel(mesh, buffers=(x,), buffer_seq_dims=(1,)), context_parallel_sdpa(mesh):
            model(x).backward(...)

    or by itself, with tensors from :func:`flashlane.distributed.shard_sequence`.

    Args:
        group: the ranks, as :func:`flashlane.distributed.context_parallel_attn_func` takes them.
        method: "allgather", "ring", "ulysses", "usp" or "auto", as for
            :func:`flashlane.distributed.context_parallel_attn_func`.
        layout: which tokens a rank has. None means the default of torch's ``context_parallel``: "zigzag" where a rank
            has an even number of tokens, else "contiguous". With ``seqlen`` it means "zigzag".
        seqlen: tokens of the whole sequence; needed where the ranks have different numbers of tokens, which torch's
            ``context_parallel`` never gives them.

    Raises:
        TypeError, ValueError: ``group``, ``method`` or ``layout`` is not valid; the message names it.
        RuntimeError: ``torch.distributed`` has no process group yet.

    In the context, a call raises NotImplementedError for ``attn_mask`` and ``dropout_p``, and ValueError if query and
    key have different lengths, because all of them are this rank's tokens. A module that imported the function by name
    before (``from torch.nn.functional import …``) still calls that of torch.

    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call the function, too: torch's fused inference path of
    them (``torch.backends.mha``) is off in the context, as it would attend to this rank's tokens only.
    ``need_weights=True``, the default of ``nn.MultiheadAttention``, raises NotImplementedError.

    The function is replaced in all threads of the process, since a backward that computes activations again may run in
    another one. Of several contexts that are open, the last one that was entered has the calls of all threads.
    """

    Grid.of(group)
    check_method(method)
    if layout is not None:
        check_layout(layout)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        refusal = _refusal({"query": query, "key": key, "value": value}, attn_mask, enable_gqa)
        if refusal is not None:
            raise_on_all(Grid.of(group), refusal)
        where: dict[str, Any] = {"group": group, "method": method, "seqlen": seqlen}
        where["layout"] = layout or ("contiguous" if seqlen is None and query.shape[2] % 2 else "zigzag")
        tensors = (t.transpose(1, 2) for t in (query, key, value))
        return context_parallel_attn_func(*tensors, dropout_p, scale, is_causal, **where).transpose(1, 2)

    with _lock:
        forward = F.multi_head_attention_forward
        own = {"scaled_dot_product_attention": attention, "multi_head_attention_forward": _without_weights(forward)}
        before = {name: getattr(F, name) for name in own}
        for name, function in own.items():
            setattr(F, name, function)
        _fused.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:
            for name, function in own.items():
                _restore(name, function, before[name])
            fused = _fused.pop()
            if not _fused:
                torch.backends.mha.set_fastpath_enabled(fused)


_lock = threading.Lock()
_fused: list[bool] = []
"""Whether torch's fused inference path was on when each of the contexts that are open was entered."""
_ended: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The functions of contexts that ended before others that were entered later, and what they had replaced."""


def _restore(name: str, own: Callable[..., Any], before: Callable[..., Any]) -> None:
    """Put back what a context replaced; where another context is open on top of it, that one does so when it ends."""
    if getattr(F, name) is not own:
        _ended[own] = before
        return
    while before in _ended:
        before = _ended.pop(before)
    setattr(F, name, before)


def _refusal(tensors: dict[str, Any], attn_mask: Any, enable_gqa: bool) -> Exception | None:
    """Why a call in the context is refused, or None."""
    if attn_mask is not None:
        return NotImplementedError("attn_mask is given; context parallelism has none: use is_causal or no mask")
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            return TypeError(f"{name} is {kind_of(t)}; it must be a torch.Tensor")
        if t.dim() != 4:
            return ValueError(f"{name} has shape {tuple(t.shape)}; it must be (batch, heads, tokens, head_dim)")
    heads, kv_heads = tensors["query"].shape[1], tensors["key"].shape[1]
    if not enable_gqa and heads != kv_heads:
        return ValueError(
            f"key has {kv_heads} heads and query has {heads}; they may differ only when enable_gqa is True"
        )
    return None


def _without_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function of ``nn.MultiheadAttention``, which has attention of its own where weights are returned."""
    position = list(inspect.signature(forward).parameters).index("need_weights")

    @functools.wraps(forward)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("need_weights", args[position] if len(args) > position else True):
            raise NotImplementedError(
                "need_weights is True, as by default; context parallelism returns no attention weights: pass "
                "need_weights=False to nn.MultiheadAttention"
            )
        return forward(*args, **kwargs)

    return refusing
