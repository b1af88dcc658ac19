"""Steps of training, whose losses tests compare."""

from __future__ import annotations

import torch

from flashlane.models.transformer import Transformer


def losses_of_training(
    model: Transformer, tokens: torch.Tensor, steps: int, lr: float, dtype: torch.dtype = torch.float32
) -> list[float]:
    """The losses of AdamW's steps on the same tokens; dtype f32 is without autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            loss = model.loss(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
