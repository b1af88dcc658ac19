// Assigns m-blocks of dQ to tiles (dense tensors only). In the launch that accumulates dQ, idle warps zero dq_accum and
// write dQ for the m-blocks of one tile at a time.
//
// The m-blocks of all query heads of a key/value head are divided evenly among the head's tiles: a tile is assigned
// low <= m-block < high of them.
#pragma once
#include "attention/block_range.cuh"

// The order of a launch's tiles: the inverse of swizzled_tile (attention/tile_scheduler.cuh).
struct TileOrder {
    int heads, n_blocks, heads_per_section;  // key/value heads of all sequences; n-blocks of each

    // The first head of a head's section, and the heads of that section.
    __device__ __forceinline__ constexpr int first_head(int head) const {
        return head / heads_per_section * heads_per_section;
    }
    __device__ __forceinline__ constexpr int section_heads(int head) const {
        return constant_min(heads_per_section, heads - first_head(head));
    }
    __device__ __forceinline__ constexpr int index(int n_block, int head) const {
        return first_head(head) * n_blocks + n_block * section_heads(head) + head - first_head(head);
    }
    // How many of the first `tiles` tiles of the launch belong to `head`.
    __device__ __forceinline__ constexpr int tiles_before(int head, int tiles) const {
        const int own = index(0, head);
        return tiles <= own ? 0 : constant_min(n_blocks, (tiles - own - 1) / section_heads(head) + 1);
    }
};

__device__ __forceinline__ constexpr BlockRange assigned_m_blocks(int n_block, int n_blocks, long long m_blocks) {
    return {static_cast<int>(m_blocks * n_block / n_blocks), static_cast<int>(m_blocks * (n_block + 1) / n_blocks)};
}
// In-kernel zeros: the tile whose m-blocks are zeroed by the CTA that takes tile `taken`. `own`: the first tiles of the
// launch, which CTAs have without taking them, and for which they zero nothing.
__device__ __forceinline__ constexpr int tile_to_zero(int taken, int own, int zeroed_before) {
    return taken - own + zeroed_before;
}
// The n-block of the tile to which an m-block is assigned.
__device__ __forceinline__ constexpr int assigned_n_block(int m_block, int n_blocks, long long m_blocks) {
    return static_cast<int>(((m_block + 1ll) * n_blocks - 1) / m_blocks);
}
