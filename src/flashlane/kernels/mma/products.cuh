// The products S = Q·Kᵀ and O += P·V of one slice, and P as the A operand between them.
#pragma once
#include "mma/tiles.cuh"

__device__ __forceinline__ void read_q(u32 (&a)[4], const FragmentCursor<LayoutQ>& q, u32 offset, int m, int chunk,
                                       u32 fold) {
    ldmatrix_x4(a, q.at(offset, m * 16, chunk));
    if constexpr (is_same<ScorePrecision, __half>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2 scaled = __hmul2(*reinterpret_cast<__half2*>(&a[i]), *reinterpret_cast<__half2*>(&fold));
            a[i] = *reinterpret_cast<const u32*>(&scaled);
        }
    }
}

using QRegisters = u32[Q_IN_REGISTERS ? M_TILES : 1][Q_IN_REGISTERS ? QK_STEPS : 1][4];

__device__ __forceinline__ void read_all_q(QRegisters& q_registers, const FragmentCursor<LayoutQ>& q, u32 fold) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int step = 0; step < QK_STEPS; ++step) read_q(q_registers[m][step], q, 0, m, step * 2, fold);
}

using ScoreTiles = Accumulator<ScorePrecision>[M_TILES][S_TILES];

// S += Q·Kᵀ along one slice of the head dim.
__device__ __forceinline__ void gemm_qk(ScoreTiles& acc, const QRegisters& q_registers,
                                        const FragmentCursor<LayoutQ>& q, const FragmentCursor<LayoutK>& k, int slice,
                                        u32 stage, u32 fold) {
    const u32 q_offset = Q_STREAMED ? stage : 0;
    const int q_chunk = Q_STREAMED ? 0 : slice * (K_SLICE / CHUNK);
#pragma unroll
    for (int step = 0; step < QK_STEPS; ++step) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            if constexpr (Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = q_registers[m][step][i];
            } else {
                read_q(a[m], q, q_offset, m, q_chunk + step * 2, fold);
            }
        }
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, k.at(stage, n * 8, step * 2));
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma<Element>(acc[m][n], a[m], b[0], b[1]);
                mma<Element>(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ void zero(ScoreTiles& acc) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < S_TILES; ++n) acc[m][n].zero();
}

__device__ __forceinline__ void unpack_scores(Scores& s, const ScoreTiles& acc) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n * 4 + i] = acc[m][n].get(i);
}

// P as the A operand of its product with V: from registers, or (split-kv) through shared memory.
struct Probabilities {
    u32 a[SPLIT_KV ? 1 : M_TILES][SPLIT_KV ? 1 : BLOCK_N / 16][4];

    __device__ __forceinline__ void pack(const Scores& s, const Warp& warp) {
        if constexpr (!SPLIT_KV) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int step = 0; step < BLOCK_N / 16; ++step)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* pair = &s[m][(2 * step + i / 2) * 4 + i % 2 * 2];
                        a[m][step][i] = Convert<Element>::pack(pair[0], pair[1]);
                    }
        } else {
            const u32 tile = shared_address(shared_memory + p_offset());
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = warp.row() + m * 16 + half * 8 + warp.quad_row;
                        const u32 address = tile + LayoutP::offset(row, warp.kv * S_TILES + n) + warp.quad_column * 4;
                        store_shared(address,
                                     Convert<Element>::pack(s[m][n * 4 + half * 2], s[m][n * 4 + half * 2 + 1]));
                    }
        }
    }
    __device__ __forceinline__ void read(u32 (&fragment)[4], const FragmentCursor<LayoutP>& p, int m, int step) const {
        if constexpr (SPLIT_KV) {
            ldmatrix_x4(fragment, p.at(0, m * 16, step * 2));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) fragment[i] = a[m][step][i];
        }
    }
};

// O += P·V of one slice of V: the rows from step `first_step` on, the columns of tiles `first_tile`.
__device__ __forceinline__ void gemm_pv(State& state, const Probabilities& p, const FragmentCursor<LayoutP>& p_tile,
                                        const CursorV& v, int first_step, int first_tile, u32 stage) {
    if constexpr (ONE_PRECISION) {
        if (NORMALISE && first_step == 0)
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int n = 0; n < V_SLICE_TILES; ++n)
                    state.o[m][first_tile + n].scale(state.keep[m][0], state.keep[m][1]);
#pragma unroll
        for (int step = 0; step < PV_STEPS; ++step) {
            u32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) p.read(a[m], p_tile, m, first_step + step);
#pragma unroll
            for (int n = 0; n < V_SLICE_TILES; n += 2) {
                u32 b[4];
                ldmatrix_x4_trans(b, v.at(stage, step * 16, n));
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma<Element>(state.o[m][first_tile + n], a[m], b[0], b[1]);
                    mma<Element>(state.o[m][first_tile + n + 1], a[m], b[2], b[3]);
                }
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < V_SLICE_TILES; n += 2) {
            Accumulator<OutPrecision> acc[M_TILES][2];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) acc[m][0].zero(), acc[m][1].zero();
#pragma unroll
            for (int step = 0; step < PV_STEPS; ++step) {
                u32 b[4];
                ldmatrix_x4_trans(b, v.at(stage, step * 16, n));
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    u32 a[4];
                    p.read(a, p_tile, m, first_step + step);
                    mma<Element>(acc[m][0], a, b[0], b[1]);
                    mma<Element>(acc[m][1], a, b[2], b[3]);
                }
            }
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float top = first_step == 0 ? state.keep[m][0] : 1.f;
                    const float bottom = first_step == 0 ? state.keep[m][1] : 1.f;
                    state.o[m][first_tile + n + i].scale_add(top, bottom, acc[m][i]);
                }
        }
    }
}
