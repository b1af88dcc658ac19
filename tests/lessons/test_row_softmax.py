"""The row softmax of the lessons."""

from __future__ import annotations

import re

import pytest
import torch
from disassembly import needs_disassembler
from lesson_checks import ARCHITECTURES, randn

from flashlane import jit, lessons
from flashlane.lessons import comparison, launch, row_softmax


def test_softmax_configurations_hold_the_row():
    variant = row_softmax.VARIANTS["online+packed+registers"]
    for dtype, torch_dtype in launch.DTYPES.items():
        count = 16 // torch_dtype.itemsize
        for columns in (1, 64, 1024, 2049, row_softmax.longest_row(dtype)):
            config = row_softmax.softmax_config(variant, dtype, columns)
            assert columns // count <= config.keep * 32 * config.warps_per_row
        with pytest.raises(ValueError, match=r"x has rows of \d+; 'online\+packed\+registers' takes up to"):
            row_softmax.softmax_config(variant, dtype, row_softmax.longest_row(dtype) + count)


def test_rows_alike():
    base = torch.empty(64, 64, dtype=torch.float16)
    assert row_softmax.rows_alike(base, torch.empty_like(base))
    assert row_softmax.rows_alike(base[:, :40], torch.empty(64, 40, dtype=torch.float16))
    assert not row_softmax.rows_alike(base[:, :41], torch.empty(64, 41, dtype=torch.float16))
    assert row_softmax.rows_alike(base[:1, :41], torch.empty(1, 41, dtype=torch.float16))
    assert not row_softmax.rows_alike(base[:, 1:41], torch.empty(64, 40, dtype=torch.float16))


def softmax_points():
    points = {
        row_softmax.softmax_config(variant, dtype, columns)
        for variant in row_softmax.VARIANTS.values()
        for dtype in launch.DTYPES
        for columns in ((100, 2100) if dtype == "f16" else (1000, 8000))
    }
    return sorted(points, key=str)


@needs_disassembler
@pytest.mark.parametrize(
    "config", softmax_points(), ids=lambda c: f"{c.variant.tag}-{c.dtype}-{c.warps_per_row}w-keep{c.keep}"
)
def test_softmax_compiles(config):
    for arch in ARCHITECTURES:
        compiled = jit.compile(row_softmax.softmax_source(config), arch)
        assert (compiled.report.spills, compiled.report.stack, compiled.report.warnings) == (0, 0, ())
        assert compiled.report.static_shared == (64 if config.warps_per_row > 1 else 0)
    text = jit.disassemble(jit.compile(row_softmax.softmax_source(config), "sm_90a").cubin)
    loads, stores = (len(re.findall(rf"\b{word}\.E\.128\b", text)) for word in ("LDG", "STG"))
    assert (loads > 0) == (stores > 0) == config.variant.packed
    if config.keep:
        assert loads == stores == config.keep


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", launch.DTYPES)
@pytest.mark.parametrize("variant", row_softmax.VARIANTS)
def test_softmax_agrees_with_float64(variant, dtype):
    for rows, columns in ((1, 1), (5, 7), (3, 63), (9, 65), (17, 127), (8, 256), (3, 1023), (2, 1025), (3, 4099)):
        x = 3 * randn(rows, columns, dtype=dtype)
        out = torch.full_like(x, float("nan"))
        assert lessons.softmax(x, variant=variant, out=out) is out
        message = comparison.wrong(out, torch.softmax(x.double(), -1))
        assert message is None, f"{rows}x{columns}: {message}"


@pytest.mark.gpu
def test_softmax_of_long_rows_shapes_strides_and_in_place():
    x = 3 * randn(2, 100003, dtype="f16")
    assert comparison.wrong(lessons.softmax(x), torch.softmax(x.double(), -1)) is None
    y = 3 * randn(2, 3, 5, 77, dtype="f32")
    assert comparison.wrong(lessons.softmax(y), torch.softmax(y.double(), -1)) is None
    wide = 3 * randn(33, 301, dtype="f16")
    for view in (wide[:, :128], wide[:, 3:130], wide[::2, 1:]):
        assert comparison.wrong(lessons.softmax(view), torch.softmax(view.double(), -1)) is None
    with pytest.raises(ValueError, match=r"variant is 'online\+packed', but rows of x"):
        lessons.softmax(wide[:, 3:130], variant="online+packed")
    with pytest.raises(ValueError, match="x has strides"):
        lessons.softmax(wide.t())
    expected = torch.softmax(y.double(), -1)
    for variant in row_softmax.VARIANTS:
        z = y.clone()
        assert comparison.wrong(lessons.softmax(z, variant=variant, out=z), expected) is None, variant
    assert lessons.softmax(y[:0]).shape == (0, 3, 5, 77)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", (40, 2000))
@pytest.mark.parametrize("variant", row_softmax.VARIANTS)
def test_softmax_of_special_rows(variant, columns):
    inf, nan = float("inf"), float("nan")
    x = randn(7, columns, dtype="f32")
    x[0] = -inf
    x[1, : columns - 1] = -inf  # one finite value, last
    x[2, 0] = -inf
    x[3, 5] = inf
    x[4, columns // 2] = nan
    x[5] = x[5] * 1e-3 + 60
    x[6, 3] = 1000
    out, expected = lessons.softmax(x, variant=variant), torch.softmax(x.double(), -1)
    rows = slice(0, 6) if variant.startswith("naive") else slice(0, 7)
    expected[3] = nan  # float64 of torch says the same; stated here as it is our promise
    if variant.startswith("naive"):
        assert out[3].isnan().any() and out[6, 3].isnan() and not out[6, 4] > 0  # overflow
        out[3] = nan
    assert comparison.wrong(out[rows], expected[rows]) is None
    assert out[0].isnan().all()
