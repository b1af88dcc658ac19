"""``flashlane roofline``: what bounds each problem on this device, and how near each implementation comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread

if TYPE_CHECKING:
    from flashlane.bench.measure.device_rates import DeviceRates, Placed
    from flashlane.bench.measure.results import Results


@spread
def roofline_command(
    sizes: s.DENSE_SIZES = s.NO_SIZES,
    tags: o.Tags = "",
    kernels: o.Kernels = "",
    peers: o.Peers = "all",
    results: Annotated[
        Path | None,
        o.option("--results", help="Place the rows of this results file instead of measuring some.", panel=o.INPUT),
    ] = None,
    backward: o.Backward = False,
    iters: o.Rounds = None,
    quick: o.Quick = False,
    seed: o.Seed = 0,
    device: o.Device = None,
    dark: Annotated[bool, o.option("--dark", help="A picture light on dark.", panel=o.OUTPUT)] = False,
    formats: Annotated[
        str, o.option("--format", help="Of the picture: png, svg, or both.", panel=o.OUTPUT, autocompletion=o.FORMATS)
    ] = "png",
    out: o.Out = o.RESULTS,
) -> None:
    """Measure this device's copy and matrix rates, place each implementation under them, say what bounds it.

    The copy rate is that of a large copy, the matrix rate that of torch's own product (and, for kernels on mma.sync,
    of that instruction from registers). Operations a byte count each input read once and each output written once.
    Writes ceilings.json (for plot --ceilings and report), and a picture where matplotlib is installed. Runs on a CPU
    too.

    Exit status: 0 done, 1 a kernel's check failed or nothing could run, 2 bad input, 3 the files could not be written
    where they should be.

    Examples:

      flashlane roofline --N 512:16384:x2 --D 64,128 --tags split-q --peers flash,cudnn

      flashlane roofline --results results/sweep.json --format svg
    """
    from flashlane.bench.measure.device_rates import FORMAT, measure_rates, place
    from flashlane.bench.measure.environment import environment
    from flashlane.bench.measure.results import check_writable, finite, load_results
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.bench.measure.saved_files import save_files
    from flashlane.bench.present import figure_frame
    from flashlane.bench.present.table import make_console
    from flashlane.core.files import write_atomically
    from flashlane.inspect.fitted_table import say

    where = resolve_device(device)
    suffixes = o.words_of(formats)
    if not suffixes or set(suffixes) - {"png", "svg"}:
        raise ValueError(f"--format is {formats!r}; it may be png, svg, or both in a list")
    console = make_console()
    if results is not None:
        rows = {"--tags": tags, "--kernels": kernels, "--peers": "" if peers == "all" else peers}
        measured = {"--backward": backward, "--iters": iters, "--quick": quick, "--seed": seed or None}
        o.refuse({**sizes.changed(), **rows, **measured}, "is given with --results, whose rows are measured already")
        loaded = load_results(results)
        here = environment(where)["device"]
        if loaded.environment.get("device") != here:
            raise ValueError(f"--results: {results} was measured on {loaded.environment.get('device')}, this is {here}")
        check_writable(out)
    else:
        problems = sizes.problems(where, quick)
        loaded = _bench(problems, where, tags, kernels, peers, backward, iters, quick, seed, out)
    dtypes = tuple(dict.fromkeys(str(row.sizes.get("dtype")) for row in loaded.rows)) or ("f16",)
    with console.status("measuring the rates of the device …"):
        ceilings = measure_rates(where, dtypes)
    points = place(loaded.rows, ceilings)
    body = {"format": FORMAT, "environment": loaded.environment, "ceilings": ceilings.as_dict()}
    body["points"] = [asdict(p) | {"share": p.share, "bound_by": p.bound_by} for p in points]
    writers = {"ceilings.json": partial(write_atomically, text=json.dumps(finite(body), indent=1) + "\n")}
    missing = ""
    try:
        figure_frame.need_matplotlib()
    except ImportError as error:
        missing = f"no picture: {error}"
    else:
        writers |= _pictures(points, ceilings, loaded, suffixes, dark)
    saved = save_files(out, writers)
    _print(points, ceilings, loaded, console)
    saved.report_to(console)
    if missing:
        say(console, missing, "yellow")
    if results is None:
        o.check_timed(loaded)
        o.end(loaded, saved)
    if saved.problem:
        raise typer.Exit(o.NOT_WRITTEN)


def _bench(
    problems: list[Any],
    where: Any,
    tags: str,
    kernels: str,
    peers: str,
    backward: bool,
    iters: int | None,
    quick: bool,
    seed: int,
    out: Path,
) -> Results:
    from flashlane.bench.measure.peers import select_peers
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import Selection, run
    from flashlane.bench.present.comparison import representatives
    from flashlane.cli.measuring import settings_for

    words, exact = o.words_of(tags), o.words_of(kernels)
    if not words and not exact:
        exact = tuple(dict.fromkeys(tag for problem in problems for tag in representatives(problem)))
    directions = o.directions_of(False, backward, False)
    selection, settings = Selection(words, exact, select_peers(peers)), settings_for(where, quick, None, iters, False)
    check_writable(out)
    with Bar(len(problems) * len(directions)) as reporter:
        return run(
            problems,
            device=where,
            selection=selection,
            settings=settings,
            directions=directions,
            seed=seed,
            reporter=reporter,
        )


def _print(points: list[Placed], ceilings: DeviceRates, results: Results, console: Any) -> None:
    from rich.text import Text

    from flashlane.bench.measure.device_rates import sentence
    from flashlane.bench.present.table import print_reasons
    from flashlane.inspect.fitted_table import Column, make_table, significant

    columns = [
        Column("TFLOP/s", lambda p: significant(p.tflops)),
        Column("ceiling", lambda p: significant(p.attainable)),
        Column("of ceiling", lambda p: f"{p.share:.1%}"),
        Column("FLOP/byte", lambda p: f"{p.intensity:.0f}", drop=1),
        Column("bound by", lambda p: p.bound_by, justify="left", fold=True),
    ]
    rates = [f"copy {ceilings.copy / 1000:.3g} TB/s"]
    rates += [f"{dtype} matrix product {rate:.3g} TFLOP/s" for dtype, rate in ceilings.matrix.items()]
    rates += [f"{dtype} mma.sync {rate:.3g} TFLOP/s" for dtype, rate in ceilings.mma.items()]
    console.print(f"{results.environment['device']}: {'; '.join(rates)}", style="bold", markup=False)
    for problem in dict.fromkeys(p.problem for p in points):
        members = sorted((p for p in points if p.problem == problem), key=lambda p: -p.tflops)
        console.print(make_table(members, columns, problem, console.width))
        console.print(Text(sentence(members), "bold"))
        console.print()
    placed = {p.problem for p in points}
    print_reasons(
        [(skip.tag, skip.reason) for skip in results.skipped if skip.problem not in placed], "not run", console
    )


def _pictures(
    points: list[Placed], ceilings: DeviceRates, results: Results, suffixes: tuple[str, ...], dark: bool
) -> dict[str, Callable[[Path], None]]:
    """What writes each picture, by its name."""
    from flashlane.bench.present import figure_frame
    from flashlane.bench.present.roofline import roofline_figure

    if not points:
        return {}
    theme = figure_frame.DARK if dark else figure_frame.LIGHT
    picture = roofline_figure(points, ceilings, results.environment, theme=theme)
    return {f"roofline{'-dark' * dark}.{suffix}": partial(figure_frame.replace, picture) for suffix in suffixes}
