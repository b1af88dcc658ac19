"""What a function returns whose flags decide it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    Result = torch.Tensor | Any  # with a union every caller would have to cast
else:
    Result = torch.Tensor | tuple[torch.Tensor | None, ...]
