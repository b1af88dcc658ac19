// The score modifiers, which are applied between Q·Kᵀ and the softmax. flashlane.kernels.score is the Python side: it
// gives the constants and mirrors ScoreParams.
//
// In base 2: score · scale, or softcap · tanh(score · scale / softcap) under a soft cap; then minus slope · |i + shift
// − j| of ALiBi, for query i and key j. A sink is one more logit of each row of its head; it has no value.
#pragma once
#include "attention/mask.cuh"
#include "config.cuh"
#include "math.cuh"
#include "mma.cuh"

struct ScoreParams {
    const float* alibi;            // slopes, (batch, head)
    const void* sinks;             // logits, (head), f32; AT_RUN_TIME they may be of the operands' type
    long long alibi_batch;         // strides, in elements
    long long alibi_head, sink_stride;  // AT_RUN_TIME; 1 otherwise
    int sinks_are_float;           // AT_RUN_TIME
    float scale_log2;              // scale · log2(e)
    float softcap_in;              // 2 · log2(e) · scale / softcap
    float softcap_log2;            // softcap · log2(e); 0 without a cap
};

// A kernel is compiled for the modifiers that a call has. With AT_RUN_TIME it is compiled for all of them, and the
// parameters say which ones the call has: no cap where softcap_log2 is 0, no slopes and no sinks where the
// pointers are null.
template <bool SOFTCAP_, bool ALIBI_, bool SINKS_, bool AT_RUN_TIME, typename Operand>
struct ScoreTransform {
    static constexpr bool SOFTCAP = SOFTCAP_, ALIBI = ALIBI_, SINKS = SINKS_;
    // Whether scores change before the row maximum is taken. The scale can otherwise wait for the exponent's FFMA.
    static constexpr bool TRANSFORMED = SOFTCAP || ALIBI;
    // Whether the backward multiplies dS by the derivative of a score; whether a score depends on i + shift − j.
    static constexpr bool HAS_DERIVATIVE = SOFTCAP, HAS_DISTANCE = ALIBI;

    // Whether the last factor of the scores (see late_scale) is left to the exponent's FFMA.
    static constexpr bool LATE_SCALE = !TRANSFORMED || !(AT_RUN_TIME || (SOFTCAP && ALIBI));
    // Whether a modifier keeps all scores within a bound.
    static constexpr bool HAS_BOUND = SOFTCAP && !ALIBI && !AT_RUN_TIME;
    // The factor by which the maximum and the exponent multiply scores.
    static __device__ __forceinline__ float late_scale(const ScoreParams& p) {
        return !LATE_SCALE ? 1.f : SOFTCAP ? p.softcap_log2 : p.scale_log2;
    }

    // tanh(score · scale / softcap). For bf16 operands its relative error is the special-function unit's 2^-11, a
    // quarter of bf16's, as in FlashAttention-2 (apply_softcap), -3 and -4. For other operands it has f32's precision,
    // which takes two special functions and three more instructions.
    static __device__ __forceinline__ float tanh_of(const ScoreParams& p, float score) {
        if constexpr (is_same<Operand, __nv_bfloat16>) return approximate_tanh(score * (p.softcap_in * (0.5f * LN_2)));
        return fmaf(-2.f, reciprocal(1.f + ex2(score * p.softcap_in)), 1.f);
    }
    // A score in base 2, capped; also the cap's derivative there, else 1.
    static __device__ __forceinline__ float scaled(const ScoreParams& p, float score, float& derivative) {
        derivative = 1.f;
        if (!SOFTCAP) return score * p.scale_log2;
        const float tanh = tanh_of(p, score);
        derivative = fmaf(-tanh, tanh, 1.f);
        return p.softcap_log2 * tanh;
    }
    // The score without its derivative. AT_RUN_TIME is exact to f32, since memory bounds decode, and divides: with a
    // reciprocal its TMA tile 2x4x32 in clusters of 8 (head dim 128, 168 registers) spills 32 bytes; with a division
    // no tile spills.
    static __device__ __forceinline__ float scaled(const ScoreParams& p, float score) {
        if constexpr (AT_RUN_TIME) {
            if (p.softcap_log2 > 0.f) return p.softcap_log2 * (1.f - __fdividef(2.f, 1.f + ex2(score * p.softcap_in)));
            return score * p.scale_log2;
        } else {
            float unused;
            return scaled(p, score, unused);
        }
    }
    // The derivative, recomputed from a capped score where there are no registers to keep it; 0 where a mask left −∞.
    static __device__ __forceinline__ float inverse_cap(const ScoreParams& p) { return reciprocal(p.softcap_log2); }
    static __device__ __forceinline__ float derivative_of_capped(float score, float inverse) {
        const float tanh = fmaxf(score * inverse, -1.f);
        return fmaf(-tanh, tanh, 1.f);
    }
    // The bias of a pair at `distance` i + shift − j.
    static __device__ __forceinline__ float biased(float score, float slope, float distance) {
        if constexpr (ALIBI) score -= slope * fabsf(distance);
        return score;
    }

    // What transform_scores makes of the product of a pair at that distance, where LATE_SCALE leaves a factor.
    static __device__ __forceinline__ float of_product(const ScoreParams& p, float product, float slope,
                                                       float distance) {
        return biased(SOFTCAP ? tanh_of(p, product) : product, slope, distance);
    }

    // The ALiBi slope of a head, in base 2; 0 without slopes.
    static __device__ __forceinline__ float slope(const ScoreParams& p, int batch, int head) {
        if (!ALIBI || (AT_RUN_TIME && p.alibi == nullptr)) return 0.f;
        return p.alibi[batch * p.alibi_batch + (AT_RUN_TIME ? head * p.alibi_head : head)] * LOG2_E;
    }
    // The extra logit of a head's rows, which is its sink; −∞ without sinks. Multiply it by LOG2_E for base 2.
    template <typename Element>
    static __device__ __forceinline__ float extra_logit(const ScoreParams& p, int head) {
        if (!SINKS || (AT_RUN_TIME && p.sinks == nullptr)) return -INF;
        if constexpr (!AT_RUN_TIME) return static_cast<const float*>(p.sinks)[head];
        const long long at = head * p.sink_stride;
        return p.sinks_are_float ? static_cast<const float*>(p.sinks)[at]
                                 : Convert<Element>::to_float(static_cast<const Element*>(p.sinks)[at]);
    }
    // Adds the extra logit to a row's sum of exponentials, which are relative to `max`; `extra` and `max` are
    // in base 2.
    static __device__ __forceinline__ float sum_with_extra_logit(float sum, float extra, float max) {
        return SINKS ? sum + ex2(extra - max) : sum;
    }
    // Adds the extra logit to a row's LSE, in base 2, and scales `inverse`, the factor of the row's output, to match.
    template <typename Element>
    static __device__ __forceinline__ void add_extra_logit(const ScoreParams& p, int head, float& lse, float& inverse) {
        if constexpr (SINKS) {
            const float logit = extra_logit<Element>(p, head) * LOG2_E, max = fmaxf(lse, logit);
            if (max > -INF) {
                const float all = max + __log2f(ex2(lse - max) + ex2(logit - max));
                inverse *= ex2(lse - all);
                lse = all;
            }
        }
    }
    // Adds a row's term to the gradient of its extra logit, from the row's LSE (natural logarithm) and delta: a sink is
    // a key whose value is 0, so its dS is −P · delta.
    template <typename Element>
    static __device__ __forceinline__ void add_row_gradient(const ScoreParams& p, int head, float lse, float delta,
                                                             float& gradient) {
        if constexpr (SINKS) gradient -= ex2((extra_logit<Element>(p, head) - lse) * LOG2_E) * delta;
    }
    // Stores the sum of all threads' terms of that gradient at `where()`, which only the thread that stores evaluates.
    // All threads of the CTA call it.
    template <int THREADS, typename Where>
    static __device__ __forceinline__ void store_row_gradient(float gradient, const Where& where) {
        if constexpr (SINKS) {
            __shared__ float warps[THREADS / WARP];
            gradient = warp_sum(gradient);
            if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = gradient;
            __syncthreads();
            if (threadIdx.x == 0) {
#pragma unroll
                for (int i = 1; i < THREADS / WARP; ++i) gradient += warps[i];
                *where() = gradient;
            }
        }
    }
};

using Score = ScoreTransform<cfg::SOFTCAP, cfg::ALIBI, cfg::SINKS, cfg::SCORE_AT_RUN_TIME, cfg::Element>;

// Turns the scores of a block into tanh(score · scale / softcap).
template <int N>
__device__ __forceinline__ void cap_scores(const ScoreParams& p, float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = Score::tanh_of(p, s[i]);
}

// Caps scores and biases them by distance, in the unit of Score::late_scale. `distance[half]` is that of row `half`'s
// query and the thread's first key, `slope[half]` the slope of its head in that unit. Rows are queries. Where all keys
// are on one side of the rows (`side`: 1 before them, −1 after them, 0 neither), the bias is linear, and the term
// `offset[half]` that a row's scores share is not added to them but to the maximum.
template <int N>
__device__ __forceinline__ void transform_scores(const ScoreParams& p, float (&s)[N], const float (&distance)[2],
                                                 const float (&slope)[2], int side, float (&offset)[2]) {
    offset[0] = offset[1] = 0.f;
    if constexpr (Score::SOFTCAP) {
        cap_scores(p, s);
        if constexpr (!Score::LATE_SCALE) {
#pragma unroll
            for (int i = 0; i < N; ++i) s[i] *= p.softcap_log2;
        }
    }
    if constexpr (Score::ALIBI) {
        if (side != 0) {
            float signed_slope[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                signed_slope[half] = side > 0 ? slope[half] : -slope[half];
                offset[half] = -signed_slope[half] * distance[half];
            }
#pragma unroll
            for (int i = 0; i < N; ++i)
                s[i] = fmaf(signed_slope[i / 2 % 2], static_cast<float>(accumulator_column(i)), s[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const int half = i / 2 % 2, column = accumulator_column(i);
                s[i] = Score::biased(s[i], slope[half], distance[half] - column);
            }
        }
    }
}

// The same for transposed scores, whose rows are keys and whose columns are queries: `distance` is that of the thread's
// first pair. It also gives the cap's derivatives, as pairs of f16.
template <int N, int DERIVATIVES>
__device__ __forceinline__ void transform_scores_transposed(const ScoreParams& p, float distance, float slope,
                                                            float (&s)[N], u32 (&derivatives)[DERIVATIVES]) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        float derivative[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = accumulator_column(i + j);
            s[i + j] = Score::biased(Score::scaled(p, s[i + j], derivative[j]), slope,
                                     distance + (column - (i / 2 % 2 ? 8 : 0)));
        }
        if constexpr (Score::SOFTCAP) derivatives[i / 2] = Convert<__half>::pack(derivative[0], derivative[1]);
    }
}
