"""Continuous batching in small, whose every step is compared with attention over the tokens that were kept.

An engine draws requests that arrive, prefill in chunks, decode, speculate and finish. It keeps rows in pages that
requests share and later ones inherit with the rows of the earlier, and calls the public functions in the forms that
serving engines use. The oracle knows the tokens of each request alone, and neither pages nor lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashlane import flash_attn_varlen_func, flash_attn_with_kvcache
from flashlane.integrations.flash_attn import fa3, fa4

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
UNUSED = (-1, 0, 2**31 - 1)
"""What engines leave in entries of a table behind the pages in use."""


@dataclass(frozen=True)
class Layer:
    """The options of a layer, in plain numbers."""

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    page: int
    dtype: torch.dtype
    window: int
    softcap: float
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None

    @staticmethod
    def drawn(draw: random.Random) -> Layer:
        some = lambda *values: draw.choice(values)  # noqa: E731
        h, hk = some((1, 1), (2, 2), (4, 2), (6, 1), (8, 2))
        dims = some((16, 16), (32, 32), (64, 64), (40, 24), (13, 13))
        modifier = some("none", "none", "sinks", "slopes")
        return Layer(
            (h, hk),
            dims,
            some(1, 4, 16, 16, 64, 128, 256),
            some(*TOLERANCE),
            some(-1, -1, 0, 3, 17),
            some(0.0, 0.0, 5.0),
            torch.linspace(-1.0, 2.0, h) if modifier == "sinks" else None,
            torch.linspace(0.5, 0.05, h) if modifier == "slopes" else None,
        )

    @property
    def options(self) -> dict[str, Any]:
        """What every form takes."""
        return {"causal": True, "window_size": (self.window, 0), "softcap": self.softcap}

    def oracle(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``(n, h, dv)`` and LSE ``(h, n)`` of a request's last queries over its tokens, in f64."""
        q, k, v = (t.double() for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads[0] // self.heads[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        away = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * away.abs()
        hidden = (away < 0) | ((away > self.window) if self.window >= 0 else False)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


@dataclass
class Request:
    """The tokens that count, and the pages in which the engine has put them."""

    prompt: int
    """Tokens that are still to be prefilled."""
    answers: int
    """Tokens that are still to be decoded."""
    k: torch.Tensor
    v: torch.Tensor
    pages: list[int] = field(default_factory=list)


class Engine:
    """A pool of pages, the requests that have some, and the steps over them."""

    def __init__(self, seed: int, pool: int = 24) -> None:
        self.draw, self.seed = random.Random(seed), seed
        self.layer = Layer.drawn(self.draw)
        self.random = torch.Generator().manual_seed(seed)
        page, hk = self.layer.page, self.layer.heads[1]
        pool = max(6, min(400, pool * 16 // page)) if page < 16 else pool if page == 16 else 8
        # Rows that nobody has written are NaN: to read one shows.
        self.k_cache, self.v_cache = (
            torch.full((pool, page, hk, d), torch.nan, dtype=self.layer.dtype) for d in self.layer.head_dims
        )
        self.free, self.owners = list(range(pool)), [0] * pool
        self.draw.shuffle(self.free)
        self.running: list[Request] = []
        self.forms: dict[str, int] = {}

    def rows(self, count: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(count, heads, dim, generator=self.random).to(self.layer.dtype)

    def arrive(self) -> None:
        """A request with tokens of its own, or one that continues the full pages of another."""
        hk, (d, dv), page = self.layer.heads[1], self.layer.head_dims, self.layer.page
        new = Request(self.draw.randint(1, 40), self.draw.randint(0, 12), *(self.rows(0, hk, n) for n in (d, dv)))
        if self.running and self.draw.random() < 0.5:
            other = self.draw.choice(self.running)
            shared = self.draw.randint(0, len(other.k) // page)
            new.k, new.v, new.pages = other.k[: shared * page], other.v[: shared * page], other.pages[:shared]
            for number in new.pages:
                self.owners[number] += 1
        self.running.append(new)

    def release(self, request: Request, kept: int = 0) -> None:
        """Give back the pages of a request behind its first ones; their rows stay as they are."""
        for number in request.pages[kept:]:
            self.owners[number] -= 1
            if not self.owners[number]:
                self.free.append(number)
        del request.pages[kept:]

    def reserve(self, request: Request, tokens: int) -> bool:
        """Pages for so many tokens, if there are any."""
        missing = -(-tokens // self.layer.page) - len(request.pages)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            number = self.free.pop()
            self.owners[number] = 1
            request.pages.append(number)
        return True

    def step(self) -> None:
        """Schedule some requests, append their tokens, compare what each form gives, and keep what is accepted."""
        if len(self.running) < 5 and self.draw.random() < 0.5:
            self.arrive()
        uniform = self.draw.choice((0, 0, 1, 1, 2, 5, 8))
        batch: list[tuple[Request, int]] = []
        for request in self.draw.sample(self.running, len(self.running)):
            most = request.prompt or self.draw.choice((1, 1, 1, 4, 8))
            count = uniform or self.draw.randint(1, min(most, 20))
            if self.draw.random() < 0.8 and self.reserve(request, len(request.k) + count):
                batch.append((request, count))
        if batch:
            self.compare(batch)
        else:  # nobody has room: the longest is preempted
            for request in sorted(self.running, key=lambda r: -len(r.pages))[:1]:
                self.release(request)
                self.running.remove(request)
        for request, count in batch:
            decoding, request.prompt = not request.prompt, max(0, request.prompt - count)
            if decoding:
                rejected = self.draw.randint(0, count - 1)
                request.k, request.v = (t[: len(t) - rejected] for t in (request.k, request.v))
                request.answers -= count - rejected
                self.release(request, -(-len(request.k) // self.layer.page))
            if not request.prompt and request.answers <= 0:
                self.release(request)
                self.running.remove(request)

    def compare(self, batch: list[tuple[Request, int]]) -> None:
        (h, hk), (d, dv) = self.layer.heads, self.layer.head_dims
        counts, before = [n for _, n in batch], [len(request.k) for request, _ in batch]
        q, k, v = (self.rows(sum(counts), *of) for of in ((h, d), (hk, d), (hk, dv)))
        wanted, lses = [], []
        for (request, _), own_q, own_k, own_v in zip(batch, *(t.split(counts) for t in (q, k, v)), strict=True):
            request.k, request.v = torch.cat([request.k, own_k]), torch.cat([request.v, own_v])
            out, lse = self.layer.oracle(own_q, request.k, request.v)
            wanted.append(out)
            lses.append(lse)
        form = self.draw.choice([form for form in FORMS if form.fits(self.layer, batch)])
        self.forms[form.name] = self.forms.get(form.name, 0) + 1
        table = self.table([request for request, _ in batch])
        if not form.appends:
            self.store(batch, before)
        call = Call(self, q, k, v, counts, before, table)
        held = table.clone()
        out, lse = form.call(call)
        assert torch.equal(table, held)
        where = f"seed {self.seed}, {form.name}, {self.layer}, tokens {counts} after {before}"
        for name, found, correct in (("out", out, torch.cat(wanted)), ("lse", lse, torch.cat(lses, 1))):
            assert found.shape == correct.shape, f"{where}: {name} {found.shape} {correct.shape}"
            far = (found.double() - correct).abs()
            worst = float((far / correct.abs().clamp(min=1)).max())
            assert worst <= TOLERANCE[self.layer.dtype], f"{where}: {name} is off by {worst:.3g}"
        for request, _ in batch:
            for cache, rows in ((self.k_cache, request.k), (self.v_cache, request.v)):
                assert torch.equal(cache[request.pages].flatten(0, 1)[: len(rows)], rows), f"{where}: rows of the cache"

    def table(self, requests: list[Request]) -> torch.Tensor:
        longest = max(len(request.pages) for request in requests) + self.draw.randint(0, 2)
        unused = self.draw.choice(UNUSED)
        return torch.tensor([r.pages + [unused] * (longest - len(r.pages)) for r in requests], dtype=torch.int32)

    def store(self, batch: list[tuple[Request, int]], before: list[int]) -> None:
        """Write the new rows to their slots, as the engines do that have a kernel for it."""
        page = self.layer.page
        for (request, count), first in zip(batch, before, strict=True):
            rows = torch.arange(first, first + count)
            places = torch.tensor(request.pages)[rows // page], rows % page
            self.k_cache[places], self.v_cache[places] = request.k[first:], request.v[first:]


@dataclass(frozen=True)
class Call:
    """The arguments of a step: packed rows, new rows of each request, and its rows before."""

    engine: Engine
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    counts: list[int]
    before: list[int]
    table: torch.Tensor

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.engine.k_cache, self.engine.v_cache

    @property
    def after(self) -> torch.Tensor:
        return integers([a + b for a, b in zip(self.before, self.counts, strict=True)])

    @property
    def cu_q(self) -> torch.Tensor:
        return integers([0, *self.counts]).cumsum(0, dtype=torch.int32)

    @property
    def cu_k(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.after.cumsum(0, dtype=torch.int32), (1, 0))

    @property
    def modifiers(self) -> dict[str, Any]:
        layer = self.engine.layer
        return layer.options | {"sinks": layer.sinks, "alibi_slopes": layer.slopes}

    def padded(self, t: torch.Tensor) -> torch.Tensor:
        return t.view(len(self.counts), self.counts[0], *t.shape[1:])


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def flat(found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = found
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def packed_over_pages(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """nano-vllm's prefill, and vLLM's batches of both kinds."""
    lengths = call.cu_q, call.cu_k, max(call.counts), int(call.after.max())
    return flash_attn_varlen_func(
        call.q, *call.caches, *lengths, block_table=call.table, return_lse=True, **call.modifiers
    )


def read(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """nano-vllm's decoding, with requests that only fill the batch behind it, as a captured graph has them."""
    fill = call.engine.draw.choice((0, 0, 2))
    q, lengths, table = call.padded(call.q), call.after, call.table
    q = torch.cat([q, torch.full_like(q[:1], 3.0).expand(fill, *q.shape[1:])])
    lengths = torch.cat([lengths, lengths.new_zeros(fill)])
    table = torch.cat([table, table.new_full((fill, table.shape[1]), call.engine.draw.choice(UNUSED))])
    splits = call.engine.draw.choice((0, 1, 3))
    options = {"cache_seqlens": lengths, "block_table": table, "num_splits": splits, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, *call.caches, **options, **call.modifiers)
    batch = len(call.counts)
    assert not out[batch:].any()
    return flat((out[:batch], lse[:batch]))


def append(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """A step that stores its own rows."""
    new = call.padded(call.k), call.padded(call.v)
    options = {"cache_seqlens": integers(call.before), "block_table": call.table, "return_softmax_lse": True}
    return flat(flash_attn_with_kvcache(call.padded(call.q), *call.caches, *new, **options, **call.modifiers))


def append_to_rows(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """A static cache, in which a request has one row of the batch axis: that of its only page."""
    new, rows = (call.padded(call.k), call.padded(call.v)), call.table[:, 0].contiguous()
    options = {"cache_seqlens": integers(call.before), "cache_batch_idx": rows, "return_softmax_lse": True}
    return flat(flash_attn_with_kvcache(call.padded(call.q), *call.caches, *new, **options, **call.modifiers))


def third_packed(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's form: packed queries over pages by FlashAttention-3's function."""
    options = {"page_table": call.table, "cache_seqlens": call.after, "cu_seqlens_q": call.cu_q}
    options |= {"max_seqlen_q": max(call.counts), "num_splits": call.engine.draw.choice((0, 1))}
    options |= {"cu_seqlens_k_new": call.cu_k, "return_softmax_lse": True}
    return fa3.flash_attn_with_kvcache(call.q, *call.caches, **options, **call.engine.layer.options)


def third_appends(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    new = call.padded(call.k), call.padded(call.v)
    options = {"cache_seqlens": integers(call.before), "page_table": call.table, "return_softmax_lse": True}
    return flat(
        fa3.flash_attn_with_kvcache(call.padded(call.q), *call.caches, *new, **options, **call.engine.layer.options)
    )


def fourth(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's own form: packed queries, lengths in use and pages by FlashAttention-4's function."""
    layer, longest = call.engine.layer, {"max_seqlen_q": max(call.counts), "max_seqlen_k": int(call.after.max())}
    options = {"cu_seqlens_q": call.cu_q, "seqused_k": call.after, "page_table": call.table, "return_lse": True}
    options |= {"causal": True, "window_size": (None if layer.window < 0 else layer.window, None)}
    options |= {"softcap": layer.softcap, "learnable_sink": layer.sinks, "num_splits": 0}
    return fa4.flash_attn_varlen_func(call.q, *call.caches, **longest, **options)


@dataclass(frozen=True)
class Form:
    """A way to call; what it takes, and whether it writes the new rows itself.

    ``equal``: every request has as many new tokens. ``pages``: the most that a request may have.
    """

    call: Callable[[Call], tuple[torch.Tensor, torch.Tensor]]
    appends: bool = False
    equal: bool = False
    sinks: bool = True
    slopes: bool = True
    pages: int = 1 << 20

    @property
    def name(self) -> str:
        return self.call.__name__

    def fits(self, layer: Layer, batch: list[tuple[Request, int]]) -> bool:
        takes = (self.sinks or layer.sinks is None) and (self.slopes or layer.slopes is None)
        takes &= all(len(request.pages) <= self.pages for request, _ in batch)
        return takes and (not self.equal or len({count for _, count in batch}) == 1)


FORMS = (
    Form(packed_over_pages),
    Form(read, equal=True),
    Form(append, appends=True, equal=True),
    Form(append_to_rows, appends=True, equal=True, pages=1),
    Form(third_packed, sinks=False, slopes=False),
    Form(third_appends, appends=True, equal=True, sinks=False, slopes=False),
    Form(fourth, slopes=False),
)
