// What the backward kernels share: a launch's parameters, and its tiles.
#pragma once
#include "mbarrier.cuh"
#include "hopper/backward/blocks.cuh"
#include "mma.cuh"
#include "tma.cuh"

constexpr int HEAD_DIM_V = cfg::HEAD_DIM_V;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int CHUNK_COLUMNS = 64, ROW_BYTES = 128;        // tiles lie in chunks of 64 columns; zeros fill the last one
constexpr int WARPGROUP = 128;

struct Params {
    TensorMap q, k, v, dout;       // (column, row, head, batch)
    const float *lse, *delta;      // statistics, see stat_block
    float* dq;                     // sums, see backward_sums.cuh
    void *dk, *dv;                 // (batch, row, head, column)
    const float* alibi;            // (batch, head)
    const int *cu_q, *cu_k;        // VARLEN: first rows of the sequences, and the end of the last
    BlockState* states;            // DETERMINISTIC: of blocks of queries
    int* queue;                    // FINISH_INSIDE: parts of dQ whose sums are complete, in that order; 0 before a launch
    void* dq_out;                  // (batch, row, head, column)
    int* counters;                 // see Counters, and with CUT what arrived of each cut tile; 0 before a launch
    float* partials;               // CUT: dK and dV of the pieces of tiles but the last
    int *zeroed, *added;           // CHORES: of each key/value head, shares whose sums are zeros, and what tiles have added
    int* finished;                 // CHORES: of each tile, 1 when dQ of its share is made
    long long dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, dq_batch, dq_row, dq_head;  // in elements
    long long alibi_batch;
    int batch, heads, kv_heads;
    int seqlen_q, seqlen_k;        // the longest
    int window_left, window_right; // with HAS_LEFT and HAS_RIGHT
    int bottom_right;              // masks align by the last query and key, else by the first
    int stat_blocks;               // blocks of queries of a head (and, of dense tensors, of a sequence)
    int blocks;                    // of keys (or of queries, where blocks of threads have those) of the longest sequence
    int heads_per_section;            // heads whose operands fit the L2 cache at once
    int tiles;                     // of the launch (not VARLEN, but of pairs: of sequences of the greatest length)
    int uncut, pieces;             // CUT: tiles that are not cut, which come first; pieces that each of the others has
    int zeroed_before;             // CHORES: tiles whose share has zeros before the launch
    int finish_until;              // CHORES: how many tiles are taken when nobody begins to make dQ any more
    float scale, scale_log2;       // scale · log2(e)
    float softcap_in, softcap_log2;  // 2 · log2(e) · scale / softcap; softcap · log2(e)
};

// A tile of the launch: a block of keys (or queries) of a head of a sequence; batch −1: no tile is left. Of a cut tile a
// piece: one more than its number among the pieces of all; 0: all of a tile.
struct alignas(16) Place {
    int block, head, batch, piece;
};

// The tile of an index among those of heads with `blocks` each; `batch` and `head` are one number still. Without a mask
// the blocks of a head follow each other; a causal mask leaves the first blocks of keys (and the last of queries) most
// work, so those of some heads come first.
__device__ __forceinline__ Place place_at(const Params& p, int index, int heads, int blocks, bool descending) {
    const int per_group = p.heads_per_section * blocks, group = index / per_group;
    const int inside = index - group * per_group, first = group * p.heads_per_section;
    const int together = min(p.heads_per_section, heads - first), turn = inside / together;
    return {descending ? blocks - 1 - turn : turn, first + inside - turn * together, 0, 0};
}

__device__ __forceinline__ Place place_of(const Params& p, int heads, bool descending) {
    Place place = place_at(p, blockIdx.x, heads * p.batch, p.blocks, descending);
    place.batch = place.head / heads, place.head -= place.batch * heads;
    return place;
}

// Finds the tile of an index, for a thread whose indices only grow; a tile is `keys` keys.
template <bool CUT = false>
struct Finder {
    int batch = 0, before = 0;

    __device__ __forceinline__ Place find(const Params& p, int index, int keys) {
        if constexpr (!cfg::VARLEN) {
            int tile = index, piece = 0;
            if (CUT && index >= p.uncut) {
                piece = index - p.uncut + 1;
                tile = p.uncut + (index - p.uncut) / p.pieces;
            }
            if (tile >= p.tiles) return {0, 0, -1, 0};
            Place place = place_at(p, tile, p.kv_heads * p.batch, p.blocks, false);
            place.batch = place.head / p.kv_heads, place.head -= place.batch * p.kv_heads, place.piece = piece;
            return place;
        } else {
            for (; batch < p.batch; ++batch) {
                const int blocks = ceil_div(p.cu_k[batch + 1] - p.cu_k[batch], keys), tiles = blocks * p.kv_heads;
                if (index < before + tiles) {
                    Place place = place_at(p, index - before, p.kv_heads, blocks, false);
                    place.batch = batch;
                    return place;
                }
                before += tiles;
            }
            return {0, 0, -1, 0};
        }
    }
};

// Zeros for rows of a tile from `row` on: what lies after the end of a packed sequence is another's, or anything.
template <int CHUNKS, int ROWS>
__device__ __forceinline__ void clear_rows(u32 tile, int row, int thread, int threads) {
    const int pieces = (ROWS - row) * (ROW_BYTES / 16);
    for (int i = thread; i < pieces * CHUNKS; i += threads)
        store_shared(tile + i / pieces * (ROWS * ROW_BYTES) + row * ROW_BYTES + i % pieces * 16, make_uint4(0, 0, 0, 0));
}
