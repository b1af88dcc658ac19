"""Decode against the copy rate of the card and against torch's attention: few query tokens over a long cache.

    PYTHONPATH=src python3 benchmarks/scripts/decode.py --out benchmarks [--only B1,paged] [--rounds 7]

Grouped queries 32/8, D 128, bf16. Every implementation is checked, then all of a cell are timed interleaved. Inputs are
rotated: no call finds the keys of the call before it in L2. Bytes are those of K, V, q and the output, each once; the
copy rate (bytes read and written of a large device copy) is measured in the same run. Short cells are replayed from a
CUDA graph. Writes decode.json, anew after each cell. Exit status 1 when a check fails; a missed target is a result.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_run import compile_ahead, device_or_exit
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.bench.measure.timing import GraphClock, Settings, Timing, measure
from flashlane.core import dispatch
from flashlane.core.problem import AttentionProblem, Inputs, arch_of
from flashlane.reference.naive import reference_attention

FORMAT = "flashlane-decode/2"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
"""Of K and V together, for one key."""
TARGET_BYTES = 256e6
TARGET_SHARE, TARGET_TOKENS, TARGET_MICROSECONDS = 0.92, 3.5, 12.0
PEERS = {
    "(cudnn)": SDPBackend.CUDNN_ATTENTION,
    "(flash)": SDPBackend.FLASH_ATTENTION,
    "(efficient)": SDPBackend.EFFICIENT_ATTENTION,
}
AHEAD_CYCLES = 2_000_000
"""The device waits about a millisecond, so that the host has enqueued a round before it begins."""


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
        """Of all rows that there is room for."""
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


class Rotating:
    """A call that goes to the next set of inputs each time."""

    def __init__(self, tag: str, calls: Sequence[Callable[[], object]], backend: SDPBackend | None) -> None:
        self.tag, self.calls, self.backend, self.next = tag, calls, backend, 0

    def call(self) -> object:
        self.next = (self.next + 1) % len(self.calls)
        return self.calls[self.next]()

    def context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


class AheadClock:
    """Device events around each call, all of a round enqueued before the first begins."""

    method = "device events, inputs rotated"

    def prepare(self, item: Rotating) -> Callable[[], object]:
        return item.call

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
        torch.cuda._sleep(AHEAD_CYCLES)
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 2 GiB."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    times = AheadClock().time(lambda: target.copy_(source), 9)
    return 2 * source.numel() * 2 / statistics.median(times[1:]) * 1e3


class Pool:
    """Random keys and values that the cells cut their inputs from."""

    def __init__(self, cells: Sequence[Cell], device: torch.device) -> None:
        self.device = device
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size
        most = max(self.sets(cell) * cell.cache_bytes for cell in cells)
        self.data = torch.empty(most // 2, dtype=torch.bfloat16, device=device).normal_()

    def sets(self, cell: Cell) -> int:
        """Two sets at least, and together four times the L2 cache."""
        return max(2, min(64, -(-4 * self.l2 // cell.cache_bytes)))

    def inputs(self, cell: Cell) -> list[Inputs]:
        rows = (cell.batch, cell.keys, KV_HEADS, HEAD_DIM)
        size = cell.cache_bytes // 4
        found = []
        for number in range(self.sets(cell)):
            start = number * 2 * size
            k, v = (self.data[at : at + size].view(rows) for at in (start, start + size))
            q = torch.randn(cell.batch, cell.tokens, HEADS, HEAD_DIM, device=self.device).bfloat16()
            paging: dict[str, torch.Tensor] = {}
            if cell.page_size:
                k, v = (t.view(-1, cell.page_size, KV_HEADS, HEAD_DIM) for t in (k, v))
                paging["block_table"] = torch.randperm(k.shape[0], device=self.device).int().view(cell.batch, -1)
                paging["seqused_k"] = torch.tensor(cell.lengths(), dtype=torch.int32, device=self.device)
            found.append(Inputs(q, k, v, **paging))
        return found


def flashlane_calls(sets: Sequence[Inputs]) -> tuple[str, list[Callable[[], torch.Tensor]], AttentionProblem]:
    """Calls of the kernel that ``auto`` takes, past the public function: its host cost is another figure."""
    problem = AttentionProblem.from_inputs(sets[0])
    kernel = dispatch.select(problem)

    def call(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        kernel.forward(problem, inputs, out, lse)
        return out

    shape = (problem.batch, problem.heads, problem.seqlen_q)
    outs = [(torch.full_like(s.q, torch.nan), torch.full(shape, torch.nan, device=s.q.device)) for s in sets]
    return kernel.tag, [lambda s=s, o=o: call(s, *o) for s, o in zip(sets, outs, strict=True)], problem


def peer_calls(sets: Sequence[Inputs]) -> list[Callable[[], torch.Tensor]]:
    """torch's attention without a mask, on views."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    views = [tuple(t.transpose(1, 2) for t in (s.q, s.k, s.v)) for s in sets]
    return [lambda v=v: call(*v) for v in views]


def fault(problem: AttentionProblem, inputs: Inputs, out: torch.Tensor) -> str:
    """What is wrong with the first and the last sequence, held against f32; empty when nothing is."""
    for i in {0, problem.batch - 1}:
        one = {"q": inputs.q[i : i + 1]}
        if problem.page_size:
            one |= {"block_table": inputs.block_table[i : i + 1], "seqused_k": inputs.seqused_k[i : i + 1]}
        else:
            one |= {"k": inputs.k[i : i + 1], "v": inputs.v[i : i + 1]}
        ref, _ = reference_attention(replace(problem, batch=1), replace(inputs, **one), torch.float32)
        error = float((out[i : i + 1].float() - ref).norm() / ref.norm())
        if not error < 1e-2:
            return f"sequence {i} is off by {error:.3g}"
    return ""


def run_cell(cell: Cell, pool: Pool, copy: float, settings: Settings) -> Iterator[Row]:
    """Check and time everything on a cell."""
    sets = pool.inputs(cell)
    tag, calls, problem = flashlane_calls(sets)
    items = [Rotating(tag, calls, None)]
    if not cell.page_size:
        items += [Rotating(name, peer_calls(sets), backend) for name, backend in PEERS.items()]
    rows = {item.tag: Row(cell.name, item.tag) for item in items}
    for item in list(items):
        try:
            with item.context():
                rows[item.tag].check = fault(problem, sets[0], item.calls[0]()) or "ok"
        except RuntimeError as error:  # a peer may refuse
            rows[item.tag].check = f"not run: {str(error).splitlines()[0][:120]}"
        if rows[item.tag].check != "ok":
            items.remove(item)
    clock = GraphClock(pool.device, settings) if cell.graph else AheadClock()
    for item, timing in zip(items, measure(items, clock, settings), strict=True):
        rows[item.tag].take(timing, cell, copy)
    yield from rows.values()


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
    for cell in cells:
        yield AttentionProblem(
            cell.batch, HEADS, KV_HEADS, cell.tokens, cell.keys, HEAD_DIM, HEAD_DIM, torch.bfloat16, HEAD_DIM**-0.5,
            arch=arch, page_size=cell.page_size, seqused_k=bool(cell.page_size),
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of decode.json")
    parser.add_argument("--only", default="", help="cells whose name holds one of these words")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = device_or_exit()
    words = [word for word in arguments.only.split(",") if word]
    cells = [cell for cell in grid() if not words or any(word in cell.name for word in words)]
    settings = Settings(rounds=max(5, arguments.rounds), round_ms=1.5, warmup_ms=4.0, max_iterations=20)
    compile_ahead((dispatch.select(problem), problem) for problem in problems(cells, arch_of(device)))
    copy = copy_rate(device)
    print(f"copy rate {copy / 1e9:.0f} GB/s", flush=True)
    pool = Pool(cells, device)
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    for cell in cells:
        found = list(run_cell(cell, pool, copy, settings))
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
    return 1 if any("off by" in row.check for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
