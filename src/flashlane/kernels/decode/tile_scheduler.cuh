// Output tiles, work tiles, and the schedulers that say which work tiles a CTA computes.
//
// The rows of an output tile are the queries of one KV head, token by token: row r is token r / group, head r % group of the
// group. An output tile is a sequence, a KV head and BLOCK_M rows. Its keys come in steps of STEP keys, and may be split over
// CTAs. There are two schedulers:
//
//     one tile    each output tile in at most `splits` splits; a CTA, or a cluster of CTAs, computes one split and ends
//     stream-K    the steps of all output tiles in a row, cut into equal ranges; a CTA stays until its range is done:
//
//               |<---- tile 0 ---->|<- tile 1 ->|<-------- tile 2 --------->|
//               |<--- CTA 0 --->|<--- CTA 1 --->|<--- CTA 2 --->|<-- CTA 3 -->|
//
// A test evaluates the arithmetic of stream-K (StreamRanges, StreamSplit) for every CTA.
#pragma once
#include "attention/pipeline.cuh"
#include "decode/tiles.cuh"

// The keys that rows of some tokens see, as rows of the cache.
struct KeyRange {
    int first, end;                    // keys that some row sees
    int unmasked_first, unmasked_end;  // keys that every row sees
    int first_step, steps;

    KeyRange() = default;
    __device__ __forceinline__ KeyRange(const CacheSeqlenInfo& sequence, const Mask& mask, int first_token, int last_token)
        : first(max(sequence.first, mask.first(first_token))), end(mask.end(last_token)),
          unmasked_first(max(sequence.first, mask.first(last_token))), unmasked_end(mask.end(first_token)),
          first_step(static_cast<u32>(first) / STEP),
          steps(end > first ? (static_cast<u32>(end) + STEP - 1) / STEP - first_step : 0) {}
};

struct Row {
    int token, head;
};

// An output tile, and the split of its keys that a CTA computes.
struct WorkTile {
    CacheSeqlenInfo sequence;
    KeyRange keys;
    int batch, kv_head, rows;              // rows of the tile that exist
    int first_token, first_head;           // of the tile's first row; the head counts within the group
    int split, splits, rank;               // among the tile's splits; the CTA's rank in its cluster
    int step, steps;                       // the first step of STEP keys, and how many there are
    int first_vector, end_vector;          // the output that the CTA combines, in vectors of 4 columns, row by row
    long long index;                       // of the output tile
    int first_partial, later_partials;     // where the tile's splits lie in the work space

    __device__ __forceinline__ Mask mask(const Params& p) const {
        return {sequence.end, sequence.shift, p.attention.window_left, p.attention.window_right};
    }
    // (The product is exact for rows × group < 2^32.)
    __device__ __forceinline__ Row at(int row, const Params& p) const {
        const int n = first_head + row, tokens = p.group_inverse ? __umulhi(n, p.group_inverse) : n;
        return {first_token + tokens, kv_head * p.attention.group + n - tokens * p.attention.group};
    }
    // The partial result of a split. With stream-K a CTA has two partials: one of the tile that it ends, and one of the tile
    // that it begins.
    __device__ __forceinline__ int partial(int of_split) const {
        if constexpr (STREAM_K) return of_split == 0 ? first_partial : later_partials + 2 * of_split;
        else return first_partial + of_split;
    }
    __device__ __forceinline__ void set_rows(const Params& p, int m_block) {
        first_token = first_head = 0;
        if (m_block > 0) first_token = m_block * BLOCK_M / p.attention.group, first_head = m_block * BLOCK_M % p.attention.group;
        rows = min(BLOCK_M, sequence.seqlen_q * p.attention.group - m_block * BLOCK_M);
        keys = KeyRange(sequence, mask(p), first_token, at(rows - 1, p).token);
    }
    __device__ __forceinline__ void set_vectors(const Params& p) {
        const int vectors = p.attention.head_dim_v / 4 * rows;
        first_vector = rank * vectors / CLUSTER, end_vector = (rank + 1) * vectors / CLUSTER;
    }
};

// The queue of work tiles that the producer warp publishes for the warp groups.
static_assert(sizeof(WorkTile) <= WORK_TILE_BYTES);
using TileQueueState = PipelineState<TILE_STAGES>;
__device__ __forceinline__ WorkTile* published_tile(int stage) {
    return shared_at<WorkTile>(tiles_offset() + stage * WORK_TILE_BYTES);
}

// The work tile of a warp group: the published one with stream-K, else its own.
__device__ __forceinline__ const WorkTile* work_tile(const TileQueueState& queue, const WorkTile& own) {
    if constexpr (STREAM_K) return published_tile(queue.index);
    else return &own;
}

// ---- tile schedulers

template <bool PERSISTENT>
struct TileScheduler;

// One output tile a CTA, or a cluster, and one of at most `splits` splits of its keys.
template <>
struct TileScheduler<false> {
    const Params& p;

    __device__ __forceinline__ explicit TileScheduler(const Params& params) : p(params) {}
    // The CTA's only tile; false when it has none, and then the other CTAs of its cluster have none either.
    __device__ __forceinline__ bool next(WorkTile& tile) const {
        // Neighbouring CTAs read neighbouring heads of the same keys.
        tile.batch = blockIdx.z, tile.split = blockIdx.y, tile.rank = blockIdx.x % CLUSTER;
        tile.kv_head = blockIdx.x / CLUSTER;
        int m_block = 0;
        if (p.m_blocks > 1) m_block = tile.kv_head / p.kv_heads, tile.kv_head %= p.kv_heads;
        tile.index = (static_cast<long long>(tile.batch) * p.kv_heads + tile.kv_head) * p.m_blocks + m_block;
        tile.first_partial = static_cast<int>(tile.index * p.split.splits);  // (used if there are splits, and then small)
        tile.sequence = CacheSeqlenInfo(p.seqlen, tile.batch);
        tile.set_rows(p, m_block);
        if (tile.rows <= 0) return false;
        const int steps = tile.keys.steps, each = max(1, ceil_div(steps, p.split.splits * CLUSTER));
        const int range = tile.split * CLUSTER + tile.rank;
        tile.splits = max(1, ceil_div(ceil_div(steps, each), CLUSTER));
        // (With TMA a CTA has a step even where it has no keys, so that a stage is free for its sums.)
        tile.step = tile.keys.first_step + range * each, tile.steps = max(TMA, min(each, steps - range * each));
        tile.set_vectors(p);
        return tile.split < tile.splits;
    }
};

// Ranges where all output tiles have so many steps: a CTA has `each`, and a tile takes `stride`, at least its own.
struct StreamRanges {
    int each, stride;

    __device__ __forceinline__ constexpr StreamRanges(int units, int tiles, int ctas)
        : each(ceil_div(units * tiles, ctas)), stride(units) {
        // Ranges that end where tiles end, if they are not much larger: a tile may then have steps that do not exist.
        const int splits = each < units ? units / each : 1;
        const int fitting = each < units ? ceil_div(units, splits) : ceil_div(each, units) * units;
        if (fitting * 16 <= each * 17) each = fitting, stride = each < units ? ceil_div(units, each) * each : units;
    }
};

// Which split of an output tile a CTA computes, and where the tile's splits lie in the work space. The tile begins at `start`
// and has `units` steps, of which the CTA's range has `from` to `to`.
struct StreamSplit {
    int split, splits, first_partial, later_partials;

    __device__ __forceinline__ constexpr StreamSplit(int start, int units, int from, int to, int each, int cta)
        : split(0), splits(0), first_partial(0), later_partials(0) {
        const int first = from == 0 ? cta : start / each, last = to >= units ? cta : (start + units - 1) / each;
        split = cta - first, splits = last - first + 1;
        first_partial = 2 * first + (start > first * each), later_partials = 2 * first;
    }
};

// Stream-K: the steps of all output tiles, one after the other, in equal ranges. Each CTA has one range.
template <>
struct TileScheduler<true> {
    const Params& p;
    int each, unit, end;      // steps of a CTA; its next one, and the one after its last
    int batch, base, stride;  // the sequence whose steps come next: where they begin, and from one head to the next

    // Steps of an output tile of a sequence: at least one, so that a CTA writes its rows. A KV head has one m_block.
    __device__ __forceinline__ int units_of(int sequence) const {
        const CacheSeqlenInfo s(p.seqlen, sequence);
        const Mask mask{s.end, s.shift, p.attention.window_left, p.attention.window_right};
        return max(1, KeyRange(s, mask, 0, s.seqlen_q - 1).steps);
    }
    // Steps of the output tiles of a sequence, one sequence a lane; 0 after the last.
    __device__ __forceinline__ int units_of_lane(int sequence) const {
        return sequence < p.attention.batch ? units_of(sequence) * p.kv_heads : 0;
    }
    __device__ __forceinline__ explicit TileScheduler(const Params& params) : p(params), batch(0), base(0) {
        const int sequences = p.attention.batch, lane = threadIdx.x % WARP;
        int total = 0;
        if (p.equal_lengths) {
            const int tiles = sequences * p.kv_heads;
            const StreamRanges ranges(units_of(0), tiles, gridDim.x);
            each = ranges.each, stride = ranges.stride, total = stride * tiles;
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
        if (p.equal_lengths || unit == end) return;
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

    // The next output tile and the CTA's steps of it; false when there is no more. All lanes of a warp call it.
    __device__ __forceinline__ bool next(WorkTile& tile) {
        while (unit < end) {
            const int heads = p.kv_heads;
            if (p.equal_lengths) {
                batch = unit / (stride * heads), base = batch * stride * heads;
            } else {
                while (unit >= base + stride * heads) base += stride * heads, stride = units_of(++batch);
            }
            tile.batch = batch, tile.kv_head = (unit - base) / stride, tile.rank = 0;
            tile.index = batch * heads + tile.kv_head;
            const int start = base + tile.kv_head * stride, from = unit - start, to = min(end - start, stride);
            unit = start + to;
            tile.sequence = CacheSeqlenInfo(p.seqlen, batch);
            tile.set_rows(p, 0);
            const int units = max(1, tile.keys.steps);
            tile.step = tile.keys.first_step + from, tile.steps = min(to, units) - from;
            if (tile.steps <= 0 || tile.rows <= 0) continue;
            const StreamSplit found(start, units, from, to, each, blockIdx.x);
            tile.split = found.split, tile.splits = found.splits;
            tile.first_partial = found.first_partial, tile.later_partials = found.later_partials;
            tile.set_vectors(p);
            return true;
        }
        return false;
    }
};
