"""Tensor maps: sizes, strides and boxes as TMA wants them; refusals; what the driver is given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlane.jit import LaunchError, tensormap
from flashlane.jit.tensormap import describe, encode, refusal


def of(t: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, sizes and strides of a (b, s, h, d) tensor as (d, s, h, b)."""
    order = (3, 1, 2, 0)
    return t.data_ptr(), tuple(t.shape[i] for i in order), tuple(t.stride(i) for i in order)


def test_strides_are_bytes_and_the_innermost_goes_unsaid() -> None:
    t = torch.zeros(2, 5, 3, 72, dtype=torch.float16)
    found = describe("f16", *of(t), box=(64, 128, 1, 1))
    assert found.sizes == (72, 5, 3, 2)
    assert found.strides == (3 * 72 * 2, 72 * 2, 5 * 3 * 72 * 2)
    assert found.box == (64, 128, 1, 1) and found.swizzle == 128


def test_a_box_visits_the_elements_that_torch_indexing_does() -> None:
    """The map's address arithmetic, carried out on a packed and transposed tensor."""
    qkv = torch.arange(2 * 7 * 3 * 4 * 16, dtype=torch.float32).view(2, 7, 3, 4, 16)
    t = qkv[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2)  # heads first in memory
    for tensor in (qkv[:, :, 1], t):
        found = describe("f32", *of(tensor), box=(16, 2, 1, 1), swizzle=64)
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)
        start = tensor.storage_offset()
        for d, s, h, b in ((0, 0, 0, 0), (15, 6, 3, 1), (3, 2, 1, 0)):
            steps = sum(i * step for i, step in zip((s, h, b), found.strides, strict=True)) // 4
            assert flat[start + d + steps] == tensor[b, s, h, d]


def test_axes_of_one_element_get_a_legal_stride() -> None:
    t = torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16).as_strided((1, 5, 1, 64), (3, 64, 7, 1))
    assert describe("bf16", *of(t), box=(64, 8, 1, 1)).strides == (128, 128, 128)
    odd = t.as_strided((1, 5, 1, 20), (3, 24, 7, 1))  # rows of 40 bytes, which is no multiple of 16
    assert describe("bf16", *of(odd), box=(64, 8, 1, 1)).strides == (48, 48, 48)


def test_broadcast_axes_keep_their_stride_of_zero() -> None:
    t = torch.zeros(1, 5, 1, 64, dtype=torch.float16).expand(4, 5, 8, 64)
    assert describe("f16", *of(t), box=(64, 8, 1, 1)).strides == (128, 0, 0)


@pytest.mark.parametrize(
    ("address", "sizes", "strides", "word"),
    [
        (8, (64, 4), (1, 64), "8 bytes past"),
        (0, (64, 4), (2, 64), "innermost stride is 2"),
        (0, (2, 4), (5, 8), "innermost stride is 5"),
        (0, (64, 4), (1, 65), "130 bytes"),
        (0, (64, 4, 2), (1, 64, 1), "2 bytes"),
        (0, (64, 0), (1, 64), "0 elements"),
        (0, (64, 2**32 + 1), (1, 64), "4294967297"),
        (0, (64, 4), (1, 2**40), "below"),
        (0, (64, 4), (1, 2**39), "below"),
        (0, (64,), (1,), "2 to 5"),
        (0, (8,) * 6, (1,) + (8,) * 5, "2 to 5"),
    ],
)
def test_refusals_say_what_is_wrong(address: int, sizes: tuple, strides: tuple, word: str) -> None:
    assert word in refusal(address, sizes, strides, "f16")
    with pytest.raises(ValueError, match="no tensor map"):
        describe("f16", address, sizes, strides, (8,) * len(sizes))


def test_what_is_legal_is_not_refused() -> None:
    assert refusal(4096, (64, 2**32), (1, 8), "f16") is None
    assert refusal(16, (1, 3), (5, 8), "f16") is None  # of one element the stride does not matter


@pytest.mark.parametrize(
    ("box", "swizzle", "word"),
    [
        ((64, 257), 128, "1 to 256"),
        ((64, 0), 128, "1 to 256"),
        ((64,), 128, "2 sizes"),
        ((72, 8), 128, "144 bytes"),
        ((4, 8), 0, "8 bytes"),
        ((64, 8), 96, "swizzle is 96"),
    ],
)
def test_boxes_are_checked(box: tuple, swizzle: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        describe("f16", 0, (128, 16), (1, 128), box, swizzle)


class Driver:
    """Writes a map's numbers down, and bytes that stand for it; ``code`` is what each call gives."""

    def __init__(self) -> None:
        self.code, self.calls = 0, []

    def cuTensorMapEncodeTiled(self, place: int, *arguments: Any) -> tuple[int]:
        self.calls.append(arguments)
        ctypes.memmove(place, bytes(range(128)), 128)
        return (self.code,)

    def address_replacer(self, place: int) -> Callable[[int], int]:
        def replace(address: int) -> int:
            self.calls.append((place, address))
            return self.code

        return replace

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(tensormap, "driver", lambda: fake)
    return fake


def test_what_the_driver_is_given(driver: Driver) -> None:
    description = describe("bf16", 256, (80, 7), (1, 80), (64, 16))
    assert encode(description) == bytes(range(128))
    bf16, swizzle_128 = 9, 3
    assert driver.calls == [(bf16, 256, (80, 7), (160,), (64, 16), swizzle_128)]
    driver.code = 1
    with pytest.raises(LaunchError, match=r"CUDA_ERROR_INVALID_VALUE.*sizes=\(80, 7\)"):
        encode(description)


def test_a_map_is_moved_where_it_lies(driver: Driver) -> None:
    move = tensormap.mover(1280)
    move(0x7000)
    move(0x8000)
    assert driver.calls == [(1280, 0x7000), (1280, 0x8000)]
    driver.code = 1
    with pytest.raises(LaunchError, match=r"CUDA_ERROR_INVALID_VALUE; the address was 0x7001"):
        move(0x7001)
    with pytest.raises(ValueError, match=r"place is 0x540; .* multiple of 128"):
        tensormap.mover(1344)


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the thread of a backward pass, before CUDA's runtime has been called there."""
    current, contexts = [], []

    def make_current() -> None:
        contexts.append(True)
        current.append(True)

    def unless_current(*_: Any) -> tuple[int]:
        return (0 if current else 201,)

    fake = SimpleNamespace(
        cuTensorMapEncodeTiled=unless_current, address_replacer=lambda place: lambda address: unless_current()[0]
    )
    monkeypatch.setattr(tensormap, "driver", lambda: fake)
    monkeypatch.setattr(tensormap, "make_current", make_current)
    move = tensormap.mover(1280)
    for call in (lambda: encode(describe("bf16", 256, (80, 7), (1, 80), (64, 16))), lambda: move(256)):
        call(), call()
        assert contexts == [True]
        current.clear(), contexts.clear()
