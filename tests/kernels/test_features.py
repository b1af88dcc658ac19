"""What a kernel refuses: by the groups that the fields of a problem declare."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from flashlane.core.problem import FEATURES, AttentionProblem
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
    assert "scale is 1e-40" in features.unsupported_features(replace(PLAIN, scale=1e-40), ("f16",))
