"""Long reductions of a mask's rows as loops: they show the pairs that the reductions element by element show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import program_kernel
from support.flex_oracle import mapped
from support.programs import SIZES, by_torch, draw

from flashlane import jit
from flashlane.flex import loops
from flashlane.flex.bind import bind
from flashlane.kernels.hopper.flex.problem import kernel_header

CPU = torch.device("cpu")
BATCH, HEADS, QUERIES, KEYS = SIZES
needs_compiler = pytest.mark.skipif(program_kernel.COMPILER is None, reason="no C++ compiler")


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    near = torch.randint(-3, KEYS, (BATCH, QUERIES, 9), generator=generator)
    short = torch.randint(-3, KEYS, (QUERIES, 6), generator=generator, dtype=torch.int16)
    return near, short, torch.rand(HEADS, 12, generator=generator) < 0.3


NEAR, SHORT, SEEN = tables()
MASKS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "any": (1, lambda b, h, q, kv: (NEAR[b, q] == kv.unsqueeze(-1)).any(-1)),
    "all": (1, lambda b, h, q, kv: (NEAR[b, q] != kv).all()),
    "any of a causal row": (1, lambda b, h, q, kv: (NEAR[b, q] // 3 == kv // 3).any() & (q >= kv)),
    "a term of two": (1, lambda b, h, q, kv: ((NEAR[b, q] == kv) | (NEAR[b, q] + 1 == kv)).any()),
    "two reductions": (2, lambda b, h, q, kv: (NEAR[b, q] == kv).any() | (SHORT[q] == kv).any()),
    "two kinds": (2, lambda b, h, q, kv: ~(NEAR[b, q] == kv).all() & (SHORT[q] != kv).all() & (q >= kv)),
    "inside the other's terms": (2, lambda b, h, q, kv: ((NEAR[b, q] == kv) ^ (SHORT[q] > kv).all()).any()),
    "of bools": (1, lambda b, h, q, kv: SEEN[h].any() ^ (q > kv)),
    "of one tensor": (1, lambda b, h, q, kv: (NEAR[b, q] == NEAR[b, q].sum() - kv).any()),
    "short": (0, lambda b, h, q, kv: (NEAR[b, q, 2] == kv) | (NEAR[b, q, 5] == kv) | (NEAR[b, q, 1] == kv)),
    "of elements": (0, lambda b, h, q, kv: sum(NEAR[b, q, i] == kv for i in (0, 4, 2, 8, 6, 1, 3)) > 0),
}
"""The number of loops of each mask, and its function."""


@needs_compiler
def test_masks_with_loops_on_the_host(tmp_path: Path) -> None:
    built = {name: (*bind(None, function, CPU), torch.zeros(SIZES)) for name, (_, function) in MASKS.items()}
    found = program_kernel.on_host(built, tmp_path, rolled=True)
    for name, (count, function) in MASKS.items():
        assert built[name][0].header(rolled=True).count("for (int element") == count, name
        assert "int element" not in built[name][0].header(), name
        assert torch.equal(found[name][2], mapped(function, None, SIZES)), name


@needs_compiler
def test_drawn_masks_with_loops_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FEWEST", 2)
    built, drawn, count = {}, {}, 0
    for seed in range(40):
        score, mask = (draw(seed, kind, "cpu", torch.float32) for kind in ("score_mod", "mask_mod"))
        program, arguments = bind(score.function, mask.function, CPU)
        built[str(seed)], drawn[str(seed)] = (program, arguments, torch.zeros(SIZES)), (score, mask)
        count += "for (int element" in program.header(rolled=True)
    assert count > 10
    for name, outputs in program_kernel.on_host(built, tmp_path, rolled=True).items():
        wanted = mapped(by_torch(int(name), *drawn[name])[1], None, SIZES)
        assert torch.equal(outputs[2], wanted), drawn[name][1]


def test_a_row_of_64_in_a_kernel_is_short() -> None:
    """A kernel has the mask's code for each of a thread's pairs."""
    chosen = torch.zeros(1, 2, 32, 64, dtype=torch.int64)
    program, _ = bind(None, lambda b, h, q, kv: (chosen[b, h, q // 16] == (kv // 16).unsqueeze(-1)).any(-1), CPU)
    assert program.header().count("program::read") == 64
    header = kernel_header(program, False, False)
    assert header.count("program::read") == 1 and header.count("for (int element = 0; element < 64") == 1
    text = '#include "program.cuh"\nextern "C" __global__ void seen(const __grid_constant__ ProgramParams p, bool* to)'
    text += " {\n    to[threadIdx.x] = Program::visible(p, 0, 0, blockIdx.x, threadIdx.x);\n}\n"
    jit.compile(jit.KernelSource("tests/seen.cu", text, "seen", headers=(("program.cuh", header),)), "sm_90a")
