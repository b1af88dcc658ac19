"""What is done to scores between Q·Kᵀ and the softmax: the Python side of ``cuda/attention/score.cuh``.

Kernels hold a :class:`ScoreConfig` and never name a modifier themselves.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from flashlane.core.modifiers import LARGEST_BOUNDED, TENSOR_OF, forms
from flashlane.kernels.params import LOG2_E, SCALES

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem, Inputs


LARGEST_CAP = 1e4
"""The largest soft cap of CUDA kernels. They compute tanh(x) as 1 − 2 / (e^2x + 1), whose absolute error is an eps of
f32: the cap multiplies it, so that scores under a cap of 1e6 are off by 0.09, and all alike under one of 1e10."""


def cap_refusal(problem: AttentionProblem, largest: float) -> str | None:
    """Why a kernel that computes in f32 cannot cap the scores of a problem, or None.

    Args:
        problem: the attention problem.
        largest: the largest soft cap that the kernel takes.
    """
    cap = problem.softcap
    if cap > largest:
        return f"softcap is {cap:g}; it takes up to {largest:g}"
    if cap and abs(problem.scale) / cap > SCALES[1]:
        return f"softcap is {cap:g} and scale {problem.scale:g}; it takes at least {abs(problem.scale) / SCALES[1]:g}"
    return None


def cap_needs_no_maximum(problem: AttentionProblem) -> bool:
    """Whether a soft cap bounds scores so that 0 can take the place of their row's maximum: P in f16 would overflow."""
    bounded = 0 < problem.softcap * LOG2_E <= LARGEST_BOUNDED and not problem.alibi
    return bounded and problem.dtype == torch.bfloat16


@dataclass(frozen=True)
class ScoreConfig:
    """Which modifiers of the scores a kernel is compiled with."""

    softcap: bool = False
    """Scores are capped: ``softcap · tanh(score / softcap)``."""
    alibi: bool = False
    """A bias of −slope · distance is added to each score."""
    sinks: bool = False
    """Each row has one more logit, which takes probability and gives no value."""

    @classmethod
    def of(cls, problem: AttentionProblem) -> ScoreConfig:
        """What a problem needs, and no more."""
        return cls(softcap=problem.softcap > 0, alibi=problem.alibi, sinks=problem.sinks)

    @classmethod
    def run_time(cls, transformed: bool) -> ScoreConfig:
        """Every modifier, for a kernel that finds out at run time which ones a call has.

        Args:
            transformed: whether calls may have those that :attr:`transformed` speaks of.
        """
        return cls(softcap=transformed, alibi=transformed, sinks=True)

    @property
    def transformed(self) -> bool:
        """Whether scores change before the row maximum is taken, so that the scale cannot wait for the exponent."""
        return self.softcap or self.alibi

    def may_defer_max(self, keys_before_rows: bool) -> bool:
        """Whether modifiers let a row's maximum stay as it is over most of its keys, walked from the last to the first.

        Args:
            keys_before_rows: whether all keys of a block without a mask are before its rows. A bias by distance then
                falls along the walk; elsewhere it may rise beyond all exponents within a block.
        """
        return keys_before_rows or not self.alibi

    @property
    def has_derivative(self) -> bool:
        """Whether the backward multiplies dS by the derivative of a score, which takes registers."""
        return self.softcap

    @property
    def differs_by_head(self) -> bool:
        """Whether what is done to each score differs from head to head, of which a tile may pack several."""
        return self.alibi

    @property
    def registers_per_score(self) -> int:
        """How many modifiers keep values besides the scores in registers."""
        return self.softcap + self.alibi

    @property
    def on_scores(self) -> ScoreConfig:
        """The modifiers that change scores, without those of the row sum."""
        return replace(self, sinks=False)

    @property
    def on_row_sum(self) -> ScoreConfig:
        """The modifiers that add to the sum of a row, without those that change scores."""
        return ScoreConfig(sinks=self.sinks)

    def constants(self, *, at_run_time: bool = False) -> tuple[tuple[str, bool], ...]:
        """Name and value of each compile-time constant.

        Args:
            at_run_time: the kernel finds out from its parameters which of its modifiers a call has.
        """
        named = ((field.name.upper(), getattr(self, field.name)) for field in fields(self))
        return (*named, ("SCORE_AT_RUN_TIME", at_run_time))

    def words(self) -> list[str]:
        """The modifiers that are on, for tables."""
        return [field.name for field in fields(self) if getattr(self, field.name)]


SCORE_FEATURES = tuple(field.name for field in fields(ScoreConfig))
"""The fields of a problem that a kernel with a :class:`ScoreConfig` honours, for ``unsupported_features``."""

SCORE_EXAMPLES: tuple[dict[str, Any], ...] = tuple(
    {name: True if name in TENSOR_OF else forms(name)[-1]} for name in SCORE_FEATURES
)
"""A value of each of :data:`SCORE_FEATURES`, for problems that lead through them."""


class ScoreParams(ctypes.Structure):
    """Mirror of ``ScoreParams`` in ``cuda/attention/score.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("alibi", "sinks")),
        *((name, ctypes.c_longlong) for name in ("alibi_batch", "alibi_head", "sink_stride")),
        ("sinks_are_float", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("scale_log2", "softcap_in", "softcap_log2")),
    )

    @classmethod
    def of(cls, problem: AttentionProblem) -> ScoreParams:
        """All but addresses and strides."""
        params = cls(scale_log2=problem.scale * LOG2_E, sinks_are_float=True)
        if problem.softcap:
            params.softcap_in = 2 * LOG2_E * problem.scale / problem.softcap
            params.softcap_log2 = problem.softcap * LOG2_E
        return params

    def point_to(self, pointers: tuple[int, ...]) -> None:
        """Set what :func:`score_pointers` gives for a call, for the launch that follows."""
        _POINTERS_AND_STRIDES.pack_into(self, 0, *pointers)


_POINTERS_AND_STRIDES = struct.Struct("2P3qi")
"""The fields of :class:`ScoreParams` up to ``sinks_are_float``, which lie one after another."""


def has_score_tensors(problem: AttentionProblem) -> bool:
    """Whether :func:`score_pointers` gives anything for the calls of a problem."""
    return problem.alibi or problem.sinks


def score_pointers(inputs: Inputs) -> tuple[int, ...]:
    """Addresses and strides of a call's slopes and sinks, 0 for what it has not, and whether the sinks are f32.

    Kernels that are compiled for a modifier read contiguous f32; see :func:`plain_score_inputs`.
    """
    slopes, sinks = inputs.alibi_slopes, inputs.sinks
    at_slopes = by_batch = by_head = at_sinks = by_sink = 0
    are_float = True
    if slopes is not None:
        at_slopes, by_head = slopes.data_ptr(), slopes.stride(-1)
        by_batch = slopes.stride(0) if slopes.dim() == 2 else 0
    if sinks is not None:
        at_sinks, by_sink = sinks.data_ptr(), sinks.stride(0)
        are_float = sinks.element_size() == ctypes.sizeof(ctypes.c_float)
    return at_slopes, at_sinks, by_batch, by_head, by_sink, are_float


def plain_score_inputs(inputs: Inputs) -> Inputs:
    """The same inputs, with slopes and sinks as contiguous f32. Keep them until the launch is enqueued."""
    changes = {}
    for name, tensor in (("alibi_slopes", inputs.alibi_slopes), ("sinks", inputs.sinks)):
        if tensor is not None and not (tensor.dtype == torch.float32 and tensor.is_contiguous()):
            changes[name] = tensor.float().contiguous()
    return replace(inputs, **changes) if changes else inputs


def run_time_score_inputs(inputs: Inputs) -> Inputs:
    """The same inputs, with sinks in f32 or in the operands' type: what kernels that find out at run time read."""
    sinks = inputs.sinks
    if sinks is None or sinks.dtype in (torch.float32, inputs.q.dtype):
        return inputs
    return replace(inputs, sinks=sinks.float())


def has_row_gradients(problem: AttentionProblem) -> bool:
    """Whether the calls of a problem have a modifier that :func:`row_gradient_partials` gives memory for."""
    return problem.sinks


def row_gradient_partials(inputs: Inputs, count: int) -> torch.Tensor | None:
    """Memory for so many partial sums of the gradient of what adds to the rows' sums, f32 ``(partial, head)``.

    None where a call has no such modifier.
    """
    if inputs.sinks is None:
        return None
    return torch.empty((count, inputs.sinks.numel()), dtype=torch.float32, device=inputs.sinks.device)


def row_gradients(partials: torch.Tensor | None, inputs: Inputs) -> dict[str, torch.Tensor]:
    """That gradient, by the name of its input, from what :func:`row_gradient_partials` gave and a kernel wrote."""
    return {} if partials is None else {"sinks": partials.sum(0).to(inputs.sinks.dtype)}


def row_gradients_without_keys(inputs: Inputs, lse: torch.Tensor, dlse: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The same for a call without keys, where every row's LSE is its head's sink.

    Args:
        inputs: the tensors of the call.
        lse: natural logarithm, ``(..., head, row)``.
        dlse: its gradient, in its shape, or None.
    """
    if inputs.sinks is None:
        return {}
    if dlse is None or not lse.numel():
        return {"sinks": torch.zeros_like(inputs.sinks)}
    rows = dlse.masked_fill(lse == -torch.inf, 0.0)
    total = rows.sum([axis for axis in range(rows.dim()) if axis != rows.dim() - 2])
    return {"sinks": total.to(inputs.sinks.dtype)}
