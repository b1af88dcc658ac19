"""Count shared-memory bank conflicts of ldmatrix with Nsight Compute, on a GPU: plain, padded and swizzled tiles.

    PYTHONPATH=src python3 benchmarks/scripts/ncu_conflicts.py --out benchmarks [--tags \
        split-q+acc-f32,split-kv+acc-f32]

One launch each of a family with the same tile shape in three layouts, checked first, then counted by ncu with the
clocks left alone. The registered kernels are padded or swizzled; the plain layout, rows as they are in device memory,
is compiled here from the same template to be compared with. Writes ncu_conflicts.json. Exit status 1 when an output
is wrong or a swizzled kernel has conflicts, 2 when ncu cannot count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from gpu_run import device_or_exit, ncu_or_exit

from flashlane import bench
from flashlane.bench.measure.check import Oracle
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import check_writable, write_atomically
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, arch_of
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.mma.attention import MmaAttention
from flashlane.kernels.mma.config import MmaConfig
from flashlane.kernels.tile_layout import PlainLayout
from flashlane.profile.ncu import read_csv as read_launches
from flashlane.profile.ncu import run_ncu

FORMAT = "flashlane-ncu-conflicts/1"
FAMILIES = "split-q+acc-f32,split-kv+acc-f32"
STAGE = "stage1"
HEAD_DIMS = (64, 128)
SHAPE = (1, 8, 2048)
"""Batch, heads and queries."""
CONFLICTS = "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"
CYCLES = "sm__cycles_elapsed.max"
TENSOR_INSTRUCTIONS = "sm__inst_executed_pipe_tensor_op_hmma.sum"
TENSOR_ACTIVE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
LDSM = "smsp__sass_inst_executed_op_ldsm.sum"
SHARED_ACTIVE = "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed"
COPY_CONFLICTS = "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts.sum"
NEEDED = (CONFLICTS, CYCLES)
WANTED = (LDSM, TENSOR_INSTRUCTIONS, TENSOR_ACTIVE, SHARED_ACTIVE, COPY_CONFLICTS)
"""Counted where this chip and this ncu know them."""


@dataclass(frozen=True)
class PlainConfig(MmaConfig):
    """A configuration whose tiles are neither padded nor swizzled."""

    @property
    def layouts(self) -> dict[str, PlainLayout]:
        return {name: PlainLayout(layout.columns) for name, layout in super().layouts.items()}


class PlainAttention(MmaAttention):
    """The template on plain tiles; not registered, as it is slow on purpose."""

    def config(self, problem: AttentionProblem) -> PlainConfig:
        found = super().config(problem)
        return PlainConfig(**{field.name: getattr(found, field.name) for field in fields(found)})

    def kernel_source(self, config: MmaConfig) -> KernelSource:
        return plain_source(super().kernel_source(config))


def plain_source(source: KernelSource) -> KernelSource:
    """The template with a ``swizzle.cuh`` that does not pad its rows.

    Raises:
        ValueError: the header no longer has what is replaced.
    """
    text, padded = header("swizzle.cuh"), "(SWIZZLED ? COLUMNS : COLUMNS + CHUNK)"
    if text.count(padded) != 1:
        raise ValueError(f"swizzle.cuh has {padded!r} {text.count(padded)} times; it must be once")
    plain = ("swizzle.cuh", text.replace(padded, "COLUMNS"))
    return replace(source, name=f"{source.name}, plain tiles", headers=(*source.headers, plain))


def header(name: str) -> str:
    """The text of a device header."""
    return device_code(f"cuda/{name}")


@dataclass
class Count:
    """One launch."""

    head_dim: int
    layout: str
    """``plain``, ``padded`` or ``swizzled``."""
    tag: str
    config: str
    shared_bytes: int
    registers: int
    metrics: dict[str, float]


def kernels(families: Sequence[str]) -> Iterator[tuple[str, MmaAttention]]:
    """(layout, kernel) of each family; padded and plain share the tag without a swizzle."""
    for family in families:
        padded = registry.get(f"mma({family}+{STAGE})")
        yield "plain", PlainAttention(padded.variant)
        yield "padded", padded
        yield "swizzled", registry.get(f"mma({family}+swizzle-qkv+{STAGE})")


def launches(families: Sequence[str], arch: str) -> Iterator[tuple[str, MmaAttention, AttentionProblem]]:
    """(layout, kernel, problem) in the order in which they are launched."""
    for head_dim in HEAD_DIMS:
        problem = bench.make_problem(*SHAPE, head_dim, arch=arch)
        for layout, kernel in kernels(families):
            yield layout, kernel, problem


def launch_all(families: Sequence[str], check: bool) -> list[str]:
    """Launch each kernel once; what the check says of each that is wrong."""
    device = torch.device("cuda", torch.cuda.current_device())
    wrong = []
    for layout, kernel, problem in launches(families, arch_of(device)):
        inputs = bench.random_inputs(problem, device, seed=problem.head_dim)
        out = torch.full_like(inputs.q, torch.nan)
        lse = torch.full((problem.batch, problem.heads, problem.seqlen_q), torch.nan, device=device)
        kernel.forward(problem, inputs, out, lse)
        torch.cuda.synchronize()
        if check:
            verdict = Oracle(problem, inputs).judge(out, lse, kernel.low_precision_reference(problem))
            wrong += [] if verdict.ok else [f"{layout} {kernel.tag} D{problem.head_dim}: {verdict.message}"]
    return wrong


def profile(ncu: str, families: str) -> list[dict[str, float]]:
    """The counters of each launch, in order.

    Raises:
        RuntimeError: ncu could not count; the message has what it said.
    """
    extra = ["--kernel-name", "regex:mma_attention"]
    target = [sys.executable, __file__, "--inside", "--tags", families]
    for metrics in ((*NEEDED, *WANTED), NEEDED):
        try:
            counted = [dict(launch.metrics) for launch in run_ncu(ncu, target, metrics, extra)]
        except RuntimeError as error:
            message = str(error)
        else:
            if all(name in row for row in counted for name in NEEDED):
                return counted
            message = "a counter that is needed is not known here"
        print(message, file=sys.stderr, flush=True)
    raise RuntimeError(message)


def read_csv(text: str) -> list[dict[str, float]]:
    """The numbers of ``ncu --csv --page raw``, one mapping a launch."""
    return [dict(launch.metrics) for launch in read_launches(text)]


def table(counts: Sequence[Count]) -> Iterator[str]:
    """One line a launch."""
    head = (
        f"{'D':>4} {'layout':<9}{'conflicts':>11}{'ldmatrix':>10}{'each':>6}{'cycles':>10}{'HMMA':>10}{'tensor %':>9}"
    )
    yield head + f"{'shared %':>9}{'KiB':>7}  tag"
    for c in counts:
        m = c.metrics
        each = m[CONFLICTS] / m[LDSM] if m.get(LDSM) else None
        yield (
            f"{c.head_dim:>4} {c.layout:<9}{m[CONFLICTS]:>11.0f}{shown(m.get(LDSM)):>10}{shown(each, 2):>6}"
            f"{m[CYCLES]:>10.0f}{shown(m.get(TENSOR_INSTRUCTIONS)):>10}{shown(m.get(TENSOR_ACTIVE), 1):>9}"
            f"{shown(m.get(SHARED_ACTIVE), 1):>9}{c.shared_bytes / 1024:>7.1f}  {c.tag}"
        )


def shown(number: float | None, digits: int = 0) -> str:
    return "–" if number is None else f"{number:.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of ncu_conflicts.json")
    parser.add_argument("--tags", default=FAMILIES, help="tags without swizzle and stage, in a list")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = device_or_exit()
    families = [word for word in arguments.tags.split(",") if word]
    if arguments.inside:
        launch_all(families, check=False)
        return 0
    ncu = ncu_or_exit()
    check_writable(arguments.out)
    wrong = launch_all(families, check=True)  # and compiles everything outside the tool
    print("checked; counting", file=sys.stderr, flush=True)
    order = list(launches(families, arch_of(device)))
    try:
        counted = profile(ncu, arguments.tags)
        if len(counted) != len(order):
            raise RuntimeError(f"ncu counted {len(counted)} launches of {len(order)}")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    counts = []
    for (layout, kernel, problem), metrics in zip(order, counted, strict=True):
        config = kernel.config(problem)
        registers = kernel.compile(config, problem.arch).report.registers
        counts.append(
            Count(problem.head_dim, layout, kernel.tag, config.describe(), config.shared_memory, registers, metrics)
        )
    body = {"format": FORMAT, "environment": environment(device), "problem": dict(zip("BHN", SHAPE, strict=True))}
    body |= {"wrong": wrong, "launches": [asdict(count) for count in counts]}
    write_atomically(arguments.out / "ncu_conflicts.json", json.dumps(body, indent=1) + "\n")
    wrong += [f"{c.tag} D{c.head_dim} has conflicts" for c in counts if c.layout == "swizzled" and c.metrics[CONFLICTS]]
    print(*wrong, *table(counts), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
