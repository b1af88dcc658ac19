"""A case that :mod:`flashlane.bench.measure.drawn` draws: a problem in plain numbers, and random tensors of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

import torch

from flashlane.bench.measure.flops import flops
from flashlane.bench.measure.grid import make_problem
from flashlane.bench.measure.inputs import Case as BenchCase
from flashlane.core.modifiers import TENSOR_OF, forms, shape_of
from flashlane.core.problem import ARGUMENTS, DIFFERENTIABLE, DTYPES, AttentionProblem, Effect, Inputs
from flashlane.kernels.score import SCORE_FEATURES

TENSORS = tuple(name for name in DIFFERENTIABLE if ARGUMENTS[name].dtype is None)
"""The inputs that a problem is cast with: differentiable, and of no dtype of their own."""
DRAWN = SCORE_FEATURES
"""The modifiers that are drawn: those that kernels compute, and not the reference alone."""
NOWHERE = 1 << 28
"""An entry of a block table that points outside every cache."""
SPARE_KEYS = 40
"""The number of rows behind the last packed key that belong to no sequence and are NaN."""

NUMBERS: dict[Effect, Callable[[tuple[int, ...], float, torch.Generator], torch.Tensor]] = {
    "distance": lambda shape, slope, draw: slope * torch.rand(shape, generator=draw),
    "logit": lambda shape, _slope, draw: torch.randn(shape, generator=draw),
    "factor": lambda shape, _slope, draw: 0.5 + torch.rand(shape, generator=draw),
}
"""From shape, largest slope and generator to the numbers of a modifier's tensor, by the modifier's effect."""

Modifiers = make_dataclass(
    "Modifiers", [(name, Any, field(default=forms(name)[0])) for name in DRAWN], frozen=True, kw_only=True
)
Modifiers.__doc__ = "Of each modifier of :data:`DRAWN`, its form: see :func:`flashlane.core.modifiers.forms`."


@dataclass(frozen=True)
class Case(Modifiers):
    """A problem in plain numbers, so that a failure prints what is needed to reproduce it."""

    lengths: tuple[tuple[int, int], ...]
    varlen: bool
    kv_heads: int
    group: int
    head_dim: int
    head_dim_v: int
    causal: bool
    alignment: str
    window: tuple[int, int]
    bias: tuple[bool, bool, bool, bool] | None
    hide: bool
    strides: str
    seed: int
    dropout: float = 0.0
    used: bool = False
    leftpad: bool = False
    batch_idx: bool = False
    page: int = 0
    """Rows of a page of the cache; 0 without pages."""
    least_used: float = 0.0
    """Of ``used`` lengths, the least share of the capacity."""
    scale: float | None = None
    deterministic: bool = False
    slope: float = 1.0
    """The largest slope of a modifier that counts distances."""
    modifier_dtype: str = "same"
    """The dtype of modifiers that have none of their own: ``same`` as q, ``f32`` or ``f64``."""
    unowned: str = "numbers"
    """What the rows of k and v hold that belong to no sequence: ``numbers`` or ``nan``."""
    corners: bool = False
    """Whether lengths in a cache are often 0, 1 or its capacity."""
    spread: float = 1.0
    """A factor of q, where the strides are plain."""
    dtype: str = ""
    """``f16`` or ``bf16`` where the dtype is drawn too; else empty."""

    @property
    def cached(self) -> bool:
        """Whether k and v are a cache, which has no gradients."""
        return bool(self.used or self.leftpad or self.batch_idx or self.page)

    @property
    def _capacity(self) -> int:
        """The most keys of a sequence, in whole pages where there are pages."""
        most = max(keys for _, keys in self.lengths)
        return -(-most // self.page) * self.page if self.page else most

    def elements(self, pair: tuple[int, int]) -> int:
        """The number of elements of q, k, v and the output of a sequence of these lengths."""
        dims = self.head_dim + self.head_dim_v
        return dims * (pair[0] * self.kv_heads * self.group + pair[1] * self.kv_heads)

    def flop(self, pair: tuple[int, int]) -> int:
        """Floating-point operations of the forward pass of a sequence of these lengths, visible pairs only."""
        return flops(replace(self, lengths=(pair,), varlen=False, used=False, page=0).problem(dtype=torch.bfloat16))

    @property
    def attended_lengths(self) -> tuple[tuple[int, int], ...]:
        """The numbers of queries and of keys of each sequence; of a cache those in use."""
        if not self.used:
            return self.lengths
        stops = torch.full((len(self.lengths),), self._capacity)
        used = self._used(stops, torch.Generator().manual_seed(self.seed))
        return tuple((queries, keys) for (queries, _), keys in zip(self.lengths, used.tolist(), strict=True))

    def problem(self, arch: str | None = None, dtype: torch.dtype | None = None) -> AttentionProblem:
        """The problem without its tensors: dense or packed sequences, or a cache whose lengths are on the device.

        It has no modifier of the scores. ``dtype`` is that of the case unless given. A cache has whole pages.

        Raises:
            ValueError: the case has what a problem without tensors does not: pages without lengths, or places.
        """
        if self.leftpad or self.batch_idx or (self.page and not self.used) or (self.varlen and self.cached):
            raise ValueError(f"case is {self}; without tensors it may be a cache with lengths, in pages or not")
        return make_problem(
            len(self.lengths),
            self.kv_heads * self.group,
            max(queries for queries, _ in self.lengths),
            self.head_dim,
            dtype or DTYPES[self.dtype],
            kv_heads=self.kv_heads,
            seqlen_k=self._capacity,
            head_dim_v=self.head_dim_v,
            causal=self.causal,
            window=self.window,
            alignment=self.alignment,  # type: ignore[arg-type]
            scale=self.scale,
            layout="packed" if self.varlen else "paged" if self.page else "cache" if self.used else "dense",
            page=self.page,
            deterministic=self.deterministic,
            arch=arch,
        )

    def posed(self, arch: str | None = None) -> BenchCase:
        """The :meth:`problem` as the bench takes it, which draws the tensors on the device itself."""
        column = 0 if self.varlen else 1
        lengths = tuple(pair[column] for pair in self.attended_lengths) if self.varlen or self.used else ()
        return BenchCase(self.problem(arch), lengths=lengths)

    def build(
        self, dtype: torch.dtype, grad: bool = False, device: str | None = None
    ) -> tuple[AttentionProblem, Inputs]:
        """The problem and new random tensors of it; :func:`moved` brings them to ``device``, where one is given."""
        draw = torch.Generator().manual_seed(self.seed)
        batch, heads = len(self.lengths), self.kv_heads * self.group
        lengths_q, lengths_k = zip(*self.lengths, strict=True)
        longest = max(lengths_q), max(lengths_k)
        spare = SPARE_KEYS if self.unowned == "nan" else 0
        outer = [(sum(lengths_q) + 2,), (sum(lengths_k) + spare,)] if self.varlen else [(batch, n) for n in longest]
        cache = self._cache(lengths_k, draw)
        if self.page:
            pages = cache["block_table"].numel() + 1
            outer[1] = (pages, self.page)
            longest = longest[0], longest[1] if self.varlen else cache["block_table"].shape[1] * self.page
        elif self.batch_idx:
            outer[1] = (batch + 2, longest[1])
        q, k, v = (
            _strided((*shape, h, d), self.strides, draw)
            for shape, h, d in (
                (outer[0], heads, self.head_dim),
                (outer[1], self.kv_heads, self.head_dim),
                (outer[1], self.kv_heads, self.head_dim_v),
            )
        )
        if self.spread != 1.0 and self.strides == "plain":
            q = q * self.spread
        bias = None
        if self.bias is not None:
            full = (batch, heads, *longest)
            bias = torch.randn([n if keep else 1 for n, keep in zip(full, self.bias, strict=True)], generator=draw)
            if self.hide:
                bias = bias.masked_fill(torch.rand(bias.shape, generator=draw) < 0.4, -torch.inf)
        tensors = Inputs(
            q=q,
            k=k,
            v=v,
            bias=bias,
            **(modifiers := self._modifiers({"batch": batch, "heads": heads}, draw)),
            cu_seqlens_q=_cumulative(lengths_q) if self.varlen else None,
            cu_seqlens_k=_cumulative(lengths_k) if self.varlen else None,
            max_seqlen_q=longest[0] if self.varlen else None,
            max_seqlen_k=longest[1] if self.varlen else None,
            dropout_seed=torch.randint(-(2**63), 2**63 - 1, (1,), generator=draw) if self.dropout else None,
            **cache,
        )
        if self.unowned == "nan":
            self._spoil(tensors)
        inputs = cast(tensors, dtype, grad)
        if self.modifier_dtype != "same":
            wide = {"f32": torch.float32, "f64": torch.float64}[self.modifier_dtype]
            free = {name: t for name, t in modifiers.items() if ARGUMENTS[name].dtype is None}
            inputs = replace(inputs, **{name: t.to(wide).requires_grad_(grad) for name, t in free.items()})
        if device:
            inputs = moved(inputs, device)
        problem = AttentionProblem.from_inputs(
            inputs,
            causal=self.causal,
            alignment=self.alignment,
            window_size=self.window,
            **{name: getattr(self, name) for name in DRAWN if name not in TENSOR_OF},
            dropout_p=self.dropout,
            **({} if self.scale is None else {"scale": self.scale}),
            **({"deterministic": True} if self.deterministic else {}),
        )
        return problem, inputs

    def _modifiers(self, sizes: dict[str, int], draw: torch.Generator) -> dict[str, torch.Tensor]:
        """The tensors of the modifiers that the case has, f32."""
        made = {}
        for modifier, name in TENSOR_OF.items():
            axes = shape_of(modifier, getattr(self, modifier)) if modifier in DRAWN else None
            if axes is not None:
                made[name] = NUMBERS[ARGUMENTS[name].effect](tuple(sizes[axis] for axis in axes), self.slope, draw)
        return made

    def _spoil(self, inputs: Inputs) -> None:
        """Write NaN into every row of k and v that belongs to no sequence."""
        rows = inputs.k.shape[: inputs.k.dim() - 2]
        owned = torch.zeros(rows, dtype=torch.bool)
        for b in range(len(self.lengths)):
            for place in places(inputs, b, inputs.k.shape[1]):
                owned[place] = True
        for t in (inputs.k, inputs.v):
            once = t if t.stride(-2) else t[..., :1, :]  # heads that share their numbers are written once
            once.masked_fill_(~owned[..., None, None], torch.nan)

    def _used(self, stops: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        """Random lengths up to ``stops``."""
        shares = self.least_used + (1 - self.least_used) * torch.rand(len(stops), generator=draw)
        used = (shares * (stops + 1)).int()
        if self.corners:
            which = torch.randint(4, (len(stops),), generator=draw)
            used = torch.where(which == 0, 0, torch.where(which == 1, 1, torch.where(which == 2, stops, used)))
        return torch.minimum(used, stops).int()

    def _cache(self, lengths_k: tuple[int, ...], draw: torch.Generator) -> dict[str, torch.Tensor]:
        """Random lengths and places. Entries of the table that no sequence needs are −1, or :data:`NOWHERE`."""
        batch, tensors = len(lengths_k), {}
        pages = max(1, -(-max(lengths_k) // self.page)) if self.page else 0
        stops = torch.tensor(lengths_k) if self.varlen else torch.full((batch,), pages * self.page or lengths_k[0])
        if self.used:
            stops = tensors["seqused_k"] = self._used(stops, draw)
        if self.leftpad:
            tensors["leftpad_k"] = (torch.rand(batch, generator=draw) * (stops + 1)).int()
        if self.batch_idx:
            tensors["batch_idx"] = torch.randperm(batch + 2, generator=draw)[:batch].int()
        if self.page:
            table = 1 + torch.randperm(batch * pages, generator=draw).view(batch, pages).int()
            unread = torch.arange(pages) * self.page >= stops[:, None]
            tensors["block_table"] = table.masked_fill(unread, NOWHERE if self.unowned == "nan" else -1)
        return tensors


PLAIN = Case(
    lengths=((333, 700),) * 2, varlen=False, kv_heads=2, group=2, head_dim=64, head_dim_v=64, causal=True,
    alignment="bottom-right", window=(-1, -1), bias=None, hide=False, strides="plain", seed=7,
)  # fmt: skip
"""Two dense causal sequences without another feature, from which tests derive cases."""


def relaid(
    t: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, start: int = 0
) -> torch.Tensor:
    """The same numbers at the same strides, ``start`` elements into memory of their own.

    The memory between them holds NaN, or the lowest integer of the type, so that a read outside them shows.
    """
    dtype = dtype or t.dtype
    if not t.numel():
        return t.detach().to(device=device, dtype=dtype)
    size = start + 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    between = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    space = torch.full((size,), between, dtype=dtype, device=device or t.device)
    # An axis that repeats one place is written once.
    once = t.detach()[tuple(slice(None if stride else 1) for stride in t.stride())]
    torch.as_strided(space, once.shape, once.stride(), start).copy_(once)
    return torch.as_strided(space, t.shape, t.stride(), start)


def cast(inputs: Inputs, dtype: torch.dtype, grad: bool = False) -> Inputs:
    """The same inputs with differentiable tensors in another dtype, as leaves; strides are kept."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    for name in TENSORS:
        if values[name] is not None:
            values[name] = relaid(values[name], dtype=dtype).requires_grad_(grad)
    return Inputs(**values)


def moved(inputs: Inputs, device: str) -> Inputs:
    """The same call on another device; strides are kept.

    A tensor with gaps whose rows are not a multiple of 16 bytes does not start on 16 bytes either.
    """
    return Inputs(**{f.name: _moved(getattr(inputs, f.name), device) for f in fields(inputs)})


def _moved(t: Any, device: str) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    odd = not t.is_contiguous() and t.stride(-1) == 1 and t.shape[-1] * t.element_size() % 16 != 0
    return relaid(t, device=device, start=int(odd)).requires_grad_(t.requires_grad)


def _strided(shape: tuple[int, ...], kind: str, draw: torch.Generator) -> torch.Tensor:
    *outer, n, h, d = shape
    if kind == "transposed":
        return torch.randn((*outer, h, n, d), generator=draw).transpose(-3, -2)
    if kind == "sliced":
        return torch.randn((*outer, 2 * n, h + 1, d + 3), generator=draw)[..., ::2, 1:, 2:-1]
    if kind == "heads first, apart":  # there is room between the rows, which still start on 16 bytes
        return torch.randn((*outer, h, n, d + 8), generator=draw)[..., :d].transpose(-3, -2)
    if kind == "apart":  # it is as "sliced", but rows still start on 16 bytes
        return torch.randn((*outer, 2 * n, h + 1, d + 16), generator=draw)[..., ::2, 1:, 8:-8]
    if kind == "expanded":
        return torch.randn((*outer, n, 1, d), generator=draw).expand(shape)
    return torch.randn(shape, generator=draw)


def _cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def places(values: Inputs, b: int, rows: int) -> list[tuple[int, ...]]:
    """Where each key of a sequence lies in k and v, whose second axis has so many rows (of a page, where there are)."""
    place = lambda j: (b, j)  # noqa: E731
    start, stop = 0, rows
    if values.cu_seqlens_k is not None:
        start, stop = values.cu_seqlens_k[b : b + 2].tolist()
        place = lambda j: (j,)  # noqa: E731
    if values.batch_idx is not None:
        row = int(values.batch_idx[b])
        place = lambda j: (row, j)  # noqa: E731
    if values.block_table is not None:
        start, stop = 0, stop - start if values.cu_seqlens_k is not None else rows * values.block_table.shape[1]
        place = lambda j: (int(values.block_table[b, j // rows]), j % rows)  # noqa: E731
    if values.seqused_k is not None:
        stop = int(values.seqused_k[b])
    if values.leftpad_k is not None:
        start = int(values.leftpad_k[b])
    return [place(j) for j in range(start, stop)]
