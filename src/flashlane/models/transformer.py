"""A decoder-only transformer, written plainly: pre-norm RMSNorm, rotary positions, SwiGLU, attention by name.

Sources: Vaswani et al. 2017 (the model); Xiong et al. 2020 (pre-norm); Zhang and Sennrich 2019 (RMSNorm); Su et al.
2021 (rotary positions); Shazeer 2020 (SwiGLU).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from flashlane.models.attention import CausalAttention, select_attention


@dataclass(frozen=True)
class Config:
    """Sizes of a :class:`Transformer`.

    Raises:
        ValueError: the sizes do not fit together; the message names the one at fault.
    """

    d_model: int
    d_ff: int
    layers: int
    heads: int
    kv_heads: int | None = None
    """Key/value heads, a divisor of ``heads``; as many by default."""
    vocab: int = 10000
    tied: bool = False
    """Whether the output projection is the embedding's weight."""
    rope_theta: float = 10000.0
    attention: str = "auto"
    """See :func:`flashlane.models.select_attention`."""

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "layers", "heads", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.d_model % (2 * self.heads):
            raise ValueError(
                f"d_model is {self.d_model} with {self.heads} heads; it must be a multiple of twice the heads, as "
                "rotary positions turn pairs of elements"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads is {self.kv_heads}; it must divide heads, {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


SIZES = {
    "sm": Config(768, 3072, 12, 12),
    "md": Config(1024, 4096, 24, 16),
    "lg": Config(1280, 5120, 36, 20),
    "xl": Config(1600, 6400, 48, 25),
    "2.7B": Config(2560, 10240, 32, 32),
}
"""The course's sizes, by name; its vocabulary has 10000 tokens."""


def rotary_angles(seqlen: int, head_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency, each f32 ``(seqlen, head_dim / 2)``."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), frequency)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn elements i and i + d/2 of ``(b, s, h, d)`` by the angle of their position; in f32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.d_model, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.attend: CausalAttention = select_attention(config.attention)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        packed = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        mixed = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(mixed.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: ``(silu(x·gate) * x·up)·down``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.d_model, config.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then the feed-forward network, each on the normed input and added to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_attention, self.norm_ff = nn.RMSNorm(config.d_model), nn.RMSNorm(config.d_model)
        self.attention, self.ff = Attention(config), FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x), cos, sin)
        return x + self.ff(self.norm_ff(x))


class Transformer(nn.Module):
    """Token ids ``(b, s)`` to logits ``(b, s, vocab)``; :meth:`loss` for training.

    Args:
        config: the sizes, and the name of the attention.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.unembed = nn.Linear(config.d_model, config.vocab, bias=False)
        self.apply(self._initialise)
        if config.tied:
            self.unembed.weight = self.embed.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        cos, sin = rotary_angles(tokens.shape[1], self.config.head_dim, self.config.rope_theta, tokens.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.unembed(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in f32, of each token given those before it."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
