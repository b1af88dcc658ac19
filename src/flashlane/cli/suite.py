"""``flashlane bench suite``: the three course tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o

if TYPE_CHECKING:
    import torch

    from flashlane.bench.suites.suite import Suite, SuiteResults

SUITES = ("attention", "flash", "model")
DTYPES = ("f16", "bf16", "f32")
ATTENTION = "sdpa,auto"
HEAD_DIMS = (16, 32, 64, 128)
LONGEST = {"attention": 16384, "flash": 65536, "model": 1024}
"""Default of --max-seqlen on a GPU."""
LONGEST_ON_CPU = {"attention": 1024, "flash": 512, "model": 64}
CPU_SECONDS = 40.0
"""Default of --seconds on a CPU: a first table within a minute."""


SuiteName = Annotated[
    str,
    typer.Argument(
        metavar="SUITE",
        help=f"Which table: {', '.join(SUITES)}.",
        autocompletion=complete.one_of(SUITES),
    ),
]
MaxSeqlen = Annotated[
    int | None,
    o.option("--max-seqlen", help="Longest sequence. Default: 16384, 65536, 1024; less on a CPU.", panel=o.SIZES),
]
Seqlens = Annotated[str | None, o.option("--N", "--seqlens", help="Lengths: a value, list or sweep.", panel=o.SIZES)]
HeadDims = Annotated[str | None, o.option("--D", "--headdim", help="Head dims: a value, list or sweep.", panel=o.SIZES)]
Batch = Annotated[int | None, o.option("--B", "--batch", help="Default: 8, 1, 4.", panel=o.SIZES)]
Heads = Annotated[int | None, o.option("--H", "--nheads", help="Heads (not of model). Default: 1.", panel=o.SIZES)]
Dtype = Annotated[
    str | None,
    o.option(
        "--dtype",
        help="f16, bf16, f32, or a list. Default: f32; bf16,f32; bf16.",
        panel=o.SIZES,
        autocompletion=complete.list_of(DTYPES),
    ),
]
Sizes = Annotated[
    str | None,
    o.option(
        "--sizes",
        help="Models: sm, md, lg, xl, 2.7B, xs. Default: sm,md,lg; xs on a CPU.",
        panel=o.SIZES,
        autocompletion=complete.list_of("models"),
    ),
]
Attention = Annotated[
    str | None,
    o.option(
        "--attention",
        help="Of model: auto, sdpa, eager or kernel tags, each also with +compile; the first is compared with. "
        f"Default: {ATTENTION}.",
        panel=o.WHICH,
        autocompletion=complete.list_of(("auto", "sdpa", "eager")),
    ),
]
Kernel = Annotated[
    str | None,
    o.option(
        "--kernel",
        help="Our kernel (not of model), by its tag. Default: what auto takes.",
        panel=o.WHICH,
        autocompletion=complete.one_of("tags"),
    ),
]
Compiling = Annotated[
    str | None,
    o.option(
        "--compile",
        help="Compare torch.compile in flash: static (again for each shape), dynamic, none. Default: static, none "
        "on a CPU.",
        panel=o.WHICH,
        autocompletion=complete.one_of(("static", "dynamic", "none")),
    ),
]
Rounds = Annotated[
    int | None, o.option("--iters", "--rounds", "--steps", help="Rounds; of model, steps.", panel=o.MEASURE)
]
Seconds = Annotated[
    float | None,
    o.option(
        "--seconds",
        help=f"Stop starting rows after SECONDS. Default: {CPU_SECONDS:g} on a CPU.",
        metavar="SECONDS",
        panel=o.MEASURE,
    ),
]
Seed = Annotated[int, o.seed("Of inputs and weights.")]
Out = Annotated[Path, o.option("--out", help="Folder for JSON, CSV and Markdown.", panel=o.OUTPUT)]


def suite_command(
    suite: SuiteName,
    max_seqlen: MaxSeqlen = None,
    seqlens: Seqlens = None,
    head_dims: HeadDims = None,
    batch: Batch = None,
    heads: Heads = None,
    dtype: Dtype = None,
    sizes: Sizes = None,
    attention: Attention = None,
    kernel: Kernel = None,
    compiling: Compiling = None,
    rounds: Rounds = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    device: o.Device = None,
    out: Out = Path("results"),
) -> None:
    """Reproduce a course table: attention, flash (FlashAttention against PyTorch) or model (a transformer's steps).

    Files are rewritten after every row, and a cell that runs out of memory says OOM, so that a stop or a small GPU
    costs no more than it must. On a CPU the sizes are small by default.

    Exit status: 0 all is right, 1 a check of ours failed or something raised, 2 bad input, 3 the files could not be
    written where they should be, 130 interrupted.

    Examples:

      flashlane bench suite flash

      flashlane bench suite attention --max-seqlen 4096 --D 64,128

      flashlane bench suite model --sizes sm,md --seqlens 256,1024 --attention sdpa,auto,eager
    """
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.bench.measure.saved_files import SavedFiles, save_texts
    from flashlane.bench.present.table import make_console
    from flashlane.bench.suites.suite import run_suite, stem_of
    from flashlane.inspect.fitted_table import say

    if suite not in SUITES:
        raise ValueError(f"SUITE is {suite!r}; it may be one of {', '.join(SUITES)}")
    where = resolve_device(device)
    on_cpu = where.type == "cpu"
    lengths = _lengths(suite, seqlens, max_seqlen, on_cpu)
    if rounds is not None and rounds < 1:
        raise ValueError(f"--iters is {rounds}; it must be at least 1")
    o.check_seconds(seconds)
    if batch is not None and batch < 1:
        raise ValueError(f"--B is {batch}; it must be at least 1")
    if suite != "flash":
        o.refuse({"--compile": compiling}, f"goes with the suite flash, and not with {suite}")
    if suite == "model":
        of_kernels = {"--D": head_dims, "--H": heads, "--kernel": kernel}
        o.refuse(of_kernels, "goes with the suites attention and flash; of model it is --sizes and --attention")
        chosen = _model(where, lengths, sizes, attention or ATTENTION, batch, dtype, rounds, seed)
    else:
        o.refuse({"--sizes": sizes, "--attention": attention}, f"goes with the suite model, and not with {suite}")
        heads = 1 if heads is None else heads
        chosen = _attention(suite, where, lengths, head_dims, batch, heads, dtype, compiling, kernel, rounds, seed)
    check_writable(out)
    stem = stem_of(chosen, str(_device_name(where)))
    saved = SavedFiles(())

    def save(results: SuiteResults) -> None:
        nonlocal saved
        saved = save_texts(out, results.texts(stem))

    limit = CPU_SECONDS if seconds is None and on_cpu else seconds
    with Bar(len(chosen.cases())) as reporter:
        results = run_suite(chosen, where, seconds=limit, reporter=reporter, keep=save)
    console = make_console()
    console.print(results.table(console.width))
    for line in (*results.notes, *results.messages, results.where()):
        say(console, line, "dim")
    saved.report_to(console)
    if results.interrupted:
        raise typer.Exit(o.INTERRUPTED)
    if results.failed:
        raise typer.Exit(1)
    if saved.problem:
        raise typer.Exit(o.NOT_WRITTEN)


def _device_name(device: torch.device) -> str:
    from flashlane.bench.measure.environment import device_name

    return device_name(device)


def _lengths(suite: str, seqlens: str | None, longest: int | None, on_cpu: bool) -> list[int]:
    from flashlane.bench.measure.sizes import parse_sizes
    from flashlane.bench.suites.attention import powers

    if longest is not None and longest < 1:
        raise ValueError(f"--max-seqlen is {longest}; it must be at least 1")
    if seqlens is not None:
        lengths = list(parse_sizes(seqlens, "--N"))
        return [n for n in lengths if longest is None or n <= longest] or _none_left(longest)
    longest = longest or (LONGEST_ON_CPU if on_cpu else LONGEST)[suite]
    if suite == "flash":
        lengths = powers(128, longest)
    elif suite == "attention":
        lengths = [256, *[n for n in (1024, 4096) if n <= longest], *powers(8192, longest)]
        lengths = [n for n in lengths if n <= longest]
    else:
        lengths = [longest]
    return lengths or _none_left(longest)


def _none_left(longest: int | None) -> list[int]:
    raise ValueError(f"--max-seqlen is {longest}, which leaves no length; the suite's shortest is longer")


def _dtypes(dtype: str | None, default: str) -> tuple[str, ...]:
    from flashlane.bench.measure.grid import parse_names

    return tuple(parse_names(dtype or default, "--dtype", DTYPES))


def _attention(
    suite: str,
    device: torch.device,
    lengths: list[int],
    head_dims: str | None,
    batch: int | None,
    heads: int,
    dtype: str | None,
    compiling: str | None,
    kernel: str | None,
    rounds: int | None,
    seed: int,
) -> Suite:
    from flashlane.bench.measure.sizes import parse_sizes
    from flashlane.bench.suites.attention import COMPILING, CPU_SETTINGS, GPU_SETTINGS, AttentionSuite
    from flashlane.core import registry

    on_cpu = device.type == "cpu"
    compiling = compiling or ("none" if on_cpu else "static")
    if compiling not in COMPILING:
        raise ValueError(f"--compile is {compiling!r}; it may be one of {', '.join(COMPILING)}")
    if heads < 1:
        raise ValueError(f"--H is {heads}; it must be at least 1")
    if kernel is not None:
        with o.named("--kernel"):
            registry.get(kernel)
    settings = CPU_SETTINGS if on_cpu else GPU_SETTINGS
    return AttentionSuite(
        name=suite,
        device=device,
        seqlens=lengths,
        head_dims=list(parse_sizes(head_dims, "--D")) if head_dims else HEAD_DIMS[:: 2 if on_cpu else 1],
        dtypes=_dtypes(dtype, "f32" if suite == "attention" else "bf16,f32"),
        batch=batch or {"attention": 8, "flash": 1}[suite],
        heads=heads,
        compiling=compiling,
        kernel=kernel,
        timing=settings if rounds is None else replace(settings, rounds=rounds),
        seed=seed,
    )


def _model(
    device: torch.device,
    lengths: list[int],
    sizes: str | None,
    attention: str,
    batch: int | None,
    dtype: str | None,
    rounds: int | None,
    seed: int,
) -> Suite:
    from flashlane.bench.suites.model import ModelSuite

    on_cpu = device.type == "cpu"
    kinds = _dtypes(dtype, "f32" if on_cpu else "bf16")
    if len(kinds) > 1:
        raise ValueError(f"--dtype is {dtype!r}; of model it may be one name")
    names = o.words_of(attention)
    if not names:
        raise ValueError(f"--attention is {attention!r}; it must have at least one name")
    return ModelSuite(
        device=device,
        sizes=o.words_of(sizes or ("xs" if on_cpu else "sm,md,lg")),
        seqlens=lengths,
        attentions=names,
        batch=batch or 4,
        dtype=kinds[0],
        steps=rounds or (3 if on_cpu else 10),
        warmup=1 if on_cpu else 3,
        seed=seed,
    )
