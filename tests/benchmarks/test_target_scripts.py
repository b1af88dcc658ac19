"""The scripts of the baseline grid, of targets and of the course tables: what they run, and what counts as met."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from flashlane import bench
from flashlane.bench.measure.results import Results, Row, Skipped
from flashlane.bench.measure.timing import summarise
from flashlane.core import registry

PROBLEM = bench.make_problem(1, 8, 8192, 64, arch="sm_90a")


def timed(tag: str, ms: float | None, status: str = "ok") -> Row:
    kind = "kernel" if tag.startswith("mma") else "peer"
    timing = None if ms is None else summarise([ms] * 5, 1, "test")
    return Row("P", {}, tag, kind, status, "why" if ms is None else "", timing=timing, tflops=1.0)


def test_baseline_takes_the_listed_tags_or_those_asked_for(script):
    baseline = script("baseline")
    listed = {kernel.tag for kernel in baseline.kernels_with(())}
    assert {"mma(naive)", "mma(split-kv+stage1)", "mma(split-q+share-qkv+acc-f32+swizzle-qkv+stage2)"} <= listed
    assert not any(tag.startswith(("reference", "tiled", "fa1")) for tag in listed)
    assert all("swizzle-qk+" in kernel.tag for kernel in baseline.kernels_with(["swizzle-qk+"]))
    assert baseline.kernels_with(["swizzle-qk+"]) and not baseline.kernels_with(["no-such-word"])


def test_baseline_summary_names_the_fastest_of_each_design(script):
    rows = [timed("mma(split-q+stage1)", 3.0), timed("mma(split-q+acc-f32+stage2)", 2.0), timed("(flash)", 4.0)]
    rows += [timed("mma(split-q+share-kv+stage1)", 8.0), timed("mma(split-kv+stage1)", None, "error")]
    head, *lines = script("baseline").summary(rows)
    assert head.split()[0] == "P"
    assert [line.split()[0] for line in lines] == [
        "mma(split-q+acc-f32+stage2)",
        "(flash)",
        "mma(split-q+share-kv+stage1)",
    ]
    assert [line.split()[-2] for line in lines] == ["2.000", "1.000", "0.500"]


def test_every_target_of_the_issue_is_one_of_the_script(script):
    targets = script("mma_targets").targets("sm_90a")
    flash = [target for target in targets if target.peer == "(flash)"]
    assert len(flash) == 2 * 4 * 2 * 2 and {target.required for target in flash} == {1.10}
    for target in flash:
        assert target.problem.batch * target.problem.seqlen_q == 16384
        assert target.problem.heads * target.problem.head_dim == 2048
    wide = [target for target in targets if target.peer == "(sdpa-efficient)"]
    assert [target.problem.head_dim for target in wide] == [320, 512, 1024]
    assert {target.required for target in wide} == {1.6}
    assert len({target.name for target in targets}) == len(targets) == 35


def test_targets_try_swizzled_tags_that_accumulate_in_f32(script):
    targets = script("mma_targets")
    narrow, wide = targets.targets("sm_90a")[0], targets.targets("sm_90a")[-1]
    assert targets.tags_for(narrow, ()) == [
        f"mma({design}+acc-f32+swizzle-qkv+stage{stage})"
        for design in ("split-q", "split-q+share-kv")
        for stage in (1, 2)
    ]
    tags = targets.tags_for(wide, ())
    assert tags and all("tiling" in tag and "acc-f32+" in tag and "swizzle-qkv" in tag for tag in tags)
    for tag in tags:
        assert registry.get(tag).supports(wide.problem) is None, tag
        assert "f16" not in registry.get(tag).low_precision_reference(wide.problem)
    assert targets.tags_for(wide, ["naive"]) == ["mma(naive)"]


def test_a_target_is_met_by_the_fastest_tag_against_the_peer(script):
    targets = script("mma_targets")
    target = targets.Target("g", PROBLEM, "(flash)", 1.1)
    results = Results({}, {}, [timed("mma(a)", 2.0), timed("mma(b)", 1.0), timed("(flash)", 1.1)])
    verdict = targets.judged(target, results)
    assert (verdict.tag, verdict.ratio, verdict.met, verdict.tags) == (
        "mma(b)",
        1.1,
        True,
        {"mma(a)": 2.0, "mma(b)": 1.0},
    )
    both = [replace(row, timings={"flushed": row.timing, "steady": row.timing}) for row in results.rows]
    slow = replace(both[1].timing, median=1.05)
    both[1] = replace(both[1], timings={"flushed": both[1].timing, "steady": slow})
    steady = targets.judged(target, Results({}, {}, both))
    assert (steady.ratio, round(steady.steady_ratio, 3), steady.met) == (1.1, 1.048, False), "a target is for both"
    assert verdict.steady_ratio is None
    results.rows[1] = timed("mma(b)", None, "FAIL")
    missed = targets.judged(target, results)
    assert (missed.tag, missed.met, missed.failed) == ("mma(a)", False, {"mma(b)": "FAIL: why"})
    results.rows[2:] = []
    results.skipped.append(Skipped("P", "(flash)", "not here"))
    unknown = targets.judged(target, results)
    assert unknown.ratio is None and not unknown.met and unknown.failed["(flash)"] == "not here"
    text = "\n".join(targets.table([verdict, missed, unknown]))
    assert (
        "1.100       –     1.10 pass" in text
        and "0.550       –     1.10 MISS" in text
        and "not run" in text
        and "1 of 3 targets met" in text
    )


def test_only_portable_backwards_run_in_the_targets_of_triton(script, tmp_path, monkeypatch):
    """The table holds these two while problems are timed, and all others again afterwards."""
    targets, before = script("triton_targets"), registry.backward_kernels()
    seen = []

    def run_and_keep(*given, **settings):
        gc.collect()
        seen.append([kernel.tag for kernel in registry.backward_kernels()])
        return Results({"device": "D"}, {}, [])

    monkeypatch.setattr(targets, "run_and_keep", run_and_keep)
    monkeypatch.setattr(targets, "device_or_exit", lambda: torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["triton_targets.py", "--out", str(tmp_path), "--only", "d64,f32,full,n1024"])
    assert targets.main() == 0
    assert seen == [["tiled", "triton"]] and registry.backward_kernels() == before


def test_a_time_limit_leaves_the_rows_of_a_suite(script, tmp_path, monkeypatch):
    """``timeout`` sends SIGTERM, after which the rows that were measured are in the file."""
    suites = script("suites")

    def app(words):
        (Path(words[-1]) / "suite.json").write_text("rows")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    def stopped(words):
        try:
            app(words)
        except KeyboardInterrupt:  # as the command line ends by Ctrl-C
            raise SystemExit(130) from None

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(suites, "app", stopped)
    monkeypatch.setattr(suites, "device_or_exit", lambda: None)
    monkeypatch.setattr(sys, "argv", ["suites.py", "--out", str(tmp_path), "--only", "model_long"])
    try:
        assert suites.main() == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "suite_model_long.json").read_text() == "rows"
