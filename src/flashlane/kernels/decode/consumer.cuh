// The consumer warps of the decode kernel: S = Q·Kᵀ, online softmax and O += P·V over the steps of a work tile.
#pragma once
#include "decode/combine.cuh"

constexpr int S_TILES = BLOCK_N / 8, O_TILES = HEAD_DIM_V / 8, QK_STEPS = HEAD_DIM / 16, PV_STEPS = BLOCK_N / 16;

struct State {
    Accumulator<float> o[O_TILES];
    float max[2];  // raw products, or in base 2 where scores are transformed; rows g and g + 8
    float sum[2];  // of this lane's columns
};

struct Lane {
    int lane, warp_group, warp_m, quad_row, quad_column;

    // The compiler has no registers to keep, through the loop, what follows from the thread's index.
    __device__ __forceinline__ Lane() {
        const int thread = thread_index_here();
        const int warp = __shfl_sync(0xffffffffu, thread / WARP, 0);
        lane = thread % WARP, warp_group = warp / WARPS_M, warp_m = warp % WARPS_M;
        quad_row = lane / 4, quad_column = lane % 4;
    }
    __device__ __forceinline__ int row(int half) const { return warp_m * 16 + half * 8 + quad_row; }
    // Synchronises the warps of the warp group, and makes their writes to shared memory visible to each other.
    __device__ __forceinline__ void group_sync() const {
        if constexpr (WARPS_M == 1) __syncwarp();
        else named_barrier_sync(warp_group + 1, GROUP_THREADS);
    }
};

using Queries = u32[QK_STEPS][4];
using Scores = float[S_TILES * 4];

// Addresses of a lane's fragments in a warp group's tile of K or V.
template <typename Layout>
struct TileCursor : FragmentCursor<Layout> {
    using FragmentCursor<Layout>::FragmentCursor;
    __device__ __forceinline__ u32 at(u32 stage, int rows, int chunks) const {
        constexpr int CHUNKS = Layout::CHUNKS;  // of a plane, or of a row
        return FragmentCursor<Layout>::at(stage + chunks / CHUNKS * PLANE_BYTES, rows, chunks % CHUNKS);
    }
};

// Starts to copy the tile's rows of Q.
__device__ __forceinline__ void load_queries(u32 destination, const Params& p, const WorkTile& tile) {
    const AttentionParams<Element>& a = p.attention;
    const Element* base = a.q + (p.total_q < 0 ? tile.batch * a.q_batch : 0) + tile.sequence.q_start * a.q_row;
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_M * LayoutQ::CHUNKS; i += THREADS) {
        const int row = i / LayoutQ::CHUNKS, chunk = i % LayoutQ::CHUNKS;
        const Row at = tile.at(row, p);
        const bool inside = row < tile.rows && chunk * CHUNK < a.head_dim;
        cp_async_16(destination + LayoutQ::offset(row, chunk),
                    base + at.token * a.q_row + at.head * a.q_head + chunk * CHUNK, inside ? 16 : 0);
    }
}

__device__ __forceinline__ void gemm_qk(Scores& s, const Queries& queries, const FragmentCursor<LayoutQ>& q,
                                        const TileCursor<LayoutK>& k, u32 stage) {
    Accumulator<float> acc[S_TILES];
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) acc[n].zero();
#pragma unroll
    for (int step = 0; step < QK_STEPS; ++step) {
        u32 a[4];
        if constexpr (!cfg::Q_IN_REGISTERS) ldmatrix_x4(a, q.at(0, 0, step * 2));
        else
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = queries[step][i];
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, k.at(stage, n * 8, step * 2));
            mma<Element>(acc[n], a, b[0], b[1]);
            mma<Element>(acc[n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < S_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n * 4 + i] = acc[n].get(i);
}

// Turns scores into unnormalised probabilities, updates the statistics and rescales O.
__device__ __forceinline__ void online_softmax(Scores& s, State& state, float scale_log2) {
    float rescale[2];
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float tile_max = quad_max(row_max(s, half));
        rescale[half] = update_row_max(state.max[half], tile_max, scale_log2, RESCALE_THRESHOLD, grew);
        state.sum[half] *= rescale[half];
    }
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) state.o[n].scale(rescale[0], rescale[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
        exponentiate_row<true>(s, half, state.max[half], scale_log2, state.sum[half]);
}

__device__ __forceinline__ void gemm_pv(State& state, const Scores& s, const TileCursor<LayoutV>& v, u32 stage) {
#pragma unroll
    for (int step = 0; step < PV_STEPS; ++step) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = &s[(2 * step + i / 2) * 4 + i % 2 * 2];
            a[i] = Convert<Element>::pack(pair[0], pair[1]);
        }
#pragma unroll
        for (int n = 0; n < O_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, v.at(stage, step * 16, n));
            mma<Element>(state.o[n], a, b[0], b[1]);
            mma<Element>(state.o[n + 1], a, b[2], b[3]);
        }
    }
}

// Zeroes the out-of-bounds rows of a warp group's tile of V. They may hold NaN or infinity, which a probability of 0
// does not cancel.
__device__ __forceinline__ void clear_out_of_bounds_rows(u32 v_tile, const KeyRange& keys, const Lane& lane, int key) {
    constexpr int CHUNKS = LayoutV::CHUNKS, ALL = V_PLANES * BLOCK_N * CHUNKS;
#pragma unroll 1
    for (int i = threadIdx.x % GROUP_THREADS; i < ALL; i += GROUP_THREADS) {
        const int row = i / CHUNKS % BLOCK_N, plane = i / CHUNKS / BLOCK_N;
        if (key + row < keys.first || key + row >= keys.end)
            store_shared(v_tile + plane * PLANE_BYTES + LayoutV::offset(row, i % CHUNKS), make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async();  // before TMA writes there again
    lane.group_sync();
}

// Copies a warp group's tiles of keys by cp.async.
// (Small CTAs of which an SM has several hide each other's latency: there looking up by lanes is 0.4 to 1 % slower.)
using Reader = PagedTileReader<cfg::PAGES, BLOCK_N, GROUP_THREADS, cfg::MIN_BLOCKS == 1, Element>;
__device__ __forceinline__ Reader reader_of(const Params& p, const WorkTile& tile) {
    const AttentionParams<Element>& a = p.attention;
    const CacheSeqlenInfo& sequence = tile.sequence;
    const long long k = tile.kv_head * a.k_head + sequence.k_start * a.k_row;
    const long long v = tile.kv_head * a.v_head + sequence.k_start * a.v_row;
    return {a.k + k + (PAGED ? 0 : sequence.cache_row * a.k_batch),
            a.v + v + (PAGED ? 0 : sequence.cache_row * a.v_batch),
            a.k_batch, a.v_batch, a.k_row, a.v_row, sequence.table, p.seqlen, tile.keys.first, tile.keys.end,
            static_cast<int>(threadIdx.x) % GROUP_THREADS, 0, 0};
}

// The first key of a warp group's tile in a step.
__device__ __forceinline__ int key_of(int step, const Lane& lane) { return step * STEP + lane.warp_group * BLOCK_N; }

// The queries of a tile, by the parity of its place in the queue.
__device__ __forceinline__ int queries_offset(const TileQueueState& queue) {
    return offsetof(SharedStorage, queries) + queue.index % QUERY_STAGES * QUERY_BYTES;
}

// With stream-K: copies the keys of a warp group STAGES - 1 steps ahead, of one published work tile after another, so
// that the copies go on while a tile ends. A tile takes STAGES steps or more, so that the queries of the tile after the
// next one are not copied before it has ended.
struct KeyLoader {
    const Params& p;
    const u32 shared;
    const Lane lane;
    TileQueueState queue;  // the tile whose keys are copied
    Reader reader;
    int first_step, step, steps;  // of the tile: its first step, the next one from there, and how many there are
    int left;                     // steps until the next tile, with those that copy nothing; negative: there is none
    u32 stage;                    // the next step's, an offset

    __device__ __forceinline__ static int all_steps(const WorkTile& tile) { return max(tile.steps, STAGES); }

    __device__ __forceinline__ KeyLoader(const Params& params, u32 base)
        : p(params), shared(base), reader(reader_of(params, published())), stage(0) {
        begin();
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) load();
    }

    __device__ __forceinline__ const WorkTile& published() const {
        mbarrier_wait(queue_full(shared, queue.index), queue.phase);
        return *published_tile(queue.index);
    }
    __device__ __forceinline__ int key() const { return key_of(first_step + step, lane); }

    // Begins with the queue's tile, and copies its queries. A tile without steps is the last one.
    __device__ __forceinline__ void begin() {
        const WorkTile& tile = published();
        first_step = tile.step, step = 0, steps = tile.steps, left = all_steps(tile);
        if (steps == 0) {
            left = -1;
            return;
        }
        const Reader next = reader_of(p, tile);
        reader.k = next.k, reader.v = next.v, reader.table = next.table, reader.first = next.first;
        reader.end = next.end;
        load_queries(shared + queries_offset(queue), p, tile);
        reader.template look_up<STEP>(0, key());
    }

    // Copies a step into the next stage, and looks up the pages of the one after it.
    __device__ __forceinline__ void load() {
        const AttentionParams<Element>& a = p.attention;
        const u32 k_tile = shared + lane.warp_group * GROUP_STRIDE + stage;
        if (step < steps)
            reader.template copy<LayoutK, LayoutV>(k_tile, k_tile + K_BYTES, step, key(), a.head_dim, a.head_dim_v);
        cp_async_commit();
        stage = stage == (STAGES - 1) * STAGE_STRIDE ? 0 : stage + STAGE_STRIDE;
        ++step;
        if (--left == 0) queue.advance(), begin();
        else if (step < steps) reader.template look_up<STEP>(step, key());
    }
};

// One work tile, as one warp group computes it.
struct Consumer {
    const Params& p;
    const WorkTile& tile;
    const u32 shared;  // address of shared memory
    const int first_step, steps;
    const KeyRange keys;
    const Lane lane;
    const u32 tiles;   // offset of the warp group's tiles in a stage, or of its pipeline
    const FragmentCursor<LayoutQ> q_cursor;
    const TileCursor<LayoutK> k_cursor;
    const TileCursor<LayoutV> v_cursor;
    const Mask mask;
    const float scale_log2;
    Queries q;
    float slopes[2];   // of the two rows' heads
    State state;

    __device__ __forceinline__ Consumer(const Params& params, const WorkTile& work_tile, u32 base, int queries)
        : p(params), tile(work_tile), shared(base), first_step(work_tile.step), steps(work_tile.steps),
          keys(work_tile.keys),
          tiles(lane.warp_group * (TMA ? BLOCK_N * LayoutK::STRIDE : GROUP_STRIDE)),
          q_cursor(base + queries, lane.warp_m * 16 + lane.lane % 16, lane.lane / 16),
          k_cursor(base + tiles, lane.lane % 8 + lane.lane / 16 * 8, lane.lane / 8 % 2),
          v_cursor(base + tiles + K_BYTES, lane.lane % 16, lane.lane / 16), mask(work_tile.mask(params)),
          scale_log2(Score::late_scale(params.score)) {}

    __device__ __forceinline__ int key(int i) const { return key_of(first_step + i, lane); }

    __device__ __forceinline__ void read_q() {
        consumers_sync();  // all of Q is there
        if constexpr (cfg::Q_IN_REGISTERS)
#pragma unroll
            for (int step = 0; step < QK_STEPS; ++step) ldmatrix_x4(q[step], q_cursor.at(0, 0, step * 2));
    }

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (Score::TRANSFORMED) {
                const int head = tile.at(lane.row(half), p).head;
                slopes[half] = lane.row(half) < tile.rows ? Score::slope(p.score, tile.batch, head) : 0.f;
            }
            state.max[half] = -INF, state.sum[half] = 0.f;
        }
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) state.o[n].zero();
    }

    // Scales scores to base 2, caps and biases them; `key` is this lane's first one.
    __device__ __forceinline__ void transform(Scores& s, int key) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int distance = tile.at(lane.row(half), p).token + tile.sequence.shift - key;
#pragma unroll
            for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[n * 4 + half * 2 + i];
                    x = Score::scaled(p.score, x);
                    x = Score::biased(x, slopes[half], static_cast<float>(distance - n * 8 - i));
                }
        }
    }

    // Masks the scores of keys from `key` on, this lane's first one.
    __device__ __forceinline__ void apply_mask(Scores& s, int key) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = tile.at(lane.row(half), p).token;
            mask_row(s, half, max(tile.sequence.first, mask.first(token)), mask.end(token), key);
        }
    }

    // One step: the warp group's tile of keys, from `key` on.
    __device__ __forceinline__ void attend(int key, u32 stage) {
        const int column = key + lane.quad_column * 2;
        Scores s;
        gemm_qk(s, q, q_cursor, k_cursor, stage);
        if constexpr (Score::TRANSFORMED) transform(s, column);
        if (key < keys.unmasked_first || key + BLOCK_N > keys.unmasked_end) apply_mask(s, column);
        if (TMA && (key < keys.first || key + BLOCK_N > keys.end))
            clear_out_of_bounds_rows(shared + tiles + K_BYTES + stage, keys, lane, key);
        online_softmax(s, state, scale_log2);
        gemm_pv(state, s, v_cursor, stage);
    }

    // Loops over the stages that the producer warp fills. Returns the last stage, which is not released.
    __device__ __forceinline__ int attend_all_by_tma() {
        PipelineState<STAGES> pipeline;
        int last = 0;
        load_queries(shared + offsetof(SharedStorage, queries), p, tile);
        cp_async_commit();
        reset();
        cp_async_wait<0>();
        read_q();
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            last = pipeline.index;
            mbarrier_wait(stage_full(shared, last), pipeline.phase);
            pipeline.advance();
            attend(key(i), last * STAGE_BYTES);
            __syncwarp();
            if (i + 1 < steps) mbarrier_arrive_warp(stage_empty(shared, last), lane.lane);
        }
        return last;
    }

    // Loops over the stages that the warp group fills by cp.async. The prologue runs in the same loop (i < 0): code
    // that runs once costs its fetch from memory.
    __device__ __forceinline__ void attend_all_by_cp_async() {
        const AttentionParams<Element>& a = p.attention;
        Reader reader = reader_of(p, tile);
        const auto look_up = [&](int i) {
            if (i < steps) reader.template look_up<STEP>(i, key(i));
        };
        const auto load = [&](int i, u32 stage) {
            const u32 k_tile = shared + tiles + stage;
            if (i < steps)
                reader.template copy<LayoutK, LayoutV>(k_tile, k_tile + K_BYTES, i, key(i), a.head_dim,
                                                       a.head_dim_v);
            cp_async_commit();
        };
        const auto after = [](u32 stage) { return stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES; };
        look_up(0);
        load_queries(shared + offsetof(SharedStorage, queries), p, tile);
        reset();
        u32 stage = 0, free_stage = 0;  // offsets
#pragma unroll 1
        for (int i = 1 - STAGES; i < steps; ++i) {
            if (i >= 0) {
                cp_async_wait<STAGES - 2>();
                lane.group_sync();  // the tile is there for the whole warp group, which has read the one before it
            }
            load(i + STAGES - 1, free_stage);
            look_up(i + STAGES);
            free_stage = after(free_stage);
            if (i < 0) continue;
            if (i == 0) read_q();  // Q came with the first tiles
            attend(key(i), stage);
            stage = after(stage);
        }
        cp_async_wait<0>();
    }

    // Loops over the stages that a loader fills. Returns the stage of the last step, which is free.
    __device__ __forceinline__ u32 attend_all_ahead(KeyLoader& loader) {
        const int all = KeyLoader::all_steps(tile);
        u32 stage = 0;
        reset();
#pragma unroll 1
        for (int i = 0; i < all; ++i) {
            cp_async_wait<STAGES - 2>();
            lane.group_sync();  // the tile is there for the whole warp group, which has read the one before it
            stage = loader.stage == (STAGES - 1) * STAGE_STRIDE ? 0 : loader.stage + STAGE_STRIDE;
            loader.load();
            if (i == 0) read_q();  // Q came with the first tiles
            if (i < steps) attend(key(i), stage);
        }
        return stage;
    }

    // Stores the warp group's statistics and unnormalised output in shared memory.
    __device__ __forceinline__ void store_sums(float* group_sums) const {
        PartialSoftmax* statistics = group_statistics() + lane.warp_group * BLOCK_M;
        float* sums = group_sums + lane.warp_group * BLOCK_M * SUM_STRIDE;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane.row(half);
            const float sum = quad_sum(state.sum[half]), max = state.max[half];
            if (row >= tile.rows) continue;
            if (lane.quad_column == 0) statistics[row] = {max == -INF ? -INF : max * scale_log2, sum};
#pragma unroll
            for (int n = 0; n < O_TILES; ++n)  // (four addresses, from which the others are at constant distances)
                *reinterpret_cast<float2*>(&sums[sum_at(row, n % 4 * 8 + lane.quad_column * 2) + n / 4 * 32]) =
                    make_float2(state.o[n].get(half * 2), state.o[n].get(half * 2 + 1));
        }
    }
};
