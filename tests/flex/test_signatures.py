"""The signatures of flex_attention and create_block_mask: torch's of each version, and ours."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane.flex.program import Program
from flashlane.kernels.hopper.flex import problem

ATTENTION = (
    "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
    "kernel_options=None, *, return_aux=None"
)
BLOCK_MASK = "mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False"
WITH_ORDER = BLOCK_MASK + ", separate_full_blocks=True, compute_dq_write_order=False, dq_kv_order=True"
PUBLISHED = {
    "2.10": (ATTENTION, BLOCK_MASK),
    "2.11": (ATTENTION, BLOCK_MASK),
    "2.12": (ATTENTION, BLOCK_MASK),
    "2.13": (ATTENTION, WITH_ORDER),
    "2.14": (ATTENTION, WITH_ORDER),
    "2.15": (ATTENTION, WITH_ORDER),
}
"""Of flex_attention and create_block_mask, as ``torch/nn/attention/flex_attention.py`` of torch's wheels has them."""
FUNCTIONS = ("flex_attention", "create_block_mask")


def text(function: object) -> str:
    """A signature without types."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))[1:-1]


@pytest.mark.parametrize("number", [0, 1], ids=FUNCTIONS)
def test_the_installed_torch_is_as_published(number: int) -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in PUBLISHED:
        pytest.skip(f"torch {version} is not in the table")
    assert text(getattr(torch_flex, FUNCTIONS[number])) == PUBLISHED[version][number]


@pytest.mark.parametrize("number", [0, 1], ids=FUNCTIONS)
@pytest.mark.parametrize("version", [*PUBLISHED, "installed"])
def test_ours_take_every_call_of_torchs(version: str, number: int) -> None:
    """All of its parameters, in its order and of its kinds and defaults; what only a later torch has has a default."""
    name = FUNCTIONS[number]
    theirs = text(getattr(torch_flex, name)) if version == "installed" else PUBLISHED[version][number]
    ours = text(getattr(flashlane, name))
    assert ours == theirs or (ours.startswith(theirs + ", ") and "*" not in theirs)
    assert all("=" in parameter for parameter in ours[len(theirs) :].split(", ")[1:])


def test_programs_have_all_that_the_kernels_ask_of_them() -> None:
    methods = {name: m for name, m in vars(problem.Program).items() if inspect.isfunction(m) and name[0] != "_"}
    assert "header" in methods
    for name, method in methods.items():
        assert text(getattr(Program, name)) == text(method), name
