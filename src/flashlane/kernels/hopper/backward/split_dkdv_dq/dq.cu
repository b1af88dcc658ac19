// The gradient of the queries, of head dims that leave no registers for all three gradients in one kernel;
// backward_keys.cu makes the others from the same statistics. Nothing is summed in device memory. It begins beside that one,
// whose blocks have waited for the statistics by then, and reads nothing that that one writes.
//
// A block of threads has 128 queries of a head, a consumer warpgroup 64 of them. Q and dO stay in shared memory; K and V
// stream through rings, for each block of keys that the queries see. A step of a consumer, i the block of keys:
//
//     issue S(i) = Q·Kᵀ, dP(i) = dO·Vᵀ │ wait S │ P │ wait dP │ dS = P·(dP − δ) │ issue dQ += dS·K │ wait
//
// dS is in registers what the last product takes as its A operand.
#include "attention/pipeline.cuh"
#include "hopper/backward/products.cuh"

constexpr int BLOCK_N = cfg::BLOCK_N, CONSUMERS = 2, ROWS = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int K_STAGES = cfg::K_STAGES, V_STAGES = cfg::V_STAGES, CONSUMER_ARRIVALS = 4 * CONSUMERS * WARP_ARRIVALS;
constexpr u32 KEYS_CHUNK = BLOCK_N * ROW_BYTES, ROWS_CHUNK = ROWS * ROW_BYTES;
constexpr u32 K_BYTES = QK_CHUNKS * KEYS_CHUNK, V_BYTES = V_CHUNKS * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK;

constexpr u32 Q = 0, DO = Q + Q_BYTES, K = DO + DO_BYTES, V = K + K_STAGES * K_BYTES;
constexpr u32 Q_FULL = V + V_STAGES * V_BYTES, DO_FULL = Q_FULL + 8;
constexpr u32 K_FULL = DO_FULL + 8, K_EMPTY = K_FULL + 8 * K_STAGES;
constexpr u32 V_FULL = K_EMPTY + 8 * K_STAGES, V_EMPTY = V_FULL + 8 * V_STAGES;
static_assert(V_EMPTY + 8 * V_STAGES == cfg::SHARED_BYTES, "the Python formula disagrees");
static_assert(BLOCK_N % 16 == 0);
enum { TOGETHER = 1 };                                    // named barriers: one a consumer

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Queries of a head from `first_query` on, and the blocks of keys that they see.
struct Work {
    int which, head, kv_head, first_query;
    Sequence sequence;
    Blocks keys;

    __device__ __forceinline__ Work(const Params& p, const Place& place)
        : which(place.batch), head(place.head), kv_head(place.head / (p.heads / p.kv_heads)),
          first_query(place.block * ROWS), sequence(p, place.batch), keys(keys_of(p, first_query, ROWS)) {}

    // The blocks of keys that `rows` queries from `first` on see.
    __device__ __forceinline__ Blocks keys_of(const Params& p, int first, int rows) const {
        const int last = min(first + rows, sequence.q_length) - 1;
        const int low = cfg::HAS_LEFT ? max(0, first + sequence.shift - p.window_left) : 0;
        int end = sequence.k_length;
        if (cfg::HAS_RIGHT) end = min(end, last + sequence.shift + p.window_right + 1);
        if (last < first || end <= low) return {0, 0};
        return {low / BLOCK_N, ceil_div(end, BLOCK_N)};
    }
};

// ---------------------------------------------------------------------------------------------- the producer's warp

__device__ __forceinline__ void produce(const Params& p, u32 base, const Work& work) {
    const Sequence& sequence = work.sequence;
    PipelineState<K_STAGES> keys;
    PipelineState<V_STAGES> values;
    auto load = [&](const TensorMap& map, int chunks, u32 chunk_bytes, u32 to, u32 full, int row, int head) {
        mbarrier_arrive_expect_tx(base + full, chunks * chunk_bytes);
        for (int i = 0; i < chunks; ++i)
            tma_load(base + to + i * chunk_bytes, map, base + full, i * CHUNK_COLUMNS, row, head, sequence.batch);
    };
    if (work.keys.high > work.keys.low)
        load(p.q, QK_CHUNKS, ROWS_CHUNK, Q, Q_FULL, sequence.q_first + work.first_query, work.head);
#pragma unroll 1
    for (int block = work.keys.low; block < work.keys.high; ++block) {
        const int row = sequence.k_first + block * BLOCK_N;
        mbarrier_wait(base + K_EMPTY + 8 * keys.index, keys.phase ^ 1);
        load(p.k, QK_CHUNKS, KEYS_CHUNK, K + keys.index * K_BYTES, K_FULL + 8 * keys.index, row, work.kv_head);
        keys.advance();
        if (block == work.keys.low)
            load(p.dout, V_CHUNKS, ROWS_CHUNK, DO, DO_FULL, sequence.q_first + work.first_query, work.head);
        mbarrier_wait(base + V_EMPTY + 8 * values.index, values.phase ^ 1);
        load(p.v, V_CHUNKS, KEYS_CHUNK, V + values.index * V_BYTES, V_FULL + 8 * values.index, row, work.kv_head);
        values.advance();
    }
}

// ---------------------------------------------------------------------------------------------- the consumers

struct Consumer {
    const Params& p;
    const u32 base;
    const Work& work;
    const int number, warp, lane, first_query;            // of the warpgroup
    PipelineState<K_STAGES> keys;
    PipelineState<V_STAGES> values;
    float minus_lse[2], delta[2];                         // of this thread's rows r and r + 8
    float s[BLOCK_N / 2], dp[BLOCK_N / 2], dq[HEAD_DIM / 2];
    u32 ds[BLOCK_N / 4];

    __device__ __forceinline__ Consumer(const Params& params, u32 address, const Work& w, int warpgroup)
        : p(params), base(address), work(w), number(warpgroup), warp(threadIdx.x % WARPGROUP / WARP),
          lane(threadIdx.x % WARP), first_query(w.first_query + warpgroup * 64) {}

    __device__ __forceinline__ void arrive(u32 which, int slot) const {
        mbarrier_arrive_warp(base + which + 8 * slot, lane);
    }
    __device__ __forceinline__ void wait_keys() const { mbarrier_wait(base + K_FULL + 8 * keys.index, keys.phase); }
    __device__ __forceinline__ void wait_values() const { mbarrier_wait(base + V_FULL + 8 * values.index, values.phase); }
    __device__ __forceinline__ void release_values() { arrive(V_EMPTY, values.index), values.advance(); }
    __device__ __forceinline__ void release_keys() { arrive(K_EMPTY, keys.index), keys.advance(); }

    __device__ __forceinline__ void load_statistics() {
        const long long first = stat_block(p, work.sequence, work.which, work.head) * BLOCK_M;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + warp * 16 + lane / 4 + 8 * half;
            const bool inside = query < work.sequence.q_length;
            minus_lse[half] = inside ? p.lse[first + query] : -INF;
            delta[half] = inside ? p.delta[first + query] : 0.f;
        }
    }

    // Of the last keys of a packed sequence, what lies past its end. Both consumers write the same zeros, each before its
    // own products.
    template <int CHUNKS>
    __device__ __forceinline__ void clear_stale(u32 tile, int block) const {
        if constexpr (cfg::VARLEN) {
            const int rows = work.sequence.k_length - block * BLOCK_N;
            if (rows >= BLOCK_N) return;
            clear_rows<CHUNKS, BLOCK_N>(base + tile, rows, threadIdx.x % WARPGROUP, WARPGROUP);
            fence_proxy_async();
            named_barrier_sync(TOGETHER + number, WARPGROUP);
        }
    }

    // This thread's first query, relative to the warpgroup's, and its first key in a block. From %tid each time: kept in
    // registers they would spill.
    struct Corner {
        int query, key;
    };
    static __device__ __forceinline__ Corner corner() {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        return {thread % WARPGROUP / WARP * 16 + thread % WARP / 4, 2 * (thread % 4)};
    }

    // S to P, times the soft cap's derivative.
    __device__ __forceinline__ void make_probabilities(int block) {
        float slope = 0.f, distance = 0.f;
        if constexpr (cfg::ALIBI) {
            const Corner at = corner();
            slope = alibi_slope(p, work.which, work.head);
            distance = first_query + at.query + work.sequence.shift - block * BLOCK_N - at.key;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            const int half = i / 2 % 2;
            if constexpr (TRANSFORMED) {
                float derivative, score = scaled(p, s[i], derivative);
                if constexpr (cfg::ALIBI) score -= slope * fabsf(distance + (8 * half - column(i)));
                s[i] = ex2(score + minus_lse[half]);
                if constexpr (cfg::SOFTCAP) s[i] *= derivative;
            } else {
                s[i] = ex2(fmaf(s[i], p.scale_log2, minus_lse[half]));
            }
        }
        mask_probabilities(block);
    }

    // Zeros for pairs that do not see each other; what the others' sum does not cover may have been infinite.
    __device__ __forceinline__ void mask_probabilities(int block) {
        const Sequence& sequence = work.sequence;
        const int first_key = block * BLOCK_N, row = first_query + sequence.shift;
        bool partly = first_key + BLOCK_N > sequence.k_length;
        if (cfg::HAS_RIGHT) partly = partly || first_key + BLOCK_N - 1 > row + p.window_right;
        if (cfg::HAS_LEFT) partly = partly || first_key < row + 63 - p.window_left;
        if (!partly) return;
        const Corner at = corner();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int from = row + at.query + 8 * half - first_key - at.key;  // the key that the query is aligned with
            int end = sequence.k_length - first_key - at.key;                 // columns low <= c < end are seen
            if (cfg::HAS_RIGHT) end = min(end, from + p.window_right + 1);
            const int low = cfg::HAS_LEFT ? from - p.window_left : 0;
#pragma unroll
            for (int i = 2 * half; i < BLOCK_N / 2; i += 4)
#pragma unroll
                for (int j = i; j < i + 2; ++j)
                    if (column(j) >= end || (cfg::HAS_LEFT && column(j) < low)) s[j] = 0.f;
        }
    }

    __device__ __forceinline__ void make_gradients() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i += 2) {
            const float minus = delta[i / 2 % 2];
            ds[i / 2] = Convert<Element>::pack(s[i] * (dp[i] - minus), s[i + 1] * (dp[i + 1] - minus));
        }
    }

    __device__ __forceinline__ void step(int block) {
        wait_keys();
        clear_stale<QK_CHUNKS>(K + keys.index * K_BYTES, block);
        multiply_rows<BLOCK_N, QK_STEPS, ROWS_CHUNK, KEYS_CHUNK>(s, base + Q + number * 64 * ROW_BYTES,
                                                                 base + K + keys.index * K_BYTES);
        wait_values();
        clear_stale<V_CHUNKS>(V + values.index * V_BYTES, block);
        multiply_rows<BLOCK_N, V_STEPS, ROWS_CHUNK, KEYS_CHUNK>(dp, base + DO + number * 64 * ROW_BYTES,
                                                                base + V + values.index * V_BYTES);
        wgmma_wait<1>(s);
        make_probabilities(block);
        wgmma_wait<0>(dp);
        release_values();
        make_gradients();
        accumulate_rows<HEAD_DIM, BLOCK_N>(dq, ds, base + K + keys.index * K_BYTES);
        wgmma_wait<0>(dq);
        release_keys();
    }

    // A block that none of this warpgroup's queries sees.
    __device__ __forceinline__ void pass() {
        wait_keys(), wait_values();
        release_values(), release_keys();
    }

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dq[i] = 0.f;
        Blocks mine = work.keys_of(p, first_query, 64);
        if (mine.high <= mine.low) mine = {work.keys.low, work.keys.low};
        int block = work.keys.low;
#pragma unroll 1
        for (; block < mine.low; ++block) pass();
        if (block < mine.high) {
            load_statistics();
            mbarrier_wait(base + Q_FULL, 0), mbarrier_wait(base + DO_FULL, 0);
#pragma unroll 1
            for (; block < mine.high; ++block) step(block);
        }
#pragma unroll 1
        for (; block < work.keys.high; ++block) pass();
        Element* const first = static_cast<Element*>(p.dq_out) + work.sequence.batch * p.dq_batch +
                               (work.sequence.q_first + first_query) * p.dq_row + work.head * p.dq_head;
        store_rows<HEAD_DIM>(dq, first, p.dq_row, work.sequence.q_length - first_query, p.scale);
    }
};

__device__ __forceinline__ void run_block(const Params& p, const Work& work) {
    const u32 base = shared_address(shared_memory);
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the swizzle counts from there
        mbarrier_init(base + Q_FULL, 1), mbarrier_init(base + DO_FULL, 1);
        for (int i = 0; i < K_STAGES; ++i)
            mbarrier_init(base + K_FULL + 8 * i, 1), mbarrier_init(base + K_EMPTY + 8 * i, CONSUMER_ARRIVALS);
        for (int i = 0; i < V_STAGES; ++i)
            mbarrier_init(base + V_FULL + 8 * i, 1), mbarrier_init(base + V_EMPTY + 8 * i, CONSUMER_ARRIVALS);
        fence_mbarrier_init();
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
    }
    __syncthreads();
    // By shuffle, so that ptxas knows them to be alike in the warp and keeps descriptors in uniform registers.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (warp == 0 && threadIdx.x % WARP == 0) produce(p, base, work);
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        Consumer(p, base, work, warpgroup - 1).run();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_backward_dq(const __grid_constant__ Params p) {
    const Work work(p, place_of(p, p.heads, true));
    if (work.first_query < work.sequence.q_length) run_block(p, work);
    if (blockIdx.x == 0) griddepcontrol_wait();            // the launch before ends before this one
}
