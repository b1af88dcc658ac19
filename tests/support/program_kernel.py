"""Generated programs evaluated pair by pair: by a C++ compiler on the host, by NVRTC, and on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from flashlane import jit
from flashlane.flex.program import Arguments, Program
from flashlane.jit import KernelSource

Sizes = tuple[int, int, int, int]
_FOUR = ctypes.c_int * 4

_PAIRS = """
struct Params { ProgramParams program; const float* score; float *out, *derivative; unsigned char* visible; int n[4]; };
__device__ void pairs(const Params& p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n[0] * p.n[1] * p.n[2] * p.n[3]) return;
    const int kv = i % p.n[3], q = i / p.n[3] % p.n[2], line = i / p.n[3] / p.n[2];
    const int h = line % p.n[1], b = line / p.n[1];
    const program::Distance distance{static_cast<float>(kv - kv % 5 - q), static_cast<float>(kv % 5)};
    const Program::Head head = Program::head(p.program, b, h);
    float derivative = 1.f;
    const float with = Program::score(p.program, head, p.score[i], 1.f, b, h, q, kv, distance, derivative);
    const float alone = Program::score(p.program, head, p.score[i], 1.f, b, h, q, kv, distance);
    p.out[i] = Program::FACTOR * (i % 2 ? with : alone);
    p.derivative[i] = derivative;
    p.visible[i] = Program::visible(p.program, b, h, q, kv);
}
"""
_KERNEL = """
struct Params {{ {members} }};
extern "C" __global__ void pairs(const __grid_constant__ Params p) {{
    switch (blockIdx.y) {{ {cases} }}
}}
"""

# What CUDA has and C++ has not. Half types are declared only.
_HOST = """
#include <cmath>
#include <cstdlib>
#include <cstring>
using std::abs;  // of long long too, as CUDA's
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
struct __half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };
inline float __half2float(__half x) { _Float16 y; std::memcpy(&y, &x, 2); return y; }
inline __half __float2half_rn(float x) { _Float16 y = x; __half z; std::memcpy(&z, &y, 2); return z; }
inline float __bfloat162float(__nv_bfloat16 x) { unsigned y = x.bits << 16; float z; std::memcpy(&z, &y, 4); return z; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    unsigned y; std::memcpy(&y, &x, 4);
    return {static_cast<unsigned short>((y + 0x7fff + (y >> 16 & 1)) >> 16)};
}
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline double rsqrt(double x) { return 1. / sqrt(x); }
inline float min_nan(float a, float b) { return a < b || a != a ? a : b; }
inline float max_nan(float a, float b) { return a > b || a != a ? a : b; }
inline float ex2(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline float approximate_tanh(float x) { return tanhf(x); }
"""
_HOST_CALL = """
extern "C" void pairs(const ProgramParams* p, const float* score, float* out, float* derivative, unsigned char* visible,
                      const int* n) {
    for (int b = 0, i = 0; b < n[0]; ++b) for (int h = 0; h < n[1]; ++h) for (int q = 0; q < n[2]; ++q)
        for (int kv = 0; kv < n[3]; ++kv, ++i) {
            const program::Distance distance{static_cast<float>(kv - kv % 5 - q), static_cast<float>(kv % 5)};
            const Program::Head head = Program::head(*p, b, h);
            derivative[i] = 1.f;
            const float with = Program::score(*p, head, score[i], 1.f, b, h, q, kv, distance, derivative[i]);
            const float alone = Program::score(*p, head, score[i], 1.f, b, h, q, kv, distance);
            out[i] = Program::FACTOR * (i % 2 ? with : alone);
            visible[i] = Program::visible(*p, b, h, q, kv);
        }
}
"""
COMPILER = shutil.which("g++") or shutil.which("c++")
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Scores, derivatives and visible pairs."""


def source(*programs: Program) -> KernelSource:
    """A kernel of all programs: ``blockIdx.y`` is which."""
    text = '#include "program_math.cuh"\n'
    for i, program in enumerate(programs):
        text += f"namespace n{i} {{\n{_body(program)}{_PAIRS}}}\n"
    members = " ".join(f"n{i}::Params p{i};" for i in range(len(programs)))
    cases = " ".join(f"case {i}: n{i}::pairs(p.p{i}); break;" for i in range(len(programs)))
    return KernelSource("tests/pairs.cu", text + _KERNEL.format(members=members, cases=cases), "pairs")


def _body(program: Program, rolled: bool = False) -> str:
    """The program's header, for a namespace."""
    return program.header(rolled=rolled).replace("#pragma once", "").replace('#include "program_math.cuh"', "")


def _outputs(score: torch.Tensor) -> Outputs:
    return (
        torch.empty_like(score),
        torch.empty_like(score),
        torch.empty(score.shape, dtype=torch.bool, device=score.device),
    )


def on_host(
    programs: Mapping[str, tuple[Program, Arguments, torch.Tensor]], folder: Path, rolled: bool = False
) -> dict[str, Outputs]:
    """Each program on the scores (f32) of every pair, compiled as C++ together; ``rolled`` as ``header`` takes it."""
    import flashlane

    math_header = Path(flashlane.__file__).parent / "cuda" / "program_math.cuh"
    lines = [line for line in math_header.read_text().splitlines() if not line.startswith(("#include", "#pragma"))]
    folder.joinpath("program_math.cuh").write_text("#pragma once\n" + _HOST + "\n".join(lines))
    text = '#include "program_math.cuh"\n'
    for i, (program, _, _) in enumerate(programs.values()):
        call = _HOST_CALL.replace("void pairs(", f"void pairs{i}(")
        text += f"namespace n{i} {{\n{_body(program, rolled)}\n{call}\n}}\n"
    folder.joinpath("pairs.cc").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "pairs.cc", "-o", "pairs.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr[:3000]
    library = ctypes.CDLL(str(folder / "pairs.so"))
    outputs = {}
    for i, (name, (program, arguments, score)) in enumerate(programs.items()):
        results = _outputs(score)
        params = program.params(arguments)
        addresses = [ctypes.c_void_p(t.data_ptr()) for t in (score, *results)]
        getattr(library, f"pairs{i}")(ctypes.byref(params), *addresses, _FOUR(*score.shape))
        outputs[name] = results
    return outputs


def on_gpu(*programs: tuple[Program, Arguments, torch.Tensor]) -> list[Outputs]:
    """Each program on the scores (f32, on one GPU) of every pair, by one launch."""
    from flashlane.core.arch import arch_of

    fields, values, results, blocks = [], [], [], 1
    for i, (program, arguments, score) in enumerate(programs):
        given, found = program.params(arguments), _outputs(score)
        names = [(name, ctypes.c_void_p) for name in ("score", "out", "derivative", "visible")]
        kind = type("Params", (ctypes.Structure,), {"_fields_": [("program", type(given)), *names, ("n", _FOUR)]})
        fields.append((f"p{i}", kind))
        values.append(kind(given, *(t.data_ptr() for t in (score, *found)), _FOUR(*score.shape)))
        results.append(found)
        blocks = max(blocks, -(-score.numel() // 128))
    params = type("Params", (ctypes.Structure,), {"_fields_": fields})(*values)
    device = programs[0][2].device
    compiled = jit.compile(source(*(program for program, *_ in programs)), arch_of(device))
    jit.load(compiled, device.index).launch((blocks, len(programs), 1), (128, 1, 1), 0, params)
    return results
