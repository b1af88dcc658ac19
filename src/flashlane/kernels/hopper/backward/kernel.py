"""The Hopper backward pass as a registered kernel: what it takes, and how a call runs.

There are three designs, each in a folder. Head dims up to 128 have one CTA that makes all gradients of a tile
(``one_cta``). Above, 2-CTA clusters make them (``two_cta``), or two kernels (``split_dkdv_dq``): where head dims are
unlike, windows are narrow, or dQ is added in order and whole tiles are too long. A preprocess kernel before them makes
the row statistics. A group's query heads are summed inside, so that dK and dV have no copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flashlane.core import tuned
from flashlane.core.problem import AttentionProblem, Gradients, Inputs
from flashlane.core.registry import (
    BackwardKernel,
    CompiledKernel,
    DeviceSource,
    Kernel,
    RepeatBackward,
    memoised,
    register,
)
from flashlane.core.validate import check_results
from flashlane.jit import KernelSource, launch
from flashlane.kernels.features import VARLEN, head_dim_refusal, rows_refusal, unsupported_features
from flashlane.kernels.hopper.arch import ARCH, SMS
from flashlane.kernels.hopper.backward import select
from flashlane.kernels.hopper.backward.config import MAX_HEAD_DIM, GradientConfig
from flashlane.kernels.hopper.backward.launch import PreparedBackward, Tensors, readable
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.backward.one_cta.launch import schedule as one_cta_schedule
from flashlane.kernels.hopper.backward.select import config_of
from flashlane.kernels.hopper.backward.split_q import split_of, splits_some
from flashlane.kernels.score import SCORE_FEATURES, ScoreConfig, row_gradients_without_keys

if TYPE_CHECKING:
    from flashlane.core.ranges import KeyPart, QueryRanges
    from flashlane.kernels.hopper.backward.parts import BackwardParts

MAX_LENGTH = 1 << 30
MAX_GRID_Y = 65535


def supports(problem: AttentionProblem) -> str | None:
    """None when :func:`hopper_backward` can run a problem, else the reason in words."""
    reason = unsupported_features(problem, ("f16", "bf16"), (*SCORE_FEATURES, *VARLEN), (ARCH,))
    reason = reason or head_dim_refusal(problem, MAX_HEAD_DIM)
    if reason:
        return reason
    if not problem.aligned or problem.head_dim % 8 or problem.head_dim_v % 8:
        return rows_refusal(problem, "TMA")
    if max(problem.seqlen_q, problem.seqlen_k) > MAX_LENGTH:
        return f"lengths are {problem.seqlen_q} and {problem.seqlen_k}; it takes up to {MAX_LENGTH}"
    if max(problem.heads, problem.batch) > MAX_GRID_Y:
        return f"batch is {problem.batch} with {problem.heads} heads; it takes up to {MAX_GRID_Y} of each"
    return None


@memoised
def tuned_config(problem: AttentionProblem) -> GradientConfig:
    """The configuration that a problem runs with: the table's, with what ``flashlane tune`` found fastest."""
    base = config_of(problem)
    found = tuned.lookup_backward(KERNEL, problem)
    return replace(base, **found) if found and found.keys() == select.tuned_fields(base).keys() else base


@memoised
def prepared_of(
    config: GradientConfig | None, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
) -> PreparedBackward:
    """What calls of one problem have in common.

    Raises:
        NotImplementedError: :func:`supports` gives a reason.
    """
    reason = supports(problem)
    if reason is not None:
        raise NotImplementedError(f"the Hopper backward cannot run {problem.describe()}: {reason}")
    problem = problem.with_hiding_sides
    config = (config or tuned_config(problem)).specialised(problem)
    return _prepared(config, problem, None, q_shape, k_shape, device)


def _prepared(
    config: GradientConfig,
    problem: AttentionProblem,
    ranges: QueryRanges | None,
    q_shape: torch.Size,
    k_shape: torch.Size,
    device: int,
) -> PreparedBackward:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if isinstance(config, OneCtaConfig) and ranges is not None:
        schedule = one_cta_schedule(config, problem, sms, ranges)
    else:
        total = (q_shape[0], k_shape[0]) if problem.varlen else None
        schedule = select.DESIGNS[config.design].schedule(config, problem, sms, total=total)
    return PreparedBackward(config, schedule, problem, q_shape, k_shape, device, ranges=ranges)


def _of_rank(problem: AttentionProblem, ranges: QueryRanges | None) -> AttentionProblem:
    """The problem that a rank's launch computes. Each of two ranges has an alignment of its own, by which a side of
    the window may hide a key that it does not hide in the problem."""
    return problem.with_hiding_sides if ranges is None else problem


@memoised
def config_of_rank(
    problem: AttentionProblem, ranges: QueryRanges | None = None, f32_dq: bool = False
) -> GradientConfig | None:
    """The configuration of a rank's share of a call, with dK and dV in f32; None where there is no such launch.

    Args:
        problem: the attention problem.
        ranges: of the queries, where they are two; the one-CTA design has them, without packed sequences and score
            modifiers.
        f32_dq: whether dQ is f32, too.
    """
    if supports(problem) is not None:
        return None
    problem = _of_rank(problem, ranges)
    tuned = tuned_config(problem).specialised(problem)
    config = tuned.for_sums(f32_dq)
    if ranges is None:
        if tuned.heads_inner and not problem.varlen:  # for which tiles are whole, where splits may be faster
            config = replace(config, split_q=splits_some(problem, config, SMS // config.ctas))
        return config
    if not isinstance(config, OneCtaConfig) or problem.varlen or ScoreConfig.of(problem).words():
        return None
    config = config.with_ranges()
    return replace(config, split_q=split_of(problem, config, SMS, ranges).splits > 1)


@memoised
def prepared_of_rank(
    problem: AttentionProblem,
    ranges: QueryRanges | None,
    f32_dq: bool,
    q_shape: torch.Size,
    k_shape: torch.Size,
    device: int,
) -> PreparedBackward | None:
    """What calls of a rank's share of one problem have in common; None where there is no such launch."""
    config = config_of_rank(problem, ranges, f32_dq)
    return None if config is None else _prepared(config, _of_rank(problem, ranges), ranges, q_shape, k_shape, device)


@memoised
def parts_of_rank(
    problem: AttentionProblem, parts: tuple[KeyPart, ...], q_shape: torch.Size, k_shape: torch.Size, device: int
) -> BackwardParts | None:
    """What calls of a rank's share of one problem in parts have in common; None where there are no such launches.

    Additions in order would wait for tiles of other launches, and tiles that are split need more device memory.
    """
    from flashlane.kernels.hopper.backward.parts import BackwardParts

    config = config_of_rank(problem, parts[0].ranges)
    if not isinstance(config, OneCtaConfig) or problem.deterministic or problem.window_left >= 0:
        return None
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return BackwardParts(replace(config, split_q=False), problem, parts, q_shape, k_shape, device, sms)


def hopper_backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    bias_grad: bool = True,
    config: GradientConfig | None = None,
) -> Gradients:
    """Gradients of q, k, v and the score modifiers; products in the inputs' dtype, sums in f32.

    dK and dV have the same bits at every run; so has dQ with ``problem.deterministic``, else it is summed in any order.

    Args:
        problem: the attention problem.
        inputs: the tensors of the call.
        out: its output ``(b, sq, h, dv)``, or ``(total_q, h, dv)`` for varlen.
        lse: its LSE, natural logarithm, f32 ``(b, h, sq)``, or ``(h, total_q)``.
        do: gradient of ``out``, in its shape, any strides.
        dlse: gradient of ``lse``, in its shape, or None.
        bias_grad: of no effect: problems with a bias are refused.
        config: the configuration to run, or None for the table's.

    Returns:
        The gradients, contiguous, in the shapes and dtypes of their inputs. Rows without a visible key and rows that
        belong to no sequence contribute nothing, and their own are 0.

    Raises:
        TypeError, ValueError: an argument is not of this call: see :func:`~flashlane.core.validate.check_results`.
        NotImplementedError: :func:`supports` gives a reason.
    """
    check_results(inputs, out, lse, do, dlse)
    q, k = inputs.q, inputs.k
    prepared = prepared_of(config, problem, q.shape, k.shape, q.device.index)
    return _run(prepared, problem, inputs, out, lse, do, dlse)


def _run(
    prepared: PreparedBackward,
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """The gradients of a checked call."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _run(prepared, problem, inputs, out, lse, do, dlse)
    q, k = inputs.q, inputs.k
    with launch.on_device(prepared.device):
        dq, dk, dv = prepared.allocate(q)
        if _computes_nothing(problem, q, k):
            for gradient in (dq, dk, dv):
                gradient.zero_()
            return Gradients(dq, dk, dv, **row_gradients_without_keys(inputs, lse, dlse))
        dlse = None if dlse is None else dlse.contiguous()
        tensors = Tensors(inputs, _readable(out), lse.contiguous(), _readable(do), dlse, dq, dk, dv)
        return Gradients(dq, dk, dv, **prepared.launch(tensors))


def _computes_nothing(problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether there are no queries or no keys, so that the gradients are zeros."""
    return not (q.shape[:-1].numel() and k.shape[:-1].numel() and problem.seqlen_q and problem.seqlen_k)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the kernels cannot read it; a contiguous one, too, may start anywhere."""
    return tensor if readable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


class HopperBackward(BackwardKernel, CompiledKernel):
    """:func:`hopper_backward` as a kernel, of three designs that share their preprocess and postprocess kernels."""

    tag = "hopper"
    summary = "wgmma and TMA, all gradients in one pass over the queries"
    source = "PTX ISA, wgmma and cp.async.bulk.tensor; Dao 2023, FlashAttention-2, Algorithm 2"
    priority = 20
    architectures = (ARCH,)

    def supports(self, problem: AttentionProblem, forward: Kernel | None = None) -> str | None:
        return supports(problem)

    def config(self, problem: AttentionProblem) -> GradientConfig:
        return tuned_config(problem.with_hiding_sides)

    def describe(self, problem: AttentionProblem) -> str:
        config = self.config(problem)
        return f"{config.design}: {config.describe()}"

    def device_sources(self, config: GradientConfig, arch: str) -> tuple[DeviceSource, ...]:
        return config.device_sources()

    def sources(self, problem: AttentionProblem) -> tuple[KernelSource, ...]:
        return self.config(problem).specialised(problem.with_hiding_sides).sources()

    def source_of(self, config: GradientConfig) -> str:
        """The package's file whose change makes stored timings of a configuration void."""
        return config.gradient_sources()[0].name

    def candidates(self, problem: AttentionProblem) -> Iterator[GradientConfig]:
        return select.candidates(problem.with_hiding_sides)

    def tuned_fields(self, config: GradientConfig) -> dict[str, Any]:
        return select.tuned_fields(config)

    def shipped(self) -> Iterator[tuple[GradientConfig, tuple[str, ...]]]:
        for config in dict.fromkeys(map(config_of, select.shipped_problems())):
            yield config, self.architectures

    def prepare(
        self, problem: AttentionProblem, inputs: Inputs, forward: Kernel | None = None
    ) -> RepeatBackward | None:
        q, k = inputs.q, inputs.k
        if _computes_nothing(problem, q, k):
            return None
        prepared = prepared_of(None, problem, q.shape, k.shape, q.device.index)
        return prepared.repeated(q.device, q.dtype)

    def prepare_share(
        self, problem: AttentionProblem, inputs: Inputs, ranges: QueryRanges | None = None
    ) -> RepeatBackward | None:
        q, k = inputs.q, inputs.k
        if _computes_nothing(problem, q, k):
            return None
        prepared = prepared_of_rank(problem, ranges, False, q.shape, k.shape, q.device.index)
        return None if prepared is None else prepared.repeated(q.device, q.dtype)

    def prepare_parts(
        self, problem: AttentionProblem, inputs: Inputs, parts: Sequence[KeyPart]
    ) -> BackwardParts | None:
        q, k = inputs.q, inputs.k
        if _computes_nothing(problem, q, k):
            return None
        return parts_of_rank(problem, tuple(parts), q.shape, k.shape, q.device.index)

    def run(
        self,
        problem: AttentionProblem,
        *call: Any,
        bias_grad: bool = True,
        forward: Kernel | None = None,
        config: GradientConfig | None = None,
    ) -> Gradients:
        return hopper_backward(problem, *call, bias_grad=bias_grad, config=config)

    def run_f32(
        self, problem: AttentionProblem, inputs: Inputs, *call: Any, f32_dq: bool, forward: Kernel | None = None
    ) -> Gradients | None:
        check_results(inputs, *call)
        q, k = inputs.q, inputs.k
        prepared = prepared_of_rank(problem, None, f32_dq, q.shape, k.shape, q.device.index)
        return None if prepared is None else _run(prepared, problem, inputs, *call)


KERNEL = register(HopperBackward())
