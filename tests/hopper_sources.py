"""The device files that the Hopper backward runs a configuration with, of whichever of its designs."""

from __future__ import annotations

from typing import Any

from flashlane.jit import KernelSource
from flashlane.kernels.hopper.backward_config import finish_source, prepare_source


def main_sources(config: Any) -> tuple[KernelSource, ...]:
    """The kernels between that of the statistics and the last: one, or several."""
    return tuple(config.sources()) if hasattr(config, "sources") else (config.source(),)


def side_sources(config: Any) -> tuple[KernelSource, ...]:
    """The kernels before and after; what sums dQ in registers, or finishes it itself, has none after."""
    before = (prepare_source(config),)
    return (*before, finish_source(config)) if config.sum_floats and not config.finish_inside else before
