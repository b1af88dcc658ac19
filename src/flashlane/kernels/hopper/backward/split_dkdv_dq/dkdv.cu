// The gradients of keys and values, of head dims that leave no registers for all three gradients in one kernel;
// backward_queries.cu makes the queries' from the same statistics. Nothing is summed in device memory.
//
// A block of threads has 64 keys of a key/value head. K and V stay in shared memory; Q, dO and their rows' statistics
// stream through rings, for each query head of the group and each block of queries that sees the keys. A gradient's
// accumulator takes a warpgroup's registers, so each warpgroup makes one. i is the block of queries:
//
//     values    issue S(i) = K·Qᵀ   │ wait │ P, hand it over           │ issue dV += P·dO │ wait
//     keys      issue dP(i) = V·dOᵀ │ take P │ wait │ dS = P·(dP − δ)  │ issue dK += dS·Q │ wait
//
// Both hold the scores transposed and alike, so that P and dS are in registers what the next product takes as its A
// operand, and a thread hands P to its double. The exponentials of one run under the products of the other: it is
// ahead by the P that it has handed over.
//
// CLUSTER: two blocks have neighbouring keys. Each brings half of the rows of Q and dO into both, and both make the same
// steps; L2 is asked for half as much.
#include "attention/pipeline.cuh"
#include "cluster.cuh"
#include "hopper/backward/work.cuh"
#include "hopper_clustered.cuh"

constexpr int BLOCK_N = 64, CLUSTER = cfg::CLUSTER, TEAM_KEYS = BLOCK_N * CLUSTER, THREADS = WARPGROUP * 3;
constexpr int Q_STAGES = cfg::Q_STAGES, DO_STAGES = cfg::DO_STAGES, SLOTS = 2;  // slots: of P on its way
constexpr u32 KEYS_CHUNK = BLOCK_N * ROW_BYTES, ROWS_CHUNK = BLOCK_M * ROW_BYTES;
constexpr u32 K_BYTES = QK_CHUNKS * KEYS_CHUNK, V_BYTES = V_CHUNKS * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK;
constexpr u32 PIECE_BYTES = 16 * WARPGROUP, P_BYTES = BLOCK_M / 16 * PIECE_BYTES, STAT_BYTES = BLOCK_M * 4;
constexpr int SHARE = BLOCK_M / CLUSTER;                  // rows of Q and dO that one block of threads brings
static_assert(BLOCK_M % 16 == 0 && SHARE % 8 == 0 && (CLUSTER == 1 || CLUSTER == 2));

constexpr u32 K = 0, V = K + K_BYTES, Q = V + V_BYTES, DO = Q + Q_STAGES * Q_BYTES, P = DO + DO_STAGES * DO_BYTES;
constexpr u32 LSE = P + SLOTS * P_BYTES, DELTA = LSE + Q_STAGES * STAT_BYTES;
constexpr u32 KV_FULL = DELTA + DO_STAGES * STAT_BYTES;
constexpr u32 Q_FULL = KV_FULL + 16, Q_EMPTY = Q_FULL + 8 * Q_STAGES, DO_FULL = Q_EMPTY + 8 * Q_STAGES;
constexpr u32 DO_EMPTY = DO_FULL + 8 * DO_STAGES, P_FULL = DO_EMPTY + 8 * DO_STAGES, P_EMPTY = P_FULL + 8 * SLOTS;
// In a cluster: the other block's stage is empty too.
constexpr u32 Q_PEER = P_EMPTY + 8 * SLOTS, DO_PEER = Q_PEER + (CLUSTER > 1 ? 8 * Q_STAGES : 0);
constexpr u32 END = DO_PEER + (CLUSTER > 1 ? 8 * DO_STAGES : 0);
static_assert(END == cfg::SHARED_BYTES, "the Python formula disagrees");
enum { TOGETHER = 1, ALL = 3 };                           // named barriers: one a consumer, and of both

// P is kept as P · 2^15: halves then have their full precision down to 2^-29.
constexpr float P_EXPONENT = 15.f, P_INVERSE = 1.f / 32768.f;

extern __shared__ __align__(1024) unsigned char shared_memory[];

// ---------------------------------------------------------------------------------------------- the producer's warp

struct Producer {
    const Params& p;
    const u32 base;
    const Work& work;
    const u32 rank;

    __device__ __forceinline__ void load_keys(const TensorMap& map, int chunks, u32 to, u32 full) const {
        for (int i = 0; i < chunks; ++i)
            tma_load(base + to + i * KEYS_CHUNK, map, full, i * CHUNK_COLUMNS, work.sequence.k_first + work.first_key,
                     work.kv_head, work.sequence.batch);
    }

    // A block of queries, and its statistics, into a stage. Until all consumers are done with the stage: those of the other
    // block tell their own producer, which tells this one.
    template <int STAGES>
    __device__ __forceinline__ void load_rows(const TensorMap& map, const float* statistics, int chunks, u32 to, u32 stat_to,
                                              u32 full, u32 empty, u32 peer, const PipelineState<STAGES>& ring, const Step& step,
                                              long long rows) const {
        const u32 at = 8 * ring.index, tile = base + to + ring.index * chunks * ROWS_CHUNK + rank * SHARE * ROW_BYTES;
        const int row = work.sequence.q_first + step.block * BLOCK_M + rank * SHARE;
        mbarrier_wait(base + empty + at, ring.phase ^ 1);
        if constexpr (CLUSTER > 1) {
            mbarrier_arrive_cluster(address_in(base + peer + at, rank ^ 1));
            mbarrier_wait_cluster(base + peer + at, ring.phase);
        }
        mbarrier_expect_tx_before_copies(base + full + at, chunks * ROWS_CHUNK + STAT_BYTES);
        for (int i = 0; i < chunks; ++i) {
            const u32 chunk = tile + i * ROWS_CHUNK;
            if constexpr (CLUSTER > 1)
                tma_load_multicast(chunk, map, base + full + at, i * CHUNK_COLUMNS, row, step.head, work.sequence.batch,
                                   (1 << CLUSTER) - 1);
            else
                tma_load(chunk, map, base + full + at, i * CHUNK_COLUMNS, row, step.head, work.sequence.batch);
        }
        bulk_load(base + stat_to + ring.index * STAT_BYTES, statistics + rows, STAT_BYTES, base + full + at);
        mbarrier_arrive_after_copies(base + full + at);
    }

    __device__ __forceinline__ void run() const {
        PipelineState<Q_STAGES> queries;
        PipelineState<DO_STAGES> outputs;
        Step step(work);
        const int steps = work.steps();
        if (steps == 0) return;
        mbarrier_arrive_expect_tx(base + KV_FULL, K_BYTES);
        load_keys(p.k, QK_CHUNKS, K, base + KV_FULL);
#pragma unroll 1
        for (int i = 0; i < steps; ++i, step.next()) {
            const long long rows = (stat_block(p, work.sequence, work.which, step.head) + step.block) * BLOCK_M;
            load_rows(p.q, p.lse, QK_CHUNKS, Q, LSE, Q_FULL, Q_EMPTY, Q_PEER, queries, step, rows);
            queries.advance();
            if (i == 0) {
                mbarrier_arrive_expect_tx(base + KV_FULL + 8, V_BYTES);
                load_keys(p.v, V_CHUNKS, V, base + KV_FULL + 8);
            }
            load_rows(p.dout, p.delta, V_CHUNKS, DO, DELTA, DO_FULL, DO_EMPTY, DO_PEER, outputs, step, rows);
            outputs.advance();
        }
    }
};

// ---------------------------------------------------------------------------------------------- the consumers

// What both warpgroups do: they walk the same rings.
struct Consumer {
    const Params& p;
    const u32 base;
    const Work& work;
    const int number, warp, lane;                         // 0: values, 1: keys
    PipelineState<Q_STAGES> queries;
    PipelineState<DO_STAGES> outputs;
    PipelineState<SLOTS> handed;
    Step step;

    __device__ __forceinline__ Consumer(const Params& params, u32 address, const Work& w, int warpgroup)
        : p(params), base(address), work(w), number(warpgroup), warp(threadIdx.x % WARPGROUP / WARP),
          lane(threadIdx.x % WARP), step(w) {}

    __device__ __forceinline__ void arrive(u32 which, int slot) const {
        mbarrier_arrive_warp(base + which + 8 * slot, lane);
    }
    __device__ __forceinline__ u32 queries_at() const { return Q + queries.index * Q_BYTES; }
    __device__ __forceinline__ u32 outputs_at() const { return DO + outputs.index * DO_BYTES; }
    // This thread's pieces of P.
    __device__ __forceinline__ u32 handed_at() const { return P + handed.index * P_BYTES + threadIdx.x % WARPGROUP * 16; }
    __device__ __forceinline__ void wait_queries() const {
        mbarrier_wait(base + Q_FULL + 8 * queries.index, queries.phase);
    }
    __device__ __forceinline__ void wait_outputs() const {
        mbarrier_wait(base + DO_FULL + 8 * outputs.index, outputs.phase);
    }
    __device__ __forceinline__ void next() { queries.advance(), outputs.advance(), handed.advance(), step.next(); }

    // What lies past the end of a packed sequence. Both warpgroups write the same zeros, each before its own products.
    template <int CHUNKS>
    __device__ __forceinline__ void clear_stale(u32 tile) const {
        if constexpr (cfg::VARLEN) {
            const int rows = work.sequence.q_length - step.block * BLOCK_M;
            if (rows >= BLOCK_M) return;
            clear_rows<CHUNKS, BLOCK_M>(base + tile, rows, threadIdx.x % WARPGROUP, WARPGROUP);
            fence_proxy_async();
            named_barrier_sync(TOGETHER + number, WARPGROUP);
        }
    }
    __device__ __forceinline__ void wait_keys() const {
        mbarrier_wait(base + KV_FULL, 0), mbarrier_wait(base + KV_FULL + 8, 0);
        if constexpr (cfg::VARLEN) {
            const int rows = max(0, work.sequence.k_length - work.first_key), threads = 2 * WARPGROUP;
            if (rows >= BLOCK_N) return;
            const int thread = threadIdx.x - WARPGROUP;
            clear_rows<QK_CHUNKS, BLOCK_N>(base + K, rows, thread, threads);
            clear_rows<V_CHUNKS, BLOCK_N>(base + V, rows, thread, threads);
            fence_proxy_async();
            named_barrier_sync(ALL, threads);
        }
    }

    template <int DIM>
    __device__ __forceinline__ void store(const float (&d)[DIM / 2], void* to, long long batch, long long row, long long head,
                                          float factor) const {
        Element* const first = static_cast<Element*>(to) + work.sequence.batch * batch +
                               (work.sequence.k_first + work.first_key) * row + work.kv_head * head;
        store_rows<DIM>(d, first, row, work.sequence.k_length - work.first_key, factor);
    }
};

struct Values : Consumer {
    float s[BLOCK_M / 2], dv[HEAD_DIM_V / 2];
    u32 probabilities[BLOCK_M / 4];
    u32 derivatives[cfg::SOFTCAP ? BLOCK_M / 4 : 1];      // of the soft cap

    using Consumer::Consumer;

    __device__ __forceinline__ void make_probabilities() {
        const u32 lse = base + LSE + queries.index * STAT_BYTES + lane % 4 * 8;
        if constexpr (TRANSFORMED)
            transform_scores(p, corner_of(step, work.first_key).distance(), alibi_slope(p, work.which, step.head), s,
                             derivatives);
        const Sequence& sequence = work.sequence;
        if (partly_masked<BLOCK_N>(p, work.first_key, sequence.k_length, step.block * BLOCK_M, sequence.shift))
            mask_scores(p, corner_of(step, work.first_key), s);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            float2 row = load_shared_float2(lse + i / 4 * 32);
            row.x += P_EXPONENT, row.y += P_EXPONENT;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float minus = j % 2 ? row.y : row.x;
                s[i + j] = ex2(TRANSFORMED ? s[i + j] + minus : fmaf(s[i + j], p.scale_log2, minus));
            }
            probabilities[i / 2] = Convert<Element>::pack(s[i], s[i + 1]);
            probabilities[i / 2 + 1] = Convert<Element>::pack(s[i + 2], s[i + 3]);
        }
    }

    // P, times the cap's derivative, to the thread with the same keys and queries.
    __device__ __forceinline__ void hand_over() {
        const u32 to = base + handed_at();
        mbarrier_wait(base + P_EMPTY + 8 * handed.index, handed.phase ^ 1);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
            u32 word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float low = s[8 * i + 2 * j], high = s[8 * i + 2 * j + 1];
                if constexpr (cfg::SOFTCAP) {
                    const float2 derivative = unpack_half2(derivatives[4 * i + j]);
                    word[j] = Convert<__half>::pack(low * derivative.x, high * derivative.y);
                } else {
                    word[j] = Convert<__half>::pack(low, high);
                }
            }
            store_shared(to + i * PIECE_BYTES, make_uint4(word[0], word[1], word[2], word[3]));
        }
        __syncwarp();
        arrive(P_FULL, handed.index);
    }

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 2; ++i) dv[i] = 0.f;
        const int steps = work.steps();
        if (steps > 0) wait_keys();
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            wait_queries();
            clear_stale<QK_CHUNKS>(queries_at());
            multiply_rows<BLOCK_M, QK_STEPS, KEYS_CHUNK, ROWS_CHUNK>(s, base + K, base + queries_at());
            wgmma_wait<0>(s);
            make_probabilities();
            hand_over();
            wait_outputs();
            clear_stale<V_CHUNKS>(outputs_at());
            accumulate_rows<HEAD_DIM_V, BLOCK_M>(dv, probabilities, base + outputs_at());
            arrive(Q_EMPTY, queries.index);
            wgmma_wait<0>(dv);
            arrive(DO_EMPTY, outputs.index);
            next();
        }
        store<HEAD_DIM_V>(dv, p.dv, p.dv_batch, p.dv_row, p.dv_head, P_INVERSE);
    }
};

struct Keys : Consumer {
    float dp[BLOCK_M / 2], dk[HEAD_DIM / 2];
    u32 probabilities[BLOCK_M / 4], ds[BLOCK_M / 4];

    using Consumer::Consumer;

    __device__ __forceinline__ void take_probabilities() {
        mbarrier_wait(base + P_FULL + 8 * handed.index, handed.phase);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
            const int4 piece = load_shared_int4(base + handed_at() + i * PIECE_BYTES);
            probabilities[4 * i] = piece.x, probabilities[4 * i + 1] = piece.y;
            probabilities[4 * i + 2] = piece.z, probabilities[4 * i + 3] = piece.w;
        }
        __syncwarp();
        arrive(P_EMPTY, handed.index);
    }

    __device__ __forceinline__ void make_gradients() {
        const u32 delta = base + DELTA + outputs.index * STAT_BYTES + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 row = load_shared_float2(delta + i / 4 * 32);
            const float x = row.x * -P_INVERSE, y = row.y * -P_INVERSE;
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                const float2 weight = unpack_half2(probabilities[j / 2]);
                ds[j / 2] = Convert<Element>::pack(weight.x * fmaf(dp[j], P_INVERSE, x), weight.y * fmaf(dp[j + 1], P_INVERSE, y));
            }
        }
    }

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.f;
        const int steps = work.steps();
        if (steps > 0) wait_keys();
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            wait_outputs();
            clear_stale<V_CHUNKS>(outputs_at());
            multiply_rows<BLOCK_M, V_STEPS, KEYS_CHUNK, ROWS_CHUNK>(dp, base + V, base + outputs_at());
            take_probabilities();
            wgmma_wait<0>(dp);
            make_gradients();
            wait_queries();
            clear_stale<QK_CHUNKS>(queries_at());
            accumulate_rows<HEAD_DIM, BLOCK_M>(dk, ds, base + queries_at());
            arrive(DO_EMPTY, outputs.index);
            wgmma_wait<0>(dk);
            arrive(Q_EMPTY, queries.index);
            next();
        }
        store<HEAD_DIM>(dk, p.dk, p.dk_batch, p.dk_row, p.dk_head, p.scale);
    }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) hopper_backward_dkdv(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory), rank = CLUSTER > 1 ? cluster_rank() : 0;
    const Place place = place_of(p, p.kv_heads, false);
    const Work work(p, place, TEAM_KEYS, rank * BLOCK_N);
    if (place.block * TEAM_KEYS >= work.sequence.k_length) return;
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the swizzle counts from there
        mbarrier_init(base + KV_FULL, 1), mbarrier_init(base + KV_FULL + 8, 1);
        for (int i = 0; i < Q_STAGES; ++i) {
            mbarrier_init(base + Q_FULL + 8 * i, 1), mbarrier_init(base + Q_EMPTY + 8 * i, 8 * WARP_ARRIVALS);
            if (CLUSTER > 1) mbarrier_init(base + Q_PEER + 8 * i, 1);
        }
        for (int i = 0; i < DO_STAGES; ++i) {
            mbarrier_init(base + DO_FULL + 8 * i, 1), mbarrier_init(base + DO_EMPTY + 8 * i, 8 * WARP_ARRIVALS);
            if (CLUSTER > 1) mbarrier_init(base + DO_PEER + 8 * i, 1);
        }
        for (int i = 0; i < SLOTS; ++i)
            mbarrier_init(base + P_FULL + 8 * i, 4 * WARP_ARRIVALS), mbarrier_init(base + P_EMPTY + 8 * i, 4 * WARP_ARRIVALS);
        fence_mbarrier_init();
        griddepcontrol_wait();                             // this thread loads the statistics
        griddepcontrol_launch_dependents();                              // they need those, too, and nothing that is made here
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
    }
    if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
    // By shuffle, so that ptxas knows them to be alike in the warp and keeps descriptors in uniform registers.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (warp == 0) {
            if (threadIdx.x % WARP == 0) Producer{p, base, work, rank}.run();
            __syncwarp();
        }
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        if (warpgroup == 1) {
            Values(p, base, work, 0).run();
        } else {
            Keys(p, base, work, 1).run();
        }
    }
    // The other block may still be sent what this one has asked for.
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();
}
