"""Combining attention over disjoint sets of keys into attention over all of them.

Source: the associative merge of online softmax, Milakov and Gimelshein 2018, and Dao 2023, "Flash-Decoding".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashlane.core.arch import DTYPE_NAMES, compute_dtype, records_gradients
from flashlane.core.validate import check_dtype, check_strided, kind_of


def combine(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from attention over disjoint sets of them, differentiable in outs and lses.

    The same queries attend to each set apart, each with ``return_lse=True``: the splits of a long cache, a shared
    prefix and each sequence's own keys, the shards of context parallelism. A set with LSE −inf has no visible key; its
    output is not read. Logits besides those of keys may be given in one of the calls only.

    Args:
        outs: one ``(b, sq, h, dv)`` for each set (packed: ``(total_q, h, dv)``), as a sequence or stacked along a first
            axis; f16, bf16, f32 or f64, all of one dtype.
        lses: one ``(b, h, sq)`` for each set (packed: ``(h, total_q)``), as a sequence or stacked; natural logarithm,
            any float dtype. These are the LSEs that the attention functions return.
        out_dtype: of the output; that of outs by default. Everything is computed in f32 (f64 for f64 outs).

    Returns:
        out ``(b, sq, h, dv)`` and LSE ``(b, h, sq)`` in f32 (f64 for f64 outs); packed: ``(total_q, h, dv)`` and
        ``(h, total_q)``. A row that sees no key in any set has output 0, LSE −inf and gradients 0. A row whose LSE is
        NaN or +inf in some set has output NaN.

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it.
    """
    outs, lses = _tensors("outs", outs), _tensors("lses", lses)
    _check(outs, lses)
    dtype = outs[0].dtype if out_dtype is None else out_dtype
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        allowed = ", ".join(map(str, DTYPE_NAMES))
        raise TypeError(f"out_dtype is {out_dtype!r}; it may be one of {allowed}, or None for that of outs")
    given = (*outs, *lses)
    if records_gradients() and any(t.requires_grad for t in given):
        return _Combine.apply(dtype, *given)
    return _combined(dtype, outs, lses)


def _combined(
    out_dtype: torch.dtype, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``lse = logsumexp(lses)`` and ``out = sum(exp(lses - lse) * outs)``."""
    dtype = compute_dtype(outs[0].dtype)
    lse = torch.logsumexp(torch.stack([each.to(dtype) for each in lses]), dim=0)
    total: torch.Tensor | None = None
    for out, (weight, seen) in zip(outs, _weights(lses, lse), strict=True):
        term = torch.where(seen, out.to(dtype) * weight, 0.0)  # the output of a set without visible keys is not read
        total = term if total is None else total + term
    return total.to(out_dtype), lse


class _Combine(torch.autograd.Function):
    """:func:`_combined` with its derivative in closed form: autograd would keep every output in f32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out_dtype: torch.dtype, *outs_and_lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _combined(out_dtype, *_halves(outs_and_lses))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], output[1])

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *outs_and_lses, lse = ctx.saved_tensors
        outs, lses = _halves(outs_and_lses)
        weights, seen = zip(*_weights(lses, lse), strict=True)
        douts: list[torch.Tensor | None] = [None] * len(outs)
        dlses = [torch.zeros_like(weight) for weight in weights]
        if do is not None:
            do = do.to(lse.dtype)
            douts = [
                torch.where(there, do * weight, 0.0).to(out.dtype)
                for out, weight, there in zip(outs, weights, seen, strict=True)
            ]
            # The mean is of the sets' outputs and not of the combined one, which may be rounded.
            read = [torch.where(there, out.to(do.dtype), 0.0) for out, there in zip(outs, seen, strict=True)]
            along = [(do * out).sum(-1, keepdim=True) for out in read]
            mean = sum(each * weight for each, weight in zip(along, weights, strict=True))
            dlses = [weight * (each - mean) for each, weight in zip(along, weights, strict=True)]
        if dlse is not None:
            dlses = [d + weight * _per_row(dlse) for d, weight in zip(dlses, weights, strict=True)]
        found = [_per_head(d).to(each.dtype) for d, each in zip(dlses, lses, strict=True)]
        return None, *douts, *found


def _halves(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The outputs, and the LSEs, of as many sets."""
    count = len(tensors) // 2
    return tensors[:count], tensors[count:]


def _weights(lses: Sequence[torch.Tensor], lse: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``exp(lses - lse)`` in the shape of an output, and whether the row sees a key of the set; else the weight is 0.

    An LSE that is NaN is no LSE of an empty set: its row becomes NaN.
    """
    top = torch.where(lse == -torch.inf, 0.0, lse)
    rows = [_per_row(each.to(lse.dtype)) for each in lses]
    return [(torch.exp(row - _per_row(top)), row != -torch.inf) for row in rows]


def _per_row(lse: torch.Tensor) -> torch.Tensor:
    """(…, h, sq) as (…, sq, h, 1)."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def _per_head(t: torch.Tensor) -> torch.Tensor:
    return t.squeeze(-1).transpose(-1, -2)


def _tensors(name: str, values: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(values, torch.Tensor):
        check_strided(name, values)
        if values.dim() == 0:
            raise ValueError(f"{name} has shape (); it must be a sequence of tensors, or stacked along a first axis")
        return values.unbind(0)
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        what = kind_of(values)
        raise TypeError(f"{name} is {what}; it must be a sequence of torch.Tensor, or one stacked along a first axis")
    for number, t in enumerate(values):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}[{number}] is {kind_of(t)}; it must be a torch.Tensor")
        check_strided(f"{name}[{number}]", t)
    return tuple(values)


def _check(outs: tuple[torch.Tensor, ...], lses: tuple[torch.Tensor, ...]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs is of {len(outs)} sets of keys and lses of {len(lses)}; both must be of the same, and of at least "
            f"one"
        )
    shape = outs[0].shape
    if len(shape) not in (3, 4):
        raise ValueError(
            f"outs[0] has shape {tuple(shape)}; it must be (batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        )
    for number, t in enumerate(outs):
        check_dtype(f"outs[{number}]", t.dtype)
    rows = (*shape[:-3], shape[-2], shape[-3])
    for name, tensors, needed in (("outs", outs, tuple(shape)), ("lses", lses, rows)):
        for number, t in enumerate(tensors):
            if not t.is_floating_point() or t.dtype != tensors[0].dtype:
                raise TypeError(f"{name}[{number}] has dtype {t.dtype}; all must have one floating-point dtype")
            if t.device != outs[0].device:
                raise ValueError(
                    f"{name}[{number}] is on {t.device} and outs[0] is on {outs[0].device}; they must agree"
                )
            if tuple(t.shape) != needed:
                raise ValueError(
                    f"{name}[{number}] has shape {tuple(t.shape)}; it must be {needed}, as outs[0] is {tuple(shape)}"
                )
