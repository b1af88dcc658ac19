// Makes dQ of the parts whose sums are complete, in the launch that sums them.
#pragma once
#include "hopper/backward/products.cuh"
#include "hopper/backward/dq_accumulate.cuh"
#include "memory_order.cuh"

__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// dQ of a part of a block of queries, by a warp; its first row, and the rows from there to the sequence's end.
__device__ __forceinline__ void finish_part(const Params& p, long long block, int part, int batch, int head, long long row, int rows) {
    PartRows from(thread_again() % WARP, p.dq + block * SUM_FLOATS,
                  static_cast<Element*>(p.dq_out) + batch * p.dq_batch + head * p.dq_head + row * p.dq_row, p.dq_row, rows, part, 0);
#pragma unroll 1
    for (; __any_sync(0xffffffffu, from.rows > 0); from.next(p.dq_row)) from.finish(part, p.scale);
}

// Writes dQ of the parts whose sums are complete, by a warp, until all are taken.
struct Finisher {
    const Params& p;

    // The next part, one more than its number, as soon as it is there; 0: there is none. No tile waits for this warp, so
    // all that are running get done meanwhile, and take those that are not.
    __device__ __forceinline__ int take() const {
        const int place = atomicAdd(p.counters + PARTS_TAKEN, 1);
        if (place >= load_relaxed(p.counters + PARTS_ALL)) return 0;
        const SpinLimit patience;
        int part;
        while ((part = load_relaxed(p.queue + place)) == 0) {
            __nanosleep(200);
            patience.spend();
        }
        fence_acq_rel_gpu();
        return part;
    }
    __device__ __forceinline__ void finish(int block, int part) const {
        const int4 place = __ldcg(reinterpret_cast<const int4*>(&p.states[block].batch));  // batch, head, row, rows
        finish_part(p, block, part, place.x, place.y, place.z, place.w);
    }
    __device__ __forceinline__ void run() const {
        griddepcontrol_wait();
        while (true) {
            int part = threadIdx.x % WARP == 0 ? take() : 0;
            __syncwarp();                                 // what lane 0 was told of is there for all
            part = uniform(part);
            if (part == 0) return;
            finish((part - 1) / PARTS, (part - 1) % PARTS);
        }
    }
};
