// Copies of tiles from device to shared memory, and a transpose among the lanes of a quad.
#pragma once
#include "math.cuh"
#include "mma.cuh"
#include "swizzle.cuh"

// A row-major matrix in device memory with any strides, counted in elements.
template <typename Element>
struct View {
    const Element* data;
    long long row_stride;
    long long column_stride;
    int rows;
    int columns;
};

// Starts to copy ROWS × COLUMNS elements from a row and a column on; elements outside the view become zeros.
// VECTOR: rows are contiguous and start on 16 bytes, so chunks go by cp.async; otherwise element by element.
// Every thread stays in one column of chunks, and steps by a constant number of rows.
template <typename Layout, int ROWS, int COLUMNS, int THREADS, bool VECTOR, typename Element>
__device__ __forceinline__ void load_tile(u32 tile, const View<Element>& view, int first_row,
                                          int first_column) {
    constexpr int CHUNKS = COLUMNS / CHUNK;
    constexpr int STEP = THREADS / CHUNKS;  // rows that all threads copy at once
    constexpr int PASSES = ceil_div(ROWS, STEP);
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, column = first_column + chunk * CHUNK;
    if (THREADS % CHUNKS != 0 && row >= STEP) return;
    const int valid_rows = column < view.columns ? view.rows - first_row : 0;
    const Element* source =
        view.data + (first_row + row) * view.row_stride + column * (VECTOR ? 1 : view.column_stride);
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int at = row + i * STEP;
        if (ROWS % STEP != 0 && i == PASSES - 1 && at >= ROWS) break;
        const u32 destination = tile + Layout::offset(at, chunk);
        if constexpr (VECTOR) {
            cp_async_16(destination, source, at < valid_rows ? 16 : 0);
        } else {
            alignas(16) Element values[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const bool inside = at < valid_rows && column + j < view.columns;
                values[j] = inside ? source[j * view.column_stride] : Element(0.f);
            }
            store_shared(destination, *reinterpret_cast<uint4*>(values));
        }
        source += STEP * view.row_stride;
    }
}

// Transposes 4 words among the 4 lanes of a quad: afterwards lane t holds word t of lanes 0 to 3, in order.
__device__ __forceinline__ void transpose_quad(u32 (&word)[4]) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const u32 sent = upper ? word[i] : word[i | step];
            const u32 received = __shfl_xor_sync(0xffffffffu, sent, step);
            (upper ? word[i] : word[i | step]) = received;
        }
    }
}
