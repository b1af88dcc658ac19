// What a launch of the decode kernel is given, and which keys of which items a block computes.
//
// The rows of a tile are the queries of one KV head, token by token: row r is token r / group, head r % group of the
// group. An item is a sequence, a KV head and a tile of BR rows; its keys come in steps of STEP. There are two schedules:
//
//     grid      each item in at most `splits` parts; a block, or a cluster of blocks, computes one part and ends
//     stream    the steps of all items in a row, cut evenly; a block stays on its SM until its share is done:
//
//               |<---- item 0 ---->|<- item 1 ->|<-------- item 2 --------->|
//               |<-- block 0 -->|<-- block 1 -->|<-- block 2 -->|<- block 3 ->|
//
// flashlane.kernels.decode.config mirrors the stream's arithmetic (stream_shares).
#pragma once
#include "config.cuh"
#include "cache.cuh"
#include "params.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "tile.cuh"
#include "tma.cuh"

using Element = cfg::Element;
constexpr bool BOXES = cfg::BOXES, STREAM = cfg::STREAM, PAGED = cfg::PAGES != PAGES_NONE;
constexpr int HEAD_DIM = cfg::HEAD_DIM, HEAD_DIM_V = cfg::HEAD_DIM_V, KEYS = cfg::KEYS, STAGES = cfg::STAGES;
constexpr int WARPS_M = cfg::WARPS_M, TEAMS = cfg::TEAMS, CLUSTER = cfg::CLUSTER;
constexpr int BR = 16 * WARPS_M, TEAM = WARP * WARPS_M, THREADS = TEAM * TEAMS, STEP = KEYS * TEAMS;
constexpr int BLOCK_THREADS = THREADS + (BOXES ? WARP : 0);  // one warp feeds the teams

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Tiles of K and V: those of a team, whole rows; or those of all teams, in planes of 64 columns (128 bytes).
constexpr int PLANE_COLUMNS = 64, PLANE_BYTES = STEP * PLANE_COLUMNS * 2;
constexpr int K_PLANES = (HEAD_DIM + PLANE_COLUMNS - 1) / PLANE_COLUMNS;
constexpr int V_PLANES = (HEAD_DIM_V + PLANE_COLUMNS - 1) / PLANE_COLUMNS;
using LayoutQ = TileLayout<HEAD_DIM, true>;
using LayoutK = TileLayout<BOXES ? PLANE_COLUMNS : HEAD_DIM, true>;
using LayoutV = TileLayout<BOXES ? PLANE_COLUMNS : HEAD_DIM_V, true>;
constexpr int K_BYTES = BOXES ? K_PLANES * PLANE_BYTES : LayoutK::bytes(KEYS);
constexpr int STAGE_BYTES = K_BYTES + (BOXES ? V_PLANES * PLANE_BYTES : LayoutV::bytes(KEYS));
constexpr int RING_BYTES = STAGES * STAGE_BYTES, RINGS_BYTES = (BOXES ? 1 : TEAMS) * RING_BYTES;

// Sums of one team, block or part: rows of floats, columns moved by XOR so that a quarter of a warp writes rows without
// bank conflicts.
constexpr int SUM_STRIDE = (HEAD_DIM_V + 31) / 32 * 32, SUM_BYTES = BR * SUM_STRIDE * 4;
__device__ __forceinline__ int sum_at(int row, int column) { return row * SUM_STRIDE + (column ^ row % 4 * 8); }

// Shared memory: the rings; Q; sums of the block that its cluster reads; statistics of the teams; barriers; the works that
// the feeder of a stream announces. The teams' sums, and the statistics of an item's parts, lie where keys were: at the
// start, or in the slot of the last step.
constexpr int SCRATCH_BYTES = larger(TEAMS * SUM_BYTES, cfg::MAX_PARTS * BR * 8);
constexpr int Q_OFFSET = BOXES ? RINGS_BYTES : larger(RINGS_BYTES, SCRATCH_BYTES);
constexpr int SHARE_OFFSET = Q_OFFSET + LayoutQ::bytes(BR);
constexpr int STATISTICS_OFFSET = SHARE_OFFSET + (CLUSTER > 1 ? BR * 8 + SUM_BYTES : 0);
constexpr int WORD_OFFSET = STATISTICS_OFFSET + TEAMS * BR * 8;  // the place of the block among an item's parts
constexpr int FULL = WORD_OFFSET + 16, EMPTY = FULL + 8 * STAGES, BARRIERS_END = BOXES ? EMPTY + 8 * STAGES : FULL;
constexpr int WORKS = STREAM ? 4 : 0, WORK_BYTES = 144;  // announced ahead, as items may be short
constexpr int WORK_FULL = BARRIERS_END, WORK_EMPTY = WORK_FULL + 8 * WORKS, WORKS_OFFSET = WORK_EMPTY + 8 * WORKS;
static_assert(WORKS_OFFSET + WORKS * WORK_BYTES == cfg::SHARED_BYTES, "the Python formula disagrees");
static_assert(KEYS % 16 == 0 && STAGES >= 2 && (KEYS <= WARP || cfg::PAGES != PAGES_ANY));
static_assert(!BOXES || (SCRATCH_BYTES <= STAGE_BYTES && cfg::PAGES != PAGES_ANY && STEP % cfg::BOX_ROWS == 0));
static_assert(!STREAM || (BOXES && CLUSTER == 1), "only a block whose feeder runs ahead has work to go on with");

extern __shared__ __align__(1024) unsigned char shared_memory[];

struct Params {
    AttentionParams<Element> attention;
    CacheParams cache;
    SplitParams split;
    const float* alibi_slopes;
    long long alibi_batch, alibi_head;
    const void* sinks;
    long long sink_stride;
    int sinks_are_float, kv_heads, row_blocks, total_q;  // total_q: rows of packed queries, or -1
    int alike;                                           // all sequences have the same lengths
    u32 group_inverse;                                   // 2^32 / group, rounded up, or 0 for a group of 1
    float softcap_log2, softcap_inverse2;                // softcap · log2(e); 2 · log2(e) · scale / softcap
};
static_assert(sizeof(Params) == cfg::PARAMS_BYTES, "the Python mirror disagrees");

// K and V to the copy engine, as (column, row, head, batch or page); unused without BOXES.
struct Maps {
    TensorMap k, v;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// All teams of the block; the warp that feeds them goes its own way.
constexpr int ALL_TEAMS = 15;
__device__ __forceinline__ void teams_sync() { named_barrier_sync(ALL_TEAMS, THREADS); }

// The keys that rows of some tokens see.
struct Keys {
    int first, end;            // that some row sees
    int whole_from, whole_to;  // that every row sees
    int first_step, steps;

    Keys() = default;
    __device__ __forceinline__ Keys(const Sequence& sequence, const Mask& mask, int first_token, int last_token)
        : first(max(sequence.first, mask.first(first_token))), end(mask.end(last_token)),
          whole_from(max(sequence.first, mask.first(last_token))), whole_to(mask.end(first_token)),
          first_step(static_cast<u32>(first) / STEP),
          steps(end > first ? (static_cast<u32>(end) + STEP - 1) / STEP - first_step : 0) {}
};

struct Row {
    int token, head;
};

// A block's item and the part of it that the block computes.
struct Work {
    Sequence sequence;
    Keys keys;
    int batch, kv_head, rows;              // rows of the tile that exist
    int first_token, first_head;           // of the tile's first row; the head within the group
    int part, parts, rank;                 // of the item's parts; the block's place in its cluster
    int step, steps;                       // of STEP keys: the first, and how many
    int first_pack, end_pack;              // the block's share of the output, in packs of 4 columns, row by row
    long long item;
    int first_slot, more_slots;            // of the work space, where the item's parts go

    __device__ __forceinline__ Mask mask(const Params& p) const {
        return {sequence.end, sequence.shift, p.attention.window_left, p.attention.window_right};
    }
    // (The product is exact for rows × group < 2^32.)
    __device__ __forceinline__ Row at(int row, const Params& p) const {
        const int n = first_head + row, tokens = p.group_inverse ? __umulhi(n, p.group_inverse) : n;
        return {first_token + tokens, kv_head * p.attention.group + n - tokens * p.attention.group};
    }
    // A block of a stream has two slots: an item that it ends, and one that it begins, may be in parts.
    __device__ __forceinline__ int slot(int of_part) const {
        if constexpr (STREAM) return of_part == 0 ? first_slot : more_slots + 2 * of_part;
        else return first_slot + of_part;
    }
    __device__ __forceinline__ void take(const Params& p, int row_block) {
        first_token = first_head = 0;
        if (row_block > 0) first_token = row_block * BR / p.attention.group, first_head = row_block * BR % p.attention.group;
        rows = min(BR, sequence.seqlen_q * p.attention.group - row_block * BR);
        keys = Keys(sequence, mask(p), first_token, at(rows - 1, p).token);
    }
    __device__ __forceinline__ void take_packs(const Params& p) {
        const int packs = p.attention.head_dim_v / 4 * rows;
        first_pack = rank * packs / CLUSTER, end_pack = (rank + 1) * packs / CLUSTER;
    }
};

static_assert(sizeof(Work) <= WORK_BYTES && WORKS_OFFSET % 16 == 0);
__device__ __forceinline__ Work* announced(int slot) {
    return reinterpret_cast<Work*>(shared_memory + WORKS_OFFSET + slot * WORK_BYTES);
}

template <bool STREAMED>
struct Schedule;

template <>
struct Schedule<false> {
    const Params& p;

    __device__ __forceinline__ explicit Schedule(const Params& params) : p(params) {}
    // The block's only work; false when it has none, as then have all blocks of its cluster.
    __device__ __forceinline__ bool next(Work& work) const {
        // Neighbouring blocks read neighbouring heads of the same keys.
        work.batch = blockIdx.z, work.part = blockIdx.y, work.rank = blockIdx.x % CLUSTER;
        work.kv_head = blockIdx.x / CLUSTER;
        int row_block = 0;
        if (p.row_blocks > 1) row_block = work.kv_head / p.kv_heads, work.kv_head %= p.kv_heads;
        work.item = (static_cast<long long>(work.batch) * p.kv_heads + work.kv_head) * p.row_blocks + row_block;
        work.first_slot = static_cast<int>(work.item * p.split.splits);  // (used if there are parts, and then small)
        work.sequence = Sequence(p.cache, p.attention, work.batch);
        work.take(p, row_block);
        if (work.rows <= 0) return false;
        const int steps = work.keys.steps, each = max(1, ceil_div(steps, p.split.splits * CLUSTER));
        const int share = work.part * CLUSTER + work.rank;
        work.parts = max(1, ceil_div(ceil_div(steps, each), CLUSTER));
        // (A block that is fed has a step even where it has no keys, so that it has a slot for its sums.)
        work.step = work.keys.first_step + share * each, work.steps = max(BOXES, min(each, steps - share * each));
        work.take_packs(p);
        return work.part < work.parts;
    }
};

template <>
struct Schedule<true> {
    const Params& p;
    int each, unit, end;      // steps of a block; its next one, and the one after its last
    int batch, base, stride;  // the sequence whose steps come next: where they begin, and from one head to the next

    // Steps of an item of a sequence: at least one, so that somebody writes its rows. There is one tile of rows.
    __device__ __forceinline__ int units_of(int sequence) const {
        const Sequence s(p.cache, p.attention, sequence);
        const Mask mask{s.end, s.shift, p.attention.window_left, p.attention.window_right};
        return max(1, Keys(s, mask, 0, s.seqlen_q - 1).steps);
    }
    // Steps of a sequence's items, a sequence a lane; 0 after the last.
    __device__ __forceinline__ int units_of_lane(int sequence) const {
        return sequence < p.attention.batch ? units_of(sequence) * p.kv_heads : 0;
    }
    __device__ __forceinline__ explicit Schedule(const Params& params) : p(params), batch(0), base(0) {
        const int sequences = p.attention.batch, lane = threadIdx.x % WARP;
        int total = 0;
        if (p.alike) {
            const int units = units_of(0), items = sequences * p.kv_heads;
            each = ceil_div(units * items, gridDim.x), stride = units;
            // Shares that end where items end, if they are not much larger: an item may have steps that do not exist.
            const int parts = each < units ? units / each : 1;
            const int fitting = each < units ? ceil_div(units, parts) : ceil_div(each, units) * units;
            if (fitting * 16 <= each * 17) each = fitting, stride = each < units ? ceil_div(units, each) * each : units;
            total = stride * items;
        } else {
#pragma unroll 1
            for (int first = 0; first < sequences; first += WARP) {
                int sum = units_of_lane(first + lane);
#pragma unroll
                for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
                total += sum;
            }
            each = ceil_div(total, gridDim.x);
        }
        unit = min(static_cast<int>(blockIdx.x) * each, total), end = min(unit + each, total);
        if (p.alike || unit == end) return;
#pragma unroll 1
        for (int first = 0;; first += WARP) {  // the sequence that holds `unit`
            int sum = units_of_lane(first + lane);
            const int mine = sum;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                const int below = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += below;
            }
            const u32 after = __ballot_sync(0xffffffffu, base + sum > unit);
            const int at = after ? __ffs(after) - 1 : WARP - 1;
            base += __shfl_sync(0xffffffffu, after ? sum - mine : sum, at);
            batch = first + at;
            if (after) break;
        }
        stride = units_of(batch);
    }

    // The next item and the block's steps of it; false when there is no more. For whole warps.
    __device__ __forceinline__ bool next(Work& work) {
        while (unit < end) {
            const int heads = p.kv_heads;
            if (p.alike) {
                batch = unit / (stride * heads), base = batch * stride * heads;
            } else {
                while (unit >= base + stride * heads) base += stride * heads, stride = units_of(++batch);
            }
            work.batch = batch, work.kv_head = (unit - base) / stride, work.rank = 0;
            work.item = batch * heads + work.kv_head;
            const int start = base + work.kv_head * stride, from = unit - start, to = min(end - start, stride);
            unit = start + to;
            work.sequence = Sequence(p.cache, p.attention, batch);
            work.take(p, 0);
            const int units = max(1, work.keys.steps), mine = blockIdx.x;
            work.step = work.keys.first_step + from, work.steps = min(to, units) - from;
            if (work.steps <= 0 || work.rows <= 0) continue;
            const int first = from == 0 ? mine : start / each, last = to >= units ? mine : (start + units - 1) / each;
            work.part = mine - first, work.parts = last - first + 1;
            work.first_slot = 2 * first + (start > first * each), work.more_slots = 2 * first;
            work.take_packs(p);
            return true;
        }
        return false;
    }
};
