"""Figures that sentences of the pages quote are those of the committed results that they name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BOTH = ("flushed", "steady")


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a file of ``benchmarks/results``."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def text_of(page: str) -> str:
    """A page with single spaces in the place of all others."""
    return " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())


def span(values: Iterable[float]) -> str:
    """``0.87 to 0.98`` for the least and the greatest of some values."""
    found = list(values)
    return f"{min(found):.2f} to {max(found):.2f}"


def test_what_modifiers_cost() -> None:
    cap, causal, full, cap_of_f16 = [], [], [], []
    for row in rows_of("modifiers"):
        for speed in (row["speed"][protocol] for protocol in BOTH):
            if " f16" in row["problem"]:
                cap_of_f16.append(speed["softcap"])
                continue
            cap.append(speed["softcap"])
            (causal if "causal" in row["problem"] else full).append(speed["alibi"])
    text = text_of("limits")
    assert f"{span(causal)} of the speed with ALiBi under a causal mask and {span(full)} without one" in text
    assert f"and {span(cap)} under a soft cap of 30" in text
    assert f"{min(cap_of_f16):.2f} and" in text


def test_what_decode_reads_and_how_it_stands_next_to_cudnn() -> None:
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows_of("decode"):
        cells.setdefault(row["cell"], {})[row["tag"]] = row
    ratios, rates = [], {False: [], True: []}
    for cell, tags in cells.items():
        own = tags["decode(split-kv)"]
        if "graph" in cell or "q1" not in cell:
            continue
        gigabytes = own["gigabytes_per_second"] * own["microseconds"] / 1e6
        if gigabytes > 0.5:
            rates["paged" in cell].append(gigabytes / own["protocols"]["steady"] * 1e3)
        if int(cell.split("KV")[1].split("k")[0]) >= 32 and "paged" not in cell:
            ratios += [tags["(cudnn)"]["protocols"][each] / own["protocols"][each] for each in BOTH]
    text = text_of("limits")
    assert f"`decode` has {min(ratios):.3f} to {max(ratios):.2f} of cuDNN's speed" in text
    plain, paged = (f"{min(rates[kind]):.1f} to {max(rates[kind]):.1f}" for kind in (False, True))
    assert f"larger ones at {plain}, or {paged} in pages" in text


def test_the_forward_next_to_peers() -> None:
    rows, text = rows_of("hopper_forward"), text_of("hopper-forward")
    flex = [row["ms"]["flex"] / row["ms"]["flashlane"] for row in rows if "flex" in row["ms"]]
    assert f"FlexAttention, which {len(flex)} rows of the grid have in the file, takes {span(flex)} times" in text
    of_80 = [row["ms"]["fa4"] / row["ms"]["flashlane"] for row in rows if row["problem"].startswith("D80 ")]
    assert f"the kernel has {span(of_80)} of FlashAttention-4's speed" in text


def test_the_fastest_calls_without_a_program() -> None:
    forward = [row["tflops"]["flashlane"] for row in rows_of("hopper_forward") if row["problem"].startswith("D128 ")]
    backward = [
        row["tflops"]["flashlane"]
        for row in rows_of("hopper_backward")
        if row["name"].startswith("D128 ") and row["direction"] == "backward"
    ]
    assert f"without a program have {max(forward):.0f} forward and {max(backward):.0f} backward" in text_of("flex")


def test_hgemm_without_tma() -> None:
    best: dict[str, float] = {}
    for row in rows_of("lessons"):
        ours = row["block"] == "hgemm" and row["tag"] != "torch" and not row["tag"].startswith("ceiling")
        if ours and "acc-f32" in row["group"] and "tma" not in row["tag"] and row["of_ceiling"]:
            best[row["group"]] = max(row["of_ceiling"], best.get(row["group"], 0.0))
    assert f"The fastest without TMA are {span(best.values())} with f32 sums" in text_of("lessons")
