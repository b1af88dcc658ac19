"""``flashlane bench ranks``: context parallelism over the GPUs of this host, or over processes on a CPU."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import complete
from flashlane.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

METHODS = ("allgather", "ring", "ulysses")
LAYOUTS = ("zigzag", "contiguous", "striped")
ON_CPU = {"tokens": 128, "heads": 4, "kv_heads": 2, "head_dim": 32}
ON_GPU = {"tokens": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}
FILE = "ranks.json"


Ranks = Annotated[int, o.option("--ranks", help="Processes, on a GPU host one a GPU.", panel=o.WHICH)]
Tokens = Annotated[int | None, o.option("--tokens", help="Tokens a rank. Default: 8192; 128 on a CPU.", panel=o.SIZES)]
Documents = Annotated[
    str | None,
    o.option("--documents", help="Lengths of packed documents, a list, in place of --tokens.", panel=o.SIZES),
]
Heads = Annotated[int | None, o.option("--H", "--nheads", help="Query heads. Default: 32; 4.", panel=o.SIZES)]
KvHeads = Annotated[int | None, o.option("--kv-heads", help="KV heads. Default: 8; 2.", panel=o.SIZES)]
HeadDim = Annotated[int | None, o.option("--D", "--headdim", help="Default: 128; 32.", panel=o.SIZES)]
Dtype = Annotated[
    str | None,
    o.option(
        "--dtype",
        help="f16, bf16 or f32. Default: bf16; f32.",
        panel=o.SIZES,
        autocompletion=complete.one_of(("f16", "bf16", "f32")),
    ),
]
Method = Annotated[
    str | None,
    o.option(
        "--method",
        help="allgather, ring, ulysses, or a list. Default: all, allgather by messages, too.",
        panel=o.WHICH,
        autocompletion=complete.list_of(METHODS),
    ),
]
Layout = Annotated[
    str,
    o.option("--layout", help="zigzag, contiguous or striped.", panel=o.WHICH, autocompletion=complete.one_of(LAYOUTS)),
]
Step = Annotated[
    bool,
    o.option(
        "--step", help="Also a training step of a small Llama under FSDP2 and context parallelism.", panel=o.WHICH
    ),
]
Model = Annotated[
    str, o.option("--model", help="Ranks that a model is asked for, a list; none: no model.", panel=o.WHICH)
]
Across = Annotated[float, o.option("--across", help="GB/s of a GPU to other hosts, for the model.", panel=o.WHICH)]
Rounds = Annotated[int, o.option("--iters", "--rounds", help="Rounds.", panel=o.MEASURE)]


def ranks_command(
    ranks: Ranks = 2,
    tokens: Tokens = None,
    documents: Documents = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    dtype: Dtype = None,
    method: Method = None,
    layout: Layout = "zigzag",
    step: Step = False,
    model: Model = "4,8,64",
    across: Across = 45.0,
    rounds: Rounds = 5,
    device: o.Device = None,
    out: o.Out = o.RESULTS,
) -> None:
    """Time context parallelism over the ranks of this host next to one process's share of the whole problem.

    A causal self-attention is divided among the ranks. The ideal is one process's time for all of it, divided by the
    ranks; each row says which share of the ideal it reaches. From the measured times and link rates a model gives more
    ranks: those rows are marked as modelled. On a CPU the ranks are processes on gloo, and the times say only that all
    runs. Writes ranks.json. flashlane bench --ranks N is this command, and flashlane e2e --ranks N is it with --step.

    Exit status: 0 done, 2 bad input, 3 the file could not be written where it should be.

    Examples:

      flashlane bench ranks --ranks 2

      flashlane bench ranks --ranks 2 --tokens 4096 --method allgather,ring --layout contiguous

      flashlane bench ranks --documents 9000,512,3000,20256 --step --model none
    """
    import torch

    from flashlane.bench.measure.environment import environment
    from flashlane.bench.measure.grid import parse_dtypes, parse_names
    from flashlane.bench.measure.ranks import SharedProblem, measure_all, on_ranks, problem_fields
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.bench.measure.saved_files import save_texts
    from flashlane.bench.measure.sizes import parse_sizes
    from flashlane.bench.present.table import make_console, say

    where = resolve_device(device)
    if ranks < 2:
        raise ValueError(f"--ranks is {ranks}; it must be at least 2")
    if where.type == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(f"--ranks is {ranks} and this host has {torch.cuda.device_count()} GPUs: one a rank")
    options = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes = _sizes(options, ON_CPU if where.type == "cpu" else ON_GPU)
    if documents is not None and tokens is not None:
        raise ValueError(f"--tokens is {tokens} and --documents {documents}; give one of them")
    if not 0 < across < math.inf:
        raise ValueError(f"--across is {across:g}; it must be a rate above 0 in GB/s")
    if rounds < 1:
        raise ValueError(f"--iters is {rounds}; it must be at least 1")
    if layout not in LAYOUTS:
        raise ValueError(f"--layout is {layout!r}; it may be {', '.join(LAYOUTS)}")
    chosen = None if method is None else parse_names(method, "--method", METHODS)
    counts = () if model == "none" else parse_sizes(model, "--model", low=2)
    kinds = parse_dtypes(dtype or ("f32" if where.type == "cpu" else "bf16"))
    if len(kinds) != 1:
        raise ValueError(f"--dtype is {dtype!r}; it must be one of f16, bf16, f32")
    lengths = () if documents is None else _lengths(documents)
    problem = SharedProblem(**sizes, documents=lengths, dtype=str(kinds[0]).removeprefix("torch."))
    check_writable(out)
    backend = "gloo" if where.type == "cpu" else "nccl"
    measured = on_ranks(ranks, backend, measure_all, problem, chosen, layout, rounds, step, counts, across)
    body = {
        "format": "flashlane-ranks/1",
        "environment": environment(where),
        **problem_fields(problem, ranks),
        "layout": layout,
        **measured,
    }
    saved = save_texts(out, {FILE: json.dumps(body, indent=1)})
    console = make_console()
    _print(console, problem.describe(ranks), measured, ranks)
    links = measured["links"]
    say(
        console,
        f"a rank sends and receives {links['gbs']:.1f} GB/s at once; {links['latency_us']:.0f} µs at least",
        "dim",
    )
    for note in measured["notes"]:
        say(console, note, "yellow")
    saved.report_to(console)
    if saved.problem:
        raise typer.Exit(o.NOT_WRITTEN)


def _sizes(options: dict[str, int | None], defaults: dict[str, int]) -> dict[str, int]:
    """The sizes of the shared problem, by the names of its fields: those that are given, and defaults."""
    sizes = {name: defaults[name] if value is None else value for name, value in options.items()}
    for name, value in zip(("--tokens", "--H", "--kv-heads", "--D"), sizes.values(), strict=True):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"--kv-heads is {sizes['kv_heads']} and --H {sizes['heads']}; it must divide it")
    return sizes


def _lengths(documents: str) -> tuple[int, ...]:
    """Lengths in their order, of which some may be equal."""
    words = [word.strip() for word in documents.split(",")]
    if not all(word.isdecimal() for word in words) or not any(int(word) for word in words):
        raise ValueError(f"--documents is {documents!r}; it must be whole numbers (9000,512), not all 0")
    return tuple(map(int, words))


def _print(console: Console, title: str, results: dict[str, Any], ranks: int) -> None:
    """The tables: what was measured, what is modelled from it, and the training step."""
    from flashlane.bench.measure.ranks import ONE
    from flashlane.bench.present.table import Column, make_table

    def number(key: str) -> Any:
        return lambda row: f"{row[key]:.3f}"

    def share(key: str) -> Any:
        return lambda row: "" if row["method"] == ONE else f"{row[key]:.1%}"

    columns = [
        Column("forward ms", number("forward_ms")),
        Column("of ideal", share("forward_efficiency")),
        Column("both ms", number("both_ms")),
        Column("of ideal ", share("both_efficiency")),
    ]
    measured = f"{title} · {ranks} ranks, measured"
    console.print(
        make_table(results["rows"], columns, measured, console.width, head="method", name=lambda r: r["method"])
    )
    if results["modelled"]:
        title = f"{title.partition(' of ')[0]} of as many tokens a rank · modelled from {results['modelled_from']}"
        tokens = Column("tokens", lambda row: f"{row['tokens']}")
        rows = [{**row, "method": ""} for row in results["modelled"]]
        table = make_table(rows, [tokens, *columns], title, console.width, head="ranks", name=lambda r: str(r["ranks"]))
        console.print(table)
    if results["steps"]:
        shown = [Column("step ms", number("step_ms")), Column("of ideal", share("step_efficiency"))]
        title = f"training step of {_step_words(results['step_problem'])} · {ranks} ranks, measured"
        console.print(
            make_table(results["steps"], shown, title, console.width, head="method", name=lambda r: r["method"])
        )


def _step_words(fields: dict[str, Any]) -> str:
    """Sizes of the model of a step."""
    return f"{fields['layers']} layers of {fields['hidden']}, {fields['tokens']} tokens a rank"
