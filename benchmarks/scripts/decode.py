"""Decode against the copy rate of the card and against torch's attention: few query tokens over a long cache.

    PYTHONPATH=src python3 benchmarks/scripts/decode.py --out FOLDER [--only B1,paged] [--rounds 7]

A list of problems for the bench: grouped queries 32/8, D 128, bf16. It checks every implementation on every sequence,
then times the public functions interleaved in drawn order, with L2 flushed and back to back; short cells are replayed
from a CUDA graph. Back to back and replayed calls alternate over several sets of inputs, so that no call finds the
keys of the call before it in L2. Bytes are those of K, V, q and the output, each once; the copy rate (bytes read and
written of a large device copy) is measured in the same run. Writes decode.json, again after each cell. Exit status 1
when a check fails; a missed target is a result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from gpu_run import BOTH, compile_ahead, device_or_exit, heat, run_and_keep

from flashlane import bench
from flashlane.bench.measure.device_rates import copy_rate
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import FAIL, write_atomically
from flashlane.bench.measure.timing import Timing
from flashlane.core import dispatch
from flashlane.core.problem import AttentionProblem, arch_of

FORMAT = "flashlane-decode/2"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
"""Of K and V together, for one key."""
TARGET_BYTES = 256e6
TARGET_SHARE, TARGET_TOKENS, TARGET_MICROSECONDS = 0.92, 3.5, 12.0
PEERS = "cudnn,flash,sdpa-efficient"


@dataclass(frozen=True)
class Cell:
    """One problem."""

    batch: int
    keys: int
    tokens: int = 1
    page_size: int = 0
    graph: bool = False
    uneven: bool = False
    """Sequences of 5 to 100 % of the keys; of a paged cell."""

    @property
    def name(self) -> str:
        words = [f"B{self.batch}", f"KV{self.keys // 1024}k", f"q{self.tokens}"]
        words += [f"paged({self.page_size})"] * bool(self.page_size)
        return " ".join(words + ["uneven"] * self.uneven + ["graph"] * self.graph)

    @property
    def cache_bytes(self) -> int:
        """The bytes of all rows that the cache has room for."""
        return self.batch * self.keys * ROW_BYTES

    @property
    def bytes(self) -> int:
        return sum(self.lengths()) * ROW_BYTES + 2 * self.batch * self.tokens * HEADS * HEAD_DIM * 2

    def lengths(self) -> list[int]:
        """Keys of each sequence."""
        if not self.uneven:
            return [self.keys] * self.batch
        steps = [round(self.keys * (0.05 + 0.95 * i / max(1, self.batch - 1))) for i in range(self.batch)]
        return random.Random(0).sample(steps, self.batch)


def grid() -> list[Cell]:
    """Batch 1 to 64, 1k to 128k keys, contiguous and paged; some query tokens; short problems from a graph."""
    k = 1024
    lengths = {1: (1, 8, 64, 128), 4: (1, 8, 32, 128), 16: (1, 8, 32, 128), 64: (1, 4, 8, 32)}
    cells = [Cell(batch, n * k) for batch, keys in lengths.items() for n in keys]
    paged = ((1, 64), (4, 32), (16, 8), (64, 1), (64, 8))
    cells += [Cell(batch, n * k, page_size=page) for (batch, n), page in itertools.product(paged, (16, 64, 256))]
    cells += [Cell(1, 62 * k, tokens=tokens) for tokens in (2, 4, 8)]
    cells += [Cell(batch, n * k, graph=True) for batch, n in ((1, 1), (1, 4), (1, 8), (4, 1), (8, 1), (16, 1))]
    return cells


@dataclass
class Row:
    """One implementation on one cell; ``share`` is of the copy rate."""

    cell: str
    tag: str
    microseconds: float | None = None
    spread: float | None = None
    gigabytes_per_second: float | None = None
    share: float | None = None
    check: str = ""
    method: str = ""
    protocols: dict[str, float] = field(default_factory=dict)
    """Microseconds under each protocol of the timer."""

    def take(self, timing: Timing | Exception, cell: Cell, copy: float) -> None:
        """What was measured, in a run whose copy rate is ``copy`` bytes a second."""
        if not isinstance(timing, Timing):
            self.check = f"not timed: {timing}"
            return
        self.microseconds, self.spread, self.method = 1e3 * timing.median, timing.spread, timing.method
        self.gigabytes_per_second = cell.bytes / timing.median / 1e6
        self.share = cell.bytes / timing.median * 1e3 / copy


@dataclass
class Verdict:
    """The targets of a cell: each a line of what was wanted and found."""

    cell: str
    targets: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def case_of(cell: Cell, arch: str | None) -> bench.Case:
    """A cell as a case for the bench: a dense problem, or a cache in pages with the lengths in use."""
    problem = bench.make_problem(
        cell.batch, HEADS, cell.tokens, HEAD_DIM, torch.bfloat16, kv_heads=KV_HEADS, seqlen_k=cell.keys, arch=arch,
        layout="paged" if cell.page_size else "dense", page=cell.page_size,
    )  # fmt: skip
    return bench.Case(problem, lengths=tuple(cell.lengths()) if cell.page_size else ())


def run_cell(cell: Cell, arch: str | None, copy: float, rounds: int, reporter: Bar) -> Iterator[Row]:
    """Check and time everything on a cell: ours first."""
    case = case_of(cell, arch)
    tag = dispatch.select(case.problem).tag
    settings = bench.Settings(
        rounds=rounds, round_ms=1.5, warmup_ms=4.0, max_iterations=20, rotate=True,
        protocols=("replay",) if cell.graph else BOTH,
    )  # fmt: skip
    selection = bench.Selection(tags=(tag,), peers=bench.select_peers(PEERS))
    results = run_and_keep(case, None, None, selection=selection, settings=settings, seed=0, reporter=reporter)
    for found in results:
        row = Row(cell.name, found.tag, check="ok" if found.timing else f"{found.status}: {found.message}")
        if found.timing:
            row.take(found.timing, cell, copy)
        row.protocols = {name: 1e3 * timing.median for name, timing in found.timings.items()}
        yield row
    yield from (Row(cell.name, item.tag, check=f"not run: {item.reason}") for item in results.skipped)


def judge(cell: Cell, rows: Sequence[Row]) -> Verdict:
    """The targets that a cell has."""
    ours, *others = rows
    verdict = Verdict(cell.name)
    if ours.microseconds is None:
        verdict.missed.append(f"not measured: {ours.check}")
        return verdict

    def target(met: bool, words: str) -> None:
        verdict.targets.append(words)
        if not met:
            verdict.missed.append(words)

    if cell.tokens == 1 and cell.cache_bytes > TARGET_BYTES:
        target(ours.share >= TARGET_SHARE, f"{ours.share:.1%} of the copy rate, wanted {TARGET_SHARE:.0%}")
    times = [row.microseconds for row in others if row.microseconds]
    if times:
        wanted = TARGET_TOKENS if cell.tokens > 1 else 1.0
        ratio = min(times) / ours.microseconds
        target(ratio >= wanted, f"{ratio:.2f} x the best peer, wanted {wanted:g}")
    if cell.graph and cell.batch == 1 and cell.keys == 1024:
        target(ours.microseconds <= TARGET_MICROSECONDS, f"{ours.microseconds:.1f} µs, wanted {TARGET_MICROSECONDS:g}")
    return verdict


def line(row: Row) -> str:
    if row.microseconds is None:
        return f"{row.cell:<26} {row.tag:<18} {row.check}"
    speed = (
        f"{row.microseconds:9.1f} µs ±{50 * row.spread:4.1f} % {row.gigabytes_per_second:7.0f} GB/s {row.share:6.1%}"
    )
    return f"{row.cell:<26} {row.tag:<18} {speed}"


def problems(cells: Sequence[Cell], arch: str | None) -> Iterator[AttentionProblem]:
    """Those of the cells, without tensors."""
    yield from (case_of(cell, arch).problem for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of decode.json")
    parser.add_argument("--only", default="", help="cells whose name holds one of these words")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = device_or_exit()
    words = [word for word in arguments.only.split(",") if word]
    cells = [cell for cell in grid() if not words or any(word in cell.name for word in words)]
    arch, rounds = arch_of(device), max(5, arguments.rounds)
    compile_ahead((dispatch.select(problem), problem) for problem in problems(cells, arch))
    heat(device)
    copy = 1e9 * copy_rate(device)
    print(f"copy rate {copy / 1e9:.0f} GB/s", flush=True)
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    with Bar(len(cells)) as reporter:
        for cell in cells:
            found = list(run_cell(cell, arch, copy, rounds, reporter))
            rows += found
            verdicts.append(judge(cell, found))
            print("\n".join(map(line, found)), flush=True)
            body = {"format": FORMAT, "environment": environment(device), "copy_gigabytes_per_second": copy / 1e9}
            body |= {"rows": [asdict(row) for row in rows], "targets": [asdict(verdict) for verdict in verdicts]}
            write_atomically(arguments.out / "decode.json", json.dumps(body, indent=1) + "\n")
    missed = [(verdict.cell, words) for verdict in verdicts for words in verdict.missed]
    for name, words_missed in missed:
        print(f"MISS {name}: {words_missed}")
    targets = sum(len(verdict.targets) for verdict in verdicts)
    print(f"{targets - len(missed)} of {targets} targets met")
    return 1 if any(row.check.startswith(FAIL) and not row.tag.startswith("(") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
