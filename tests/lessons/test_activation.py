"""The activations of the lessons."""

from __future__ import annotations

import re

import pytest
import torch
from disassembly import needs_disassembler
from lesson_checks import ARCHITECTURES, SIZES, randn

from flashlane import jit, lessons
from flashlane.lessons import activation, comparison, launch


def test_dense_tensors():
    x = torch.empty(4, 6, 8)
    assert all(activation.is_dense(t) for t in (x, x.transpose(0, 2), x[1:2], x[0, 0, 0], torch.empty(0, 3)))
    assert not any(activation.is_dense(t) for t in (x[:, :3], x[..., ::2], x[:1].expand(4, 6, 8)))


@needs_disassembler
@pytest.mark.parametrize("config", activation.CONFIGS.values(), ids=lambda c: c.tag)
def test_activations_compile_to_wide_accesses(config):
    for arch in ARCHITECTURES:
        report = jit.compile(activation.activation_source(config), arch).report
        assert (report.spills, report.stack, report.warnings) == (0, 0, ())
        assert jit.occupancy(arch, launch.THREADS, report.registers, 0).fraction >= 0.75
    text = jit.disassemble(jit.compile(activation.activation_source(config), "sm_90a").cubin)
    wide = config.unroll if config.packed else 0
    assert len(re.findall(r"\bLDG\.E\.128\b", text)) == len(re.findall(r"\bSTG\.E\.128\b", text)) == wide


@pytest.mark.gpu
@pytest.mark.parametrize("access", activation.ACCESSES)
@pytest.mark.parametrize("dtype", launch.DTYPES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    (
        (lessons.elu, torch.nn.functional.elu),
        (lambda x, **kw: lessons.elu(x, 0.3, **kw), lambda x: torch.nn.functional.elu(x, 0.3)),
        (lessons.hard_shrink, torch.nn.functional.hardshrink),
        (lambda x, **kw: lessons.hard_shrink(x, 1.25, **kw), lambda x: torch.nn.functional.hardshrink(x, 1.25)),
        (lessons.hard_swish, torch.nn.functional.hardswish),
    ),
    ids=("elu", "elu0.3", "hard_shrink", "hard_shrink1.25", "hard_swish"),
)
def test_activations_agree_with_float64(ours, theirs, dtype, access):
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 0.5, -0.5, 3.0, -3.0, 1e-4, -1e-4, -0.015, -0.0157]
    for size in (*SIZES, 4096, 100001):
        for start in (0, 1, 3):
            base = 3 * randn(size + start, dtype=dtype)
            base[: len(special)] = torch.tensor(special, device="cuda")[: size + start].to(base.dtype)
            x = base[start:]
            out = torch.full_like(base, float("nan"))[start:]  # as far past 16 bytes as x
            assert ours(x, access=access, out=out) is out
            message = comparison.wrong(out, theirs(x.double()))
            assert message is None, f"size {size}, start {start}: {message}"


@pytest.mark.gpu
def test_activations_keep_neighbours_strides_and_refuse_misfits():
    base = randn(300, dtype="f16")
    kept = base.clone()
    lessons.hard_swish(base[13:277], out=base[13:277])
    assert torch.equal(base[:13], kept[:13]) and torch.equal(base[277:], kept[277:])
    assert comparison.wrong(base[13:277], torch.nn.functional.hardswish(kept[13:277].double())) is None
    x = randn(6, 10, 4, dtype="f32").permute(2, 0, 1)
    y = lessons.elu(x)
    assert y.stride() == x.stride() and comparison.wrong(y, torch.nn.functional.elu(x.double())) is None
    with pytest.raises(ValueError, match="it must be dense in memory"):
        lessons.elu(x[..., ::2])
    with pytest.raises(ValueError, match="access is 'packed', but x starts"):
        lessons.elu(base[1:], access="packed", out=torch.empty(299, dtype=torch.float16, device="cuda"))
    assert lessons.elu(base[:0]).numel() == 0
