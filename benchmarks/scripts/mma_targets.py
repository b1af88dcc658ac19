"""Set the mma.sync family against its targets on a GPU: SDPA flash at D 64 and 128, SDPA efficient at D 320 to 1024.

    PYTHONPATH=src python3 benchmarks/scripts/mma_targets.py --out FOLDER [--tags split-q+acc-f32] [--only d64,causal]

Only kernels that accumulate and store in f32. Each is checked, then timed interleaved with the peer under both
protocols; the ratio is the peer's median over that of the fastest tag, and a target is met under both. Writes
mma_targets.json, again after each problem. Exit status 1 when a check fails; a missed target is a result, not a
failure.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from gpu_run import STEADY, compile_ahead, device_or_exit, options, run_and_keep, settings_for

from flashlane import bench
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import Results, check_writable, write_atomically
from flashlane.core import registry
from flashlane.core.problem import DTYPES, AttentionProblem, arch_of

FORMAT = "flashlane-mma-targets/4"
TOKENS, WIDTH = 16384, 2048
"""B·N and H·D of the problems at D 64 and 128."""
DESIGNS = ({"split-q"}, {"split-q", "share-kv"})
"""Whole head dims: the listed tags tried without ``--tags``, with acc-f32, swizzle-qkv and stage 1 or 2."""


@dataclass(frozen=True)
class Target:
    """One problem and the ratio to a peer that is wanted on it."""

    name: str
    problem: AttentionProblem
    peer: str
    required: float


@dataclass
class Measured:
    """What was measured for a target; the ratio is None where the tags or the peer did not run."""

    name: str
    problem: str
    peer: str
    required: float
    peer_ms: float | None = None
    tag: str | None = None
    ms: float | None = None
    spread: float | None = None
    tflops: float | None = None
    mma_ceiling: float | None = None
    """Share of what mma.sync gives from registers alone, measured in the same run."""
    ratio: float | None = None
    """With the L2 cache flushed before each call, as all figures above."""
    steady_ratio: float | None = None
    """Of calls back to back, by the tag that is the fastest then."""
    met: bool = False
    """Under both protocols."""
    tags: dict[str, float] = field(default_factory=dict)
    """Milliseconds of every tag that ran."""
    steady: dict[str, float] = field(default_factory=dict)
    """Milliseconds of the peer and every tag, of calls back to back."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a tag or the peer has no time."""


def targets(arch: str) -> list[Target]:
    """Every problem that has a target."""
    chosen = []
    for head_dim, seqlen, dtype, causal in itertools.product(
        (64, 128), (2048, 4096, 8192, 16384), ("f16", "bf16"), (False, True)
    ):
        shape = (TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim)
        problem = bench.make_problem(*shape, DTYPES[dtype], causal=causal, arch=arch)
        name = f"d{head_dim} n{seqlen} {dtype} {'causal' if causal else 'full'}"
        chosen.append(Target(name, problem, "(flash)", 1.10))
    for head_dim in (320, 512, 1024):
        problem = bench.make_problem(1, 8, 8192, head_dim, arch=arch)
        chosen.append(Target(f"d{head_dim} n8192 f16 full", problem, "(sdpa-efficient)", 1.6))
    return chosen


def tags_for(target: Target, words: Sequence[str]) -> list[str]:
    """The tags to try: those with one of the words, or the short list for the head dim."""
    family = [kernel.tag for kernel in registry.kernels(listed_only=not words) if kernel.family == "mma"]
    if words:
        return [tag for tag in family if any(word in tag for word in words)]
    chosen = []
    for tag in family:
        designs = {word for word in tag[len("mma(") : -1].split("+") if not word.startswith("stage")}
        if target.problem.head_dim <= 256:
            wanted = designs - {"acc-f32", "swizzle-qkv"} in DESIGNS
        else:
            wanted = any(word.startswith("tiling") for word in designs)
        if wanted and {"acc-f32", "swizzle-qkv"} <= designs:
            chosen.append(tag)
    return chosen


def judged(target: Target, results: Results) -> Measured:
    """The fastest tag over the peer."""
    measured = Measured(target.name, target.problem.describe(), target.peer, target.required)
    for row in results.rows:
        if row.timing is None:
            measured.failed[row.tag] = f"{row.status}: {row.message}"
            continue
        if STEADY in row.timings:
            measured.steady[row.tag] = row.timings[STEADY].median
        if row.kind == "peer":
            measured.peer_ms = row.timing.median
        else:
            measured.tags[row.tag] = row.timing.median
            if measured.ms is None or row.timing.median < measured.ms:
                measured.tag, measured.ms, measured.spread = row.tag, row.timing.median, row.timing.spread
                measured.tflops, measured.mma_ceiling = row.tflops, row.mma_ceiling
    measured.failed |= {item.tag: item.reason for item in results.skipped}
    if measured.ms and measured.peer_ms:
        measured.ratio = measured.peer_ms / measured.ms
        if target.peer in measured.steady:
            ours = min(ms for tag, ms in measured.steady.items() if tag != target.peer)
            measured.steady_ratio = measured.steady[target.peer] / ours
        measured.met = min(measured.ratio, measured.steady_ratio or measured.ratio) >= target.required
    return measured


def table(rows: Sequence[Measured]) -> Iterator[str]:
    """One line a target, then how many were met."""
    figures = f"{'ms':>9} {'±%':>5} {'TFLOP/s':>7}"
    yield f"{'target':<26}{'ratio':>7} {STEADY:>7} {'required':>8}       {figures}  fastest tag, against"
    for item in rows:
        if item.ratio is None:
            reasons = "; ".join(dict.fromkeys(item.failed.values())) or "no tag"
            yield f"{item.name:<26}      –       – {item.required:8.2f} not run: {reasons}"[:160]
            continue
        verdict = "pass" if item.met else "MISS"
        speed = f"{item.ms:9.4f} {50 * item.spread:5.1f} {item.tflops:7.1f}"
        steady = f"{item.steady_ratio:7.3f}" if item.steady_ratio else f"{'–':>7}"
        ratio = f"{item.ratio:7.3f} {steady} {item.required:8.2f}"
        yield f"{item.name:<26}{ratio} {verdict} {speed}  {item.tag}, {item.peer}"
    ratios = [item.ratio for item in rows if item.ratio is not None]
    line = f"{sum(item.met for item in rows)} of {len(rows)} targets met"
    yield line + (
        f"; ratio {min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}" if ratios else ""
    )


def main() -> int:
    parser = options(__doc__, "mma_targets", seconds=30.0)
    parser.add_argument("--tags", default="", help="tags that contain one of these words, instead of the short list")
    parser.add_argument("--only", default="", help="targets whose name has all of these words: d64,causal")
    arguments = parser.parse_args()
    device = device_or_exit()
    check_writable(arguments.out)
    words = [word for word in arguments.tags.split(",") if word]
    only = {word for word in arguments.only.split(",") if word}
    chosen = [target for target in targets(arch_of(device)) if only <= set(target.name.split())]
    tags = {target.name: tags_for(target, words) for target in chosen}
    settings = settings_for(sum(len(t) + 1 for t in tags.values()), arguments.seconds, arguments.rounds)
    compile_ahead((registry.get(tag), target.problem) for target in chosen for tag in tags[target.name])
    rows: list[Measured] = []
    wrong: list[str] = []
    environment: dict[str, object] = {}
    with Bar(len(chosen)) as reporter:
        for seed, target in enumerate(chosen):
            if not tags[target.name]:
                rows.append(Measured(target.name, target.problem.describe(), target.peer, target.required))
                continue
            peers = bench.select_peers(target.peer)
            selection = bench.Selection(tags=tuple(tags[target.name]), peers=peers, accumulate_f32=True)
            results = run_and_keep(
                target.problem, None, None, selection=selection, settings=settings, seed=seed, reporter=reporter
            )
            environment = environment or results.environment
            rows.append(judged(target, results))
            wrong += [f"{row.status} {target.name} {row.tag}: {row.message}" for row in results.failed]
            body = {"format": FORMAT, "environment": environment, "settings": asdict(settings)}
            body["targets"] = [asdict(item) for item in rows]
            write_atomically(arguments.out / "mma_targets.json", json.dumps(body, indent=1) + "\n")
    wrong = [f"{item.name} {tag}: {why}" for item in rows for tag, why in item.failed.items() if why.startswith("FAIL")]
    print(*wrong, *table(rows), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
