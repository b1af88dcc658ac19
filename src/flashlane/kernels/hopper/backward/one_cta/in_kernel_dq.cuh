// What warps without other work do for a launch while it runs, so that neither the launch before it writes all zeros that
// dQ is summed from, nor the one after it reads all sums: both would go through device memory, and here stay in L2.
//
// Each tile has a share of the blocks of queries of its head. Shares are taken in the order of the tiles: one that is to
// become zeros some time before its head's first tile begins, one that is to become dQ when all tiles of its head have
// added. A warp has one of each and makes what may be made, so that it never waits for another: zeros of a tile are due
// when one `zeroed_before` tiles earlier is taken, which is more than the tiles that a group of heads has. Tiles wait for
// zeros, and for dQ nobody: it is made a block of queries at a time, between which zeros may be due.
#pragma once
#include "hopper/backward/one_cta/postprocess_warp.cuh"

constexpr unsigned PAUSE = 1000, LONG_PAUSE = 4000;       // ns

// A tile has made all its additions, of which this thread knows by others of its block.
__device__ __forceinline__ void announce_added(const Params& p, int head, int piece) {
    fence_acq_rel_gpu();                                      // and release: of theirs
    atomicAdd(p.added + head, piece > 0 ? 1 : p.pieces);
}

struct Chores {
    const Params& p;

    __device__ __forceinline__ int take(int counter) const {
        return uniform(threadIdx.x % WARP == 0 ? atomicAdd(p.counters + counter, 1) : 0);
    }
    __device__ __forceinline__ Place place(int tile) const { return place_at(p, tile, p.kv_heads * p.batch, p.blocks, false); }
    // The tile's share, as blocks of all.
    __device__ __forceinline__ long long first_of(const Place& at) const {
        return static_cast<long long>(at.head) * (p.heads / p.kv_heads) * p.stat_blocks;
    }
    __device__ __forceinline__ Blocks share(const Place& at) const {
        return share_of(at.block, p.blocks, static_cast<long long>(p.heads / p.kv_heads) * p.stat_blocks);
    }

    __device__ __forceinline__ void clear(int tile) const {
        const Place at = place(tile);
        const Blocks blocks = share(at);
        const int lane = threadIdx.x % WARP;
        float4* to = reinterpret_cast<float4*>(p.dq + (first_of(at) + blocks.low) * SUM_FLOATS) + lane;
        float4* const end = to + static_cast<long long>(blocks.count()) * (SUM_FLOATS / 4);
        static_assert(SUM_FLOATS % (4 * WARP) == 0);
#pragma unroll 4
        for (; to < end; to += WARP) __stcg(to, make_float4(0.f, 0.f, 0.f, 0.f));
        __syncwarp();
        if (lane == 0) {
            fence_acq_rel_gpu();
            atomicAdd(p.zeroed + at.head, 1);
        }
    }
    __device__ __forceinline__ bool complete(int tile) const {
        return load_acquire(p.added + place(tile).head) == p.blocks * p.pieces;
    }
    // The next block of the tile's share; whether it was the last.
    __device__ __forceinline__ bool finish(int tile, int made) const {
        const Place at = place(tile);
        const Blocks blocks = share(at);
        const int group = p.heads / p.kv_heads;
        const int which = at.head / p.kv_heads, first_head = (at.head - which * p.kv_heads) * group;
        const int block = blocks.low + made, row = block % p.stat_blocks * BLOCK_M;
        if (block < blocks.high) {
#pragma unroll 1
            for (int part = 0; part < PARTS; ++part)
                finish_part(p, first_of(at) + block, part, which, first_head + block / p.stat_blocks, row, p.seqlen_q - row);
        }
        if (block + 1 < blocks.high) return false;
        __syncwarp();
        if (threadIdx.x % WARP == 0) p.finished[tile] = 1;
        return true;
    }

    __device__ __forceinline__ void run() const {
        griddepcontrol_wait();
        const int items = p.uncut + (p.tiles - p.uncut) * p.pieces;
        int zero = p.zeroed_before + take(ZEROS_TAKEN), done = take(FINISHES_TAKEN);
        int made = -1;                                    // blocks of the share `done`; −1: it is not begun
        while (true) {
            const int taken = load_relaxed(p.counters + TILES_TAKEN);
            if (zero < p.tiles) {
                if (uniform(zero - p.zeroed_before <= taken)) {
                    clear(zero);
                    zero = p.zeroed_before + take(ZEROS_TAKEN);
                    continue;
                }
            } else if (made < 0 && uniform(taken >= items)) {
                return;
            }
            if (made < 0 && done < p.tiles && uniform(taken < p.finish_until && complete(done))) made = 0;
            if (made < 0) {
                __nanosleep(LONG_PAUSE);
            } else if (finish(done, made++)) {
                done = take(FINISHES_TAKEN), made = -1;
            }
        }
    }
};
