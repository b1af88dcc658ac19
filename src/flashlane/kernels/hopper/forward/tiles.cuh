// What the Hopper forward kernel is given, and how a call is cut into tiles. flashlane.kernels.hopper.forward.tile_scheduler mirrors it.
//
// A tile is BLOCK_M rows of one tile head and its range of key blocks. A tile head stands for PACK query heads of one
// key/value head: its row r is query r / PACK of query head `head * PACK + r % PACK`. PACK is 1, or all heads of a group
// (short queries then fill a tile and share the loads of K and V). Where v is wider than an accumulator, a tile has one of
// SLICES parts of its columns, and slices of one head count as neighbouring tile heads.
#pragma once
#include "config.cuh"
#include "hopper/forward/combine.cuh"
#include "tma.cuh"

constexpr int BLOCK_M = cfg::BLOCK_M, BLOCK_N = cfg::BLOCK_N, PACK = cfg::PACK, SLICES = cfg::SLICES;
static_assert(BLOCK_M % PACK == 0);

// Rows of K or V as they lie in memory, for GATHER; strides in elements.
struct Rows {
    const void* data;
    long long page, row, head;
};

struct Params {
    TensorMap q, k, v;             // q (column, packed head, row, tile head, batch); k, v (column, row, head, batch)
    void* out;                     // (split, batch, row, head, column); f32 when SPLIT, else the operands' type
    float* lse;                    // (split, batch, head, row); null where it is not wanted, without SPLIT
    const float *alibi, *sinks;    // (batch, head), (head)
    const int *cu_q, *cu_k;        // VARLEN: first rows of the sequences, and the end of the last
    const int *used_k, *leftpad_k, *batch_idx;  // CACHE: null, or by sequence
    const int* pages;              // PAGED: (sequence, page)
    int* counter;                  // tiles taken beyond the first of each block; 0 before and after a launch
    long long out_split, out_batch, out_row, out_head;  // strides, in elements
    long long lse_split, lse_batch, lse_head;
    long long alibi_batch, pages_row;
    Rows k_rows, v_rows;           // GATHER
    Combine join;                  // FUSED
    int batch, heads, group;       // tile heads (and slices); tile heads (without) that share a key/value head
    int seqlen_q, seqlen_k;        // VARLEN: seqlen_q is the number of rows of q
    int window_left, window_right; // with HAS_LEFT and HAS_RIGHT
    int bottom_right;              // masks align by the last query and key, else by the first
    int q_blocks;                  // of a sequence (not VARLEN)
    int heads_per_section;            // tile heads whose K and V fit the L2 cache at once
    int splits;                    // parts that a tile's keys are cut into
    int tiles;                     // of the launch (not VARLEN)
    int page_size;
    float scale_log2;              // scale · log2(e)
    float softcap_in, softcap_log2;  // 2 · log2(e) · scale / softcap; softcap · log2(e)
};

struct alignas(16) Tile {
    int batch, head, row, split;   // row: the first, counted within the sequence; batch −1: no tile is left
};

__device__ __forceinline__ int head_of(const Tile& tile) { return SLICES == 1 ? tile.head : tile.head / SLICES; }
__device__ __forceinline__ int slice_of(const Tile& tile) { return SLICES == 1 ? 0 : tile.head % SLICES; }

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where a tile's sequence lies, and how long it is.
struct Sequence {
    int q_first, q_length, q_batch;
    int k_first, k_length, k_batch;
    int shift;                     // a query i is aligned with key i + shift

    __device__ __forceinline__ Sequence(const Params& p, int batch) {
        q_first = 0, q_length = p.seqlen_q, q_batch = batch;
        k_first = 0, k_length = p.seqlen_k, k_batch = batch;
        if constexpr (cfg::VARLEN) {
            // The rows after the last sequence count as one more, without keys.
            const bool rest = batch == p.batch;
            q_first = p.cu_q[batch], q_batch = 0;
            q_length = (rest ? p.seqlen_q : p.cu_q[batch + 1]) - q_first;
            k_first = rest ? 0 : p.cu_k[batch], k_batch = 0;
            k_length = rest ? 0 : p.cu_k[batch + 1] - k_first;
            if (cfg::PAGED) k_first = 0, k_batch = batch;
        } else if constexpr (cfg::CACHE) {
            const int stop = p.used_k == nullptr ? p.seqlen_k : max(0, min(p.used_k[batch], p.seqlen_k));
            k_first = p.leftpad_k == nullptr ? 0 : max(0, min(p.leftpad_k[batch], stop));
            k_length = stop - k_first;
            if (p.batch_idx != nullptr) k_batch = p.batch_idx[batch];
        }
        shift = p.bottom_right ? k_length - q_length : 0;
    }

    // Keys that a query may see: first <= key < end (end may be negative).
    __device__ __forceinline__ int first_key(const Params& p, int query) const {
        return cfg::HAS_LEFT ? max(0, query + shift - p.window_left) : 0;
    }
    __device__ __forceinline__ int end_key(const Params& p, int query) const {
        return cfg::HAS_RIGHT ? min(k_length, query + shift + p.window_right + 1) : k_length;
    }
};

// Blocks of BLOCK_N keys: low <= block < high.
struct Blocks {
    int low, high;
    __device__ __forceinline__ bool empty() const { return high <= low; }
};

// The blocks in which some of `rows` rows from `row` on see a key.
__device__ __forceinline__ Blocks blocks_of(const Params& p, const Sequence& sequence, int row, int rows) {
    const int first_query = row / PACK, last_query = min((row + rows - 1) / PACK, sequence.q_length - 1);
    const int low = sequence.first_key(p, first_query), end = sequence.end_key(p, last_query);
    if (last_query < first_query || end <= low) return {0, 0};
    return {low / BLOCK_N, ceil_div(end, BLOCK_N)};
}

// Blocks of each part of a tile's keys; the last part may have fewer, and parts after it none.
__device__ __forceinline__ int part_size(const Params& p, const Blocks& all) { return ceil_div(all.high - all.low, p.splits); }

// The blocks of a tile: of all its rows, and of its part of the keys.
__device__ __forceinline__ Blocks blocks_of(const Params& p, const Sequence& sequence, const Tile& tile) {
    Blocks all = blocks_of(p, sequence, tile.row, BLOCK_M);
    if constexpr (cfg::SPLIT) {
        const int size = part_size(p, all);
        all.low += tile.split * size;
        all.high = min(all.high, all.low + size);
    }
    return all;
}

// The tile of an index among those of heads with `q_blocks` tiles each: heads in groups that fit the L2 cache together;
// in a group the last rows, which a causal mask leaves most work, come first.
__device__ __forceinline__ Tile tile_of(const Params& p, int index, int heads, int q_blocks) {
    Tile tile;
    tile.split = 0;
    if constexpr (cfg::SPLIT) tile.split = index % p.splits, index /= p.splits;
    const int per_group = p.heads_per_section * q_blocks, group = index / per_group, inside = index - group * per_group;
    const int first = group * p.heads_per_section, together = min(p.heads_per_section, heads - first);
    const int turn = inside / together;
    tile.row = (q_blocks - 1 - turn) * BLOCK_M;
    tile.head = first + inside - turn * together;  // of all sequences; the caller takes them apart
    return tile;
}

// Finds the tile of an index, for one warp whose indices only grow.
struct Finder {
    int first_batch = 0, tiles_before = 0;
    int total;

    __device__ __forceinline__ explicit Finder(const Params& p) { total = cfg::VARLEN ? 0 : p.tiles; }

    __device__ __forceinline__ Tile find(const Params& p, int index) {
        Tile tile{-1, 0, 0, 0};
        if constexpr (!cfg::VARLEN) {
            if (index >= p.tiles) return tile;
            tile = tile_of(p, index, p.batch * p.heads, p.q_blocks);
            const int flat = tile.head;
            tile.batch = flat / p.heads;
            tile.head = flat - tile.batch * p.heads;
            return tile;
        } else {
            // 32 sequences at a time; lane by lane their tiles, then a sum over the lanes before.
            const int lane = threadIdx.x % WARP;
            for (; first_batch <= p.batch; first_batch += WARP) {
                const int batch = first_batch + lane;
                int q_blocks = 0;
                if (batch <= p.batch) q_blocks = ceil_div(Sequence(p, batch).q_length * PACK, BLOCK_M);
                const int tiles = q_blocks * p.heads * p.splits;
                int end = tiles;
#pragma unroll
                for (int step = 1; step < WARP; step *= 2) {
                    const int before = __shfl_up_sync(0xffffffffu, end, step);
                    if (lane >= step) end += before;
                }
                const u32 after = __ballot_sync(0xffffffffu, index < tiles_before + end);
                if (after != 0) {
                    const int owner = __ffs(after) - 1;
                    const int start = tiles_before + __shfl_sync(0xffffffffu, end - tiles, owner);
                    q_blocks = __shfl_sync(0xffffffffu, q_blocks, owner);
                    tile = tile_of(p, index - start, p.heads, q_blocks);
                    tile.batch = first_batch + owner;
                    return tile;
                }
                tiles_before += __shfl_sync(0xffffffffu, end, WARP - 1);
            }
            total = tiles_before;
            return tile;
        }
    }
};
