"""Tensor maps, which describe to TMA a tensor and the boxes that it copies to shared memory.

:func:`describe` computes a map from sizes and strides and runs anywhere; :func:`encode` has the driver pack it into the
128 bytes that a kernel takes, and :func:`mover` points such bytes at another tensor of the same sizes and strides.
Source: CUDA driver API, ``cuTensorMapEncodeTiled``, ``cuTensorMapReplaceAddress``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal, NamedTuple

from flashlane.jit import driver as api
from flashlane.jit.driver import driver
from flashlane.jit.launch import NOT_CURRENT, LaunchError, make_current

Element = Literal["f16", "bf16", "f32"]
ITEM_BYTES: dict[str, int] = {"f16": 2, "bf16": 2, "f32": 4}
SWIZZLES = (0, 32, 64, 128)
MAX_BOX = 256
MAX_SIZE = 2**32
MAX_STRIDE_BYTES = 2**40
ALIGNMENT = 16
MAP_BYTES = 128
MAX_RANK = 5


class TensorMap(NamedTuple):
    """One map: sizes, strides and box, the innermost axis first. Elements outside the sizes arrive as zeros."""

    element: Element
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes between neighbours along the second axis, the third and so on; the first is contiguous."""
    box: tuple[int, ...]
    swizzle: int
    """Bytes of a row of the box over which 16-byte chunks are permuted: 0, 32, 64 or 128."""


def refusal(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], element: Element) -> str | None:
    """Why TMA cannot read such a tensor, or None.

    Args:
        address: of the first element, bytes.
        sizes: of the axes, the innermost first.
        strides: of the same axes, in elements; of an axis of size 1 it does not matter.
        element: the element type.
    """
    item = ITEM_BYTES[element]
    if not 2 <= len(sizes) <= MAX_RANK or len(strides) != len(sizes):
        return f"sizes are {sizes} and strides {strides}; a map has 2 to {MAX_RANK} axes"
    if address % ALIGNMENT:
        return f"its address is {address % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; TMA needs a multiple"
    if strides[0] != 1 and sizes[0] > 1:
        return f"its innermost stride is {strides[0]}; TMA needs 1"
    for size in sizes:
        if not 1 <= size <= MAX_SIZE:
            return f"an axis has {size} elements; TMA takes 1 to {MAX_SIZE}"
    for size, stride in zip(sizes[1:], strides[1:], strict=True):
        if size > 1 and (stride * item % ALIGNMENT or not 0 <= stride * item < MAX_STRIDE_BYTES):
            return f"a stride is {stride * item} bytes; TMA takes multiples of {ALIGNMENT} below {MAX_STRIDE_BYTES}"
    return None


def describe(
    element: Element,
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
) -> TensorMap:
    """The map of a tensor.

    Args:
        element: the element type.
        address: of the first element, bytes.
        sizes: of the axes, the innermost first.
        strides: of the same axes, in elements.
        box: elements along each axis that one copy transfers, 1 to 256 each.
        swizzle: 0, 32, 64 or 128; the box's innermost axis may take at most that many bytes.

    Raises:
        ValueError: TMA has no such map; the message says what is wrong.
    """
    reason = refusal(address, sizes, strides, element)
    if reason is not None:
        raise ValueError(f"no tensor map: {reason}")
    if len(box) != len(sizes) or not all(1 <= size <= MAX_BOX for size in box):
        raise ValueError(f"box is {box}; it must have {len(sizes)} sizes of 1 to {MAX_BOX}")
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle is {swizzle}; it may be one of {', '.join(map(str, SWIZZLES))}")
    item = ITEM_BYTES[element]
    inner = box[0] * item
    if inner % ALIGNMENT or (swizzle and inner > swizzle):
        raise ValueError(
            f"box is {box}: its rows have {inner} bytes; with swizzle {swizzle} they may have a multiple "
            f"of {ALIGNMENT}" + (f" up to {swizzle}" if swizzle else "")
        )
    # An axis of one element is never stepped along; torch gives it any stride, the driver wants a legal one.
    packed = sizes[0] * item
    legal = -(-packed // ALIGNMENT) * ALIGNMENT
    steps = tuple(stride * item if size > 1 else legal for size, stride in zip(sizes[1:], strides[1:], strict=True))
    return TensorMap(element, address, sizes, steps, box, swizzle)


def encode(tensor_map: TensorMap) -> bytes:
    """The 128 bytes of a map, as the driver packs them.

    Raises:
        ToolchainError: there is no driver.
        LaunchError: the driver refuses the map.
    """
    memory = ctypes.create_string_buffer(2 * MAP_BYTES)
    place = ctypes.addressof(memory) + -ctypes.addressof(memory) % MAP_BYTES
    arguments = (place, api.DATA_TYPES[tensor_map.element], tensor_map.address, tensor_map.sizes, tensor_map.strides)
    arguments += (tensor_map.box, api.SWIZZLES[tensor_map.swizzle])
    (code,) = driver().cuTensorMapEncodeTiled(*arguments)
    if code in NOT_CURRENT:
        make_current()
        (code,) = driver().cuTensorMapEncodeTiled(*arguments)
    if code:
        raise LaunchError(
            f"cuTensorMapEncodeTiled failed: {driver().cuGetErrorName(code)[1].decode()}; the map was {tensor_map}"
        )
    return ctypes.string_at(place, MAP_BYTES)


def mover(place: int) -> Callable[[int], None]:
    """A function that points an encoded map at another tensor of the same sizes and strides.

    Args:
        place: the address in host memory of the map's 128 bytes, a multiple of 128.

    Returns:
        A function of the other tensor's address. It may be called as long as the bytes are there, and raises
        :class:`LaunchError` where the driver refuses the address.

    Raises:
        ValueError: the place is no multiple of 128.
    """
    if place % MAP_BYTES:
        raise ValueError(f"place is {place:#x}; a map is changed where it lies on a multiple of {MAP_BYTES} bytes")
    replace_address = driver().address_replacer(place)

    def move(address: int) -> None:
        code = replace_address(address)
        if code:
            refused(code, address)

    def refused(code: int, address: int) -> None:
        if code in NOT_CURRENT:
            make_current()
            code = replace_address(address)
        if code:
            name = driver().cuGetErrorName(code)[1].decode()
            raise LaunchError(f"cuTensorMapReplaceAddress failed: {name}; the address was {address:#x}")

    return move


def movable(params: ctypes.Structure) -> ctypes.Structure:
    """A copy of parameters that begin with maps, at an address where :func:`mover` can change these."""
    memory = ctypes.create_string_buffer(ctypes.sizeof(params) + MAP_BYTES)
    start = -ctypes.addressof(memory) % MAP_BYTES
    ctypes.memmove(ctypes.addressof(memory) + start, ctypes.addressof(params), ctypes.sizeof(params))
    return type(params).from_buffer(memory, start)
