// The bits of a mask program, in units of 64 queries and 64 keys: one CTA a unit that may be cut, which also finds out
// whether it is hidden or visible as a whole. attention/block_list.cuh reads them.
#include "attention/block_list.cuh"
#include "config.cuh"
#include "program.cuh"

constexpr int THREADS = 128;

struct Params {
    const long long* units;        // of all (batch, head, query unit, key unit): those that are looked at
    signed char* states;           // of all: a BlockState
    int* slots;                    // of all, see MaskBits; `slot_columns` wide
    uint2 *by_query, *by_key;      // (looked at, row): the words of MaskBits
    int heads, rows, columns, slot_columns, queries, keys;
    ProgramParams program;
};

extern "C" __global__ void __launch_bounds__(THREADS) hopper_mask_bits(const __grid_constant__ Params p) {
    __shared__ u32 words[UNIT][2];
    const long long unit = p.units[blockIdx.x], row_of_all = unit / p.columns, matrix = row_of_all / p.rows;
    const int row_unit = static_cast<int>(row_of_all % p.rows), column_unit = static_cast<int>(unit % p.columns);
    const int batch = static_cast<int>(matrix / p.heads), head = static_cast<int>(matrix % p.heads);
    const int row = threadIdx.x / 2, part = threadIdx.x % 2, first_key = column_unit * UNIT + part * 32;
    const int query = row_unit * UNIT + row;
    // Queries past the end count as seeing all keys, so that they do not make a unit partial. Keys past the end are
    // hidden.
    u32 word = ~0u;
    if (query < p.queries) {
        word = 0;
#pragma unroll 8
        for (int i = 0; i < 32; ++i)
            if (first_key + i < p.keys && Program::visible(p.program, batch, head, query, first_key + i))
                word |= 1u << i;
    }
    words[row][part] = word;
    const bool all = __syncthreads_and(word == ~0u), none = !__syncthreads_or(query < p.queries && word != 0);
    if (threadIdx.x == 0) {
        p.states[unit] = all ? BLOCK_FULL : none ? BLOCK_NONE : BLOCK_PARTIAL;
        p.slots[row_of_all * p.slot_columns + column_unit] = all    ? UNIT_FULL
                                                             : none ? UNIT_NONE
                                                                    : static_cast<int>(blockIdx.x);
    }
    u32 column = 0;                // of the key with this thread's `row`
#pragma unroll 8
    for (int i = 0; i < 32; ++i) column |= (words[part * 32 + i][row / 32] >> row % 32 & 1) << i;
    const long long slot = static_cast<long long>(blockIdx.x) * UNIT + row;
    reinterpret_cast<u32*>(p.by_query + slot)[part] = word;
    reinterpret_cast<u32*>(p.by_key + slot)[part] = column;
}
