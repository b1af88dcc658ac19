"""One point of the mma.sync design space as a value: the constants of the template, and the resources that follow."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashlane.core.arch import ELEMENTS
from flashlane.kernels.tile_layout import TileLayout

OUTPUTS = ("direct", "shuffle", "shared")
PRECISIONS = {"f16": "__half", "f32": "float"}


@dataclass(frozen=True)
class MmaConfig:
    """Compile-time constants of ``attention.cu``; its head names the roles."""

    dtype: str
    head_dim: int
    """Columns of the Q and K tiles: the problem's head_dim rounded up to 16, or in tiling families to a slice."""
    head_dim_v: int
    block_m: int
    block_n: int
    warps_q: int
    warps_kv: int = 1
    kv_stages: int = 2
    share_qkv: bool = False
    q_in_registers: bool = False
    scores: str = "f32"
    """Accumulator of Q·Kᵀ."""
    out: str = "f32"
    """Accumulator of P·V."""
    store: str = "f32"
    """Running output."""
    swizzle: str = ""
    """Which tiles are swizzled instead of padded: '', 'q', 'qk' or 'qkv'."""
    vector: bool = True
    """16-byte copies; False copies element by element, for rows that do not start on 16 bytes."""
    early_v: bool = False
    """Wait for V before the softmax, so that the next K loads under it."""
    min_blocks: int = 1
    """CTAs of an SM that the register allocation must allow."""
    k_slice: int = 0
    """Columns of Q and K that one stage holds; 0 for all."""
    v_rows: int = 0
    """Rows of V that one stage holds; 0 for all ``block_n``."""
    v_columns: int = 0
    """Columns of V that one stage holds; 0 for all."""
    q_streamed: bool = False
    """A slice of Q is loaded with each slice of K, again for every tile; otherwise Q is kept in shared memory."""
    output: str = "shuffle"
    """How O is stored: ``direct`` (4 bytes a lane), ``shuffle`` (16 bytes a lane, transposed in the quad) or
    ``shared`` (whole rows, through shared memory)."""

    @property
    def slices(self) -> tuple[int, int, int]:
        """Columns of a slice of K; rows and columns of a slice of V."""
        return self.k_slice or self.head_dim, self.v_rows or self.block_n, self.v_columns or self.head_dim_v

    @property
    def layouts(self) -> dict[str, TileLayout]:
        """Shared-memory layout of the q, k and v slices (and p, which split-kv passes through shared memory)."""
        k_slice, _, v_columns = self.slices
        return {
            "q": TileLayout(k_slice if self.q_streamed else self.head_dim, "q" in self.swizzle),
            "k": TileLayout(k_slice, "k" in self.swizzle),
            "v": TileLayout(v_columns, "v" in self.swizzle),
            "p": TileLayout(self.block_n, False),
        }

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory: Q, the pipeline, and (several warps a row) P and the row statistics.

        ``Q/KV`` share one region, ``QKV`` is a pipeline of slices, and ``O`` is what the output tile needs beyond them.
        """
        layouts = self.layouts
        q = layouts["q"].bytes(self.block_m)
        streamed = q if self.q_streamed else 0
        stage = max(streamed + layouts["k"].bytes(self.block_n), layouts["v"].bytes(self.slices[1]))
        pipeline = self.kv_stages * stage
        if self.share_qkv:
            parts = {"Q/KV": max(q, pipeline)}
        elif self.q_streamed:
            parts = {"QKV": pipeline}
        else:
            parts = {"Q": q, "KV": pipeline}
        if self.warps_kv > 1:
            parts |= {"P": layouts["p"].bytes(self.block_m), "stats": self.block_m * self.warps_kv * 4}
        beyond = TileLayout(self.head_dim_v, False).bytes(self.block_m) - sum(parts.values())
        return parts | ({"O": beyond} if self.output == "shared" and beyond > 0 else {})

    @property
    def shared_memory(self) -> int:
        """Bytes of one CTA."""
        return sum(self.regions.values())

    @property
    def threads(self) -> int:
        return 32 * self.warps_q * self.warps_kv

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("head_dim", "head_dim_v", "block_m", "block_n", "warps_q", "warps_kv", "kv_stages")
        plain += ("share_qkv", "q_in_registers", "q_streamed", "vector", "early_v", "min_blocks")
        return (
            ("Element", ELEMENTS[self.dtype]),
            ("ScorePrecision", PRECISIONS[self.scores]),
            ("OutPrecision", PRECISIONS[self.out]),
            ("StorePrecision", PRECISIONS[self.store]),
            *((name.upper(), getattr(self, name)) for name in plain),
            *zip(("K_SLICE", "V_ROWS", "V_COLUMNS"), self.slices, strict=True),
            *((f"SWIZZLE_{side.upper()}", side in self.swizzle) for side in "qkv"),
            ("STORE", OUTPUTS.index(self.output)),
            ("SHARED_BYTES", self.shared_memory),
        )

    def describe(self) -> str:
        """What differs from the plainest configuration, for tables: ``128x64 4x1 warps, 2 stages, …``."""
        words = [f"{self.block_m}x{self.block_n}", f"{self.warps_q}x{self.warps_kv} warps", f"{self.kv_stages} stages"]
        shown = ("dtype", "head_dim", "head_dim_v", "block_m", "block_n", "warps_q", "warps_kv", "kv_stages")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return ", ".join(words)
