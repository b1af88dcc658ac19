"""How the 2-CTA backward is launched: persistent clusters on every two SMs, which take tiles."""

from __future__ import annotations

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import CHUNK
from flashlane.kernels.hopper.backward.design_cost import CLUSTER, mean_columns
from flashlane.kernels.hopper.backward.head_swizzle import (
    by_model,
    fastest_section,
    steps_of,
    two_cta_heads_per_section,
)
from flashlane.kernels.hopper.backward.in_kernel_zeros import zeros_of
from flashlane.kernels.hopper.backward.launch import GradientLaunch, Schedule
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import OWN_LAUNCHES
from flashlane.kernels.hopper.backward.seen_keys import tiles_of
from flashlane.kernels.hopper.backward.split_q import WHOLE_TILES, order_of, split_of
from flashlane.kernels.hopper.backward.two_cta.config import CTAS, TwoCtaConfig, refusal


def schedule(
    config: TwoCtaConfig, problem: AttentionProblem, sms: int, *, total: tuple[int, int] | None = None
) -> Schedule:
    """The launch of a problem on a GPU of ``sms`` SMs.

    Args:
        config: the tile.
        problem: the attention problem.
        sms: SMs of the GPU.
        total: queries and keys of all packed sequences.

    Raises:
        NotImplementedError: :func:`~flashlane.kernels.hopper.backward.two_cta.config.refusal` gives a reason.
    """
    reason = refusal(problem)
    if reason is not None:
        raise NotImplementedError(f"the 2-CTA backward cannot run {problem.describe()}: {reason}")
    n_block_range = tiles_of(problem, config)
    n_blocks = len(n_block_range)
    tiles = n_blocks * problem.kv_heads * problem.batch
    split = split_of(problem, config, sms // CTAS, total=total) if config.split_q else WHOLE_TILES
    section = config.heads_per_section
    if split.splits > 1 and not problem.varlen:
        section = order_of(problem, config, sms // CTAS).heads_per_section
    # Under a window, clusters ended as early with the heads one after the other (notebook 0026).
    if not section and problem.has_right_only and by_model(problem):
        steps = steps_of(problem, config.block_m, config.block_n)
        section = fastest_section(problem, steps, sms // CTAS, config.heads_first)
    if not section and config.in_order:
        from flashlane.kernels.hopper.backward.ordered_tiles import ordered_section

        step = CLUSTER.column * mean_columns(problem)
        section = ordered_section(problem, config.block_m, config.block_n, sms // CTAS, step)
    section = section or two_cta_heads_per_section(problem)
    sizes = {"blocks": n_blocks, "first_block": n_block_range.start, "tiles": tiles, "heads_per_section": section}
    sizes |= split.sizes(tiles, problem.varlen)
    grid = CTAS * min(tiles + split.partials, sms // CTAS), 1, 1
    # Each CTA loads half of the rows of Q and dO.
    zeros = OWN_LAUNCHES
    if config.in_kernel_zeros:
        zeros = zeros_of(problem, config.block_n, section, sms // CTAS, own_tiles=False)
    return Schedule((GradientLaunch(grid, (config.block_m // CTAS, CHUNK), sizes),), split, zeros)
