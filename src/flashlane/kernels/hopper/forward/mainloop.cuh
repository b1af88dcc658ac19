// The steps of a consumer warpgroup: products, softmax, and the waits between them.
//
// A stage holds K of one n-block and V of the n-block before it, so that a step issues S = Q·Kᵀ of its own n-block and
// O += P·V of the last one. The head of kernel.cu draws the stream of steps.
#pragma once
#include "hopper/forward/epilogue.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

struct Mainloop {
    const Params& p;
    const u32 base;
    const ConsumerRows rows;
    PipelineState<STAGES> kv;
    PipelineState<Q_STAGES> queries;
    WorkTile tile;                 // the one whose scores are computed
    Seqlen sequence;               // of that tile
    RowLimits limits;
    int position[2];               // query + shift, relative to the first column of n-block 0: exact, unlike a float
    float slope[2];                // what a score changes by with each key
    RowSoftmax softmax;
    int v_rows = BLOCK_N;          // rows of the next V that are keys; the others are out of bounds and hold anything
    u32 q_fragments[cfg::Q_IN_REGISTERS ? 4 * QK_STEPS : 1];
    float s[BLOCK_N / 2];
    u32 probabilities[BLOCK_N / 4];
    OutputTile o;
    ListedBlock listed;            // BLOCK_LISTS: the n-block of this step
    uint2 mask_bits[2][MASK_UNITS];  // MASK_BITS: of that n-block, by row and 64 columns
    InKernelCombine combine;

    __device__ __forceinline__ Mainloop(const Params& params, u32 address, int warpgroup)
        : p(params), base(address), rows(warpgroup), sequence(params.seqlen, 0) {}

    __device__ __forceinline__ Epilogue epilogue() const { return {p, rows}; }

    // ---- pipelines: the consumer's side

    __device__ __forceinline__ u32 kv_barrier(u32 which) const { return barrier_of(which, kv.index); }
    __device__ __forceinline__ void wait_kv() const {
        mbarrier_wait(kv_barrier(SHARED(base, kv_barriers[K].full)), kv.phase);
        if (!cfg::ONE_BARRIER) mbarrier_wait(kv_barrier(SHARED(base, kv_barriers[V].full)), kv.phase);
        if (cfg::GATHER) fence_proxy_async();  // cp.async wrote it
    }
    template <typename Storage = SharedStorage>
    __device__ __forceinline__ void read_listed() {
        if constexpr (cfg::BLOCK_LISTS)
            listed = {uniform(load_shared(listed_block<Storage>(base, kv.index)))};
    }
    __device__ __forceinline__ void release_k() const {
        if (!cfg::ONE_BARRIER) mbarrier_arrive_warp(kv_barrier(SHARED(base, kv_barriers[K].empty)), rows.lane);
    }
    __device__ __forceinline__ void release_kv() {
        mbarrier_arrive_warp(kv_barrier(SHARED(base, kv_barriers[V].empty)), rows.lane);
        kv.advance();
    }
    // The next work tile, with its Q.
    __device__ __forceinline__ WorkTile wait_tile() const {
        mbarrier_wait(barrier_of(SHARED(base, q_barriers.full), queries.index), queries.phase);
        const int4 words = load_shared_int4(SHARED(base, tiles) + static_cast<u32>(sizeof(WorkTile)) * queries.index);
        return {uniform(words.x), uniform(words.y), uniform(words.z), uniform(words.w)};
    }
    __device__ __forceinline__ void release_q() {
        __syncwarp();
        mbarrier_arrive_warp(barrier_of(SHARED(base, q_barriers.empty), queries.index), rows.lane);
        queries.advance();
    }
    // Ping-pong scheduling: the consumers issue their products one after another.
    __device__ __forceinline__ void pingpong_wait() const {
        if (cfg::PINGPONG) named_barrier_sync(PINGPONG + rows.warpgroup, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void pingpong_arrive() const {
        if (cfg::PINGPONG)
            named_barrier_arrive(PINGPONG + (rows.warpgroup + 1 == CONSUMERS ? 0 : rows.warpgroup + 1), 2 * WARPGROUP);
    }

    // MASK_BITS: what this thread's rows see of the step's n-block, while its scores are computed.
    __device__ __forceinline__ void load_mask_bits() {
        if constexpr (cfg::MASK_BITS) {
            if (listed.state(rows.warpgroup) != BLOCK_PARTIAL) return;
            const MaskBits& bits = p.lists.bits;
#pragma unroll
            for (int unit = 0; unit < MASK_UNITS; ++unit) {
                const int slot = bits.slot(tile.batch, tile.tile_head(), tile.row / UNIT + rows.warpgroup,
                                           listed.block() * MASK_UNITS + unit);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    mask_bits[half][unit] = bits.row(slot, rows.warp * 16 + rows.lane / 4 + 8 * half);
            }
        }
    }

    // ---- products

    __device__ __forceinline__ void gemm_qk() {
        // Made uniform in each step. Otherwise ptxas computes a tile's descriptors once and keeps them in ordinary
        // registers, from which wgmma cannot take them.
        const u32 from = COMBINE_IN_KERNEL ? uniform(base) : base;
        const u64 k = wgmma_k_inner(SHARED(from, kv) + kv.index * STAGE_BYTES);
        const u64 q =
            wgmma_k_inner(SHARED(from, q) + queries.index * Q_BYTES + rows.warpgroup * CONSUMER_ROWS * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < QK_STEPS; ++i) {
            const u64 k_step = k + (i / 4 * KV_CHUNK + i % 4 * 32) / 16;
            if constexpr (cfg::Q_IN_REGISTERS) Wgmma<BLOCK_N>::rs(s, &q_fragments[4 * i], k_step, i > 0);
            else Wgmma<BLOCK_N>::ss(s, q + (i / 4 * Q_CHUNK + i % 4 * 32) / 16, k_step, i > 0);
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void gemm_pv() {
        const u64 v = wgmma_n_inner(SHARED(base, kv) + K_BYTES + kv.index * STAGE_BYTES, KV_CHUNK);
#pragma unroll
        for (int i = 0; i < PV_STEPS; ++i)
            Wgmma<COLUMNS_V>::rs_mn(o, &probabilities[4 * i], v + i * (16 * ROW_BYTES / 16));
        wgmma_commit();
    }
    __device__ __forceinline__ void load_q_fragments() {
        if constexpr (cfg::Q_IN_REGISTERS) {
            const int row = rows.warpgroup * CONSUMER_ROWS + rows.warp * 16 + rows.lane % 16;
            const u32 q = SHARED(base, q) + queries.index * Q_BYTES;
#pragma unroll
            for (int i = 0; i < QK_STEPS; ++i) {
                const int vector = i % 4 * 2 + rows.lane / 16;
                u32 (&fragment)[4] = *reinterpret_cast<u32(*)[4]>(&q_fragments[4 * i]);
                ldmatrix_x4(fragment, q + i / 4 * Q_CHUNK + row * ROW_BYTES + ((vector ^ (row % 8)) << 4));
            }
            wait_for_loads(q_fragments);
            release_q();
        }
    }
    // P·V adds 0 · v for keys that do not exist, so their rows of V may hold no NaN and no infinity: they are zeroed,
    // once in a tile whose keys end inside a block. Every consumer writes the same zeros.
    __device__ __forceinline__ void zero_out_of_bounds_v() {
        if constexpr (OUT_OF_BOUNDS_ROWS) {
            if (v_rows < BLOCK_N) {
                const u32 v = SHARED(base, kv) + K_BYTES + kv.index * STAGE_BYTES;
                zero_rows<V_CHUNKS, BLOCK_N>(v, v_rows, threadIdx.x % WARPGROUP, WARPGROUP);
                fence_proxy_async();
                named_barrier_sync(WARPGROUP_SYNC + rows.warpgroup, WARPGROUP);
                v_rows = BLOCK_N;
            }
        }
    }

    // ---- softmax of one n-block, in registers

    // What the mask and the score transform need of the tile's rows.
    __device__ __forceinline__ void begin_rows() {
        const TileMask mask = mask_of(p, sequence);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile.row + rows.row(half), query = row / PACK_GQA, first_column = 2 * (rows.lane % 4);
            limits.end[half] = mask.end(query) - first_column;
            limits.first[half] = mask.first(query) - first_column;
            position[half] = 0, slope[half] = 0.f;
            if constexpr (Score::HAS_DISTANCE) {
                const int head = query_head(tile, row);
                position[half] = query + sequence.shift - first_column;
                slope[half] = Score::slope(p.score, tile.batch, head) / late_scale(p);
            }
            if constexpr (Program::IS_LINEAR)
                slope[half] = Program::slope(p.program, tile.batch, tile.tile_head()) * (LOG2_E / late_scale(p));
        }
    }
    // The thread's first key of an n-block.
    __device__ __forceinline__ int first_key(int n_block) const { return n_block * BLOCK_N + 2 * (rows.lane % 4); }
    // The distance of a row's query and that key.
    __device__ __forceinline__ int distance_to(int n_block, int half) const {
        if constexpr (Program::IS_LINEAR) return tile.row + rows.row(half) - first_key(n_block);
        return Score::HAS_DISTANCE ? position[half] - n_block * BLOCK_N : 0;
    }
    // Applies modifiers and a linear program to the scores of an n-block, but for the terms `offset` of its rows.
    // `side` is that of transform_scores (attention/score.cuh).
    __device__ __forceinline__ void modify_scores(int n_block, int side, float (&offset)[2]) {
        float distance[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) distance[half] = Score::HAS_DISTANCE ? distance_to(n_block, half) : 0;
        transform_scores(p.score, s, distance, slope, side, offset);
        if constexpr (Program::IS_LINEAR)
            add_distances(s, slope, tile.row + rows.row(0), first_key(n_block), offset);
    }
    template <bool MASKED>
    __device__ __forceinline__ void softmax_of(int n_block, bool mask, float (&alpha)[2]) {
        float bias[2], offset[2];
        if constexpr (cfg::BLOCK_LISTS) n_block = listed.block();
        if constexpr (FUSED_UNMASKED) {
            if (cfg::BLOCK_LISTS ? listed.state(rows.warpgroup) == BLOCK_FULL : !mask) {
                float scale = p.score.scale_log2 * LN_2;
                asm volatile("" : "+f"(scale));  // or the scores of both sides are computed in front of the branch
                transform_by_program(p.program, s, scale, tile.batch, tile.tile_head(), tile.row + rows.row(0),
                                     first_key(n_block));
                softmax.exponentiate_bounded<cfg::POLYNOMIALS, false>(s, late_scale(p), BOUNDED_MAX);
                return;
            }
        }
        modify_scores(n_block, Score::HAS_DISTANCE ? side_of_keys(n_block) : 0, offset);
        if constexpr (Program::HAS_SCORE && !Program::IS_LINEAR)
            transform_by_program(p.program, s, p.score.scale_log2 * LN_2, tile.batch, tile.tile_head(),
                                 tile.row + rows.row(0), first_key(n_block));
        if constexpr (cfg::BLOCK_LISTS) mask_listed(n_block);
        else if (mask) mask_scores<side(cfg::HAS_LEFT)>(s, limits, n_block * BLOCK_N);
        if constexpr (BOUNDED) {
            constexpr bool MAY_BE_HIDDEN = MASKED || Program::HAS_SCORE;
            softmax.exponentiate_bounded<cfg::POLYNOMIALS, MAY_BE_HIDDEN>(s, late_scale(p), BOUNDED_MAX);
        } else {
            softmax.update_max<MASKED && !ANY_MAY_BE_HIDDEN, ROW_OFFSET>(s, late_scale(p), offset, alpha, bias);
            if constexpr (LARGE_SCORES)
                softmax.subtract_large_max<ROW_OFFSET>(s, late_scale(p), offset, alpha, bias, large_maxima());
            softmax.exponentiate<SCALED>(s, late_scale(p), alpha, bias);
        }
    }
    // Whether the bias of one of the warp's rows grows towards earlier keys, which are the later ones of a walk.
    __device__ __forceinline__ bool scores_rise() const {
        return __any_sync(0xffffffffu, slope[0] < 0.f || slope[1] < 0.f);
    }
    // The softmax of a block without a mask, with a deferred maximum (attention/online_softmax.cuh).
    __device__ __forceinline__ void softmax_by_old_max(int n_block) {
        float block_sum[2], offset[2];
        modify_scores(n_block, 1, offset);
        softmax.exponentiate_by_old_max<ROW_OFFSET>(s, late_scale(p), offset, block_sum);
        if (!cfg::LATE_WAIT) wgmma_wait<0>(o);  // which ptxas moves above the exponentials
        if (__any_sync(0xffffffffu, RowSoftmax::exceeds(block_sum[0]) || RowSoftmax::exceeds(block_sum[1]))) {
            if (cfg::LATE_WAIT) wgmma_wait<0>(o);  // this is rare, and then the old P needs no registers any more
            float alpha[2];
            bool lost[2];
            softmax.raise_max<LARGE_SCORES>(s, late_scale(p), block_sum, alpha, lost);
            if (__any_sync(0xffffffffu, lost[0] || lost[1])) exponentiate_again(n_block, lost, block_sum, alpha);
            rescale_output(alpha);
#pragma unroll
            for (int half = 0; half < 2; ++half) softmax.sum[half] *= alpha[half];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) softmax.sum[half] += block_sum[half];
    }
    // S of two groups of eight keys from key 16 · `group` of the step's n-block on, by this warp alone. Q and K are in
    // shared memory still.
    __device__ __forceinline__ void scores_again(int group, Accumulator<float> (&again)[2]) const {
        // Or ptxas computes the addresses before the loop over n-blocks, and spills them.
        const int thread = thread_index_here(), lane = thread % WARP;
        const int q_row = (thread / WARP - WARPS) * 16 + lane % 16, key = group * 16 + lane / 16 * 8 + lane % 8;
        const u32 q = SHARED(base, q) + queries.index * Q_BYTES + q_row * ROW_BYTES;
        const u32 k = SHARED(base, kv) + kv.index * STAGE_BYTES + key * ROW_BYTES;
        again[0].zero(), again[1].zero();
#pragma unroll(cfg::Q_IN_REGISTERS ? QK_STEPS : 1)
        for (int i = 0; i < QK_STEPS; ++i) {
            u32 a[4], b[4];
            if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
                for (int j = 0; j < 4; ++j) a[j] = q_fragments[4 * i + j];
            } else {
                ldmatrix_x4(a, q + i / 4 * Q_CHUNK + (((i % 4 * 2 + lane / 16) ^ (q_row % 8)) << 4));
            }
            ldmatrix_x4(b, k + i / 4 * KV_CHUNK + (((i % 4 * 2 + lane / 8 % 2) ^ (key % 8)) << 4));
            mma<Element>(again[0], a, b[0], b[1]);
            mma<Element>(again[1], a, b[2], b[3]);
        }
    }
    // What modifiers and a linear program make of the product of a row's query and a key, in the unit of late_scale.
    __device__ __forceinline__ float modified(float product, int half, float distance) const {
        if constexpr (Program::IS_LINEAR) return fmaf(-slope[half], distance, product);
        return Score::of_product(p.score, product, slope[half], distance);
    }
    // The scores of `lost` rows are computed again, as their exponentials overflowed: their maximum first, then P. That
    // is so rare that it may be slow; unrolled, it would take registers from the loop over n-blocks.
    __device__ __forceinline__ void exponentiate_again(int n_block, const bool (&lost)[2], float (&block_sum)[2],
                                                       float (&alpha)[2]) {
        const auto score = [&](const Accumulator<float> (&products)[2], int group, int i) {
            const int half = i / 2 % 2, column = 16 * group + accumulator_column(i);
            return modified(products[i / 4].get(i % 4), half, distance_to(n_block, half) - column);
        };
        float local[BLOCK_N / 2];  // in local memory, as the loops are rolled
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) local[i] = s[i];
        Accumulator<float> again[2];
        float largest[2] = {-INF, -INF};
#pragma unroll 1
        for (int group = 0; group < BLOCK_N / 16; ++group) {
            scores_again(group, again);
#pragma unroll
            for (int i = 0; i < 8; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], score(again, group, i));
        }
        const float scale = late_scale(p);
        float row_max[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float old = LARGE_SCORES ? softmax.true_max(half, large_maxima()) : softmax.max[half];
            const float now = row_max[half] = fmaxf(old, quad_max(largest[half]));
            if (!lost[half]) continue;
            alpha[half] = ex2((old - now) * scale);
            if constexpr (LARGE_SCORES) softmax.set_max(half, now, scale, large_maxima());
            else softmax.max[half] = now;
            block_sum[half] = 0.f;
        }
#pragma unroll 1
        for (int group = 0; group < BLOCK_N / 16; ++group) {
            scores_again(group, again);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int half = i / 2 % 2;
                if (!lost[half]) continue;
                const float of_key = score(again, group, i);
                const float x = ex2(LARGE_SCORES ? (of_key - row_max[half]) * scale
                                                 : fmaf(of_key, scale, -row_max[half] * scale));
                block_sum[half] += x;
                local[8 * group + i] = x;
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = local[i];
    }
    // On which side of the rows the visible keys of an n-block lie: 1 if none is after the position of any row, −1 if
    // none is before it, 0 otherwise.
    __device__ __forceinline__ int side_of_keys(int n_block) const {
        // Without the shuffle ptxas does not see that the branch is uniform, and moves descriptors (R2UR) in each step.
        const int row = tile.row + __shfl_sync(0xffffffffu, rows.first(), 0), key = n_block * BLOCK_N - sequence.shift;
        if ((cfg::HAS_RIGHT && p.window_right == 0) || key + BLOCK_N - 1 <= row / PACK_GQA) return 1;
        return key >= (row + CONSUMER_ROWS - 1) / PACK_GQA ? -1 : 0;
    }
    __device__ __forceinline__ void mask_listed(int n_block) {
        const int state = listed.state(rows.warpgroup);
        if (state == BLOCK_FULL) return;
        if (state == BLOCK_NONE) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = -INF;
        } else if constexpr (cfg::MASK_BITS) {
            mask_by_bits(s, 2 * (rows.lane % 4), mask_bits);
        } else {
            mask_by_program(p.program, s, tile.batch, tile.tile_head(), tile.row + rows.row(0), first_key(n_block),
                            sequence.k_length);
        }
    }
    __device__ __forceinline__ void reset_softmax() {
        if constexpr (BOUNDED) softmax.reset(BOUNDED_MAX);
        else softmax.reset(ANY_MAY_BE_HIDDEN ? LEAST_MAX / fmaxf(1.f, late_scale(p)) : -INF);
    }
    __device__ __forceinline__ void softmax_of_first(int n_block, bool mask) {
        float alpha[2];
        reset_softmax();
        softmax_of<true>(n_block, mask, alpha);
    }
    __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) probabilities[i] = Convert<Element>::pack(s[2 * i], s[2 * i + 1]);
    }
    __device__ __forceinline__ void rescale_output(const float (&alpha)[2]) {
        if constexpr (BOUNDED) return;
        if (!__any_sync(0xffffffffu, alpha[0] != 1.f || alpha[1] != 1.f)) return;
#pragma unroll
        for (int i = 0; i < COLUMNS_V / 2; ++i) o[i] *= alpha[i / 2 % 2];
    }
    __device__ __forceinline__ void zero_output() {
#pragma unroll
        for (int i = 0; i < COLUMNS_V / 2; ++i) o[i] = 0.f;
    }

    // ---- steps

    // Issues S of this n-block and the P·V that is pending, and loads what the mask needs while they run.
    __device__ __forceinline__ void issue_both_products() {
        wait_kv();
        zero_out_of_bounds_v();
        pingpong_wait();
        wgmma_fence();
        gemm_qk();
        gemm_pv();
        pingpong_arrive();
        read_listed();
        load_mask_bits();
    }
    // Steady state: S of this n-block is issued before P·V of the last one; the softmax of S runs under P·V.
    template <bool MASKED>
    __device__ __forceinline__ void step(int n_block) {
        float alpha[2];
        issue_both_products();
        wgmma_wait<1>(s);
        release_k();
        // Ends the basic block, or ptxas computes what a program makes of distances above the wait for S,
        // and spills it.
        if (Program::HAS_DISTANCE && !Program::IS_LINEAR)
            mbarrier_wait(kv_barrier(SHARED(base, kv_barriers[V].full)), kv.phase);
        constexpr bool DEFERRED = cfg::DEFERRED_MAX && !MASKED;
        if constexpr (DEFERRED) softmax_by_old_max(n_block);
        else softmax_of<MASKED>(n_block, MASKED, alpha);
        // Complete since the step began. The wait ends the basic block, or ptxas moves the one below
        // above the exponentials.
        if (cfg::LATE_WAIT && !DEFERRED) mbarrier_wait(kv_barrier(SHARED(base, kv_barriers[V].full)), kv.phase);
        wgmma_wait<0>(o);
        release_kv();
        pack_probabilities();
        if (!DEFERRED) rescale_output(alpha);
    }
    // Without ACROSS_TILES: S of a tile's first n-block. An empty group stands for the P·V that is in flight with the S
    // of the others, so that all n-blocks have one body.
    __device__ __forceinline__ void issue_first_product() {
        reset_softmax();
        zero_output();
        fence_registers(o);  // or ptxas writes the zeros between products, and serialises them
        wait_kv();
        pingpong_wait();
        wgmma_fence();
        gemm_qk();
        wgmma_commit();
        pingpong_arrive();
        read_listed();
        load_mask_bits();
    }
    // The rest of a step: the softmax of the S that is in flight, and what waits for the P·V under it.
    __device__ __forceinline__ void finish_step(int n_block, bool mask) {
        float alpha[2];
        wgmma_wait<1>(s);
        release_k();
        if constexpr (cfg::DEFERRED_MAX) {
            if (mask) {
                softmax_of<false>(n_block, true, alpha);
                wgmma_wait<0>(o);
                rescale_output(alpha);
            } else {
                softmax_by_old_max(n_block);
                wgmma_wait<0>(o);
            }
            release_kv();
            pack_probabilities();
            return;
        }
        softmax_of<false>(n_block, mask, alpha);
        if (cfg::LATE_WAIT) mbarrier_wait(kv_barrier(SHARED(base, kv_barriers[V].full)), kv.phase);
        wgmma_wait<0>(o);
        release_kv();
        pack_probabilities();
        rescale_output(alpha);
    }
    // The first n-block of a tile when no P·V is pending.
    __device__ __forceinline__ void first_step(int n_block, bool masked) {
        wait_kv();
        pingpong_wait();
        wgmma_fence();
        gemm_qk();
        pingpong_arrive();
        read_listed();
        load_mask_bits();
        wgmma_wait<0>(s);
        release_k();
        release_kv();
        softmax_of_first(n_block, masked);
        pack_probabilities();
        zero_output();
    }
    // From one tile to the next: S of its first n-block with the last P·V of the tile before, which is then stored.
    __device__ __forceinline__ void boundary_step(const WorkTile& done, int n_block, bool masked) {
        float inverse[2];
        issue_both_products();
        epilogue().store_lse(done, softmax, inverse);
        wgmma_wait<1>(s);
        release_k();
        softmax_of_first(n_block, masked);
        wgmma_wait<0>(o);
        release_kv();
        pack_probabilities();
        epilogue().store_output(done, o, inverse);
        zero_output();
    }
    // The last P·V of a tile, in a stage whose K this warpgroup does not need; or, with KEEP_STAGE, whose K the next
    // step needs, which then releases the stage.
    template <bool KEEP_STAGE = false>
    __device__ __forceinline__ void last_step(const WorkTile& done) {
        float inverse[2];
        wait_kv();
        zero_out_of_bounds_v();
        if (!KEEP_STAGE) pingpong_wait();
        wgmma_fence();
        gemm_pv();
        if (!KEEP_STAGE) pingpong_arrive();
        epilogue().store_lse(done, softmax, inverse);
        wgmma_wait<0>(o);
        if (!KEEP_STAGE) release_k(), release_kv();
        epilogue().store_output(done, o, inverse);
        combine.add(done);
    }
    // A stage of which this warpgroup needs neither K nor V.
    __device__ __forceinline__ void skip_step() {
        wait_kv();
        pingpong_wait();
        pingpong_arrive();
        release_k();
        release_kv();
    }

    // COMBINE_IN_KERNEL: combines what is stored, with no product in flight. O and P are cleared first: ptxas would
    // keep them in registers, as it does not know when a P is pending.
    __device__ __forceinline__ void combine_stored() {
        zero_output();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) probabilities[i] = 0;
        combine.run(p, rows, base);
    }
};
