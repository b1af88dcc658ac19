"""Files: complete, readable, replaced at once, and never half-written."""

import csv
import io
import json
import math
import os
import re
from dataclasses import replace

import pytest
import torch

from flashlane.bench.measure import environment
from flashlane.bench.measure.check import Verdict
from flashlane.bench.measure.memory import Memory
from flashlane.bench.measure.results import (
    Results,
    Row,
    Skipped,
    check_writable,
    file_stem,
    load_results,
    write_atomically,
)
from flashlane.bench.measure.timing import summarise
from flashlane.inspect.compile_report import Usage


def results():
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": 8, "seqlen_k": 8, "head_dim": 16, "dtype": "f16"}
    sizes["causal"] = True
    good = Row("p", sizes, "good", "kernel", "ok", values=(0.5, -1.0, 2.0), timing=summarise([1.0, 3.0, 2.0], 4, "m"))
    bad = Row("p", sizes, "bad", "kernel", "FAIL", "output: NaN", verdict=Verdict(False, math.inf, 1e-3, math.inf))
    peer = Row("p", sizes, "(peer)", "peer", "error", "RuntimeError: no")
    environment = {"device": "NVIDIA H200", "commit": "abc", "date": "2025-01-31T00:00:00+00:00", "torch": "2"}
    return Results(environment, {"rule": "fa2"}, [good, bad, peer], [Skipped("p", "other", "head_dim, is 1000")])


def test_json_is_strict_and_complete():
    body = json.loads(results().to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert body["format"] == "flashlane-bench/1"
    assert [row["tag"] for row in body["rows"]] == ["good", "bad", "(peer)"]
    assert body["rows"][0]["timing"]["samples"] == [1.0, 3.0, 2.0]
    assert body["rows"][1]["verdict"]["max_error"] is None
    assert body["skipped"][0]["reason"] == "head_dim, is 1000"


def test_csv_has_what_the_compiler_reported_and_what_was_allocated():
    usage = Usage(
        "good", "sm_90a", registers=168, spill_stores=4, spill_loads=8, shared_bytes=1024, blocks=2, occupancy=0.25
    )
    run = results()
    run.rows[0] = replace(run.rows[0], usage=usage, memory=Memory(10, 20, 30, 40, "allocator"))
    good, bad, *_ = csv.DictReader(io.StringIO(run.to_csv()))
    columns = ("registers", "spills", "shared_bytes", "blocks_per_sm", "occupancy")
    assert [good[name] for name in columns] == ["168", "12", "1024", "2", "0.25"]
    assert [bad[name] for name in columns] == [""] * 5
    columns = ("extra", "allocated", "reserved", "peak", "method")
    assert [good[f"memory_{name}"] for name in columns] == ["10", "20", "30", "40", "allocator"]


def printed(found, **how):
    from flashlane.bench.present.table import make_console, print_results

    console = make_console(width=120)
    with console.capture() as captured:
        print_results(found, console, **how)
    return captured.get()


@pytest.mark.parametrize(("load", "told"), [(1.9, False), (2.6, True), (None, False)])
def test_a_loaded_cpu_is_said_above_the_times(load, told):
    """Times of a CPU that others use can be many times off, and the spread within the run does not show it."""
    found = results()
    found.environment |= {"load": load, "cores": 2}
    assert ("The load average is 2.6 on 2 cores" in printed(found)) == told


def test_the_header_counts_and_the_footer_explains_what_is_shown():
    outcome = results()
    outcome.settings |= {"seed": 0, "warmup": 1, "rounds": 5, "check": True}
    outcome.rows[0] = replace(outcome.rows[0], timing=summarise([1.0, 3.0, 2.0], 1, "m"))
    text = printed(outcome)
    assert "warm-up 1 call and" in text and "5 rounds of 1 iteration, interleaved" in text
    assert not re.search(r"\bgain\b", text), "one kernel gains over none"
    outcome.rows[1] = replace(outcome.rows[1], timing=summarise([0.5, 0.4, 0.3], 7, "m"))
    text = printed(outcome)
    assert "5 rounds of 1 to 7 iterations" in text and len(re.findall(r"\bgain\b", text)) == 2, (
        "the column and its line"
    )


def test_the_results_come_last_and_a_family_has_one_row_of_the_compile_report():
    from flashlane.core import registry
    from flashlane.inspect.compile_report import Usage

    found, tags = results(), [k.tag for k in registry.kernels(listed_only=True) if k.family == "mma"][:30]
    found.compiled = [Usage(tag, "sm_90a", "p", registers=128, spill_stores=0) for tag in tags]
    short, full = printed(found, full_report=False), printed(found, full_report=True)
    (line,) = (line for line in short.splitlines() if line.startswith("mma "))
    assert line.split()[1] == "30" and sum(line.startswith("mma(") for line in full.splitlines()) >= 30
    assert (
        short.index("compiled for sm_90a") < short.index("not run (1)") < short.index("bad") < short.index("max err:")
    )


def test_csv_has_a_line_for_every_row_and_every_skipped_one():
    lines = list(csv.DictReader(io.StringIO(results().to_csv())))
    assert [(line["tag"], line["status"]) for line in lines] == [
        ("good", "ok"),
        ("bad", "FAIL"),
        ("(peer)", "error"),
        ("other", "skipped"),
    ]
    assert float(lines[0]["ms"]) == 2.0 and lines[0]["device"] == "NVIDIA H200" and lines[0]["commit"] == "abc"
    assert lines[0]["seqlen_q"] == "8" and lines[0]["causal"] == "True"


def test_what_counts_as_failed():
    assert [row.tag for row in results().failed] == ["bad"]


def test_a_folder_and_a_file_may_be_given_as_text(tmp_path):
    written, _ = results().write(str(tmp_path), "some")
    assert written == tmp_path / "some.json"
    assert load_results(str(written)).to_json() == load_results(written).to_json() == results().to_json()
    with pytest.raises(ValueError, match=r"^absent/file.json cannot be read: No such file or directory$"):
        load_results("absent/file.json")


def test_files_appear_together(tmp_path):
    paths = results().write(tmp_path)
    assert sorted(p.suffix for p in paths) == [".csv", ".json"]
    assert sorted(os.listdir(tmp_path)) == sorted(p.name for p in paths)
    assert "nvidia-h200" in paths[0].name and paths[0].stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_crash_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch, where):
    path = tmp_path / "r.json"
    path.write_text("old")

    def crash(*_args, **_keywords):
        raise KeyboardInterrupt

    if where == "write":
        opened = os.fdopen

        def half_open(*args, **keywords):
            file = opened(*args, **keywords)
            monkeypatch.setattr(file, "write", crash, raising=False)
            return file

        monkeypatch.setattr(os, "fdopen", half_open)
    else:
        monkeypatch.setattr(os, where, crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["r.json"]
    write_atomically(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["r.json"]


def test_unwritable_folder_is_found_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out is .*file/deep"):
        check_writable(tmp_path / "file" / "deep")
    check_writable(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep").is_dir() and not os.listdir(tmp_path / "new" / "deep")


def test_stem():
    assert file_stem("AMD EPYC (7B13) / x").startswith("bench-2") and file_stem("AMD EPYC/").endswith("-amd-epyc")


def test_a_command_names_no_folder_of_this_machine(monkeypatch):
    monkeypatch.delenv(environment.COMMAND, raising=False)
    words = ["/a/b/drawn.py", "--out", "/c/d.json", "--peers=/e/f,/g/h/", "--lists=dense:1,window:2", "i/j", "3/6"]
    monkeypatch.setattr("sys.argv", words)
    said = environment.environment(torch.device("cpu"))["command"]
    assert said == "drawn.py --out d.json --peers=f,h/ --lists=dense:1,window:2 i/j 3/6"
