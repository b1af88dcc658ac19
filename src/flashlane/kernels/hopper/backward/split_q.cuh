// Split-Q: which tile, or split of a tile, an index stands for, and the steps of a split. A launch's first tiles are
// whole, and the others are split; of packed sequences the first ones are split, as the longest sequences come first.
// flashlane.kernels.hopper.backward.split_q says which tiles are split.
#pragma once
#include "ptx.cuh"

struct TileSplit {
    int tile;                      // `tiles` or more: no tile is left
    int split;                     // one more than the split's number among the splits of all tiles; 0: the whole tile
};

template <bool FIRST_ARE_SPLIT>
__device__ __forceinline__ constexpr TileSplit tile_split(int index, int first_tiles, int splits) {
    if (FIRST_ARE_SPLIT) {
        if (index < first_tiles * splits) return {index / splits, index + 1};
        return {index - first_tiles * (splits - 1), 0};
    }
    if (index < first_tiles) return {index, 0};
    return {first_tiles + (index - first_tiles) / splits, index - first_tiles + 1};
}

// The steps of a tile that are made: begin <= step < end.
struct StepRange {
    int begin, end;
    __device__ __forceinline__ constexpr int count() const { return end - begin; }
};

// Of `all` steps those of a split, which is numbered as TileSplit has it.
__device__ __forceinline__ constexpr StepRange step_range(int all, int split_of_all, int splits) {
    if (split_of_all == 0) return {0, all};
    const int split = (split_of_all - 1) % splits;
    return {all * split / splits, all * (split + 1) / splits};
}
