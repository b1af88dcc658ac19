"""``flashlane mask``: the picture in a terminal, the counts of blocks, the PNG, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashlane.cli.main import app
from flashlane.flex.catalogue import NAMED, Parameters, mask_of
from flashlane.inspect import mask_view

PNG = b"\x89PNG"


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["mask", *arguments], env={"COLUMNS": "80"})
    return done.exit_code, done.output


def test_the_picture_is_the_mask() -> None:
    rc, output = run("causal-documents", "--N", "6", "--lengths", "2,1,3", "--show", "--block-size", "2")
    assert rc == 0, output
    dense = mask_view.dense(mask_of("causal-documents", Parameters(6, lengths=(2, 1, 3))), 6)
    drawn = [line[2:] for line in output.splitlines()[:3]]
    for row in range(6):
        cells = drawn[row // 2].ljust(6)
        assert [c in ("█", "▀▄"[row % 2]) for c in cells] == dense[row].tolist(), row
    assert "6 tokens in blocks of 2: 0 full, 4 partial and 5 hidden of 9" in output


def test_counts_are_those_of_the_lists() -> None:
    rc, said = run("causal", "--N", "1024", "--json", "-")
    assert rc == 0 and json.loads(said) == {
        "mask": "causal", "tokens": 1024, "block": 128, "full": 28, "partial": 8, "hidden": 28, "intervals": 1,
        "intervals_of": "row",
    }  # fmt: skip


def test_a_tree_has_intervals_of_keys() -> None:
    assert "intervals a key: 1" in run("prefix-tree")[1] and "intervals a row: 2" in run("block-diffusion")[1]
    assert "its rows are not a few intervals" in run("neighbourhood-3d", "--grid", "4,4,4", "--window", "3,2,2")[1]


@pytest.mark.parametrize("name", NAMED)
def test_every_mask_is_drawn_in_80_columns(name: str) -> None:
    for tokens in ("64", "100"):
        rc, said = run(name, "--show", "--N", tokens)
        assert rc == 0 and max(map(len, said.splitlines())) <= 80, said
    rc, listed = run()
    assert rc == 0 and f"{name} " in listed and max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_a_tree_of_few_tokens_has_fewer_segments(tokens: int) -> None:
    """Its parents were those of six segments, which the message took for the user's."""
    rc, said = run("prefix-tree", "--N", str(tokens), "--show")
    assert rc == 0 and f"{tokens} tokens in blocks" in said, said
    dense = mask_view.dense(mask_of("prefix-tree", Parameters(tokens)), tokens)
    assert dense.diagonal().all() and dense[:, 0].all() and not dense.triu(1).any()


def test_shades_are_shares_of_visible_pairs() -> None:
    pairs = torch.zeros(144, 144, dtype=torch.bool)
    pairs[:72, :72], pairs[0, 80] = True, True
    lines = mask_view.lines_of(pairs)
    assert len(lines) == 36 and lines[0] == "█" * 36 + "    ░" and lines[17] == "█" * 36 and lines[18] == ""


def test_pngs_of_one_and_of_all(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for arguments in (("chunks", "--block", "8", "--png"), ("--png",)):
        path = tmp_path / f"{len(arguments)}.png"
        rc, said = run(*arguments, str(path))
        assert rc == 0 and path.read_bytes().startswith(PNG), said


WRONG = {
    "NAME is 'nope'; it may be causal, sliding-window": ["nope"],
    "--window is 3; chunks takes block": ["chunks", "--window", "3"],
    "--lengths is 'a'; it is whole numbers with commas: 20,12,32": ["documents", "--lengths", "a"],
    "--lengths is 3,4; they are positive, and their sum must be 64": ["documents", "--lengths", "3,4"],
    "--N is 0; it must be at least 1": ["causal", "--N", "0"],
    "--N is 5000; a picture may have 1 to 4096": ["causal", "--N", "5000", "--show"],
    "--N is 5001; a picture may have 1 to 4096": ["causal", "--N", "5001", "--png", "x.png"],
    "NAME and --png are missing; --N and --block-size are of what is drawn": ["--block-size", "64"],
    "--json is 'x.png', which is written too (--png)": ["causal", "--png", "x.png", "--json", "./x.png"],
    "names a file that ends in .png": ["causal", "--png", "x.jpg"],
    "--grid is 3,3, which are 9 tokens; there are 64": ["neighbourhood-2d", "--grid", "3,3"],
    "NAME is missing": ["--show"],
    "--window is 'a'; it is whole numbers with commas: 512,0": ["chunks", "--window", "a"],
    "--N is 63; block diffusion has each token twice": ["block-diffusion", "--N", "63"],
    "--window is -3; keys to the left and to the right are numbers of at least 0": ["sliding-window", "--window=-3"],
    "--window is 3,-1; keys to the left and to the right": ["sliding-window", "--window", "3,-1"],
    "--window is 0; for each axis of grid 64 it has a number": ["neighbourhood-1d", "--window", "0"],
    "--window is 2; for each axis of grid 8,8 it has a number": ["neighbourhood-2d", "--window", "2"],
    "--window is 3,9; for each axis of grid 8,8 it has a number": ["neighbourhood-2d", "--window", "3,9"],
    "--grid is -8,-8; its numbers must be at least 1": ["neighbourhood-2d", "--grid=-8,-8"],
    "parents and lengths go together": ["prefix-tree", "--parents=-1,0"],
    "--N is 5002; a picture may have 1 to 4096": ["--N", "5002", "--png", "x.png"],
    "--N is 1000000000; it may be up to 16777216": ["causal", "--N", "1000000000"],
    "--N is 2000000, in 15625 x 15625 blocks, of which there may be 67108864": ["causal", "--N", "2000000"],
    "--N is 7; block diffusion has each token twice": ["--N", "7", "--png", "x.png"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    rc, said = run(*WRONG[message])
    assert rc == 2 and message in " ".join(said.split()), said


def test_want_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2441409375000 bytes.")

    monkeypatch.setattr("flashlane.inspect.mask_view.facts", facts)
    rc, said = run("causal", "--N", "1000000")
    assert rc == 2 and "--N is 1000000; there is no memory for the states of 7813 x 7813 blocks" in " ".join(
        said.split()
    )
