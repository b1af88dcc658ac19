"""Variants of the Hopper backward, drawn problems of each, and how a test runs them.

``FLASHLANE_DRAWS`` says how many problems each variant draws; a release takes hundreds. A variant is one compiled
configuration, whose lengths, heads, strides and values are drawn.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backward_rule import BackwardInputs, backward_inputs, complaints, logs_of, poison, without_an_owner

from flashlane.bench.measure import drawn as draws
from flashlane.bench.measure.drawn_case import Case
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs, arch_of
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.kernel import hopper_backward, supports
from flashlane.reference.tiled import Gradients

ARCH = "sm_90a"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAWS = int(os.environ.get("FLASHLANE_DRAWS", "12"))
BF16, F16 = torch.bfloat16, torch.float16
KERNEL = registry.get("hopper(wgmma+tma)")
REFUSALS = {
    "rows that TMA cannot copy": r"rows of q, k and v must be contiguous and start on 16 bytes"
    r"|head_dim( of v)? is \d+; it takes multiples of 8, as TMA"
}
"""Reasons for which a drawn problem may be refused; any other is a fault."""
needs_hopper = pytest.mark.skipif(arch_of(HERE) != ARCH, reason="needs an sm_90 GPU")


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for."""

    dtype: torch.dtype = BF16
    head_dim: int = 128
    head_dim_v: int = 0
    mask: str = "right"
    """``full``; ``right`` (causal, or so many keys after a query); ``left``; ``both``."""
    features: tuple[str, ...] = ()
    """Of softcap, alibi, sinks, varlen, deterministic."""

    def __str__(self) -> str:
        dims = f"{self.head_dim}-{self.head_dim_v or self.head_dim}"
        return "_".join((str(self.dtype)[6:], dims, self.mask, *self.features))


FEATURES = ("softcap", "alibi", "sinks", "varlen", "deterministic")


def several() -> Iterator[Variant]:
    """Each feature alone, all of them, and products of them that a seed picks."""
    for feature in FEATURES:
        for head_dim in (64, 128, 256):
            yield Variant((BF16, F16)[head_dim == 64], head_dim, features=(feature,))
    for mask in ("full", "left", "both"):
        yield Variant(BF16, 64, mask=mask, features=("varlen",))
        yield Variant(F16, 128, mask=mask, features=("varlen", "deterministic"))
    for head_dim in (64, 128, 256):
        yield Variant(BF16, head_dim, mask="both", features=FEATURES)
    chance = random.Random(7)
    for _ in range(32):
        head_dim = 8 * chance.randint(1, 32)
        unlike = chance.random() < 0.4
        yield Variant(
            chance.choice((BF16, F16)),
            head_dim,
            8 * chance.randint(1, 32) if unlike else 0,
            chance.choice(("full", "right", "right", "left", "both")),
            tuple(feature for feature in FEATURES if chance.random() < 0.35),
        )


def all_variants() -> Iterator[Variant]:
    """Every head dim that is a multiple of 8; both types and all masks of common ones; unlike head dims; features."""
    for dtype in (BF16, F16):
        for head_dim in (64, 128, 256):
            yield from (Variant(dtype, head_dim, mask=mask) for mask in ("full", "right", "both"))
    for head_dim in range(8, 257, 8):
        yield Variant((BF16, F16)[head_dim // 8 % 2], head_dim, mask=("full", "right")[head_dim // 16 % 2])
    for head_dim, head_dim_v in ((192, 128), (128, 64), (64, 128), (64, 256), (256, 64), (40, 24)):
        yield Variant(BF16, head_dim, head_dim_v)
    yield from several()


VARIANTS = tuple(dict.fromkeys(all_variants()))


@dataclass(frozen=True)
class Drawn:
    """A problem, and how what its backward is given lies in memory."""

    case: Case
    do: str
    dlse: str
    out: str
    owned: bool
    """Whether rows without an owner are numbers (else NaN)."""

    def build(self, dtype: torch.dtype, device: torch.device) -> tuple[AttentionProblem, Inputs]:
        return self.case.build(dtype, device=str(device))

    def backward_inputs(self, problem: AttentionProblem, inputs: Inputs) -> tuple[Inputs, BackwardInputs]:
        """What the backward is called with, and what it must find."""
        generator = torch.Generator(inputs.q.device).manual_seed(self.case.seed)
        logs = logs_of(problem, inputs)
        do = laid_out((*inputs.q.shape[:-1], problem.head_dim_v), self.do, problem.dtype, generator)
        dlse = None if self.dlse == "none" else laid_out(logs, self.dlse, torch.float32, generator)
        what = backward_inputs(problem, inputs, do, dlse)
        if self.out == "transposed":
            out = what.out.transpose(-3, -2).contiguous().transpose(-3, -2)
            what = replace(what, out=out, lse=what.lse.transpose(-1, -2).contiguous().transpose(-1, -2))
        return (inputs, what) if self.owned else without_an_owner(inputs, what)


def laid_out(shape: tuple[int, ...], how: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in one of the ways in which autograd hands gradients over."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=generator.device).to(dtype)

    if how == "transposed":
        return normal(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if how == "heads first" and len(shape) > 2:
        return normal(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-3, -2)
    if how == "one number":  # what the gradient of a sum is
        return normal(*(1,) * len(shape)).expand(shape)
    if how == "one row":
        return normal(*(1,) * (len(shape) - 1), shape[-1]).expand(shape)
    if how == "odd start":
        return normal(*shape[:-1], shape[-1] + 3)[..., 1:-2]
    return normal(*shape)


def draw(variant: Variant, number: int) -> Drawn:
    chance = random.Random(f"{variant} {number}")
    left, right = variant.mask in ("left", "both"), variant.mask in ("right", "both")
    space = replace(
        draws.features(draws.HOPPER_BACKWARD, variant.features),
        head_dims=(variant.head_dim,),
        head_dims_v=(variant.head_dim_v,),
        causal=(True, True, False) if right else (False,),
        left=(0, 5, 70, 130, 400) if left else (-1,),
        right=(0, 9, 100, 400) if right else (-1,),
        scales=(None, None, None, 0.3, 1 / variant.head_dim),
    )
    case = draws.draw(chance, space)
    return Drawn(
        case=case,
        do=chance.choice(("plain", "plain", "heads first", "transposed", "one number", "one row", "odd start")),
        dlse=chance.choice(("none", "plain", "plain", "transposed", "one number", "odd start")),
        out=chance.choice(("plain", "plain", "transposed")),
        owned=not case.varlen or chance.random() < 0.5,
    )


def drawn_problems(
    variant: Variant, count: int = DRAWS, drawing: Callable[[Variant, int], Drawn] = draw
) -> Iterator[tuple[int, Drawn, AttentionProblem, Inputs]]:
    """Those of the first drawn problems of a variant that are taken, with their numbers."""
    for number in range(count):
        item = drawing(variant, number)
        problem, inputs = item.build(variant.dtype, HERE)
        if refusal(problem) is None:
            yield number, item, problem, inputs


def assert_right(item: object, inputs: Inputs, what: BackwardInputs, found: Gradients) -> None:
    wrong = complaints(inputs, what, found)
    assert not wrong, f"{item}: {'; '.join(wrong)}"


def run(
    problem: AttentionProblem, inputs: Inputs, what: BackwardInputs, config: GradientConfig | None = None
) -> Gradients:
    """The gradients, in memory that held NaN; by the table's configuration or another one."""
    poison(inputs, extra=1 << 24)
    return hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse, config=config)


def repeats(problem: AttentionProblem) -> tuple[str, ...]:
    """The gradients that have the same bits at every run: dQ is else summed in any order."""
    return ("k", "v", "sinks", *(("q",) if problem.deterministic else ()))


def equal(a: Gradients, b: Gradients, names: tuple[str, ...]) -> bool:
    pairs = ((getattr(a, name), getattr(b, name)) for name in names)
    return all(x is y is None or torch.equal(x, y) for x, y in pairs)


def dense(n: int, head_dim: int, batch: int = 2, heads: int = 4, kv_heads: int = 2, **asked: Any):
    q, k, v = (torch.randn(batch, n, h, head_dim, device=HERE, dtype=BF16) for h in (heads, kv_heads, kv_heads))
    inputs = Inputs(q, k, v)
    return AttentionProblem.from_inputs(inputs, **asked), inputs


def forwarded(problem: AttentionProblem, inputs: Inputs) -> BackwardInputs:
    """Output and LSE of the Hopper forward and random gradients of both; nothing to compare with."""
    out = torch.empty((*inputs.q.shape[:-1], problem.head_dim_v), dtype=problem.dtype, device=HERE)
    lse = torch.empty(logs_of(problem, inputs), device=HERE)
    KERNEL.forward(problem, inputs, out, lse)
    return BackwardInputs(out, lse, torch.randn_like(out), torch.randn_like(lse), {}, {})


def on_four_streams(problem: AttentionProblem, inputs: Inputs, what: BackwardInputs, calls: int) -> list[Gradients]:
    """What so many calls find, on four streams one after another, none waiting for another."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for number in range(calls):
        with torch.cuda.stream(streams[number % 4]):
            found.append(hopper_backward(problem, inputs, what.out, what.lse, what.do, what.dlse))
    torch.cuda.synchronize()
    return found


def refusal(problem: AttentionProblem) -> str | None:
    """Which of :data:`REFUSALS` a problem meets, or None when it is taken."""
    reason = supports(problem)
    if reason is None:
        return None
    found = [name for name, pattern in REFUSALS.items() if re.search(pattern, reason)]
    assert found, f"{problem.describe()} is refused: {reason}"
    return found[0]
