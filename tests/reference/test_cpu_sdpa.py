"""torch's SDPA on a CPU as a kernel: right, differentiable, and chosen where it is faster."""

import pytest
import torch

import flashlane
from flashlane import bench
from flashlane.core import dispatch, registry


def problem(n=1024, dtype=torch.float32, **how):
    return bench.make_problem(1, 4, n, 64, dtype, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("b", "n", "m", "d"), [(2, 65, 65, 32), (1, 130, 130, 40), (1, 1, 1, 16), (1, 7, 300, 64)])
def test_output_and_lse_are_those_of_the_formula(dtype, causal, b, n, m, d):
    posed = bench.make_problem(b, 2, n, d, dtype, seqlen_k=m, causal=causal)
    if causal and n != m:
        assert "its causal mask is of squares" in registry.get("cpu-sdpa").supports(posed)
        return
    selection = bench.Selection(tags=("cpu-sdpa",), peers=())
    settings = bench.Settings(3, 0.1, 0.1, 1, 1)
    (row,) = bench.run([posed], device="cpu", selection=selection, settings=settings, directions=("forward",))
    assert row.status == "ok", row.message
    assert row.verdict.lse_error < 1e-3


def test_gradients_are_those_of_the_formula():
    q, k, v = (torch.randn(1, 70, 2, 32, requires_grad=True) for _ in range(3))
    do = torch.randn(1, 70, 2, 32)
    found = {
        tag: torch.autograd.grad(flashlane.flash_attn_func(q, k, v, causal=True, kernel=tag), (q, k, v), do)
        for tag in ("cpu-sdpa", "reference")
    }
    for ours, formula in zip(found["cpu-sdpa"], found["reference"], strict=True):
        torch.testing.assert_close(ours, formula, rtol=1e-4, atol=1e-5)


def test_auto_takes_it_where_it_is_faster_and_explain_says_so():
    assert (
        dispatch.select(problem()).tag == "cpu-sdpa"
        and dispatch.select(problem(dtype=torch.bfloat16)).tag == "cpu-sdpa"
    )
    assert dispatch.select(problem(n=16)).tag == "reference", "few scores: the formula in one pass"
    assert dispatch.select(problem(dtype=torch.float16)).tag == "tiled", "about equal there"
    assert (
        dispatch.select(problem(kv_heads=2)).tag == "tiled" and dispatch.select(problem(window=(8, 0))).tag == "tiled"
    )
    text = str(dispatch.explain_problem(problem()))
    assert text.startswith("B1 H4 N1024 D64 f32 on cpu: cpu-sdpa") and "torch's own SDPA on a CPU" in text
    assert "cpu-sdpa" not in str(dispatch.explain_problem(problem().on("sm_90a"))).splitlines()[0]
