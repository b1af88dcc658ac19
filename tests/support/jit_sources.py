"""Small kernels and helpers that the tests of flashlane.jit share."""

from __future__ import annotations

from flashlane import jit

VECTOR_ADD = """
struct Params { const float* a; const float* b; float* c; long long n; };
extern "C" __global__ void add(Params p) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < p.n) p.c[i] = p.a[i] + p.b[i];
}
"""

# 96 values live over a barrier, in 32 registers.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x, int n) {
  float a[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = x[i * n + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 96; ++i) x[i * n + threadIdx.x] = a[95 - i] * a[(i * 7) % 96];
}
"""

MMA = """
#include "config.cuh"
extern "C" __global__ void multiply(float* x, const unsigned* u) {
  float c[4] = {0.f, 0.f, 0.f, 0.f};
  #pragma unroll
  for (int i = 0; i < cfg::STEPS; ++i)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(u[i]), "r"(u[i + 1]), "r"(u[i + 2]), "r"(u[i + 3]), "r"(u[i + 4]), "r"(u[i + 5]));
  x[threadIdx.x] = exp2f(c[0]) + c[1] + c[2] + c[3];
}
"""


def vector_add(comment: str = "") -> jit.KernelSource:
    """The vector-add kernel; a comment makes it a new source."""
    return jit.KernelSource("tests/add.cu", f"// {comment}\n{VECTOR_ADD}", "add")


def spilling() -> jit.KernelSource:
    return jit.KernelSource("tests/spill.cu", SPILLING, "spill")


def multiply(steps: int = 3) -> jit.KernelSource:
    return jit.KernelSource("tests/multiply.cu", MMA, "multiply", (("STEPS", steps),))
