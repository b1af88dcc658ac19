"""``flashlane regress``: synthetic runs with known shifts and noise, damaged files, and the command from outside."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from flashlane.bench.measure.results import Results, Row
from flashlane.bench.measure.timing import summarise
from flashlane.bench.present import regress as r
from flashlane.bench.present.regress_view import annotations, junit_xml
from flashlane.cli.main import app

CELLS = [(f"B1 H8 N{512 << i} D{d} f16", tag) for i in range(5) for d in (64, 128) for tag in ("mma(a)", "mma(b)")]
RNG = random.Random()


@pytest.fixture(autouse=True)
def same_noise(seed):
    """Each test has noise of its own, and the same each time: verdicts on noise are right almost always, not always."""
    RNG.seed(seed)


def results(shifts=None, *, noise=0.005, rounds=7, drift=0.0, device="Fake GPU", drop=(), outlier=0.0, status=None):
    """A run: cell i takes i + 0.02 ms, times 1 + its shift and the run's drift; a peer next to the kernels."""
    rows = []
    for i, cell in enumerate([*CELLS, (CELLS[0][0], "cudnn")]):
        if cell in drop:
            continue
        ms = (i + 0.02) * (1 + (shifts or {}).get(cell, 0.0)) * (1 + drift)
        samples = [ms * RNG.lognormvariate(0, noise) * (1.5 if RNG.random() < outlier else 1) for _ in range(rounds)]
        kind = "peer" if cell[1] == "cudnn" else "kernel"
        state = (status or {}).get(cell, "ok")
        timing = summarise(samples, 10, "host clock") if state == "ok" else None
        rows.append(Row(cell[0], {}, cell[1], kind, state, "" if timing else "it is wrong", timing=timing))
    return Results({"device": device, "torch": "2"}, {}, rows)


def run_of(*args, **keywords):
    return r.parse(results(*args, **keywords).to_json(), "run.json")


def verdicts(found):
    return {(c.problem, c.tag): c.verdict for c in found.cells}


@pytest.fixture
def files(tmp_path):
    """Writes runs to files and gives their paths."""

    def write(name, *args, **keywords):
        path = tmp_path / name
        path.write_text(results(*args, **keywords).to_json(), encoding="utf-8")
        return path

    return write


def invoke(*words):
    return CliRunner().invoke(app, ["regress", *map(str, words)], env={"COLUMNS": "200"})


@pytest.mark.parametrize(("t", "free", "p"), [(1, 1, 0.25), (2, 2, 0.0917517095), (2.0, 5, 0.0509697394)])
def test_tail_of_students_t(t, free, p):
    assert r.t_tail(t, free) == pytest.approx(p, rel=1e-8)


def test_holm():
    assert r.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@pytest.mark.parametrize(
    ("shift", "noise", "verdict"),
    [(0.01, 0.005, r.SAME), (0.05, 0.003, r.LOSS), (0.2, 0.015, r.LOSS), (-0.2, 0.015, r.GAIN), (-0.01, 0.005, r.SAME)],
)
def test_an_injected_shift_is_judged_and_the_other_cells_are_not(shift, noise, verdict):
    cell, hits, others = RNG.choice(CELLS), 0, 0
    for _ in range(20):
        found = r.compare(run_of(noise=noise), run_of({cell: shift}, noise=noise))
        judged = verdicts(found)
        hits += judged.pop(cell) == verdict
        others += sum(v in (r.LOSS, r.GAIN) for v in judged.values())
    assert hits >= 18 and others <= 1


def test_one_percent_is_seen_without_the_floor():
    cell = CELLS[3]
    found = r.compare(run_of(noise=0.0005), run_of({cell: 0.01}, noise=0.0005), floor=0.0)
    assert verdicts(found)[cell] == r.LOSS
    assert next(c.change for c in found.of(r.LOSS) if (c.problem, c.tag) == cell) == pytest.approx(0.01, abs=0.003)


@pytest.mark.parametrize(
    ("noise", "outlier", "drift", "floor"), [(0.01, 0.0, 0.0, 0.0), (0.02, 0.1, 0.0, 0.0), (0.005, 0.05, 0.012, 0.02)]
)
def test_equal_runs_are_rarely_called_different(noise, outlier, drift, floor):
    """The first two have no floor to hide behind: there only the test and its correction hold the rate."""
    alarms, runs = 0, 100
    for _ in range(runs):
        a, b = run_of(noise=noise, outlier=outlier), run_of(noise=noise, outlier=outlier, drift=drift)
        alarms += bool(r.compare(a, b, floor=floor).of(r.LOSS, r.GAIN))
    assert alarms / runs < 0.05


def test_one_disturbed_round_neither_makes_nor_hides_a_loss():
    calm = [1.0, 1.002, 0.998, 1.001, 0.999, 1.003, 0.997]
    slow = [1.1 * x for x in calm]
    assert r.shift_test(calm, [*calm[:-1], 3.0], 0.02)[1] == 1.0
    shift, p = r.shift_test(calm, [*slow[:-1], 3.0], 0.02)
    assert shift == pytest.approx(0.0953, abs=0.003) and p < 1e-6


def test_noise_as_large_as_the_shift_is_suspect_not_a_loss():
    before, after = [1.0, 1.3, 0.8, 1.1, 0.9], [1.05, 1.4, 0.85, 1.2, 0.95]
    shift, p = r.shift_test(before, after, 0.02)
    assert shift > 0.02 and p > 0.3


def test_a_single_round_proves_nothing_and_says_so(files):
    done = invoke(files("a.json", rounds=1), files("b.json", dict.fromkeys(CELLS, 0.5), rounds=1), "--github")
    assert done.exit_code == 0
    assert "0 slower" in done.output and "one round cannot be told from noise" in done.output


def test_rounds_that_are_all_the_same_tick_of_a_clock():
    assert r.shift_test([0.004] * 5, [0.004] * 5, 0.02) == (0.0, 1.0)
    assert r.shift_test([0.004] * 5, [0.005] * 5, 0.02)[1] < 1e-6


def test_cells_on_one_side_and_broken_ones():
    gone, new, broken = CELLS[1], CELLS[2], CELLS[3]
    a, b = run_of(drop=[new]), run_of(drop=[gone], status={broken: "FAIL"})
    found = r.compare(a, b)
    assert verdicts(found) | {gone: r.MISSING, new: r.NEW, broken: r.BROKEN} == verdicts(found)
    assert [(c.problem, c.tag) for c in found.failed] == [broken]
    assert found.compared == len(CELLS) + 1 - 3
    assert "1 broken" in found.summary() and "1 missing" in found.summary() and "1 new" in found.summary()


@pytest.mark.parametrize("only", ["earlier", "later"])
def test_many_cells_of_one_run_alone_are_counted_in_a_line(files, only):
    few, many = files("few.json", drop=CELLS[1:]), files("many.json")
    done = invoke(*((many, few) if only == "earlier" else (few, many)))
    word = "missing" if only == "earlier" else "new"
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith(word)]
    assert len(lines) == 1 and f"{word}: {len(CELLS) - 1} cells of " in lines[0] and "--json FILE" in done.output


def test_a_slower_peer_is_shown_and_does_not_fail(files):
    peer = (CELLS[0][0], "cudnn")
    a, b = files("a.json"), files("b.json", {peer: 1.0})
    done = invoke(a, b, "--github")
    assert done.exit_code == 0, done.output
    assert "loss (peer)" in done.output and "::warning" in done.output and "::error" not in done.output
    assert "the peers moved by +9" in done.output or "the peers moved by +10" in done.output


def test_status_table_and_files_of_a_loss(files, tmp_path):
    slow, fast, dropped = CELLS[4], CELLS[7], CELLS[1]
    a, b = files("a.json"), files("b.json", {slow: 0.3, fast: -0.3}, drop=[dropped])
    done = invoke(a, b, "--json", tmp_path / "o.json", "--junit", tmp_path / "o.xml", "--github")
    assert done.exit_code == 1
    assert "1 slower, 1 faster" in done.output and "1 missing" in done.output
    lines = done.output.splitlines()
    [loss] = [line for line in lines if line.endswith("loss") or line.rstrip().endswith("loss")]
    assert slow[0] in loss and slow[1] in loss
    [error] = [line for line in lines if line.startswith("::error")]
    assert slow[0] in error and "%25" in error and "% " not in error
    assert [dropped[0] in line for line in lines if line.startswith("::warning")].count(True) == 1

    body = json.loads((tmp_path / "o.json").read_text())
    assert body["format"] == r.REPORT_FORMAT and body["failed"] == 1 and len(body["cells"]) == len(CELLS) + 1
    [cell] = [c for c in body["cells"] if c["fails"]]
    assert (cell["problem"], cell["tag"]) == slow and cell["change"] == pytest.approx(0.3, abs=0.02)

    suite = ET.parse(tmp_path / "o.xml").getroot()
    assert suite.attrib | {"tests": str(len(CELLS) + 1), "failures": "1", "skipped": "1"} == suite.attrib
    [failed] = [case for case in suite if case.find("failure") is not None]
    assert (failed.get("classname"), failed.get("name")) == slow
    assert len(list(suite)) == len(CELLS) + 1 and len(suite.findall("testcase/skipped")) == 1


def test_equal_files_and_a_drift_below_the_floor_pass(files):
    a = files("a.json")
    assert invoke(a, a).exit_code == 0
    assert invoke(a, files("b.json", drift=0.01)).exit_code == 0
    assert invoke(a, files("c.json", dict.fromkeys(CELLS, 0.1))).exit_code == 1


def test_messages_that_xml_and_annotations_cannot_hold():
    bad = run_of(status={CELLS[0]: "error"})
    key = CELLS[0]
    bad.rows[key] = r.Recorded("kernel", "error", "\x1b[31m50 % <off>\nline & two\x00", None, ())
    found = r.compare(run_of(), bad)
    failure = ET.fromstring(junit_xml(found).encode()).find("testcase/failure")
    assert failure is not None and "50 % <off>" in failure.text and "line & two?" in failure.text
    [line] = annotations(found)
    assert "\n" not in line and "50 %25 <off>%0Aline" in line


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[: len(text) // 2], "is not valid JSON: "),
        (lambda text: "", "is not valid JSON: "),
        (lambda text: "[" * 200000, "is not valid JSON: its brackets are nested too deeply"),
        (lambda text: "[]", "format 'list'"),
        (lambda text: text.replace("flashlane-bench/1", "other/3"), "format 'other/3'"),
        (lambda text: text.replace('"rows"', '"lines"', 1), "'rows' is missing"),
        (lambda text: text.replace('"samples"', '"sample"', 1), "'samples' is missing"),
        (lambda text: text.replace('"samples": [', '"samples": [null,', 1), "row 0 has samples"),
        (lambda text: text.replace('"samples": [', '"samples": [-1.0,', 1), "row 0 has samples"),
        (lambda text: text.replace(CELLS[0][1], CELLS[1][1]), "repeats"),
        (lambda text: json.dumps({**json.loads(text), "rows": []}), "no timed row"),
        (lambda text: json.dumps({**json.loads(text), "rows": ["x"]}), "damaged"),
    ],
)
def test_a_damaged_baseline_is_named_and_said_what_it_must_be(files, tmp_path, spoil, words):
    good, path = files("good.json"), tmp_path / "baseline.json"
    path.write_text(spoil(good.read_text()))
    for arguments in ([path, good], ["save", path, "--baseline", tmp_path / "kept.json"]):
        done = invoke(*arguments)
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
        assert words in done.output and "baseline.json" in done.output and "results file of `flashlane" in done.output
    assert not (tmp_path / "kept.json").exists()


def test_files_that_cannot_be_read_or_written(files, tmp_path):
    good = files("good.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path, words in (("none.json", "does not exist"), ("", "cannot be read"), ("binary.json", "not UTF-8")):
        done = invoke(tmp_path / path, good)
        assert done.exit_code == 2 and words in done.output and "results file" in done.output
    for arguments in ([good, good, "--json"], [good, good, "--junit"], ["save", good, "--baseline"]):
        done = invoke(*arguments, tmp_path / "no" / "folder.x")
        assert done.exit_code == 2 and f"{arguments[-1]} is" in done.output and "cannot be written" in done.output


def test_another_device_or_another_clock(files, tmp_path):
    a, b = files("a.json"), files("b.json", device="Other GPU")
    outcome = invoke(a, b)
    assert outcome.exit_code == 2 and "'Fake GPU'" in outcome.output and "--across-devices" in outcome.output
    assert invoke(a, b, "--across-devices").exit_code == 0
    graph = tmp_path / "graph.json"
    graph.write_text(a.read_text().replace("host clock", "CUDA-graph replay"))
    outcome = invoke(a, graph)
    assert outcome.exit_code == 2 and "CUDA-graph replay" in outcome.output


def test_nothing_in_common():
    with pytest.raises(ValueError, match="no timed cell"):
        r.compare(run_of(drop=CELLS), run_of(drop=[(CELLS[0][0], "cudnn")]))


def test_save_keeps_the_results_and_replaces_an_older_baseline(files, tmp_path):
    a, kept = files("a.json"), tmp_path / "kept.json"
    kept.write_text("old")
    done = invoke("save", a, "--baseline", kept)
    assert done.exit_code == 0 and f"saved {len(CELLS) + 1} timed cells of Fake GPU" in done.output
    assert kept.read_text() == a.read_text() and sorted(os.listdir(tmp_path)) == ["a.json", "kept.json"]
    assert invoke(kept, a).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "c"], "3 given"),
        (["a"], "1 given"),
        (["save"], "one RESULTS.json"),
        (["save", "a"], "needs --baseline"),
        (["a", "b", "--baseline", "c"], "goes with save"),
        (["a", "b", "--floor", "-1"], "--floor is -1"),
        (["a", "b", "--floor", "nan"], "--floor is nan"),
        (["a", "b", "--alpha", "1"], "--alpha is 1"),
    ],
)
def test_bad_arguments(words, message):
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.output


def test_the_test_is_scipys_trimmed_one():
    """Yuen's test without a margin is scipy's, where rounds differ by more than the clock's resolution."""
    stats = pytest.importorskip("scipy.stats")
    before, after = [1.0, 1.1, 0.93, 1.04, 1.21, 0.9, 1.02], [1.3, 1.1, 1.45, 1.32, 1.2, 1.5, 1.27, 1.41]
    logs = ([math.log(x) for x in samples] for samples in (after, before))
    expected = stats.ttest_ind(*logs, equal_var=False, trim=r.TRIM)
    assert r.shift_test(before, after, 0.0)[1] == pytest.approx(expected.pvalue, rel=1e-9)


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ImportError, match=r"flashlane\[bench\]"):
        r.t_tail(1.0, 5.0)
