"""Makes the tensors that the bench runs on: drawn from a seed in a pattern, or saved from a model.

A problem says how its sequences lie (dense, packed, in a key/value cache), and a :class:`Case` how long each is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.features import PAGED


@dataclass(frozen=True)
class Pattern:
    """What fills q, k and v. Random numbers are the default: constants draw less power and hide errors."""

    random_q: bool = True
    random_k: bool = True
    random_v: bool = True
    range_k: bool = False
    """K's row j is (j + 1) / seqlen_k in every element, as ``--range-k`` asks for it."""

    def describe(self) -> str:
        """The pattern in a phrase, for titles and results files."""
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
    lengths: tuple[int, ...] = ()
    """The length of each sequence: queries and keys where they are packed, or rows in use of a cache.

    Where it is empty, each sequence is as long as the problem says."""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.problem.describe()}" if self.name else self.problem.describe()

    def materialise(self, device: torch.device, seed: int, pattern: Pattern = RANDOM) -> Inputs:
        """The tensors on a device, drawn from ``seed`` unless they are given."""
        if self.inputs is None:
            return random_inputs(self.problem, device, seed, pattern, self.lengths)
        return Inputs(
            **{
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in ((field, getattr(self.inputs, field)) for field in Inputs.__dataclass_fields__)
            }
        )


def describe_inputs(cases: Iterable[Case], pattern: Pattern) -> str:
    """A phrase for results files that says where the tensors of the cases come from."""
    given = {case.inputs is not None for case in cases}
    words = ([pattern.describe()] if given != {True} else []) + (["saved tensors"] if True in given else [])
    return " or ".join(words)


def random_inputs(
    problem: AttentionProblem,
    device: torch.device,
    seed: int,
    pattern: Pattern = RANDOM,
    lengths: Sequence[int] = (),
) -> Inputs:
    """Tensors of a problem from a seed: q ``(b, sq, h, d)``, k ``(b, sk, hk, d)``, v ``(b, sk, hk, dv)``.

    They are drawn in f32 and rounded, so that all dtypes of one shape and seed have the same numbers. Packed sequences
    are ``(total, h, d)``; a cache in pages is ``(pages, rows, hk, d)``, with the pages in random order.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(rows: tuple[int, ...], heads: int, dim: int, random: bool) -> torch.Tensor:
        # It is drawn even where it is not used, so that a pattern for one tensor does not change the others.
        drawn = torch.randn((*rows, heads, dim), generator=generator, device=device)
        return (drawn if random else torch.ones_like(drawn)).to(problem.dtype)

    rows_q, rows_k = (problem.batch, problem.seqlen_q), (problem.batch, problem.seqlen_k)
    page = getattr(problem, *PAGED)
    if problem.varlen:
        rows_q, rows_k = ((sum(each),) for each in _packed_lengths(problem, lengths))
    elif page:
        rows_k = (problem.batch * problem.seqlen_k // page, page)
    q = draw(rows_q, problem.heads, problem.head_dim, pattern.random_q)
    k = draw(rows_k, problem.kv_heads, problem.head_dim, pattern.random_k)
    v = draw(rows_k, problem.kv_heads, problem.head_dim_v, pattern.random_v)
    if pattern.range_k and not problem.varlen and not page:
        ramp = torch.arange(1, problem.seqlen_k + 1, device=device) / max(problem.seqlen_k, 1)
        k.copy_(ramp.view(1, -1, 1, 1).expand_as(k))
    return Inputs(q, k, v, **_lengths_of(problem, lengths, generator))


def _packed_lengths(problem: AttentionProblem, lengths: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Queries and keys of each packed sequence."""
    if lengths:
        return lengths, lengths
    return [problem.seqlen_q] * problem.batch, [problem.seqlen_k] * problem.batch


def _lengths_of(problem: AttentionProblem, lengths: Sequence[int], generator: torch.Generator) -> dict[str, object]:
    """The tensors that say where sequences lie and how long they are."""
    device, page = generator.device, getattr(problem, *PAGED)
    if problem.varlen:
        starts_q, starts_k = (
            torch.tensor([0, *each], device=device).cumsum(0).to(torch.int32)
            for each in _packed_lengths(problem, lengths)
        )
        longest = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
        return {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, **longest}
    of_problem: dict[str, object] = {}
    if problem.seqused_k:
        used = list(lengths) or [problem.seqlen_k] * problem.batch
        of_problem["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
    if page:
        pages = torch.randperm(problem.batch * problem.seqlen_k // page, generator=generator, device=device)
        of_problem["block_table"] = pages.to(torch.int32).view(problem.batch, -1)
    return of_problem


def load_cases(path: Path, arch: str | None, dtypes: tuple[torch.dtype, ...] | None = None) -> list[Case]:
    """Read a case for every attention call of a file that ``flashlane capture`` saved.

    With ``dtypes`` there is a case for each of them, with the tensors rounded to it; None keeps the saved dtype.

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
