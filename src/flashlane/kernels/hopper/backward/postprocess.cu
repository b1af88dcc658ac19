// The postprocess kernel writes dQ, scaled, from dq_accum. With IN_KERNEL_DQ it writes the m-blocks that the idle
// warps did not. It is in the operands' type or, with F32_DQ, in f32.
#include "hopper/backward/dq_accumulate.cuh"
#include "hopper/backward/dq_assignment.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;

struct PlainParams {
    const int* written;            // IN_KERNEL_DQ: for each tile, 1 when dQ of its m-blocks is written
    const float* dq_accum;
    void* dq;                      // (batch, row, head, column)
    long long dq_batch, dq_row, dq_head;  // in elements
    int heads, row_blocks;
    float scale;
    SeqlenParams seqlen;           // queries
    int kv_heads, n_blocks, heads_per_section;  // IN_KERNEL_DQ
};
struct Params : PlainParams, Optional<cfg::QUERY_RANGES, QueryRanges> {};

extern "C" __global__ void __launch_bounds__(THREADS) hopper_backward_postprocess(const __grid_constant__ Params p) {
    griddepcontrol_wait();
    const dim3 place = row_block_place();
    const RowBlock at(p, place);
    if (at.of_no_sequence()) return;
    const int head = place.y, sequence = at.sequence, first = at.m_block * BLOCK_M;
    const QuerySeqlen seqlen = queries_of(p, sequence, at.range);
    const int rows = seqlen.q_length - first;
    if (rows <= 0) return;
    if constexpr (cfg::IN_KERNEL_DQ) {
        const int group = p.heads / p.kv_heads, kv_head = sequence * p.kv_heads + head / group;
        const TileOrder order{p.kv_heads * static_cast<int>(gridDim.z), p.n_blocks, p.heads_per_section};
        const int m_block = head % group * p.row_blocks + place.x;
        if (p.written[order.index(
                assigned_n_block(m_block, order.n_blocks, static_cast<long long>(group) * p.row_blocks), kv_head)])
            return;
    }
    const float* sums = p.dq_accum + (first_row_block(p, seqlen, sequence, head) + at.m_block) * DQ_ACCUM_FLOATS;
    DqElement* dq = static_cast<DqElement*>(p.dq) + seqlen.q_batch * p.dq_batch + head * p.dq_head +
                    static_cast<long long>(seqlen.q_first + first) * p.dq_row;
    // A warp has the loads of two groups under way at once: each takes the latency of the L2 cache.
    const int warp = threadIdx.x / WARP;
    if constexpr (cfg::DQ_TRANSPOSED) {
        constexpr int GROUPS_OF_SLICE = SLICE_ROWS / 8, GROUPS = (MIXED_DQ ? 1 : SLICES) * GROUPS_OF_SLICE;
        for (int i = warp; MIXED_DQ && i < BLOCK_M / 16; i += WARPS)
            write_dq_block(sums, dq, p.dq_row, rows, i * 16, 64, p.scale);
        const auto slice_of = [](int group) { return group / GROUPS_OF_SLICE; };
        const auto rows_of = [&](int group) {
            return SliceRows(threadIdx.x % WARP, sums, dq, p.dq_row, rows, slice_of(group), group % GROUPS_OF_SLICE);
        };
#pragma unroll 1
        for (int i = warp; i < GROUPS; i += 2 * WARPS) {
            const int j = min(i + WARPS, GROUPS - 1);
            float4 x[SLICE_FRAGMENTS], y[SLICE_FRAGMENTS];
            rows_of(i).load(x, slice_of(i));
            rows_of(j).load(y, slice_of(j));
            rows_of(i).write(x, slice_of(i), p.scale);
            if (i + WARPS < GROUPS) rows_of(j).write(y, slice_of(j), p.scale);
        }
    } else {
        constexpr int ROW_GROUPS = BLOCK_M / 16, GROUPS = ROW_GROUPS * ceil_div(HEAD_DIM, 32);
        const auto row_of = [](int group) { return group % ROW_GROUPS * 16; };
        const auto columns_of = [](int group) { return group / ROW_GROUPS * 32; };
#pragma unroll 1
        for (int i = warp; i < GROUPS; i += 2 * WARPS) {
            const int j = min(i + WARPS, GROUPS - 1);
            const DqBlock x(sums, row_of(i), columns_of(i)), y(sums, row_of(j), columns_of(j));
            x.write(dq, p.dq_row, rows, row_of(i), columns_of(i), p.scale);
            if (i + WARPS < GROUPS) y.write(dq, p.dq_row, rows, row_of(j), columns_of(j), p.scale);
        }
    }
}
