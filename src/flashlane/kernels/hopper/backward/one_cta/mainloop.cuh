// A consumer warpgroup of the one-CTA backward: the loop over tiles, the steps of a tile, and the products of a step.
#pragma once
#include "attention/out_of_bounds.cuh"
#include "hopper/backward/one_cta/dq_registers.cuh"
#include "hopper/backward/one_cta/epilogue.cuh"
#include "hopper/backward/one_cta/slice_count.cuh"
#include "hopper/backward/one_cta/storage.cuh"
#include "hopper/backward/score_position.cuh"

struct Consumer {
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

    __device__ __forceinline__ Consumer(const Params& params, u32 address, int warpgroup)
        : p(params), base(address), number(warpgroup), warp(threadIdx.x % WARPGROUP / WARP),
          lane(threadIdx.x % WARP) {}

    // ---- the loops

    __device__ __forceinline__ void run() {
        // For the zeros of dq_accum; and of counters, where the producer has not waited for them.
        if (!Dq::TMA || FIRST_TILE_OWN) griddepcontrol_wait();
        // Consumer 0 is the first to issue.
        if (PING_PONG != PingPong::OFF && number == 1) named_barrier_arrive(PING_PONG_BARRIER, CONSUMERS * WARPGROUP);
        for (;; ++tiles) {
            const u32 stage = tiles % TILE_STAGES;
            wait<TILE_STAGES>(SMEM(tile_full), tiles);
            if (uniform(tile_coordinates(base, stage).batch) < 0) break;
            if (!PEELED) zero_accumulator(dk), zero_accumulator(dv);
            const int steps = uniform(tile_keys(base, stage).steps);
            if (steps > 0) {
                run_steps(steps);
            } else if (PEELED) {
                zero_accumulator(dk), zero_accumulator(dv);
            }
            const TileCoordinates at = tile_coordinates(base, stage);
            const WorkTile tile(p, at, BLOCK_N);
            wait_for_load(at.batch);
            __syncwarp();
            arrive(SMEM(tile_empty), stage);
            const int split = SPLIT_Q ? uniform(at.split()) : 0;
            if (UNDER_LAST_DQ && steps > 0 && split == 0) continue;
            if (SPLIT_Q && !combine_splits(p, split, number, dk, dv)) continue;
            if constexpr (STAGING == Staging::DQ_AND_DS) {
                wait_for_staged();
                stage_dv(tile, next_slice()), stage_dk(tile);
            } else if constexpr (STAGING != Staging::REGISTERS) {
                store_by_tma(tile);
            } else {
                store_keys_gradient<HEAD_DIM_V>(dv, tile, number, p.dv, p.dv_batch, p.dv_row, p.dv_head, 1.f);
                store_keys_gradient<HEAD_DIM>(dk, tile, number, p.dk, p.dk_batch, p.dk_row, p.dk_head, p.scale);
            }
        }
        if (PIPELINED_TILES && full_tiles() > 0) last_dq(), ++steps_done;
        if (STAGING != Staging::REGISTERS) wait_for_staged();
        if (!DQ_STORE_WARPS) return;
        const u32 stage = dq_stage(next_slice(), number);
        mbarrier_wait(barrier_of(SMEM(dq_empty), stage), next_slice() / DQ_STAGES % 2 ^ 1);
        arrive(SMEM(dq_full), stage);                     // NO_MORE, for the dQ-store warp
    }

    // ---- dK and dV by TMA

    // DQ_AND_DS: dV of a warp in its own fragment of dQ, and dK of two warps in each stage of dS, in this
    // consumer's half of it.
    __device__ __forceinline__ void stage_dv(const WorkTile& tile, u32 slice) const {
        const u32 stage = dq_stage(slice, number);
        mbarrier_wait(barrier_of(SMEM(dq_empty), stage), slice / DQ_STAGES % 2 ^ 1);
        stage_and_store<HEAD_DIM_V>(dv, tile, number * 64 + warp * 16, p.dv_map,
                                    SMEM_DQ + stage * SLICE_BYTES + warp * FRAGMENT_BYTES, 1.f);
    }
    __device__ __forceinline__ void stage_dk(const WorkTile& tile) const {
        wait<DS_STAGES>(SMEM(ds_empty), steps_done, 1);
        wait<DS_STAGES>(SMEM(ds_empty), steps_done + 1, 1);
        stage_and_store<HEAD_DIM>(dk, tile, number * 64 + warp * 16, p.dk_map,
                                  SMEM_TILE(ds) + warp / 2 * DS_BYTES + number * ROWS_CHUNK +
                                      warp % 2 * (QK_CHUNKS * STAGED_CHUNK),
                                  p.scale);
    }
    // The last dQ of a tile, under which dV is staged. Its fragment takes dQ when TMA has read dV, under which dK is
    // staged. Those of a split are not complete before all splits are.
    __device__ __forceinline__ void last_dq_and_stores() {
        const TileCoordinates at = tile_coordinates(base, tiles % TILE_STAGES);
        const WorkTile tile(p, at, BLOCK_N);
        const bool complete = !SPLIT_Q || uniform(at.split()) == 0;
        gemm_dq(SMEM_TILE(k));
        if (complete) stage_dv(tile, dq_slices());
        wait_for_dq<0>();
        arrive(SMEM(k_empty));
        arrive(SMEM(ds_empty), dq_slices() % DS_STAGES);
        if (complete) {
            stage_dk(tile);
            if (elect_one()) bulk_wait_read_but_last();   // dV
            __syncwarp();
        }
        leave_dq();
    }
    // A warp's rows. The copies run under the next tile, but for that of dV where dK takes its place.
    __device__ __forceinline__ void store_by_tma(const WorkTile& tile) const {
        const int row = number * 64 + warp * 16;
        if constexpr (STAGING == Staging::DS_AND_DQ) {
            // Two warps in each stage, in this consumer's half of it, when no dQ reads it any more.
            wait<DS_STAGES>(SMEM(ds_empty), next_slice(), 1);
            wait<DS_STAGES>(SMEM(ds_empty), next_slice() + 1, 1);
            wait_for_staged();
            stage_and_store<HEAD_DIM_V>(dv, tile, row, p.dv_map,
                                        SMEM_TILE(ds) + warp / 2 * DS_BYTES + number * ROWS_CHUNK +
                                            warp % 2 * (V_CHUNKS * STAGED_CHUNK),
                                        1.f);
            const u32 stage = dq_stage(next_slice(), number);
            mbarrier_wait(barrier_of(SMEM(dq_empty), stage), next_slice() / DQ_STAGES % 2 ^ 1);
            stage_and_store<HEAD_DIM>(dk, tile, row, p.dk_map, SMEM_DQ + stage * SLICE_BYTES + warp * FRAGMENT_BYTES,
                                      p.scale);
            return;
        }
        const u32 to = SMEM_STAGED + (number * 4 + warp) * STAGED_WARP_BYTES;
        if constexpr (STAGING == Staging::DS_AND_ROOM) {
            wait<DS_STAGES>(SMEM(ds_empty), next_slice(), 1);
            wait<DS_STAGES>(SMEM(ds_empty), next_slice() + 1, 1);
            wait_for_staged();
            const u32 of_ds =
                SMEM_TILE(ds) + warp / 2 * DS_BYTES + number * ROWS_CHUNK + warp % 2 * (3 * STAGED_CHUNK);
            stage_and_store<HEAD_DIM_V>(dv, tile, row, p.dv_map, of_ds, 1.f);
            stage_and_store<HEAD_DIM>(dk, tile, row, p.dk_map, of_ds + V_CHUNKS * STAGED_CHUNK, p.scale,
                                      to - (of_ds + V_CHUNKS * STAGED_CHUNK));
            return;
        }
        wait_for_staged();
        stage_and_store<HEAD_DIM_V>(dv, tile, row, p.dv_map, to, 1.f);
        if (STAGING == Staging::IN_TURN) wait_for_staged();
        const u32 to_k = STAGING == Staging::IN_TURN ? to : to + V_CHUNKS * STAGED_CHUNK;
        stage_and_store<HEAD_DIM>(dk, tile, row, p.dk_map, to_k, p.scale);
    }

    // ---- a tile

    __device__ __forceinline__ void run_steps(int steps) {
        if (!DP_FIRST) wait<K_STAGES>(SMEM(k_full), full_tiles());
        wait<V_STAGES>(SMEM(v_full), full_tiles());
        if constexpr (PEELED) {
            first_step();
            // Without it ptxas keeps five scores of D 128 in local memory in the loop, and with it two.
            fence_registers(dk), fence_registers(dv), fence_registers(s), fence_registers(dp), fence_registers(dq);
        } else {
            if (IN_DS) wait_for_staged_of_all();
            first_ds();
        }
#pragma unroll 1
        for (int i = PEELED; i < steps; ++i) {
            const bool of_last_tile = PIPELINED_TILES && i == 0 && full_tiles() > 0;  // the dQ of this step
            begin_step();
            ping_pong_wait();
            if constexpr (SKIPS_HIDDEN) {
                if (StepQueries::is_hidden(mask_word, number)) {
                    hidden_step(of_last_tile, i + 1 == steps);
                    continue;
                }
            }
            gemm_qk(number);
            gemm_dp(number);
            ping_pong_arrive(PingPong::UNTIL_ISSUED);
            read_semaphore();
            wgmma_wait<1>(s);
            make_probabilities();
            gemm_dv();
            wgmma_wait<1>(dp);
            ping_pong_arrive(PingPong::UNTIL_COMPLETE);
            if (EARLY_V_RELEASE && i + 1 == steps) arrive(SMEM(v_empty));
            make_ds();
            gemm_dq(SMEM_TILE(k) + (full_tiles() - of_last_tile) % K_STAGES * K_BYTES);
            gemm_dk();
            publish_ds(ds_slice());                       // here, as its fence waits for the stores of dS
            wgmma_wait<2>(dv);
            arrive(SMEM(do_empty), do_stage());
            wait_for_dq<1>();
            if (of_last_tile) arrive(SMEM(k_empty), (full_tiles() - 1) % K_STAGES);
            store_dq();
            if (of_last_tile) count_tile_added();
            wgmma_wait<0>(dk);
            arrive(SMEM(q_empty), q_stage());
            ++steps_done;
        }
        if (!EARLY_V_RELEASE) arrive(SMEM(v_empty), full_tiles() % V_STAGES);
        count.tile_done();
        if constexpr (UNDER_LAST_DQ) {
            last_dq_and_stores();
        } else {
            if (!PIPELINED_TILES) last_dq();
        }
    }

    // PEELED: the first step of a tile. A template, as products of a first step are made where there is one only.
    template <int = 0>
    __device__ __forceinline__ void first_step() {
        ping_pong_wait();
        begin_step();
        // Read here, so that the compiler keeps no address of this step for the loop, which would be longer.
        const int consumer = uniform(warpgroup_of_thread() - 1);
        if constexpr (DP_FIRST) {
            gemm_dp(consumer);
            wait<K_STAGES>(SMEM(k_full), full_tiles());
            gemm_qk(consumer);
        } else {
            gemm_qk(consumer);
            gemm_dp(consumer);
        }
        ping_pong_arrive(PingPong::UNTIL_ISSUED);
        wgmma_wait<DP_FIRST ? 0 : 1>(s);
        if (DP_FIRST) ping_pong_arrive(PingPong::UNTIL_COMPLETE);
        make_probabilities();
        gemm_rs<HEAD_DIM_V, BLOCK_M, true>(dv, probabilities, do_tile());
        wgmma_wait<1>(dp);
        if (!DP_FIRST) ping_pong_arrive(PingPong::UNTIL_COMPLETE);
        if (IN_DS) wait_for_staged_of_all();
        make_ds();
        wgmma_wait<0>(dv);
        arrive(SMEM(do_empty), do_stage());
        gemm_rs<HEAD_DIM, BLOCK_M, true>(dk, ds, q_tile());
        publish_ds(ds_slice());
        wgmma_wait<0>(dk);
        arrive(SMEM(q_empty), q_stage());
        ++steps_done;
    }
    // Until TMA has read what all warps of this consumer staged.
    __device__ __forceinline__ void wait_for_staged_of_all() const {
        wait_for_staged();
        named_barrier_sync(WARPGROUP_BARRIER + number, WARPGROUP);
    }

    // SKIPS_HIDDEN: a step of which this consumer's keys are hidden. Its dS is zeros, and its only product is the dQ of
    // the step before.
    __device__ __forceinline__ void hidden_step(bool of_last_tile, bool last) {
        if (PING_PONG != PingPong::OFF) ping_pong_arrive(PING_PONG);
        wait<DO_STAGES>(SMEM(do_full), steps_done);
        if (EARLY_V_RELEASE && last) arrive(SMEM(v_empty));
        read_semaphore();
        zero_ds(dq_slices() + 1);
        arrive(SMEM(do_empty), do_stage());
        gemm_dq(SMEM_TILE(k) + (full_tiles() - of_last_tile) % K_STAGES * K_BYTES);
        publish_ds(dq_slices() + 1);
        wait_for_dq<0>();
        if (of_last_tile) arrive(SMEM(k_empty), (full_tiles() - 1) % K_STAGES);
        store_dq();
        if (of_last_tile) count_tile_added();
        arrive(SMEM(q_empty), q_stage());
        ++steps_done;
    }

    // dS before the first step is that of no m-block: zeros, so that the loop has no special first step.
    __device__ __forceinline__ void first_ds() {
        if (PIPELINED_TILES && full_tiles() > 0) return;  // it is that of the last tile
        zero_ds(dq_slices());
        publish_ds(dq_slices());
    }
    __device__ __forceinline__ void zero_ds(u32 slice) const {
        wait<DS_STAGES>(SMEM(ds_empty), slice, 1);
        const u32 zeros = SMEM_TILE(ds) + slice % DS_STAGES * DS_BYTES + number * ROWS_CHUNK;
        for (int i = threadIdx.x % WARPGROUP; i < BLOCK_M * ROW_BYTES / 16; i += WARPGROUP)
            store_shared(zeros + i * 16, make_uint4(0, 0, 0, 0));
    }
    // dQ of the last step, after which the tile's K is released.
    __device__ __forceinline__ void last_dq() {
        const u32 tile = full_tiles() - (PIPELINED_TILES || PEELED);
        read_semaphore();
        gemm_dq(SMEM_TILE(k) + tile % K_STAGES * K_BYTES);
        wait_for_dq<0>();
        arrive(SMEM(k_empty), tile % K_STAGES);
        store_dq();
        count_tile_added();
    }

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
