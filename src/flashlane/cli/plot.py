"""``flashlane plot``: pictures of the bench's results files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flashlane.bench.present.plots import Measured, Theme

KINDS, FORMATS = ("throughput", "speedup", "memory", "heatmap"), ("png", "svg")
PICTURE = "Picture"


def plot_command(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS.json...", help="Files that the bench wrote.")],
    kind: Annotated[
        str,
        o.option(
            "--kind",
            help=f"{', '.join(KINDS)}, or a list of them.",
            panel=PICTURE,
            autocompletion=complete.list_of(KINDS),
        ),
    ] = "throughput",
    tags: Annotated[
        str,
        o.option(
            "--tags",
            help="Kernels whose tag contains one of these words. Default: all.",
            panel=o.WHICH,
            autocompletion=complete.list_of("words"),
        ),
    ] = "",
    most: Annotated[
        int | None,
        o.option("--most", help="Kernels drawn, the fastest. Default: 12 bars a problem, 5 lines.", panel=o.WHICH),
    ] = None,
    ceiling: Annotated[
        float | None, o.option("--ceiling", "--roof", help="TFLOP/s of a line across the throughput.", panel=PICTURE)
    ] = None,
    ceilings: Annotated[
        Path | None,
        o.option(
            "--ceilings",
            "--roofs",
            help="Rates from this file of flashlane roofline, or of lessons_gpu.py.",
            panel=PICTURE,
        ),
    ] = None,
    dark: Annotated[bool, o.option("--dark", help="Light on dark; -dark ends the names.", panel=PICTURE)] = False,
    formats: Annotated[
        str, o.option("--format", help="png, svg, or both in a list.", panel=o.OUTPUT, autocompletion=o.FORMATS)
    ] = "png",
    out: Annotated[Path, o.option("--out", help="Folder of the pictures.", panel=o.OUTPUT)] = Path("plots"),
) -> None:
    """Draw results files of bench, sweep and compare: rates, memory, speed-up bars, a heat map against the best peer.

    A picture for each file and kind, <file>-<kind>.png, replaced at once. Needs no GPU; needs matplotlib. Rates that
    the run itself measured (--ceilings of bench and sweep) are drawn in.

    Exit status: 0 done, 2 bad input or no matplotlib, 3 there is no room for a picture.

    Examples:

      flashlane plot results/sweep.json --kind throughput,speedup,memory,heatmap --format png,svg

      flashlane plot results/bench-….json --ceilings results/ceilings.json --dark
    """
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.present import plots
    from flashlane.bench.present.figure_frame import write

    kinds = _listed("--kind", kind, KINDS)
    suffixes = _listed("--format", formats, FORMATS)
    _check(most, ceiling, ceilings, kinds, results)
    plots.need_matplotlib()
    theme = plots.DARK if dark else plots.LIGHT
    figures: dict[str, Figure] = {}
    for path in results:
        measured = plots.read_results(path).choose(o.words_of(tags))
        lines, copy = _ceilings(measured, ceilings)
        lines |= {} if ceiling is None else {"ceiling": ceiling}
        for each in kinds:
            figures[f"{path.stem}-{each}{'-dark' * dark}"] = _draw(each, measured, most, theme, lines, copy)
    check_writable(out)
    for name, figure in figures.items():
        for suffix in suffixes:
            write(figure, out / f"{name}.{suffix}")
    for name in figures:
        for suffix in suffixes:
            typer.echo(out / f"{name}.{suffix}")


def _ceilings(measured: Measured, path: Path | None) -> tuple[dict[str, float], float | None]:
    """Matrix rates by name and the copy rate in GB/s: of a file, or those measured in the same run."""
    from flashlane.bench.present.points import all_rates, lines_of

    if path is not None:
        return all_rates(path, str(measured.environment.get("device")))
    found = measured.ceilings
    return ({}, None) if found is None else (lines_of(found), found.copy)


def _draw(
    kind: str, measured: Measured, most: int | None, theme: Theme, ceilings: dict[str, float], copy: float | None
) -> Figure:
    from flashlane.bench.present import plots

    if kind == "throughput":
        return plots.throughput_figure(measured, most or plots.MOST_LINES, ceilings, copy, theme=theme)
    if kind == "memory":
        return plots.memory_figure(measured, most or plots.MOST_LINES, theme=theme)
    if kind == "speedup":
        return plots.speedup_figure(measured, most or plots.MOST_BARS, theme=theme)
    return plots.heatmap_figure(measured, theme=theme)


def _listed(name: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    words = o.words_of(text)
    if not words or set(words) - set(allowed):
        raise ValueError(f"{name} is {text!r}; {', '.join(allowed)}, or a list of them")
    return words


def _check(
    most: int | None, ceiling: float | None, ceilings: Path | None, kinds: Sequence[str], results: Sequence[Path]
) -> None:
    if most is not None and most < 1:
        raise ValueError(f"--most is {most}; at least 1")
    if ceiling is not None and not 0 < ceiling < float("inf"):
        raise ValueError(f"--ceiling is {ceiling:g}; a positive number of TFLOP/s")
    if "throughput" not in kinds and (ceiling is not None or ceilings is not None):
        raise ValueError("--ceiling and --ceilings go with --kind throughput")
    stems = [path.stem for path in results]
    for path in results:
        if stems.count(path.stem) > 1:
            raise ValueError(f"{path} has the name of another file given; their pictures would be one")
