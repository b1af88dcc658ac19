"""The mma.sync family: one template (``attention.cu``), one registered kernel a variant."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from flashlane import jit
from flashlane.core import tuned
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel, Repeat, memoised, register
from flashlane.jit import KernelSource
from flashlane.jit.launch import Dim3
from flashlane.kernels.device_file import device_code
from flashlane.kernels.features import head_dim_refusal, unsupported_features
from flashlane.kernels.mma import cost
from flashlane.kernels.mma import tiles as shapes
from flashlane.kernels.mma.config import MmaConfig
from flashlane.kernels.mma.variants import FAMILIES, VARIANTS, Variant, heads_per_section
from flashlane.kernels.params import (
    AttentionParams,
    attention_params,
    check_outputs,
    fold_of,
    repeated,
)

SOURCE = "kernels/mma/attention.cu"
SPILLS_ALLOWED = 1024
"""Bytes, stores and loads, that a configuration may spill which ``auto`` does not take (or, above D 256, does)."""


def source_of(config: MmaConfig) -> KernelSource:
    """The template with a configuration's constants."""
    return KernelSource(SOURCE, device_code(SOURCE), "mma_attention", config.constants())


class MmaAttention(DeviceKernel):
    """One variant of the template as a registered kernel."""

    family = "mma"
    source = "Dao 2023 (FlashAttention-2), algorithm 1; PTX ISA mma.sync.m16n8k16, ldmatrix, cp.async"
    priority = 10

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.tag = variant.tag
        self.summary = FAMILIES[variant.split]
        self.listed = variant.listed or variant.tag in shapes.FASTEST

    def preference(self, problem: AttentionProblem) -> float:
        return self.priority + float(self.tag == _fastest_tag(problem))

    def low_precision_reference(self, problem: AttentionProblem) -> str:
        return self.low_precision_reference_of(self.config(problem), problem)

    def low_precision_reference_of(self, config: MmaConfig, problem: AttentionProblem) -> str:
        if self.variant.precision == "f32/f32":
            return "standard"
        # Where the product adds straight to an f16 output, that is rounded after every 16 keys.
        block_k = 16 if config.out == config.store else config.block_n
        return f"scores={config.scores},out={config.out},store={config.store},block_k={block_k}"

    def supports(self, problem: AttentionProblem) -> str | None:
        variant = self.variant
        reason = unsupported_features(problem, ("f16", "bf16") if variant.precision == "f32/f32" else ("f16",))
        reason = reason or head_dim_refusal(problem, variant.max_head_dim)
        if reason:
            return reason
        if next(variant.configs(problem), None) is None:
            return f"no tile shape fits the {jit.shared_limit(problem.arch)} bytes of shared memory of {problem.arch}"
        return None

    def config(self, problem: AttentionProblem) -> MmaConfig:
        """What the tuner found on this GPU, or else the heuristic's choice."""
        return _config(self, problem)

    def candidates(self, problem: AttentionProblem) -> Iterator[MmaConfig]:
        """What the cost model compares, the fastest first, then what it does not know."""
        ranked = (each.config for each in _ranked(self, problem))
        table = (self.variant.configs(problem, few) for few in (None, False, True))
        yield from dict.fromkeys((*ranked, *itertools.chain.from_iterable(table)))

    def predicted_configs(self, problem: AttentionProblem) -> list[tuple[str, float]]:
        """The configurations that are compared and their predicted milliseconds, the fastest first.

        Empty on architectures that were not timed, where the model compares and does not foretell.
        """
        ranked = _ranked(self, problem) if problem.arch == cost.TIMED_ARCH else []
        return [(each.config.describe(), each.microseconds / 1e3) for each in ranked]

    def spills_allowed(self, config: MmaConfig, arch: str) -> int:
        few = config.block_m == 16  # one of the shapes for few CTAs
        taken = self.tag == shapes.best_tag(config.head_dim_v, few)
        return 0 if taken and arch == "sm_90a" and config.vector and config.head_dim <= 256 else SPILLS_ALLOWED

    def kernel_source(self, config: MmaConfig) -> KernelSource:
        return source_of(config)

    def shipped(self) -> Iterator[tuple[MmaConfig, tuple[str, ...]]]:
        archs_of: dict[MmaConfig, list[str]] = {}
        for problem in shipped_problems(self):
            compared = (each.config for each in cost.ranked(self.variant, problem))
            for config in (next(self.variant.configs(problem)), *compared):
                archs = archs_of.setdefault(config, [])
                if problem.arch not in archs:
                    archs.append(problem.arch)
        for config, archs in archs_of.items():
            yield config, tuple(archs)

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.run(self.config(problem), problem, inputs, out, lse)

    def run(
        self, config: MmaConfig, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Launch a given configuration (the tuner's entry; ``forward`` takes the heuristic's)."""
        check_outputs(problem, out, lse)
        if problem.seqlen_q:
            function, *launch = _launch(config, problem, inputs, out, lse)
            function.launch(*launch)

    def prepare(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> Repeat:
        check_outputs(problem, out, lse)
        if not problem.seqlen_q:
            return lambda *_: None
        function, grid, cta, shared, params = _launch(self.config(problem), problem, inputs, out, lse)
        return repeated(function, grid, cta[0], shared, params)


def _launch(
    config: MmaConfig, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> tuple[jit.Function, Dim3, Dim3, int, AttentionParams]:
    """A call's function, grid, block, bytes of shared memory and parameters."""
    q_blocks = -(-problem.seqlen_q // config.block_m)
    params = attention_params(
        problem,
        inputs,
        out,
        lse,
        q_blocks=q_blocks,
        heads_per_section=heads_per_section(problem),
        q_fold=fold_of(problem.scale) if config.scores == "f16" else 1.0,
    )
    function, threads, shared_memory = _loaded(config, problem.arch, out.device.index)
    return function, (q_blocks * problem.batch * problem.heads, 1, 1), (threads, 1, 1), shared_memory, params


@functools.lru_cache(maxsize=4096)
def _loaded(config: MmaConfig, arch: str, device: int) -> tuple[jit.Function, int, int]:
    """A configuration's function on a device, its threads and its shared memory; computed once, not every call."""
    return jit.load(jit.compile(source_of(config), arch), device), config.threads, config.shared_memory


def shipped_problems(kernel: DeviceKernel) -> Iterator[AttentionProblem]:
    """Problems that lead the heuristic through its table: head dims, dtypes, sizes, alignment, architectures."""
    for arch in kernel.architectures:
        for dtype in (torch.float16, torch.bfloat16):
            for head_dim in (32, 64, 96, 128, 160, 256):
                for batch, aligned in ((1, True), (4096, True), (4096, False)):
                    problem = AttentionProblem(
                        batch=batch, heads=1, kv_heads=1, seqlen_q=128, seqlen_k=128, head_dim=head_dim,
                        head_dim_v=head_dim, dtype=dtype, scale=head_dim**-0.5, arch=arch, aligned=aligned,
                    )  # fmt: skip
                    if kernel.supports(problem) is None:
                        yield problem


@memoised
def _config(kernel: MmaAttention, problem: AttentionProblem) -> MmaConfig:
    found = tuned.config_of(MmaConfig, kernel, problem)
    if found is not None:
        return found
    ranked = _ranked(kernel, problem)
    return ranked[0].config if ranked else next(kernel.variant.configs(problem))


def _ranked(kernel: MmaAttention, problem: AttentionProblem) -> list[cost.Predicted]:
    """What the cost model compares, the fastest first.

    Empty where it does not know the table's choice, unless the kernel is the fastest without it: what is slower than
    another variant was not timed on every problem.
    """
    ranked = cost.ranked(kernel.variant, problem)
    table = next(kernel.variant.configs(problem), None)
    if kernel.tag == _fastest_tag(problem) or any(each.config == table for each in ranked):
        return ranked
    return []


@memoised
def _fastest_tag(problem: AttentionProblem) -> str | None:
    return cost.fastest_tag(problem)


for _variant in VARIANTS.values():
    register(MmaAttention(_variant))
