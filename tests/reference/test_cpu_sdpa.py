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


def formula(q, k, v, scale, causal=False):
    """Output of attention in f64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


ROWS = {
    "transposed": lambda: torch.randn(1, 140, 32, 4).transpose(2, 3),
    "every second column": lambda: torch.randn(1, 140, 4, 64)[..., ::2],
    "one column": lambda: torch.randn(1, 140, 4, 1).expand(1, 140, 4, 32),
    "one row": lambda: torch.randn(1, 1, 4, 32).expand(1, 140, 4, 32),
    "rows that overlap": lambda: torch.randn(1, 4, 171).unfold(2, 32, 1).transpose(1, 2),
    "one head": lambda: torch.randn(1, 140, 1, 32).expand(1, 140, 4, 32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("rows", ROWS)
def test_rows_may_lie_anywhere(rows, place, dtype):
    """torch's operator reads a row as contiguous, whatever its strides are."""
    tensors = [torch.randn(1, 140, 4, 32).to(dtype) for _ in range(3)]
    view = ROWS[rows]()
    tensors[place] = view.to(dtype)
    assert dtype != torch.float32 or tensors[place].stride() == view.stride()
    for t in tensors:
        t.requires_grad_()
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    out = flashlane.flash_attn_func(*tensors, softmax_scale=0.2, kernel="cpu-sdpa")
    wanted = formula(*tensors, 0.2)
    torch.testing.assert_close(out.double(), wanted, **tolerance)
    do = torch.randn(1, 140, 32, 4).to(dtype).transpose(2, 3)
    for ours, exact in zip(
        torch.autograd.grad(out, tensors, do), torch.autograd.grad(wanted, tensors, do.double()), strict=True
    ):
        torch.testing.assert_close(ours, exact, **tolerance)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-50])
def test_a_causal_mask_takes_a_positive_scale_only(scale):
    """torch's operator multiplies hidden scores by the scale, which shows them or gives NaN."""
    x = torch.randn(1, 200, 8, 16)
    with pytest.raises(NotImplementedError, match="its causal mask takes a positive scale only"):
        flashlane.flash_attn_func(x, x, x, causal=True, softmax_scale=scale, kernel="cpu-sdpa")
    for causal, kernel in ((True, None), (False, "cpu-sdpa")):
        out = flashlane.flash_attn_func(x, x, x, causal=causal, softmax_scale=scale, kernel=kernel)
        torch.testing.assert_close(out.double(), formula(x, x, x, scale, causal), rtol=1e-5, atol=1e-5)
