// Where the transposed scores of a thread lie: rows are keys, columns are queries.
#pragma once
#include "hopper/backward/gemm.cuh"

// The thread's first key and first query, and the mask of its sequence. It is made from %tid each time that it is needed:
// kept in registers it would spill.
struct ScorePosition {
    TileMask mask;
    int key, query;

    __device__ __forceinline__ ScorePosition(const TileMask& of, int first_key, int first_query) : mask(of) {
        const int thread = thread_again();
        key = first_key + thread / WARP * 16 + thread % WARP / 4, query = first_query + 2 * (thread % 4);
    }
    // Of the first pair; negative: the key is after the query.
    __device__ __forceinline__ float distance() const { return query + mask.shift - key; }
};
