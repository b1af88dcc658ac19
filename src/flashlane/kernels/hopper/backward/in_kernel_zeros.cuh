// In-kernel zeroing of dq_accum (dense tensors only). Zeros that the preprocess kernel writes go to device memory, from
// which the first additions read them again. So the gradients' kernel writes those of later heads itself, while other
// heads have their products: they stay in the L2 cache until the sums are complete.
//
// Each tile is assigned some m-blocks of its head (dq_assignment.cuh). The CTA that takes a tile zeroes the m-blocks of
// the tile `zeroed_before` tiles later, and a tile waits for the zeros of its whole head. `zeroed_before` is more tiles
// than a section of heads has, and tiles are taken in their order: so a tile waits only for CTAs that took one before
// it, and these have an SM.
#pragma once
#include "attention/semaphore.cuh"
#include "hopper/backward/dq_accumulate.cuh"
#include "hopper/backward/dq_assignment.cuh"
#include "hopper/backward/params.cuh"
#include "memory_order.cuh"

constexpr int ZEROING_CTAS = cfg::ZEROING_CTAS;           // that share the m-blocks of a tile; 0: preprocess.cu has all
constexpr int ZEROS_AT_ONCE = 4;                          // stores of a warp, between which it pauses:
constexpr unsigned BETWEEN_ZEROS = 250;                   // ns

// The m-blocks of dq_accum that are assigned to a tile of the launch.
struct AssignedBlocks {
    const Params& p;

    // The tile's n-block and head; the head counts those of all sequences.
    __device__ __forceinline__ SwizzledTile at(int tile) const {
        return swizzled_tile<false>(tile, p.kv_heads * p.seqlen.batch, p.blocks, p.heads_per_section);
    }
    // The index of the tile of an n-block and a head.
    __device__ __forceinline__ int index(int n_block, int head) const {
        return TileOrder{p.kv_heads * p.seqlen.batch, p.blocks, p.heads_per_section}.index(n_block, head);
    }
    __device__ __forceinline__ long long head_m_blocks() const {
        return static_cast<long long>(p.heads / p.kv_heads) * p.row_blocks;
    }
    // The head's first m-block among those of all heads.
    __device__ __forceinline__ long long first_m_block(const SwizzledTile& at) const {
        return static_cast<long long>(at.head) * (p.heads / p.kv_heads) * p.row_blocks;
    }
    __device__ __forceinline__ BlockRange assigned(const SwizzledTile& at) const {
        return assigned_m_blocks(at.block, p.blocks, head_m_blocks());
    }
    // Zeroes the `part`-th of PARTS equal parts of a tile's m-blocks, by a warp. Until `has_waiting_tile()` it pauses
    // between stores, as those of the consumers would wait behind them.
    template <int PARTS, typename HasWaitingTile>
    __device__ __forceinline__ void zero(int tile, int part, const HasWaitingTile& has_waiting_tile) const {
        const SwizzledTile where = at(tile);
        const BlockRange m_blocks = assigned(where);
        const int lane = threadIdx.x % WARP;
        const long long floats = static_cast<long long>(m_blocks.count()) * (DQ_ACCUM_FLOATS / PARTS);
        static_assert(DQ_ACCUM_FLOATS % (PARTS * 4 * WARP) == 0);
        float* const first = p.dq_accum + (first_m_block(where) + m_blocks.low) * DQ_ACCUM_FLOATS + part * floats;
        float4* to = reinterpret_cast<float4*>(first) + lane;
        float4* const end = to + floats / 4;
        bool pauses = true;
        for (; to < end; to += ZEROS_AT_ONCE * WARP) {
#pragma unroll
            for (int i = 0; i < ZEROS_AT_ONCE; ++i)
                if (to + i * WARP < end) __stcg(to + i * WARP, make_float4(0.f, 0.f, 0.f, 0.f));
            pauses = pauses && !uniform(has_waiting_tile());
            if (pauses) __nanosleep(BETWEEN_ZEROS);
        }
        fence_proxy_async_global();                       // for additions by TMA
        __syncwarp();
        if (lane == 0) semaphore_add(p.zeroed + where.head, 1);
    }
    // Zeroes the m-blocks of the later tile that a CTA zeroes when it has taken the tile of an n-block and a head.
    template <int PARTS, typename HasWaitingTile>
    __device__ __forceinline__ void zero_ahead(
        int n_block, int head, int part, int own, const HasWaitingTile& has_waiting_tile) const {
        const int tile = tile_to_zero(index(n_block, head), own, p.zeroed_before);
        if (tile < p.tiles) zero<PARTS>(tile, part, has_waiting_tile);
    }
    // Waits for the zeros of a head.
    __device__ __forceinline__ void wait_for_zeros(int head) const {
        semaphore_wait(p.zeroed + head, max(1, ZEROING_CTAS) * p.blocks);
    }
};
