"""``flashlane compare``: everything that can run a problem, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread
from flashlane.cli.isolated import COMPARED, DEFAULT

if TYPE_CHECKING:
    from rich.console import Console

    from flashlane.bench.measure.results import Results
    from flashlane.core.problem import AttentionProblem


@spread
def compare_command(
    sizes: s.ALL_SIZES = s.NO_SIZES,
    tags: Annotated[
        str,
        o.option(
            "--tags",
            help="Kernels whose tag contains one of these words. Default: what auto takes, and one a family.",
            panel=o.WHICH,
            autocompletion=complete.list_of("words"),
        ),
    ] = "",
    measured: COMPARED = DEFAULT,
) -> None:
    """Compare plain PyTorch, torch's SDPA backends, our kernels and every installed peer: time, memory, error.

    Everything runs interleaved in one process of its own. What raises has a row that says so; so has what hangs
    longer than --timeout or crashes: it is ended, and the rest is measured without it. The fastest and the one that
    takes least memory a call are named. Writes JSON, CSV and Markdown.

    Exit status: 0 done, 1 a kernel's check failed, it raised, or nothing could run, 2 bad input, 3 the files could not
    be written where they should be.

    Examples:

      flashlane compare --preset gpt2

      flashlane compare --N 4096 --D 128 --causal --backward --peers flash,cudnn,flash-attn-4

      flashlane compare --preset bert-base --peers-from my_attention.py --timeout 30
    """
    from flashlane.bench.measure.isolated import run_isolated
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import resolve_device

    where = resolve_device(measured.device)
    directions = measured.directions()
    problems = sizes.problems(where, measured.quick, first=True)
    spec = measured.spec(where, tags, problems, otherwise=_representatives)
    check_writable(measured.out)
    with Bar(len(problems) * len(directions)) as reporter:
        results = run_isolated(problems, spec, seconds=measured.timeout, seed=measured.seed, reporter=reporter)
    _finish(results, measured.out)


def _representatives(problems: list[AttentionProblem]) -> tuple[str, ...]:
    from flashlane.bench.present.comparison import representatives

    return tuple(dict.fromkeys(tag for problem in problems for tag in representatives(problem)))


def _finish(results: Results, out: Path) -> None:
    from flashlane.bench.measure.saved_files import save_results
    from flashlane.bench.present.comparison import markdown
    from flashlane.bench.present.table import make_console

    saved, console = save_results(results, out, extra={".md": markdown(results)}, kind="compare"), make_console()
    print_comparison(results, console)
    saved.report_to(console)
    o.check_timed(results)
    o.end(results, saved)


def print_comparison(results: Results, console: Console) -> None:
    """One table a problem, the fastest first, then what went wrong and the verdict."""
    from rich.text import Text

    from flashlane.bench.present.comparison import columns, standings, verdict
    from flashlane.bench.present.table import STYLES, make_table, print_reasons
    from flashlane.inspect.fitted_table import say

    where = f"{results.environment['device']}, torch {results.environment['torch']}"
    titles = dict.fromkeys([r.problem for r in results.rows] + [s.problem for s in results.skipped])
    for title in titles:
        ranked = standings([row for row in results.rows if row.problem == title])
        if ranked:
            heading, fastest = f"{title} · {where}", ranked[:1]
            table = make_table(
                ranked, columns(), heading, console.width, lambda s, best=fastest: "bold" if s in best else None
            )
            console.print(table)
        for standing in ranked:
            row = standing.row
            if row.message:
                label = Text(f"{row.status} {standing.tag}: ", STYLES.get(row.status, ""))
                say(console, label.append(row.message, "default"))
        print_reasons([(s.tag, s.reason) for s in results.skipped if s.problem == title], "not run", console)
        say(console, verdict(ranked), "bold")
        console.print()
    say(
        console,
        "× plain: times as fast as (unfused), plain PyTorch; MiB: what one call takes beyond its inputs, at the peak",
        "dim",
    )
