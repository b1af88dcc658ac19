// Combines the results of the warp groups of a CTA (in shared memory), of the CTAs of a cluster (in distributed
// shared memory), and of the splits of an output tile (in device memory, by the CTA that arrives last). The order is
// always the same.
#pragma once
#include "cluster.cuh"
#include "decode/tile_scheduler.cuh"

// Four columns of one row's output, unnormalised, and the row's statistics.
struct PartialOutput {
    PartialSoftmax statistics;
    float4 out;

    __device__ __forceinline__ PartialOutput() : statistics{-INF, 0.f}, out(make_float4(0.f, 0.f, 0.f, 0.f)) {}
    __device__ __forceinline__ void add(float weight, float sum, const float4& x) {
        statistics.sum = fmaf(weight, sum, statistics.sum);
        out.x = fmaf(weight, x.x, out.x), out.y = fmaf(weight, x.y, out.y);
        out.z = fmaf(weight, x.z, out.z), out.w = fmaf(weight, x.w, out.w);
    }
};

__device__ __forceinline__ PartialSoftmax* group_statistics() {
    return shared_at<PartialSoftmax>(offsetof(SharedStorage, statistics));
}

__device__ __forceinline__ PartialOutput combine_warp_groups(const float* sums, int row, int column) {
    const PartialSoftmax* statistics = group_statistics() + row;
    const float* source = sums + sum_at(row, column);
    PartialOutput all;
#pragma unroll
    for (int group = 0; group < WARP_GROUPS; ++group)
        all.statistics.max = fmaxf(all.statistics.max, statistics[group * BLOCK_M].max);
#pragma unroll
    for (int group = 0; group < WARP_GROUPS; ++group) {
        const PartialSoftmax one = statistics[group * BLOCK_M];
        all.add(one.weight(all.statistics.max), one.sum,
                *reinterpret_cast<const float4*>(source + group * BLOCK_M * SUM_STRIDE));
    }
    return all;
}

// Stores the CTA's sums where its cluster reads them.
__device__ __forceinline__ void store_cta_sums(const float* group_sums, int rows) {
    PartialSoftmax* statistics = shared_at<PartialSoftmax>(cta_statistics_offset());
    float* sums = shared_at<float>(cta_sums_offset());
    for (int i = threadIdx.x; i < rows * VECTORS; i += THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * 4;
        const PartialOutput sum = combine_warp_groups(group_sums, row, column);
        *reinterpret_cast<float4*>(&sums[sum_at(row, column)]) = sum.out;
        if (column == 0) statistics[row] = sum.statistics;
    }
}

__device__ __forceinline__ PartialOutput combine_cluster(int row, int column) {
    const u32 statistics = shared_address(shared_memory + cta_statistics_offset()) + row * 8;
    const u32 sums = shared_address(shared_memory + cta_sums_offset()) + sum_at(row, column) * 4;
    float2 one[CLUSTER];
    float4 x[CLUSTER];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
        one[rank] = load_cluster_float2(address_in(statistics, rank));
        x[rank] = load_cluster_float4(address_in(sums, rank));
    }
    PartialOutput all;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) all.statistics.max = fmaxf(all.statistics.max, one[rank].x);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank)
        all.add(PartialSoftmax{one[rank].x, one[rank].y}.weight(all.statistics.max), one[rank].y, x[rank]);
    return all;
}

// Adds the head's extra logit, normalises, and stores four columns of a row, and the row's LSE.
__device__ __forceinline__ void store_output(const Params& p, const WorkTile& tile, int row, int column,
                                             const PartialOutput& all) {
    const AttentionParams<Element>& a = p.attention;
    if (column >= a.head_dim_v) return;
    const Row at = tile.at(row, p);
    const float logit = Score::extra_logit<Element>(p.score, at.head) * LOG2_E, max = fmaxf(all.statistics.max, logit);
    const float weight = all.statistics.weight(max);
    const float sum = all.statistics.sum * weight + (logit == -INF ? 0.f : ex2(logit - max)),
                scale = sum > 0.f ? weight / sum : 0.f;
    const bool packed = p.total_q >= 0;
    const long long token = tile.sequence.q_start + at.token;
    Element* out = a.out + (packed ? 0 : tile.batch * a.out_batch) + token * a.out_row + at.head * a.out_head + column;
    const uint2 words = make_uint2(Convert<Element>::pack(all.out.x * scale, all.out.y * scale),
                                   Convert<Element>::pack(all.out.z * scale, all.out.w * scale));
    if (reinterpret_cast<u64>(out) % 8 == 0) {
        *reinterpret_cast<uint2*>(out) = words;
    } else {  // the caller's strides need not be multiples of 8 bytes
        const Element* values = reinterpret_cast<const Element*>(&words);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = values[i];
    }
    if (column == 0) {
        const long long head = packed ? at.head : static_cast<long long>(tile.batch) * a.heads + at.head;
        a.lse[head * (packed ? p.total_q : a.seqlen_q) + token] = natural_lse(max, sum);
    }
}

// Combines the CTA's vectors of the output over warp groups and cluster, and stores them as output or in the workspace.
__device__ __forceinline__ void store_split(const Params& p, const WorkTile& tile, const float* group_sums) {
    const long long first_row = static_cast<long long>(tile.partial(tile.split, p)) * BLOCK_M;
    const int first = tile.first_vector(tile.rank()), end = tile.first_vector(tile.rank() + 1);
#pragma unroll 1
    for (int i = first + threadIdx.x; i < end; i += THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * 4;
        PartialOutput sum;
        if constexpr (CLUSTER > 1) sum = combine_cluster(row, column);
        else sum = combine_warp_groups(group_sums, row, column);
        if (tile.splits == 1) {
            store_output(p, tile, row, column, sum);
        } else {
            __stcg(reinterpret_cast<float4*>(p.split.out + first_row * HEAD_DIM_V) + i, sum.out);
            // Each CTA of a cluster stores the statistics of the rows that it combines, so that it waits for
            // no other CTA.
            if (column == 0 || i == first)
                __stcg(reinterpret_cast<float2*>(
                           p.split.statistics + first_row * CLUSTER + tile.rank() * BLOCK_M + row),
                       make_float2(sum.statistics.max, sum.statistics.sum));
        }
    }
}

// Starts to copy the statistics of a tile's splits: of all rows, although those that other CTAs combine may not be
// there yet, and are not used.
__device__ __forceinline__ void load_split_statistics(const Params& p, const WorkTile& tile, u32 destination) {
    constexpr int PAIRS = BLOCK_M / 2;  // of 16 bytes
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.splits * PAIRS; i += THREADS) {
        const long long partial = tile.partial(i / PAIRS, p);
        cp_async_16(destination + 16 * i,
                    p.split.statistics + (partial * CLUSTER + tile.rank()) * BLOCK_M + i % PAIRS * 2, 16);
    }
}

// Combines the splits of an output tile, for the CTA's vectors of the output. Their sums come by cp.async, as many at
// once as the scratch memory holds: a load from the L2 cache takes a microsecond while other CTAs read keys. Each warp
// copies those of its splits.
__device__ __forceinline__ void combine_splits(const Params& p, const WorkTile& tile, unsigned char* scratch) {
    const PartialSoftmax* statistics = reinterpret_cast<const PartialSoftmax*>(scratch);  // (split, row)
    const int statistics_bytes = tile.splits * BLOCK_M * static_cast<int>(sizeof(PartialSoftmax));
    const float4* sums = reinterpret_cast<const float4*>(scratch + statistics_bytes);  // (split, vector of a chunk)
    const int chunk = (SCRATCH_BYTES - statistics_bytes) / (16 * tile.splits);
    const int first = tile.first_vector(tile.rank()), end = tile.first_vector(tile.rank() + 1);
    load_split_statistics(p, tile, shared_address(statistics));
#pragma unroll 1
    for (int from = first; from < end; from += chunk) {
        const int count = min(chunk, end - from);
        if (from > first) consumers_sync();  // all have read the chunk before
#pragma unroll 1
        for (int split = threadIdx.x / WARP; split < tile.splits; split += THREADS / WARP) {
            const long long first_row = static_cast<long long>(tile.partial(split, p)) * BLOCK_M;
            const float4* source = reinterpret_cast<const float4*>(p.split.out + first_row * HEAD_DIM_V) + from;
            const u32 destination = shared_address(sums + split * count);
#pragma unroll 4
            for (int i = threadIdx.x % WARP; i < count; i += WARP) cp_async_16(destination + 16 * i, source + i, 16);
        }
        cp_async_commit();
        cp_async_wait<0>();
        consumers_sync();
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const int row = (from + i) / VECTORS;
            PartialOutput all;
#pragma unroll 4
            for (int split = 0; split < tile.splits; ++split)
                all.statistics.max = fmaxf(all.statistics.max, statistics[split * BLOCK_M + row].max);
#pragma unroll 4
            for (int split = 0; split < tile.splits; ++split) {
                const PartialSoftmax one = statistics[split * BLOCK_M + row];
                all.add(one.weight(all.statistics.max), one.sum, sums[split * count + i]);
            }
            store_output(p, tile, row, (from + i) % VECTORS * 4, all);
        }
    }
}

// Combines the sums that the warp groups stored in shared memory; the CTA that arrives last combines the
// tile's splits, too.
__device__ __forceinline__ void combine(const Params& p, const WorkTile& tile, unsigned char* scratch) {
    const float* group_sums = reinterpret_cast<const float*>(scratch);
    if constexpr (CLUSTER > 1) {
        store_cta_sums(group_sums, tile.rows);
        cluster_arrive();
        cluster_wait();
    }
    store_split(p, tile, group_sums);
    if constexpr (CLUSTER > 1) cluster_arrive();  // this CTA has finished reading the others' shared memory
    if (tile.splits > 1 &&
        semaphore_arrive_last(p.split.arrivals + tile.index(p) * CLUSTER + tile.rank(), tile.splits, CONSUMERS_BARRIER,
                              THREADS, shared_address(shared_memory + offsetof(SharedStorage, arrival)),
                              threadIdx.x == 0))
        combine_splits(p, tile, scratch);
    if constexpr (CLUSTER > 1) cluster_wait();
}

// Writes output and LSE of the rows of packed queries after the last sequence, which see no key.
__device__ __forceinline__ void store_tail_rows(const Params& p) {
    const AttentionParams<Element>& a = p.attention;
    const int ctas = gridDim.x * gridDim.y * gridDim.z,
              cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (p.total_q < 0 || cta >= a.heads) return;
    const int from = p.seqlen.cu_seqlens_q[a.batch];
    for (int head = cta; head < a.heads; head += ctas)
        for (int row = from + threadIdx.x; row < p.total_q; row += THREADS) {
            a.lse[static_cast<long long>(head) * p.total_q + row] = -INF;
            Element* out = a.out + static_cast<long long>(row) * a.out_row + head * a.out_head;
            for (int column = 0; column < a.head_dim_v; ++column) out[column] = Element(0.f);
        }
}
