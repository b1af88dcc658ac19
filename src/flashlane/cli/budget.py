"""``flashlane budget``: what a kernel takes of an SM, on any architecture."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o

ARCH = "sm_90a"


def budget_command(
    tags: Annotated[
        list[str],
        typer.Argument(
            metavar="TAG...",
            help="Kernels, by their whole tags, in quotes.",
            autocompletion=complete.one_of("tags"),
        ),
    ],
    batch: o.Batch = None,
    heads: o.Heads = None,
    seqlen: o.Seqlen = None,
    head_dim: o.HeadDim = None,
    kv_heads: o.KvHeads = None,
    seqlen_k: o.SeqlenK = None,
    dtype: o.Dtype = None,
    arch: Annotated[
        str,
        o.option(
            "--arch",
            help="Architectures, in a list; all: each that the kernel ships for.",
            panel=o.OUTPUT,
            autocompletion=complete.list_of("architectures"),
        ),
    ] = ARCH,
    direction: o.KernelDirection = "forward",
    json_: Annotated[bool, o.option("--json", help="Print the budgets as JSON.", panel=o.OUTPUT)] = False,
) -> None:
    """Say what kernels take of an SM: registers, spills, shared memory by region, occupancy, what limits it.

    Compiles the configuration that each kernel would choose for the given sizes (default B1 H8 N8192 D64); no GPU
    is needed.

    Exit status: 0 all compiled, 1 one did not, 2 bad input.

    Examples:

      flashlane budget "mma(split-q+stage1)" --D 64,128 --arch sm_80,sm_90a

      flashlane budget "mma(split-q+stage1)" --arch all --json

      flashlane budget hopper --direction backward --D 128
    """
    from flashlane.bench.present.table import make_console
    from flashlane.core.registry import CompiledKernel, get, get_backward
    from flashlane.inspect.budget_view import budget_of, print_budgets
    from flashlane.inspect.compile_report import check_arch

    find = get_backward if o.kernel_direction(direction) == "backward" else get
    with o.named("TAG"):
        chosen = [find(tag) for tag in dict.fromkeys(tags)]
    named = [] if arch == "all" else [check_arch(name) for name in o.words_of(arch)]
    grid = o.grid_of(batch, heads, seqlen, head_dim, kv_heads, seqlen_k, dtype, None, "bottom-right")
    problems = list(grid.problems(None, o.shapes_of(on_gpu=True, quick=False)[:1]))
    budgets = [
        budget
        for kernel in chosen
        for problem in problems
        for name in named or (kernel.architectures if isinstance(kernel, CompiledKernel) else [ARCH])
        for budget in budget_of(kernel, problem, name)
    ]
    if json_:
        typer.echo(json.dumps([budget.as_dict() for budget in budgets], indent=1))
    else:
        print_budgets(budgets, make_console())
    if any(budget.usage.error for budget in budgets):
        raise typer.Exit(1)
