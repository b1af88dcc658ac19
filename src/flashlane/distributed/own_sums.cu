// Adds f32 rows of several ranks in their order and rounds once, several sums in one launch: a row of CTAs each.
#include "config.cuh"
#include "vector.cuh"

constexpr int ELEMENTS = cfg::OF_A_THREAD;  // at a time: two loads of 16 bytes for each rank, one store
static_assert(ELEMENTS == 8);

struct Sum {
    cfg::Element* to;
    const float* sources[cfg::RANKS];
    long long vectors;
    long long count;  // of sources
};
struct Params {
    Sum sums[cfg::MOST];
};

struct Eight {
    float4 low, high;

    __device__ __forceinline__ explicit Eight(const float* source)
        : low(__ldcs(reinterpret_cast<const float4*>(source))),
          high(__ldcs(reinterpret_cast<const float4*>(source) + 1)) {}
    __device__ __forceinline__ void add(const Eight& other) {
        low.x += other.low.x, low.y += other.low.y, low.z += other.low.z, low.w += other.low.w;
        high.x += other.high.x, high.y += other.high.y, high.z += other.high.z, high.w += other.high.w;
    }
    __device__ __forceinline__ void store(cfg::Element* to) const {
        Vector<cfg::Element, ELEMENTS> rounded;
        const float values[ELEMENTS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) rounded.set(i, values[i]);
        rounded.store(to);
    }
};

extern "C" __global__ void __launch_bounds__(cfg::THREADS) own_sums(const __grid_constant__ Params p) {
    const Sum& sum = p.sums[blockIdx.y];
    const int count = static_cast<int>(sum.count);
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < sum.vectors;
         i += gridDim.x * static_cast<long long>(blockDim.x)) {
        Eight total(sum.sources[0] + i * ELEMENTS);
        for (int rank = 1; rank < count; ++rank) total.add(Eight(sum.sources[rank] + i * ELEMENTS));
        total.store(sum.to + i * ELEMENTS);
    }
}
