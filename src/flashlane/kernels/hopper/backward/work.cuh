// What a block of threads that has keys steps through, and its scores. They are transposed: rows are keys, columns queries.
#pragma once
#include "hopper/backward/products.cuh"

// Keys from `first_key` on, and the (query head, block of queries) that they and their team's other keys are seen by.
struct Work {
    int which, kv_head, first_key, group;
    Sequence sequence;
    Blocks queries;

    // A team has `keys` keys, of which this block's begin at `offset`.
    __device__ __forceinline__ Work(const Params& p, const Place& place, int keys, int offset)
        : which(place.batch), kv_head(place.head), first_key(place.block * keys + offset), group(p.heads / p.kv_heads),
          sequence(p, place.batch), queries(queries_of(p, sequence, place.block * keys, keys)) {}
    __device__ __forceinline__ int steps() const { return max(0, queries.high - queries.low) * group; }
};

struct Step {
    const Work& work;
    int head, block;

    __device__ __forceinline__ explicit Step(const Work& w)
        : work(w), head(w.kv_head * w.group), block(w.queries.low) {}
    __device__ __forceinline__ void next() {
        if (++block == work.queries.high) block = work.queries.low, ++head;
    }
};

__device__ __forceinline__ Corner corner_of(const Step& step, int first_key) {
    const Sequence& sequence = step.work.sequence;
    return Corner(first_key, sequence.k_length, step.block * BLOCK_M, sequence.shift);
}
