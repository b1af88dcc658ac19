"""Of which integers Triton makes variants of the kernels, as JSON: run by a test, in a process of its own.

Triton compiles another kernel where an integer that it may specialise is 1 or a multiple of 16. What depends on a
length must be none of them, or a sum of lengths that happens to be a multiple of 16 costs a call seconds.

    python tests/support/triton_keys.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from kvcache_steps import Step, update_of
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from flashlane.bench.measure.drawn_case import Case
from flashlane.core import registry
from flashlane.kernels.triton import backward, cache_update
from flashlane.kernels.triton.forward import PreparedForward
from flashlane.kernels.triton.launch import Launch

ARCH = "sm_90a"
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
LENGTHS = ((1, 1), (16, 16), (17, 33), (96, 300), (101, 320), (128, 256), (333, 700))
PLAIN = Case(
    lengths=((17, 33),) * 2, varlen=False, kv_heads=1, group=3, head_dim=64, head_dim_v=64, causal=True,
    alignment="bottom-right", window=(-1, -1), softcap=0.0, alibi="batch", bias=None, hide=False, sinks=True,
    strides="plain", seed=1,
)  # fmt: skip


@triton.jit
def control(n):
    """A kernel that is made again for some ``n``: were it not found, nothing would be."""
    tl.device_print("", n)


def integers(launch: Launch) -> dict[str, str]:
    """How Triton sees each integer of a launch: its type, and whether it is known to be 1 or a multiple of 16.

    The unit of strides, which is a constant of the kernel, and all fields of named tuples are listed too.
    """
    function = launch.function
    bind = create_function_from_signature(function.signature, function.params, BACKEND)
    given = launch.neutral({})
    seen = bind(**given, **launch.options)[1]
    described = {}
    for param, how in zip(function.params, seen, strict=True):
        value = given[param.name]
        if param.name == "UNIT" or (isinstance(value, int) and not param.is_constexpr):
            described[param.name] = str(how)
        elif isinstance(value, tuple):  # type and variant of each field
            described |= {f"{param.name}.{field}": str(each) for field, *each in zip(value._fields, *how, strict=True)}
    return described


def attention(case: Case) -> Iterator[Launch]:
    """The launches of a forward and a backward."""
    problem, inputs = case.build(torch.bfloat16)
    problem = problem.on(ARCH)
    kernel = registry.get("triton")
    out = inputs.q.new_empty((*inputs.q.shape[:-1], problem.head_dim_v))
    *batch, rows, heads, _ = out.shape
    lse = torch.empty((*batch, heads, rows))
    plan = PreparedForward(problem, kernel.config(problem), inputs, out, lse, kernel.precision_of(problem))
    yield from filter(None, (plan.forward, plan.combine))
    if not case.cached:
        made = backward.prepare(problem, inputs, out, lse, out, lse, True, "ieee", None)
        yield from filter(None, (made.statistics, made.key, made.query, made.bias))


def families() -> Iterator[tuple[str, list[Launch]]]:
    """Launches that differ in their lengths alone."""
    yield "control", [Launch(control, (1,), {"n": n}, {}) for n in (16, 17)]
    for head_dim in (64, 40, 59):
        sized = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim)
        for strides in ("plain", "transposed"):
            for bias in (None, (True, True, True, True)):
                case = replace(sized, strides=strides, bias=bias)
                name = f"D{head_dim} {strides}{' bias' if bias else ''}"
                cases = [replace(case, lengths=(pair,) * 2) for pair in LENGTHS]
                yield name, [launch for each in cases for launch in attention(each)]
        packed = replace(sized, varlen=True)
        cases = [replace(packed, lengths=pairs) for pairs in zip(LENGTHS, reversed(LENGTHS), strict=True)]
        cases += [replace(packed, lengths=((5, 9),) * count) for count in (2, 7, 14)]
        yield f"D{head_dim} packed", [launch for each in cases for launch in attention(each)]
        for page_size in (0, 16, 17):
            cached = replace(sized, used=True, page=page_size)
            cases = [replace(cached, lengths=(pair,) * 2) for pair in ((1, 33), (1, 48), (1, 5000), (16, 5000))]
            yield f"D{head_dim} cache of pages of {page_size}", [launch for each in cases for launch in attention(each)]
            step = Step(head_dims=(head_dim, head_dim), heads=(3, 1), rotary=16, page_size=page_size)
            changes = ({}, {"seqlen_q": 1, "seqlen_new": 1}, {"seqlen_new": 16}, {"capacity": 48}, {"batch": 16})
            updates = [update_of(replace(step, **change), torch.bfloat16, "cpu") for change in changes]
            yield f"D{head_dim} update of pages of {page_size}", [cache_update._make(update) for update in updates]


def main() -> None:
    keys: list[dict[str, Any]] = []
    for family, launches in families():
        kernels = {launch.function.__name__: launch.function for launch in launches}
        for name, function in kernels.items():
            rows = [integers(launch) for launch in launches if launch.function is function]
            several = {argument: sorted({row[argument] for row in rows}) for argument in rows[0]}
            several = {argument: ways for argument, ways in several.items() if len(ways) > 1}
            keys.append({"family": family, "kernel": name, "launches": len(rows), "several": several})
    json.dump(keys, sys.stdout)


if __name__ == "__main__":
    main()
