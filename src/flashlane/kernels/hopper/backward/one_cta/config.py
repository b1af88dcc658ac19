"""Configurations of the one-CTA backward: tiles, stages and policies (``one_cta/policies.cuh``)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from flashlane.jit import KernelSource, shared_limit
from flashlane.kernels.hopper.arch import ARCH, CHUNK
from flashlane.kernels.hopper.backward.config import COLUMNS_BYTES, CONSUMERS, GradientConfig, row_bytes
from flashlane.kernels.hopper.backward.seen_keys import has_unseen_keys

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem

Dq = Literal["register_atomics", "tma_reduce_add", "ordered_register_atomics", "ordered_tma_reduce_add"]
"""How dQ is added to dq_accum; in order, it has the same bits at every run."""
Postprocess = Literal["own_launch", "idle_warps"]
"""Where dQ is computed from dq_accum."""
PingPong = Literal["off", "until_issued", "until_complete"]
"""How long a consumer warpgroup has the tensor cores alone for the first two products of a step."""
Staging = Literal["registers", "both", "in_turn", "ds_and_dq", "dq_and_ds", "ds_and_room"]
"""Where dK and dV of a tile lie until they are stored: in registers, from which consumers store them; or in shared
memory, from which TMA does, with room for both or for one at a time, dV first; else dV where dS was, and dK where dQ
was; or dV where dQ was, under the tile's last dQ, and dK where dS was; or both where dS was, with room for what is
left of dK."""
IN_DS: tuple[Staging, ...] = ("ds_and_dq", "dq_and_ds", "ds_and_room")
"""Those in the place of dS, which the first step of the next tile needs again."""
DQ_POLICIES: dict[tuple[Dq, Postprocess], str] = {
    ("register_atomics", "own_launch"): "RegisterAtomics",
    ("register_atomics", "idle_warps"): "RegisterAtomicsInKernelDq",
    ("tma_reduce_add", "own_launch"): "TmaReduceAdd",
    ("ordered_register_atomics", "own_launch"): "OrderedRegisterAtomics",
    ("ordered_tma_reduce_add", "own_launch"): "OrderedTmaReduceAdd",
}
"""The device type of each combination that works."""
ORDERED: dict[Dq, Dq] = {
    "register_atomics": "ordered_register_atomics",
    "tma_reduce_add": "ordered_tma_reduce_add",
}
"""The same additions in an order."""
FROM_REGISTERS: tuple[Dq, ...] = ("register_atomics", "ordered_register_atomics")
REGISTERS = ((200, (56, 224)), (216, (40, 232)), (1 << 30, (24, 240)))
"""Registers of a producer and of a consumer thread, for up to so many accumulators and operands of a consumer."""
SPILLS_ALLOWED = {56: 0, 40: 60, 24: 328}
"""Bytes of stores and loads that a kernel may spill, by the registers of a producer thread: it is the producer that
spills, tile by tile, where the consumers take its registers. The most that is known
(``tests/kernels/hopper/spills.json``)."""
LEAST_SCALE = 1e-3
"""Scale of the scores from which on, and up to its inverse, LSE over the scale has no overflow that its row has not."""
MIXED_HEAD_DIM = 96
"""Head dims up to which :attr:`OneCtaConfig.mixed_dq` was faster; at 112 it was not."""
WEIGHTS_BYTES = 2 * 8 * 16
"""Of the weights of row statistics as columns (``statistic_columns.cuh``)."""
TILE_BYTES, STEP_BYTES, DQ_TARGETS_BYTES = 32, 16, 4 * 8
"""Records in shared memory: of a tile, of a step, and of the slices of dQ that belong to a stage of Q."""


@dataclass(frozen=True)
class OneCtaConfig(GradientConfig):
    """Compile-time constants and policies of ``one_cta/kernel.cu``; its head draws the roles."""

    q_stages: int = 2
    do_stages: int = 2
    k_stages: int = 1
    """Tiles whose keys fit at once: with two, the next tile's are there when it begins."""
    v_stages: int = 1
    dq_stages: int = 1
    """M-blocks of dQ that may wait in shared memory for the dQ-store warps."""
    dq: Dq = "tma_reduce_add"
    postprocess: Postprocess = "own_launch"
    split_q: bool = False
    """Tiles may be split along their queries (``split_q.py``)."""
    ping_pong: PingPong = "off"
    own_loops: bool = False
    """Each consumer warpgroup has its own copy of the loop; with :attr:`mixed_dq` always."""
    tma_stores: bool = False
    """TMA stores dK and dV where it can and shared memory has room (:attr:`staging`)."""
    in_kernel_zeros: bool = False
    """The launch zeroes dq_accum of all heads but the first ones (``in_kernel_zeros.cuh``)."""
    skips_hidden: bool = False
    """A consumer makes no products of a step in which its keys are hidden."""
    subtracts_in_products: bool = True
    """The products of the scores subtract LSE and delta, where they can (:attr:`product_statistics`)."""
    peeled: bool = False
    """The first step of a tile is a copy of the loop's body without a dQ, where it has none to make (:attr:`peels`)."""

    design: ClassVar[str] = "one_cta"
    block_n: ClassVar[int] = CHUNK * CONSUMERS
    """Keys of a CTA."""

    def __post_init__(self) -> None:
        if (self.dq, self.postprocess) not in DQ_POLICIES:
            raise ValueError(f"postprocess is {self.postprocess!r} with dq {self.dq!r}; it may be {self._may_be()}")
        if self.split_q and self.in_order:
            raise ValueError(f"split_q is True with dq {self.dq!r}; additions in order are of whole tiles")
        if self.varlen and self.in_kernel_dq:
            raise ValueError("varlen is True with idle_warps, which count the tiles before the launch")
        if self.f32_dq and self.postprocess != "own_launch":
            raise ValueError(f"f32_dq is True with postprocess {self.postprocess!r}; it may be 'own_launch'")

    def _may_be(self) -> str:
        return " or ".join(repr(postprocess) for dq, postprocess in DQ_POLICIES if dq == self.dq)

    @property
    def in_order(self) -> bool:  # type: ignore[override]
        return self.dq in ORDERED.values()

    @functools.cached_property
    def peels(self) -> bool:
        """:attr:`peeled`, where a tile's first step makes no dQ of the tile before; not with ordered TMA additions."""
        other = self.k_stages > 1 or self.dq == "ordered_tma_reduce_add" or self.skips_hidden
        return self.peeled and not other

    @property
    def from_registers(self) -> bool:
        """Whether consumers add dQ themselves."""
        return self.dq in FROM_REGISTERS

    @functools.cached_property
    def product_statistics(self) -> bool:  # type: ignore[override]
        """:attr:`subtracts_in_products`, where nothing else changes a score and shared memory has room."""
        changed = self.score.transformed or self.block_lists or self.program
        fits = sum(self._regions(self.staging, True).values()) <= shared_limit(ARCH)
        return self.subtracts_in_products and fits and not changed

    @property
    def stores_by_tma(self) -> bool:  # type: ignore[override]
        return self.staging != "registers"

    @functools.cached_property
    def staging(self) -> Staging:
        """Where dK and dV of a tile lie until they are stored.

        A tensor map stores nothing that is not in the operands' type.
        """
        if self.tma_stores and not (self.f32_dkdv or self.block_lists or self.program):
            staged: tuple[Staging, ...] = "both", "in_turn"
            for staging in staged:
                if sum(self._regions(staging).values()) <= shared_limit(ARCH):
                    return staging
            if self._fits_ds_and_dq:
                return "dq_and_ds" if self.peels else "ds_and_dq"
            if self._fits_ds_and_room:
                return "ds_and_room"
        return "registers"

    @property
    def _fits_ds_and_room(self) -> bool:
        """Three chunks of two warps in a consumer's half of a stage of dS, of two of dV and two of dK."""
        rows, chunk = CHUNK * CONSUMERS // 8, CHUNK * 2
        two_chunks = row_bytes(self.head_dim) == row_bytes(self.head_dim_v) == 2 * chunk
        fits = two_chunks and self.k_stages == 1 and 2 * 3 * rows * chunk <= self.block_m * chunk
        return fits and sum(self._regions("ds_and_room").values()) <= shared_limit(ARCH)

    @property
    def _fits_ds_and_dq(self) -> bool:
        """Two warps' rows of dV or dK in a consumer's half of a stage of dS, and a warp's in a fragment of dQ."""
        rows = CHUNK * CONSUMERS // 8 * row_bytes(max(self.head_dim, self.head_dim_v))
        added_by_tma = self.dq == "tma_reduce_add" and self.dq_stages == 1 and self.k_stages == 1
        return added_by_tma and 2 * rows <= self.block_m * CHUNK * 2 and rows <= CHUNK * self.slice_rows

    @property
    def in_kernel_dq(self) -> bool:  # type: ignore[override]
        return self.postprocess == "idle_warps"

    @property
    def zeroing_ctas(self) -> int:  # type: ignore[override]
        return int(self.in_kernel_zeros or self.in_kernel_dq)

    @property
    def tile(self) -> str:
        return f"{self.block_m}x{self.block_n}"

    @property
    def split_columns(self) -> bool:
        """Each consumer has half of dQ's columns (else of its rows)."""
        return self.head_dim > CHUNK

    @property
    def slice_rows(self) -> int:
        """Queries of the slice of dQ that a consumer makes."""
        return self.block_m if self.split_columns else self.block_m // 2

    @property
    def mixed_dq(self) -> bool:  # type: ignore[override]
        """Whether dQ of the columns from 64 on is no transpose: of 64 queries a step it has fewer products then.

        It pays with ping-pong scheduling of the consumers, and nowhere else (notebook 0024).
        """
        one_product = self.block_m == CHUNK < self.head_dim <= MIXED_HEAD_DIM
        return one_product and self.from_registers and self.ping_pong == "until_issued"

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory."""
        return self._regions(self.staging, self.product_statistics)

    def _regions(self, staging: Staging, product_statistics: bool = False) -> dict[str, int]:
        m, n, qk, v = self.block_m, self.block_n, row_bytes(self.head_dim), row_bytes(self.head_dim_v)
        stages = self.q_stages + self.do_stages
        slices = 0 if self.from_registers else self.dq_stages * CONSUMERS
        return {
            "K and V": n * (self.k_stages * qk + self.v_stages * v),
            "Q": self.q_stages * m * qk,
            "dO": self.do_stages * m * v,
            "dS": 2 * m * n * 2,
            "dK and dV": n * {"both": qk + v, "in_turn": max(qk, v), "ds_and_room": CHUNK * 2}.get(staging, 0),
            "dQ": slices * CHUNK * 4 * self.slice_rows,
            "statistics": self.q_stages * m * COLUMNS_BYTES + WEIGHTS_BYTES if product_statistics else stages * m * 4,
            "records": 2 * TILE_BYTES + (STEP_BYTES + DQ_TARGETS_BYTES) * self.q_stages,
            # Of two stages each of tiles and of dS; and the count of tiles that have added.
            "barriers": 8 * (8 + 2 * (self.k_stages + self.v_stages + stages) + 2 * self.dq_stages * CONSUMERS) + 16,
        }

    @property
    def shared_memory(self) -> int:
        """Bytes of one CTA."""
        return sum(self.regions.values())

    @property
    def registers(self) -> tuple[int, int]:
        """The registers of a producer and of a consumer thread."""
        derivatives = self.block_m // 4 * self.score.has_derivative
        live = (self.head_dim + self.head_dim_v) // 2 + self.block_m // 2 * 2 + self.block_m // 4 + derivatives
        return next(registers for most, registers in REGISTERS if live <= most)

    @property
    def spills_allowed(self) -> int:
        return SPILLS_ALLOWED[self.registers[0]]

    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """``one_cta/kernel.cu`` with these constants and policies."""
        stages = {f"{name}_STAGES": getattr(self, f"{name.lower()}_stages") for name in ("Q", "DO", "K", "V", "DQ")}
        columns = (self.block_m, self.slice_rows, self.head_dim, self.head_dim_v)
        constants = {**stages, "BLOCK_N": self.block_n, "SHARED_BYTES": self.shared_memory}
        constants["STATISTICS_IN_PRODUCTS"] = self.product_statistics
        policies = (
            f"using Dq = {DQ_POLICIES[self.dq, self.postprocess]};\n"
            f"using Partition = {'SplitQ' if self.split_q else 'WholeTiles'};\n"
            f"constexpr PingPong PING_PONG = PingPong::{self.ping_pong.upper()};\n"
            f"constexpr bool OWN_LOOPS = {int(self.own_loops or self.mixed_dq)};\n"
            f"constexpr Staging STAGING = Staging::{self.staging.upper()};\n"
            f"constexpr bool SKIPS_HIDDEN = {int(self.skips_hidden)};\n"
            f"constexpr bool PEELED = {int(self.peels)};\n"
        )
        headers = (("one_cta_policies.cuh", policies),)
        n_inner = ((self.head_dim - CHUNK,) if self.mixed_dq else ()) + (self.block_m,) * self.product_statistics
        rs_first = (self.head_dim, self.head_dim_v) if self.peels else ()
        return (
            self.gradient_source("one_cta/kernel", columns, self.registers, headers, n_inner, rs_first, **constants),
        )

    def for_sums(self, f32_dq: bool) -> OneCtaConfig:
        """The same as of all designs; a dQ in f32 is not written by idle warps, which would spill more registers."""
        ping_pong: PingPong = "off" if self.peeled and self.has_right else self.ping_pong  # as without a peeled step
        postprocess: Postprocess = "own_launch" if f32_dq else self.postprocess
        tile = replace(
            self,
            in_kernel_zeros=False,
            peeled=False,
            ping_pong=ping_pong,
            postprocess=postprocess,
            subtracts_in_products=False,
        )
        return GradientConfig.for_sums(tile, f32_dq)

    def with_ranges(self) -> OneCtaConfig:
        """The tile for two ranges of queries, whose m-blocks are not counted for idle warps.

        All launches of a call share LSE and delta as numbers (``parts.py``).
        """
        return replace(
            self, postprocess="own_launch", query_ranges=True, skips_hidden=False, subtracts_in_products=False
        )

    def specialised(self, problem: AttentionProblem) -> OneCtaConfig:
        """The tile for a problem; a deterministic one adds to dQ in order, and no other one does."""
        dq, postprocess = self.dq, self.postprocess
        unordered = {ordered: name for name, ordered in ORDERED.items()}
        if problem.deterministic != self.in_order:
            dq, postprocess = (ORDERED if problem.deterministic else unordered)[self.dq], "own_launch"
        elif problem.varlen and postprocess == "idle_warps":
            postprocess = "own_launch"
        zeros = self.in_kernel_zeros and not (problem.deterministic or problem.varlen or problem.window_left >= 0)
        zeros = zeros and postprocess != "idle_warps"
        split = self.split_q and not problem.deterministic
        subtracts = self.subtracts_in_products and LEAST_SCALE <= problem.scale <= 1 / LEAST_SCALE
        tile = replace(
            self, dq=dq, postprocess=postprocess, split_q=split, in_kernel_zeros=zeros, subtracts_in_products=subtracts
        )
        # Idle warps count the m-blocks that are assigned to each n-block.
        unseen = not tile.in_kernel_dq and has_unseen_keys(problem, self.block_n, self.block_m)
        return replace(GradientConfig.specialised(tile, problem), unseen_keys=unseen)
