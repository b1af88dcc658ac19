"""HGEMM on ``mma.sync`` m16n8k16: swizzled shared memory, a pipeline of ``cp.async`` tiles, fragments read ahead.

The idea: a warp that multiplies 64×64 tiles does 65536 multiply-adds for 4 KiB read from shared memory, which is what
lets the tensor cores, and not shared memory (128 bytes a clock and SM), be the limit. ``gemm.cu`` draws the pipeline.
Source: PTX ISA mma.sync.m16n8k16, ldmatrix, cp.async; CUTLASS's multistage mainloop for the order of a step.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from flashlane import jit
from flashlane.jit import KernelSource
from flashlane.kernels.tile_layout import CHUNK, TileLayout
from flashlane.lessons.launch import (
    DTYPES,
    ELEMENTS,
    VECTOR_BYTES,
    check_choice,
    check_tensor,
    device_arch,
    dtype_name,
    run,
    source_of,
)

LAYOUTS = {"nn": False, "tn": True}
"""Layout -> B is stored with K contiguous."""
OPERANDS = (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))
"""(dtype, accumulate) pairs that the instruction has."""
PRECISIONS = {"f16": "__half", "f32": "float"}
GROUP_ROWS = 2048
"""Rows of C that CTAs cover which run at the same time, about: 132 CTAs of 128×256 then form 16 × 8."""


@dataclass(frozen=True)
class HgemmConfig:
    """Tile shape and pipeline of ``gemm.cu``."""

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    fragment_buffers: int = 2
    """2: a step's fragments are read before the products of the step before; 1: after them, in half the registers."""
    min_blocks: int = 1
    """CTAs an SM that the register allocation must allow."""

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def name(self) -> str:
        """``128x256x64 2x4 s3``: tile of a CTA, warps, stages; ``f1`` for single fragments."""
        words = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"{self.warps_m}x{self.warps_n}", f"s{self.stages}"]
        return " ".join(words + (["f1"] if self.fragment_buffers == 1 else []))

    def layouts(self, layout: str) -> tuple[TileLayout, TileLayout]:
        """Shared-memory layouts of the A and B tiles."""
        return TileLayout(self.block_k, True), TileLayout(self.block_k if LAYOUTS[layout] else self.block_n, True)

    def shared_memory(self, layout: str = "nn") -> int:
        """Bytes of the pipeline."""
        a, b = self.layouts(layout)
        return self.stages * (a.bytes(self.block_m) + b.bytes(self.block_n if LAYOUTS[layout] else self.block_k))

    def accumulator_registers(self, accumulate: str) -> int:
        """Registers of a thread that hold its part of C."""
        elements = self.block_m * self.block_n // self.threads
        return elements if accumulate == "f32" else elements // 2

    def constants(self, dtype: str, accumulate: str, layout: str) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("block_m", "block_n", "block_k", "warps_m", "warps_n", "stages", "fragment_buffers", "min_blocks")
        return (
            ("Element", ELEMENTS[dtype]),
            ("Precision", PRECISIONS[accumulate]),
            *((name.upper(), getattr(self, name)) for name in plain),
            ("K_MAJOR_B", LAYOUTS[layout]),
            ("SHARED_BYTES", self.shared_memory(layout)),
        )


CONFIGS: dict[str, HgemmConfig] = {
    config.name: config
    for config in (
        HgemmConfig(128, 256, 32, 2, 4, stages=4),
        HgemmConfig(128, 256, 64, 2, 4, stages=3),
        HgemmConfig(128, 256, 64, 2, 4, stages=4),
        HgemmConfig(256, 128, 32, 4, 2, stages=4),
        HgemmConfig(256, 128, 64, 4, 2, stages=3),
        HgemmConfig(256, 128, 64, 4, 2, stages=4),
        HgemmConfig(192, 256, 32, 2, 4, stages=4, fragment_buffers=1),
        HgemmConfig(256, 256, 32, 4, 2, stages=4),
        HgemmConfig(256, 256, 64, 4, 2, stages=3),
        HgemmConfig(128, 128, 32, 2, 2, stages=2, min_blocks=2),
        HgemmConfig(128, 128, 32, 2, 2, stages=3, min_blocks=2),
        HgemmConfig(128, 128, 32, 2, 2, stages=4, min_blocks=2),
        HgemmConfig(128, 128, 64, 2, 2, stages=3, min_blocks=2),
    )
}
"""The configurations by name. All are compiled, checked and timed; :data:`PREFERENCE` picks among them."""

PREFERENCE: dict[str, tuple[str, ...]] = {
    "f32": ("256x128x64 4x2 s4", "128x256x32 2x4 s4"),
    "f16": ("256x256x32 4x2 s4", "128x256x32 2x4 s4"),
}
"""Accumulator -> configurations for large products, best first; the first that fits the shared memory is taken."""
SMALL = "128x128x32 2x2 s4"
"""The configuration of products whose preferred tiles would not occupy every SM."""


def fits(config: HgemmConfig, accumulate: str, arch: str) -> bool:
    """Whether a configuration has enough registers and shared memory on an architecture."""
    fragments = (config.block_m // config.warps_m + config.block_n // config.warps_n) // 4 * config.fragment_buffers
    registers = config.accumulator_registers(accumulate) + fragments
    budget = min(255, 65536 // (config.threads * config.min_blocks))
    enough_shared = config.min_blocks * (config.shared_memory() + 1024) <= jit.limits(arch).shared
    return enough_shared and registers + ADDRESSES <= budget


ADDRESSES = 16
"""Registers of a thread besides accumulators and fragments, at least: pointers, cursors, counters."""


@functools.cache
def default_config(m: int, n: int, accumulate: str, arch: str, multiprocessors: int) -> HgemmConfig:
    """The configuration that :func:`hgemm` takes when it is given none."""
    for name in PREFERENCE[accumulate]:
        config = CONFIGS[name]
        if fits(config, accumulate, arch) and ctas_of(config, m, n) >= multiprocessors:
            return config
    return CONFIGS[SMALL]


def ctas_of(config: HgemmConfig, m: int, n: int) -> int:
    """CTAs of a launch."""
    return -(-m // config.block_m) * -(-n // config.block_n)


class HgemmParams(ctypes.Structure):
    """Mirror of ``Params`` in ``gemm.cu``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_int) for name in ("a_stride", "b_stride", "c_stride", "m", "n", "k")),
        *((name, ctypes.c_int) for name in ("blocks_m", "blocks_n", "group")),
    ]


@functools.cache
def gemm_source(config: HgemmConfig, dtype: str, accumulate: str, layout: str) -> KernelSource:
    """The device file with a configuration's constants."""
    return source_of("gemm.cu", "hgemm", config.constants(dtype, accumulate, layout))


def hgemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    layout: str = "nn",
    accumulate: str = "f32",
    config: HgemmConfig | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """C = A·B on the tensor cores, with 16-bit operands and result.

    Args:
        a: (M, K), f16 or bf16.
        b: (K, N) for ``layout="nn"``; (N, K), that is B transposed, for ``layout="tn"``. The dtype of ``a``.
        layout: how B is stored.
        accumulate: ``f32``, or ``f16`` (f16 operands only), whose running sums round and overflow as f16 does.
        config: a configuration or the name of one in :data:`CONFIGS`; None takes the preferred one.
        out: (M, N), the dtype of ``a``; allocated when None. It may not overlap ``a`` or ``b``.

    K and N are multiples of 8, M is any; columns are contiguous, rows are any multiple of 8 elements apart and start
    on 16 bytes.

    Returns:
        C (M, N).

    Raises:
        ValueError: a shape, stride, alignment, layout, accumulator or configuration that cannot be; the message names
            the argument.
        TypeError: a dtype that cannot be.
    """
    check_choice("layout", layout, LAYOUTS)
    check_tensor("a", a, ("f16", "bf16"))
    check_tensor("b", b, (dtype_name(a.dtype),))
    m, n, k = _sizes(a, b, layout)
    dtype = dtype_name(a.dtype)
    if (dtype, accumulate) not in OPERANDS:
        allowed = " or ".join(repr(item) for kind, item in OPERANDS if kind == dtype)
        raise ValueError(f"accumulate is {accumulate!r}; for {DTYPES[dtype]} operands it may be {allowed}")
    if out is None:
        out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    elif out.shape != (m, n) or out.dtype != a.dtype or out.device != a.device:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must be {a.dtype} {(m, n)} on a's")
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        _check_rows(name, tensor)
    if 0 in (m, n, k):
        return out.zero_()
    arch = device_arch(a.device)
    chosen = _chosen(config, m, n, accumulate, arch, a.device)
    blocks_m, blocks_n = -(-m // chosen.block_m), -(-n // chosen.block_n)
    params = HgemmParams(
        *(tensor.data_ptr() for tensor in (a, b, out)),
        *(tensor.stride(0) for tensor in (a, b, out)),
        *(m, n, k, blocks_m, blocks_n, max(1, GROUP_ROWS // chosen.block_m)),
    )
    source = gemm_source(chosen, dtype, accumulate, layout)
    run(source, a.device, blocks_m * blocks_n, chosen.threads, chosen.shared_memory(layout), params)
    return out


def _chosen(
    config: HgemmConfig | str | None, m: int, n: int, accumulate: str, arch: str, device: torch.device
) -> HgemmConfig:
    if config is None:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return default_config(m, n, accumulate, arch, multiprocessors)
    if isinstance(config, str):
        check_choice("config", config, CONFIGS)
        config = CONFIGS[config]
    if not fits(config, accumulate, arch):
        raise ValueError(f"config is {config.name!r}, which has too few registers or shared memory on {arch}")
    return config


def _sizes(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """M, N and K."""
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must have two dimensions")
    if a.device != b.device:
        raise ValueError(f"b is on {b.device}; it must be on a's device, {a.device}")
    (m, k), (b_k, n) = a.shape, b.shape if layout == "nn" else b.shape[::-1]
    if b_k != k:
        raise ValueError(f"b is {tuple(b.shape)}; with a {tuple(a.shape)} and layout {layout!r} its K must be {k}")
    for name, axis, size in (("a", "K", k), ("b", "N", n)):
        if size % CHUNK:
            raise ValueError(f"{name} has {axis} = {size}; {axis} must be a multiple of {CHUNK} (16-byte chunks)")
    return m, n, k


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    """Rows must be readable in 16-byte chunks, and their stride must fit 32 bits."""
    stride = tensor.stride(0)
    contiguous = tensor.stride(1) == 1 or tensor.shape[1] <= 1
    if not contiguous or tensor.data_ptr() % VECTOR_BYTES or (tensor.shape[0] > 1 and stride % CHUNK):
        raise ValueError(
            f"{name} has strides {tensor.stride()} and starts at {tensor.data_ptr() % VECTOR_BYTES} bytes past a "
            f"multiple of 16; its columns must be contiguous and its rows start on 16 bytes (a stride of 8·n elements)"
        )
    if not 0 <= stride < 2**31:
        raise ValueError(f"{name} has a row stride of {stride}; it must be below 2^31 elements")
