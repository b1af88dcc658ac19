// Before the backward kernels: the statistics of the rows, what dQ is summed with, and the sinks' gradient.
//
//     lse = −LSE · log2(e),   delta = Σ O·dO − dLSE,   a block's share of dsink = −Σ exp(sink − LSE) · delta
//
// A row that sees no key, and one past the end of its sequence, has −∞ and 0: all its probabilities are then 0.
#include "hopper/backward/blocks.cuh"
#include "mma.cuh"

constexpr int HEAD_DIM_V = cfg::HEAD_DIM_V, THREADS = 256;
constexpr int LANES = HEAD_DIM_V <= 64 ? 8 : HEAD_DIM_V <= 128 ? 16 : 32;  // of a row, 8 columns each
constexpr float LOG2_E = 1.4426950408889634f;

struct Params {
    const void *out, *dout;        // (batch, row, head, column), rows on 16 bytes
    const float *lse_in, *dlse;    // (batch, head, row); dlse may be null
    const float* sinks;            // (head)
    const int *cu_q, *cu_k;        // VARLEN; cu_k with DETERMINISTIC
    float *lse, *delta;
    float* dq;                     // sums
    float* shares;                 // (batch, block, head) of dsink
    BlockState* states;            // DETERMINISTIC
    int *queue, *counters;         // to become 0; the queue with FINISH_INSIDE
    void* dq_out;                  // FINISH_INSIDE: (batch, row, head, column)
    int *zeroed, *added, *finished;  // CHORES, see backward_tiles.cuh
    long long out_batch, out_row, out_head, dout_batch, dout_row, dout_head;  // in elements
    long long dq_batch, dq_row, dq_head;
    long long lse_batch, lse_head, dlse_batch, dlse_head;
    int heads, seqlen_q, stat_blocks, blocks;  // blocks: of the longest sequence
    int seqlen_k, window_left, window_right, bottom_right;  // DETERMINISTIC: what the backward kernel knows of the mask
    int arrivals;                  // further counters
    int kv_heads, key_blocks, heads_per_section, zeroed_before;  // CHORES
};

// Products of two packed elements, summed in f32.
__device__ __forceinline__ float dot(u32 a, u32 b) {
    const Element *x = reinterpret_cast<Element*>(&a), *y = reinterpret_cast<Element*>(&b);
    return Convert<Element>::to_float(x[0]) * Convert<Element>::to_float(y[0]) +
           Convert<Element>::to_float(x[1]) * Convert<Element>::to_float(y[1]);
}

__device__ __forceinline__ void clear(void* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += THREADS) static_cast<uint4*>(from)[i] = make_uint4(0, 0, 0, 0);
}

// What is known of the tiles' shares before the launch that has them. Whether this block's sums get their zeros here.
__device__ __forceinline__ bool begin_chores(const Params& p, int which, int head) {
    const int group = p.heads / p.kv_heads, kv_head = which * p.kv_heads + head / group;
    const TileOrder order{p.kv_heads * static_cast<int>(gridDim.z), p.key_blocks, p.heads_per_section};
    if (blockIdx.x == 0 && head % group == 0) {
        if (threadIdx.x == 0) p.zeroed[kv_head] = order.before(kv_head, p.zeroed_before), p.added[kv_head] = 0;
        for (int i = threadIdx.x; i < order.blocks; i += THREADS) p.finished[order.index(i, kv_head)] = 0;
    }
    const int owner = owner_of(head % group * p.stat_blocks + blockIdx.x, order.blocks, static_cast<long long>(group) * p.stat_blocks);
    return order.index(owner, kv_head) < p.zeroed_before;
}

// The state of a block of queries, its sums' zeros, and those of dQ where nobody adds to it.
__device__ __forceinline__ void begin_sums(const Params& p, const Rows& rows, int which, int head, long long stat) {
    if constexpr (cfg::DETERMINISTIC) {
        const int first = blockIdx.x * BLOCK_M;
        const Blocks keys = keys_of(p, Sequence(p, which), blockIdx.x, cfg::BLOCK_N);
        if (threadIdx.x == 0) {
            p.states[stat] = {{keys.low, keys.low}, keys.high, 0, rows.batch, head, rows.q_first + first, rows.q_length - first};
        }
        if (cfg::FINISH_INSIDE && keys.count() == 0) {
            Element* const dq = static_cast<Element*>(p.dq_out) + rows.batch * p.dq_batch + head * p.dq_head;
            for (int row = first; row < min(first + BLOCK_M, rows.q_length); ++row)
                clear(dq + (static_cast<long long>(rows.q_first) + row) * p.dq_row, HEAD_DIM * sizeof(Element));
        }
    }
    if (!cfg::CHORES || begin_chores(p, which, head)) clear(p.dq + stat * cfg::SUM_FLOATS, cfg::SUM_FLOATS * sizeof(float));
}

// By one warp of the launch.
__device__ __forceinline__ void begin_counters(const Params& p) {
    for (int i = threadIdx.x; i < COUNTERS + p.arrivals; i += WARP)
        if (i != PARTS_ALL) p.counters[i] = 0;
    if constexpr (cfg::FINISH_INSIDE) {
        int blocks = 0;                                   // of queries that any keys are added to
        for (int i = threadIdx.x; i < gridDim.z; i += WARP)
            blocks += queries_of_all(p, Sequence(p, i), cfg::BLOCK_N).count();
        blocks = __reduce_add_sync(0xffffffffu, blocks);
        if (threadIdx.x == 0) p.counters[PARTS_ALL] = 2 * blocks * p.heads;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) hopper_backward_preprocess(const __grid_constant__ Params p) {
    griddepcontrol_launch_dependents();
    const int head = blockIdx.y, which = blockIdx.z, first = blockIdx.x * BLOCK_M;
    const Rows rows(p, which);
    const int q_first = rows.q_first, q_length = rows.q_length, batch = rows.batch;
    const long long stat = stat_block(p, rows, which, head) + blockIdx.x;
    const long long index = (static_cast<long long>(which) * gridDim.y + head) * gridDim.x + blockIdx.x;
    if (p.counters != nullptr && index == 0 && threadIdx.x < WARP) begin_counters(p);
    // There are no more parts than blocks of threads for them, and of packed sequences than places.
    if (cfg::FINISH_INSIDE && threadIdx.x < 2 && (!cfg::VARLEN || index < static_cast<long long>(p.heads) * p.stat_blocks))
        p.queue[2 * index + threadIdx.x] = 0;
    const bool some = first < q_length;
    float share = 0.f;
    if (some) {
        const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const Element* out = static_cast<const Element*>(p.out) + batch * p.out_batch + head * p.out_head;
        const Element* dout = static_cast<const Element*>(p.dout) + batch * p.dout_batch + head * p.dout_head;
        const float* lse_in = p.lse_in + batch * p.lse_batch + head * p.lse_head + q_first;
        const float* dlse = p.dlse == nullptr ? nullptr : p.dlse + batch * p.dlse_batch + head * p.dlse_head + q_first;
#pragma unroll 2
        for (int row = group; row < BLOCK_M; row += THREADS / LANES) {
            const int query = first + row;
            float sum = 0.f;
            if (query < q_length && lane * 8 < HEAD_DIM_V) {
                const long long at = q_first + query;
                const uint4 a = *reinterpret_cast<const uint4*>(out + at * p.out_row + lane * 8);
                const uint4 b = *reinterpret_cast<const uint4*>(dout + at * p.dout_row + lane * 8);
                sum = dot(a.x, b.x) + dot(a.y, b.y) + dot(a.z, b.z) + dot(a.w, b.w);
            }
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (lane != 0) continue;
            const float lse = query < q_length ? lse_in[query] : -INF;
            const bool seen = lse != -INF;
            if (p.dlse != nullptr && seen) sum -= dlse[query];
            sum = seen ? sum : 0.f;
            p.lse[stat * BLOCK_M + row] = seen ? -lse * LOG2_E : -INF;
            p.delta[stat * BLOCK_M + row] = sum;
            if (cfg::SINKS && seen) share -= ex2((p.sinks[head] - lse) * LOG2_E) * sum;
        }
        if constexpr (cfg::SUM_FLOATS > 0) begin_sums(p, rows, which, head, stat);
    }
    if constexpr (cfg::SINKS) {
        __shared__ float warps[THREADS / WARP];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) share += __shfl_xor_sync(0xffffffffu, share, step);
        if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = share;
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 1; i < THREADS / WARP; ++i) share += warps[i];
            p.shares[(static_cast<long long>(which) * p.blocks + blockIdx.x) * p.heads + head] = share;
        }
    }
}
