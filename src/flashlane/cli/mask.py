"""``flashlane mask``: the named masks, drawn."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.flex.catalogue import NAMED, Parameters, mask_of

THE_MASK = "The mask"
TOKENS, BLOCK_SIZE = 64, 128
MOST_TOKENS, MOST_BLOCKS = 2**24, 2**26
"""Of a mask whose blocks are counted: each token and each block is looked at, beyond these for minutes."""


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", help="Which mask. Default: a list of all.", autocompletion=complete.one_of(tuple(NAMED))
    ),
]
Tokens = Annotated[int, o.option("--N", help="Tokens: queries and keys.", panel=THE_MASK)]
Window = Annotated[
    str | None, o.option("--window", help="Keys to the left,right; of a neighbourhood, by axis.", panel=THE_MASK)
]
First = Annotated[int, o.option("--first", help="First keys that all see.", panel=THE_MASK)]
Lengths = Annotated[
    str | None, o.option("--lengths", help="Tokens of each document or segment: 20,12,32.", panel=THE_MASK)
]
Parents = Annotated[str | None, o.option("--parents", help="Parent of each segment of a tree: -1,0,0.", panel=THE_MASK)]
Block = Annotated[int | None, o.option("--block", help="Tokens of a block or chunk.", panel=THE_MASK)]
Prefix = Annotated[int | None, o.option("--prefix", help="Tokens of the prefix.", panel=THE_MASK)]
Grid = Annotated[str | None, o.option("--grid", help="Shape of a neighbourhood's tokens: 8,8.", panel=THE_MASK)]
BlockSize = Annotated[int, o.option("--block-size", help="Queries and keys of a block of the lists.", panel=o.OUTPUT)]
Show = Annotated[bool, o.option("--show", help="Draw it here.", panel=o.OUTPUT)]
Png = Annotated[
    Path | None, o.option("--png", help="Draw it into this file; without NAME, all of them.", panel=o.OUTPUT)
]
Json = Annotated[
    Path | None, o.option("--json", help="Write the figures to this file; - prints only them.", panel=o.OUTPUT)
]


def mask_command(
    name: Name = None,
    tokens: Tokens = TOKENS,
    window: Window = None,
    first: First = 0,
    lengths: Lengths = None,
    parents: Parents = None,
    block: Block = None,
    prefix: Prefix = None,
    grid: Grid = None,
    block_size: BlockSize = BLOCK_SIZE,
    show: Show = False,
    png: Png = None,
    json_: Json = None,
) -> None:
    """Draw a named mask of flex_attention, and count the blocks of its lists; needs no GPU.

    Rows are queries, columns keys; what is drawn is visible. Each mask is a function of flashlane.flex.masks.

    Exit status: 0 done, 2 bad input, 3 there is no room for a file.

    Examples:

      flashlane mask causal-documents --lengths 20,12,32 --show

      flashlane mask sliding-window --N 4096 --window 512,0 --first 4 --show --png window.png
    """
    parameters = Parameters(
        tokens,
        _numbers("--window", window),
        first,
        _numbers("--lengths", lengths),
        _numbers("--parents", parents),
        block,
        prefix,
        _numbers("--grid", grid),
    )
    _check(tokens, block, block_size, png)
    o.check_apart({"--png": png, "--json": json_})
    if name is None:
        if parameters != Parameters(tokens) or show or json_ is not None:
            raise ValueError("NAME is missing; without it --N, --png and --block-size are all there is to say")
        if png is None and (tokens, block_size) != (TOKENS, BLOCK_SIZE):
            raise ValueError("NAME and --png are missing; --N and --block-size are of what is drawn")
        with _options_named():
            _list_all(tokens, png, block_size)
        return
    with _options_named():
        mask = mask_of(name, parameters)
    from flashlane.bench.present.table import make_console
    from flashlane.core.files import write_named
    from flashlane.inspect import mask_view

    try:
        facts = mask_view.facts(mask, tokens, block_size)
    except RuntimeError as error:  # torch's allocator has no error of its own on a CPU
        if "alloc" not in str(error):
            raise
        blocks = -(-tokens // block_size)
        raise ValueError(
            f"--N is {tokens}; there is no memory for the states of {blocks} x {blocks} blocks, of which a larger "
            f"--block-size makes fewer"
        ) from None
    lines: list[str] = []
    with _options_named():
        if show:
            lines = mask_view.lines_of(mask_view.dense(mask, tokens))
        if png is not None:
            mask_view.save_png([(f"{name}, {tokens} tokens", mask, tokens)], png, block_size)
    if json_ is not None:
        text = json.dumps(facts, indent=1)
        if str(json_) == "-":
            typer.echo(text)
            return
        write_named(json_, text + "\n", "--json")
    console = make_console()
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    total = facts["full"] + facts["partial"] + facts["hidden"]
    console.print(f"{name}: {NAMED[name].summary}", markup=False, highlight=False)
    console.print(
        f"{tokens} tokens in blocks of {block_size}: {facts['full']} full, {facts['partial']} partial and "
        f"{facts['hidden']} hidden of {total}",
        highlight=False,
    )
    number, of = facts["intervals"], facts["intervals_of"]
    console.print(
        "its rows are not a few intervals" if number is None else f"intervals a {of}: {number}", highlight=False
    )


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Errors about a parameter of a mask name the option that gave it, and what was written there."""
    options = {"name": "NAME", "tokens": "--N"}
    fields = "name|tokens|window|first|lengths|parents|block|prefix|grid"

    def written(match: re.Match[str]) -> str:
        numbers = ",".join(re.findall(r"-?\d+", match[2] or ""))
        return f"{options.get(match[1], f'--{match[1]}')} is {numbers}"

    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(rf"^({fields}) is (\([^)]*\))?", written, str(error))) from None


EXAMPLES = {"window": "512,0", "lengths": "20,12,32", "parents": "-1,0,0", "grid": "8,8"}
"""How numbers of an option are written."""


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} is {text!r}; it is whole numbers with commas: {EXAMPLES[option[2:]]}") from None


def _check(tokens: int, block: int | None, block_size: int, png: Path | None) -> None:
    for option, number in (("--N", tokens), ("--block", block), ("--block-size", block_size)):
        if number is not None and number < 1:
            raise ValueError(f"{option} is {number}; it must be at least 1")
    blocks = -(-tokens // block_size)
    if tokens > MOST_TOKENS:
        raise ValueError(f"--N is {tokens}; it may be up to {MOST_TOKENS}")
    if blocks**2 > MOST_BLOCKS:
        raise ValueError(
            f"--N is {tokens}, in {blocks} x {blocks} blocks, of which there may be {MOST_BLOCKS}; a larger "
            f"--block-size makes fewer"
        )
    if png is not None and png.suffix != ".png":
        raise ValueError(f"--png is {str(png)!r}; it names a file that ends in .png")


def _list_all(tokens: int, png: Path | None, block_size: int) -> None:
    from flashlane.bench.present.table import make_console

    console = make_console()
    if png is not None:
        from flashlane.inspect import mask_view

        pictures = [(name, mask_of(name, Parameters(tokens)), tokens) for name in NAMED]
        mask_view.save_png(pictures, png, block_size)
    width = max(map(len, NAMED))
    for name, named in NAMED.items():
        console.print(f"[bold]{name:{width}}[/]  {named.summary}", highlight=False)
        if named.takes:
            console.print(f"{'':{width}}  [dim]{', '.join(f'--{field}' for field in named.takes)}[/]", highlight=False)
