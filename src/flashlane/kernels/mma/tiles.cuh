// What the mma.sync template is compiled for: tile shapes, the layout of shared memory, and which rows each warp owns.
#pragma once
#include "config.cuh"
#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "attention/tile_scheduler.cuh"
#include "offsetof.cuh"
#include "optional.cuh"
#include "params.cuh"
#include "tile.cuh"

using Element = cfg::Element;
using ScorePrecision = cfg::ScorePrecision;    // accumulator of Q·Kᵀ
using OutPrecision = cfg::OutPrecision;        // accumulator of P·V
using StorePrecision = cfg::StorePrecision;    // running output
constexpr int BLOCK_M = cfg::BLOCK_M, BLOCK_N = cfg::BLOCK_N, HEAD_DIM = cfg::HEAD_DIM, HEAD_DIM_V = cfg::HEAD_DIM_V;
constexpr int WARPS_Q = cfg::WARPS_Q, WARPS_KV = cfg::WARPS_KV, THREADS = WARP * WARPS_Q * WARPS_KV;
constexpr int M_TILES = BLOCK_M / (16 * WARPS_Q);     // 16-row tiles of one warp
constexpr int S_TILES = BLOCK_N / (8 * WARPS_KV);     // 8-column tiles of S of one warp
constexpr int O_TILES = HEAD_DIM_V / (8 * WARPS_KV);  // 8-column tiles of O of one warp
constexpr int K_SLICE = cfg::K_SLICE, V_ROWS = cfg::V_ROWS, V_COLUMNS = cfg::V_COLUMNS;
constexpr int K_SLICES = HEAD_DIM / K_SLICE, V_ROW_SLICES = BLOCK_N / V_ROWS, V_COLUMN_SLICES = HEAD_DIM_V / V_COLUMNS;
constexpr int V_SLICES = V_ROW_SLICES * V_COLUMN_SLICES, SLICES = K_SLICES + V_SLICES;  // of one key/value tile
constexpr int QK_STEPS = K_SLICE / 16, PV_STEPS = V_ROWS / 16;                         // products along one slice
constexpr int V_SLICE_TILES = V_COLUMNS / (8 * WARPS_KV);  // 8-column tiles of O of one warp in one slice of V
constexpr int STAGES = cfg::KV_STAGES;
constexpr bool Q_STREAMED = cfg::Q_STREAMED;
constexpr bool Q_IN_REGISTERS = cfg::Q_IN_REGISTERS || cfg::SHARE_QKV;
constexpr bool SPLIT_KV = WARPS_KV > 1;
// f16 sums of P·V stay in range and accurate only if O stays a mean of V: normalise in the loop.
constexpr bool NORMALISE = is_same<OutPrecision, __half> || is_same<StorePrecision, __half>;
// The product accumulates straight into the running output when both have one precision.
constexpr bool ONE_PRECISION = is_same<OutPrecision, StorePrecision>;
// Old maxima are kept until a score exceeds them by 2^8: P stays within f16, and O is rarely rescaled.
constexpr float THRESHOLD = NORMALISE ? 0.f : RESCALE_THRESHOLD;
enum { STORE_DIRECT, STORE_SHUFFLE, STORE_SHARED };

using LayoutQ = TileLayout<Q_STREAMED ? K_SLICE : HEAD_DIM, cfg::SWIZZLE_Q>;
using LayoutK = TileLayout<K_SLICE, cfg::SWIZZLE_K>;
using LayoutV = TileLayout<V_COLUMNS, cfg::SWIZZLE_V>;
using LayoutP = TileLayout<BLOCK_N, false>;
using LayoutO = TileLayout<HEAD_DIM_V, false>;
using CursorV = FragmentCursor<LayoutV, SPLIT_KV>;  // with split-kv a warp starts at its own columns
constexpr int Q_BYTES = LayoutQ::bytes(BLOCK_M);
constexpr int Q_SLICE_BYTES = Q_STREAMED ? Q_BYTES : 0;
constexpr int STAGE_BYTES = constant_max(Q_SLICE_BYTES + LayoutK::bytes(BLOCK_N), LayoutV::bytes(V_ROWS));
static_assert(S_TILES % 2 == 0 && V_SLICE_TILES % 2 == 0 && M_TILES >= 1, "tiles are read in pairs");
static_assert(K_SLICES * K_SLICE == HEAD_DIM && V_COLUMN_SLICES * V_COLUMNS == HEAD_DIM_V);
static_assert(V_ROW_SLICES * V_ROWS == BLOCK_N);
static_assert(K_SLICES == 1 || !Q_IN_REGISTERS, "registers hold all of Q or none");

using Params = AttentionParams<Element>;
using Scores = float[M_TILES][S_TILES * 4];  // of one warp

// ---- shared memory

// Q, before the pipeline. With SHARE_QKV it is in registers before the pipeline takes its memory; a streamed Q comes
// slice by slice in the stages.
struct QueryStorage {
    unsigned char q[Q_BYTES];
};
struct PipelineStorage {
    unsigned char stages[constant_max(STAGES * STAGE_BYTES, cfg::SHARE_QKV ? Q_BYTES : 0)];
};
struct SplitKvStorage {
    unsigned char p[LayoutP::bytes(BLOCK_M)];
    float row_statistics[BLOCK_M * WARPS_KV];
};
struct LoopStorage : Optional<!cfg::SHARE_QKV && !Q_STREAMED, QueryStorage>,
                     PipelineStorage,
                     Optional<SPLIT_KV, SplitKvStorage> {};
template <bool OUT_TILE>
union StorageOf {
    LoopStorage loop;
    unsigned char out[LayoutO::bytes(BLOCK_M)];  // after the loop
};
template <>
union StorageOf<false> {
    LoopStorage loop;
};
using SharedStorage = StorageOf<cfg::STORE == STORE_SHARED>;
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");

extern __shared__ __align__(128) unsigned char shared_memory[];

// Offsets of the members; 0 of those that a configuration lacks.
constexpr int PIPELINE_OFFSET = offsetof(LoopStorage, stages);
template <typename Storage = LoopStorage, bool USED = SPLIT_KV>
__device__ constexpr int p_offset() {
    if constexpr (USED) return offsetof(Storage, p);
    else return 0;
}
template <typename Storage = LoopStorage, bool USED = SPLIT_KV>
__device__ constexpr int row_statistics_offset() {
    if constexpr (USED) return offsetof(Storage, row_statistics);
    else return 0;
}

// The query rows that a CTA computes.
struct OutputTile {
    int batch, head, row;

    __device__ __forceinline__ explicit OutputTile(const Params& p) {
        const SwizzledTile tile = swizzled_tile<true>(blockIdx.x, p.batch * p.heads, p.q_blocks, p.heads_per_section);
        batch = tile.head / p.heads, head = tile.head % p.heads, row = tile.block * BLOCK_M;
    }
};

// What one thread holds through the loop.
struct State {
    Accumulator<StorePrecision> o[M_TILES][O_TILES];
    float max[M_TILES][2];  // of the raw products, rows g and g + 8
    float sum[M_TILES][2];  // of this lane's columns; of the whole row when NORMALISE
    float keep[M_TILES][2]; // when NORMALISE: what the next product multiplies O by

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            max[m][0] = max[m][1] = -INF;
            sum[m][0] = sum[m][1] = 0.f;
#pragma unroll
            for (int n = 0; n < O_TILES; ++n) o[m][n].zero();
        }
    }
};

struct Warp {
    int lane, q, kv, quad_row, quad_column;

    __device__ __forceinline__ Warp() {
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
        lane = threadIdx.x % WARP, q = warp / WARPS_KV, kv = warp % WARPS_KV;
        quad_row = lane / 4, quad_column = lane % 4;
    }
    // First of the warp's rows in the CTA's tile.
    __device__ __forceinline__ int row() const { return q * (16 * M_TILES); }
};
