// How results go up, always in the same order: teams in shared memory, blocks of a cluster in each other's shared memory,
// parts of an item in device memory by the block that comes last.
#pragma once
#include "cluster.cuh"
#include "decode/work.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

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

__device__ __forceinline__ Statistics* team_statistics() {
    return reinterpret_cast<Statistics*>(shared_memory + STATISTICS_OFFSET);
}

__device__ __forceinline__ Sum add_teams(const float* sums, int row, int column) {
    const Statistics* statistics = team_statistics() + row;
    const float* source = sums + sum_at(row, column);
    Sum all;
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) all.statistics.top = fmaxf(all.statistics.top, statistics[team * BR].top);
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) {
        const Statistics one = statistics[team * BR];
        all.add(one.weight(all.statistics.top), one.sum, *reinterpret_cast<const float4*>(source + team * BR * SUM_STRIDE));
    }
    return all;
}

// Leave the block's sums where its cluster reads them.
__device__ __forceinline__ void leave_share(const float* teams, int rows, int packs) {
    Statistics* statistics = reinterpret_cast<Statistics*>(shared_memory + SHARE_OFFSET);
    float* sums = reinterpret_cast<float*>(shared_memory + SHARE_OFFSET + BR * 8);
    for (int i = threadIdx.x; i < rows * packs; i += THREADS) {
        const int row = i / packs, column = i % packs * 4;
        const Sum sum = add_teams(teams, row, column);
        *reinterpret_cast<float4*>(&sums[sum_at(row, column)]) = sum.out;
        if (column == 0) statistics[row] = sum.statistics;
    }
}

__device__ __forceinline__ Sum add_shares(int row, int column) {
    const u32 statistics = shared_address(shared_memory + SHARE_OFFSET) + row * 8;
    const u32 sums = shared_address(shared_memory + SHARE_OFFSET + BR * 8) + sum_at(row, column) * 4;
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
__device__ __forceinline__ void store_whole(const Params& p, const Work& work, int row, int column, const Sum& all) {
    const AttentionParams<Element>& a = p.attention;
    const Row at = work.at(row, p);
    const float sink = sink_of(p, at.head), top = fmaxf(all.statistics.top, sink), kept = all.statistics.weight(top);
    const float sum = all.statistics.sum * kept + (sink == -INF ? 0.f : ex2(sink - top)), scale = sum > 0.f ? kept / sum : 0.f;
    const bool packed = p.total_q >= 0;
    const long long token = work.sequence.q_start + at.token;
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
__device__ __forceinline__ void add_part(const Params& p, const Work& work, const float* teams, int packs) {
    const long long place = static_cast<long long>(work.slot(work.part)) * BR;
    for (int i = work.first_pack + threadIdx.x; i < work.end_pack; i += THREADS) {
        const int row = i / packs, column = i % packs * 4;
        Sum sum;
        if constexpr (CLUSTER > 1) sum = add_shares(row, column);
        else sum = add_teams(teams, row, column);
        if (work.parts == 1) {
            store_whole(p, work, row, column, sum);
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
__device__ __forceinline__ void add_parts(const Params& p, const Work& work, void* scratch, int packs) {
    constexpr int AHEAD = 16;  // loads in flight: each is a trip to the L2 cache
    Statistics* statistics = static_cast<Statistics*>(scratch);  // (part, row)
    float4 x[AHEAD];
    const int columns = p.attention.head_dim_v;
    const auto load = [&](int i, int first_part) {
        const float* source = p.split.out + i / packs * columns + i % packs * 4;
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const long long slot = work.slot(first_part + j);
            const bool exists = i < work.end_pack && first_part + j < work.parts;
            x[j] = exists ? __ldcg(reinterpret_cast<const float4*>(source + slot * (BR * columns))) : float4{};
        }
    };
    const int first = work.first_pack + threadIdx.x;
    load(first, 0);
    for (int i = threadIdx.x; i < work.parts * BR; i += THREADS) {
        const int part = i / BR, row = i % BR;
        // (Rows of other blocks' shares are not there yet, and not used.)
        const long long slot = work.slot(part);
        const Statistics* source = p.split.statistics + (slot * CLUSTER + work.rank) * BR + row;
        if (row < work.rows) *reinterpret_cast<float2*>(&statistics[i]) = __ldcg(reinterpret_cast<const float2*>(source));
    }
    teams_sync();
#pragma unroll 1
    for (int i = first; i < work.end_pack; i += THREADS) {
        const int row = i / packs;
        Sum all;
#pragma unroll 4
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
        store_whole(p, work, row, i % packs * 4, all);
    }
}

// The sums of all teams, which they have left in shared memory, go up; the block that comes last ends the item.
__device__ __forceinline__ void finish(const Params& p, const Work& work, unsigned char* scratch) {
    const int packs = p.attention.head_dim_v / 4;
    const float* teams = reinterpret_cast<const float*>(scratch);
    if constexpr (CLUSTER > 1) {
        leave_share(teams, work.rows, packs);
        cluster_arrive();
        cluster_wait();
    }
    add_part(p, work, teams, packs);
    if constexpr (CLUSTER > 1) cluster_arrive();  // done with the others' shared memory
    if (work.parts > 1 && arrive_last(p.split.arrivals + work.item * CLUSTER + work.rank, work.parts, ALL_TEAMS, THREADS,
                                      shared_address(shared_memory + WORD_OFFSET), threadIdx.x == 0))
        add_parts(p, work, scratch, packs);
    if constexpr (CLUSTER > 1) cluster_wait();
}

// Rows of packed queries after the last sequence: they see no key.
__device__ __forceinline__ void clear_rest(const Params& p) {
    const AttentionParams<Element>& a = p.attention;
    const int blocks = gridDim.x * gridDim.y * gridDim.z, block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (p.total_q < 0 || block >= a.heads) return;
    const int from = p.cache.cu_seqlens_q[a.batch];
    for (int head = block; head < a.heads; head += blocks)
        for (int row = from + threadIdx.x; row < p.total_q; row += THREADS) {
            a.lse[static_cast<long long>(head) * p.total_q + row] = -INF;
            Element* out = a.out + static_cast<long long>(row) * a.out_row + head * a.out_head;
            for (int column = 0; column < a.head_dim_v; ++column) out[column] = Element(0.f);
        }
}
