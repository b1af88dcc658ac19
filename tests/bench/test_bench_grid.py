"""Sizes, sweeps and the grid that they span."""

import re

import numpy
import pytest
import torch

from flashlane.bench.measure.grid import (
    BASELINE_SHAPES,
    Grid,
    make_problem,
    parse_dtypes,
    parse_names,
    parse_window,
    problems,
)
from flashlane.bench.measure.sizes import parse_sizes
from flashlane.core.problem import AttentionProblem, Inputs


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64", (64,)),
        ("64,128", (64, 128)),
        ("1024:8192:x2", (1024, 2048, 4096, 8192)),
        ("1024:5000:x2", (1024, 2048, 4096)),
        ("64:256:+64", (64, 128, 192, 256)),
        ("1,100:300:+100,7", (1, 100, 200, 300, 7)),
        ("8,8,4", (8, 4)),
        ("5:5:x3", (5,)),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text, "--N") == sizes


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "1.5", "1:2", "8:4:x2", "4:8:x1", "0:8:x2", "4:8:+0", "1:2:*2", "0", "1:99999999:+1", "²"]
)
def test_bad_sizes_name_the_option(text):
    with pytest.raises(ValueError, match="--N"):
        parse_sizes(text, "--N")


def test_bounds_say_what_is_possible():
    with pytest.raises(ValueError, match=r"--D has 2048 \(given '64,2048'\); it may be 1 to 1024"):
        parse_sizes("64,2048", "--D", high=1024)
    assert parse_sizes("0", "--seqlen-k", low=0) == (0,)
    most = 2**63 - 1
    assert parse_sizes(str(most), "--N") == (most,)
    with pytest.raises(ValueError, match=f"--N has {most + 1}; it may be 1 to {most}"):
        parse_sizes(str(most + 1), "--N")
    with pytest.raises(ValueError, match="--N has 0; it may be at least 1"):
        parse_sizes("0", "--N")


def test_dtypes():
    assert parse_dtypes("f16,bf16,fp16") == (torch.float16, torch.bfloat16)
    with pytest.raises(ValueError, match="--dtype has 'int8'"):
        parse_dtypes("f16,int8")


def test_unknown_names_get_the_nearest():
    assert parse_names("flash, flex", "--x", ("flash", "flex")) == ("flash", "flex")
    with pytest.raises(ValueError, match="did you mean 'flash'"):
        parse_names("flsh", "--x", ("flash", "cudnn"))


def test_grid_is_the_product_and_fills_what_is_not_given():
    grid = Grid(seqlen=(128, 256), head_dim=(64, 80), dtypes=(torch.float16, torch.float32), causal=(True,))
    problems = grid.problems(None, BASELINE_SHAPES)
    assert len(problems) == len(set(problems)) == 8
    assert {(p.batch, p.heads) for p in problems} == {(1, 8)}
    assert all(p.causal and p.scale == p.head_dim**-0.5 for p in problems)
    assert [p.describe() for p in Grid().problems("sm_90a", BASELINE_SHAPES)][:2] == [
        "B1 H8 N8192 D64 f16",
        "B2 H2 N4096 D64 f16",
    ]


@pytest.mark.parametrize("dim", [64, 59, 80])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_problem_is_what_its_tensors_would_give(dim, dtype):
    made = make_problem(2, 6, 33, dim, dtype, kv_heads=3, seqlen_k=45, causal=True, alignment="top-left")
    q, k = torch.empty(2, 33, 6, dim, dtype=dtype), torch.empty(2, 45, 3, dim, dtype=dtype)
    assert made == AttentionProblem.from_inputs(Inputs(q, k, k), causal=True, alignment="top-left")


@pytest.mark.parametrize(
    ("keywords", "word"),
    [({"kv_heads": 3}, "kv_heads"), ({"kv_heads": 0}, "kv_heads"), ({"alignment": "left"}, "alignment")],
)
def test_impossible_problems(keywords, word):
    with pytest.raises(ValueError, match=word):
        make_problem(1, 8, 16, 64, **keywords)


def test_layouts_are_axes_of_the_grid():
    grid = Grid(
        seqlen=(256,), head_dim_v=(32, 64), layouts=("dense", "packed", "paged"), pages=(16, 64), window=(40, 0)
    )
    problems = grid.problems(None, BASELINE_SHAPES)
    assert len(problems) == len({p.describe() for p in problems}) == 8
    assert {p.page_size for p in problems} == {0, 16, 64} and {p.head_dim_v for p in problems} == {32, 64}
    assert all((p.window_left, p.window_right) == (40, 0) for p in problems)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"layout": "paged", "page": 5}, "page is 5; with layout 'paged' it must divide seqlen_k 16"),
        ({"layout": "paged"}, "page is 0"),
        ({"layout": "cache", "page": 8}, "page is 8 and layout 'cache'"),
        ({"layout": "sideways"}, "layout is 'sideways'"),
    ],
)
def test_impossible_layouts(keywords, message):
    with pytest.raises(ValueError, match=message):
        make_problem(1, 8, 16, 64, **keywords)


def test_windows():
    assert parse_window("512, 0") == (512, 0) and parse_window("-1,7") == (-1, 7)
    for text in ("512", "-2,0", "a,b", "1,2,3"):
        with pytest.raises(ValueError, match="--window is"):
            parse_window(text)


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"seqlen": 8.5}, TypeError, "seqlen is 8.5; it must be a whole number of at least 0"),
        ({"seqlen": [8, True]}, TypeError, "seqlen is True; it must be a whole number of at least 0"),
        ({"seqlen": "8"}, TypeError, "seqlen is '8'; it must be a whole number of at least 0"),
        ({"seqlen": None}, TypeError, "seqlen is None; it must be a whole number of at least 0"),
        ({"seqlen": -1}, ValueError, "seqlen is -1; it must be at least 0"),
        ({"heads": 0}, ValueError, "heads is 0; it must be at least 1"),
        ({"kv_heads": 2.0}, TypeError, "kv_heads is 2.0; it must be a whole number of at least 1"),
        ({"causal": "abc"}, TypeError, "causal is 'abc'; it must be True or False"),
        (
            {"dtype": torch.int8},
            TypeError,
            "dtype is torch.int8; it may be one of torch.float16, torch.bfloat16, torch.float32, torch.float64",
        ),
    ],
)
def test_wrong_arguments_are_named(keywords, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        problems(**keywords)


def test_make_problem_names_its_own_arguments():
    with pytest.raises(TypeError, match=r"^seqlen_q is '8'; it must be a whole number of at least 0$"):
        make_problem(1, 2, "8", 64)
    with pytest.raises(TypeError, match=r"^causal is 2; it must be True or False$"):
        make_problem(1, 2, 8, 64, causal=2)


def test_numbers_of_numpy_are_sizes():
    (found,) = problems(seqlen=numpy.int64(8), kv_heads=[None], causal=numpy.bool_(True))
    assert found == problems(seqlen=8, causal=True)[0]
    assert type(found.seqlen_q) is int and found.window_right == 0
