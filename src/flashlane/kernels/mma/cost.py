"""The time that the variants of the mma.sync family take for a problem, predicted, and the fastest of them.

A tile costs a constant and a time for each n-block (:mod:`flashlane.kernels.tile_cost`); a launch takes what
:mod:`flashlane.kernels.grid_cost` says of its CTAs. Coefficients are data: ``cost.json``, which
``benchmarks/scripts/fit_grid_cost.py`` writes from timings on a Hopper GPU. The code of the family is the same on every
architecture: elsewhere the CTAs of an SM and the SMs are counted, and all else is taken to be in proportion.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.core.tuned import few_blocks
from flashlane.kernels.grid_cost import Grid, share_of, sms_of
from flashlane.kernels.makespan import sections_of
from flashlane.kernels.mma import tiles
from flashlane.kernels.mma.config import MmaConfig
from flashlane.kernels.mma.variants import VARIANTS, Variant, heads_per_section
from flashlane.kernels.tile_cost import SOFTMAX, Coefficients, blocks_of

TIMED_ARCH = "sm_90a"
CLASSES = (32, 64, 96, 128, 160, 256, 320, 512)
"""Head dims that were timed; others count as the next larger one, in proportion to their products."""
COMPARED = {tag: variant for tag, variant in VARIANTS.items() if tag in tiles.FASTEST}
"""The variants that ``auto`` chooses from, by tag."""


@dataclass(frozen=True)
class Timed:
    """What is known of a tile shape of a variant."""

    one: Coefficients
    """The coefficients with :attr:`resident` CTAs on an SM."""
    fixed: float
    """Part of a CTA's time that the others on its SM do not lengthen."""
    resident: int
    """CTAs of an SM of the GPU that was timed."""
    registers: int
    """Registers of a thread."""


class Predicted(NamedTuple):
    """A configuration with predicted microseconds."""

    microseconds: float
    config: MmaConfig


@functools.cache
def coefficients() -> tuple[dict[str, Timed], dict[str, float]]:
    """The coefficients of each shape by its name; and what all share: microseconds of a launch."""
    body = json.loads(Path(__file__).with_name("cost.json").read_text(encoding="utf-8"))
    known = {
        name: Timed(Coefficients(*values[:3]), values[3], *map(int, values[4:]))
        for name, values in body["shapes"].items()
    }
    return known, body["shared"]


def class_of(problem: AttentionProblem) -> int | None:
    """The head dim of :data:`CLASSES` that a problem counts as, or None where it is larger than all."""
    largest = max(problem.head_dim, problem.head_dim_v)
    return next((head_dim for head_dim in CLASSES if largest <= head_dim), None)


def name_of(head_dim: int, variant: Variant, shape: tiles.Shape) -> str:
    """A shape of a variant at a head dim of :data:`CLASSES`, as a key of the data."""
    words = [f"{shape.block_m}x{shape.block_n}", f"{shape.warps_q}x{shape.warps_kv}"]
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name not in ("block_m", "block_n", "warps_q", "warps_kv") and value != field.default:
            words.append(f"{field.name}={int(value)}")
    return f"{head_dim} {variant.tag} {' '.join(words)}"


def shapes_of(variant: Variant, problem: AttentionProblem) -> dict[MmaConfig, tiles.Shape]:
    """The shapes of a variant for problems with few and with many CTAs, by the configurations that fit."""
    found: dict[MmaConfig, tiles.Shape] = {}
    for shape in variant.shapes(problem, True):
        config = variant.at(problem, shape)
        if config.shared_memory <= jit.shared_limit(problem.arch):
            found.setdefault(config, shape)
    return found


@functools.lru_cache(maxsize=1024)
def _compared(variant: Variant, kind: AttentionProblem) -> tuple[tuple[MmaConfig, Timed, int], ...]:
    """Configurations of a variant that are known, and CTAs of an SM of each on the architecture.

    Args:
        variant: one of :data:`COMPARED`.
        kind: a problem of one key, whose head dims, type, alignment and architecture are the problem's.
    """
    head_dim, (known, _) = class_of(kind), coefficients()
    compared = []
    for config, shape in shapes_of(variant, kind).items() if head_dim else ():
        timed = known.get(name_of(head_dim, variant, shape))
        if timed is None:
            continue
        resident = timed.resident
        if kind.arch != TIMED_ARCH:
            shared = config.shared_memory
            resident = jit.occupancy(str(kind.arch), config.threads, timed.registers, shared).ctas
        if resident:
            compared.append((config, timed, resident))
    return tuple(compared)


def fastest_tag(problem: AttentionProblem) -> str | None:
    """The tag with the least predicted time; where nothing is known, that of the table."""
    able = [v for v in COMPARED.values() if max(problem.head_dim, problem.head_dim_v) <= v.max_head_dim]
    times = {v.tag: found[0].microseconds for v in able if (found := ranked(v, problem))}
    if times:
        return min(times, key=times.__getitem__)
    return tiles.best_tag(max(problem.head_dim, problem.head_dim_v), few_blocks(problem))


def ranked(variant: Variant, problem: AttentionProblem) -> list[Predicted]:
    """The configurations of a variant whose coefficients are known, the fastest first; empty where none is.

    Args:
        variant: one of :data:`COMPARED`; of others nothing is known.
        problem: the attention problem.
    """
    if variant.tag not in COMPARED or problem.arch not in jit.LIMITS:
        return []
    return list(_ranked(variant, problem.chosen_for))


@functools.lru_cache(maxsize=1024)
def _ranked(variant: Variant, problem: AttentionProblem) -> tuple[Predicted, ...]:
    """The list of :func:`ranked`, which a choice asks for twice: for the variant, and for its configuration."""
    kind = AttentionProblem(
        batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=1, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v,
        dtype=problem.dtype, scale=1.0, arch=problem.arch, aligned=problem.aligned,
    )  # fmt: skip
    found = [Predicted(_predicted(problem, *known), known[0]) for known in _compared(variant, kind)]
    return tuple(sorted(found, key=lambda each: each.microseconds))


def _predicted(problem: AttentionProblem, config: MmaConfig, timed: Timed, resident: int) -> float:
    """Microseconds of a configuration.

    Args:
        problem: the attention problem.
        config: the configuration.
        timed: what is known of its shape.
        resident: CTAs of an SM on the problem's architecture.
    """
    _, shared = coefficients()
    width = 2 * (class_of(problem) or 1)
    share = share_of(resident, timed.resident, timed.fixed)
    work = SOFTMAX + (1 - SOFTMAX) * (problem.head_dim + problem.head_dim_v) / width
    one = Coefficients(timed.one.tile * share, timed.one.block * work * share, timed.one.masked * share)
    time = grid_of(problem, config).time(one, sms_of(problem.arch), resident, timed.fixed / share)
    return shared["launch"] + time


def grid_of(problem: AttentionProblem, config: MmaConfig) -> Grid:
    """The launch of a configuration."""
    sections = sections_of(problem.batch * problem.heads, heads_per_section(problem))
    return Grid(blocks_of(problem, config.block_m, config.block_n), sections)
