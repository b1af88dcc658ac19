"""The bench: every kernel beside every baseline, checked against the formula, then timed in one interleaved run.

>>> from flashlane import bench
>>> results = bench.run([bench.make_problem(1, 8, 1024, 64)])
>>> for row in results: print(row.tag, row.status, row.timing.median)
"""

from flashlane.bench.check import Oracle, Verdict
from flashlane.bench.compile_report import Usage, report_problem, report_shipped
from flashlane.bench.flops import flops, tflops
from flashlane.bench.grid import Grid, make_problem
from flashlane.bench.inputs import Case, Pattern, load_cases, random_inputs
from flashlane.bench.peers import PEERS, Peer, select_peers
from flashlane.bench.results import Results, Row, Skipped
from flashlane.bench.runner import Selection, run
from flashlane.bench.table import make_console, print_compiled, print_results
from flashlane.bench.timing import Settings, Timing

__all__ = [
    "PEERS",
    "Case",
    "Grid",
    "Oracle",
    "Pattern",
    "Peer",
    "Results",
    "Row",
    "Selection",
    "Settings",
    "Skipped",
    "Timing",
    "Usage",
    "Verdict",
    "flops",
    "load_cases",
    "make_console",
    "make_problem",
    "print_compiled",
    "print_results",
    "random_inputs",
    "report_problem",
    "report_shipped",
    "run",
    "select_peers",
    "tflops",
]
