"""The main job: every kernel and every baseline on every problem, checked, then timed against each other."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from flashlane import registry
from flashlane.bench.check import STANDARD, Oracle, Rule
from flashlane.bench.compile_report import Usage, first_line, report_problem, usage_of
from flashlane.bench.environment import environment
from flashlane.bench.flops import tflops
from flashlane.bench.inputs import RANDOM, Case, Pattern
from flashlane.bench.peers import PEERS, Peer, peer_tags
from flashlane.bench.progress import Reporter, Silent
from flashlane.bench.results import ERROR, FAIL, OK, UNCHECKED, Results, Row, Skipped
from flashlane.bench.timing import Settings, Timing, clock_for, measure
from flashlane.problem import AttentionProblem, Inputs, arch_of
from flashlane.registry import DeviceKernel, Kernel


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
    """Without words and tags: every kernel of the table instead of the listed ones."""

    def __post_init__(self) -> None:
        known = tuple(k.tag for k in registry.kernels())
        for tag in self.tags:
            if tag not in known:
                raise ValueError(f"--kernels has {tag!r}, which no kernel is called; {registry.suggest(tag, known)}")
        for word in self.words:
            if not any(word in tag for tag in known):
                raise ValueError(f"--tags has {word!r}, which is in no kernel's tag; {_near(word, known)}")

    def kernels(self) -> list[Kernel]:
        """The kernels asked for by name, in the order of the registry."""
        if not self.words and not self.tags:
            return list(registry.kernels(listed_only=not self.show_all))
        return [k for k in registry.kernels() if k.tag in self.tags or any(word in k.tag for word in self.words)]

    @property
    def unlisted(self) -> int:
        """How many kernels of the table are left out because nobody asked for them by name."""
        asked = self.words or self.tags
        return 0 if asked else len(registry.kernels()) - len(self.kernels())

    def declines(self, kernel: Kernel, problem: AttentionProblem) -> str | None:
        """Why a kernel that was asked for by name is left out all the same."""
        if self.accumulate_f32:
            narrow = kernel.low_precision_reference(problem).split(",")
            if any(item.strip() in ("scores=f16", "out=f16") for item in narrow):
                return "--acc-f32: it accumulates in f16"
        return None


def _near(word: str, known: tuple[str, ...]) -> str:
    if any(word in tag for tag in peer_tags()):
        return "it is in a baseline's: use --baselines"
    pieces = {piece for tag in known for piece in tag.replace("(", "+").replace(")", "+").split("+") if piece}
    return registry.suggest(word, (*sorted(pieces), *known))


@dataclass
class Implementation:
    """One thing to run on one problem: a kernel writing into shared buffers, or a peer returning its output."""

    tag: str
    kind: str
    call: Callable[[], torch.Tensor | None]
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    kernel: Kernel | None = None


@dataclass
class _Checked:
    """An implementation's row as far as the check brings it."""

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
    arch: str | None = None,
    arch_seconds: float = math.inf,
    reporter: Reporter | None = None,
) -> Results:
    """Bench problems and return every row.

    Args:
        problems: dense problems, or :class:`~flashlane.bench.inputs.Case` with tensors of their own.
        device: default: the current GPU, or the CPU without one.
        selection: which kernels and baselines; default: all that are listed.
        check: compare each output and LSE with the reference; what fails is not timed.
        rule: how close it must be, see :mod:`flashlane.bench.check`.
        settings: how long to measure.
        pattern: what fills the tensors.
        seed: of the first problem; each next one adds 1, so that no two see the same numbers.
        arch: also compile every GPU kernel for this architecture and report it (``sm_90a``).
        arch_seconds: how long that may take; kernels left out then have a line that says so.
        reporter: told where the run is.

    Raises:
        ValueError: a problem is not dense, or the device is not there.
    """
    device = resolve_device(device)
    selection, settings, reporter = selection or Selection(), settings or Settings(), reporter or Silent()
    cases = [p if isinstance(p, Case) else Case(p) for p in problems]
    cases = [replace(case, problem=case.problem.on(arch_of(device))) for case in cases]
    for case in cases:
        _check_dense(case.problem)
    clock_for(device, settings)  # refuses what the device cannot do before anything runs
    results = Results(
        environment=environment(device),
        settings={
            **asdict(settings),
            "check": check,
            "rule": rule,
            "seed": seed,
            "inputs": pattern.describe(),
            "order": "interleaved round by round, every other round reversed",
        },
        unlisted=selection.unlisted,
    )
    for number, case in enumerate(cases):
        _run_case(case, results, device, selection, check, rule, settings, pattern, seed + number, reporter)
    if arch is not None:
        _compile_cases(cases, results, arch, time.monotonic() + arch_seconds, selection, reporter)
    return results


def resolve_device(device: torch.device | str | None) -> torch.device:
    """A device that is there.

    Raises:
        ValueError: there is no such device; the message says what there is.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device is {str(device)!r}; it may be cpu, cuda or cuda:N") from None
    if asked.type == "cpu":
        return asked
    if asked.type != "cuda":
        raise ValueError(f"--device is {str(device)!r}; it may be cpu, cuda or cuda:N")
    if (asked.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device here (see flashlane doctor), only cpu"
        raise ValueError(f"--device is {str(device)!r}; there is {there}")
    index = torch.cuda.current_device() if asked.index is None else asked.index
    return torch.device("cuda", index)


def _check_dense(problem: AttentionProblem) -> None:
    for name in ("varlen", "alibi", "sinks", "dropout_p", "needs_grad"):
        if getattr(problem, name):
            raise ValueError(f"problem {problem.describe()} has {name}; the bench takes dense forward problems")


def _run_case(
    case: Case,
    results: Results,
    device: torch.device,
    selection: Selection,
    check: bool,
    rule: Rule,
    settings: Settings,
    pattern: Pattern,
    seed: int,
    reporter: Reporter,
) -> None:
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.no_grad():
        try:
            inputs = case.materialise(device, seed, pattern)
            out, lse = shared_outputs(case.problem, device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            tags = [k.tag for k in selection.kernels()] + [peer.tag for peer in selection.peers]
            results.skipped += [Skipped(case.title, tag, "out of memory: its tensors do not fit") for tag in tags]
            return
        items, skipped = _implementations(case.problem, inputs, out, lse, selection, device)
        results.skipped += [Skipped(case.title, tag, reason) for tag, reason in skipped]
        reporter.begin(case.title, len(items) * (2 + settings.rounds))
        oracle = Oracle(case.problem, inputs, rule) if check else None
        checked = [_check(case, item, oracle, out, lse, device, reporter) for item in items]
        del oracle
        free_memory(device)
        running = [c for c in checked if c.runs]
        clock = clock_for(device, settings)
        timings = measure([c.item for c in running], clock, settings, lambda tag: reporter.step(f"timing {tag}"))
        for entry, timing in zip(running, timings, strict=True):
            entry.row = _timed(entry.row, timing, case.problem)
        results.rows += _compared([c.row for c in checked])
    del inputs, out, lse, items, checked, running
    free_memory(device)


def shared_outputs(problem: AttentionProblem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One output and one LSE that all kernels write, poisoned before each check."""
    shape = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
    out = torch.full(shape, math.nan, dtype=problem.dtype, device=device)
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    return out, torch.full((shape[0], shape[2], shape[1]), math.nan, dtype=wide, device=device)


def _implementations(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    selection: Selection,
    device: torch.device,
) -> tuple[list[Implementation], list[tuple[str, str]]]:
    items, skipped = [], []
    for kernel in selection.kernels():
        reason = kernel.supports(problem) or selection.declines(kernel, problem)
        if reason is not None:
            skipped.append((kernel.tag, reason))
            continue
        items.append(Implementation(kernel.tag, "kernel", _writer(kernel, problem, inputs, out, lse), kernel=kernel))
    for peer in selection.peers:
        reason = peer.available(device) or peer.supports(problem)
        if reason is not None:
            skipped.append((peer.tag, reason))
            continue
        items.append(Implementation(peer.tag, "baseline", _Prepared(peer, problem, inputs), peer.context))
    return items, skipped


def _writer(
    kernel: Kernel, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> Callable[[], None]:
    return lambda: kernel.forward(problem, inputs, out, lse)


@dataclass
class _Prepared:
    """A peer's call, prepared at its first use, so that a peer that cannot even be prepared is a row that says so."""

    peer: Peer
    problem: AttentionProblem
    inputs: Inputs
    function: Callable[[], torch.Tensor] | None = field(default=None, repr=False)

    def __call__(self) -> torch.Tensor:
        if self.function is None:
            self.function = self.peer.prepare(self.problem, self.inputs)
        return self.function()


def _check(
    case: Case,
    item: Implementation,
    oracle: Oracle | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    device: torch.device,
    reporter: Reporter,
) -> _Checked:
    reporter.step(f"checking {item.tag}")
    problem = case.problem
    row = Row(case.title, _sizes(problem), item.tag, item.kind, UNCHECKED)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            out.fill_(math.nan)
            lse.fill_(math.nan)
            with item.context():
                returned = item.call()
            synchronize(device)
            result = out if item.kind == "kernel" else returned
            row = replace(row, values=_three(result), usage=_usage(item, problem))
            if oracle is not None:
                row = _judged(row, oracle, item, result, lse)
        except Exception as error:  # whatever it raises, the run goes on and the row says it
            row = replace(row, status=ERROR, message=explained(error, heard))
            stop_if_broken(device, item.tag, problem, error)
            free_memory(device)
    return _Checked(item, row, runs=row.status in (OK, UNCHECKED))


def _judged(row: Row, oracle: Oracle, item: Implementation, result: torch.Tensor, lse: torch.Tensor) -> Row:
    try:
        oracle.reference  # noqa: B018  computed here, so that its lack of memory is not taken for the kernel's
    except Exception as error:
        if not _out_of_memory(error):
            raise
        return replace(row, status=ERROR, message="the reference ran out of memory; --no-check times without it")
    emulation = item.kernel.low_precision_reference(oracle.problem) if item.kernel else STANDARD
    verdict = oracle.judge(result, lse if item.kind == "kernel" else None, emulation)
    return replace(row, verdict=verdict, status=OK if verdict.ok else FAIL, message=verdict.message)


def stop_if_broken(device: torch.device, tag: str, problem: AttentionProblem, error: Exception) -> None:
    """After an illegal access nothing more runs in this process, and every later row would blame the wrong kernel."""
    try:
        synchronize(device)
    except RuntimeError as broken:
        raise RuntimeError(
            f"{tag} broke the CUDA context on {problem.describe()}: {first_line(error)}; nothing after it can run in "
            "this process (run it alone with --kernels, under compute-sanitizer)"
        ) from broken


def _out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


def explained(error: Exception, heard: Sequence[warnings.WarningMessage]) -> str:
    """An error on one line; torch says why it refuses a backend in warnings, so those follow."""
    if _out_of_memory(error):
        return "out of memory"
    text = first_line(error)
    if "No available kernel" in text:
        causes = dict.fromkeys(str(w.message).splitlines()[0].split(" (Triggered")[0] for w in heard)
        text = "; ".join(c for c in causes if c and not c.endswith("because:")) or text
    return text


def _timed(row: Row, timing: Timing | Exception, problem: AttentionProblem) -> Row:
    if isinstance(timing, Exception):
        return replace(row, status=ERROR, message=f"while timing: {explained(timing, ())}")
    ms = timing.median
    return replace(
        row,
        timing=timing,
        tflops=tflops(problem, ms, "gemm") if ms else None,
        tflops_founding=tflops(problem, ms, "founding") if ms else None,
    )


def _compared(rows: Sequence[Row]) -> list[Row]:
    """Each row's speed-up over the best baseline that ran and did not fail."""
    baselines = [r.timing.median for r in rows if r.kind == "baseline" and r.timing and r.status in (OK, UNCHECKED)]
    if not baselines:
        return list(rows)
    best = min(baselines)
    return [replace(r, speedup=best / r.timing.median) if r.timing and r.timing.median else r for r in rows]


def _compile_cases(
    cases: Sequence[Case], results: Results, arch: str, deadline: float, selection: Selection, reporter: Reporter
) -> None:
    """The compile report, of each distinct problem."""
    kernels = [k for k in selection.kernels() if isinstance(k, DeviceKernel)]
    if not kernels:
        return
    for problem in dict.fromkeys(case.problem for case in cases):
        reporter.begin(f"compiling for {arch}: {problem.describe()}", len(kernels))
        results.compiled += report_problem(
            problem, arch, kernels, lambda tag: reporter.step(f"compiled {tag}"), deadline
        )


def _usage(item: Implementation, problem: AttentionProblem) -> Usage | None:
    if not isinstance(item.kernel, DeviceKernel) or problem.arch is None:
        return None
    return usage_of(item.kernel, item.kernel.config(problem), problem.arch, instructions=False)


def _three(out: torch.Tensor) -> tuple[float, ...]:
    """First, second and last element, in the order of memory of a contiguous ``(b, s, h, d)``."""
    if out.numel() == 0:
        return ()
    last = tuple(size - 1 for size in out.shape)
    flat = out[(0,) * (out.dim() - 1)]
    return tuple(float(x) for x in (flat[0], flat[min(1, flat.numel() - 1)], out[last]))


def _sizes(problem: AttentionProblem) -> dict[str, object]:
    return {
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "dtype": problem.dtype_name,
        "causal": problem.causal,
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
