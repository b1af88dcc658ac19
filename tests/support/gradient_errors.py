"""Errors of the gradients of ranks against f64, next to those of one process: a job of ranks that have GPUs."""

from __future__ import annotations

from dataclasses import replace

import context_parallel_cases as cases
import numpy
import rank_pool
import torch
import torch.distributed as dist
from context_parallel_cases import Case

from flashlane.bench.measure.ranks import note
from flashlane.core.arch import arch_of
from flashlane.distributed.layout import token_indices

Gradients = dict[str, numpy.ndarray]
NAMES = ("dq", "dk", "dv")
DOCUMENTS = (400, 3, 800, 1, 0, 500, 299)
SHAPE = {"heads": 8, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128, "dtype": torch.bfloat16, "reads_lse": False}
D64, D192 = {"head_dim": 64, "head_dim_v": 64}, {"head_dim": 192, "head_dim_v": 192}
RINGS = {
    "causal": {},
    "window": {"window": (900, 0)},
    "documents": {"lengths": DOCUMENTS},
    "softcap": {"softcap": 20.0, **D64},
    "ALiBi": {"alibi": True, "layout": "striped", **D64},
    "sinks": {"sinks": True},
    "deterministic": {"deterministic": True},
    "D192": D192,
    "D192, window, deterministic": {"window": (900, 0), "deterministic": True, **D192},
}
"""Cases of a ring."""


def case_of(name: str, device: torch.device) -> Case:
    """A case of :data:`RINGS`; on a CPU it is small."""
    asked = {"lengths": (2003,), **SHAPE, **RINGS[name]}
    if device.type == "cpu":
        lengths = tuple(-(-count // 10) for count in asked["lengths"])
        asked |= {"lengths": lengths, "window": (90, 0) if "window" in RINGS[name] else (-1, -1)}
        asked |= {"head_dim": 8, "head_dim_v": 8}
    return Case(method="ring", **asked)


def errors_on_ranks(device: torch.device, names: tuple[str, ...]) -> dict[str, dict[str, dict[str, float]]]:
    """By case, by way (``one`` process, ``ranks``, and ranks with ``rounded`` parts) and by name of the gradient.

    Of a deterministic case there are also, as ``again``, numbers of ranks whose gradients have other bits in a second
    run.
    """
    size, rank, found = dist.get_world_size(), dist.get_rank(), {}
    rank_pool._groups[size] = dist.group.WORLD
    for name in names:
        case = case_of(name, device)
        note(f"{name} on {arch_of(device)}")
        own = token_indices(case.layout, case.lengths, size, rank).numpy()
        alone = cases.expected(case, device), cases.one_process(case, device)
        right, one = ({n: each[n].take(own, case.axis) for n in NAMES} for each in alone)
        ways = {"one": one, "ranks": cases.on_rank(case, size, device)}
        ways["rounded"] = cases.on_rank(replace(case, rounded=True), size, device)
        found[name] = {way: _errors(each, right, device) for way, each in ways.items()}
        if case.deterministic:
            again = cases.on_rank(case, size, device)
            other = torch.tensor([float((again[n] != ways["ranks"][n]).any()) for n in NAMES], device=device)
            dist.all_reduce(other)
            found[name]["again"] = dict(zip(NAMES, other.tolist(), strict=True))
    return found


def _errors(found: Gradients, right: Gradients, device: torch.device) -> dict[str, float]:
    """Relative to the norms, over the tokens of all ranks."""
    sums = [[((found[n] - right[n]) ** 2).sum(), (right[n] ** 2).sum()] for n in NAMES]
    total = torch.tensor(numpy.array(sums), device=device)
    dist.all_reduce(total)
    return {n: float((error / size) ** 0.5) for n, (error, size) in zip(NAMES, total.tolist(), strict=True)}
