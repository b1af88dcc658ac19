// Where the transposed scores of a thread lie: rows are keys, columns are queries.
#pragma once
#include "hopper/backward/gemm.cuh"

// The thread's first key and first query, and the mask of its sequence. It is computed wherever it is needed: registers
// that held it would spill.
struct ScorePosition {
    TileMask mask;
    int key, query;

    __device__ __forceinline__ ScorePosition(const TileMask& of, int first_key, int first_query) : mask(of) {
        const int thread = warpgroup_thread();
        key = first_key + thread / WARP * 16 + thread % WARP / 4, query = first_query + 2 * (thread % 4);
    }
    // i + shift − j of the first pair; it is negative where the key is after the query.
    __device__ __forceinline__ float distance() const { return query + mask.shift - key; }
};
