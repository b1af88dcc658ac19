"""Configurations of the decode kernel against each other and against torch's attention, where they differ most.

    PYTHONPATH=src python3 benchmarks/scripts/decode_candidates.py --out FOLDER [--only B1,paged] [--rounds 5] \
        [--seconds 90]

Every candidate is first checked on small odd problems, compiled with waits that trap, in processes of their own: one
that hangs or faults is left out and takes no other with it. Then the candidates and the peers of a cell are timed
interleaved, as in decode.py, which has the cells' words. ``auto`` marks what the tables of
``flashlane.kernels.decode.select`` choose; the last lines say which cells another candidate would have won by how much.
Writes decode_candidates.json again after each cell. Exit status 1 when a candidate was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from decode import HEAD_DIM, HEADS, KV_HEADS, Cell, Row, line
from gpu_run import device_or_exit, heat
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlane.bench.measure.device_rates import copy_rate
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.bench.measure.timing import Settings, clock_for, measure
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.decode.config import DecodeConfig
from flashlane.kernels.decode.select import config_for, config_of, output_tiles
from flashlane.kernels.decode.tables import Shape
from flashlane.reference.naive import reference_attention

FORMAT = "flashlane-decode-candidates/1"
KERNEL = registry.get("decode(split-kv)")
ARCH = "sm_90a"
CHECK_SECONDS = 60
"""A process of checks that takes longer is ended, and what it has not said is not timed."""
WRONG = 2e-2
"""Largest error of a bf16 output of normal values, and of its LSE."""


def _of_rows(warps_m: int, groups: int, keys: int) -> dict[str, Shape]:
    """Candidates for tiles of 16 × warps_m rows, by name."""
    shapes = {"cp.async": Shape(warps_m, groups), "cp.async 2/SM": Shape(warps_m, max(1, groups // 2), 2)}
    shapes |= {"cp.async 4/SM": Shape(warps_m, max(1, groups // 4), 4)}
    shapes |= {f"TMA c{size}": Shape(warps_m, groups, block_n=keys, tma=True, cluster=size) for size in (1, 2, 4, 8)}
    shapes |= {
        name: Shape(warps_m, of, stream_k=True) for name, of in (("stream-K", groups), ("stream-K half", groups // 2))
    }
    return shapes | {"TMA 2/SM": Shape(warps_m, groups // 2, 2, keys, tma=True)}


CANDIDATES = {16: _of_rows(1, 8, 16), 32: _of_rows(2, 4, 32)}
"""By rows of a tile."""
PAGES = (0, 16, 64)
"""Page sizes that candidates are checked with."""


def cells() -> list[Cell]:
    """The cells on which candidates differ, or miss a target."""
    k = 1024
    chosen = [Cell(1, k, graph=True), Cell(1, 8 * k, graph=True), Cell(16, k, graph=True)]
    chosen += [Cell(batch, n * k) for batch, n in ((1, 64), (1, 128), (4, 32), (16, 8), (16, 32), (64, 1), (64, 4))]
    chosen += [Cell(1, 62 * k, tokens=tokens) for tokens in (2, 4, 8)]
    chosen += [Cell(1, 64 * k, page_size=size) for size in (16, 64, 256)]
    chosen += [Cell(16, 8 * k, page_size=64), Cell(64, k, page_size=16), Cell(64, 8 * k, page_size=256)]
    return chosen + [Cell(16, 8 * k, page_size=64, uneven=True), Cell(64, 2 * k, page_size=16, uneven=True)]


def candidates(problem: AttentionProblem) -> dict[str, DecodeConfig]:
    """Name and configuration of what can run a problem; no two are the same."""
    tile = next((rows for rows in CANDIDATES if problem.rows_of_kv_head <= rows), None)
    configs: dict[str, DecodeConfig] = {}
    for name, shape in CANDIDATES.get(tile, {}).items():
        config = config_of(problem, shape)
        held = output_tiles(problem, tile) * shape.cluster <= 132
        if config is not None and config not in configs.values() and (shape.cluster <= 1 or held):
            configs[name] = config
    return configs


def problem_of(cell: Cell) -> AttentionProblem:
    """A cell's problem, without tensors."""
    return AttentionProblem(
        cell.batch, HEADS, KV_HEADS, cell.tokens, cell.keys, HEAD_DIM, HEAD_DIM, torch.bfloat16, HEAD_DIM**-0.5,
        arch=ARCH, page_size=cell.page_size, seqused_k=bool(cell.page_size),
    )  # fmt: skip


# ---- checks, in processes of their own


def odd_inputs(page_size: int, tokens: int, device: torch.device) -> Iterator[Inputs]:
    """Few keys and many, sequences of all lengths and none; what lies outside the keys is not a number."""
    shapes: list[tuple[int, list[int]]] = [(2, [1000] * 3), (1, [5000]), (8, [333])]
    if page_size:
        shapes = [(2, [0, 1, 129, 640, 5000, 17]), (8, [*range(0, 1200, 31)]), (1, [2999])]
    draw = torch.Generator(device).manual_seed(0)
    for kv_heads, lengths in shapes:
        batch, keys = len(lengths), -(-max(lengths) // 256) * 256 if page_size else max(lengths)
        used = torch.tensor(lengths, device=device, dtype=torch.int32)
        inside = torch.arange(keys, device=device)[None, :, None, None] < used[:, None, None, None]
        k, v = (
            torch.randn(batch, keys, kv_heads, HEAD_DIM, generator=draw, device=device).bfloat16() for _ in range(2)
        )
        k, v = (t.masked_fill(~inside, torch.nan) for t in (k, v))
        q = torch.randn(batch, tokens, 4 * kv_heads, HEAD_DIM, generator=draw, device=device).bfloat16()
        if not page_size:
            yield Inputs(q, k, v)
            continue
        order = torch.randperm(batch * keys // page_size, generator=draw, device=device)
        k, v = (t.reshape(-1, page_size, kv_heads, HEAD_DIM)[order.argsort()] for t in (k, v))
        yield Inputs(q, k, v, block_table=order.int().view(batch, -1), seqused_k=used)


def wrong(config: DecodeConfig, problem: AttentionProblem, inputs: Inputs, splits: int | None) -> str:
    """What is wrong with a candidate's result; empty when nothing is."""
    out = torch.full_like(inputs.q, torch.nan)
    lse = torch.full((problem.batch, problem.heads, problem.seqlen_q), torch.nan, device=out.device)
    KERNEL.run(config, problem, inputs, out, lse, splits, debug=True)
    ref, ref_lse = reference_attention(problem, inputs, torch.float32)
    worst = float((out.float() - ref).abs().max())
    difference = torch.where(lse == ref_lse, 0.0, (lse - ref_lse).abs())
    worst_lse = float(difference.nan_to_num(nan=torch.inf).max())
    if worst < WRONG and worst_lse < WRONG:
        return ""
    return f"{problem.describe()}, {splits or 'its own'} splits: off by {worst:.3g}, LSE by {worst_lse:.3g}"


def check(names: Sequence[str]) -> None:
    """Check candidates, given as ``rows:name``; a line of JSON each: its name, the page size, what is wrong."""
    device = device_or_exit()
    jobs = []
    for which in names:
        rows, name = which.split(":", 1)
        shape = CANDIDATES[int(rows)][name]
        for page_size in PAGES:
            for tokens in (1, 4) if int(rows) == 16 else (8,):
                for inputs in odd_inputs(page_size, tokens, device):
                    problem = AttentionProblem.from_inputs(inputs, causal=True)
                    jobs.append((which, page_size, config_of(problem, shape), problem, inputs))
    build_all({job[2] for job in jobs if job[2] is not None}, debug=True)
    for which, page_size, config, problem, inputs in jobs:
        faults = [wrong(config, problem, inputs, splits) for splits in (None, 3)] if config else []
        torch.cuda.synchronize()
        print(json.dumps([which, page_size, next(filter(None, faults), "")]), flush=True)


def build_all(configs: set[DecodeConfig], debug: bool = False) -> None:
    """Compile, many at a time; one that does not compile says so where it is used."""
    from flashlane import jit

    def build(config: DecodeConfig) -> None:
        try:
            jit.compile(KERNEL.kernel_source(config), ARCH, debug=debug)
        except Exception as error:
            print(f"{config.describe()}: {error}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(build, configs))


@dataclass
class Checks:
    """A process of checks, and what it said."""

    names: tuple[str, ...]
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, names: Sequence[str]) -> Checks:
        command = [sys.executable, __file__, "--check", ",".join(names)]
        pipe = subprocess.PIPE
        return cls(tuple(names), subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))

    def faults(self, until: float) -> dict[str, str]:
        """What is wrong with each candidate; one of which nothing was said, or not to the end, is wrong too."""
        try:
            said, errors = self.process.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            said, errors = self.process.communicate()
        lines = [json.loads(text) for text in said.splitlines() if text.startswith("[")]
        faults: dict[str, str] = {}
        for name in self.names:
            mine = [words for which, _, words in lines if which == name]
            pages = {page for which, page, _ in lines if which == name}
            faults[name] = next(filter(None, mine), "")
            if not faults[name] and pages != set(PAGES):
                last = (errors.strip().splitlines() or ["it was ended"])[-1]
                faults[name] = f"not checked to the end: {last[:200]}"
        if self.process.returncode:
            print(errors[-1500:], file=sys.stderr, flush=True)
        return faults


def check_all() -> dict[str, str]:
    """What is wrong with each candidate, or an empty text; those that wait for nobody apart from those that do."""
    every = [f"{rows}:{name}" for rows, shapes in CANDIDATES.items() for name in shapes]
    groups = [[name for name in every if f":{word}" in name] for word in ("cp.async", "TMA", "stream-K")]
    until = time.monotonic() + CHECK_SECONDS
    started = [Checks.start(group) for group in groups]
    return {name: words for checks in started for name, words in checks.faults(until).items()}


# ---- times


PEERS = {
    "(cudnn)": SDPBackend.CUDNN_ATTENTION,
    "(flash)": SDPBackend.FLASH_ATTENTION,
    "(efficient)": SDPBackend.EFFICIENT_ATTENTION,
}


class Rotating:
    """A call that goes to the next set of inputs each time."""

    def __init__(self, tag: str, calls: Sequence[Callable[[], object]], backend: SDPBackend | None) -> None:
        self.tag, self.calls, self.backend, self.next = tag, calls, backend, 0

    def call(self) -> object:
        self.next = (self.next + 1) % len(self.calls)
        return self.calls[self.next]()

    def context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


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
        copies = []
        for number in range(self.sets(cell)):
            start = number * 2 * size
            k, v = (self.data[at : at + size].view(rows) for at in (start, start + size))
            q = torch.randn(cell.batch, cell.tokens, HEADS, HEAD_DIM, device=self.device).bfloat16()
            paging: dict[str, torch.Tensor] = {}
            if cell.page_size:
                k, v = (t.view(-1, cell.page_size, KV_HEADS, HEAD_DIM) for t in (k, v))
                paging["block_table"] = torch.randperm(k.shape[0], device=self.device).int().view(cell.batch, -1)
                paging["seqused_k"] = torch.tensor(cell.lengths(), dtype=torch.int32, device=self.device)
            copies.append(Inputs(q, k, v, **paging))
        return copies


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


@dataclass
class CellResult:
    """A cell: the rows of its implementations, and which one ``auto`` would take."""

    cell: str
    auto: str
    rows: list[Row] = field(default_factory=list)

    def best(self, ours: bool) -> Row | None:
        timed = [row for row in self.rows if row.microseconds and (row.tag[0] == "(") != ours]
        return min(timed, key=lambda row: row.microseconds, default=None)

    def verdict(self) -> str:
        """The best candidate against the best peer, and what ``auto`` loses to it."""
        best, peer = self.best(ours=True), self.best(ours=False)
        if best is None:
            return f"{self.cell:<30} nothing was timed"
        auto = next((row for row in self.rows if row.tag == self.auto and row.microseconds), None)
        words = f"{self.cell:<30} {best.tag:<14} {best.microseconds:8.1f} µs {best.share:6.1%}"
        words += f"  {peer.microseconds / best.microseconds:5.3f} x {peer.tag}" if peer else ""
        loss = f"{auto.microseconds / best.microseconds - 1:.1%}" if auto else "not timed"
        return f"{words}  auto is {self.auto} (+{loss})"


def run_cell(cell: Cell, pool: Pool, copy: float, settings: Settings, good: set[str]) -> CellResult:
    """Check and time a cell's candidates and peers."""
    sets = pool.inputs(cell)
    problem = AttentionProblem.from_inputs(sets[0])
    shape = (problem.batch, problem.heads, problem.seqlen_q)
    tile = next(rows for rows in CANDIDATES if problem.rows_of_kv_head <= rows)
    chosen, items, configs = config_for(problem), [], candidates(problem)
    for name, config in configs.items():
        outs = [(torch.full_like(s.q, torch.nan), torch.full(shape, torch.nan, device=s.q.device)) for s in sets]

        def call(config: DecodeConfig, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
            KERNEL.run(config, problem, inputs, out, lse)
            return out

        if f"{tile}:{name}" in good:
            calls = [lambda c=config, s=s, o=o: call(c, s, *o) for s, o in zip(sets, outs, strict=True)]
            items.append(Rotating(name, calls, None))
    auto = next((name for name, config in configs.items() if config == chosen), chosen.describe())
    if not cell.page_size:
        items += [Rotating(name, peer_calls(sets), backend) for name, backend in list(PEERS.items())[:2]]
    row = CellResult(cell.name, auto)
    settings = replace(settings, protocols=("replay",) if cell.graph else ("flushed",))
    rows = {item.tag: Row(cell.name, item.tag) for item in items}
    for item in list(items):
        try:
            with item.context():
                rows[item.tag].check = fault(problem, sets[0], item.calls[0]()) or "ok"
        except RuntimeError as error:
            rows[item.tag].check = f"not run: {str(error).splitlines()[0][:120]}"
        if rows[item.tag].check != "ok":
            items.remove(item)
    for item, timing in zip(items, measure(items, clock_for(pool.device, settings), settings), strict=True):
        rows[item.tag].take(timing, cell, copy)
    row.rows = list(rows.values())
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of decode_candidates.json")
    parser.add_argument("--only", default="", help="cells whose name holds one of these words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=90.0, help="no cell begins later than that")
    parser.add_argument("--check", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check.split(","))
        return 0
    began = time.monotonic()
    device = device_or_exit()
    words = [word for word in arguments.only.split(",") if word]
    selected = [cell for cell in cells() if not words or any(word in cell.name for word in words)]
    with ThreadPoolExecutor(1) as aside:
        checked = aside.submit(check_all)
        build_all({config for cell in selected for config in candidates(problem_of(cell)).values()})
        faults = checked.result()
    for name, what in faults.items():
        if what:
            print(f"OUT {name}: {what}", flush=True)
    print(f"{len(faults)} candidates checked, {time.monotonic() - began:.0f} s", flush=True)
    good = {name for name, what in faults.items() if not what}
    settings = Settings(rounds=max(5, arguments.rounds), round_ms=1.5, warmup_ms=4.0, max_iterations=20)
    heat(device)
    copy = 1e9 * copy_rate(device)
    print(f"copy rate {copy / 1e9:.0f} GB/s", flush=True)
    pool = Pool(selected, device)
    rows: list[CellResult] = []
    for cell in selected:
        if time.monotonic() - began > arguments.seconds:
            print(f"not run for want of time: {cell.name}")
            continue
        timed = run_cell(cell, pool, copy, settings, good)
        rows.append(timed)
        print("\n".join(map(line, timed.rows)), flush=True)
        body = {"format": FORMAT, "environment": environment(device), "copy_gigabytes_per_second": copy / 1e9}
        body |= {"faults": faults, "cells": [asdict(timed) for timed in rows]}
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.out / "decode_candidates.json", json.dumps(body, indent=1) + "\n")
    print("\n".join(timed.verdict() for timed in rows))
    wrong_ones = [row for timed in rows for row in timed.rows if "off by" in row.check and row.tag[0] != "("]
    return 1 if any(faults.values()) or wrong_ones else 0


if __name__ == "__main__":
    sys.exit(main())
