// The preprocess kernel computes the row statistics and the gradient of extra logits, and initialises dq_accum, its
// semaphores, the counters of the launch and the gradients' rows that belong to no sequence.
//
//     lse = −LSE · log2(e),   delta = Σ O·dO − dLSE,   dlogit of an m-block = −Σ exp(logit − LSE) · delta
//
// (STATISTICS_IN_PRODUCTS: −LSE/scale and −delta, as the columns of statistic_columns.cuh.)
// A row that sees no key, and one past the end of its sequence, has −∞ and 0: all its probabilities are then 0.
#include "attention/score.cuh"
#include "hopper/backward/dq_assignment.cuh"
#include "hopper/backward/dq_semaphore.cuh"
#include "hopper/backward/gradient_element.cuh"
#include "hopper/backward/statistic_columns.cuh"
#include "mma.cuh"

constexpr int HEAD_DIM_V = cfg::HEAD_DIM_V, THREADS = 256;
constexpr int LANES = HEAD_DIM_V <= 64 ? 8 : HEAD_DIM_V <= 128 ? 16 : 32;  // of a row, 8 columns each
constexpr int ROWS = THREADS / LANES;                     // which have a thread each of their own columns
// Rows of a thread whose loads are under way at once: each takes the latency of device memory.
constexpr int ROWS_OF_A_THREAD = ceil_div(BLOCK_M, ROWS), ROUNDS = ceil_div(ROWS_OF_A_THREAD, 4);
constexpr int ROWS_AT_ONCE = ceil_div(ROWS_OF_A_THREAD, ROUNDS);
constexpr bool EVEN_ROWS = BLOCK_M % (ROWS * ROWS_AT_ONCE) == 0;

// What every launch reads lies together: a kernel waits for each line of the constant cache that it begins to read.
struct PlainParams {
    float* dlogit_partials;        // (batch, m-block, head); packed sequences: (m-block, head), all m-blocks of a head
    DqSemaphore* semaphores;       // IN_ORDER
    DqElement* dq;                 // VARLEN: (row, head, column)
    DkdvElement *dk, *dv;          // VARLEN: (row, head, column); UNSEEN_KEYS: the same, sequence after sequence
    int *zeroed, *added, *written; // ZEROING_CTAS, IN_KERNEL_DQ, see Params of the gradients' kernels (params.cuh)
    const void *out, *dout;        // (batch, row, head, column), rows on 16 bytes
    const float *lse_in, *dlse;    // (batch, head, row); dlse may be null
    float *lse, *delta, *dq_accum;
    int* counters;                 // initialised here, see Params of the gradients' kernels; null where they have none
    long long out_batch, out_row, out_head, dout_batch, dout_row, dout_head;  // in elements
    long long lse_batch, lse_head;
    int heads, row_blocks;
    int split_arrivals;            // further counters
    SeqlenParams seqlen;           // keys are read with IN_ORDER, VARLEN and UNSEEN_KEYS
    ScoreParams score;
    int window_left, window_right; // IN_ORDER: what the kernel of the gradients knows of the mask
    int kv_heads, n_blocks, heads_per_section, zeroed_before;  // ZEROING_CTAS; kv_heads always
    int total_q, total_k;          // VARLEN: rows of dq, and of dk and dv
    long long dlse_batch, dlse_head;
    int first_key, end_key;        // UNSEEN_KEYS: the keys that tiles have
};
struct Params : PlainParams, Optional<cfg::QUERY_RANGES, QueryRanges> {};

// The sum, in f32, of the products of two pairs of packed elements.
__device__ __forceinline__ float dot(u32 a, u32 b) {
    const Element *x = reinterpret_cast<Element*>(&a), *y = reinterpret_cast<Element*>(&b);
    return Convert<Element>::to_float(x[0]) * Convert<Element>::to_float(y[0]) +
           Convert<Element>::to_float(x[1]) * Convert<Element>::to_float(y[1]);
}

__device__ __forceinline__ void clear(void* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += THREADS) static_cast<uint4*>(from)[i] = make_uint4(0, 0, 0, 0);
}

// Zeroes the rows [from, to) of a packed tensor; `workers` CTAs, of which the CTA is number `worker`, share them.
__device__ __forceinline__ void clear_rows(void* tensor, int row_bytes, long long from, long long to, long long worker,
                                           long long workers) {
    uint4* const end = reinterpret_cast<uint4*>(static_cast<char*>(tensor) + to * row_bytes);
    uint4* at =
        reinterpret_cast<uint4*>(static_cast<char*>(tensor) + from * row_bytes) + worker * THREADS + threadIdx.x;
    for (; at < end; at += workers * THREADS) *at = make_uint4(0, 0, 0, 0);
}

// Zeroes the rows of a packed gradient that no other kernel writes: those before the first sequence and after the last
// one, and, by the CTAs of a sequence's first m-block, what it has beyond the length that the caller gave for
// the longest.
template <typename Gradient>
__device__ __forceinline__ void clear_rows_of_no_sequence(const Params& p, Gradient* gradient, int columns,
                                                          const int* cu_seqlens, int longest, int total,
                                                          long long index, const RowBlock& at) {
    const int bytes = columns * sizeof(Gradient);
    const long long ctas = static_cast<long long>(gridDim.x) * gridDim.y;
    if (!at.of_no_sequence() && at.m_block == 0) {
        const int first = cu_seqlens[at.sequence], end = cu_seqlens[at.sequence + 1];
        if (end - first > longest) clear_rows(gradient, bytes, first + longest, end, blockIdx.y, gridDim.y);
    }
    clear_rows(gradient, bytes, 0, cu_seqlens[0], index, ctas);
    clear_rows(gradient, bytes, cu_seqlens[p.seqlen.batch], total, index, ctas);
}

// Zeroes the rows of a sequence's dK or dV that no tile has, which its CTAs share.
__device__ __forceinline__ void clear_unseen_keys(const Params& p, DkdvElement* gradient, int columns) {
    const int bytes = columns * sizeof(DkdvElement), workers = gridDim.x * gridDim.y;
    const int worker = blockIdx.y * gridDim.x + blockIdx.x;
    const long long first = static_cast<long long>(blockIdx.z) * p.seqlen.seqlen_k;
    clear_rows(gradient, bytes, first, first + p.first_key, worker, workers);
    clear_rows(gradient, bytes, first + p.end_key, first + p.seqlen.seqlen_k, worker, workers);
}

// Gives the tiles of a packed sequence their place in the launch, behind those of all sequences with more queries.
__device__ __forceinline__ void order_sequence(const Params& p, int sequence) {
    const auto queries = [&](int i) { return p.seqlen.cu_seqlens_q[i + 1] - p.seqlen.cu_seqlens_q[i]; };
    const int own = queries(sequence);
    int before = 0;
    for (int first = 0; first < p.seqlen.batch; first += THREADS) {
        const int i = first + threadIdx.x, other = i < p.seqlen.batch ? queries(i) : -1;
        before += __syncthreads_count(other > own || (other == own && i < sequence));
    }
    if (threadIdx.x == 0) p.counters[COUNTERS + before] = sequence;
}

// Initialises the counters of in-kernel zeros and dQ. Returns whether this kernel, and no warp of the kernel of the
// gradients, zeroes dq_accum of the CTA's m-block.
__device__ __forceinline__ bool init_in_kernel_dq(const Params& p, int batch, int head, int m_block) {
    const int group = p.heads / p.kv_heads, kv_head = batch * p.kv_heads + head / group;
    const TileOrder order{p.kv_heads * static_cast<int>(gridDim.z), p.n_blocks, p.heads_per_section};
    if (m_block == 0 && head % group == 0) {
        if (threadIdx.x == 0) p.zeroed[kv_head] = cfg::ZEROING_CTAS * order.tiles_before(kv_head, p.zeroed_before);
        if (cfg::IN_KERNEL_DQ && threadIdx.x == 0) p.added[kv_head] = 0;
        for (int i = threadIdx.x; cfg::IN_KERNEL_DQ && i < order.n_blocks; i += THREADS)
            p.written[order.index(i, kv_head)] = 0;
    }
    const int n_block = assigned_n_block(head % group * p.row_blocks + m_block, order.n_blocks,
                                         static_cast<long long>(group) * p.row_blocks);
    return order.index(n_block, kv_head) < p.zeroed_before;
}

// Initialises the semaphores of the CTA's m-block, and zeroes its dq_accum. In an order the first n-block stores, so
// that only m-blocks to which none adds need zeros. With block lists all have them, as a list may leave an m-block
// without an addition.
__device__ __forceinline__ void init_dq(const Params& p, const RowBlock& at, int head, long long row_block) {
    if constexpr (cfg::IN_ORDER) {
        const TileMask mask = tile_mask(p, seqlen_of(p, at.sequence, at.range));
        const BlockRange n_blocks = n_block_range_of<BLOCK_M>(mask, at.m_block, cfg::BLOCK_N);
        if (threadIdx.x < cfg::DQ_SEMAPHORES) p.semaphores[row_block].next_n_block[threadIdx.x] = ~n_blocks.low;
        if (!cfg::BLOCK_LISTS && n_blocks.count() > 0) return;
    }
    if (cfg::ZEROING_CTAS == 0 || init_in_kernel_dq(p, at.sequence, head, at.m_block))
        clear(p.dq_accum + row_block * cfg::DQ_ACCUM_FLOATS, cfg::DQ_ACCUM_FLOATS * sizeof(float));
}

// Initialises the counters of the launch; one warp of the launch calls it.
__device__ __forceinline__ void init_counters(const Params& p) {
    const int ordered = cfg::VARLEN ? p.seqlen.batch : 0;  // see order_sequence
    for (int i = threadIdx.x; i < COUNTERS + p.split_arrivals; i += WARP)
        p.counters[i < COUNTERS ? i : i + ordered] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) hopper_backward_preprocess(const __grid_constant__ Params p) {
    griddepcontrol_wait();                                // for whatever kernel is before this one on the stream
    griddepcontrol_launch_dependents();                   // which may read the operands before they wait for this one
    const dim3 place = row_block_place();
    const RowBlock at(p, place);
    const int head = place.y, first = at.m_block * BLOCK_M;
    const QuerySeqlen seqlen = queries_of(p, at.of_no_sequence() ? 0 : at.sequence, at.range);
    const int q_first = seqlen.q_first, q_length = at.of_no_sequence() ? 0 : seqlen.q_length, batch = seqlen.q_batch;
    const long long row_block = first_row_block(p, seqlen, at.sequence, head) + at.m_block;
    const long long index = (static_cast<long long>(blockIdx.z) * gridDim.y + head) * gridDim.x + blockIdx.x;
    if (p.counters != nullptr && index == 0 && threadIdx.x < WARP) init_counters(p);
    float dlogit = 0.f;
    if (first < q_length) {
        const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const bool has_columns = LANES * 8 == HEAD_DIM_V || lane * 8 < HEAD_DIM_V;
        const int column = has_columns ? lane * 8 : 0, last = q_length - 1;
        const Element* out = static_cast<const Element*>(p.out) + batch * p.out_batch + head * p.out_head + column;
        const Element* dout = static_cast<const Element*>(p.dout) + batch * p.dout_batch + head * p.dout_head + column;
        const float* lse_in = p.lse_in + batch * p.lse_batch + head * p.lse_head + q_first;
        const float* dlse = p.dlse == nullptr ? nullptr : p.dlse + batch * p.dlse_batch + head * p.dlse_head + q_first;
#pragma unroll 1
        for (int first_row = group; first_row < BLOCK_M; first_row += ROWS_AT_ONCE * ROWS) {
            uint4 a[ROWS_AT_ONCE], b[ROWS_AT_ONCE];
            float lse_of[ROWS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; ++i) {      // without a condition, which would wait for each load
                const int query = min(first + first_row + i * ROWS, last);
                const long long token = q_first + query;
                a[i] = *reinterpret_cast<const uint4*>(out + token * p.out_row);
                b[i] = *reinterpret_cast<const uint4*>(dout + token * p.dout_row);
                lse_of[i] = lse_in[query];
            }
            // Its stores run while the first loads are under way.
            if constexpr (cfg::DQ_ACCUM_FLOATS > 0)
                if (first_row == group) init_dq(p, at, head, row_block);
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; ++i) {
                const int row = first_row + i * ROWS, query = first + row;
                float sum = dot(a[i].x, b[i].x) + dot(a[i].y, b[i].y) + dot(a[i].z, b[i].z) + dot(a[i].w, b[i].w);
                sum = warp_sum<LANES>(has_columns ? sum : 0.f);
                if (lane != 0 || (!EVEN_ROWS && row >= BLOCK_M)) continue;
                const float lse = query <= last ? lse_of[i] : -INF;
                const bool seen = lse != -INF;
                if (p.dlse != nullptr && seen) sum -= dlse[query];
                sum = seen ? sum : 0.f;
                if constexpr (cfg::STATISTICS_IN_PRODUCTS) {
                    constexpr float LIMIT = StatisticWeights<Element>::LIMIT;
                    Element* const block = reinterpret_cast<Element*>(p.lse) + row_block * BLOCK_M * COLUMNS_OF_QUERY;
                    const float minus = seen ? -lse * LOG2_E / p.score.scale_log2 : -LIMIT;
                    store_statistic(block, row, STATISTIC_LSE, minus > LIMIT ? LIMIT : minus < -LIMIT ? -LIMIT : minus);
                    store_statistic(block, row, STATISTIC_DELTA, -sum);
                } else {
                    p.lse[row_block * BLOCK_M + row] = seen ? -lse * LOG2_E : -INF;
                    p.delta[row_block * BLOCK_M + row] = sum;
                }
                if (seen) Score::add_row_gradient<Element>(p.score, head, lse, sum, dlogit);
            }
        }
    }
    Score::store_row_gradient<THREADS>(dlogit, [&] {
        return p.dlogit_partials + (static_cast<long long>(place.z) * gridDim.x + place.x) * p.heads + head;
    });
    if constexpr (cfg::UNSEEN_KEYS) {
        clear_unseen_keys(p, p.dk, p.kv_heads * HEAD_DIM);
        clear_unseen_keys(p, p.dv, p.kv_heads * HEAD_DIM_V);
    }
    if constexpr (cfg::VARLEN) {
        if (p.counters != nullptr && index < p.seqlen.batch) order_sequence(p, static_cast<int>(index));
        const int *cu_q = p.seqlen.cu_seqlens_q, *cu_k = p.seqlen.cu_seqlens_k;
        const int q_longest = p.seqlen.seqlen_q, k_longest = p.seqlen.seqlen_k;
        clear_rows_of_no_sequence(p, p.dq, p.heads * HEAD_DIM, cu_q, q_longest, p.total_q, index, at);
        clear_rows_of_no_sequence(p, p.dk, p.kv_heads * HEAD_DIM, cu_k, k_longest, p.total_k, index, at);
        clear_rows_of_no_sequence(p, p.dv, p.kv_heads * HEAD_DIM_V, cu_k, k_longest, p.total_k, index, at);
    }
}
