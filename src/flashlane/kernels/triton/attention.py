"""The Triton forward as kernels of the registry. Triton is imported by the first problem that runs, not before."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashlane.core import tuned
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import TunableKernel, memoised, register
from flashlane.jit.toolchain import architecture_number
from flashlane.kernels.features import head_dim_refusal
from flashlane.kernels.params import LOG2_E, SCALES
from flashlane.kernels.score import cap_refusal
from flashlane.kernels.triton import cost
from flashlane.kernels.triton import forward_configs as configs
from flashlane.kernels.triton.forward_configs import TritonConfig

MIN_TRITON = (3, 6)
MIN_CAPABILITY = 80
"""Triton's own minimum, sm_80."""
HOW_TO_GET = "pip install 'triton>=3.6' (Linux; torch for CUDA brings it)"
MAX_SCALE = 3.4e38 / LOG2_E


def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def missing() -> str | None:
    """Why Triton cannot be used here, and how to get it; None when it can."""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {HOW_TO_GET}"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build of torch's with another name, such as triton-rocm
        return None
    numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdigit())
    if numbers < MIN_TRITON:
        return f"Triton is {version}; it takes {'.'.join(map(str, MIN_TRITON))} or later: {HOW_TO_GET}"
    return None


def triton_refusal(problem: AttentionProblem, dtypes: tuple[str, ...], max_head_dim: int) -> str | None:
    """Why Triton kernels of those dtypes and head dims, forward or backward, cannot run a problem here, or None."""
    reason = missing()
    if reason is not None:
        return reason
    if problem.arch is None and not interpreting():
        return "it needs a GPU (on the CPU it runs in Triton's interpreter, for tests: TRITON_INTERPRET=1)"
    if problem.dtype_name not in dtypes:
        return f"dtype is {problem.dtype_name}; it takes {' or '.join(dtypes)}"
    if problem.arch is None and problem.dtype == torch.bfloat16:
        return "dtype is bf16; Triton's interpreter computes its products wrongly, it takes f16 or f32 there"
    if problem.arch is not None and architecture_number(problem.arch) < MIN_CAPABILITY:
        return f"architecture is {problem.arch}; Triton takes sm_{MIN_CAPABILITY} or later"
    return head_dim_refusal(problem, max_head_dim) or cap_refusal(problem, SCALES[1])


class TritonAttention(TunableKernel):
    """The template of ``forward_kernels.py`` with one arithmetic for f32."""

    source = "Dao 2023 (FlashAttention-2), Algorithm 1; Triton's attention tutorial for the shape of the loop"

    def __init__(
        self, tag: str, family: str, precision: str, dtypes: tuple[str, ...], summary: str, priority: int = 5
    ) -> None:
        self.tag, self.family, self.precision = tag, family, precision
        self.dtypes, self.summary, self.priority = dtypes, summary, priority

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = triton_refusal(problem, self.dtypes, configs.MAX_HEAD_DIM)
        if reason is None and not abs(problem.scale) < MAX_SCALE:
            return f"scale is {problem.scale:g}; its size may be up to {MAX_SCALE:g}"
        return reason

    def preference(self, problem: AttentionProblem) -> float:
        """Above ``tiled`` and below the CUDA kernels on a GPU; in the interpreter below everything."""
        if problem.arch is None:
            return -2.0
        # TF32 loses precision, and auto never takes less than it is given.
        return float(self.priority) if self.precision != "tf32" else -1.0

    def low_precision_reference(self, problem: AttentionProblem) -> str:
        """TF32 and f16 have the same 10 bits of fraction."""
        return "scores=f16,out=f16,store=f32" if self.precision == "tf32" else "standard"

    def config(self, problem: AttentionProblem) -> TritonConfig:
        """What the tuner found on this GPU, or else the heuristic's choice."""
        return _config(self, problem)

    def candidates(self, problem: AttentionProblem) -> Iterator[TritonConfig]:
        """The configurations that ``flashlane tune`` times: those that the model knows, the fastest first, then all."""
        yield from dict.fromkeys((*(config for _, config in self._ranked(problem)), *self._listed(problem)))

    def predicted_configs(self, problem: AttentionProblem) -> list[tuple[str, float]]:
        """The configurations that are compared and their predicted milliseconds, the fastest first."""
        return [(config.describe(), us / 1e3) for us, config in self._ranked(problem.chosen_for)]

    def _ranked(self, problem: AttentionProblem) -> list[tuple[float, TritonConfig]]:
        """Predicted microseconds of the table's configurations, the fastest first."""
        return cost.forward_ranked(problem, self._listed(problem), self.precision_of(problem))

    def _listed(self, problem: AttentionProblem) -> Iterator[TritonConfig]:
        return configs.candidates(problem, configs.shared_limit(problem.arch), self.precision_of(problem))

    def precision_of(self, problem: AttentionProblem) -> str:
        """How ``tl.dot`` multiplies; the interpreter, which has no tensor cores, always as IEEE says."""
        return self.precision if problem.arch is not None and problem.dtype == torch.float32 else "ieee"

    def source_of(self, config: TritonConfig) -> str:
        return "kernels/triton/forward_kernels.py"

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        self._launch(None, problem, inputs, out, lse)

    def run(
        self, config: TritonConfig, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """:meth:`forward` with a given configuration.

        Raises:
            ValueError: the configuration has descriptors, and these keys cannot be read through them.
        """
        if config.descriptors and not (configs.describable(problem) and configs.describes(inputs.k, inputs.v)):
            raise ValueError(
                f"config is {config}; descriptors read keys of a dense problem on Hopper or later, whose head dims are "
                "powers of two and whose rows do not overlap and start on 16 bytes"
            )
        self._launch(config, problem, inputs, out, lse)

    def _launch(
        self,
        config: TritonConfig | None,
        problem: AttentionProblem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if out.numel() == 0 and lse.numel() == 0:
            return
        from flashlane.kernels.triton import forward

        forward.run(
            problem, config or functools.partial(self.config, problem), inputs, out, lse, self.precision_of(problem)
        )


@memoised
def _config(kernel: TritonAttention, problem: AttentionProblem) -> TritonConfig:
    problem = problem.chosen_for
    config = tuned.config_of(TritonConfig, kernel, problem)
    if config is not None:
        return replace(config, descriptors=config.descriptors and configs.describable(problem))
    return next(kernel.candidates(problem))


register(
    TritonAttention(
        "triton", "triton", "bf16x6", ("f16", "bf16", "f32"),
        "portable: any mask and modifier, packed and cached sequences, split-KV; f32 as sums of six bf16 products",
    )
)  # fmt: skip
register(
    TritonAttention(
        "triton(ieee)", "triton", "ieee", ("f32",),
        "the same for f32 with IEEE multiply-adds, without tensor cores",
        priority=3,
    )
)  # fmt: skip
register(
    TritonAttention(
        "triton(tf32)", "triton-tf32", "tf32", ("f32",),
        "the same for f32 with TF32 products (10 bits of fraction)",
        priority=2,
    )
)  # fmt: skip
