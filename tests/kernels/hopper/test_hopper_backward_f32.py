"""The Hopper backward with gradients in f32, for callers that add them to others, without a GPU.

What the compiler says of every design, what the launches are given, and where ``dq_accumulate.cuh`` writes a dQ, which
the host's compiler runs with 32 threads for a warp.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from disassembly import disassembled
from hopper_fakes import gradient_tensors, install
from recorded_spills import check_spills
from sass_loops import families, loops

import flashlane
from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import BackwardKernel
from flashlane.jit import launch
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig

ARCH = "sm_90a"
SOURCE = Path(flashlane.__file__).parent
CAUSAL = AttentionProblem(
    batch=2, heads=8, kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=128, head_dim_v=128, dtype=torch.bfloat16,
    scale=0.1, window_right=0, needs_grad=True, arch=ARCH,
)  # fmt: skip
SMALL = {"batch": 16, "heads": 16, "kv_heads": 16, "seqlen_q": 1024, "seqlen_k": 1024}
FEATURES = {
    "causal": {},
    "full": {"window_right": -1},
    "window": {"window_left": 700},
    "documents": {"varlen": True},
    "documents with a window": {"varlen": True, "window_left": 700},
    "deterministic": {"deterministic": True},
    "documents, deterministic": {"varlen": True, "deterministic": True},
    "softcap": {"softcap": 10.0},
    "ALiBi": {"alibi": True},
    "sinks": {"sinks": True},
    "all": {"window_left": 700, "varlen": True, "deterministic": True, "softcap": 10.0, "alibi": True},
    "many small problems": SMALL,
}
PROBLEMS = {
    f"D{head_dim}, {name}": replace(CAUSAL, head_dim=head_dim, head_dim_v=head_dim, **changes)
    for head_dim in (64, 96, 128, 192, 256)
    for name, changes in FEATURES.items()
    if head_dim in (64, 128, 256) or name in ("causal", "deterministic")
}


def config_of(problem: AttentionProblem, f32_dq: bool = True) -> GradientConfig:
    found = backward.config_of_rank(problem, None, f32_dq)
    assert found is not None
    return found


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_design_compiles_with_gradients_in_f32(problem: AttentionProblem) -> None:
    config = config_of(problem)
    assert config.f32_dq and config.f32_dkdv and not config.unseen_keys and not config.stores_by_tma
    for source in config.sources():
        if source in config.gradient_sources():
            check_spills(config, source)
        else:
            report = jit.compile(source, ARCH).report
            assert not report.spills and not report.warnings, source.name


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_only_what_writes_dq_is_another_kernel(problem: AttentionProblem) -> None:
    """So ranks that add dQ over steps and those that do not share the kernels that take longest to compile."""
    wide, narrow = config_of(problem), config_of(problem, f32_dq=False)
    writers = {source.name.rpartition("/")[2] for source in set(wide.sources()) ^ set(narrow.sources())}
    own = {"dq.cu"} if wide.design == "split_dkdv_dq" else {"postprocess.cu"}
    if isinstance(narrow, OneCtaConfig) and narrow.postprocess != "own_launch":
        own |= {"kernel.cu", "preprocess.cu"}  # idle warps write a dQ in the operands' type
    assert writers == own | ({"preprocess.cu"} if problem.varlen else set())


@pytest.mark.parametrize("problem", [CAUSAL, replace(CAUSAL, head_dim=192, head_dim_v=192)], ids=["D128", "D192"])
def test_the_postprocess_kernel_stores_floats(problem: AttentionProblem) -> None:
    """A store of a lane has two of them, so that there are two for each load of 16 bytes."""
    text = disassembled(jit.compile(config_of(problem).sources()[-1], ARCH).cubin)
    assert "F2FP" not in text and "STG.E.128" not in text and "STG.E.64" in text
    stores = max(inside["STG"] for inside in map(families, loops(text)))
    loads = max(inside["LDG"] for inside in map(families, loops(text)))
    assert stores >= 2 * loads


def test_idle_warps_write_no_dq_in_f32() -> None:
    narrow = config_of(replace(CAUSAL, **SMALL), f32_dq=False)
    assert isinstance(narrow, OneCtaConfig) and narrow.postprocess == "idle_warps"
    with pytest.raises(ValueError, match=r"^f32_dq is True with postprocess 'idle_warps'; it may be"):
        replace(narrow, f32_dq=True)


@pytest.mark.parametrize("f32_dq", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"varlen": True}, {"head_dim": 192, "head_dim_v": 192}, {"head_dim": 256, "deterministic": True}],
    ids=str,
)
def test_launches_write_tensors_in_f32(
    changes: dict[str, object], f32_dq: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(CAUSAL, seqlen_q=100, seqlen_k=170, **changes)
    tensors = gradient_tensors(problem)
    installed = install(monkeypatch)
    launches = next(installed)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "allocator", lambda device: lambda *how: torch.empty_strided(*how[:2], dtype=how[2]))
    backward.prepared_of_rank.cache_clear()
    what = tensors.inputs, tensors.out, tensors.lse, tensors.do
    found = backward.KERNEL.run_f32(problem, *what, f32_dq=f32_dq)
    assert found.q.dtype == (torch.float32 if f32_dq else problem.dtype)
    assert found.k.dtype == found.v.dtype == torch.float32
    params = [each[-1] for each in launches]
    assert len(params) == 3
    for name in ("q", "k", "v"):
        gradient = getattr(found, name)
        written = [one for one in params if getattr(one, f"d{name}", None) == gradient.data_ptr()]
        assert written and all(
            getattr(one, f"d{name}_row", gradient.stride(-3)) == gradient.stride(-3) for one in written
        )
    backward.prepared_of_rank.cache_clear()
    next(installed, None)


@pytest.mark.parametrize("f32_dq", [False, True])
def test_a_window_that_hides_nothing_is_none_of_a_ranks_launch(f32_dq: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the kernel's functions asks for the launch: it has the code and the work of a call without one."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    wide, shapes = replace(CAUSAL, window_left=5000), (torch.Size((2, 4096, 8, 128)), torch.Size((2, 4096, 2, 128)))
    config = backward.config_of_rank(wide, None, f32_dq)
    assert config is not None and config == backward.config_of_rank(CAUSAL, None, f32_dq)
    assert config != backward.config_of_rank(replace(CAUSAL, window_left=4094), None, f32_dq)
    prepared, plain = (backward.prepared_of_rank(each, None, f32_dq, *shapes, 0) for each in (wide, CAUSAL))
    assert prepared.config == config and prepared.problem == CAUSAL and prepared.schedule == plain.schedule
    backward.prepared_of_rank.cache_clear()


def test_a_kernel_writes_none_in_f32_unless_it_says_so() -> None:
    call = SimpleNamespace(), None, None, None
    assert BackwardKernel.run_f32(backward.KERNEL, CAUSAL, *call, f32_dq=True) is None


# --- the layout


WARP_ON_THE_HOST = """
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
using u32 = unsigned;
using std::min;
constexpr int WARP = 32;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 __ldcg(const float4* from) { return *from; }
static u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 __byte_perm(u32 a, u32 b, u32 which) {
  const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  u32 found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<u32>(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
static thread_local struct { int x; } threadIdx;
static std::barrier<> together(WARP);
static u32 words[WARP];
template <typename Read> u32 exchange(u32 mine, Read read) {
  words[threadIdx.x] = mine;
  together.arrive_and_wait();
  const u32 found = read();
  together.arrive_and_wait();
  return found;
}
static u32 __shfl_xor_sync(u32, u32 x, int step) { return exchange(x, [&] { return words[threadIdx.x ^ step]; }); }
static u32 movmatrix_trans(u32 x) {  // PTX ISA, movmatrix: lane l has the elements 2 (l % 4) and the next of row l / 4
  return exchange(x, [] {
    const int column = threadIdx.x / 4, row = threadIdx.x % 4 * 2;
    const auto at = [&](int row) { return words[row * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
    return at(row) | at(row + 1) << 16;
  });
}
struct Bf16 { unsigned short bits; };
template <typename Element> struct Convert {
  static u32 pack(float x, float y) { return __float_as_uint(x) >> 16 | (__float_as_uint(y) & 0xffff0000u); }
};
TRANSPOSE_QUAD
"""
CASE = """
namespace caseNUMBER {
namespace cfg { constexpr bool F32_DQ = IN_F32, MIXED_DQ = MIXED; }
using Element = Bf16;
using DqElement = TYPE;
constexpr int BLOCK_M = ROWS, HEAD_DIM = COLUMNS;
HEADER
void run(const float* sums, DqElement* dq) {  // as postprocess.cu does; the last 3 rows are past the sequence's end
  constexpr int STRIDE = HEAD_DIM + 8;
  if (TRANSPOSED)
    for (int slice = 0; slice < (MIXED ? 1 : SLICES); ++slice)
      for (int group = 0; group < SLICE_ROWS / 8; ++group)
        SliceRows(threadIdx.x, sums, dq, STRIDE, BLOCK_M - 3, slice, group).write_dq(slice, 0.5f);
  for (int column = TRANSPOSED ? MIXED ? 64 : HEAD_DIM : 0; column < HEAD_DIM; column += 32)
    for (int row = 0; row < BLOCK_M; row += 16)
      write_dq_block(sums, dq, STRIDE, BLOCK_M - 3, row, column, 0.5f);
}
void main() {
  std::vector<float> sums(DQ_ACCUM_FLOATS);
  if (fread(sums.data(), 4, sums.size(), stdin) != sums.size()) return;
  std::vector<DqElement> dq(BLOCK_M * (HEAD_DIM + 8));
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < WARP; ++lane)
    lanes.emplace_back([&, lane] { threadIdx.x = lane, run(sums.data(), dq.data()); });
  for (auto& lane : lanes) lane.join();
  fwrite(dq.data(), sizeof(DqElement), dq.size(), stdout);
}
}
"""
TILES = {
    "narrow": (128, 40, True, False),
    "D64": (128, 64, True, False),
    "mixed": (64, 80, True, True),
    "D96": (96, 96, True, False),
    "D104": (64, 104, True, False),
    "D128": (80, 128, True, False),
    "two CTAs, D136": (64, 136, False, False),
    "two CTAs, D256": (64, 256, False, False),
}
"""Rows of an m-block, columns, whether the sums are transposed, and whether those from column 64 on are not."""


def accumulated(values: numpy.ndarray, transposed: bool, mixed: bool) -> numpy.ndarray:
    """dq_accum with the sums ``(row, column)`` of an m-block, as the head of ``dq_accumulate.cuh`` describes it."""
    rows, columns = values.shape
    padded = numpy.zeros((rows, -(-columns // 16) * 16), numpy.float32)
    padded[:, :columns] = values
    lane, parts = numpy.arange(32), []
    halves = [padded] if columns > 64 else [padded[: rows // 2], padded[rows // 2 :]]
    for half in halves if transposed else []:
        for column in range(0, 64 if mixed else padded.shape[1], 16):
            for row in range(0, len(half), 8):
                one = [half[row + 2 * (lane % 4) + i % 2, column + lane // 4 + i // 2 * 8] for i in range(4)]
                parts.append(numpy.stack(one, 1).ravel())
    for column in range(64 if mixed else 0, 0 if transposed and not mixed else padded.shape[1], 8):
        for row in range(0, rows, 16):
            one = [padded[row + lane // 4 + i // 2 * 8, column + 2 * (lane % 4) + i % 2] for i in range(4)]
            parts.append(numpy.stack(one, 1).ravel())
    return numpy.concatenate(parts)


@pytest.mark.slow
def test_dq_is_written_where_it_belongs(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the host")
    header = (SOURCE / "kernels/hopper/backward/dq_accumulate.cuh").read_text()
    header = "\n".join(line for line in header.splitlines() if not line.startswith(("#include", "#pragma once")))
    header = re.sub(r"asm volatile\(.*?\);", "", header, flags=re.DOTALL)
    transpose = re.search(r"__device__[^\n]*transpose_quad.*?\n}\n", (SOURCE / "cuda/tile.cuh").read_text(), re.DOTALL)
    assert transpose is not None
    program, given, wanted = WARP_ON_THE_HOST.replace("TRANSPOSE_QUAD", transpose[0]), b"", []
    cases = [(*tile, in_f32) for tile in TILES.values() for in_f32 in (False, True)]
    for number, (rows, columns, transposed, mixed, in_f32) in enumerate(cases):
        names = {"caseNUMBER": f"case{number}", "ROWS": rows, "COLUMNS": columns}
        names |= {"TYPE": "float" if in_f32 else "Bf16", "IN_F32": int(in_f32), "MIXED": int(mixed)}
        names |= {"TRANSPOSED": int(transposed), "HEADER": header}
        text = CASE
        for name, value in names.items():
            text = re.sub(rf"\b{name}\b", lambda _, value=value: str(value), text)
        program += text
        row, column = numpy.ogrid[:rows, :columns]
        values = row * 512.0 + column if in_f32 else (row * 7.0 + column * 3) % 251  # exact in bf16
        given += accumulated(values, transposed, mixed).astype(numpy.float32).tobytes()
        wide = numpy.zeros((rows, columns + 8), numpy.float32)
        wide[: rows - 3, :columns] = values[: rows - 3] / 2
        wanted.append(wide)
    program += "int main() {" + "".join(f"case{number}::main();" for number in range(len(cases))) + "}"
    (tmp_path / "warp.cpp").write_text(program)
    build = [compiler, "-std=c++20", "-O1", "-pthread", "-w", str(tmp_path / "warp.cpp"), "-o", str(tmp_path / "warp")]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = subprocess.run([tmp_path / "warp"], input=given, capture_output=True, check=True).stdout
    for (*tile, in_f32), right in zip(cases, wanted, strict=True):
        size = right.size * (4 if in_f32 else 2)
        one, found = found[:size], found[size:]
        bits = numpy.frombuffer(one, numpy.uint32 if in_f32 else numpy.uint16)
        bits = bits if in_f32 else bits.astype(numpy.uint32) << 16
        assert numpy.array_equal(bits.view(numpy.float32).reshape(right.shape), right), (tile, in_f32)
    assert not found
