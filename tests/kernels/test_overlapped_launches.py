"""Launches that may begin before the kernel before them has ended: each waits for it before it touches memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from disassembly import disassembled

from flashlane import jit
from flashlane.core import registry
from flashlane.core.dispatch import select_backward
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource

HOPPER, DECODE = (registry.get(tag) for tag in ("hopper(wgmma+tma)", "decode(split-kv)"))
WAIT = "ACQBULK"
"""What ``griddepcontrol.wait`` is compiled to."""
GLOBAL = re.compile(r"\b(LDG|STG|ATOMG?|RED|UTMALDG|UTMASTG|UBLKCP|LDGSTS)\b")
"""Instructions that read or write device memory."""


def problem_of(**changes: object) -> AttentionProblem:
    fields = {"batch": 1, "heads": 8, "kv_heads": 8, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64, "head_dim_v": 64}
    fields |= {"dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a"}
    return AttentionProblem(**{**fields, **changes})


def sources() -> Iterator[KernelSource]:
    """Kernels that are first in a call, and the backward's last one."""
    yield HOPPER.sources(problem_of())[0]
    yield HOPPER.sources(problem_of(seqlen_q=4096, seqlen_k=4096, head_dim=256, head_dim_v=256))[0]
    yield DECODE.sources(problem_of(seqlen_q=1, seqlen_k=4096, kv_heads=2, seqused_k=True))[0]
    recorded = problem_of(needs_grad=True)
    preprocess, _, postprocess = select_backward(recorded, HOPPER).sources(recorded)
    yield from (preprocess, postprocess)


@pytest.mark.parametrize("source", tuple(sources()), ids=lambda source: source.name.removeprefix("kernels/"))
def test_it_waits_before_it_touches_memory(source: KernelSource) -> None:
    text = disassembled(jit.compile(source, "sm_90a").cubin)
    lines = text.splitlines()
    waits = next(number for number, line in enumerate(lines) if WAIT in line)
    touches = next(number for number, line in enumerate(lines) if GLOBAL.search(line))
    assert waits < touches
