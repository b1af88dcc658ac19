"""``flashlane compare``: everything that can run a problem, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flashlane.cli import complete
from flashlane.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from flashlane.bench.measure.results import Results
    from flashlane.core.problem import AttentionProblem


def compare_command(
    batch: o.Batch = None,
    heads: o.Heads = None,
    seqlen: o.Seqlen = None,
    head_dim: o.HeadDim = None,
    kv_heads: o.KvHeads = None,
    seqlen_k: o.SeqlenK = None,
    head_dim_v: o.HeadDimV = None,
    layout: o.Layouts = "dense",
    page: o.Page = None,
    window: o.Window = None,
    causal: o.Causal = None,
    alignment: o.AlignmentName = "bottom-right",
    dtype: o.Dtype = None,
    preset: o.PresetName = None,
    tags: Annotated[
        str,
        o.option(
            "--tags",
            help="Kernels whose tag contains one of these words. Default: what auto takes, and one a family.",
            panel=o.WHICH,
            autocompletion=complete.list_of("words"),
        ),
    ] = "",
    kernels: o.Kernels = "",
    peers: o.Peers = "all",
    peers_from: o.PeersFrom = None,
    no_grad: o.NoGrad = False,
    backward: o.Backward = False,
    both: o.Both = False,
    check: Annotated[
        bool, o.option("--check/--no-check", help="Compare outputs (and gradients) with the formula.", panel=o.MEASURE)
    ] = True,
    warmup: o.Warmup = None,
    iters: o.Rounds = None,
    quick: o.Quick = False,
    timeout: o.Timeout = o.TIMEOUT,
    seed: o.Seed = 0,
    device: o.Device = None,
    out: o.Out = o.RESULTS,
) -> None:
    """Compare plain PyTorch, torch's SDPA backends, our kernels and every installed peer: time, memory, error.

    Everything runs interleaved in one process of its own. What raises has a row that says so; so has what hangs
    longer than --timeout or crashes: it is ended, and the rest is measured without it. The fastest and the one that
    takes least memory a call are named. Writes JSON, CSV and Markdown.

    Exit status: 0 done, 1 a kernel's check failed or it raised, 2 bad input, 3 the files could not be written where
    they should be.

    Examples:

      flashlane compare --preset gpt2

      flashlane compare --N 4096 --D 128 --causal --backward --peers flash,cudnn,flash-attn-4

      flashlane compare --preset bert-base --peers-from my_attention.py --timeout 30
    """
    from flashlane.bench.measure.isolated import Spec, run_isolated
    from flashlane.bench.measure.peers import peers_of_files, select_peers
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import Selection, resolve_device
    from flashlane.cli.measuring import settings_for

    where = resolve_device(device)
    directions = o.directions_of(no_grad, backward, both)
    o.check_timeout(timeout)
    sizes = (batch, heads, seqlen, head_dim, kv_heads, seqlen_k, dtype, causal, alignment)
    laid_out = {"head_dim_v": head_dim_v, "layout": layout, "page": page, "window": window}
    problems = o.problems_of(preset, *sizes, device=where, quick=quick, first=True, **laid_out)
    o.check_layouts(problems, directions)
    files = tuple(peers_from or ())
    peers_of_files(files)  # refused here, before anything runs
    words, exact = o.words_of(tags), o.words_of(kernels)
    if not words and not exact:
        exact = _representatives(problems)
    Selection(words, exact)
    check_writable(out)
    spec = Spec(
        str(where),
        words,
        exact,
        tuple(peer.tag for peer in select_peers(peers)),
        tuple(map(str, files)),
        directions=directions,
        settings=settings_for(where, quick, warmup, iters, graph=False),
        check=check,
    )
    with Bar(len(problems) * len(directions)) as reporter:
        results = run_isolated(problems, spec, seconds=timeout, seed=seed, reporter=reporter)
    _finish(results, out)


def _representatives(problems: list[AttentionProblem]) -> tuple[str, ...]:
    from flashlane.bench.present.comparison import representatives

    return tuple(dict.fromkeys(tag for problem in problems for tag in representatives(problem)))


def _finish(results: Results, out: Path) -> None:
    from flashlane.bench.measure.kept import keep
    from flashlane.bench.present.comparison import markdown
    from flashlane.bench.present.table import make_console

    kept, console = keep(results, out, extra={".md": markdown(results)}, kind="compare"), make_console()
    print_comparison(results, console)
    kept.tell(console)
    o.end(results, kept)


def print_comparison(results: Results, console: Console) -> None:
    """One table a problem, the fastest first, then what went wrong and the verdict."""
    from rich.text import Text

    from flashlane.bench.present.comparison import columns, standings, verdict
    from flashlane.bench.present.table import STYLES, make_table, print_reasons
    from flashlane.inspect.fitted_table import say

    where = f"{results.environment['device']}, torch {results.environment['torch']}"
    titles = dict.fromkeys([r.problem for r in results.rows] + [s.problem for s in results.skipped])
    for title in titles:
        found = standings([row for row in results.rows if row.problem == title])
        if found:
            heading, fastest = f"{title} · {where}", found[:1]
            table = make_table(
                found, columns(), heading, console.width, lambda s, best=fastest: "bold" if s in best else None
            )
            console.print(table)
        for s in found:
            if s.row.message:
                label = Text(f"{s.row.status} {s.tag}: ", STYLES.get(s.row.status, ""))
                say(console, label.append(s.row.message, "default"))
        print_reasons([(s.tag, s.reason) for s in results.skipped if s.problem == title], "not run", console)
        say(console, verdict(found), "bold")
        console.print()
    say(
        console,
        "× plain: times as fast as (unfused), plain PyTorch; MiB: what one call takes beyond its inputs, at the peak",
        "dim",
    )
