"""A kernel's share of what ``mma.sync`` can give on this card: measured once a process, see ``lessons/ceiling.py``."""

from __future__ import annotations

import functools

import torch

from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import Kernel

FAMILY = "mma"
"""The kernels whose products are ``mma.sync`` m16n8k16."""


def accumulators(kernel: Kernel, problem: AttentionProblem) -> tuple[str, str]:
    """What QKᵀ and PV accumulate in: ``f32`` or ``f16``."""
    said = dict(
        item.strip().split("=", 1) for item in kernel.low_precision_reference(problem).split(",") if "=" in item
    )
    return said.get("scores", "f32"), said.get("out", "f32")


def share_of_ceiling(
    kernel: Kernel | None, problem: AttentionProblem, tflops: float | None, device: torch.device
) -> float | None:
    """TFLOP/s over the card's ``mma.sync`` rate; None for other kernels, dtypes and devices.

    Where the two products accumulate in different types, the ceiling is that of their operations one after the other.
    """
    if kernel is None or kernel.family != FAMILY or device.type != "cuda" or not tflops:
        return None
    if problem.dtype_name not in ("f16", "bf16"):
        return None
    rates = [ceiling(device.index or 0, problem.dtype_name, kind) for kind in accumulators(kernel, problem)]
    work = (problem.head_dim, problem.head_dim_v)
    return tflops * sum(part / rate for part, rate in zip(work, rates, strict=True)) / sum(work)


@functools.cache
def ceiling(device: int, dtype: str, accumulate: str) -> float:
    """TFLOP/s of register-only loops on a device; takes about a third of a second, once."""
    from flashlane.lessons.ceiling import mma_ceiling

    return mma_ceiling(dtype, accumulate, device=device)
