// Which blocks of keys (n-blocks) some rows see, and which blocks of queries (m-blocks) see some keys.
#pragma once
#include "attention/mask.cuh"
#include "math.cuh"

// The blocks low <= block < high.
struct BlockRange {
    int low, high;
    __device__ __forceinline__ constexpr bool empty() const { return high <= low; }
    __device__ __forceinline__ int count() const { return max(0, high - low); }

    // Blocks of each split of the range; the last one may have fewer, and those after it none.
    __device__ __forceinline__ constexpr int blocks_of_split(int splits) const { return ceil_div(high - low, splits); }
    __device__ __forceinline__ constexpr BlockRange of_split(int split, int splits) const {
        const int size = blocks_of_split(splits), start = low + split * size;
        return {start, constant_min(high, start + size)};
    }
};

// The n-blocks in which some query of first_query..last_query sees a key.
template <int BLOCK_N, Side LEFT, Side RIGHT>
__device__ __forceinline__ BlockRange n_block_range(const WindowMask<LEFT, RIGHT>& mask, int first_query,
                                                    int last_query) {
    const int low = mask.first(first_query), end = mask.end(last_query);
    if (last_query < first_query || end <= low) return {0, 0};
    return {low / BLOCK_N, ceil_div(end, BLOCK_N)};
}

// The n-blocks that every query of first_query..last_query sees whole: their scores need no mask.
template <int BLOCK_N, Side LEFT, Side RIGHT>
__device__ __forceinline__ BlockRange unmasked_n_block_range(const WindowMask<LEFT, RIGHT>& mask, int first_query,
                                                             int last_query) {
    return {ceil_div(mask.first(last_query), BLOCK_N), max(0, mask.end(first_query)) / BLOCK_N};
}

// The n-blocks of `block_n` keys that see an m-block: the inverse of m_block_range.
template <int BLOCK_M, Side LEFT, Side RIGHT>
__device__ __forceinline__ BlockRange n_block_range_of(const WindowMask<LEFT, RIGHT>& mask, int m_block, int block_n) {
    const int first = m_block * BLOCK_M + mask.shift;
    BlockRange range{0, ceil_div(mask.seqlen_k, block_n)};
    if (LEFT == Side::BOUNDED) range.low = max(0, first - mask.window_left) / block_n;
    if (RIGHT == Side::BOUNDED) {
        const int last = first + BLOCK_M - 1 + mask.window_right;
        range.high = last < 0 ? 0 : min(range.high, last / block_n + 1);
    }
    return range;
}

// The m-blocks that see some of `keys` keys from `first_key` on.
template <int BLOCK_M, Side LEFT, Side RIGHT>
__device__ __forceinline__ BlockRange m_block_range(const WindowMask<LEFT, RIGHT>& mask, int seqlen_q, int first_key,
                                                    int keys) {
    BlockRange range{0, ceil_div(seqlen_q, BLOCK_M)};
    if (RIGHT == Side::BOUNDED) range.low = max(0, first_key - mask.shift - mask.window_right) / BLOCK_M;
    if (LEFT == Side::BOUNDED) {
        const int last = first_key + keys - 1 - mask.shift + mask.window_left;
        range.high = last < 0 ? 0 : min(range.high, last / BLOCK_M + 1);
    }
    if (mask.seqlen_k <= first_key) range.high = 0;
    return range;
}
