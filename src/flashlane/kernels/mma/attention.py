"""The mma.sync family: one template (``attention.cu``), one registered kernel a variant."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashlane import jit
from flashlane.core import tuned as tune
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel, Repeat, Resources, memoised, register
from flashlane.jit import KernelSource
from flashlane.jit.launch import Dim3
from flashlane.kernels.device_file import device_code
from flashlane.kernels.features import unsupported_features
from flashlane.kernels.mma import tiles as shapes
from flashlane.kernels.mma.config import OUTPUTS, MmaConfig
from flashlane.kernels.params import (
    AttentionParams,
    attention_params,
    check_outputs,
    fold_of,
    repeated,
)

SOURCE = "kernels/mma/attention.cu"
L2_BYTES = 24 << 20
"""Bytes of the L2 cache that the keys and values of one section of heads may take."""
CAUSAL_L2_BYTES = 48 << 20
"""The same under a causal mask, where tiles of one length, of several heads, beat those of all lengths of one: 4 to
16 % of the time at N 2048 to 16384 (an H200; more than this gains nothing)."""
FAMILIES = {
    "split-kv": "warps share a row tile by keys; P and row maxima cross warps through shared memory",
    "split-q": "each warp owns rows and sees all keys; P stays in registers",
    "split-q+share-kv": "split-q, with K and V one after the other in the stages of one pipeline",
    "split-q+share-qkv": "split-q, with Q in registers and K and V in the shared memory that Q had",
    "split-q+tiling-qk": "Q and K in slices of the head dim, V in slices of rows; O over warps where it outgrows one",
    "split-q+tiling-qkv": "Q, K and V in slices of the head dim: shared memory does not grow with it (FFPA level 1)",
}
ACCUMULATORS = {
    ("f16", "f16"): "",
    ("f32", "f32"): "acc-f32",
    ("f32", "f16"): "acc-qk-f32",
    ("f16", "f32"): "acc-pv-f32",
}
"""Accumulators of Q·Kᵀ and of P·V, and the word of each pair."""
SWIZZLES = ("", "q", "qk", "qkv")
SPILLS_ALLOWED = 1024
"""Bytes, stores and loads, that a configuration may spill which ``auto`` does not take (or, above D 256, does)."""


@dataclass(frozen=True)
class Variant:
    """One point of the grid: family × accumulators × O storage × Q kept or streamed × swizzles × store × stages."""

    split: str
    stage: int
    scores: str = "f32"
    out: str = "f32"
    store: str = "f32"
    persistent: bool = False
    """(tiling) Q is kept in shared memory; otherwise its slices are loaded again with each tile of keys."""
    swizzle: str = ""
    output: str = "shuffle"

    @property
    def tag(self) -> str:
        """The name in the logs; it leaves out f16 accumulators, f32 O storage, padded tiles and stores by shuffle."""
        words = [self.split, ACCUMULATORS[self.scores, self.out]]
        words += ["o-f16" if self.store == "f16" else "", "persist-q" if self.persistent else ""]
        words += [f"swizzle-{self.swizzle}" if self.swizzle else ""]
        words += [f"store-{self.output}" if self.output != "shuffle" else "", f"stage{self.stage}"]
        return f"mma({'+'.join(word for word in words if word)})"

    @property
    def family(self) -> str:
        return self.split.removeprefix("split-q+")

    @property
    def tiling(self) -> bool:
        """Whether the head dim is loaded in slices."""
        return self.family.startswith("tiling")

    @property
    def max_head_dim(self) -> int:
        return 1024 if self.tiling else 256

    @property
    def kv_stages(self) -> int:
        """Stages of the pipeline: as many as the variant names where K and V share each; otherwise one more, for V."""
        return self.stage if self.tiling or self.family.startswith("share") else self.stage + 1

    @property
    def precision(self) -> str:
        """Accumulators and O storage, such as ``f16/f32``; ``mixed`` when the two accumulators differ."""
        return f"{self.out}/{self.store}" if self.scores == self.out else "mixed"

    @property
    def listed(self) -> bool:
        """Shown without being asked for: accumulators alike, all tiles swizzled or none, up to two stages."""
        plain = self.scores == self.out and self.swizzle in ("", "qkv") and self.output == "shuffle" and self.stage <= 2
        return plain and (not self.tiling or self.store == "f32")

    def configs(self, problem: AttentionProblem, few_blocks: bool | None = None) -> Iterator[MmaConfig]:
        """The configurations that fit the problem's architecture, the preferred one first.

        ``few_blocks``: as for a problem with few (or many) CTAs; None asks the problem.
        """
        largest = max(problem.head_dim, problem.head_dim_v)
        marks = (self.precision, f"stage{self.stage}")
        few = tune.few_blocks(problem) if few_blocks is None else few_blocks
        for shape in shapes.candidates(self.family, marks, largest, few):
            config = self.at(problem, shape)
            if config.shared_memory <= jit.shared_limit(problem.arch):
                yield config

    def at(self, problem: AttentionProblem, shape: shapes.Shape) -> MmaConfig:
        """The configuration with a given tile shape."""
        column_unit = 16 * shape.warps_kv
        k_slice = v_rows = v_columns = 0
        if self.tiling:
            k_slice = shapes.slice_of(problem.head_dim, shape.k_slice)
        if self.family == "tiling-qk":
            v_rows = min(shape.v_rows, shape.block_n)
        if self.family == "tiling-qkv":
            v_columns = shapes.slice_of(problem.head_dim_v, shape.k_slice, column_unit)
        return MmaConfig(
            dtype=problem.dtype_name,
            head_dim=_round_up(problem.head_dim, k_slice or 16),
            head_dim_v=_round_up(problem.head_dim_v, v_columns or column_unit),
            block_m=shape.block_m,
            block_n=shape.block_n,
            warps_q=shape.warps_q,
            warps_kv=shape.warps_kv,
            kv_stages=self.kv_stages,
            share_qkv=self.family == "share-qkv",
            q_in_registers=shape.q_in_registers,
            scores=self.scores,
            out=self.out,
            store=self.store,
            swizzle=self.swizzle,
            vector=problem.aligned,
            early_v=shape.early_v,
            min_blocks=shape.min_blocks,
            k_slice=k_slice,
            v_rows=v_rows,
            v_columns=v_columns,
            q_streamed=self.tiling and not self.persistent,
            output=self.output,
        )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


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
        return self.priority + shapes.preference(self.tag, problem)

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
        if reason:
            return reason
        if problem.arch not in jit.LIMITS:
            return f"architecture is {problem.arch}; it takes {', '.join(jit.LIMITS)}"
        if max(problem.head_dim, problem.head_dim_v) > variant.max_head_dim:
            return f"head_dim is {max(problem.head_dim, problem.head_dim_v)}; it takes up to {variant.max_head_dim}"
        if next(variant.configs(problem), None) is None:
            return f"no tile shape fits the {jit.shared_limit(problem.arch)} bytes of shared memory of {problem.arch}"
        return None

    def config(self, problem: AttentionProblem) -> MmaConfig:
        """What the tuner found on this GPU, or else the heuristic's choice."""
        return _config(self, problem)

    def candidates(self, problem: AttentionProblem) -> Iterator[MmaConfig]:
        yield from dict.fromkeys((*self.variant.configs(problem, False), *self.variant.configs(problem, True)))

    def spills_allowed(self, config: MmaConfig, arch: str) -> int:
        few = config.block_m == 16  # one of the shapes for few CTAs
        taken = self.tag == shapes.best_tag(config.head_dim_v, few)
        return 0 if taken and arch == "sm_90a" and config.vector and config.head_dim <= 256 else SPILLS_ALLOWED

    def kernel_source(self, config: MmaConfig) -> KernelSource:
        return source_of(config)

    def resources(self, config: MmaConfig) -> Resources:
        return config.resources()

    def shipped(self) -> Iterator[tuple[MmaConfig, tuple[str, ...]]]:
        found: dict[MmaConfig, list[str]] = {}
        for problem in shipped_problems(self):
            config = next(self.variant.configs(problem))
            archs = found.setdefault(config, [])
            if problem.arch not in archs:
                archs.append(problem.arch)
        for config, archs in found.items():
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


def heads_per_section(problem: AttentionProblem) -> int:
    """Query heads whose keys and values fit the L2 cache at once; whole groups of a shared key/value head."""
    size = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize)
    allowed = L2_BYTES if problem.window_right < 0 else CAUSAL_L2_BYTES
    return min(problem.batch * problem.heads, max(1, allowed // size) * problem.group)


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
    tuned = tune.lookup(kernel, problem)
    return MmaConfig(**tuned) if tuned else next(kernel.variant.configs(problem))


def grid() -> Iterator[Variant]:
    """Every point; stages 3 and 4, and the choice of keeping Q or streaming it, are those of the tiling families."""
    for split in FAMILIES:
        tiling = "tiling" in split
        for (scores, out), store, swizzle, output, stage, persistent in itertools.product(
            ACCUMULATORS, ("f32", "f16"), SWIZZLES, OUTPUTS, (1, 2, 3, 4), (False, True)
        ):
            if tiling or (stage <= 2 and not persistent):
                yield Variant(split, stage, scores, out, store, persistent, swizzle, output)


for _variant in grid():
    register(MmaAttention(_variant))
