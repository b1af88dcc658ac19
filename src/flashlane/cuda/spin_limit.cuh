// The limit of a wait for other threads.
#pragma once
#include "ptx.cuh"

// In a debug build a wait of several seconds traps, so that a hang is an error.
struct SpinLimit {
#ifdef FLASHLANE_DEBUG
    static constexpr long long CLOCKS = 8000000000ll;
    const long long start = clock64();
    __device__ __forceinline__ void check() const {
        if (clock64() - start > CLOCKS) __trap();
    }
#else
    __device__ __forceinline__ void check() const {}
#endif
};
