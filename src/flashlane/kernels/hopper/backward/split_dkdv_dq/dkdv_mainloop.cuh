// The consumer warpgroups of the dK and dV kernel: the first computes P and dV, the second dS and dK.
#pragma once
#include "hopper/backward/score_position.cuh"
#include "hopper/backward/split_dkdv_dq/dkdv_storage.cuh"

// What both consumers do: they step through the same stages.
struct Consumer {
    const Params& p;
    const u32 base;
    const WorkTile& tile;
    const int lane;
    PipelineState<Q_STAGES> q;
    PipelineState<DO_STAGES> dout;
    PipelineState<P_STAGES> p_stage;
    Step step;

    __device__ __forceinline__ Consumer(const Params& params, u32 address, const WorkTile& of)
        : p(params), base(address), tile(of), lane(threadIdx.x % WARP), step(of) {}

    __device__ __forceinline__ void arrive(u32 barriers, int stage) const {
        mbarrier_arrive_warp(barrier_of(barriers, stage), lane);
    }
    __device__ __forceinline__ u32 q_tile() const { return SMEM(q) + q.index * Q_BYTES; }
    __device__ __forceinline__ u32 do_tile() const { return SMEM(dout) + dout.index * DO_BYTES; }
    // This thread's vectors of P.
    __device__ __forceinline__ u32 p_vectors() const {
        return SMEM(p) + p_stage.index * P_BYTES + threadIdx.x % WARPGROUP * 16;
    }
    __device__ __forceinline__ void wait_q() const { mbarrier_wait(barrier_of(SMEM(q_full), q.index), q.phase); }
    __device__ __forceinline__ void wait_do() const {
        mbarrier_wait(barrier_of(SMEM(do_full), dout.index), dout.phase);
    }
    __device__ __forceinline__ void next() { q.advance(), dout.advance(), p_stage.advance(), step.next(); }

    __device__ __forceinline__ void wait_keys() const {
        mbarrier_wait(SMEM(k_full), 0), mbarrier_wait(SMEM(v_full), 0);
    }

    template <int DIM>
    __device__ __forceinline__ void store(const float (&d)[DIM / 2], void* to, long long batch, long long row,
                                          long long head, float factor) const {
        DkdvElement* const first = static_cast<DkdvElement*>(to) + tile.seqlen.k_batch * batch +
                                   (tile.seqlen.k_first + tile.first_key) * row + tile.kv_head * head;
        store_accumulator<DIM>(d, first, row, tile.seqlen.k_length - tile.first_key, factor);
    }
};

struct DvConsumer : Consumer {
    float s[BLOCK_M / 2], dv[HEAD_DIM_V / 2];
    u32 probabilities[BLOCK_M / 4];
    u32 derivatives[Score::HAS_DERIVATIVE ? BLOCK_M / 4 : 1];  // of the score transform

    using Consumer::Consumer;

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 2; ++i) dv[i] = 0.f;
        const int steps = tile.steps();
        if (steps > 0) wait_keys();
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            gemm_qk();
            wgmma_wait<0>(s);
            make_probabilities();
            publish_probabilities();
            gemm_dv();
            arrive(SMEM(q_empty), q.index);
            wgmma_wait<0>(dv);
            arrive(SMEM(do_empty), dout.index);
            next();
        }
        store<HEAD_DIM_V>(dv, p.dv, p.dv_batch, p.dv_row, p.dv_head, P_INVERSE);
    }

    __device__ __forceinline__ void gemm_qk() {
        wait_q();
        gemm_ss<BLOCK_M, QK_STEPS, KEYS_CHUNK, ROWS_CHUNK>(s, SMEM(k), q_tile());
    }
    __device__ __forceinline__ void gemm_dv() {
        wait_do();
        gemm_rs<HEAD_DIM_V, BLOCK_M>(dv, probabilities, do_tile());
    }

    __device__ __forceinline__ ScorePosition position() const {
        return ScorePosition(tile.mask(p), tile.first_key, step.m_block * BLOCK_M);
    }
    __device__ __forceinline__ void make_probabilities() {
        const u32 lse = SMEM(lse) + q.index * STAT_BYTES + lane % 4 * 8;
        if constexpr (Score::TRANSFORMED)
            transform_scores_transposed(p.score, position().distance(), Score::slope(p.score, tile.batch, step.head), s,
                                        derivatives);
        if (tile.mask(p).needs_mask(tile.first_key, BLOCK_N, step.m_block * BLOCK_M, BLOCK_M)) {
            const ScorePosition at = position();
            mask_scores_transposed(s, at.mask, at.key, at.query);
        }
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            float2 row = load_shared_float2(lse + i / 4 * 32);
            row.x += P_EXPONENT, row.y += P_EXPONENT;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float minus = j % 2 ? row.y : row.x;
                s[i + j] = ex2(Score::TRANSFORMED ? s[i + j] + minus : fmaf(s[i + j], p.score.scale_log2, minus));
            }
            probabilities[i / 2] = Convert<Element>::pack(s[i], s[i + 1]);
            probabilities[i / 2 + 1] = Convert<Element>::pack(s[i + 2], s[i + 3]);
        }
    }

    // Passes P, times the derivative of the score transform, to the thread of the other consumer with the same
    // keys and queries.
    __device__ __forceinline__ void publish_probabilities() {
        const u32 to = p_vectors();
        mbarrier_wait(barrier_of(SMEM(p_empty), p_stage.index), p_stage.phase ^ 1);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
            u32 word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float low = s[8 * i + 2 * j], high = s[8 * i + 2 * j + 1];
                if constexpr (Score::HAS_DERIVATIVE) {
                    const float2 derivative = unpack_half2(derivatives[4 * i + j]);
                    word[j] = Convert<__half>::pack(low * derivative.x, high * derivative.y);
                } else {
                    word[j] = Convert<__half>::pack(low, high);
                }
            }
            store_shared(to + i * VECTORS_BYTES, make_uint4(word[0], word[1], word[2], word[3]));
        }
        __syncwarp();
        arrive(SMEM(p_full), p_stage.index);
    }
};

struct DkConsumer : Consumer {
    float dp[BLOCK_M / 2], dk[HEAD_DIM / 2];
    u32 probabilities[BLOCK_M / 4], ds[BLOCK_M / 4];

    using Consumer::Consumer;

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.f;
        const int steps = tile.steps();
        if (steps > 0) wait_keys();
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            gemm_dp();
            load_probabilities();
            wgmma_wait<0>(dp);
            make_ds();
            gemm_dk();
            arrive(SMEM(do_empty), dout.index);
            wgmma_wait<0>(dk);
            arrive(SMEM(q_empty), q.index);
            next();
        }
        store<HEAD_DIM>(dk, p.dk, p.dk_batch, p.dk_row, p.dk_head, p.scale);
    }

    __device__ __forceinline__ void gemm_dp() {
        wait_do();
        gemm_ss<BLOCK_M, V_STEPS, KEYS_CHUNK, ROWS_CHUNK>(dp, SMEM(v), do_tile());
    }
    __device__ __forceinline__ void gemm_dk() {
        wait_q();
        gemm_rs<HEAD_DIM, BLOCK_M>(dk, ds, q_tile());
    }

    __device__ __forceinline__ void load_probabilities() {
        mbarrier_wait(barrier_of(SMEM(p_full), p_stage.index), p_stage.phase);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i) {
            const int4 vector = load_shared_int4(p_vectors() + i * VECTORS_BYTES);
            probabilities[4 * i] = vector.x, probabilities[4 * i + 1] = vector.y;
            probabilities[4 * i + 2] = vector.z, probabilities[4 * i + 3] = vector.w;
        }
        wait_for_loads(probabilities);
        __syncwarp();
        arrive(SMEM(p_empty), p_stage.index);
    }

    __device__ __forceinline__ void make_ds() {
        const u32 delta = SMEM(delta) + dout.index * STAT_BYTES + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 row = load_shared_float2(delta + i / 4 * 32);
            const float x = row.x * -P_INVERSE, y = row.y * -P_INVERSE;
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                const float2 weight = unpack_half2(probabilities[j / 2]);
                ds[j / 2] = Convert<Element>::pack(weight.x * fmaf(dp[j], P_INVERSE, x),
                                                   weight.y * fmaf(dp[j + 1], P_INVERSE, y));
            }
        }
    }
};
