// A consumer warpgroup of the one-CTA backward: the loop over tiles, the steps of a tile, and how dK and dV are stored.
#pragma once
#include "hopper/backward/one_cta/epilogue.cuh"
#include "hopper/backward/one_cta/step.cuh"

struct Consumer : ConsumerStep {
    using ConsumerStep::ConsumerStep;

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
            const TileKeys keys = tile_keys(base, stage);
            const int steps = uniform(keys.steps);
            if (steps > 0) {
                run_steps(steps, SKIPS_KEYLESS && number == 1 && uniform(keys.length - keys.first) <= 64);
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

    // `keyless`: the tile, the last one of its sequence, has no keys of this consumer.
    __device__ __forceinline__ void run_steps(int steps, bool keyless) {
        if (!DP_FIRST) wait<K_STAGES>(SMEM(k_full), full_tiles());
        wait<V_STAGES>(SMEM(v_full), full_tiles());
        if (keyless) {
            hidden_steps(steps);
        } else {
            make_steps(steps);
        }
        if (!EARLY_V_RELEASE) arrive(SMEM(v_empty), full_tiles() % V_STAGES);
        count.tile_done();
        if constexpr (UNDER_LAST_DQ) {
            last_dq_and_stores();
        } else {
            if (!PIPELINED_TILES) last_dq();
        }
    }

    __device__ __forceinline__ void make_steps(int steps) {
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

    // A step of which this consumer's keys are hidden (SKIPS_HIDDEN), or of a tile that has none of them. Its dS is
    // zeros, and its only product is the dQ of the step before.
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

    // All steps of a tile that has no keys of this consumer.
    __device__ __forceinline__ void hidden_steps(int steps) {
        if constexpr (PEELED) {
            first_hidden_step();
        } else {
            if (IN_DS) wait_for_staged_of_all();
            first_ds();
        }
#pragma unroll 1
        for (int i = PEELED; i < steps; ++i) {
            wait<Q_STAGES>(SMEM(q_full), steps_done);
            ping_pong_wait();
            hidden_step(PIPELINED_TILES && i == 0 && full_tiles() > 0, i + 1 == steps);
        }
        zero_accumulator(dk), zero_accumulator(dv);       // here, so that they take no registers before
    }
    __device__ __forceinline__ void first_hidden_step() {
        ping_pong_wait();
        wait<Q_STAGES>(SMEM(q_full), steps_done);
        if (PING_PONG != PingPong::OFF) ping_pong_arrive(PING_PONG);
        wait<DO_STAGES>(SMEM(do_full), steps_done);
        wait<K_STAGES>(SMEM(k_full), full_tiles());
        if (IN_DS) wait_for_staged_of_all();
        zero_ds(ds_slice());
        arrive(SMEM(do_empty), do_stage());
        publish_ds(ds_slice());
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
};
