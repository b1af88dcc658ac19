// In-kernel zeroing and postprocess of dQ by idle warps. The preprocess kernel need then not write all zeros of
// dq_accum, nor the postprocess kernel read all its sums: both would go through device memory, and stay in the
// L2 cache here.
//
// Each tile is assigned some m-blocks of its head (dq_assignment.cuh), which are taken in the order of the tiles: to be
// zeroed some time before the head's first tile begins, and to have their dQ written when all tiles of the head have
// added. A warp has one assignment of each kind and works on the one that is due, so that it never waits for another
// warp: zeros for a tile are due when the tile `zeroed_before` tiles earlier is taken, and `zeroed_before` is more
// tiles than a section of heads has. Tiles wait for zeros, but nothing waits for dQ: it is written one m-block at a
// time, between which zeroing may become due.
#pragma once
#include "hopper/backward/gemm.cuh"
#include "hopper/backward/in_kernel_zeros.cuh"
#include "hopper/backward/one_cta/storage.cuh"
#include "memory_order.cuh"

constexpr unsigned PAUSE = 1000, LONG_PAUSE = 4000;       // ns

// dQ of a slice of an m-block, by a warp; `row` is the m-block's first row, and `rows` those from there to
// the sequence's end.
__device__ __forceinline__ void write_dq_slice(const Params& p, long long m_block, int slice, int batch, int head,
                                               long long row, int rows) {
    if (MIXED_DQ && slice == 1) {
        DqElement* const dq = static_cast<DqElement*>(p.dq) + batch * p.dq_batch + head * p.dq_head + row * p.dq_row;
#pragma unroll 1
        for (int first = 0; first < BLOCK_M; first += 16)
            write_dq_block(p.dq_accum + m_block * DQ_ACCUM_FLOATS, dq, p.dq_row, rows, first, 64, p.scale);
        return;
    }
    SliceRows from(warpgroup_thread() % WARP, p.dq_accum + m_block * DQ_ACCUM_FLOATS,
                   static_cast<DqElement*>(p.dq) + batch * p.dq_batch + head * p.dq_head + row * p.dq_row, p.dq_row,
                   rows, slice, 0);
#pragma unroll 1
    for (; __any_sync(0xffffffffu, from.rows > 0); from.next(p.dq_row)) from.write_dq(slice, p.scale);
}

struct InKernelDqWarp : AssignedBlocks {
    __device__ __forceinline__ explicit InKernelDqWarp(const Params& params) : AssignedBlocks{params} {}

    __device__ __forceinline__ void run() const {
        griddepcontrol_wait();
        const int items = p.first_tiles + (p.tiles - p.first_tiles) * p.splits;
        int to_zero = p.zeroed_before + take(ZEROING_TAKEN), to_write = take(POSTPROCESS_TAKEN);
        int written = -1;                                 // m-blocks of the tile `to_write`; −1: its dQ is not begun
        while (true) {
            const int taken = load_relaxed(p.counters + TILES_TAKEN);
            if (to_zero < p.tiles) {
                if (uniform(to_zero - p.zeroed_before <= taken)) {
                    zero<1>(to_zero, 0, [] { return true; });
                    to_zero = p.zeroed_before + take(ZEROING_TAKEN);
                    continue;
                }
            } else if (written < 0 && uniform(taken >= items)) {
                return;
            }
            if (written < 0 && to_write < p.tiles && uniform(taken < p.write_until && complete(to_write))) {
                __syncwarp();                             // what the first lane has acquired holds for all lanes
                written = 0;
            }
            if (written < 0) {
                __nanosleep(LONG_PAUSE);
            } else if (write_dq(to_write, written++)) {
                to_write = take(POSTPROCESS_TAKEN), written = -1;
            }
        }
    }

    __device__ __forceinline__ int take(int counter) const {
        return uniform(threadIdx.x % WARP == 0 ? atomicAdd(p.counters + counter, 1) : 0);
    }
    // Whether all tiles of the head have added.
    __device__ __forceinline__ bool complete(int tile) const {
        return load_acquire(p.added + at(tile).head) == p.blocks * p.splits;
    }
    // dQ of the tile's next m-block; whether it was the last.
    __device__ __forceinline__ bool write_dq(int tile, int written) const {
        const SwizzledTile where = at(tile);
        const BlockRange m_blocks = assigned(where);
        const int group = p.heads / p.kv_heads;
        const int batch = where.head / p.kv_heads, first_head = (where.head - batch * p.kv_heads) * group;
        const int m_block = m_blocks.low + written, row = m_block % p.row_blocks * BLOCK_M;
        if (m_block < m_blocks.high) {
#pragma unroll 1
            for (int slice = 0; slice < SLICES; ++slice)
                write_dq_slice(p, first_m_block(where) + m_block, slice, batch, first_head + m_block / p.row_blocks,
                               row, p.seqlen.seqlen_q - row);
        }
        if (m_block + 1 < m_blocks.high) return false;
        __syncwarp();
        if (threadIdx.x % WARP == 0) p.written[tile] = 1;
        return true;
    }
};

// Zeroes m-blocks for each tile that this CTA takes.
struct ZeroingWarp {
    const Params& p;
    const u32 base;

    __device__ __forceinline__ void run() const {
        griddepcontrol_wait();                            // for the semaphores
        const AssignedBlocks blocks{p};
        for (u32 tiles = 0;; ++tiles) {
            const u32 stage = tiles % TILE_STAGES;
            while (!uniform(mbarrier_try_wait(barrier_of(SMEM(tile_full), stage), tiles / TILE_STAGES % 2)))
                __nanosleep(PAUSE);
            const TileCoordinates at = tile_coordinates(base, stage);
            wait_for_load(at.batch);
            __syncwarp();
            if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier_of(SMEM(tile_empty), stage));
            if (uniform(at.batch) < 0) return;
            if (FIRST_TILE_OWN && tiles == 0) continue;
            // Of the splits of a tile the first one.
            if (SPLIT_Q && at.split() > 0 && (at.split() - 1) % p.splits != 0) continue;
            const u32 next = tiles + 1;
            blocks.zero_ahead<1>(at.n_block, at.batch * p.kv_heads + at.head, 0, FIRST_TILE_OWN ? gridDim.x : 0, [&] {
                return mbarrier_test_wait(barrier_of(SMEM(tile_full), next % TILE_STAGES), next / TILE_STAGES % 2);
            });
        }
    }
};

// Reports the tiles to which the consumers of this CTA have made all additions, one thread. It polls seldom, as it
// shares its scheduler with consumers. The last additions of a tile are made in the next tile that has steps. So it
// keeps two tiles, whose stages it has released: it waits for the first only when it knows the tile that the
// consumers need to go on.
struct AdditionsWarp {
    const Params& p;
    const u32 base;
    u32 seen = 0, reported = 0;                           // tiles with steps
    int first = 0, second = 0;                            // seen, not reported: 2 · head + (1 for a split of a tile)

    __device__ __forceinline__ void run() {
        griddepcontrol_wait();
        for (u32 tiles = 0;; ++tiles) {
            const u32 stage = tiles % TILE_STAGES;
            while (!mbarrier_try_wait(barrier_of(SMEM(tile_full), stage), tiles / TILE_STAGES % 2))
                if (!report_first()) __nanosleep(PAUSE);
            const TileCoordinates at = tile_coordinates(base, stage);
            const int steps = tile_keys(base, stage).steps,
                      tile = 2 * (at.batch * p.kv_heads + at.head) + (at.split() > 0);
            wait_for_load(tile | steps);
            mbarrier_arrive(barrier_of(SMEM(tile_empty), stage));
            if (at.batch < 0) break;
            if (steps == 0) {
                report(tile);
                continue;
            }
            while (seen - reported == 2)                  // the first is added to while the second is made
                if (!report_first()) __nanosleep(PAUSE);
            (seen == reported ? first : second) = tile, ++seen;
        }
        while (reported < seen)
            if (!report_first()) __nanosleep(PAUSE);
    }

    // A tile has made all its additions, which this thread knows from other threads of its CTA.
    __device__ __forceinline__ void report(int tile) const {
        fence_acq_rel_gpu();                              // and releases theirs
        atomicAdd(p.added + tile / 2, tile % 2 > 0 ? 1 : p.splits);
    }
    // Whether there was a tile to report.
    __device__ __forceinline__ bool report_first() {
        if (reported == seen || load_shared_acquire(SMEM(tiles_added)) < (reported + 1) * 4 * CONSUMERS) return false;
        report(first);
        first = second, ++reported;
        return true;
    }
};
