"""Launches of Triton kernels past Triton's launcher, with a driver that only looks at what it is given; and a GPU's."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
import torch

import flashlane
from flashlane.jit import driver as api
from flashlane.jit import launch as jit_launch
from flashlane.jit.launch import NOT_CURRENT, LaunchError
from flashlane.kernels.triton import backward, driver_launch, forward, launch
from flashlane.kernels.triton.driver_launch import DriverLaunch, plan_of

SIGNATURE = {"q": "*bf16", "bias": "constexpr", "rows": "i32", "stride": "i64", "scale": "fp32", "out": "*fp32"}
SIGNATURE |= {"BM": "constexpr"}
ARGUMENTS = {"q": None, "bias": None, "rows": 77, "stride": 1 << 40, "scale": 0.375, "out": None, "BM": 64}
SIZES = [8, 4, 8, 4, 8, 8, 8]
"""Bytes of q, rows, stride, scale, out and Triton's two."""
KINDS = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, *(ctypes.c_uint64,) * 3)


class Driver:
    """Stands for the driver; reads the parameters where it would."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.codes, self.launched, self.pushed = sizes, [], [], 0

    def cuCtxPushCurrent(self, context: Any) -> tuple[int]:
        self.pushed += 1
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, None]:
        self.pushed -= 1
        return 0, None

    def cuFuncGetAttribute(self, attribute: int, function: int) -> tuple[int, int]:
        return 0, {api.MAX_THREADS_PER_BLOCK: 1024, api.NUM_REGS: 64}.get(attribute, 0)

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, b"what it is called"

    def cuGetErrorString(self, code: int) -> tuple[int, bytes]:
        return 0, b"what it says"

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[int, int, int]:
        return (0, 8 * index, self.sizes[index]) if index < len(self.sizes) else (1, 0, 0)

    def launcher(self, function: int, grid: Any, block: Any, shared: int, place: int, overlapped: bool) -> Any:
        def launch(stream: int) -> int:
            addresses = (ctypes.c_void_p * len(KINDS)).from_address(place)
            values = [kind.from_address(address).value for kind, address in zip(KINDS, addresses, strict=True)]
            self.launched.append((function, (*grid, *block, shared), stream, values))
            assert not overlapped
            return self.codes.pop(0) if self.codes else 0

        return launch


def compiled(signature: dict[str, str] = SIGNATURE, **metadata: Any) -> Any:
    plain = {"num_warps": 4, "num_ctas": 1, "shared": 4096, "launch_cooperative_grid": False, "launch_pdl": False}
    plain |= {"global_scratch_size": 0, "profile_scratch_size": 0, "name": "softmax"}
    plain |= {"target": types.SimpleNamespace(arch=90)}
    source = types.SimpleNamespace(signature=signature)
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(**plain | metadata), src=source, function=1234, run=types.SimpleNamespace()
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(list(SIZES))
    for module in (driver_launch, jit_launch):
        monkeypatch.setattr(module, "driver", lambda: made)
    monkeypatch.setattr(jit_launch, "_primary_context", lambda device: f"context of {device}")
    return made


def test_hands_the_driver_every_parameter_in_its_order(driver: Driver) -> None:
    made = plan_of(compiled(), (7, 2, 1), ARGUMENTS, 0)
    assert made is not None and made.pointers == ("q", "out") and not driver.pushed
    enqueue = made.enqueuer()
    for stream in (0, 99):
        q, out = torch.zeros(3), torch.zeros(5)
        enqueue({"q": q, "out": out, "bias": None, "BM": None}, stream)
        wanted = [q.data_ptr(), 77, 1 << 40, 0.375, out.data_ptr(), 0, 0]
        assert driver.launched.pop() == (1234, (7, 2, 1, 128, 1, 1, 4096), stream, wanted)


def test_two_threads_have_parameters_of_their_own(driver: Driver) -> None:
    made = plan_of(compiled(), (1, 1, 1), ARGUMENTS, 0)
    assert made is not None
    one, other = made.plan.acquire_any(), made.plan.acquire_any()
    one.set_pointers(made.pointers, [16, 32])
    other.set_pointers(made.pointers, [48, 64])
    one.enqueue(0)
    other.enqueue(0)
    assert [values[0::4] for *_, values in driver.launched] == [[16, 32], [48, 64]]


@pytest.mark.parametrize(
    "change",
    [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"launch_pdl": True}, {"global_scratch_size": 8}],
    ids=str,
)
def test_leaves_special_launches_to_triton(driver: Driver, change: dict[str, Any]) -> None:
    assert plan_of(compiled(**change), (1, 1, 1), ARGUMENTS, 0) is None


@pytest.mark.parametrize("sizes", [SIZES[:-1], [*SIZES, 8], [*SIZES[:1], 8, *SIZES[2:]], []], ids=str)
def test_leaves_kernels_to_triton_that_the_driver_sees_otherwise(driver: Driver, sizes: list[int]) -> None:
    driver.sizes = sizes
    assert plan_of(compiled(), (1, 1, 1), ARGUMENTS, 0) is None


def test_leaves_descriptors_empty_grids_and_old_drivers_to_triton(driver: Driver) -> None:
    assert plan_of(compiled(SIGNATURE | {"q": "tensordesc<bf16[64, 64]>"}), (1, 1, 1), ARGUMENTS, 0) is None
    assert plan_of(compiled(), (0, 1, 1), ARGUMENTS, 0) is None
    driver.sizes = []
    assert plan_of(compiled(), (1, 1, 1), ARGUMENTS, 0) is None


def test_a_thread_without_a_context_gets_one_and_other_errors_are_raised(driver: Driver) -> None:
    made = plan_of(compiled(), (1, 1, 1), ARGUMENTS, 0)
    assert made is not None
    tensors = {"q": torch.zeros(1), "out": torch.zeros(1)}
    driver.codes = [NOT_CURRENT[0]]
    enqueue = made.enqueuer()
    enqueue(tensors, 0)
    assert len(driver.launched) == 2 and not driver.pushed, "refused once, and launched with the context"
    driver.codes = [700]
    with pytest.raises(
        LaunchError, match=r"Triton's softmax \(sm_90, 64 registers\) .*block \(128, 1, 1\).*what it says"
    ):
        enqueue(tensors, 0)


def launched_by(
    monkeypatch: pytest.MonkeyPatch, plan: DriverLaunch | None
) -> tuple[launch.Launch, list[Any], list[Any]]:
    """A launch whose kernel is there, with what asks for its plan, and what goes through Triton's launcher."""
    plan_calls, through_triton = [], []
    monkeypatch.setattr(launch, "plan_of", lambda *arguments: plan_calls.append(arguments) or plan)
    compiled_kernel = compiled()
    compiled_kernel.run, compiled_kernel.packed_metadata = lambda *arguments: through_triton.append(arguments), ()
    active = types.SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(launch, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_hooked", lambda: False)
    compiles = types.SimpleNamespace(interpret=False)
    monkeypatch.setattr(launch, "knobs", types.SimpleNamespace(runtime=compiles))
    kernel = launch.Launch(None, (2, 3), ARGUMENTS, {})
    monkeypatch.setattr(kernel, "compile", lambda *arguments: compiled_kernel)
    return kernel, plan_calls, through_triton


def test_a_kernel_that_is_tritons_to_launch_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, asked, through_triton = launched_by(monkeypatch, None)
    for _ in range(2):
        kernel({"q": torch.zeros(1), "out": torch.zeros(1)})
    assert len(asked) == 1 and len(through_triton) == 2


def test_a_launch_is_made_once_and_used_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(compiled(), (2, 3, 1), ARGUMENTS, 0)
    kernel, asked, through_triton = launched_by(monkeypatch, plan)
    for _ in range(3):
        kernel({"q": torch.zeros(1), "out": torch.zeros(1)})
    assert [sizes[:3] for _, sizes, *_ in driver.launched] == [(2, 3, 1)] * 3
    assert {stream for *_, stream, _ in driver.launched} == {7}
    assert len(asked) == 1 and not through_triton and plan is not None and len(plan.plan.pool.spare) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [333, 2048])
def test_on_a_gpu_later_calls_go_past_triton_and_give_the_bits_of_the_first(
    monkeypatch: pytest.MonkeyPatch, seqlen: int
) -> None:
    plans: list[DriverLaunch | None] = []
    monkeypatch.setattr(launch, "plan_of", lambda *given: plans.append(plan_of(*given)) or plans[-1])
    monkeypatch.setattr(forward, "_prepared", {})
    monkeypatch.setattr(backward, "_prepared", {})
    q, k, v, grad = (torch.randn(1, seqlen, 3, 64, device="cuda") for _ in range(4))
    results = []
    for _ in range(3):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = flashlane.flash_attn_func(*leaves, causal=True, kernel="triton")
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert len(plans) >= 3 and None not in plans  # the forward, and at least two kernels of the backward
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_every_kernel_says_that_multiply_adds_are_fused() -> None:
    """Else Triton 3.9 warns of its next version's default, in a user's first backward or decoding step."""
    assert launch.Launch(None, (1,), {}, {"num_warps": 4}).options == {"num_warps": 4, "enable_fp_fusion": True}
