"""The Hopper forward kernel (``kernel.cu``): what it takes, and its entry in the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flashlane import jit
from flashlane.core import tuned
from flashlane.core.arch import ELEMENTS
from flashlane.core.problem import MAX_SPLITS, AttentionProblem, Inputs
from flashlane.core.registry import BEFORE_DECODE, DeviceKernel, Repeat, memoised, register
from flashlane.jit import KernelSource, launch, tensormap
from flashlane.kernels.features import CACHE, PAGED, VARLEN, head_dim_refusal, rows_refusal, unsupported_features
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.forward import select, tile_scheduler, tiles
from flashlane.kernels.hopper.forward.config import CONSUMER_ROWS, MAX_COLUMNS_V, HopperConfig, columns_of
from flashlane.kernels.hopper.forward.launch import PreparedForward, config_and_splits, plain_inputs, sources_of
from flashlane.kernels.score import SCORE_EXAMPLES, SCORE_FEATURES, has_row_gradients
from flashlane.kernels.seqlen import SEQLEN_EXAMPLES

if TYPE_CHECKING:
    from flashlane.core.ranges import Arriving, RangedRepeat, Ranges

MAX_HEAD_DIM = 256
MAX_HEAD_DIM_V = 1024
MAX_LENGTH = 1 << 30
MAX_TILES = 1 << 30
"""Work tiles that are counted in 32 bits, together with those that CTAs ask for when none is left."""
ABLE = (*SCORE_FEATURES, *VARLEN, *CACHE, *PAGED)
FEW_TILES = 8
"""So few that the mma.sync family, which splits the keys among the warps of a CTA, is ahead: one head of 64 with 1024
keys took it 9.8 µs, and this one 16 (benchmarks/archive/auto_check_20261122.json)."""
FEW_TILES_KEYS = range(512, 1025)
"""Keys of these problems. Only the one with 1024 keys was timed; the bounds of both were set around it. The predicted
times of the two families are not compared: those of mma.sync are of replays of graphs, and those here of launches. By
these mma.sync would take problems of twice as many tiles, and of fewer keys, which nobody has timed with both."""
ROWS_BEFORE_DECODE = range(CONSUMER_ROWS // 2 + 1, CONSUMER_ROWS + 1)
"""Rows of a key/value head for which wgmma tiles are faster than the decode kernel's of mma.sync, whose time they
double: 1.35 to 1.9 times with 64 rows, level with 32 (benchmarks/archive/forward_orders.json). Of caches with lengths
on the device they are ahead of any number of splits of the decode kernel in all of 84 problems of 36 and 64 rows and
2,048 to 65,536 keys (benchmarks/archive/decode_lengths_fit.json)."""
CTAS_BEFORE_DECODE = 16
"""Tiles with their splits from which that holds: with 4 and 8 the decode kernel took 0.74 to 0.97 of the time, with 16
to 56 1.08 to 2.3 times (notebook 0038)."""
BEHIND_MMA = 10.5
"""Between the priority of that family and what its best tag has."""


class HopperForward(DeviceKernel):
    """wgmma and TMA, one producer warp and one to four consumer warpgroups, work tiles taken dynamically."""

    tag = "hopper(wgmma+tma)"
    family = "hopper"
    summary = "wgmma and TMA; persistent, one stream of n-blocks over all tiles of a CTA, softmax under the products"
    source = "Shah et al. 2024 (FlashAttention-3), algorithm 2; PTX ISA wgmma, cp.async.bulk.tensor, mbarrier"
    priority = 20
    architectures = (ARCH,)
    lse_optional = True

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = unsupported_features(problem, ELEMENTS, ABLE, self.architectures)
        reason = reason or head_dim_refusal(problem, MAX_HEAD_DIM, MAX_HEAD_DIM_V)
        if reason:
            return reason
        if not problem.aligned or problem.head_dim % 8 or problem.head_dim_v % 8:
            return rows_refusal(problem, "TMA")
        if max(problem.rows_of_kv_head, problem.seqlen_k) > MAX_LENGTH:
            return f"lengths are {problem.seqlen_q} and {problem.seqlen_k}; it takes up to {MAX_LENGTH}"
        tiles = _most_tiles(problem)
        return f"it may have {tiles} tiles, of all heads; it takes up to {MAX_TILES}" if tiles > MAX_TILES else None

    def preference(self, problem: AttentionProblem) -> float:
        """Behind the mma.sync family's best where it has few tiles of narrow heads, which that one's warps share.

        Before the decode kernel where the rows of a key/value head fill more than half of a tile.
        """
        problem = problem.chosen_for.with_hiding_sides
        if _outruns_decode(problem):
            return BEFORE_DECODE
        count = problem.batch * problem.heads * tile_scheduler.ceil_div(problem.seqlen_q, 2 * CONSUMER_ROWS)
        narrow = max(problem.head_dim, problem.head_dim_v) <= 64
        few = count <= FEW_TILES and problem.seqlen_k in FEW_TILES_KEYS
        return BEHIND_MMA if few and narrow and not problem.needs_grad else self.priority

    def config(self, problem: AttentionProblem) -> HopperConfig:
        return _config(problem.with_hiding_sides)

    def predicted_configs(self, problem: AttentionProblem) -> list[tuple[str, float]]:
        """The configurations that a problem may get and their predicted milliseconds, the fastest first.

        Empty for packed sequences, whose lengths only the GPU knows.
        """
        if problem.varlen:
            return []
        ranked = select.ranked(problem.chosen_for.with_hiding_sides)
        return [(config.describe(), us / 1e3) for config, us in ranked]

    def candidates(self, problem: AttentionProblem) -> Iterator[HopperConfig]:
        """What the cost model chooses from, the fastest first; every order of tiles of every shape; combining parts and
        loading pages in every way."""
        problem = problem.with_hiding_sides
        one = tiles.class_of(problem.head_dim, columns_of(problem.head_dim_v))
        shapes = (*select.shapes_of(problem), *one.loaded, one.few_rows)
        configs = [config for config, _ in select.ranked(problem)]
        configs += [select.config_of_shape(shape, problem) for shape in dict.fromkeys(shapes)]
        found = (v for config in configs for v in select.variants(config, problem))
        limit = jit.shared_limit(ARCH)
        yield from dict.fromkeys(config for config in found if config.shared_memory <= limit)

    def kernel_source(self, config: HopperConfig) -> KernelSource:
        return config.source()

    def sources(self, problem: AttentionProblem) -> tuple[KernelSource, ...]:
        config, _ = config_and_splits(self.config(problem), problem.with_hiding_sides)
        return sources_of(config)

    def shipped(self) -> Iterator[tuple[HopperConfig, tuple[str, ...]]]:
        chosen = (replace(_config(problem), heads_per_section=0, kv_splits=0) for problem in shipped_problems())
        for config in dict.fromkeys((*chosen, *_shapes_that_lengths_choose())):
            yield config, (ARCH,)

    def spills_allowed(self, config: HopperConfig, arch: str) -> int:
        return config.spills_allowed

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        _launch(None, problem, inputs, out, lse)

    def prepare(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> Repeat:
        launch_plain = _checked(None, problem, inputs, out, lse).launch
        if not out.numel():
            return lambda *_: None
        if plain_inputs(inputs) is inputs:  # so it is in every call like this one
            return launch_plain

        def repeat(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            addresses: tuple[int, int, int],
            inputs: Inputs,
        ) -> None:
            launch_plain(q, k, v, out, lse, addresses, plain_inputs(inputs))

        return repeat

    def forward_f32(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> bool:
        # What combines splits adds the extra logit of a row's sum.
        if problem.paged or has_row_gradients(problem) or not out.numel():
            return False
        plain = plain_inputs(inputs)
        q, k, v = plain.q, plain.k, plain.v
        tensors = q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.shape, out.stride(), out.device.index
        prepared = _prepared_f32(problem, *tensors)
        with launch.on_device(prepared.device):
            prepared.launch(q, k, v, out, lse, (q.data_ptr(), k.data_ptr(), v.data_ptr()), plain)
        return True

    def prepare_ranges(
        self,
        problem: AttentionProblem,
        ranges: Ranges,
        inputs: Inputs,
        out: torch.Tensor,
        arriving: Arriving | None = None,
    ) -> RangedRepeat:
        from flashlane.kernels.hopper.forward import ranged

        dense = ranged.as_dense(problem, ranges, inputs, arriving)
        if dense is not None and ranges.chunks and select.splits_full_waves(dense, _config(dense)):
            dense = replace(dense, num_splits=1)  # the first and the last keys would be waited for at once
        if dense is not None and _config(dense).cluster == 1:  # clusters would wait for keys together
            problem = dense
        config = _config(problem)
        if problem.has_right_only:
            config, problem, ranges = ranged.fastest(problem, ranges, config)
        return ranged.prepare(config, problem, ranges, inputs, out, arriving)

    def run(
        self, config: HopperConfig, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Launch a given configuration."""
        _launch(config, problem, inputs, out, lse)


def _most_tiles(problem: AttentionProblem) -> int:
    """Work tiles of dense tensors in the smallest shape; 0 for packed sequences, of which the device finds them."""
    if problem.varlen:
        return 0
    tiles_of_head = tile_scheduler.ceil_div(problem.seqlen_q, CONSUMER_ROWS) * -(-problem.head_dim_v // MAX_COLUMNS_V)
    return problem.batch * problem.heads * tiles_of_head * max(1, min(problem.num_splits, MAX_SPLITS))


def _outruns_decode(problem: AttentionProblem) -> bool:
    """Whether a tile packs all rows of a key/value head, and tiles with their splits are not too few.

    Packed sequences have no splits here, and windows were not timed.
    """
    rows = problem.rows_of_kv_head
    if rows not in ROWS_BEFORE_DECODE or not select.has_few_rows(problem) or problem.window_left >= 0:
        return False
    if problem.varlen or KERNEL.supports(problem) is not None:
        return False
    return problem.batch * problem.kv_heads * select.splits_of(problem, _config(problem)) >= CTAS_BEFORE_DECODE


@memoised
def _config(problem: AttentionProblem) -> HopperConfig:
    """What the tuner found on this GPU, or else the tables' choice."""
    problem = problem.chosen_for
    found = tuned.config_of(HopperConfig, KERNEL, problem)
    return select.config_for(problem) if found is None else select.specialise_tuned(found, problem)


@memoised
def _prepared(config: HopperConfig | None, problem: AttentionProblem, *tensors_and_device: object) -> PreparedForward:
    if config is None:
        problem = problem.with_hiding_sides
    return PreparedForward(_config(problem) if config is None else config, problem, *tensors_and_device)


@memoised
def _prepared_f32(problem: AttentionProblem, *tensors_and_device: object) -> PreparedForward:
    problem = problem.with_hiding_sides
    return PreparedForward(_config(problem), problem, *tensors_and_device, partial=True)


def _launch(
    config: HopperConfig | None, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> None:
    prepared = _checked(config, problem, inputs, out, lse)
    if out.data_ptr() % tensormap.ALIGNMENT:
        raise ValueError(f"out starts at address {out.data_ptr():#x}; it must start on {tensormap.ALIGNMENT} bytes")
    if out.numel():
        plain = plain_inputs(inputs)
        addresses = plain.q.data_ptr(), plain.k.data_ptr(), plain.v.data_ptr()
        with launch.on_device(prepared.device):
            prepared.launch(plain.q, plain.k, plain.v, out, lse, addresses, plain)


def _checked(
    config: HopperConfig | None, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> PreparedForward:
    """What was prepared for a call, whose outputs are what it writes."""
    q, k, v = inputs.q, inputs.k, inputs.v
    prepared = _prepared(
        config, problem, q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.shape, out.stride(), out.device.index
    )
    if (
        lse.dtype != torch.float32
        or out.dtype != problem.dtype
        or lse.shape != prepared.lse_shape
        or not lse.is_contiguous()
    ):
        raise ValueError(
            f"out is {out.dtype} and lse {lse.dtype} {tuple(lse.shape)}; they must be {problem.dtype}, and contiguous "
            f"torch.float32 {prepared.lse_shape}"
        )
    return prepared


def shipped_problems() -> Iterator[AttentionProblem]:
    """Problems that lead the heuristic through its tables, and through each feature at the common head dims."""
    for head_dim, head_dim_v in [*((one.head_dim, one.head_dim_v) for one in tiles.CLASSES), (64, 512)]:
        for seqlen in (1024, 4096, 16384):
            base = AttentionProblem(
                batch=64, heads=32, kv_heads=8, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim,
                head_dim_v=head_dim_v, dtype=torch.bfloat16, scale=head_dim**-0.5, arch=ARCH,
            )  # fmt: skip
            yield base
            yield replace(base, window_right=0)
        yield replace(base, seqlen_q=1)
        yield replace(base, seqlen_q=1, batch=1)
        yield replace(base, seqlen_q=256, batch=1, heads=8)
        if head_dim == head_dim_v and head_dim in (64, 128):
            causal = replace(base, window_right=0)
            yield replace(causal, dtype=torch.float16)
            window = replace(causal, window_left=1024)
            yield window
            for feature in (*SCORE_EXAMPLES, *SEQLEN_EXAMPLES):
                yield replace(causal, **feature)
            for feature in SCORE_EXAMPLES:
                yield replace(window, **feature)
            for feature in SEQLEN_EXAMPLES[1:]:
                yield replace(base, seqlen_q=8, batch=1, **feature)


def _shapes_that_lengths_choose() -> Iterator[HopperConfig]:
    """Every shape of every class, for plain problems: lengths and heads decide which is chosen."""
    for one in tiles.CLASSES:
        for window_right in (-1, 0):
            problem = AttentionProblem(
                batch=64, heads=32, kv_heads=32, seqlen_q=4096, seqlen_k=4096, head_dim=one.head_dim,
                head_dim_v=one.head_dim_v, dtype=torch.bfloat16, scale=0.1, arch=ARCH, window_right=window_right,
            )  # fmt: skip
            yield from (select.config_of_shape(shape, problem) for shape in one.shapes_without_modifier)


KERNEL = register(HopperForward())
