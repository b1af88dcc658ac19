// Attention backward for Hopper at head dims above 128: all three gradients in one pass, by two blocks of threads.
//
// A cluster of two blocks has 128 keys of a key/value head, each block 64 of them. Both step through the same blocks of
// queries; each brings half of the rows of Q and dO to both. In a block the two consumer warpgroups divide the products,
// for the accumulators of dV and dK take half of the registers each:
//
//     warpgroup 0:  Sᵀ = K·Qᵀ, P          dV += Pᵀ·dO     dQ = dS·K, a quarter of the columns, all 128 keys
//     warpgroup 1:  dPᵀ = V·dOᵀ, dS       dK += dSᵀ·Q     the next quarter
//
// A stage of dS has two tiles of 64 keys, a row a query. Warpgroup 0 leaves P in its block's tile, warpgroup 1 takes it
// from there, and dS goes to the same place: the threads of both hold the same elements. The copy engine then brings the
// tile to the other block. Block r makes columns half r of dQ, so it needs that half of the columns of all 128 keys of K
// in shared memory. The other half of its own keys, and half of V, it needs for S and dP only: they stay in registers as
// A operands, which saves a quarter of those products' reads. They come through the stages of dS, before the first.
//
// A step, i the block of queries; dQ is one block late, so that nobody waits for a fresh copy from the other block:
//
//     0:  issue S(i) │ wait │ P(i), hand it over │ issue dQ(i−1), dV(i) │ wait dQ, add it to the sums │ wait dV
//     1:  issue dP(i) │ wait for it and for P(i) │ dS(i), send it │ issue dQ(i−1), dK(i) │ wait dQ, add it │ wait dK
//
// Clusters stay on their SMs and take tile after tile (a tile: a block of keys), of which block 0 tells block 1: the loads of
// the next one run under the stores of the one before. What goes to registers counts as two more uses of the stages of dS.
//
// While one computes P or dS, the other's products run. dQ is added to its sums in device memory from registers, in their
// order (backward_sums.cuh).
#include "attention/pipeline.cuh"
#include "cluster.cuh"
#include "hopper/backward/dq_accumulate.cuh"
#include "hopper/backward/work.cuh"

constexpr int BLOCKS = 2, KEYS = 64, CONSUMERS = 2, THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int Q_STAGES = cfg::Q_STAGES, DO_STAGES = cfg::DO_STAGES, DS_STAGES = 2;
constexpr int LOADERS = 3;                                // warps that load, and look tiles up
// Columns of K and V in quarters of 16 · FIRST and 16 · SECOND, of either half of them, each padded to a chunk: two in
// shared memory, two in registers.
template <int COLUMNS>
struct Quarters {
    static constexpr int STEPS = (COLUMNS + 31) / 32;     // of 16 columns, of half of them
    static constexpr int FIRST = (STEPS + 1) / 2, SECOND = STEPS - FIRST;
    static __device__ __forceinline__ constexpr int column(int half, int i) { return 16 * (half * STEPS + i * FIRST); }
};
using KeyQuarters = Quarters<HEAD_DIM>;
using ValueQuarters = Quarters<HEAD_DIM_V>;
constexpr u32 KEYS_CHUNK = KEYS * ROW_BYTES, ROWS_CHUNK = BLOCK_M * ROW_BYTES;
constexpr u32 K_BYTES = 2 * BLOCKS * KEYS_CHUNK, V_BYTES = 2 * KEYS_CHUNK, KEPT_BYTES = 2 * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK, DS_BYTES = BLOCKS * ROWS_CHUNK;
constexpr u32 STAT_BYTES = BLOCK_M * 4;
constexpr int HALF_ROWS = BLOCK_M / BLOCKS;

static_assert(cfg::BLOCK_N == BLOCKS * KEYS && BLOCK_M == 64);
static_assert((Q_STAGES & (Q_STAGES - 1)) == 0 && (DO_STAGES & (DO_STAGES - 1)) == 0);
static_assert(HEAD_DIM <= 256 && HEAD_DIM_V <= 256 && KEPT_BYTES <= DS_BYTES);

constexpr u32 K = 0, V = K + K_BYTES, Q = V + V_BYTES, DO = Q + Q_STAGES * Q_BYTES, DS = DO + DO_STAGES * DO_BYTES;
constexpr u32 LSE = DS + DS_STAGES * DS_BYTES, DELTA = LSE + Q_STAGES * STAT_BYTES;
// What the threads look up of a tile, and the consumers of a step with its Q or dO: they have no registers to carry it.
constexpr u32 TILE_RECORDS = DELTA + DO_STAGES * STAT_BYTES, TILE_SLOTS = 2, TILE_BYTES = 48;
constexpr u32 Q_RECORD = TILE_RECORDS + TILE_SLOTS * TILE_BYTES, DO_RECORD = Q_RECORD + 16 * Q_STAGES;
constexpr u32 NEXT = DO_RECORD + 16 * DO_STAGES, NEXT_FULL = NEXT + 8, NEXT_EMPTY = NEXT_FULL + 8;
constexpr u32 WANTED = NEXT_EMPTY + 8, TILE_FULL = WANTED + 8, TILE_EMPTY = TILE_FULL + 8 * TILE_SLOTS;
constexpr u32 KV_FULL = TILE_EMPTY + 8 * TILE_SLOTS, KV_EMPTY = KV_FULL + 16, Q_FULL = KV_EMPTY + 8;
constexpr u32 Q_EMPTY = Q_FULL + 8 * Q_STAGES, DO_FULL = Q_EMPTY + 8 * Q_STAGES;
constexpr u32 DO_EMPTY = DO_FULL + 8 * DO_STAGES, P_FULL = DO_EMPTY + 8 * DO_STAGES, DS_FULL = P_FULL + 8 * DS_STAGES;
constexpr u32 DS_EMPTY = DS_FULL + 8 * DS_STAGES;
static_assert(DS_EMPTY + 8 * DS_STAGES == cfg::SHARED_BYTES, "the Python formula disagrees");
enum { TOGETHER = 1, ALL = 3 };                           // named barriers: one a consumer, and of both

extern __shared__ __align__(1024) unsigned char shared_memory[];

// 16 bytes each.
struct KeysRecord {
    int first, length, shift, queries;                    // this block's first key; the sequence's keys and queries
};
struct OwnerRecord {
    int kv_head, batch, k_first, which;                   // batch of the tensors, and first row of the sequence there
};
struct StepsRecord {
    int count, low, high;                                 // steps (NO_TILE: none is left); blocks of queries of each head
    int q_first;                                          // row of the sequence in the tensors
};
struct StepRecord {
    int first, head, sums;                                // first query of the block; where its statistics are
    int masked;                                           // some pair of the step's is hidden
};

template <typename Record>
__device__ __forceinline__ Record record_at(u32 address) {
    const int4 x = load_shared_int4(address);
    return {x.x, x.y, x.z, x.w};
}
constexpr int NO_TILE = -1;
__device__ __forceinline__ u32 tile_record(u32 base, u32 tile) { return base + TILE_RECORDS + tile % TILE_SLOTS * TILE_BYTES; }
__device__ __forceinline__ KeysRecord keys_record(u32 base, u32 tile) { return record_at<KeysRecord>(tile_record(base, tile)); }
__device__ __forceinline__ OwnerRecord owner_record(u32 base, u32 tile) {
    return record_at<OwnerRecord>(tile_record(base, tile) + 16);
}
__device__ __forceinline__ StepsRecord steps_record(u32 base, u32 tile) {
    return record_at<StepsRecord>(tile_record(base, tile) + 32);
}

// ---------------------------------------------------------------------------------------------- the producer's warps

// Steps of a tile of whose record some warp told, or NO_TILE.
__device__ __forceinline__ int wait_tile(u32 base, u32 tile) {
    mbarrier_wait(base + TILE_FULL + 8 * (tile % TILE_SLOTS), tile / TILE_SLOTS % 2);
    return steps_record(base, tile).count;
}

// Takes tiles for the cluster, each when the loads of the one before are under way, and tells the others of its block.
struct Taker {
    const Params& p;
    const u32 base;
    const int rank;
    u32 tiles = 0;                                        // told of so far

    // The next tile's number: block 0 takes it, and passes it on.
    __device__ __forceinline__ int take() const {
        const u32 parity = tiles % 2;
        if (rank == 0) {
            mbarrier_wait(base + WANTED, parity ^ 1);
            const int index = atomicAdd(p.counters + TILES_TAKEN, 1);
            mbarrier_wait_cluster(base + NEXT_EMPTY, parity ^ 1);
            store_cluster_async(address_in(base + NEXT, 1), index, address_in(base + NEXT_FULL, 1));
            return index;
        }
        mbarrier_arrive_expect_tx(base + NEXT_FULL, 4);
        mbarrier_wait_cluster(base + NEXT_FULL, parity);
        const int index = load_shared(base + NEXT);
        mbarrier_arrive_cluster(address_in(base + NEXT_EMPTY, 0));
        return index;
    }
    __device__ __forceinline__ void run() {
        griddepcontrol_wait();                             // of the counter
        for (bool more = true; more; ++tiles) {
            const int index = take();
            const u32 slot = tiles % TILE_SLOTS, at = tile_record(base, tiles);
            mbarrier_wait(base + TILE_EMPTY + 8 * slot, tiles / TILE_SLOTS % 2 ^ 1);
            more = index < p.tiles;
            if (more) {
                Place place = place_at(p, index, p.kv_heads * p.batch, p.blocks, false);
                place.batch = place.head / p.kv_heads, place.head -= place.batch * p.kv_heads;
                const Work work(p, place, cfg::BLOCK_N, rank * KEYS);
                const Sequence& sequence = work.sequence;
                store_shared(at, make_uint4(work.first_key, sequence.k_length, sequence.shift, sequence.q_length));
                store_shared(at + 16, make_uint4(work.kv_head, sequence.batch, sequence.k_first, work.which));
                store_shared(at + 32, make_uint4(work.steps(), work.queries.low, work.queries.high, sequence.q_first));
            } else {
                store_shared(at + 32, make_uint4(static_cast<u32>(NO_TILE), 0, 0, 0));
            }
            mbarrier_arrive(base + TILE_FULL + 8 * slot);
        }
    }
};

// Loads blocks of Q or dO, half of the rows to both blocks of the cluster, and their statistics.
template <int STAGES, int CHUNKS>
struct RowLoader {
    const Params& p;
    const u32 base;
    const int rank;

    __device__ __forceinline__ void run(const TensorMap& map, const float* statistics, u32 tile, u32 stat, u32 record, u32 full,
                                        u32 empty, bool wants) const {
        constexpr u32 BYTES = CHUNKS * ROWS_CHUNK;
        u32 made = 0;                                     // steps so far
        griddepcontrol_wait();
        for (u32 tiles = 0;; ++tiles) {
            int left = wait_tile(base, tiles);
            if (left == NO_TILE) return;
            const OwnerRecord owner = owner_record(base, tiles);
            int head = owner.kv_head * (p.heads / p.kv_heads), block = steps_record(base, tiles).low;
            int sums = (cfg::VARLEN ? head : owner.which * p.heads + head) * p.stat_blocks + block;
            if (cfg::VARLEN) sums += steps_record(base, tiles).q_first / BLOCK_M + owner.which;  // stat_block
#pragma unroll 1
            for (; left > 0; --left, ++made) {
                const PipelineStateAt<STAGES> use(made);
                const u32 barrier = base + full + 8 * use.index;
                mbarrier_wait(base + empty + 8 * use.index, use.phase ^ 1);
                const int first = block * BLOCK_M;
                const KeysRecord keys = keys_record(base, tiles);
                const bool masked = partly_masked<KEYS>(p, keys.first, keys.length, first, keys.shift);
                store_shared(base + record + 16 * use.index, make_uint4(first, head, sums, masked));
                mbarrier_expect_tx_before_copies(barrier, BYTES + STAT_BYTES);
                const u32 to = base + tile + use.index * BYTES + rank * (HALF_ROWS * ROW_BYTES);
                const int row = steps_record(base, tiles).q_first + first + rank * HALF_ROWS;
                const int batch = owner_record(base, tiles).batch;
#pragma unroll 1
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    tma_load_multicast(to + chunk * ROWS_CHUNK, map, barrier, chunk * CHUNK_COLUMNS, row, head, batch,
                                       (1 << BLOCKS) - 1);
                bulk_load(base + stat + use.index * STAT_BYTES, statistics + static_cast<long long>(sums) * BLOCK_M,
                          STAT_BYTES, barrier);
                mbarrier_arrive_after_copies(barrier);
                const StepsRecord steps = steps_record(base, tiles);
                ++sums;
                if (++block == steps.high) {
                    sums += p.stat_blocks - (steps.high - steps.low);
                    block = steps.low, ++head;
                }
            }
            if (wants) mbarrier_arrive(base + WANTED);
            mbarrier_arrive(base + TILE_EMPTY + 8 * (tiles % TILE_SLOTS));
        }
    }
};

// Half of the columns of 64 keys: its two quarters, as chunks `stride` bytes apart.
template <typename QUARTERS>
__device__ __forceinline__ void load_keys(u32 to, u32 stride, const TensorMap& map, u32 barrier, int half, int row, int head,
                                          int batch) {
    for (int i = 0; i < 2; ++i)
        tma_load(to + i * stride, map, barrier, QUARTERS::column(half, i), row, head, batch);
}

// Loads K and V: the half of the columns that stays, and through the next two stages of dS the half that goes to registers.
struct KeysLoader {
    const Params& p;
    const u32 base;
    const int rank;
    u32 full_tiles = 0, parts = 0;                        // tiles with steps so far, parts of dS

    __device__ __forceinline__ void load(u32 tile) const {
        const OwnerRecord owner = owner_record(base, tile);
        const int own = owner.k_first + keys_record(base, tile).first, row = own - rank * KEYS;
        const int head = owner.kv_head, batch = owner.batch;
        u32 full = base + KV_FULL;
        mbarrier_wait(base + KV_EMPTY, full_tiles % 2 ^ 1);
        wait_stage(parts);
        mbarrier_arrive_expect_tx(full, K_BYTES + KEPT_BYTES);
        for (int i = 0; i < BLOCKS; ++i)
            load_keys<KeyQuarters>(base + K + i * KEYS_CHUNK, BLOCKS * KEYS_CHUNK, p.k, full, rank, row + i * KEYS, head, batch);
        load_keys<KeyQuarters>(stage(parts), KEYS_CHUNK, p.k, full, 1 - rank, own, head, batch);
        full += 8;
        wait_stage(parts + 1);
        mbarrier_arrive_expect_tx(full, V_BYTES + KEPT_BYTES);
        load_keys<ValueQuarters>(base + V, KEYS_CHUNK, p.v, full, rank, own, head, batch);
        load_keys<ValueQuarters>(stage(parts + 1), KEYS_CHUNK, p.v, full, 1 - rank, own, head, batch);
    }
    __device__ __forceinline__ u32 stage(u32 part) const { return base + DS + part % DS_STAGES * DS_BYTES; }
    // Until a stage of dS is free for a part that the next tile has before its own.
    __device__ __forceinline__ void wait_stage(u32 part) const {
        const u32 use = (part + 2 * full_tiles) / DS_STAGES;
        mbarrier_wait_cluster(base + DS_EMPTY + 8 * (part % DS_STAGES), use % 2 ^ 1);
    }
    __device__ __forceinline__ void run() {
        for (u32 tile = 0;; ++tile) {
            const int steps = wait_tile(base, tile);
            if (steps == NO_TILE) return;
            if (steps > 0) load(tile), ++full_tiles, parts += steps + 1;
            mbarrier_arrive(base + TILE_EMPTY + 8 * (tile % TILE_SLOTS));
        }
    }
};

// ---------------------------------------------------------------------------------------------- the consumers

// 64 keys as A operand of a product with rows of queries: of the quarters of their columns, two in registers.
template <typename QUARTERS>
struct Keys {
    static constexpr int STEPS = QUARTERS::STEPS, FIRST = QUARTERS::FIRST;
    u32 kept[STEPS * 4];

    // Where step i of a half lies in its chunks `stride` bytes apart, and where its columns lie in a tile of rows.
    static __device__ __forceinline__ constexpr u32 offset(int i, u32 stride) {
        return i < FIRST ? i * 32 : stride + (i - FIRST) * 32;
    }
    static __device__ __forceinline__ constexpr int place(int half, int i) {
        const int column = 16 * (half * STEPS + i);
        return column / CHUNK_COLUMNS * ROWS_CHUNK + column % CHUNK_COLUMNS * 2;
    }
    static __device__ __forceinline__ int rows_offset(int half, int i) {
        return (place(0, i) + half * (place(1, i) - place(0, i))) / 16;
    }

    __device__ __forceinline__ void take(u32 tile, int warp, int lane) {
        const int row = 16 * warp + lane % 16;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const u32 at = offset(i, KEYS_CHUNK);
            const int piece = at % ROW_BYTES / 16 + lane / 16;
            u32(&words)[4] = reinterpret_cast<u32(&)[4]>(kept[4 * i]);
            ldmatrix_x4(words, tile + at / ROW_BYTES * ROW_BYTES + row * ROW_BYTES + (piece ^ row % 8) * 16);
        }
    }

    // d = keys·rowsᵀ; the half of the keys' columns in shared memory is chunks `stride` bytes apart.
    __device__ __forceinline__ void multiply(float (&d)[BLOCK_M / 2], u32 keys, u32 stride, u32 rows, int half) const {
        const u64 a = wgmma_k_inner(keys), b = wgmma_k_inner(rows);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const u64 a_step = a + offset(i, stride) / 16, b_step = b + rows_offset(half, i);
            if (i == 0) {
                Wgmma<BLOCK_M>::ss_first(d, a_step, b_step);
            } else {
                Wgmma<BLOCK_M>::ss(d, a_step, b_step, true);
            }
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) Wgmma<BLOCK_M>::rs(d, &kept[4 * i], b + rows_offset(1 - half, i), true);
        wgmma_commit();
    }
};

__device__ __forceinline__ float2 unpack(u32 packed) {
    const Element* const x = reinterpret_cast<const Element*>(&packed);
    return make_float2(Convert<Element>::to_float(x[0]), Convert<Element>::to_float(x[1]));
}

template <int NUMBER>
struct Consumer {
    const Params& p;
    const u32 base;
    const int rank, warp, lane;
    u32 turn = 0;                                         // steps so far
    u32 tiles = 0, full_tiles = 0;                        // so far; with steps
    int before = -1;                                      // the block of sums that dS in the stage used() belongs to
    static constexpr int COLUMNS = 16 * (NUMBER ? KeyQuarters::SECOND : KeyQuarters::FIRST);  // of dQ
    float dq[COLUMNS / 2];

    __device__ __forceinline__ Consumer(const Params& params, u32 address, int block, int own_warp)
        : p(params), base(address), rank(block), warp(own_warp), lane(threadIdx.x % WARP) {}

    __device__ __forceinline__ PipelineStateAt<Q_STAGES> queries() const { return PipelineStateAt<Q_STAGES>(turn); }
    __device__ __forceinline__ PipelineStateAt<DO_STAGES> outputs() const { return PipelineStateAt<DO_STAGES>(turn); }
    // Stages of dS: the first of a tile is of no block; where P and dS are written, and where they are read for dQ.
    __device__ __forceinline__ PipelineStateAt<DS_STAGES> made() const { return PipelineStateAt<DS_STAGES>(turn + full_tiles + 1); }
    __device__ __forceinline__ PipelineStateAt<DS_STAGES> used() const { return PipelineStateAt<DS_STAGES>(turn + full_tiles); }
    // Until a stage is free in both blocks: of its uses two a tile are K's and V's on their way to registers.
    __device__ __forceinline__ void wait_free(const PipelineStateAt<DS_STAGES>& use) const {
        mbarrier_wait(base + DS_EMPTY + 8 * use.index, (use.phase + full_tiles) % 2);
    }

    // One arrival of this warp, after its products: in this block, or in both.
    __device__ __forceinline__ void arrive(u32 which, u32 slot) const {
        mbarrier_arrive_warp(base + which + 8 * slot, lane);
    }
    __device__ __forceinline__ void arrive_both(u32 which, u32 slot) const {
        if constexpr (WARP_ARRIVALS > 1) {
            for (int block = 0; block < BLOCKS; ++block) mbarrier_arrive_remote(address_in(base + which + 8 * slot, block));
        } else if (lane < BLOCKS) {
            mbarrier_arrive_remote(address_in(base + which + 8 * slot, lane));
        }
    }

    __device__ __forceinline__ u32 own_tile() const {
        return base + DS + made().index * DS_BYTES + rank * ROWS_CHUNK;
    }
    // Where this lane's part of an 8×8 matrix of P or dS lies: a row is a query, keys of warps follow each other in it.
    __device__ __forceinline__ u32 own_rows() const {
        const int row = lane / 16 * 8 + lane % 8, piece = (2 * warp + lane / 8 % 2) ^ (lane % 8);
        return own_tile() + row * ROW_BYTES + piece * 16;
    }

    // ---- products

    // dQ of the block before: m queries, n a quarter of its columns, k all keys of the cluster.
    __device__ __forceinline__ void multiply_queries() {
        mbarrier_wait(base + DS_FULL + 8 * used().index, used().phase);
        const u64 a = opaque(wgmma_k_inner(base + DS + used().index * DS_BYTES));
        const u64 b = wgmma_n_inner(base + K + NUMBER * (BLOCKS * KEYS_CHUNK), KEYS_CHUNK);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::BLOCK_N / 16; ++i) {
            const u64 a_step = a + (i / 4 * ROWS_CHUNK + i % 4 * 32) / 16, b_step = b + i * (16 * ROW_BYTES / 16);
            if (i == 0) {
                Wgmma<COLUMNS>::ss_mn_first(dq, a_step, b_step);
            } else {
                Wgmma<COLUMNS>::ss_mn(dq, a_step, b_step, true);
            }
        }
        wgmma_commit();
    }
    // Adds what multiply_queries made; the first is of no block.
    __device__ __forceinline__ void add_queries() {
        arrive_both(DS_EMPTY, used().index);
        if (before < 0) return;
        const int first = KeyQuarters::column(rank, NUMBER) / 8;
        float* const sums = p.dq + static_cast<long long>(before) * SUM_FLOATS + first * GROUP_FLOATS + warp * 128 + lane * 4;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i)
            if (HEAD_DIM % 32 == 0 || first + i < 2 * SLABS)
                global_add(sums + i * GROUP_FLOATS, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }

    // ---- what lies past the end of a packed sequence

    template <int CHUNKS>
    __device__ __forceinline__ void clear_stale(u32 tile, const StepRecord& step) {
        if constexpr (cfg::VARLEN) {
            const int rows = keys_record(base, tiles).queries - step.first;
            if (rows >= BLOCK_M) return;
            // Who else reads the tile writes the same zeros, or waits for this warpgroup.
            clear_rows<CHUNKS, BLOCK_M>(tile, rows, threadIdx.x % WARPGROUP, WARPGROUP);
            fence_proxy_async();
            named_barrier_sync(TOGETHER + NUMBER, WARPGROUP);
        }
    }
    __device__ __forceinline__ void clear_stale_keys() {
        if constexpr (cfg::VARLEN) {
            const KeysRecord keys = keys_record(base, tiles);
            const int own = max(0, keys.length - keys.first), rows = keys.length - keys.first + rank * KEYS;
            if (rows >= cfg::BLOCK_N) return;
            const int thread = threadIdx.x - WARPGROUP, threads = CONSUMERS * WARPGROUP;
            clear_rows<2, cfg::BLOCK_N>(base + K, rows, thread, threads);
            if (own < KEYS) {
                clear_rows<2, KEYS>(base + V, own, thread, threads);
                clear_rows<2, KEYS>(base + DS, own, thread, threads);
                clear_rows<2, KEYS>(base + DS + DS_BYTES, own, thread, threads);
            }
            fence_proxy_async();
            named_barrier_sync(ALL, threads);
        }
    }

    // ---- S to P, dP to dS. Rows of the transposed scores are keys, columns queries.

    // This thread's first key and first query of a step, and the sequence that they are of. Looked up, and from %tid, each
    // time: kept in registers they would spill.
    __device__ __forceinline__ Corner corner(const StepRecord& step) const {
        const KeysRecord keys = keys_record(base, tiles);
        return Corner(keys.first, keys.length, step.first, keys.shift);
    }

    // P of the scores; what dS takes of it, P times the derivative of the cap, goes to warpgroup 1.
    __device__ __forceinline__ void make_probabilities(float (&s)[BLOCK_M / 2], u32 (&probabilities)[BLOCK_M / 4],
                                                       const StepRecord& step) {
        const u32 lse = base + LSE + queries().index * STAT_BYTES + lane % 4 * 8;
        float inverse = 0.f, slope = 0.f, distance = 0.f;
        if constexpr (cfg::SOFTCAP) {
            float derivative;
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; ++i) s[i] = scaled(p, s[i], derivative);
            inverse = reciprocal(p.softcap_log2);
        }
        if (step.masked) mask_scores(p, corner(step), s);
        if constexpr (cfg::ALIBI) {
            slope = alibi_slope(p, owner_record(base, tiles).which, step.head);
            distance = corner(step).distance();
        }
        wait_free(made());
        const u32 to = own_rows();
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
            u32 weights[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int j = 8 * i + 2 * k;
                const float2 minus = load_shared_float2(lse + j / 4 * 32);
                float low = cfg::SOFTCAP ? s[j] + minus.x : fmaf(s[j], p.scale_log2, minus.x);
                float high = cfg::SOFTCAP ? s[j + 1] + minus.y : fmaf(s[j + 1], p.scale_log2, minus.y);
                if constexpr (cfg::ALIBI) {
                    const float from = distance - (k % 2 ? 8 : 0);
                    low -= slope * fabsf(from + column(j)), high -= slope * fabsf(from + column(j + 1));
                }
                low = ex2(low), high = ex2(high);
                weights[k] = probabilities[j / 2] = Convert<Element>::pack(low, high);
                if constexpr (cfg::SOFTCAP) {
                    // 1 − tanh², and 0 where a mask left −∞
                    const float x = fmaxf(s[j] * inverse, -1.f), y = fmaxf(s[j + 1] * inverse, -1.f);
                    weights[k] = Convert<Element>::pack(low * fmaf(-x, x, 1.f), high * fmaf(-y, y, 1.f));
                }
            }
            stmatrix_x4_trans(to + i * 16 * ROW_BYTES, weights[0], weights[1], weights[2], weights[3]);
        }
        __syncwarp();
        arrive(P_FULL, made().index);
    }

    // dS of P, in its place, from where the copy engine brings it to the other block.
    __device__ __forceinline__ void make_gradients(const float (&dp)[BLOCK_M / 2], u32 (&ds)[BLOCK_M / 4]) {
        const u32 delta = base + DELTA + outputs().index * STAT_BYTES + lane % 4 * 8, tile = own_rows();
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int j = 8 * i + 2 * k;
                const float2 row = load_shared_float2(delta + j / 4 * 32);
                const float2 weight = unpack(ds[j / 2]);
                ds[j / 2] = Convert<Element>::pack(weight.x * (dp[j] - row.x), weight.y * (dp[j + 1] - row.y));
            }
            stmatrix_x4_trans(tile + i * 16 * ROW_BYTES, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
        }
        send_gradients();
    }
    __device__ __forceinline__ void take_probabilities(u32 (&words)[BLOCK_M / 4]) const {
        mbarrier_wait(base + P_FULL + 8 * made().index, made().phase);
        const u32 from = own_rows();
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i)
            ldmatrix_x4_trans(reinterpret_cast<u32(&)[4]>(words[4 * i]), from + i * 16 * ROW_BYTES);
    }
    // The stage is full when the other block's tile has come as well.
    __device__ __forceinline__ void send_gradients() {
        fence_proxy_async();
        named_barrier_sync(TOGETHER + NUMBER, WARPGROUP);
        if (warp == 0 && lane == 0) {
            const u32 full = base + DS_FULL + 8 * made().index, other = 1 - rank;
            mbarrier_expect_tx_before_copies(full, ROWS_CHUNK);
            bulk_copy(address_in(own_tile(), other), own_tile(), ROWS_CHUNK, address_in(full, other));
            mbarrier_arrive_after_copies(full);
        }
        __syncwarp();
    }

    // ---- results

    template <int DIM>
    __device__ __forceinline__ void store_keys(const float (&d)[DIM / 2], void* to, long long batch, long long row,
                                               long long head, float factor) const {
        const KeysRecord keys = keys_record(base, tiles);
        const OwnerRecord owner = owner_record(base, tiles);
        Element* const out = static_cast<Element*>(to) + owner.batch * batch +
                             static_cast<long long>(owner.k_first + keys.first) * row + owner.kv_head * head;
        store_rows<DIM>(d, out, row, keys.length - keys.first, factor);
    }

    // K and V have come; the halves that go to registers are taken, and their place becomes the stages of dS.
    template <typename QUARTERS>
    __device__ __forceinline__ void begin(Keys<QUARTERS>& keys) {
        mbarrier_wait(base + KV_FULL, full_tiles % 2);
        mbarrier_wait(base + KV_FULL + 8, full_tiles % 2);
        clear_stale_keys();
        keys.take(base + DS + (turn + full_tiles + NUMBER) % DS_STAGES * DS_BYTES, warp, lane);
        for (int i = 0; i < DS_STAGES; ++i) arrive_both(DS_EMPTY, i);
        before = -1;
    }
    __device__ __forceinline__ void finish() {
        multiply_queries();
        wgmma_wait<0>(dq);
        arrive(KV_EMPTY, 0);
        add_queries();
        ++full_tiles;
    }
    // Steps of the next tile, or NO_TILE.
    __device__ __forceinline__ int next_tile() const {
        return __shfl_sync(0xffffffffu, wait_tile(base, tiles), 0);
    }
    __device__ __forceinline__ void end_tile() {
        __syncwarp();
        arrive(TILE_EMPTY, tiles % TILE_SLOTS);
        ++tiles;
    }

    __device__ __forceinline__ void make_dv(int count) {
        float dv[HEAD_DIM_V / 2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 2; ++i) dv[i] = 0.f;
        if (count > 0) {
            Keys<KeyQuarters> keys;
            begin(keys);
            arrive(P_FULL, used().index);                  // of no block
#pragma unroll 1
            do {
                float s[BLOCK_M / 2];
                u32 probabilities[BLOCK_M / 4];
                const u32 rows = base + Q + queries().index * Q_BYTES, outs = base + DO + outputs().index * DO_BYTES;
                mbarrier_wait(base + Q_FULL + 8 * queries().index, queries().phase);
                const StepRecord step = record_at<StepRecord>(base + Q_RECORD + 16 * queries().index);
                clear_stale<QK_CHUNKS>(rows, step);
                keys.multiply(s, base + K + rank * KEYS_CHUNK, BLOCKS * KEYS_CHUNK, rows, rank);
                wgmma_wait<0>(s);
                make_probabilities(s, probabilities, step);  // after it warpgroup 1 may free the queries
                mbarrier_wait(base + DO_FULL + 8 * outputs().index, outputs().phase);
                clear_stale<V_CHUNKS>(outs, step);
                multiply_queries();
                accumulate_rows<HEAD_DIM_V, BLOCK_M>(dv, probabilities, outs);
                wgmma_wait<1>(dq);
                add_queries();
                before = step.sums;
                wgmma_wait<0>(dv);
                arrive_both(DO_EMPTY, outputs().index);
            } while (++turn, --count > 0);
            finish();
        }
        store_keys<HEAD_DIM_V>(dv, p.dv, p.dv_batch, p.dv_row, p.dv_head, 1.f);
    }

    __device__ __forceinline__ void make_dk(int count) {
        float dk[HEAD_DIM / 2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.f;
        if (count > 0) {
            Keys<ValueQuarters> values;
            begin(values);
            // The dS of no block: zeros, so that the loop has no special first step.
            wait_free(used());
            const u32 zeros = base + DS + used().index * DS_BYTES;
            for (int i = threadIdx.x % WARPGROUP; i < DS_BYTES / 16; i += WARPGROUP)
                store_shared(zeros + i * 16, make_uint4(0, 0, 0, 0));
            fence_proxy_async();
            named_barrier_sync(TOGETHER + NUMBER, WARPGROUP);
            if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive(base + DS_FULL + 8 * used().index);
#pragma unroll 1
            do {
                float dp[BLOCK_M / 2];
                u32 ds[BLOCK_M / 4];
                const u32 rows = base + Q + queries().index * Q_BYTES, outs = base + DO + outputs().index * DO_BYTES;
                mbarrier_wait(base + DO_FULL + 8 * outputs().index, outputs().phase);
                const StepRecord step = record_at<StepRecord>(base + DO_RECORD + 16 * outputs().index);
                clear_stale<V_CHUNKS>(outs, step);
                values.multiply(dp, base + V, KEYS_CHUNK, outs, rank);
                take_probabilities(ds);
                wgmma_wait<0>(dp);
                make_gradients(dp, ds);
                arrive_both(DO_EMPTY, outputs().index);
                mbarrier_wait(base + Q_FULL + 8 * queries().index, queries().phase);
                multiply_queries();
                accumulate_rows<HEAD_DIM, BLOCK_M>(dk, ds, rows);
                wgmma_wait<1>(dq);
                add_queries();
                before = step.sums;
                wgmma_wait<0>(dk);
                arrive_both(Q_EMPTY, queries().index);
            } while (++turn, --count > 0);
            finish();
        }
        store_keys<HEAD_DIM>(dk, p.dk, p.dk_batch, p.dk_row, p.dk_head, p.scale);
    }

    __device__ __forceinline__ void run() {
        griddepcontrol_wait();                             // of the sums
        for (int count; (count = next_tile()) != NO_TILE; end_tile()) {
            if (NUMBER == 0) {
                make_dv(count);
            } else {
                make_dk(count);
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    hopper_backward_two_cta(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory);
    const int rank = blockIdx.x % BLOCKS;
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the swizzle counts from there
        mbarrier_init(base + NEXT_FULL, 1), mbarrier_init(base + NEXT_EMPTY, 1), mbarrier_init(base + WANTED, 1);
        for (int i = 0; i < TILE_SLOTS; ++i)
            mbarrier_init(base + TILE_FULL + 8 * i, 1), mbarrier_init(base + TILE_EMPTY + 8 * i, 8 * WARP_ARRIVALS + LOADERS);
        mbarrier_init(base + KV_FULL, 1), mbarrier_init(base + KV_FULL + 8, 1);
        mbarrier_init(base + KV_EMPTY, 8 * WARP_ARRIVALS);
        // Arrivals are of warps: of warpgroup 1, or of both, in both blocks where the slot is filled from both.
        for (int i = 0; i < Q_STAGES; ++i)
            mbarrier_init(base + Q_FULL + 8 * i, 1), mbarrier_init(base + Q_EMPTY + 8 * i, 4 * BLOCKS * WARP_ARRIVALS);
        for (int i = 0; i < DO_STAGES; ++i)
            mbarrier_init(base + DO_FULL + 8 * i, 1), mbarrier_init(base + DO_EMPTY + 8 * i, 8 * BLOCKS * WARP_ARRIVALS);
        for (int i = 0; i < DS_STAGES; ++i) {
            mbarrier_init(base + P_FULL + 8 * i, 4 * WARP_ARRIVALS), mbarrier_init(base + DS_FULL + 8 * i, 1);
            mbarrier_init(base + DS_EMPTY + 8 * i, 8 * BLOCKS * WARP_ARRIVALS);
        }
        fence_mbarrier_init();
        griddepcontrol_launch_dependents();                              // which wait for the end all the same
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
    }
    __syncthreads();
    cluster_arrive_relaxed(), cluster_wait();             // of the barriers, released by the fence
    // By shuffle, so that ptxas knows them to be alike in the warp and keeps descriptors in uniform registers.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (threadIdx.x % WARP == 0) {
            if (warp == 0) {
                RowLoader<Q_STAGES, QK_CHUNKS>{p, base, rank}.run(p.q, p.lse, Q, LSE, Q_RECORD, Q_FULL, Q_EMPTY, rank == 0);
            } else if (warp == 1) {
                RowLoader<DO_STAGES, V_CHUNKS>{p, base, rank}.run(p.dout, p.delta, DO, DELTA, DO_RECORD, DO_FULL, DO_EMPTY, false);
            } else if (warp == 2) {
                KeysLoader{p, base, rank}.run();
            } else {
                Taker{p, base, rank}.run();
            }
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        if (warpgroup == 1) {
            Consumer<0>(p, base, rank, warp % 4).run();
        } else {
            Consumer<1>(p, base, rank, warp % 4).run();
        }
    }
    cluster_arrive(), cluster_wait();                     // neither block may end while the other's arrivals are under way
}
