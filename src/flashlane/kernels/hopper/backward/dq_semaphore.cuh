// The semaphores of an m-block, by which n-blocks add to its dQ in order, and the counters of a launch. The preprocess
// kernel initialises both.
#pragma once
#include "attention/block_range.cuh"
#include "hopper/backward/row_blocks.cuh"
#include "memory_order.cuh"

using TileMask = WindowMask<side(cfg::HAS_LEFT), side(cfg::HAS_RIGHT)>;

template <typename Params>
__device__ __forceinline__ TileMask tile_mask(const Params& p, const Seqlen& seqlen) {
    return {seqlen.k_length, seqlen.shift, p.window_left, p.window_right};
}

struct alignas(32) DqSemaphore {
    // For each part that is added by itself: the n-block whose addition is next, and before the first one ~n-block.
    int next_n_block[cfg::DQ_SEMAPHORES];
};

// Whether an n-block may add. The first one stores its dQ in place of adding it, so that nobody writes
// zeros before.
__device__ __forceinline__ bool may_add(int next_n_block, int n_block) {
    return next_n_block == n_block || next_n_block == ~n_block;
}
__device__ __forceinline__ bool is_first_addition(int next_n_block) { return next_n_block < 0; }

// Whose addition to a part of an m-block is next, for consumers that add from registers. Additions follow this load
// only if its value allows them, and are made where it was read, in the L2 cache. So it needs no fence, which would
// take a third of a step.
__device__ __forceinline__ int next_to_add(const DqSemaphore* semaphores, long long row_block, int part) {
    return load_relaxed(semaphores[row_block].next_n_block + part);
}

// Counters of a launch.
enum Counters {
    TILES_TAKEN,                   // work tiles that a CTA or a cluster has taken
    ZEROING_TAKEN,                 // in-kernel dQ: tiles whose m-blocks a warp has taken for zeroing
    POSTPROCESS_TAKEN,             // in-kernel dQ: tiles whose m-blocks a warp has taken for writing dQ
    COUNTERS
};
