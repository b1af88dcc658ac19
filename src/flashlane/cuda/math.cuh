// Small arithmetic that every kernel needs.
#pragma once
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// min() and max() as constants: tests evaluate what uses them in the compiler.
__device__ __forceinline__ constexpr int constant_min(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ constexpr int constant_max(int a, int b) { return a > b ? a : b; }

// The value of lane 0, for a value that is the same in all lanes. ptxas then knows that it is the same, and keeps what
// follows from it (addresses, descriptors of wgmma) in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Whether this is the thread that its warp elects, the same one each time. ptxas then knows that one thread takes the
// branch, and puts operands of TMA into uniform registers at once. For any other choice of a thread, as lane 0, it has
// a loop over all threads that might be there.
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile(
        "{\n.reg .pred P;\n"
        "elect.sync _|P, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, P;\n}"
        : "=r"(elected));
    return elected;
}

// The LSE as a natural logarithm, from a maximum in base 2; −∞ for a row that saw no key, and NaN where a score was.
__device__ __forceinline__ float natural_lse(float max_log2, float sum) {
    return sum == 0.f ? -INF : (max_log2 + log2f(sum)) * LN_2;
}

// a + b, added where this is called. The compiler would otherwise add what does not change in a loop before the loop,
// and keep it in registers.
__device__ __forceinline__ int add_here(int a, int b) {
    int sum;
    asm volatile("add.s32 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// The thread's index in its CTA, read where this is called. The compiler would otherwise compute what follows from
// threadIdx.x before a loop, and keep it in registers.
__device__ __forceinline__ u32 thread_index_here() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// A bit for each lane of the warp for which the predicate is true.
template <typename Predicate>
__device__ __forceinline__ u32 warp_ballot(const Predicate& predicate) {
    return __ballot_sync(0xffffffffu, predicate(static_cast<int>(threadIdx.x % WARP)));
}

// The sum of a value of each lane, in all lanes; of each LANES neighbouring lanes, a power of two of them.
template <int LANES = WARP, typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// The sum of the values of the lanes up to and including this one.
__device__ __forceinline__ int warp_inclusive_sum(int x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += before;
    }
    return x;
}
