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
// Exact for |x| < 2^22: x is added to the lowest bits of 12582912, which is 1.5 · 2^23. A conversion instruction would
// compete with the exponentials for the special-function unit.
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
__device__ __forceinline__ float minimum(float a, float b) { return min_nan(a, b); }
__device__ __forceinline__ float maximum(float a, float b) { return max_nan(a, b); }
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

// An angle less the nearest multiple of π/2, and that multiple's number, of which the lowest two bits count.
struct Angle {
    float rest;
    int quadrant;
};

// The bits of 2/π, after a word of those in front of the binary point.
constexpr unsigned TWO_OVER_PI[] = {0, 0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0, 0xdb629599, 0x3c439041};

// The angle of a large number, by Payne and Hanek: x · 2/π modulo 4, of which the product with 96 bits of 2/π gives 62
// bits after the point. It is rare, and a function that is not inlined is compiled once for all pairs of a thread.
__device__ __noinline__ Angle angle_of_large(float x) {
    const unsigned bits = static_cast<unsigned>(__float_as_int(x)), mantissa = bits << 8 | 0x80000000u;
    const int exponent = bits >> 23 & 0xff, shift = exponent & 31;  // the exponent's bias is 127, and 128 is a multiple
    if (exponent == 0xff) return {x - x, 0};
    const unsigned* words = TWO_OVER_PI + (exponent - 128) / 32;
    unsigned long long product = 0, part[3];
#pragma unroll
    for (int i = 2; i >= 0; --i) {
        const unsigned long long pair = static_cast<unsigned long long>(words[i]) << 32 | words[i + 1];
        product = part[i] = (pair << shift >> 32) * mantissa + (product >> 32);
    }
    const unsigned long long quarters = (part[0] << 32) | static_cast<unsigned>(part[1]);
    const int quadrant = static_cast<int>(quarters >> 62) + static_cast<int>(quarters >> 61 & 1);
    // 2^-64 · π/2
    const float rest = static_cast<float>(static_cast<long long>(quarters << 2) * 8.515303950216386e-20);
    return bits >> 31 ? Angle{-rest, -quadrant} : Angle{rest, quadrant};
}
// By Cody and Waite, with π/2 in three parts: exact enough for |x| < 105615, as in CUDA's sinf.
__device__ __forceinline__ Angle angle_of(float x) {
    if (fabsf(x) >= 105615.f) return angle_of_large(x);
    // With 1.5 · 2^23 the sum's lowest bits are the product, rounded to an integer. Conversions would take the
    // special-function unit.
    const float shifted = __fadd_rn(__fmul_rn(x, 0.636619747f), 12582912.f), number = shifted - 12582912.f;
    float rest = fmaf(number, -1.57079625f, x);
    rest = fmaf(number, -7.54978942e-8f, rest);
    return {fmaf(number, -5.39030295e-15f, rest), __float_as_int(shifted)};
}
// CUDA's polynomials: the cosine of the rest in odd quadrants, else its sine.
__device__ __forceinline__ float sin_of(Angle angle) {
    const bool odd = angle.quadrant & 1;
    const float square = angle.rest * angle.rest, first = odd ? 1.f : angle.rest;
    float factor = fmaf(odd ? 2.42795795e-5f : 0.f, square, odd ? -1.38878601e-3f : -1.95746587e-4f);
    factor = fmaf(factor, square, odd ? 4.16667275e-2f : 8.33270326e-3f);
    factor = fmaf(factor, square, odd ? -4.99999970e-1f : -1.66666627e-1f);
    const float sine = fmaf(factor, square * first, first);
    return angle.quadrant & 2 ? -sine : sine;
}
__device__ __forceinline__ float cos_of(Angle angle) { return sin_of({angle.rest, angle.quadrant + 1}); }
__device__ __forceinline__ float tan_of(Angle angle) {
    const float square = angle.rest * angle.rest;
    float factor = fmaf(9.33837891e-3f, square, 3.26538086e-3f);
    factor = fmaf(factor, square, 2.42919922e-2f);
    factor = fmaf(factor, square, 5.34667969e-2f);
    factor = fmaf(factor, square, 1.33377910e-1f);
    factor = fmaf(factor, square, 3.33332300e-1f);
    const float tangent = fmaf(factor, square * angle.rest, angle.rest);
    return angle.quadrant & 1 ? -reciprocal(tangent) : tangent;
}

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
