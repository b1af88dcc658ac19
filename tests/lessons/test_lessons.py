"""What all lessons have in common: how arrays are cut, errors, streams."""

from __future__ import annotations

import pytest
import torch
from lesson_checks import randn

from flashlane import lessons
from flashlane.lessons import ceiling, comparison, launch


@pytest.mark.parametrize("itemsize", (2, 4))
def test_cut_covers_an_array_and_aligns_its_packs(itemsize):
    count = 16 // itemsize
    for address in range(0, 64, itemsize):
        for size in range(0, 40):
            head, vectors, tail = launch.cut(address, size, itemsize)
            assert head + vectors * count + tail == size
            assert head < count and tail < count and min(head, vectors, tail) >= 0
            assert vectors == 0 or (address + head * itemsize) % 16 == 0


def test_the_blocks_say_that_they_need_a_gpu():
    x = torch.randn(8, 8)
    for call in (lessons.softmax, lessons.elu, lessons.hard_shrink, lessons.hard_swish):
        with pytest.raises(ValueError, match="x is on cpu; the lessons run on CUDA"):
            call(x)
    with pytest.raises(ValueError, match="a is on cpu"):
        lessons.hgemm(x.half(), x.half())


def test_errors_name_the_argument():
    x = torch.randn(8, 8)
    with pytest.raises(TypeError, match=r"x is torch\.int64; it may be torch\.float32"):
        lessons.softmax(x.long())
    with pytest.raises(TypeError, match="x is a list"):
        lessons.elu([1.0])
    with pytest.raises(ValueError, match="variant is 'fast'; it may be None, 'naive"):
        lessons.softmax(x, variant="fast")
    with pytest.raises(ValueError, match="access is 'wide'"):
        lessons.hard_swish(x, access="wide")
    with pytest.raises(ValueError, match="layout is 'nt'; it may be 'nn', 'tn'"):
        lessons.hgemm(x.half(), x.half(), layout="nt")
    with pytest.raises(TypeError, match=r"a is torch\.float32; it may be torch\.float16"):
        lessons.hgemm(x, x)
    with pytest.raises(ValueError, match=r"\(dtype, accumulate\) is \('bf16', 'f16'\)"):
        ceiling.ceiling_call("bf16", "f16", 8, 1e9)
    with pytest.raises(ValueError, match="warps is 3"):
        ceiling.ceiling_call("f16", "f32", 3, 1e9)


@pytest.mark.gpu
def test_the_blocks_run_on_the_current_stream():
    x = randn(512, 512, dtype="f16")
    lessons.softmax(lessons.hgemm(lessons.hard_swish(x), x))  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        y = lessons.hard_swish(x)
        z = lessons.hgemm(y, y)
        w = lessons.softmax(z)
        done = stream.query()
    assert not done, "the blocks did not queue behind the work on the current stream"
    stream.synchronize()
    assert comparison.wrong(w, torch.softmax(z.double(), -1)) is None
