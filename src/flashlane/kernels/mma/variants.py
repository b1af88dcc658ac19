"""The variants of the mma.sync family: one point of the grid each, and the configurations that it may run with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from flashlane import jit
from flashlane.core import tuned
from flashlane.core.problem import AttentionProblem
from flashlane.jit.budget import round_up
from flashlane.kernels.makespan import SECTION_BYTES, heads_that_fit
from flashlane.kernels.mma import tiles as shapes
from flashlane.kernels.mma.config import OUTPUTS, MmaConfig

CAUSAL_SECTION_BYTES = 48 << 20
"""The same budget under a causal mask, where tiles of one length, of several heads, beat those of all lengths of one:
4 to 16 % of the time at N 2048 to 16384 (an H200; more than this gains nothing)."""
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
        few = tuned.few_blocks(problem) if few_blocks is None else few_blocks
        for shape in self.shapes(problem, few):
            config = self.at(problem, shape)
            if config.shared_memory <= jit.shared_limit(problem.arch):
                yield config

    def shapes(self, problem: AttentionProblem, few_blocks: bool) -> tuple[shapes.Shape, ...]:
        """The tile shapes for a problem's head dim, those for few CTAs first where there are few."""
        largest = max(problem.head_dim, problem.head_dim_v)
        return shapes.candidates(self.family, (self.precision, f"stage{self.stage}"), largest, few_blocks)

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
            head_dim=round_up(problem.head_dim, k_slice or 16),
            head_dim_v=round_up(problem.head_dim_v, v_columns or column_unit),
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


def heads_per_section(problem: AttentionProblem) -> int:
    """Query heads whose keys and values fit the L2 cache at once; whole groups of a shared key/value head."""
    size = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    budget = SECTION_BYTES if problem.window_right < 0 else CAUSAL_SECTION_BYTES
    return min(problem.batch * problem.heads, heads_that_fit(size, budget) * problem.group)


def _grid() -> Iterator[Variant]:
    """Every point; stages 3 and 4, and the choice of keeping Q or streaming it, are those of the tiling families."""
    for split in FAMILIES:
        tiling = "tiling" in split
        for (scores, out), store, swizzle, output, stage, persistent in itertools.product(
            ACCUMULATORS, ("f32", "f16"), SWIZZLES, OUTPUTS, (1, 2, 3, 4), (False, True)
        ):
            if tiling or (stage <= 2 and not persistent):
                yield Variant(split, stage, scores, out, store, persistent, swizzle, output)


VARIANTS = {variant.tag: variant for variant in _grid()}
"""Every point of the grid by its tag."""
