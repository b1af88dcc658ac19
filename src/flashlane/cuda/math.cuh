// Small arithmetic that every kernel needs.
#pragma once
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// min() as a constant: tests evaluate what uses it in the compiler.
__device__ __forceinline__ constexpr int constant_min(int a, int b) { return a < b ? a : b; }

// 2^x for x up to 128 without the special-function unit, with a relative error of 1.02e-4 (2^-13): 2^round(x) times a polynomial of the
// remainder, which is within 1/2. It is +0 where x is below -127; NaN becomes infinity or NaN.
__device__ __forceinline__ float ex2_by_polynomial(float x) {
    constexpr float ROUND = 12582912.f;  // 1.5 · 2^23: a sum with it has the integer nearest to x in its low bits
    x = max_or_nan(x, -127.f);             // where the exponent's bits are 0
    const float rounded = x + ROUND, rest = x - (rounded - ROUND);
    const float power = fmaf(fmaf(fmaf(0.05500893f, rest, 0.24221097f), rest, 0.6932829f), rest, 1.f);
    return __int_as_float(__float_as_int(power) + (__float_as_int(rounded) << 23));
}

// 2^x for accumulator i: EIGHTHS of the groups of 8 columns are by the polynomial, so that the special-function unit has fewer.
template <int EIGHTHS>
__device__ __forceinline__ float ex2_of_column(float x, int i) {
    return i / 4 * EIGHTHS % 8 < EIGHTHS ? ex2_by_polynomial(x) : ex2(x);
}

// The value of lane 0, for a value that is the same in all lanes. ptxas then knows that it is the same, and keeps what
// follows from it (addresses, descriptors of wgmma) in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// a + b, added where this is called. The compiler would otherwise add what does not change in a loop before the loop, and keep
// it in registers.
__device__ __forceinline__ int add_here(int a, int b) {
    int sum;
    asm volatile("add.s32 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// The sum of the values of the lanes up to and including this one.
__device__ __forceinline__ int warp_inclusive_sum(int x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += before;
    }
    return x;
}
