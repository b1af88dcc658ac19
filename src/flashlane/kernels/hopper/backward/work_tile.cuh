// A work tile: an n-block of a key/value head of a sequence, and the m-blocks that see it.
#pragma once
#include "hopper/backward/params.cuh"

constexpr int NO_TILE = -1;

struct TileCoordinates {
    int n_block, head, batch;      // key/value head; batch NO_TILE: no tile is left
    int split_or_listed;           // see split() and listed()

    // Split-Q: the split's index among the splits of all tiles, plus one; 0: the whole tile.
    __device__ __forceinline__ int split() const { return split_or_listed; }
    // BLOCK_LISTS, whose tiles are not split: the number of steps in the tile's lists.
    __device__ __forceinline__ int listed() const { return split_or_listed; }
};

// The tile at an index of the launch's order, where the grid is that of dense tensors or of the longest sequence.
__device__ __forceinline__ TileCoordinates dense_tile(const Params& p, int index) {
    const SwizzledTile tile = swizzled_tile<false>(index, p.kv_heads * p.seqlen.batch, p.blocks, p.heads_per_section);
    const int batch = tile.head / p.kv_heads;
    if constexpr (cfg::BLOCK_LISTS) {
        const int kv_head = tile.head - batch * p.kv_heads;
        const int2 listed = p.lists.at(batch, kv_head, tile.block);
        return {listed.x, kv_head, batch, listed.y};
    }
    return {tile.block + (cfg::HAS_LEFT ? p.first_block : 0), tile.head - batch * p.kv_heads, batch, 0};
}

// Finds the tiles of packed sequences by their indices in the launch's order, which must not decrease. A sequence has
// as many tiles as its own keys fill. Sequences with long tiles come first, so that the last tiles are short.
struct PackedTileSearch {
    VarlenSearchByThread search;

    static __device__ __forceinline__ int sequence(const Params& p, int place) { return p.counters[COUNTERS + place]; }
    __device__ __forceinline__ TileCoordinates tile(const Params& p, int index, int keys) {
        const auto n_blocks = [&](int i) {
            const int batch = sequence(p, i);
            return ceil_div(p.seqlen.cu_seqlens_k[batch + 1] - p.seqlen.cu_seqlens_k[batch], keys);
        };
        const auto of_sequence = search.find(index, p.seqlen.batch, p.kv_heads, n_blocks);
        if (of_sequence.batch < 0) return {0, 0, NO_TILE, 0};
        const SwizzledTile tile = swizzled_tile<false>(of_sequence.index, p.kv_heads, of_sequence.blocks,
                                                        p.heads_per_section);
        return {tile.block, tile.head, sequence(p, of_sequence.batch), 0};
    }
};

// The keys of a tile, and the steps that it takes: for each query head of the group, the m-blocks that see the keys.
struct WorkTile {
    int batch, kv_head, first_key, group;
    Seqlen seqlen;
    BlockRange m_blocks;           // QUERY_RANGES: of the first range
    BlockRange more_m_blocks{0, 0};  // QUERY_RANGES: of the second range

    // The tile's `keys` keys may be divided among the CTAs of a cluster: this CTA's begin at `offset`.
    __device__ __forceinline__ WorkTile(const Params& p, const TileCoordinates& at, int keys, int offset = 0)
        : batch(at.batch), kv_head(at.head), first_key(at.n_block * keys + offset), group(p.heads / p.kv_heads),
          seqlen(p.seqlen, at.batch),
          m_blocks(m_blocks_of(p, at, keys, 0)) {
        if constexpr (cfg::QUERY_RANGES) more_m_blocks = m_blocks_of(p, at, keys, 1);
    }
    // Of a query head.
    __device__ __forceinline__ int all_m_blocks() const {
        return cfg::QUERY_RANGES ? m_blocks.count() + more_m_blocks.count() : m_blocks.high - m_blocks.low;
    }
    __device__ __forceinline__ int steps() const {
        return (cfg::QUERY_RANGES ? all_m_blocks() : m_blocks.count()) * group;
    }
    // Computed at each use: as a member it would keep the window in registers, and the producer would spill.
    __device__ __forceinline__ TileMask mask(const Params& p) const { return tile_mask(p, seqlen); }

private:
    __device__ __forceinline__ BlockRange m_blocks_of(const Params& p, const TileCoordinates& at, int keys,
                                                      int range) const {
        const Seqlen of = cfg::QUERY_RANGES ? seqlen_of(p, batch, range) : seqlen;
        return m_block_range<BLOCK_M>(tile_mask(p, of), of.q_length, at.n_block * keys, keys);
    }
};

// A step of a tile: a query head of the group, and one of its m-blocks.
struct Step {
    const WorkTile& tile;
    int head, m_block;

    __device__ __forceinline__ explicit Step(const WorkTile& of)
        : tile(of), head(of.kv_head * of.group), m_block(of.m_blocks.low) {}
    __device__ __forceinline__ void next() {
        if (++m_block == tile.m_blocks.high) m_block = tile.m_blocks.low, ++head;
    }
};
