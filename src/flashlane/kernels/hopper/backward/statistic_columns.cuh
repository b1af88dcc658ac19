// Row statistics as operands of the products of the scores (STATISTICS_IN_PRODUCTS).
//
// One more step along k subtracts them in the products themselves:
//
//     S − LSE/scale = K·Qᵀ + w·c_LSE       dP − delta = V·dOᵀ + w·c_delta
//
// so that no thread loads them. Read from shared memory as numbers they would take a tenth of the reads: each of them
// goes to 64 threads. c are the statistic's parts, of 11 or 8 bits each, in the operands' type, and w their weights,
// the same in all rows. Eight queries lie next to each other, in groups of rows (the parts):
//
//     lse low │ delta low │ lse middle │ delta middle │ lse high │ delta high        8 queries each, 16 bytes
//
// A product reads eight rows of a group, so the first two of the next one too, whose weights are 0: these are low
// parts, which are finite. It reads the group twice, as the first and as the second half of its 16 rows: weights are
// halves.
#pragma once
#include "mma.cuh"

constexpr int STATISTIC_PARTS = 3, COLUMNS_OF_QUERY = 2 * STATISTIC_PARTS, COLUMNS_GROUP = 8 * COLUMNS_OF_QUERY;
enum Statistic { STATISTIC_LSE, STATISTIC_DELTA };

template <typename Element>
struct StatisticWeights {                                 // bf16 has the exponents of f32
    static constexpr float LIMIT = 1e38f;
    static __device__ __forceinline__ constexpr float weight(int) { return 1.f; }
};
template <>
struct StatisticWeights<__half> {
    static constexpr float LIMIT = 65504.f * 65536.f;
    static __device__ __forceinline__ constexpr float weight(int part) {
        return part == 2 ? 65536.f : part == 1 ? 32.f : 1.f / 64;
    }
};

// Stores the parts of minus a statistic of a query; part 2 is the highest. What is not finite is in that one alone.
template <typename Element>
__device__ __forceinline__ void store_statistic(Element* block, int row, Statistic which, float minus) {
    using Weights = StatisticWeights<Element>;
    Element* const to = block + row / 8 * COLUMNS_GROUP + row % 8;
    float rest = minus;
#pragma unroll
    for (int part = STATISTIC_PARTS - 1; part >= 0; --part) {
        const Element x = Convert<Element>::from_float(rest / Weights::weight(part));
        to[8 * (2 * part + which)] = x;
        rest -= Convert<Element>::to_float(x) * Weights::weight(part);
        rest = fabsf(rest) < Weights::LIMIT ? rest : 0.f;
    }
}

// The weights of a statistic, of which each row of A is a copy: 8 rows of 8 columns.
template <typename Element>
__device__ __forceinline__ Element selector(int index, Statistic which) {
    const int row = index % 8;
    const bool own = row < COLUMNS_OF_QUERY && row % 2 == which;
    return Convert<Element>::from_float(own ? StatisticWeights<Element>::weight(row / 2) / 2 : 0.f);
}
