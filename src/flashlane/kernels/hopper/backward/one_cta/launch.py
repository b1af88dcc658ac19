"""How the one-CTA backward is launched: a persistent CTA on each SM, which takes tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.head_swizzle import by_model, fastest_section, heads_per_section, steps_of
from flashlane.kernels.hopper.backward.in_kernel_zeros import zeros_of
from flashlane.kernels.hopper.backward.launch import GradientLaunch, Schedule
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import OWN_LAUNCHES, in_kernel_dq_of
from flashlane.kernels.hopper.backward.seen_keys import tiles_of
from flashlane.kernels.hopper.backward.split_q import WHOLE_TILES, order_of, split_of

if TYPE_CHECKING:
    from flashlane.core.ranges import QueryRanges


def schedule(
    config: OneCtaConfig,
    problem: AttentionProblem,
    sms: int,
    ranges: QueryRanges | None = None,
    total: tuple[int, int] | None = None,
) -> Schedule:
    """The launch of a problem on a GPU of so many SMs.

    Args:
        config: the tile.
        problem: the attention problem.
        sms: SMs of the GPU.
        ranges: of the queries, where they are two.
        total: queries and keys of all packed sequences.
    """
    split = split_of(problem, config, sms, ranges, total) if config.split_q else WHOLE_TILES
    n_block_range = tiles_of(problem, config)
    n_blocks = len(n_block_range)
    section = config.heads_per_section
    if split.splits > 1 and not problem.varlen:
        section = order_of(problem, config, sms, ranges).heads_per_section
    section = section or _section(config, problem, n_block_range, sms, ranges)
    in_kernel = in_kernel_dq_of(problem, config.block_n, section, sms) if config.in_kernel_dq else OWN_LAUNCHES
    if config.in_kernel_zeros:
        in_kernel = zeros_of(problem, config.block_n, section, sms, own_tiles=True)
    tiles = n_blocks * problem.kv_heads * problem.batch
    sizes = {"blocks": n_blocks, "tiles": tiles, "heads_per_section": section}
    sizes |= {"first_block": n_block_range.start, **split.sizes(tiles, problem.varlen)}
    # At most a CTA an SM. Of packed sequences, whose tiles are counted on the GPU, perhaps fewer have work.
    grid = min(sms, tiles + split.partials), 1, 1
    return Schedule((GradientLaunch(grid, (config.block_m, config.block_n), sizes),), split, in_kernel)


def _section(
    config: OneCtaConfig, problem: AttentionProblem, n_blocks: range, sms: int, ranges: QueryRanges | None
) -> int:
    if by_model(problem):
        steps = steps_of(problem, config.block_m, config.block_n, ranges)
        return fastest_section(problem, steps[n_blocks.start : n_blocks.stop], sms, config.heads_first)
    if config.in_order:
        from flashlane.kernels.hopper.backward.one_cta.tiles import step_of
        from flashlane.kernels.hopper.backward.ordered_tiles import ordered_section

        return ordered_section(problem, config.block_m, config.block_n, sms, step_of(problem, config.block_m))
    return heads_per_section(problem)
