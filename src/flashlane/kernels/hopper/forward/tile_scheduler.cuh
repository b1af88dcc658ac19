// Which work tile an index stands for. flashlane.kernels.hopper.forward.tile_scheduler mirrors it.
#pragma once
#include "attention/tile_scheduler.cuh"
#include "hopper/forward/params.cuh"

// For one warp whose indices only grow.
struct TileScheduler {
    const Params& p;
    int total;                     // tiles of the launch; VARLEN: known when the last one was asked for
    VarlenSearchByWarp search;

    __device__ __forceinline__ explicit TileScheduler(const Params& params)
        : p(params), total(cfg::VARLEN ? 0 : params.tiles) {}

    // Tile `index` of `heads` heads with `m_blocks` m-blocks each; the head is counted among them.
    __device__ __forceinline__ WorkTile swizzled(int index, int heads, int m_blocks) const {
        WorkTile tile;
        tile.split_or_listed = 0;
        if constexpr (cfg::SPLIT) tile.split_or_listed = index % p.splits, index /= p.splits;
        const SwizzledTile block_and_head = swizzled_tile<true>(index, heads, m_blocks, p.heads_per_section);
        tile.row = block_and_head.block * BLOCK_M, tile.head = block_and_head.head;
        return tile;
    }
    __device__ __forceinline__ WorkTile tile_of(int index) {
        WorkTile tile{-1, 0, 0, 0};
        if constexpr (!cfg::VARLEN) {
            if (index >= p.tiles) return tile;
            tile = swizzled(index, p.seqlen.batch * p.heads, p.m_blocks);
            const int flat = tile.head;
            tile.batch = flat / p.heads;
            tile.head = flat - tile.batch * p.heads;
            if constexpr (cfg::BLOCK_LISTS) {
                const int2 listed = p.lists.at(tile.batch, tile.tile_head(), p.m_blocks - 1 - tile.row / BLOCK_M);
                tile.row = listed.x * BLOCK_M, tile.split_or_listed = listed.y;
            }
        } else {
            // The rows after the last sequence are one more, but for those of RANGES.
            const auto m_blocks_of = [&](int batch) {
                return ceil_div(Seqlen(p.seqlen, batch).q_length * PACK_GQA, BLOCK_M);
            };
            const auto of_sequence = search.find(index, p.seqlen.batch + !cfg::RANGES, p.heads * p.splits, m_blocks_of);
            if (of_sequence.batch < 0) {
                total = search.tiles_before;
                return tile;
            }
            tile = swizzled(of_sequence.index, p.heads, of_sequence.blocks);
            tile.batch = of_sequence.batch;
        }
        return tile;
    }
};
