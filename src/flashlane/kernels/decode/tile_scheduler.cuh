// Output tiles, work tiles, and the tile schedulers, which decide which work tiles a CTA computes.
//
// The rows of an output tile are the queries of one KV head, token by token: row r is token r / group, head r % group
// of the group. An output tile is a sequence, a KV head and BLOCK_M rows. Its keys come in steps of STEP keys, and may
// be split over CTAs. There are two schedulers:
//
//     one tile    each output tile has at most `splits` splits; a CTA, or a cluster of CTAs, computes one of them
//     stream-K    the steps of a head's output tiles, end to end, are divided into equal ranges; a CTA computes one:
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
    __device__ __forceinline__ KeyRange(const CacheSeqlenInfo& sequence, const Mask& mask, int first_token,
                                        int last_token)
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
    int split, splits;                     // among the tile's splits
    int step, steps;                       // the first step of STEP keys, and how many there are
    int first_partial, later_partials;     // with stream-K: where the splits lie in the workspace, see partial()

    __device__ __forceinline__ Mask mask(const Params& p) const {
        return {sequence.end, sequence.shift, p.attention.window_left, p.attention.window_right};
    }
    // (The product is exact for rows × group < 2^32.)
    __device__ __forceinline__ Row at(int row, const Params& p) const {
        const int n = first_head + row, tokens = p.group_inverse ? __umulhi(n, p.group_inverse) : n;
        return {first_token + tokens, kv_head * p.attention.group + n - tokens * p.attention.group};
    }
    // The index of the output tile, where tiles are split; there are few then.
    __device__ __forceinline__ int index(const Params& p) const {
        return STREAM_K ? batch * p.kv_heads + kv_head : blockIdx.z * (gridDim.x / CLUSTER) + blockIdx.x / CLUSTER;
    }
    // The index of a split's partial result in the workspace. With stream-K a CTA has two partial results: one of the
    // tile in which its range begins, and one of the tile in which it ends.
    __device__ __forceinline__ int partial(int of_split, const Params& p) const {
        if constexpr (!STREAM_K) return index(p) * p.split.splits + of_split;
        return (of_split == 0 ? first_partial : later_partials + 2 * of_split) * p.kv_heads + kv_head;
    }
    __device__ __forceinline__ void set_rows(const Params& p, int m_block) {
        first_token = first_head = 0;
        if (m_block > 0)
            first_token = m_block * BLOCK_M / p.attention.group, first_head = m_block * BLOCK_M % p.attention.group;
        rows = min(BLOCK_M, sequence.seqlen_q * p.attention.group - m_block * BLOCK_M);
        keys = KeyRange(sequence, mask(p), first_token, at(rows - 1, p).token);
    }
    // The CTA's rank in its cluster.
    __device__ __forceinline__ static int rank() { return CLUSTER > 1 ? blockIdx.x % CLUSTER : 0; }
    // The output that the CTA combines, in vectors of 4 columns, row by row: up to the first one of the rank after it.
    __device__ __forceinline__ int first_vector(int of_rank) const { return of_rank * VECTORS * rows / CLUSTER; }
};

// The queue of work tiles that the scheduler warp publishes for the warp groups, with stream-K.
static_assert(sizeof(WorkTile) <= WORK_TILE_BYTES);
using TileQueueState = PipelineState<TILE_STAGES>;
__device__ __forceinline__ WorkTile* published_tile(int stage) {
    return shared_at<WorkTile>(tiles_offset() + stage * WORK_TILE_BYTES);
}

// ---- tile schedulers

template <bool PERSISTENT>
struct TileScheduler;

// A CTA, or a cluster, computes one of at most `splits` splits of the keys of one output tile.
template <>
struct TileScheduler<false> {
    const Params& p;

    __device__ __forceinline__ explicit TileScheduler(const Params& params) : p(params) {}
    // The CTA's only tile; false when it has none, and then the other CTAs of its cluster have none either.
    __device__ __forceinline__ bool next(WorkTile& tile) const {
        // Neighbouring CTAs read neighbouring heads of the same keys.
        tile.batch = blockIdx.z, tile.split = blockIdx.y;
        tile.kv_head = blockIdx.x / CLUSTER;
        int m_block = 0;
        if (p.m_blocks > 1) m_block = tile.kv_head / p.kv_heads, tile.kv_head %= p.kv_heads;
        tile.sequence = CacheSeqlenInfo(p.seqlen, tile.batch);
        tile.set_rows(p, m_block);
        if (tile.rows <= 0) return false;
        const int steps = tile.keys.steps, each = max(1, ceil_div(steps, p.split.splits * CLUSTER));
        const int range = tile.split * CLUSTER + tile.rank();
        tile.splits = max(1, ceil_div(ceil_div(steps, each), CLUSTER));
        // (With TMA a CTA has a step even where it has no keys, so that a stage is free for its sums.)
        tile.step = tile.keys.first_step + range * each, tile.steps = max(TMA, min(each, steps - range * each));
        return tile.split < tile.splits;
    }
};

// The ranges of stream-K where each of a head's `tiles` output tiles has `steps` steps: the range of a CTA has `each`
// steps, and the steps of neighbouring tiles begin `stride` >= `steps` apart.
struct StreamRanges {
    int each, stride;

    __device__ __forceinline__ constexpr StreamRanges(int steps, int tiles, int ranges)
        : each(ceil_div(steps * tiles, ranges)), stride(steps) {
        // Ranges that end where tiles end are preferred if they are at most 1/16 longer: a stride may then hold steps
        // that no tile has.
        const int splits = each < steps ? steps / each : 1;
        const int fitting = each < steps ? ceil_div(steps, splits) : ceil_div(each, steps) * steps;
        if (fitting * 16 <= each * 17) each = fitting, stride = each < steps ? ceil_div(steps, each) * each : steps;
    }
};

// Which split of an output tile a range computes, and where the tile's splits lie among the head's partial results. The
// tile begins at step `start` of the head's steps and has `steps` steps, of which the range has those from `from` to
// `to`.
struct StreamSplit {
    int split, splits, first_partial, later_partials;

    __device__ __forceinline__ constexpr StreamSplit(int start, int steps, int from, int to, int each, int range)
        : split(0), splits(0), first_partial(0), later_partials(0) {
        const int first = from == 0 ? range : start / each, last = to >= steps ? range : (start + steps - 1) / each;
        split = range - first, splits = last - first + 1;
        first_partial = 2 * first + (start > first * each), later_partials = 2 * first;
    }
};

// Stream-K: the steps of a head's output tiles, laid end to end and counted from 0, are divided into equal ranges, one
// for each CTA. CTAs of one range and all heads read neighbouring memory at the same time.
template <>
struct TileScheduler<true> {
    const Params& p;
    const int head, range;
    int each, position, end;  // steps of a range; the first remaining step of this CTA's range, and the range's end
    int batch, base, stride;  // the sequence at `position`, its first step, and how many it has

    // Steps of an output tile of a sequence: at least one, so that a CTA writes its rows. A KV head has one m_block.
    __device__ __forceinline__ int steps_of(int sequence) const {
        const CacheSeqlenInfo s(p.seqlen, sequence);
        const Mask mask{s.end, s.shift, p.attention.window_left, p.attention.window_right};
        return max(1, KeyRange(s, mask, 0, s.seqlen_q - 1).steps);
    }
    // The same of one sequence a lane; 0 after the last.
    __device__ __forceinline__ int steps_of_lane(int sequence) const {
        return sequence < p.attention.batch ? steps_of(sequence) : 0;
    }
    __device__ __forceinline__ explicit TileScheduler(const Params& params)
        : p(params), head(blockIdx.x % p.kv_heads), range(blockIdx.x / p.kv_heads), batch(0), base(0) {
        const int ranges = gridDim.x / p.kv_heads;
        int total = 0;
        if (p.equal_lengths) {
            const StreamRanges equal(steps_of(0), p.attention.batch, ranges);
            each = equal.each, stride = equal.stride, total = stride * p.attention.batch;
        } else {
            total = total_steps(), each = ceil_div(total, ranges);
        }
        position = min(range * each, total), end = min(position + each, total);
        if (!p.equal_lengths && position != end) find_sequence();
    }

    // The steps of a head, over all sequences.
    __device__ __forceinline__ int total_steps() const {
        const int lane = threadIdx.x % WARP;
        int total = 0;
#pragma unroll 1
        for (int first = 0; first < p.attention.batch; first += WARP) total += warp_sum(steps_of_lane(first + lane));
        return total;
    }

    // Sets the sequence that holds `position`, which exists.
    __device__ __forceinline__ void find_sequence() {
        const int lane = threadIdx.x % WARP;
#pragma unroll 1
        for (int first = 0;; first += WARP) {
            const int lane_steps = steps_of_lane(first + lane), sum = warp_inclusive_sum(lane_steps);
            const u32 after = __ballot_sync(0xffffffffu, base + sum > position);
            const int at = after ? __ffs(after) - 1 : WARP - 1;
            base += __shfl_sync(0xffffffffu, after ? sum - lane_steps : sum, at);
            batch = first + at;
            if (after) break;
        }
        stride = steps_of(batch);
    }

    // The next output tile and the CTA's steps of it; false when none is left. All lanes of a warp call it.
    __device__ __forceinline__ bool next(WorkTile& tile) {
        while (position < end) {
            if (p.equal_lengths) {
                batch = position / stride, base = batch * stride;
            } else {
                while (position >= base + stride) base += stride, stride = steps_of(++batch);
            }
            tile.batch = batch, tile.kv_head = head;
            const int start = base, from = position - start, to = min(end - start, stride);
            position = start + to;
            tile.sequence = CacheSeqlenInfo(p.seqlen, batch);
            tile.set_rows(p, 0);
            const int steps = max(1, tile.keys.steps);
            tile.step = tile.keys.first_step + from, tile.steps = min(to, steps) - from;
            if (tile.steps <= 0 || tile.rows <= 0) continue;
            const StreamSplit split(start, steps, from, to, each, range);
            tile.split = split.split, tile.splits = split.splits;
            tile.first_partial = split.first_partial, tile.later_partials = split.later_partials;
            return true;
        }
        return false;
    }
};

// The scheduler warp publishes the CTA's work tiles one after another; a tile without steps ends the warp groups' loop.
__device__ __forceinline__ void publish_tiles(const Params& p, u32 shared) {
    TileScheduler<true> scheduler(p);
    TileQueueState queue;
    for (bool more = true; more; queue.advance()) {
        WorkTile tile;
        more = scheduler.next(tile);
        if (!more) tile.steps = 0;
        mbarrier_wait(queue_empty(shared, queue.index), queue.phase ^ 1);
        if (threadIdx.x % WARP == 0) {
            *published_tile(queue.index) = tile;
            mbarrier_arrive(queue_full(shared, queue.index));
        }
    }
}
