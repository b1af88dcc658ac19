// Split-Q: which tile, or split of a tile, an index stands for, and the steps of a split. Whole tiles come first, then
// the splits of the others. flashlane.kernels.hopper.backward.split_q says which tiles are split.
#pragma once
#include "ptx.cuh"

struct TileSplit {
    int tile;                      // `tiles` or more: no tile is left
    int split;                     // one more than the split's number among the splits of all tiles; 0: the whole tile
};

__device__ __forceinline__ constexpr TileSplit tile_split(int index, int whole_tiles, int splits) {
    if (index < whole_tiles) return {index, 0};
    return {whole_tiles + (index - whole_tiles) / splits, index - whole_tiles + 1};
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
