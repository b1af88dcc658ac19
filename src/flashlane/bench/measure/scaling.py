"""A model of context parallelism by gathered keys: it predicts times on more GPUs than were measured.

The compute of a rank is its share of one GPU's time, increased by :attr:`Workload.excess`. By messages it always waits
for the first group of heads that it fetches, and for the last group of gradients that it returns. A group between them
costs no time where the groups before it take longer to compute than all bytes so far take to arrive. By copies, which
ranks of one host have, a pass takes as long as its computation or its transfers, whichever take longer.

Every figure of the model is predicted, not measured; :func:`checked` gives its distance from what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

F32_BYTES = 4


@dataclass(frozen=True)
class Links:
    """The rates of the links between GPUs."""

    inside_gbs: float
    """GB/s that a GPU sends and receives at once inside a host."""
    latency_us: float
    """Microseconds of one batch of messages, from enqueueing to arrival."""
    host_gpus: int = 8
    """GPUs of a host."""
    across_gbs: float = 45.0
    """GB/s that a GPU sends and receives at once to and from other hosts; 45 is 90 % of a link of 400 Gbit/s."""

    def milliseconds(self, bytes_a_peer: float, ranks: int) -> float:
        """Milliseconds until ``bytes_a_peer`` bytes have arrived from every other rank."""
        inside = min(ranks, self.host_gpus) - 1
        outside = ranks - 1 - inside
        slowest = max(inside * bytes_a_peer / self.inside_gbs, outside * bytes_a_peer / self.across_gbs)
        return slowest / 1e6 + self.latency_us / 1e3


@dataclass(frozen=True)
class Workload:
    """Self-attention under a causal mask, in zigzag layout, and the times of one GPU for a whole problem."""

    tokens: int
    """Tokens of each rank."""
    heads: int
    kv_heads: int
    head_dim: int
    ranks_measured: int
    """The number of ranks of the run that the times are from; each of them has ``tokens`` tokens."""
    forward_ms: float
    """Milliseconds of the forward on one GPU, for the whole problem of that run."""
    both_ms: float
    """The same for forward and backward."""
    groups: tuple[int, ...] = ()
    """KV heads of each group that is fetched; empty where all are fetched at once."""
    element_bytes: int = 2
    copies: bool = False
    """Whether ranks of one host copy; those of several hosts send messages."""
    excess: float = field(default=0.0)
    """Share by which a rank's kernels take longer than their share of one GPU's time."""

    def share_ms(self, ranks: int, both: bool) -> float:
        """A rank's part of one GPU's time in milliseconds, which grows with the square of all tokens."""
        whole = self.both_ms if both else self.forward_ms
        return whole / self.ranks_measured * ranks / self.ranks_measured

    def predicted_ms(self, ranks: int, links: Links, both: bool) -> float:
        """Milliseconds of a rank's forward, or of its forward and backward."""
        forward = self._pass(self.share_ms(ranks, False), ranks, links, returns=False)
        if not both:
            return forward
        backward = self.share_ms(ranks, True) - self.share_ms(ranks, False)
        return forward + self._pass(backward, ranks, links, returns=True)

    def efficiency(self, ranks: int, links: Links, both: bool) -> float:
        """A rank's part of one GPU's time, over the predicted time."""
        return self.share_ms(ranks, both) / self.predicted_ms(ranks, links, both)

    def _pass(self, share: float, ranks: int, links: Links, returns: bool) -> float:
        groups = self.groups or (self.kv_heads,)
        compute = share * (1 + self.excess)
        if self.copies and ranks <= links.host_gpus:
            sizes = self.element_bytes, *((F32_BYTES,) if returns else ())
            return max(compute, sum(links.milliseconds(self._bytes(self.kv_heads, size), ranks) for size in sizes))
        now = arrived = 0.0
        for heads in groups:
            arrived += links.milliseconds(self._bytes(heads, self.element_bytes), ranks)
            now = max(now, arrived) + compute * heads / self.kv_heads
        if not returns:
            return now
        sent = 0.0
        done = 0.0
        for heads in groups:
            done += compute * heads / self.kv_heads
            sent = max(sent, done + now - compute) + links.milliseconds(self._bytes(heads, F32_BYTES), ranks)
        return max(now, sent)

    def _bytes(self, kv_heads: int, element_bytes: int) -> float:
        """Bytes of these heads of K and V of a rank's tokens."""
        return 2.0 * self.tokens * kv_heads * self.head_dim * element_bytes


def checked(workload: Workload, links: Links, forward_ms: float, both_ms: float) -> dict[str, float]:
    """Predicted over measured time, less 1, for the run that the workload's times are from."""
    ranks = workload.ranks_measured
    return {
        "forward": workload.predicted_ms(ranks, links, False) / forward_ms - 1,
        "both": workload.predicted_ms(ranks, links, True) / both_ms - 1,
    }


def modelled_rows(workload: Workload, links: Links, ranks: tuple[int, ...]) -> list[dict[str, float | int | str]]:
    """One row for each number of ranks, marked as modelled."""
    return [
        {
            "ranks": count,
            "source": "modelled",
            "tokens": count * workload.tokens,
            "forward_ms": round(workload.predicted_ms(count, links, False), 4),
            "forward_efficiency": round(workload.efficiency(count, links, False), 4),
            "both_ms": round(workload.predicted_ms(count, links, True), 4),
            "both_efficiency": round(workload.efficiency(count, links, True), 4),
        }
        for count in ranks
    ]
