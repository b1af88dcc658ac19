// The types of the gradients in device memory: the operands' one, or f32 where the caller adds them to others.
#pragma once
#include "hopper/backward/row_blocks.cuh"

template <bool F32>
struct GradientElement {
    using Type = Element;
};
template <>
struct GradientElement<true> {
    using Type = float;
};
using DqElement = GradientElement<cfg::F32_DQ>::Type;
using DkdvElement = GradientElement<cfg::F32_DKDV>::Type;
