// y = f(x) element by element: ELU, hard-shrink, hard-swish. Bound by memory: a thread moves UNROLL vectors of 16
// bytes, all loads before the first use. The arithmetic is f32; results are rounded once.
#include "vector.cuh"

// e^x − 1 for x ≤ 0. 16-bit results need no more than the special-function unit, but for small x, where 1 cancels.
template <typename Element>
__device__ __forceinline__ float exp_minus_one(float x) {
    if constexpr (is_same<Element, float>) {
        return expm1f(x);
    } else {
        const float series = fmaf(0.5f * x, x, x);
        return x > -0.015625f ? series : ex2(x * 1.4426950408889634f) - 1.f;
    }
}

template <typename Element>
struct Elu {
    static __device__ __forceinline__ float of(float x, float alpha) {
        return x > 0.f ? x : alpha * exp_minus_one<Element>(x);
    }
};

// Written so that NaN stays NaN, as in torch.
template <typename Element>
struct HardShrink {
    static __device__ __forceinline__ float of(float x, float lambda) { return x >= -lambda && x <= lambda ? 0.f : x; }
};

template <typename Element>
struct HardSwish {
    static __device__ __forceinline__ float of(float x, float) {
        return x * fminf(fmaxf(x + 3.f, 0.f), 6.f) * (1.f / 6.f);
    }
};

#include "config.cuh"  // names one of the operations

using Element = cfg::Element;
using Slice = VectorSpan<Element, cfg::PACKED>;
constexpr int UNROLL = cfg::UNROLL, THREADS = cfg::THREADS;

// Mirrored by flashlane.lessons.activation.ActivationParams.
struct Params {
    const Element* x;
    Element* y;
    long long size;
    float parameter;  // alpha of ELU, lambda of hard-shrink
};

template <typename Vector>
__device__ __forceinline__ void apply(Vector& vector, float parameter) {
#pragma unroll
    for (int i = 0; i < Vector::COUNT; ++i) vector.set(i, cfg::Operation::of(vector.get(i), parameter));
}

extern "C" __global__ void __launch_bounds__(THREADS) activation(const __grid_constant__ Params p) {
    const Slice slice(p.x, p.size);
    const long long first = static_cast<long long>(blockIdx.x) * (THREADS * UNROLL) + threadIdx.x;
    typename Slice::Full vectors[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
        if (first + i * THREADS < slice.vectors) vectors[i].load(p.x + slice.vector(first + i * THREADS));
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        apply(vectors[i], p.parameter);
        if (first + i * THREADS < slice.vectors) vectors[i].store(p.y + slice.vector(first + i * THREADS));
    }
    if (blockIdx.x == 0) {
        slice.for_edges(p.x, threadIdx.x, [&](auto& one, long long at) {
            apply(one, p.parameter);
            one.store(p.y + at);
        });
    }
}
