// Lists of blocks: the blocks that a tile steps through where its mask is not a range of blocks. A forward tile has a
// list of n-blocks, a backward tile a list of the m-blocks that see its keys. flashlane.kernels.hopper.block_lists
// builds them and mirrors BlockLists.
#pragma once
#include "attention/block_state.cuh"
#include "ptx.cuh"

// The bits of a mask, in units of 64 queries and 64 keys. A unit that is neither hidden nor visible as a whole has a
// slot; a slot has 64 words of 64 bits.
enum UnitSlot { UNIT_NONE = -1, UNIT_FULL = -2 };
constexpr int UNIT = 64;

struct MaskBits {
    const int* slots;              // (batch, head, query unit, key unit): a slot, or a UnitSlot; null: a program's mask
    const uint2* words;            // (slot, row): a row's columns; rows are queries (forward) or keys (backward)
    int batch, head;               // from one batch row or head to the next, in units: 0 where all have the same
    int columns;                   // key units

    __device__ __forceinline__ int slot(int of_batch, int of_head, int query_unit, int key_unit) const {
        return slots[static_cast<long long>(of_batch) * batch + static_cast<long long>(of_head) * head +
                     static_cast<long long>(query_unit) * columns + key_unit];
    }
    // The 64 columns of a row of a unit.
    __device__ __forceinline__ uint2 row(int slot, int row) const {
        if (slot < 0) return slot == UNIT_FULL ? make_uint2(~0u, ~0u) : make_uint2(0u, 0u);
        return words[static_cast<long long>(slot) * UNIT + row];
    }
};

// An entry of a list: a block; its BlockState for each of up to four groups of 64 rows of the tile, two bits each; and
// for each group whether it is the last block in which they see anything, in the order in which the forward steps
// through the list.
struct ListedBlock {
    int word;

    static constexpr int STATE_BITS = 12, LAST = 8;
    __device__ __forceinline__ int block() const { return word >> STATE_BITS; }
    __device__ __forceinline__ int state(int rows) const { return word >> 2 * rows & 3; }
    __device__ __forceinline__ bool last(int rows) const { return word >> (LAST + rows) & 1; }
};

struct BlockLists {
    const int *counts, *entries;   // (batch, head, tile) and (batch, head, tile, entry); heads are those of queries
    const int* ranks;              // like entries, with additions in order: which addition to its m-block's dQ it is
    const int2* order;             // (batch, tile head, position): a tile, and the steps that it takes
    int batch, head;               // from one batch row or head to the next, in tiles: 0 where all have the same lists
    int order_batch, order_head;   // of `order`, in positions
    int pitch;                     // entries allocated for each tile
    MaskBits bits;

    __device__ __forceinline__ long long row(int of_batch, int of_head, int tile) const {
        return static_cast<long long>(of_batch) * batch + static_cast<long long>(of_head) * head + tile;
    }
    __device__ __forceinline__ int2 at(int of_batch, int tile_head, int position) const {
        return order[static_cast<long long>(of_batch) * order_batch + static_cast<long long>(tile_head) * order_head +
                     position];
    }
};
