// The two consumer warpgroups of the 2-CTA backward: one computes P and dV, the other dS and dK, and each a
// quarter of dQ.
#pragma once
#include "hopper/backward/two_cta/consumer.cuh"

struct DvConsumer : Consumer<0> {
    using Consumer<0>::Consumer;

    __device__ __forceinline__ void run() {
        run_tiles([&](int count) { run_tile(count); });
    }

    __device__ __forceinline__ void run_tile(int count) {
        float dv[HEAD_DIM_V / 2];
        if (count > 0) {
            KeyOperand<KQuarters> k;
            begin_steps(k, SMEM(k_full));
            run_step<true>(k, dv);
#pragma unroll 1
            while (--count > 0) run_step<false>(k, dv);
            end_steps();
        } else {
            zero_accumulator(dv);
        }
        if (!combine_splits<HEAD_DIM_V>(dv)) return;
        if constexpr (cfg::TMA_STORES) {
            store_by_tma<HEAD_DIM_V>(dv, p.dv_map, 1.f);
        } else {
            store_keys_gradient<HEAD_DIM_V>(dv, tile_rows(), p.dv, p.dv_batch, p.dv_row, p.dv_head, 1.f);
        }
    }

    template <bool FIRST>
    __device__ __forceinline__ void run_step(const KeyOperand<KQuarters>& k, float (&dv)[HEAD_DIM_V / 2]) {
        float s[BLOCK_M / 2];
        u32 probabilities[BLOCK_M / 4];
        const u32 q = q_tile(), dout = do_tile();
        wait_q();
        const StepRecord step = record_at<StepRecord>(SMEM(q_step) + STEP_RECORD_BYTES * (steps_done % Q_RECORDS));
        k.gemm(s, SMEM(k) + rank * KEYS_CHUNK, CTAS * KEYS_CHUNK, q, rank);                 // gemm_qk
        if constexpr (!FIRST) read_semaphore();
        wgmma_wait<0>(s);
        make_probabilities(s, probabilities, step);       // its arrival lets the other consumer release Q and LSE
        wait_do();
        if constexpr (FIRST) {
            gemm_rs<HEAD_DIM_V, BLOCK_M, true>(dv, probabilities, dout);                    // gemm_dv
        } else {
            gemm_dq();
            gemm_rs<HEAD_DIM_V, BLOCK_M>(dv, probabilities, dout);
            wgmma_wait<1>(dq);
            add_dq();
        }
        row_block_before = step.row_block;
        wgmma_wait<0>(dv);
        arrive_both(SMEM(do_empty), do_state().index);
        ++steps_done;
    }

    // This thread's first key and first query of a step. They are looked up at each use: registers that held
    // them would spill.
    __device__ __forceinline__ ScorePosition position(const StepRecord& step) const {
        const KeysRecord keys = keys_record(base, tiles);
        return ScorePosition(keys_mask(p, keys), keys.first, step.first);
    }

    // Turns the scores into P, for dV, and publishes P times the derivative of the score transform, from which the
    // other consumer makes dS.
    __device__ __forceinline__ void make_probabilities(float (&s)[BLOCK_M / 2], u32 (&probabilities)[BLOCK_M / 4],
                                                       const StepRecord& step) {
        const u32 lse = SMEM(lse) + q_state().index * STAT_BYTES + lane % 4 * 8;
        float inverse = 0.f, slope = 0.f, distance = 0.f;
        if constexpr (Score::HAS_DERIVATIVE) {
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; ++i) s[i] = Score::scaled(p.score, s[i]);
            inverse = Score::inverse_cap(p.score);
        }
        if (needs_mask(step)) {
            const ScorePosition at = position(step);
            mask_scores_transposed(s, at.mask, at.key, at.query);
        }
        if constexpr (Score::HAS_DISTANCE) {
            slope = Score::slope(p.score, owner_record(base, tiles).batch, step.head);
            distance = position(step).distance();
        }
        wait_free(ds_written());
        const u32 to = own_ds_rows();
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
            u32 weights[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int j = 8 * i + 2 * k;
                const float2 minus = load_shared_float2(lse + j / 4 * 32);
                float low = Score::HAS_DERIVATIVE ? s[j] + minus.x : fmaf(s[j], p.score.scale_log2, minus.x);
                float high = Score::HAS_DERIVATIVE ? s[j + 1] + minus.y : fmaf(s[j + 1], p.score.scale_log2, minus.y);
                const float from = distance - (k % 2 ? 8 : 0);
                low = Score::biased(low, slope, from + accumulator_column(j));
                high = Score::biased(high, slope, from + accumulator_column(j + 1));
                low = ex2(low), high = ex2(high);
                weights[k] = probabilities[j / 2] = Convert<Element>::pack(low, high);
                if constexpr (Score::HAS_DERIVATIVE)
                    weights[k] = Convert<Element>::pack(low * Score::derivative_of_capped(s[j], inverse),
                                                        high * Score::derivative_of_capped(s[j + 1], inverse));
            }
            stmatrix_x4_trans(to + i * 16 * ROW_BYTES, weights[0], weights[1], weights[2], weights[3]);
        }
        __syncwarp();
        arrive(SMEM(p_full), ds_written().index);
    }
};

struct DkConsumer : Consumer<1> {
    using Consumer<1>::Consumer;

    __device__ __forceinline__ void run() {
        run_tiles([&](int count) { run_tile(count); });
    }

    __device__ __forceinline__ void run_tile(int count) {
        float dk[HEAD_DIM / 2];
        if (count > 0) {
            KeyOperand<VQuarters> v;
            begin_steps(v, SMEM(v_full));
            run_step<true>(v, dk, count == 1);
#pragma unroll 1
            while (--count > 0) run_step<false>(v, dk, count == 1);
            end_steps();
        } else {
            zero_accumulator(dk);
        }
        if (!combine_splits<HEAD_DIM>(dk)) return;
        if constexpr (cfg::TMA_STORES) {
            store_by_tma<HEAD_DIM>(dk, p.dk_map, p.scale);
        } else {
            store_keys_gradient<HEAD_DIM>(dk, tile_rows(), p.dk, p.dk_batch, p.dk_row, p.dk_head, p.scale);
        }
    }

    template <bool FIRST>
    __device__ __forceinline__ void run_step(const KeyOperand<VQuarters>& v, float (&dk)[HEAD_DIM / 2], bool last) {
        float dp[BLOCK_M / 2];
        u32 ds[BLOCK_M / 4];
        const u32 q = q_tile(), dout = do_tile();
        wait_do();
        const StepRecord step = record_at<StepRecord>(SMEM(do_step) + STEP_RECORD_BYTES * (steps_done % DO_RECORDS));
        v.gemm(dp, SMEM(v), KEYS_CHUNK, dout, rank);                                        // gemm_dp
        if constexpr (!FIRST) read_semaphore();
        load_probabilities(ds);
        wgmma_wait<0>(dp);
        make_ds(dp, ds);
        if (last) arrive(SMEM(v_empty), 0);
        arrive_both(SMEM(do_empty), do_state().index);
        wait_q();
        if constexpr (FIRST) {
            gemm_rs<HEAD_DIM, BLOCK_M, true>(dk, ds, q);                                    // gemm_dk
            mbarrier_wait(SMEM(k_full), full_tiles % 2);  // for dQ
        } else {
            gemm_dq();
            gemm_rs<HEAD_DIM, BLOCK_M>(dk, ds, q);
            wgmma_wait<1>(dq);
            add_dq();
        }
        row_block_before = step.row_block;
        wgmma_wait<0>(dk);
        arrive_both(SMEM(q_empty), q_state().index);
        ++steps_done;
    }
    __device__ __forceinline__ void load_probabilities(u32 (&words)[BLOCK_M / 4]) const {
        mbarrier_wait(barrier_of(SMEM(p_full), ds_written().index), ds_written().phase);
        const u32 from = own_ds_rows();
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i)
            ldmatrix_x4_trans(reinterpret_cast<u32(&)[4]>(words[4 * i]), from + i * 16 * ROW_BYTES);
    }
    // dS = P·(dP − delta) replaces P in shared memory, from where it is copied to the peer CTA.
    __device__ __forceinline__ void make_ds(const float (&dp)[BLOCK_M / 2], u32 (&ds)[BLOCK_M / 4]) {
        const u32 delta = SMEM(delta) + do_state().index * STAT_BYTES + lane % 4 * 8, tile = own_ds_rows();
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int j = 8 * i + 2 * k;
                const float2 row = load_shared_float2(delta + j / 4 * 32);
                const float2 weight = unpack<Element>(ds[j / 2]);
                ds[j / 2] = Convert<Element>::pack(weight.x * (dp[j] - row.x), weight.y * (dp[j + 1] - row.y));
            }
            stmatrix_x4_trans(tile + i * 16 * ROW_BYTES, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
        }
        send_ds();
    }
    // Copies this CTA's tile of dS to the peer CTA. The stage is full when the peer CTA's tile has arrived here, too.
    __device__ __forceinline__ void send_ds() {
        fence_proxy_async();
        named_barrier_sync(WARPGROUP_BARRIER + 1, WARPGROUP);
        if (warp == 0 && elect_one()) {
            const u32 full = barrier_of(SMEM(ds_full), ds_written().index), peer = 1 - rank;
            mbarrier_expect_tx_before_copies(full, ROWS_CHUNK);
            bulk_copy(address_in(own_ds_tile(), peer), own_ds_tile(), ROWS_CHUNK, address_in(full, peer));
            mbarrier_arrive_after_copies(full);
        }
        __syncwarp();
    }
};
