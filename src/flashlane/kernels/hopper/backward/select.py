"""Which design and which configuration a problem of the Hopper backward gets."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import memoised
from flashlane.jit import shared_limit
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.config import ONE_CTA_HEAD_DIM, GradientConfig
from flashlane.kernels.hopper.backward.launch import Schedule
from flashlane.kernels.score import SCORE_EXAMPLES


class Design(NamedTuple):
    """One of the ways in which the gradients are divided among kernels and CTAs; imported where a problem gets it."""

    name: str
    """Its folder."""
    picked_in: str
    """The module of the folder that has ``pick``."""

    def pick(self, problem: AttentionProblem) -> GradientConfig:
        """The configuration that a problem gets."""
        return self._module(self.picked_in).pick(problem)

    def schedule(self, *arguments: Any, **named: Any) -> Schedule:
        """The launches of a configuration for a problem on a GPU of so many SMs; ``total``: of packed sequences."""
        return self._module("launch").schedule(*arguments, **named)

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"flashlane.kernels.hopper.backward.{self.name}.{name}")


_DESIGNS = Design("one_cta", "tiles"), Design("two_cta", "config"), Design("split_dkdv_dq", "config")
DESIGNS = {design.name: design for design in _DESIGNS}


def design_of(problem: AttentionProblem) -> str:
    """The design of a supported problem."""
    if max(problem.head_dim, problem.head_dim_v) <= ONE_CTA_HEAD_DIM:
        return "one_cta"
    from flashlane.kernels.hopper.backward.design_cost import two_kernels_are_faster
    from flashlane.kernels.hopper.backward.two_cta.config import refusal

    if refusal(problem) is not None or two_kernels_are_faster(problem):
        return "split_dkdv_dq"
    return "two_cta"


@memoised
def config_of(problem: AttentionProblem) -> GradientConfig:
    """The table's configuration of a problem."""
    return DESIGNS[design_of(problem)].pick(problem)


VARIED = {"block_m": (48, 64, 80, 96, 112, 128), "k_stages": (1, 2), "v_stages": (1, 2)}
VARIED |= {"ping_pong": ("off", "until_issued", "until_complete")}
"""What ``flashlane tune`` varies of the one-CTA design; the other designs have the largest tile that fits."""


def candidates(problem: AttentionProblem) -> Iterator[GradientConfig]:
    """The table's configuration, and others of the same design that fit shared memory."""
    base = config_of(problem)
    yield base
    if base.design != "one_cta":
        return
    for chosen in itertools.product(*VARIED.values()):
        other = replace(base, **dict(zip(VARIED, chosen, strict=True)))
        if other != base and other.shared_memory <= shared_limit(ARCH) and _makes_sense(other):
            yield other


def _makes_sense(config: Any) -> bool:
    """V has a second stage only where K has one; a slice of dQ has 8 · n queries, and an m-block 16 · n."""
    return config.v_stages <= config.k_stages and config.slice_rows % 8 == 0 and config.block_m % 16 == 0


def tuned_fields(config: GradientConfig) -> dict[str, Any]:
    """What ``flashlane tune`` keeps of a configuration."""
    return {name: getattr(config, name) for name in VARIED} if config.design == "one_cta" else {}


def shipped_problems() -> Iterator[AttentionProblem]:
    """Problems that lead through the designs, tiles, masks and features."""
    masks = ({}, {"window_right": 0}, {"window_left": 100, "window_right": 9})
    features = ({}, *SCORE_EXAMPLES, {"varlen": True}, {"deterministic": True})
    everything = {name: value for feature in features for name, value in feature.items()}
    dims = ((64, 64), (80, 80), (96, 96), (104, 64), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
    dtypes = (torch.bfloat16, torch.float16)
    number = 0
    for (d, dv), mask, feature in itertools.product(dims, masks, (*features, everything)):
        for batch, heads, kv_heads, n in (
            (2, 8, 2, 4096),
            (16, 16, 16, 1024),
            (1, 2, 2, 2048),
            (16, 8, 8, 551),
            (16, 8, 8, 570),
            (8, 16, 2, 4096),
        ):
            if heads == 8 * kv_heads and (d <= 64 or feature or mask != {"window_right": 0}):
                continue
            if n < 1000 and (d != 64 or feature):
                continue
            number += 1
            if feature and n != 4096 and d not in (64, 128):
                continue
            yield AttentionProblem(
                batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=dv,
                dtype=dtypes[number % 2], scale=0.1, arch=ARCH, needs_grad=True, **mask, **feature,
            )  # fmt: skip
