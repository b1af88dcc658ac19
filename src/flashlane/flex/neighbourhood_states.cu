// The states of blocks of a neighbourhood (neighbourhoods.py), and the table by which a pair is found visible. The
// tokens of a block follow each other, so they are lines of the grid, of which the first and the last may be cut. A
// thread takes a block of queries and one of keys, and compares their lines.
//
// Grid: (rows of blocks, segments of columns).
#include "attention/block_state.cuh"
#include "config.cuh"
#include "math.cuh"

struct Axis { int n, w; };         // positions, and how many of them a token sees
enum { AXES = 3 };
struct Params {
    int* table;                    // (3 · axis + {first that is seen, end, own position}, token)
    signed char* states;           // (row of blocks, column of blocks): a BlockState
    Axis axes[AXES];
    int position;                  // tokens of a position of the last axis
    int tokens, block_q, block_k, rows, columns;
};

// The first position that the token at `x` sees. It ascends with x, by at most 1 a position, and so does the end of the
// window: positions from a to b see, together, what is from first_of(a) to the end of the window of b.
__device__ __forceinline__ int first_of(const Axis& axis, int x) {
    return max(0, min(x - axis.w / 2, axis.n - axis.w));
}

struct Lines {                     // of the tokens from `begin` to `end` − 1
    int first, last;               // lines
    int first_x, last_x;           // positions of the first token in the first line, and of the last one in the last
    int end_x;                     // of a whole line, the last position

    __device__ __forceinline__ Lines(const Params& p, int begin, int end) {
        const int line = p.axes[AXES - 1].n * p.position;
        first = begin / line, last = (end - 1) / line;
        first_x = (begin - first * line) / p.position, last_x = (end - 1 - last * line) / p.position;
        end_x = p.axes[AXES - 1].n - 1;
    }
    __device__ __forceinline__ int from(int line) const { return line == first ? first_x : 0; }
    __device__ __forceinline__ int to(int line) const { return line == last ? last_x : end_x; }
};

// The BlockState of a block that is not cut off.
__device__ __forceinline__ int state_of(const Params& p, const Lines& q, const Lines& k) {
    const Axis &outer = p.axes[0], &middle = p.axes[1], &inner = p.axes[2];
    bool any = false, all = true;
    for (int q_line = q.first; q_line <= q.last; ++q_line) {
        const int first_outer = first_of(outer, q_line / middle.n), first_middle = first_of(middle, q_line % middle.n);
        // Positions [begin, end) are seen from some of this line's tokens, [common, end_of_common) from all of them.
        const int begin = first_of(inner, q.from(q_line)), common = first_of(inner, q.to(q_line));
        const int end = common + inner.w, end_of_common = begin + inner.w;
        // Lines at the positions of the outer axis that are seen; others hide what they have.
        const int k_first = max(k.first, first_outer * middle.n);
        const int k_last = min(k.last, (first_outer + outer.w) * middle.n - 1);
        all = all && k_first == k.first && k_last == k.last;
        int at = k_first % middle.n;
        for (int k_line = k_first; k_line <= k_last; ++k_line, at = at + 1 == middle.n ? 0 : at + 1) {
            const bool seen = at >= first_middle && at < first_middle + middle.w;
            const int k_from = k.from(k_line), k_to = k.to(k_line);
            any = any || (seen && k_from < end && k_to >= begin);
            all = all && seen && k_from >= common && k_to < end_of_common;
            if (any && !all) return BLOCK_PARTIAL;
        }
        if (any && !all) return BLOCK_PARTIAL;
    }
    return any && all ? BLOCK_FULL : any;  // as a number, `any` is BLOCK_PARTIAL or BLOCK_NONE
}

extern "C" __global__ void __launch_bounds__(cfg::THREADS) neighbourhood_states(const Params p) {
    const int row = blockIdx.x, begin = row * p.block_q, end = min(p.tokens, begin + p.block_q);
    if (blockIdx.y == 0) {
        for (int token = begin + threadIdx.x; token < end; token += cfg::THREADS) {
            int rest = token / p.position;
#pragma unroll
            for (int axis = AXES - 1; axis >= 0; --axis) {
                const int at = rest % p.axes[axis].n, first = first_of(p.axes[axis], at);
                rest /= p.axes[axis].n;
                int* const rows = p.table + static_cast<long long>(3 * axis) * p.tokens + token;
                rows[0] = first, rows[p.tokens] = first + p.axes[axis].w, rows[2ll * p.tokens] = at;
            }
        }
    }
    const int column = blockIdx.y * cfg::THREADS + threadIdx.x;
    if (column >= p.columns) return;
    const int k_begin = column * p.block_k, k_end = min(p.tokens, k_begin + p.block_k);
    const int state = state_of(p, Lines(p, begin, end), Lines(p, k_begin, k_end));
    // A block that is cut off has pairs that do not exist, which count as hidden.
    const bool whole = end - begin == p.block_q && k_end - k_begin == p.block_k;
    p.states[static_cast<long long>(row) * p.columns + column] = state == BLOCK_FULL && !whole ? BLOCK_PARTIAL : state;
}
