"""The main loop of the bench: it checks every kernel and every peer on every problem, then times them."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from flashlane.bench.measure import expected
from flashlane.bench.measure.check import STANDARD, Oracle, Rule, Verdict
from flashlane.bench.measure.device_rates import measure_rates, share_of_ceiling
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import DIRECTIONS, Convention, Direction, tflops
from flashlane.bench.measure.gradients import GradientOracle
from flashlane.bench.measure.implementations import (
    Implementation,
    Work,
    first_second_last,
    prepare,
    rotating,
    shared_outputs,
)
from flashlane.bench.measure.inputs import RANDOM, Case, Pattern, describe_inputs
from flashlane.bench.measure.memory import measure_memory
from flashlane.bench.measure.peers import PEERS, Peer, peer_tags
from flashlane.bench.measure.progress import Reporter, Silent
from flashlane.bench.measure.results import ERROR, FAIL, OK, STOPPED, UNCHECKED, Results, Row, Skipped
from flashlane.bench.measure.timing import Settings, Timing, clocks_for, host_cost, measure_by
from flashlane.core import aliases, registry
from flashlane.core.problem import FEATURES, AttentionProblem, arch_of
from flashlane.core.registry import CompiledKernel, DeviceKernel, Kernel
from flashlane.core.suggestions import KERNELS_LISTED_BY, suggest
from flashlane.inspect.compile_report import Usage, backward_device_kernels, first_line, report_problem, usage_of
from flashlane.jit import ToolchainError
from flashlane.kernels.features import BIAS, CACHE, DROPOUT, PAGED, VARLEN

__all__ = ["Implementation", "Selection", "resolve_device", "run", "shared_outputs"]

TITLES: dict[Direction, str] = {"forward": "", "backward": ", backward", "both": ", forward+backward"}
"""The suffix of a problem's title for each direction."""
PLAIN = "(unfused)"
"""The tag of attention as plain PyTorch operations."""
CHECKING, TIMING = "checking ", "timing "
"""Beginnings of the text of a step; a tag follows."""


@dataclass(frozen=True)
class Selection:
    """Which implementations run; without words and tags all listed kernels."""

    words: tuple[str, ...] = ()
    """Kernels whose tag contains one of these."""
    tags: tuple[str, ...] = ()
    """Kernels with exactly these tags."""
    peers: tuple[Peer, ...] = PEERS
    accumulate_f32: bool = False
    """Only kernels whose matrix products accumulate in f32."""
    show_all: bool = False
    """Without words and tags: every kernel of the registry instead of the listed ones."""
    excluded: tuple[tuple[str, str], ...] = ()
    """(tag, reason) of implementations that are left out although selected, such as a peer that hung before."""

    def __post_init__(self) -> None:
        for field in ("words", "tags"):  # names of the baseline logs are aliases of tags
            object.__setattr__(self, field, tuple(aliases.KERNELS.get(name, name) for name in getattr(self, field)))
        tags_of_kernels = tuple(k.tag for k in registry.kernels())
        for tag in self.tags:
            if tag not in tags_of_kernels:
                peer = tag if tag in peer_tags() else aliases.PEERS.get(tag)
                hint = f"it is the peer {peer} (--peers)" if peer else suggest(tag, tags_of_kernels, KERNELS_LISTED_BY)
                raise ValueError(f"--kernels has {tag!r}, which no kernel is called; {hint}")
        for word in self.words:
            if not any(word in tag for tag in tags_of_kernels):
                raise ValueError(f"--tags has {word!r}, which is in no kernel's tag; {_near(word, tags_of_kernels)}")

    def kernels(self) -> list[Kernel]:
        """The kernels asked for by name, in the order of the registry."""
        if not self.words and not self.tags:
            return list(registry.kernels(listed_only=not self.show_all))
        return [k for k in registry.kernels() if k.tag in self.tags or any(word in k.tag for word in self.words)]

    @property
    def unlisted(self) -> int:
        """The number of kernels in the registry that are left out because they were not named."""
        asked = self.words or self.tags
        return 0 if asked else len(registry.kernels()) - len(self.kernels())

    def declines(self, kernel: Kernel, problem: AttentionProblem) -> str | None:
        """Why a selected kernel is left out, or None."""
        if self.accumulate_f32:
            narrow = kernel.low_precision_reference(problem).split(",")
            if any(item.strip() in ("scores=f16", "out=f16") for item in narrow):
                return "--acc-f32: it accumulates in f16"
        return None

    def excludes(self, tag: str) -> str | None:
        """Why a tag is in :attr:`excluded`, or None."""
        return dict(self.excluded).get(tag)


def _near(word: str, known: tuple[str, ...]) -> str:
    if any(word in tag for tag in peer_tags()):
        return "it is in a peer's: use --peers"
    words = {word for tag in known for word in tag.replace("(", "+").replace(")", "+").split("+") if word}
    return suggest(word, (*sorted(words), *known), KERNELS_LISTED_BY)


@dataclass
class _Checked:
    """An implementation's row after its check."""

    item: Implementation
    row: Row
    runs: bool = True


def run(
    problems: Iterable[AttentionProblem | Case],
    *,
    device: torch.device | str | None = None,
    selection: Selection | None = None,
    check: bool = True,
    rule: Rule = "fa2",
    settings: Settings | None = None,
    pattern: Pattern = RANDOM,
    seed: int = 0,
    directions: Sequence[Direction] = ("forward",),
    memory: bool = True,
    cycles: bool = False,
    ceilings: bool = False,
    arch: str | None = None,
    arch_seconds: float = math.inf,
    keep_partial: bool = False,
    reporter: Reporter | None = None,
) -> Results:
    """Bench problems and return every row; :meth:`Results.frame` makes a tidy table of them for a notebook.

    Args:
        problems: problems, or each a :class:`~flashlane.bench.measure.inputs.Case` with lengths of packed or cached
            sequences, or with tensors of its own.
        device: where it runs; by default the current GPU, or the CPU without one.
        selection: the kernels and peers; by default all that are listed.
        check: compare each output and LSE with the reference; what fails is not timed.
        rule: the allowed error, see :mod:`flashlane.bench.measure.check`.
        settings: how long to measure.
        pattern: the values in the tensors.
        seed: the seed of the first problem; each next problem adds 1, so that no two have the same values.
        directions: what is timed of each problem: ``forward``, ``backward`` (alone, after an untimed forward),
            ``both`` (a forward and its backward as one step).
        memory: also run each implementation once to measure what it allocates.
        cycles: also count the cycles of each implementation with Nsight Compute.
        ceilings: also measure the copy and matrix rates of the device, into ``environment["ceilings"]``.
        arch: also compile every GPU kernel for this architecture and report it (``sm_90a``).
        arch_seconds: how long that may take; kernels left out then have a line that says so.
        keep_partial: after Ctrl-C, or when a kernel breaks the CUDA context, return the finished problems, with the
            reason in ``stopped``, instead of raising.
        reporter: gets the progress of the run.

    Raises:
        ValueError: a problem has a feature for which the bench draws no tensors, there is no such device, or cycles
            cannot be counted on it.
        BrokenContext: a kernel left the device unusable.
    """
    device = resolve_device(device)
    selection, settings, reporter = selection or Selection(), settings or Settings(), reporter or Silent()
    cases = [p if isinstance(p, Case) else Case(p) for p in problems]
    cases = [replace(case, problem=case.problem.on(arch_of(device))) for case in cases]
    _check_directions(directions, settings)
    for case in cases:
        _check_case(case, directions, cycles)
    clocks_for(device, settings)  # refuses what the device cannot do before anything runs
    if cycles:
        from flashlane.profile.tools import need_ncu

        need_ncu(device, "--cycles")
    results = Results(
        environment=environment(device),
        settings={
            **asdict(settings),
            "check": check,
            "rule": rule,
            "seed": seed,
            "directions": list(directions),
            "inputs": describe_inputs(cases, pattern),
            "protocol": settings.protocols[0],
            "order": f"interleaved round by round, each in an order of its own (seed {settings.order_seed})",
            "calls": "the public function, its own allocation included",
        },
        unlisted=selection.unlisted,
    )
    if ceilings:
        reporter.step("measuring the ceilings of the device", advance=False)
        dtypes = tuple(dict.fromkeys(case.problem.dtype_name for case in cases))
        try:
            results.environment["ceilings"] = measure_rates(device, dtypes).as_dict()
        except RuntimeError as error:
            results.notes.append(f"--ceilings: {first_line(error)}")
    plan = _Plan(device, selection, check, rule, settings, pattern, memory, cycles, reporter)
    try:
        for number, case in enumerate(cases):
            for direction in directions:
                _run_case(case, direction, results, plan, seed + number)
    except (KeyboardInterrupt, BrokenContext) as error:
        if not keep_partial:
            raise
        results.stopped = str(error) if isinstance(error, BrokenContext) else STOPPED
        return results
    if arch is not None:
        compile_cases(cases, results, arch, time.monotonic() + arch_seconds, selection, reporter, directions)
    return results


@dataclass(frozen=True)
class _Plan:
    """The arguments that all problems of a run share."""

    device: torch.device
    selection: Selection
    check: bool
    rule: Rule
    settings: Settings
    pattern: Pattern
    memory: bool
    cycles: bool
    reporter: Reporter


def resolve_device(device: torch.device | str | None) -> torch.device:
    """A device of this machine, with its index; None gives the current GPU, or the CPU without one.

    Raises:
        ValueError: there is no such device; the message names those that exist.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    try:
        requested = torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device is {str(device)!r}; it may be cpu, cuda or cuda:N") from None
    if requested.type == "cpu":
        return requested
    if requested.type != "cuda":
        raise ValueError(f"--device is {str(device)!r}; it may be cpu, cuda or cuda:N")
    if (requested.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device here (see flashlane doctor), only cpu"
        raise ValueError(f"--device is {str(device)!r}; there is {there}")
    index = torch.cuda.current_device() if requested.index is None else requested.index
    return torch.device("cuda", index)


def _check_directions(directions: Sequence[Direction], settings: Settings) -> None:
    for direction in directions:
        if direction not in DIRECTIONS:
            raise ValueError(f"directions has {direction!r}; it may hold {', '.join(map(repr, DIRECTIONS))}")
    if settings.graph and set(directions) != {"forward"}:
        raise ValueError(
            "--graph replays forward passes; it goes without --backward and --both (autograd runs a backward on the "
            "stream of its forward, which a graph of the backward alone cannot hold)"
        )


TAKEN = (*VARLEN, *CACHE, *PAGED, *BIAS)
"""The features of a problem for which the bench draws tensors, or takes them from a case."""


def _check_case(case: Case, directions: Sequence[Direction], cycles: bool) -> None:
    problem = case.problem
    title = f"problem {problem.describe()}"
    for name in (*FEATURES, "needs_grad"):
        value = getattr(problem, name)
        # A feature that is a number (a soft cap) needs no tensor.
        if value and name not in TAKEN and (type(value) is bool or name in DROPOUT):
            raise ValueError(f"{title} has {name}; the bench takes forward problems without")
    undrawn = [name for name in CACHE if name != "seqused_k" and getattr(problem, name)]
    if undrawn and case.inputs is None:
        raise ValueError(f"{title} has {undrawn[0]} and no tensors; it comes as a Case with inputs")
    if problem.varlen and case.inputs is None and case.lengths and len(case.lengths) != problem.batch:
        raise ValueError(
            f"{title} has {problem.batch} packed sequences and {len(case.lengths)} lengths; a Case gives the length of "
            f"each, or none where all are as long as the problem says"
        )
    laid_out = [name for name in (*VARLEN, *CACHE, *PAGED) if getattr(problem, name)]
    if laid_out and cycles:
        raise ValueError(f"--cycles counts dense problems; {problem.describe()} has {laid_out[0]}")
    undifferentiable = [name for name in (*CACHE, *PAGED, *BIAS) if getattr(problem, name)]
    if undifferentiable and set(directions) != {"forward"}:
        raise ValueError(f"{title} has {undifferentiable[0]}; the bench differentiates problems without")


def _run_case(case: Case, direction: Direction, results: Results, plan: _Plan, seed: int) -> None:
    device, reporter, title = plan.device, plan.reporter, case.title + TITLES[direction]
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.no_grad():
        try:
            inputs = case.materialise(device, seed, plan.pattern)
            work = prepare(case.problem, inputs, direction, plan.selection, device, seed)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            tags = [k.tag for k in plan.selection.kernels()] + [peer.tag for peer in plan.selection.peers]
            results.skipped += [Skipped(title, tag, "out of memory: its tensors do not fit") for tag in tags]
            free_memory(device)
            return
        results.skipped += [Skipped(title, tag, reason) for tag, reason in work.skipped]
        slow = expected.warning(work.sequences, direction, len(work.items)) if device.type == "cpu" else ""
        reporter.begin(title + slow, len(work.items) * (2 + plan.settings.rounds))
        oracle = _oracle(work, plan) if plan.check else None
        checked = [_check(title, item, oracle, work, plan) for item in work.items]
        del oracle
        free_memory(device)
        running = [c for c in checked if c.runs]
        rotations = _rotations(case, work, plan, seed) if plan.settings.rotate else []
        _time(running, work, plan, results, rotations)
        if plan.cycles:
            _count_cycles(running, work, results, plan, seed)
        results.rows += _compared([c.row for c in checked])
    del inputs, work, checked, running, rotations
    free_memory(device)


MOST_ROTATIONS = 64
L2_SHARE = 4
"""The sets of inputs between which calls alternate have this many times the size of L2 together; at least two."""


def _rotations(case: Case, work: Work, plan: _Plan, seed: int) -> list[Work]:
    """The problem with further sets of inputs, between which calls alternate with :attr:`Settings.rotate`."""
    if plan.device.type != "cuda" or case.inputs is not None:
        return []
    l2 = torch.cuda.get_device_properties(plan.device).L2_cache_size
    one = sum(t.nbytes for t in (work.inputs.q, work.inputs.k, work.inputs.v))
    count = max(2, min(MOST_ROTATIONS, math.ceil(L2_SHARE * l2 / one)))
    made = []
    for number in range(1, count):
        inputs = case.materialise(plan.device, seed + 7919 * number, plan.pattern)
        made.append(prepare(case.problem, inputs, work.direction, plan.selection, plan.device, seed))
    return made


def _time(running: list[_Checked], work: Work, plan: _Plan, results: Results, rotations: Sequence[Work] = ()) -> None:
    """Time the implementations that passed their check, interleaved, and complete their rows."""
    items, device = [c.item.as_called for c in running], plan.device
    if rotations:
        alike = [{item.tag: item.as_called.call for item in other.items} for other in rotations]
        items = [rotating(item, [calls[item.tag] for calls in alike]) for item in items]
    clocks = clocks_for(device, plan.settings)
    timings = measure_by(clocks, items, plan.settings, lambda tag: plan.reporter.step(f"{TIMING}{tag}"))
    costs = host_cost(items, device) if plan.settings.graph else {}
    for entry, timing in zip(running, timings, strict=True):
        entry.row = _timed(entry.row, timing, work)
        share = _share(entry, work, device, results)
        entry.row = replace(entry.row, host_us=costs.get(entry.item.tag), mma_ceiling=share)


def _share(entry: _Checked, work: Work, device: torch.device, results: Results) -> float | None:
    """The row's share of the mma.sync ceiling; None, and a note, where that cannot be measured."""
    if work.direction != "forward":
        return None
    try:
        return share_of_ceiling(entry.item.kernel, work.problem, entry.row.tflops, device)
    except Exception as error:
        note = f"% mma ceiling: {first_line(error)}"
        results.notes += [] if note in results.notes else [note]
        return None


def _count_cycles(running: list[_Checked], work: Work, results: Results, plan: _Plan, seed: int) -> None:
    from flashlane.profile.ncu import CYCLES, count

    tags = [c.item.tag for c in running]
    plan.reporter.step("counting cycles with ncu", advance=False)
    problem = replace(work.problem, needs_grad=False)
    try:
        counted = count(problem, tags, work.direction, metrics=(CYCLES,), seed=seed, device=plan.device)
    except RuntimeError as error:  # the timings are kept
        results.notes.append(f"--cycles: {error}")
        return
    for entry in running:
        launches = counted.get(entry.item.tag, ())
        if launches:
            entry.row = replace(entry.row, cycles=sum(launch.metrics.get(CYCLES, 0.0) for launch in launches))


def _oracle(work: Work, plan: _Plan) -> Oracle | GradientOracle:
    if work.direction == "forward":
        return Oracle(work.problem, work.inputs, plan.rule)
    return GradientOracle(work.problem, work.inputs, work.do)


def _check(
    title: str, item: Implementation, oracle: Oracle | GradientOracle | None, work: Work, plan: _Plan
) -> _Checked:
    plan.reporter.step(f"{CHECKING}{item.tag}")
    problem, device = work.problem, plan.device
    row = Row(title, sizes_of(problem), item.tag, item.kind, UNCHECKED, direction=work.direction)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            work.poison()
            with item.context():
                returned = item.call()
            synchronize(device)
            result = work.out if item.kind == "kernel" and work.direction == "forward" else returned
            row = replace(row, values=first_second_last(result), usage=_usage(item, problem))
            if oracle is not None:
                row = _judged(row, oracle, item, result, work.lse)
            del result, returned
            if plan.memory and row.status in (OK, UNCHECKED):
                with item.context():
                    row = replace(row, memory=measure_memory(item.as_called.call, device))
        except Exception as error:  # after any error the row reports it, and the run continues
            row = replace(row, status=ERROR, message=explained(error, heard))
            stop_if_broken(device, item.tag, problem, error)
            free_memory(device)
    # The allowed error is computed from plain PyTorch's own, which sometimes exceeds it: it is timed in any case.
    plain = item.tag == PLAIN and row.status == FAIL
    return _Checked(item, row, runs=plain or row.status in (OK, UNCHECKED))


def _judged(
    row: Row,
    oracle: Oracle | GradientOracle,
    item: Implementation,
    result: torch.Tensor | Sequence[torch.Tensor],
    lse: torch.Tensor,
) -> Row:
    try:
        oracle.reference  # noqa: B018  computed here, so that its out-of-memory error is not taken for the kernel's
    except Exception as error:
        if not out_of_memory(error):
            raise
        return replace(row, status=ERROR, message="the reference ran out of memory; --no-check times without it")
    verdict = _verdict(oracle, item, result, lse)
    return replace(row, verdict=verdict, status=OK if verdict.ok else FAIL, message=verdict.message)


def _verdict(
    oracle: Oracle | GradientOracle,
    item: Implementation,
    result: torch.Tensor | Sequence[torch.Tensor],
    lse: torch.Tensor,
) -> Verdict:
    if isinstance(oracle, GradientOracle):
        return oracle.judge(result)
    emulation = item.kernel.low_precision_reference(oracle.problem) if item.kernel else STANDARD
    return oracle.judge(result, lse if item.kind == "kernel" else None, emulation)


class BrokenContext(RuntimeError):
    """A kernel left the device unusable for this process; the message names the kernel and the problem."""


def stop_if_broken(device: torch.device, tag: str, problem: AttentionProblem, error: Exception) -> None:
    """Raise :class:`BrokenContext` if the device is unusable: later rows would otherwise blame the wrong kernel."""
    try:
        synchronize(device)
    except RuntimeError as broken:
        raise BrokenContext(
            f"{tag} broke the CUDA context on {problem.describe()}: {first_line(error)}; nothing after it can run in "
            "this process (run it alone with --kernels, under compute-sanitizer)"
        ) from broken


def out_of_memory(error: Exception) -> bool:
    """Whether an error of torch says that memory ran out, or that no memory could hold so many bytes."""
    text = str(error).lower()
    words = ("out of memory", "can't allocate memory", "storage size calculation overflowed")
    return isinstance(error, torch.OutOfMemoryError) or any(each in text for each in words)


def explained(error: Exception, heard: Sequence[warnings.WarningMessage]) -> str:
    """An error on one line; for a backend that torch refuses, the reasons, which torch gives as warnings."""
    if out_of_memory(error):
        return "out of memory"
    text = first_line(error)
    if "No available kernel" in text:
        causes = dict.fromkeys(str(w.message).splitlines()[0].split(" (Triggered")[0] for w in heard)
        text = "; ".join(c for c in causes if c and not c.endswith("because:")) or text
    return text


def _timed(row: Row, timings: dict[str, Timing] | Exception, work: Work) -> Row:
    if isinstance(timings, Exception):
        return replace(row, status=ERROR, message=f"while timing: {explained(timings, ())}")
    timing = next(iter(timings.values()))

    def rate(ms: float, convention: Convention) -> float | None:
        total = sum(tflops(one, ms, convention, work.direction) for one in work.sequences) if ms else 0
        return total or None  # without queries or keys there is nothing to count

    usual, peak, mean = (rate(ms, "gemm") for ms in (timing.median, timing.fastest, timing.mean))
    rates = {"tflops": usual, "tflops_peak": peak, "tflops_mean": mean, "tflops_all": rate(timing.median, "all")}
    return replace(row, timing=timing, timings=timings, **rates)


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Each row's speed-up over the best peer that ran and did not fail."""
    peers = [r.timing.median for r in rows if r.kind == "peer" and r.timing and r.status in (OK, UNCHECKED)]
    if not peers:
        return list(rows)
    best = min(peers)
    return [replace(r, speedup=best / r.timing.median) if r.timing and r.timing.median else r for r in rows]


def compile_cases(
    cases: Sequence[Case],
    results: Results,
    arch: str,
    deadline: float,
    selection: Selection,
    reporter: Reporter,
    directions: Sequence[str] = ("forward",),
) -> None:
    """Add the compile report of each distinct problem to results."""
    kernels: list[CompiledKernel] = [k for k in selection.kernels() if isinstance(k, CompiledKernel)]
    if set(directions) != {"forward"}:
        kernels += backward_device_kernels((*selection.words, *selection.tags))
    if not kernels:
        return
    for problem in dict.fromkeys(case.problem for case in cases):
        reporter.begin(f"compiling for {arch}: {problem.describe()}", len(kernels))
        try:
            results.compiled += report_problem(
                problem, arch, kernels, lambda tag: reporter.step(f"compiled {tag}"), deadline
            )
        except ToolchainError as error:  # nothing that was timed needs it
            results.notes.append(f"the GPU kernels are not compiled for {arch}: {error}")
            return


def _usage(item: Implementation, problem: AttentionProblem) -> Usage | None:
    if not isinstance(item.kernel, DeviceKernel) or problem.arch is None:
        return None
    return usage_of(item.kernel, item.kernel.config(problem), problem.arch, instructions=False)


def sizes_of(problem: AttentionProblem) -> dict[str, object]:
    """The sizes of a problem for a results file; those that not every problem has only if they are set."""
    page = getattr(problem, *PAGED)
    used = any(getattr(problem, name) for name in CACHE)
    layout = "packed" if problem.varlen else "paged" if page else "cache" if used else ""
    window = (problem.window_left, -1 if problem.causal else problem.window_right)
    sizes = {
        "head_dim_v": problem.head_dim_v if problem.head_dim_v != problem.head_dim else 0,
        "layout": layout,
        "page": page,
        "window": list(window) if max(window) >= 0 else [],
    }
    return {
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "dtype": problem.dtype_name,
        "causal": problem.causal,
        **{name: value for name, value in sizes.items() if value},
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
