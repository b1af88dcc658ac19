"""The driver's functions through ctypes: its numbers and structures are those of the bindings, which are not called."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flashlane.jit import driver

bindings = pytest.importorskip("cuda.bindings.driver")


def test_numbers_are_those_of_the_bindings() -> None:
    of_function, of_device = bindings.CUfunction_attribute, bindings.CUdevice_attribute
    of_types, of_swizzles = bindings.CUtensorMapDataType, bindings.CUtensorMapSwizzle  # no subscripts: 13.5 has none
    names = ("MAX_THREADS_PER_BLOCK", "SHARED_SIZE_BYTES", "LOCAL_SIZE_BYTES", "NUM_REGS")
    for name in (*names, "MAX_DYNAMIC_SHARED_SIZE_BYTES"):
        assert getattr(driver, name) == getattr(of_function, f"CU_FUNC_ATTRIBUTE_{name}")
    name = "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
    assert getattr(driver, name) == getattr(of_device, f"CU_DEVICE_ATTRIBUTE_{name}")
    names = {"f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32"}
    types = {name: getattr(of_types, f"CU_TENSOR_MAP_DATA_TYPE_{long}") for name, long in names.items()}
    assert types == driver.DATA_TYPES
    names = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
    swizzles = {size: getattr(of_swizzles, f"CU_TENSOR_MAP_SWIZZLE_{name}") for size, name in names.items()}
    assert swizzles == driver.SWIZZLES
    assert bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B == driver.L2_256B
    assert bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE == 0
    assert bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE == 0
    assert bindings.CUresult.CUDA_ERROR_NOT_FOUND == driver.NOT_FOUND
    assert bindings.CUstream_flags.CU_STREAM_NON_BLOCKING == driver.NON_BLOCKING
    assert bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED == driver.RELAXED


def test_a_launch_as_the_bindings_lay_it_out() -> None:
    config, attribute = bindings.CUlaunchConfig(), bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = 5, 6, 7
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 4, 2
    config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs = 512, 0x7F0012345678, [attribute], 1
    theirs = driver.LaunchConfig.from_address(config.getPtr())
    mine = driver.launch_config((5, 6, 7), (32, 4, 2), 512, overlapped=True)
    mine.hStream = 0x7F0012345678
    assert [getattr(mine, name) for name, _ in mine._fields_ if name != "attrs"] == [
        getattr(theirs, name) for name, _ in theirs._fields_ if name != "attrs"
    ]
    theirs, mine = theirs.attrs[0], mine.attrs[0]
    assert (mine.id, mine.value) == (theirs.id, theirs.value) == (driver.PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    assert driver.launch_config((5, 6, 7), (32, 4, 2), 512, overlapped=False).numAttrs == 0


def test_an_address_reaches_the_driver_whole() -> None:
    """Without types, ctypes would pass the lower half."""
    given, codes = [], iter((0, 201))

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def replace_address(place: int, address: int) -> int:
        given.append((place, address))
        return next(codes)

    replace_address.argtypes = None
    library = SimpleNamespace(cuTensorMapReplaceAddress=replace_address)
    replace = driver.Driver(library).address_replacer(0x7F0012345680)  # type: ignore[arg-type]
    assert [replace(0x7F00ABCDEF00), replace(0xFFFF00000010)] == [0, 201]
    assert given == [(0x7F0012345680, 0x7F00ABCDEF00), (0x7F0012345680, 0xFFFF00000010)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_it_says_so() -> None:
    driver.driver.cache_clear()
    with pytest.raises(driver.ToolchainError, match="needs an NVIDIA"):
        driver.driver()


def test_the_bindings_are_not_imported() -> None:
    """Importing them takes as long as everything else of a first call with a full cache."""
    code = "import sys, flashlane.jit.launch, flashlane.jit.tensormap; print('cuda.bindings' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "False\n"), found.stderr


def test_a_structure_is_as_large_as_the_driver_reads() -> None:
    assert ctypes.sizeof(driver.LaunchAttribute) == 72 and ctypes.sizeof(driver.LaunchConfig) == 56
