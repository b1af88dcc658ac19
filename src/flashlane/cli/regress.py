"""``flashlane regress``: did anything get slower since the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashlane.bench.measure.defaults import ALPHA, FLOOR_PERCENT
from flashlane.cli import options as o


def regress_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="BASELINE.json LATER.json | save RESULTS.json",
            help="Two results files of flashlane bench to compare; or save and the one to keep as --baseline.",
            show_default=False,
        ),
    ],
    baseline: Annotated[
        Path | None, o.option("--baseline", help="With save: the file to keep it in.", panel=o.OUTPUT)
    ] = None,
    floor: Annotated[
        float, o.option("--floor", help="Percent of change that counts as none.", panel=o.MEASURE)
    ] = FLOOR_PERCENT,
    alpha: Annotated[
        float, o.option("--alpha", help="Chance of any false alarm among all cells.", panel=o.MEASURE)
    ] = ALPHA,
    across_devices: Annotated[
        bool, o.option("--across-devices", help="Compare although the devices differ.", panel=o.MEASURE)
    ] = False,
    json_: Annotated[
        Path | None, o.option("--json", help="Write every cell to this JSON file; - prints only them.", panel=o.OUTPUT)
    ] = None,
    junit: Annotated[
        Path | None, o.option("--junit", help="Write a JUnit XML file, one test a cell.", panel=o.OUTPUT)
    ] = None,
    github: Annotated[
        bool, o.option("--github", help="Also print GitHub Actions annotations (::error, ::warning).", panel=o.OUTPUT)
    ] = False,
) -> None:
    """Compare two results files of flashlane bench, and fail when a kernel got slower by more than noise explains.

    Cells (one tag on one problem) are compared by the rounds that each row carries: Yuen's trimmed t test on the
    logarithms of the rounds, of a change beyond --floor, Holm-corrected for the number of cells. Slower but within
    noise is "suspect" and does not fail; measure with more --rounds to know (11, say; fewer than 7 find little). A
    kernel that was timed and now fails its check or raises is "broken" and fails. Peers are compared and shown, but
    never fail.

    Exit status: 0 no kernel got slower, 1 one did or is broken, 2 bad input, 3 there is no room for a file.

    Examples:

      flashlane regress save results/bench-….json --baseline baseline.json

      flashlane regress baseline.json results/bench-….json --junit regress.xml --github
    """
    from flashlane.bench.present import regress as r
    from flashlane.bench.present.regress_view import annotations, junit_xml, print_comparison
    from flashlane.bench.present.table import make_console
    from flashlane.core.files import write_named

    if words[0] == "save":
        given = {"--json": json_, "--junit": junit, "--github": github, "--across-devices": across_devices}
        o.refuse(given, "is of a comparison; save only keeps a file")
        o.refuse({"--floor": floor != FLOOR_PERCENT, "--alpha": alpha != ALPHA}, "is of a comparison; save has none")
        _save(words[1:], baseline)
        return
    if len(words) != 2:
        raise ValueError(f"regress takes BASELINE.json LATER.json, or save RESULTS.json; {len(words)} given: {words}")
    if baseline is not None:
        raise ValueError(f"--baseline is {str(baseline)!r}; it goes with save, a comparison takes two files")
    if not 0 <= floor < 100:
        raise ValueError(f"--floor is {floor:g}; it may be a percentage from 0 up to, but not, 100")
    if not 0 < alpha < 1:
        raise ValueError(f"--alpha is {alpha:g}; it may be a probability between 0 and 1")
    alone = json_ is not None and str(json_) == "-"
    if alone and github:
        raise ValueError("--github is given with --json -, which prints only the cells; --json may be a file")
    files = Path(words[0]), Path(words[1])
    o.check_apart({"--json": json_, "--junit": junit}, {"BASELINE.json": files[:1], "LATER.json": files[1:]})
    runs = r.load(files[0]), r.load(files[1])
    comparison = r.compare(*runs, floor=floor / 100, alpha=alpha, across_devices=across_devices)
    if json_ is not None and not alone:
        write_named(json_, comparison.to_json(), "--json")
    if junit is not None:
        write_named(junit, junit_xml(comparison), "--junit")
    if alone:
        typer.echo(comparison.to_json(), nl=False)
    else:
        print_comparison(comparison, make_console())
    if github:
        for line in annotations(comparison):
            typer.echo(line)
    if comparison.failed:
        raise typer.Exit(1)


def _save(words: list[str], baseline: Path | None) -> None:
    from flashlane.bench.present import regress as r
    from flashlane.core.files import write_named

    if len(words) != 1:
        raise ValueError(f"regress save takes one RESULTS.json; {len(words)} given: {words}")
    if baseline is None:
        raise ValueError("regress save needs --baseline FILE, where to keep the results")
    text = r.read(Path(words[0]))
    run = r.parse(text, words[0])
    write_named(baseline, text, "--baseline")
    rounds = min(len(row.samples) for row in run.rows.values() if row.samples)
    typer.echo(f"saved {run.timed} timed cells of {run.device}, {rounds} rounds each or more, to {baseline}")
