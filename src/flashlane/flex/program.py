"""Programs, for which kernels are compiled: a score and a mask as expressions, and the tensors that they read."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashlane.flex import derivative, device_text, loops
from flashlane.flex.expression import Expression, digest, inputs_of, is_constant, linear, nodes

if TYPE_CHECKING:
    import torch

HEADER = "program.cuh"
"""Name of the generated header, which a kernel's source includes."""
LONGEST_AXIS = 2**31 - 1
"""The longest axis of a tensor that kernels read: ``ProgramParams`` has sizes of 32 bits."""


@dataclass(frozen=True)
class CapturedTensor:
    """A tensor that a program reads. Its address, strides and sizes are launch parameters."""

    name: str
    dtype: str
    """The short name of its type: ``bf16``, ``i32`` or ``bool``, say."""
    ndim: int
    differentiable: bool


@dataclass(frozen=True)
class Arguments:
    """The tensors and integers of one call of a program."""

    tensors: tuple[torch.Tensor, ...] = ()
    """The tensors that ``Program.captured`` declares, in its order."""
    integers: tuple[int, ...] = ()
    """The values of the ``integer`` expressions, such as a window or a length; another value compiles nothing."""


@dataclass(frozen=True)
class Program:
    """A score and a mask function. Programs that compute the same in the same order are equal."""

    score: Expression | None = None
    """The new score, computed from the scaled score in natural units; None leaves the score as it is."""
    mask: Expression | None = None
    """Whether a pair is visible, a bool; with None every pair is."""
    captured: tuple[CapturedTensor, ...] = ()
    integers: int = 0
    """The length of :attr:`Arguments.integers`."""

    @functools.cached_property
    def key(self) -> str:
        """A hex digest of all that decides the generated code."""
        declared = [f"{t.dtype} {t.ndim} {t.differentiable}" for t in self.captured]
        texts = ["\n".join(linear(e)) if e is not None else "none" for e in (self.score, self.mask)]
        return digest(*texts, *declared, str(self.integers))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key == other.key

    def __getstate__(self) -> object:
        raise TypeError("a Program is not pickled: its expressions are objects of this process")

    @functools.cached_property
    def derivative(self) -> Expression | None:
        """The derivative of the score; None where it is 1 everywhere."""
        if self.score is None:
            return None
        found = derivative.of_score(self.score)
        return None if is_constant(found, 1) else found

    def mask_inputs(self) -> set[str]:
        """The names of the inputs that the mask depends on."""
        return inputs_of(self.mask)

    def loads_by_position(self) -> bool:
        """Whether the score reads a captured tensor at an index that depends on ``q`` or ``kv``."""
        loads = [e for e in nodes(self.score) if e.op == "load"] if self.score is not None else []
        return any(inputs_of(load) & {"q", "kv"} for load in loads)

    def has_tanh(self) -> bool:
        """Whether the score has a hyperbolic tangent."""
        return self.score is not None and any(e.op == "tanh" for e in nodes(self.score))

    def without_mask(self) -> Program:
        """The same score, with every pair visible; the same object at each call, whose key is hashed once."""
        return self._without_mask

    @functools.cached_property
    def _without_mask(self) -> Program:
        return self if self.mask is None else dataclasses.replace(self, mask=None)

    @functools.cached_property
    def read_by_mask(self) -> tuple[int, ...]:
        """Which of the captured tensors the mask reads."""
        loads = {e.value for e in nodes(self.mask) if e.op == "load"} if self.mask is not None else set()
        return tuple(i for i in range(len(self.captured)) if i in loads)

    def inputs(self) -> set[str]:
        """The names of the inputs (``score``, ``b``, ``h``, ``q``, ``kv``) that the score or the mask depends on."""
        return inputs_of(self.score, self.mask)

    @functools.cached_property
    def linear_score(self) -> device_text.LinearScore | None:
        """The score as a multiple of the score plus a multiple of the distance; None where it is anything else."""
        return None if self.score is None else device_text.linear_of(self.score)

    @functools.cached_property
    def centre(self) -> float | None:
        """A number near which all scores are, so that no row maximum is needed; None where they may be anywhere."""
        from flashlane.flex import score_range  # whose interval arithmetic has tensors of this module's types

        return score_range.centre_of(self.score)

    def header(self, approximate: bool = False, by_distance: bool = False, rolled: bool = False) -> str:
        """CUDA C++ of :data:`HEADER`: ``struct ProgramParams`` and ``struct Program``, scalar and inlined.

        ``Program::score`` takes ``q·k`` and its scale, the pair, and its distance kv − q again, in two parts. What it
        returns is multiplied by ``FACTOR``. With a further argument it also gives its derivative, by which dS is
        multiplied. Both take what ``Program::head`` gives for the pair's head.

        Args:
            approximate: whether tanh in the score and its derivative has a relative error of 2^-11, a quarter of
                bf16's, instead of f32's.
            by_distance: whether a kernel may take a :attr:`linear_score` by its slope, for which its scale is positive.
            rolled: whether the mask has its long reductions as loops, for a kernel that has its code many times.
        """
        options = approximate, by_distance, rolled
        if options not in self._headers:
            self._headers[options] = self._text(*options)
        return self._headers[options]

    @functools.cached_property
    def _headers(self) -> dict[tuple[bool, bool, bool], str]:
        return {}

    def _text(self, approximate: bool, by_distance: bool, rolled: bool) -> str:
        factor, score = (1.0, None) if self.score is None else device_text.factor_of(self.score)
        sizes = {"N": max(1, len(self.captured)), "D": max([1, *(t.ndim for t in self.captured)])}
        types = tuple(t.dtype for t in self.captured)
        identity, always = (f"        return {value};" for value in ("product * scale", "true"))
        head = device_text.head_values(*(e for e in (score, self.derivative) if e is not None))
        call = types, "float", True, approximate, head
        mask = loops.rolled(self.mask) if rolled and self.mask is not None else self.mask
        bodies = {
            "SCORE": identity if score is None else device_text.body(score, *call),
            "BOTH": identity if score is None else device_text.body(score, *call, self.derivative),
            "MEMBERS": device_text.head_struct(head),
            "HEAD": device_text.head_body(head, types, approximate),
            "VISIBLE": always if mask is None else device_text.body(mask, types, "bool"),
        }
        bodies["FACTOR"] = device_text.literal(factor, "f32")
        by_slope = self.linear_score if by_distance else None
        bodies["GAIN"] = device_text.literal(1.0 if by_slope is None else by_slope.gain, "f32")
        bodies["CENTRE"] = device_text.literal(0.0 if self.centre is None else self.centre, "f32")
        bodies["SLOPE"] = (
            "        return 0.f;"
            if by_slope is None
            else device_text.body(by_slope.slope, types, "float", True, approximate)
        )
        flags = {
            "HAS_DISTANCE": "distance" in bodies["SCORE"] or None,
            "IS_LINEAR": by_slope,
            "IS_BOUNDED": None if self.centre is None else True,
            "HAS_SCORE": self.score,
            "HAS_MASK": self.mask,
            "HAS_DERIVATIVE": self.derivative,
        }
        text = _TEMPLATE
        for name, value in {**sizes, "M": max(1, self.integers), **bodies}.items():
            text = text.replace(f"@{name}@", str(value))
        for name, e in flags.items():
            text = text.replace(f"@{name}@", "false" if e is None else "true")
        return text

    def params(self, arguments: Arguments) -> ctypes.Structure:
        """The header's ``ProgramParams``. It holds addresses: the tensors must outlive the launch.

        Raises:
            ValueError: the tensors or the integers are not those that the program declares.
            NotImplementedError: :func:`refusal` gives a reason.
        """
        self.check(arguments)
        if (reason := refusal(arguments.tensors)) is not None:
            raise NotImplementedError(reason)
        dims = max([1, *(t.ndim for t in self.captured)])
        params = _structure(max(1, len(self.captured)), dims, max(1, self.integers))()
        for i, tensor in enumerate(arguments.tensors):
            params.data[i] = tensor.data_ptr()
            for axis, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
                params.stride[i][axis], params.size[i][axis] = stride, size
        for i, number in enumerate(arguments.integers):
            params.integer[i] = number
        return params

    def check(self, arguments: Arguments) -> None:
        """Raise a ValueError unless the arguments are those that the program declares."""
        if len(arguments.tensors) != len(self.captured) or len(arguments.integers) != self.integers:
            raise ValueError(
                f"arguments has {len(arguments.tensors)} tensors and {len(arguments.integers)} integers; the program "
                f"takes {len(self.captured)} and {self.integers}"
            )
        for declared, tensor in zip(self.captured, arguments.tensors, strict=True):
            if short_name(tensor.dtype) != declared.dtype or tensor.ndim != declared.ndim:
                raise ValueError(
                    f"{declared.name} is {tensor.dtype} of {tensor.ndim} dimensions; the program reads "
                    f"{declared.dtype} of {declared.ndim}"
                )
            if not tensor.numel():
                raise ValueError(
                    f"{declared.name} has shape {tuple(tensor.shape)}; a program reads at least one element"
                )


def refusal(tensors: Sequence[torch.Tensor]) -> str | None:
    """Why kernels cannot read the tensors of a call, or None: a size that wrapped would be another tensor's."""
    for t in tensors:
        if any(size > LONGEST_AXIS for size in t.shape):
            return f"a captured tensor has shape {tuple(t.shape)}; an axis may have up to {LONGEST_AXIS} elements"
    return None


@functools.cache
def _structure(tensors: int, dims: int, integers: int) -> type[ctypes.Structure]:
    fields = [
        ("data", ctypes.c_void_p * tensors),
        ("stride", (ctypes.c_longlong * dims) * tensors),
        ("size", (ctypes.c_int * dims) * tensors),
        ("integer", ctypes.c_int * integers),
    ]
    return type("ProgramParams", (ctypes.Structure,), {"_fields_": fields})


_SHORT = {"bool": "bool", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64"}
_SHORT |= {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


def short_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bf16``.

    Raises:
        NotImplementedError: programs do not read that type.
    """
    name = _SHORT.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise NotImplementedError(f"a program reads a tensor of {dtype}; it may read {', '.join(_SHORT)}")
    return name


def torch_type(name: str) -> torch.dtype:
    """``bf16`` -> ``torch.bfloat16``."""
    import torch

    return getattr(torch, next(long for long, short in _SHORT.items() if short == name))


def captured(tensors: Sequence[torch.Tensor]) -> tuple[CapturedTensor, ...]:
    """The declarations of tensors."""
    return tuple(
        CapturedTensor(f"captured{i}", short_name(t.dtype), t.ndim, t.requires_grad) for i, t in enumerate(tensors)
    )


_TEMPLATE = """\
// Generated from a score and a mask function by flashlane.flex.program.
#pragma once
#include "program_math.cuh"

struct ProgramParams {
    const void* data[@N@];
    long long stride[@N@][@D@];  // in elements
    int size[@N@][@D@];
    int integer[@M@];
};

struct Program {
    static constexpr bool HAS_SCORE = @HAS_SCORE@, HAS_MASK = @HAS_MASK@;
    // Whether dS must be multiplied by the derivative, which is 1 otherwise.
    static constexpr bool HAS_DERIVATIVE = @HAS_DERIVATIVE@;

    // Whether score() reads `distance`.
    static constexpr bool HAS_DISTANCE = @HAS_DISTANCE@;
    // What score() is multiplied by. It is positive, so that the exponent's FFMA may do it, after the row's maximum.
    static constexpr float FACTOR = @FACTOR@;
    // Whether a kernel takes the score as GAIN · score + slope() · (kv − q) instead of asking score().
    static constexpr bool IS_LINEAR = @IS_LINEAR@;
    static constexpr float GAIN = @GAIN@;
    // Whether 2^((score − CENTRE) · log2 e) and its sums have room in f32, so that no row maximum is needed.
    static constexpr bool IS_BOUNDED = @IS_BOUNDED@;
    static constexpr float CENTRE = @CENTRE@;
    static __device__ __forceinline__ float slope(const ProgramParams& p, int b, int h) {
@SLOPE@
    }

    // What score() and its derivative have of a head, so that it is computed once for many pairs.
    struct Head {
@MEMBERS@
    };
    static __device__ __forceinline__ Head head(const ProgramParams& p, int b, int h) {
@HEAD@
    }
    static __device__ __forceinline__ float score(const ProgramParams& p, const Head& head, float product, float scale,
                                                  int b, int h, int q, int kv, program::Distance distance) {
@SCORE@
    }
    // The score and, where HAS_DERIVATIVE, its derivative, which share what they have in common.
    static __device__ __forceinline__ float score(const ProgramParams& p, const Head& head, float product, float scale,
                                                  int b, int h, int q, int kv, program::Distance distance,
                                                  float& derivative) {
@BOTH@
    }
    static __device__ __forceinline__ bool visible(const ProgramParams& p, int b, int h, int q, int kv) {
@VISIBLE@
    }
};
"""
