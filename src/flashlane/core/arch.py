"""Element types and GPU architectures by their names, and the element types that ``torch.autocast`` asks for."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16"}
"""Types of device code, by dtype."""
SMS = {"sm_80": 108, "sm_86": 84, "sm_87": 16, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
"""SMs of a large GPU of an architecture; what is chosen for it suits a GPU with others a little less well."""
_NOTHING = contextlib.nullcontext()


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


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on devices of a type; None where it is off, or where there is none, as of meta tensors."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(t: Any) -> Any:
    """A tensor as autocast wants it, in its dtype where that is a floating one but f64; all else as it is."""
    if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    dtype = autocast_dtype(t.device.type)
    return t if dtype is None else t.to(dtype)


def records_gradients() -> bool:
    """Whether autograd records calls: gradients are on, and inference mode, which records none anyway, is not.

    torch.compile cannot trace the question, and knows itself what its graphs record.
    """
    return torch.is_grad_enabled() and (torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled())


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast off on a device: what runs there chooses the types that it computes in."""
    if not torch._C._is_any_autocast_enabled() or not torch.amp.is_autocast_available(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)
