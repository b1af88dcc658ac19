// Keys and values where a cache keeps them: a row of the batch axis, a stretch of a packed tensor, or pages.
// flashlane.kernels.decode mirrors CacheParams.
#pragma once
#include "swizzle.cuh"

// What tells the lengths and places of the sequences; null pointers for what a call does not have.
struct CacheParams {
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_k, *leftpad_k, *batch_idx, *block_table;
    long long table_batch, table_page;  // strides of the block table
    int page_size, bottom_right;
};

// One sequence: its queries, and the rows [first, end) of the cache that are its keys.
struct Sequence {
    int seqlen_q, first, end;
    int shift;                      // cache row on the diagonal of query 0
    long long q_start, k_start;     // rows of packed tensors
    int cache_row;                  // row of the batch axis of k and v
    const int* table;

    Sequence() = default;
    template <typename Params>
    __device__ __forceinline__ Sequence(const CacheParams& c, const Params& p, int batch)
        : seqlen_q(p.seqlen_q), first(0), end(p.seqlen_k), q_start(0), k_start(0), cache_row(batch), table(nullptr) {
        // All at once, as each is a trip to device memory. What a GPU holds is not checked on the host: nothing is
        // read outside the cache.
        const int q_from = c.cu_seqlens_q ? c.cu_seqlens_q[batch] : 0, q_to = c.cu_seqlens_q ? c.cu_seqlens_q[batch + 1] : 0;
        const int k_from = c.cu_seqlens_k ? c.cu_seqlens_k[batch] : 0, k_to = c.cu_seqlens_k ? c.cu_seqlens_k[batch + 1] : 0;
        const int used = c.seqused_k ? c.seqused_k[batch] : end, pad = c.leftpad_k ? c.leftpad_k[batch] : 0;
        if (c.batch_idx) cache_row = c.batch_idx[batch];
        if (c.cu_seqlens_q) seqlen_q = min(q_to - q_from, p.seqlen_q), q_start = q_from;
        if (c.cu_seqlens_k) {
            end = min(k_to - k_from, p.seqlen_k);
            if (!c.block_table) k_start = k_from;
        }
        if (c.cu_seqlens_q) cache_row = 0;
        end = max(0, min(used, end)), first = max(0, min(pad, end));
        shift = c.bottom_right ? end - seqlen_q : first;
        if (c.block_table) table = c.block_table + batch * c.table_batch;
    }
};

enum { PAGES_NONE, PAGES_WHOLE, PAGES_ANY };  // no pages; pages that hold whole tiles of KEYS rows; of any size

// Copies tiles of KEYS cache rows by a team of THREADS threads (whole warps); rows outside [first, end) become zeros.
// The page of a tile, or of each of its rows, is looked up a tile ahead of its copy.
template <int PAGES, int KEYS, int THREADS, typename Element>
struct CacheReader {
    const Element *k, *v;
    long long k_page, v_page, k_row, v_row;
    const int* table;
    long long table_page;
    int page_size, first, end, thread;
    int page, offset;  // of the tile's first row; with PAGES_ANY of row lane % KEYS

    __device__ __forceinline__ void look_up(int key) {
        if constexpr (PAGES != PAGES_NONE) {
            if constexpr (PAGES == PAGES_ANY) key += threadIdx.x % KEYS;
            // Entries beyond the rows in use may be anything.
            const int inside = max(first, min(key, end - 1));
            const int number = inside / page_size;
            page = __ldg(table + number * table_page);
            offset = (PAGES == PAGES_ANY ? inside : key) - number * page_size;
        }
    }
    // Tile of K and tile of V of the rows from `key` on, which were looked up.
    template <typename LayoutK, typename LayoutV>
    __device__ __forceinline__ void copy(u32 k_tile, u32 v_tile, int key, int head_dim, int head_dim_v) const {
        copy_one<LayoutK>(k_tile, k, k_page, k_row, key, head_dim);
        copy_one<LayoutV>(v_tile, v, v_page, v_row, key, head_dim_v);
    }

   private:
    template <typename Layout>
    __device__ __forceinline__ void copy_one(u32 tile, const Element* base, long long page_stride, long long row_stride,
                                             int key, int columns) const {
        constexpr int CHUNKS = Layout::CHUNKS;
        constexpr int STEP = THREADS / CHUNKS;  // rows that the team copies at once
        constexpr int PASSES = (KEYS + STEP - 1) / STEP;
        static_assert(STEP >= 1, "a row of a tile has no more chunks than the team has threads");
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        const bool works = THREADS % CHUNKS == 0 || row < STEP;
        const bool column_inside = chunk * CHUNK < columns;
        const Element* source = base + chunk * CHUNK;
        if constexpr (PAGES == PAGES_NONE) source += (key + row) * row_stride;
        if constexpr (PAGES == PAGES_WHOLE) source += page * page_stride + (offset + row) * row_stride;
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const int at = row + i * STEP;
            const Element* from = source;
            if constexpr (PAGES == PAGES_ANY)
                from += __shfl_sync(0xffffffffu, page, at % KEYS) * page_stride +
                        __shfl_sync(0xffffffffu, offset, at % KEYS) * row_stride;
            const bool inside = column_inside && key + at >= first && key + at < end;
            if (works && (KEYS % STEP == 0 || at < KEYS)) cp_async_16(tile + Layout::offset(at, chunk), from, inside ? 16 : 0);
            if constexpr (PAGES != PAGES_ANY) source += STEP * row_stride;
        }
    }
};
