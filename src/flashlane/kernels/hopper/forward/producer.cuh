// The sizes of a block's shared memory, and the warps that fill it: the head of forward.cu draws their work.
//
// K and V come in three ways, of which a kernel has one:
//     by TMA            one warp; a box a chunk of columns (and of a paged cache a box a page, or part of one)
//     by multicast      CLUSTER blocks have neighbouring rows of one tile head and walk over the same key blocks: each
//                       loads its share of a block's rows into all of them
//     by cp.async       GATHER: pages that no box fits; four warps, of which each lane brings 16 bytes of a row
#pragma once
#include "attention/pipeline.cuh"
#include "mbarrier.cuh"
#include "cluster.cuh"
#include "config.cuh"
#include "hopper/forward/tiles.cuh"

using Element = cfg::Element;
constexpr int HEAD_DIM = cfg::HEAD_DIM, COLUMNS_V = cfg::COLUMNS_V, CONSUMERS = cfg::CONSUMERS, CLUSTER = cfg::CLUSTER;
constexpr int STAGES = cfg::STAGES, Q_STAGES = cfg::Q_STAGES;
constexpr int WARPGROUP = 128, WARPS = 4, THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int BLOCK_ROWS = 64 * CONSUMERS;          // of a tile, that one block has
constexpr int CHUNK_COLUMNS = 64, ROW_BYTES = 128;  // tiles lie in chunks of 64 columns; zeros fill the last one
constexpr int PIECE = 8;                            // columns of 16 bytes
constexpr int QK_CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS, QK_STEPS = (HEAD_DIM + 15) / 16;
constexpr int V_CHUNKS = (COLUMNS_V + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS, PV_STEPS = BLOCK_N / 16;
constexpr u32 Q_CHUNK = BLOCK_ROWS * ROW_BYTES, KV_CHUNK = BLOCK_N * ROW_BYTES;
constexpr u32 Q_BYTES = QK_CHUNKS * Q_CHUNK, K_BYTES = QK_CHUNKS * KV_CHUNK, V_BYTES = V_CHUNKS * KV_CHUNK;
constexpr u32 STAGE_BYTES = K_BYTES + V_BYTES;

// Shared memory: stages of Q, stages of K and V, barriers, for each stage of Q the tile that it belongs to, and words.
constexpr u32 RING = Q_STAGES * Q_BYTES, BARRIERS = RING + STAGES * STAGE_BYTES;
constexpr u32 Q_FULL = BARRIERS, Q_EMPTY = Q_FULL + 8 * Q_STAGES;
constexpr u32 K_FULL = Q_EMPTY + 8 * Q_STAGES, K_EMPTY = K_FULL + 8 * STAGES;
// With ONE_BARRIER a stage's K and V arrive and leave together; otherwise K leaves as soon as S is there.
constexpr u32 V_FULL = cfg::ONE_BARRIER ? K_FULL : K_EMPTY + 8 * STAGES;
constexpr u32 V_EMPTY = cfg::ONE_BARRIER ? K_EMPTY : V_FULL + 8 * STAGES;
// In a cluster: the other block's stage is empty too; its word with the next tile has come, or was read.
constexpr u32 K_PEER = V_EMPTY + 8 * STAGES, V_PEER = cfg::ONE_BARRIER ? K_PEER : K_PEER + 8 * STAGES;
constexpr u32 NEXT_FULL = V_PEER + 8 * STAGES, NEXT_EMPTY = NEXT_FULL + 8;
constexpr u32 BARRIERS_END = CLUSTER > 1 ? NEXT_EMPTY + 8 : V_EMPTY + 8 * STAGES;
constexpr u32 TILES = (BARRIERS_END + 15) / 16 * 16;
constexpr u32 NEXT = TILES + Q_STAGES * sizeof(Tile);                   // words: the index of the next tile
constexpr u32 LAST = NEXT + (cfg::GATHER || CLUSTER > 1 ? 16 : 0);      // and whether a consumer's part is the last
static_assert(LAST + (cfg::FUSED ? 16 : 0) == cfg::SHARED_BYTES, "the Python formula disagrees");
static_assert(BLOCK_M == BLOCK_ROWS * CLUSTER && BLOCK_ROWS % PACK == 0 && BLOCK_N % 16 == 0 && COLUMNS_V % 8 == 0);
static_assert(CLUSTER == 1 || (CLUSTER == 2 && !cfg::VARLEN && !cfg::CACHE && !cfg::PAGED && !cfg::SPLIT));
static_assert(!cfg::GATHER || cfg::PAGED);

enum { TURN = 1, TOGETHER = 8, FILLERS = 12 };  // named barriers; of the first two kinds one a consumer

extern __shared__ __align__(1024) unsigned char shared_memory[];

struct Producer {
    const Params& p;
    const u32 base;
    const int rank;  // of the block in its cluster
    const int warp, lane = threadIdx.x % WARP;
    PipelineState<STAGES> stage;
    PipelineState<Q_STAGES> queries;
    PipelineState<cfg::GATHER ? 2 : 1> word;

    struct Item {
        Sequence sequence;
        int head, block;  // key/value head; block of keys
        int column;       // of v: the first of the tile's slice
    };

    // One thread of those that work on the same tiles.
    __device__ __forceinline__ bool leads() const { return threadIdx.x == 0 && rank == 0; }

    // ---- K and V into a stage

    template <int CHUNKS>
    __device__ __forceinline__ void load(const TensorMap& map, u32 destination, u32 barrier, const Item& item, int column) {
        const Sequence& sequence = item.sequence;
        if constexpr (cfg::PAGED) {
            constexpr int BOXES = BLOCK_N / cfg::BOX_ROWS;
            for (int i = lane; i < BOXES * CHUNKS; i += WARP) {
                const int chunk = i / BOXES, row = i % BOXES * cfg::BOX_ROWS, key = item.block * BLOCK_N + row;
                // A page past the last key may not exist; its rows are outside the map.
                const bool inside = key < sequence.k_length;
                const int page = inside ? p.pages[sequence.k_batch * p.pages_row + key / p.page_size] : 0;
                tma_load(destination + chunk * KV_CHUNK + row * ROW_BYTES, map, barrier, column + chunk * CHUNK_COLUMNS,
                         inside ? key % p.page_size : p.page_size, item.head, page);
            }
        } else if (lane == 0) {
            constexpr int SHARE = BLOCK_N / CLUSTER;
            const int row = sequence.k_first + item.block * BLOCK_N + rank * SHARE;
            destination += rank * SHARE * ROW_BYTES;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int first = column + chunk * CHUNK_COLUMNS;
                if constexpr (CLUSTER == 1)
                    tma_load(destination + chunk * KV_CHUNK, map, barrier, first, row, item.head, sequence.k_batch);
                else
                    tma_load_multicast(destination + chunk * KV_CHUNK, map, barrier, first, row, item.head,
                                       sequence.k_batch, (1 << CLUSTER) - 1);
            }
        }
    }

    // A quarter of the block's rows: one lane finds where a row lies, then eight bring 128 bytes of it. PIECES of 16 bytes
    // are written to each row; what is past `columns`, or past the last key, is zeros.
    template <int PIECES>
    __device__ __forceinline__ void gather(const Rows& from, u32 destination, const Item& item, int column, int columns) {
        constexpr int SHARE = BLOCK_N / WARPS, CHUNKS = (PIECES + 7) / 8;
        const Sequence& sequence = item.sequence;
        const Element* data = static_cast<const Element*>(from.data) + item.head * from.head + column + lane % 8 * PIECE;
#pragma unroll
        for (int first = 0; first < SHARE; first += WARP) {
            const int key = item.block * BLOCK_N + warp * SHARE + first + lane;
            long long place = -1;
            if (first + lane < SHARE && key < sequence.k_length) {
                const int row = sequence.k_first + key, page = row / p.page_size;
                place = p.pages[sequence.k_batch * p.pages_row + page] * from.page + (row - page * p.page_size) * from.row;
            }
#pragma unroll
            for (int i = 0; i < (SHARE - first < WARP ? SHARE - first : WARP); i += 4) {
                const long long at = __shfl_sync(0xffffffffu, place, i + lane / 8);
                const int row = warp * SHARE + first + i + lane / 8;
                const u32 to = destination + row * ROW_BYTES + ((lane % 8 ^ row % 8) << 4);
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const int piece = chunk * 8 + lane % 8;
                    if (PIECES % 8 != 0 && chunk == CHUNKS - 1 && piece >= PIECES) continue;
                    const bool inside = at >= 0 && piece * PIECE < columns;
                    cp_async_16(to + chunk * KV_CHUNK, data + (inside ? at + chunk * CHUNK_COLUMNS : 0), inside ? 16 : 0);
                }
            }
        }
    }

    __device__ __forceinline__ void bring_keys(u32 destination, u32 barrier, const Item& item) {
        if constexpr (cfg::GATHER) gather<2 * QK_STEPS>(p.k_rows, destination, item, 0, HEAD_DIM);
        else load<QK_CHUNKS>(p.k, destination, barrier, item, 0);
    }
    __device__ __forceinline__ void bring_values(u32 destination, u32 barrier, const Item& item) {
        if constexpr (cfg::GATHER)
            gather<COLUMNS_V / PIECE>(p.v_rows, destination, item, item.column, cfg::HEAD_DIM_V - item.column);
        else load<V_CHUNKS>(p.v, destination, barrier, item, item.column);
    }

    // Until all consumers are done with the place. Those of the other block tell their own producer, which tells this one:
    // so a consumer's arrival needs no fence for the cluster, and the order of its reads and our writes is one that the
    // memory model knows (docs/notebook/0003).
    __device__ __forceinline__ void wait_empty(u32 empty, u32 peer) const {
        mbarrier_wait(base + empty + 8 * stage.index, stage.phase ^ 1);
        if constexpr (CLUSTER > 1) {
            const u32 mine = base + peer + 8 * stage.index;
            if (lane == 0) mbarrier_arrive_cluster(address_in(mine, rank ^ 1));
            mbarrier_wait_cluster(mine, stage.phase);
        }
    }
    // What is to come until the barrier's phase is complete; of cp.async, which tells of itself afterwards, nothing.
    __device__ __forceinline__ void expect(u32 barrier, u32 bytes) const {
        if (!cfg::GATHER && lane == 0) mbarrier_arrive_expect_tx(barrier, bytes);
        if (cfg::PAGED) __syncwarp();
    }

    // One step of the stream: the keys of a block and the values of the one before, of which either may be missing.
    __device__ __forceinline__ void step(bool has_keys, const Item& keys, bool has_values, const Item& values) {
        const u32 at = base + RING + stage.index * STAGE_BYTES, barrier = base + 8 * stage.index;
        const u32 k_bytes = has_keys ? K_BYTES : 0, v_bytes = has_values ? V_BYTES : 0;
        wait_empty(K_EMPTY, K_PEER);
        expect(barrier + K_FULL, k_bytes + (cfg::ONE_BARRIER ? v_bytes : 0));
        if (has_keys) bring_keys(at, barrier + K_FULL, keys);
        if constexpr (!cfg::ONE_BARRIER) {
            if (cfg::GATHER) mbarrier_arrive_cp_async(barrier + K_FULL);
            wait_empty(V_EMPTY, V_PEER);
            expect(barrier + V_FULL, v_bytes);
        }
        if (has_values) bring_values(at + K_BYTES, barrier + V_FULL, values);
        if (cfg::GATHER) mbarrier_arrive_cp_async(barrier + V_FULL);
        stage.advance();
    }

    // ---- tiles

    // Tell the consumers which tile is next, and bring its queries if it has keys.
    __device__ __forceinline__ void announce(const Tile& tile, bool wanted, const Sequence& sequence) {
        if (cfg::GATHER && warp != 0) return;
        const u32 at = base + queries.index * Q_BYTES, barrier = base + 8 * queries.index;
        mbarrier_wait(barrier + Q_EMPTY, queries.phase ^ 1);
        if (lane == 0) {
            reinterpret_cast<Tile*>(shared_memory + TILES)[queries.index] = tile;
            mbarrier_arrive_expect_tx(barrier + Q_FULL, wanted ? Q_BYTES : 0);
            if (wanted) {
                const int row = tile.row + rank * BLOCK_ROWS;
#pragma unroll
                for (int chunk = 0; chunk < QK_CHUNKS; ++chunk)
                    tma_load(at + chunk * Q_CHUNK, p.q, barrier + Q_FULL, chunk * CHUNK_COLUMNS, 0,
                             sequence.q_first + row / PACK, head_of(tile), sequence.q_batch);
            }
        }
        queries.advance();
    }

    // The leader's index, for all who work on its tiles.
    __device__ __forceinline__ int pass_on(int index) {
        if constexpr (cfg::GATHER) {
            const u32 at = base + NEXT + 4 * word.index;  // in turn: the one before may still be read
            if (leads()) store_shared(at, index);
            named_barrier_sync(FILLERS, WARPGROUP);
            index = load_shared(at);
            word.advance();
        } else if constexpr (CLUSTER > 1) {
            const u32 full = base + NEXT_FULL, empty = base + NEXT_EMPTY;
            if (rank == 0) {
                if (lane == 0) {
                    mbarrier_wait_cluster(empty, word.phase ^ 1);
                    store_cluster_async(address_in(base + NEXT, 1), index, address_in(full, 1));
                }
            } else {
                if (lane == 0) mbarrier_arrive_expect_tx(full, 4);
                mbarrier_wait_cluster(full, word.phase);
                index = load_shared(base + NEXT);
                __syncwarp();
                if (lane == 0) mbarrier_arrive_cluster(address_in(empty, 0));
            }
            word.advance();
        }
        return __shfl_sync(0xffffffffu, index, 0);
    }

    __device__ __forceinline__ void run() {
        Finder finder(p);
        const int workers = gridDim.x / CLUSTER;
        int index = blockIdx.x / CLUSTER;
        Item before{Sequence(p, 0), 0, 0, 0};
        bool started = false;
        while (true) {
            const Tile tile = finder.find(p, index);
            if (tile.batch < 0) break;
            int next = 0;
            if (leads()) next = workers + atomicAdd(p.counter, 1);  // a tile ahead of its use
            Item item{Sequence(p, tile.batch), head_of(tile) / p.group, 0, slice_of(tile) * COLUMNS_V};
            const Blocks blocks = blocks_of(p, item.sequence, tile);
            if (blocks.empty()) announce(tile, false, item.sequence);
            for (item.block = blocks.high - 1; item.block >= blocks.low; --item.block) {
                step(true, item, started, before);
                // The values before must not wait for the queries: the consumers need them to free the queries' place.
                if (item.block == blocks.high - 1) announce(tile, true, item.sequence);
                before = item, started = true;
            }
            index = pass_on(next);
        }
        if (started) step(false, before, true, before);
        announce({-1, 0, 0, 0}, false, before.sequence);
        // The last index that any block takes; nobody reads the counter after it.
        if (leads() && index == finder.total + workers - 1) *p.counter = 0;
    }
};
