"""The Hopper backward pass: what it takes, and which kernels run.

Head dims up to 128 have one kernel that makes all gradients (``backward.cu``). Above, clusters of two blocks make them
(``backward_pair.cu``), or, with the same bits at every run, two kernels (``backward_keys.cu``,
``backward_queries.cu``). A launch before them makes the statistics of the rows. A group's query heads are summed
inside, so that dK and dV have no copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from flashlane.core import tuned as tune
from flashlane.core.problem import AttentionProblem, Gradients, Inputs
from flashlane.core.registry import BackwardKernel, CompiledKernel, DeviceSource, Kernel, memoised, register
from flashlane.jit import launch, shared_limit, tensormap
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.config import WIDEST_FUSED, BackwardConfig
from flashlane.kernels.hopper.backward.launch import Tensors, plain
from flashlane.kernels.hopper.backward.one_cta import tiles as backward_shapes
from flashlane.kernels.hopper.backward.one_cta.launch import FusedPlan
from flashlane.kernels.hopper.backward.split_dkdv_dq import config as backward_wide_config
from flashlane.kernels.hopper.backward.split_dkdv_dq.config import MAX_HEAD_DIM, WideConfig
from flashlane.kernels.hopper.backward.split_dkdv_dq.launch import WidePlan
from flashlane.kernels.hopper.backward.two_cta import config as backward_pair
from flashlane.kernels.hopper.backward.two_cta.config import PairConfig, PairPlan
from flashlane.kernels.params import check_gradient_inputs, unsupported_features

FEATURES = ("alibi", "sinks", "varlen", "softcap")
MAX_LENGTH = 1 << 30
MAX_GRID_Y = 65535


def supports(problem: AttentionProblem) -> str | None:
    """None when :func:`hopper_backward` can run a problem, else the reason in words."""
    reason = unsupported_features(problem, ("f16", "bf16"), FEATURES)
    if reason:
        return reason
    if problem.arch != ARCH:
        return f"architecture is {problem.arch}; it takes {ARCH}"
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > MAX_HEAD_DIM:
        return f"head_dim is {largest}; it takes up to {MAX_HEAD_DIM}"
    if not problem.aligned or problem.head_dim % 8 or problem.head_dim_v % 8:
        return "rows of q, k and v must be contiguous and start on 16 bytes, as TMA copies them"
    if max(problem.seqlen_q, problem.seqlen_k) > MAX_LENGTH:
        return f"lengths are {problem.seqlen_q} and {problem.seqlen_k}; it takes up to {MAX_LENGTH}"
    if max(problem.heads, problem.batch) > MAX_GRID_Y:
        return f"batch is {problem.batch} with {problem.heads} heads; it takes up to {MAX_GRID_Y} of each"
    return None


Config = BackwardConfig | PairConfig | WideConfig
Plan = FusedPlan | PairPlan | WidePlan
DESIGNS: dict[type, tuple[Callable[[AttentionProblem], Config], type]] = {
    BackwardConfig: (backward_shapes.pick, FusedPlan),
    PairConfig: (backward_pair.pick, PairPlan),
    WideConfig: (backward_wide_config.pick, WidePlan),
}
"""Of each type of configuration: which one a problem gets, and what launches it."""


@memoised
def config_of(problem: AttentionProblem) -> Config:
    """The table's configuration of a problem."""
    if max(problem.head_dim, problem.head_dim_v) <= WIDEST_FUSED:
        design: type = BackwardConfig
    else:
        design = PairConfig if backward_pair.refusal(problem) is None else WideConfig
    return DESIGNS[design][0](problem)


@memoised
def tuned_config(problem: AttentionProblem) -> Config:
    """The configuration that a problem runs with: the table's, with what ``flashlane tune`` found fastest."""
    base = config_of(problem)
    found = tune.lookup_backward(KERNEL, problem)
    return replace(base, **found) if found and all(hasattr(base, name) for name in found) else base


@memoised
def plan_of(
    config: Config | None, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
) -> Plan:
    """What calls of one problem have in common.

    Raises:
        NotImplementedError: :func:`supports` gives a reason.
    """
    reason = supports(problem)
    if reason is not None:
        raise NotImplementedError(f"the Hopper backward cannot run {problem.describe()}: {reason}")
    config = config or tuned_config(problem)
    return DESIGNS[type(config)][1](config, problem, q_shape, k_shape, device)


def hopper_backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    bias_grad: bool = True,
    config: Config | None = None,
) -> Gradients:
    """Gradients of q, k, v and sinks; products in the inputs' dtype, sums in f32.

    dK and dV have the same bits at every run; so has dQ with ``problem.deterministic``, else it is summed in any order.

    Args:
        problem: what was asked.
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
        ValueError: a tensor has another shape or dtype than its part of the call.
        NotImplementedError: :func:`supports` gives a reason.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return hopper_backward(problem, inputs, out, lse, do, dlse, bias_grad=bias_grad, config=config)
    check_gradient_inputs(problem, inputs, out, lse, do, dlse)
    q, k = inputs.q, inputs.k
    plan = plan_of(config, problem, q.shape, k.shape, q.device.index)
    with launch.on_device(plan.device):
        dq, dk, dv = plan.allocate(q)
        if not (q.shape[:-1].numel() and k.shape[:-1].numel() and problem.seqlen_q and problem.seqlen_k):
            for gradient in (dq, dk, dv):
                gradient.zero_()
            return Gradients(dq, dk, dv, None, _idle_sinks(problem, inputs, lse, dlse))
        tensors = Tensors(inputs, _readable(out), lse.contiguous(), _readable(do), plain(dlse), dq, dk, dv)
        return Gradients(dq, dk, dv, None, plan.launch(tensors))


def _idle_sinks(
    problem: AttentionProblem, inputs: Inputs, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor | None:
    """The sinks' gradient where no key is: every row's LSE is then its head's sink."""
    if not problem.sinks:
        return None
    if dlse is None or not lse.numel():
        return torch.zeros_like(inputs.sinks)
    rows = dlse.masked_fill(lse == -torch.inf, 0.0)
    return rows.sum([axis for axis in range(rows.dim()) if axis != rows.dim() - 2]).to(inputs.sinks.dtype)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its rows are not contiguous or do not start on 16 bytes."""
    starts = tensor.data_ptr() % tensormap.ALIGNMENT == 0
    if starts and tensor.is_contiguous():  # and head dims are multiples of 16 bytes
        return tensor
    unit = tensormap.ALIGNMENT // tensor.element_size()
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    readable = tensor.stride(-1) == 1 and not any(step % unit or step <= 0 for step in steps)
    if starts and readable:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # a contiguous one, too, may start anywhere


class HopperBackward(BackwardKernel, CompiledKernel):
    """:func:`hopper_backward` as a kernel, of three designs that share their preprocess and postprocess kernels."""

    tag = "hopper"
    summary = "wgmma and TMA, all gradients in one pass over the queries"
    source = "PTX ISA, wgmma and cp.async.bulk.tensor; Dao 2023, FlashAttention-2, Algorithm 2"
    priority = 20
    architectures = (ARCH,)

    def supports(self, problem: AttentionProblem, forward: Kernel | None = None) -> str | None:
        return supports(problem)

    def config(self, problem: AttentionProblem) -> Config:
        return tuned_config(problem)

    def describe(self, problem: AttentionProblem) -> str:
        config = tuned_config(problem)
        return f"{config.design}: {config.describe()}"

    def device_sources(self, config: Config, arch: str) -> tuple[DeviceSource, ...]:
        return config.device_sources()

    def source_of(self, config: Config) -> str:
        """The package's file whose change makes stored timings of a configuration void."""
        return config.gradient_sources()[0].name

    def candidates(self, problem: AttentionProblem) -> Iterator[Config]:
        """The table's configuration, and other tiles that fit shared memory."""
        base = config_of(problem)
        yield base
        own = {name: values for name, values in VARIED.items() if hasattr(base, name)}
        for chosen in itertools.product(*own.values()):
            other = replace(base, **dict(zip(own, chosen, strict=True)))
            if other != base and other.shared_memory <= shared_limit(ARCH) and _makes_sense(other):
                yield other

    def tuned_fields(self, config: Config) -> dict[str, Any]:
        return {name: getattr(config, name) for name in VARIED if hasattr(config, name)}

    def shipped(self) -> Iterator[tuple[Config, tuple[str, ...]]]:
        for config in dict.fromkeys(map(config_of, shipped_problems())):
            yield config, self.architectures

    def run(
        self,
        problem: AttentionProblem,
        *call: Any,
        bias_grad: bool = True,
        forward: Kernel | None = None,
        config: Config | None = None,
    ) -> Gradients:
        return hopper_backward(problem, *call, bias_grad=bias_grad, config=config)


VARIED = {"block_m": (48, 64, 80, 96, 112, 128), "k_stages": (1, 2), "v_stages": (1, 2), "turns": (0, 1, 2)}
"""What ``flashlane tune`` varies of a tile of one CTA; the other designs have the largest tile that fits."""


def _makes_sense(config: Config) -> bool:
    """V has a second stage only where K has one, and every count of queries is a multiple of what dQ's parts need."""
    return config.v_stages <= config.k_stages and config.block_m % (16 if config.split_columns else 32) == 0


def shipped_problems() -> Iterator[AttentionProblem]:
    """Problems that lead through the designs, tiles, masks and features."""
    masks = ({}, {"window_right": 0}, {"window_left": 100, "window_right": 9})
    features = ({}, {"softcap": 10.0}, {"alibi": True}, {"sinks": True}, {"varlen": True}, {"deterministic": True})
    everything = {"alibi": True, "softcap": 10.0, "sinks": True, "varlen": True, "deterministic": True}
    dims = ((64, 64), (80, 80), (96, 96), (104, 64), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
    dtypes = (torch.bfloat16, torch.float16)
    number = 0
    for (d, dv), mask, feature in itertools.product(dims, masks, (*features, everything)):
        for batch, heads, kv_heads, n in ((2, 8, 2, 4096), (16, 16, 16, 1024), (1, 2, 2, 2048)):
            number += 1
            if feature and n != 4096 and d not in (64, 128):
                continue
            yield AttentionProblem(
                batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=dv,
                dtype=dtypes[number % 2], scale=0.1, arch=ARCH, needs_grad=True, **mask, **feature,
            )  # fmt: skip


KERNEL = register(HopperBackward())
