"""Few queries over a long key/value cache, packed, paged or padded, in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DECODE, FEW_ROWS, DeviceKernel, Repeat, register
from flashlane.jit import KernelSource
from flashlane.jit.launch import MAX_GRID
from flashlane.kernels.decode.config import DecodeConfig
from flashlane.kernels.decode.launch import launch_attention, repeated_attention, source_of
from flashlane.kernels.decode.select import compared_configs, config_for, predicted_time
from flashlane.kernels.features import CACHE, PAGED, VARLEN, head_dim_refusal, rows_refusal, unsupported_features
from flashlane.kernels.score import SCORE_EXAMPLES, SCORE_FEATURES

MAX_HEAD_DIM = 256
MAX_BATCH = MAX_GRID[2]
MAX_ROWS = 1 << 30
"""Rows of a key/value head of a sequence, of packed ones of the longest, which tiles count in 32 bits."""
MAX_GROUP = 1 << 15
"""The largest group of heads by which the kernel divides rows exactly in 32 bits."""
ABLE = (*SCORE_FEATURES, *VARLEN, *CACHE, *PAGED)


class Decode(DeviceKernel):
    """The registered kernel."""

    tag = "decode(split-kv)"
    family = "decode"
    summary = "few queries over a long cache: query heads share tiles, keys are split over CTAs, one launch"
    source = "Dao et al. 2023 (Flash-Decoding); PTX ISA mma.sync.m16n8k16, cp.async, cp.async.bulk.tensor"
    priority = 4

    def preference(self, problem: AttentionProblem) -> float:
        """Above kernels that read K and V once for each query head, where few rows share a KV head."""
        return DECODE if problem.rows_of_kv_head <= FEW_ROWS else float(self.priority)

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = unsupported_features(problem, ("f16", "bf16"), ABLE) or head_dim_refusal(problem, MAX_HEAD_DIM)
        if reason:
            return reason
        if not problem.aligned:
            return rows_refusal(problem, "cp.async")
        config = config_for(problem)
        if config is None:
            return f"no tile shape fits the {jit.shared_limit(problem.arch)} bytes of shared memory of {problem.arch}"
        if problem.batch > MAX_BATCH:
            return f"batch is {problem.batch}; it takes up to {MAX_BATCH}"
        if problem.group > MAX_GROUP:
            return f"{problem.group} query heads share a KV head; it takes up to {MAX_GROUP}"
        rows = problem.rows_of_kv_head
        return f"{rows} rows of a sequence share a KV head; it takes up to {MAX_ROWS}" if rows > MAX_ROWS else None

    def config(self, problem: AttentionProblem) -> DecodeConfig:
        found = config_for(problem)
        if found is None:
            raise ValueError(f"kernel {self.tag!r} cannot run {problem.describe()}: {self.supports(problem)}")
        return found

    def predicted_configs(self, problem: AttentionProblem) -> list[tuple[str, float]]:
        problem = problem.chosen_for
        found = compared_configs(problem)
        times = {config.describe(): predicted_time(problem, config) / 1e3 for config in found}
        return sorted(times.items(), key=lambda item: item[1])

    def predicted_ms(self, problem: AttentionProblem) -> float | None:
        """None: what it reads is predicted without its launch, and so is not compared with other kernels' times."""
        return None

    def kernel_source(self, config: DecodeConfig) -> KernelSource:
        return source_of(config)

    def shipped(self) -> Iterator[tuple[DecodeConfig, tuple[str, ...]]]:
        found: dict[DecodeConfig, list[str]] = {}
        for problem in shipped_problems(self):
            archs = found.setdefault(self.config(problem), [])
            if problem.arch not in archs:
                archs.append(problem.arch)
        for config, archs in found.items():
            yield config, tuple(archs)

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        launch_attention(None, problem, inputs, out, lse)

    def prepare(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> Repeat:
        return repeated_attention(problem, inputs, out, lse)

    def run(
        self,
        config: DecodeConfig,
        problem: AttentionProblem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        splits: int | None = None,
        debug: bool = False,
    ) -> None:
        """Launch a given configuration.

        Args:
            config, problem, inputs, out, lse: as :meth:`forward` has them.
            splits: the most splits of an output tile, or with stream-K the CTAs for each tile; None for the problem's
                or the heuristic's.
            debug: compile with waits that trap after seconds, so that a hang is an error.

        Raises:
            ValueError: the configuration reads K and V by TMA, which cannot read tensors of these strides; or it
                divides keys otherwise than by splits, and the problem says how many splits there are.
        """
        launch_attention(config, problem, inputs, out, lse, splits, debug)


def shipped_problems(kernel: DeviceKernel) -> Iterator[AttentionProblem]:
    """Problems that reach every line of the heuristic's tables, and every dtype, kind of pages and modifier."""
    base = AttentionProblem(1, 4, 1, 1, 65536, 128, 128, torch.bfloat16, 128**-0.5)
    shapes = ((64, 64), (128, 128), (192, 128), (256, 256))
    changes = ({"dtype": torch.float16}, SCORE_EXAMPLES[0], {"seqlen_k": 1024}, {"batch": 16, "seqused_k": True})
    changes += ({"num_splits": 1},)
    changes += tuple(dict.fromkeys(PAGED, rows) for rows in (16, 17, 64, 256))
    many = {"batch": 64, "seqused_k": True}  # by stream-K
    changes += ({"batch": 256, "dtype": torch.float16}, {"batch": 256, **SCORE_EXAMPLES[0]}, many)
    changes += tuple(many | dict.fromkeys(PAGED, rows) for rows in (16, 17))
    for arch, (head_dim, head_dim_v), seqlen_q in itertools.product(kernel.architectures, shapes, (1, 8, 16)):
        plain = replace(base, arch=arch, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=seqlen_q)
        more = [replace(plain, **change) for change in changes] if head_dim == 128 else []
        for problem in (plain, replace(plain, batch=256), *more):
            if kernel.supports(problem) is None:
                yield problem


register(Decode())
