"""Launches of Triton kernels past Triton's launcher, with a driver that only looks at what it is given; and a GPU's."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
import torch

import flashlane
from flashlane.jit.launch import NOT_CURRENT, LaunchError
from flashlane.kernels.triton import backward, driver_launch, forward, launch
from flashlane.kernels.triton.driver_launch import DriverLaunch

SIGNATURE = {"q": "*bf16", "bias": "constexpr", "rows": "i32", "stride": "i64", "scale": "fp32", "out": "*fp32"}
SIGNATURE |= {"BM": "constexpr"}
ARGUMENTS = {"q": None, "bias": None, "rows": 77, "stride": 1 << 40, "scale": 0.375, "out": None, "BM": 64}
SIZES = [8, 4, 8, 4, 8, 8, 8]
"""Bytes of q, rows, stride, scale, out and Triton's two."""
KINDS = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, *(ctypes.c_uint64,) * 3)


class Driver:
    """Stands for ``cuda.bindings.driver``; reads the parameters where the driver would."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.code, self.launched = sizes, 0, []

    def CUfunction(self, handle: int) -> int:
        return handle

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[int, int, int]:
        return (0, 8 * index, self.sizes[index]) if index < len(self.sizes) else (1, 0, 0)

    def cuLaunchKernel(self, function: int, *rest: Any) -> tuple[int]:
        *sizes, stream, place, extra = rest
        addresses = (ctypes.c_void_p * len(KINDS)).from_address(place)
        values = [kind.from_address(address).value for kind, address in zip(KINDS, addresses, strict=True)]
        self.launched.append((function, tuple(sizes), stream, values))
        assert extra == 0
        return (self.code,)


def compiled(signature: dict[str, str] = SIGNATURE, **metadata: Any) -> Any:
    plain = {"num_warps": 4, "num_ctas": 1, "shared": 4096, "launch_cooperative_grid": False, "launch_pdl": False}
    plain |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    source = types.SimpleNamespace(signature=signature)
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(**plain | metadata), src=source, function=1234, run=types.SimpleNamespace()
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(list(SIZES))
    monkeypatch.setattr(driver_launch, "driver", lambda: made)
    return made


def test_hands_the_driver_every_parameter_in_its_order(driver: Driver) -> None:
    made = DriverLaunch.of(compiled(), (7, 2, 1), ARGUMENTS)
    assert made is not None
    for stream in (0, 99):
        q, out = torch.zeros(3), torch.zeros(5)
        assert made({"q": q, "out": out, "bias": None, "BM": None}, stream)
        wanted = [q.data_ptr(), 77, 1 << 40, 0.375, out.data_ptr(), 0, 0]
        assert driver.launched.pop() == (1234, (7, 2, 1, 128, 1, 1, 4096), stream or None, wanted)


@pytest.mark.parametrize(
    "change",
    [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"launch_pdl": True}, {"global_scratch_size": 8}],
    ids=str,
)
def test_leaves_special_launches_to_triton(driver: Driver, change: dict[str, Any]) -> None:
    assert DriverLaunch.of(compiled(**change), (1, 1, 1), ARGUMENTS) is None


@pytest.mark.parametrize("sizes", [SIZES[:-1], [*SIZES, 8], [*SIZES[:1], 8, *SIZES[2:]], []], ids=str)
def test_leaves_kernels_to_triton_that_the_driver_sees_otherwise(driver: Driver, sizes: list[int]) -> None:
    driver.sizes = sizes
    assert DriverLaunch.of(compiled(), (1, 1, 1), ARGUMENTS) is None


def test_leaves_descriptors_empty_grids_and_old_drivers_to_triton(driver: Driver) -> None:
    assert DriverLaunch.of(compiled(SIGNATURE | {"q": "tensordesc<bf16[64, 64]>"}), (1, 1, 1), ARGUMENTS) is None
    assert DriverLaunch.of(compiled(), (0, 1, 1), ARGUMENTS) is None
    driver.cuFuncGetParamInfo = None  # type: ignore[method-assign]
    assert DriverLaunch.of(compiled(), (1, 1, 1), ARGUMENTS) is None


def test_an_error_is_raised_but_for_a_thread_without_a_context(driver: Driver) -> None:
    made = DriverLaunch.of(compiled(), (1, 1, 1), ARGUMENTS)
    assert made is not None
    tensors = {"q": torch.zeros(1), "out": torch.zeros(1)}
    driver.code = NOT_CURRENT[0]
    assert not made(tensors, 0)
    driver.code = 700
    with pytest.raises(LaunchError, match=r"grid, block and shared memory \(1, 1, 1, 128, 1, 1, 4096\): 700"):
        made(tensors, 0)


def test_a_kernel_that_is_tritons_to_launch_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(launch.DriverLaunch, "of", lambda *given: asked.append(None))
    kernel = launch.Launch(None, (1,), ARGUMENTS, {})
    kernel.compiled = compiled()
    assert not kernel._enqueued({}, 0) and not kernel._enqueued({}, 0)
    assert len(asked) == 1


def test_a_launch_is_made_once_and_used_again(driver: Driver) -> None:
    kernel = launch.Launch(None, (2, 3), ARGUMENTS, {})
    kernel.compiled = compiled()
    for _ in range(3):
        assert kernel._enqueued({"q": torch.zeros(1), "out": torch.zeros(1)}, 7)
    assert len(kernel.pool.spare) == 1 and [sizes[:3] for _, sizes, *_ in driver.launched] == [(2, 3, 1)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [333, 2048])
def test_on_a_gpu_later_calls_go_past_triton_and_give_the_bits_of_the_first(
    monkeypatch: pytest.MonkeyPatch, seqlen: int
) -> None:
    made: list[DriverLaunch | None] = []
    of = DriverLaunch.of
    monkeypatch.setattr(DriverLaunch, "of", lambda *given: made.append(of(*given)) or made[-1])
    monkeypatch.setattr(forward, "_prepared", {})
    monkeypatch.setattr(backward, "_prepared", {})
    q, k, v, grad = (torch.randn(1, seqlen, 3, 64, device="cuda") for _ in range(4))
    found = []
    for _ in range(3):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = flashlane.flash_attn_func(*leaves, causal=True, kernel="triton")
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert len(made) >= 3 and None not in made  # the forward, and at least two kernels of the backward
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))
