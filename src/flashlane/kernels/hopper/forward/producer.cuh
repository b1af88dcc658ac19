// The producer: it takes work tiles and loads Q, K and V for the consumers.
//
// K and V come in three ways, of which a kernel has one:
//     by TMA            one warp; a box is a chunk of columns (and of a paged cache a page, or a part of one)
//     by multicast      CLUSTER CTAs have neighbouring rows of one tile head and walk over the same n-blocks: each
//                       loads its share of a block's rows into all of them
//     by cp.async       GATHER: pages that no box fits; four warps, of which each lane copies 16 bytes of a row
#pragma once
#include "cluster.cuh"
#include "hopper/forward/tile_scheduler.cuh"
#include "mbarrier.cuh"

// BLOCK_LISTS: the list of a tile, from its last entry to its first. A lane has every 32nd entry.
struct ListReader {
    const int* from;
    int last, lane, loaded = 0;

    __device__ __forceinline__ ListReader(const Params& p, const WorkTile& tile, int of_lane)
        : from(p.lists.entries), last(tile.listed() - 1), lane(of_lane) {
        if (last < 0) return;
        from += p.lists.row(tile.batch, tile.tile_head(), tile.row / BLOCK_M) * p.lists.pitch;
        loaded = from[max(0, last - lane)];
    }
    __device__ __forceinline__ ListedBlock entry(int i) {
        const int read = last - i;
        if (read > 0 && read % WARP == 0) loaded = from[max(0, i - lane)];
        return {__shfl_sync(0xffffffffu, loaded, read % WARP)};
    }
};

struct Producer {
    const Params& p;
    const u32 base;
    const int rank;                // of the CTA in its cluster
    const int warp, lane = threadIdx.x % WARP;
    PipelineState<STAGES> kv;
    PipelineState<Q_STAGES> queries;
    // Words with the index of the next tile; GATHER: two, since the last one may still be read.
    PipelineState<cfg::GATHER ? 2 : 1> next;
    Arrivals arrivals;             // ARRIVALS

    static constexpr int TAKEN_AHEAD = 1;  // n-blocks before a tile's last one at which the next tile is taken
    static constexpr int PREPARED_AHEAD = 3;  // BLOCK_LISTS: a tile's last n-blocks, under which the next is prepared

    // An n-block of a tile.
    struct KvBlock {
        Seqlen sequence;
        int head, n_block;         // key/value head; BLOCK_LISTS: the n-block's entry
        int column;                // of v: the first of the tile's slice
        int own_row = NOT_OWN;     // ARRIVALS: of its first key in the own tensors

        __device__ __forceinline__ int first_key() const {
            return (cfg::BLOCK_LISTS ? ListedBlock{n_block}.block() : n_block) * BLOCK_N;
        }
    };

    // The thread of a warp that issues its loads. Tiles of few rows, which wait for device memory, were 0.3 % slower
    // with an elected one (docs/notebook/0059).
    __device__ __forceinline__ bool issues() const { return CONSUMERS > 1 ? elect_one() : lane == 0; }
    // One thread of all that work on the same tiles.
    __device__ __forceinline__ bool takes_tiles() const { return threadIdx.x == 0 && rank == 0; }

    // The producer of a CTA, or of a cluster: tiles of the launch, until none is left.
    __device__ __forceinline__ void run() {
        begin_arrivals();
        TileScheduler scheduler(p);
        const int workers = gridDim.x / CLUSTER;
        int index = blockIdx.x / CLUSTER;
        KvBlock before{Seqlen(p.seqlen, 0), 0, 0, 0};
        bool started = false;
        while (true) {
            const WorkTile tile = scheduler.tile_of(index);
            if (tile.batch < 0) break;
            int next_index = 0;
            const auto take_next = [&] {
                if (takes_tiles()) next_index = workers + atomicAdd(p.tiles_taken, 1);
            };
            KvBlock block{Seqlen(p.seqlen, tile.batch), tile.tile_head() / p.group, 0, tile.v_slice() * COLUMNS_V};
            const BlockRange range = n_blocks_of_tile(p, block.sequence, tile);
            if (range.empty()) load_tile(tile, false, block.sequence), take_next();
            // The CTA that is done first takes the next tile, so it is taken late: while the last blocks are loaded.
            const int take_at = min(range.low + TAKEN_AHEAD, range.high - 1);
            for (block.n_block = range.high - 1; block.n_block >= range.low; --block.n_block) {
                if (block.n_block == take_at) take_next();
                wait_arrival(block);
                load_stage(true, block, started, before);
                // V of the block before must not wait for Q: the consumers need it to free Q's stage.
                if (block.n_block == range.high - 1) load_tile(tile, true, block.sequence);
                before = block, started = true;
            }
            index = broadcast(next_index);
        }
        if (started) load_stage(false, before, true, before);
        load_tile({-1, 0, 0, 0}, false, before.sequence);
        // The last index that any CTA takes; nothing reads the counter after it.
        if (takes_tiles() && index == scheduler.total + workers - 1) *p.tiles_taken = 0;
    }

    // BLOCK_LISTS. While the last n-blocks of a tile are loaded, the next tile is taken, looked up, and its list begun:
    // each takes the latency of the L2 cache.
    __device__ __forceinline__ void run_listed() {
        TileScheduler scheduler(p);
        const int workers = gridDim.x;
        int index = blockIdx.x;
        KvBlock before{Seqlen(p.seqlen, 0), 0, 0, 0};
        bool started = false;
        WorkTile tile = scheduler.tile_of(index);
        ListReader list(p, tile, lane);
        while (tile.batch >= 0) {
            int taken = 0, done = 0;
            WorkTile next{-1, 0, 0, 0};
            ListReader next_list(p, next, lane);
            const auto prepare = [&] {
                if (done == 0) {
                    if (takes_tiles()) taken = workers + atomicAdd(p.tiles_taken, 1);
                } else if (done == 1) {
                    index = __shfl_sync(0xffffffffu, taken, 0);
                    next = scheduler.tile_of(index);
                } else if (done == 2) {
                    next_list = ListReader(p, next, lane);
                }
                ++done;
            };
            KvBlock block{Seqlen(p.seqlen, tile.batch), tile.tile_head() / p.group, 0, tile.v_slice() * COLUMNS_V};
            const int steps = tile.listed();
            if (steps == 0) load_tile(tile, false, block.sequence);
            for (int i = steps - 1; i >= 0; --i) {
                if (i < PREPARED_AHEAD) prepare();
                block.n_block = list.entry(i).word;
                load_stage(true, block, started, before);
                if (i == steps - 1) load_tile(tile, true, block.sequence);
                before = block, started = true;
            }
            while (done < PREPARED_AHEAD) prepare();
            tile = next, list = next_list;
        }
        if (started) load_stage(false, before, true, before);
        load_tile({-1, 0, 0, 0}, false, before.sequence);
        // The last index that any CTA takes; nothing reads the counter after it.
        if (takes_tiles() && index == scheduler.total + workers - 1) *p.tiles_taken = 0;
    }

    // ---- one stage: K of an n-block and V of the one before it, of which either may be missing

    __device__ __forceinline__ void load_stage(bool has_k, const KvBlock& k, bool has_v, const KvBlock& v) {
        const u32 stage = SHARED(base, kv) + kv.index * STAGE_BYTES, barrier = barrier_of(base, kv.index);
        const u32 k_full = SHARED(barrier, kv_barriers[K].full), v_full = SHARED(barrier, kv_barriers[V].full);
        const u32 k_bytes = has_k ? K_BYTES : 0, v_bytes = has_v ? V_BYTES : 0;
        acquire<K>();
        if (has_k) publish_listed({k.n_block});
        expect(k_full, k_bytes + (cfg::ONE_BARRIER ? v_bytes : 0));
        if (has_k) load_k(stage, k_full, k);
        if constexpr (!cfg::ONE_BARRIER) {
            if (cfg::GATHER) mbarrier_arrive_cp_async(k_full);
            acquire<V>();
            expect(v_full, v_bytes);
        }
        if (has_v) load_v(stage + K_BYTES, v_full, v);
        if (cfg::GATHER) mbarrier_arrive_cp_async(v_full);
        kv.advance();
    }

    template <typename Storage = SharedStorage>
    __device__ __forceinline__ void publish_listed(ListedBlock listed) const {
        if constexpr (cfg::BLOCK_LISTS)
            if (issues()) store_shared(listed_block<Storage>(base, kv.index), static_cast<u32>(listed.word));
    }
    // Waits until all consumers have released the stage. Those of the peer CTA release it to their own producer, which
    // arrives here for them: a consumer's arrival then needs no fence for the cluster, and the memory model orders its
    // reads before our writes (docs/notebook/0003).
    template <int PIPELINE, typename Storage = SharedStorage>
    __device__ __forceinline__ void acquire() const {
        mbarrier_wait(barrier_of(SHARED(base, kv_barriers[PIPELINE].empty), kv.index), kv.phase ^ 1);
        if constexpr (CLUSTER > 1) {
            const u32 mine = barrier_of(SHARED_OF(Storage, base, peer_empty[PIPELINE]), kv.index);
            if (lane == 0) mbarrier_arrive_cluster(address_in(mine, rank ^ 1));
            mbarrier_wait_cluster(mine, kv.phase);
        }
    }
    // (A template, as Params has no such base without ARRIVALS.)
    template <typename AllParams = Params>
    __device__ __forceinline__ void begin_arrivals() {
        if constexpr (cfg::ARRIVALS) arrivals = Arrivals(static_cast<const AllParams&>(p), lane);
    }
    template <typename AllParams = Params>
    __device__ __forceinline__ void wait_arrival(KvBlock& block) {
        if constexpr (cfg::ARRIVALS) {
            const int row = block.sequence.k_first + block.first_key();
            const int stop = min(row + BLOCK_N, block.sequence.k_first + block.sequence.k_length);
            block.own_row = arrivals.wait(static_cast<const AllParams&>(p), row, stop);
        }
    }
    // The bytes that are to come until the barrier's phase is complete. cp.async counts none: it arrives afterwards.
    __device__ __forceinline__ void expect(u32 barrier, u32 bytes) const {
        if (!cfg::GATHER && issues()) mbarrier_arrive_expect_tx(barrier, bytes);
        if (cfg::PAGED) __syncwarp();
    }

    __device__ __forceinline__ void load_k(u32 destination, u32 barrier, const KvBlock& block) {
        if constexpr (cfg::GATHER) gather<2 * QK_STEPS>(p.k_rows, destination, block, 0, HEAD_DIM);
        else load<QK_CHUNKS>(k_of(block), destination, barrier, block, 0);
    }
    __device__ __forceinline__ void load_v(u32 destination, u32 barrier, const KvBlock& block) {
        if constexpr (cfg::GATHER)
            gather<COLUMNS_V / VECTOR>(p.v_rows, destination, block, block.column, cfg::HEAD_DIM_V - block.column);
        else load<V_CHUNKS>(v_of(block), destination, barrier, block, block.column);
    }
    // Where a block lies.
    template <typename AllParams = Params>
    __device__ __forceinline__ const TensorMap& k_of(const KvBlock& block) const {
        if constexpr (cfg::ARRIVALS) return block.own_row == NOT_OWN ? p.k : static_cast<const AllParams&>(p).own_k;
        return p.k;
    }
    template <typename AllParams = Params>
    __device__ __forceinline__ const TensorMap& v_of(const KvBlock& block) const {
        if constexpr (cfg::ARRIVALS) return block.own_row == NOT_OWN ? p.v : static_cast<const AllParams&>(p).own_v;
        return p.v;
    }
    template <int CHUNKS>
    __device__ __forceinline__ void load(const TensorMap& map, u32 destination, u32 barrier, const KvBlock& block,
                                         int column) {
        const Seqlen& sequence = block.sequence;
        if constexpr (cfg::PAGED) {
            load_pages<BLOCK_N, cfg::BOX_ROWS, CHUNKS, KV_CHUNK>(p.seqlen, sequence, map, destination, barrier,
                                                                 block.n_block, block.head, lane, column);
        } else if (issues()) {
            constexpr int SHARE = BLOCK_N / CLUSTER;
            SequenceRows rows{sequence.k_first, sequence.k_length, sequence.k_batch};
            int row = block.first_key() + rank * SHARE;
            if (cfg::ARRIVALS && block.own_row != NOT_OWN) rows.first = 0, row = block.own_row;
            destination += rank * SHARE * ROW_BYTES;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int first = column + chunk * CHUNK_COLUMNS;
                if constexpr (CLUSTER == 1)
                    load_rows<ENDS_WITH_SEQUENCE>(destination + chunk * KV_CHUNK, map, barrier, first, row, block.head,
                                                  rows);
                else
                    load_rows_multicast<ENDS_WITH_SEQUENCE>(destination + chunk * KV_CHUNK, map, barrier, first, row,
                                                            block.head, rows, (1 << CLUSTER) - 1);
            }
        }
    }
    template <int VECTORS>
    __device__ __forceinline__ void gather(const PagedRows& from, u32 destination, const KvBlock& block, int column,
                                           int columns) {
        gather_rows<Element, BLOCK_N, WARPS, VECTORS, KV_CHUNK>(p.seqlen, block.sequence, from, destination,
                                                                block.n_block, block.head, warp, column, columns);
    }

    // ---- tiles

    // Publishes a tile to the consumers, with its Q if it has keys.
    __device__ __forceinline__ void load_tile(const WorkTile& tile, bool has_keys, const Seqlen& sequence) {
        if (cfg::GATHER && warp != 0) return;
        const u32 q = SHARED(base, q) + queries.index * Q_BYTES, barrier = barrier_of(base, queries.index);
        const u32 full = SHARED(barrier, q_barriers.full);
        mbarrier_wait(SHARED(barrier, q_barriers.empty), queries.phase ^ 1);
        if (issues()) {
            reinterpret_cast<WorkTile*>(shared_memory + offsetof(SharedStorage, tiles))[queries.index] = tile;
            mbarrier_arrive_expect_tx(full, has_keys ? Q_BYTES : 0);
            if (has_keys) {
                const int row = tile.row + rank * CTA_ROWS;
#pragma unroll
                for (int chunk = 0; chunk < QK_CHUNKS; ++chunk)
                    tma_load(q + chunk * Q_CHUNK, p.q, full, chunk * CHUNK_COLUMNS, 0,
                             sequence.q_first + row / PACK_GQA, tile.tile_head(), sequence.q_batch);
            }
        }
        queries.advance();
    }

    // The index that takes_tiles() has, for all threads that work on the same tiles.
    template <typename Storage = SharedStorage>
    __device__ __forceinline__ int broadcast(int index) {
        if constexpr (cfg::GATHER) {
            const u32 word = SHARED_OF(Storage, base, next_tile) + static_cast<u32>(sizeof(int)) * next.index;
            if (takes_tiles()) store_shared(word, index);
            named_barrier_sync(PRODUCER_WARPS, WARPGROUP);
            index = load_shared(word);
            next.advance();
        } else if constexpr (CLUSTER > 1) {
            const u32 word = SHARED_OF(Storage, base, next_tile), full = SHARED_OF(Storage, base, next_tile_full);
            const u32 empty = SHARED_OF(Storage, base, next_tile_empty);
            if (rank == 0) {
                if (lane == 0) {
                    mbarrier_wait_cluster(empty, next.phase ^ 1);
                    store_cluster_async(address_in(word, 1), index, address_in(full, 1));
                }
            } else {
                if (lane == 0) mbarrier_arrive_expect_tx(full, 4);
                mbarrier_wait_cluster(full, next.phase);
                index = load_shared(word);
                wait_for_load(index);
                __syncwarp();
                if (lane == 0) mbarrier_arrive_cluster(address_in(empty, 0));
            }
            next.advance();
        }
        return __shfl_sync(0xffffffffu, index, 0);
    }
};
