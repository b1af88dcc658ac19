"""What the torch implementations share: which pairs are visible or dropped, and the caller's tensors by KV head.

A :class:`SequenceBatch` is a batch of sequences of one length: the whole call, or one sequence of a varlen call or of
a cache of keys and values. Its methods return views (of paged keys copies) with the query heads of one KV head on an
axis of their own, so that grouped-query attention is a plain matrix product and the sum over a group falls out of its
transpose:

    q, out, do   (b, hk, g, sq, d)
    k, v         (b, hk, sk, d)
    lse, delta   (b, hk, g, sq)
    bias         (b, hk, g, sq, sk), any of them 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashlane.core.problem import CACHE_FIELDS, AttentionProblem, Inputs

WORD = 0xFFFFFFFF
PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Band:
    """The visible pairs of one sequence: key j for query i iff ``-left <= j - i - shift <= right`` (−1: unbounded)."""

    seqlen_q: int
    seqlen_k: int
    shift: int
    left: int
    right: int

    def keys(self, rows: range) -> range:
        """The keys that some query of ``rows`` may see, as one range (empty when there is none)."""
        low = 0 if self.left < 0 else max(0, rows.start + self.shift - self.left)
        high = self.seqlen_k if self.right < 0 else min(self.seqlen_k, rows.stop + self.shift + self.right)
        return range(low, max(low, high)) if rows else range(0)

    def queries(self, cols: range) -> range:
        """The queries that may see some key of ``cols``, as one range (empty when there is none)."""
        low = 0 if self.right < 0 else max(0, cols.start - self.shift - self.right)
        high = self.seqlen_q if self.left < 0 else min(self.seqlen_q, cols.stop - self.shift + self.left)
        return range(low, max(low, high)) if cols else range(0)

    def full(self, rows: range, cols: range) -> bool:
        """Whether every query of ``rows`` may see every key of ``cols``."""
        nearest = cols.start - (rows.stop - 1) - self.shift
        furthest = cols.stop - 1 - rows.start - self.shift
        return (self.left < 0 or nearest >= -self.left) and (self.right < 0 or furthest <= self.right)

    def offsets(self, rows: range, cols: range, device: torch.device) -> torch.Tensor:
        """``j - i - shift`` for every pair of a tile, int64 ``(rows, cols)``."""
        i = torch.arange(rows.start, rows.stop, device=device)
        j = torch.arange(cols.start, cols.stop, device=device)
        return j - (i[:, None] + self.shift)

    def visible(self, offsets: torch.Tensor) -> torch.Tensor:
        """Which pairs at these offsets are visible."""
        seen = offsets <= self.right if self.right >= 0 else torch.ones_like(offsets, dtype=torch.bool)
        return seen & (offsets >= -self.left) if self.left >= 0 else seen


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """A batch of sequences of one length inside the tensors of a call; see the module's docstring for the views."""

    band: Band
    kv_heads: int
    group: int
    sequence: int | None = None
    """The sequence's number, or None for a batch of one length."""
    start_q: int | None = None
    """Its first row of a packed q, or None where q has a batch axis."""
    start_k: int = 0
    """Its first row of k and v: of the packed total, of its row of the batch axis, or of its pages together."""
    row_k: int | None = None
    """Its row of the batch axis of k and v, or None where they are packed or paged."""
    pages: torch.Tensor | None = None
    """The pages of k and v that hold it, in order."""

    def queries(self, t: torch.Tensor) -> torch.Tensor:
        """(b, sq, h, x) or (total_q, h, x) as (b, hk, g, sq, x)."""
        if self.start_q is not None:
            t = t[self.start_q : self.start_q + self.band.seqlen_q].unsqueeze(0)
        elif self.sequence is not None:
            t = t[self.sequence : self.sequence + 1]
        return t.transpose(1, 2).unflatten(1, (self.kv_heads, self.group))

    def keys(self, t: torch.Tensor) -> torch.Tensor:
        """(b, sk, hk, x), (total_k, hk, x) or (pages, rows, hk, x) as (b, hk, sk, x); of pages a copy."""
        if self.sequence is not None:
            if self.pages is not None:
                t = t[self.pages].flatten(0, 1)
            elif self.row_k is not None:
                t = t[self.row_k]
            t = t[self.start_k : self.start_k + self.band.seqlen_k].unsqueeze(0)
        return t.transpose(1, 2)

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """(b, h, sq) or (h, total_q) as (b, hk, g, sq)."""
        if self.start_q is not None:
            t = t[:, self.start_q : self.start_q + self.band.seqlen_q].unsqueeze(0)
        elif self.sequence is not None:
            t = t[self.sequence : self.sequence + 1]
        return t.unflatten(1, (self.kv_heads, self.group))

    def heads(self, t: torch.Tensor) -> torch.Tensor:
        """(h,) or (b, h) as (1 or b, hk, g, 1), to be added to :meth:`rows`."""
        if t.dim() == 2 and self.sequence is not None:
            t = t[self.sequence]
        return t.reshape(-1, self.kv_heads, self.group, 1)

    def pairs(self, t: torch.Tensor) -> torch.Tensor:
        """A bias that broadcasts to (b, h, sq, sk), as a view that broadcasts to (b, hk, g, sq, sk)."""
        t = t[(None,) * (4 - t.dim())]
        t = t.unsqueeze(2) if t.shape[1] == 1 else t.unflatten(1, (self.kv_heads, self.group))
        if self.sequence is not None and t.shape[0] > 1:
            t = t[self.sequence : self.sequence + 1]
        return t

    def dropout_keep(self, problem: AttentionProblem, inputs: Inputs, rows: range, cols: range) -> torch.Tensor:
        """Which probabilities of a tile dropout keeps, bool (b, hk, g, rows, cols)."""
        first = self.sequence or 0
        sequences = range(first, first + (problem.batch if self.sequence is None else 1))
        heads = self.kv_heads * self.group
        keep = dropout_keep(inputs.dropout_seed, problem.dropout_p, heads, sequences, rows, cols)
        return keep.unflatten(1, (self.kv_heads, self.group))


def sequence_batches(problem: AttentionProblem, inputs: Inputs) -> Iterator[SequenceBatch]:
    """The batches of sequences of one length that a call consists of.

    Lengths and tables are read from the device once, which waits for it.
    """

    def band(seqlen_q: int, seqlen_k: int) -> Band:
        shift = problem.shift_of(seqlen_q, seqlen_k)
        return Band(seqlen_q, seqlen_k, shift, problem.window_left, problem.window_right)

    heads = problem.kv_heads, problem.group
    if problem.varlen:
        starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
        for i in range(problem.batch):
            lengths = starts_q[i + 1] - starts_q[i], starts_k[i + 1] - starts_k[i]
            pages = _pages(inputs, i, lengths[1])
            yield SequenceBatch(
                band(*lengths), *heads, i, starts_q[i], starts_k[i] if pages is None else 0, pages=pages
            )
    elif any(getattr(inputs, name) is not None for name in CACHE_FIELDS):
        used = _each(inputs.seqused_k, problem.batch, problem.seqlen_k)
        leftpad = _each(inputs.leftpad_k, problem.batch, 0)
        row = list(range(problem.batch)) if inputs.batch_idx is None else inputs.batch_idx.tolist()
        for i in range(problem.batch):
            # What a GPU holds is not checked: nothing is read outside the cache.
            stop = max(0, min(used[i], problem.seqlen_k))
            start = max(0, min(leftpad[i], stop))
            pages = _pages(inputs, i, stop)
            where = {"row_k": row[i]} if pages is None else {"pages": pages}
            yield SequenceBatch(band(problem.seqlen_q, stop - start), *heads, i, start_k=start, **where)
    else:
        yield SequenceBatch(band(problem.seqlen_q, problem.seqlen_k), *heads)


def _each(lengths: torch.Tensor | None, batch: int, default: int) -> list[int]:
    return [default] * batch if lengths is None else lengths.tolist()


def _pages(inputs: Inputs, sequence: int, rows: int) -> torch.Tensor | None:
    """The pages that hold the first rows of a sequence."""
    if inputs.block_table is None:
        return None
    return inputs.block_table[sequence, : -(-rows // inputs.k.shape[1])].long()


def philox(counter: Sequence[torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10: four pseudo-random 32-bit words from a 128-bit counter and a 64-bit key.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.

    Args:
        counter: four tensors of words (0 to 2^32 − 1) in int64, which broadcast together.
        key: two such tensors.

    Returns:
        Four tensors of words in int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(c0, PHILOX_FACTORS[0])
        high1, low1 = _multiply(c2, PHILOX_FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & WORD, (k1 + PHILOX_KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower word of a product of two words, by halves, as int64 cannot hold it."""
    lower = (word & 0xFFFF) * factor
    upper = (word >> 16) * factor + (lower >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF


def dropout_keep(
    seed: torch.Tensor, dropout_p: float, heads: int, sequences: range, rows: range, cols: range
) -> torch.Tensor:
    """Which probabilities of a tile dropout keeps: the one definition that every kernel follows.

    The word for sequence b, query head h, query i and key j (indices within the sequence) is number ``j & 3`` of
    :func:`philox` of the counter ``(j >> 2, i, b * heads + h, 0)`` and the key (low, high word of the seed). The
    probability is kept iff the word is at least ``floor(dropout_p * 2^32)``.

    Args:
        seed: int64 ``(1,)``; it is not read by the host.
        dropout_p: the share that is dropped, 0 to 1.
        heads: all query heads of the call.
        sequences: the sequences wanted, of all heads.
        rows: the queries wanted.
        cols: the keys wanted.

    Returns:
        bool ``(sequences, heads, rows, cols)`` on the seed's device.
    """
    device = seed.device
    first = cols.start >> 2
    quads = torch.arange(first, max(first, (cols.stop + 3) >> 2), device=device)
    queries = torch.arange(rows.start, rows.stop, device=device)
    number = torch.arange(sequences.start * heads, sequences.stop * heads, device=device)
    counter = (quads, queries[:, None], number[:, None, None], torch.zeros_like(quads))
    words = torch.stack(philox(counter, (seed & WORD, seed >> 32 & WORD)), dim=-1)
    skip = cols.start - 4 * first
    keep = words.flatten(-2)[..., skip : skip + len(cols)] >= int(dropout_p * 2**32)
    return keep.unflatten(0, (len(sequences), heads))


def tile_of(pairs: torch.Tensor, rows: range, cols: range) -> torch.Tensor:
    """The tile of a broadcastable (…, sq or 1, sk or 1) view that belongs to ``rows`` and ``cols``."""
    row = slice(rows.start, rows.stop) if pairs.shape[-2] > 1 else slice(None)
    col = slice(cols.start, cols.stop) if pairs.shape[-1] > 1 else slice(None)
    return pairs[..., row, col]


def tiles(span: range, size: int) -> Iterator[range]:
    """``span`` cut at multiples of ``size``, in order."""
    first = span.start - span.start % size
    for start in range(first, span.stop if span else first, size):
        yield range(max(start, span.start), min(start + size, span.stop))
