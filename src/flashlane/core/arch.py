"""Element types and GPU architectures by their names."""

from __future__ import annotations

import torch

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16"}
"""Types of device code, by dtype."""


def arch_of(device: torch.device) -> str | None:
    """The compiler's name of a CUDA device's architecture ("sm_90a"), or None for the CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics and sums of a problem's element type are kept in: f64 for f64, else f32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtypes(dtype: torch.dtype, f32_dq: bool) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of dQ, and of dK and dV, whose caller adds dK and dV to others, and dQ as well with ``f32_dq``."""
    wide = compute_dtype(dtype)
    return wide if f32_dq else dtype, wide
