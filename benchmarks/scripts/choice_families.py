"""The families whose choices are timed: which problems each is timed on, its candidates, and a call of each of them.

:data:`FAMILIES` is what ``time_choices.py`` times and the fit of each cost model reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from choice_shapes import (
    BACKWARD_EVEN,
    BACKWARD_KINDS,
    FORWARD_EVEN,
    FORWARD_KINDS,
    MMA_EVEN,
    MMA_KINDS,
    any_shapes,
    decode_shapes,
    even_shapes,
    hopper_shapes,
    hopper_shapes_of_kind,
)
from hopper_shapes import Shape, make

from flashlane import jit
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import KernelSource
from flashlane.kernels.decode import tables
from flashlane.kernels.decode.select import config_of, keys_of, output_tiles, splits_for
from flashlane.kernels.grid_cost import SMS
from flashlane.kernels.hopper.backward.head_swizzle import COMPARED, by_model
from flashlane.kernels.hopper.backward.kernel import KERNEL as HOPPER_BACKWARD
from flashlane.kernels.hopper.backward.kernel import hopper_backward
from flashlane.kernels.hopper.backward.select import DESIGNS
from flashlane.kernels.makespan import section_sizes
from flashlane.kernels.mma.attention import source_of
from flashlane.kernels.mma.cost import COMPARED as MMA_TAGS
from flashlane.kernels.triton import backward_configs as backward_tables
from flashlane.kernels.triton.backward_configs import BackwardConfig, Tile
from flashlane.kernels.triton.forward_configs import TritonConfig, describable, shared_limit

HOPPER = registry.get("hopper(wgmma+tma)")
TRITON = registry.get("triton")
DECODE = registry.get("decode(split-kv)")


@dataclass(frozen=True)
class Candidate:
    """A configuration that is timed."""

    words: str
    """What the results call it."""
    section: int
    """Heads of a section of its tiles; 0 where the order of tiles is no choice."""
    call: Callable[[], object]
    resident: Callable[[], tuple[int, ...]] = tuple
    """CTAs of each kernel that an SM holds, known after a call; empty where nobody asks."""
    variant: tuple[object, ...] = ()
    """What decides the code that Triton compiles, besides the words."""


Calls = tuple[list[Candidate], Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """What is chosen together, and how it is timed."""

    file: str
    """Of the results, without its ending."""
    shapes: Callable[[int, int], list[Shape]]
    """The first so many problems of a seed."""
    candidates: Callable[[Shape, torch.device, bool], Calls]
    """The candidates of a problem, the chosen one first, and what the last call made. Without ``checked`` the calls may
    read numbers that no kernel wrote: such calls compile, and their results are not read."""
    sources: Callable[[AttentionProblem], list[KernelSource]] = lambda problem: []
    """What NVRTC compiles ahead."""
    triton: bool = False
    """Whether calls have Triton compile, which processes do ahead."""
    graphs: bool = False
    """Whether short calls are timed as replays of a CUDA graph, so that the host is not timed."""
    host: bool = False
    """Whether the host's time is measured too, as candidates differ in it."""


def outputs(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """An output of NaN, and an LSE."""
    size = (*inputs.q.shape[:-1], problem.head_dim_v)
    out = torch.full(size, torch.nan, dtype=problem.dtype, device=inputs.q.device)
    *batch, rows, heads, _ = size
    return out, torch.empty(*batch, heads, rows, device=inputs.q.device)


def hopper_configs(problem: AttentionProblem, direction: str) -> list[Any]:
    """The chosen configuration and the others."""
    if direction == "forward":
        return list(dict.fromkeys((HOPPER.config(problem), *HOPPER.candidates(problem))))
    problem = replace(problem, needs_grad=True)
    chosen = HOPPER_BACKWARD.config(problem)
    heads = problem.kv_heads * problem.batch
    sections = section_sizes(heads, 1, COMPARED) if by_model(problem) and chosen.design != "split_dkdv_dq" else ()
    orders = (replace(chosen, heads_per_section=section) for section in sections)
    return list(dict.fromkeys((chosen, *HOPPER_BACKWARD.candidates(problem), *orders)))


DQ_WAYS = (
    ("register_atomics", "own_launch"),
    ("register_atomics", "idle_warps"),
    ("tma_reduce_add", "own_launch"),
)
"""How dQ is added and where it is computed, in the configurations that are timed for windows and packed sequences."""
VARIED_ROWS = {64: (64, 96, 112, 128), 128: (48, 64, 80, 96)}
"""Queries of a step that are timed there, by the head dim up to which they are."""
VARIED_PING_PONG = ("off", "until_issued", "until_complete")
DKDV_AND_DQ_REACH = 1024
"""Keys of a window up to which two kernels, of which neither adds to dQ in device memory, are timed too."""


def masked_configs(problem: AttentionProblem) -> list[Any]:
    """The chosen configuration of the backward and others, for windows and packed sequences."""
    problem = replace(problem, needs_grad=True)
    chosen = HOPPER_BACKWARD.config(problem)
    configs = [chosen]
    window = problem.window_left >= 0
    if window and problem.window_left + max(0, problem.window_right) <= DKDV_AND_DQ_REACH:
        configs.append(DESIGNS["split_dkdv_dq"].pick(problem))
    if chosen.design == "one_cta":
        stages = ((2, 2),) if problem.head_dim <= 64 else ((1, 1), (2, 1))
        rows = VARIED_ROWS[64 if problem.head_dim <= 64 else 128]
        for block_m, (k, v), ping_pong, (dq, postprocess) in itertools.product(rows, stages, VARIED_PING_PONG, DQ_WAYS):
            if problem.varlen and postprocess == "idle_warps":
                continue
            other = replace(
                chosen, block_m=block_m, k_stages=k, v_stages=v, ping_pong=ping_pong, dq=dq, postprocess=postprocess
            )
            if makes_sense(other, problem):
                configs.append(other)
    return list(dict.fromkeys(config.specialised(problem) for config in configs))


def makes_sense(config: Any, problem: AttentionProblem) -> bool:
    """Whether a configuration fits, and is not one of those that lost everywhere (docs/notebook)."""
    narrow, idle = problem.head_dim <= 64, config.postprocess == "idle_warps"
    if config.shared_memory > jit.shared_limit("sm_90a"):
        return False
    if config.block_m == 48 and (problem.varlen or config.k_stages == 1):
        return False
    if config.dq == "tma_reduce_add" and problem.head_dim <= 96:
        return False  # there the atomics have the registers that they need
    if config.dq == "register_atomics" and problem.head_dim > 96 and (config.block_m > 64 or config.k_stages == 1):
        return False
    if idle and (narrow or config.block_m > 64 or config.k_stages == 1):
        return False
    return config.ping_pong != "until_complete" or (narrow or problem.varlen)


def masked_sources(problem: AttentionProblem) -> list[KernelSource]:
    found = [HOPPER.config(problem).source()]
    return found + [source for config in masked_configs(problem) for source in config.sources()]


def hopper_sources(problem: AttentionProblem, direction: str) -> list[KernelSource]:
    """What all candidates are compiled from."""
    if direction == "forward":
        return [config.source() for config in hopper_configs(problem, direction)]
    found = [HOPPER.config(problem).source()]
    return found + [s for c in hopper_configs(problem, direction) for s in c.specialised(problem).sources()]


def hopper_forward_calls(shape: Shape, device: torch.device, checked: bool = True) -> Calls:
    problem, inputs = make(shape, device)
    out, lse = outputs(problem, inputs)
    return [
        Candidate(c.describe(), c.heads_per_section, lambda c=c: HOPPER.run(c, problem, inputs, out, lse))
        for c in hopper_configs(problem, "forward")
    ], lambda: out.float().flatten()


def hopper_backward_calls(
    shape: Shape,
    device: torch.device,
    checked: bool = True,
    configs: Callable[[AttentionProblem], list[Any]] = lambda problem: hopper_configs(problem, "backward"),
) -> Calls:
    problem, inputs = make(shape, device)
    out, lse = outputs(problem, inputs)
    HOPPER.forward(problem, inputs, out, lse)
    do, calls = torch.randn_like(out), []

    def run(config: Any) -> None:
        calls[:] = [hopper_backward(problem, inputs, out, lse, do, config=config)]

    return [
        Candidate(c.describe(), c.heads_per_section, lambda c=c: run(c))
        for c in configs(problem)
    ], lambda: torch.cat([t.float().flatten() for t in (calls[0].q, calls[0].k, calls[0].v)])  # fmt: skip


def mma_configs(problem: AttentionProblem) -> list[tuple[Any, Any]]:
    """Kernel and configuration of each candidate, what ``auto`` takes first."""
    largest = max(problem.head_dim, problem.head_dim_v)
    able = [
        k for k in map(registry.get, MMA_TAGS) if k.supports(problem) is None and k.variant.tiling == (largest > 256)
    ]
    able.sort(key=lambda k: -k.preference(problem))
    found = [(k, k.config(problem)) for k in able[:1]]
    return list(dict.fromkeys(found + [(k, c) for k in able for c in k.candidates(problem)]))


def mma_sources(problem: AttentionProblem) -> list[KernelSource]:
    return [source_of(config) for _, config in mma_configs(problem)]


def loaded(source: KernelSource, problem: AttentionProblem, device: torch.device) -> jit.Function:
    return jit.load(jit.compile(source, problem.arch), device.index)


def mma_calls(shape: Shape, device: torch.device, checked: bool = True) -> Calls:
    problem, inputs = make(shape, device)
    out, lse = outputs(problem, inputs)

    def resident(config: Any) -> int:
        return loaded(source_of(config), problem, device).occupancy(config.threads, config.shared_memory)

    return [
        Candidate(
            f"{k.tag} {c.describe()}",
            0,
            lambda k=k, c=c: k.run(c, problem, inputs, out, lse),
            lambda c=c: (resident(c),),
        )
        for k, c in mma_configs(problem)
    ], lambda: out.float().flatten()


MORE_FORWARD = {
    ("bf16", 64): ((128, 128, 8, 2, True), (128, 64, 4, 3, True)),
    ("bf16", 128): ((128, 128, 8, 2, True), (128, 64, 8, 3, True)),
    ("bf16", 256): ((64, 64, 4, 2, True),),
    ("f32", 64): ((128, 32, 8, 2, False),),
    ("f32", 128): ((64, 64, 8, 2, False), (128, 32, 8, 2, False)),
}
"""Timed besides what the tables have."""
MORE_BACKWARD = {
    ("bf16", 64): (
        (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        (Tile(64, 128, 8, 2), Tile(128, 64, 8, 3)),
        (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    ),
    ("bf16", 128): (
        (Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
        (Tile(64, 128, 8, 2), Tile(128, 64, 8, 2)),
        (Tile(64, 64, 4, 2, True), Tile(128, 32, 8, 3)),
    ),
    ("bf16", 256): ((Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),),
    ("f32", 64): (
        (Tile(32, 64, 4, 1, True), Tile(64, 32, 4, 1)),
        (Tile(32, 128, 8, 1, True), Tile(128, 32, 8, 1)),
        (Tile(64, 64, 8, 1, True), Tile(64, 64, 8, 1)),
    ),
    ("f32", 128): (
        (Tile(16, 64, 4, 1, True), Tile(64, 16, 4, 1)),
        (Tile(32, 64, 8, 1, True), Tile(64, 32, 8, 1)),
    ),
}
"""Tiles of dK and dV, and of dQ, timed besides those of the tables, each kind with the table's other one."""


def forward_configs(problem: AttentionProblem, dtype: str) -> list[TritonConfig]:
    """The chosen configuration, those of the table, and more."""
    more = [TritonConfig(*words) for words in MORE_FORWARD.get((dtype, problem.head_dim), ())]
    found = dict.fromkeys((TRITON.config(problem), *TRITON.candidates(problem), *more))
    limit = shared_limit(problem.arch)
    return [c for c in found if c.shared_memory(problem) <= limit and (not c.descriptors or describable(problem))]


def resident_of(launch: Any) -> int:
    """CTAs of a launch of Triton's that an SM holds."""
    compiled = launch.compiled
    return jit.occupancy(
        "sm_90a", 32 * launch.options["num_warps"], compiled.n_regs, compiled.metadata.shared
    ).ctas  # fmt: skip


def constants_of(*launches: Any) -> tuple[object, ...]:
    """Compile-time arguments of launches."""
    return tuple(value for one in launches if one for name, value in one.arguments.items() if name.isupper())


def triton_forward_calls(shape: Shape, device: torch.device, checked: bool = True) -> Calls:
    from flashlane.kernels.triton.forward import PreparedForward

    problem, inputs = make(shape, device)
    out, lse = outputs(problem, inputs)
    calls = []
    for config in forward_configs(problem, shape.dtype):
        one = PreparedForward(problem, config, inputs, out, lse, TRITON.precision_of(problem))
        variant = (shape.dtype, one.splits > 1, *constants_of(one.forward))
        calls.append(
            Candidate(
                config.describe(), 0, lambda one=one: one(inputs, out, lse),
                lambda one=one: (resident_of(one.forward),), variant,
            )
        )  # fmt: skip
    return calls, lambda: out.float().flatten()


def backward_configs(base: BackwardConfig, problem: AttentionProblem, dtype: str) -> Iterator[BackwardConfig]:
    """The table's configuration, and others that differ from it in one of its tiles."""
    yield base
    more = MORE_BACKWARD.get((dtype, problem.head_dim), ())
    found = [replace(base, key=key) for key, _ in more] + [replace(base, query=query) for _, query in more]
    precision = TRITON.precision_of(problem)
    for config in dict.fromkeys(found):
        if config != base and config.shared_memory(problem, precision) <= shared_limit(problem.arch):
            yield config


def timed_backward_configs(problem: AttentionProblem, dtype: str) -> Iterator[BackwardConfig]:
    """The same of a problem with dense tensors, without any."""
    limit, precision = shared_limit(problem.arch), TRITON.precision_of(problem)
    return backward_configs(backward_tables.pick(problem, precision, problem.aligned, limit), problem, dtype)


def triton_backward_calls(shape: Shape, device: torch.device, checked: bool = True) -> Calls:
    from flashlane.kernels.triton import backward

    problem, inputs = make(shape, device)
    out, lse = outputs(problem, inputs)
    if checked:
        (HOPPER if shape.dtype == "bf16" else TRITON).forward(problem, inputs, out, lse)
    problem = replace(problem, needs_grad=True)
    do, calls, configs = torch.randn_like(out), [], []
    precision = TRITON.precision_of(problem)

    def run(one: Any) -> None:
        calls[:] = [one(inputs, out, lse, do, None)]

    for config in backward_configs(backward.config_of(problem, inputs, do, precision), problem, shape.dtype):
        one = backward.prepare(problem, inputs, out, lse, do, None, False, precision, config)
        variant = (shape.dtype, *(n > 1 for n in one.splits), *constants_of(one.statistics, one.key, one.query))
        configs.append(
            Candidate(
                config.describe(), 0, lambda one=one: run(one),
                lambda one=one: (resident_of(one.key), resident_of(one.query)), variant,
            )
        )  # fmt: skip
    return configs, lambda: torch.cat([t.float().flatten() for t in (calls[0].q, calls[0].k, calls[0].v)])


COLD_BYTES = 128 << 20
"""K and V of all sets that a decode call goes through in turn: no set finds its own in the L2 cache."""
MOST_SETS = 40
FULL_WAVES = (1, 3)
"""Waves of CTAs for whose number of splits each shape of decode is timed."""


def decode_configs(problem: AttentionProblem) -> list[tuple[Any, int | None]]:
    """Configurations and most splits (None with stream-K): the chosen one, every shape of the tables, other splits."""
    chosen = DECODE.config(problem)
    by_rows = [
        by_load for table in (tables.SHAPES, tables.PREFERRED["sm_90a"]) for _, lines in table for _, by_load in lines
    ]
    shapes = {shape for by_load in by_rows for of_load in by_load.values() for shape in of_load}
    tiles = {rows for _, lines in tables.SHAPES for rows, _ in lines}
    tile = min((rows for rows in tiles if rows >= problem.rows_of_kv_head), default=max(tiles))
    shapes |= {shape for limit, _, compared in tables.COMPARED for shape in compared if problem.head_dim <= limit}
    shapes |= {rule.shape for rule in tables.STREAM["sm_90a"] if problem.head_dim <= rule.head_dim}
    shapes = {s for s in shapes if 16 * s.warps_m == tile}
    shapes |= {replace(s, cluster=1) for s in shapes if s.ctas == 1}  # where the rule has clusters, none of them too
    found = [config_of(problem, shape) for shape in sorted(shapes, key=repr)]
    configs = list(dict.fromkeys((chosen, *(c for c in found if c is not None))))
    parts = dict.fromkeys(configs, (0.5, 2.0)) | {chosen: (0.5, 0.75, 1.5, 2.0)}
    others = [(c, n) for c in configs if not c.stream_k for n in other_splits(problem, c, parts[c])]
    return [(c, None if c.stream_k else rule_splits(problem, c)) for c in configs] + others


def rule_splits(problem: AttentionProblem, config: Any) -> int:
    """Splits that the rule gives a configuration on an H200."""
    return splits_for(problem, config, output_tiles(problem, config.rows), SMS["sm_90a"] * config.min_blocks)


def other_splits(problem: AttentionProblem, config: Any, parts: tuple[float, ...]) -> list[int]:
    """Splits over and below what the rule gives, as parts of that, which a configuration can have, and full waves."""
    tiles, held = output_tiles(problem, config.rows), SMS["sm_90a"] * config.min_blocks
    splits = rule_splits(problem, config)
    waves = {waves * held // tiles for waves in FULL_WAVES} if config.cluster == 1 else set()
    found = {max(1, int(splits * part)) for part in parts} | {n for n in waves if n}
    most = min(config.max_splits, -(-keys_of(problem) // (config.step * config.cluster)))
    return [n for n in sorted(found - {splits}) if n <= most]


def decode_calls(shape: Shape, device: torch.device, checked: bool = True) -> Calls:
    problem, inputs = make(shape, device)
    out, lse = outputs(problem, inputs)
    size = 2 * inputs.k.numel() * inputs.k.element_size()
    count = max(1, min(MOST_SETS, -(-COLD_BYTES // size)))
    sets = itertools.cycle([inputs, *(make(shape, device)[1] for _ in range(count - 1))])

    def call(config: Any, splits: int | None) -> None:
        DECODE.run(config, problem, next(sets), out, lse, splits)

    return [
        Candidate(
            c.describe() + (f", at most {n} splits" if n else ""), 0, lambda c=c, n=n: call(c, n),
            lambda c=c: (loaded(DECODE.kernel_source(c), problem, device).occupancy(c.threads, c.shared_memory),),
        )
        for c, n in decode_configs(problem)
    ], lambda: out.float().flatten()  # fmt: skip


FAMILIES = {
    "hopper_forward": Family(
        "choices_forward",
        lambda seed, count: hopper_shapes(seed, count, 2.5e12),
        hopper_forward_calls,
        lambda problem: hopper_sources(problem, "forward"),
    ),
    "hopper_forward_unaligned": Family(
        "choices_forward_unaligned",
        lambda seed, count: hopper_shapes(seed, count, 2.5e12, unaligned=True),
        hopper_forward_calls,
        lambda problem: hopper_sources(problem, "forward"),
    ),
    "hopper_backward": Family(
        "choices_backward",
        lambda seed, count: hopper_shapes(seed, count, 1.0e12),
        hopper_backward_calls,
        lambda problem: hopper_sources(problem, "backward"),
    ),
    "hopper_backward_window": Family(
        "choices_backward_window",
        lambda seed, count: hopper_shapes_of_kind("window", seed, count, 5e11, (128, 96, 64, 128, 192)),
        lambda shape, device, checked: hopper_backward_calls(shape, device, checked, masked_configs),
        masked_sources,
    ),
    "hopper_backward_packed": Family(
        "choices_backward_packed",
        lambda seed, count: hopper_shapes_of_kind("packed", seed, count, 5e11, (128, 64, 128, 96)),
        lambda shape, device, checked: hopper_backward_calls(shape, device, checked, masked_configs),
        masked_sources,
    ),
    "mma": Family(
        "choices_mma",
        lambda seed, count: any_shapes("mma", seed, count, MMA_KINDS),
        mma_calls,
        mma_sources,
        graphs=True,
    ),
    "decode": Family(
        "choices_decode",
        decode_shapes,
        decode_calls,
        lambda problem: [DECODE.kernel_source(config) for config, _ in decode_configs(problem)],
        graphs=True,
    ),
    "triton_forward": Family(
        "choices_triton_forward",
        lambda seed, count: any_shapes("triton forward", seed, count, FORWARD_KINDS),
        triton_forward_calls,
        triton=True,
        graphs=True,
        host=True,
    ),
    "triton_backward": Family(
        "choices_triton_backward",
        lambda seed, count: any_shapes("triton backward", seed, count, BACKWARD_KINDS),
        triton_backward_calls,
        lambda problem: [HOPPER.config(problem).source()] if problem.dtype == torch.bfloat16 else [],
        triton=True,
        graphs=True,
    ),
}
FAMILIES |= {
    f"{name}_even": replace(
        FAMILIES[name],
        file=f"choices_{name}_even",
        shapes=lambda seed, count, name=name, kinds=kinds: even_shapes(name, seed, count, kinds),
    )
    for name, kinds in {"mma": MMA_EVEN, "triton_forward": FORWARD_EVEN, "triton_backward": BACKWARD_EVEN}.items()
}
"""By name."""
