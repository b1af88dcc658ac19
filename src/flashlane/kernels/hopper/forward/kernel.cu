// Attention forward for Hopper: wgmma products, TMA loads, warp specialisation.
//
// The kernel is persistent: a CTA takes work tile after work tile. The n-blocks of all its tiles are one stream,
// and each step of the stream has a stage of the pipeline in shared memory, which holds K of its n-block and V of
// the n-block before:
//
//     producer warp      K0      K1 V0   K2 V1   K3 V2 | K0' V3  K1' V0' …                      (' the next tile)
//     each consumer      S0      S1 O0   S2 O1   S3 O2 | S0' O3  S1' O0' …                      S = Q·Kᵀ, O += P·V
//       under them         max,exp 0  1       2       3     store, 0'   …                       softmax of the step's S
//
// So the two products of a step are in flight at once, the softmax of S runs under the product before, and the pipeline
// does not drain between tiles. A consumer is a warpgroup with 64 rows of the tile; with PINGPONG the consumers issue
// their products one after another, so that the softmax of one runs under the products of the others. Row maxima are
// updated lazily, or, with DEFERRED_MAX, where sums demand it (attention/online_softmax.cuh); row sums stay per lane
// until the end. A tile is walked from its last n-block to its first.
#include "hopper_clustered.cuh"
#include "hopper/forward/mainloop.cuh"
#include "hopper/forward/producer.cuh"

// Whether one consumer has all rows of a tile. Then it computes scores from every stage.
constexpr bool ALL_ROWS = CONSUMERS == 1 && CLUSTER == 1 && !cfg::SPLIT;
// Whether all rows of a tile see its first keys, so that the loop over the first n-blocks that a consumer skips can be
// left out. With more than two consumers the code without that loop is up to 3 % slower (D 64 256x64, D 128 192x64),
// because ptxas schedules the rest differently.
constexpr bool ALL_SEE_FIRST_KEYS = ALL_ROWS || (CONSUMERS <= 2 && !cfg::HAS_LEFT && !cfg::SPLIT && !cfg::BLOCK_LISTS);

// A consumer's steps: one for each stage that the producer fills, in the same order.
struct Consumer : Mainloop {
    bool pv_pending = false, started = false;  // the last P still waits for its V; a step was made
    WorkTile pending{};                        // the tile of that P

    using Mainloop::Mainloop;

    __device__ __forceinline__ void run() {
        if (cfg::PINGPONG && rows.warpgroup == CONSUMERS - 1) pingpong_arrive();
        while (true) {
            tile = wait_tile();
            if (tile.batch < 0) return finish();
            sequence = Seqlen(p.seqlen, tile.batch);
            if constexpr (cfg::BLOCK_LISTS) {
                walk_list();
                continue;
            }
            const BlockRange all = n_blocks_of_tile(p, sequence, tile);
            BlockRange mine = n_blocks_of_rows(p, sequence, tile.row + rows.first(), CONSUMER_ROWS);
            mine.low = max(mine.low, all.low), mine.high = min(mine.high, all.high);
            if (COMBINE_IN_KERNEL && all.empty()) {
                release_q();
                if (tile.split() == 0) combine.combine<1>(p, rows, tile, 0);  // no split has n-blocks
                continue;
            }
            if (mine.empty()) mine = {all.low, all.low};
            const int last_v_rows = sequence.k_length - (all.high - 1) * BLOCK_N;

            int n_block = all.high - 1;
            if (!all.empty()) started = true;
            if constexpr (!ALL_ROWS)
                for (; n_block >= mine.high; --n_block) step_without_scores();  // after the last key of these rows
            if constexpr (COMBINE_IN_KERNEL) {
                if (pv_pending) last_step<true>(pending);
                pv_pending = false;
                combine_stored();
            }
            if (mine.empty() && (!ALL_ROWS || all.empty())) {
                release_q();
                epilogue().store_zeros(tile);
                combine.add(tile);
                continue;
            }
            load_q_fragments();
            begin_rows();
            n_block = step_over(mine, n_block, n_block == all.high - 1 ? min(BLOCK_N, last_v_rows) : BLOCK_N);
            if (!cfg::Q_IN_REGISTERS) release_q();
            end_tile();
            if constexpr (!ALL_SEE_FIRST_KEYS)
                for (; n_block >= all.low; --n_block) step_without_scores();  // before the first key of these rows
        }
    }

    // BLOCK_LISTS: all consumers walk over the whole list. Blocks that are hidden from this consumer's rows lie at the
    // ends of the list where its order allows that, and are skipped there. In the middle their scores are masked.
    __device__ __forceinline__ void walk_list() {
        const int steps = tile.listed();
        if (steps == 0) {
            release_q();
            epilogue().store_zeros(tile);
            return;
        }
        started = true;
        int i = 0;
        if constexpr (CONSUMERS > 1) {
#pragma unroll 1
            for (; i < steps; ++i) {
                wait_kv();
                read_listed();
                if (listed.state(rows.warpgroup) != BLOCK_NONE) break;
                step_without_scores();
            }
            if (i == steps) {
                release_q();
                epilogue().store_zeros(tile);
                return;
            }
        }
        load_q_fragments();
        begin_rows();
        if constexpr (cfg::ACROSS_TILES) {
            if (pv_pending) boundary_step(pending, 0, true);
            else first_step(0, true);
            ++i;
            if constexpr (cfg::DEFERRED_MAX) {
                i += walk_by_state();
            } else {
#pragma unroll 1
                for (; !listed.last(rows.warpgroup); ++i) step<true>(0);
            }
        } else {
            issue_first_product();
#pragma unroll 1
            for (++i;; ++i) {
                finish_step(0, true);
                if (listed.last(rows.warpgroup)) break;
                issue_both_products();
            }
        }
        if (!cfg::Q_IN_REGISTERS) release_q();
        end_tile();
        if constexpr (CONSUMERS > 1) {
#pragma unroll 1
            for (; i < steps; ++i) step_without_scores();
        }
    }

    // DEFERRED_MAX: the rest of a list, in which full blocks take no row maximum when all rows have one, from a full
    // block before. Runs of full blocks have a loop of their own: one loop for both would spill. Returns the steps.
    __device__ __forceinline__ int walk_by_state() {
        const auto is_full = [&] { return listed.state(rows.warpgroup) == BLOCK_FULL; };
        const auto is_last = [&] { return listed.last(rows.warpgroup); };
        int walked = 0;
#pragma unroll 1
        for (; !is_full(); ++walked) {
            if (is_last()) return walked;
            step<true>(0);
        }
        if (is_last()) return walked;
        peek();
        while (true) {
#pragma unroll 1
            while (is_full()) {
                step<false>(0), ++walked;
                if (is_last()) return walked;
                peek();
            }
#pragma unroll 1
            while (!is_full()) {
                step<true>(0), ++walked;
                if (is_last()) return walked;
                peek();
            }
        }
    }
    // The entry of the next step's n-block.
    __device__ __forceinline__ void peek() {
        wait_kv();
        read_listed();
    }

    // The n-blocks that some of these rows see. Those on the right are masked, those in the middle
    // are not, and those on the left of a window are masked again.
    __device__ __forceinline__ int step_over(BlockRange mine, int n_block, int first_v_rows) {
        const int first_row = tile.row + rows.first(), first_query = first_row / PACK_GQA;
        const int last_query = min((first_row + CONSUMER_ROWS - 1) / PACK_GQA, sequence.q_length - 1);
        BlockRange unmasked = unmasked_n_block_range<BLOCK_N>(mask_of(p, sequence), first_query, last_query);
        // A row that saw no key in the blocks before has no maximum yet: its first block takes one.
        if constexpr (cfg::DEFERRED_MAX && cfg::HAS_RIGHT)
            unmasked.high -= unmasked.high < mine.high &&
                             mask_of(p, sequence).end(first_query) == unmasked.high * BLOCK_N;
        if constexpr (cfg::DEFERRED_MAX && ROW_OFFSET)  // else the maximum would be raised in each block
            if (scores_rise()) unmasked.high = unmasked.low = mine.low;
        if constexpr (!cfg::ACROSS_TILES) {
            if constexpr (cfg::DEFERRED_MAX) unmasked.high = min(unmasked.high, n_block);  // the first takes a maximum
            issue_first_product();
#pragma unroll 1
            while (true) {
                finish_step(n_block, n_block >= unmasked.high || n_block < unmasked.low);
                if (--n_block < mine.low) return n_block;
                issue_both_products();
            }
        }
        const bool masked = n_block >= unmasked.high || n_block < unmasked.low;
        if (!COMBINE_IN_KERNEL && pv_pending) boundary_step(pending, n_block, masked);
        else first_step(n_block, masked);
        if (OUT_OF_BOUNDS_ROWS) v_rows = first_v_rows;
        --n_block;
        // Uniform again: of a kernel with three loops ptxas may otherwise keep all descriptors in ordinary registers,
        // which takes up to 40 R2UR a step.
        if constexpr (cfg::HAS_LEFT)
            mine.low = uniform(mine.low), unmasked = {uniform(unmasked.low), uniform(unmasked.high)};
#pragma unroll 1
        for (; n_block >= mine.low && n_block >= unmasked.high; --n_block) step<true>(n_block);
#pragma unroll 1
        for (; n_block >= mine.low && n_block >= unmasked.low; --n_block) step<false>(n_block);
        if constexpr (cfg::HAS_LEFT) {
#pragma unroll 1
            for (; n_block >= mine.low; --n_block) step<true>(n_block);
        }
        return n_block;
    }
    // Leaves the tile's last P to the next stage, which has its V: to the next tile, or at once.
    __device__ __forceinline__ void end_tile() {
        if constexpr (cfg::ACROSS_TILES) pv_pending = true, pending = tile;
        else last_step<true>(tile);
    }
    __device__ __forceinline__ void step_without_scores() {
        if (pv_pending) {
            last_step(pending);
            pv_pending = false;
        } else {
            skip_step();
        }
    }
    __device__ __forceinline__ void finish() {
        if (pv_pending) {
            last_step(pending);
        } else if (started) {
            skip_step();
        }
        combine.run(p, rows, base);
    }
};

template <typename Storage>
__device__ __forceinline__ void init_barriers(u32 base) {
    constexpr int CONSUMER_ARRIVALS = 4 * CONSUMERS * WARP_ARRIVALS;
    constexpr int PRODUCER_ARRIVALS = cfg::GATHER ? WARPGROUP : 1;  // with TMA one thread arrives, and the bytes follow
    for (int i = 0; i < Q_STAGES; ++i) {
        mbarrier_init(barrier_of(SHARED(base, q_barriers.full), i), 1);
        mbarrier_init(barrier_of(SHARED(base, q_barriers.empty), i), CONSUMER_ARRIVALS);
    }
    for (int i = 0; i < STAGES; ++i)
        for (int j = 0; j < KV_PIPELINES; ++j) {
            const u32 pipeline = base + static_cast<u32>(sizeof(StageBarriers<STAGES>)) * j;
            mbarrier_init(barrier_of(SHARED(pipeline, kv_barriers[0].full), i), PRODUCER_ARRIVALS);
            mbarrier_init(barrier_of(SHARED(pipeline, kv_barriers[0].empty), i), CONSUMER_ARRIVALS);
            if constexpr (CLUSTER > 1)
                mbarrier_init(barrier_of(SHARED_OF(Storage, base, peer_empty), STAGES * j + i), 1);
        }
    if constexpr (CLUSTER > 1) {
        mbarrier_init(SHARED_OF(Storage, base, next_tile_full), 1);
        mbarrier_init(SHARED_OF(Storage, base, next_tile_empty), 1);
    }
    fence_mbarrier_init();
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, cfg::CTAS_PER_SM)
    hopper_forward(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory);
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the swizzle counts from there
        init_barriers<SharedStorage>(base);
        tma_prefetch(p.q);
        if (!cfg::GATHER) tma_prefetch(p.k), tma_prefetch(p.v);
    }
    if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
    griddepcontrol_wait();  // for whatever kernel is before this one on the stream
    const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (warp == 0 || cfg::GATHER) {
            if constexpr (cfg::BLOCK_LISTS) Producer{p, base, rank, warp}.run_listed();
            else Producer{p, base, rank, warp}.run();
        }
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        Consumer(p, base, warpgroup - 1).run();
    }
    if constexpr (CLUSTER > 1) {  // no CTA leaves while its peer may still write to its shared memory
        __syncwarp();
        cluster_arrive(), cluster_wait();
    }
}
