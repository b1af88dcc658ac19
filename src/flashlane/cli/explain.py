"""``flashlane explain``: which kernel runs a problem, and why each other one does not."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread


@spread
def explain_command(
    sizes: s.DENSE_SIZES = s.NO_SIZES,
    kernel: Annotated[
        str | None,
        o.option(
            "--kernel",
            help="Force this kernel, and say whether it can.",
            panel=o.WHICH,
            autocompletion=complete.one_of("tags"),
        ),
    ] = None,
    show_all: o.ShowAll = False,
    arch: Annotated[str | None, o.one_arch("An architecture (sm_90a) or cpu. Default: this machine's.")] = None,
    backward: Annotated[
        bool, o.option("--backward", help="Also which backward kernel would follow.", panel=o.WHICH)
    ] = False,
    json_: Annotated[bool, o.option("--json", help="Print the choices as JSON.", panel=o.OUTPUT)] = False,
) -> None:
    """Say which kernel would run for given sizes, and why each other one would not; with --backward, gradients' too.

    Kernels are grouped by the reason; --show-all gives each a line. What can run and does not is ranked lower, by the
    order in which kernels are preferred: one family to another, whatever their times. Next to it is the time that a
    model predicts for it, where there is one, else its place.

    Exit status: 0 a kernel runs it, 2 bad input or none does.

    Examples:

      flashlane explain --preset llama3-8b --arch sm_90a

      flashlane explain --D 320 --dtype bf16 --kernel "mma(naive)"
    """
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.core.dispatch import explain_problem
    from flashlane.core.explanation import ROOM
    from flashlane.core.problem import arch_of
    from flashlane.inspect.compile_report import check_arch
    from flashlane.inspect.fitted_table import make_console

    target = arch_of(resolve_device(None))
    if arch is not None:
        target = None if arch == "cpu" else check_arch(arch)
    shapes = s.shapes_of(on_gpu=True, quick=False)[:1]
    problems = [problem for grid in sizes.grids(on_cpu=target is None) for problem in grid.problems(target, shapes)]
    with o.named("--kernel"), o.named("--N", "seqlen_q"), o.named("--seqlen-k", "seqlen_k"):
        found = [explain_problem(dataclasses.replace(each, needs_grad=backward), kernel, show_all) for each in problems]
    if json_:
        typer.echo(json.dumps([explanation_json(each) for each in found], indent=1))
        return
    console = make_console()
    for each in found:
        # Lines were made for 80 columns or, with --show-all, for the terminal; one of fewer than 80 breaks them.
        text = each.listed(console.width) if show_all else str(each)
        console.print(text, markup=False, soft_wrap=console.width >= ROOM)


def explanation_json(explanation: Any) -> dict[str, Any]:
    """What ``explain --json`` prints of one problem."""
    kernels = [dataclasses.asdict(choice) for choice in explanation.choices]
    arch = explanation.problem.arch or "cpu"
    said = {"problem": explanation.problem.describe(), "arch": arch, "chosen": explanation.chosen, "kernels": kernels}
    if explanation.backward is None:
        return said
    backwards = [dataclasses.asdict(choice) for choice in explanation.backwards]
    return {**said, "backward": explanation.backward, "backward_kernels": backwards}
