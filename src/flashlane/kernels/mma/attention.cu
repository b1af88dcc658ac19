// Attention forward on mma.sync m16n8k16: split-kv, split-q, share-kv and share-qkv are points of this one template.
//
// One CTA owns BLOCK_M query rows and walks over the key/value tiles of BLOCK_N rows that those queries may see:
//     S = Q·Kᵀ   ->   online softmax (f32, base 2)   ->   O += P·V.
//
// Warps: WARPS_Q × WARPS_KV.                       split-q (4 × 1)            split-kv (2 × 4)
//     S[BLOCK_M, BLOCK_N] by warp:                 | w0 w0 w0 w0 |            | w0 w1 w2 w3 |
//                                                  | w1 w1 w1 w1 |            | w4 w5 w6 w7 |
//                                                  | w2 w2 w2 w2 |
//                                                  | w3 w3 w3 w3 |
// With WARPS_KV = 1 a warp owns whole rows: P stays in registers as the next A operand. With more, row maxima cross
// warps through shared memory, P is written there, and each warp of a row owns columns of O.
//
// K and V arrive in slices: whole tiles, or slices of the head dim (tiling-qk: K in K_SLICE columns and V in V_ROWS
// rows; tiling-qkv: V in V_COLUMNS columns too, so that shared memory does not grow with the head dim). Each slice
// takes a stage of a pipeline of KV_STAGES, in the order K0 V0 K1 V1 …: one stage is share-kv stage 1; two are
// share-kv stage 2 and split-q stage 1; three are split-q stage 2. A slice of Q comes with each slice of K
// (Q_STREAMED), or Q stays.
//
// Shared memory is SharedStorage in tiles.cuh: Q, pipeline, P, row statistics. The output may pass through the same
// memory at the end (STORE).
#include "mma/epilogue.cuh"
#include "mma/pipeline.cuh"
#include "mma/products.cuh"

// O += P·V of key/value tile j, from its slices of V. With EARLY_V the first one has been acquired.
__device__ __forceinline__ void add_values(State& state, const SlicePipeline& stages,
                                           const Probabilities& probabilities, const FragmentCursor<LayoutP>& p,
                                           const CursorV& v, int j, bool active) {
#pragma unroll
    for (int slice = 0; slice < V_SLICES; ++slice) {
        const int r = K_SLICES + slice;
        if (slice > 0 || !cfg::EARLY_V) stages.acquire(j, r);
        if (active)
            gemm_pv(state, probabilities, p, v, slice % V_ROW_SLICES * PV_STEPS, slice / V_ROW_SLICES * V_SLICE_TILES,
                    stages.stage_of(j, r));
        stages.release(j, r);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, cfg::MIN_BLOCKS) mma_attention(const __grid_constant__ Params p) {
    const OutputTile out_tile(p);
    const Warp warp;
    const int kv_head = out_tile.head / p.group;
    const View<Element> q{p.q + out_tile.batch * p.q_batch + out_tile.head * p.q_head, p.q_row, p.q_column, p.seqlen_q,
                          p.head_dim};
    const View<Element> k{p.k + out_tile.batch * p.k_batch + kv_head * p.k_head, p.k_row, p.k_column, p.seqlen_k,
                          p.head_dim};
    const View<Element> v{p.v + out_tile.batch * p.v_batch + kv_head * p.v_head, p.v_row, p.v_column, p.seqlen_k,
                          p.head_dim_v};
    const Mask mask{p.seqlen_k, p.shift, p.window_left, p.window_right};

    // Key/value tiles that some row of the CTA sees, and the keys that every row sees.
    const int last_row = min(out_tile.row + BLOCK_M, p.seqlen_q) - 1;
    const int first_tile = mask.first(out_tile.row) / BLOCK_N;
    const int tiles = ceil_div(max(mask.end(last_row), 0), BLOCK_N) - first_tile;
    const int unmasked_first = mask.first(last_row), unmasked_end = mask.end(out_tile.row);

    const u32 shared = shared_address(shared_memory), pipeline = shared + PIPELINE_OFFSET;
    const SlicePipeline stages{q, k, v, pipeline, out_tile.row, first_tile, tiles};

    if constexpr (!Q_STREAMED) {
        load_tile<LayoutQ, BLOCK_M, HEAD_DIM, THREADS, cfg::VECTOR>(shared, q, out_tile.row, 0);
        cp_async_commit();
    }
    const FragmentCursor<LayoutQ> q_cursor(shared, warp.row() + warp.lane % 16, warp.lane / 16);
    const __half fold_half = __float2half_rn(p.q_fold);
    const __half2 fold_pair(fold_half, fold_half);
    const u32 fold = *reinterpret_cast<const u32*>(&fold_pair);
    QRegisters q_registers;
    if constexpr (Q_IN_REGISTERS) {
        cp_async_wait<0>();
        __syncthreads();
        read_all_q(q_registers, q_cursor, fold);
        if constexpr (cfg::SHARE_QKV) __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < (STAGES >= 2 ? STAGES - 1 : 1); ++r) stages.load(0, r);

    const int kv_row = warp.kv * S_TILES * 8;
    const FragmentCursor<LayoutK> k_cursor(pipeline + Q_SLICE_BYTES, kv_row + warp.lane % 8 + warp.lane / 16 * 8,
                                           warp.lane / 8 % 2);
    const CursorV v_cursor(pipeline, warp.lane % 16, warp.kv * V_SLICE_TILES + warp.lane / 16);
    const FragmentCursor<LayoutP> p_cursor(shared + p_offset(), warp.row() + warp.lane % 16, warp.lane / 16);

    State state;
    state.reset();

#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
        const int key = (first_tile + j) * BLOCK_N;
        // A warp skips tiles that none of its rows sees, but not their barriers. (In split-kv several warps
        // have a row.)
        const int warp_row = out_tile.row + warp.row();
        const bool active =
            SPLIT_KV || (key < mask.end(warp_row + 16 * M_TILES - 1) && key + BLOCK_N > mask.first(warp_row));
        Scores s;
        if constexpr (K_SLICES == 1) {
            stages.acquire(j, 0);
            if (active) {
                ScoreTiles scores;
                zero(scores);
                gemm_qk(scores, q_registers, q_cursor, k_cursor, 0, stages.stage_of(j, 0), fold);
                unpack_scores(s, scores);
            }
            stages.release(j, 0);
        } else {
            ScoreTiles scores;
            zero(scores);
#pragma unroll 1
            for (int r = 0; r < K_SLICES; ++r) {
                stages.acquire(j, r);
                if (active) gemm_qk(scores, q_registers, q_cursor, k_cursor, r, stages.stage_of(j, r), fold);
                stages.release(j, r);
            }
            unpack_scores(s, scores);
        }
        if constexpr (cfg::EARLY_V) stages.acquire(j, K_SLICES);
        Probabilities probabilities;
        if (active) {
            if (key < unmasked_first || key + BLOCK_N > unmasked_end)
                apply_mask(s, mask, out_tile.row + warp.row() + warp.quad_row, key + kv_row + warp.quad_column * 2);
            online_softmax(s, state, p.scale_log2, warp);
            probabilities.pack(s, warp);
        }
        if constexpr (cfg::EARLY_V && SPLIT_KV) __syncthreads();
        add_values(state, stages, probabilities, p_cursor, v_cursor, j, active);
    }
    store_output(p, out_tile, warp, state);
}
