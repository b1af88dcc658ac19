"""One factor of the scores per head, against the formula in float64: forward and gradients of each kernel with it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing did yet

import flashlane
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem, Inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, N, M, H, HK, D = 2, 37, 53, 4, 2, 32


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logit_scale: torch.Tensor, softcap: float, causal: bool
) -> torch.Tensor:
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 * logit_scale[:, None, None]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if causal:
        n, m = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def made(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    shapes = (B, N, H, D), (B, M, HK, D), (B, M, HK, D)
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    return [*tensors, 0.2 + 2 * torch.rand(H, device=DEVICE)]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [("reference", torch.float64, 1e-6), ("tiled", torch.float64, 1e-6), ("tiled", torch.float32, 1e-4)]
    + [("triton", torch.float16, 5e-3)],
)
def test_forward_and_gradients_are_those_of_the_formula(
    kernel: str, dtype: torch.dtype, tolerance: float, causal: bool, softcap: float
) -> None:
    tag = kernel if kernel != "triton" else next(k.tag for k in registry.kernels() if k.family == "triton")
    ours = [t.requires_grad_() for t in made(dtype)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    asked: dict[str, Any] = {"softcap": softcap, "causal": causal, "logit_scale": ours[3]}
    out = flashlane.flash_attn_func(*ours[:3], **asked, kernel=tag)
    want = formula(*theirs, softcap, causal)
    do = torch.randn_like(want)
    found = torch.autograd.grad(out, ours, do.to(dtype))
    wanted = torch.autograd.grad(want, theirs, do.to(dtype).double())
    for got, right in zip((out, *found), (want, *wanted), strict=True):
        size = max(1.0, right.abs().max().item())
        assert (got.double() - right).abs().max().item() <= tolerance * size
    assert found[3].dtype == torch.float32 and found[3].abs().min() > 0


@pytest.mark.parametrize("kernel", ["reference", "tiled", "triton"])
def test_a_factor_may_have_any_sign(kernel: str) -> None:
    """Pairs are hidden after it."""
    tag = kernel if kernel != "triton" else next(k.tag for k in registry.kernels() if k.family == "triton")
    *tensors, _ = made(torch.float16 if kernel == "triton" else torch.float64)
    factors = torch.tensor([-1.5, 0.0, 0.5, -0.1], device=DEVICE)
    if kernel == "triton":
        factors[1] = -2.0  # its backward divides by the factor: see the limits
    ours = [t.requires_grad_() for t in (*tensors, factors)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    out = flashlane.flash_attn_func(*ours[:3], causal=True, logit_scale=ours[3], kernel=tag)
    want = formula(*theirs, 0.0, True)
    found = torch.autograd.grad(out, ours, torch.ones_like(out))
    wanted = torch.autograd.grad(want, theirs, torch.ones_like(want))
    for got, right in zip((out, *found), (want, *wanted), strict=True):
        tolerance = 5e-3 if kernel == "triton" else 1e-6
        assert (got.double() - right).abs().max().item() <= tolerance * max(1.0, right.abs().max().item())


def test_a_factor_of_one_changes_nothing() -> None:
    q, k, v, _ = made(torch.float32)
    ones = torch.ones(H, device=DEVICE)
    for kernel in ("reference", "tiled"):
        plain = flashlane.flash_attn_func(q, k, v, kernel=kernel)
        assert torch.equal(plain, flashlane.flash_attn_func(q, k, v, kernel=kernel, logit_scale=ones))


def test_packed_sequences_and_caches_take_it() -> None:
    q, k, v, factor = made(torch.float32)
    want = formula(*(t.double() for t in (q, k, v, factor)), 0.0, True)
    cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32, device=DEVICE) * n for n in (N, M))
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    out = flashlane.flash_attn_varlen_func(*packed, cu_q, cu_k, N, M, causal=True, logit_scale=factor, kernel="tiled")
    torch.testing.assert_close(out.unflatten(0, (B, N)).double(), want, rtol=0, atol=1e-5)
    out = flashlane.flash_attn_with_kvcache(q, k, v, causal=True, logit_scale=factor, kernel="tiled")
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


def test_errors_name_it() -> None:
    q, k, v, factor = made(torch.float32)
    with pytest.raises(ValueError, match=r"logit_scale has shape \(3,\); it must be \(4,\)"):
        flashlane.flash_attn_func(q, k, v, logit_scale=factor[:3])
    with pytest.raises(TypeError, match=r"logit_scale has dtype torch.float64; it must be torch.float32"):
        flashlane.flash_attn_func(q, k, v, logit_scale=factor.double())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_that_have_no_code_for_it_refuse_it(arch: str) -> None:
    """And ``auto`` takes one that has."""
    inputs = Inputs(*(t.cpu() for t in made(torch.float16)[:3]))
    problem = AttentionProblem.from_inputs(inputs).on(arch)
    with_factor = AttentionProblem.from_inputs(Inputs(inputs.q, inputs.k, inputs.v, logit_scale=torch.ones(H))).on(arch)
    assert with_factor.logit_scale and "logit_scale" in with_factor.describe()
    for kernel in registry.kernels():
        if kernel.family not in ("reference", "tiled", "triton", "triton-tf32"):
            reason = kernel.supports(with_factor)
            assert reason is not None and (kernel.supports(problem) is not None or reason == "it has no logit_scale")
    with registry.table_of(*(k for k in registry.kernels() if k.family != "triton")):
        assert dispatch.select(with_factor).tag in ("reference", "tiled")
    for kernel in registry.backward_kernels():
        if kernel.tag not in ("tiled", "triton"):
            assert "logit_scale" in str(kernel.supports(with_factor)) or kernel.supports(problem) is not None
