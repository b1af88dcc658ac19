// What the Hopper forward kernel is given, its sizes, and its shared memory. flashlane.kernels.hopper.forward.launch
// mirrors Params, and config.py the sizes.
//
// A work tile is BLOCK_M rows of one tile head and its range of n-blocks. A tile head stands for PACKED_HEADS query
// heads of one key/value head: its row r is query r / PACK_GQA of query head `head * PACKED_HEADS + r % PACK_GQA`.
// PACKED_HEADS is 1, or all heads of a group (short queries then fill a tile and share the loads of K and V).
// PACK_GQA is as many, or the next number that divides a tile: the rows between are of no head. Where v is wider than
// an accumulator, a tile has one of V_SLICES slices of its columns, and the slices of one head count as neighbouring
// tile heads.
#pragma once
#include "attention/arrivals.cuh"
#include "attention/block_list.cuh"
#include "attention/block_range.cuh"
#include "attention/out_of_bounds.cuh"
#include "attention/paged_kv.cuh"
#include "attention/pipeline.cuh"
#include "attention/score.cuh"
#include "attention/score_program.cuh"
#include "attention/seqlen.cuh"
#include "config.cuh"
#include "hopper/forward/combine.cuh"
#include "hopper/sequence_rows.cuh"
#include "offsetof.cuh"
#include "optional.cuh"

using Element = cfg::Element;
constexpr int BLOCK_M = cfg::BLOCK_M, BLOCK_N = cfg::BLOCK_N, V_SLICES = cfg::V_SLICES;
constexpr int PACK_GQA = cfg::PACK_GQA, PACKED_HEADS = cfg::PACKED_HEADS;
constexpr int HEAD_DIM = cfg::HEAD_DIM, COLUMNS_V = cfg::COLUMNS_V, CONSUMERS = cfg::CONSUMERS, CLUSTER = cfg::CLUSTER;
constexpr int STAGES = cfg::STAGES, Q_STAGES = cfg::Q_STAGES;
constexpr int WARPGROUP = 128, WARPS = 4, THREADS = WARPGROUP * (CONSUMERS + 1), CONSUMER_ROWS = 64;
constexpr int CTA_ROWS = CONSUMER_ROWS * CONSUMERS;  // of a tile, that one CTA has
constexpr int CHUNK_COLUMNS = 64, ROW_BYTES = 128;   // tiles lie in chunks of 64 columns; zeros fill the last one
constexpr int VECTOR = 8;                            // columns of 16 bytes
constexpr int QK_CHUNKS = ceil_div(HEAD_DIM, CHUNK_COLUMNS), QK_STEPS = ceil_div(HEAD_DIM, 16);
constexpr int V_CHUNKS = ceil_div(COLUMNS_V, CHUNK_COLUMNS), PV_STEPS = BLOCK_N / 16;
constexpr u32 Q_CHUNK = CTA_ROWS * ROW_BYTES, KV_CHUNK = BLOCK_N * ROW_BYTES;
constexpr u32 Q_BYTES = QK_CHUNKS * Q_CHUNK, K_BYTES = QK_CHUNKS * KV_CHUNK, V_BYTES = V_CHUNKS * KV_CHUNK;
constexpr u32 STAGE_BYTES = K_BYTES + V_BYTES;
// One pipeline, whose stages hold K and V together; or one for K and one for V, so that a stage of K is free as soon
// as S is complete.
constexpr int KV_PIPELINES = cfg::ONE_BARRIER ? 1 : 2, K = 0, V = KV_PIPELINES - 1;
static_assert(BLOCK_M == CTA_ROWS * CLUSTER && BLOCK_N % 16 == 0 && COLUMNS_V % 8 == 0);
static_assert(CTA_ROWS % PACK_GQA == 0 && PACKED_HEADS <= PACK_GQA);
static_assert(CLUSTER == 1 || (CLUSTER == 2 && !cfg::VARLEN && !cfg::CACHE && !cfg::PAGED && !cfg::SPLIT));
static_assert(!cfg::GATHER || cfg::PAGED);
static_assert(!cfg::RANGES || (cfg::VARLEN && !cfg::PAGED));
static_assert(!cfg::ARRIVALS || (!cfg::PAGED && !cfg::BLOCK_LISTS && CLUSTER == 1));
static_assert(cfg::ACROSS_TILES || (!cfg::SPLIT && !cfg::VARLEN && !cfg::CACHE && !cfg::PAGED));
static_assert(!cfg::BLOCK_LISTS ||
              (CLUSTER == 1 && PACK_GQA == 1 && !cfg::VARLEN && !cfg::CACHE && !cfg::PAGED && !cfg::SPLIT));
// Scores are in base 2 before their maximum is taken; their last factor can otherwise wait for the exponent's FFMA.
constexpr bool SCALED = !Score::LATE_SCALE && !Program::HAS_SCORE;
// Whether a list or a program may hide all scores of a row in any block. Its maximum begins with LEAST_MAX over the
// scale, not with −∞: differences from it are no NaN, so that such a row needs no test. Scores below it are hidden.
constexpr bool ANY_MAY_BE_HIDDEN = cfg::BLOCK_LISTS || Program::HAS_SCORE || !cfg::ACROSS_TILES;
constexpr float LEAST_MAX = -1e38f;
// Whether 2^(score − a constant) needs no row maximum. P in f16 would overflow.
constexpr bool BOUNDED = (Program::IS_BOUNDED || cfg::BOUNDED_SCORE) && is_same<Element, __nv_bfloat16>;
constexpr float BOUNDED_MAX = Program::CENTRE / Program::FACTOR;  // in the unit of Program::score; 0 without a program
static_assert(!cfg::BOUNDED_SCORE ||
              (Score::HAS_BOUND && !Program::HAS_SCORE && !cfg::DEFERRED_MAX && cfg::ACROSS_TILES));
// Whether blocks without a mask have a softmax of their own, in which each score and its exponential are one chain. By
// lists, the tiles of small heads have too few registers for two forms.
constexpr bool FUSED_UNMASKED = BOUNDED && Program::HAS_SCORE && (!cfg::BLOCK_LISTS || HEAD_DIM > 64 || COLUMNS_V > 64);
// Whether the scores of a row and n-block have a term in common, which is added to the maximum instead of to them.
constexpr bool ROW_OFFSET = Score::HAS_DISTANCE || Program::IS_LINEAR;
// A deferred maximum needs K and Q until the end of a step's softmax. With a bias by distance it needs a window whose
// right side is 0: blocks without a mask then lie before their rows, and the bias falls from the first block on.
static_assert(!cfg::DEFERRED_MAX ||
              (cfg::ONE_BARRIER && Score::LATE_SCALE && (cfg::ACROSS_TILES || Program::IS_LINEAR) &&
               (!Program::HAS_SCORE || Program::IS_LINEAR) && (!Score::HAS_DISTANCE || cfg::HAS_RIGHT)));
// Whether rows with large maxima are exact (attention/online_softmax.cuh). By lists, the loop over partial blocks has
// too few registers.
constexpr bool LARGE_SCORES = cfg::DEFERRED_MAX && !cfg::BLOCK_LISTS;
constexpr int MASK_UNITS = ceil_div(BLOCK_N, UNIT);  // of an n-block, with MASK_BITS
static_assert(!cfg::MASK_BITS || (cfg::BLOCK_LISTS && BLOCK_N % UNIT == 0 && !Program::HAS_MASK));

// Packed sequences: the rows after the last one are written too, as if they saw no key. RANGES: rows of no
// sequence are not.
using Seqlen = SeqlenInfo<cfg::VARLEN, cfg::CACHE, cfg::PAGED, cfg::RANGES ? Tail::RANGES : Tail::ONE_MORE_SEQUENCE>;
using TileMask = WindowMask<side(cfg::HAS_LEFT), side(cfg::HAS_RIGHT)>;
// Where the maps of k and v have the axes of sequence_rows.cuh: rows after a sequence's last key are then zeros.
constexpr bool ENDS_WITH_SEQUENCE = cfg::VARLEN && !cfg::PAGED && !cfg::ARRIVALS;
// Else TMA loads whole blocks, whose rows after the last key hold anything. Gathered rows are zeros there.
constexpr bool OUT_OF_BOUNDS_ROWS = (cfg::VARLEN || cfg::CACHE || cfg::PAGED) && !ENDS_WITH_SEQUENCE && !cfg::GATHER;

// What a tile's output is: the result (WHOLE), or the partial result of one split of the keys. Splits are combined by
// another launch (PARTIAL) or by the warpgroup that stores the last one (COMBINED_IN_KERNEL).
enum class Output { WHOLE, PARTIAL, COMBINED_IN_KERNEL };
constexpr Output OUTPUT = !cfg::SPLIT                ? Output::WHOLE
                          : cfg::COMBINE_IN_KERNEL ? Output::COMBINED_IN_KERNEL
                                                   : Output::PARTIAL;
constexpr bool COMBINE_IN_KERNEL = OUTPUT == Output::COMBINED_IN_KERNEL;

// What every launch reads lies together: a kernel waits for each line of the constant cache that it begins to read.
struct PlainParams {
    TensorMap q, k, v;             // q (column, packed head, row, tile head, batch); k, v (column, row, head, batch);
                                   // ENDS_WITH_SEQUENCE: k, v as sequence_rows.cuh says
    ScoreParams score;
    void* out;                     // (split, batch, row, head, column); f32 where partial, else the operands' type
    float* lse;                    // (split, batch, head, row); null where not wanted, unless the output is partial
    int* tiles_taken;              // beyond the first of each CTA; 0 before and after a launch
    long long out_split, out_batch, out_row, out_head;  // strides, in elements
    long long lse_split, lse_batch, lse_head;
    int heads, group;              // tile heads (and slices); tile heads (without) that share a key/value head
    int window_left, window_right; // with HAS_LEFT and HAS_RIGHT
    int m_blocks;                  // of a sequence (not VARLEN)
    int heads_per_section;         // of the L2 head swizzle
    int splits;                    // of a tile's keys
    int tiles;                     // of the launch (not VARLEN)
    SeqlenParams seqlen;           // packed sequences: seqlen_q is the number of rows of q
    PagedRows k_rows, v_rows;      // GATHER
    CombineParams combine;         // COMBINE_IN_KERNEL
    BlockLists lists;              // BLOCK_LISTS: the n-blocks of each m-block
    ProgramParams program;
};

struct Params : PlainParams, Optional<cfg::ARRIVALS, ArrivalParams> {};

struct alignas(16) WorkTile {
    int batch, head, row;          // row: the first, counted within the sequence; batch −1: no tile is left
    int split_or_listed;           // see split() and listed()

    // SPLIT: which split of the keys; else 0.
    __device__ __forceinline__ int split() const { return split_or_listed; }
    // BLOCK_LISTS, whose tiles are not split: how many n-blocks its list has.
    __device__ __forceinline__ int listed() const { return split_or_listed; }

    __device__ __forceinline__ int tile_head() const { return V_SLICES == 1 ? head : head / V_SLICES; }
    __device__ __forceinline__ int v_slice() const { return V_SLICES == 1 ? 0 : head % V_SLICES; }
};

// ---- shared memory

template <int N>
struct StageBarriers {
    u64 full[N], empty[N];
};

struct Operands {
    alignas(16) unsigned char q[Q_STAGES][Q_BYTES];
    unsigned char kv[STAGES][STAGE_BYTES];          // K, then V
    StageBarriers<Q_STAGES> q_barriers;
    StageBarriers<STAGES> kv_barriers[KV_PIPELINES];
};
// In a cluster: the peer CTA's stage is empty too; its word with the next tile has come, or was read.
struct ClusterBarriers {
    u64 peer_empty[KV_PIPELINES][STAGES];
    u64 next_tile_full, next_tile_empty;
};
struct WorkTiles {
    WorkTile tiles[Q_STAGES];                       // the tile that each stage of Q belongs to
};
struct NextTile {
    alignas(16) int next_tile[2];                   // its index, for the other warps or the other CTA
};
struct LastArrival {
    alignas(16) u32 arrived[4];                     // by consumer: splits of its tile that were stored before
};
struct ListedBlocks {
    alignas(16) ListedBlock listed[STAGES <= 4 ? 4 : 8];  // the entry that each stage's K belongs to
};
struct LargeMaxima {
    alignas(16) float large_maxima[CTA_ROWS];       // attention/online_softmax.cuh
};
struct SharedStorage : Operands,
                       Optional<(CLUSTER > 1), ClusterBarriers>,
                       WorkTiles,
                       Optional<(cfg::GATHER || CLUSTER > 1), NextTile>,
                       Optional<COMBINE_IN_KERNEL, LastArrival>,
                       Optional<cfg::BLOCK_LISTS, ListedBlocks>,
                       Optional<LARGE_SCORES, LargeMaxima> {};
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");

// The address of a member in the window of shared memory. A function that names a member of an optional base is a
// template on the storage, as the compiler would look for the member even in a branch that is not taken.
#define SHARED_OF(Storage, base, member) ((base) + static_cast<u32>(offsetof(Storage, member)))
#define SHARED(base, member) SHARED_OF(SharedStorage, base, member)

// BLOCK_LISTS: where the entry of a stage lies.
template <typename Storage>
__device__ __forceinline__ u32 listed_block(u32 base, u32 stage) {
    return SHARED_OF(Storage, base, listed) + static_cast<u32>(sizeof(ListedBlock)) * stage;
}

extern __shared__ __align__(1024) unsigned char shared_memory[];

// LARGE_SCORES: where the maximum of the thread's first row lies. The thread's index is read where this is called: what
// follows from it would take a register in the loop over n-blocks.
template <typename Storage = SharedStorage>
__device__ __forceinline__ u32 large_maxima() {
    if constexpr (LARGE_SCORES) {
        const u32 thread = thread_index_here() - WARPGROUP, row = thread / WARP * 16 + thread % WARP / 4;
        return SHARED_OF(Storage, shared_address(shared_memory), large_maxima) + 4 * row;
    }
    return 0;
}

// Named barriers. Of the first two there is one for each consumer.
enum NamedBarrier { PINGPONG = 1, WARPGROUP_SYNC = 8, PRODUCER_WARPS = 12 };

// ---- what a tile covers

// Whether a row of a tile belongs to a query head; rows of no head are zeros of Q, and nothing of them is stored.
__device__ __forceinline__ bool has_head(int row) {
    return PACKED_HEADS == PACK_GQA || row % PACK_GQA < PACKED_HEADS;
}
// The query head of a row; that of a row of no head is the group's last.
__device__ __forceinline__ int query_head(const WorkTile& tile, int row) {
    const int packed = row % PACK_GQA;
    return tile.tile_head() * PACKED_HEADS + (PACKED_HEADS == PACK_GQA ? packed : min(packed, PACKED_HEADS - 1));
}

// What the maximum and the exponent multiply scores by.
__device__ __forceinline__ float late_scale(const Params& p) {
    if (Program::IS_LINEAR) return p.score.scale_log2 * Program::GAIN;
    return Program::HAS_SCORE ? Program::FACTOR * LOG2_E : Score::late_scale(p.score);
}

__device__ __forceinline__ TileMask mask_of(const Params& p, const Seqlen& sequence) {
    return {sequence.k_length, sequence.shift, p.window_left, p.window_right};
}

// The n-blocks in which some of `rows` rows from `row` on see a key.
__device__ __forceinline__ BlockRange n_blocks_of_rows(const Params& p, const Seqlen& sequence, int row, int rows) {
    const int last_query = min((row + rows - 1) / PACK_GQA, sequence.q_length - 1);
    return n_block_range<BLOCK_N>(mask_of(p, sequence), row / PACK_GQA, last_query);
}

// The n-blocks of a tile: of all its rows, and of its split of the keys. BLOCK_LISTS: the places in its list.
__device__ __forceinline__ BlockRange n_blocks_of_tile(const Params& p, const Seqlen& sequence, const WorkTile& tile) {
    if constexpr (cfg::BLOCK_LISTS) return {0, tile.listed()};
    const BlockRange all = n_blocks_of_rows(p, sequence, tile.row, BLOCK_M);
    return cfg::SPLIT ? all.of_split(tile.split(), p.splits) : all;
}
