// Combines the partial results of a row whose keys were split: at the end of the launch that made them, by the
// warpgroup that stores the last split (COMBINE_IN_KERNEL), or in a launch of its own (combine.cu).
//
//     lse = log Σ exp(lse_s)  (and of the extra logit),   out = Σ exp(lse_s − lse) · out_s
#pragma once
#include "attention/score.cuh"
#include "config.cuh"
#include "mma.cuh"

struct CombineParams {
    const float *partial_out, *partial_lse;     // (split, batch, row, head, column), (split, batch, head, row)
    void* out;
    float* lse;                                 // (batch, head, row), contiguous; or null
    u32* semaphores;                            // COMBINE_IN_KERNEL: one a tile and consumer; 0 between launches
    long long partial_out_split, partial_lse_split;  // strides, in elements
    long long out_batch, out_row, out_head;
    int batch, rows, heads, splits;
};

// COLUMNS columns of a row from `first` on, by a warp, which has LOADS loads in flight. Splits are always added in
// their order, so that the result does not depend on which split was stored last. They may be newer than what the
// L1 cache holds.
template <int COLUMNS, int LOADS>
__device__ __forceinline__ void combine_row(const CombineParams& p, const ScoreParams& score, int splits, int batch,
                                            int head, int row, int first, bool with_lse) {
    const int lane = threadIdx.x % WARP;
    const long long flat = (static_cast<long long>(batch) * p.heads + head) * p.rows + row;

    // Loops and branches are the same in all lanes: a loop of unlike lanes would cost the caller its uniform registers.
    const auto lse_of = [&](int split) {
        return split < splits ? __ldcg(p.partial_lse + flat + split * p.partial_lse_split) * LOG2_E : -INF;
    };
    const float extra = Score::extra_logit<cfg::Element>(score, head) * LOG2_E;
    const float lane_lse = lse_of(lane);  // read once, from L2: there are rarely more splits than lanes
    float top = fmaxf(extra, lane_lse);
#pragma unroll 1
    for (int split = WARP; split < splits; split += WARP) top = fmaxf(top, lse_of(split + lane));
    top = warp_max(top);
    const float zero = top == -INF ? 0.f : top;
    float sum = ex2(lane_lse - zero);
#pragma unroll 1
    for (int split = WARP; split < splits; split += WARP) sum += ex2(lse_of(split + lane) - zero);
    sum = Score::sum_with_extra_logit(warp_sum(sum), extra, zero);
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    if (with_lse && lane == 0 && p.lse != nullptr) p.lse[flat] = natural_lse(zero, sum);

    const float* partial =
        p.partial_out + ((static_cast<long long>(batch) * p.rows + row) * p.heads + head) * cfg::HEAD_DIM_V;
    cfg::Element* out = static_cast<cfg::Element*>(p.out) + batch * p.out_batch + row * p.out_row + head * p.out_head;
#pragma unroll
    for (int from = 0; from < COLUMNS; from += 4 * WARP) {
        const int column = first + from + 4 * lane;
        const bool inside = from + 4 * lane < COLUMNS && column < cfg::HEAD_DIM_V;
        const float* source = partial + (inside ? column : 0);
        float4 result = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int split = 0; split < splits; split += WARP) {
            const float weight = ex2((split == 0 ? lane_lse : lse_of(split + lane)) - zero) * inverse;
#pragma unroll 1
            for (int i = 0; i < min(WARP, splits - split); i += LOADS) {
                float4 x[LOADS];
#pragma unroll
                for (int j = 0; j < LOADS; ++j)  // past the last split: the last one, with weight 0
                    x[j] = __ldcg(
                        reinterpret_cast<const float4*>(source + min(split + i + j, splits - 1) * p.partial_out_split));
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    const float w = __shfl_sync(0xffffffffu, weight, i + j);
                    result.x += w * x[j].x, result.y += w * x[j].y, result.z += w * x[j].z, result.w += w * x[j].w;
                }
            }
        }
        const u32 low = Convert<cfg::Element>::pack(result.x, result.y),
                  high = Convert<cfg::Element>::pack(result.z, result.w);
        if (inside) *reinterpret_cast<uint2*>(out + column) = make_uint2(low, high);
    }
}
