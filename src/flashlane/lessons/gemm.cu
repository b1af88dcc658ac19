// HGEMM: C = A·B on mma.sync m16n8k16, operands f16 or bf16, accumulators f32 or f16.
//
// One CTA computes BLOCK_M × BLOCK_N of C and walks along K in tiles of BLOCK_K through a pipeline of STAGES stages:
//
//     stage:  | A: BLOCK_M rows × BLOCK_K | B: BLOCK_N rows × BLOCK_K (TN), or BLOCK_K rows × BLOCK_N (NN) |
//
//     tile t      step 0        step 1        …   last step
//     fragments   load step 1   load step 2   …   wait for tile t + 1, barrier, load its step 0
//     mma         step 0        step 1        …   last step
//     cp.async    tile t + STAGES − 1, a share a step   …   the first share of tile t + STAGES
//
// There is one barrier a tile. It says that tile t + 1 is in shared memory and that every warp has read tile t, whose
// stage is then free: all stages but the one being read are in flight.
//
// Rows and columns outside C are clamped to the last one inside: their products are computed and not stored. Only K
// is filled with zeros. K and N are multiples of 8, so that a 16-byte chunk is inside or outside as a whole.
#include "gemm.cuh"

constexpr int BUFFERS = cfg::FRAGMENT_BUFFERS;

using LayoutA = TileLayout<BLOCK_K, true>;
using LayoutB = TileLayout<TN ? BLOCK_K : BLOCK_N, true>;
constexpr int A_BYTES = LayoutA::bytes(BLOCK_M), STAGE_BYTES = A_BYTES + LayoutB::bytes(TN ? BLOCK_N : BLOCK_K);
static_assert(STAGES * STAGE_BYTES == cfg::SHARED_BYTES, "the Python formula disagrees");

// Mirrored by flashlane.lessons.gemm.HgemmParams. Strides in elements.
struct Params {
    const Element *a, *b;
    Element* c;
    int a_stride, b_stride, c_stride;
    int m, n, k;
    int blocks_m, blocks_n, group;
};

// CTAs go in sections of `group` rows of C, column by column: those that run at once share few rows of A and
// columns of B, which then come from L2.
struct Position {
    int row, column;

    __device__ __forceinline__ explicit Position(const Params& p) {
        const SwizzledTile tile = swizzled_tile<false>(blockIdx.x, p.blocks_m, p.blocks_n, p.group);
        row = tile.head * BLOCK_M, column = tile.block * BLOCK_N;
    }
};

// One thread's part of copying ROWS × COLUMNS elements: it stays in one column of chunks and steps down the rows.
template <typename Layout, int ROWS, int COLUMNS>
struct Copy {
    static constexpr int CHUNKS = COLUMNS / CHUNK, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "whole passes of all threads");
    static constexpr int PASSES = ROWS / STEP;
    const Element* source;  // of this thread's chunk in row 0
    int stride, row, column;

    __device__ __forceinline__ Copy(const Element* data, int stride_)
        : source(data + threadIdx.x % CHUNKS * CHUNK), stride(stride_), row(threadIdx.x / CHUNKS),
          column(threadIdx.x % CHUNKS * CHUNK) {}

    __device__ __forceinline__ u32 destination(int pass) const {
        return Layout::offset(row + pass * STEP, column / CHUNK);
    }
};

// The operand whose rows run along K (A, and B of TN): rows are clamped to `last`, columns past K become zeros.
template <int ROWS>
struct CopyAlongK : Copy<TileLayout<BLOCK_K, true>, ROWS, BLOCK_K> {
    using Base = Copy<TileLayout<BLOCK_K, true>, ROWS, BLOCK_K>;
    int last;

    __device__ __forceinline__ CopyAlongK(const Element* data, int stride, int first_row, int rows)
        : Base(data + static_cast<long long>(first_row) * stride, stride), last(rows - 1 - first_row) {}

    __device__ __forceinline__ void pass(u32 tile, int index, int first_k, int k) const {
        const long long row = min(this->row + index * Base::STEP, last);
        cp_async_16(tile + this->destination(index), this->source + row * this->stride + first_k,
                    first_k + this->column < k ? 16 : 0);
    }
};

// The operand whose rows are K (B of NN): columns are clamped to the last chunk, rows past K become zeros.
struct CopyAcrossK : Copy<TileLayout<BLOCK_N, true>, BLOCK_K, BLOCK_N> {
    using Base = Copy<TileLayout<BLOCK_N, true>, BLOCK_K, BLOCK_N>;

    __device__ __forceinline__ CopyAcrossK(const Element* data, int stride, int first_column, int columns)
        : Base(data + first_column, stride) {
        source -= max(0, first_column + column + CHUNK - columns);
    }

    __device__ __forceinline__ void pass(u32 tile, int index, int first_k, int k) const {
        const long long at = first_k + row + index * STEP;
        cp_async_16(tile + destination(index), source + at * stride, at < k ? 16 : 0);
    }
};

template <bool K_MAJOR>
struct SelectCopyB {
    using Type = CopyAlongK<BLOCK_N>;
};
template <>
struct SelectCopyB<false> {
    using Type = CopyAcrossK;
};
using CopyA = CopyAlongK<BLOCK_M>;
using CopyB = typename SelectCopyB<TN>::Type;

// The share of tile `first_k / BLOCK_K` that is copied in one of the steps.
__device__ __forceinline__ void copy_share(const CopyA& a, const CopyB& b, u32 stage, int first_k, int k, int step) {
    constexpr int PASSES = CopyA::PASSES + CopyB::PASSES;
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        if (i * STEPS / PASSES != step) continue;
        if (i < CopyA::PASSES) a.pass(stage, i, first_k, k);
        else b.pass(stage + A_BYTES, i - CopyA::PASSES, first_k, k);
    }
}

struct Fragments {
    u32 a[M_TILES][4];
    u32 b[N_TILES / 2][4];  // two 8-column tiles each

    __device__ __forceinline__ void load(const FragmentCursor<LayoutA>& at_a, const FragmentCursor<LayoutB>& at_b,
                                         u32 stage, int step) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) ldmatrix_x4(a[m], at_a.at(stage, m * 16, step * 2));
#pragma unroll
        for (int n = 0; n < N_TILES / 2; ++n) {
            if constexpr (TN) ldmatrix_x4(b[n], at_b.at(stage, n * 16, step * 2));
            else ldmatrix_x4_trans(b[n], at_b.at(stage, step * 16, n * 2));
        }
    }
};

// Every other column runs upwards, so that neighbouring products share an operand.
__device__ __forceinline__ void multiply(Accumulators& c, const Fragments& f) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            const int m = n % 2 ? M_TILES - 1 - i : i;
            mma<Element>(c[m][n], f.a[m], f.b[n / 2][n % 2 * 2], f.b[n / 2][n % 2 * 2 + 1]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, cfg::MIN_BLOCKS) hgemm(const __grid_constant__ Params p) {
    const Position position(p);
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const int tiles = (p.k + BLOCK_K - 1) / BLOCK_K;
    const u32 pipeline = shared_address(shared_memory);
    const CopyA copy_a(p.a, p.a_stride, position.row, p.m);
    const CopyB copy_b(p.b, p.b_stride, position.column, p.n);
    const FragmentCursor<LayoutA> at_a(pipeline, warp_row + lane % 16, lane / 16);
    const FragmentCursor<LayoutB> at_b(pipeline + A_BYTES, TN ? warp_column + lane % 8 + lane / 16 * 8 : lane % 16,
                                       TN ? lane / 8 % 2 : warp_column / CHUNK + lane / 16);

    // What the loop finds in flight: tiles 0 … STAGES − 2 whole, and of the next one the share of the last step.
#pragma unroll
    for (int tile = 0; tile < STAGES; ++tile) {
        if (tile < tiles) {
#pragma unroll
            for (int step = 0; step < (tile < STAGES - 1 ? STEPS : 1); ++step)
                copy_share(copy_a, copy_b, pipeline + tile * STAGE_BYTES, tile * BLOCK_K, p.k, step);
        }
        if (tile < STAGES - 1) cp_async_commit();
    }
    Accumulators c;
    zero(c);

    Fragments fragments[BUFFERS];
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    fragments[0].load(at_a, at_b, 0, 0);

    u32 reading = 0, writing = (STAGES - 1) * STAGE_BYTES;  // offsets of the stages
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const u32 next = reading + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : reading + STAGE_BYTES;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const bool last = step == STEPS - 1;
            if (last) {
                cp_async_wait<STAGES - 2>();
                __syncthreads();
                writing = reading;
            }
            const u32 stage = last ? next : reading;  // of the next step
            if constexpr (BUFFERS == 2) fragments[(step + 1) % 2].load(at_a, at_b, stage, (step + 1) % STEPS);
            // Shares 1 … of the tile begun in the step before, and at the barrier share 0 of the next one.
            const int loading = tile + (last ? STAGES : STAGES - 1);
            if (loading < tiles)
                copy_share(copy_a, copy_b, pipeline + writing, loading * BLOCK_K, p.k, (step + 1) % STEPS);
            if (step == STEPS - 2) cp_async_commit();
            multiply(c, fragments[step % BUFFERS]);
            if constexpr (BUFFERS == 1) fragments[0].load(at_a, at_b, stage, (step + 1) % STEPS);
        }
        reading = next;
    }
    cp_async_wait<0>();
    store(p, c, position.row + warp_row, position.column + warp_column, lane);
}
