// Rows of a tile in shared memory that lie past the end of a sequence: rows of another one, or arbitrary bytes.
#pragma once
#include "ptx.cuh"

// Zeroes the rows from `row` on of a tile of chunks of 64 columns, each ROWS rows of 128 bytes, as TMA loads them. The
// number of rows is not known to the compiler, so nothing here is divided by it: this stands in main loops.
template <int CHUNKS, int ROWS>
__device__ __forceinline__ void zero_rows(u32 tile, int row, int thread, int threads) {
    constexpr int ROW_VECTORS = 8;                        // of 16 bytes
#pragma unroll 1
    for (int i = row * ROW_VECTORS + thread; i < ROWS * ROW_VECTORS; i += threads) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            store_shared(tile + (chunk * ROWS * ROW_VECTORS + i) * 16, make_uint4(0, 0, 0, 0));
    }
}
