// Joins the partial results of a row whose keys were cut into parts: at the end of the launch that made them, by the
// warps that finish last (forward.cu, FUSED), or by a launch of its own (combine.cu).
//
//     lse = log Σ exp(lse_s)  (and of the sink),   out = Σ exp(lse_s − lse) · out_s
#pragma once
#include "config.cuh"
#include "mma.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Combine {
    const float *parts, *part_lse;  // (split, batch, row, head, column) and (split, batch, head, row), contiguous
    const float* sinks;
    void* out;
    float* lse;                     // (batch, head, row), contiguous; or null
    u32* tickets;                   // FUSED: one a tile and consumer, 0 before and after a launch
    long long part_split, lse_split;            // strides in elements
    long long out_batch, out_row, out_head;
    int batch, rows, heads, splits;
};

// Columns `first` to `first` + COLUMNS of a row, by a warp, which has AHEAD loads under way; the parts are always added in
// their order. They may be newer than what the L1 cache holds.
template <int COLUMNS, int AHEAD>
__device__ __forceinline__ void combine_row(const Combine& p, int splits, int batch, int head, int row, int first,
                                            bool with_lse) {
    const int lane = threadIdx.x % WARP;
    const long long flat = (static_cast<long long>(batch) * p.heads + head) * p.rows + row;

    // Loops and branches are the warp's: a loop of unlike lanes would cost the caller its uniform registers.
    const auto lse_of = [&](int part) {
        return part < splits ? __ldcg(p.part_lse + flat + part * p.lse_split) * LOG2_E : -INF;
    };
    const float sink = cfg::SINKS ? p.sinks[head] * LOG2_E : -INF;
    const float near = lse_of(lane);  // rarely are there more parts than lanes: each look costs the row a trip to L2
    float top = fmaxf(sink, near);
#pragma unroll 1
    for (int part = WARP; part < splits; part += WARP) top = fmaxf(top, lse_of(part + lane));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const float zero = top == -INF ? 0.f : top;
    float sum = ex2(near - zero);
#pragma unroll 1
    for (int part = WARP; part < splits; part += WARP) sum += ex2(lse_of(part + lane) - zero);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (cfg::SINKS) sum += ex2(sink - zero);
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    if (with_lse && lane == 0 && p.lse != nullptr) p.lse[flat] = sum > 0.f ? (zero + log2f(sum)) * LN_2 : -INF;

    const float* parts = p.parts + ((static_cast<long long>(batch) * p.rows + row) * p.heads + head) * cfg::HEAD_DIM_V;
    cfg::Element* out = static_cast<cfg::Element*>(p.out) + batch * p.out_batch + row * p.out_row + head * p.out_head;
#pragma unroll
    for (int from = 0; from < COLUMNS; from += 4 * WARP) {
        const int column = first + from + 4 * lane;
        const bool inside = from + 4 * lane < COLUMNS && column < cfg::HEAD_DIM_V;
        const float* source = parts + (inside ? column : 0);
        float4 result = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int part = 0; part < splits; part += WARP) {
            const float weight = ex2((part == 0 ? near : lse_of(part + lane)) - zero) * inverse;
#pragma unroll 1
            for (int i = 0; i < min(WARP, splits - part); i += AHEAD) {
                float4 x[AHEAD];
#pragma unroll
                for (int j = 0; j < AHEAD; ++j)  // beyond the last part, its own again: with weight 0
                    x[j] = __ldcg(reinterpret_cast<const float4*>(source + min(part + i + j, splits - 1) * p.part_split));
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    const float w = __shfl_sync(0xffffffffu, weight, i + j);
                    result.x += w * x[j].x, result.y += w * x[j].y, result.z += w * x[j].z, result.w += w * x[j].w;
                }
            }
        }
        const u32 low = Convert<cfg::Element>::pack(result.x, result.y), high = Convert<cfg::Element>::pack(result.z, result.w);
        if (inside) *reinterpret_cast<uint2*>(out + column) = make_uint2(low, high);
    }
}
