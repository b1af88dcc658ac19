// Lists of blocks: what a tile walks over where its mask is no range of blocks. A forward tile has n-blocks, a backward tile of
// keys the m-blocks that see them. flashlane.kernels.hopper.flex.lists makes them and mirrors BlockLists.
#pragma once
#include "ptx.cuh"

// What 64 rows of a tile see of a block.
enum BlockState { BLOCK_NONE, BLOCK_PARTIAL, BLOCK_FULL };

// An entry: a block, and its state for each 64 rows of the tile, two bits each.
struct ListedBlock {
    int word;

    static constexpr int STATE_BITS = 8;
    __device__ __forceinline__ int block() const { return word >> STATE_BITS; }
    __device__ __forceinline__ int state(int rows) const { return word >> 2 * rows & 3; }
};

struct BlockLists {
    const int *counts, *entries;   // (batch, head, tile) and (batch, head, tile, entry); heads are those of queries
    const int* ranks;              // like entries: which addition to its m-block's dQ an entry makes; only with additions in order
    const int2* order;             // (batch, tile head, position): a tile, and the steps that it takes; the longest come first
    int batch, head;               // from one batch row or head to the next, in tiles: 0 where all have the same lists
    int order_batch, order_head;   // of `order`, in positions
    int pitch;                     // entries that a tile has room for

    __device__ __forceinline__ long long row(int of_batch, int of_head, int tile) const {
        return static_cast<long long>(of_batch) * batch + static_cast<long long>(of_head) * head + tile;
    }
    __device__ __forceinline__ int2 at(int of_batch, int tile_head, int position) const {
        return order[static_cast<long long>(of_batch) * order_batch + static_cast<long long>(tile_head) * order_head + position];
    }
};
