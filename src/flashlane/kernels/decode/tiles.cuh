// The decode kernel's compile-time constants, parameters and shared memory.
#pragma once
#include "config.cuh"
#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "attention/paged_kv.cuh"
#include "attention/score.cuh"
#include "attention/semaphore.cuh"
#include "offsetof.cuh"
#include "optional.cuh"
#include "params.cuh"
#include "tile.cuh"

using Element = cfg::Element;
constexpr bool TMA = cfg::TMA, STREAM_K = cfg::STREAM_K, PAGED = cfg::PAGES != PAGES_NONE;
constexpr int HEAD_DIM = cfg::HEAD_DIM, HEAD_DIM_V = cfg::HEAD_DIM_V, BLOCK_N = cfg::BLOCK_N, STAGES = cfg::STAGES;
constexpr int WARPS_M = cfg::WARPS_M, WARP_GROUPS = cfg::WARP_GROUPS, CLUSTER = cfg::CLUSTER;
constexpr int BLOCK_M = 16 * WARPS_M, GROUP_THREADS = WARP * WARPS_M, THREADS = GROUP_THREADS * WARP_GROUPS;
constexpr int STEP = BLOCK_N * WARP_GROUPS;          // keys of one step of a CTA
constexpr int CTA_THREADS = THREADS + (TMA || STREAM_K ? WARP : 0);  // with the producer or scheduler warp

// A stage holds tiles of K and V: those of one warp group, in whole rows; or with TMA those of all warp groups, in
// planes of 64 columns (128 bytes), the width of a TMA box. Stages of a warp group follow each other; with stream-K
// those of all warp groups do, so that the tiles of one step lie together.
constexpr int PLANE_COLUMNS = 64, PLANE_BYTES = STEP * PLANE_COLUMNS * 2;
constexpr int K_PLANES = ceil_div(HEAD_DIM, PLANE_COLUMNS), V_PLANES = ceil_div(HEAD_DIM_V, PLANE_COLUMNS);
using LayoutQ = TileLayout<HEAD_DIM, true>;
using LayoutK = TileLayout<TMA ? PLANE_COLUMNS : HEAD_DIM, true>;
using LayoutV = TileLayout<TMA ? PLANE_COLUMNS : HEAD_DIM_V, true>;
constexpr int K_BYTES = TMA ? K_PLANES * PLANE_BYTES : LayoutK::bytes(BLOCK_N);
constexpr int STAGE_BYTES = K_BYTES + (TMA ? V_PLANES * PLANE_BYTES : LayoutV::bytes(BLOCK_N));
constexpr int PIPELINE_BYTES = STAGES * STAGE_BYTES, PIPELINES_BYTES = (TMA ? 1 : WARP_GROUPS) * PIPELINE_BYTES;
constexpr int STEP_BYTES = TMA ? STAGE_BYTES : WARP_GROUPS * STAGE_BYTES;  // K and V of a step of a CTA
constexpr int STAGE_STRIDE = STREAM_K ? STEP_BYTES : STAGE_BYTES;
constexpr int GROUP_STRIDE = STREAM_K ? STAGE_BYTES : PIPELINE_BYTES;

// Sums of P·V of one warp group, CTA or split are rows of floats. Columns are permuted by XOR, so that a quarter of a
// warp writes rows without bank conflicts.
constexpr int SUM_STRIDE = ceil_div(HEAD_DIM_V, 32) * 32, SUM_BYTES = BLOCK_M * SUM_STRIDE * 4;
__device__ __forceinline__ int sum_at(int row, int column) { return row * SUM_STRIDE + (column ^ row % 4 * 8); }
// The output is combined in vectors of four columns, row by row. Their number is a constant, so that threads divide by
// what the compiler knows; those after the problem's last column are zeros, and are not stored.
constexpr int VECTORS = HEAD_DIM_V / 4;

// ---- parameters

// The workspace of splits. The CTA that arrives last combines the splits in their order, so that the result does not
// depend on which CTA that is.
struct SplitParams {
    float* out;                  // (partial, row of BLOCK_M, column of HEAD_DIM_V), sums of P·V
    PartialSoftmax* statistics;  // (partial, CTA of the cluster, row)
    u32* arrivals;               // (output tile, CTA of the cluster); 0 between launches
    int splits;                  // most splits of an output tile
};

// flashlane.kernels.decode.launch mirrors it.
struct Params {
    AttentionParams<Element> attention;
    SeqlenParams seqlen;
    ScoreParams score;
    SplitParams split;
    int kv_heads, m_blocks, total_q;  // m_blocks of a KV head; total_q: rows of packed queries, or −1
    int equal_lengths;                // all sequences have the same lengths
    u32 group_inverse;                // 2^32 / group, rounded up, or 0 for a group of 1
};
static_assert(sizeof(Params) == cfg::PARAMS_BYTES, "the Python mirror disagrees");

// K and V as (column, row, head, batch or page); unused without TMA.
struct Maps {
    TensorMap k, v;
};

// ---- shared memory

// After the last step, scratch memory holds the warp groups' sums, and then the statistics of a tile's splits and as
// many of their sums as fit, four of each at least. It is the memory of the last step with TMA and with stream-K, whose
// other stages hold the next tile's keys; with stream-K it is apart from them where a step's has no room. Else it is
// that of the pipelines.
constexpr int LEAST_SCRATCH = constant_max(WARP_GROUPS * SUM_BYTES, cfg::MAX_SPLITS * (BLOCK_M * 8 + 16));
constexpr bool OWN_SCRATCH = STREAM_K && LEAST_SCRATCH > STEP_BYTES;
constexpr int SCRATCH_BYTES = OWN_SCRATCH       ? LEAST_SCRATCH
                              : TMA || STREAM_K ? STEP_BYTES
                                                : constant_max(PIPELINES_BYTES, LEAST_SCRATCH);
constexpr int QUERY_BYTES = LayoutQ::bytes(BLOCK_M);
constexpr int QUERY_STAGES = STREAM_K ? 2 : 1;  // with stream-K the next tile's are loaded before the tile ends
constexpr int TILE_STAGES = 4;  // with stream-K: work tiles that are published ahead, since they may be short
constexpr int WORK_TILE_BYTES = 144;

struct PipelineStorage {  // from shared_memory on; TMA's swizzle needs it at a multiple of 1024
    unsigned char stages[TMA || STREAM_K ? PIPELINES_BYTES : SCRATCH_BYTES];
    unsigned char queries[QUERY_STAGES * QUERY_BYTES];
};
struct ScratchStorage {
    alignas(16) unsigned char scratch[LEAST_SCRATCH];
};
struct ClusterStorage {  // what the other CTAs of the cluster read
    PartialSoftmax cta_statistics[BLOCK_M];
    float cta_sums[SUM_BYTES / 4];
};
struct StatisticsStorage {
    PartialSoftmax statistics[WARP_GROUPS * BLOCK_M];
    alignas(16) u32 arrival[4];  // how many splits arrived before this one
};
struct BarrierStorage {
    u64 full[STAGES], empty[STAGES];
};
struct TileQueueStorage {
    u64 tile_full[TILE_STAGES], tile_empty[TILE_STAGES];
    alignas(16) unsigned char tiles[TILE_STAGES][WORK_TILE_BYTES];
};
struct SharedStorage : PipelineStorage,
                       Optional<OWN_SCRATCH, ScratchStorage>,
                       Optional<(CLUSTER > 1), ClusterStorage>,
                       StatisticsStorage,
                       Optional<TMA, BarrierStorage>,
                       Optional<STREAM_K, TileQueueStorage> {};
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");
static_assert(BLOCK_N % 16 == 0 && STAGES >= 2 && (BLOCK_N <= WARP || cfg::PAGES != PAGES_ANY));
static_assert(!TMA || (LEAST_SCRATCH <= STAGE_BYTES && cfg::PAGES != PAGES_ANY && STEP % cfg::BOX_ROWS == 0));
static_assert(!STREAM_K || (!TMA && CLUSTER == 1), "warp groups copy keys of tile after tile by themselves");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Offsets of the members that only some configurations have; 0 in others.
#define OPTIONAL_OFFSET(name, member, condition)                     \
    template <typename Storage = SharedStorage, bool USED = (condition)> \
    __device__ constexpr int name() {                                \
        if constexpr (USED) return offsetof(Storage, member);        \
        else return 0;                                               \
    }
OPTIONAL_OFFSET(full_offset, full, TMA)
OPTIONAL_OFFSET(empty_offset, empty, TMA)
OPTIONAL_OFFSET(tile_full_offset, tile_full, STREAM_K)
OPTIONAL_OFFSET(tile_empty_offset, tile_empty, STREAM_K)
OPTIONAL_OFFSET(tiles_offset, tiles, STREAM_K)
OPTIONAL_OFFSET(scratch_offset, scratch, OWN_SCRATCH)
OPTIONAL_OFFSET(cta_statistics_offset, cta_statistics, CLUSTER > 1)
OPTIONAL_OFFSET(cta_sums_offset, cta_sums, CLUSTER > 1)
#undef OPTIONAL_OFFSET

// Addresses of the barriers, from that of shared memory.
__device__ __forceinline__ u32 stage_full(u32 base, int stage) { return barrier_of(base + full_offset(), stage); }
__device__ __forceinline__ u32 stage_empty(u32 base, int stage) { return barrier_of(base + empty_offset(), stage); }
__device__ __forceinline__ u32 queue_full(u32 base, int stage) { return barrier_of(base + tile_full_offset(), stage); }
__device__ __forceinline__ u32 queue_empty(u32 base, int stage) {
    return barrier_of(base + tile_empty_offset(), stage);
}

// What lies at an offset of SharedStorage.
template <typename T>
__device__ __forceinline__ T* shared_at(int offset) {
    return reinterpret_cast<T*>(shared_memory + offset);
}

// All warp groups of the CTA; the producer or scheduler warp does not take part.
constexpr int CONSUMERS_BARRIER = 15;
__device__ __forceinline__ void consumers_sync() { named_barrier_sync(CONSUMERS_BARRIER, THREADS); }
