"""The scripts in benchmarks/: the documents that they write, what they choose to run, and how they judge it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FakeKernel, one_element

from flashlane import bench
from flashlane.bench.measure.progress import Bar
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
WHERE = {"device": "H", "torch": "2.13.0", "commit": "abc", "date": "2026-01-02T03:04:05+00:00"}
PROBLEM = bench.make_problem(1, 8, 8192, 64, arch="sm_90a")


def row(tag: str, ms: float | None, problem: str = "P", **more: object) -> dict[str, object]:
    kind = "kernel" if tag.startswith("mma") else "peer"
    timing = None if ms is None else {"median": ms}
    found = {"problem": problem, "tag": tag, "kind": kind, "status": "ok", "timing": timing, "tflops": 1 / (ms or 1)}
    return {**found, **more}


def write(folder: Path, name: str, body: dict[str, object]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": WHERE, **body}))
    return path


def lines_of(text: str) -> list[list[str]]:
    """Cells of a Markdown table's lines, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


# --- documents


def test_documents_equal_what_is_generated(script):
    tables = script("readme_tables")
    pages = tables.documents()
    assert {"kernels.md", "mma.md"} <= {page.name for page in pages}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if page.name not in (
            "kernels.md",
            "features.md",
        ):  # the list of kernels is compared in test_packaging, in a process of its own
            assert tables.rendered(text, ROOT / "benchmarks" / "results", page.name) == text, (
                f"{page.name}: make readme"
            )


def test_documents_are_found_by_their_markers(script, tmp_path):
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    for name, text in (("README.md", "<!-- kernels:begin -->"), ("docs/a.md", "no"), ("docs/deep/b.md", "x:begin -->")):
        (tmp_path / name).write_text(text)
    assert [page.name for page in script("readme_tables").documents(tmp_path)] == ["README.md", "b.md"]


def test_a_result_that_is_not_there_leaves_a_line_and_its_marker(script, tmp_path):
    tables = script("readme_tables")
    marked = "a\n<!-- bench:x/designs:begin -->\nold\n<!-- bench:x/designs:end -->\nz\n"
    text = tables.rendered(marked, tmp_path)
    assert text == "a\n<!-- bench:x/designs:begin -->\nNot measured yet.\n<!-- bench:x/designs:end -->\nz\n"
    write(tmp_path, "x", {"format": "flashlane-bench/1", "rows": [row("mma(naive)", 4.0)]})
    assert "mma(naive)" in tables.rendered(text, tmp_path) and "Not measured" not in tables.rendered(text, tmp_path)


@pytest.mark.parametrize("marker", ["bench:x/steps", "bench:", "shapes"])
def test_markers_that_mean_nothing_are_refused(script, tmp_path, marker):
    write(tmp_path, "x", {"format": "flashlane-bench/1", "rows": []})
    with pytest.raises(ValueError, match=r"no view .steps.|it may be kernels"):
        script("readme_tables").rendered(f"<!-- {marker}:begin -->\n<!-- {marker}:end -->", tmp_path, "page.md")


def test_designs_take_the_fastest_f32_tag_of_each_design(script, tmp_path):
    usage = {"registers": 255, "shared_bytes": 65536}
    rows = [
        row("mma(naive)", 80.0),
        row("mma(split-q+acc-f32+swizzle-qkv+stage1)", 1.0, usage=usage),
        row("mma(split-q+acc-f32+stage1)", 2.0),
        row("mma(split-q+acc-f32+stage2)", 1.6),
        row("mma(split-q+stage2)", 0.1),
        row("mma(split-q+acc-f32+o-f16+stage2)", 0.1),
        row("mma(split-kv+acc-f32+stage1)", 8.0),
        row("mma(split-kv+acc-f32+stage2)", 0.1, status="FAIL"),
        row("mma(split-q+share-kv+acc-f32+stage2)", None, status="error"),
        row("(flash)", 1.2),
    ]
    path = write(tmp_path, "x", {"format": "flashlane-bench/1", "rows": rows})
    assert lines_of(script("readme_tables").bench_tables(path, "designs")) == [
        ["naive", "`mma(naive)`", "80", "0.0", "–", "0.01", "–", "–"],
        ["split-kv", "`mma(split-kv+acc-f32+stage1)`", "8", "0.1", "10.00", "0.15", "–", "–"],
        ["split-q", "`mma(split-q+acc-f32+stage2)`", "1.6", "0.6", "5.00", "0.75", "–", "–"],
        ["swizzle-qkv", "`mma(split-q+acc-f32+swizzle-qkv+stage1)`", "1", "1.0", "1.60", "1.20", "255", "64.0"],
        ["(flash)", "", "1.2", "0.8", "", "1.00", "", ""],
    ]


def test_the_share_of_the_ceiling_is_a_column_where_it_was_measured(script, tmp_path):
    tables = script("readme_tables")
    rows = [row("mma(naive)", 80.0), row("mma(split-q+acc-f32+stage1)", 2.0, mma_ceiling=0.564), row("(flash)", 1.2)]
    lines = lines_of(
        tables.bench_tables(write(tmp_path, "x", {"format": "flashlane-bench/1", "rows": rows}), "designs")
    )
    assert [line[-1] for line in lines] == ["–", "56", ""] and {len(line) for line in lines} == {9}
    target = {"problem": "P", "peer": "(flash)", "required": 1.1, "ratio": 1.2, "met": True, "tag": "mma(x)", "ms": 2.0}
    targets = [target | {"tflops": 300.0, "mma_ceiling": 0.5}, target | {"tflops": 300.0}]
    path = write(tmp_path, "b", {"format": "flashlane-mma-targets/3", "targets": targets})
    assert [line[-2:] for line in lines_of(tables.bench_tables(path))] == [["50", "`mma(x)`"], ["–", "`mma(x)`"]]


def test_the_baseline_logs_stand_beside_ours_line_by_line(script, tmp_path):
    title = "B2 H2 N4096 D64 f16, README"
    rows = [
        row("mma(split-kv+stage1)", 0.145, title, values=(1.0, -0.5, 0.25), tflops_all=120.6),
        row("mma(split-kv+stage2)", None, title, status="FAIL"),
    ]
    path = write(tmp_path, "x", {"format": "flashlane-bench/1", "rows": rows})
    lines = lines_of(script("readme_tables").bench_tables(path, "logs"))[:5]
    values = "1.00000000, -0.50000000, 0.25000000"
    assert lines[2] == ["B2 H2 N4096 D64 f16", "`mma(split-kv+stage1)`", values, "0.145000", "120.60", "0.336719"]
    assert lines[3][3:] == ["FAIL", "–", "0.304818"] and lines[0][1] == "`(unfused)`" and lines[0][3] == "not run"


def test_every_line_of_the_baseline_logs_can_be_run(script):
    """40 problems of the README, 24 of the older one (12 of them in f32 too), and the three of the release notes."""
    from flashlane.bench.suites.baseline import lines as lines_of

    lines = list(lines_of("sm_90a"))
    assert len(lines) == 40 + 36 + 3 and sum(len(line.kernels) + len(line.peers) for line in lines) == 288
    for line in lines:
        assert all(registry.get(tag).supports(line.problem) is None for tag in line.kernels), line
        assert len(bench.select_peers(",".join(line.peers))) == len(line.peers), line
    assert {line.problem.describe() for line in lines if line.problem.head_dim == 512} == {
        "B1 H8 N8192 D512 f16",
        "B1 H48 N16384 D512 f16",
    }


def test_blocks_show_the_fastest_beside_torch_and_the_ceiling(script, tmp_path):
    row = {"block": "hgemm", "group": "8192 f16", "ok": True, "gigabytes_per_second": None, "message": ""}
    rows = [
        row | {"tag": "torch", "milliseconds": 1.0, "tflops": 800.0, "versus_torch": 1.0, "of_ceiling": 1.3},
        row | {"tag": "a", "milliseconds": 4.0, "tflops": 200.0, "versus_torch": 0.25, "of_ceiling": 0.3},
        row | {"tag": "b", "milliseconds": 2.0, "tflops": 400.0, "versus_torch": 0.5, "of_ceiling": 0.6},
        row | {"tag": "wrong", "ok": False, "milliseconds": None, "tflops": None, "versus_torch": None},
        row | {"tag": "ceiling 8 warps", "milliseconds": 1.5, "tflops": 600.0, "versus_torch": None, "of_ceiling": 1},
    ]
    other = {"block": "softmax", "group": "2x2 f32", "tag": "torch", "ok": True, "milliseconds": 3.0}
    path = write(tmp_path, "x", {"rows": [*rows, other]})
    assert lines_of(script("readme_tables").bench_tables(path, "rows")) == [
        ["hgemm", "8192 f16", "`b`", "2", "400.0", "1", "0.50", "60"],
        ["softmax", "2x2 f32", "none passed its check", "–", "–", "3", "–", ""],
    ]


def test_triton_bars_become_a_table(script, tmp_path):
    ratios = {"(flash)": 1.5, "(flex)": 1.2}
    targets = [
        {"name": "a", "ms": 2.0, "tflops": 300.0, "ratios": ratios, "met": True},
        {"name": "b", "ms": 4.0, "tflops": 100.0, "ratios": {"(flex)": 0.9}, "met": False},
        {"name": "c", "ms": None, "tflops": None, "ratios": {}, "met": False},
    ]
    path = write(tmp_path, "x", {"format": "flashlane-triton-targets/3", "targets": targets})
    text = script("readme_tables").bench_tables(path)
    assert lines_of(text) == [
        ["a", "2", "300.0", "1.500", "1.200", "met"],
        ["b", "4", "100.0", "–", "0.900", "**missed**"],
        ["c", "–", "–", "–", "–", "not run"],
    ]
    assert "1 of 3 targets met" in text


def hopper_row(name: str, group: str, ours: float, fa4: float, **more: Any) -> dict[str, Any]:
    direction = name.split()[-1]
    row = {"name": name, "group": group, "direction": direction, "problem": name, "ratio": ours / fa4, "cost": None}
    return row | {"tflops": {"flashlane": ours, "fa4": fa4}} | more


HOPPER_ROWS = [
    hopper_row("D64 full N1024 B16 H32 backward", "grid", 400.0, 500.0),
    hopper_row("D64 full N1024 B16 H32 both", "grid", 450.0, 400.0),
    hopper_row("D64 full N2048 B8 H32 backward", "grid", 500.0, 400.0),
    hopper_row("D128 causal N4096 B4 H32/8 backward", "gqa", 300.0, 200.0),
    hopper_row("D64 full N4096 B4 H32 deterministic backward", "deterministic", 300.0, 400.0, cost=0.125),
]


def test_hopper_results_become_tables(script, tmp_path):
    target = {"target": "least", "cells": 2, "required": 1.0, "measured": 0.8, "met": False}
    result = {"format": "flashlane-hopper-backward/3", "rows": HOPPER_ROWS, "targets": [target]}
    path, tables = write(tmp_path, "hopper_backward", result), script("readme_tables")
    grid = tables.bench_tables(path, "grid-backward")
    assert lines_of(grid) == [["D64 full", "400 / – / 500 / – **0.80**", "500 / – / 400 / – **1.25**"]]
    assert "earlier" not in grid
    older = write(tmp_path, "older", {**result, "rows": [*HOPPER_ROWS[1:], {**HOPPER_ROWS[0], "commit": "dead"}]})
    assert "Rows of other runs: 1 at commit dead." in tables.bench_tables(older, "targets")
    assert "2 ratios 1.000, the least 0.800" in grid
    assert lines_of(tables.bench_tables(path, "grid-both")) == [["D64 full", "450 / – / 400 / – **1.12**"]]
    assert lines_of(tables.bench_tables(path, "rows")) == [
        ["D128 causal N4096 B4 H32/8 backward", "300", "200", "1.50", ""],
        ["D64 full N4096 B4 H32 deterministic backward", "300", "400", "**0.75**", "12 %"],
    ]
    assert lines_of(tables.bench_tables(path, "targets")) == [["least", "2", "1", "0.800", "**missed**"]]
    targets = [{"ratios": {"(flex)": 2.0}}]
    write(tmp_path, "triton_targets", {"format": "flashlane-triton-targets/3", "targets": targets})
    standing = {tuple(line[:3]): line[3:] for line in lines_of(tables.standing(tmp_path))}
    assert standing["`hopper`, backward", "FlashAttention-4", "4"][:1] == ["2"]
    assert standing["`hopper`, forward and backward", "FlashAttention-4", "1"] == ["1", "1.12", "1.12", "1.12"]
    assert standing["`triton`, targets", "FlexAttention", "1"] == ["1", "2.00", "2.00", "2.00"]


def test_hopper_forward_s_other_problems_show_their_tile(script, tmp_path):
    rows = [
        {
            "problem": "D64 full N1024 B16 H32",
            "config": "256x64",
            "ratio": 1.2,
            "tflops": {"flashlane": 6.0, "fa4": 5.0},
        },
        {
            "problem": "D64 full N1024 B16 H32/8",
            "config": "192x64, x",
            "ratio": 2,
            "tflops": {"flashlane": 6, "fa4": 3},
        },
    ]
    path = write(tmp_path, "hopper_forward", {"format": "flashlane-hopper-forward/1", "rows": rows})
    assert lines_of(script("readme_tables").bench_tables(path, "rows")) == [
        ["D64 full N1024 B16 H32/8", "192x64", "6", "3", "2.00"]
    ]
    assert lines_of(script("readme_tables").bench_tables(path, "grid")) == [["D64 full", "6 / – / 5 / – **1.20**"]]
    assert lines_of(script("readme_tables").bench_tables(path, "every")) == [
        ["D64 full N1024 B16 H32", "256x64", "6", "5", "1.20"],
        ["D64 full N1024 B16 H32/8", "192x64", "6", "3", "2.00"],
    ]


def test_kernels_of_whole_models_become_a_table(script, tmp_path):
    row = {"workload": "wan", "attention": "flash", "ms": 428.21, "classes": {"attention": 337.12, "product": 57.06}}
    path = write(tmp_path, "e2e_kernels", {"format": "flashlane-e2e-kernels/1", "rows": [row]})
    assert lines_of(script("readme_tables").bench_tables(path)) == [
        ["wan", "flash", "428.2", "337.1", "57.1", "–", "–"]
    ]


def test_decode_results_become_a_table(script, tmp_path):
    def row(cell: str, tag: str, us: float | None, check: str = "ok") -> dict[str, Any]:
        return {"cell": cell, "tag": tag, "microseconds": us, "share": 0.5, "check": check}

    def both(cell: str, tag: str, steady: float, flushed: float) -> dict[str, Any]:
        return row(cell, tag, flushed) | {"protocols": {"steady": steady, "flushed": flushed}}

    rows = [row("a", "decode(split-kv)", 10.0), row("a", "(cudnn)", 12.0), row("b", "decode(split-kv)", 20.0)]
    rows += [both("e", "decode(split-kv)", 8.0, 10.0), both("e", "(cudnn)", 12.0, 9.0)]
    rows += [row("b", "(cudnn)", 5.0, "wrong"), row("c", "(cudnn)", 1.0), row("d", "decode(split-kv)", None)]
    targets = [{"cell": "a", "targets": ["1.20 x the best peer, wanted 1"], "missed": []}]
    targets += [
        {"cell": "b", "targets": ["50% of the copy rate, wanted 92%"], "missed": ["50% of the copy rate, wanted 92%"]}
    ]
    result = {"format": "flashlane-decode/2", "rows": rows, "targets": targets, "copy_gigabytes_per_second": 4280.4}
    text = script("readme_tables").bench_tables(write(tmp_path, "decode", result))
    assert lines_of(text) == [
        ["a", "10.0", "50.0", "12.0", "1.20", ""],
        ["b", "20.0", "50.0", "–", "–", "**missed** 92%"],
        ["e", "8.0 / 10.0", "62.5 / 50.0", "12.0 / 9.0", "1.50 / **0.90**", ""],
    ]
    assert "4280 GB/s" in text and "1 of 2 targets met" in text


def test_holes_of_the_grid_are_listed(script):
    lines = lines_of(script("readme_tables").hole_table())
    assert all(line[1].startswith("split-q+tiling-qk") and line[4].endswith(" to 1024") for line in lines)
    assert not any("sm_90" in line[0] for line in lines) and any("sm_86" in line[0] for line in lines)


def test_logs_columns_view_has_the_columns_of_the_baseline_logs(script, tmp_path):
    rows = [
        row("(unfused)", 20.0, values=(1.0, -0.5, 0.25), tflops_all=6.67),
        row("mma(split-kv+stage1)", 5.0, values=(1.0, -0.5, 0.25), tflops_all=27.36),
        row("mma(split-q+stage2)", 10.0, values=(1.0, -0.5, 0.25), tflops_all=14.0),
        row("mma(split-q+acc-f32+stage2)", 1.0),
        row("mma(split-q+share-kv+stage1)", None, status="FAIL"),
    ]
    path = write(tmp_path, "x", {"format": "flashlane-bench/1", "rows": rows})
    values = "1.00000000, -0.50000000, 0.25000000"
    assert lines_of(script("readme_tables").bench_tables(path, "logs-columns")) == [
        ["(unfused)", values, "20.000000", "6.67", "+0.00 %"],
        ["mma(split-kv+stage1)", values, "5.000000", "27.36", "+300.00 %"],
        ["mma(split-q+stage2)", values, "10.000000", "14.00", ""],
        ["mma(split-q+share-kv+stage1)", "", "FAIL", "", ""],
    ]


def test_targets_conflicts_and_ceilings_become_tables(script, tmp_path):
    tables = script("readme_tables")
    target = {
        "problem": "P",
        "peer": "(flash)",
        "required": 1.1,
        "ratio": 1.0876,
        "met": False,
        "tag": "mma(x)",
        "ms": 2.0,
    }
    targets = [
        target | {"tflops": 300.0, "steady_ratio": 1.2},
        target | {"ratio": None, "tag": None, "ms": None, "tflops": None},
    ]
    text = tables.bench_tables(write(tmp_path, "b", {"format": "flashlane-mma-targets/3", "targets": targets}))
    assert lines_of(text) == [
        ["P", "(flash)", "1.088", "1.200", "1.1", "**missed**", "2", "300.0", "`mma(x)`"],
        ["P", "(flash)", "–", "–", "1.1", "", "–", "–", "not run"],
    ]
    assert "0 of 2 targets met" in text
    target = {"name": "d64", "ms": 2.0, "tflops": 300.0, "met": True, "ratios": {"(flex)": 1.5, "(flash)": 1.25}}
    target["steady_ratios"] = {"(flex)": 1.4}
    text = tables.bench_tables(write(tmp_path, "e", {"format": "flashlane-triton-targets/4", "targets": [target]}))
    assert lines_of(text) == [["d64", "2", "300.0", "1.500 / 1.400", "1.250", "met"]]

    ncu = script("ncu_conflicts")
    metrics = {ncu.CONFLICTS: 700.0, ncu.LDSM: 100.0, ncu.CYCLES: 5e6, ncu.TENSOR_ACTIVE: 41.25}
    launch = {"head_dim": 64, "layout": "plain", "tag": "mma(x)", "shared_bytes": 49152, "metrics": metrics}
    launches = [launch, launch | {"metrics": {ncu.CONFLICTS: 0.0, ncu.CYCLES: 1e6}}]
    text = tables.bench_tables(write(tmp_path, "c", {"format": ncu.FORMAT, "launches": launches}))
    assert lines_of(text) == [
        ["64", "plain", "700", "7.00", "5000000", "41.2", "48.0", "`mma(x)`"],
        ["64", "plain", "0", "–", "1000000", "–", "48.0", "`mma(x)`"],
    ]

    group = "8192 f16 acc-f32 nn"
    rows = [("ceiling 4 warps", group, 500.0), ("ceiling 8 warps", group, 610.0), ("big", group, 550.0)]
    rows = [{"block": "hgemm", "tag": t, "group": g, "tflops": x, "gigabytes_per_second": None} for t, g, x in rows]
    rows += [{"block": "softmax", "tag": "s", "group": "g", "tflops": None, "gigabytes_per_second": 4100.0}]
    assert lines_of(tables.bench_tables(write(tmp_path, "d", {"rows": rows}), "ceilings")) == [
        ["mma.sync m16n8k16, f16 acc-f32", "610 TFLOP/s"],
        ["device memory, read and write together", "4.10 TB/s"],
    ]


# --- what the GPU scripts share


def test_settings_keep_to_the_time(script):
    settings_for = script("gpu_run").settings_for
    few, many = settings_for(4, 60.0), settings_for(600, 60.0)
    assert few == bench.Settings(
        rounds=5, round_ms=8.0, warmup_ms=60.0, max_iterations=100, budget_ms=60000.0, protocols=("flushed", "steady")
    )
    assert many.rounds * many.round_ms + many.warmup_ms <= 100.0, "600 in a minute: a tenth of a second each"
    assert settings_for(10**6, 1.0).round_ms >= 1.0 and settings_for(10, 60.0, rounds=2).rounds == 5


def test_results_are_kept_problem_by_problem(script, tmp_path):
    keep = script("gpu_run").run_and_keep
    with registry.table_of(FakeKernel("right"), FakeKernel("wrong", one_element)):
        how = {"selection": bench.Selection(peers=()), "settings": bench.Settings(5, 0.1, 0.1, 1, 1), "seed": 0}
        with Bar(2) as bar:
            first = bench.make_problem(1, 1, 16, 16, torch.float32)
            results = keep(first, None, tmp_path / "x.json", **how, reporter=bar)
            assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 2
            results = keep(first, results, tmp_path / "x.json", **how, reporter=bar, note="again")
    saved = json.loads((tmp_path / "x.json").read_text())
    assert [row["problem"] for row in saved["rows"]] == [first.describe()] * 2 + [f"{first.describe()}, again"] * 2
    assert {row.tag for row in results.failed} == {"wrong"} and saved["rows"][0]["timing"]["rounds"] == 5


@pytest.mark.parametrize("name", ["baseline", "baseline_logs", "mma_targets", "triton_targets", "ncu_conflicts"])
def test_scripts_say_that_there_is_no_gpu(script, name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [name, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_trees_are_not_compared_without_a_gpu(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["compare_trees", "--before", str(tmp_path), "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as ended:
        script("compare_trees").main()
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- ncu_conflicts.py


NCU = """==PROF== Connected to process 7
ran something "quoted"
"ID","Process ID","Kernel Name","a__b.sum","c__d.max","e__f.avg"
"","","","","cycle","%"
"0","7","mma_attention","1,024","12345.5","n/a"
"1","7","mma_attention","0","99","41.5"
==PROF== Disconnected from process 7
"""


def test_counters_are_read_from_what_ncu_prints(script):
    read = script("ncu_conflicts").read_csv
    assert read(NCU) == [
        {"a__b.sum": 1024.0, "c__d.max": 12345.5},
        {"a__b.sum": 0.0, "c__d.max": 99.0, "e__f.avg": 41.5},
    ]
    assert read("==ERROR== no permission\n") == []


def test_ncu_that_is_missing_is_named(script, monkeypatch, capsys, tmp_path):
    ncu = script("ncu_conflicts")
    monkeypatch.setattr(ncu, "device_or_exit", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["ncu_conflicts", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        ncu.main()
    assert ended.value.code == 2 and "ncu (Nsight Compute) is not on the PATH" in capsys.readouterr().err


def test_ncu_that_cannot_count_says_why(script, monkeypatch, capsys, tmp_path):
    ncu = script("ncu_conflicts")
    refusing = tmp_path / "ncu"
    refusing.write_text("#!/bin/sh\necho '==ERROR== the counters are locked'\nexit 1\n")
    refusing.chmod(0o755)
    with pytest.raises(RuntimeError, match="the counters are locked"):
        ncu.profile(str(refusing), ncu.FAMILIES)
    assert capsys.readouterr().err.count("locked") == 2, "tried with all counters, then with the needed ones"


def test_plain_tiles_are_the_template_without_padding(script):
    ncu = script("ncu_conflicts")
    found = list(ncu.launches(["split-q+acc-f32"], "sm_90a"))
    assert [(layout, problem.head_dim) for layout, _, problem in found] == [
        (layout, head_dim) for head_dim in (64, 128) for layout in ("plain", "padded", "swizzled")
    ]
    (_, plain, problem), (_, padded, _), (_, swizzled, _) = found[:3]
    sizes = [kernel.config(problem).shared_memory for kernel in (plain, padded, swizzled)]
    assert sizes[0] == sizes[2] < sizes[1]
    source, original = plain.kernel_source(plain.config(problem)), padded.kernel_source(padded.config(problem))
    assert "COLUMNS + CHUNK" not in dict(source.headers)["swizzle.cuh"] and "COLUMNS + CHUNK" in ncu.header(
        "swizzle.cuh"
    )
    assert source.entry == original.entry and source.name != original.name
    assert plain.compile(plain.config(problem), "sm_90a").report.registers > 0  # static_assert compares the bytes


def test_a_changed_header_stops_the_plain_variant(script, monkeypatch):
    ncu = script("ncu_conflicts")
    padded = registry.get("mma(split-q+acc-f32+stage1)")
    problem: AttentionProblem = PROBLEM
    monkeypatch.setattr(ncu, "header", lambda name: "// nothing")
    with pytest.raises(ValueError, match=r"swizzle\.cuh .*0 times"):
        ncu.plain_source(padded.kernel_source(padded.config(problem)))


def test_counters_that_ncu_does_not_know_are_given_up(script, tmp_path):
    ncu = script("ncu_conflicts")
    cells = f'"ID","{ncu.CONFLICTS}","{ncu.CYCLES}"\n"","",""\n"0","0","7"\n'
    fake = tmp_path / "ncu"
    fake.write_text(
        f"#!/bin/sh\ncase \"$*\" in *hmma*) echo '==ERROR== no such metric'; exit 1;; esac\nprintf '{cells}'\n"
    )
    fake.chmod(0o755)
    assert ncu.profile(str(fake), ncu.FAMILIES) == [{ncu.CONFLICTS: 0.0, ncu.CYCLES: 7.0}]
