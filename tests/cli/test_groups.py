"""Options that are declared once, and the line that bad input ends with."""

from __future__ import annotations

import errno
import inspect
from dataclasses import dataclass
from typing import Annotated, get_args

import pytest
import typer

from flashlane.cli.failure import print_failure
from flashlane.cli.groups import spread
from flashlane.cli.sizes import Sizes, option_of
from flashlane.core.files import NotWritten


@dataclass(frozen=True)
class Group:
    first: Annotated[int, typer.Option("--first")] = 1
    second: Annotated[str, typer.Option("--second")] = "two"
    third: Annotated[int, typer.Option("--third")] = 3


CALLS: list[tuple[Group, int]] = []


@spread
def command(group: Annotated[Group, ("third", "first")] = Group(), other: int = 5) -> None:
    CALLS.append((group, other))


def test_a_group_becomes_its_options_in_the_order_that_is_named() -> None:
    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["third", "first", "other"]
    assert [each.default for each in parameters.values()] == [3, 1, 5]
    kind, option = get_args(parameters["first"].annotation)
    assert kind is int and option.default == "--first"
    command(third=7, first=8, other=9)
    assert CALLS.pop() == (Group(first=8, third=7), 9), "an option that the command has not keeps its default"
    with pytest.raises(KeyError):
        command(third=7, other=9)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("--B is [x]\nor so"), 2, "error: --B is [x] or so"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.json"), 2, "error: a.json: No such file"),
        (OSError(errno.ENOSPC, "No space left", "a.json"), 3, "error: a.json cannot be written: No space left"),
        (NotWritten("disk"), 3, "error: disk"),
    ],
)
def test_bad_input_is_one_line_and_a_status(
    error: Exception, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_failure(error).exit_code == status
    assert capsys.readouterr().err == line + "\n"


def test_a_size_that_is_refused_while_it_is_read_says_the_same_as_one_that_is_refused_later(invoke) -> None:
    early, late = invoke("explain", "--B", "x"), invoke("explain", "--alignment", "x")
    assert early.exit_code == 2 and early.stderr.startswith("error: --B ")
    assert late.exit_code == 2 and late.stderr.startswith("error: --alignment is 'x'")


def test_a_preset_is_overridden_by_what_is_given() -> None:
    (grid,) = Sizes(preset="gpt3", seqlen="64", causal=False).grids()
    assert (grid.batch, grid.seqlen, grid.heads, grid.causal) == ((2,), (64,), (96,), (False,))
    assert Sizes(preset="gpt3").grids()[0].causal == (True,)
    assert option_of("head_dim_v") == "--Dv" and option_of("causal") == "--causal"
