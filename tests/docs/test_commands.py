"""Every ``flashlane …`` line of README and the pages: parsed by the command's own parser, and run as far as seconds go.

Three sorts. Lines that measure nothing run from beginning to end. Lines that measure run up to the first measurement,
which is taken for Ctrl-C: names of kernels and peers, sizes, files and rules about options are all checked by then. The
rest are parsed only; PARSED_ONLY says which and why.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flashlane.bench.measure import device_rates, isolated, ranks, runner
from flashlane.bench.suites.attention import AttentionSuite
from flashlane.bench.suites.e2e import E2ESuite
from flashlane.bench.suites.model import ModelSuite
from flashlane.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OWN_WORDS = ("docs/notebook/",)
"""Notebooks keep the commands of their time."""

PARSED_ONLY = {
    "capture": "it loads a model",
    "compile": "it compiles for minutes",
    "prebuild": "it compiles for minutes",
    "monitor": "it needs a GPU and runs until it is stopped",
    "profile": "it profiles; --show-commands is run",
    "doctor": "tests/inspect runs it",
    "bench ranks": "it starts processes; tests/distributed runs it",
    "--install-completion": "it changes the shell's files",
    "--show-completion": "it asks which shell runs it",
    "sweep grid.toml --export": "it needs the journal of the line before",
    "roofline --results": "its file has to have rates, which no committed file has",
}
"""Beginnings of lines, and why they are not run here."""
WHOLE = (
    "bench baseline --list",
    "explain",
    "budget",
    "layout",
    "mask",
    "plot",
    "report",
    "regress",
    "tune --list",
    "tune --forget",
    "--version",
)
"""Beginnings of lines that run to their end."""
FOR_A_GPU = re.compile(r"GPU|ncu|CUDA|Nsight")


def lines_of(page: Path) -> list[str]:
    """Commands of a page's code blocks and of its text; mentions of a command or an option in the text are not."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.S | re.M)
    found = [line for line in "".join(blocks).replace("\\\n", " ").splitlines() if line.startswith("flashlane ")]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    inline = re.findall(r"`(flashlane [^`\n]+)`", outside)
    mention = re.compile(r"…|\b[A-Z]{3,}\b|^flashlane (\S+|bench suite)$| --[\w-]+$")
    found += [line for line in inline if not mention.search(line)]
    return [re.sub(r"\s+#\s.*", "", line).removeprefix("flashlane ").strip() for line in found]


def cases() -> list:
    names = {}
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if not name.startswith(OWN_WORDS):
            for line in lines_of(page):
                names.setdefault(line, name)
    return [pytest.param(line, id=f"{name}: {line}") for line, name in names.items()]


LINES = cases()


def test_the_rule_sees_the_lines():
    assert len(LINES) > 50 and {"bench", "compare", "doctor"} < {case.values[0].split()[0] for case in LINES}


@pytest.mark.parametrize("line", LINES)
def test_a_line_parses(line):
    """Names, options and the values' types, by the parser that the command has."""
    words = shlex.split(line)
    command: click.Command = get_command(app)
    if words[0].startswith("-"):
        assert any(words[0] in p.opts for p in command.params) or words[0] in ("--version", "--help"), line
        return
    context = click.Context(command, info_name="flashlane")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(context, words[0])
        if inner is None:
            break  # an argument, not a command's name
        command, words = inner, words[1:]
    command.make_context("flashlane", words, parent=context)


def measures(line: str) -> bool:
    return not line.startswith((*PARSED_ONLY, *WHOLE)) or "--show-commands" in line


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files that the pages' lines name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "images").mkdir(parents=True)
    (tmp_path / "docs" / "notebook").symlink_to(ROOT / "docs" / "notebook")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "results").mkdir()
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    results = json.loads((ROOT / "benchmarks" / "results" / "baseline.json").read_text())
    for row in results["rows"]:
        row["memory"] = {"extra": 1 << 20, "allocated": None, "reserved": None, "peak": None, "method": "made up"}
    for name in ("sweep.json", "bench-….json"):
        (tmp_path / "results" / name).write_text(json.dumps(results))
    blocks = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "cli").glob("*.md")))
    for name in ("grid.toml", "mine.py"):
        body = re.search(rf"^```\w+\n(# {re.escape(name)}.*?)^```", blocks, re.S | re.M)
        (tmp_path / name).write_text(body[1])
    return tmp_path


def invoke(line: str):
    return CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "120", "NO_COLOR": "1"})


@pytest.mark.parametrize("line", [case for case in LINES if case.values[0].startswith(WHOLE)])
def test_a_line_that_measures_nothing_runs(line, place):
    if line.startswith("regress baseline.json"):
        assert invoke("regress save results/bench-….json --baseline baseline.json").exit_code == 0
    done = invoke(line)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("line", [case for case in LINES if measures(case.values[0])])
def test_a_line_that_measures_runs_up_to_the_measurement(line, place, monkeypatch):
    reached = []

    def stop(*_: object, **__: object) -> None:
        reached.append(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_run_case", stop)
    monkeypatch.setattr(isolated.Workers, "run", stop)
    monkeypatch.setattr(ranks, "on_ranks", stop)
    monkeypatch.setattr(device_rates, "copy_rate", lambda *_: 1.0)
    monkeypatch.setattr(device_rates, "matrix_rate", lambda *_: 1.0)
    for suite in (AttentionSuite, ModelSuite, E2ESuite):
        monkeypatch.setattr(suite, "measure", stop)
    device_rates.measure_rates.cache_clear()
    outcome = invoke(line)
    device_rates.measure_rates.cache_clear()
    if "--show-commands" in line:
        assert outcome.exit_code == 0, outcome.output
    elif outcome.exit_code == 2:
        assert FOR_A_GPU.search(outcome.stderr), outcome.stderr
    else:
        assert outcome.exit_code == 130 and reached, outcome.output
