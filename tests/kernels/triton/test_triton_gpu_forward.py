"""The Triton forward on a GPU: drawn problems of every feature by the peers' rule, and what must hold of a launch.

``FLASHLANE_DRAWS`` says how many problems each variant draws, ``FLASHLANE_SHARE=2/8`` takes every eighth variant from
the second on, so that several processes share the compiling.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forward_rule import complaint
from stream_and_graph import check_stream_and_graph
from triton_variants import FORWARD_VARIANTS as VARIANTS
from triton_variants import ForwardVariant as Variant

from flashlane.bench.measure.drawn_case import PLAIN, Case
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton.forward_configs import TritonConfig

pytestmark = pytest.mark.gpu
DRAWS = int(os.environ.get("FLASHLANE_DRAWS", "12"))
SHARE, SHARES = (int(word) for word in os.environ.get("FLASHLANE_SHARE", "1/1").split("/"))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def build(case: Case, dtype: torch.dtype) -> tuple[AttentionProblem, Inputs]:
    return case.build(dtype, device="cuda")


def run(
    problem: AttentionProblem, inputs: Inputs, tag: str = "triton", config: TritonConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, written over NaN."""
    rows = inputs.q.shape[:-1]
    shape = (problem.heads, rows[0]) if problem.varlen else (problem.batch, problem.heads, problem.seqlen_q)
    out = torch.full((*rows, problem.head_dim_v), math.nan, dtype=problem.dtype, device="cuda")
    lse = torch.full(shape, math.nan, device="cuda")
    kernel = registry.get(tag)
    assert kernel.supports(problem) is None
    if config is None:
        kernel.forward(problem, inputs, out, lse)
    else:
        kernel.run(config, problem, inputs, out, lse)
    return out, lse


@pytest.mark.parametrize("variant", VARIANTS[SHARE - 1 :: SHARES], ids=str)
def test_agrees_with_the_reference(variant: Variant) -> None:
    for number in range(DRAWS):
        case = variant.draw(number)
        problem, inputs = build(case, variant.dtype)
        out, lse = run(problem, inputs, variant.tag)
        wrong = complaint(problem, inputs, out, lse, tf32="tf32" in variant.tag)
        assert not wrong, f"{wrong}: {problem.describe()} with {registry.get(variant.tag).config(problem)}, {case}"


def test_every_candidate_is_right() -> None:
    for dtype in (BF16, F32):
        for head_dim in (64, 128):
            problem, inputs = build(replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim), dtype)
            for config in registry.get("triton").candidates(problem):
                assert not complaint(problem, inputs, *run(problem, inputs, config=config)), config


@pytest.mark.parametrize("lengths", [(333, 700), (1, 9000)], ids=["tiles", "splits"])
def test_repeats_to_the_bit(lengths: tuple[int, int]) -> None:
    problem, inputs = build(replace(PLAIN, lengths=(lengths,), dropout=0.2), BF16)
    first = run(problem, inputs)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run(problem, inputs), strict=True))


def test_large_offsets() -> None:
    """Rows further apart than 2^31 elements take all together, and tiles of keys that span as many."""
    rows, stride = 70, 1 << 25
    space = torch.empty(rows * stride + 64, dtype=F16, device="cuda")
    q = torch.as_strided(space, (1, rows, 1, 64), (1, stride, 1, 1)).normal_()
    inputs = Inputs(q, q, q)
    problem = AttentionProblem.from_inputs(inputs)
    assert not complaint(problem, inputs, *run(problem, inputs))


def test_runs_on_the_current_stream_and_in_a_graph() -> None:
    for lengths in ((300, 300), (1, 5000)):
        problem, inputs = build(replace(PLAIN, lengths=(lengths,)), BF16)
        check_stream_and_graph(
            registry.get("triton"), problem, inputs, lambda p=problem, tensors=inputs: run(p, tensors)
        )


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (((100, 300), (65, 200)), ((96, 112), (62, 400))),  # the other's sums are multiples of 16
        (((100, 600), (65, 200)), ((97, 111), (70, 700))),
    ],
    ids=["tiles", "splits"],
)
def test_a_call_after_the_first_builds_nothing(
    first: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lengths that are cut up alike run what is compiled; another call like the first does not reach Triton."""
    from flashlane.kernels.triton import forward
    from flashlane.kernels.triton import forward_configs as configs

    def compiled() -> int:
        return len(forward.attention_kernel().device_caches[torch.cuda.current_device()][0])

    problem, inputs = build(replace(PLAIN, varlen=True, lengths=first), BF16)
    other_problem, other_inputs = build(replace(PLAIN, varlen=True, lengths=other), BF16)
    many = {configs.splits_of(p, registry.get("triton").config(p)) > 1 for p in (problem, other_problem)}
    assert len(many) == 1, "the keys of one are split, and of the other not: two kernels by design"
    run(problem, inputs)
    before = compiled()
    assert not complaint(other_problem, other_inputs, *run(other_problem, other_inputs))
    assert compiled() == before
    monkeypatch.setattr(forward.PreparedForward, "__init__", lambda *args: pytest.fail("a plan was made"))
    run(problem, inputs)


FIRST_CALL = """
import torch, triton
from flashlane import flash_attn_func

built, launched = [], []
triton.knobs.runtime.jit_post_compile_hook = lambda **known: built.append(known["fn"].name)
triton.knobs.runtime.launch_enter_hook.add(lambda data: launched.append(data.get()["name"]))
q, k, v = (torch.randn(1, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
flash_attn_func(q, k, v, causal=True, kernel="triton").sum().backward()
torch.cuda.synchronize()
print(len(built), len(launched), *sorted(launched))
"""


def test_a_fresh_process_compiles_no_more_than_it_runs(tmp_path: Path) -> None:
    """Configurations are tables, or were stored by the tuner: nothing is tried, forward and backward."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}  # in f32, whose backward is Triton's
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built, launched, *names = done.stdout.split()
    assert int(launched) == len(names) == len(set(names)) >= 3, done.stdout
    assert int(built) == int(launched), done.stdout
