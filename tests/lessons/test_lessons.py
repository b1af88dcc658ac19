"""What all lessons have in common: how arrays are cut, errors, streams."""

from __future__ import annotations

import pytest
import torch
from lesson_checks import randn

from flashlane import jit, lessons
from flashlane.lessons import ceiling, comparison

CUTS = """
#include "vector.cuh"
template <typename Element>
__device__ constexpr bool cuts_are_right() {
    using C = VectorSpan<Element, true>;
    constexpr int COUNT = 16 / sizeof(Element);
    for (u64 address = 0; address < 64; address += sizeof(Element))
        for (int size = 0; size < 40; ++size) {
            const C cut(address, size);
            const long long tail = cut.size - cut.tail();
            if (cut.head < 0 || cut.head >= COUNT || tail < 0 || tail >= COUNT || cut.vectors < 0) return false;
            if (cut.vectors > 0 && (address + cut.head * sizeof(Element)) % 16 != 0) return false;
        }
    return true;
}
static_assert(cuts_are_right<float>() && cuts_are_right<__half>());
extern "C" __global__ void checked() {}
"""


def test_cut_covers_an_array_and_aligns_its_packs():
    """The compiler evaluates the device's own ``VectorSpan`` for addresses and sizes."""
    jit.compile(jit.KernelSource("cuts.cu", CUTS, "checked"), "sm_90a")


def test_the_lessons_say_that_they_need_a_gpu():
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
def test_the_lessons_run_on_the_current_stream():
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
    assert not done, "the lessons did not queue behind the work on the current stream"
    stream.synchronize()
    assert comparison.wrong(w, torch.softmax(z.double(), -1)) is None
