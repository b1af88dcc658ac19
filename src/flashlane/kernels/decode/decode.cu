// Attention of few queries over a long cache, bound by the reading of K and V: each is read once for all query heads
// that share it.
//
// The rows of a tile are the queries of one KV head, token by token: row r is token r / group, head r % group of the
// group. Items (sequence, KV head, tile of BR rows) are split by keys into parts, one block or one cluster each:
//
//     keys of an item   |<------- part 0 ------->|<------- part 1 ------->|<- part 2 ->|
//     step of a block   |T0 T1 T2 T3|T0 T1 T2 T3|T0 ...        a team takes KEYS keys of each step
//
// A team is WARPS_M warps of 16 rows each; it has a ring of STAGES tiles of K and V of its own and its own softmax, and
// meets no other team before the end. Then sums go up: teams in shared memory, blocks of a cluster in each other's shared
// memory, parts in device memory by the block that comes last (split.cuh), always in the same order.
//
// A block runs once, and instructions that run once come from memory a few at a time: the code around the loop is kept
// short, and one piece of code fills the rings before and in the loop.
//
// Shared memory: the rings, Q; over them, at the end, the teams' statistics and sums, or those of the parts; the block's.
#include "config.cuh"
#include "cache.cuh"
#include "cluster.cuh"
#include "params.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "tile.cuh"

using Element = cfg::Element;
constexpr int HEAD_DIM = cfg::HEAD_DIM, HEAD_DIM_V = cfg::HEAD_DIM_V, KEYS = cfg::KEYS, STAGES = cfg::STAGES;
constexpr int WARPS_M = cfg::WARPS_M, TEAMS = cfg::TEAMS, CLUSTER = cfg::CLUSTER;
constexpr int BR = 16 * WARPS_M, TEAM = WARP * WARPS_M, THREADS = TEAM * TEAMS, STEP = KEYS * TEAMS;
constexpr int S_TILES = KEYS / 8, O_TILES = HEAD_DIM_V / 8, QK_STEPS = HEAD_DIM / 16, PV_STEPS = KEYS / 16;
constexpr float LAZY = 8.f;  // old maxima are kept until a score exceeds them by 2^8: O is rarely rescaled
constexpr float LOG2_E = 1.4426950408889634f;

using LayoutQ = TileLayout<HEAD_DIM, false>;
using LayoutK = TileLayout<HEAD_DIM, false>;
using LayoutV = TileLayout<HEAD_DIM_V, false>;
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int K_BYTES = LayoutK::bytes(KEYS), STAGE_BYTES = K_BYTES + LayoutV::bytes(KEYS);
constexpr int RING_BYTES = STAGES * STAGE_BYTES, Q_OFFSET = TEAMS * RING_BYTES;
constexpr int SUM_STRIDE = HEAD_DIM_V + 8;  // floats; a quarter of a warp writes rows without bank conflicts
constexpr int SUMS_OFFSET = TEAMS * BR * 8, SUMS_BYTES = SUMS_OFFSET + TEAMS * BR * SUM_STRIDE * 4;
constexpr int SHARE_OFFSET = larger(SUMS_BYTES, cfg::MAX_SPLITS * BR * 8);
constexpr int SHARE_BYTES = CLUSTER > 1 ? BR * (8 + SUM_STRIDE * 4) : 0;
static_assert(larger(Q_OFFSET + LayoutQ::bytes(BR), SHARE_OFFSET + SHARE_BYTES) == cfg::SHARED_BYTES,
              "the Python formula disagrees");
static_assert(KEYS % 16 == 0 && KEYS <= WARP && STAGES >= 2);

struct Params {
    AttentionParams<Element> attention;
    CacheParams cache;
    SplitParams split;
    const float* alibi_slopes;
    long long alibi_batch, alibi_head;
    const void* sinks;
    long long sink_stride;
    int sinks_are_float, kv_heads, row_blocks, total_q;  // total_q: rows of packed queries, or -1
    u32 group_inverse;                                   // 2^32 / group, rounded up, or 0 for a group of 1
    float softcap_log2, softcap_inverse2;                // softcap · log2(e); 2 · log2(e) · scale / softcap
};
static_assert(sizeof(Params) == cfg::PARAMS_BYTES, "the Python mirror disagrees");

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Row {
    int token, head;
};

// One block's item and the part of it that it computes.
struct Work {
    int batch, kv_head, row_block, rows;  // rows of the tile that exist
    int first_token, first_head;          // of the tile's first row; the head within the group
    int part, parts, rank;                // of the item's parts; the block's place in its cluster
    int step, steps;                      // of STEP keys: the first, and how many
    int first_pack, end_pack;             // the block's share of the output, in packs of 4 columns, row by row
    long long item;

    // (The product is exact for rows × group < 2^32.)
    __device__ __forceinline__ Row at(int row, const Params& p) const {
        const int n = first_head + row, tokens = p.group_inverse ? __umulhi(n, p.group_inverse) : n;
        return {first_token + tokens, kv_head * p.attention.group + n - tokens * p.attention.group};
    }
};

struct State {
    Accumulator<float> o[O_TILES];
    float max[2];  // raw products, or log2 units with MODIFIERS; rows g and g + 8
    float sum[2];  // of this lane's columns
};

struct Lane {
    int lane, team, warp_m, quad_row, quad_column;

    __device__ __forceinline__ Lane() {
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
        lane = threadIdx.x % WARP, team = warp / WARPS_M, warp_m = warp % WARPS_M;
        quad_row = lane / 4, quad_column = lane % 4;
    }
    __device__ __forceinline__ int row(int half) const { return warp_m * 16 + half * 8 + quad_row; }
    // All warps of the team; also makes their shared memory visible to each other.
    __device__ __forceinline__ void team_sync() const {
        if constexpr (WARPS_M == 1) __syncwarp();
        else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
    }
};

using Queries = u32[QK_STEPS][4];
using Scores = float[S_TILES][4];
using Slopes = float[2];  // ALiBi, times log2(e)

// Start copying the block's rows of Q.
__device__ __forceinline__ void load_queries(u32 tile, const Params& p, const Work& work, const Sequence& sequence) {
    const AttentionParams<Element>& a = p.attention;
    const Element* base = a.q + (p.total_q < 0 ? work.batch * a.q_batch : 0) + sequence.q_start * a.q_row;
#pragma unroll 1
    for (int i = threadIdx.x; i < BR * LayoutQ::CHUNKS; i += THREADS) {
        const int row = i / LayoutQ::CHUNKS, chunk = i % LayoutQ::CHUNKS;
        const Row at = work.at(row, p);
        const bool inside = row < work.rows && chunk * CHUNK < a.head_dim;
        cp_async_16(tile + LayoutQ::offset(row, chunk), base + at.token * a.q_row + at.head * a.q_head + chunk * CHUNK,
                    inside ? 16 : 0);
    }
}

__device__ __forceinline__ void score_product(Scores& s, const Queries& queries, const FragmentCursor<LayoutQ>& q,
                                              const FragmentCursor<LayoutK>& k, u32 slot) {
    Accumulator<float> acc[S_TILES];
#pragma unroll
    for (int n = 0; n < S_TILES; ++n) acc[n].zero();
#pragma unroll
    for (int step = 0; step < QK_STEPS; ++step) {
        u32 a[4];
        if constexpr (!cfg::Q_IN_REGISTERS) ldmatrix_x4(a, q.at(0, 0, step * 2));
        else
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = queries[step][i];
#pragma unroll
        for (int n = 0; n < S_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, k.at(slot, n * 8, step * 2));
            mma<Element>(acc[n], a, b[0], b[1]);
            mma<Element>(acc[n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < S_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = acc[n].get(i);
}

// Scores to log2 units: scale, soft cap, ALiBi.
__device__ __forceinline__ void modify(Scores& s, const Params& p, const Work& work, const Slopes& slopes, const Lane& lane,
                                       int shift, int key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int distance = work.at(lane.row(half), p).token + shift - key;
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[n][half * 2 + i];
                // tanh(y) = 1 − 2 / (1 + e^2y): tanh.approx is right to 11 bits only
                if (p.softcap_log2 > 0.f) x = p.softcap_log2 * (1.f - __fdividef(2.f, 1.f + ex2(x * p.softcap_inverse2)));
                else x *= p.attention.scale_log2;
                x -= slopes[half] * fabsf(static_cast<float>(distance - n * 8 - i));
            }
    }
}

// Hide what the mask hides, in tiles that it cuts.
__device__ __forceinline__ void apply_mask(Scores& s, const Params& p, const Work& work, const Mask& mask, int first_key,
                                           const Lane& lane, int key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = work.at(lane.row(half), p).token;
        const int first = max(first_key, mask.first(token)), end = mask.end(token);
        const u32 visible = max(end - first, 0), distance = key - first;
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) hide_outside(s[n][half * 2 + i], distance + n * 8 + i, visible);
    }
}

// Scores to probabilities, unnormalised; updates the statistics, rescales O.
__device__ __forceinline__ void online_softmax(Scores& s, State& state, float scale_log2) {
    float rescale[2];
    bool grew = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = s[0][half * 2];
#pragma unroll
        for (int n = 0; n < S_TILES; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
        top = quad_max(top);
        const float old = state.max[half];
        // (−inf for `old`: any score updates. −inf for both: the difference is not a number, and nothing does.)
        const bool update = (top - old) * scale_log2 > LAZY;
        const float now = update ? top : old;
        rescale[half] = ex2(update ? (old - now) * scale_log2 : 0.f);
        state.max[half] = now;
        state.sum[half] *= rescale[half];
        grew |= update;
    }
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int n = 0; n < O_TILES; ++n) state.o[n].scale(rescale[0], rescale[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float offset = state.max[half] == -INF ? 0.f : state.max[half] * scale_log2;
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[n][half * 2 + i];
                x = ex2(fmaf(x, scale_log2, -offset));
                state.sum[half] += x;
            }
    }
}

__device__ __forceinline__ void value_product(State& state, const Scores& s, const FragmentCursor<LayoutV>& v, u32 slot) {
#pragma unroll
    for (int step = 0; step < PV_STEPS; ++step) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = &s[2 * step + i / 2][i % 2 * 2];
            a[i] = Convert<Element>::pack(pair[0], pair[1]);
        }
#pragma unroll
        for (int n = 0; n < O_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, v.at(slot, step * 16, n));
            mma<Element>(state.o[n], a, b[0], b[1]);
            mma<Element>(state.o[n + 1], a, b[2], b[3]);
        }
    }
}

// A pack of one row's output, unnormalised, and the row's statistics.
struct Sum {
    Statistics statistics;
    float4 out;

    __device__ __forceinline__ Sum() : statistics{-INF, 0.f}, out(make_float4(0.f, 0.f, 0.f, 0.f)) {}
    __device__ __forceinline__ void add(float weight, float sum, const float4& x) {
        statistics.sum = fmaf(weight, sum, statistics.sum);
        out.x = fmaf(weight, x.x, out.x), out.y = fmaf(weight, x.y, out.y);
        out.z = fmaf(weight, x.z, out.z), out.w = fmaf(weight, x.w, out.w);
    }
};

// Leave a team's statistics and output in shared memory.
__device__ __forceinline__ void leave_team(const State& state, const Lane& lane, int rows, float scale_log2) {
    Statistics* statistics = reinterpret_cast<Statistics*>(shared_memory) + lane.team * BR;
    float* sums = reinterpret_cast<float*>(shared_memory + SUMS_OFFSET) + lane.team * BR * SUM_STRIDE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane.row(half);
        const float sum = quad_sum(state.sum[half]), top = state.max[half];
        if (row >= rows) continue;
        if (lane.quad_column == 0) statistics[row] = {top == -INF ? -INF : top * scale_log2, sum};
#pragma unroll
        for (int n = 0; n < O_TILES; ++n)
            *reinterpret_cast<float2*>(&sums[row * SUM_STRIDE + n * 8 + lane.quad_column * 2]) =
                make_float2(state.o[n].get(half * 2), state.o[n].get(half * 2 + 1));
    }
}

__device__ __forceinline__ Sum add_teams(int row, int column) {
    const Statistics* statistics = reinterpret_cast<const Statistics*>(shared_memory) + row;
    const float* sums = reinterpret_cast<const float*>(shared_memory + SUMS_OFFSET) + row * SUM_STRIDE + column;
    Sum all;
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) all.statistics.top = fmaxf(all.statistics.top, statistics[team * BR].top);
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) {
        const Statistics one = statistics[team * BR];
        all.add(one.weight(all.statistics.top), one.sum, *reinterpret_cast<const float4*>(&sums[team * BR * SUM_STRIDE]));
    }
    return all;
}

// Leave the block's sums where its cluster reads them.
__device__ __forceinline__ void leave_share(const Work& work, int packs) {
    Statistics* statistics = reinterpret_cast<Statistics*>(shared_memory + SHARE_OFFSET);
    float* sums = reinterpret_cast<float*>(shared_memory + SHARE_OFFSET + BR * 8);
    for (int i = threadIdx.x; i < work.rows * packs; i += THREADS) {
        const int row = i / packs, column = i % packs * 4;
        const Sum sum = add_teams(row, column);
        *reinterpret_cast<float4*>(&sums[row * SUM_STRIDE + column]) = sum.out;
        if (column == 0) statistics[row] = sum.statistics;
    }
}

__device__ __forceinline__ Sum add_shares(int row, int column) {
    const u32 statistics = shared_address(shared_memory + SHARE_OFFSET) + row * 8;
    const u32 sums = shared_address(shared_memory + SHARE_OFFSET + BR * 8) + (row * SUM_STRIDE + column) * 4;
    float2 one[CLUSTER];
    float4 x[CLUSTER];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
        one[rank] = load_cluster_float2(address_in(statistics, rank));
        x[rank] = load_cluster_float4(address_in(sums, rank));
    }
    Sum all;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) all.statistics.top = fmaxf(all.statistics.top, one[rank].x);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank)
        all.add(Statistics{one[rank].x, one[rank].y}.weight(all.statistics.top), one[rank].y, x[rank]);
    return all;
}

// The logit in log2 units that a head's sink adds; −inf without.
__device__ __forceinline__ float sink_of(const Params& p, int head) {
    if (p.sinks == nullptr) return -INF;
    const long long at = head * p.sink_stride;
    return LOG2_E * (p.sinks_are_float ? static_cast<const float*>(p.sinks)[at]
                                       : Convert<Element>::to_float(static_cast<const Element*>(p.sinks)[at]));
}

// Bring the head's sink in, normalise and store.
__device__ __forceinline__ void store_whole(const Params& p, const Work& work, const Sequence& sequence, int row, int column,
                                            const Sum& all) {
    const AttentionParams<Element>& a = p.attention;
    const Row at = work.at(row, p);
    const float sink = sink_of(p, at.head), top = fmaxf(all.statistics.top, sink), kept = all.statistics.weight(top);
    const float sum = all.statistics.sum * kept + (sink == -INF ? 0.f : ex2(sink - top)), scale = sum > 0.f ? kept / sum : 0.f;
    const bool packed = p.total_q >= 0;
    const long long token = sequence.q_start + at.token;
    Element* out = a.out + (packed ? 0 : work.batch * a.out_batch) + token * a.out_row + at.head * a.out_head + column;
    const uint2 words = make_uint2(Convert<Element>::pack(all.out.x * scale, all.out.y * scale),
                                   Convert<Element>::pack(all.out.z * scale, all.out.w * scale));
    if (reinterpret_cast<u64>(out) % 8 == 0) {
        *reinterpret_cast<uint2*>(out) = words;
    } else {  // the caller's strides may be anything
        const Element* values = reinterpret_cast<const Element*>(&words);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = values[i];
    }
    if (column == 0) {
        const long long head = packed ? at.head : static_cast<long long>(work.batch) * a.heads + at.head;
        a.lse[head * (packed ? p.total_q : a.seqlen_q) + token] = natural_lse(top, sum);
    }
}

// Add up the block's share of the output over teams and cluster; it is done, or goes to the work space.
__device__ __forceinline__ void add_part(const Params& p, const Work& work, const Sequence& sequence, int packs) {
    const long long place = (work.item * p.split.splits + work.part) * BR;
    for (int i = work.first_pack + threadIdx.x; i < work.end_pack; i += THREADS) {
        const int row = i / packs, column = i % packs * 4;
        Sum sum;
        if constexpr (CLUSTER > 1) sum = add_shares(row, column);
        else sum = add_teams(row, column);
        if (work.parts == 1) {
            store_whole(p, work, sequence, row, column, sum);
        } else {
            __stcg(reinterpret_cast<float4*>(p.split.out + (place + row) * p.attention.head_dim_v + column), sum.out);
            // Each block of a cluster leaves the statistics of its own rows, to wait for no other.
            if (column == 0 || i == work.first_pack)
                __stcg(reinterpret_cast<float2*>(p.split.statistics + place * CLUSTER + work.rank * BR + row),
                       make_float2(sum.statistics.top, sum.statistics.sum));
        }
    }
}

// Put the parts of an item together: the block's share of the output.
__device__ __forceinline__ void add_parts(const Params& p, const Work& work, const Sequence& sequence, int packs) {
    constexpr int AHEAD = 16;  // loads in flight: each is a trip to the L2 cache
    Statistics* statistics = reinterpret_cast<Statistics*>(shared_memory);  // (part, row)
    const long long place = work.item * p.split.splits * BR, next = static_cast<long long>(BR) * p.attention.head_dim_v;
    float4 x[AHEAD];
    const auto load = [&](int i, int first_part) {
        const float* source = p.split.out + (place + i / packs) * p.attention.head_dim_v + i % packs * 4;
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            x[j] = __ldcg(reinterpret_cast<const float4*>(source + min(first_part + j, work.parts - 1) * next));
    };
    const int first = work.first_pack + threadIdx.x;
    if (first < work.end_pack) load(first, 0);
    for (int i = threadIdx.x; i < work.parts * BR; i += THREADS) {
        const int part = i / BR, row = i % BR;
        // (Rows of other blocks' shares are not there yet, and not used.)
        const Statistics* source = p.split.statistics + (place + part * BR) * CLUSTER + work.rank * BR + row;
        if (row < work.rows) *reinterpret_cast<float2*>(&statistics[i]) = __ldcg(reinterpret_cast<const float2*>(source));
    }
    __syncthreads();
#pragma unroll 1
    for (int i = first; i < work.end_pack; i += THREADS) {
        const int row = i / packs;
        Sum all;
#pragma unroll 1
        for (int part = 0; part < work.parts; ++part)
            all.statistics.top = fmaxf(all.statistics.top, statistics[part * BR + row].top);
#pragma unroll 1
        for (int part = 0; part < work.parts; part += AHEAD) {
            if (i > first || part > 0) load(i, part);
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                const Statistics one = statistics[min(part + j, work.parts - 1) * BR + row];
                all.add(part + j < work.parts ? one.weight(all.statistics.top) : 0.f, one.sum, x[j]);
            }
        }
        store_whole(p, work, sequence, row, i % packs * 4, all);
    }
}

// Rows of packed queries after the last sequence: they see no key.
__device__ __forceinline__ void clear_rest(const Params& p, const Work& work) {
    const AttentionParams<Element>& a = p.attention;
    const int from = p.cache.cu_seqlens_q[a.batch], rows = (p.total_q - from) * a.group;
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        const long long row = from + i / a.group;
        const int head = work.kv_head * a.group + i % a.group;
        a.lse[static_cast<long long>(head) * p.total_q + row] = -INF;
        for (int column = 0; column < a.head_dim_v; ++column) a.out[row * a.out_row + head * a.out_head + column] = Element(0.f);
    }
}

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, cfg::MIN_BLOCKS)
    decode_attention(const __grid_constant__ Params p) {
    const AttentionParams<Element>& a = p.attention;
    const Lane lane;
    // Neighbouring blocks read neighbouring heads of the same keys.
    Work work;
    work.batch = blockIdx.z, work.part = blockIdx.y, work.rank = blockIdx.x % CLUSTER;
    work.kv_head = blockIdx.x / CLUSTER, work.row_block = work.first_token = work.first_head = 0;
    if (p.row_blocks > 1) {
        work.row_block = work.kv_head / p.kv_heads, work.kv_head %= p.kv_heads;
        work.first_token = work.row_block * BR / a.group, work.first_head = work.row_block * BR % a.group;
    }
    work.item = (static_cast<long long>(work.batch) * p.kv_heads + work.kv_head) * p.row_blocks + work.row_block;
    const bool first_of_item = work.part == 0 && work.rank == 0;
    if (p.total_q >= 0 && work.batch == a.batch - 1 && first_of_item && work.row_block == 0) clear_rest(p, work);

    const Sequence sequence(p.cache, a, work.batch);
    work.rows = min(BR, sequence.seqlen_q * a.group - work.row_block * BR);
    if (work.rows <= 0) return;
    // Keys that some row of the tile sees, and those that every row sees.
    const Mask mask{sequence.end, sequence.shift, a.window_left, a.window_right};
    const int last_token = work.at(work.rows - 1, p).token;
    const int first_key = max(sequence.first, mask.first(work.first_token)), end_key = mask.end(last_token);
    const int whole_from = max(sequence.first, mask.first(last_token)), whole_to = mask.end(work.first_token);
    const int first_step = static_cast<u32>(first_key) / STEP;
    const int steps = end_key > first_key ? (static_cast<u32>(end_key) + STEP - 1) / STEP - first_step : 0;
    const int each = max(1, ceil_div(steps, p.split.splits * CLUSTER)), share = work.part * CLUSTER + work.rank;
    work.parts = max(1, ceil_div(ceil_div(steps, each), CLUSTER));
    if (work.part >= work.parts) return;  // all blocks of a cluster
    work.step = first_step + share * each, work.steps = max(0, min(each, steps - share * each));
    const int packs = a.head_dim_v / 4, share_packs = work.rows * packs;
    work.first_pack = work.rank * share_packs / CLUSTER, work.end_pack = (work.rank + 1) * share_packs / CLUSTER;

    using Reader = CacheReader<cfg::PAGES, KEYS, TEAM, Element>;
    constexpr bool PAGED = cfg::PAGES != PAGES_NONE;
    const long long k_base = work.kv_head * a.k_head + sequence.k_start * a.k_row;
    const long long v_base = work.kv_head * a.v_head + sequence.k_start * a.v_row;
    Reader reader{a.k + k_base + (PAGED ? 0 : sequence.cache_row * a.k_batch),
                  a.v + v_base + (PAGED ? 0 : sequence.cache_row * a.v_batch),
                  a.k_batch, a.v_batch, a.k_row, a.v_row, sequence.table, p.cache.table_page, p.cache.page_size,
                  first_key, end_key, static_cast<int>(threadIdx.x) % TEAM, 0, 0};
    const u32 shared = shared_address(shared_memory), ring = shared + lane.team * RING_BYTES;
    const auto key_of = [&](int i) { return (work.step + i) * STEP + lane.team * KEYS; };
    const auto look_up = [&](int i) {
        if (i < work.steps) reader.look_up(key_of(i));
    };
    const auto load = [&](int i, u32 slot) {
        if (i < work.steps)
            reader.template copy<LayoutK, LayoutV>(ring + slot, ring + slot + K_BYTES, key_of(i), a.head_dim, a.head_dim_v);
        cp_async_commit();
    };
    const auto after = [](u32 slot) { return slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES; };
    look_up(0);
    load_queries(shared + Q_OFFSET, p, work, sequence);

    Slopes slopes;
    State state;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (cfg::MODIFIERS) {
            const int head = work.at(lane.row(half), p).head;
            const bool sloped = p.alibi_slopes != nullptr && lane.row(half) < work.rows;
            slopes[half] = sloped ? LOG2_E * p.alibi_slopes[work.batch * p.alibi_batch + head * p.alibi_head] : 0.f;
        }
        state.max[half] = -INF, state.sum[half] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < O_TILES; ++n) state.o[n].zero();
    const FragmentCursor<LayoutQ> q_cursor(shared + Q_OFFSET, lane.warp_m * 16 + lane.lane % 16, lane.lane / 16);
    const FragmentCursor<LayoutK> k_cursor(ring, lane.lane % 8 + lane.lane / 16 * 8, lane.lane / 8 % 2);
    const FragmentCursor<LayoutV> v_cursor(ring + K_BYTES, lane.lane % 16, lane.lane / 16);
    const float scale_log2 = cfg::MODIFIERS ? 1.f : a.scale_log2;
    Queries queries;

    u32 slot = 0, free_slot = 0;
#pragma unroll 1
    for (int i = 1 - STAGES; i < work.steps; ++i) {
        if (i >= 0) {
            cp_async_wait<STAGES - 2>();
            lane.team_sync();  // the tile is there for the whole team, which is done with the one before it
        }
        load(i + STAGES - 1, free_slot);
        look_up(i + STAGES);
        free_slot = after(free_slot);
        if (i < 0) continue;
        if (i == 0) {
            __syncthreads();  // Q came with the first tiles
            if constexpr (cfg::Q_IN_REGISTERS)
#pragma unroll
                for (int step = 0; step < QK_STEPS; ++step) ldmatrix_x4(queries[step], q_cursor.at(0, 0, step * 2));
        }
        const int key = key_of(i), column = key + lane.quad_column * 2;
        Scores s;
        score_product(s, queries, q_cursor, k_cursor, slot);
        if constexpr (cfg::MODIFIERS) modify(s, p, work, slopes, lane, sequence.shift, column);
        if (key < whole_from || key + KEYS > whole_to) apply_mask(s, p, work, mask, sequence.first, lane, column);
        online_softmax(s, state, scale_log2);
        value_product(state, s, v_cursor, slot);
        slot = after(slot);
    }
    cp_async_wait<0>();
    __syncthreads();
    leave_team(state, lane, work.rows, scale_log2);
    __syncthreads();
    if constexpr (CLUSTER > 1) {
        leave_share(work, packs);
        cluster_arrive();
        cluster_wait();
    }
    add_part(p, work, sequence, packs);
    if constexpr (CLUSTER > 1) cluster_arrive();  // done with the others' shared memory
    if (work.parts > 1 && arrive_last(p.split.arrivals + work.item * CLUSTER + work.rank, work.parts))
        add_parts(p, work, sequence, packs);
    if constexpr (CLUSTER > 1) cluster_wait();
}
