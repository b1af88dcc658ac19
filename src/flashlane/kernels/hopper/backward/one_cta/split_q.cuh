// Split-Q: which tile, or part of a tile, an index stands for, and the steps of a part. Whole tiles come first, then the parts of
// the others. flashlane.kernels.hopper.backward.one_cta.split_q says which tiles are split.
#pragma once
#include "ptx.cuh"

struct TilePart {
    int tile;                      // `tiles` or more: no tile is left
    int part;                      // one more than the part's number among the parts of all tiles; 0: the whole tile
};

__device__ __forceinline__ constexpr TilePart tile_part(int index, int whole_tiles, int parts) {
    if (index < whole_tiles) return {index, 0};
    return {whole_tiles + (index - whole_tiles) / parts, index - whole_tiles + 1};
}

// The steps of a tile that are made: begin <= step < end.
struct StepRange {
    int begin, end;
    __device__ __forceinline__ constexpr int count() const { return end - begin; }
};

// Of `all` steps those of a part, which is numbered as TilePart has it.
__device__ __forceinline__ constexpr StepRange step_range(int all, int part_of_all, int parts) {
    if (part_of_all == 0) return {0, all};
    const int part = (part_of_all - 1) % parts;
    return {all * part / parts, all * (part + 1) / parts};
}
