// HGEMM as in gemm.cu, for sm_90 and up: larger warp tiles, whose operands TMA loads.
//
// A warp that multiplies 96×64 tiles reads a sixth less of shared memory a product than one with 64×64, but 192 of a
// thread's 255 registers are sums. So there is one set of fragments, and each is loaded again for the next step as soon
// as its last product of this step is issued. A fragment of B is two tiles of 8 columns; WIDTH of them are multiplied
// with a fragment of A at a time, so that A is read from the operand cache, and its next load has time. With WIDTH 2:
//
//     products of a step   B0 B1: A0  A1  A2  A3  A4  A5 | B2 B3: A0  A1  A2  A3  A4  A5 |
//     loads for the next                                 |  B0    A0  A1  A2  A3  A4  A5 | B2 B3
//                                                        |                B1
//
// There is no register for the addresses of copies either: one thread of a warp, of a different one for each k-block,
// loads a whole stage by TMA. Warps wait for each other at the stages' mbarriers only: `full` counts the bytes that
// have landed, `empty` the warps that have read a stage. A stage is filled again LAG k-blocks after it was read, so
// that the thread that loads does not wait for the slowest warp.
//
// Tiles from `split_from` on would fill at most half of a last wave. Two CTAs compute each of them: the second one has
// the second half of K and stores its sums in the workspace, the first one adds them to its own.
#include "gemm.cuh"
#include "attention/semaphore.cuh"
#include "mbarrier.cuh"
#include "offsetof.cuh"
#include "tma.cuh"

constexpr int LAG = 2, WIDTH = cfg::WIDTH, PAIRS = N_TILES / 2;  // pairs of tiles: fragments of B
constexpr int PLANE = 64;  // columns of a box of B, where B's rows run along N: 128 bytes
constexpr bool SPLITS = is_same<Precision, float>;  // f16 sums would round once more
using LayoutA = TileLayout<BLOCK_K, true>;
using LayoutB = TileLayout<TN ? BLOCK_K : PLANE, true>;
constexpr int A_BYTES = LayoutA::bytes(BLOCK_M), PLANE_BYTES = LayoutB::bytes(BLOCK_K);
constexpr int STAGE_BYTES = A_BYTES + BLOCK_N * BLOCK_K * 2;
static_assert(BLOCK_K == 64 && STAGES > LAG, "rows of 128 bytes, TMA's widest swizzle");
static_assert(TN || WARP_N % PLANE == 0, "a warp's columns begin with a box");

// Mirrored by flashlane.lessons.gemm.TmaParams. Strides in elements.
struct Params {
    Element* c;
    int c_stride;
    int m, n, k;
    int blocks_m, blocks_n, group;
    int boxes_b;     // of B in a stage: 1, or one of each plane where N is no multiple of a plane
    int split_from;  // the first tile of which two CTAs have half of K each
    float4* sums;    // of the second ones
    int* arrivals;   // of each of these tiles, 0 between launches
};
struct Maps {
    TensorMap a, b;
};

struct Barriers {
    u64 full[STAGES], empty[STAGES];
};
struct SharedStorage {
    unsigned char stages[STAGES][STAGE_BYTES];
    Barriers barriers;
    int4 tile;  // first row, first column, first element of K, k-blocks
};
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");

__device__ __forceinline__ u32 full_barrier(u32 base, int stage) {
    return barrier_of(base + offsetof(SharedStorage, barriers.full), stage);
}
__device__ __forceinline__ u32 empty_barrier(u32 base, int stage) {
    return barrier_of(base + offsetof(SharedStorage, barriers.empty), stage);
}

// Read again where they are needed: no register keeps them through the loop.
__device__ __forceinline__ int thread_index() { return thread_index_here(); }
__device__ __forceinline__ int cta_index() {
    int cta;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
    return cta;
}

// What a CTA computes.
struct WorkTile {
    int row, column, first_block, blocks;  // where its tile begins in C, and its k-blocks
    int half, split;                       // of K; −1: it has all of K. The index among the tiles that are split.

    __device__ __forceinline__ explicit WorkTile(const Params& p) {
        int tile = cta_index();
        half = -1, split = 0, first_block = 0, blocks = (p.k + BLOCK_K - 1) / BLOCK_K;
        if (tile >= p.split_from) {
            half = (tile - p.split_from) % 2, split = (tile - p.split_from) / 2, tile = p.split_from + split;
            const int front = (blocks + 1) / 2;
            first_block = half ? front : 0, blocks = half ? blocks - front : front;
        }
        const SwizzledTile at = swizzled_tile<false>(tile, p.blocks_m, p.blocks_n, p.group);
        row = at.head * BLOCK_M, column = at.block * BLOCK_N;
    }
};

// One thread: loads k-block `block` of the CTA's tile into a stage.
__device__ __forceinline__ void load(const Params& p, const Maps& maps, u32 base, int block, int stage) {
    const int4 tile = load_shared_int4(base + offsetof(SharedStorage, tile));
    const int row = tile.x, column = tile.y, k = tile.z + block * BLOCK_K;
    const u32 full = full_barrier(base, stage), a = base + stage * STAGE_BYTES, b = a + A_BYTES;
    mbarrier_arrive_expect_tx(full, STAGE_BYTES);
    tma_load(a, maps.a, full, k, row, 0, 0);
    if constexpr (TN) {
        tma_load(b, maps.b, full, k, column, 0, 0);
    } else if (p.boxes_b == 1) {
        tma_load(b, maps.b, full, 0, k, column / PLANE, 0);
    } else {
#pragma unroll 1
        for (int i = 0; i < BLOCK_N / PLANE; ++i)
            tma_load(b + i * PLANE_BYTES, maps.b, full, column + i * PLANE, k, 0, 0);
    }
}

// Whether two chunks further along a row is an XOR of the address, wherever in a row of a fragment a lane begins.
template <typename Layout>
__device__ constexpr bool steps_are_xors() {
    for (int row = 0; row < 8; ++row)
        for (int chunk = 0; chunk < Layout::CHUNKS; ++chunk)
            if (Layout::offset(row, chunk) != (Layout::offset(row, chunk % 2) ^ (chunk / 2 * 32))) return false;
    return true;
}
static_assert(steps_are_xors<LayoutA>() && steps_are_xors<LayoutB>());

// A lane's addresses of fragments in a stage.
struct FragmentReader {
    u32 a, b;

    __device__ __forceinline__ FragmentReader(u32 base, int warp_row, int warp_column, int lane)
        : a(base + LayoutA::offset(warp_row + lane % 16, lane / 16)), b(base + A_BYTES) {
        if constexpr (TN) b += LayoutB::offset(warp_column + lane % 8 + lane / 16 * 8, lane / 8 % 2);
        else b += warp_column / PLANE * PLANE_BYTES + LayoutB::offset(lane % 16, lane / 16);
    }
    __device__ __forceinline__ void load_a(u32 (&fragment)[4], u32 stage, int step, int m) const {
        ldmatrix_x4(fragment, ((a + stage) ^ (step * 32)) + m * 16 * LayoutA::STRIDE);
    }
    // Of two tiles of 8 columns.
    __device__ __forceinline__ void load_b(u32 (&fragment)[4], u32 stage, int step, int pair) const {
        if constexpr (TN) {
            ldmatrix_x4(fragment, ((b + stage) ^ (step * 32)) + pair * 16 * LayoutB::STRIDE);
        } else {
            constexpr int BOX_PAIRS = PLANE / 16;
            const u32 box = (b + stage) ^ (pair % BOX_PAIRS * 32);
            ldmatrix_x4_trans(fragment, box + pair / BOX_PAIRS * PLANE_BYTES + step * 16 * LayoutB::STRIDE);
        }
    }
};

struct Fragments {
    u32 a[M_TILES][4], b[PAIRS][4];

    __device__ __forceinline__ void load(const FragmentReader& from, u32 stage) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) from.load_a(a[m], stage, 0, m);
#pragma unroll
        for (int n = 0; n < PAIRS; ++n) from.load_b(b[n], stage, 0, n);
    }
    // The products of a step, with the loads of the next one, which is `step` in `stage`.
    __device__ __forceinline__ void multiply(Accumulators& c, const FragmentReader& from, u32 stage, int step) {
        static_assert(PAIRS % WIDTH == 0);
#pragma unroll
        for (int first = 0; first < PAIRS; first += WIDTH) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 2 * WIDTH; ++i) {
                    const int n = 2 * first + (m % 2 ? 2 * WIDTH - 1 - i : i);  // neighbours share an operand
                    mma<Element>(c[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
                }
                if (first + WIDTH == PAIRS) from.load_a(a[m], stage, step, m);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const int before = first - WIDTH + i;
                    if (first > 0 && m == i * M_TILES / WIDTH) from.load_b(b[before], stage, step, before);
                }
            }
        }
#pragma unroll
        for (int i = PAIRS - WIDTH; i < PAIRS; ++i) from.load_b(b[i], stage, step, i);
    }
};

__device__ __forceinline__ float4* sums_of(const Params& p, const WorkTile& tile) {
    return p.sums + static_cast<long long>(tile.split) * (M_TILES * N_TILES * THREADS) + thread_index();
}

// The sums of the second half of K, from one CTA to the other.
__device__ __forceinline__ void send_sums(const Params& p, const WorkTile& tile, const Accumulators& c) {
    float4* sums = sums_of(p, tile);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            __stcg(sums + (m * N_TILES + n) * THREADS,
                   make_float4(c[m][n].get(0), c[m][n].get(1), c[m][n].get(2), c[m][n].get(3)));
    __syncthreads();
    if (thread_index() == 0) semaphore_set(p.arrivals + tile.split, 1);
}
template <typename Sums>
__device__ __forceinline__ void add_sums(const Params& p, const WorkTile& tile, Sums& c) {
    if (thread_index() == 0) {
        semaphore_wait(p.arrivals + tile.split, 1);
        p.arrivals[tile.split] = 0;
    }
    __syncthreads();
    const float4* sums = sums_of(p, tile);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const float4 x = __ldcg(sums + (m * N_TILES + n) * THREADS);
            c[m][n].c[0] += x.x, c[m][n].c[1] += x.y, c[m][n].c[2] += x.z, c[m][n].c[3] += x.w;
            if (n % 4 == 3) wait_for_load(__float_as_uint(c[m][n].c[3]));  // or ptxas loads more at once, and spills
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hgemm(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    const u32 base = shared_address(shared_memory);
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // TMA's swizzle counts from there
        for (int i = 0; i < STAGES; ++i)
            mbarrier_init(full_barrier(base, i), 1), mbarrier_init(empty_barrier(base, i), WARPS * WARP_ARRIVALS);
        fence_mbarrier_init();
        const WorkTile tile(p);
        const uint4 words = make_uint4(tile.row, tile.column, tile.first_block * BLOCK_K, tile.blocks);
        store_shared(base + offsetof(SharedStorage, tile), words);
    }
    __syncthreads();
    const int blocks = load_shared(base + offsetof(SharedStorage, tile.w));
    if (threadIdx.x == 0)
        for (int i = 0; i < min(STAGES - LAG, blocks); ++i) load(p, maps, base, i, i);

    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    const FragmentReader from(base, warp / WARPS_N * WARP_M, warp % WARPS_N * WARP_N, lane);
    Accumulators c;
    zero(c);
    Fragments fragments;
    mbarrier_wait(full_barrier(base, 0), 0);
    fragments.load(from, 0);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const int stage = block % STAGES, next = (block + 1) % STAGES, loaded = block + STAGES - LAG;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            // (Above the steps it would cost three registers, which are spilled.)
            if (step == 0 && loaded < blocks && thread_index() == block % WARPS * WARP) {
                if (loaded >= STAGES) mbarrier_wait(empty_barrier(base, loaded % STAGES), (loaded / STAGES - 1) % 2);
                load(p, maps, base, loaded, loaded % STAGES);
            }
            const bool last = step == STEPS - 1;
            if (last && block + 1 < blocks) mbarrier_wait(full_barrier(base, next), (block + 1) / STAGES % 2);
            u32 offset = (last ? next : stage) * STAGE_BYTES;
            asm volatile("" : "+r"(offset));  // or all addresses of a stage are computed before its first step
            fragments.multiply(c, from, offset, (step + 1) % STEPS);
        }
        mbarrier_arrive_warp(empty_barrier(base, stage), thread_index() % WARP);
    }

    const WorkTile tile(p);
    if constexpr (SPLITS) {
        if (tile.half == 1) return send_sums(p, tile, c);
        if (tile.half == 0) add_sums(p, tile, c);
    }
    const int thread = thread_index(), own = __shfl_sync(0xffffffffu, thread / WARP, 0);
    store(p, c, tile.row + own / WARPS_N * WARP_M, tile.column + own % WARPS_N * WARP_N, thread % WARP);
}
