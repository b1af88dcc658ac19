// After the backward kernel: dQ from its sums, scaled; with CHORES, of the blocks that it has left.
#include "hopper/backward/blocks.cuh"
#include "hopper/backward/dq_accumulate.cuh"

constexpr int THREADS = 256;

struct Params {
    const float* dq;               // sums
    void* dq_out;                  // (batch, row, head, column)
    const int* cu_q;               // VARLEN
    const int* finished;           // CHORES, of each tile
    long long dq_batch, dq_row, dq_head;  // in elements
    int heads, seqlen_q, stat_blocks;
    int kv_heads, key_blocks, heads_per_section;  // CHORES
    float scale;
};

extern "C" __global__ void __launch_bounds__(THREADS) hopper_backward_postprocess(const __grid_constant__ Params p) {
    griddepcontrol_wait();
    const int head = blockIdx.y, which = blockIdx.z, first = blockIdx.x * BLOCK_M;
    const Rows rows(p, which);
    const int here = rows.q_length - first;
    if (here <= 0) return;
    if constexpr (cfg::CHORES) {
        const int group = p.heads / p.kv_heads, kv_head = which * p.kv_heads + head / group;
        const TileOrder order{p.kv_heads * static_cast<int>(gridDim.z), p.key_blocks, p.heads_per_section};
        const int block = head % group * p.stat_blocks + blockIdx.x;
        if (p.finished[order.index(owner_of(block, order.blocks, static_cast<long long>(group) * p.stat_blocks), kv_head)]) return;
    }
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
