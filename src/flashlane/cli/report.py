"""``flashlane report``: results files as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashlane.cli import options as o


def report_command(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS.json...", help="Files that bench, sweep or compare wrote.")
    ],
    out: Annotated[Path, o.option("--out", help="The page; replaced at once.", panel=o.OUTPUT)] = Path("report.html"),
    notebook: Annotated[
        list[Path] | None,
        o.option("--notebook", help="A Markdown file or a folder of them, to quote. Repeatable.", panel=o.INPUT),
    ] = None,
    title: Annotated[str, o.option("--title", help="Of the page.", panel=o.OUTPUT)] = "flashlane report",
) -> None:
    """Make one self-contained HTML page of results: sortable tables, pictures, device and versions, notebook excerpts.

    The page opens from a file, needs no network (its own policy forbids it), and shows light or dark as the reader
    likes. Rates and the roofline are in it where the run measured them (--ceilings of bench and sweep). Without
    matplotlib the page says that its pictures are missing.

    Exit status: 0 done, 2 bad input, 3 there is no room for the page.

    Examples:

      flashlane report results/sweep.json --notebook docs/notebook --out report.html
    """
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.present.report import build
    from flashlane.core.files import write_named

    if out.is_dir():
        raise ValueError(f"--out is {str(out)!r}, which is a folder; it names the page")
    o.check_apart({"--out": out}, {"RESULTS.json": results, "--notebook": notebook or ()})
    page = build(results, notebook or (), title)
    check_writable(out.parent)
    write_named(out, page, "--out")
    typer.echo(f"wrote {out} ({len(page) / 2**20:.1f} MiB)")
