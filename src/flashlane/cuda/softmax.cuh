// Row statistics of the online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1), in base 2.
#pragma once
#include "ptx.cuh"

// Reductions over the four lanes that share the rows of an accumulator tile.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Keys that row `row` may see: first <= key < end. Bounds below 0 mean unbounded.
struct Mask {
    int seqlen_k, shift, window_left, window_right;

    __device__ __forceinline__ int first(int row) const {
        return window_left < 0 ? 0 : max(0, row + shift - window_left);
    }
    __device__ __forceinline__ int end(int row) const {
        return window_right < 0 ? seqlen_k : min(seqlen_k, row + shift + window_right + 1);
    }
};

// score = −inf unless distance < visible. In asm, as the compiler would carry the predicates of a skipped mask along.
__device__ __forceinline__ void hide_outside(float& score, u32 distance, u32 visible) {
    asm volatile("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p mov.f32 %0, 0fFF800000; }"
                 : "+f"(score)
                 : "r"(distance), "r"(visible));
}

// log2-domain LSE to natural logarithm; a row that saw no key has −inf.
__device__ __forceinline__ float natural_lse(float max_log2, float sum) {
    return sum > 0.f ? (max_log2 + log2f(sum)) * 0.69314718055994531f : -INF;
}
