// The parameters of the gradient kernels and the sizes of their tiles.
// flashlane.kernels.hopper.backward.launch mirrors Params.
#pragma once
#include "attention/block_list.cuh"
#include "attention/score.cuh"
#include "attention/score_program.cuh"
#include "attention/tile_scheduler.cuh"
#include "hopper/backward/dq_semaphore.cuh"
#include "hopper/backward/gradient_element.cuh"
#include "mbarrier.cuh"
#include "hopper/sequence_rows.cuh"
#include "offsetof.cuh"

constexpr int HEAD_DIM_V = cfg::HEAD_DIM_V;
constexpr int CHUNK_COLUMNS = 64, ROW_BYTES = 128;        // tiles lie in chunks of 64 columns; zeros fill the last one
constexpr int QK_CHUNKS = ceil_div(HEAD_DIM, CHUNK_COLUMNS), V_CHUNKS = ceil_div(HEAD_DIM_V, CHUNK_COLUMNS);
constexpr int WARPGROUP = 128;

struct PlainParams {
    TensorMap q, k, v, dout;       // (column, row, head, batch); VARLEN: see sequence_rows.cuh
    TensorMap dk_map, dv_map;      // of dK and dV, where these are stored by TMA
    SeqlenParams seqlen;
    ScoreParams score;
    const float *lse, *delta;      // row statistics, see first_row_block
    float* dq_accum;               // sums of dQ, see dq_accumulate.cuh
    void *dk, *dv, *dq;            // (batch, row, head, column)
    DqSemaphore* semaphores;       // one for each m-block, where additions to dQ have an order
    int* counters;                 // see Counters; VARLEN: then the sequences in the order of their tiles, those with
                                   // most queries first; then arrivals of the splits of each split tile. Counters
                                   // and arrivals are 0 before a launch
    float* partials;               // split-Q: dK and dV of all splits of a tile but the last
    int *zeroed, *added;           // in-kernel dQ, by key/value head: tiles whose m-blocks are zeroed; that have added
    int* written;                  // in-kernel dQ: for each tile, 1 when dQ of its m-blocks is written
    long long dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, dq_batch, dq_row, dq_head;  // in elements
    int heads, kv_heads;
    int window_left, window_right; // with HAS_LEFT and HAS_RIGHT
    int row_blocks;                // m-blocks of a head (and, of dense tensors, of a sequence)
    int blocks;                    // n-blocks of the longest sequence that are tiles (dq.cu: its m-blocks)
    int heads_per_section;         // heads whose operands fit the L2 cache at once
    int tiles;                     // of the launch; VARLEN: each sequence counted as the longest, and not read
    int first_tiles, splits;       // split-Q: tiles that come first, see tile_split; splits of each split tile
    int zeroed_before;             // in-kernel dQ: tiles whose m-blocks the preprocess kernel zeroes
    int write_until;               // in-kernel dQ: when this many tiles are taken, no warp starts to write dQ any more
    float scale;
    int first_block;               // HAS_LEFT, dense tensors: n-blocks before the first one that is a tile
    BlockLists lists;              // BLOCK_LISTS: the m-blocks of each n-block
    ProgramParams program;
};
struct Params : PlainParams, Optional<cfg::QUERY_RANGES, QueryRanges> {};
static_assert(!cfg::QUERY_RANGES || !(cfg::VARLEN || cfg::BLOCK_LISTS));

// Where the queries and the keys of a sequence lie, and how their boxes are copied.
__device__ __forceinline__ SequenceRows query_rows(const QuerySeqlen& of) {
    return {of.q_first, of.q_length, of.q_batch};
}
__device__ __forceinline__ SequenceRows key_rows(const Seqlen& of) { return {of.k_first, of.k_length, of.k_batch}; }
constexpr bool PACKED_ROWS = cfg::VARLEN;

constexpr int MASK_UNITS = ceil_div(BLOCK_M, UNIT);  // of an m-block, with MASK_BITS
static_assert(!cfg::MASK_BITS || (cfg::BLOCK_LISTS && BLOCK_M % UNIT == 0 && !Program::HAS_MASK));
// Whether a program or block lists take part in the probabilities, and not only score modifiers and a window.
constexpr bool BY_PROGRAM = cfg::BLOCK_LISTS || Program::HAS_SCORE;
