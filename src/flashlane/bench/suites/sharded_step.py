"""A training step of a small Llama whose weights are sharded by FSDP2 and whose tokens by context parallelism.

The ranks divide one sequence, and the same ranks shard the weights. The step computes what one process computes on the
whole sequence: the loss of a rank is its tokens' part of the mean. FSDP2 averages gradients over the ranks, so each
rank's loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from flashlane import flash_attn_func
from flashlane.bench.measure.ranks import ONE, round_milliseconds, shares_of_ideal
from flashlane.distributed import context_parallel_attn_func, position_ids, shard_sequence

THETA = 500000.0


@dataclass(frozen=True)
class StepProblem:
    """Sizes of the model and its sequence; those of Llama 3 8B with fewer layers by default."""

    tokens: int = 8192
    """Tokens of each rank."""
    layers: int = 2
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    dtype: str = "bfloat16"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, sizes: StepProblem) -> None:
        super().__init__()
        kv = sizes.kv_heads * sizes.head_dim
        self.sizes = sizes
        self.before_attention, self.before_mlp = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.q, self.o = (nn.Linear(sizes.hidden, sizes.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(sizes.hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], shared: dict[str, Any] | None
    ) -> Any:
        """``(b, rows, hidden)`` to the same; ``shared`` are the arguments of context parallelism, or None."""
        normed = self.before_attention(x)
        q, k, v = (each(normed).unflatten(-1, (-1, self.sizes.head_dim)) for each in (self.q, self.k, self.v))
        q, k = rotated(q, rotation), rotated(k, rotation)
        if shared is None:
            out = flash_attn_func(q, k, v, causal=True)
        else:
            out = context_parallel_attn_func(q, k, v, causal=True, **shared)
        x = x + self.o(out.flatten(2))
        normed = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    """Embedding, layers, and the logits of the next token."""

    def __init__(self, sizes: StepProblem) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, shared: dict[str, Any] | None = None) -> Any:
        """Logits ``(b, rows, vocabulary)`` of tokens at these positions of the sequence."""
        dim = self.sizes.head_dim
        rates = THETA ** (-torch.arange(0, dim, 2, device=tokens.device, dtype=torch.float32) / dim)
        angles = positions[:, None].float() * rates
        x = self.embedding(tokens)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, shared)
        return self.head(self.norm(x))


def rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of ``(b, rows, heads, head_dim)``, whose halves are pairs."""
    cos, sin = (each[:, None] for each in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def built(sizes: StepProblem, device: torch.device) -> Model:
    """The model with the same random weights on every rank."""
    torch.manual_seed(11)
    return Model(sizes).to(device, getattr(torch, sizes.dtype))


def batch_of(sizes: StepProblem, total: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the sequence and the ones that follow them, ``(1, total)``."""
    random = torch.Generator().manual_seed(12)
    tokens = torch.randint(sizes.vocabulary, (1, total + 1), generator=random).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, labels: torch.Tensor, total: int) -> torch.Tensor:
    """The share of these tokens in the mean over all."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / total


def sharded(model: Model) -> Model:
    """The model with its weights sharded over all ranks, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


class SharedStep:
    """A step of this rank: its tokens of the sequence, its shard of the weights."""

    def __init__(self, sizes: StepProblem, device: torch.device, method: str, layout: str, total: int) -> None:
        self.size, self.total = dist.get_world_size(), total
        self.model = sharded(built(sizes, device))
        self.tokens, self.labels = (
            shard_sequence(t, layout=layout).contiguous() for t in batch_of(sizes, total, device)
        )
        self.positions = position_ids(total, layout=layout, device=device)
        self.shared = {"method": method, "layout": layout, "seqlen": total}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def gradients(self) -> torch.Tensor:
        """Forward and backward; returns this rank's share of the loss."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(self.tokens, self.positions, self.shared), self.labels, self.total)
        (loss * self.size).backward()
        return loss.detach()

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self.gradients()
        self.optimizer.step()


class WholeStep:
    """A step of one process on the whole sequence."""

    def __init__(self, sizes: StepProblem, device: torch.device, total: int) -> None:
        self.model, self.total = built(sizes, device), total
        self.tokens, self.labels = batch_of(sizes, total, device)
        self.positions = torch.arange(total, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def gradients(self) -> torch.Tensor:
        """Forward and backward; returns the loss."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(self.tokens, self.positions), self.labels, self.total)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self.gradients()
        self.optimizer.step()


def time_steps(
    device: torch.device, sizes: StepProblem, methods: tuple[str, ...], layout: str, rounds: int
) -> list[dict[str, Any]]:
    """Milliseconds of a step by each method, and one process's time divided by the ranks and by that time.

    All models are there at once, so that their steps are timed in the same rounds.
    """
    size = dist.get_world_size()
    total = sizes.tokens * size
    steps: dict[str, Any] = {ONE: WholeStep(sizes, device, total)}
    steps |= {method: SharedStep(sizes, device, method, layout, total) for method in methods}
    times = round_milliseconds({name: each.step for name, each in steps.items()}, device, rounds)
    shares = shares_of_ideal(times, size)
    return [
        {"method": name, "step_ms": round(statistics.median(ms), 3), "step_efficiency": round(shares[name], 4)}
        for name, ms in times.items()
    ]
