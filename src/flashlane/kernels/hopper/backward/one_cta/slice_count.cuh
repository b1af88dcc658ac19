// How a consumer of the one-CTA backward counts tiles and slices of dQ.
#pragma once
#include "ptx.cuh"

// Tiles with steps, and slices of dQ that were stored. A tile has one slice more than it has steps, or PIPELINED_TILES
// one more in all, so that one of both follows from the other and the steps: consumers have no register for it. PEELED
// it has AS_MANY, and in the loop the slice of the step before is next.
template <bool PIPELINED, bool AS_MANY>
struct SliceCount {
    u32 stored = 0;                                       // slices
    __device__ __forceinline__ u32 slices(u32) const { return stored; }
    __device__ __forceinline__ u32 tiles(u32 steps) const { return stored - steps; }
    __device__ __forceinline__ void slice_stored() { ++stored; }
    __device__ __forceinline__ void tile_done() {}
};
template <>
struct SliceCount<true, false> {
    u32 done = 0;                                         // tiles
    __device__ __forceinline__ u32 slices(u32 steps) const { return steps; }
    __device__ __forceinline__ u32 tiles(u32) const { return done; }
    __device__ __forceinline__ void slice_stored() {}
    __device__ __forceinline__ void tile_done() { ++done; }
};
template <>
struct SliceCount<false, true> {
    u32 done = 0;                                         // tiles
    __device__ __forceinline__ u32 slices(u32 steps) const { return steps - 1; }
    __device__ __forceinline__ u32 tiles(u32) const { return done; }
    __device__ __forceinline__ void slice_stored() {}
    __device__ __forceinline__ void tile_done() { ++done; }
};
