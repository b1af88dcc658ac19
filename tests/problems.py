"""Drawn attention problems, and an oracle that shares no code with the package's own attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st

from flashlane.problem import AttentionProblem, Inputs

LENGTHS = (0, 1, 2, 17, 63, 64, 65, 127)
HEAD_DIMS = (8, 40, 59, 64, 111, 128)
TENSORS = ("q", "k", "v", "bias", "sinks")


@dataclass(frozen=True)
class Case:
    """A problem in plain numbers, so that a failure prints what is needed to see it again."""

    lengths: tuple[tuple[int, int], ...]
    varlen: bool
    kv_heads: int
    group: int
    head_dim: int
    head_dim_v: int
    causal: bool
    alignment: str
    window: tuple[int, int]
    softcap: float
    alibi: str
    bias: tuple[bool, bool, bool, bool] | None
    hide: bool
    sinks: bool
    strides: str
    seed: int

    def build(self, dtype: torch.dtype, grad: bool = False) -> tuple[AttentionProblem, Inputs]:
        """The problem and fresh random tensors of it."""
        draw = torch.Generator().manual_seed(self.seed)
        batch, heads = len(self.lengths), self.kv_heads * self.group
        lengths_q, lengths_k = zip(*self.lengths, strict=True)
        longest = max(lengths_q), max(lengths_k)
        outer = [(sum(lengths_q) + 2,), (sum(lengths_k),)] if self.varlen else [(batch, n) for n in longest]
        q, k, v = (
            _strided((*shape, h, d), self.strides, draw)
            for shape, h, d in (
                (outer[0], heads, self.head_dim),
                (outer[1], self.kv_heads, self.head_dim),
                (outer[1], self.kv_heads, self.head_dim_v),
            )
        )
        slopes = {"none": None, "heads": (heads,), "batch": (batch, heads)}[self.alibi]
        bias = None
        if self.bias is not None:
            full = (batch, heads, *longest)
            bias = torch.randn([n if keep else 1 for n, keep in zip(full, self.bias, strict=True)], generator=draw)
            if self.hide:
                bias = bias.masked_fill(torch.rand(bias.shape, generator=draw) < 0.4, -torch.inf)
        made = Inputs(
            q=q,
            k=k,
            v=v,
            alibi_slopes=None if slopes is None else torch.rand(slopes, generator=draw),
            bias=bias,
            sinks=torch.randn(heads, generator=draw) if self.sinks else None,
            cu_seqlens_q=_cumulative(lengths_q) if self.varlen else None,
            cu_seqlens_k=_cumulative(lengths_k) if self.varlen else None,
            max_seqlen_q=longest[0] if self.varlen else None,
            max_seqlen_k=longest[1] if self.varlen else None,
        )
        inputs = cast(made, dtype, grad)
        problem = AttentionProblem.from_inputs(
            inputs,
            causal=self.causal,
            alignment=self.alignment,
            window_size=self.window,
            softcap=self.softcap,
        )
        return problem, inputs


def cast(inputs: Inputs, dtype: torch.dtype, grad: bool = False) -> Inputs:
    """The same numbers in another type, as leaves; strides are kept."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    for name in TENSORS:
        if values[name] is not None:
            values[name] = values[name].detach().to(dtype).requires_grad_(grad)
    return Inputs(**values)


def gradients(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients of every differentiable input through both results; a row without a visible key has no LSE to push."""
    wanted = {name: getattr(inputs, name) for name in TENSORS if getattr(inputs, name) is not None}
    grads = torch.autograd.grad([out, lse], list(wanted.values()), [do.to(out.dtype), dlse.to(lse.dtype)])
    return dict(zip(wanted, grads, strict=True))


def _strided(shape: tuple[int, ...], kind: str, draw: torch.Generator) -> torch.Tensor:
    *outer, n, h, d = shape
    if kind == "transposed":
        return torch.randn((*outer, h, n, d), generator=draw).transpose(-3, -2)
    if kind == "sliced":
        return torch.randn((*outer, 2 * n, h + 1, d + 3), generator=draw)[..., ::2, 1:, 2:-1]
    if kind == "expanded":
        return torch.randn((*outer, n, 1, d), generator=draw).expand(shape)
    return torch.randn(shape, generator=draw)


def _cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Every product of features; lengths fall around tile edges."""
    varlen = draw(st.booleans())
    length = st.tuples(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS))
    lengths = draw(st.lists(length, min_size=1, max_size=3)) if varlen else [draw(length)] * draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    return Case(
        lengths=tuple(lengths),
        varlen=varlen,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from((head_dim, *HEAD_DIMS))),
        causal=draw(st.booleans()),
        alignment=draw(st.sampled_from(("bottom-right", "top-left"))),
        window=draw(st.tuples(st.sampled_from((-1, 0, 5, 70)), st.sampled_from((-1, 0, 9)))),
        softcap=draw(st.sampled_from((0.0, 0.0, 1.5, 20.0))),
        alibi=draw(st.sampled_from(("none", "none", "heads", "batch"))),
        bias=draw(st.none() | st.tuples(*[st.booleans()] * 4)),
        hide=draw(st.booleans()),
        sinks=draw(st.booleans()),
        strides=draw(st.sampled_from(("plain", "transposed", "sliced", "expanded"))),
        seed=draw(st.integers(0, 2**32)),
    )


def oracle(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in f64, one row after another, over exactly the keys that it sees."""
    values = cast(inputs, torch.float64)
    out = values.q.new_zeros((*values.q.shape[:-1], problem.head_dim_v))
    shape = (problem.heads, len(out)) if problem.varlen else (problem.batch, problem.heads, problem.seqlen_q)
    lse = values.q.new_full(shape, -torch.inf)
    for b in range(problem.batch):
        if problem.varlen:
            (a, z), (c, e) = (cu[b : b + 2].tolist() for cu in (values.cu_seqlens_q, values.cu_seqlens_k))
            q, k, v = values.q[a:z], values.k[c:e], values.v[c:e]
            where_out, where_lse = out[a:z], lse[:, a:z]
        else:
            q, k, v = values.q[b], values.k[b], values.v[b]
            where_out, where_lse = out[b], lse[b]
        for h, i in itertools.product(range(problem.heads), range(len(q))):
            where_out[i, h], where_lse[h, i] = _row(problem, values, b, h, i, q, k, v)
    return out, lse


def _row(
    problem: AttentionProblem,
    values: Inputs,
    b: int,
    h: int,
    i: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    shift = len(k) - len(q) if problem.alignment == "bottom-right" else 0
    low = 0 if problem.window_left < 0 else max(0, i + shift - problem.window_left)
    high = len(k) if problem.window_right < 0 else min(len(k), i + shift + problem.window_right + 1)
    keys = torch.arange(low, max(low, high))
    logits = k[keys, h // problem.group] @ q[i, h] * problem.scale
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    if values.alibi_slopes is not None:
        slopes = values.alibi_slopes.double().expand(problem.batch, problem.heads)
        logits = logits - slopes[b, h] * (i + shift - keys).abs()
    if values.bias is not None:
        full = values.bias.expand(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        logits = logits + full[b, h, i, keys]
    if values.sinks is not None:
        logits = torch.cat([logits, values.sinks[h : h + 1]])
    lse = torch.logsumexp(logits, 0)
    weights = torch.zeros_like(logits) if lse == -torch.inf else torch.exp(logits - lse)
    return weights[: len(keys)] @ v[keys, h // problem.group], lse
