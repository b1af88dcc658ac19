// Keys and values in the pages of a cache: which page holds a row, and copies of tiles whose rows lie in pages.
#pragma once
#include "attention/seqlen.cuh"
#include "math.cuh"
#include "swizzle.cuh"
#include "tma.cuh"

// No pages; pages that hold whole tiles of KEYS rows; pages of any size.
enum { PAGES_NONE, PAGES_WHOLE, PAGES_ANY };

// ---- cp.async of tiles, by a decode kernel's warps

// Copies tiles of KEYS cache rows by THREADS threads (whole warps); rows outside [first, end) become zeros. The page of
// a tile, or of each of its rows, is looked up a tile ahead of its copy. With BY_LANE each lane looks up the page of
// one of 32 tiles, where pages hold whole tiles: else the first tiles' look-ups wait one after another.
template <int PAGES, int KEYS, int THREADS, bool BY_LANE, typename Element>
struct PagedTileReader {
    const Element *k, *v;
    long long k_page, v_page, k_row, v_row;
    const int* table;
    const SeqlenParams& seqlen;
    int first, end, thread;
    int page, offset;  // of the tile's first row; with PAGES_ANY of row lane % KEYS; with BY_LANE the lane's page

    // Entries of the table beyond the rows in use may be anything.
    __device__ __forceinline__ int inside(int key) const { return max(first, min(key, end - 1)); }
    __device__ __forceinline__ int page_at(int entry) const { return __ldg(table + entry * seqlen.table_page); }

    // The tile of step `step` begins at `key`, and that of the next step STRIDE keys further.
    template <int STRIDE>
    __device__ __forceinline__ void look_up(int step, int key) {
        if constexpr (PAGES == PAGES_WHOLE && BY_LANE) {
            const int lane = threadIdx.x % WARP;
            if (step % WARP == 0) page = page_at(seqlen.page_entry(inside(key + lane * STRIDE)));
            offset = seqlen.row_in_page(key, seqlen.page_entry(inside(key)));
        } else if constexpr (PAGES != PAGES_NONE) {
            if constexpr (PAGES == PAGES_ANY) key += threadIdx.x % KEYS;
            const int row = inside(key), entry = seqlen.page_entry(row);
            page = page_at(entry);
            offset = seqlen.row_in_page(PAGES == PAGES_ANY ? row : key, entry);
        }
    }
    // The tiles of K and V of step `step`, from row `key` on, whose pages were looked up.
    template <typename LayoutK, typename LayoutV>
    __device__ __forceinline__ void copy(u32 k_tile, u32 v_tile, int step, int key, int head_dim, int head_dim_v) {
        int page_of_tile = 0;
        if constexpr (PAGES == PAGES_WHOLE && BY_LANE) page_of_tile = __shfl_sync(0xffffffffu, page, step % WARP);
        copy_one<LayoutK>(k_tile, k + page_of_tile * k_page, k_page, k_row, key, head_dim);
        copy_one<LayoutV>(v_tile, v + page_of_tile * v_page, v_page, v_row, key, head_dim_v);
    }

   private:
    template <typename Layout>
    __device__ __forceinline__ void copy_one(u32 tile, const Element* base, long long page_stride, long long row_stride,
                                             int key, int columns) const {
        constexpr int CHUNKS = Layout::CHUNKS;
        constexpr int STEP = THREADS / CHUNKS;  // rows of one pass
        constexpr int PASSES = ceil_div(KEYS, STEP);
        static_assert(STEP >= 1, "a row of a tile has no more chunks than there are threads");
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        const bool works = THREADS % CHUNKS == 0 || row < STEP;
        const bool column_inside = chunk * CHUNK < columns;
        const Element* source = base + chunk * CHUNK;
        if constexpr (PAGES == PAGES_NONE) source += (key + row) * row_stride;
        // (With BY_LANE `base` is that of the tile's page.)
        if constexpr (PAGES == PAGES_WHOLE)
            source += (BY_LANE ? 0 : page * page_stride) + (offset + row) * row_stride;
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
            const int at = row + i * STEP;
            const Element* from = source;
            if constexpr (PAGES == PAGES_ANY)
                from += __shfl_sync(0xffffffffu, page, at % KEYS) * page_stride +
                        __shfl_sync(0xffffffffu, offset, at % KEYS) * row_stride;
            const bool inside = column_inside && key + at >= first && key + at < end;
            if (works && (KEYS % STEP == 0 || at < KEYS))
                cp_async_16(tile + Layout::offset(at, chunk), from, inside ? 16 : 0);
            if constexpr (PAGES != PAGES_ANY) source += STEP * row_stride;
        }
    }
};

// ---- by the warps of a Hopper producer

// Rows of K or V as they lie in memory; strides in elements.
struct PagedRows {
    const void* data;
    long long page, row, head;
};

// Copies one warp's rows of a block by cp.async, for pages that no TMA box fits: one lane finds where a row lies, then
// eight lanes copy 128 bytes of it. VECTORS vectors of 16 bytes are written to each row; elements past `columns` or
// past the last key become zeros. Rows lie in swizzled chunks of 128 bytes; chunks are CHUNK_BYTES apart.
template <typename Element, int BLOCK_N, int WARPS, int VECTORS, int CHUNK_BYTES, typename Seqlen>
__device__ __forceinline__ void gather_rows(const SeqlenParams& p, const Seqlen& sequence, const PagedRows& from,
                                            u32 destination, int n_block, int head, int warp, int column, int columns) {
    constexpr int WARP_ROWS = BLOCK_N / WARPS, CHUNKS = ceil_div(VECTORS, 8);
    constexpr int VECTOR = 8;  // columns of 16 bytes
    constexpr int CHUNK_COLUMNS = 64, ROW_BYTES = 128;
    const int lane = threadIdx.x % WARP;
    const Element* data = static_cast<const Element*>(from.data) + head * from.head + column + lane % 8 * VECTOR;
#pragma unroll
    for (int first = 0; first < WARP_ROWS; first += WARP) {
        const int key = n_block * BLOCK_N + warp * WARP_ROWS + first + lane;
        long long offset = -1;
        if (first + lane < WARP_ROWS && key < sequence.k_length) {
            const int row = sequence.k_first + key, entry = p.page_entry(row);
            offset = p.block_table[sequence.k_batch * p.table_batch + entry] * from.page +
                     p.row_in_page(row, entry) * from.row;
        }
#pragma unroll
        for (int i = 0; i < (WARP_ROWS - first < WARP ? WARP_ROWS - first : WARP); i += 4) {
            const long long at = __shfl_sync(0xffffffffu, offset, i + lane / 8);
            const int row = warp * WARP_ROWS + first + i + lane / 8;
            const u32 to = destination + row * ROW_BYTES + ((lane % 8 ^ row % 8) << 4);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int vector = chunk * 8 + lane % 8;
                if (VECTORS % 8 != 0 && chunk == CHUNKS - 1 && vector >= VECTORS) continue;
                const bool inside = at >= 0 && vector * VECTOR < columns;
                cp_async_16(to + chunk * CHUNK_BYTES, data + (inside ? at + chunk * CHUNK_COLUMNS : 0),
                            inside ? 16 : 0);
            }
        }
    }
}

// Copies a block's rows by TMA; all lanes of a warp call it. A box is BOX_ROWS rows of a page and a chunk of
// columns. Elements outside the map become zeros. Boxes past the last key, whose page may not exist, are read from
// outside the map.
template <int BLOCK_N, int BOX_ROWS, int CHUNKS, int CHUNK_BYTES, typename Seqlen>
__device__ __forceinline__ void load_pages(const SeqlenParams& p, const Seqlen& sequence, const TensorMap& map,
                                           u32 destination, u32 barrier, int n_block, int head, int lane, int column) {
    constexpr int BOXES = BLOCK_N / BOX_ROWS, CHUNK_COLUMNS = 64, ROW_BYTES = 128;
    for (int i = lane; i < BOXES * CHUNKS; i += WARP) {
        const int chunk = i / BOXES, row = i % BOXES * BOX_ROWS, key = n_block * BLOCK_N + row;
        const bool inside = key < sequence.k_length;
        const int page = inside ? p.block_table[sequence.k_batch * p.table_batch + p.page_entry(key)] : 0;
        tma_load(destination + chunk * CHUNK_BYTES + row * ROW_BYTES, map, barrier, column + chunk * CHUNK_COLUMNS,
                 inside ? p.row_in_page(key) : p.row_outside_page(), head, page);
    }
}
