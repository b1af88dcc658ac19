// After the backward kernel: dQ from its sums, scaled.
#include "hopper_backward_sums.cuh"

constexpr int THREADS = 256;

struct Params {
    const float* dq;               // sums
    void* dq_out;                  // (batch, row, head, column)
    const int* cu_q;               // VARLEN
    long long dq_batch, dq_row, dq_head;  // in elements
    int heads, seqlen_q, stat_blocks;
    float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS) hopper_backward_finish(const __grid_constant__ Params p) {
    wait_prerequisites();
    const int head = blockIdx.y, which = blockIdx.z, first = blockIdx.x * BLOCK_M;
    const Rows rows(p, which);
    const int here = rows.q_length - first;
    if (here <= 0) return;
    const float* sums = p.dq + (stat_block(p, rows, which, head) + blockIdx.x) * SUM_FLOATS;
    Element* dq = static_cast<Element*>(p.dq_out) + rows.batch * p.dq_batch + head * p.dq_head +
                  static_cast<long long>(rows.q_first + first) * p.dq_row;
    const int warp = threadIdx.x / WARP;
    if constexpr (cfg::STRAIGHT) {
        constexpr int TALL = BLOCK_M / 16, ALL = TALL * ((HEAD_DIM + 31) / 32);
        for (int i = warp; i < ALL; i += THREADS / WARP)
            finish_straight(sums, dq, p.dq_row, here, i % TALL * 16, i / TALL * 32, p.scale);
    } else {
#pragma unroll 2
        for (int i = warp; i < PARTS * (PART / 8); i += THREADS / WARP) {
            const int part = i / (PART / 8);
            PartRows(threadIdx.x % WARP, sums, dq, p.dq_row, here, part, i % (PART / 8)).finish(part, p.scale);
        }
    }
}
