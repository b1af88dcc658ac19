// Shared-memory tiles of 16-bit elements in 16-byte chunks, read by ldmatrix without bank conflicts.
// flashlane.kernels.tile_layout mirrors these formulas in Python and counts the conflicts.
#pragma once
#include "ptx.cuh"

constexpr int CHUNK = 8;  // elements of one 16-byte chunk

// COLUMNS elements a row. Padded: one chunk more a row. Swizzled: no padding; the chunk index is XORed with the row.
// Eight rows of ldmatrix must fall into eight different 16-byte bank groups of the 128 bytes that are served at once.
template <int COLUMNS, bool SWIZZLED>
struct TileLayout {
    static constexpr int CHUNKS = COLUMNS / CHUNK;
    static constexpr int STRIDE = 2 * (SWIZZLED ? COLUMNS : COLUMNS + CHUNK);  // bytes of one row
    // The largest power of two (up to 8) that divides the chunks of a row: XOR never leaves the row.
    static constexpr int SPAN = !SWIZZLED ? 1 : CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
    static constexpr int ROWS_PER_KEY = 8 / SPAN;  // rows that share one 128-byte line share one key

    static __device__ __forceinline__ constexpr int key(int row) { return SPAN == 1 ? 0 : (row / ROWS_PER_KEY) % SPAN; }
    static __device__ __forceinline__ constexpr u32 offset(int row, int chunk) {
        return row * STRIDE + ((chunk ^ key(row)) << 4);
    }
    static constexpr int bytes(int rows) { return rows * STRIDE; }
};

// One lane's ldmatrix addresses in a tile: computed once, then stepped by compile-time rows and chunks.
// The key that a chunk's index is XORed with repeats every 8 rows, and steps are multiples of 8 rows and of 2 chunks.
// So a step is one XOR and one addition of constants, provided that the first chunk is 0 or 1. ANYWHERE: it may be any.
template <typename Layout, bool ANYWHERE = false>
struct FragmentCursor {
    u32 base;
    u32 chunk, key;

    __device__ __forceinline__ constexpr FragmentCursor(u32 tile, int row, int first_chunk)
        : base(tile + row * Layout::STRIDE), chunk(first_chunk), key(Layout::key(row)) {}

    // Address `rows` (a multiple of 8) below and `chunks` (even) to the right of the first.
    __device__ __forceinline__ constexpr u32 at(u32 tile_offset, int rows, int chunks) const {
        constexpr int LOW = Layout::SPAN - 1;
        const u32 row_address = base + tile_offset + rows * Layout::STRIDE;
        if constexpr (ANYWHERE) return row_address + (((chunk + chunks) ^ key) << 4);
        else return row_address + ((((chunk ^ key) ^ (chunks & LOW)) + (chunks & ~LOW)) << 4);
    }
};
