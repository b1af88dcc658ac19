// Before the backward kernels: the statistics of the rows, zeros where dQ is summed, and the sinks' gradient.
//
//     lse = −LSE · log2(e),   delta = Σ O·dO − dLSE,   a block's share of dsink = −Σ exp(sink − LSE) · delta
//
// A row that sees no key, and one past the end of its sequence, has −∞ and 0: all its probabilities are then 0.
#include "config.cuh"
#include "mma.cuh"
#include "ptx.cuh"

using Element = cfg::Element;
constexpr int BLOCK_M = cfg::BLOCK_M, HEAD_DIM_V = cfg::HEAD_DIM_V, THREADS = 256;
constexpr int LANES = HEAD_DIM_V <= 64 ? 8 : HEAD_DIM_V <= 128 ? 16 : 32;  // of a row, 8 columns each
constexpr float LOG2_E = 1.4426950408889634f;

struct Params {
    const void *out, *dout;        // (batch, row, head, column), rows on 16 bytes
    const float *lse_in, *dlse;    // (batch, head, row); dlse may be null
    const float* sinks;            // (head)
    const int* cu_q;               // VARLEN
    float *lse, *delta, *dq;
    float* shares;                 // (batch, block, head) of dsink
    int *turns, *counter;          // to become 0; turns with DETERMINISTIC
    long long out_batch, out_row, out_head, dout_batch, dout_row, dout_head;  // in elements
    long long lse_batch, lse_head, dlse_batch, dlse_head;
    int heads, seqlen_q, stat_blocks, blocks;  // blocks: of the longest sequence
};

// Products of two packed elements, summed in f32.
__device__ __forceinline__ float dot(u32 a, u32 b) {
    const Element *x = reinterpret_cast<Element*>(&a), *y = reinterpret_cast<Element*>(&b);
    return Convert<Element>::to_float(x[0]) * Convert<Element>::to_float(y[0]) +
           Convert<Element>::to_float(x[1]) * Convert<Element>::to_float(y[1]);
}

extern "C" __global__ void __launch_bounds__(THREADS) hopper_backward_prepare(const __grid_constant__ Params p) {
    const int head = blockIdx.y, which = blockIdx.z, first = blockIdx.x * BLOCK_M;
    int q_first = 0, q_length = p.seqlen_q, batch = which;
    long long stat = (static_cast<long long>(which) * p.heads + head) * p.stat_blocks;
    if constexpr (cfg::VARLEN) {
        q_first = p.cu_q[which], q_length = p.cu_q[which + 1] - q_first, batch = 0;
        stat = static_cast<long long>(head) * p.stat_blocks + q_first / BLOCK_M + which;
    }
    stat += blockIdx.x;
    if (p.counter != nullptr && head + which + blockIdx.x + threadIdx.x == 0) *p.counter = 0;
    const bool some = first < q_length;
    float share = 0.f;
    if (some) {
        const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const Element* out = static_cast<const Element*>(p.out) + batch * p.out_batch + head * p.out_head;
        const Element* dout = static_cast<const Element*>(p.dout) + batch * p.dout_batch + head * p.dout_head;
        const float* lse_in = p.lse_in + batch * p.lse_batch + head * p.lse_head + q_first;
        const float* dlse = p.dlse == nullptr ? nullptr : p.dlse + batch * p.dlse_batch + head * p.dlse_head + q_first;
#pragma unroll 2
        for (int row = group; row < BLOCK_M; row += THREADS / LANES) {
            const int query = first + row;
            float sum = 0.f;
            if (query < q_length && lane * 8 < HEAD_DIM_V) {
                const long long at = q_first + query;
                const uint4 a = *reinterpret_cast<const uint4*>(out + at * p.out_row + lane * 8);
                const uint4 b = *reinterpret_cast<const uint4*>(dout + at * p.dout_row + lane * 8);
                sum = dot(a.x, b.x) + dot(a.y, b.y) + dot(a.z, b.z) + dot(a.w, b.w);
            }
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (lane != 0) continue;
            const float lse = query < q_length ? lse_in[query] : -INF;
            const bool seen = lse != -INF;
            if (p.dlse != nullptr && seen) sum -= dlse[query];
            sum = seen ? sum : 0.f;
            p.lse[stat * BLOCK_M + row] = seen ? -lse * LOG2_E : -INF;
            p.delta[stat * BLOCK_M + row] = sum;
            if (cfg::SINKS && seen) share -= ex2((p.sinks[head] - lse) * LOG2_E) * sum;
        }
        if constexpr (cfg::SUM_FLOATS > 0) {
            float4* sums = reinterpret_cast<float4*>(p.dq + stat * cfg::SUM_FLOATS);
            for (int i = threadIdx.x; i < cfg::SUM_FLOATS / 4; i += THREADS) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
        if (cfg::DETERMINISTIC && threadIdx.x < 2) p.turns[2 * stat + threadIdx.x] = 0;
    }
    if constexpr (cfg::SINKS) {
        __shared__ float warps[THREADS / WARP];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) share += __shfl_xor_sync(0xffffffffu, share, step);
        if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = share;
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 1; i < THREADS / WARP; ++i) share += warps[i];
            p.shares[(static_cast<long long>(which) * p.blocks + blockIdx.x) * p.heads + head] = share;
        }
    }
}
