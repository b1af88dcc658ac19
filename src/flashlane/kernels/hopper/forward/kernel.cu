// Attention forward for Hopper: wgmma products, TMA copies, warps with different jobs.
//
// A block stays on its SM and takes tile after tile. Its key blocks are one stream over all its tiles, and each step of
// the stream has a stage of the ring in shared memory, which holds the keys of its block and the values of the block
// before:
//
//     producer warp      K0      K1 V0   K2 V1   K3 V2 | K0' V3  K1' V0' …                      (' the next tile)
//     each consumer      S0      S1 O0   S2 O1   S3 O2 | S0' O3  S1' O0' …                      S = Q·Kᵀ, O += P·V
//       under them         max,exp 0  1       2       3     store, 0'   …                       softmax of that step's S
//
// So the two products of a step are in flight together, the softmax of S runs under the product before, and from one
// tile to the next nothing drains. A consumer is a warpgroup with 64 rows of the tile; PINGPONG makes them take turns at
// the tensor cores. Old row maxima are kept until a score exceeds them by 2^8, so O is rarely rescaled
// (FlashAttention-4); row sums stay per lane until the end. Where the keys of a tile are cut into parts, the one stored last
// puts them together (FUSED), or another launch does.
#include "hopper_clustered.cuh"
#include "hopper/forward/producer.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

constexpr float LAZY = 8.f;                               // in powers of two
constexpr bool TRANSFORMED = cfg::SOFTCAP || cfg::ALIBI;  // scores are scaled before the maximum is taken
// Rows after a sequence's last key hold anything.
constexpr bool RAGGED = (cfg::VARLEN || cfg::CACHE || cfg::PAGED) && !cfg::GATHER;

// ---------------------------------------------------------------------------------------------- the consumers

using Scores = float[BLOCK_N / 2];
using Probabilities = u32[BLOCK_N / 4];
using Output = float[COLUMNS_V / 2];

__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Which keys this thread's two rows (r and r + 8) may see, relative to its first column of block 0.
struct Limits {
    int first[2], end[2];
};

// Bias of ALiBi: −slope · |i + shift − j|, in powers of two; `position` is i + shift relative to the first column.
struct Slopes {
    int position[2];
    float slope[2];
};

struct RowStatistics {
    float max[2], sum[2];  // of the scores as they come; per lane
    __device__ __forceinline__ void reset() { max[0] = max[1] = -INF, sum[0] = sum[1] = 0.f; }
};

struct Consumer {
    const Params& p;
    const u32 base;
    const int number, warp, lane;  // warpgroup among the consumers; warp in it
    PipelineState<STAGES> stage;
    PipelineState<Q_STAGES> queries;
    Tile tile;                     // whose scores are made
    Sequence sequence;             // of that tile
    Limits limits;
    Slopes slopes;
    RowStatistics statistics;
    int stale = BLOCK_N;           // rows of the next values that may be used; the others hold anything
    u32 fragments[cfg::Q_IN_REGISTERS ? 4 * QK_STEPS : 1];
    Scores s;
    Probabilities probabilities;
    Output o;
    Tile joining{}, joining_next{};  // FUSED: whose parts are stored, but not yet counted
    int to_join = 0;

    __device__ __forceinline__ Consumer(const Params& params, u32 address, int warpgroup)
        : p(params), base(address), number(warpgroup), warp(threadIdx.x % WARPGROUP / WARP),
          lane(threadIdx.x % WARP), sequence(params, 0) {}

    // The first row of the tile that this warpgroup has. The block's place is read anew: registers are scarce.
    __device__ __forceinline__ int first_row() const {
        return (CLUSTER > 1 ? static_cast<int>(cluster_rank()) * BLOCK_ROWS : 0) + number * 64;
    }
    // Row of the tile of this thread's rows (0 and 1).
    __device__ __forceinline__ int row_of(int half) const { return first_row() + warp * 16 + lane / 4 + 8 * half; }
    __device__ __forceinline__ float scale() const { return TRANSFORMED ? 1.f : p.scale_log2; }

    // ---- barriers

    __device__ __forceinline__ u32 barrier(u32 which) const { return base + which + 8 * stage.index; }
    __device__ __forceinline__ void wait_stage() const {
        mbarrier_wait(barrier(K_FULL), stage.phase);
        if (!cfg::ONE_BARRIER) mbarrier_wait(barrier(V_FULL), stage.phase);
        if (cfg::GATHER) fence_proxy_async();  // cp.async wrote it
    }
    __device__ __forceinline__ void release_keys() const {
        if (!cfg::ONE_BARRIER) mbarrier_arrive_warp(barrier(K_EMPTY), lane);
    }
    __device__ __forceinline__ void release_stage() {
        mbarrier_arrive_warp(barrier(V_EMPTY), lane);
        stage.advance();
    }
    __device__ __forceinline__ void release_queries() {
        __syncwarp();
        mbarrier_arrive_warp(base + Q_EMPTY + 8 * queries.index, lane);
        queries.advance();
    }
    // Consumers issue their products in turn.
    __device__ __forceinline__ void pingpong_wait() const {
        if (cfg::PINGPONG) named_barrier_sync(TURN + number, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void pingpong_arrive() const {
        if (cfg::PINGPONG) named_barrier_arrive(TURN + (number + 1 == CONSUMERS ? 0 : number + 1), 2 * WARPGROUP);
    }

    // ---- products

    __device__ __forceinline__ void gemm_qk() {
        // Read anew, or ptxas computes a tile's descriptors once and keeps them where wgmma cannot take them from.
        const u32 from = cfg::FUSED ? uniform(base) : base;
        const u64 k = wgmma_k_inner(from + RING + stage.index * STAGE_BYTES);
        const u64 q = wgmma_k_inner(from + queries.index * Q_BYTES + number * 64 * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < QK_STEPS; ++i) {
            const u64 k_step = k + (i / 4 * KV_CHUNK + i % 4 * 32) / 16;
            if constexpr (cfg::Q_IN_REGISTERS) {
                Wgmma<BLOCK_N>::rs(s, &fragments[4 * i], k_step, i != 0);
            } else {
                Wgmma<BLOCK_N>::ss(s, q + (i / 4 * Q_CHUNK + i % 4 * 32) / 16, k_step, i != 0);
            }
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void gemm_pv() {
        const u64 v = wgmma_n_inner(base + RING + K_BYTES + stage.index * STAGE_BYTES, KV_CHUNK);
#pragma unroll
        for (int i = 0; i < PV_STEPS; ++i)
            Wgmma<COLUMNS_V>::rs_mn(o, &probabilities[4 * i], v + i * (16 * ROW_BYTES / 16), true);
        wgmma_commit();
    }

    __device__ __forceinline__ void load_fragments() {
        if constexpr (cfg::Q_IN_REGISTERS) {
            const int row = number * 64 + warp * 16 + lane % 16;
            const u32 at = base + queries.index * Q_BYTES;
#pragma unroll
            for (int i = 0; i < QK_STEPS; ++i) {
                const int piece = i % 4 * 2 + lane / 16;  // of 16 bytes
                u32 (&fragment)[4] = *reinterpret_cast<u32(*)[4]>(&fragments[4 * i]);
                ldmatrix_x4(fragment, at + i / 4 * Q_CHUNK + row * ROW_BYTES + ((piece ^ (row % 8)) << 4));
            }
            release_queries();
        }
    }

    // P·V adds 0 · value for keys that do not exist: their values must be numbers. Once for a tile that ends inside a
    // block; every consumer writes the same zeros.
    __device__ __forceinline__ void clear_stale_values() {
        if constexpr (RAGGED) {
            if (stale < BLOCK_N) {
                const u32 v = base + RING + K_BYTES + stage.index * STAGE_BYTES;
                const int pieces = (BLOCK_N - stale) * (ROW_BYTES / 16);
                for (int i = threadIdx.x % WARPGROUP; i < pieces * V_CHUNKS; i += WARPGROUP)
                    store_shared(v + i / pieces * KV_CHUNK + stale * ROW_BYTES + i % pieces * 16, make_uint4(0, 0, 0, 0));
                fence_proxy_async();
                named_barrier_sync(TOGETHER + number, WARPGROUP);
                stale = BLOCK_N;
            }
        }
    }

    // ---- softmax

    // Column i of this thread's scores, relative to its first one.
    static __device__ __forceinline__ constexpr int column(int i) { return 8 * (i / 4) + i % 2; }

    __device__ __forceinline__ void transform_scores(int block) {
        if constexpr (TRANSFORMED) {
            float position[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) position[half] = cfg::ALIBI ? slopes.position[half] - block * BLOCK_N : 0;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) {
                const int half = i / 2 % 2;
                if constexpr (cfg::SOFTCAP) {
                    // tanh(x) = 1 − 2 / (e^2x + 1); tanh.approx has an error of 2^-11, too much here.
                    s[i] = p.softcap_log2 - 2.f * p.softcap_log2 * reciprocal(1.f + ex2(s[i] * p.softcap_in));
                } else {
                    s[i] *= p.scale_log2;
                }
                if constexpr (cfg::ALIBI) s[i] -= slopes.slope[half] * fabsf(position[half] - column(i));
            }
        }
    }

    __device__ __forceinline__ void mask_scores(int block) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            const int half = i / 2 % 2, at = column(i) + block * BLOCK_N;
            if (at >= limits.end[half] || (cfg::HAS_LEFT && at < limits.first[half])) s[i] = -INF;
        }
    }

    // New row maxima. `alpha`: what O and the sums so far are multiplied by; `bias`: what the exponent adds.
    template <bool MASKED>
    __device__ __forceinline__ void take_maxima(float (&alpha)[2], float (&bias)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float even = s[2 * half], odd = s[2 * half + 1];
#pragma unroll
            for (int i = 4; i < BLOCK_N / 2; i += 4) {
                even = fmaxf(even, s[i + 2 * half]);
                odd = fmaxf(odd, s[i + 2 * half + 1]);
            }
            float& max = statistics.max[half];
            const float found = fmaxf(max, quad_max(fmaxf(even, odd)));
            const float growth = (max - found) * scale();  // at most 0; NaN where both are −∞
            bool keep = growth >= -LAZY;
            if (MASKED) keep = keep || found == -INF;
            alpha[half] = keep ? 1.f : ex2(growth);
            max = keep ? max : found;
            bias[half] = -max * scale();
            if (MASKED) bias[half] = max == -INF ? 0.f : bias[half];
        }
    }

    // S becomes P = 2^(S · scale + bias), not yet divided by its sum.
    __device__ __forceinline__ void exponentiate(const float (&alpha)[2], const float (&bias)[2]) {
        float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            const int half = i / 2 % 2;
            s[i] = ex2(TRANSFORMED ? s[i] + bias[half] : fmaf(s[i], p.scale_log2, bias[half]));
            sum[half][i % 2] += s[i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            statistics.sum[half] = fmaf(statistics.sum[half], alpha[half], sum[half][0] + sum[half][1]);
    }

    __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) probabilities[i] = Convert<Element>::pack(s[2 * i], s[2 * i + 1]);
    }

    __device__ __forceinline__ void rescale_output(const float (&alpha)[2]) {
        if (!__any_sync(0xffffffffu, alpha[0] != 1.f || alpha[1] != 1.f)) return;
#pragma unroll
        for (int i = 0; i < COLUMNS_V / 2; ++i) o[i] *= alpha[i / 2 % 2];
    }

    __device__ __forceinline__ void softmax_of_first(int block, bool masked) {
        float alpha[2], bias[2];
        statistics.reset();
        transform_scores(block);
        if (masked) mask_scores(block);
        take_maxima<true>(alpha, bias);
        exponentiate(alpha, bias);
    }

    // ---- steps of the stream

    // Steady state: S of this block and P·V of the one before, together.
    template <bool MASKED>
    __device__ __forceinline__ void step(int block) {
        float alpha[2], bias[2];
        wait_stage();
        clear_stale_values();
        pingpong_wait();
        wgmma_fence();
        gemm_qk();
        gemm_pv();
        pingpong_arrive();
        wgmma_wait<1>(s);
        release_keys();
        transform_scores(block);
        if (MASKED) mask_scores(block);
        take_maxima<MASKED>(alpha, bias);
        exponentiate(alpha, bias);
        // Complete since the step began. It ends the basic block, or ptxas moves the wait below above the exponentials.
        if (cfg::LATE_WAIT) mbarrier_wait(barrier(V_FULL), stage.phase);
        wgmma_wait<0>(o);
        release_stage();
        pack_probabilities();
        rescale_output(alpha);
    }

    // The first block after a pause: nothing to multiply the values with.
    __device__ __forceinline__ void first_step(int block, bool masked) {
        wait_stage();
        pingpong_wait();
        wgmma_fence();
        gemm_qk();
        pingpong_arrive();
        wgmma_wait<0>(s);
        release_keys();
        release_stage();
        softmax_of_first(block, masked);
        pack_probabilities();
        clear_output();
    }

    // From one tile to the next: S of its first block with the last P·V of the tile before, which is then stored.
    __device__ __forceinline__ void turn_over(const Tile& done, int block, bool masked) {
        float inverse[2];
        wait_stage();
        clear_stale_values();
        pingpong_wait();
        wgmma_fence();
        gemm_qk();
        gemm_pv();
        pingpong_arrive();
        finish_statistics(done, inverse);
        wgmma_wait<1>(s);
        release_keys();
        softmax_of_first(block, masked);
        wgmma_wait<0>(o);
        release_stage();
        pack_probabilities();
        store_output(done, inverse);
        clear_output();
    }

    // The last P·V of a tile when no block of this warpgroup's follows; or when its keys are for a step of their own.
    template <bool KEYS_TOO = false>
    __device__ __forceinline__ void last_step(const Tile& done) {
        float inverse[2];
        wait_stage();
        clear_stale_values();
        if (!KEYS_TOO) pingpong_wait();
        wgmma_fence();
        gemm_pv();
        if (!KEYS_TOO) pingpong_arrive();
        finish_statistics(done, inverse);
        wgmma_wait<0>(o);
        if (!KEYS_TOO) release_keys(), release_stage();
        store_output(done, inverse);
        join_later(done);
    }

    // A block that none of this warpgroup's rows sees.
    __device__ __forceinline__ void pass() {
        wait_stage();
        pingpong_wait();
        pingpong_arrive();
        release_keys();
        release_stage();
    }

    // ---- results

    using Out = cfg::Out;

    // Where the row of a tile goes, or null past the end of the sequence.
    __device__ __forceinline__ Out* out_row(const Tile& at, const Sequence& in, int half, float*& lse) const {
        const int row = at.row + row_of(half), query = row / PACK, head = head_of(at) * PACK + row % PACK;
        lse = p.lse + at.split * p.lse_split + in.q_batch * p.lse_batch + head * p.lse_head + in.q_first + query;
        if (query >= in.q_length) return nullptr;
        return static_cast<Out*>(p.out) + at.split * p.out_split + in.q_batch * p.out_batch +
               (in.q_first + query) * p.out_row + head * p.out_head + slice_of(at) * COLUMNS_V;
    }

    // Columns of a tile's slice; the last one may have fewer than the others.
    static __device__ __forceinline__ int columns_of(const Tile& tile) {
        return cfg::HEAD_DIM_V % COLUMNS_V == 0 ? COLUMNS_V : min(COLUMNS_V, cfg::HEAD_DIM_V - slice_of(tile) * COLUMNS_V);
    }
    // One slice writes the LSE, if it is wanted; of parts each does, and they write the same.
    __device__ __forceinline__ bool writes_lse(const Tile& tile) const {
        return lane % 4 == 0 && (cfg::SPLIT || (slice_of(tile) == 0 && p.lse != nullptr));
    }

    // LSE of a finished tile, and what its output is multiplied by.
    __device__ __forceinline__ void finish_statistics(const Tile& done, float (&inverse)[2]) {
        const Sequence in(p, done.batch);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(statistics.sum[half]);
            float total = sum > 0.f ? statistics.max[half] * scale() + __log2f(sum) : -INF;
            inverse[half] = sum > 0.f ? reciprocal(sum) : 0.f;
            float* lse;
            const bool exists = out_row(done, in, half, lse) != nullptr;
            if constexpr (cfg::SINKS && !cfg::SPLIT) {  // the parts' sink is added when they are combined
                const int head = head_of(done) * PACK + (done.row + row_of(half)) % PACK;
                const float sink = p.sinks[head] * LOG2_E, top = fmaxf(total, sink);
                if (top > -INF) {
                    const float all = top + __log2f(ex2(total - top) + ex2(sink - top));
                    inverse[half] *= ex2(total - all);
                    total = all;
                }
            }
            if (exists && writes_lse(done)) *lse = total * LN_2;
        }
    }

    __device__ __forceinline__ void store_output(const Tile& done, const float (&factor)[2]) {
        const Sequence in(p, done.batch);
        const int columns = columns_of(done);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* lse;
            Out* out = out_row(done, in, half, lse);
            if constexpr (is_same<Out, float>) {
                if (out == nullptr) continue;
#pragma unroll
                for (int n = 0; n < COLUMNS_V / 8; ++n)
                    if (8 * n < columns)
                        *reinterpret_cast<float2*>(out + 8 * n + lane % 4 * 2) =
                            make_float2(o[4 * n + 2 * half] * factor[half], o[4 * n + 2 * half + 1] * factor[half]);
            } else {
                // Groups of 8 columns are transposed in the quad, so that each lane stores 16 bytes.
#pragma unroll
                for (int n = 0; n < COLUMNS_V / 8; n += 4) {
                    u32 word[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int j = 4 * (n + i) + 2 * half;
                        word[i] = n + i < COLUMNS_V / 8
                                      ? Convert<Element>::pack(o[j] * factor[half], o[j + 1] * factor[half])
                                      : 0u;
                    }
                    transpose_quad(word);
                    const int column = (n + lane % 4) * 8;
                    if (out != nullptr && column < columns)
                        *reinterpret_cast<uint4*>(out + column) = make_uint4(word[0], word[1], word[2], word[3]);
                }
            }
        }
    }

    // Rows that see no key: zeros, and LSE −∞ (or the sink).
    __device__ __forceinline__ void store_nothing(const Tile& at) const {
        const Sequence in(p, at.batch);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* lse;
            Out* out = out_row(at, in, half, lse);
            if (out == nullptr) continue;
            for (int column = lane % 4 * 8; column < columns_of(at); column += 32)
#pragma unroll
                for (int i = 0; i < 8; i += 16 / sizeof(Out))
                    *reinterpret_cast<uint4*>(out + column + i) = make_uint4(0, 0, 0, 0);
            const bool sink = cfg::SINKS && !cfg::SPLIT && !(cfg::VARLEN && at.batch == p.batch);
            const int head = head_of(at) * PACK + (at.row + row_of(half)) % PACK;
            if (writes_lse(at)) *lse = sink ? p.sinks[head] : -INF;
        }
    }

    // ---- parts of a tile's keys that meet in the launch (FUSED)

    __device__ __forceinline__ void join_later(const Tile& stored) {
        if constexpr (cfg::FUSED) (to_join++ == 0 ? joining : joining_next) = stored;
    }

    // Nothing else is in the registers from here on: ptxas would keep it, as it does not know when a P is pending.
    __device__ __forceinline__ void forget() {
        clear_output();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) probabilities[i] = 0;
    }

    // The warpgroup that stores the last part of its rows puts them together.
    __device__ __forceinline__ void join_parts() {
        if constexpr (cfg::FUSED) {
#pragma unroll 1
            for (; to_join > 0; --to_join, joining = joining_next) {
                const Tile& tile = joining;
                const Blocks all = blocks_of(p, Sequence(p, tile.batch), tile.row, BLOCK_M);
                const int parts = ceil_div(all.high - all.low, part_size(p, all));  // that have blocks
                const int rows = ((tile.batch * p.heads + tile.head) * p.q_blocks + tile.row / BLOCK_M) * CONSUMERS + number;
                const bool last = arrive_last(p.join.tickets + rows, parts, TOGETHER + number, WARPGROUP,
                                              base + LAST + 4 * number, threadIdx.x % WARPGROUP == 0);
                if (uniform(last))
                    join_rows<CONSUMERS == 1 ? 16 : 8>(tile, parts);
            }
        }
    }

    template <int AHEAD>
    __device__ __forceinline__ void join_rows(const Tile& tile, int parts) const {
#pragma unroll 1
        for (int i = uniform(warp); i < 64; i += WARPS) {
            const int row = tile.row + first_row() + i, query = row / PACK, head = head_of(tile) * PACK + row % PACK;
            if (query >= p.seqlen_q) return;
            combine_row<COLUMNS_V, AHEAD>(p.join, parts, tile.batch, head, query, slice_of(tile) * COLUMNS_V,
                                          slice_of(tile) == 0);
        }
    }

    __device__ __forceinline__ void clear_output() {
#pragma unroll
        for (int i = 0; i < COLUMNS_V / 2; ++i) o[i] = 0.f;
    }

    // ---- the stream

    __device__ __forceinline__ Tile take_tile() {
        mbarrier_wait(base + Q_FULL + 8 * queries.index, queries.phase);
        int4 words;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "r"(base + TILES + static_cast<u32>(sizeof(Tile)) * queries.index)
                     : "memory");
        // Alike in the warp; see hopper_forward.
        return {uniform(words.x), uniform(words.y), uniform(words.z), uniform(words.w)};
    }

    __device__ __forceinline__ void take_limits() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile.row + row_of(half), query = row / PACK, first_column = 2 * (lane % 4);
            limits.end[half] = sequence.end_key(p, query) - first_column;
            limits.first[half] = sequence.first_key(p, query) - first_column;
            if constexpr (cfg::ALIBI) {
                const int head = head_of(tile) * PACK + row % PACK;
                slopes.position[half] = query + sequence.shift - first_column;
                slopes.slope[half] = p.alibi[tile.batch * p.alibi_batch + head] * LOG2_E;
            }
        }
    }

    __device__ __forceinline__ void run() {
        bool pending = false, started = false;  // the last P still waits for its values; a step was made
        Tile owed{};                            // whose P it is
        if (cfg::PINGPONG && number == CONSUMERS - 1) pingpong_arrive();
        while (true) {
            tile = take_tile();
            if (tile.batch < 0) {
                if (pending) {
                    last_step(owed);
                } else if (started) {
                    pass();
                }
                join_parts();
                return;
            }
            sequence = Sequence(p, tile.batch);
            const Blocks all = blocks_of(p, sequence, tile);
            Blocks mine = blocks_of(p, sequence, tile.row + first_row(), 64);
            mine.low = max(mine.low, all.low), mine.high = min(mine.high, all.high);
            if (cfg::FUSED && all.empty()) {
                release_queries();
                if (tile.split == 0) join_rows<1>(tile, 0);  // no part has blocks
                continue;
            }
            if (mine.empty()) mine = {all.low, all.low};
            const int values_end = sequence.k_length - (all.high - 1) * BLOCK_N;  // rows of the first values of the tile

            int block = all.high - 1;
            if (!all.empty()) started = true;
            for (; block >= mine.high; --block) {  // the last blocks, hidden from these rows
                if (pending) {
                    last_step(owed);
                    pending = false;
                } else {
                    pass();
                }
            }
            if constexpr (cfg::FUSED) {
                if (pending) last_step<true>(owed);
                pending = false;
                forget();
                join_parts();
            }
            if (mine.empty()) {
                release_queries();
                store_nothing(tile);
                join_later(tile);
                continue;
            }
            load_fragments();
            take_limits();
            const int first_query = (tile.row + first_row()) / PACK;
            const int last_query = min((tile.row + first_row() + 63) / PACK, sequence.q_length - 1);
            // Blocks that all rows see whole: full_low <= block < full_high.
            const int full_high = max(0, sequence.end_key(p, first_query)) / BLOCK_N;
            const int full_low = ceil_div(sequence.first_key(p, last_query), BLOCK_N);
            const bool masked = block >= full_high || block < full_low;
            if (!cfg::FUSED && pending) {
                turn_over(owed, block, masked);
            } else {
                first_step(block, masked);
            }
            if (RAGGED) stale = block == all.high - 1 ? min(BLOCK_N, values_end) : BLOCK_N;
            --block;
#pragma unroll 1
            for (; block >= mine.low && block >= full_high; --block) step<true>(block);
#pragma unroll 1
            for (; block >= mine.low && block >= full_low; --block) step<false>(block);
            if constexpr (cfg::HAS_LEFT) {
#pragma unroll 1
                for (; block >= mine.low; --block) step<true>(block);
            }
            if (!cfg::Q_IN_REGISTERS) release_queries();
            pending = true, owed = tile;
            for (; block >= all.low; --block) {  // the first blocks, hidden from these rows
                if (pending) {
                    last_step(owed);
                    pending = false;
                } else {
                    pass();
                }
            }
        }
    }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) hopper_forward(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory);
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the swizzle counts from there
        for (int i = 0; i < Q_STAGES; ++i) {
            mbarrier_init(base + Q_FULL + 8 * i, 1);
            mbarrier_init(base + Q_EMPTY + 8 * i, 4 * CONSUMERS * WARP_ARRIVALS);
        }
        constexpr int FILLING = cfg::GATHER ? WARPGROUP : 1;  // arrivals that say that a stage is full
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(base + K_FULL + 8 * i, FILLING);
            mbarrier_init(base + K_EMPTY + 8 * i, 4 * CONSUMERS * WARP_ARRIVALS);
            if (CLUSTER > 1) mbarrier_init(base + K_PEER + 8 * i, 1);
            if (cfg::ONE_BARRIER) continue;
            mbarrier_init(base + V_FULL + 8 * i, FILLING);
            mbarrier_init(base + V_EMPTY + 8 * i, 4 * CONSUMERS * WARP_ARRIVALS);
            if (CLUSTER > 1) mbarrier_init(base + V_PEER + 8 * i, 1);
        }
        if (CLUSTER > 1) mbarrier_init(base + NEXT_FULL, 1), mbarrier_init(base + NEXT_EMPTY, 1);
        fence_mbarrier_init();
        tma_prefetch(p.q);
        if (!cfg::GATHER) tma_prefetch(p.k), tma_prefetch(p.v);
    }
    if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
    // By shuffle, so that ptxas knows them to be alike in the warp and keeps descriptors in uniform registers.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (warp == 0 || cfg::GATHER) Producer{p, base, rank, warp}.run();
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        Consumer(p, base, warpgroup - 1).run();
    }
    if constexpr (CLUSTER > 1) {  // nobody leaves while the other block may still write to its shared memory
        __syncwarp();
        cluster_arrive(), cluster_wait();
    }
}
