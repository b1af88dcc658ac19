"""A GPU by name and a clock that reads a table, for tests of the tuner on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from flashlane.bench.measure.timing import Settings

ARCH, DEVICE = "sm_90a", "Fake GPU 9000"
SETTINGS = Settings(rounds=3, round_ms=1.0, warmup_ms=1.0, warmup=1)
CPU = torch.device("cpu")


class TableClock:
    """Says what the ``times`` of a contender's kernel say of its number of rows; 5 ms for a kernel without."""

    method = "table"
    preheats = False

    def prepare(self, item: Any) -> Any:
        return item.call.args[0]

    def time(self, contender: Any, iterations: int) -> list[float]:
        times = getattr(contender.kernel, "times", {None: 5.0})
        return [times[getattr(contender.config, "rows", None)]] * iterations
