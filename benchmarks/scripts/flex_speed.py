"""Speed of flex_attention next to torch's (Triton, and FLASH: FlashAttention-4) and functions without programs.

    python benchmarks/scripts/flex_speed.py --out flex_speed.json [--peers triton,flash] [--candidates] [--seconds 400]
        [--together 100] [--resume]

A cell is a mask and a score. All that run it alternate in drawn order, by the bench's timer, under both protocols:
calls back to back, and with the L2 cache flushed before each; the figures are TFLOP/s of visible pairs, and a target is
met under both. What a peer refuses, or compiles for too long, is a line that says so. In front of the timings each
output is compared with that of the first that ran. ``--candidates`` adds other configurations of our kernels. torch's
functions are compiled for each cell, and get torch's own block masks (``flex_peers.py``). ``--together`` compiles all
cells at once (``flex_processes.py``): FLASH takes some ten seconds a kernel. The file is written again after each row.
``--resume`` keeps the cells that a run of the same commit on the same card timed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import flex_peers
import torch
import torch._functorch.config
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

import flashlane
from flashlane import bench, jit
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.implementations import Implementation
from flashlane.bench.measure.results import write_atomically
from flashlane.bench.measure.timing import clocks_for, measure_by
from flashlane.flex import blocks, masks, packed, windows
from flashlane.flex.bind import bind
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.block_lists import UNIT
from flashlane.kernels.hopper.forward import tiles

SCRIPT = "benchmarks/scripts/flex_speed.py"
HEADS = 16
LENGTHS = (128, 256, 384, 640, 900, 1100, 1300, 1500, 1700, 1900, 2100, 2300, 2600, 2900, 3300, 4418, 5342)
"""Packed documents, 32768 tokens."""
TOLERANCE = 3e-2
"""Largest difference of two outputs in bf16, by the largest output."""
DRAW = 0
ROWS = (64, 80, 96, 112)
"""Queries of a step of the backward that candidates without lists try."""
Call = Callable[[], Any]
Score = Callable[..., torch.Tensor] | None


@dataclass
class Cell:
    """A mask and a score, and what runs them besides flex_attention."""

    name: str
    size: tuple[int, int, int]
    """Batch, tokens and head dim."""
    pairs: float
    """Visible ones, of all batch rows and heads."""
    mask: Callable[[torch.device], BlockMask | None]
    score: Score = None
    native: Callable[..., torch.Tensor] | None = None
    """Of ``(b, s, h, d)`` q, k and v: flashlane's function without a program."""
    function: Callable[[torch.device], Callable[..., torch.Tensor]] | None = None
    """The mask function that torch's own create_block_mask takes; None: the peers get the lists of ``mask``."""
    ordered: bool = False
    """Whether the deterministic backward is timed, too."""
    blocks_apart: int = 0
    """Rows and keys of blocks whose lists follow no function, so that a tile should have no more."""
    targets: dict[str, float] = field(default_factory=dict)
    """What is asked of ``forward`` and ``backward``, in TFLOP/s or, below 2, of the native figure."""


def linear(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score + (kv - q) * 0.01


def causal(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q >= kv


def capped(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return 30 * torch.tanh(score / 30)


@functools.cache
def _documents(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def _packed(lengths: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    ends = _documents(lengths, q.device)  # kept, or each call would wait for a copy
    operands = (t.flatten(0, 1) for t in (q, k, v))
    return flashlane.flash_attn_varlen_func(*operands, ends, ends, max(lengths), max(lengths), causal=True)[None]


def cells(shrink: int = 1) -> Iterator[Cell]:
    """The cells of the issue; their lengths divided by ``shrink``."""
    lengths = tuple(length // shrink for length in LENGTHS)
    tokens = sum(lengths)
    block_mask = functools.partial(flashlane.create_block_mask, B=None, H=None)

    def of_documents(device: torch.device) -> masks.Mask:
        return masks.documents(_documents(lengths, device), causal=True)

    pairs = HEADS * sum(n * (n + 1) / 2 for n in lengths)
    targets = {"forward": 0.95, "backward": 0.95}
    native = functools.partial(_packed, lengths)
    yield Cell(
        "causal documents 32k", (1, tokens, 128), pairs,
        lambda device: block_mask(of_documents(device), Q_LEN=tokens, KV_LEN=tokens, device=device), native=native,
        function=lambda device: of_documents(device).function, ordered=True, targets=targets,
    )  # fmt: skip

    block = 1024 // shrink
    sizes = (32768 // shrink, block)
    pairs = HEADS * block**2 * sum(range(1, sizes[0] // block + 1))
    yield Cell(
        "block-causal 32k", (1, sizes[0], 128), pairs,
        lambda device: block_mask(_block_causal(device, *sizes), Q_LEN=sizes[0], KV_LEN=sizes[0], device=device),
        function=lambda device: _block_causal(device, *sizes).function, ordered=True,
        targets={"forward": 640, "backward": 480},
    )  # fmt: skip

    tokens_of_lists = 16384 // shrink
    for size, density, least in (
        (128, 0.1, (620, 520)),
        (128, 0.5, (620, 520)),
        (64, 0.1, (345, 0)),
        (64, 0.3, (345, 0)),
    ):
        rows = tokens_of_lists // size
        table = torch.rand(1, HEADS, rows, rows, generator=torch.Generator().manual_seed(DRAW)) < density
        yield Cell(
            f"random {size}-blocks {density:.0%}", (1, tokens_of_lists, 128), int(table.sum()) * size * size,
            functools.partial(_by_hand, table, size), ordered=True, blocks_apart=size,
            targets=dict(zip(("forward", "backward"), least)),
        )  # fmt: skip

    for head_dim, ratio in ((128, 0.88), (64, 0.75)):
        n = 4096 // shrink
        pairs = 4 * HEADS * n * (n + 1) / 2
        for name, score, asked_ratio in (("linear", linear, ratio), ("tanh", capped, 0.8)):
            yield Cell(
                f"causal 4096 D{head_dim}, {name}", (4, n, head_dim), pairs,
                lambda device, n=n: block_mask(masks.causal(), Q_LEN=n, KV_LEN=n, device=device), score,
                functools.partial(flashlane.flash_attn_func, causal=True), lambda device: causal,
                targets={"forward": asked_ratio, "backward": asked_ratio},
            )  # fmt: skip


def _block_causal(device: torch.device, tokens: int, block: int) -> masks.Mask:
    return masks.block_causal_documents(torch.tensor([0, tokens], device=device), block)


def _by_hand(table: torch.Tensor, size: int, device: torch.device) -> BlockMask:
    """All listed blocks are full, so that no mask function is asked."""
    counts, indices = (t.to(device) for t in blocks.lists(table))
    none = torch.zeros_like(counts)
    lengths = (table.shape[2] * size, table.shape[3] * size)
    return BlockMask.from_kv_blocks(none, indices, counts, indices, BLOCK_SIZE=size, seq_lengths=lengths)


@dataclass
class Operands:
    """The q, k and v of one cell as torch's function takes them, ``(b, h, s, d)`` over ``(b, s, h, d)`` memory."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, cell: Cell, device: torch.device) -> Operands:
        batch, tokens, head_dim = cell.size
        torch.manual_seed(DRAW)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = batch, tokens, HEADS, head_dim
        return cls(*(torch.randn(size, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)))

    def leaves(self) -> list[torch.Tensor]:
        return [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]


def functions(cell: Cell, device: torch.device, peers: Sequence[str]) -> dict[str, Callable[..., torch.Tensor]]:
    """What runs a cell, by name, of ``(b, h, s, d)`` tensors."""
    mask = cell.mask(device)

    def flex(*operands: torch.Tensor) -> torch.Tensor:
        return flashlane.flex_attention(*operands, cell.score, mask)

    by_name: dict[str, Callable[..., torch.Tensor]] = {"flashlane": flex}
    if cell.native is not None:
        function = cell.native
        by_name["native"] = lambda *t: function(*(x.transpose(1, 2) for x in t)).transpose(1, 2)
    theirs = peers_mask(cell, device) if peers else None
    return by_name | {name: flex_peers.function(name, cell.score, theirs, device) for name in peers}


def peers_mask(cell: Cell, device: torch.device) -> BlockMask | None:
    """The cell's mask by torch's own create_block_mask; lists by hand are the same, with a function for FLASH."""
    if cell.function is None:
        mask = cell.mask(device)
        return None if mask is None else flex_peers.with_function(mask)
    _, tokens, _ = cell.size
    return torch_flex.create_block_mask(cell.function(device), None, None, tokens, tokens, device)


def gradient_of(operands: Operands) -> torch.Tensor:
    """The gradient of an output, always the same."""
    return torch.empty_like(operands.q).normal_(generator=torch.Generator(operands.q.device).manual_seed(DRAW))


def forward_calls(cell: Cell, operands: Operands, run: dict[str, Callable[..., Any]]) -> dict[str, Call]:
    def call(function: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return function(operands.q, operands.k, operands.v)

    return {name: functools.partial(call, function) for name, function in run.items()}


def backward_calls(cell: Cell, operands: Operands, run: dict[str, Callable[..., Any]]) -> dict[str, Call]:
    """Gradients of kept outputs. An output that cannot be made raises when it is called."""
    dout = gradient_of(operands)

    def made(function: Callable[..., Any], ordered: bool) -> Call:
        outputs: list[Any] = []

        def call() -> Any:
            if not outputs:
                leaves = operands.leaves()
                outputs.extend((function(*leaves), leaves))
            torch.use_deterministic_algorithms(ordered)
            try:
                return torch.autograd.grad(outputs[0], outputs[1], dout, retain_graph=True)
            finally:
                torch.use_deterministic_algorithms(False)

        return call

    calls = {name: made(function, False) for name, function in run.items()}
    if cell.ordered:
        calls["flashlane, ordered"] = made(run["flashlane"], True)
    return calls


def candidates(cell: Cell, operands: Operands, backward: bool) -> dict[str, Call]:
    """Other configurations of our kernels, called without the public function; a backward with the calls' gradient."""
    kernels = importlib.import_module("flashlane.kernels.hopper.flex")
    of = importlib.import_module(f"flashlane.kernels.hopper.flex.run_{'backward' if backward else 'forward'}")
    problem_of = importlib.import_module("flashlane.kernels.hopper.flex.problem").problem_of
    mask = cell_mask = cell.mask(operands.q.device)
    program, arguments = bind(cell.score, None if mask is None else mask.mask_mod, operands.q.device)
    window = windows.OPEN if mask is None else windows.NOTES.of(mask)
    if window is not None:
        program, mask = program.without_mask(), None
    else:
        window, mask = windows.OPEN, blocks.narrowed(mask)
    q, k, v = (t.transpose(1, 2) for t in (operands.q, operands.k, operands.v))
    scale = q.shape[-1] ** -0.5
    block = None if mask is None else tuple(mask.BLOCK_SIZE)
    call = program, arguments, mask, scale, window

    def others(ordered: bool) -> dict[str, Any]:
        """Configurations by name, all of them compiled."""
        problem = problem_of(q, k, v, scale, window, ordered)
        base = of.config_of(problem, program, block, mask is not None and program.mask is not None)
        configs = {} if packed.NOTES.of(cell_mask) is None else {"lists": base}
        configs |= backward_candidates(base, problem) if backward else forward_candidates(base, cell)
        if "approximate_tanh(" in base.program:
            configs["exact tanh"] = replace(base, program=base.program.replace("approximate_tanh(", "program::tanh("))
        sources = [one for config in configs.values() for one in (config.sources() if backward else (config.source(),))]
        jit.compile_together(list(dict.fromkeys(sources)), ARCH)
        return configs

    if not backward:
        return {
            f"candidate {name}": lambda c=config: kernels.forward(q, k, v, *call, config=c)
            for name, config in others(False).items()
        }
    out, lse = kernels.forward(q, k, v, *call)
    dout = gradient_of(operands).transpose(1, 2)
    return {
        f"candidate {name}{', ordered' if ordered else ''}": lambda c=config, o=ordered: kernels.backward(
            q, k, v, out, lse, dout, None, *call, deterministic=o, config=c
        )
        for ordered in ((False, True) if cell.ordered else (False,))
        for name, config in others(ordered).items()
    }


def forward_candidates(base: Any, cell: Cell) -> dict[str, Any]:
    """By name: the tiles of the head dim that walk over the same blocks, and other orders of tiles."""
    configs = {}
    if base.block_lists:
        configs = {f"{n} heads a section": replace(base, heads_per_section=n) for n in (1, 2, 1 << 20)}
    if base.deferred_max:  # what needs no deferral may go without it, and never the other way round
        configs["no deferred maximum"] = replace(base, deferred_max=False)
    for shape in tiles.class_of(base.head_dim, base.head_dim_v).shapes:
        alike = shape.cluster == 1 and not (base.block_lists and shape.block_n % UNIT)
        apart = cell.blocks_apart and max(64 * shape.consumers, shape.block_n) > cell.blocks_apart
        if not alike or apart:
            continue
        deferred_max = base.deferred_max and shape.one_barrier
        config = replace(base, **{**asdict(shape), "deferred_max": deferred_max}, ctas_per_sm=1)
        if config != base and config.shared_memory <= jit.shared_limit(ARCH):
            configs[config.describe()] = config
    return configs


def backward_candidates(base: Any, problem: Any) -> dict[str, Any]:
    most = problem.batch * problem.kv_heads
    sections = sorted({min(most, base.heads_per_section * factor) for factor in (2, 4)} | {1, most})
    configs = {
        f"{n} heads a section": replace(base, heads_per_section=n) for n in sections if n != base.heads_per_section
    }
    if not base.block_lists:
        configs = {}
    ping_pong = {f"ping-pong {until}": {"ping_pong": until} for until in ("until_issued", "until_complete")}
    rows = {} if base.block_lists else {f"{rows} rows": {"block_m": rows} for rows in ROWS}
    rows |= {f"{name}, ping-pong": changes | ping_pong["ping-pong until_complete"] for name, changes in rows.items()}
    for name, changes in ({"two stages of K": {"k_stages": 2}} | ping_pong | rows).items():
        other = replace(base, **changes)
        if other != base and other.shared_memory <= jit.shared_limit(ARCH):
            configs[name] = other
    return configs


def compare(calls: dict[str, Call]) -> dict[str, str | float]:
    """The largest difference of each from the first that runs, by the largest value; or what it raised."""
    differences: dict[str, str | float] = {}
    first: list[torch.Tensor] = []
    for name, call in calls.items():
        try:
            results = call()
            results = list(results) if isinstance(results, (tuple, list)) else [results]
        except Exception as error:  # a peer may raise anything
            differences[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            continue
        if name.startswith("candidate"):
            results = [t.transpose(1, 2) for t in results if t.ndim == 4]
        first = first or [t.detach() for t in results]
        pairs = zip(results, first)
        differences[name] = max(
            ((a.detach().float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs
        )
    return differences


def measured(
    cell: Cell,
    direction: str,
    calls: dict[str, Call],
    settings: bench.Settings,
    device: Any,
    differences: dict[str, str | float] | None = None,
) -> dict[str, Any]:
    """One row: differences, milliseconds, TFLOP/s, ratios to ours and whether the targets are met."""
    differences = compare(calls) if differences is None else differences
    able = {name: call for name, call in calls.items() if not isinstance(differences[name], str)}
    items = [Implementation(name, "kernel", call) for name, call in able.items()]
    timings = dict(zip(able, measure_by(clocks_for(device, settings), items, settings), strict=True))
    flops = 4 * cell.pairs * cell.size[2] * (2.5 if direction == "backward" else 1)
    row: dict[str, Any] = {"cell": cell.name, "direction": direction, "difference": differences}
    timed = {name: t for name, t in timings.items() if not isinstance(t, Exception)}
    first, *further = settings.protocols
    row["ms"] = {name: t[first].median for name, t in timed.items()}
    row["spread"] = {name: t[first].spread for name, t in timed.items()}
    row["tflops"] = {name: flops / ms / 1e9 for name, ms in row["ms"].items()}
    row["protocols"] = {
        protocol: {name: flops / t[protocol].median / 1e9 for name, t in timed.items() if protocol in t}
        for protocol in further
    }
    row["failed"] = {name: text for name, text in differences.items() if isinstance(text, str)}
    row["failed"] |= {name: str(t)[:160] for name, t in timings.items() if isinstance(t, Exception)}
    row["wrong"] = [n for n, d in differences.items() if not isinstance(d, str) and not d <= limit(cell, n)]
    ours = row["tflops"].get("flashlane")
    if ours is not None:
        row["ratio"] = {name: ours / other for name, other in row["tflops"].items() if name != "flashlane"}
        target = cell.targets.get(direction, 0.0)
        row["met"] = met(target, row["tflops"])
        for tflops in row["protocols"].values():
            if "flashlane" in tflops:
                row["met"] = {name: row["met"][name] and fine for name, fine in met(target, tflops).items()}
    return row


def limit(cell: Cell, name: str) -> float:
    """Native functions do not have the cell's score."""
    return float("inf") if name == "native" and cell.score is not None else TOLERANCE


def met(target: float, tflops: dict[str, float]) -> dict[str, bool]:
    """By what is asked: the cell's own target, 1.25 times FLASH and 1.8 times Triton."""
    found, ours = {}, tflops["flashlane"]
    if target >= 2:
        found[f"{target:.0f} TFLOP/s"] = ours >= target
    elif target and "native" in tflops:
        found[f"{target} of native"] = ours >= target * tflops["native"]
    for name, factor in (("flash", 1.25), ("triton", 1.8)):
        if name in tflops:
            found[f"{factor} of {name}"] = ours >= factor * tflops[name]
    return found


def run(
    device: torch.device,
    peers: Sequence[str],
    settings: bench.Settings,
    seconds: float,
    *,
    shrink: int = 1,
    with_candidates: bool = False,
    words: Sequence[str] = (),
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """All rows. After two thirds of the seconds peers that compile are left out, and after them all that is left is."""
    began, rows = time.monotonic(), []
    torch.utils.deterministic.fill_uninitialized_memory = False
    for cell in cells(shrink):
        if words and not any(word in cell.name for word in words):
            continue
        if peers:  # which are compiled for the shapes of a cell, and whose backward is repeated
            torch._dynamo.reset()
            torch._functorch.config.donated_buffer = False
        for direction, calls_of in (("forward", forward_calls), ("backward", backward_calls)):
            spent = time.monotonic() - began
            if spent > seconds:
                rows.append({"cell": cell.name, "direction": direction, "failed": {"all": "no time was left"}})
                continue
            operands = Operands.of(cell, device)
            run_by = functions(cell, device, peers if spent < seconds * 2 / 3 else ())
            calls = calls_of(cell, operands, run_by)
            if with_candidates:
                calls |= candidates(cell, operands, direction == "backward")
            rows.append(measured(cell, direction, calls, settings, device))
            print(line(rows[-1]), flush=True)
            keep(rows)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def resumed(body: dict[str, Any], before: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier file whose cells have figures in both directions, if its run was like this one."""
    alike = ("commit", "device", "torch", "driver")
    if any(body["environment"].get(key) != before["environment"].get(key) for key in alike):
        return []
    timed = [row for row in before["rows"] if "flashlane" in row.get("tflops", {})]
    directions = Counter(row["cell"] for row in timed)
    return [row for row in timed if directions[row["cell"]] == 2]


def line(row: dict[str, Any]) -> str:
    figures = "  ".join(f"{name} {value:.0f}" for name, value in row.get("tflops", {}).items())
    missed = [name for name, fine in row.get("met", {}).items() if not fine]
    ends = f"  MISSED {', '.join(missed)}" if missed else ""
    ends += f"  WRONG {row['wrong']}" if row.get("wrong") else ""
    return f"{row['cell']:28} {row['direction']:9}{figures}{ends}  {row['failed'] or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--peers", default="triton,flash", help=f"of {', '.join(flex_peers.BACKENDS)}; none leaves them out"
    )
    parser.add_argument("--cells", default="", help="words of cells' names, separated by commas")
    parser.add_argument("--seconds", type=float, default=400.0, help="time to stay below, compiling included")
    parser.add_argument("--candidates", action="store_true", help="also time other configurations of our kernels")
    parser.add_argument("--together", type=float, help="seconds for which all cells compile at once, each in a process")
    parser.add_argument("--resume", action="store_true", help="leave out cells that --out has from a run like this")
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name and name != "none"]
    for name in peers:
        if name not in flex_peers.BACKENDS:
            parser.error(f"--peers has {name!r}; it may have {', '.join(flex_peers.BACKENDS)}, or be none")
    device = importlib.import_module("gpu_run").device_or_exit()
    body: dict[str, Any] = {
        "format": "flashlane-flex-speed/2",
        "script": SCRIPT,
        "environment": environment(device),
        "seed": DRAW,
    }

    before = json.loads(options.out.read_text()) if options.resume and options.out.is_file() else None
    kept = resumed(body, before) if before else []

    def keep(rows: list[dict[str, Any]]) -> None:
        write_atomically(options.out, json.dumps(body | {"rows": kept + rows}, indent=1) + "\n")

    settings = bench.Settings(rounds=5, round_ms=6.0, warmup_ms=20.0, protocols=("steady", "flushed"))
    words = [word for word in options.cells.split(",") if word]
    names = [cell.name for cell in cells() if not words or any(word in cell.name for word in words)]
    left = [name for name in names if name not in {row["cell"] for row in kept}]
    if not left:
        return
    how: dict[str, Any] = {"words": left, "keep": keep}
    if options.together is None:
        keep(run(device, peers, settings, options.seconds, with_candidates=options.candidates, **how))
    else:
        flex_processes = importlib.import_module("flex_processes")
        flex_processes.run(device, peers, settings, options.together, options.seconds, **how)


if __name__ == "__main__":
    main()
