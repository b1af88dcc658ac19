"""Calls whose way through the host is watched."""

from __future__ import annotations

import pytest
import torch

from flashlane.ops import call as ops
from flashlane.ops import execute


def qkv(n: int = 64, m: int = 64, heads: int = 2, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.randn(1, s, heads, 64).to(dtype) for s in (n, m, m)]


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, a call that is not like an earlier one fails."""

    def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError("the call was checked again")

    monkeypatch.setattr(ops, "check_and_run", refuse)
    monkeypatch.setattr(execute, "rebuild", refuse)
