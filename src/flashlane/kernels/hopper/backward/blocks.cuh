// Which blocks of queries and of keys see each other, and what is kept of a block of queries while dQ is summed.
//
// Keys are cut into blocks of cfg::BLOCK_N, queries into blocks of BLOCK_M.
#pragma once
#include "hopper/backward/rows.cuh"

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Sequence : Rows {
    int k_first, k_length;
    int shift;                     // a query i is aligned with key i + shift

    template <typename Params>
    __device__ __forceinline__ Sequence(const Params& p, int which) : Rows(p, which), k_first(0), k_length(p.seqlen_k) {
        if constexpr (cfg::VARLEN) k_first = p.cu_k[which], k_length = p.cu_k[which + 1] - k_first;
        shift = p.bottom_right ? k_length - q_length : 0;
    }
};

// Blocks low <= block < high.
struct Blocks {
    int low, high;
    __device__ __forceinline__ int count() const { return max(0, high - low); }
};

// The blocks of queries that see a block of `keys` keys from `first` on.
template <typename Params>
__device__ __forceinline__ Blocks queries_of(const Params& p, const Sequence& sequence, int first, int keys) {
    Blocks found{0, ceil_div(sequence.q_length, BLOCK_M)};
    if (cfg::HAS_RIGHT) found.low = max(0, first - sequence.shift - p.window_right) / BLOCK_M;
    if (cfg::HAS_LEFT) {
        const int last = first + keys - 1 - sequence.shift + p.window_left;
        found.high = last < 0 ? 0 : min(found.high, last / BLOCK_M + 1);
    }
    if (sequence.k_length <= first) found.high = 0;
    return found;
}

// The blocks of `keys` keys that see a block of queries: the inverse of queries_of.
template <typename Params>
__device__ __forceinline__ Blocks keys_of(const Params& p, const Sequence& sequence, int block, int keys) {
    const int first = block * BLOCK_M + sequence.shift;
    Blocks found{0, ceil_div(sequence.k_length, keys)};
    if (cfg::HAS_LEFT) found.low = max(0, first - p.window_left) / keys;
    if (cfg::HAS_RIGHT) {
        const int last = first + BLOCK_M - 1 + p.window_right;
        found.high = last < 0 ? 0 : min(found.high, last / keys + 1);
    }
    return found;
}

// The blocks of queries that see any block of keys: they follow each other, as both ends of queries_of only grow.
template <typename Params>
__device__ __forceinline__ Blocks queries_of_all(const Params& p, const Sequence& sequence, int keys) {
    const int last = (ceil_div(sequence.k_length, keys) - 1) * keys;
    return last < 0 ? Blocks{0, 0} : Blocks{queries_of(p, sequence, 0, keys).low, queries_of(p, sequence, last, keys).high};
}

// What is kept of a block of queries while the two parts of its dQ are summed in order; backward_prepare.cu makes it.
struct alignas(32) BlockState {
    int turn[2];                   // of each part: the block of keys that adds next
    int keys_end;                  // the last block of keys that adds, and one
    int unused;
    int batch, head, row, rows;    // where the block's dQ is: its first row, and how many there are to the sequence's end
};

// What the threads of a launch count together: tiles that were taken, parts of dQ whose sums are complete, of these those
// that were taken. And how many parts there are. With CHORES: shares that someone is to fill with zeros, and to finish.
enum Counters { TILES_TAKEN, PARTS_COMPLETE, PARTS_TAKEN, PARTS_ALL, ZEROS_TAKEN, FINISHES_TAKEN, COUNTERS };

// The order of a launch's tiles (of dense tensors): `together` heads take turns at each block of keys, in groups.
struct TileOrder {
    int heads, blocks, together;   // key/value heads of all sequences, blocks of keys of each

    // Tiles of the group before those of a head, and heads that take turns in it.
    __device__ __forceinline__ int first(int head) const { return head / together * together; }
    __device__ __forceinline__ int turns(int head) const { return min(together, heads - first(head)); }
    __device__ __forceinline__ int index(int block, int head) const {
        return first(head) * blocks + block * turns(head) + head - first(head);
    }
    // Tiles of a head among the first so many of the launch.
    __device__ __forceinline__ int before(int head, int tiles) const {
        const int own = index(0, head);
        return tiles <= own ? 0 : min(blocks, (tiles - own - 1) / turns(head) + 1);
    }
};

// A tile's share of the blocks of queries of its key/value head's group, low <= block < high. All tiles of the head have
// them together.
__device__ __forceinline__ Blocks share_of(int tile_block, int tile_blocks, long long all) {
    return {static_cast<int>(all * tile_block / tile_blocks), static_cast<int>(all * (tile_block + 1) / tile_blocks)};
}
// The tile's block of keys that has a block of queries in its share.
__device__ __forceinline__ int owner_of(int block, int tile_blocks, long long all) {
    return static_cast<int>(((block + 1ll) * tile_blocks - 1) / all);
}
