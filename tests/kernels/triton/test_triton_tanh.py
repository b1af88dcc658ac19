"""A soft cap's tanh in f32: as near as f32 has it, near 0 and far from it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlane.kernels.triton.score import tanh

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def all_tanh(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tanh(tl.load(x + at)))


def relative_errors(x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, torch.nan)
    all_tanh[(x.numel() // 1024,)](x, y, BLOCK=1024)
    right = x.double().tanh()
    return ((y.double() - right) / right).abs()


def test_small_arguments_are_within_one_eps_and_larger_ones_within_two() -> None:
    eps = torch.finfo(torch.float32).eps
    size = torch.linspace(1e-4, 10.0, 1 << 16, device=HERE)
    for x in (size, -size):
        errors = relative_errors(x)
        assert errors[size < 0.6].max() < eps
        assert errors.max() < 2 * eps


def test_ends_are_exact() -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, 100.0, -100.0, torch.inf, -torch.inf, 20.0], device=HERE).repeat(128)
    y = torch.full_like(x, torch.nan)
    all_tanh[(1,)](x, y, BLOCK=1024)
    assert torch.equal(y, x.tanh())
