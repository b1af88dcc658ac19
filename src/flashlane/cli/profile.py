"""``flashlane profile``: where the time of one implementation goes."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread

if TYPE_CHECKING:
    from rich.console import Console

    from flashlane.inspect.fitted_table import Column
    from flashlane.profile.ncu import Launch
    from flashlane.profile.nsys import KernelTime
    from flashlane.profile.target import Request
    from flashlane.profile.trace import Trace

PROGRAMS = {"torch": "torch's profiler", "ncu": "Nsight Compute", "nsys": "Nsight Systems"}
TOOLS = tuple(PROGRAMS)
SETS = ("full", "detailed", "basic", "roofline", "source")
FORMAT = "flashlane-profile/1"
MOST = 14
"""Operations shown; the trace has them all."""


@dataclass
class Profile:
    """What the tools said."""

    trace: Trace | None = None
    counted: dict[str, list[Launch]] = field(default_factory=dict)
    kernels: list[KernelTime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: bool = False
    """Whether a file could not be written; a note says which."""
    failed: list[str] = field(default_factory=list)
    """Why tools that were asked for by name failed."""


Tag = Annotated[
    list[str] | None,
    o.option(
        "--tag",
        help="A kernel or (peer), by its whole tag. Repeatable. Default: auto's.",
        panel=o.WHICH,
        autocompletion=complete.one_of("tags"),
    ),
]
Tool = Annotated[
    str,
    o.option(
        "--tool",
        help=f"{', '.join(TOOLS)}, a list, or all: those that are here.",
        panel=o.MEASURE,
        autocompletion=complete.list_of((*TOOLS, "all")),
    ),
]
Backward = Annotated[bool, o.option("--backward", help="The backward pass instead.", panel=o.MEASURE)]
Calls = Annotated[int, o.option("--calls", help="Calls that torch's profiler and nsys see.", panel=o.MEASURE)]
Metrics = Annotated[str, o.option("--metrics", help="Further counters for ncu, in a list.", panel=o.MEASURE)]
Sections = Annotated[
    str | None,
    o.option(
        "--set",
        help="Also write a .ncu-rep for Nsight Compute's window, with this set of sections: full, detailed, basic.",
        panel=o.MEASURE,
        autocompletion=complete.one_of(SETS),
    ),
]
ShowCommands = Annotated[
    bool,
    o.option("--show-commands", help="Print the command lines of ncu and nsys, and run nothing.", panel=o.OUTPUT),
]
Out = Annotated[Path, o.option("--out", help="Folder for the traces and tables.", panel=o.OUTPUT)]


@spread
def profile_command(
    tag: Tag = None,
    sizes: s.DENSE_SIZES = s.NO_SIZES,
    tool: Tool = "torch",
    backward: Backward = False,
    calls: Calls = 10,
    metrics: Metrics = "",
    sections: Sections = None,
    show_commands: ShowCommands = False,
    seed: o.Seed = 0,
    device: o.Device = None,
    out: Out = Path("profiles"),
) -> None:
    """Profile one implementation on one problem: torch's profiler, Nsight Compute, Nsight Systems.

    torch: a Chrome trace (open it in chrome://tracing or ui.perfetto.dev) with a range for each call, and a table of
    the operations; runs on a CPU too. ncu: the counters of every kernel launch of one call (DRAM, L2, SM, tensor and
    MUFU pipes, occupancy, bank conflicts, stall reasons) and what bounds it; the clocks are left alone, so cycles
    repeat. --set full also writes a report with every section, for ncu-ui or ncu --import. nsys: a timeline and the
    time of each kernel. A tool that is not here is named with how to get it.

    Exit status: 0 done, 2 bad input, or a tool that was asked for by name is not here or failed, 3 a file could not be
    written where it should be.

    Examples:

      flashlane profile --tag tiled --N 1024 --D 64

      flashlane profile --tag "mma(split-q+acc-f32+swizzle-qkv+stage1)" --tag "(flash)" --preset long --tool all

      flashlane profile --tag "hopper(wgmma+tma)" --N 4096 --D 128 --tool ncu --set full

      flashlane profile --tag "(cudnn)" --backward --tool ncu --metrics lts__t_bytes.sum
    """
    from flashlane.bench.measure.environment import environment
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable, file_stem, finite
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.bench.measure.saved_files import save_texts
    from flashlane.bench.present.table import make_console
    from flashlane.profile.target import Request, selection_of
    from flashlane.profile.tools import need_ncu

    where = resolve_device(device)
    if calls < 1:
        raise ValueError(f"--calls is {calls}; it must be at least 1")
    problems = sizes.problems(where, first=True)
    if len(problems) != 1:
        raise ValueError(f"the sizes name {len(problems)} problems; a profile is of one")
    tags = tuple(dict.fromkeys(tag or (_auto(problems[0]),)))
    with o.named("--tag"):
        selection_of(tags)
    direction = "backward" if backward else "forward"
    request = Request(problems[0], tags, direction, seed, str(where), calls)
    if show_commands:
        _show_commands(request, out, metrics, sections)
        return
    if sections is not None:
        if not re.fullmatch(r"[\w-]+", sections):
            raise ValueError(f"--set is {sections!r}; it may be {', '.join(SETS)}, as ncu --list-sets has them")
        need_ncu(where, "--set")
    tools, by_name = _tools(tool, where)
    if sections is not None and "ncu" not in tools:
        tools = (*tools, "ncu")
    check_writable(out)
    name = file_stem(f"{problems[0].describe()} {direction}", "profile")
    profile, console = Profile(), make_console()
    body = {"format": FORMAT, "environment": environment(where), "problem": problems[0].describe()}
    body |= {"tags": list(tags), "direction": direction}
    status = 0
    with Bar(len(tools)) as reporter:
        for each in tools:
            reporter.begin(f"{PROGRAMS[each]}: {problems[0].describe()}", 1)
            try:
                _profile(each, request, out / name, metrics, sections, profile, by_name)
            except KeyboardInterrupt:
                status = o.INTERRUPTED
            saved = save_texts(out, {f"{name}.json": json.dumps(finite(body | _as_json(profile)), indent=1) + "\n"})
            if status:
                break
    print_profile(profile, request, console)
    others = sorted(path for path in out.glob(f"{name}*") if path not in saved.paths)
    replace(saved, paths=(*saved.paths, *others)).report_to(console)
    notes = make_console(stderr=True)
    for problem in profile.failed:
        notes.print(f"error: {problem}", style="bold red", soft_wrap=True, markup=False)
    if status:
        notes.print("interrupted; what was done before is kept", style="bold yellow")
    status = status or (o.NOT_WRITTEN if saved.problem or profile.lost else 0) or (2 if profile.failed else 0)
    if status:
        raise typer.Exit(status)


def _auto(problem: Any) -> str:
    from flashlane.core.dispatch import select

    return select(problem).tag


def _tools(text: str, device: Any) -> tuple[tuple[str, ...], bool]:
    """The tools to use, and whether they were asked for by name (then each must be there)."""
    from flashlane.profile.tools import NSYS, need_ncu

    words = o.words_of(text)
    if words == ("all",):
        return TOOLS, False
    if not words or set(words) - set(TOOLS):
        raise ValueError(f"--tool is {text!r}; it may be {', '.join(TOOLS)}, a list of them, or all")
    if "ncu" in words:
        need_ncu(device, "--tool ncu")
    if "nsys" in words:
        NSYS.need("--tool nsys")
    return words, True


def _profile(
    tool: str, request: Request, stem: Path, metrics: str, sections: str | None, profile: Profile, by_name: bool
) -> None:
    """One tool's part; what cannot be done is a note, or an error where the tool was asked for."""
    from flashlane.core.files import NotWritten
    from flashlane.profile import ncu, nsys, trace
    from flashlane.profile.tools import NSYS, need_ncu

    try:
        if tool == "torch":
            profile.trace = trace.record(request, stem.with_suffix(".trace.json"))
        elif tool == "ncu":
            need_ncu(_device(request), "--tool ncu")
            wanted = (*ncu.all_metrics(), *o.words_of(metrics))
            report = None if sections is None else stem.with_name(f"{stem.name}.ncu-rep")
            profile.counted = ncu.count(
                request.problem, request.tags, request.direction, metrics=wanted, seed=request.seed,
                device=request.device, report=report, sections=sections or "",
            )  # fmt: skip
            if report is not None:
                profile.notes.append(f"open it: ncu-ui {report}, or ncu --import {report} --page details")
        else:
            profile.kernels = nsys.record(NSYS.need("--tool nsys"), request, stem.with_suffix(".nsys-rep"))
    except NotWritten as error:
        profile.lost = True
        profile.notes.append(str(error))
    except RuntimeError as error:
        wanted_by = "--set" if tool == "ncu" and sections is not None else f"--tool {tool}" if by_name else None
        (profile.notes if wanted_by is None else profile.failed).append(f"{wanted_by or PROGRAMS[tool]}: {error}")
    except ValueError as error:
        if by_name or tool == "torch":
            raise
        profile.notes.append(str(error))


def _device(request: Request) -> Any:
    import torch

    return torch.device(request.device)


def _show_commands(request: Request, out: Path, metrics: str, sections: str | None) -> None:
    import sys

    from flashlane.profile import ncu, nsys
    from flashlane.profile.tools import NCU, NSYS

    spec = Path(tempfile.gettempdir()) / "flashlane-request.json"
    spec.write_text(request.to_json(), encoding="utf-8")
    target = [sys.executable, "-m", "flashlane.profile.target", str(spec)]
    names = ",".join((*ncu.all_metrics(), *o.words_of(metrics)))
    command = [NCU.path or NCU.command, "--clock-control", "none", "--profile-from-start", "off", "--metrics", names]
    typer.echo(f"# {spec} holds the request\n{shlex.join([*command, *target])}")
    report = ncu.report_command(NCU.path or NCU.command, target, out / "report.ncu-rep", sections or "full")
    typer.echo(shlex.join(report))
    typer.echo(shlex.join(nsys.command(NSYS.path or NSYS.command, spec, out / "timeline.nsys-rep")))
    for tool in (NCU, NSYS):
        if tool.path is None:
            typer.echo(f"# {tool.remedy}")


def _as_json(profile: Profile) -> dict[str, Any]:
    from flashlane.profile.ncu import to_json

    body: dict[str, Any] = {"notes": [*profile.notes, *profile.failed], "ncu": json.loads(to_json(profile.counted))}
    body["nsys"] = [asdict(kernel) for kernel in profile.kernels]
    if profile.trace is not None:
        trace = profile.trace
        body["torch"] = {"trace": trace.path.name, "operations": [asdict(x) for x in trace.operations]}
        body["torch"]["ranges"] = [asdict(x) for x in trace.ranges]
    return body


def print_profile(profile: Profile, request: Request, console: Console) -> None:
    """A table for each tool, then what could not be done."""
    from flashlane.inspect.fitted_table import Column, say

    title = f"{request.problem.describe()}, {request.direction}"
    if profile.trace is not None:
        _print_trace(profile.trace, title, console)
    for tag, launches in profile.counted.items():
        for launch in launches:
            _print_launch(tag, launch, console)
    if profile.kernels:
        columns = [
            Column("calls", lambda k: str(k.calls)),
            Column("total µs", lambda k: f"{k.total:.1f}"),
            Column("median µs", lambda k: f"{k.median:.1f}"),
        ]
        _print_table(f"{title} · nsys", "kernel", profile.kernels[:MOST], lambda k: k.name, columns, console)
    for note in profile.notes:
        say(console, note, "yellow")


def _print_trace(trace: Trace, title: str, console: Console) -> None:
    from flashlane.inspect.fitted_table import Column

    device = trace.on_device
    names = {True: ("device self µs", "device µs"), False: ("CPU self µs", "CPU µs")}[device]
    own, overall = ("device_self", "device_total") if device else ("cpu_self", "cpu_total")
    total = sum(getattr(x, own) for x in trace.operations) or 1.0
    columns = [
        Column("calls", lambda x: str(x.calls), drop=2),
        Column(names[0], lambda x: f"{getattr(x, own):.1f}"),
        Column("share", lambda x: "" if x in trace.ranges else f"{getattr(x, own) / total:.0%}"),
        Column(names[1], lambda x: f"{getattr(x, overall):.1f}", drop=1),
        Column("MiB", lambda x: f"{(x.device_bytes if device else x.cpu_bytes) / 2**20:.2f}", drop=3),
    ]
    shown = (*trace.ranges, *trace.operations[:MOST])
    _print_table(f"{title} · torch profiler", "operation", shown, lambda x: x.name, columns, console)
    left = len(trace.operations) - MOST
    if left > 0:
        console.print(f"{left} more in the JSON file", style="dim")


def _print_launch(tag: str, launch: Launch, console: Console) -> None:
    from rich.text import Text

    from flashlane.inspect.fitted_table import Column
    from flashlane.profile.ncu import meaning

    stalls = [(f"stalled: {meaning(reason)}", f"{share:.0%}") for reason, share in launch.stalls[:6]]
    columns = [Column("value", lambda line: line[1])]
    title = f"{tag} · {launch.kernel[:80]}"
    _print_table(title, "counter", [*launch.rows(), *stalls], lambda line: line[0], columns, console)
    console.print(Text(launch.bound_by, "bold"))
    console.print()


def _print_table(
    title: str,
    head: str,
    rows: Sequence[Any],
    name: Callable[[Any], str],
    columns: Sequence[Column],
    console: Console,
) -> None:
    from flashlane.inspect.fitted_table import make_table

    console.print(make_table(rows, columns, title, console.width, head=head, name=name))
    console.print()
