// Boxes of a sequence's rows by TMA. What lies past the sequence's last row arrives as zeros and is not stored: of
// dense tensors because their axis of rows ends there, of packed ones by the coordinates.
//
// The map of a packed tensor has the axes (column, row, head, end, wrap); flashlane.kernels.hopper.sequence_rows makes
// it. Its axis of rows has ROW_AXIS rows, and row r of a sequence of `length` rows is number ROW_AXIS - length + r, so
// that the axis ends with the sequence. The other two axes put the address right. `end` has the stride of a row, too,
// and its coordinate is the row behind the sequence. A step of `wrap` goes back by one row and on by 2^35 bytes, so
// that ROW_AXIS steps go back by as many rows, and on by 2^65 bytes, which addresses of 64 bits do not see. The idea is
// that of Triton's ragged descriptors (triton/tools/ragged_tma.py).
#pragma once
#include "tma.cuh"

constexpr int ROW_AXIS = 1 << 30;

// Where a sequence lies in a tensor.
struct SequenceRows {
    int first, length;             // its first row, and how many it has
    int batch;                     // its row of the batch axis; 0 of packed tensors
};

template <bool PACKED>
__device__ __forceinline__ void load_rows(u32 to, const TensorMap& map, u32 barrier, int column, int row, int head,
                                          const SequenceRows& of) {
    if constexpr (PACKED)
        tma_load(to, map, barrier, column, ROW_AXIS - of.length + row, head, of.first + of.length, ROW_AXIS);
    else
        tma_load(to, map, barrier, column, of.first + row, head, of.batch);
}
// The same into each CTA of the cluster that has a bit in `ctas`.
template <bool PACKED>
__device__ __forceinline__ void load_rows_multicast(u32 to, const TensorMap& map, u32 barrier, int column, int row,
                                                    int head, const SequenceRows& of, unsigned short ctas) {
    if constexpr (PACKED)
        tma_load_multicast(to, map, barrier, column, ROW_AXIS - of.length + row, head, of.first + of.length, ROW_AXIS,
                           ctas);
    else
        tma_load_multicast(to, map, barrier, column, of.first + row, head, of.batch, ctas);
}
template <bool PACKED>
__device__ __forceinline__ void store_rows(const TensorMap& map, u32 from, int column, int row, int head,
                                           const SequenceRows& of) {
    if constexpr (PACKED)
        tma_store(map, from, column, ROW_AXIS - of.length + row, head, of.first + of.length, ROW_AXIS);
    else
        tma_store(map, from, column, of.first + row, head, of.batch);
}
