// The semaphores of an m-block, by which n-blocks add to its dQ in order, and the counters of a launch. The preprocess
// kernel initialises both.
#pragma once
#include "attention/block_range.cuh"
#include "hopper/backward/row_blocks.cuh"

using TileMask = WindowMask<side(cfg::HAS_LEFT), side(cfg::HAS_RIGHT)>;

template <typename Params>
__device__ __forceinline__ TileMask tile_mask(const Params& p, const Seqlen& seqlen) {
    return {seqlen.k_length, seqlen.shift, p.window_left, p.window_right};
}

struct alignas(32) DqSemaphore {
    int next_n_block[cfg::DQ_SEMAPHORES];  // for each part that is added by itself, the n-block whose addition is next
    int n_block_end;               // the last n-block that adds, plus one
    int unused;
    int batch, head, row, rows;    // where the m-block's dQ lies: first row, and rows from there to the sequence's end
};

// Counters of a launch.
enum Counters {
    TILES_TAKEN,                   // work tiles that a CTA or a cluster has taken
    SLICES_COMPLETE,               // slices of dq_accum with all additions: the length of the postprocess queue
    SLICES_TAKEN,                  // entries of that queue that a postprocess warp has taken
    SLICES_ALL,                    // slices to which any n-block adds
    ZEROING_TAKEN,                 // in-kernel dQ: tiles whose m-blocks a warp has taken for zeroing
    POSTPROCESS_TAKEN,             // in-kernel dQ: tiles whose m-blocks a warp has taken for writing dQ
    COUNTERS
};
