"""What a kernel refuses: by the groups that the fields of a problem declare."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from flashlane.core import dispatch, registry
from flashlane.core.problem import FEATURES, AttentionProblem, Inputs
from flashlane.kernels import features

PLAIN = AttentionProblem(1, 2, 2, 8, 8, 16, 16, torch.float16, 0.25, arch="sm_80")
SCORE_MODIFIERS = features.of_group("score")
GROUPS = [SCORE_MODIFIERS, features.BIAS, features.DROPOUT, features.VARLEN, features.CACHE, features.PAGED]


def test_each_feature_belongs_to_one_group() -> None:
    assert sorted(name for group in GROUPS for name in group) == sorted(FEATURES)
    assert not any(getattr(PLAIN, name) for name in FEATURES)  # the default asks for none


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_refused_unless_its_group_is_named(name: str) -> None:
    kind = {each.name: each.type for each in fields(AttentionProblem)}[name]
    asked = replace(PLAIN, **{name: {"bool": True, "float": 0.5, "int": 16}[kind]})
    assert features.unsupported_features(asked, ("f16",)) == f"it has no {name}"
    for group in GROUPS:
        reason = features.unsupported_features(asked, ("f16",), group)
        assert (reason is None) == (name in group)
    assert name.removesuffix("_p") in asked.describe() or "paged(16)" in asked.describe()


def test_the_other_reasons() -> None:
    assert features.unsupported_features(PLAIN, ("f16",)) is None
    assert features.unsupported_features(replace(PLAIN, arch=None), ("f16",)) == "it needs a GPU"
    assert features.unsupported_features(PLAIN, ("bf16", "f32")) == "dtype is f16; it takes bf16 or f32"
    assert features.unsupported_features(PLAIN, ("f16",), architectures=("sm_90a",)) == (
        "architecture is sm_80; it takes sm_90a"
    )
    assert "scale is 1e-40" in features.unsupported_features(replace(PLAIN, scale=1e-40), ("f16",))


WIDE_V = ("mma(naive)", "mma(split-q+acc-f32+swizzle-qkv+stage1)", "decode(split-kv)", "triton", "hopper(wgmma+tma)")


@pytest.mark.parametrize("tag", WIDE_V)
def test_a_head_dim_that_is_too_large_is_named(tag: str) -> None:
    """That of v alone was called head_dim, which the call's q and k do not have."""
    problem = replace(PLAIN, head_dim=24, head_dim_v=1032, arch="sm_90a")
    assert str(registry.get(tag).supports(problem)).startswith("head_dim of v is 1032; it takes up to ")
    wide = replace(PLAIN, head_dim=1032, arch="sm_90a")
    assert str(registry.get(tag).supports(wide)).startswith("head_dim is 1032; it takes up to ")


@pytest.mark.parametrize(("tag", "direction"), [("hopper(wgmma+tma)", "get"), ("hopper", "get_backward")])
def test_a_head_dim_that_16_bytes_do_not_divide_is_named(tag: str, direction: str) -> None:
    """Rows of 60 elements may be contiguous and start on 16 bytes, which was said to be missing."""
    room = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    for at, inputs in {
        "head_dim": Inputs(room[..., :60], room[..., :60], room),
        "head_dim of v": Inputs(room, room, room[..., :60]),
    }.items():
        problem = AttentionProblem.from_inputs(inputs).on("sm_90a")
        reason = f"{at} is 60; it takes multiples of 8, as {{}} copies rows by 16 bytes"
        assert getattr(registry, direction)(tag).supports(problem) == reason.format("TMA")
        assert registry.get("decode(split-kv)").supports(problem) == reason.format("cp.async")


@pytest.mark.parametrize(("softcap", "scale"), [(1e6, 0.25), (3e38, 0.25), (1e-40, 0.25), (1e-10, 1e25)])
def test_a_softcap_that_f32_loses_is_refused(softcap: float, scale: float) -> None:
    problem = replace(PLAIN, softcap=softcap, scale=scale, arch="sm_90a")
    reason = features.unsupported_features(problem, ("f16",), SCORE_MODIFIERS)
    assert reason is not None and reason.startswith(f"softcap is {softcap:g}")
    assert features.unsupported_features(replace(problem, softcap=50.0, scale=0.25), ("f16",), SCORE_MODIFIERS) is None
    assert not isinstance(dispatch.select(problem), registry.CompiledKernel)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_999"])
def test_gpus_that_are_too_old_or_unknown_run_no_cuda_kernel(arch: str, dtype: torch.dtype) -> None:
    problem = replace(PLAIN, arch=arch, dtype=dtype)
    for kernel in registry.kernels():
        if isinstance(kernel, registry.CompiledKernel):
            assert kernel.supports(problem) is not None, kernel.tag
    explained = dispatch.explain_problem(problem)
    assert not isinstance(registry.get(explained.chosen), registry.CompiledKernel)
    tag = "fa1(f32)" if dtype == torch.float32 else "mma(naive)"
    (reason,) = (each.reason for each in explained.choices if each.tag == tag)
    assert f"architecture is {arch}; it takes sm_80, sm_86" in reason
