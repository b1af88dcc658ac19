"""Sines, cosines and tangents as scores, the numbers to try them with, and what their results must be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.program_kernel import Outputs

ANGLES: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "sin": (lambda s, b, h, q, kv: s.sin(), 2.0),
    "cos": (lambda s, b, h, q, kv: s.cos(), 2.0),
    "tan": (lambda s, b, h, q, kv: s.tan(), 4.0),
}
"""Scores, and CUDA's bounds of the functions' errors in units of the last place."""


def angles() -> torch.Tensor:
    """Numbers of every exponent, and those next to multiples of π/2, of which sine or cosine are small."""
    generator = torch.Generator().manual_seed(0)
    mantissas = 1 + torch.rand(254, 200, generator=generator, dtype=torch.float64)
    drawn = (mantissas * 2.0 ** torch.arange(-126, 128, dtype=torch.float64)[:, None]).float().flatten()
    near = (torch.arange(1, 100000, dtype=torch.float64) * (torch.pi / 2)).float()
    near = torch.cat((near, near.nextafter(torch.tensor(torch.inf)), torch.tensor([105614.99, 105615.0, 105615.01])))
    # The f32 number whose distance to a multiple of π/2 is the least of all.
    found = torch.cat((drawn, near, torch.tensor([16367173.0 * 2.0**72])))
    return torch.cat((found, -found, torch.zeros(2))).view(1, 1, 1, -1)


def check_circular(name: str, x: torch.Tensor, found: Outputs) -> None:
    """Whether a function of :data:`ANGLES` is within CUDA's bounds at these numbers, and its derivative right."""
    wide = x.double()
    slopes = {"sin": wide.cos(), "cos": -wide.sin(), "tan": 1 + wide.tan().square()}
    values, derivative, _ = found
    wanted = getattr(wide, name)()
    error = ((values.double() - wanted).abs() / wanted.abs()).nan_to_num() * 2**23
    assert error.amax() <= ANGLES[name][1], (name, x.flatten()[error.argmax()].item(), error.amax())
    torch.testing.assert_close(derivative.double(), slopes[name], rtol=2**-20, atol=0)
