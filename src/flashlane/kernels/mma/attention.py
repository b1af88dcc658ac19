"""split-kv, split-q, share-kv and share-qkv: one template (``attention.cu``), one registered kernel a variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashlane import jit
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.mma import shapes
from flashlane.kernels.mma.config import MmaConfig
from flashlane.kernels.params import attention_params, check_outputs, fold_of, unsupported_features
from flashlane.problem import AttentionProblem, Inputs
from flashlane.registry import DeviceKernel, Resources, register

SOURCE = "kernels/mma/attention.cu"
MAX_HEAD_DIM = 256
L2_BYTES = 24 << 20
"""Share of the L2 cache that the keys and values of heads run together may take."""
FAMILIES = {
    "split-kv": "warps share a row tile by keys; P and row maxima cross warps through shared memory",
    "split-q": "each warp owns rows and sees all keys; P stays in registers",
    "split-q+share-kv": "split-q, with K and V taking turns in one ring of buffers",
    "split-q+share-qkv": "split-q, with Q in registers and K and V in its place",
}
SWIZZLES = ("", "q", "qk", "qkv")
STAGES = (1, 2)


@dataclass(frozen=True)
class Variant:
    """One point of the grid: family × accumulators × O storage × swizzles × stages."""

    split: str
    accumulate: str
    store: str
    swizzle: str
    stage: int

    @property
    def tag(self) -> str:
        """The founding name: f16 accumulators, f32 O storage and padded tiles go unsaid."""
        words = [self.split]
        words += ["acc-f32"] if self.accumulate == "f32" else []
        words += ["o-f16"] if self.store == "f16" else []
        words += [f"swizzle-{self.swizzle}"] if self.swizzle else []
        return f"mma({'+'.join(words)}+stage{self.stage})"

    @property
    def family(self) -> str:
        return self.split.removeprefix("split-q+")

    @property
    def kv_slots(self) -> int:
        """Buffers of the K/V ring: with shared buffers one a stage; otherwise K's stages and one for V."""
        return self.stage if self.family.startswith("share") else self.stage + 1

    @property
    def precision(self) -> str:
        """Accumulators and O storage, such as ``f16/f32``."""
        return f"{self.accumulate}/{self.store}"

    def config(self, problem: AttentionProblem) -> MmaConfig | None:
        """The preferred configuration that fits the problem's architecture; None when none fits."""
        largest = max(problem.head_dim, problem.head_dim_v)
        marks = (self.precision, f"stage{self.stage}")
        for shape in shapes.candidates(self.family, marks, largest, shapes.few_blocks(problem)):
            config = self.at(problem, shape)
            if config.shared_memory <= jit.shared_limit(problem.arch):
                return config
        return None

    def at(self, problem: AttentionProblem, shape: shapes.Shape) -> MmaConfig:
        """The configuration with a given tile shape."""
        columns = 16 * shape.warps_kv
        return MmaConfig(
            dtype=problem.dtype_name,
            head_dim=-(-problem.head_dim // 16) * 16,
            head_dim_v=-(-problem.head_dim_v // columns) * columns,
            br=shape.br,
            bc=shape.bc,
            warps_q=shape.warps_q,
            warps_kv=shape.warps_kv,
            kv_slots=self.kv_slots,
            share_qkv=self.family == "share-qkv",
            q_in_registers=shape.q_in_registers,
            scores=self.accumulate,
            out=self.accumulate,
            store=self.store,
            swizzle=self.swizzle,
            vector=problem.aligned,
            early_v=shape.early_v,
            min_blocks=shape.min_blocks,
        )


def source_of(config: MmaConfig) -> KernelSource:
    """The template with a configuration's constants."""
    return KernelSource(SOURCE, device_code(SOURCE), "mma_attention", config.constants())


class MmaAttention(DeviceKernel):
    """One variant of the template as a registered kernel."""

    family = "mma"
    source = "Dao 2023 (FlashAttention-2), algorithm 1; PTX ISA mma.sync.m16n8k16, ldmatrix, cp.async"

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.tag = variant.tag
        self.summary = FAMILIES[variant.split]
        self.priority = 10

    def preference(self, problem: AttentionProblem) -> float:
        return self.priority + shapes.preference(self.tag, problem)

    def low_precision_reference(self, problem: AttentionProblem) -> str:
        if self.variant.precision == "f32/f32":
            return "standard"
        accumulate, store = self.variant.accumulate, self.variant.store
        return f"scores={accumulate},out={accumulate},store={store},block_k={self.config(problem).bc}"

    def supports(self, problem: AttentionProblem) -> str | None:
        dtypes = ("f16", "bf16") if self.variant.precision == "f32/f32" else ("f16",)
        reason = unsupported_features(problem, dtypes)
        if reason:
            return reason
        if problem.arch not in jit.LIMITS:
            return f"architecture is {problem.arch}; it takes {', '.join(jit.LIMITS)}"
        if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
            return f"head_dim is {max(problem.head_dim, problem.head_dim_v)}; it takes up to {MAX_HEAD_DIM}"
        if self.config(problem) is None:
            return f"no tile shape fits the {jit.shared_limit(problem.arch)} bytes of shared memory of {problem.arch}"
        return None

    def config(self, problem: AttentionProblem) -> MmaConfig:
        return self.variant.config(problem)

    def kernel_source(self, config: MmaConfig) -> KernelSource:
        return source_of(config)

    def resources(self, config: MmaConfig) -> Resources:
        return config.resources()

    def shipped(self) -> Iterator[tuple[MmaConfig, tuple[str, ...]]]:
        found: dict[MmaConfig, list[str]] = {}
        for problem in shipped_problems(self):
            config = self.config(problem)
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
        if problem.seqlen_q == 0:
            return
        q_blocks = -(-problem.seqlen_q // config.br)
        heads = problem.batch * problem.heads
        params = attention_params(
            problem,
            inputs,
            out,
            lse,
            q_blocks=q_blocks,
            heads_together=heads_together(problem),
            q_fold=fold_of(problem.scale) if config.scores == "f16" else 1.0,
        )
        function = jit.load(self.compile(config, problem.arch), out.device.index)
        function.launch((q_blocks * heads, 1, 1), (config.threads, 1, 1), config.shared_memory, params)


def heads_together(problem: AttentionProblem) -> int:
    """Query heads whose keys and values fit the L2 cache at once; whole groups of a shared key/value head."""
    size = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize)
    return min(problem.batch * problem.heads, max(1, L2_BYTES // size) * problem.group)


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


for _split in FAMILIES:
    for _accumulate in ("f16", "f32"):
        for _store in ("f32", "f16"):
            for _swizzle in SWIZZLES:
                for _stage in STAGES:
                    register(MmaAttention(Variant(_split, _accumulate, _store, _swizzle, _stage)))
