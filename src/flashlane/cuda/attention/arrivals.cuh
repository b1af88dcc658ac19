// Keys and values that arrive while a kernel runs: copy engines of other GPUs, or of this one, write chunks of rows and
// set a flag after each. flashlane.kernels.hopper.forward.ranged mirrors ArrivalParams.
//
// The rows of k and v are divided into chunks. The rows of this GPU's own chunk are read from tensors of their own.
// Each other chunk is read once its flag has the launch's value: in the warp that loads keys, each lane polls the flag
// of one chunk. A lane that waits longer than the limit stores the flag's number in host memory and traps, because the
// sender is gone.
#pragma once
#include "memory_order.cuh"
#include "tma.cuh"

struct KeyChunk {
    int first, end;                // rows of k and v
    int flag;                      // which of the flags; OWN: the chunk lies in own_k and own_v
    int own_row;                   // where its first row lies there
};
enum { OWN = -1, NOT_OWN = -1 };

struct ArrivalParams {
    alignas(128) TensorMap own_k, own_v;
    const KeyChunk* chunks;        // at most one a lane; rows outside all chunks need no flag
    const int* flags;              // in memory that copy engines write
    int* lost;                     // in host memory: one more than the flag of a chunk that did not come
    long long limit;               // nanoseconds that a chunk may take
    int count;                     // chunks
    int value;                     // least value of a flag whose chunk is there (flags only grow, modulo 2^32)
};

__device__ __forceinline__ int load_acquire_system(const int* from) {
    int x;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ long long nanoseconds() {
    long long x;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
    return x;
}

// What a lane of the warp that loads keys knows of its chunk.
struct Arrivals {
    int first = 0, end = 0, own_row = NOT_OWN;  // rows of a chunk that is own, or is awaited
    const int* flag = nullptr;     // of an awaited one

    // A launch without such chunks.
    Arrivals() = default;
    __device__ __forceinline__ Arrivals(const ArrivalParams& p, int lane) {
        if (lane >= p.count) return;
        const int4 chunk = reinterpret_cast<const int4*>(p.chunks)[lane];
        first = chunk.x, end = chunk.y;
        if (chunk.z == OWN) own_row = chunk.w;
        else flag = p.flags + chunk.z;
    }

    // Waits until rows [row, stop) can be loaded. All lanes call it. It returns where the first of them lies in the own
    // tensors, or NOT_OWN where they lie in k and v.
    __device__ __forceinline__ int wait(const ArrivalParams& p, int row, int stop) {
        const u32 own = __ballot_sync(0xffffffffu, own_row != NOT_OWN && first <= row && stop <= end);
        if (own != 0) return row + __shfl_sync(0xffffffffu, own_row - first, __ffs(own) - 1);
        const bool missing = flag != nullptr && first < stop && row < end;
        if (__any_sync(0xffffffffu, missing)) {
            if (missing) spin(p);
            __syncwarp();                // what a lane has acquired holds for the lane that loads,
            fence_proxy_async_global();  // and for its loads by TMA
        }
        return NOT_OWN;
    }

  private:
    __device__ __forceinline__ void spin(const ArrivalParams& p) {
        const long long start = nanoseconds();
        const auto before = [&](int value) {  // in unsigned arithmetic, as signed overflow is undefined
            return static_cast<int>(static_cast<u32>(value) - static_cast<u32>(p.value)) < 0;
        };
        while (before(load_acquire_system(flag))) {
            if (nanoseconds() - start > p.limit) {
                *static_cast<volatile int*>(p.lost) = static_cast<int>(flag - p.flags) + 1;
                __threadfence_system();
                __trap();
            }
        }
        flag = nullptr;
    }
};
