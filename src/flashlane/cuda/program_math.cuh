// Operations of score and mask programs that C++ lacks, or defines differently from torch. flashlane.flex.device_text
// writes calls of them. Floor division and remainder are those of torch and of Python.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "ptx.cuh"

namespace program {

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

template <typename T>
__device__ __forceinline__ T read(const T* from) { return *from; }
__device__ __forceinline__ float read(const __half* from) { return __half2float(*from); }
__device__ __forceinline__ float read(const __nv_bfloat16* from) { return __bfloat162float(*from); }
// Exact for |x| < 2^22. A conversion instruction would compete with the exponentials for the special-function unit.
__device__ __forceinline__ float float_of_position(int x) { return __int_as_float(0x4b400000 + x) - 12582912.f; }

// kv − q of a pair: that of the thread's first pair in the row, plus a constant that the compiler knows. Both are
// integers below 2^22, so that their sum is exact.
struct Distance {
    float first, rest;
    __device__ __forceinline__ float value() const { return first + rest; }
    // Times a factor that all pairs of a row share: the first product is computed once, and each pair takes one FFMA.
    __device__ __forceinline__ float times(float factor) const { return fmaf(factor, rest, factor * first); }
};
__device__ __forceinline__ float rounded_to_f16(float x) { return __half2float(__float2half_rn(x)); }
__device__ __forceinline__ float rounded_to_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// The place that an index reads. An index past the end reads the last element: a tile has pairs outside the sequence,
// whose results are dropped, but whose loads must stay inside the tensor.
template <typename Index>
__device__ __forceinline__ long long place(Index i, int size) { return i < size ? i : size - 1; }
// The same for an index that may be negative, which counts from the end.
template <typename Index>
__device__ __forceinline__ long long place_of_any(Index i, int size) {
    if (i < 0) i += size;
    return i < 0 ? 0 : place(i, size);
}

// Arithmetic whose result may not fit wraps around, as torch's does; for the compiler a signed result always fits.
__device__ __forceinline__ int as_signed(unsigned x) { return static_cast<int>(x); }
__device__ __forceinline__ long long as_signed(unsigned long long x) { return static_cast<long long>(x); }
__device__ __forceinline__ unsigned as_unsigned(int x) { return static_cast<unsigned>(x); }
__device__ __forceinline__ unsigned long long as_unsigned(long long x) { return static_cast<unsigned long long>(x); }
template <typename T>
__device__ __forceinline__ T wrapping_add(T a, T b) { return as_signed(as_unsigned(a) + as_unsigned(b)); }
template <typename T>
__device__ __forceinline__ T wrapping_sub(T a, T b) { return as_signed(as_unsigned(a) - as_unsigned(b)); }
template <typename T>
__device__ __forceinline__ T wrapping_mul(T a, T b) { return as_signed(as_unsigned(a) * as_unsigned(b)); }
template <typename T>
__device__ __forceinline__ T wrapping_neg(T a) { return as_signed(-as_unsigned(a)); }
// A shift by fewer than 0 places, or by all of the type, leaves no bit but the sign of a shift to the right.
template <typename T>
__device__ __forceinline__ T shl(T a, T places) {
    return as_unsigned(places) < sizeof(T) * 8 ? as_signed(as_unsigned(a) << places) : 0;
}
template <typename T>
__device__ __forceinline__ T shr(T a, T places) {
    return a >> (as_unsigned(places) < sizeof(T) * 8 ? places : static_cast<T>(sizeof(T) * 8 - 1));
}

template <typename T>
__device__ __forceinline__ bool isnan(T x) { return x != x; }
template <typename T>
__device__ __forceinline__ bool isinf(T x) { return x == infinity() || x == -infinity(); }
template <typename T>
__device__ __forceinline__ T sign(T x) { return static_cast<T>((x > 0) - (x < 0)); }
// The result is NaN where either operand is.
template <typename T>
__device__ __forceinline__ T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <typename T>
__device__ __forceinline__ T maximum(T a, T b) { return a > b || a != a ? a : b; }

__device__ __forceinline__ float divided(float a, float b) { return __fdividef(a, b); }

// tanh(x) = 1 − 2 / (e^2x + 1) has an absolute error of the size of f32's eps, so that small results are relatively
// less exact.
__device__ __forceinline__ float tanh(float x) {
    return fmaf(-2.f, reciprocal(1.f + ex2(x * 2.8853900817779268f)), 1.f);
}
__device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.f + ex2(x * -1.4426950408889634f)); }
__device__ __forceinline__ double sigmoid(double x) { return 1. / (1. + ::exp(-x)); }

__device__ __forceinline__ float fmod(float a, float b) { return ::fmodf(a, b); }
__device__ __forceinline__ double fmod(double a, double b) { return ::fmod(a, b); }

// The remainder has the divisor's sign.
template <typename T>
__device__ __forceinline__ T remainder(T a, T b) {
    const T r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <typename T>
__device__ __forceinline__ T remainder_of_floating(T a, T b) {
    const T r = fmod(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <>
__device__ __forceinline__ float remainder(float a, float b) { return remainder_of_floating(a, b); }
template <>
__device__ __forceinline__ double remainder(double a, double b) { return remainder_of_floating(a, b); }

// The quotient is rounded down.
template <typename T>
__device__ __forceinline__ T floordiv(T a, T b) {
    const T quotient = a / b;
    return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
template <typename T>
__device__ __forceinline__ T floordiv_of_floating(T a, T b) {
    if (b == 0) return a / b;
    const T r = fmod(a, b);
    T quotient = (a - r) / b;
    if (r != 0 && (b < 0) != (r < 0)) quotient -= 1;
    if (quotient == 0) return a / b < 0 ? -T(0) : T(0);
    const T down = ::floor(quotient);
    return quotient - down > T(0.5) ? down + 1 : down;
}
template <>
__device__ __forceinline__ float floordiv(float a, float b) { return floordiv_of_floating(a, b); }
template <>
__device__ __forceinline__ double floordiv(double a, double b) { return floordiv_of_floating(a, b); }

}  // namespace program
