"""Captured tensors of integers whose type is shorter than the numbers that meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

SHORT_TYPES = {
    "uint8": torch.tensor([0, 5, 44, 250, 255], dtype=torch.uint8),
    "int8": torch.tensor([-128, -56, 0, 44, 127], dtype=torch.int8),
    "int16": torch.tensor([-(2**15), -3, 0, 300, 2**15 - 1], dtype=torch.int16),
    "int32": torch.tensor([1 - 2**31, -3, 0, 300, 2**31 - 1], dtype=torch.int32),
}
WITH_A_NUMBER: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "above": lambda x, n: x > n,
    "equal": lambda x, n: x == n,
    "the number above": lambda x, n: n >= x,
    "quotient": lambda x, n: x // n,
    "remainder": lambda x, n: x % n,
    "fmod": lambda x, n: torch.fmod(x, n),
    "towards zero": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "sum": lambda x, n: x + n,
    "difference": lambda x, n: n - x,
    "product": lambda x, n: x * n,
    "bits": lambda x, n: x ^ n,
    "a shift": lambda x, n: x >> n,
    "clamp": lambda x, n: torch.clamp(x, min=n),
    "where": lambda x, n: torch.where(x > 3, x, n),
}
NUMBERS = (300, 200, 3, -1, -3, 70_000, 2**31 + 5)


def that_torch_computes(way: str, dtype: str) -> Iterator[tuple[int, torch.Tensor]]:
    """The numbers that torch takes there, with its results."""
    for number in NUMBERS:
        try:
            yield number, WITH_A_NUMBER[way](SHORT_TYPES[dtype], number)
        except RuntimeError:  # torch refuses it
            continue
