// What lies in the shared memory of the one-CTA backward: operand tiles, records for the consumers, and barriers.
#pragma once
#include "hopper/backward/dq_accumulate.cuh"
#include "hopper/backward/one_cta/policies.cuh"
#include "hopper/backward/statistic_columns.cuh"
#include "hopper/backward/work_tile.cuh"

constexpr int BLOCK_N = cfg::BLOCK_N, CONSUMERS = 2, THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int K_STAGES = cfg::K_STAGES, V_STAGES = cfg::V_STAGES;  // tiles whose keys fit at once
constexpr int Q_STAGES = cfg::Q_STAGES, DO_STAGES = cfg::DO_STAGES, DS_STAGES = 2;
constexpr u32 DQ_STAGES = cfg::DQ_STAGES;                 // m-blocks of dQ that may wait for the dQ-store warps
constexpr int TILE_STAGES = 2;
constexpr u32 KEYS_CHUNK = BLOCK_N * ROW_BYTES, ROWS_CHUNK = BLOCK_M * ROW_BYTES;
constexpr u32 K_BYTES = QK_CHUNKS * KEYS_CHUNK, V_BYTES = V_CHUNKS * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK, DS_BYTES = BLOCK_N / 64 * ROWS_CHUNK;
// Row statistics of a stage of Q, of one of dO, and the weights of those that are in the products.
constexpr bool STATISTICS_IN_PRODUCTS = cfg::STATISTICS_IN_PRODUCTS;
constexpr u32 LSE_BYTES = BLOCK_M * (STATISTICS_IN_PRODUCTS ? 2 * COLUMNS_OF_QUERY : 4);
constexpr u32 DELTA_BYTES = STATISTICS_IN_PRODUCTS ? 0 : BLOCK_M * 4, SELECTOR_BYTES = 8 * 8 * 2;
constexpr u32 SELECTORS_BYTES = STATISTICS_IN_PRODUCTS ? 2 * SELECTOR_BYTES : 0;
// dK and dV until TMA has read them: of each warp 16 rows, in chunks one after another.
constexpr u32 STAGED_CHUNK = 16 * ROW_BYTES;
constexpr int STAGED_CHUNKS = STAGING == Staging::BOTH      ? QK_CHUNKS + V_CHUNKS
                              : STAGING == Staging::DS_AND_ROOM ? 1
                              : STAGING == Staging::IN_TURN ? constant_max(QK_CHUNKS, V_CHUNKS)
                                                            : 0;
constexpr u32 STAGED_WARP_BYTES = STAGED_CHUNKS * STAGED_CHUNK, STAGED_BYTES = STAGED_WARP_BYTES * 4 * CONSUMERS;
// Of dQᵀ a consumer makes 64 columns for SLICE_ROWS queries: its slice of dq_accum, and what it leaves for
// its dQ-store warp.
constexpr u32 FRAGMENT_BYTES = FRAGMENT_FLOATS * 4, SLICE_BYTES = 4 * FRAGMENT_BYTES;
constexpr int REST_COLUMNS = MIXED_DQ ? HEAD_DIM - 64 : 8;  // MIXED_DQ: those that are not transposed
static_assert(!MIXED_DQ || (!Dq::TMA && BLOCK_M == 64 && OWN_LOOPS));
static_assert(BLOCK_N == 64 * CONSUMERS && BLOCK_M % 16 == 0 && HEAD_DIM <= 128 && HEAD_DIM_V <= 128 &&
              SLICES == CONSUMERS);

// A CTA's first tile has its number, so that its operands are loaded while the preprocess kernel runs. Where tiles of
// other CTAs wait for one, or the GPU counts them, every tile is taken; and with QUERY_RANGES, as the producer would
// spill more.
constexpr bool FIRST_TILE_OWN =
    !(cfg::VARLEN || cfg::BLOCK_LISTS || cfg::QUERY_RANGES || Dq::IN_ORDER || IN_KERNEL_DQ);
// Software pipelining across tiles: the last dQ of a tile is made in the first step of the next one, whose keys have
// the other stage, so that no step waits for the other warpgroup's dS. Where additions have an order, the semaphore
// would wait for it.
constexpr bool PIPELINED_TILES = K_STAGES > 1 && !Dq::IN_ORDER;
// V of the next tile has no stage but that of this one, which is needed no more when the last dP is complete.
constexpr bool EARLY_V_RELEASE = PIPELINED_TILES && V_STAGES == 1;
constexpr bool IN_DS =
    STAGING == Staging::DS_AND_DQ || STAGING == Staging::DQ_AND_DS || STAGING == Staging::DS_AND_ROOM;
static_assert(STAGING != Staging::DS_AND_ROOM || (K_STAGES == 1 && QK_CHUNKS == 2 && V_CHUNKS == 2 &&
                                                  2 * 3 * STAGED_CHUNK <= ROWS_CHUNK),
              "dV and a chunk of dK of two warps lie in a consumer's half of a stage of dS");
static_assert(!PEELED || (!PIPELINED_TILES && !SKIPS_HIDDEN && !(Dq::IN_ORDER && Dq::TMA)));
// Whether consumer 1 makes no products of a tile that has no keys of it. SKIPS_HIDDEN finds that step by step. Next to
// these steps ptxas makes the loop over others 2 to 4 % slower up to head dim 96 (notebook 0071). With programs or a
// bias by distance it spills up to 50 bytes more.
constexpr bool SKIPS_KEYLESS =
    constant_max(HEAD_DIM, HEAD_DIM_V) > 96 && !(SKIPS_HIDDEN || BY_PROGRAM || Score::HAS_DISTANCE);
// The first step then makes dP before S, as V comes before K.
constexpr bool DP_FIRST = PEELED;
// Of whole tiles; dK and dV of a split are complete later.
constexpr bool UNDER_LAST_DQ = STAGING == Staging::DQ_AND_DS;
static_assert(STAGING != Staging::DQ_AND_DS ||
                  (Dq::TMA && K_STAGES == 1 && DQ_STAGES == 1 && PEELED &&
                   2 * QK_CHUNKS * STAGED_CHUNK <= ROWS_CHUNK && V_CHUNKS * STAGED_CHUNK <= FRAGMENT_BYTES),
              "dK of two warps lies in a consumer's half of a stage of dS, and dV of one in its fragment of dQ");
static_assert(STAGING != Staging::DS_AND_DQ ||
                  (Dq::TMA && K_STAGES == 1 && DQ_STAGES == 1 &&
                   2 * V_CHUNKS * STAGED_CHUNK <= ROWS_CHUNK && QK_CHUNKS * STAGED_CHUNK <= FRAGMENT_BYTES),
              "dV of two warps lies in a consumer's half of a stage of dS, and dK of one in its fragment of dQ");
static_assert(STAGING == Staging::REGISTERS || !cfg::F32_DKDV, "a tensor map cannot store these");
// With additions in order each tile walks the queries in the direction in which the tiles before it arrive there
// earlier: with a causal mask, from the last m-block to the first.
constexpr bool DESCENDING_M_BLOCKS = Dq::IN_ORDER && cfg::HAS_RIGHT;
// With HEADS_INNER a tile's steps go through all heads of an m-block before the next one, from the last m-block on, so
// that tiles that begin together read the same rows at the same time, however long they are.
static_assert(!cfg::HEADS_INNER || !(SPLIT_Q || Dq::IN_ORDER || cfg::QUERY_RANGES), "these have an order of their own");

// What the consumers look up of a tile and of a step, 16 bytes at a time: they have no registers to carry it.
struct TileKeys {
    int first, length, shift, steps;                      // first key of the tile; keys of its sequence
};
struct TileRecord {
    TileCoordinates at;
    TileKeys keys;
};
struct StepQueries {
    int first, rows, head;                                // the m-block's first query; rows to its sequence's or
                                                          // range's end. QUERY_RANGES: as the tile's shift aligns it
    int mask_word;                                        // 0: no pair is hidden; BLOCK_LISTS: the step's ListedBlock

    // SKIPS_HIDDEN, without lists: bits above the lowest one, which are set where all pairs of a consumer are hidden.
    static __device__ __forceinline__ int hidden_bits(const TileMask& mask, int first_key, int first_query,
                                                      int last_query) {
        int bits = 0;
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) {
            const int key = first_key + 64 * i;
            bits |= (mask.end(last_query) <= key || mask.first(first_query) >= key + 64) << (1 + i);
        }
        return bits;
    }
    static __device__ __forceinline__ bool is_hidden(int mask_word, int consumer) {
        if (cfg::BLOCK_LISTS) return ListedBlock{mask_word}.state(consumer) == BLOCK_NONE;
        return mask_word >> (1 + consumer) & 1;
    }
};
// And what the dQ-store warps look up of a slice of dQ: a step makes two, the producer is Q_STAGES steps ahead of the
// consumers, and these are DQ_STAGES slices ahead of the dQ-store warps.
struct DqTarget {
    int m_block, n_block;                                 // n_block: with additions in order
};
enum { NO_M_BLOCK = -1, NO_MORE = -2 };                   // slices of dQ that are of no m-block, and the end
constexpr int DQ_TARGETS = 4 * Q_STAGES;
static_assert(DQ_STAGES == 1 || DQ_TARGETS >= 2 * Q_STAGES + DQ_STAGES + 2, "a target would be overwritten");

struct OperandTiles {
    unsigned char k[K_STAGES][K_BYTES], v[V_STAGES][V_BYTES], q[Q_STAGES][Q_BYTES], dout[DO_STAGES][DO_BYTES];
    unsigned char ds[DS_STAGES * DS_BYTES + STAGED_BYTES];  // and after it dK and dV
};
template <bool TMA>
struct Tiles {
    OperandTiles operands;
    unsigned char dq[DQ_STAGES][CONSUMERS][SLICE_BYTES];
};
template <>
struct Tiles<false> {                                     // dQ is added from registers
    OperandTiles operands;
};

struct SharedStorage {
    Tiles<Dq::TMA> tiles;
    __align__(16) unsigned char statistics[Q_STAGES * LSE_BYTES + DO_STAGES * DELTA_BYTES + SELECTORS_BYTES];
    TileRecord tile[TILE_STAGES];
    StepQueries step[Q_STAGES];
    DqTarget dq_target[DQ_TARGETS];
    u64 tile_full[TILE_STAGES], tile_empty[TILE_STAGES];
    u64 k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], do_full[DO_STAGES], do_empty[DO_STAGES], ds_full[DS_STAGES],
        ds_empty[DS_STAGES];
    u64 dq_full[DQ_STAGES][CONSUMERS], dq_empty[DQ_STAGES][CONSUMERS];
    u32 tiles_added;                                      // IN_KERNEL_DQ: tiles, times warps, with all additions issued
    u32 unused[3];
};
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");
// Named barriers: one of each for each consumer.
enum NamedBarrier { WARPGROUP_BARRIER = 1, PING_PONG_BARRIER = WARPGROUP_BARRIER + CONSUMERS };

extern __shared__ __align__(1024) unsigned char shared_memory[];

// The address of a member; `base` is that of the struct.
#define SMEM(member) (base + static_cast<u32>(offsetof(SharedStorage, member)))
#define SMEM_TILE(member) SMEM(tiles.operands.member)
#define SMEM_LSE SMEM(statistics)
#define SMEM_DELTA (SMEM_LSE + Q_STAGES * LSE_BYTES)
#define SMEM_SELECTORS (SMEM_DELTA + DO_STAGES * DELTA_BYTES)
#define SMEM_STAGED (SMEM_TILE(ds) + DS_STAGES * DS_BYTES)
#define SMEM_DQ (base + static_cast<u32>(offsetof(Tiles<true>, dq)))

constexpr int TILE_BYTES = sizeof(TileRecord);
enum : u32 { STEP_BYTES = sizeof(StepQueries), DQ_TARGET_BYTES = sizeof(DqTarget) };
enum : u32 { TILE_KEYS = offsetof(TileRecord, keys), DQ_TARGET_N_BLOCK = offsetof(DqTarget, n_block) };  // offsets

__device__ __forceinline__ TileCoordinates tile_coordinates(u32 base, u32 stage) {
    const int4 x = load_shared_int4(SMEM(tile) + TILE_BYTES * stage);
    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ TileKeys tile_keys(u32 base, u32 stage) {
    const int4 x = load_shared_int4(SMEM(tile) + TILE_BYTES * stage + TILE_KEYS);
    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ StepQueries step_queries(u32 base, u32 stage) {
    const int4 x = load_shared_int4(SMEM(step) + STEP_BYTES * stage);
    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ u32 dq_target(u32 base, u32 count) {
    return SMEM(dq_target) + count % DQ_TARGETS * DQ_TARGET_BYTES;
}
// The stage of the count-th slice of dQ that a consumer leaves for its dQ-store warp.
__device__ __forceinline__ u32 dq_stage(u32 count, int consumer) { return count % DQ_STAGES * CONSUMERS + consumer; }

// A statistic of two queries, of which a thread has four scores; 0 where the products subtract it.
__device__ __forceinline__ float2 load_statistic(u32 address) {
    return STATISTICS_IN_PRODUCTS ? make_float2(0.f, 0.f) : load_shared_float2(address);
}

// A count of what warps of the CTA have done, and what each did before.
__device__ __forceinline__ void add_shared_release(u32 address, u32 x) {
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ u32 load_shared_acquire(u32 address) {
    u32 x;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
