// The state of a multi-stage pipeline: which stage is next, and the phase (parity) of its mbarriers.
#pragma once
#include "mbarrier.cuh"

// A stored state: an index and a phase. A consumer waits for `phase`, a producer for `phase ^ 1`.
template <int STAGES>
struct PipelineState {
    int index = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (STAGES == 1) {
            phase ^= 1;
        } else if (++index == STAGES) {
            index = 0, phase ^= 1;
        }
    }
};

// The state of the n-th use, derived from the count where registers are short. STAGES is a power of two.
template <int STAGES>
struct PipelineStateAt {
    u32 index, phase;
    __device__ __forceinline__ explicit PipelineStateAt(u32 n) : index(n % STAGES), phase(n / STAGES % 2) {}
};
