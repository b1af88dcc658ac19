"""What the documents say of drawn problems: figures of judging seeds, and of one device unless another is named."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WHERE = {"device": "NVIDIA H200", "commit": "abc1234", "date": "2026-11-24T08:00:00+00:00", "torch": "2.11.0+cu130"}
WHERE |= {"cuda": "13.0", "cudnn": 91900, "flash-attn-4": "4.0.0b36"}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("drawn_tables")


def row(steady: float, flushed: float, absent: dict[str, str] | None = None, head_dim: int = 128) -> dict[str, Any]:
    ours = {"steady": 0.1, "flushed": 0.3}
    return {
        "ms": {"flashlane": ours, "fa2": {"steady": 0.1 * steady, "flushed": 0.3 * flushed}},
        "problem": f"P{steady:g}", "sizes": {"head_dim": head_dim}, "absent": absent or {},
        "ratio": {"steady": steady, "flushed": flushed},
        "best_peer": {"steady": "fa4", "flushed": "cudnn"},
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    files = {
        "drawn_backward_dense_2.json": ("backward", "dense", "judging", "NVIDIA H200", [row(2.0, 0.5)]),
        "drawn_forward_cache_5.json": ("forward", "cache", "judging", "NVIDIA H200", [row(0.7, 1.5)]),
        "drawn_forward_window_3.json": ("forward", "window", "judging", "NVIDIA H200", [row(1.5, 1.5)]),
        "drawn_forward_dense_1_h100.json": ("forward", "dense", "judging", "NVIDIA H100", [row(0.8, 0.8, head_dim=72)]),
        "drawn_forward_dense_1.json": (
            "forward", "dense", "judging", "NVIDIA H200", [row(4.0, 1.0), row(0.9, 1.0, {"fa4": "no"}), row(0.96, 4.0)],
        ),
        "drawn_forward_dense_9.json": ("forward", "dense", "fitting", "NVIDIA H200", [row(0.1, 0.1)]),
    }  # fmt: skip
    for name, (direction, kind, role, device, rows) in files.items():
        body = {"direction": direction, "kind": kind, "role": role, "count": 200, "seed": 2013, "rows": rows}
        body |= {"peers": ["(fa2)"], "protocols": ["steady", "flushed"]}
        date = "2026-11-23T08:00:00+00:00" if device == "NVIDIA H100" else WHERE["date"]
        (tmp_path / name).write_text(json.dumps(body | {"environment": WHERE | {"device": device, "date": date}}))
    return tmp_path


def test_a_line_for_each_judging_file_and_another_device_is_named(tables: ModuleType, results: Path) -> None:
    lines = tables.summary_table(results).splitlines()
    assert lines[2:] == [
        "| forward, dense | 3 | 33 / 100 % | 0.90 / 1.00 | 1.51 / 1.59 |",
        "| forward, dense, NVIDIA H100 | 1 | 0 / 0 % | 0.80 / 0.80 | 0.80 / 0.80 |",
        "| forward, window | 1 | 100 / 100 % | 1.50 / 1.50 | 1.50 / 1.50 |",
        "| forward, cache | 1 | 0 / 100 % | 0.70 / 1.50 | 0.70 / 1.50 |",
        "| backward, dense | 1 | 100 / 0 % | 2.00 / 0.50 | 2.00 / 0.50 |",
    ]
    assert tables.worst_table(results).splitlines()[2:] == [
        "| forward, dense | P0.9 | steady | 0.900 | fa4 |",
        "| forward, dense | P0.96 | steady | 0.960 | fa4 |",
        "| forward, dense, NVIDIA H100 | P0.8 | flushed | 0.800 | cudnn |",
        "| forward, cache | P0.7 | steady | 0.700 | fa4 |",
        "| backward, dense | P2 | flushed | 0.500 | cudnn |",
    ]


def test_sentences_have_the_figures_of_one_device(tables: ModuleType, results: Path) -> None:
    behind = " ".join(tables.behind_sentence(results).split())
    assert behind.startswith("- On problems drawn at random (NVIDIA H200), the forward")
    assert "the forward is behind the fastest peer in 2 (steady) or 0 (flushed) of 3" in behind
    assert "the backward is behind the fastest peer in 0 (steady) or 1 (flushed) of 1" in behind
    run = "Each problem was measured on one NVIDIA H200 with torch 2.11.0 for CUDA 13.0, cuDNN 9.19"
    run += " and FlashAttention-4 4.0.0b36"
    assert " ".join(tables.run_sentence(results).split()) == f"{run} (2026-11-24)."
    first = " ".join(tables.files_list(results).split("\n- ")[0].split())
    assert "3 of 200 problems of seed 2013, NVIDIA H200, commit abc1234, 2026-11-24" in first
    assert first.endswith("FlashAttention-4 is absent from 1")
    assert dict(tables.dense_panels(results)) == {
        "forward, steady": [0.9, 0.96, 4.0], "forward, flushed": [1.0, 1.0, 4.0],
        "backward, steady": [2.0], "backward, flushed": [0.5],
    }  # fmt: skip


def test_a_column_for_each_range_of_head_dims(tables: ModuleType, results: Path) -> None:
    lines = tables.head_dims_table(results).splitlines()
    assert (
        lines[0]
        == "| drawn, ahead in both protocols | D 64 | D 72 to 96 | D 104 to 128 | D 136 to 192 | D 200 to 256 |"
    )
    assert lines[2:4] == [
        "| forward, dense | – | – | 1 of 3 | – | – |",
        "| forward, dense, NVIDIA H100 | – | 0 of 1 | – | – | – |",
    ]


def test_why_flash_attention_4_is_absent(tables: ModuleType, results: Path, tmp_path: Path) -> None:
    told = tables.absent_text(results).strip()
    assert told == "FlashAttention-4 is absent from 1 problems: it did not run at D 128."
    file = tmp_path / "drawn_forward_dense_1.json"
    file.write_text(file.read_text().replace('"no"', '"WRONG: dq"'))
    assert "it gave a wrong result at D 128" in tables.absent_text(tmp_path)


def test_which_peers_never_ran_and_which_problems_had_none(tables: ModuleType, results: Path) -> None:
    file = results / "drawn_forward_window_3.json"
    body = json.loads(file.read_text())
    body["rows"] = [
        row(1.5, 1.5, {"cudnn": "it takes no mask", "fa2": "no"}),
        row(1.5, 1.5, {"cudnn": "it takes none"}),
    ]
    del body["rows"][0]["ratio"]
    file.write_text(json.dumps(body))
    assert " ".join(tables.absent_text(results).split("\n\n")[1].split()) == (
        "- cuDNN ran in no problem of *forward, window*: it takes no mask. - Problems that no peer ran are not counted"
        " above: 1 of 2 in *forward, window*."
    )


def test_short_backwards_in_which_flash_attention_2_is_ahead(tables: ModuleType, results: Path) -> None:
    told = " ".join(tables.short_sentence(results).split())
    assert "ahead in 0 of 1 (steady) and in 0 of 0 (flushed)" in told
    file = results / "drawn_backward_dense_2.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rows": [row(0.5, 0.5), row(2.0, 2.0)]}))
    assert "ahead in 1 of 2 (steady)" in " ".join(tables.short_sentence(results).split())


def test_the_newest_dense_file_decides_which_device_goes_without_its_name(tables: ModuleType, results: Path) -> None:
    file = results / "drawn_forward_dense_1_h100.json"
    file.write_text(file.read_text().replace("2026-11-23", "2026-11-25"))
    lines = tables.summary_table(results).splitlines()
    assert lines[2].startswith("| forward, dense | 1 |") and lines[3].startswith("| forward, dense, NVIDIA H200 | 3 |")


def test_lists_of_one_direction_and_kind_are_one_line(tables: ModuleType, results: Path) -> None:
    second = json.loads((results / "drawn_backward_dense_2.json").read_text()) | {"seed": 2014, "rows": [row(0.5, 2.0)]}
    (results / "drawn_backward_dense_4.json").write_text(json.dumps(second))
    assert "| backward, dense | 2 | 50 / 50 % | 0.50 / 0.50 | 1.00 / 1.00 |" in tables.summary_table(results)
    assert dict(tables.dense_panels(results))["backward, steady"] == [0.5, 2.0]
    assert "in 1 (steady) or 1 (flushed) of 2" in " ".join(tables.behind_sentence(results).split())
    assert tables.files_list(results).count("backward, dense") == 2


def test_without_files_nothing_was_measured(tables: ModuleType, tmp_path: Path) -> None:
    assert {part(tmp_path) for part in tables.PARTS.values()} == {"Not measured yet.\n"}


def test_regret_is_of_files_with_our_other_configurations(tables: ModuleType, results: Path) -> None:
    assert "not measured" in tables.regret_table(results).lower()
    before = {name: part(results) for name, part in tables.PARTS.items() if name not in ("drawn-files", "drawn-regret")}
    rows = []
    for chosen, best in ((1.0, 1.0), (1.02, 1.0), (1.1, 1.0), (0.9, 1.0)):
        times = {"chosen one": {"steady": chosen}, "another": {"steady": best}}
        first = {"chosen one": {"steady": 1.5}, "another": {"steady": 1.0}}  # which one is best comes from these
        rows.append({"candidates": {"chosen": "chosen one", "ms": first, "again": times}, "sizes": {"head_dim": 64}})
    body = {"direction": "forward", "kind": "dense", "role": "judging", "count": 4, "seed": 2014, "rows": rows}
    body |= {"peers": [], "protocols": ["steady"], "environment": WHERE | {"date": "2026-11-30T08:00:00+00:00"}}
    (results / "drawn_forward_dense_2014.json").write_text(json.dumps(body))
    assert tables.regret_table(results).splitlines()[2:] == ["| forward, dense | 4 | 3.0 % | 10.0 % | 10.0 % |"]
    # No other figure counts its problems.
    assert before == {name: tables.PARTS[name](results) for name in before}
    assert "without peers" in tables.files_list(results)
