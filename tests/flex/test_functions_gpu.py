"""Functions of programs at numbers that are special to them, on a GPU, next to torch in f64."""

from __future__ import annotations

import pytest
import torch
from support import program_kernel
from support.circular import ANGLES, angles, check_circular
from support.short_types import SHORT_TYPES, WITH_A_NUMBER, that_torch_computes

from flashlane.flex.bind import bind

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def test_circular_functions_of_all_numbers() -> None:
    """Their errors are within CUDA's bounds, also behind the range reduction of large numbers."""
    x = angles()
    programs = [(*bind(function, None, CUDA), x.cuda()) for function, _ in ANGLES.values()]
    for name, outputs in zip(ANGLES, program_kernel.on_gpu(*programs), strict=True):
        check_circular(name, x, tuple(t.cpu() for t in outputs))
    endless = torch.tensor([torch.inf, -torch.inf, torch.nan], device=CUDA).view(1, 1, 1, 3)
    found = program_kernel.on_gpu(*((*given[:2], endless) for given in programs))
    assert all(outputs[0].isnan().all() for outputs in found)


SPECIAL = {
    "erfc": torch.erfc,
    "erf": torch.erf,
    "relu": torch.relu,
    "clamp to both sides": lambda x: torch.clamp(x, -1.0, 2.0),
    "clamp from below": lambda x: torch.clamp(x, min=0.5),
    "clamp from above": lambda x: torch.clamp(x, max=0.5),
}


def test_functions_of_ordinary_numbers_of_none_and_of_infinities() -> None:
    x = torch.cat((torch.linspace(-9, 9, 4001), torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf])))
    scores = x.view(1, 1, 1, -1).cuda()
    programs = [(*bind(lambda s, b, h, q, kv, f=f: f(s), None, CUDA), scores) for f in SPECIAL.values()]
    for (name, function), found in zip(SPECIAL.items(), program_kernel.on_gpu(*programs), strict=True):
        wide = x.double().requires_grad_()
        expected = function(wide)
        (slope,) = torch.autograd.grad(expected.sum(), wide)
        for what, a, b in (("value", found[0], expected.detach()), ("slope", found[1], slope)):
            a = a.cpu().double().flatten()
            if what == "slope":  # at a kink torch has one of two slopes, and NaN has none
                smooth = x.isfinite() & (x != 0) & (x != 0.5) & (x != -1) & (x != 2)
                a, b = a[smooth], b[smooth]
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-37, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", SHORT_TYPES)
def test_a_number_becomes_one_of_the_captured_tensors_type_first(dtype: str) -> None:
    table = SHORT_TYPES[dtype].cuda()
    zeros = torch.zeros(1, 1, 1, len(table), device=CUDA)
    programs, wanted = [], []
    for way, function in WITH_A_NUMBER.items():
        for number, expected in that_torch_computes(way, dtype):
            score_mod = lambda s, b, h, q, kv, f=function, n=number: s + f(table[kv], n)  # noqa: E731
            try:
                programs.append((*bind(score_mod, None, CUDA), zeros))
            except NotImplementedError:
                assert dtype == "uint8" and number < -255
                continue
            wanted.append((way, number, expected))
    assert len(programs) >= 3 * len(WITH_A_NUMBER)
    for (way, number, expected), found in zip(wanted, program_kernel.on_gpu(*programs), strict=True):
        assert torch.equal(found[0].flatten().cpu(), expected.float()), (way, number, found[0], expected)
