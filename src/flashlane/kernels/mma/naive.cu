// The first tensor-core attention: FlashAttention-2's order of loops inside one CTA a head, nothing overlapped.
//
// Grid (1, heads, batch): a CTA walks over all query tiles of its head, and for each over the key tiles. Four warps
// have 16 rows each. K and V are copied into one buffer one after the other, through registers, with two barriers a
// tile. Shared memory is 2 · 64 · head_dim · 2 bytes.
#include "config.cuh"
#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "params.cuh"
#include "tile.cuh"

using Element = cfg::Element;
constexpr int ROWS = 64, KEYS = 64, WARPS = 4, THREADS = WARPS * WARP, HEAD_DIM = cfg::HEAD_DIM;
constexpr int S_TILES = KEYS / 8, O_TILES = HEAD_DIM / 8;
using Layout = TileLayout<HEAD_DIM, true>;

extern __shared__ __align__(128) unsigned char shared_memory[];

// Element by element through registers; what lies outside the view becomes zeros.
__device__ void copy_tile(unsigned char* tile, const View<Element>& view, int first_row) {
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        const bool inside = first_row + row < view.rows && column < view.columns;
        const long long at = (first_row + row) * view.row_stride + column * view.column_stride;
        Element* destination = reinterpret_cast<Element*>(tile + Layout::offset(row, column / CHUNK)) + column % CHUNK;
        *destination = inside ? view.data[at] : Element(0.f);
    }
}

using Cursor = FragmentCursor<Layout>;
using ScoreTiles = Accumulator<float>[S_TILES];
using OutputTiles = Accumulator<float>[O_TILES];

// S = Q·Kᵀ of a warp's 16 rows.
__device__ __forceinline__ void gemm_qk(ScoreTiles& s, const Cursor& q, const Cursor& k) {
    for (int n = 0; n < S_TILES; ++n) s[n].zero();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        u32 a[4], b[4];
        ldmatrix_x4(a, q.at(0, 0, step * 2));
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2) {
            ldmatrix_x4(b, k.at(0, n * 8, step * 2));
            mma<Element>(s[n], a, b[0], b[1]);
            mma<Element>(s[n + 1], a, b[2], b[3]);
        }
    }
}

// Scores to probabilities of a row, in place; `column` is the lane's first key. The factor of what was added before.
__device__ __forceinline__ float softmax_of_row(ScoreTiles& s, int half, int first, int end, int column,
                                                float scale_log2, float& max, float& sum) {
    float top = max;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = column + n * 8 + i;
            float& x = s[n].c[half * 2 + i];
            x = key >= first && key < end ? x * scale_log2 : -INF;
            top = fmaxf(top, x);
        }
    top = quad_max(top);
    const float rescale = top == -INF ? 1.f : ex2(max - top);
    max = top;
    sum *= rescale;
#pragma unroll
    for (int n = 0; n < S_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& x = s[n].c[half * 2 + i];
            x = top == -INF ? 0.f : ex2(x - top);
            sum += x;
        }
    return rescale;
}

// O += P·V
__device__ __forceinline__ void gemm_pv(OutputTiles& o, const ScoreTiles& s, const Cursor& v) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        u32 a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = &s[2 * step + i / 2].c[i % 2 * 2];
            a[i] = Convert<Element>::pack(pair[0], pair[1]);
        }
#pragma unroll
        for (int n = 0; n < O_TILES; n += 2) {
            ldmatrix_x4_trans(b, v.at(0, step * 16, n));
            mma<Element>(o[n], a, b[0], b[1]);
            mma<Element>(o[n + 1], a, b[2], b[3]);
        }
    }
}

// One row of a lane: its quarter of the columns, and the LSE.
__device__ __forceinline__ void store_row(const AttentionParams<Element>& p, const OutputTiles& o, int half, int row,
                                          float max, float sum) {
    Element* out = p.out + blockIdx.z * p.out_batch + blockIdx.y * p.out_head;
    float* lse = p.lse + (static_cast<long long>(blockIdx.z) * p.heads + blockIdx.y) * p.seqlen_q;
    const int lane = threadIdx.x % WARP;
    const float total = quad_sum(sum), inverse = total > 0.f ? 1.f / total : 0.f;
    if (row >= p.seqlen_q) return;
    if (lane % 4 == 0) lse[row] = natural_lse(max, total);
#pragma unroll
    for (int n = 0; n < O_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = n * 8 + lane % 4 * 2 + i;
            if (column < p.head_dim_v)
                out[row * p.out_row + column] = Convert<Element>::from_float(o[n].c[half * 2 + i] * inverse);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) mma_naive(const __grid_constant__ AttentionParams<Element> p) {
    const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / p.group;
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * 16;
    const View<Element> q{p.q + batch * p.q_batch + head * p.q_head, p.q_row, p.q_column, p.seqlen_q, p.head_dim};
    const View<Element> k{p.k + batch * p.k_batch + kv_head * p.k_head, p.k_row, p.k_column, p.seqlen_k, p.head_dim};
    const View<Element> v{p.v + batch * p.v_batch + kv_head * p.v_head, p.v_row, p.v_column, p.seqlen_k, p.head_dim_v};
    const Mask mask{p.seqlen_k, p.shift, p.window_left, p.window_right};
    unsigned char* const q_tile = shared_memory;
    unsigned char* const kv_tile = shared_memory + Layout::bytes(ROWS);
    const Cursor q_cursor(shared_address(q_tile), warp_row + lane % 16, lane / 16);
    const Cursor k_cursor(shared_address(kv_tile), lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const Cursor v_cursor(shared_address(kv_tile), lane % 16, lane / 16);

    for (int first_row = 0; first_row < p.seqlen_q; first_row += ROWS) {
        __syncthreads();
        copy_tile(q_tile, q, first_row);
        OutputTiles o;
        for (int n = 0; n < O_TILES; ++n) o[n].zero();
        const int row = first_row + warp_row + lane / 4;  // this lane's rows: row and row + 8
        float max[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};

        for (int first_key = 0; first_key < p.seqlen_k; first_key += KEYS) {
            __syncthreads();
            copy_tile(kv_tile, k, first_key);
            __syncthreads();
            ScoreTiles s;
            gemm_qk(s, q_cursor, k_cursor);
            float rescale[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                rescale[half] = softmax_of_row(s, half, mask.first(row + half * 8), mask.end(row + half * 8),
                                               first_key + lane % 4 * 2, p.scale_log2, max[half], sum[half]);
            __syncthreads();
            copy_tile(kv_tile, v, first_key);
            __syncthreads();
#pragma unroll
            for (int n = 0; n < O_TILES; ++n) o[n].scale(rescale[0], rescale[1]);
            gemm_pv(o, s, v_cursor);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) store_row(p, o, half, row + half * 8, max[half], sum[half]);
    }
}
