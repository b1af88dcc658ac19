// Attention backward for Hopper, all three gradients in one pass over the queries.
//
// A block of threads has 128 keys of a key/value head. K and V stay in shared memory; Q, dO and their rows' statistics
// stream through rings, for each query head of the group and each block of queries that sees the keys. A consumer
// warpgroup has 64 of the keys. It holds the scores transposed, so that P and dS are in registers what the next products
// take as their A operand:
//
//     Sᵀ = K·Qᵀ     dPᵀ = V·dOᵀ     dV += Pᵀ·dO     dK += dSᵀ·Q     dQᵀ = Kᵀ·dSᵀ of both warpgroups' keys
//
// Only dS goes through shared memory, from which the last product takes it: of a head dim above 64 each warpgroup makes
// half of the columns of dQ, else half of its rows. dQ is summed in device memory, in the order of the accumulator's registers
// (backward_sums.cuh): by the copy engine, or if DIRECT from the registers. A step of a consumer, i the block of queries:
//
//     issue S(i), dP(i) │ wait S │ P │ issue dV(i) │ wait dP │ dS, store it │ wait dV │ issue dQ(i−1), dK(i) │ wait dQ,
//     store it │ wait dK
//
// dQ is one block late, so that neither warpgroup waits for the other's dS of this step. Where K has two places the first
// step of a tile makes the last dQ of the tile before (CARRY). TURNS: one consumer issues S and dP while the other has its
// scores.
//
// Blocks of threads stay on their SMs and take tile after tile (a tile: a block of keys), so that the loads of the next
// tile run under the stores of the one before. DETERMINISTIC: the tiles add to a block of queries in their order. Each
// walks the queries in the direction in which the tiles before it arrive there earlier: with a causal mask, backwards. dQ that
// waits for its turn has DQ_STAGES places.
//
// CUT: the last tiles are cut along their queries into pieces, so that all SMs get done at about the same time. All but the
// last piece of a tile leave their dK and dV in device memory, where the last one adds them to its own, in their order.
//
// CHORES: warps that have nothing else to do write zeros for the sums and make dQ of them, some tiles before and after
// (backward_chores.cuh).
//
// FINISH_INSIDE: who makes the last addition to a part of dQ puts it into a queue, from which any idle warp of the launch
// takes it and writes dQ, under the products of the others. Else backward_finish.cu does it.
#include "hopper/backward/one_cta/in_kernel_dq.cuh"

constexpr int BLOCK_N = cfg::BLOCK_N, CONSUMERS = 2, THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int K_STAGES = cfg::K_STAGES, V_STAGES = cfg::V_STAGES;  // tiles whose keys have a place at once
constexpr int Q_STAGES = cfg::Q_STAGES, DO_STAGES = cfg::DO_STAGES, DS_STAGES = 2;
constexpr u32 DQ_STAGES = cfg::DQ_STAGES;                 // blocks of dQ that may wait for the adder
constexpr u32 KEYS_CHUNK = BLOCK_N * ROW_BYTES, ROWS_CHUNK = BLOCK_M * ROW_BYTES;
constexpr u32 K_BYTES = QK_CHUNKS * KEYS_CHUNK, V_BYTES = V_CHUNKS * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK, DS_BYTES = BLOCK_N / 64 * ROWS_CHUNK;
constexpr u32 STAT_BYTES = BLOCK_M * 4;

// Of dQᵀ a warpgroup makes 64 columns for PART queries; what is added of them is its part (backward_sums.cuh).
constexpr u32 SLAB_BYTES = SLAB_FLOATS * 4, PART_BYTES = cfg::DIRECT ? 0 : 4 * SLAB_BYTES;
static_assert(BLOCK_N == 64 * CONSUMERS && BLOCK_M % 16 == 0 && HEAD_DIM <= 128 && HEAD_DIM_V <= 128 && PARTS == CONSUMERS);

constexpr u32 K = 0, V = K + K_STAGES * K_BYTES, Q = V + V_STAGES * V_BYTES, DO = Q + Q_STAGES * Q_BYTES, DS = DO + DO_STAGES * DO_BYTES;
constexpr u32 DQ = DS + DS_STAGES * DS_BYTES, LSE = DQ + DQ_STAGES * CONSUMERS * PART_BYTES, DELTA = LSE + Q_STAGES * STAT_BYTES;
// What the consumers look up of a tile and of a step: they have no registers to carry it.
constexpr u32 TILES = DELTA + DO_STAGES * STAT_BYTES, TILE_SLOTS = 2, TILE_BYTES = 32;
constexpr u32 STEPS = TILES + TILE_BYTES * TILE_SLOTS, STEP_BYTES = 16;
// And what the adders look up of a part of dQ: of two a step, and the producer is Q_STAGES steps ahead of the consumers, who are
// as many parts ahead of the adders as wait.
constexpr u32 ORDERS = STEPS + STEP_BYTES * Q_STAGES, ORDER_SLOTS = 4 * Q_STAGES, ORDER_BYTES = 8;
constexpr u32 TILE_FULL = ORDERS + ORDER_BYTES * ORDER_SLOTS, TILE_EMPTY = TILE_FULL + 8 * TILE_SLOTS;
constexpr u32 K_FULL = TILE_EMPTY + 8 * TILE_SLOTS, K_EMPTY = K_FULL + 8 * K_STAGES, V_FULL = K_EMPTY + 8 * K_STAGES;
constexpr u32 V_EMPTY = V_FULL + 8 * V_STAGES, Q_FULL = V_EMPTY + 8 * V_STAGES, Q_EMPTY = Q_FULL + 8 * Q_STAGES, DO_FULL = Q_EMPTY + 8 * Q_STAGES;
constexpr u32 DO_EMPTY = DO_FULL + 8 * DO_STAGES, DS_FULL = DO_EMPTY + 8 * DO_STAGES, DS_EMPTY = DS_FULL + 8 * DS_STAGES;
constexpr u32 DQ_FULL = DS_EMPTY + 8 * DS_STAGES, DQ_EMPTY = DQ_FULL + 8 * DQ_STAGES * CONSUMERS;
constexpr u32 ADDED = DQ_EMPTY + 8 * DQ_STAGES * CONSUMERS;  // CHORES: warps' tiles of which all additions are under way
constexpr int CONSUMER_ARRIVALS = 4 * CONSUMERS * WARP_ARRIVALS;
constexpr bool BACKWARDS = cfg::DETERMINISTIC && cfg::HAS_RIGHT;
// The last dQ of a tile is made in the first step of the next one, while that one's keys have the other place: no step waits
// for the other warpgroup's dS. Where additions have an order, a turn would be late for it.
constexpr bool CARRY = K_STAGES > 1 && !cfg::DETERMINISTIC;
// V of the next tile has no place but V's of this one, which is needed no more when the last dP has come.
constexpr bool EARLY_VALUES = CARRY && V_STAGES == 1;
static_assert(!cfg::DIRECT || !cfg::DETERMINISTIC, "the adders keep the order");
static_assert(cfg::DETERMINISTIC || !cfg::FINISH_INSIDE, "only an order tells which addition is the last");
static_assert(!cfg::CUT || !(cfg::DETERMINISTIC || cfg::VARLEN), "a turn is a tile's, and the tiles are counted before");
static_assert(!cfg::CHORES || !cfg::VARLEN, "shares are of tiles that are counted before");
static_assert(!cfg::CHORES || cfg::DIRECT, "the copy engine's additions are not told");
static_assert(DQ_STAGES == 1 || ORDER_SLOTS >= 2 * Q_STAGES + DQ_STAGES + 2, "an order would be overwritten");
static_assert(ADDED + 16 == cfg::SHARED_BYTES, "the Python formula disagrees");
enum { TOGETHER = 1, ALL = 3, TURN = 4 };                 // named barriers: one a consumer, of both, one a consumer

// Where a consumer leaves its part of dQ for the adder.
__device__ __forceinline__ u32 dq_place(u32 handed, int consumer) { return handed % DQ_STAGES * CONSUMERS + consumer; }

extern __shared__ __align__(1024) unsigned char shared_memory[];

// A count of what warps of the block have done, and what each did before.
__device__ __forceinline__ void add_shared_release(u32 address, u32 x) {
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ u32 load_shared_acquire(u32 address) {
    u32 x;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

// A tile: its keys, and the (query head, block of queries) that it steps through.
struct Work {
    int which, kv_head, first_key, group;
    Sequence sequence;
    Blocks queries;

    __device__ __forceinline__ Work(const Params& p, const Place& place)
        : which(place.batch), kv_head(place.head), first_key(place.block * BLOCK_N), group(p.heads / p.kv_heads),
          sequence(p, place.batch), queries(queries_of(p, sequence, first_key, BLOCK_N)) {}
    __device__ __forceinline__ int steps() const { return max(0, queries.high - queries.low) * group; }
};

// The steps of a tile that are made: begin <= step < end.
struct Steps {
    int begin, end;

    __device__ __forceinline__ Steps(const Params& p, const Place& place, int all) : begin(0), end(all) {
        if (cfg::CUT && place.piece > 0) {
            const int piece = (place.piece - 1) % p.pieces;
            begin = all * piece / p.pieces, end = all * (piece + 1) / p.pieces;
        }
    }
    __device__ __forceinline__ int count() const { return end - begin; }
};

// What the producer announces of a tile, 16 bytes each.
struct TileKeys {
    int first, length, shift, steps;                      // first key of the tile; keys of its sequence
};
// And of a step, with its queries.
struct StepQueries {
    int first, rows, head;                                // first query of the block; rows from there to the sequence's end
    int masked;                                           // some pair of the step's is hidden
};
enum { NO_BLOCK = -1, NO_MORE = -2 };                     // parts of dQ that are of no block, and not there

__device__ __forceinline__ Place tile_place(u32 base, u32 slot) {
    const int4 x = load_shared_int4(base + TILES + TILE_BYTES * slot);
    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ TileKeys tile_keys(u32 base, u32 slot) {
    const int4 x = load_shared_int4(base + TILES + TILE_BYTES * slot + 16);
    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ StepQueries step_queries(u32 base, u32 slot) {
    const int4 x = load_shared_int4(base + STEPS + STEP_BYTES * slot);
    return {x.x, x.y, x.z, x.w};
}

// ---------------------------------------------------------------------------------------------- the producer's warps

struct Producer {
    const Params& p;
    const u32 base;
    u32 tiles = 0, full_tiles = 0, steps = 0;             // announced so far; full: with steps

    __device__ __forceinline__ void announce(const Place& place, const Work& work, const Steps& made) {
        const u32 slot = tiles % TILE_SLOTS, at = base + TILES + TILE_BYTES * slot;
        mbarrier_wait(base + TILE_EMPTY + 8 * slot, tiles / TILE_SLOTS % 2 ^ 1);
        store_shared(at, make_uint4(place.block, place.head, place.batch, place.piece));
        store_shared(at + 16, make_uint4(work.first_key, work.sequence.k_length, work.sequence.shift, made.count()));
        mbarrier_arrive(base + TILE_FULL + 8 * slot);
        ++tiles;
    }

    // Tell the adders of the next part: the block of queries that it is of, and if DETERMINISTIC the block of keys.
    __device__ __forceinline__ void order_part(int block, int keys = 0) const {
        const u32 at = base + ORDERS + (steps + (CARRY ? min(full_tiles, 1u) : full_tiles)) % ORDER_SLOTS * ORDER_BYTES;
        store_shared(at, static_cast<u32>(block));
        if (cfg::DETERMINISTIC) store_shared(at + 4, static_cast<u32>(keys));
    }
    __device__ __forceinline__ void wait_zeros(const Place& place) const {
        const SpinLimit patience;
        while (load_acquire(p.zeroed + place.batch * p.kv_heads + place.head) != p.blocks) patience.spend();
    }

    template <int CHUNKS>
    __device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 chunk_bytes, u32 full, int row, int head,
                                         int batch) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            tma_load(base + to + i * chunk_bytes, map, full, i * CHUNK_COLUMNS, row, head, batch);
    }

    __device__ __forceinline__ void load_k(int row, int head, int batch) const {
        const u32 before = full_tiles - 1, slot = before % K_STAGES, full = base + K_FULL + 8 * slot;
        mbarrier_wait(base + K_EMPTY + 8 * slot, before / K_STAGES % 2 ^ 1);
        mbarrier_arrive_expect_tx(full, K_BYTES);
        load<QK_CHUNKS>(p.k, K + slot * K_BYTES, KEYS_CHUNK, full, row, head, batch);
    }
    __device__ __forceinline__ void load_v(int row, int head, int batch) const {
        const u32 before = full_tiles - 1, slot = before % V_STAGES, full = base + V_FULL + 8 * slot;
        mbarrier_wait(base + V_EMPTY + 8 * slot, before / V_STAGES % 2 ^ 1);
        mbarrier_arrive_expect_tx(full, V_BYTES);
        load<V_CHUNKS>(p.v, V + slot * V_BYTES, KEYS_CHUNK, full, row, head, batch);
    }
    // What has its place first: of two places K's, of one V's, which the tile before needs less long.
    __device__ __forceinline__ void load_keys(const Work& work) const {
        const int row = work.sequence.k_first + work.first_key, batch = work.sequence.batch;
        if (K_STAGES > 1) load_k(row, work.kv_head, batch);
        load_v(row, work.kv_head, batch);
        if (K_STAGES == 1) load_k(row, work.kv_head, batch);
    }

    __device__ __forceinline__ void load_tile(const Place& place, const Work& work, const Steps& made) {
        const Sequence& sequence = work.sequence;
        const int blocks = work.queries.high - work.queries.low;
        if (made.count() <= 0) return;
        if (!CARRY || full_tiles == 0) order_part(NO_BLOCK);
        ++full_tiles;
        bool first = true;
        const int end = (work.kv_head + 1) * work.group;
        int i = cfg::CUT ? made.begin % blocks : 0, left = made.count();
        for (int head = end - work.group + (cfg::CUT ? made.begin / blocks : 0); cfg::CUT ? left > 0 : head < end; ++head, i = 0) {
            const long long stat = stat_block(p, sequence, work.which, head);
#pragma unroll 1
            for (; i < blocks; ++i, ++steps) {
                if (cfg::CUT && left-- == 0) return;
                const int block = BACKWARDS ? work.queries.high - 1 - i : work.queries.low + i, query = block * BLOCK_M;
                const int row = sequence.q_first + query;
                u32 slot = steps % Q_STAGES, full = base + Q_FULL + 8 * slot;
                mbarrier_wait(base + Q_EMPTY + 8 * slot, steps / Q_STAGES % 2 ^ 1);
                order_part(stat + block, work.first_key / BLOCK_N);
                const bool masked = partly_masked<BLOCK_N>(p, work.first_key, sequence.k_length, query, sequence.shift);
                store_shared(base + STEPS + STEP_BYTES * slot,
                             make_uint4(query, sequence.q_length - query, head, masked));
                mbarrier_expect_tx_before_copies(full, Q_BYTES + STAT_BYTES);
                load<QK_CHUNKS>(p.q, Q + slot * Q_BYTES, ROWS_CHUNK, full, row, head, sequence.batch);
                bulk_load(base + LSE + slot * STAT_BYTES, p.lse + (stat + block) * BLOCK_M, STAT_BYTES, full);
                mbarrier_arrive_after_copies(full);
                slot = steps % DO_STAGES, full = base + DO_FULL + 8 * slot;
                mbarrier_wait(base + DO_EMPTY + 8 * slot, steps / DO_STAGES % 2 ^ 1);
                mbarrier_expect_tx_before_copies(full, DO_BYTES + STAT_BYTES);
                load<V_CHUNKS>(p.dout, DO + slot * DO_BYTES, ROWS_CHUNK, full, row, head, sequence.batch);
                bulk_load(base + DELTA + slot * STAT_BYTES, p.delta + (stat + block) * BLOCK_M, STAT_BYTES, full);
                mbarrier_arrive_after_copies(full);
                if (first) {
                    if (cfg::CHORES) wait_zeros(place);
                    load_keys(work);
                }
                first = false;
            }
        }
    }

    __device__ __forceinline__ void run() {
        griddepcontrol_wait();
        Finder<cfg::CUT> finder;
        while (true) {
            // Late, as who is done first takes the next; and never a tile of one's own, which might wait for an SM while
            // others that have theirs wait for the tile.
            const Place place = finder.find(p, atomicAdd(p.counters + TILES_TAKEN, 1), BLOCK_N);
            const Work work(p, place.batch < 0 ? Place{0, 0, 0, 0} : place);
            const Steps made(p, place, work.steps());
            if (place.batch < 0) order_part(NO_MORE);
            announce(place, work, made);
            if (place.batch < 0) return;
            load_tile(place, work, made);
        }
    }
};

// ---------------------------------------------------------------------------------------------- sums of dQ

// Adds a consumer's parts of dQ to the sums. A turn is passed when the addition has arrived, which the copy engine's end of
// it makes visible to this thread's later operations (PTX ISA, async proxy).
struct Adder {
    const Params& p;
    const u32 base;
    const int consumer;

    __device__ __forceinline__ u32 order(u32 part) const { return base + ORDERS + part % ORDER_SLOTS * ORDER_BYTES; }
    __device__ __forceinline__ int* turn_of(int block) const { return &p.states[block].turn[consumer]; }

    // Until what the blocks of keys before this one added is there for the copy engine.
    __device__ __forceinline__ void semaphore_acquire(int block, int keys) const {
        const SpinLimit patience;
        while (load_acquire(turn_of(block)) != keys) patience.spend();
        fence_proxy_async_global();
    }
    __device__ __forceinline__ void semaphore_release(int block, int keys) const {
        bulk_wait();
        store_release(turn_of(block), keys + 1);
        if (cfg::FINISH_INSIDE && keys + 1 == p.states[block].keys_end) complete(block);
    }
    __device__ __forceinline__ void complete(int block) const {
        if constexpr (cfg::FINISH_INSIDE) {
            fence_acq_rel_gpu();                              // what others added, before what the finisher reads
            const int place = atomicAdd(p.counters + PARTS_COMPLETE, 1);
            store_release(p.queue + place, PARTS * block + consumer + 1);
        }
    }

    __device__ __forceinline__ void run() {
        const u32 bytes = slabs_of(consumer) * SLAB_BYTES;
        griddepcontrol_wait();
        for (u32 handed = 0;; ++handed) {
            const u32 place = dq_place(handed, consumer), from = base + DQ + place * PART_BYTES;
            mbarrier_wait(base + DQ_FULL + 8 * place, handed / DQ_STAGES % 2);
            const int block = load_shared(order(handed));
            if (block == NO_MORE) break;
            const int keys = cfg::DETERMINISTIC ? load_shared(order(handed) + 4) : 0;
            if (block != NO_BLOCK) {
                if (cfg::DETERMINISTIC) semaphore_acquire(block, keys);
                float* const to = p.dq + static_cast<long long>(block) * SUM_FLOATS + consumer * PART_FLOATS;
                bulk_add(to, from, bytes);
            }
            bulk_commit();
            bulk_wait_read();
            mbarrier_arrive(base + DQ_EMPTY + 8 * place);
            if (cfg::DETERMINISTIC && block != NO_BLOCK) semaphore_release(block, keys);
        }
        bulk_wait();
    }
};

// CHORES: tells of the tiles whose additions the consumers of the block have made. It looks seldom: it shares its scheduler
// with consumers. The last additions of a tile are made in the next one that has steps. So it keeps two tiles in mind, whose
// places in the ring it has freed: it waits for the first only when it knows the tile that the consumers need to go on.
struct Teller {
    const Params& p;
    const u32 base;
    u32 read = 0, told = 0;                               // tiles with steps
    int first = 0, second = 0;                            // those that are not told yet: head, twice, and whether a piece

    __device__ __forceinline__ void announce(int tile) const { announce_added(p, tile / 2, tile % 2); }
    // Whether there was a tile to tell of.
    __device__ __forceinline__ bool tell() {
        if (told == read || load_shared_acquire(base + ADDED) < (told + 1) * 4 * CONSUMERS) return false;
        announce(first);
        first = second, ++told;
        return true;
    }

    __device__ __forceinline__ void run() {
        griddepcontrol_wait();
        for (u32 made = 0;; ++made) {
            const u32 slot = made % TILE_SLOTS;
            while (!mbarrier_try_wait(base + TILE_FULL + 8 * slot, made / TILE_SLOTS % 2))
                if (!tell()) __nanosleep(PAUSE);
            const Place place = tile_place(base, slot);
            const int steps = tile_keys(base, slot).steps, tile = 2 * (place.batch * p.kv_heads + place.head) + (place.piece > 0);
            mbarrier_arrive(base + TILE_EMPTY + 8 * slot);
            if (place.batch < 0) break;
            if (steps == 0) {
                announce(tile);
                continue;
            }
            while (read - told == 2)                      // the first is added to while the second is made
                if (!tell()) __nanosleep(PAUSE);
            (read == told ? first : second) = tile, ++read;
        }
        while (told < read)
            if (!tell()) __nanosleep(PAUSE);
    }
};

// ---------------------------------------------------------------------------------------------- the consumers

struct Consumer {
    const Params& p;
    const u32 base;
    const int number, warp, lane;
    // Every ring's place follows from the tiles and steps made and the parts of dQ handed over, one more a tile than it has
    // steps (CARRY: one more in all). dS of a step is part `handed() + 1`, the part that its dQ product reads is `handed()`.
    u32 tiles_made = 0, steps_made = 0;
    u32 counted = 0;                                      // parts handed over; CARRY: tiles with steps before this one
    int masked;                                           // of the step
    float s[BLOCK_M / 2], dp[BLOCK_M / 2], dq[PART / 2];
    float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];
    u32 probabilities[BLOCK_M / 4], ds[BLOCK_M / 4];
    u32 slopes[cfg::SOFTCAP ? BLOCK_M / 4 : 1];           // of the soft cap, in halves

    __device__ __forceinline__ Consumer(const Params& params, u32 address, int warpgroup)
        : p(params), base(address), number(warpgroup), warp(threadIdx.x % WARPGROUP / WARP),
          lane(threadIdx.x % WARP) {}

    template <int STAGES>
    __device__ __forceinline__ void wait(u32 which, u32 count, u32 flip = 0) const {
        mbarrier_wait(base + which + 8 * (count % STAGES), count / STAGES % 2 ^ flip);
    }
    __device__ __forceinline__ void arrive(u32 which, u32 slot = 0) const {
        mbarrier_arrive_warp(base + which + 8 * slot, lane);
    }
    __device__ __forceinline__ u32 handed() const { return CARRY ? steps_made : counted; }
    // Tiles with steps before this one; not while the step's part is handed over.
    __device__ __forceinline__ u32 full_tiles() const { return CARRY ? counted : counted - steps_made; }
    __device__ __forceinline__ u32 keys() const { return K + full_tiles() % K_STAGES * K_BYTES; }
    __device__ __forceinline__ u32 values() const { return V + full_tiles() % V_STAGES * V_BYTES; }
    __device__ __forceinline__ u32 queries() const { return steps_made % Q_STAGES; }
    __device__ __forceinline__ u32 outputs() const { return steps_made % DO_STAGES; }

    // ---- TURNS: one consumer makes S and dP while the other has its scores, so that they do not leave the tensor cores idle
    // together. A turn is over when the products are issued (1), or when they have come (2).

    __device__ __forceinline__ void take_turn() const {
        if (cfg::TURNS) named_barrier_sync(TURN + number, CONSUMERS * WARPGROUP);
    }
    __device__ __forceinline__ void semaphore_release(int after) const {
        if (cfg::TURNS == after) named_barrier_arrive(TURN + 1 - number, CONSUMERS * WARPGROUP);
    }

    // ---- products

    __device__ __forceinline__ void multiply_scores() {
        wait<Q_STAGES>(Q_FULL, steps_made);
        // Now, as its latency is hidden under the product; by shuffle, as in hopper_backward.
        masked = uniform(step_queries(base, queries()).masked);
        clear_stale<QK_CHUNKS>(Q + queries() * Q_BYTES);
        multiply_rows<BLOCK_M, QK_STEPS, KEYS_CHUNK, ROWS_CHUNK>(s, base + keys() + number * 64 * ROW_BYTES,
                                                                 base + Q + queries() * Q_BYTES);
    }
    __device__ __forceinline__ void multiply_outputs() {
        wait<DO_STAGES>(DO_FULL, steps_made);
        clear_stale<V_CHUNKS>(DO + outputs() * DO_BYTES);
        multiply_rows<BLOCK_M, V_STEPS, KEYS_CHUNK, ROWS_CHUNK>(dp, base + values() + number * 64 * ROW_BYTES,
                                                                base + DO + outputs() * DO_BYTES);
    }
    // dQᵀ of the block before: m its columns, n queries, k all keys.
    __device__ __forceinline__ void multiply_queries(u32 its_keys) {
        wait<DS_STAGES>(DS_FULL, handed());
        const u64 a = wgmma_n_inner(base + its_keys + (SPLIT_COLUMNS ? number * KEYS_CHUNK : 0), KEYS_CHUNK);
        const u64 b = opaque(wgmma_k_inner(base + DS + handed() % DS_STAGES * DS_BYTES + (SPLIT_COLUMNS ? 0 : number * PART * ROW_BYTES)));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; ++i) {
            const u64 a_step = a + i * (16 * ROW_BYTES / 16), b_step = b + (i / 4 * ROWS_CHUNK + i % 4 * 32) / 16;
            if (i == 0) {
                Wgmma<PART>::ss_mt_first(dq, a_step, b_step);
            } else {
                Wgmma<PART>::ss_mt(dq, a_step, b_step, true);
            }
        }
        wgmma_commit();
    }

    // ---- what lies past the end of a packed sequence

    template <int CHUNKS>
    __device__ __forceinline__ void clear_stale(u32 tile) {
        if constexpr (cfg::VARLEN) {
            const int rows = step_queries(base, queries()).rows;
            if (rows >= BLOCK_M) return;
            // Both consumers write the same zeros, each before its own products.
            clear_rows<CHUNKS, BLOCK_M>(base + tile, rows, threadIdx.x % WARPGROUP, WARPGROUP);
            fence_proxy_async();
            named_barrier_sync(TOGETHER + number, WARPGROUP);
        }
    }
    __device__ __forceinline__ void clear_stale_keys() {
        if constexpr (cfg::VARLEN) {
            const TileKeys tile = tile_keys(base, tiles_made % TILE_SLOTS);
            const int rows = tile.length - tile.first;
            if (rows >= BLOCK_N) return;
            const int thread = threadIdx.x - WARPGROUP, threads = CONSUMERS * WARPGROUP;
            clear_rows<QK_CHUNKS, BLOCK_N>(base + keys(), rows, thread, threads);
            clear_rows<V_CHUNKS, BLOCK_N>(base + values(), rows, thread, threads);
            fence_proxy_async();
            named_barrier_sync(ALL, threads);
        }
    }

    // ---- S to P, dP to dS. Rows of the transposed scores are keys, columns queries.

    __device__ __forceinline__ Corner corner() const {
        const StepQueries step = step_queries(base, queries());
        const TileKeys tile = tile_keys(base, tiles_made % TILE_SLOTS);
        return Corner(tile.first + number * 64, tile.length, step.first, tile.shift);
    }

    __device__ __forceinline__ void make_probabilities() {
        const u32 lse = base + LSE + queries() * STAT_BYTES + lane % 4 * 8;
        if constexpr (TRANSFORMED) {
            const int which = tile_place(base, tiles_made % TILE_SLOTS).batch;
            transform_scores(p, corner().distance(), alibi_slope(p, which, step_queries(base, queries()).head), s, slopes);
        }
        if (masked) mask_scores(p, corner(), s);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 row = load_shared_float2(lse + i / 4 * 32);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float minus = j % 2 ? row.y : row.x;
                s[i + j] = ex2(TRANSFORMED ? s[i + j] + minus : fmaf(s[i + j], p.scale_log2, minus));
            }
            probabilities[i / 2] = Convert<Element>::pack(s[i], s[i + 1]);
            probabilities[i / 2 + 1] = Convert<Element>::pack(s[i + 2], s[i + 3]);
        }
    }

    __device__ __forceinline__ void make_gradients() {
        const u32 delta = base + DELTA + outputs() * STAT_BYTES + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 row = load_shared_float2(delta + i / 4 * 32);
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                float low = s[j] * (dp[j] - row.x), high = s[j + 1] * (dp[j + 1] - row.y);
                if constexpr (cfg::SOFTCAP) {
                    const float2 slope = unpack_half2(slopes[j / 2]);
                    low *= slope.x, high *= slope.y;
                }
                ds[j / 2] = Convert<Element>::pack(low, high);
            }
        }
        wait<DS_STAGES>(DS_EMPTY, handed() + 1, 1);
        // Transposed on its way: a row is a query, and a chunk of columns the keys of one consumer.
        const int row = lane / 16 * 8 + lane % 8, piece = (2 * warp + lane / 8 % 2) ^ (lane % 8);
        const u32 to = base + DS + (handed() + 1) % DS_STAGES * DS_BYTES + number * ROWS_CHUNK + row * ROW_BYTES + piece * 16;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i)
            stmatrix_x4_trans(to + i * 16 * ROW_BYTES, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    }
    __device__ __forceinline__ void announce_gradients(u32 part) const {
        fence_proxy_async();
        __syncwarp();
        arrive(DS_FULL, part % DS_STAGES);
    }

    // ---- results

    // What multiply_queries made: to the sums, or to where the adder takes it from.
    __device__ __forceinline__ void store_queries() {
        arrive(DS_EMPTY, handed() % DS_STAGES);
        const int thread = thread_again();
        if constexpr (cfg::DIRECT) {
            const int block = load_shared(base + ORDERS + handed() % ORDER_SLOTS * ORDER_BYTES);
            float* const to = p.dq + static_cast<long long>(block) * SUM_FLOATS + number * PART_FLOATS +
                              thread / WARP * SLAB_FLOATS + thread % WARP * 4;
            // The last warps of a narrow head dim have no slab; their zeros would go past the part.
            if (block >= 0 && (SLABS % 4 == 0 || thread / WARP < slabs_of(number))) {
#pragma unroll
                for (int i = 0; i < PART / 8; ++i)
                    global_add(to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
            }
        } else {
            const u32 place = dq_place(handed(), number);
            mbarrier_wait(base + DQ_EMPTY + 8 * place, handed() / DQ_STAGES % 2 ^ 1);
            const u32 to = base + DQ + place * PART_BYTES + thread / WARP * SLAB_BYTES + thread % WARP * 16;
#pragma unroll
            for (int i = 0; i < PART / 8; ++i)
                store_shared(to + i * 512, make_uint4(__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                                      __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])));
            fence_proxy_async();
            __syncwarp();
            arrive(DQ_FULL, place);
        }
        if (!CARRY) ++counted;
    }

    // A consumer's rows of dK or dV.
    template <int DIM>
    __device__ __forceinline__ void store_keys(const float (&d)[DIM / 2], const Work& work, void* to, long long batch,
                                               long long row, long long head, float factor) const {
        const int first = work.first_key + number * 64;
        store_rows<DIM>(d, static_cast<Element*>(to) + work.sequence.batch * batch + (work.sequence.k_first + first) * row +
                               work.kv_head * head, row, work.sequence.k_length - first, factor);
    }

    // ---- pieces of a tile

    // Where a piece leaves dK and dV; a thread's four by four, so that a warp's are 512 bytes in a row.
    __device__ __forceinline__ float4* partial(int tile, int piece) const {
        constexpr int VECTORS = (HEAD_DIM + HEAD_DIM_V) / 8;
        const long long at = (static_cast<long long>(tile) * (p.pieces - 1) + piece) * CONSUMERS + number;
        return reinterpret_cast<float4*>(p.partials) + at * (VECTORS * WARPGROUP) + threadIdx.x % WARPGROUP;
    }
    template <int N>
    __device__ __forceinline__ static void leave(float4*& to, const float (&d)[N]) {
#pragma unroll
        for (int i = 0; i < N; i += 4, to += WARPGROUP) __stcg(to, make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]));
    }
    template <int N>
    __device__ __forceinline__ static void fetch(const float4*& from, float (&d)[N]) {
#pragma unroll
        for (int i = 0; i < N; i += 4, from += WARPGROUP) {
            const float4 x = __ldcg(from);
            d[i] += x.x, d[i + 1] += x.y, d[i + 2] += x.z, d[i + 3] += x.w;
        }
    }
    // True when dK and dV are complete: of a piece that is not its tile's last they are left for that one.
    __device__ __forceinline__ bool join(int number_of_all) {
        if (number_of_all == 0) return true;
        const int tile = (number_of_all - 1) / p.pieces, piece = (number_of_all - 1) % p.pieces, last = p.pieces - 1;
        int* const arrived = p.counters + COUNTERS + tile * CONSUMERS + number;
        const bool first = threadIdx.x % WARPGROUP == 0;
        if (piece < last) {
            float4* to = partial(tile, piece);
            leave(to, dk), leave(to, dv);
            named_barrier_sync(TOGETHER + number, WARPGROUP);
            if (first) __threadfence(), atomicAdd(arrived, 1);  // releases what all threads left
            return false;
        }
        // Pieces are taken in their order, so that those before this one have their SMs, or are done.
        if (first) {
            const SpinLimit patience;
            while (load_acquire(arrived) != last) patience.spend();
        }
        named_barrier_sync(TOGETHER + number, WARPGROUP);
#pragma unroll 1
        for (int i = 0; i < last; ++i) {
            const float4* from = partial(tile, i);
            fetch(from, dk), fetch(from, dv);
        }
        return true;
    }

    // The dS of no block: zeros, so that the loop has no special first step.
    __device__ __forceinline__ void begin_gradients() {
        if (CARRY && full_tiles() > 0) return;            // it is that of the tile before
        wait<DS_STAGES>(DS_EMPTY, handed(), 1);
        const u32 zeros = base + DS + handed() % DS_STAGES * DS_BYTES + number * ROWS_CHUNK;
        for (int i = threadIdx.x % WARPGROUP; i < BLOCK_M * ROW_BYTES / 16; i += WARPGROUP)
            store_shared(zeros + i * 16, make_uint4(0, 0, 0, 0));
        announce_gradients(handed());
    }
    // dQ of the last step, of keys that are then free.
    __device__ __forceinline__ void end_gradients() {
        const u32 tile = full_tiles() - CARRY;
        multiply_queries(K + tile % K_STAGES * K_BYTES);
        wgmma_wait<0>(dq);
        arrive(K_EMPTY, tile % K_STAGES);
        store_queries();
        count_added();
    }
    __device__ __forceinline__ void count_added() const {
        if constexpr (cfg::CHORES) {
            __syncwarp();
            if (lane == 0) add_shared_release(base + ADDED, 1);
        }
    }

    __device__ __forceinline__ void sum_tile(int steps) {
        wait<K_STAGES>(K_FULL, full_tiles());
        wait<V_STAGES>(V_FULL, full_tiles());
        clear_stale_keys();
        begin_gradients();
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            const bool carried = CARRY && i == 0 && full_tiles() > 0;
            take_turn();
            multiply_scores();
            multiply_outputs();
            semaphore_release(1);
            wgmma_wait<1>(s);
            make_probabilities();
            accumulate_rows<HEAD_DIM_V, BLOCK_M>(dv, probabilities, base + DO + outputs() * DO_BYTES);
            wgmma_wait<1>(dp);
            semaphore_release(2);
            if (EARLY_VALUES && i + 1 == steps) arrive(V_EMPTY);
            make_gradients();
            wgmma_wait<0>(dv);
            arrive(DO_EMPTY, outputs());
            multiply_queries(K + (full_tiles() - carried) % K_STAGES * K_BYTES);
            accumulate_rows<HEAD_DIM, BLOCK_M>(dk, ds, base + Q + queries() * Q_BYTES);
            announce_gradients(handed() + 1);             // now, as its fence waits for the stores of dS
            wgmma_wait<1>(dq);
            if (carried) arrive(K_EMPTY, (full_tiles() - 1) % K_STAGES);
            store_queries();
            if (carried) count_added();
            wgmma_wait<0>(dk);
            arrive(Q_EMPTY, queries());
            ++steps_made;
        }
        if (!EARLY_VALUES) arrive(V_EMPTY, full_tiles() % V_STAGES);
        if (CARRY) {
            ++counted;
        } else {
            end_gradients();
        }
    }

    __device__ __forceinline__ void run() {
        if (cfg::DIRECT) griddepcontrol_wait();            // of the sums
        if (cfg::TURNS && number == 1) named_barrier_arrive(TURN, CONSUMERS * WARPGROUP);  // the first turn is consumer 0's
        for (;; ++tiles_made) {
            const u32 slot = tiles_made % TILE_SLOTS;
            wait<TILE_SLOTS>(TILE_FULL, tiles_made);
            if (uniform(tile_place(base, slot).batch) < 0) break;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.f;
#pragma unroll
            for (int i = 0; i < HEAD_DIM_V / 2; ++i) dv[i] = 0.f;
            const int steps = uniform(tile_keys(base, slot).steps);
            if (steps > 0) sum_tile(steps);
            const Place place = tile_place(base, slot);
            const Work work(p, place);
            __syncwarp();
            arrive(TILE_EMPTY, slot);
            if (cfg::CUT && !join(uniform(place.piece))) continue;
            store_keys<HEAD_DIM_V>(dv, work, p.dv, p.dv_batch, p.dv_row, p.dv_head, 1.f);
            store_keys<HEAD_DIM>(dk, work, p.dk, p.dk_batch, p.dk_row, p.dk_head, p.scale);
        }
        if (CARRY && full_tiles() > 0) end_gradients(), ++steps_made;
        if (cfg::DIRECT) return;
        const u32 place = dq_place(handed(), number);
        mbarrier_wait(base + DQ_EMPTY + 8 * place, handed() / DQ_STAGES % 2 ^ 1);
        arrive(DQ_FULL, place);                           // the end, for the adder
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_backward(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory);
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the swizzle counts from there
        for (int i = 0; i < TILE_SLOTS; ++i) {
            mbarrier_init(base + TILE_FULL + 8 * i, 1);
            mbarrier_init(base + TILE_EMPTY + 8 * i, CONSUMER_ARRIVALS + cfg::CHORES);
        }
        for (int i = 0; i < K_STAGES; ++i)
            mbarrier_init(base + K_FULL + 8 * i, 1), mbarrier_init(base + K_EMPTY + 8 * i, CONSUMER_ARRIVALS);
        for (int i = 0; i < V_STAGES; ++i)
            mbarrier_init(base + V_FULL + 8 * i, 1), mbarrier_init(base + V_EMPTY + 8 * i, CONSUMER_ARRIVALS);
        for (int i = 0; i < Q_STAGES; ++i)
            mbarrier_init(base + Q_FULL + 8 * i, 1), mbarrier_init(base + Q_EMPTY + 8 * i, CONSUMER_ARRIVALS);
        for (int i = 0; i < DO_STAGES; ++i)
            mbarrier_init(base + DO_FULL + 8 * i, 1), mbarrier_init(base + DO_EMPTY + 8 * i, CONSUMER_ARRIVALS);
        for (int i = 0; i < DS_STAGES; ++i)
            mbarrier_init(base + DS_FULL + 8 * i, CONSUMER_ARRIVALS), mbarrier_init(base + DS_EMPTY + 8 * i, CONSUMER_ARRIVALS);
        for (int i = 0; i < DQ_STAGES * CONSUMERS; ++i)
            mbarrier_init(base + DQ_FULL + 8 * i, 4 * WARP_ARRIVALS), mbarrier_init(base + DQ_EMPTY + 8 * i, 1);
        if (cfg::CHORES) store_shared(base + ADDED, 0u);
        fence_mbarrier_init();
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
        if (!cfg::FINISH_INSIDE) griddepcontrol_launch_dependents();     // which wait for the end all the same
    }
    __syncthreads();
    const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (threadIdx.x % WARP == 0) {
            if (warp == 0) {
                Producer{p, base}.run();
            } else if (!cfg::DIRECT && warp <= CONSUMERS) {
                Adder{p, base, warp - 1}.run();
            } else if (cfg::CHORES && warp == 1) {
                Teller{p, base}.run();
            }
        }
        __syncwarp();
        if constexpr (cfg::CHORES) {
            if (warp > 1) Chores{p}.run();
        }
        if constexpr (cfg::FINISH_INSIDE) Finisher{p}.run();
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        Consumer(p, base, warpgroup - 1).run();
        // What is left, with all warps; but where scores are capped or biased, that costs a register inside the loop.
        if constexpr (cfg::FINISH_INSIDE && !TRANSFORMED) Finisher{p}.run();
    }
}
