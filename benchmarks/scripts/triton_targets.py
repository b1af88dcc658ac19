"""Set the Triton kernels against their targets on a GPU: FlexAttention compiled in bf16, SDPA efficient in f32.

    PYTHONPATH=src python3 benchmarks/scripts/triton_targets.py --out benchmarks [--only d64,causal] [--directions \
        forward,both]

The kernel is named (``triton``), and its backward is Triton's too, where ``auto`` might take a faster family's. It is
checked, and timed interleaved with the peers under both protocols; a ratio is a peer's median over ours, and a target
is met under both. Writes triton_targets.json, again after each problem. Exit status 1 when a check fails; a missed
target is a result, not a failure.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from gpu_run import STEADY, device_or_exit, options, run_and_keep, settings_for

from flashlane import bench
from flashlane.bench.measure.flops import DIRECTIONS, Direction
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import Results, check_writable, write_atomically
from flashlane.core import registry
from flashlane.core.problem import DTYPES, AttentionProblem, arch_of

FORMAT = "flashlane-triton-targets/4"
TAG = "triton"
TOKENS, WIDTH = 16384, 2048
"""B·N and H·D of the bf16 problems."""
TOKENS_F32 = 8192
TARGET = 1.0


@dataclass(frozen=True)
class Target:
    """One problem, the peer that is to be reached, and others that run next to it."""

    name: str
    problem: AttentionProblem
    peer: str
    others: tuple[str, ...]
    direction: Direction = "forward"


@dataclass
class Measured:
    """What was measured for a target."""

    name: str
    problem: str
    peer: str
    required: float = TARGET
    ms: float | None = None
    spread: float | None = None
    tflops: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    """Milliseconds of every peer that ran."""
    ratios: dict[str, float] = field(default_factory=dict)
    """With the L2 cache flushed before each call, as all figures above."""
    steady: dict[str, float] = field(default_factory=dict)
    """Milliseconds of the kernel and every peer, of calls back to back."""
    steady_ratios: dict[str, float] = field(default_factory=dict)
    met: bool = False
    """Under both protocols."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why the kernel or a peer has no time."""


def targets(arch: str, directions: Sequence[Direction] = ("forward",)) -> Iterator[Target]:
    """Every problem that has a target, in each direction: its name ends in that of a backward or of both."""
    for direction, target in itertools.product(directions, forward_targets(arch)):
        name = target.name if direction == "forward" else f"{target.name} {direction}"
        yield replace(target, name=name, direction=direction)


def forward_targets(arch: str) -> Iterator[Target]:
    """Every problem that has a target."""
    for head_dim, seqlen, causal in itertools.product((64, 128), (1024, 2048, 4096, 8192, 16384), (False, True)):
        shape = (TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim)
        problem = bench.make_problem(*shape, DTYPES["bf16"], causal=causal, arch=arch)
        name = f"d{head_dim} n{seqlen} bf16 {'causal' if causal else 'full'}"
        yield Target(name, problem, "(flex)", ("(flash)",))
    for head_dim, seqlen, causal in itertools.product((64, 128), (1024, 4096), (False, True)):
        shape = (TOKENS_F32 // seqlen, WIDTH // head_dim, seqlen, head_dim)
        problem = bench.make_problem(*shape, DTYPES["f32"], causal=causal, arch=arch)
        yield Target(f"d{head_dim} n{seqlen} f32 {'causal' if causal else 'full'}", problem, "(sdpa-efficient)", ())


def judged(target: Target, results: Results) -> Measured:
    """The kernel's time, the peers', and their ratios."""
    measured = Measured(target.name, target.problem.describe(), target.peer)
    for row in results.rows:
        if row.timing is None:
            measured.failed[row.tag] = f"{row.status}: {row.message}"
            continue
        if STEADY in row.timings:
            measured.steady[row.tag] = row.timings[STEADY].median
        if row.tag == TAG:
            measured.ms, measured.spread, measured.tflops = row.timing.median, row.timing.spread, row.tflops
        else:
            measured.peers[row.tag] = row.timing.median
    measured.failed |= {item.tag: item.reason for item in results.skipped}
    if measured.ms:
        measured.ratios = {tag: ms / measured.ms for tag, ms in measured.peers.items()}
        if TAG in measured.steady:
            measured.steady_ratios = {t: ms / measured.steady[TAG] for t, ms in measured.steady.items() if t != TAG}
        found = (measured.ratios.get(target.peer, 0.0), measured.steady_ratios.get(target.peer, math.inf))
        measured.met = min(found) >= measured.required
    return measured


def table(rows: Sequence[Measured]) -> Iterator[str]:
    """One line a target, then how many were met."""
    yield f"{'target':<33}{'ms':>9} {'±%':>5} {'TFLOP/s':>7}  ratios"
    for item in rows:
        if item.ms is None:
            yield f"{item.name:<33} not run: {'; '.join(item.failed.values())}"[:160]
            continue
        ratios = ", ".join(
            f"{tag} {ratio:.3f} ({STEADY} {item.steady_ratios.get(tag, math.nan):.3f})"
            for tag, ratio in item.ratios.items()
        )
        verdict = "pass" if item.met else "MISS"
        speed = f"{item.ms:9.4f} {50 * (item.spread or 0):5.1f} {item.tflops or 0:7.1f}"
        failed = f"; no {', '.join(item.failed)}" if item.failed else ""
        yield f"{item.name:<33}{speed}  {verdict} {ratios}{failed}"
    yield f"{sum(item.met for item in rows)} of {len(rows)} targets met"


def main() -> int:
    parser = options(__doc__, "triton_targets", seconds=30.0)
    parser.add_argument("--only", default="", help="targets whose name has all of these words: d64,causal")
    parser.add_argument("--directions", default="forward", help=f"some of {','.join(DIRECTIONS)}")
    arguments = parser.parse_args()
    directions = [word for word in arguments.directions.split(",") if word]
    if not directions or not set(directions) <= set(DIRECTIONS):
        parser.error(f"--directions is {arguments.directions!r}; it may hold {', '.join(DIRECTIONS)}")
    device = device_or_exit()
    check_writable(arguments.out)
    only = {word for word in arguments.only.split(",") if word}
    chosen = [target for target in targets(arch_of(device), directions) if only <= set(target.name.split())]
    implementations = sum(2 + len(target.others) for target in chosen)
    settings = settings_for(implementations, arguments.seconds, arguments.rounds)
    rows: list[Measured] = []
    environment: dict[str, object] = {}
    portable = map(registry.get_backward, ("tiled", "triton"))  # the only backward kernels that may run
    with registry.backward_table_of(*portable), Bar(len(chosen)) as reporter:
        for seed, target in enumerate(chosen):
            peers = bench.select_peers(",".join((target.peer, *target.others)))
            selection = bench.Selection(tags=(TAG,), peers=peers)
            results = run_and_keep(
                target.problem, None, None, selection=selection, settings=settings, seed=seed, reporter=reporter,
                directions=(target.direction,),
            )  # fmt: skip
            environment = environment or results.environment
            rows.append(judged(target, results))
            body = {"format": FORMAT, "environment": environment, "settings": asdict(settings)}
            body["targets"] = [asdict(item) for item in rows]
            write_atomically(arguments.out / "triton_targets.json", json.dumps(body, indent=1) + "\n")
    wrong = [f"{item.name} {tag}: {why}" for item in rows for tag, why in item.failed.items() if "FAIL" in why[:4]]
    print(*wrong, *table(rows), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
