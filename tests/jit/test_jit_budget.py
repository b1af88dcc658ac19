"""Occupancy and limits, against known values and against NVIDIA's own calculator."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess

import pytest

from flashlane import jit
from flashlane.jit import toolchain

KIB = 1024


@pytest.mark.parametrize(
    "arch, threads, registers, shared, ctas, limit",
    [
        ("sm_80", 256, 64, 0, 4, "registers"),  # 65536 / (256 · 64)
        ("sm_80", 128, 255, 0, 2, "registers"),  # 8192 registers a warp, two warps a sub-partition
        ("sm_80", 128, 40, 0, 12, "registers"),  # 12 warps a sub-partition, and not 51 warps an SM
        ("sm_86", 128, 32, 0, 12, "threads"),  # 1536 threads
        ("sm_86", 64, 16, 0, 16, "CTAs"),
        ("sm_89", 32, 16, 0, 24, "CTAs"),
        ("sm_86", 128, 64, 48 * KIB, 2, "shared memory"),  # 49 KiB each of 100
        ("sm_80", 128, 64, 81 * KIB, 2, "shared memory"),  # 82 KiB each of 164
        ("sm_80", 128, 64, 81 * KIB + 1, 1, "shared memory"),
        ("sm_90a", 128, 64, 113 * KIB, 2, "shared memory"),
        ("sm_90a", 384, 168, 200 * KIB, 1, "registers"),  # the warp-specialised Hopper shape: both allow one
        ("sm_90a", 1024, 65, 0, 0, "registers"),  # 72 · 1024 registers do not exist
        ("sm_100", 128, 64, 228 * KIB, 0, "shared memory"),
        ("sm_120", 128, 128, 99 * KIB, 1, "shared memory"),
    ],
)
def test_known_occupancies(arch, threads, registers, shared, ctas, limit):
    found = jit.occupancy(arch, threads, registers, shared)
    warps = ctas * -(-threads // 32)
    assert (found.ctas, found.limit, found.warps) == (ctas, limit, warps)
    assert found.fraction == pytest.approx(warps / jit.LIMITS[arch].warps)


@pytest.mark.parametrize("arch, kib", [("sm_80", 163), ("sm_86", 99), ("sm_87", 163), ("sm_89", 99), ("sm_90a", 227)])
def test_shared_limits_are_the_programming_guides(arch, kib):
    assert jit.shared_limit(arch) == kib * KIB


def test_every_architecture_we_compile_for_has_limits():
    ours = {arch for arch in toolchain.supported_architectures() if toolchain.architecture_number(arch) >= 80}
    assert ours <= set(jit.LIMITS)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("sm_42", 32, 32, 0), "arch is 'sm_42'; known: sm_80"),
        (("sm_80", 0, 32, 0), "threads is 0"),
        (("sm_80", 1025, 32, 0), "threads is 1025"),
        (("sm_80", 32, 256, 0), "registers is 256"),
        (("sm_80", 32, 32, -1), "shared is -1"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        jit.occupancy(*arguments)


ORACLE = """
#include <cstddef>
#include <cuda_occupancy.h>
extern "C" int blocks(int major, int minor, int sm_threads, int sm_shared, int threads, int registers, int shared) {
  cudaOccDeviceProp p;
  p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024; p.warpSize = 32; p.numSms = 100;
  p.maxThreadsPerMultiprocessor = sm_threads; p.regsPerBlock = 65536; p.regsPerMultiprocessor = 65536;
  p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = sm_shared;
  p.sharedMemPerBlockOptin = sm_shared - 1024; p.reservedSharedMemPerBlock = 1024;
  cudaOccFuncAttributes a;
  a.maxThreadsPerBlock = 1024; a.numRegs = registers; a.sharedSizeBytes = 0; a.numBlockBarriers = 1;
  a.partitionedGCConfig = PARTITIONED_GC_OFF; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  a.maxDynamicSharedSizeBytes = shared;
  cudaOccDeviceState s;
  s.cacheConfig = CACHE_PREFER_NONE; s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult r;
  return cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, shared)
    ? -1 : r.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """``cuda_occupancy.h`` of the CUDA runtime, compiled for the host."""
    host_compiler = shutil.which("g++") or shutil.which("clang++")
    if host_compiler is None:
        pytest.skip("no C++ compiler for the host")
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "oracle.cpp").write_text(ORACLE)
    include = f"-I{toolchain.include_directory()}"
    command = [host_compiler, "-shared", "-fPIC", include, str(folder / "oracle.cpp"), "-o", str(folder / "oracle.so")]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "oracle.so")).blocks


# The header of CUDA 13.0 knows no compute capability 8.8.
@pytest.mark.parametrize("arch", [arch for arch in jit.LIMITS if arch[-1].isdigit() and arch != "sm_88"])
def test_agrees_with_nvidias_calculator(oracle, arch):
    limits, number = jit.LIMITS[arch], toolchain.architecture_number(arch)
    for _ in range(1000):
        threads = random.choice([random.randint(1, 1024), 32 * random.randint(1, 32)])
        registers = random.randint(1, 255)
        shared = random.choice([0, random.randint(0, limits.shared), limits.shared_of_cta])
        expected = oracle(number // 10, number % 10, limits.threads, limits.shared, threads, registers, shared)
        assert jit.occupancy(arch, threads, registers, shared).ctas == expected, (threads, registers, shared)
