// The order of a launch's work tiles, and which tile an index stands for.
//
// L2 head swizzle: heads are taken in sections whose K and V (or Q and dO) fit the L2 cache at once. Inside a section
// the tiles of one block index follow each other, head by head. Under a causal mask the blocks with most work come
// first: the last blocks of queries, or the first blocks of keys.
#pragma once
#include "math.cuh"

struct SwizzledTile {
    int block, head;               // `head` counts the heads of all sequences of the launch; the caller divides it
};

// Index may be unsigned (from blockIdx), which makes the first division cheaper.
template <bool DESCENDING, typename Index>
__device__ __forceinline__ constexpr SwizzledTile swizzled_tile(Index index, int heads, int blocks,
                                                                int heads_per_section) {
    const int tiles_per_section = heads_per_section * blocks, section = index / tiles_per_section;
    const int inside = index - section * tiles_per_section, first_head = section * heads_per_section;
    const int section_heads = constant_min(heads_per_section, heads - first_head), row = inside / section_heads;
    return {DESCENDING ? blocks - 1 - row : row, first_head + inside - row * section_heads};
}

// Packed sequences: finds the sequence that holds the tile with an index. The index must not decrease from
// call to call.
//
// A warp searches 32 sequences at a time, a thread one: in a kernel whose scheduler is one thread the other lanes do
// not take part.
struct VarlenSearchByWarp {
    int first_batch = 0, tiles_before = 0;

    struct SequenceTile {
        int batch, index, blocks;  // index within the sequence; batch −1: no tile is left, and tiles_before counts all
    };
    // blocks_of(batch): m-blocks of a sequence. Each stands for `tiles_per_block` tiles.
    template <typename BlocksOf>
    __device__ __forceinline__ SequenceTile find(int index, int sequences, int tiles_per_block,
                                                 const BlocksOf& blocks_of) {
        const int lane = threadIdx.x % WARP;
        for (; first_batch < sequences; first_batch += WARP) {
            const int batch = first_batch + lane;
            int blocks = 0;
            if (batch < sequences) blocks = blocks_of(batch);
            const int tiles = blocks * tiles_per_block, end = warp_inclusive_sum(tiles);
            const u32 after = __ballot_sync(0xffffffffu, index < tiles_before + end);
            if (after != 0) {
                const int owner = __ffs(after) - 1;
                const int start = tiles_before + __shfl_sync(0xffffffffu, end - tiles, owner);
                blocks = __shfl_sync(0xffffffffu, blocks, owner);
                return {first_batch + owner, index - start, blocks};
            }
            tiles_before += __shfl_sync(0xffffffffu, end, WARP - 1);
        }
        return {-1, 0, 0};
    }
};

struct VarlenSearchByThread {
    int batch = 0, tiles_before = 0;

    // As above; tiles_of(batch) counts the tiles of a sequence.
    template <typename BlocksOf>
    __device__ __forceinline__ VarlenSearchByWarp::SequenceTile find(int index, int sequences, int tiles_per_block,
                                                                     const BlocksOf& blocks_of) {
        for (; batch < sequences; ++batch) {
            const int blocks = blocks_of(batch), tiles = blocks * tiles_per_block;
            if (index < tiles_before + tiles) return {batch, index - tiles_before, blocks};
            tiles_before += tiles;
        }
        return {-1, 0, 0};
    }
};
