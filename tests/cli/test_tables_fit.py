"""Every table fits 80 and 100 columns: nothing is cut, and what is left out is named."""

import json
import random
import re

import bench_fakes as fakes
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from flashlane import bench
from flashlane.cli.main import BASELINE, app
from flashlane.core import registry
from flashlane.inspect.compile_report import describe_config
from flashlane.inspect.fitted_table import Column, fold_name, make_table, significant

LONG = "mma(split-q+tiling-qk+acc-f32+persist-q+swizzle-qkv+store-direct+stage2)"
LONGEST = "mma(split-q+tiling-qkv+acc-pv-f32+o-f16+persist-q+swizzle-qkv+store-shared+stage4)"
SIZES = ["--N", "32", "--D", "16", "--H", "1", "--B", "1"]
TINY = [*SIZES, "--quick", "--device", "cpu"]


def printed(table, width):
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("seed", range(40))
def test_any_table_fits_or_says_what_it_leaves_out(seed):
    draw = random.Random(seed)
    tags = ["+".join("x" * draw.randint(1, 14) for _ in range(draw.randint(1, 6))) for _ in range(4)]
    titles = [f"c{i}" + "y" * draw.randint(0, 9) for i in range(draw.randint(1, 14))]
    widths = [draw.randint(1, 12) for _ in titles]
    columns = [
        Column(title, lambda tag, n=n: "7" * n, draw.choice((0, 1, 2, 3)) if i > 2 else 0)
        for i, (title, n) in enumerate(zip(titles, widths, strict=True))
    ]
    columns.append(Column("other", lambda tag: tag[::-1], 0, "left", fold=True))
    must = 2 * len(columns) + sum(max(12, len(c.title)) for c in columns if not c.drop) + 24
    width = max(80, must)
    lines = printed(make_table(tags, columns, "a title", width, name=lambda tag: tag), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    head, _, hidden = text.partition("hidden: ")
    for column in columns:
        shown, named = column.title in head.split(), bool(re.search(rf"\b{column.title}\b", hidden))
        assert shown != named, f"{column.title} is shown or named, and not both"
    for tag in tags:
        assert tag in re.sub(r"\s+", "", text) or all(piece in text for piece in tag.split("+"))


def test_a_column_of_two_widths_is_named_once():
    wide = Column("out[0, 1, -1]", lambda r: "1" * 30, drop=3)
    narrow = Column("out[0,1,-1]", lambda r: "1" * 20, drop=8, replaces="out[0, 1, -1]")
    other = Column("ms", lambda r: "1" * 15)
    tables = {
        width: "\n".join(printed(make_table(["t"], [wide, narrow, other], "", width, name=str), width))
        for width in (100, 50, 40, 30)
    }
    assert "hidden" not in tables[100] and "hidden" not in tables[50]
    for width in (30,):
        assert len(re.findall(r"out\[", tables[width].partition("hidden: ")[2])) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "–"), (0.0, "0.00000"), (7.43e-7, "7.4e-07"), (2e-4, "0.00020"), (0.5, "0.5000"), (12345.6, "12346")],
)
def test_no_figure_is_shown_as_zero_that_is_none(number, text):
    assert significant(number) == text and len(text) <= 7


def test_names_fold_before_a_plus_and_never_pass_their_width():
    assert fold_name("mma(split-q+acc-f32+stage1)", 20) == "mma(split-q+acc-f32\n  +stage1)"
    for width in range(8, 40):
        lines = fold_name(LONG, width).split("\n")
        assert max(map(len, lines)) <= width and "".join(line.strip() for line in lines) == LONG


@pytest.fixture(scope="module")
def results():
    """Of long tags on two problems."""
    with registry.table_of(fakes.FakeKernel(LONG), fakes.FakeKernel("wrong(" + LONG, fakes.one_element)):
        problems = [bench.make_problem(1, 1, n, 16, torch.float32, causal=True, kv_heads=1) for n in (16, 32)]
        selection = bench.Selection(peers=bench.select_peers("unfused,sdpa-math"))
        settings = bench.Settings(3, 0.1, 0.1, 1, 1)
        return bench.run(problems, device="cpu", selection=selection, settings=settings)


@pytest.fixture
def files(results, tmp_path, monkeypatch):
    """A working folder with the results, and with the same a little slower."""
    monkeypatch.chdir(tmp_path)
    text = results.to_json()
    slower = re.sub(
        r'("samples": \[)([^]]*)',
        lambda m: m[1] + ",".join(str(3 * float(x)) for x in m[2].split(",")),
        text,
    )
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text(slower)


FAMILY = "tiling-qkv+acc-f32"
# Of the family's 192 kernels, those with the widest cells: names, configurations, spills, KiB, limits and counts.
WIDEST = tuple(
    f"mma(split-q+{FAMILY}+{rest})"
    for rest in (
        "o-f16+persist-q+swizzle-qkv+store-direct+stage1",
        "o-f16+swizzle-qkv+store-shared+stage1",
        "o-f16+swizzle-qkv+store-direct+stage4",
    )
)


def test_the_compiled_rows_are_the_widest_of_their_family():
    problem = bench.make_problem(1, 8, 8192, 64, arch="sm_90a")
    family = [kernel for kernel in registry.kernels() if FAMILY in kernel.tag]
    widths = [(len(k.tag), len(describe_config(k.config(problem)))) for k in family]
    chosen = [width for kernel, width in zip(family, widths) if kernel.tag in WIDEST]
    assert len(family) > len(chosen) == len(WIDEST)
    assert list(map(max, zip(*chosen))) == list(map(max, zip(*widths)))


COMMANDS = [
    ["bench", *TINY, "--arch", "none", "--kernels", "tiled,reference", "--check"],
    ["bench", *TINY, "--arch", "sm_90a", "--tags", "split-q+acc-f32+swizzle-qkv", "--peers", "none", "--no-check"],
    ["bench", "suite", "flash", "--device", "cpu", "--max-seqlen", "128", "--D", "16,32", "--iters", "1"],
    ["bench", "suite", "attention", "--device", "cpu", "--max-seqlen", "256", "--D", "16", "--B", "1", "--iters", "1"],
    ["bench", "suite", "model", "--device", "cpu", "--max-seqlen", "16", "--iters", "1"],
    ["budget", "hopper(wgmma+tma)", LONG.replace("+store-direct", ""), "--arch", "sm_80,sm_90a"],
    ["compile", "--kernels", ",".join(WIDEST), "--arch", "sm_90a"],
    ["regress", "a.json", "b.json", "--floor", "0"],
    ["roofline", "--device", "cpu", "--results", "a.json"],
    ["profile", "--device", "cpu", *SIZES, "--tag", "tiled", "--tag", "(unfused)", "--calls", "1"],
    ["layout", "--columns", "128", "--compare"],
    ["explain", "--arch", "sm_90a"],
    ["explain", "--arch", "cpu"],
    ["explain", "--show-all", "--arch", "sm_90a", "--backward"],
    ["explain", "--show-all", "--arch", "cpu"],
    ["explain", "--kernel", LONGEST, "--arch", "sm_90a"],
    ["mask"],
    ["mask", "causal-documents", "--lengths", "20,12,32", "--show"],
    [*BASELINE.split(), "--list"],
    ["lessons", "--list"],
    ["doctor"],
    ["--help"],
    ["bench", "--help"],
]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_what_commands_print_fits_the_terminal(files, monkeypatch, words, width):
    monkeypatch.setenv("COLUMNS", str(width))
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code in (0, 1), (outcome.output, outcome.exception)
    lines = [line for line in outcome.stdout.splitlines() if not line.startswith(("wrote ", "/"))]
    too_long = [line for line in lines if len(line.rstrip()) > width]
    assert not too_long, too_long
    if "see the JSON file" in re.sub(r"\s+", " ", outcome.stdout):
        assert re.search(r"wrote \S+\.json", outcome.stdout), "there is such a file"
    mark = r"[\w.]…" if "--help" in words else r"[\w.]…|…\s"  # a help's own sentences have lists that go on
    cut = [line for line in lines if re.search(mark, line) and "flashlane" not in line]
    assert not cut, cut


def test_the_longest_tag_is_the_longest() -> None:
    assert len(LONGEST) == max(len(kernel.tag) for kernel in registry.kernels()) > 80


@pytest.mark.parametrize("width", [80, 100, None])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "cpu"])
def test_explain_names_every_kernel_and_its_reason_in_a_narrow_terminal_too(monkeypatch, arch, width):
    words = ["explain", "--show-all", "--D", "192", "--dtype", "f16", "--arch", arch]
    (said,) = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    lines = CliRunner().invoke(app, words).stdout.splitlines()[1:]
    if width is None:  # a file has a line for each kernel
        reasons = dict(line.strip().split(maxsplit=1) for line in lines)
    else:
        assert max(map(len, lines)) <= width
        reasons, why = {}, ""
        for line in "\n".join(lines).replace("\n" + " " * 8, "").splitlines():  # the rest of a tag is in the next line
            if line.startswith("    "):
                reasons[line.strip()] = why
            else:
                why = line.strip().removesuffix(":")
    assert len(said["kernels"]) > 2000 and reasons.keys() == {kernel["tag"] for kernel in said["kernels"]}
    for kernel in said["kernels"]:
        found = reasons[kernel["tag"]]
        if kernel["tag"] == said["chosen"]:
            assert found == "runs"
        else:
            assert kernel["reason"] in found if kernel["reason"] else "ranked lower" in found, (kernel, found)


@pytest.mark.parametrize("width", [80, 100])
def test_results_of_other_commands_fit_too(results, width):
    from flashlane.bench.measure.sweep import summary_rows
    from flashlane.bench.present.table import print_results
    from flashlane.cli.compare import print_comparison
    from flashlane.cli.sweep import _print

    assert len(summary_rows(results)) == 2
    for show in (print_results, print_comparison, _print):
        console = Console(width=width, force_terminal=False, color_system=None)
        with console.capture() as captured:
            show(results, console)
        lines = captured.get().splitlines()
        assert not [line for line in lines if len(line.rstrip()) > width and "FAIL" not in line], show
        assert not [line for line in lines if re.search(r"\w…", line)], show
