"""Tiles of the one-CTA backward as data: which configuration a head dim and a mask get."""

from __future__ import annotations

from dataclasses import replace

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward.design_cost import mean_columns, microseconds_around
from flashlane.kernels.hopper.backward.head_swizzle import heads_per_section, steps_of
from flashlane.kernels.hopper.backward.in_kernel_zeros import zeros_are_worth_it, zeros_of
from flashlane.kernels.hopper.backward.one_cta.config import IN_DS, Dq, OneCtaConfig, PingPong
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import in_kernel_dq_of, worth_it
from flashlane.kernels.hopper.backward.seen_keys import seen_n_blocks
from flashlane.kernels.hopper.backward.split_q import ways_of
from flashlane.kernels.memory_rate import on_sector
from flashlane.kernels.score import ScoreConfig

SHORT_SEQUENCES = 1024
"""Typical length of packed sequences up to which causal tiles above head dim 96 have steps of 64 queries and one stage
of K, next to steps of 80: 1.03 times as fast in the mean of 36 problems of up to 1200 queries, 0.97 to 1.24 (notebook
0040). It is measured, as the host knows no lengths but the longest, from which steps cannot be counted."""
FEW_STEPS = 2048
"""Queries that see a tile under a mask, of all heads of its group, up to which what is between tiles counts most. Up to
it the tile of few steps was 1.02 to 1.06 times as fast at D 72 to 96 in five causal problems (notebook 0024,
benchmarks/archive/backward_main_loop.json). Above it, at D 104 to 128, dense causal problems keep another rule: of 12
that were timed and whose tile the predicted time would change, 7 are slower with that one, by up to 4 %
(benchmarks/archive/backward_few_steps.json). Windows were not timed with both."""
WITHOUT_PING_PONG = range(113, 121)
"""Head dims whose steps of 80 queries are 1 % faster without ping-pong; with 104 and 112 they are not."""
WINDOW_STEP = (28, 12)
"""What a step under a window takes besides its queries, in queries, of head dims above 96 and above 120: steps of 64
queries, without ping-pong scheduling, next to steps of 80 (notebook 0040)."""
IDLE_WARPS_REACH = 512
"""Queries that see a tile under a window from which on its steps take as long as two idle warps take for 128 rows of
dQ: with 384 a launch of their own is 1.02 to 1.11 times as fast, with 428 and 488 1.01 to 1.08 at D 96 and 128, with
639 it is 0.97 to 1.01 (notebooks 0037 and 0053)."""
IDLE_WARPS_BLOCKS = (0.0258, 0.0205)
"""The same without a window: n-blocks that an m-block sees in the mean, if it sees any, for each column of a head; and
these times the part of a launch's tiles whose zeros idle warps write. Of fewer of either a launch of their own is 0.99
to 1.09 times as fast, of more 0.92 to 1.00, and 1.03 in one problem of 30 (notebooks 0053 and 0054)."""
NARROW_ROWS = ((128, 112, 96), (96,), (96,))
"""Queries of a step of head dims up to 64, by the registers that score modifiers take."""
NARROW_PING_PONG: dict[int, PingPong] = {128: "until_complete", 112: "off", 96: "until_issued"}
"""Ping-pong of these steps under a causal mask. Of 13 problems all were slower with steps of 112 and ping-pong
until products are complete than without, by 4 % in the mean; with steps of 128 all were faster (notebook 0016)."""
OWN_LOOPS_ROWS = 128
"""Queries of these steps with which two loops were faster without a mask: by 2 to 7 % in six problems, and slower with
112 in both (notebook 0024). With packed sequences under any mask and with any of these rows (notebook 0040)."""
OWN_LOOPS_REACH = 1000
"""Queries that see a tile under a window, of all heads of its group, from which on two loops were faster: by up to 8 %
in 13 problems, and with fewer slower by up to 1.5 % in seven (notebook 0040)."""
NARROW_STEP, WIDE_STEP = 20, 20
"""What a step takes besides its queries, in queries, of head dims up to 64 and above (notebook 0016)."""
ORDERED_STEP = 12
"""The same above head dim 96 with additions in order, of steps of 64 queries next to steps of 80: the choice among
both loses 0.4 % in the mean of 22 problems, and 4.4 % at worst (notebook 0065)."""
STEP_MICROSECONDS = 2.23e-4
"""Of a step of 64 queries above head dim 64, for each column of a head and each query, :data:`WIDE_STEP` more of them
(notebook 0037)."""
PEELED_STEP = (0.94, 0.99)
"""The same with 80 queries and a peeled first step, as a part of one of 64 queries with idle warps, which skips hidden
keys under a mask: without a mask and with one (notebook 0054)."""
REGISTER_STEP = 1.03
"""What a step of 64 queries takes whose dQ is added from registers, with no idle warps, next to a peeled one of 80 for
as many queries (notebook 0054)."""
PEELED_TILE = 30
"""What a tile of peeled steps takes besides them next to a tile of those, in queries; it waits for its keys."""
ENDS_OF_A_LAUNCH, LEAST_ROUNDS = 0.15, 2.5
"""What a launch of peeled steps takes longer at both ends, in tiles, if it has two rounds of tiles; and rounds from
which on that was timed."""
TWO_ROUNDS = 1.75
"""Rounds of tiles from which on a launch has about two: of 1.2 to 1.6, 64 queries lost up to 5 % (notebook 0054)."""
SAVED_BY_IDLE_WARPS = 0.35
"""Part of the time of the preprocess and the postprocess kernel that idle warps save, where they write all zeros
(notebook 0054)."""
MAX_REGISTER_ATOMICS = 96
"""Head dims up to which consumers have registers to spare for the time that the atomics to dq_accum take."""
MAX_SMALL_REGISTER_ATOMICS = 120
"""The same with 64 queries a step under a window: shared memory then has room for dK and dV (notebook 0025). Without a
window they were faster at any head dim (notebook 0054)."""
MEDIUM_PEELED_STEP, PADDING = (0.97, 1.006), 0.4
"""Of head dims 72 to 96: what a step of 96 queries takes as a part of one of 64 with idle warps, for as many queries
with :data:`WIDE_STEP`, without a mask and with one; and the part of the time of padded products that it takes longer.
These and the next three fit 210 timed problems (notebook 0055)."""
MEDIUM_PEELED_TILE = 35
"""What a tile of these steps takes besides them next to a tile of 64 queries a step, in queries."""
MEDIUM_REGISTER_STEP = 0.986
"""What a step of 64 queries takes with no idle warps, next to one with them."""
MEDIUM_SAVED = (0.45, 0.22)
"""Part of the time of the preprocess and the postprocess kernel that idle warps save, where they write all zeros: of
rows of dQ that do not start on a sector, and of others."""


def pick(problem: AttentionProblem) -> OneCtaConfig:
    """The table's configuration of a problem."""
    largest = max(problem.head_dim, problem.head_dim_v)
    wide = largest > 64
    atomics = largest <= MAX_REGISTER_ATOMICS and not problem.deterministic
    # Score modifiers take registers that a tile of fewer queries has.
    extras = registers_of_score(problem)
    masked = is_masked(problem)
    block_m = (64, 64, 48)[extras] if wide else (128, 96, 96)[extras]
    dq: Dq = "register_atomics" if atomics else "ordered_tma_reduce_add" if problem.deterministic else "tma_reduce_add"
    tile = OneCtaConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, block_m, dq=dq)
    if problem.deterministic:
        tile = replace(tile, dq_stages=1 if wide else 2) if extras else tile_in_order(problem, tile)
    elif not wide:  # there is room for the next tile's keys
        block_m = least_work(problem, tile, NARROW_ROWS[extras], NARROW_STEP)
        # Packed sequences and windows were slower with it in all 9 problems (notebook 0021).
        causal = problem.has_right_only and not problem.varlen and not extras
        ping_pong: PingPong = NARROW_PING_PONG[block_m] if causal else "until_complete" if extras and masked else "off"
        alike = block_m == OWN_LOOPS_ROWS and (not masked or (problem.window_left >= 0 and many_rows(problem)))
        own_loops = (problem.varlen or alike) and not extras
        tile = replace(tile, block_m=block_m, k_stages=2, v_stages=2, ping_pong=ping_pong, own_loops=own_loops)
    elif largest > MAX_REGISTER_ATOMICS and not extras:
        tile = wide_tile(problem, tile)
    elif not extras:
        tile = middle_tile(problem, tile)
    return finished(problem, tile)


def tile_in_order(problem: AttentionProblem, tile: OneCtaConfig) -> OneCtaConfig:
    """The tile of additions in order, without score modifiers (notebook 0065).

    Up to head dim 64 and above 96 dQ waits in shared memory until it may be added. In between it waits in registers, so
    that there is room for the keys of two tiles; packed sequences, whose tiles are short, have a first step without dQ.
    """
    largest, staged = max(problem.head_dim, problem.head_dim_v), replace(tile, tma_stores=True)
    if largest <= 64:
        return replace(staged, own_loops=True)
    if largest <= MAX_REGISTER_ATOMICS:
        tile = replace(staged, block_m=64, dq="ordered_register_atomics", ping_pong="until_issued")
        return replace(tile, peeled=True) if problem.varlen else replace(tile, k_stages=2)
    if least_work(problem, tile, (80, 64), ORDERED_STEP) == 80:
        return replace(tile, block_m=80, ping_pong="until_issued")
    return replace(staged, block_m=64, ping_pong="off")


def finished(problem: AttentionProblem, tile: OneCtaConfig) -> OneCtaConfig:
    """A tile with the stores of dK and dV, zeros of dq_accum, splits and features that the problem gets with it."""
    wide, masked = max(problem.head_dim, problem.head_dim_v) > 64, is_masked(problem)
    # With score modifiers TMA stores were not timed (notebook 0025), and tiles of additions in order have them.
    if not (problem.deterministic or registers_of_score(problem)):
        staged = replace(tile, tma_stores=True)
        if problem.varlen or (wide and problem.window_left >= 0 and tile.k_stages == 1):
            tile = replace(staged, peeled=tile.k_stages == 1)
        elif staged.staging in IN_DS or ((tile.k_stages > 1 or not wide) and staged.stores_by_tma):
            tile = replace(staged, peeled=staged.staging in IN_DS)
    if tile.staging in ("ds_and_dq", "dq_and_ds"):
        section = heads_per_section(problem)
        zeros = zeros_of(problem, tile.block_n, section, SMS, own_tiles=True)
        worth = zeros_are_worth_it(problem, zeros, tile.block_m, tile.block_n, 1)
        tile = replace(tile, in_kernel_zeros=worth)
    # Of 52 problems those with these tiles were faster, and others slower (notebook 0027); of packed ones 37 of
    # 41 (notebook 0071).
    few_queries = wide and tile.block_m == 64 and tile.k_stages > 1 and tile.ping_pong == "until_issued"
    tile = replace(tile, skips_hidden=few_queries and masked and not problem.deterministic)
    tile = tile.specialised(problem)
    return replace(tile, **ways_of(problem, tile, SMS))


def is_masked(problem: AttentionProblem) -> bool:
    """Whether a causal mask or a window hides keys."""
    return problem.window_left >= 0 or problem.window_right >= 0


def registers_of_score(problem: AttentionProblem) -> int:
    """Registers that score modifiers take for each score; above head dim 64 a derivative takes as many as two."""
    score = ScoreConfig.of(problem)
    return 2 if score.has_derivative and max(problem.head_dim, problem.head_dim_v) > 64 else score.registers_per_score


def wide_tile(problem: AttentionProblem, tile: OneCtaConfig) -> OneCtaConfig:
    """The tile of head dims above 96 without score modifiers; without a mask, the one with less predicted time."""
    if not problem.varlen and (few_steps(problem) or not is_masked(problem)):
        few = tile_of_few_steps(problem, tile)
        # Without idle warps, windows had tiles as fast or faster in five problems of five (notebook 0040).
        slower = few.dq == "tma_reduce_add" if problem.window_left >= 0 else long_steps_are_faster(problem, few)
        if not slower:
            return few
    return long_tile(problem, tile)


def long_tile(problem: AttentionProblem, tile: OneCtaConfig) -> OneCtaConfig:
    """The tile of head dims above 96 with one stage of K, for many steps."""
    largest, window = max(problem.head_dim, problem.head_dim_v), problem.window_left >= 0
    rows = 80
    if window:
        rows = least_work(problem, tile, (80, 64), WINDOW_STEP[largest >= WITHOUT_PING_PONG.stop])
    elif problem.varlen and problem.has_right_only and typical_length(problem) <= SHORT_SEQUENCES:
        rows = 64
    elif not problem.varlen and problem.has_right_only and not few_steps(problem):
        rows, few = least_work(problem, tile, (80, 64), WIDE_STEP), tile_of_few_steps(problem, tile)
        # Faster than with one stage of K (notebook 0043); of more queries than keys it was not timed.
        if rows == 64 and few.postprocess == "idle_warps" and problem.seqlen_q <= problem.seqlen_k:
            return few
    if rows == 80:
        return replace(tile, block_m=80, ping_pong="off" if largest in WITHOUT_PING_PONG else "until_complete")
    return replace(tile, block_m=64, ping_pong="off" if window or problem.varlen else "until_issued")


def tile_of_few_steps(problem: AttentionProblem, tile: OneCtaConfig) -> OneCtaConfig:
    """The tile of head dims above 96 for few steps, with room for the keys of two tiles."""
    window, largest = problem.window_left >= 0, max(problem.head_dim, problem.head_dim_v)
    if not window or (problem.has_right_only and largest <= MAX_SMALL_REGISTER_ATOMICS):
        tile = replace(tile, dq="register_atomics")
    return idle_warps_where_worth_it(problem, replace(tile, block_m=64, k_stages=2, ping_pong="until_issued"))


def long_steps_are_faster(problem: AttentionProblem, few: OneCtaConfig) -> bool:
    """Whether steps of 80 queries, the first one peeled, are predicted to take less time than the tile of few steps.

    Both take steps, and what the launches before and after them move, of which idle warps save a part; without these,
    peeled steps take longer between tiles and at the ends of a launch. So it is asked of few queries that many keys
    see, which have long tiles, and of a last step that is nearly empty.
    """
    steps = {block_m: step_microseconds(problem, block_m, few.block_n) for block_m in (64, 80)}
    if few.postprocess != "idle_warps":
        tiles = -(-problem.seqlen_k // few.block_n)
        rounds = tiles * problem.kv_heads * problem.batch / SMS
        ends = ENDS_OF_A_LAUNCH / max(LEAST_ROUNDS, rounds) if rounds > TWO_ROUNDS else 0.0
        return steps[80] + microseconds_of(problem, PEELED_TILE * tiles) < (REGISTER_STEP - ends) * steps[64]
    saved = SAVED_BY_IDLE_WARPS * in_kernel_part(problem, few) * microseconds_around(problem)
    return PEELED_STEP[problem.has_right_only] * steps[80] < steps[64] - saved


def microseconds_of(problem: AttentionProblem, queries: float) -> float:
    """Microseconds of steps of so many queries, those of a key/value head, in all heads of a launch."""
    return STEP_MICROSECONDS * mean_columns(problem) * queries * problem.kv_heads * problem.batch / SMS


def step_of(problem: AttentionProblem, block_m: int) -> float:
    """Microseconds of a step of so many queries."""
    return STEP_MICROSECONDS * mean_columns(problem) * (block_m + WIDE_STEP)


def step_microseconds(problem: AttentionProblem, block_m: int, block_n: int) -> float:
    """Microseconds of all steps of a launch, with what each takes besides its queries."""
    return microseconds_of(problem, sum(steps_of(problem, block_m, block_n)) * (block_m + WIDE_STEP))


def in_kernel_part(problem: AttentionProblem, tile: OneCtaConfig) -> float:
    """The part of a launch's tiles whose zeros idle warps write."""
    section = heads_per_section(problem)
    return in_kernel_dq_of(problem, tile.block_n, section, SMS).zeroed_part


def middle_tile(problem: AttentionProblem, tile: OneCtaConfig) -> OneCtaConfig:
    """The tile of head dims 72 to 96 without score modifiers."""
    small = replace(tile, block_m=64, k_stages=2, ping_pong="until_issued")
    if problem.varlen:
        return small  # than steps of 96 it was faster in 61 of 65 problems, and slower by up to 4 % (notebook 0071)
    if problem.window_left >= 0:  # faster however many queries see a tile (notebook 0043)
        return idle_warps_where_worth_it(problem, small)
    return fastest_middle_tile(problem, replace(tile, block_m=96), small)


def fastest_middle_tile(problem: AttentionProblem, large: OneCtaConfig, small: OneCtaConfig) -> OneCtaConfig:
    """The one of three tiles that is predicted to take least time (notebook 0055).

    Args:
        problem: of dense tensors without a window, and head dims 72 to 96.
        large: of 96 queries a step, the first one peeled.
        small: of 64 queries a step, with room for the keys of two tiles; dQ by idle warps is the third one.
    """
    largest = max(problem.head_dim, problem.head_dim_v)
    around, steps = microseconds_around(problem), step_microseconds(problem, small.block_m, small.block_n)
    # Products of dQ transposed have rows of zeros for the columns that 128 has more.
    padded = MEDIUM_PEELED_STEP[problem.has_right_only] * (1 + PADDING * (128 - largest) / (5 * largest))
    tiles = -(-problem.seqlen_k // large.block_n)
    times = {
        large: padded * step_microseconds(problem, large.block_m, large.block_n)
        + microseconds_of(problem, MEDIUM_PEELED_TILE * tiles)
        + around,
        small: MEDIUM_REGISTER_STEP * steps + around,
    }
    idle = idle_warps_where_worth_it(problem, small)
    if idle.postprocess == "idle_warps":
        saved = MEDIUM_SAVED[on_sector(problem.dtype, problem.head_dim)] * in_kernel_part(problem, small)
        times[idle] = steps + (1 - saved) * around
    return min(times, key=times.__getitem__)


def idle_warps_where_worth_it(problem: AttentionProblem, tile: OneCtaConfig) -> OneCtaConfig:
    """A tile of few steps, with dQ by idle warps of the launch where these have the time for it.

    They need steps that take as long as their work, and tiles of all n-blocks: more than half of these are then seen.
    """
    n_blocks = -(-problem.seqlen_k // tile.block_n)
    if problem.window_left >= 0:
        few = tile.block_n + problem.window_left + max(0, problem.window_right) < IDLE_WARPS_REACH
    else:
        hidden = max(0, -problem.shift - problem.window_right) if problem.has_right_only else 0  # queries, of any key
        m_blocks = (-(-problem.seqlen_q // tile.block_m) - hidden // tile.block_m) * problem.group
        least, least_of_part = (each * max(problem.head_dim, problem.head_dim_v) for each in IDLE_WARPS_BLOCKS)
        seen = sum(steps_of(problem, tile.block_m, tile.block_n))
        few = seen < least * m_blocks or seen * in_kernel_part(problem, tile) < least_of_part * m_blocks
    if few or 2 * len(seen_n_blocks(problem, tile.block_n, tile.block_m)) < n_blocks:
        return replace(tile, dq="register_atomics")
    if worth_it(problem, tile.block_n, heads_per_section(problem), SMS):
        return replace(tile, dq="register_atomics", postprocess="idle_warps")
    return tile


def least_work(problem: AttentionProblem, tile: OneCtaConfig, rows: tuple[int, ...], step: int) -> int:
    """Queries of a step with which the steps of all tiles take least; the first of equals.

    Args:
        problem: the attention problem.
        tile: the tile, for its keys.
        rows: that are compared.
        step: what a step takes besides its queries, in queries.
    """
    if problem.varlen and problem.window_left < 0:
        if not problem.has_right_only:
            return rows[0]
        # Most sequences are shorter than the longest.
        half = problem.seqlen_q // 2, problem.seqlen_k // 2
        problem = replace(problem, varlen=False, seqlen_q=half[0], seqlen_k=half[1])
    elif problem.varlen:
        problem = replace(problem, varlen=False)

    def work(block_m: int) -> int:
        return sum(steps_of(problem, block_m, tile.block_n)) * (block_m + step)

    return min(rows, key=work)


def few_steps(problem: AttentionProblem) -> bool:
    """Whether tiles are so short under a mask that what is between them matters most."""
    queries = reach_of(problem) * problem.group if problem.window_left >= 0 else problem.rows_of_kv_head
    return queries <= FEW_STEPS


def reach_of(problem: AttentionProblem) -> int:
    """Queries of a head that a window lets see a key."""
    return min(problem.seqlen_q, problem.window_left + max(0, problem.window_right))


def many_rows(problem: AttentionProblem) -> bool:
    """Whether so many queries see a tile under a window that two loops are faster up to head dim 64."""
    return reach_of(problem) * problem.group >= OWN_LOOPS_REACH


def typical_length(problem: AttentionProblem) -> float:
    """Length of the packed sequence that a typical tile is of, from the longest, which is all that the host knows.

    Where the logarithm of a length is as likely to be any number, it is the longest times 0.87 of two sequences, and
    times 0.46 of 46: the mean over 1500 drawn batches of each tile's own length is within 3 % of this.
    """
    return problem.seqlen_q / max(1, problem.batch) ** 0.2
