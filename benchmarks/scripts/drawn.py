"""Time flashlane next to its peers on problems drawn at random: what a claim to be faster in general rests on.

    PYTHONPATH=src python3 benchmarks/scripts/drawn.py --seed 1000 --count 60
        [--kind dense,packed,window,deterministic,decode,cache] [--direction forward,backward] [--protocol both]
        [--peers cudnn,fa2,fa4,flashinfer] [--candidates] [--seconds 200]
    PYTHONPATH=src python3 benchmarks/scripts/drawn.py --lists packed:backward:1000:60,dense:backward:1001:200

Each problem follows from kind, seed and number (flashlane.bench.measure.drawn.TIMED). benchmarks/seeds.json says which
seeds are for fitting and which for judging. Everything is compiled first, in threads. Each implementation is checked
(flashlane.bench.measure.sampled_check, and two deterministic calls for equal bits), runs by itself for 25 ms and is
timed through its public function, in rounds of drawn order: steady (back to back) and flushed (L2 flushed before each
call), or by replays of CUDA graphs, without the host's time. A peer that is far behind another one at its first calls,
under each protocol, is not timed further. ``--candidates`` also times the other configurations of our kernel, or for
few queries other numbers of splits. A file a kind and direction, drawn_DIRECTION_KIND_SEED.json, is written again after
each problem, and a further run adds what it lacks. ``--show FILE...`` prints and draws existing files, without a GPU.

Where the environment names a compile cache of FlashAttention-4 (tools/fa4_cache.py --drawn makes one), kernels that it
lacks are not compiled, which takes ten seconds each; that peer is then absent. tools/ahead.py --drawn compiles ours on
another machine, tools/flashinfer_cache.py those of FlashInfer for caches. On a machine of several GPUs a process a GPU
takes each n-th problem (``--share 0/4``) into a folder of its own, and ``--join FOLDER...`` puts their rows into the
files of ``--out``. Exit status 1 when an output of ours was wrong, 3 when a kernel broke the GPU's context.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from drawn_compile import compile_all, refuse_to_compile_fa4, warm_cudnn
from drawn_summary import FORMAT, OURS, SAME, fastest_of, join, picture, read, summary
from gpu_run import ROUNDS, device_or_exit, heat
from hopper_shapes import PEER_TAGS

from flashlane import bench
from flashlane.bench.measure.drawn import TIMED, timed
from flashlane.bench.measure.drawn_case import Case
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import WORK, Direction
from flashlane.bench.measure.implementations import Implementation, Work, prepare, public_call
from flashlane.bench.measure.peers import Peer
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import write_atomically
from flashlane.bench.measure.runner import BrokenContext, explained, out_of_memory, stop_if_broken, synchronize
from flashlane.bench.measure.sampled_check import SampledOracle
from flashlane.bench.measure.timing import PROTOCOLS as ALL_PROTOCOLS
from flashlane.bench.measure.timing import Clock, Settings, Timing, TimingProtocol, clocks_for, measure_by
from flashlane.core import dispatch
from flashlane.core.problem import AttentionProblem, arch_of
from flashlane.tuning.candidates import calls_of, candidates_of

SEEDS = Path(__file__).resolve().parents[1] / "seeds.json"
PEERS = {**PEER_TAGS, "efficient": "(sdpa-efficient)", "flashinfer": "(flashinfer)"}
DEFAULT_PEERS = ("cudnn", "fa2", "fa4")
Share = tuple[int, int]
"""Place and number of shares: of N shares the K-th has the problems K, K + N, K + 2N, ..."""
PROTOCOLS: tuple[TimingProtocol, ...] = ("steady", "flushed")
"""The steady timing comes right after an implementation has run by itself."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
FORWARD_ONLY = ("decode", "cache")
"""Kinds of few queries, whose candidates are numbers of splits of the keys."""
BACKWARD_ONLY = ("deterministic",)
"""Kinds whose gradients are asked for in an order of additions."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_FLOP = {"forward": 2e12, "backward": 3e12 / WORK["backward"]}
"""Of the forward pass of a problem, by the direction that is timed."""
MARGIN = 1.3
"""Candidates that take so many times the fastest one's time in a short timing are not timed further."""
FAR_BEHIND = 1.5
"""Peers that take so many times the fastest peer's time at their first calls, under every protocol, are not timed. What
ran before makes up to 1.09 of a figure."""
FIRST_CALLS = 2
GLANCE = Settings(rounds=1, round_ms=0.5, warmup_ms=0.0, warmup=2, preheat_ms=0.0, protocols=("steady",))
RESERVED_BYTES = 40e9
"""Memory that torch keeps from problems before; beyond it is given back."""


@dataclass(frozen=True)
class ProblemList:
    """One list of problems, in one direction."""

    kind: str
    direction: Direction
    seed: int
    count: int

    def case(self, number: int) -> Case:
        return timed(self.kind, self.seed, number, MOST_FLOP[self.direction])

    def problem(self, number: int, arch: str | None) -> AttentionProblem:
        return replace(self.case(number).problem(arch), needs_grad=self.direction != "forward")

    @property
    def name(self) -> str:
        return f"drawn_{self.direction}_{self.kind}_{self.seed}"


def lists_of(kinds: Sequence[str], directions: Sequence[Direction], seed: int, count: int) -> list[ProblemList]:
    """Every kind in every direction that it has."""
    pairs = [(kind, direction) for direction in directions for kind in kinds]
    return [ProblemList(*pair, seed, count) for pair in pairs if has(*pair)]


def has(kind: str, direction: str) -> bool:
    """Whether problems of a kind have a direction: decoding has no backward, and an order of additions no forward."""
    return kind not in (BACKWARD_ONLY if direction == "forward" else FORWARD_ONLY)


def lists_of_text(text: str) -> list[tuple[ProblemList, bool]]:
    """Lists and whether candidates are wanted, from ``KIND:DIRECTION:SEED:COUNT[:candidates],…``.

    Raises:
        ValueError: it is not of that form.
    """
    lists = []
    for item in text.split(","):
        words = item.split(":")
        fits = (
            len(words) in (4, 5) and words[0] in TIMED and words[1] in DIRECTIONS and words[4:] in ([], ["candidates"])
        )
        if not fits or not all(word.isdigit() for word in words[2:4]):
            raise ValueError(f"list is {item!r}; it may be KIND:DIRECTION:SEED:COUNT or that with :candidates")
        if not has(words[0], words[1]):
            raise ValueError(f"list is {item!r}; {words[0]} has no {words[1]}")
        lists.append((ProblemList(words[0], words[1], int(words[2]), int(words[3])), len(words) == 5))  # type: ignore[arg-type]
    return lists


def asked(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[ProblemList]:
    """The lists that the options name."""
    if arguments.lists:
        pairs = lists_of_text(arguments.lists)
        if arguments.seed is not None or any(candidates for _, candidates in pairs):
            parser.error("--lists goes without --seed, and with --candidates in place of :candidates")
        return [problem_list for problem_list, _ in pairs]
    if arguments.seed is None:
        parser.error("--seed is missing; benchmarks/seeds.json says which are for what")
    role_of(arguments.seed)
    kinds = words(parser, "--kind", arguments.kind, TIMED)
    directions = words(parser, "--direction", arguments.direction, DIRECTIONS)
    lists = lists_of(kinds, directions, arguments.seed, arguments.count)  # type: ignore[arg-type]
    if not lists:
        parser.error(f"--kind {arguments.kind} has no {arguments.direction}")
    return lists


def role_of(seed: int) -> str:
    """What a seed is for, ``fitting`` or ``judging``.

    Raises:
        ValueError: it is for neither.
    """
    seeds = json.loads(SEEDS.read_text(encoding="utf-8"))
    for role in ("fitting", "judging"):
        if seeds[role][0] <= seed <= seeds[role][1]:
            return role
    bounds = " or ".join(f"{seeds[role][0]} to {seeds[role][1]} ({role})" for role in ("fitting", "judging"))
    raise ValueError(f"--seed is {seed}; it may be {bounds}")


# --- one problem


@dataclass(frozen=True)
class Measuring:
    """What is the same for all problems of a run."""

    device: torch.device
    settings: Settings
    clocks: Mapping[str, Clock]
    peers: tuple[Peer, ...]
    candidates: bool


def checked(item: Implementation, work: Work, oracle: SampledOracle) -> str:
    """Run an implementation once, twice if it shall be deterministic; what is wrong with it, or empty.

    Memory that it is given holds NaN.
    """
    results: list[tuple[torch.Tensor, ...]] = []
    again = work.problem.deterministic
    try:
        with warnings.catch_warnings(record=True) as heard, item.context():
            warnings.simplefilter("always")
            for _ in range(1 + again):
                stale = [torch.full_like(t, math.nan) for t in (work.out, work.inputs.q, work.inputs.k, work.inputs.v)]
                del stale
                result = item.call()
                tensors = result if isinstance(result, tuple) else (result,)
                results.append(tuple(t.clone() for t in tensors) if again else tensors)
                synchronize(work.out.device)
    except Exception as error:  # a peer may raise anything
        stop_if_broken(work.out.device, item.tag, work.problem, error)
        return explained(error, heard)
    wrong = oracle.judge(results[0])
    if not wrong and not all(map(torch.equal, results[0], results[-1])):
        wrong = "two calls gave unlike bits"
    return f"WRONG: {wrong}" if wrong else ""


def by_protocol(timing: Mapping[str, Timing]) -> dict[str, float]:
    return {name: found.median for name, found in timing.items()}


def time_problem(problem_list: ProblemList, number: int, measuring: Measuring) -> dict[str, Any]:
    """A row: milliseconds, spread and TFLOP/s of each implementation under each protocol, and the ratios."""
    begun, case = time.monotonic(), problem_list.case(number)
    posed = case.posed(arch_of(measuring.device))
    problem = problem_list.problem(number, posed.problem.arch)
    kernel = dispatch.select(problem)
    row: dict[str, Any] = {"number": number, "problem": problem.describe(), "sizes": bench_sizes(case, problem)}
    row |= {"kernel": kernel.tag, "ok": True, "ms": {}, "spread": {}, "tflops": {}, "absent": {}}
    names = {kernel.tag: OURS, **{tag: name for name, tag in PEERS.items()}}
    try:
        inputs = posed.materialise(measuring.device, case.seed)
        selection = bench.Selection(tags=(kernel.tag,), peers=measuring.peers)
        work = prepare(posed.problem, inputs, problem_list.direction, selection, measuring.device, case.seed)
        oracle = SampledOracle(work.problem, work.inputs, work.do, case.seed)
        row["absent"] = {names[tag]: why for tag, why in work.skipped}
        running = []
        for item in (item.as_called for item in work.items):
            why = checked(item, work, oracle)
            if why:
                row["absent"][names[item.tag]] = why
            else:
                running.append(item)
        row["ok"] = any(item.tag == kernel.tag for item in running)
        peers = [item for item in running if item.tag != kernel.tag]
        row["far_behind"] = {names[tag]: times for tag, times in far_behind(peers, measuring.clocks).items()}
        running = [item for item in running if names[item.tag] not in row["far_behind"]]
        timings = measure_by(measuring.clocks, running, measuring.settings)
        if measuring.candidates:
            row["candidates"] = time_candidates(problem_list, work, oracle, measuring)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        row["absent"][OURS] = "out of memory"
        return row
    flop = sum(map(case.flop, case.attended_lengths)) * WORK[problem_list.direction]
    for item, timing in zip(running, timings, strict=True):
        name = names[item.tag]
        if isinstance(timing, Exception):
            row["absent"][name] = f"while timing: {explained(timing, ())}"
            row["ok"] &= name != OURS
            continue
        row["ms"][name] = by_protocol(timing)
        row["spread"][name] = {way: found.spread for way, found in timing.items()}
        row["tflops"][name] = {way: flop / ms / 1e9 for way, ms in row["ms"][name].items()}
    row |= compared(row["ms"])
    return row | {"seconds": time.monotonic() - begun}


def far_behind(peers: Sequence[Implementation], clocks: Mapping[str, Clock]) -> dict[str, float]:
    """Peers that cannot be the fastest by a few calls, and the least of how many times the fastest one's time they take
    under any protocol. A peer that raises is none of them."""
    first: dict[str, dict[str, float]] = {}
    for item in peers:
        try:
            with item.context():
                times = {way: min(clock.time(item.call, FIRST_CALLS)) for way, clock in clocks.items()}
        except Exception:  # the timing of the same call reports the error
            continue
        first[item.tag] = times
    fastest = {way: min(times[way] for times in first.values()) for way in clocks} if first else {}
    found = {tag: min(ms / fastest[way] for way, ms in times.items()) for tag, times in first.items()}
    return {tag: times for tag, times in found.items() if times > FAR_BEHIND}


def bench_sizes(case: Case, problem: AttentionProblem) -> dict[str, object]:
    """The sizes of a problem, with the lengths of sequences that differ."""
    from flashlane.bench.measure.runner import sizes_of

    lengths = case.posed().lengths
    return {**sizes_of(problem), **({"lengths": list(lengths)} if lengths else {})}


def compared(ms: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """The fastest peer of each protocol, and its time over ours."""
    row: dict[str, dict[str, Any]] = {"best_peer": {}, "ratio": {}}
    for protocol, ours in ms.get(OURS, {}).items():
        others = {name: by[protocol] for name, by in ms.items() if name != OURS}
        if others:
            best = row["best_peer"][protocol] = min(others, key=others.get)  # type: ignore[arg-type]
            row["ratio"][protocol] = others[best] / ours
    return row


def configurations(problem_list: ProblemList, work: Work) -> tuple[str | None, list[Implementation]]:
    """The name of the chosen configuration of our kernel, and a call of each."""
    candidates = candidates_of(work.problem, problem_list.direction)
    calls = calls_of(candidates, work.problem, work.inputs, work.do)
    items = [Implementation(c.name, "kernel", call) for c, call in zip(candidates, calls, strict=True)]
    return next((c.name for c in candidates if c.chosen), None), items


def split_counts(work: Work) -> tuple[str, list[Implementation]]:
    """The same for few queries: how many splits the keys have is what decides there."""
    tag = dispatch.select(work.problem).tag
    problems = {"chosen": work.problem} | {str(n): replace(work.problem, num_splits=n) for n in SPLITS}
    return "chosen splits", [
        Implementation(f"{name} splits", "kernel", public_call(problem, work.inputs, tag))
        for name, problem in problems.items()
    ]


def time_candidates(
    problem_list: ProblemList, work: Work, oracle: SampledOracle, measuring: Measuring
) -> dict[str, Any]:
    """Milliseconds of our candidates by name and protocol, which is chosen, and what was left out and why.

    The least of several times is too low by chance. Thus the chosen configuration and the fastest ones are timed
    ``again``, and regret is the ratio of these times.
    """
    chosen, items = split_counts(work) if problem_list.kind in FORWARD_ONLY else configurations(problem_list, work)
    row: dict[str, Any] = {"chosen": chosen, "ms": {}, "left_out": {}}
    running = []
    for item in items:
        why = checked(item, work, oracle)
        if why:
            row["left_out"][item.tag] = why
        else:
            running.append(item)
    clocks = {"steady": measuring.clocks["steady"]} if "steady" in measuring.clocks else measuring.clocks
    glances = {}
    for item, timing in zip(running, measure_by(clocks, running, GLANCE), strict=True):
        glances[item.tag] = math.inf if isinstance(timing, Exception) else next(iter(timing.values())).median
    fastest = min(glances.values(), default=math.inf)
    for name, ms in glances.items():
        if ms > MARGIN * fastest and name != row["chosen"]:
            row["left_out"][name] = f"{ms / fastest:.3g} times the fastest in a short timing"
    running = [item for item in running if item.tag not in row["left_out"]]
    for item, timing in zip(running, measure_by(measuring.clocks, running, measuring.settings), strict=True):
        if isinstance(timing, Exception):
            row["left_out"][item.tag] = f"while timing: {explained(timing, ())}"
        else:
            row["ms"][item.tag] = by_protocol(timing)
    named = {row["chosen"], *(fastest_of(row["ms"], name) for name in measuring.clocks)}
    finalists = [item for item in running if item.tag in named and item.tag in row["ms"]]
    if row["chosen"] in row["ms"]:
        again = measure_by(measuring.clocks, finalists, measuring.settings)
        pairs = zip(finalists, again, strict=True)
        row["again"] = {item.tag: by_protocol(timing) for item, timing in pairs if not isinstance(timing, Exception)}
    return row


# --- files


class ResultFile:
    """A list's file: what it holds already, and how a row is added.

    Raises:
        ValueError: a file of that name was measured on another device, at another commit or with other versions.
    """

    def __init__(self, path: Path, problem_list: ProblemList, measuring: Measuring, where: dict[str, object]) -> None:
        self.path, self.problem_list = path, problem_list
        self.body: dict[str, Any] = {
            "format": FORMAT, "environment": where, **asdict(problem_list), "role": role_of(problem_list.seed),
            "protocols": list(measuring.settings.protocols), "peers": [peer.tag for peer in measuring.peers],
            "settings": asdict(measuring.settings), "begun": None, "rows": [],
        }  # fmt: skip
        if not path.is_file():
            return
        before = read(path)
        for name, old, new in [
            *((name, before["environment"].get(name), where.get(name)) for name in SAME),
            *((name, before[name], self.body[name]) for name in ("kind", "direction", "seed", "protocols", "peers")),
        ]:
            if old != new:
                raise ValueError(f"{path} was measured with {name} {old}, here it is {new}; give another --out")
        self.body["rows"] = before["rows"]
        if before["begun"] is not None:
            self.add({
                "number": before["begun"], "problem": problem_list.problem(before["begun"], None).describe(),
                "ok": False, "absent": {OURS: "the process ended while it ran"},
            })  # fmt: skip

    def lacking(self, share: Share = (0, 1)) -> list[int]:
        """Numbers of the problems of ``share`` that have no row."""
        done = {row["number"] for row in self.body["rows"]}
        return [number for number in range(share[0], self.problem_list.count, share[1]) if number not in done]

    def begin(self, number: int) -> None:
        self.body["begun"] = number
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        self.body["begun"] = None
        self.body["rows"] = sorted((*self.body["rows"], row), key=lambda row: row["number"])
        self.write()

    def write(self) -> None:
        write_atomically(self.path, json.dumps(self.body, indent=1) + "\n")


def line(row: Mapping[str, Any]) -> str:
    """What is printed of a row."""
    ratios = "  ".join(f"{way} {ratio:.3f} of {row['best_peer'][way]}" for way, ratio in row.get("ratio", {}).items())
    rate = next(iter(row.get("tflops", {}).get(OURS, {}).values()), math.nan)
    wrong = "" if row["ok"] else "  " + row["absent"].get(OURS, "")
    return f"{row['number']:3d} {row['problem']:<46} {rate:6.1f}  {ratios or 'no peer'}{wrong}"


def run(files: Sequence[ResultFile], measuring: Measuring, seconds: float, share: Share) -> int:
    """Time what the files lack of ``share``, a problem of each list in turn; the exit status."""
    stop, status = time.monotonic() + seconds, 0
    order = sorted(((number, place) for place, file in enumerate(files) for number in file.lacking(share)))
    begun = time.monotonic()
    with Bar(len(order)) as reporter:
        for done, (number, place) in enumerate(order):
            file = files[place]
            if time.monotonic() > stop:
                print(f"time is up: {len(order) - done} problems are left; the same command goes on with them")
                break
            file.begin(number)
            reporter.begin(f"{file.problem_list.direction} {file.problem_list.kind} {number}", 1)
            try:
                row = time_problem(file.problem_list, number, measuring)
            except KeyboardInterrupt:
                file.body["begun"] = None
                file.write()
                print("interrupted: the rows are kept")
                return 130
            except BrokenContext as error:
                print(error, file=sys.stderr)
                return 3
            file.add(row)
            print(line(row), flush=True)
            status |= not row["ok"]
            if measuring.device.type == "cuda" and torch.cuda.memory_reserved(measuring.device) > RESERVED_BYTES:
                torch.cuda.empty_cache()
    spent = time.monotonic() - begun
    print(f"{spent:.0f} s, {spent / max(1, len(order)):.2f} s a problem")
    return status


def show(paths: Sequence[Path], folder: Path) -> int:
    """Print what files amount to, and draw them all in one picture next to them; the exit status."""
    bodies = [read(path) for path in paths]
    for body in bodies:
        print(*summary(body), sep="\n")
    name = f"drawn_{bodies[0]['seed']}" if len(bodies) > 1 else paths[0].stem
    target = folder / f"{name}.svg"
    drawn = picture(bodies, target)
    print(
        f"picture: {target}"
        if drawn
        else "no picture: there is no ratio, or no matplotlib here (--show draws it later)"
    )
    return 0


def share_of(text: str) -> Share:
    """``0/4`` as (0, 4): of four shares the first one."""
    place, _, count = text.partition("/")
    if not (place.isdigit() and count.isdigit() and int(place) < int(count)):
        raise argparse.ArgumentTypeError(f"it is {text!r}; it may be 0/4, the first of four shares, to 3/4")
    return int(place), int(count)


def words(parser: argparse.ArgumentParser, option: str, text: str, known: Iterable[str]) -> list[str]:
    chosen = [word for word in text.split(",") if word]
    if not chosen or not set(chosen) <= set(known):
        parser.error(f"{option} is {text!r}; it may hold {', '.join(known)}")
    return chosen


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the lists; benchmarks/seeds.json says which are for what")
    parser.add_argument("--lists", default="", help="KIND:DIRECTION:SEED:COUNT,... in place of --seed and the like")
    parser.add_argument("--count", type=int, default=40, help="problems of each list")
    parser.add_argument("--kind", default="dense", help=f"some of {','.join(TIMED)}")
    parser.add_argument("--direction", default="forward", help=f"some of {','.join(DIRECTIONS)}")
    parser.add_argument("--protocol", default="both", choices=("both", *ALL_PROTOCOLS))
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS), help=f"some of {','.join(PEERS)}, or none")
    parser.add_argument("--candidates", action="store_true", help="time our other configurations too")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds, at least {ROUNDS}")
    parser.add_argument("--round-ms", type=float, default=2.0, help="how long a round repeats one implementation")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no problem so long after the start")
    parser.add_argument("--compile-fa4", action="store_true", help="compile what FlashAttention-4's cache lacks")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the files")
    parser.add_argument("--share", type=share_of, default=(0, 1), metavar="K/N", help="each N-th problem from the K-th")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FOLDER", help="join these folders' files in --out")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print and draw these; measure nothing")
    arguments = parser.parse_args()
    try:
        if arguments.show:
            return show(arguments.show, arguments.show[0].parent)
        if arguments.join:
            return show(join(arguments.join, arguments.out), arguments.out)
        lists = asked(arguments, parser)
        arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.peers == "none":
            peers: tuple[Peer, ...] = ()
        else:
            tags = [PEERS[name] for name in words(parser, "--peers", arguments.peers, PEERS)]
            peers = bench.select_peers(",".join(tags))
        device = device_or_exit()
        settings = Settings(
            rounds=max(ROUNDS, arguments.rounds), round_ms=arguments.round_ms, warmup_ms=2.0, max_iterations=100,
            budget_ms=1e9, protocols=PROTOCOLS if arguments.protocol == "both" else (arguments.protocol,),
        )  # fmt: skip
        measuring = Measuring(device, settings, clocks_for(device, settings), peers, arguments.candidates)
        where = environment(device)
        files = [ResultFile(arguments.out / f"{each.name}.json", each, measuring, where) for each in lists]
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") and not arguments.compile_fa4:
        refuse_to_compile_fa4()
    began = time.monotonic()
    arch = arch_of(device)
    problems = [
        (each.problem_list.problem(n, arch), each.problem_list.direction)
        for each in files
        for n in each.lacking(arguments.share)
    ]
    compiled = compile_all(problems, arguments.candidates)
    print(f"compiled {compiled} kernels in {time.monotonic() - began:.0f} s", flush=True)
    kinds = warm_cudnn(problems, device, peers)
    print(f"cuDNN has run {kinds} kinds of problems after {time.monotonic() - began:.0f} s", flush=True)
    if device.type == "cuda":
        heat(device)
    with torch.no_grad():
        status = run(files, measuring, arguments.seconds - (time.monotonic() - started), arguments.share)
    show([file.path for file in files if file.path.is_file()], arguments.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
