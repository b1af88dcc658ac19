"""Which tile a forward of head dims above 192 gets, held against what was timed (docs/notebook/0072)."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from timed_problems import problem_titled

from flashlane.core import registry

ROWS = json.loads((Path(__file__).parents[3] / "benchmarks" / "archive" / "forward_wide_tiles.json").read_text())
KERNEL = registry.get("hopper(wgmma+tma)")


def chosen(row: dict[str, Any]) -> str:
    return KERNEL.config(replace(problem_titled(row["title"]), needs_grad=False)).describe()


def test_the_tile_loses_little_where_others_were_timed() -> None:
    now, before = [], []
    for row in ROWS["rows"]:
        best = min(ms for words, ms in row["ms"].items() if "q_steps" not in words)
        now.append(row["ms"][chosen(row)] / best)
        before.append(row["ms"][row["chosen_before"]] / best)
    assert len(now) == 24
    assert statistics.geometric_mean(now) < 1.0078 < 1.0087 < statistics.geometric_mean(before)


def test_all_have_ping_pong() -> None:
    """Steps of 80 keys were 1.02 times as slow, and the five drawn problems that were behind had them."""
    assert all("128x64" in chosen(row) and "pingpong" in chosen(row) for row in ROWS["rows"])
