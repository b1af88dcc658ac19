"""The tensors that the bench runs on: random ones, the founding patterns, or tensors saved from a real model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashlane.core.problem import AttentionProblem, Inputs


@dataclass(frozen=True)
class Pattern:
    """What fills q, k and v. Random is the rule (zeros and ones draw less power and hide errors)."""

    random_q: bool = True
    random_k: bool = True
    random_v: bool = True
    range_k: bool = False
    """K's row j is (j + 1) / seqlen_k in every element, as the founding ``--range-k`` has it."""

    def describe(self) -> str:
        """One phrase for titles and results files."""
        ones = [name for name in "qkv" if not getattr(self, f"random_{name}")]
        words = ["normal(0, 1)"] + ([f"{', '.join(ones)} all ones"] if ones else [])
        return "; ".join(words + (["k ramped"] if self.range_k else []))


RANDOM = Pattern()


@dataclass(frozen=True)
class Case:
    """One problem to bench, and the tensors of it when they are given rather than drawn."""

    problem: AttentionProblem
    name: str = ""
    """Where the tensors come from (``layers.0 of model.safetensors``); empty for drawn ones."""
    inputs: Inputs | None = None

    @property
    def title(self) -> str:
        return f"{self.name}: {self.problem.describe()}" if self.name else self.problem.describe()

    def materialise(self, device: torch.device, seed: int, pattern: Pattern = RANDOM) -> Inputs:
        """The tensors on a device."""
        if self.inputs is None:
            return random_inputs(self.problem, device, seed, pattern)
        return Inputs(
            **{
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in ((field, getattr(self.inputs, field)) for field in Inputs.__dataclass_fields__)
            }
        )


def random_inputs(problem: AttentionProblem, device: torch.device, seed: int, pattern: Pattern = RANDOM) -> Inputs:
    """q ``(b, sq, h, d)``, k ``(b, sk, hk, d)``, v ``(b, sk, hk, dv)`` of a dense problem, from a seed.

    Drawn in f32 and rounded, so that every dtype of one shape and seed sees the same numbers.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(length: int, heads: int, dim: int, random: bool) -> torch.Tensor:
        shape = (problem.batch, length, heads, dim)
        # Drawn even when it is not used, so that a pattern changes one tensor and leaves the others as they were.
        drawn = torch.randn(shape, generator=generator, device=device)
        return (drawn if random else torch.ones_like(drawn)).to(problem.dtype)

    q = draw(problem.seqlen_q, problem.heads, problem.head_dim, pattern.random_q)
    k = draw(problem.seqlen_k, problem.kv_heads, problem.head_dim, pattern.random_k)
    v = draw(problem.seqlen_k, problem.kv_heads, problem.head_dim_v, pattern.random_v)
    if pattern.range_k:
        ramp = torch.arange(1, problem.seqlen_k + 1, device=device) / max(problem.seqlen_k, 1)
        k.copy_(ramp.view(1, -1, 1, 1).expand_as(k))
    return Inputs(q, k, v)


def load_cases(path: Path, arch: str | None, dtypes: tuple[torch.dtype, ...] | None = None) -> list[Case]:
    """One case for every attention layer that ``flashlane capture`` saved.

    ``dtypes`` asks for the saved tensors rounded to each of them; None keeps the saved dtype.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: as :func:`~flashlane.bench.measure.qkv_file.load_qkv`.
    """
    from flashlane.bench.measure.qkv_file import load_qkv

    cases = []
    for captured in load_qkv(path):
        for dtype in dtypes or (captured.q.dtype,):
            rounded = replace(captured, **{side: getattr(captured, side).to(dtype) for side in "qkv"})
            inputs = Inputs(rounded.q, rounded.k, rounded.v)
            cases.append(Case(rounded.problem().on(arch), f"{captured.name} of {path.name}", inputs))
    return cases
