// After the backward kernel: dQ from the sums, which lie in the order of its accumulators (see backward.cu), scaled.
#include "config.cuh"
#include "mma.cuh"
#include "ptx.cuh"

using Element = cfg::Element;
constexpr int BLOCK_M = cfg::BLOCK_M, HEAD_DIM = cfg::HEAD_DIM, THREADS = 256;
constexpr bool SPLIT_COLUMNS = HEAD_DIM > 64;
constexpr int SLABS = (HEAD_DIM + 15) / 16, PART = SPLIT_COLUMNS ? BLOCK_M : BLOCK_M / 2;
constexpr int SUM_FLOATS = BLOCK_M * SLABS * 16;

struct Params {
    const float* sums;
    void* dq;                      // (batch, row, head, column)
    const int* cu_q;               // VARLEN
    long long dq_batch, dq_row, dq_head;  // in elements
    int heads, seqlen_q, stat_blocks;
    float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS) hopper_backward_finish(const __grid_constant__ Params p) {
    __shared__ __align__(16) Element tile[BLOCK_M][HEAD_DIM + 8];
    const int head = blockIdx.y, which = blockIdx.z, first = blockIdx.x * BLOCK_M;
    int q_first = 0, q_length = p.seqlen_q, batch = which;
    long long stat = (static_cast<long long>(which) * p.heads + head) * p.stat_blocks;
    if constexpr (cfg::VARLEN) {
        q_first = p.cu_q[which], q_length = p.cu_q[which + 1] - q_first, batch = 0;
        stat = static_cast<long long>(head) * p.stat_blocks + q_first / BLOCK_M + which;
    }
    if (first >= q_length) return;
    const float4* sums = reinterpret_cast<const float4*>(p.sums + (stat + blockIdx.x) * SUM_FLOATS);
#pragma unroll 4
    for (int i = threadIdx.x; i < SUM_FLOATS / 4; i += THREADS) {
        const float4 x = sums[i];
        const int lane = i % WARP, group = i / WARP % (PART / 8), slab = i / (WARP * (PART / 8));
        const int column = (SPLIT_COLUMNS ? slab : slab % SLABS) * 16 + lane / 4;
        const int row = (SPLIT_COLUMNS ? 0 : slab / SLABS * PART) + group * 8 + lane % 4 * 2;
        const float values[2][2] = {{x.x, x.y}, {x.z, x.w}};
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (column + 8 * half < HEAD_DIM)
                    tile[row + j][column + 8 * half] = Convert<Element>::from_float(values[half][j] * p.scale);
    }
    __syncthreads();
    Element* dq = static_cast<Element*>(p.dq) + batch * p.dq_batch + head * p.dq_head;
    for (int i = threadIdx.x; i < BLOCK_M * (HEAD_DIM / 8); i += THREADS) {
        const int row = i / (HEAD_DIM / 8), column = i % (HEAD_DIM / 8) * 8;
        if (first + row < q_length)
            *reinterpret_cast<uint4*>(dq + (q_first + first + row) * p.dq_row + column) =
                *reinterpret_cast<uint4*>(&tile[row][column]);
    }
}
