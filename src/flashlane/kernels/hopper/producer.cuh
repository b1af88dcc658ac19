// The sizes of a block's shared memory, and the warp that fills it: the head of forward.cu draws its work.
#pragma once
#include "barrier.cuh"
#include "config.cuh"
#include "hopper_tiles.cuh"

using Element = cfg::Element;
constexpr int HEAD_DIM = cfg::HEAD_DIM, HEAD_DIM_V = cfg::HEAD_DIM_V, CONSUMERS = cfg::CONSUMERS;
constexpr int STAGES = cfg::STAGES, Q_STAGES = cfg::Q_STAGES;
constexpr int WARPGROUP = 128, THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int CHUNK_COLUMNS = 64, ROW_BYTES = 128;  // tiles lie in chunks of 64 columns; zeros fill the last one
constexpr int QK_CHUNKS = (HEAD_DIM + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS, QK_STEPS = (HEAD_DIM + 15) / 16;
constexpr int V_CHUNKS = (HEAD_DIM_V + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS, PV_STEPS = BLOCK_N / 16;
constexpr u32 Q_CHUNK = BLOCK_M * ROW_BYTES, KV_CHUNK = BLOCK_N * ROW_BYTES;
constexpr u32 Q_BYTES = QK_CHUNKS * Q_CHUNK, K_BYTES = QK_CHUNKS * KV_CHUNK, V_BYTES = V_CHUNKS * KV_CHUNK;
constexpr u32 STAGE_BYTES = K_BYTES + V_BYTES;

// Shared memory: stages of Q, stages of K and V, barriers, and for each stage of Q the tile that it belongs to.
constexpr u32 RING = Q_STAGES * Q_BYTES, BARRIERS = RING + STAGES * STAGE_BYTES;
constexpr u32 Q_FULL = BARRIERS, Q_EMPTY = Q_FULL + 8 * Q_STAGES;
constexpr u32 K_FULL = Q_EMPTY + 8 * Q_STAGES, K_EMPTY = K_FULL + 8 * STAGES;
// With ONE_BARRIER a stage's K and V arrive and leave together; otherwise K leaves as soon as S is there.
constexpr u32 V_FULL = cfg::ONE_BARRIER ? K_FULL : K_EMPTY + 8 * STAGES;
constexpr u32 V_EMPTY = cfg::ONE_BARRIER ? K_EMPTY : V_FULL + 8 * STAGES;
constexpr u32 TILES = (V_EMPTY + 8 * STAGES + 15) / 16 * 16;
static_assert(TILES + Q_STAGES * sizeof(Tile) == cfg::SHARED_BYTES, "the Python formula disagrees");
static_assert(BLOCK_M == 64 * CONSUMERS && BLOCK_N % 16 == 0 && HEAD_DIM_V % 8 == 0);

extern __shared__ __align__(1024) unsigned char shared_memory[];

struct Producer {
    const Params& p;
    const u32 base;
    const int lane = threadIdx.x % WARP;
    Ring<STAGES> stage;
    Ring<Q_STAGES> queries;

    struct Item {
        Sequence sequence;
        int head, block;  // key/value head; block of keys
    };

    // Rows of K or V into a stage: a box a chunk of columns, and of a paged cache a box a page as well.
    template <int CHUNKS>
    __device__ __forceinline__ void load(const TensorMap& map, u32 destination, u32 barrier, const Item& item) {
        const Sequence& sequence = item.sequence;
        if constexpr (cfg::PAGED) {
            constexpr int BOXES = BLOCK_N / cfg::BOX_ROWS;
            for (int i = lane; i < BOXES * CHUNKS; i += WARP) {
                const int chunk = i / BOXES, row = i % BOXES * cfg::BOX_ROWS, key = item.block * BLOCK_N + row;
                // A page past the last key may not exist; its rows are outside the map.
                const bool inside = key < sequence.k_length;
                const int page = inside ? p.pages[sequence.k_batch * p.pages_row + key / p.page_size] : 0;
                tma_load(destination + chunk * KV_CHUNK + row * ROW_BYTES, map, barrier, chunk * CHUNK_COLUMNS,
                         inside ? key % p.page_size : p.page_size, item.head, page);
            }
        } else if (lane == 0) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                tma_load(destination + chunk * KV_CHUNK, map, barrier, chunk * CHUNK_COLUMNS,
                         sequence.k_first + item.block * BLOCK_N, item.head, sequence.k_batch);
        }
    }

    // One step of the stream: the keys of a block and the values of the one before, of which either may be missing.
    __device__ __forceinline__ void step(bool has_keys, const Item& keys, bool has_values, const Item& values) {
        const u32 at = base + RING + stage.slot * STAGE_BYTES, barrier = base + 8 * stage.slot;
        const u32 k_bytes = has_keys ? K_BYTES : 0, v_bytes = has_values ? V_BYTES : 0;
        barrier_wait(barrier + K_EMPTY, stage.parity ^ 1);
        if (lane == 0) barrier_expect(barrier + K_FULL, k_bytes + (cfg::ONE_BARRIER ? v_bytes : 0));
        if (cfg::PAGED) __syncwarp();
        if (has_keys) load<QK_CHUNKS>(p.k, at, barrier + K_FULL, keys);
        if constexpr (!cfg::ONE_BARRIER) {
            barrier_wait(barrier + V_EMPTY, stage.parity ^ 1);
            if (lane == 0) barrier_expect(barrier + V_FULL, v_bytes);
            if (cfg::PAGED) __syncwarp();
        }
        if (has_values) load<V_CHUNKS>(p.v, at + K_BYTES, barrier + V_FULL, values);
        stage.next();
    }

    // Tell the consumers which tile is next, and bring its queries if it has keys.
    __device__ __forceinline__ void announce(const Tile& tile, bool wanted, const Sequence& sequence) {
        const u32 at = base + queries.slot * Q_BYTES, barrier = base + 8 * queries.slot;
        barrier_wait(barrier + Q_EMPTY, queries.parity ^ 1);
        if (lane == 0) {
            reinterpret_cast<Tile*>(shared_memory + TILES)[queries.slot] = tile;
            barrier_expect(barrier + Q_FULL, wanted ? Q_BYTES : 0);
            if (wanted) {
#pragma unroll
                for (int chunk = 0; chunk < QK_CHUNKS; ++chunk)
                    tma_load(at + chunk * Q_CHUNK, p.q, barrier + Q_FULL, chunk * CHUNK_COLUMNS, 0,
                             sequence.q_first + tile.row / PACK, tile.head, sequence.q_batch);
            }
        }
        queries.next();
    }

    __device__ __forceinline__ void run() {
        Finder finder(p);
        int index = blockIdx.x;
        Item before{Sequence(p, 0), 0, 0};
        bool started = false;
        while (true) {
            const Tile tile = finder.find(p, index);
            if (tile.batch < 0) break;
            int next = 0;
            if (lane == 0) next = gridDim.x + atomicAdd(p.counter, 1);  // a tile ahead of its use
            Item item{Sequence(p, tile.batch), tile.head / p.group, 0};
            const Blocks blocks = blocks_of(p, item.sequence, tile);
            if (blocks.empty()) announce(tile, false, item.sequence);
            for (item.block = blocks.high - 1; item.block >= blocks.low; --item.block) {
                step(true, item, started, before);
                // The values before must not wait for the queries: the consumers need them to free the queries' place.
                if (item.block == blocks.high - 1) announce(tile, true, item.sequence);
                before = item, started = true;
            }
            index = __shfl_sync(0xffffffffu, next, 0);
        }
        if (started) step(false, before, true, before);
        announce({-1, 0, 0, 0}, false, before.sequence);
        // The last index that any block takes; nobody reads the counter after it.
        if (lane == 0 && index == finder.total + static_cast<int>(gridDim.x) - 1) *p.counter = 0;
    }
};
