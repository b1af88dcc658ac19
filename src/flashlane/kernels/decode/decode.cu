// Attention of few queries over a long cache, bound by the reading of K and V: each is read once for all query heads
// that share it. What a block computes of which item, work.cuh says:
//
//     keys of an item   |<------- part 0 ------->|<------- part 1 ------->|<- part 2 ->|
//     step of a block   |T0 T1 T2 T3|T0 T1 T2 T3|T0 ...        a team takes KEYS keys of each step
//
// A team is WARPS_M warps of 16 rows each, with its own softmax; it meets no other team before the end, when sums go up
// (sums.cuh). Two ways bring the keys:
//
//     rows      each team copies its tiles by cp.async into a ring of its own, whole rows, from anywhere
//     boxes     a further warp has the copy engine fill one ring with the tiles of all teams (feeder.cuh)
//
// A block runs once, and instructions that run once come from memory a few at a time: the code around the loop is kept
// short, and one piece of code fills the rings before and in the loop.
#include "decode/feeder.cuh"
#include "decode/sums.cuh"

constexpr int S_TILES = KEYS / 8, O_TILES = HEAD_DIM_V / 8, QK_STEPS = HEAD_DIM / 16, PV_STEPS = KEYS / 16;
constexpr float LAZY = 8.f;  // old maxima are kept until a score exceeds them by 2^8: O is rarely rescaled

struct State {
    Accumulator<float> o[O_TILES];
    float max[2];  // raw products, or log2 units with MODIFIERS; rows g and g + 8
    float sum[2];  // of this lane's columns
};

struct Lane {
    int lane, team, warp_m, quad_row, quad_column;

    // Of this thread. In asm, as the compiler would compute all that follows from it before a loop, and have no place for it.
    __device__ __forceinline__ Lane() {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int warp = __shfl_sync(0xffffffffu, thread / WARP, 0);
        lane = thread % WARP, team = warp / WARPS_M, warp_m = warp % WARPS_M;
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

// Addresses of a lane's fragments in a team's tile of K or V.
template <typename Layout>
struct TileCursor : FragmentCursor<Layout> {
    using FragmentCursor<Layout>::FragmentCursor;
    __device__ __forceinline__ u32 at(u32 slot, int rows, int chunks) const {
        constexpr int CHUNKS = Layout::CHUNKS;  // of a plane, or of a row
        return FragmentCursor<Layout>::at(slot + chunks / CHUNKS * PLANE_BYTES, rows, chunks % CHUNKS);
    }
};

// Start copying the block's rows of Q.
__device__ __forceinline__ void load_queries(u32 tile, const Params& p, const Work& work) {
    const AttentionParams<Element>& a = p.attention;
    const Element* base = a.q + (p.total_q < 0 ? work.batch * a.q_batch : 0) + work.sequence.q_start * a.q_row;
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
                                              const TileCursor<LayoutK>& k, u32 slot) {
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

__device__ __forceinline__ void value_product(State& state, const Scores& s, const TileCursor<LayoutV>& v, u32 slot) {
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

// Rows of a team's tile of V that are no keys of the item may hold anything: zeros, as a probability of 0 is not enough.
__device__ __forceinline__ void clear_stale(u32 tile, const Keys& keys, const Lane& lane, int key) {
    constexpr int CHUNKS = LayoutV::CHUNKS, ALL = V_PLANES * KEYS * CHUNKS;
#pragma unroll 1
    for (int i = threadIdx.x % TEAM; i < ALL; i += TEAM) {
        const int row = i / CHUNKS % KEYS, plane = i / CHUNKS / KEYS;
        if (key + row < keys.first || key + row >= keys.end)
            store_shared(tile + plane * PLANE_BYTES + LayoutV::offset(row, i % CHUNKS), make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async();  // before the copy engine writes there again
    lane.team_sync();
}

// Leave a team's statistics and output in shared memory.
__device__ __forceinline__ void leave_team(float* teams, const State& state, const Lane& lane, int rows, float scale_log2) {
    Statistics* statistics = team_statistics() + lane.team * BR;
    float* sums = teams + lane.team * BR * SUM_STRIDE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane.row(half);
        const float sum = quad_sum(state.sum[half]), top = state.max[half];
        if (row >= rows) continue;
        if (lane.quad_column == 0) statistics[row] = {top == -INF ? -INF : top * scale_log2, sum};
#pragma unroll
        for (int n = 0; n < O_TILES; ++n)  // (four addresses, from which the others are at constant distances)
            *reinterpret_cast<float2*>(&sums[sum_at(row, n % 4 * 8 + lane.quad_column * 2) + n / 4 * 32]) =
                make_float2(state.o[n].get(half * 2), state.o[n].get(half * 2 + 1));
    }
}

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(BLOCK_THREADS, cfg::MIN_BLOCKS)
    decode_attention(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    const AttentionParams<Element>& a = p.attention;
    const u32 shared = shared_address(shared_memory);
    if constexpr (BOXES) {
        if (threadIdx.x == THREADS) {
            if (shared % 1024 != 0) __trap();  // the swizzle counts from there
            for (int i = 0; i < STAGES; ++i) {
                mbarrier_init(shared + FULL + 8 * i, 1);
                mbarrier_init(shared + EMPTY + 8 * i, TEAMS * WARPS_M * WARP_ARRIVALS);
            }
            for (int i = 0; i < WORKS; ++i) {
                mbarrier_init(shared + WORK_FULL + 8 * i, 1);
                mbarrier_init(shared + WORK_EMPTY + 8 * i, TEAMS * WARPS_M * WARP_ARRIVALS);
            }
            fence_mbarrier_init();
            tma_prefetch(maps.k), tma_prefetch(maps.v);
        }
        __syncthreads();
        if (Lane().team == TEAMS) {
            Feeder{p, maps, shared}.run();
            return;
        }
    }
    clear_rest(p);
    const float scale_log2 = cfg::MODIFIERS ? 1.f : a.scale_log2;
    PipelineState<STAGES> ring;
    PipelineState<larger(WORKS, 1)> works;
    Work own;
    do {
        if constexpr (STREAM) mbarrier_wait(shared + WORK_FULL + 8 * works.index, works.phase);
        else if (!Schedule<false>(p).next(own)) return;
        const Work& work = STREAM ? *announced(works.index) : own;
        const int first_step = work.step, steps = work.steps;
        const Keys keys = work.keys;
        if (STREAM && steps == 0) return;
        const Lane lane;
        const u32 tiles = BOXES ? lane.team * KEYS * LayoutK::STRIDE : lane.team * RING_BYTES;
        const FragmentCursor<LayoutQ> q_cursor(shared + Q_OFFSET, lane.warp_m * 16 + lane.lane % 16, lane.lane / 16);
        const TileCursor<LayoutK> k_cursor(shared + tiles, lane.lane % 8 + lane.lane / 16 * 8, lane.lane / 8 % 2);
        const TileCursor<LayoutV> v_cursor(shared + tiles + K_BYTES, lane.lane % 16, lane.lane / 16);
        const Mask mask = work.mask(p);
        const auto key_of = [&](int i) { return (first_step + i) * STEP + lane.team * KEYS; };
        Queries queries;
        const auto take_queries = [&] {
            teams_sync();  // all of Q is there
            if constexpr (cfg::Q_IN_REGISTERS)
#pragma unroll
                for (int step = 0; step < QK_STEPS; ++step) ldmatrix_x4(queries[step], q_cursor.at(0, 0, step * 2));
        };
        Slopes slopes;
        State state;
        const auto reset = [&] {
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
        };
        // The team's tile of one step.
        const auto attend = [&](int key, u32 slot) {
            const int column = key + lane.quad_column * 2;
            Scores s;
            score_product(s, queries, q_cursor, k_cursor, slot);
            if constexpr (cfg::MODIFIERS) modify(s, p, work, slopes, lane, work.sequence.shift, column);
            if (key < keys.whole_from || key + KEYS > keys.whole_to)
                apply_mask(s, p, work, mask, work.sequence.first, lane, column);
            if (BOXES && (key < keys.first || key + KEYS > keys.end))
                clear_stale(shared + tiles + K_BYTES + slot, keys, lane, key);
            online_softmax(s, state, scale_log2);
            value_product(state, s, v_cursor, slot);
        };
        int last = 0;  // the slot of the last step
        if constexpr (BOXES) {
            load_queries(shared + Q_OFFSET, p, work);
            cp_async_commit();
            reset();
            cp_async_wait<0>();
            take_queries();
#pragma unroll 1
            for (int i = 0; i < steps; ++i) {
                last = ring.index;
                mbarrier_wait(shared + FULL + 8 * last, ring.phase);
                ring.advance();
                attend(key_of(i), last * STAGE_BYTES);
                __syncwarp();
                if (i + 1 < steps) mbarrier_arrive_warp(shared + EMPTY + 8 * last, lane.lane);
            }
        } else {
            const Sequence& sequence = work.sequence;
            using Reader = CacheReader<cfg::PAGES, KEYS, TEAM, Element>;
            const long long k_base = work.kv_head * a.k_head + sequence.k_start * a.k_row;
            const long long v_base = work.kv_head * a.v_head + sequence.k_start * a.v_row;
            Reader reader{a.k + k_base + (PAGED ? 0 : sequence.cache_row * a.k_batch),
                          a.v + v_base + (PAGED ? 0 : sequence.cache_row * a.v_batch),
                          a.k_batch, a.v_batch, a.k_row, a.v_row, sequence.table, p.cache.table_page, p.cache.page_size,
                          keys.first, keys.end, static_cast<int>(threadIdx.x) % TEAM, 0, 0};
            const auto look_up = [&](int i) {
                if (i < steps) reader.look_up(key_of(i));
            };
            const auto load = [&](int i, u32 slot) {
                const u32 tile = shared + tiles + slot;
                if (i < steps)
                    reader.template copy<LayoutK, LayoutV>(tile, tile + K_BYTES, key_of(i), a.head_dim, a.head_dim_v);
                cp_async_commit();
            };
            const auto after = [](u32 slot) { return slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES; };
            look_up(0);
            load_queries(shared + Q_OFFSET, p, work);
            reset();
            u32 slot = 0, free_slot = 0;
#pragma unroll 1
            for (int i = 1 - STAGES; i < steps; ++i) {
                if (i >= 0) {
                    cp_async_wait<STAGES - 2>();
                    lane.team_sync();  // the tile is there for the whole team, which is done with the one before it
                }
                load(i + STAGES - 1, free_slot);
                look_up(i + STAGES);
                free_slot = after(free_slot);
                if (i < 0) continue;
                if (i == 0) take_queries();  // they came with the first tiles
                attend(key_of(i), slot);
                slot = after(slot);
            }
            cp_async_wait<0>();
        }
        unsigned char* scratch = shared_memory + (BOXES ? last * STAGE_BYTES : 0);
        teams_sync();  // no team reads keys there any more
        leave_team(reinterpret_cast<float*>(scratch), state, lane, work.rows, scale_log2);
        teams_sync();
        finish(p, work, scratch);
        if constexpr (STREAM) {  // the feeder has the places back
            fence_proxy_async();
            __syncwarp();
            mbarrier_arrive_warp(shared + EMPTY + 8 * last, lane.lane), mbarrier_arrive_warp(shared + WORK_EMPTY + 8 * works.index, lane.lane);
            works.advance();
        }
    } while (STREAM);
}
