// What a step of a consumer warpgroup of the one-CTA backward is made of: products, and what becomes of their results.
#pragma once
#include "attention/out_of_bounds.cuh"
#include "hopper/backward/one_cta/dq_registers.cuh"
#include "hopper/backward/one_cta/slice_count.cuh"
#include "hopper/backward/one_cta/storage.cuh"
#include "hopper/backward/score_position.cuh"

struct ConsumerStep {
    const Params& p;
    const u32 base;
    const int number, warp, lane;
    // The stage and phase of every pipeline follow from the counts of tiles, of steps, of tiles with steps and of
    // slices of dQ. dS of a step is that of slice `ds_slice()`; the dQ product of the same step reads dS of slice
    // `dq_slices()`.
    u32 tiles = 0, steps_done = 0;
    SliceCount<PIPELINED_TILES, PEELED> count;
    int mask_word;                                        // of the step
    int next_n_block;                                     // additions from registers in order: whose is next, as read
    float s[BLOCK_M / 2], dp[BLOCK_M / 2], dq[SLICE_ROWS / 2];
    float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];
    u32 probabilities[BLOCK_M / 4], ds[BLOCK_M / 4];
    float dq_rest[REST_COLUMNS / 2];                      // MIXED_DQ: of consumer 1, in place of dq
    u32 derivatives[Score::HAS_DERIVATIVE ? BLOCK_M / 4 : 1];  // of the scores' transform, in halves

    __device__ __forceinline__ ConsumerStep(const Params& params, u32 address, int warpgroup)
        : p(params), base(address), number(warpgroup), warp(threadIdx.x % WARPGROUP / WARP),
          lane(threadIdx.x % WARP) {}

    // ---- pipeline states, from the counts

    __device__ __forceinline__ u32 dq_slices() const { return count.slices(steps_done); }
    // The slice of this step's dS. PEELED: there are as many slices as steps.
    __device__ __forceinline__ u32 ds_slice() const { return PEELED ? steps_done : dq_slices() + 1; }
    // Between tiles: the slice of dQ that is stored next.
    __device__ __forceinline__ u32 next_slice() const { return PEELED ? steps_done : dq_slices(); }
    // Tiles with steps before this one. Not valid between the store of a step's dQ and the step's end.
    __device__ __forceinline__ u32 full_tiles() const { return count.tiles(steps_done); }
    __device__ __forceinline__ u32 q_stage() const { return steps_done % Q_STAGES; }
    __device__ __forceinline__ u32 do_stage() const { return steps_done % DO_STAGES; }
    __device__ __forceinline__ u32 k_tile() const { return SMEM_TILE(k) + full_tiles() % K_STAGES * K_BYTES; }
    __device__ __forceinline__ u32 v_tile() const { return SMEM_TILE(v) + full_tiles() % V_STAGES * V_BYTES; }
    __device__ __forceinline__ u32 q_tile() const { return SMEM_TILE(q) + q_stage() * Q_BYTES; }
    __device__ __forceinline__ u32 do_tile() const { return SMEM_TILE(dout) + do_stage() * DO_BYTES; }

    template <int STAGES>
    __device__ __forceinline__ void wait(u32 barriers, u32 count, u32 flip = 0) const {
        mbarrier_wait(barrier_of(barriers, count % STAGES), count / STAGES % 2 ^ flip);
    }
    __device__ __forceinline__ void arrive(u32 barriers, u32 stage = 0) const {
        mbarrier_arrive_warp(barrier_of(barriers, stage), lane);
    }

    // ---- ping-pong scheduling

    __device__ __forceinline__ void ping_pong_wait() const {
        if (PING_PONG != PingPong::OFF) named_barrier_sync(PING_PONG_BARRIER + number, CONSUMERS * WARPGROUP);
    }
    __device__ __forceinline__ void ping_pong_arrive(PingPong until) const {
        if (PING_PONG == until) named_barrier_arrive(PING_PONG_BARRIER + 1 - number, CONSUMERS * WARPGROUP);
    }

    // ---- products

    // Waits for Q of the step, and reads what its mask is.
    __device__ __forceinline__ void begin_step() {
        wait<Q_STAGES>(SMEM(q_full), steps_done);
        // Read here, where the product hides its latency. It is the same in all lanes, and ptxas is told so.
        const StepQueries step = step_queries(base, q_stage());
        mask_word = uniform(step.mask_word);
        if (ZEROES_QUERIES) zero_out_of_bounds_queries(uniform(step.rows));
    }
    // The operands of the step along k that subtracts a statistic.
    __device__ __forceinline__ LastStep<STATISTICS_IN_PRODUCTS> subtracted(Statistic which) const {
        return {SMEM_SELECTORS + which * SELECTOR_BYTES, SMEM_LSE + q_stage() * LSE_BYTES};
    }
    // Sᵀ = K·Qᵀ
    __device__ __forceinline__ void gemm_qk(int consumer) {
        gemm_ss<BLOCK_M, QK_STEPS, KEYS_CHUNK, ROWS_CHUNK>(s, k_tile() + consumer * 64 * ROW_BYTES, q_tile(),
                                                           subtracted(STATISTIC_LSE));
    }
    // dPᵀ = V·dOᵀ
    __device__ __forceinline__ void gemm_dp(int consumer) {
        wait<DO_STAGES>(SMEM(do_full), steps_done);
        gemm_ss<BLOCK_M, V_STEPS, KEYS_CHUNK, ROWS_CHUNK>(dp, v_tile() + consumer * 64 * ROW_BYTES, do_tile(),
                                                          subtracted(STATISTIC_DELTA));
    }
    // dV += Pᵀ·dO, dK += dSᵀ·Q
    __device__ __forceinline__ void gemm_dv() { gemm_rs<HEAD_DIM_V, BLOCK_M>(dv, probabilities, do_tile()); }
    __device__ __forceinline__ void gemm_dk() { gemm_rs<HEAD_DIM, BLOCK_M>(dk, ds, q_tile()); }
    // dQᵀ = Kᵀ·dSᵀ of the m-block before: m are columns of dQ, n queries, k all keys of the tile.
    // MIXED_DQ: of consumer 1 it is dQ = dS·K of the columns from 64 on, of which dQᵀ would fill 8 to 32 of 64 rows.
    __device__ __forceinline__ void gemm_dq(u32 keys) {
        wait<DS_STAGES>(SMEM(ds_full), dq_slices());
        if constexpr (MIXED_DQ) {
            if (number == 1) {
                gemm_ss_mn<REST_COLUMNS, BLOCK_N, ROWS_CHUNK, KEYS_CHUNK>(
                    dq_rest, SMEM_TILE(ds) + dq_slices() % DS_STAGES * DS_BYTES, keys + KEYS_CHUNK);
                return;
            }
        }
        const u64 a = wgmma_n_inner(keys + (SPLIT_COLUMNS ? number * KEYS_CHUNK : 0), KEYS_CHUNK);
        const u64 b = opaque(wgmma_k_inner(SMEM_TILE(ds) + dq_slices() % DS_STAGES * DS_BYTES +
                                           (SPLIT_COLUMNS ? 0 : number * SLICE_ROWS * ROW_BYTES)));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; ++i) {
            const u64 a_step = a + i * (16 * ROW_BYTES / 16), b_step = b + (i / 4 * ROWS_CHUNK + i % 4 * 32) / 16;
            if (i == 0) {
                Wgmma<SLICE_ROWS>::ss_mt_first(dq, a_step, b_step);
            } else {
                Wgmma<SLICE_ROWS>::ss_mt(dq, a_step, b_step);
            }
        }
        wgmma_commit();
    }

    // dQ is complete, and PENDING later groups may be in flight.
    template <int PENDING>
    __device__ __forceinline__ void wait_for_dq() {
        if (MIXED_DQ && number == 1) {
            wgmma_wait<PENDING>(dq_rest);
        } else {
            wgmma_wait<PENDING>(dq);
        }
    }

    // ---- S to P, dP to dS. Rows of the transposed scores are keys, columns queries.

    __device__ __forceinline__ ScorePosition position() const {
        const StepQueries step = step_queries(base, q_stage());
        const TileKeys keys = tile_keys(base, tiles % TILE_STAGES);
        const TileMask mask{keys.length, keys.shift, p.window_left, p.window_right};
        return ScorePosition(mask, keys.first + number * 64, step.first);
    }

    // By a program. P becomes P times the derivative of the score when it is packed for dV, so that the derivative
    // needs no registers. Hidden pairs are zeroed in both.
    __device__ __forceinline__ void make_probabilities_by_program() {
        const u32 lse = SMEM_LSE + q_stage() * LSE_BYTES + lane % 4 * 8;
        const int batch = tile_coordinates(base, tiles % TILE_STAGES).batch, head = step_queries(base, q_stage()).head;
        const ScorePosition at = position();
        const PairProgram pairs(p.program, p.score.scale_log2 * LN_2, batch, head);
        const float first = program::float_of_position(at.key - at.query);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 row = load_shared_float2(lse + i / 4 * 32);
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                float derivative[2];
                const int query = at.query + accumulator_column(j), key = at.key + 8 * (j / 2 % 2);
                const program::Distance distance{first, static_cast<float>(8 * (j / 2 % 2) - accumulator_column(j))};
                s[j] = pairs.probability(s[j], row.x, query, key, distance, derivative[0]);
                s[j + 1] = pairs.probability(s[j + 1], row.y, query + 1, key, {distance.first, distance.rest - 1.f},
                                             derivative[1]);
                probabilities[j / 2] = Convert<Element>::pack(s[j], s[j + 1]);
                if constexpr (Program::HAS_DERIVATIVE) s[j] *= derivative[0], s[j + 1] *= derivative[1];
            }
        }
        const int state = cfg::BLOCK_LISTS ? ListedBlock{mask_word}.state(number)
                                           : mask_word ? BLOCK_PARTIAL : BLOCK_FULL;
        if (state == BLOCK_FULL) return;
        if constexpr (cfg::MASK_BITS) {
            u32 words[2][2 * MASK_UNITS] = {};
            if (state == BLOCK_PARTIAL) words_from_bits(words, mask_bits(batch, head).of, lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; ++i)
                if (!visible_by_bits(words, i)) hide(i);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; ++i) {
                const int query = at.query + accumulator_column(i), key = at.key + 8 * (i / 2 % 2);
                bool seen = state == BLOCK_PARTIAL && key >= at.mask.first(query) && key < at.mask.end(query);
                if constexpr (Program::HAS_MASK) seen = seen && Program::visible(p.program, batch, head, query, key);
                if (!seen) hide(i);
            }
        }
    }
    __device__ __forceinline__ void hide(int i) { s[i] = 0.f, probabilities[i / 2] &= i % 2 ? 0xffffu : 0xffff0000u; }
    // Of this thread's two keys and the m-block's queries.
    struct KeyBits {
        uint2 of[2][MASK_UNITS];
    };
    __device__ __forceinline__ KeyBits mask_bits(int batch, int head) const {
        const MaskBits& bits = p.lists.bits;
        const int key_unit = tile_keys(base, tiles % TILE_STAGES).first / UNIT + number;
        const int query_unit = step_queries(base, q_stage()).first / UNIT,
                  row = warpgroup_thread() / WARP * 16 + lane / 4;
        KeyBits found;
#pragma unroll
        for (int unit = 0; unit < MASK_UNITS; ++unit) {
            const int slot = bits.slot(batch, head, query_unit + unit, key_unit);
            found.of[0][unit] = bits.row(slot, row), found.of[1][unit] = bits.row(slot, row + 8);
        }
        return found;
    }

    __device__ __forceinline__ void make_probabilities() {
        if constexpr (BY_PROGRAM) {
            make_probabilities_by_program();
            return;
        }
        const u32 lse = SMEM_LSE + q_stage() * LSE_BYTES + lane % 4 * 8;
        if constexpr (Score::TRANSFORMED) {
            const int batch = tile_coordinates(base, tiles % TILE_STAGES).batch;
            transform_scores_transposed(p.score, position().distance(),
                                        Score::slope(p.score, batch, step_queries(base, q_stage()).head), s,
                                        derivatives);
        }
        if (mask_word) {
            const ScorePosition at = position();
            mask_scores_transposed(s, at.mask, at.key, at.query);
        }
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 row = load_statistic(lse + i / 4 * 32);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float minus = j % 2 ? row.y : row.x, x = s[i + j], scale = p.score.scale_log2;
                s[i + j] = ex2(Score::TRANSFORMED       ? x + minus
                               : STATISTICS_IN_PRODUCTS ? x * scale
                                                        : fmaf(x, scale, minus));
            }
            probabilities[i / 2] = Convert<Element>::pack(s[i], s[i + 1]);
            probabilities[i / 2 + 1] = Convert<Element>::pack(s[i + 2], s[i + 3]);
        }
    }

    // dS = P·(dP − delta), also to shared memory.
    __device__ __forceinline__ void make_ds() {
        const u32 delta = SMEM_DELTA + do_stage() * DELTA_BYTES + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 row = load_statistic(delta + i / 4 * 32);
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                float low = s[j] * (dp[j] - row.x), high = s[j + 1] * (dp[j + 1] - row.y);
                if constexpr (Score::HAS_DERIVATIVE) {
                    const float2 derivative = unpack_half2(derivatives[j / 2]);
                    low *= derivative.x, high *= derivative.y;
                }
                ds[j / 2] = Convert<Element>::pack(low, high);
            }
        }
        wait<DS_STAGES>(SMEM(ds_empty), ds_slice(), 1);
        // Transposed on its way: a row is a query, and a chunk of columns the keys of one consumer.
        const int row = lane / 16 * 8 + lane % 8, vector = (2 * warp + lane / 8 % 2) ^ (lane % 8);
        const u32 to = SMEM_TILE(ds) + ds_slice() % DS_STAGES * DS_BYTES + number * ROWS_CHUNK +
                       row * ROW_BYTES + vector * 16;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i)
            stmatrix_x4_trans(to + i * 16 * ROW_BYTES, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    }
    __device__ __forceinline__ void publish_ds(u32 slice) const {
        fence_proxy_async();
        __syncwarp();
        arrive(SMEM(ds_full), slice % DS_STAGES);
    }

    // ---- dQ: to dq_accum, or to where the dQ-store warp takes it from

    __device__ __forceinline__ void store_dq() {
        arrive(SMEM(ds_empty), dq_slices() % DS_STAGES);
        leave_dq();
    }
    __device__ __forceinline__ void leave_dq() {
        const int thread = warpgroup_thread();
        if constexpr (Dq::TMA) {
            const u32 stage = dq_stage(dq_slices(), number);
            mbarrier_wait(barrier_of(SMEM(dq_empty), stage), dq_slices() / DQ_STAGES % 2 ^ 1);
            const u32 to = SMEM_DQ + stage * SLICE_BYTES + thread / WARP * FRAGMENT_BYTES + thread % WARP * 16;
#pragma unroll
            for (int i = 0; i < SLICE_ROWS / 8; ++i)
                store_shared(to + i * 512, make_uint4(__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                                      __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])));
            fence_proxy_async();
            __syncwarp();
            arrive(SMEM(dq_full), stage);
        } else if constexpr (Dq::IN_ORDER) {
            add_slice_in_order(p, dq_target(base, dq_slices()), number, thread, next_n_block, dq, dq_rest);
            const u32 stage = dq_stage(dq_slices(), number);
            mbarrier_wait(barrier_of(SMEM(dq_empty), stage), dq_slices() / DQ_STAGES % 2 ^ 1);
            __syncwarp();
            arrive(SMEM(dq_full), stage);
        } else {
            const int m_block = load_shared(dq_target(base, dq_slices()));
            add_slice<false>(p, m_block, number, thread, dq, dq_rest);
        }
        count.slice_stored();
    }
    // Additions from registers in order: for that of the next dQ, some products before it is made.
    __device__ __forceinline__ void read_semaphore() {
        if constexpr (Dq::IN_ORDER && !Dq::TMA) {
            const int m_block = load_shared(dq_target(base, dq_slices()));
            if (m_block >= 0) next_n_block = next_to_add(p.semaphores, m_block, number);
        }
    }
    __device__ __forceinline__ void count_tile_added() const {
        if constexpr (IN_KERNEL_DQ) {
            __syncwarp();
            if (lane == 0) add_shared_release(SMEM(tiles_added), 1);
        }
    }

    // ---- out-of-bounds rows of a range of queries become zeros

    // QUERY_RANGES: rows past the first range's end are the second range's. They have no probabilities; and without a
    // left side they see all keys of the first range themselves, so that their NaN are in those sums anyway.
    static constexpr bool ZEROES_QUERIES = cfg::QUERY_RANGES && cfg::HAS_LEFT;
    // Of Q and dO at once, so that a step has one branch. Both consumers write the same zeros, each before its own
    // products.
    __device__ __forceinline__ void zero_out_of_bounds_queries(int rows) {
        if (rows >= BLOCK_M) return;
        wait<DO_STAGES>(SMEM(do_full), steps_done);
        zero_rows<QK_CHUNKS, BLOCK_M>(q_tile(), rows, threadIdx.x % WARPGROUP, WARPGROUP);
        zero_rows<V_CHUNKS, BLOCK_M>(do_tile(), rows, threadIdx.x % WARPGROUP, WARPGROUP);
        fence_proxy_async();
        named_barrier_sync(WARPGROUP_BARRIER + number, WARPGROUP);
    }
};
