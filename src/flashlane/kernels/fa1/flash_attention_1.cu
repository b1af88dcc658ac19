// FlashAttention-1 in f32 on CUDA cores, as the paper's algorithm 1 has it: the outer loop walks over K and V, the
// inner one over Q, and O, l and m go to device memory and back between them.
//
// Grid (heads, batch), one warp a CTA, one thread a row: 32×32 tiles. The Q, K, V and S tiles take
// (3 · 32 · head_dim + 32 · 32) · 4 bytes of shared memory (the larger of the two head dims).
#include "config.cuh"
#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "params.cuh"
#include "tile.cuh"

constexpr int TILE = 32, HEAD_DIM = cfg::HEAD_DIM;

extern __shared__ float shared_floats[];

__device__ void copy_tile(float (*tile)[HEAD_DIM], const View<float>& source, int first_row) {
    for (int i = threadIdx.x; i < TILE * HEAD_DIM; i += TILE) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        const bool inside = first_row + row < source.rows && column < source.columns;
        tile[row][column] =
            inside ? source.data[(first_row + row) * source.row_stride + column * source.column_stride] : 0.f;
    }
}

struct Params {
    AttentionParams<float> attention;
    float* sum;  // l of every row, (batch, head, row)
    float* max;  // m of every row, in base 2
};

extern "C" __global__ void __launch_bounds__(TILE) flash_attention_1(const __grid_constant__ Params params) {
    const AttentionParams<float>& p = params.attention;
    const int head = blockIdx.x, batch = blockIdx.y, kv_head = head / p.group;
    auto q_tile = reinterpret_cast<float(*)[HEAD_DIM]>(shared_floats);
    auto k_tile = q_tile + TILE;
    auto v_tile = k_tile + TILE;
    auto s_tile = reinterpret_cast<float(*)[TILE]>(v_tile + TILE);
    const View<float> q{p.q + batch * p.q_batch + head * p.q_head, p.q_row, p.q_column, p.seqlen_q, p.head_dim};
    const View<float> k{p.k + batch * p.k_batch + kv_head * p.k_head, p.k_row, p.k_column, p.seqlen_k, p.head_dim};
    const View<float> v{p.v + batch * p.v_batch + kv_head * p.v_head, p.v_row, p.v_column, p.seqlen_k, p.head_dim_v};
    const Mask mask{p.seqlen_k, p.shift, p.window_left, p.window_right};
    const long long rows = (static_cast<long long>(batch) * p.heads + head) * p.seqlen_q;
    float *lse = p.lse + rows, *row_sum = params.sum + rows, *row_max = params.max + rows;
    float* out = p.out + batch * p.out_batch + head * p.out_head;
    const int thread = threadIdx.x;

    for (int row = thread; row < p.seqlen_q; row += TILE) {
        row_sum[row] = 0.f, row_max[row] = -INF, lse[row] = -INF;
        for (int column = 0; column < p.head_dim_v; ++column) out[row * p.out_row + column] = 0.f;
    }
    for (int first_key = 0; first_key < p.seqlen_k; first_key += TILE) {
        __syncwarp();
        copy_tile(k_tile, k, first_key);
        copy_tile(v_tile, v, first_key);
        for (int first_row = 0; first_row < p.seqlen_q; first_row += TILE) {
            __syncwarp();
            copy_tile(q_tile, q, first_row);
            __syncwarp();
            const int row = first_row + thread;
            if (row >= p.seqlen_q) continue;
            const int first = mask.first(row), end = mask.end(row);
            float tile_max = -INF;
            for (int j = 0; j < TILE; ++j) {
                float s = 0.f;
                for (int column = 0; column < HEAD_DIM; ++column) s += q_tile[thread][column] * k_tile[j][column];
                const int key = first_key + j;
                s = key >= first && key < end ? s * p.scale_log2 : -INF;
                s_tile[thread][j] = s;
                tile_max = fmaxf(tile_max, s);
            }
            if (tile_max == -INF) continue;
            float tile_sum = 0.f;
            for (int j = 0; j < TILE; ++j) {
                const float e = exp2f(s_tile[thread][j] - tile_max);
                s_tile[thread][j] = e;
                tile_sum += e;
            }
            const float old_max = row_max[row], old_sum = row_sum[row], max = fmaxf(old_max, tile_max);
            const float keep = old_max == -INF ? 0.f : exp2f(old_max - max), add = exp2f(tile_max - max);
            const float sum = keep * old_sum + add * tile_sum;
            for (int column = 0; column < p.head_dim_v; ++column) {
                float pv = 0.f;
                for (int j = 0; j < TILE; ++j) pv += s_tile[thread][j] * v_tile[j][column];
                float& o = out[row * p.out_row + column];
                o = (keep * old_sum * o + add * pv) / sum;
            }
            row_max[row] = max, row_sum[row] = sum;
            lse[row] = natural_lse(max, sum);
        }
    }
}
