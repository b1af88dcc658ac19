"""``flashlane budget``: what a kernel takes of an SM, on any architecture."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread

ARCH = "sm_90a"


@spread
def budget_command(
    tags: Annotated[
        list[str],
        typer.Argument(
            metavar="TAG...",
            help="Kernels, by their whole tags, in quotes.",
            autocompletion=complete.one_of("tags"),
        ),
    ],
    sizes: s.KERNEL_SIZES = s.NO_SIZES,
    arch: Annotated[str, o.archs("Architectures, in a list; all: each that the kernel ships for.")] = ARCH,
    direction: o.KernelDirection = "forward",
    json_: Annotated[bool, o.option("--json", help="Print the budgets as JSON.", panel=o.OUTPUT)] = False,
) -> None:
    """Say what kernels take of an SM: registers, spills, shared memory by region, occupancy, what limits it.

    Compiles the configuration that each kernel would choose for the given sizes (default B1 H8 N8192 D64); no GPU
    is needed.

    Exit status: 0 all compiled, 1 one did not, 2 bad input or no compiler.

    Examples:

      flashlane budget "mma(split-q+stage1)" --D 64,128 --arch sm_80,sm_90a

      flashlane budget "mma(split-q+stage1)" --arch all --json

      flashlane budget hopper --direction backward --D 128
    """
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.present.table import make_console
    from flashlane.core.dispatch import check_explained
    from flashlane.core.registry import CompiledKernel, get, get_backward
    from flashlane.inspect.budget_view import budget_of, print_budgets
    from flashlane.inspect.compile_report import check_arch

    find = get_backward if o.kernel_direction(direction) == "backward" else get
    with o.named("TAG"):
        chosen = [find(tag) for tag in dict.fromkeys(tags)]
    named = [] if arch == "all" else [check_arch(name) for name in o.archs_of(arch)]
    problems = list(sizes.grid().problems(None, s.shapes_of(on_gpu=True, quick=False)[:1]))
    with o.named("--N", "seqlen_q"), o.named("--seqlen-k", "seqlen_k"):
        for problem in problems:
            check_explained(problem, find is get_backward)
    jobs = [
        (kernel, problem, name)
        for kernel in chosen
        for problem in problems
        for name in named or (kernel.architectures if isinstance(kernel, CompiledKernel) else [ARCH])
    ]
    budgets = []
    with Bar(len(jobs)) as reporter:
        for kernel, problem, name in jobs:
            reporter.begin(f"{kernel.tag} for {name}", 1)
            budgets += budget_of(kernel, problem, name)
    if json_:
        typer.echo(json.dumps([budget.as_dict() for budget in budgets], indent=1))
    else:
        print_budgets(budgets, make_console())
    if any(budget.usage.error for budget in budgets):
        raise typer.Exit(1)
