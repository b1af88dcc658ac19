"""HGEMM on ``mma.sync`` m16n8k16: swizzled shared memory, a pipeline of ``cp.async`` tiles, fragments read ahead.

The idea: a warp that multiplies 64×64 tiles does 65536 multiply-adds for 4 KiB read from shared memory, which is what
lets the tensor cores, and not shared memory (128 bytes a clock and SM), be the limit. ``gemm.cu`` draws the pipeline.
``gemm_tma.cu`` is the same product where TMA loads tiles, which leaves registers for warp tiles of 96×64.
Source: PTX ISA mma.sync.m16n8k16, ldmatrix, cp.async; CUTLASS's multistage mainloop for the order of a step.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from flashlane import jit
from flashlane.jit import KernelSource, launch_pool, tensormap
from flashlane.jit.toolchain import architecture_number
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
BOX_COLUMNS = 64
"""Columns of a TMA box: 128 bytes, its widest swizzle."""
BARRIER_BYTES = 16
"""The two barriers of a stage."""
TILE_BYTES = 16
"""Where a CTA's tile begins, and its steps, in shared memory."""
TMA_ARCH = 90
"""The first architecture that has TMA."""
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
    tma: bool = False
    """``gemm_tma.cu``: TMA loads the tiles, and single fragments are loaded again after their last product."""
    width: int = 1
    """With TMA: fragments of B that are multiplied with a fragment of A at a time."""

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def name(self) -> str:
        """``128x256x64 2x4 s3``: tile of a CTA, warps, stages; ``f1``: single fragments; ``tma``, ``w2``: its width."""
        words = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"{self.warps_m}x{self.warps_n}", f"s{self.stages}"]
        words += ["tma"] if self.tma else ["f1"] if self.fragment_buffers == 1 else []
        words += [f"w{self.width}"] if self.width > 1 else []
        return " ".join(words)

    def layouts(self, layout: str) -> tuple[TileLayout, TileLayout]:
        """Shared-memory layouts of the A and B tiles; with TMA B's rows along N are cut into boxes."""
        columns = BOX_COLUMNS if self.tma else self.block_n
        return TileLayout(self.block_k, True), TileLayout(self.block_k if LAYOUTS[layout] else columns, True)

    def shared_memory(self, layout: str = "nn") -> int:
        """Bytes of the pipeline, and with TMA of its barriers and of where the tile lies."""
        if self.tma:
            operands = 2 * (self.block_m + self.block_n) * self.block_k
            return self.stages * (operands + BARRIER_BYTES) + TILE_BYTES
        a, b = self.layouts(layout)
        return self.stages * (a.bytes(self.block_m) + b.bytes(self.block_n if LAYOUTS[layout] else self.block_k))

    def accumulator_registers(self, accumulate: str) -> int:
        """Registers of a thread that hold its part of C."""
        elements = self.block_m * self.block_n // self.threads
        return elements if accumulate == "f32" else elements // 2

    def constants(self, dtype: str, accumulate: str, layout: str) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("block_m", "block_n", "block_k", "warps_m", "warps_n", "stages")
        plain += ("width",) if self.tma else ("fragment_buffers", "min_blocks")
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
        HgemmConfig(192, 256, 64, 2, 4, stages=4, fragment_buffers=1, tma=True),
        HgemmConfig(192, 256, 64, 2, 4, stages=4, fragment_buffers=1, tma=True, width=2),
        HgemmConfig(256, 256, 64, 4, 2, stages=3, fragment_buffers=1, tma=True, width=2),
    )
}
"""The configurations by name. All are compiled, checked and timed; :data:`PREFERENCE` picks among them."""

PREFERENCE: dict[str, tuple[str, ...]] = {
    "f32": ("192x256x64 2x4 s4 tma", "256x128x64 4x2 s4", "128x256x32 2x4 s4"),
    "f16": ("256x256x64 4x2 s3 tma w2", "256x256x32 4x2 s4", "128x256x32 2x4 s4"),
}
"""Accumulator -> configurations for large products, best first; the first that fits the architecture is taken."""
SMALL = "128x128x32 2x2 s4"
"""The configuration of products whose preferred tiles would not occupy every SM."""


def fits(config: HgemmConfig, accumulate: str, arch: str) -> bool:
    """Whether a configuration has enough registers and shared memory on an architecture."""
    fragments = (config.block_m // config.warps_m + config.block_n // config.warps_n) // 4 * config.fragment_buffers
    registers = config.accumulator_registers(accumulate) + fragments
    budget = min(255, 65536 // (config.threads * config.min_blocks))
    enough_shared = config.min_blocks * (config.shared_memory() + 1024) <= jit.limits(arch).shared
    has_tma = architecture_number(arch) >= TMA_ARCH
    return enough_shared and (has_tma or not config.tma) and registers + ADDRESSES[config.tma] <= budget


ADDRESSES = {False: 16, True: 8}
"""With TMA or without: registers of a thread besides accumulators and fragments, at least: pointers, cursors,
counters."""


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


class TmaParams(ctypes.Structure):
    """Mirror of ``Params`` in ``gemm_tma.cu``."""

    _fields_ = [
        ("c", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("c_stride", "m", "n", "k")),
        *((name, ctypes.c_int) for name in ("blocks_m", "blocks_n", "group", "boxes_b", "split_from")),
        *((name, ctypes.c_void_p) for name in ("sums", "arrivals")),
    ]


@functools.cache
def gemm_source(config: HgemmConfig, dtype: str, accumulate: str, layout: str) -> KernelSource:
    """The device file with a configuration's constants."""
    file = "gemm_tma.cu" if config.tma else "gemm.cu"
    return source_of(file, "hgemm", config.constants(dtype, accumulate, layout), ("gemm.cuh",))


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
    if chosen.tma:
        _launch_by_tma(chosen, a, b, out, layout, accumulate)
        return out
    blocks_m, blocks_n = -(-m // chosen.block_m), -(-n // chosen.block_n)
    params = HgemmParams(
        *(tensor.data_ptr() for tensor in (a, b, out)),
        *(tensor.stride(0) for tensor in (a, b, out)),
        *(m, n, k, blocks_m, blocks_n, max(1, GROUP_ROWS // chosen.block_m)),
    )
    source = gemm_source(chosen, dtype, accumulate, layout)
    run(source, a.device, blocks_m * blocks_n, chosen.threads, chosen.shared_memory(layout), params)
    return out


def split_tiles(tiles: int, resident: int, blocks: int) -> int:
    """Tiles of the last wave of which two CTAs compute half of K each: those that fill at most half of it.

    Args:
        tiles: of the launch.
        resident: tiles that the GPU computes at once.
        blocks: k-blocks of a tile; each half has at least one.
    """
    rest = tiles % resident
    return rest if 2 * rest <= resident and blocks >= 2 else 0


def _launch_by_tma(
    config: HgemmConfig, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, layout: str, accumulate: str
) -> None:
    """Enqueue ``gemm_tma.cu``."""
    (m, k), n, device = a.shape, out.shape[1], a.device
    blocks_m, blocks_n = -(-m // config.block_m), -(-n // config.block_n)
    tiles, multiprocessors = blocks_m * blocks_n, torch.cuda.get_device_properties(device).multi_processor_count
    split = split_tiles(tiles, multiprocessors, -(-k // config.block_k)) if accumulate == "f32" else 0
    with torch.cuda.device(device):
        index, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        capturing = stream != 0 and torch.cuda.is_current_stream_capturing()
        arrivals = launch_pool.counters_of(index, stream, max(1, split), capturing)
        sums = out.new_empty(split * config.block_m * config.block_n, dtype=torch.float32)
        boxes_b = 1 if LAYOUTS[layout] or n % BOX_COLUMNS == 0 else config.block_n // BOX_COLUMNS
        maps = b"".join(map(tensormap.encode, tensor_maps(config, a, b, layout, boxes_b)))
        sizes = m, n, k, blocks_m, blocks_n, max(1, GROUP_ROWS // config.block_m), boxes_b, tiles - split
        params = TmaParams(out.data_ptr(), out.stride(0), *sizes, sums.data_ptr(), arrivals.data_ptr())
        source = gemm_source(config, dtype_name(a.dtype), accumulate, layout)
        both = params, (ctypes.c_ubyte * len(maps)).from_buffer_copy(maps)
        run(source, device, tiles + split, config.threads, config.shared_memory(layout), both)


def tensor_maps(
    config: HgemmConfig, a: torch.Tensor, b: torch.Tensor, layout: str, boxes_b: int
) -> tuple[tensormap.TensorMap, tensormap.TensorMap]:
    """The maps of A and B, with axes (column, row, plane, 1).

    Where one box holds all of B's columns of a stage, B is cut into planes of :data:`BOX_COLUMNS` columns.
    """
    element = dtype_name(a.dtype)
    rows, columns = b.shape
    if LAYOUTS[layout]:
        sizes, strides, box = (columns, rows, 1), (1, b.stride(0), 0), (config.block_k, config.block_n, 1)
    elif boxes_b == 1:
        planes = columns // BOX_COLUMNS
        sizes, strides = (BOX_COLUMNS, rows, planes), (1, b.stride(0), BOX_COLUMNS)
        box = BOX_COLUMNS, config.block_k, config.block_n // BOX_COLUMNS
    else:
        sizes, strides, box = (columns, rows, 1), (1, b.stride(0), 0), (BOX_COLUMNS, config.block_k, 1)
    (m, k), box_a = a.shape, (config.block_k, config.block_m, 1, 1)
    return (
        tensormap.describe(element, a.data_ptr(), (k, m, 1, 1), (1, a.stride(0), 0, 0), box_a),
        tensormap.describe(element, b.data_ptr(), (*sizes, 1), (*strides, 0), (*box, 1)),
    )


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
