// Attention forward on mma.sync m16n8k16: split-kv, split-q, share-kv and share-qkv are points of this one template.
//
// One block owns BR query rows and walks over the key/value tiles of BC rows that those queries may see:
//     S = Q·Kᵀ   ->   online softmax (f32, base 2)   ->   O += P·V.
//
// Warps: WARPS_Q × WARPS_KV.                       split-q (4 × 1)            split-kv (2 × 4)
//     S[BR, BC] by warp:                           | w0 w0 w0 w0 |            | w0 w1 w2 w3 |
//                                                  | w1 w1 w1 w1 |            | w4 w5 w6 w7 |
//                                                  | w2 w2 w2 w2 |
//                                                  | w3 w3 w3 w3 |
// With WARPS_KV = 1 a warp owns whole rows: P stays in registers as the next A operand. With more, row maxima cross
// warps through shared memory, P is written there, and the warps of a row share O by columns.
//
// K and V arrive in pieces: whole tiles, or slices of the head dim (tiling-qk: K in K_SLICE columns and V in V_ROWS rows;
// tiling-qkv: V in V_COLUMNS columns too, so that shared memory does not grow with the head dim). Each piece takes a slot
// of a ring of KV_SLOTS, in the order K0 V0 K1 V1 …: one slot is share-kv stage 1; two are share-kv stage 2 and split-q
// stage 1; three split-q stage 2. A slice of Q comes with each slice of K (Q_STREAMED), or Q stays.
//
// Shared memory: [Q] [ring] [P] [row statistics]. With SHARE_QKV the queries move to registers first and the ring lies
// over them. The output may pass through the same memory at the end (STORE).
#include "config.cuh"
#include "params.cuh"
#include "softmax.cuh"
#include "tile.cuh"

using Element = cfg::Element;
using ScorePrecision = cfg::ScorePrecision;    // accumulator of Q·Kᵀ
using OutPrecision = cfg::OutPrecision;        // accumulator of P·V
using StorePrecision = cfg::StorePrecision;    // running output
constexpr int BR = cfg::BR, BC = cfg::BC, HEAD_DIM = cfg::HEAD_DIM, HEAD_DIM_V = cfg::HEAD_DIM_V;
constexpr int WARPS_Q = cfg::WARPS_Q, WARPS_KV = cfg::WARPS_KV, THREADS = WARP * WARPS_Q * WARPS_KV;
constexpr int M_TILES = BR / (16 * WARPS_Q);          // 16-row tiles of one warp
constexpr int S_TILES = BC / (8 * WARPS_KV);          // 8-column tiles of S of one warp
constexpr int O_TILES = HEAD_DIM_V / (8 * WARPS_KV);  // 8-column tiles of O of one warp
constexpr int K_SLICE = cfg::K_SLICE, V_ROWS = cfg::V_ROWS, V_COLUMNS = cfg::V_COLUMNS;
constexpr int K_PIECES = HEAD_DIM / K_SLICE, V_ROW_PIECES = BC / V_ROWS, V_COLUMN_PIECES = HEAD_DIM_V / V_COLUMNS;
constexpr int V_PIECES = V_ROW_PIECES * V_COLUMN_PIECES, PIECES = K_PIECES + V_PIECES;  // of one key/value tile
constexpr int QK_STEPS = K_SLICE / 16, PV_STEPS = V_ROWS / 16;                         // products along one piece
constexpr int PIECE_TILES = V_COLUMNS / (8 * WARPS_KV);  // 8-column tiles of O of one warp that one piece of V reaches
constexpr int SLOTS = cfg::KV_SLOTS;
constexpr bool Q_STREAMED = cfg::Q_STREAMED;
constexpr bool Q_IN_REGISTERS = cfg::Q_IN_REGISTERS || cfg::SHARE_QKV;
constexpr bool SPLIT_KV = WARPS_KV > 1;
// f16 sums of P·V stay in range and accurate only if O stays a mean of V: normalise in the loop.
constexpr bool NORMALISE = is_same<OutPrecision, __half> || is_same<StorePrecision, __half>;
// The product accumulates straight into the running output when both have one precision.
constexpr bool DIRECT = is_same<OutPrecision, StorePrecision>;
// Old maxima are kept until a score exceeds them by 2^8: P stays within f16, and O is rarely rescaled.
constexpr float LAZY = NORMALISE ? 0.f : 8.f;
enum { STORE_DIRECT, STORE_SHUFFLE, STORE_SHARED };

using LayoutQ = TileLayout<Q_STREAMED ? K_SLICE : HEAD_DIM, cfg::SWIZZLE_Q>;
using LayoutK = TileLayout<K_SLICE, cfg::SWIZZLE_K>;
using LayoutV = TileLayout<V_COLUMNS, cfg::SWIZZLE_V>;
using LayoutP = TileLayout<BC, false>;
using LayoutO = TileLayout<HEAD_DIM_V, false>;
using CursorV = FragmentCursor<LayoutV, SPLIT_KV>;  // with split-kv a warp starts at its own columns
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int Q_BYTES = LayoutQ::bytes(BR);
constexpr int Q_SLICE_BYTES = Q_STREAMED ? Q_BYTES : 0;
constexpr int SLOT_BYTES = larger(Q_SLICE_BYTES + LayoutK::bytes(BC), LayoutV::bytes(V_ROWS));
constexpr int RING = cfg::SHARE_QKV || Q_STREAMED ? 0 : Q_BYTES;
constexpr int P_OFFSET = larger(RING + SLOTS * SLOT_BYTES, cfg::SHARE_QKV ? Q_BYTES : 0);
constexpr int STATISTICS = P_OFFSET + (SPLIT_KV ? LayoutP::bytes(BR) : 0);
constexpr int LOOP_BYTES = STATISTICS + (SPLIT_KV ? BR * WARPS_KV * 4 : 0);
static_assert(larger(LOOP_BYTES, cfg::STORE == STORE_SHARED ? LayoutO::bytes(BR) : 0) == cfg::SHARED_BYTES,
              "the Python formula disagrees");
static_assert(S_TILES % 2 == 0 && PIECE_TILES % 2 == 0 && M_TILES >= 1, "tiles are read in pairs");
static_assert(K_PIECES * K_SLICE == HEAD_DIM && V_COLUMN_PIECES * V_COLUMNS == HEAD_DIM_V && V_ROW_PIECES * V_ROWS == BC);
static_assert(K_PIECES == 1 || !Q_IN_REGISTERS, "registers hold all of Q or none");

using Params = AttentionParams<Element>;

extern __shared__ __align__(128) unsigned char shared_memory[];

// What one thread carries through the loop.
struct State {
    Accumulator<StorePrecision> o[M_TILES][O_TILES];
    float max[M_TILES][2];  // of the raw products, rows g and g + 8
    float sum[M_TILES][2];  // of this lane's columns; of the whole row when NORMALISE
    float keep[M_TILES][2]; // when NORMALISE: what the next product multiplies O by
};

struct Warp {
    int lane, q, kv, quad_row, quad_column;

    __device__ __forceinline__ Warp() {
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
        lane = threadIdx.x % WARP, q = warp / WARPS_KV, kv = warp % WARPS_KV;
        quad_row = lane / 4, quad_column = lane % 4;
    }
    // First of the warp's rows in the block's tile.
    __device__ __forceinline__ int row() const { return q * (16 * M_TILES); }
};

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

using ScoreTiles = Accumulator<ScorePrecision>[M_TILES][S_TILES];

// S += Q·Kᵀ along one piece of the head dim.
__device__ __forceinline__ void score_product(ScoreTiles& acc, const QRegisters& q_registers,
                                              const FragmentCursor<LayoutQ>& q, const FragmentCursor<LayoutK>& k,
                                              int piece, u32 slot, u32 fold) {
    const u32 q_offset = Q_STREAMED ? slot : 0;
    const int q_chunk = Q_STREAMED ? 0 : piece * (K_SLICE / CHUNK);
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
            ldmatrix_x4(b, k.at(slot, n * 8, step * 2));
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

__device__ __forceinline__ void unpack_scores(float (&s)[M_TILES][S_TILES][4], const ScoreTiles& acc) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] = acc[m][n].get(i);
}

// Hide what the mask hides, in tiles that it cuts.
__device__ __forceinline__ void apply_mask(float (&s)[M_TILES][S_TILES][4], const Mask& mask, int row, int key) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = mask.first(row + m * 16 + half * 8), end = mask.end(row + m * 16 + half * 8);
            const u32 visible = max(end - first, 0), distance = key - first;
#pragma unroll
            for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) hide_outside(s[m][n][half * 2 + i], distance + n * 8 + i, visible);
        }
}

// A row value combined over the warps that share the row: each leaves its part, all read every part.
template <bool MAXIMUM>
__device__ __forceinline__ void combine_across_warps(float (&x)[M_TILES][2], const Warp& warp) {
    float* board = reinterpret_cast<float*>(shared_memory + STATISTICS);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (warp.quad_column == 0)
                board[(warp.row() + m * 16 + half * 8 + warp.quad_row) * WARPS_KV + warp.kv] = x[m][half];
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* parts = board + (warp.row() + m * 16 + half * 8 + warp.quad_row) * WARPS_KV;
            float all = parts[0];
#pragma unroll
            for (int w = 1; w < WARPS_KV; ++w) all = MAXIMUM ? fmaxf(all, parts[w]) : all + parts[w];
            x[m][half] = all;
        }
}

// Divide P by the row sums so far, and O by what they grew by: O is the mean of the values seen, P the new ones' share.
__device__ __forceinline__ void normalise(float (&s)[M_TILES][S_TILES][4], State& state, float (&tile_sum)[M_TILES][2],
                                          const Warp& warp) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) tile_sum[m][half] = quad_sum(tile_sum[m][half]);
    if constexpr (SPLIT_KV) combine_across_warps<false>(tile_sum, warp);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float before = state.sum[m][half];
            const float after = before + tile_sum[m][half];
            inverse[half] = after > 0.f ? 1.f / after : 0.f;
            state.keep[m][half] = before * inverse[half];
            state.sum[m][half] = after;
        }
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] *= inverse[i / 2];
    }
}

// Scores to probabilities (unnormalised, or normalised so far when NORMALISE); updates the statistics, rescales O.
__device__ __forceinline__ void online_softmax(float (&s)[M_TILES][S_TILES][4], State& state, float scale_log2,
                                               const Warp& warp) {
    float top[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x = s[m][0][half * 2];
#pragma unroll
            for (int n = 0; n < S_TILES; ++n) x = fmaxf(x, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
            top[m][half] = quad_max(x);
        }
    if constexpr (SPLIT_KV) combine_across_warps<true>(top, warp);

    float rescale[M_TILES][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float old = state.max[m][half];
            // (−inf for `old`: any score updates. −inf for both: the difference is not a number, and nothing does.)
            const bool update = (top[m][half] - old) * scale_log2 > LAZY;
            const float now = update ? top[m][half] : old;
            rescale[m][half] = ex2(update ? (old - now) * scale_log2 : 0.f);
            state.max[m][half] = now;
            state.sum[m][half] *= rescale[m][half];
            grew |= update;
        }
    if (!NORMALISE && __any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < O_TILES; ++n) state.o[m][n].scale(rescale[m][0], rescale[m][1]);
    }
    float tile_sum[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float offset = state.max[m][half] == -INF ? 0.f : state.max[m][half] * scale_log2;
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[m][n][half * 2 + i];
                    x = ex2(fmaf(x, scale_log2, -offset));
                    sum += x;
                }
            tile_sum[m][half] = sum;
        }
    if constexpr (NORMALISE) normalise(s, state, tile_sum, warp);
    else
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) state.sum[m][0] += tile_sum[m][0], state.sum[m][1] += tile_sum[m][1];
}

// P as the A operand of its product with V: from registers, or (split-kv) through shared memory.
struct Probabilities {
    u32 a[SPLIT_KV ? 1 : M_TILES][SPLIT_KV ? 1 : BC / 16][4];

    __device__ __forceinline__ void pack(const float (&s)[M_TILES][S_TILES][4], const Warp& warp) {
        if constexpr (!SPLIT_KV) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int step = 0; step < BC / 16; ++step)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* pair = &s[m][2 * step + i / 2][i % 2 * 2];
                        a[m][step][i] = Convert<Element>::pack(pair[0], pair[1]);
                    }
        } else {
            const u32 tile = shared_address(shared_memory + P_OFFSET);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int n = 0; n < S_TILES; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = warp.row() + m * 16 + half * 8 + warp.quad_row;
                        const u32 address = tile + LayoutP::offset(row, warp.kv * S_TILES + n) + warp.quad_column * 4;
                        store_shared(address, Convert<Element>::pack(s[m][n][half * 2], s[m][n][half * 2 + 1]));
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

// O += P·V of one piece of V: the rows from step `first_step` on, the columns of tiles `first_tile`.
__device__ __forceinline__ void value_product(State& state, const Probabilities& p, const FragmentCursor<LayoutP>& p_tile,
                                              const CursorV& v, int first_step, int first_tile, u32 slot) {
    if constexpr (DIRECT) {
        if (NORMALISE && first_step == 0)
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int n = 0; n < PIECE_TILES; ++n)
                    state.o[m][first_tile + n].scale(state.keep[m][0], state.keep[m][1]);
#pragma unroll
        for (int step = 0; step < PV_STEPS; ++step) {
            u32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) p.read(a[m], p_tile, m, first_step + step);
#pragma unroll
            for (int n = 0; n < PIECE_TILES; n += 2) {
                u32 b[4];
                ldmatrix_x4_trans(b, v.at(slot, step * 16, n));
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma<Element>(state.o[m][first_tile + n], a[m], b[0], b[1]);
                    mma<Element>(state.o[m][first_tile + n + 1], a[m], b[2], b[3]);
                }
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < PIECE_TILES; n += 2) {
            Accumulator<OutPrecision> acc[M_TILES][2];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) acc[m][0].zero(), acc[m][1].zero();
#pragma unroll
            for (int step = 0; step < PV_STEPS; ++step) {
                u32 b[4];
                ldmatrix_x4_trans(b, v.at(slot, step * 16, n));
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

// First column of a warp's O tile: pieces of V lie one after the other, and the warps of a row share each piece.
__device__ __forceinline__ int column_of(int n, const Warp& warp) {
    return n / PIECE_TILES * V_COLUMNS + (warp.kv * PIECE_TILES + n % PIECE_TILES) * 8;
}

// One row of a warp's output, 2 elements a lane and tile; `row` is null outside the sequence.
__device__ __forceinline__ void store_row(Element* row, const u32 (&word)[O_TILES], int columns, const Warp& warp) {
    // Collective: tiles in groups of four are transposed in the quad, so that each lane stores 16 bytes.
    constexpr int GROUPED = cfg::VECTOR && cfg::STORE == STORE_SHUFFLE && PIECE_TILES % 4 == 0 ? O_TILES : 0;
#pragma unroll
    for (int n = 0; n < GROUPED; n += 4) {
        u32 quad[4] = {word[n], word[n + 1], word[n + 2], word[n + 3]};
        transpose_quad(quad);
        const int column = column_of(n, warp) + warp.quad_column * 8;
        if (row != nullptr && column < columns)
            *reinterpret_cast<uint4*>(row + column) = make_uint4(quad[0], quad[1], quad[2], quad[3]);
    }
#pragma unroll
    for (int n = GROUPED; n < O_TILES; ++n) {
        const int column = column_of(n, warp) + warp.quad_column * 2;
        if (row == nullptr) continue;
        if constexpr (cfg::VECTOR) {
            if (column < columns) *reinterpret_cast<u32*>(row + column) = word[n];
        } else {
            const Element* pair = reinterpret_cast<const Element*>(&word[n]);
            if (column < columns) row[column] = pair[0];
            if (column + 1 < columns) row[column + 1] = pair[1];
        }
    }
}

// Through shared memory: the block's tile of O is laid out row by row, then stored 16 bytes a thread, whole rows at once.
__device__ __forceinline__ void store_tile(Element* out, const Params& p, int first_row) {
    constexpr int CHUNKS = HEAD_DIM_V / CHUNK;
    __syncthreads();
    for (int i = threadIdx.x; i < BR * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
        if (first_row + row >= p.seqlen_q || column >= p.head_dim_v) continue;
        const uint4 chunk = *reinterpret_cast<const uint4*>(shared_memory + LayoutO::offset(row, i % CHUNKS));
        Element* destination = out + (first_row + row) * p.out_row + column;
        if constexpr (cfg::VECTOR) {
            *reinterpret_cast<uint4*>(destination) = chunk;
        } else {
            const Element* values = reinterpret_cast<const Element*>(&chunk);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j)
                if (column + j < p.head_dim_v) destination[j] = values[j];
        }
    }
}

__device__ __forceinline__ void store_output(const Params& p, const Block<BR>& block, const Warp& warp, State& state) {
    if constexpr (!NORMALISE) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) state.sum[m][half] = quad_sum(state.sum[m][half]);
        if constexpr (SPLIT_KV) combine_across_warps<false>(state.sum, warp);
    }
    Element* out = p.out + block.batch * p.out_batch + block.head * p.out_head;
    float* lse = p.lse + (static_cast<long long>(block.batch) * p.heads + block.head) * p.seqlen_q;
    if constexpr (cfg::STORE == STORE_SHARED) {
        cp_async_wait<0>();  // without a tile to work on, Q is still on its way
        __syncthreads();     // every warp is done with the tiles
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tile_row = warp.row() + m * 16 + half * 8 + warp.quad_row;
            const int row = block.row + tile_row;
            const bool inside = row < p.seqlen_q;
            const float sum = state.sum[m][half];
            const float inverse = NORMALISE ? 1.f : sum > 0.f ? 1.f / sum : 0.f;
            u32 word[O_TILES];
#pragma unroll
            for (int n = 0; n < O_TILES; ++n)
                word[n] = Convert<Element>::pack(state.o[m][n].get(half * 2) * inverse,
                                                 state.o[m][n].get(half * 2 + 1) * inverse);
            if constexpr (cfg::STORE == STORE_SHARED) {
                const u32 tile = shared_address(shared_memory) + tile_row * LayoutO::STRIDE + warp.quad_column * 4;
#pragma unroll
                for (int n = 0; n < O_TILES; ++n) store_shared(tile + column_of(n, warp) * 2, word[n]);
            } else {
                store_row(inside ? out + row * p.out_row : nullptr, word, p.head_dim_v, warp);
            }
            if (inside && warp.kv == 0 && warp.quad_column == 0)
                lse[row] = natural_lse(state.max[m][half] * p.scale_log2, sum);
        }
    if constexpr (cfg::STORE == STORE_SHARED) store_tile(out, p, block.row);
}

extern "C" __global__ void __launch_bounds__(THREADS, cfg::MIN_BLOCKS) mma_attention(const __grid_constant__ Params p) {
    const Block<BR> block(p);
    const Warp warp;
    const int kv_head = block.head / p.group;
    const View<Element> q{p.q + block.batch * p.q_batch + block.head * p.q_head, p.q_row, p.q_column, p.seqlen_q, p.head_dim};
    const View<Element> k{p.k + block.batch * p.k_batch + kv_head * p.k_head, p.k_row, p.k_column, p.seqlen_k, p.head_dim};
    const View<Element> v{p.v + block.batch * p.v_batch + kv_head * p.v_head, p.v_row, p.v_column, p.seqlen_k, p.head_dim_v};
    const Mask mask{p.seqlen_k, p.shift, p.window_left, p.window_right};

    // Key/value tiles that some row of the block sees, and those that every row sees whole.
    const int last_row = min(block.row + BR, p.seqlen_q) - 1;
    const int first_tile = mask.first(block.row) / BC;
    const int tiles = (max(mask.end(last_row), 0) + BC - 1) / BC - first_tile;
    const int whole_from = mask.first(last_row), whole_to = mask.end(block.row);

    const u32 shared = shared_address(shared_memory), ring = shared + RING;
    // Piece r of key/value tile j; r runs over the pieces of K, then those of V, then on into the next tile's.
    const auto slot_of = [](int j, int r) { return (PIECES % SLOTS == 0 ? r : j * PIECES + r) % SLOTS * SLOT_BYTES; };
    const auto load_piece = [&](int j, int r) {
        const int tile = j + r / PIECES, piece = r % PIECES, key = (first_tile + tile) * BC;
        if (tile < tiles) {
            const u32 slot = ring + slot_of(j, r);
            if (piece < K_PIECES) {
                const int column = piece * K_SLICE;
                if constexpr (Q_STREAMED)
                    load_tile<LayoutQ, BR, K_SLICE, THREADS, cfg::VECTOR>(slot, q, block.row, column);
                load_tile<LayoutK, BC, K_SLICE, THREADS, cfg::VECTOR>(slot + Q_SLICE_BYTES, k, key, column);
            } else {
                const int row = (piece - K_PIECES) % V_ROW_PIECES * V_ROWS;
                const int column = (piece - K_PIECES) / V_ROW_PIECES * V_COLUMNS;
                load_tile<LayoutV, V_ROWS, V_COLUMNS, THREADS, cfg::VECTOR>(slot, v, key + row, column);
            }
        }
        cp_async_commit();
    };
    // Wait for a piece. The barrier also says that all warps are done with the piece before it, whose slot loads next.
    const auto arrive = [&](int j, int r) {
        cp_async_wait<(SLOTS >= 2 ? SLOTS - 2 : 0)>();
        __syncthreads();
        if constexpr (SLOTS >= 2) load_piece(j, r + SLOTS - 1);
    };
    // With one slot the next piece can load only when all warps are done with this one.
    const auto release = [&](int j, int r) {
        if constexpr (SLOTS == 1) {
            __syncthreads();
            load_piece(j, r + 1);
        }
    };

    if constexpr (!Q_STREAMED) {
        load_tile<LayoutQ, BR, HEAD_DIM, THREADS, cfg::VECTOR>(shared, q, block.row, 0);
        cp_async_commit();
    }
    const FragmentCursor<LayoutQ> q_cursor(shared, warp.row() + warp.lane % 16, warp.lane / 16);
    const __half fold_half = __float2half_rn(p.q_fold);
    const __half2 fold_pair(fold_half, fold_half);
    const u32 fold = *reinterpret_cast<const u32*>(&fold_pair);
    QRegisters q_registers;
    if constexpr (Q_IN_REGISTERS) {
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int step = 0; step < QK_STEPS; ++step) read_q(q_registers[m][step], q_cursor, 0, m, step * 2, fold);
        if constexpr (cfg::SHARE_QKV) __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < (SLOTS >= 2 ? SLOTS - 1 : 1); ++r) load_piece(0, r);

    const int kv_row = warp.kv * S_TILES * 8;
    const FragmentCursor<LayoutK> k_cursor(ring + Q_SLICE_BYTES, kv_row + warp.lane % 8 + warp.lane / 16 * 8, warp.lane / 8 % 2);
    const CursorV v_cursor(ring, warp.lane % 16, warp.kv * PIECE_TILES + warp.lane / 16);
    const FragmentCursor<LayoutP> p_cursor(shared + P_OFFSET, warp.row() + warp.lane % 16, warp.lane / 16);

    State state;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        state.max[m][0] = state.max[m][1] = -INF;
        state.sum[m][0] = state.sum[m][1] = 0.f;
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) state.o[m][n].zero();
    }

#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
        const int key = (first_tile + j) * BC;
        // A warp passes over tiles that none of its rows sees; the barriers it still meets. (In split-kv rows are shared.)
        const int warp_row = block.row + warp.row();
        const bool active =
            SPLIT_KV || (key < mask.end(warp_row + 16 * M_TILES - 1) && key + BC > mask.first(warp_row));
        float s[M_TILES][S_TILES][4];
        if constexpr (K_PIECES == 1) {
            arrive(j, 0);
            if (active) {
                ScoreTiles scores;
                zero(scores);
                score_product(scores, q_registers, q_cursor, k_cursor, 0, slot_of(j, 0), fold);
                unpack_scores(s, scores);
            }
            release(j, 0);
        } else {
            ScoreTiles scores;
            zero(scores);
#pragma unroll 1
            for (int r = 0; r < K_PIECES; ++r) {
                arrive(j, r);
                if (active) score_product(scores, q_registers, q_cursor, k_cursor, r, slot_of(j, r), fold);
                release(j, r);
            }
            unpack_scores(s, scores);
        }
        if constexpr (cfg::EARLY_V) arrive(j, K_PIECES);
        Probabilities probabilities;
        if (active) {
            if (key < whole_from || key + BC > whole_to)
                apply_mask(s, mask, block.row + warp.row() + warp.quad_row, key + kv_row + warp.quad_column * 2);
            online_softmax(s, state, p.scale_log2, warp);
            probabilities.pack(s, warp);
        }
        if constexpr (cfg::EARLY_V && SPLIT_KV) __syncthreads();
#pragma unroll
        for (int piece = 0; piece < V_PIECES; ++piece) {
            const int r = K_PIECES + piece;
            if (piece > 0 || !cfg::EARLY_V) arrive(j, r);
            if (active)
                value_product(state, probabilities, p_cursor, v_cursor, piece % V_ROW_PIECES * PV_STEPS,
                              piece / V_ROW_PIECES * PIECE_TILES, slot_of(j, r));
            release(j, r);
        }
    }
    store_output(p, block, warp, state);
}
