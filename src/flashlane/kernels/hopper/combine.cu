// Joins the partial results of a call whose keys were cut into parts: a warp a row.
//
//     lse = log Σ exp(lse_s)  (and of the sink),   out = Σ exp(lse_s − lse) · out_s
#include "config.cuh"
#include "mma.cuh"
#include "ptx.cuh"

using Element = cfg::Element;
constexpr int HEAD_DIM_V = cfg::HEAD_DIM_V, WARPS = 4;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Params {
    const float *parts, *part_lse;  // (split, batch, row, head, column) and (split, batch, head, row), contiguous
    const float* sinks;
    Element* out;
    float* lse;
    long long part_split, lse_split;                 // strides in elements
    long long out_batch, out_row, out_head;
    int batch, rows, heads, splits;
};

extern "C" __global__ void __launch_bounds__(WARPS * WARP) hopper_combine(const __grid_constant__ Params p) {
    const long long flat = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / WARP;  // (batch, head, row)
    const int lane = threadIdx.x % WARP;
    if (flat >= static_cast<long long>(p.batch) * p.heads * p.rows) return;
    const int row = flat % p.rows;
    const long long above = flat / p.rows;
    const int head = above % p.heads, batch = above / p.heads;

    float top = cfg::SINKS ? p.sinks[head] * LOG2_E : -INF;
    const float sink = top;
    for (int i = lane; i < p.splits; i += WARP) top = fmaxf(top, p.part_lse[i * p.lse_split + flat] * LOG2_E);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const float zero = top == -INF ? 0.f : top;
    float sum = 0.f;
    for (int i = lane; i < p.splits; i += WARP) sum += ex2(p.part_lse[i * p.lse_split + flat] * LOG2_E - zero);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (cfg::SINKS) sum += ex2(sink - zero);
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    if (lane == 0) p.lse[flat] = sum > 0.f ? (zero + log2f(sum)) * LN_2 : -INF;

    constexpr int PIECES = HEAD_DIM_V / 4;  // of four columns
    const float* part = p.parts + ((static_cast<long long>(batch) * p.rows + row) * p.heads + head) * HEAD_DIM_V;
    Element* out = p.out + batch * p.out_batch + row * p.out_row + head * p.out_head;
#pragma unroll
    for (int first = 0; first < PIECES; first += WARP) {
        const int piece = first + lane;
        if (piece >= PIECES) break;
        float4 result = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (int i = 0; i < p.splits; ++i) {
            const float weight = ex2(p.part_lse[i * p.lse_split + flat] * LOG2_E - zero) * inverse;
            const float4 x = *reinterpret_cast<const float4*>(part + i * p.part_split + 4 * piece);
            result.x += weight * x.x, result.y += weight * x.y, result.z += weight * x.z, result.w += weight * x.w;
        }
        const uint2 packed = make_uint2(Convert<Element>::pack(result.x, result.y), Convert<Element>::pack(result.z, result.w));
        *reinterpret_cast<uint2*>(out + 4 * piece) = packed;
    }
}
