// Row maximum and row sum of the online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1),
// in base 2.
//
// Rescale threshold: the old row maximum is kept until a score, in base 2, exceeds it by more than RESCALE_THRESHOLD,
// so that O is rarely rescaled (FlashAttention-4). P then stays within 2^8, which f16 can represent.
//
// Deferred maximum: blocks without a mask take no maximum. Exponentials are relative to an old one, and their sums,
// which are needed anyway, show where it is too small: above DEFERRED_SUM. Then all of a row is divided by a power of
// two.
//
// Large maxima: an exponent is one fused multiply-add of a score, the scale and the rounded product of maximum and
// scale. The rounding multiplies all of a row's exponentials by one factor, which is near 1 up to LARGE_MAX, but may be
// 0 or infinite from 2^30 on. Where the maximum is deferred such rows can take the way of sums that are too large, in
// which the maximum is subtracted before the scale. That is exact, and costs other rows nothing. Elsewhere it would be
// a branch in each step, 3 to 5 % of the time (notebook 0068).
#pragma once
#include "math.cuh"

constexpr float RESCALE_THRESHOLD = 8.f;  // of scores in base 2
constexpr float DEFERRED_SUM = 4096.f;    // of a thread's exponentials of a row and block; f16 can represent each
constexpr float LARGE_MAX = 131072.f;     // in base 2: its product is rounded by 2^-8 at most

// Reductions over the four lanes that share the rows of an accumulator tile.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Replaces a row's maximum by `block_max`, that of its new scores, if that exceeds it by more than the threshold.
// Returns the factor by which O and the sum so far are multiplied; `grew` becomes true where it is not 1.
//
// (If the old maximum is −∞, any score replaces it. If both are −∞, their difference is NaN and the old one stays.)
__device__ __forceinline__ float update_row_max(float& row_max, float block_max, float scale_log2,
                                                float threshold, bool& grew) {
    const float old = row_max;
    const bool update = (block_max - old) * scale_log2 > threshold;
    const float now = update ? block_max : old;
    row_max = now;
    grew |= update;
    return ex2(update ? (old - now) * scale_log2 : 0.f);
}

// The maximum of a block's scores in one of a thread's two rows, over the thread's own columns.
template <int N>
__device__ __forceinline__ float row_max(const float (&s)[N], int half) {
    float largest = s[half * 2];
#pragma unroll
    for (int n = 0; n < N / 4; ++n) largest = fmaxf(largest, fmaxf(s[n * 4 + half * 2], s[n * 4 + half * 2 + 1]));
    return largest;
}

// Turns the scores of one of a thread's two rows into 2^((S − max) · scale), and adds them to the sum. SUBTRACT_FIRST:
// in two instructions, of which the first is exact, so that a maximum may be of any size.
template <bool SUBTRACT_FIRST, int N>
__device__ __forceinline__ void exponentiate_row(float (&s)[N], int half, float max, float scale_log2, float& sum) {
    const float subtracted = max == -INF ? 0.f : max, offset = subtracted * scale_log2;
#pragma unroll
    for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& x = s[n * 4 + half * 2 + i];
            x = ex2(SUBTRACT_FIRST ? (x - subtracted) * scale_log2 : fmaf(x, scale_log2, -offset));
            sum += x;
        }
}

// 2^x on [−1/2, 1/2], on the FMA units, with a relative error of at most 1.015e-4, less than 2^-13. It is the minimax
// polynomial of the relative error among those of degree 3 that are 1 at 0, which makes powers of two exact:
// 1 + x · q(x) has three coefficients, and the error has four extrema of one size, at −1/2, −0.34, 0.30 and 1/2.
// (With a free constant term the error would be 2^-13.7.) That of rounding P to bf16 is 2^-9.
__device__ __forceinline__ float ex2_polynomial(float x) {
    return fmaf(fmaf(fmaf(0.05500865f, x, 0.24221053f), x, 0.69328291f), x, 1.f);
}

// 2^x for x < 127 by that polynomial, for which x is divided into an integer and a rest. From −127 down it is 0.
__device__ __forceinline__ float ex2_by_polynomial(float x) {
    constexpr float ROUND = 12582912.f;  // 1.5 · 2^23: a sum with it has the integer part of x in its last bits
    asm("max.NaN.f32 %0, %0, 0fC2FE0000;" : "+f"(x));
    const float integer = x + ROUND, rest = x - (integer - ROUND);
    return ex2_polynomial(rest) * __int_as_float((__float_as_int(integer) << 23) + 0x3f800000);
}

// 2^(x · scale + bias) for results between 2^-126 and 2^127, by the same polynomial. NaN gives NaN: the power of two is
// a factor, as a sum of exponents would turn NaN into a number.
__device__ __forceinline__ float ex2_by_polynomial_in_range(float x, float scale, float bias) {
    constexpr float ROUND = 12582912.f + 127.f;  // the last 8 bits of a sum with it are a float's exponent
    float integer, rest;
    if (bias == 0.f) {  // known to the compiler: the sum does not wait for the product
        integer = fmaf(x, scale, ROUND);
        rest = fmaf(x, scale, ROUND - integer);
    } else {
        const float product = fmaf(x, scale, bias);
        integer = product + ROUND;
        rest = product - (integer - ROUND);
    }
    return ex2_polynomial(rest) * __int_as_float(__float_as_int(integer) << 23);
}

// Maximum and sum of a thread's two rows, over the thread's own columns, and the softmax of one block
// of N accumulators.
//
// This form does not use update_row_max: a block without a masked score needs no test for −∞, and two independent
// chains take the maxima of even and of odd columns.
struct RowSoftmax {
    float max[2], sum[2];          // in the scores' own unit, before the scale; NaN for a large maximum

    // A large maximum is in shared memory, as it would rarely use its register: of row 0 at `large`, of row 1 behind
    // the seven rows between them. What reads and writes it has no branch by rows: ptxas keeps descriptors in uniform
    // registers only where it sees that a warp stays together.
    static constexpr u32 NEXT_ROW = 8 * sizeof(float);
    __device__ __forceinline__ bool is_marked(int half) const { return max[half] != max[half]; }
    static __device__ __forceinline__ float in_memory(int half, u32 large) {
        return __int_as_float(load_shared(large + half * NEXT_ROW));
    }
    __device__ __forceinline__ float true_max(int half, u32 large) const {
        const float marked = in_memory(half, large);
        return is_marked(half) ? marked : max[half];
    }
    // Sets a row's maximum. NaN makes each later block of the row take the way of one whose maximum changes. The
    // maximum of a row without a score is −∞ or far below any score.
    __device__ __forceinline__ void set_max(int half, float row_max, float scale, u32 large) {
        const float in_base_2 = fabsf(row_max * scale);
        max[half] = in_base_2 > LARGE_MAX && in_base_2 < 1e37f ? NOT_A_NUMBER : row_max;
        store_shared(large + half * NEXT_ROW, __float_as_int(row_max));
    }

    __device__ __forceinline__ void reset(float least = -INF) { max[0] = max[1] = least, sum[0] = sum[1] = 0.f; }

    // Updates the row maxima. `alpha`: the factor of O and of the sums so far; `bias`: the term that the exponent adds.
    // OFFSET: the row's scores are s + offset[half].
    template <bool MASKED, bool OFFSET, int N>
    __device__ __forceinline__ void update_max(const float (&s)[N], float scale, const float (&offset)[2],
                                               float (&alpha)[2], float (&bias)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float even = s[2 * half], odd = s[2 * half + 1];
#pragma unroll
            for (int i = 4; i < N; i += 4) {
                even = fmaxf(even, s[i + 2 * half]);
                odd = fmaxf(odd, s[i + 2 * half + 1]);
            }
            float& row_max = max[half];
            // The lanes of a row have other columns, and other offsets.
            const float largest = OFFSET ? fmaxf(even, odd) + offset[half] : fmaxf(even, odd);
            const float new_max = fmaxf(row_max, quad_max(largest));
            const float growth = (row_max - new_max) * scale;  // at most 0; NaN where both are −∞
            bool keep = growth >= -RESCALE_THRESHOLD;
            if (MASKED) keep = keep || new_max == -INF;
            alpha[half] = keep ? 1.f : ex2(growth);
            row_max = keep ? row_max : new_max;
            bias[half] = OFFSET ? (offset[half] - row_max) * scale : -row_max * scale;
            if (MASKED) bias[half] = row_max == -INF ? 0.f : bias[half];
        }
    }
    // After update_max: rows with a large maximum have it subtracted from their scores, and then no bias.
    template <bool OFFSET, int N>
    __device__ __forceinline__ void subtract_large_max(float (&s)[N], float scale, const float (&offset)[2],
                                                       float (&alpha)[2], float (&bias)[2], u32 large) {
        // A marked maximum makes `alpha` NaN, or, in a block without a score of the row, stays as it is.
        const auto was_large = [&](int half) { return (alpha[half] != alpha[half]) | is_marked(half); };
        const auto concerns = [&](int half) {
            const float in_base_2 = OFFSET ? max[half] * scale : bias[half];
            return (alpha[half] != alpha[half]) | !(fabsf(in_base_2) <= LARGE_MAX);
        };
        if (!__any_sync(0xffffffffu, concerns(0) | concerns(1))) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool before = was_large(half);
            const float old = in_memory(half, large), row_max = before ? fmaxf(old, max[half]) : max[half];
            alpha[half] = before ? ex2((old - row_max) * scale) : alpha[half];
            set_max(half, row_max, scale, large);
            const bool now = is_marked(half);
            const float added = OFFSET && now ? offset[half] : 0.f, subtracted = now ? row_max : 0.f;
            bias[half] = now ? 0.f : bias[half];
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i / 2 % 2 == half) s[i] = (OFFSET ? s[i] + added : s[i]) - subtracted;
        }
    }

    // Turns S into P = 2^((S − max) · scale) where the maximum is a constant. Of every eight exponentials the FMA units
    // compute POLYNOMIALS, and the special-function unit the others. MASKED: some scores may be −∞.
    template <int POLYNOMIALS, bool MASKED, int N>
    __device__ __forceinline__ void exponentiate_bounded(float (&s)[N], float scale_log2, float constant_max) {
        const float bias = constant_max == 0.f ? 0.f : -constant_max * scale_log2;  // a product would be computed
        float block_sum[2][2];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const bool by_polynomial = i * POLYNOMIALS % 8 < POLYNOMIALS;
            if (by_polynomial && !MASKED) {
                s[i] = ex2_by_polynomial_in_range(s[i], scale_log2, bias);
            } else {
                const float x = fmaf(s[i], scale_log2, bias);
                s[i] = by_polynomial ? ex2_by_polynomial(x) : ex2(x);
            }
            float& of_columns = block_sum[i / 2 % 2][i % 2];
            of_columns = i < 4 ? s[i] : of_columns + s[i];  // the compiler keeps an addition to 0
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) sum[half] += block_sum[half][0] + block_sum[half][1];
    }

    // Turns S into P = 2^(S · scale + bias), not yet divided by its sum. SCALED: S contains the scale already.
    template <bool SCALED, int N>
    __device__ __forceinline__ void exponentiate(float (&s)[N], float scale_log2, const float (&alpha)[2],
                                                 const float (&bias)[2]) {
        float block_sum[2][2];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int half = i / 2 % 2;
            s[i] = ex2(SCALED ? s[i] + bias[half] : fmaf(s[i], scale_log2, bias[half]));
            block_sum[half][i % 2] = i < 4 ? s[i] : block_sum[half][i % 2] + s[i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            sum[half] = fmaf(sum[half], alpha[half], block_sum[half][0] + block_sum[half][1]);
    }

    // Turns S into P = 2^((S − max) · scale) with the maxima as they are, and gives the sums of P. OFFSET: the row's
    // scores are s + offset[half].
    template <bool OFFSET, int N>
    __device__ __forceinline__ void exponentiate_by_old_max(float (&s)[N], float scale_log2, const float (&offset)[2],
                                                            float (&block_sum)[2]) {
        float sums[2][2], bias[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            bias[half] = OFFSET ? (offset[half] - max[half]) * scale_log2 : -max[half] * scale_log2;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int half = i / 2 % 2;
            s[i] = ex2(fmaf(s[i], scale_log2, bias[half]));
            sums[half][i % 2] = i < 4 ? s[i] : sums[half][i % 2] + s[i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) block_sum[half] = sums[half][0] + sums[half][1];
    }
    // Whether a sum of P is so large that the row's maximum must grow; also if it is no number.
    static __device__ __forceinline__ bool exceeds(float block_sum) { return !(block_sum <= DEFERRED_SUM); }
    // Where the sums of P are too large and finite, divides P by the power of two next to the largest, and raises
    // the maximum by its logarithm. Rows whose P overflowed, or, with LARGE, whose maximum is large, are left to the
    // caller, as `lost`.
    template <bool LARGE, int N>
    __device__ __forceinline__ void raise_max(float (&s)[N], float scale_log2, float (&block_sum)[2],
                                              float (&alpha)[2], bool (&lost)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sums = quad_sum(exceeds(block_sum[half]) ? block_sum[half] : 0.f);
            const float largest = quad_max(block_sum[half]);
            alpha[half] = 1.f, lost[half] = false;
            if (sums == 0.f) continue;
            lost[half] = !(sums < INF) || (LARGE && fabsf(max[half] * scale_log2) > LARGE_MAX);
            if (lost[half]) continue;
            const int exponent = __float_as_int(largest) >> 23;  // its power of two, plus 127: at most 254
            alpha[half] = __int_as_float((255 - exponent) << 23);
            max[half] += static_cast<float>(exponent - 128) / scale_log2;
            block_sum[half] *= alpha[half];
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i / 2 % 2 == half) s[i] *= alpha[half];
        }
    }
};

// Maximum (base 2), and sum of 2^(score − maximum), of a row's scores in one split of its keys.
struct PartialSoftmax {
    float max, sum;

    // The factor of this split's results in a combination whose maximum is `all`; 0 for a split without a score.
    __device__ __forceinline__ float weight(float all) const { return max == -INF ? 0.f : ex2(max - all); }
};
