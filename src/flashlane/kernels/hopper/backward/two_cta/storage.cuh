// The shared memory of a CTA of the 2-CTA backward: operand tiles, records of tiles and steps, and barriers.
#pragma once
#include "attention/pipeline.cuh"
#include "cluster.cuh"
#include "hopper/backward/dq_accumulate.cuh"
#include "hopper/backward/work_tile.cuh"

constexpr int CTAS = 2, KEYS = 64, CONSUMERS = 2, THREADS = WARPGROUP * (CONSUMERS + 1);  // KEYS: of a CTA
constexpr int Q_STAGES = cfg::Q_STAGES, DO_STAGES = cfg::DO_STAGES, DS_STAGES = 2, TILE_STAGES = 2;
constexpr int PRODUCERS = 3;                              // warps that load; each reads the records of tiles

// Columns of K and V in quarters of 16 · FIRST and 16 · SECOND columns of either half, each padded to a chunk. The two
// quarters of one half are in shared memory, those of the other half in registers.
template <int COLUMNS>
struct Quarters {
    static constexpr int STEPS = ceil_div(COLUMNS, 32);   // of 16 columns, of half of them
    static constexpr int FIRST = ceil_div(STEPS, 2), SECOND = STEPS - FIRST;
    static __device__ __forceinline__ constexpr int column(int half, int i) { return 16 * (half * STEPS + i * FIRST); }
};
using KQuarters = Quarters<HEAD_DIM>;
using VQuarters = Quarters<HEAD_DIM_V>;
constexpr u32 KEYS_CHUNK = KEYS * ROW_BYTES, ROWS_CHUNK = BLOCK_M * ROW_BYTES;
constexpr u32 K_BYTES = 2 * CTAS * KEYS_CHUNK, V_BYTES = 2 * KEYS_CHUNK, IN_REGISTERS_BYTES = 2 * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK, DS_BYTES = CTAS * ROWS_CHUNK;
constexpr u32 STAT_BYTES = BLOCK_M * 4;
constexpr int HALF_ROWS = BLOCK_M / CTAS;
// dK and dV until TMA has read them: of each consumer warp 16 rows, in chunks one after another. dV comes first.
constexpr u32 STAGED_CHUNK = 16 * ROW_BYTES;
constexpr u32 STAGED_BYTES = cfg::TMA_STORES ? 4 * (V_CHUNKS + QK_CHUNKS) * STAGED_CHUNK : 0;
// IN_ORDER: records of steps are kept until what the steps add to dQ is released.
constexpr int Q_RECORDS = cfg::IN_ORDER ? 4 : Q_STAGES, DO_RECORDS = cfg::IN_ORDER ? 4 : DO_STAGES;
static_assert(!cfg::IN_ORDER || (Q_STAGES <= 2 && DO_STAGES <= 2));
static_assert(!(cfg::TMA_STORES && cfg::F32_DKDV), "a tensor map cannot store these");
static_assert(!cfg::IN_ORDER || !(cfg::SPLIT_Q || cfg::ZEROING_CTAS > 0), "these were not made for additions in order");

static_assert(cfg::BLOCK_N == CTAS * KEYS && BLOCK_M == 64);
static_assert((Q_STAGES & (Q_STAGES - 1)) == 0 && (DO_STAGES & (DO_STAGES - 1)) == 0);
static_assert(HEAD_DIM <= 256 && HEAD_DIM_V <= 256 && IN_REGISTERS_BYTES <= DS_BYTES);

// The record of a tile, which all warps read, and that of a step, which the consumers read with its Q or dO. Threads
// read 16 bytes of a record where they need them: they have no registers to keep them.
struct KeysRecord {
    int first, length, shift, queries;                    // this CTA's first key; the sequence's keys and queries
};
struct OwnerRecord {
    int kv_head, tensor_batch, k_first, batch;            // tensor_batch, k_first: where the sequence is in k and v
};
struct StepsRecord {
    int count, low, high;                                 // steps (NO_TILE: no tile is left); m-blocks of each head
    int q_first;                                          // row of the sequence in the tensors
};
struct SplitRecord {
    int split;                                            // TileCoordinates::split
    int begin;                                            // steps of the tile that the splits before this one make
    int unused[2];
};
template <bool OF_SPLITS>
struct TileRecordOf {
    KeysRecord keys;
    OwnerRecord owner;
    StepsRecord steps;
};
template <>
struct TileRecordOf<true> {
    KeysRecord keys;
    OwnerRecord owner;
    StepsRecord steps;
    SplitRecord split;
};
using TileRecord = TileRecordOf<cfg::SPLIT_Q>;
struct StepRecord {
    int first, head, row_block;                           // first query of the m-block; where its statistics are
    int masked;                                           // whether some pair is hidden; IN_ORDER: plus 2 · n-block
};
__device__ __forceinline__ bool needs_mask(const StepRecord& step) {
    return cfg::IN_ORDER ? step.masked % 2 : step.masked;
}

struct SharedStorage {
    unsigned char k[K_BYTES], v[V_BYTES], q[Q_STAGES][Q_BYTES], dout[DO_STAGES][DO_BYTES];
    unsigned char ds[DS_STAGES * DS_BYTES + STAGED_BYTES];  // and after it dK and dV
    float lse[Q_STAGES][BLOCK_M], delta[DO_STAGES][BLOCK_M];
    TileRecord tile[TILE_STAGES];
    StepRecord q_step[Q_RECORDS], do_step[DO_RECORDS];
    u64 next_tile;                                        // the number of the next tile, from CTA 0
    u64 next_full, next_empty, next_wanted;
    u64 tile_full[TILE_STAGES], tile_empty[TILE_STAGES];
    u64 k_full, k_empty, v_full, v_empty;
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], do_full[DO_STAGES], do_empty[DO_STAGES];
    u64 p_full[DS_STAGES], ds_full[DS_STAGES], ds_empty[DS_STAGES];
};
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");
enum { WARPGROUP_BARRIER = 1 };                           // named barriers: one each consumer
// IN_ORDER: the semaphore of a consumer's part of an m-block of dQ.
__device__ __forceinline__ constexpr int dq_semaphore(int rank, int consumer) { return rank * CONSUMERS + consumer; }

extern __shared__ __align__(1024) unsigned char shared_memory[];

// The address of a member; `base` is that of the struct.
#define SMEM(member) (base + static_cast<u32>(offsetof(SharedStorage, member)))

template <typename Record>
__device__ __forceinline__ Record record_at(u32 address) {
    const int4 x = load_shared_int4(address);
    return {x.x, x.y, x.z, x.w};
}
constexpr u32 TILE_RECORD_BYTES = sizeof(TileRecord);
enum : u32 { STEP_RECORD_BYTES = sizeof(StepRecord) };
enum : u32 { OWNER_RECORD = offsetof(TileRecord, owner), STEPS_RECORD = offsetof(TileRecord, steps) };  // offsets in it
enum : u32 { SPLIT_RECORD = offsetof(TileRecordOf<true>, split) };
__device__ __forceinline__ u32 tile_record(u32 base, u32 tile) {
    return SMEM(tile) + tile % TILE_STAGES * TILE_RECORD_BYTES;
}
__device__ __forceinline__ KeysRecord keys_record(u32 base, u32 tile) {
    return record_at<KeysRecord>(tile_record(base, tile));
}
__device__ __forceinline__ OwnerRecord owner_record(u32 base, u32 tile) {
    return record_at<OwnerRecord>(tile_record(base, tile) + OWNER_RECORD);
}
__device__ __forceinline__ StepsRecord steps_record(u32 base, u32 tile) {
    return record_at<StepsRecord>(tile_record(base, tile) + STEPS_RECORD);
}
__device__ __forceinline__ SplitRecord split_record(u32 base, u32 tile) {
    const int4 x = load_shared_int4(tile_record(base, tile) + SPLIT_RECORD);
    return {x.x, x.y};
}
__device__ __forceinline__ SequenceRows key_rows(const KeysRecord& keys, const OwnerRecord& owner) {
    return {owner.k_first, keys.length, owner.tensor_batch};
}
__device__ __forceinline__ TileMask keys_mask(const Params& p, const KeysRecord& keys) {
    return {keys.length, keys.shift, p.window_left, p.window_right};
}

// Steps of a tile, or NO_TILE, when the scheduler warp has published it.
__device__ __forceinline__ int wait_tile(u32 base, u32 tile) {
    mbarrier_wait(barrier_of(SMEM(tile_full), tile % TILE_STAGES), tile / TILE_STAGES % 2);
    return steps_record(base, tile).count;
}
