"""One point of the mma.sync design space as a value: what the template is compiled with, and what it then takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashlane.layout import TileLayout
from flashlane.registry import Resources

ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16"}
PRECISIONS = {"f16": "__half", "f32": "float"}


@dataclass(frozen=True)
class MmaConfig:
    """Compile-time constants of ``attention.cu``; its head names the roles."""

    dtype: str
    head_dim: int
    """Columns of the Q and K tiles: the problem's head_dim rounded up to 16."""
    head_dim_v: int
    br: int
    bc: int
    warps_q: int
    warps_kv: int = 1
    kv_slots: int = 2
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
    """Blocks an SM that the register allocation must allow."""

    @property
    def layouts(self) -> dict[str, TileLayout]:
        """Shared-memory layout of the q, k and v tiles (and p, which split-kv passes through shared memory)."""
        return {
            "q": TileLayout(self.head_dim, "q" in self.swizzle),
            "k": TileLayout(self.head_dim, "k" in self.swizzle),
            "v": TileLayout(self.head_dim_v, "v" in self.swizzle),
            "p": TileLayout(self.bc, False),
        }

    @property
    def shared_memory(self) -> int:
        """Bytes: Q, the ring of K and V tiles (over Q when they share), and P with the row statistics of split-kv."""
        layouts = self.layouts
        q = layouts["q"].bytes(self.br)
        ring = self.kv_slots * max(layouts["k"].bytes(self.bc), layouts["v"].bytes(self.bc))
        tiles = max(q, ring) if self.share_qkv else q + ring
        exchange = layouts["p"].bytes(self.br) + self.br * self.warps_kv * 4 if self.warps_kv > 1 else 0
        return tiles + exchange

    @property
    def threads(self) -> int:
        return 32 * self.warps_q * self.warps_kv

    def resources(self) -> Resources:
        return Resources(self.threads, self.shared_memory)

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("head_dim", "head_dim_v", "br", "bc", "warps_q", "warps_kv", "kv_slots")
        plain += ("share_qkv", "q_in_registers", "vector", "early_v", "min_blocks")
        return (
            ("Element", ELEMENTS[self.dtype]),
            ("ScorePrecision", PRECISIONS[self.scores]),
            ("OutPrecision", PRECISIONS[self.out]),
            ("StorePrecision", PRECISIONS[self.store]),
            *((name.upper(), getattr(self, name)) for name in plain),
            *((f"SWIZZLE_{side.upper()}", side in self.swizzle) for side in "qkv"),
            ("SHARED_BYTES", self.shared_memory),
        )

    def describe(self) -> str:
        """What differs from the plainest configuration, for tables: ``128x64 4x1 warps, 2 slots, …``."""
        words = [f"{self.br}x{self.bc}", f"{self.warps_q}x{self.warps_kv} warps", f"{self.kv_slots} slots"]
        shown = ("dtype", "head_dim", "head_dim_v", "br", "bc", "warps_q", "warps_kv", "kv_slots")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return ", ".join(words)
