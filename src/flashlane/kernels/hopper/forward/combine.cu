// Combines split results in a launch of its own: a warp a row.
#include "hopper/forward/combine.cuh"

constexpr int WARPS = 4;

struct Params {
    CombineParams combine;
    ScoreParams score;
};

extern "C" __global__ void __launch_bounds__(WARPS * WARP) hopper_combine(const __grid_constant__ Params params) {
    const CombineParams& p = params.combine;
    const long long flat = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / WARP;  // (batch, head, row)
    if (flat >= static_cast<long long>(p.batch) * p.heads * p.rows) return;
    const long long above = flat / p.rows;
    combine_row<cfg::HEAD_DIM_V, 8>(p, params.score, p.splits, above / p.heads, above % p.heads, flat % p.rows, 0,
                                    true);
}
