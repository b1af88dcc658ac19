"""The bench: every kernel next to every peer, checked against the formula, then timed in one interleaved run.

>>> from flashlane import bench
>>> results = bench.run(bench.problems(seqlen=[512, 1024], head_dim=64, causal=True))
>>> frame = results.frame()                       # tidy, a line a row (pandas)
>>> for row in results: print(row.tag, row.status, row.timing.median)

The names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlane.lazy import loader

if TYPE_CHECKING:
    from flashlane.bench.measure.check import Oracle, Verdict
    from flashlane.bench.measure.flops import flops, least_bytes, tflops
    from flashlane.bench.measure.grid import Grid, make_problem, problems
    from flashlane.bench.measure.inputs import Case, Pattern, load_cases, random_inputs
    from flashlane.bench.measure.memory import Memory
    from flashlane.bench.measure.peers import PEERS, Peer, select_peers
    from flashlane.bench.measure.presets import PRESETS, Preset
    from flashlane.bench.measure.results import Results, Row, Skipped, load_results
    from flashlane.bench.measure.runner import Selection, run
    from flashlane.bench.measure.timing import Settings, Timing
    from flashlane.bench.present.table import make_console, print_compiled, print_results
    from flashlane.inspect.compile_report import Usage, report_problem, report_shipped

_MODULES = {
    "flashlane.bench.measure.check": (
        "Oracle",
        "Verdict",
    ),
    "flashlane.bench.measure.flops": (
        "flops",
        "least_bytes",
        "tflops",
    ),
    "flashlane.bench.measure.grid": (
        "Grid",
        "make_problem",
        "problems",
    ),
    "flashlane.bench.measure.inputs": (
        "Case",
        "Pattern",
        "load_cases",
        "random_inputs",
    ),
    "flashlane.bench.measure.memory": ("Memory",),
    "flashlane.bench.measure.peers": (
        "PEERS",
        "Peer",
        "select_peers",
    ),
    "flashlane.bench.measure.presets": (
        "PRESETS",
        "Preset",
    ),
    "flashlane.bench.measure.results": (
        "Results",
        "Row",
        "Skipped",
        "load_results",
    ),
    "flashlane.bench.measure.runner": (
        "Selection",
        "run",
    ),
    "flashlane.bench.measure.timing": (
        "Settings",
        "Timing",
    ),
    "flashlane.bench.present.table": (
        "make_console",
        "print_compiled",
        "print_results",
    ),
    "flashlane.inspect.compile_report": (
        "Usage",
        "report_problem",
        "report_shipped",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "PEERS",
    "PRESETS",
    "Case",
    "Grid",
    "Memory",
    "Oracle",
    "Pattern",
    "Peer",
    "Preset",
    "Results",
    "Row",
    "Selection",
    "Settings",
    "Skipped",
    "Timing",
    "Usage",
    "Verdict",
    "flops",
    "least_bytes",
    "load_cases",
    "load_results",
    "make_console",
    "make_problem",
    "print_compiled",
    "print_results",
    "problems",
    "random_inputs",
    "report_problem",
    "report_shipped",
    "run",
    "select_peers",
    "tflops",
]


__getattr__ = loader(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
