// Softmax of rows: three algorithms that differ in how often a row is read, and one that reads it once.
//
//     naive    Σ eˣ                  ; eˣ / Σ              2 reads; overflows for x > 88, as nothing is subtracted
//     safe     max ; Σ eˣ⁻ᵐᵃˣ        ; eˣ⁻ᵐᵃˣ / Σ          3 reads
//     online   max and Σ in one pass ; eˣ⁻ᵐᵃˣ / Σ          2 reads: Σ is rescaled whenever the maximum grows
//     online, KEEP > 0: the row stays in registers         1 read
//
// WARPS_PER_ROW warps share a row; a CTA of 8 warps has 8 / WARPS_PER_ROW rows. Sums and maxima are f32.
#include "config.cuh"
#include "vector.cuh"

using Element = cfg::Element;
using Slice = VectorSpan<Element, cfg::PACKED>;
constexpr int THREADS = cfg::THREADS, WARPS = cfg::WARPS_PER_ROW, ROWS = THREADS / (WARP * WARPS);
constexpr int KEEP = cfg::KEEP;  // vectors of a row that a thread holds
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 ALL = 0xffffffffu;
enum Algorithm { NAIVE, SAFE, ONLINE };
static_assert(KEEP == 0 || cfg::ALGORITHM == ONLINE, "only the online pass keeps the row");

// Mirrored by flashlane.lessons.row_softmax.SoftmaxParams. Strides in elements.
struct Params {
    const Element* x;
    Element* y;
    long long rows, columns, x_stride, y_stride;
};

// What to subtract before the exponential: nothing while only −inf was seen, as −inf − (−inf) is no number.
__device__ __forceinline__ float offset_of(float max) { return max == -INF ? 0.f : max; }
__device__ __forceinline__ float exponential(float x, float offset) { return ex2((x - offset) * LOG2_E); }

// Largest value and Σ e^(x − max) of some elements of a row.
struct Statistics {
    float max = -INF, sum = 0.f;

    __device__ __forceinline__ void merge(float other_max, float other_sum) {
        const float top = fmaxf(max, other_max), offset = offset_of(top);
        sum = sum * exponential(max, offset) + other_sum * exponential(other_max, offset);
        max = top;
    }
    template <typename Vector>
    __device__ __forceinline__ void add_online(const Vector& vector) {
        float top = max;
#pragma unroll
        for (int i = 0; i < Vector::COUNT; ++i) top = fmaxf(top, vector.get(i));
        const float offset = offset_of(top);
        sum *= exponential(max, offset);
        max = top;
        add_exponentials(vector, offset);
    }
    template <typename Vector>
    __device__ __forceinline__ void add_exponentials(const Vector& vector, float offset) {
#pragma unroll
        for (int i = 0; i < Vector::COUNT; ++i) sum += exponential(vector.get(i), offset);
    }
    template <typename Vector>
    __device__ __forceinline__ void add_max(const Vector& vector) {
#pragma unroll
        for (int i = 0; i < Vector::COUNT; ++i) max = fmaxf(max, vector.get(i));
    }
};

// Combine the statistics of all threads of a row; every thread gets the same.
__device__ __forceinline__ void reduce(Statistics& s) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        s.merge(__shfl_xor_sync(ALL, s.max, step), __shfl_xor_sync(ALL, s.sum, step));
    if constexpr (WARPS > 1) {
        __shared__ float2 warps[THREADS / WARP];
        __syncthreads();
        if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = make_float2(s.max, s.sum);
        __syncthreads();
        s = Statistics{};
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const float2 other = warps[threadIdx.x / (WARP * WARPS) * WARPS + i];
            s.merge(other.x, other.y);
        }
    }
}

// A sum alone: the row's offset is known already.
__device__ __forceinline__ void reduce_sum(Statistics& s, float max) {
    s.max = 0.f;  // merging equal maxima adds the sums
    reduce(s);
    s.max = max;
}

extern "C" __global__ void __launch_bounds__(THREADS, cfg::MIN_BLOCKS) row_softmax(const __grid_constant__ Params p) {
    constexpr int PER_ROW = WARP * WARPS;
    const long long row = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / PER_ROW;
    const int thread = threadIdx.x % PER_ROW;
    const Element* x = p.x + row * p.x_stride;
    Element* y = p.y + row * p.y_stride;
    const Slice slice(x, row < p.rows ? p.columns : 0);  // warps past the last row meet the barriers all the same
    Statistics s;
    typename Slice::Full kept[KEEP > 0 ? KEEP : 1];

    if constexpr (KEEP > 0) {
#pragma unroll
        for (int i = 0; i < KEEP; ++i)
            if (thread + i * PER_ROW < slice.vectors) kept[i].load(x + slice.vector(thread + i * PER_ROW));
#pragma unroll
        for (int i = 0; i < KEEP; ++i)
            if (thread + i * PER_ROW < slice.vectors) s.add_online(kept[i]);
        slice.for_edges(x, thread, [&](const auto& vector, long long) { s.add_online(vector); });
        reduce(s);
    } else if constexpr (cfg::ALGORITHM == ONLINE) {
        slice.for_all(x, thread, PER_ROW, [&](const auto& vector, long long) { s.add_online(vector); });
        reduce(s);
    } else {
        if constexpr (cfg::ALGORITHM == SAFE) {
            slice.for_all(x, thread, PER_ROW, [&](const auto& vector, long long) { s.add_max(vector); });
            reduce(s);
            s.sum = 0.f;
        } else {
            s.max = 0.f;
        }
        const float max = s.max, offset = offset_of(max);
        slice.for_all(x, thread, PER_ROW, [&](const auto& vector, long long) { s.add_exponentials(vector, offset); });
        reduce_sum(s, max);
    }

    const float offset = offset_of(s.max), inverse = __fdividef(1.f, s.sum);
    const auto write = [&](auto& vector, long long at) {
#pragma unroll
        for (int i = 0; i < vector.COUNT; ++i) vector.set(i, exponential(vector.get(i), offset) * inverse);
        vector.store(y + at);
    };
    if constexpr (KEEP > 0) {
#pragma unroll
        for (int i = 0; i < KEEP; ++i)
            if (thread + i * PER_ROW < slice.vectors) write(kept[i], slice.vector(thread + i * PER_ROW));
        slice.for_edges(x, thread, write);
    } else {
        slice.for_all(x, thread, PER_ROW, write);
    }
}
