"""What is known of the score modifiers by their declarations."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashlane.core import modifiers
from flashlane.core.problem import ARGUMENTS, FEATURES, MODIFIERS, AttentionProblem

PLAIN = AttentionProblem(1, 2, 2, 8, 8, 16, 16, torch.float16, 0.25)


def test_every_modifier_declares_what_it_does() -> None:
    assert all(ARGUMENTS[name].effect is not None for name in MODIFIERS)
    assert modifiers.with_effect("distance") == ("alibi_slopes",)
    assert modifiers.with_effect("logit", "factor") == ("sinks", "logit_scale")
    flags = {*modifiers.TENSOR_OF, *modifiers.NUMBERS}
    assert flags == {name for name, group in FEATURES.items() if group in ("score", "bias")}


def test_forms_begin_with_none_and_say_the_shape() -> None:
    assert modifiers.forms("softcap") == (0.0, 1.5, 20.0)
    assert modifiers.forms("alibi") == ("none", "heads", "batch") and modifiers.forms("sinks") == (False, True)
    assert modifiers.shape_of("alibi", "none") is None and modifiers.shape_of("sinks", False) is None
    assert modifiers.shape_of("alibi", "batch") == ("batch", "heads") and modifiers.shape_of("sinks", True) == (
        "heads",
    )
    for name in (*modifiers.TENSOR_OF, *modifiers.NUMBERS):
        assert len(modifiers.forms(name)) > 1, name


def test_numbers_go_by_the_names_of_a_library() -> None:
    assert modifiers.numbers_for(PLAIN) == modifiers.numbers_for(PLAIN, "flashinfer") == {}
    capped = replace(PLAIN, softcap=30.0)
    assert modifiers.numbers_for(capped) == modifiers.numbers_for(capped, "flash_attn") == {"softcap": 30.0}
    assert modifiers.numbers_for(capped, "flashinfer") == {"logits_soft_cap": 30.0}
