"""The baseline logs and the lessons as commands, and the names that the logs print."""

import json
import re

import bench_fakes as fakes
import pytest
import torch

import flashlane
from flashlane.bench.measure.peers import select_peers
from flashlane.bench.measure.runner import Selection
from flashlane.bench.suites import baseline
from flashlane.cli import baseline as command
from flashlane.cli import lessons
from flashlane.cli.main import BASELINE, FORMERLY
from flashlane.core import aliases, registry
from flashlane.lessons import comparison


@pytest.fixture
def invoke(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return invoke


@pytest.mark.parametrize(("name", "tag"), aliases.KERNELS.items())
def test_a_kernel_has_the_name_that_the_logs_print(name, tag):
    assert registry.get(name).tag == tag
    assert Selection(tags=(name,)).tags == (tag,) and [k.tag for k in Selection(tags=(name,)).kernels()] == [tag]
    assert tag in [k.tag for k in Selection(words=(name,)).kernels()]
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        flashlane.flash_attn_func(q, q, q, kernel=name)


@pytest.mark.parametrize(("name", "tag"), aliases.PEERS.items())
def test_a_peer_has_the_name_that_people_type(name, tag):
    assert [peer.tag for peer in select_peers(name)] == [tag]
    assert {peer.tag for peer in select_peers(f"flash,{name}")} == {"(flash)", tag}


def test_the_problems_of_the_logs_are_listed_without_a_gpu(invoke):
    (former,) = (name for name, today in FORMERLY.items() if today == BASELINE)
    done = invoke(*BASELINE.split(), "--list", "--only", "D512")
    assert done.exit_code == 0 and "mma(split-q+tiling-qk+stage2)" in done.stdout and "48.78" in done.stdout
    assert invoke(*former.split(), "--list", "--only", "D512").stdout == done.stdout, "its name before"
    assert len(baseline.select_lines(None, ())) == 79
    none = invoke(*BASELINE.split(), "--list", "--only", "D999")
    assert none.exit_code == 2 and "--only is 'D999'" in none.stderr and none.stderr.count("\n") == 1
    if not torch.cuda.is_available():
        refused = invoke(*BASELINE.split())
        assert refused.exit_code == 2 and "need a GPU" in refused.stderr


def test_every_problem_is_on_the_disk_before_the_next_and_shown_beside_the_log(tmp_path, invoke):
    """Two problems of a log of kernels that run here; the second is interrupted."""
    from flashlane.bench.measure.grid import make_problem
    from flashlane.bench.measure.timing import Settings
    from flashlane.inspect.fitted_table import make_console

    class Stops(fakes.FakeKernel):
        def forward(self, problem, inputs, out, lse):
            if problem.seqlen_q == 24:
                raise KeyboardInterrupt
            super().forward(problem, inputs, out, lse)

    problems = [make_problem(1, 1, n, 16, torch.float32) for n in (16, 24)]
    times = {"stops": 1.5, "(unfused)": 3.0}
    lines = [baseline.Line("a log", p, ("stops",), ("(unfused)",), times) for p in problems]
    with registry.table_of(Stops("stops")):
        how = {"settings": Settings(3, 0.1, 0.1, 1, 1), "check": True, "seed": 0}
        results, saved, stopped = command.measure(lines, torch.device("cpu"), tmp_path, **how)
    assert stopped and [path.suffix for path in saved.paths] == [".json", ".csv"]
    rows = json.loads(saved.paths[0].read_text())["rows"]
    assert [row["tag"] for row in rows] == ["stops", "(unfused)"] and {row["status"] for row in rows} == {"ok"}
    console = make_console(width=100)
    with console.capture() as captured:
        command.print_lines(lines, results, console)
    text = captured.get()
    # The name of the CPU decides where the line is wrapped.
    one_line = " ".join(text.split())
    assert re.search(r"torch \S+ · seed 0 · warm-up 1 call and 0.1 ms at least · 3 rounds of", one_line), (
        "as the logs begin"
    )
    assert "B1 H1 N16 D16 f32 · a log" in text and "N24" not in text and "the log's ms" in text and "1.500" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rope",), "LESSON is 'rope'; it may be softmax, activation, hgemm"),
        (("hgemm", "--size", "0"), "--size is 0"),
        (("softmax", "--iters", "0"), "--iters is 0"),
    ],
)
def test_lessons_that_cannot_be(invoke, words, message):
    done = invoke("lessons", *words)
    assert done.exit_code == 2 and message in done.stderr


def test_variants_of_the_lessons_are_listed(invoke):
    done = invoke("lessons", "--list")
    assert done.exit_code == 0
    for block, words in {"softmax": "online", "activation": "scalar, packed", "hgemm": ""}.items():
        assert block in lessons.LESSONS and f"{block}: " in done.stdout and words in done.stdout


def test_lessons_are_written_after_every_group_and_a_wrong_variant_is_a_status(tmp_path, monkeypatch, invoke):
    import typer

    from flashlane.bench.measure.timing import Settings
    from flashlane.inspect.fitted_table import make_console

    def group(name, message=None):
        items = tuple(comparison.Item(tag, lambda: None, lambda: message) for tag in ("torch", "ours"))
        return comparison.Group("softmax", name, items, bytes=1e6)

    def groups(device):
        yield group("good")
        written = list(tmp_path.glob("lessons-*.json"))
        assert len(written) == 1 and len(json.loads(written[0].read_text())["rows"]) == 2
        yield group("bad", "element 3 is 1.0, not 2.0")

    monkeypatch.setitem(comparison.LESSONS, "softmax", groups)
    monkeypatch.setattr(comparison, "SETTINGS", Settings(3, 0.1, 0.1, 1, 1))
    console = make_console(width=140)
    with console.capture() as captured, pytest.raises(typer.Exit) as ended:
        lessons.run_lessons(("softmax",), torch.device("cpu"), 64, None, tmp_path, console)
    assert ended.value.exit_code == 1
    assert "warm-up 0.1 ms · 3 rounds of 0.1 ms at least, interleaved · check against f64" in captured.get()
    assert "softmax · good" in captured.get() and "FAIL ours: element 3 is 1.0" in captured.get()
