"""The Triton forward and backward over the whole product of features, drawn by hypothesis, by the peers' rule.

Without a GPU some hundred small problems run in Triton's interpreter. On a GPU the same draws run in thousands
(``FLASHLANE_DRAWS`` of each of 32 structures, each a test, for processes that run at once: ``pytest -n 16 -m gpu``).
A structure is what a kernel is compiled for, drawn once, since compiling takes longer than hundreds of problems.
"""

from __future__ import annotations

import functools
import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_rule import judge
from draws import cases
from forward_rule import complaint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashlane.bench.measure.drawn import EVERYTHING, draw
from flashlane.bench.measure.drawn_case import Case
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton import forward_configs as configs
from flashlane.kernels.triton.attention import TritonAttention
from flashlane.kernels.triton.backward import supports_backward, triton_backward
from flashlane.kernels.triton.backward_configs import BackwardConfig, Tile

KERNEL: TritonAttention = registry.get("triton")  # type: ignore[assignment]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")

SHORT = (0, 1, 2, 15, 16, 17, 33)
SMALL_HEAD_DIMS = (8, 24, 59, 64, 40, 96)
FORWARD_DRAWS, BACKWARD_DRAWS = 100, 50
SMALL_TILES = (
    None,
    BackwardConfig(Tile(32, 32, 4, 1, True), Tile(32, 32, 4, 1)),
    BackwardConfig(Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), splits=2),
)

STRUCTURES = 32
DRAWS = int(os.environ.get("FLASHLANE_DRAWS", "75"))
LONG = (0, 1, 2, 17, 63, 64, 65, 127, 203, 333, 512)
HEAD_DIMS = (8, 40, 59, 64, 64, 96, 128, 128, 192, 256)


def drawing(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def ran(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the forward, written over NaN."""
    rows, device = inputs.q.shape[:-1], inputs.q.device
    shape = (problem.heads, rows[0]) if problem.varlen else (problem.batch, problem.heads, problem.seqlen_q)
    out = torch.full((*rows, problem.head_dim_v), math.nan, dtype=problem.dtype, device=device)
    lse = torch.full(shape, math.nan, device=device)
    assert KERNEL.supports(problem) is None
    KERNEL.forward(problem, inputs, out, lse)
    return out, lse


def forward_of(problem: AttentionProblem, inputs: Inputs) -> None:
    wrong = complaint(problem, inputs, *ran(problem, inputs))
    assert not wrong, wrong


@pytest.mark.slow
@interpreted
@drawing(FORWARD_DRAWS)
@given(
    st.booleans().flatmap(
        lambda cached: cases(dropout=True, cached=cached, some_lengths=SHORT, head_dims=SMALL_HEAD_DIMS)
    ),
    st.sampled_from((F32, F16)),
    st.integers(1, 3),
)
def test_forward(case: Case, dtype: torch.dtype, splits: int) -> None:
    from flashlane.kernels.triton import forward

    forward.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "splits_of", lambda problem, config: splits)
        forward_of(*case.build(dtype))
    forward.clear()


@pytest.mark.slow
@interpreted
@drawing(BACKWARD_DRAWS)
@given(
    cases(dropout=True, some_lengths=SHORT, head_dims=SMALL_HEAD_DIMS[:4]).map(
        lambda case: replace(case, kv_heads=1) if case.group > 1 else case  # the interpreter takes a second for more
    ),
    st.sampled_from((F32, F16)),
    st.sampled_from(SMALL_TILES),
)
def test_backward(case: Case, dtype: torch.dtype, config: BackwardConfig | None) -> None:
    problem, inputs = case.build(dtype)
    torch.manual_seed(case.seed)  # of the gradients: what failed once fails again
    judge(problem, inputs, functools.partial(triton_backward, config=config))


STRUCTURE = replace(
    EVERYTHING,
    head_dims=HEAD_DIMS,
    head_dims_v=(0, 0, *HEAD_DIMS),
    modifiers={**EVERYTHING.modifiers, "softcap": (0.0, 0.0, 20.0)},
    dropout=(0.0, 0.0, 0.17),
    caches=((),) * 6
    + (("used",), ("used", "leftpad"), ("batch_idx",), ("used", "batch_idx"), ("paged",), ("used", "paged")),
    pages=(16, 100),
)
WINDOWS = ((-1, -1), (-1, -1), (70, 0), (5, 9), (-1, 3))
BIASES = (None, None, (True, True, True, True), (False, True, False, True))
COMPILED_FOR = (
    "varlen", "group", "head_dim", "head_dim_v", "causal", "alignment", "window", "softcap", "alibi", "bias", "sinks",
    "dropout", "strides", "page", "used", "leftpad", "batch_idx",
)  # fmt: skip


def structure(chance: random.Random) -> dict[str, Any]:
    """What kernels are compiled for, drawn: fields of a :class:`Case`, and the dtype."""
    case = replace(draw(chance, STRUCTURE), window=chance.choice(WINDOWS), bias=chance.choice(BIASES))
    return {"dtype": chance.choice((BF16, BF16, F16, F32)), **{name: getattr(case, name) for name in COMPILED_FOR}}


def of_structure(case: Case, fields: dict[str, Any]) -> Case:
    """A case with the lengths, heads and values that were drawn, and what it is compiled for replaced."""
    lengths = case.lengths if fields["varlen"] else case.lengths[:1] * min(2, len(case.lengths))
    return replace(case, lengths=lengths, **{name: value for name, value in fields.items() if name != "dtype"})


def second_backward(*given: Any, **options: Any) -> Any:
    """What a second call of the Triton backward gives, in f32 as the table of backwards runs it."""
    for _ in range(2):
        found = triton_backward(*given, precision="bf16x6", **options)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(STRUCTURES))
def test_on_a_gpu(seed: int) -> None:
    fields = structure(random.Random(seed))

    @drawing(DRAWS)
    @given(cases(some_lengths=LONG))
    def both(case: Case) -> None:
        case = of_structure(case, fields)
        problem, inputs = case.build(fields["dtype"], device="cuda")
        ran(problem, inputs)
        forward_of(problem, inputs)  # the second call is launched otherwise: past Triton
        if not case.cached:
            torch.manual_seed(case.seed)
            judge(problem, inputs, second_backward)

    both()


def test_the_structures_of_a_gpu_hold_every_feature_and_build() -> None:
    """Every feature is in at least one of them, and each is a problem that the kernels take."""
    drawn = [structure(random.Random(seed)) for seed in range(STRUCTURES)]
    for fields in drawn:
        base = Case(
            lengths=((17, 33), (1, 16)), kv_heads=1, hide=True, seed=1,
            **{name: value for name, value in fields.items() if name != "dtype"},
        )  # fmt: skip
        problem, _ = of_structure(base, fields).build(fields["dtype"])
        problem = replace(problem, arch="sm_90a")
        assert KERNEL.supports(problem) is None
        assert base.cached or supports_backward(problem) is None
    switches = ("varlen", "causal", "softcap", "bias", "sinks", "dropout", "page", "used", "leftpad", "batch_idx")
    for name in switches:
        assert 0 < sum(bool(fields[name]) for fields in drawn) < len(drawn), name
    assert {fields["dtype"] for fields in drawn} == {F16, BF16, F32}
    assert {fields["group"] for fields in drawn} == set(STRUCTURE.groups)
    assert {fields["strides"] for fields in drawn} == {"plain", "transposed", "sliced", "expanded"}
    assert {fields["alibi"] for fields in drawn} == {"none", "heads", "batch"}
    assert {fields["alignment"] for fields in drawn} == {"bottom-right", "top-left"}
