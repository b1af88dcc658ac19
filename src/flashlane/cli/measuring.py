"""How long the commands that time something measure."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashlane.bench.measure.timing import Settings

CPU_SETTINGS = Settings(rounds=5, round_ms=4.0, warmup_ms=10.0, warmup=1, budget_ms=1500.0)
QUICK = {"rounds": 3, "round_ms": 2.0, "warmup_ms": 5.0, "budget_ms": 500.0}


def settings_for(device: torch.device, quick: bool, warmup: int | None, iters: int | None, graph: bool) -> Settings:
    """How long to measure on a device, as the options say.

    Raises:
        ValueError: an option is out of range, or the device has no graphs.
    """
    if graph and device.type != "cuda":
        raise ValueError(f"--graph replays CUDA graphs; the device is {device}, which has none")
    settings = Settings() if device.type == "cuda" else CPU_SETTINGS
    if graph:
        settings = replace(settings, protocols=("replay",))
    if quick:
        settings = replace(settings, **QUICK)
    for name, value, field, low in (("--warmup", warmup, "warmup", 0), ("--iters", iters, "rounds", 1)):
        if value is not None:
            if value < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
            settings = replace(settings, **{field: value})
    return settings
