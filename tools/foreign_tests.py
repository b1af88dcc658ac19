"""What the tools that run other projects' test modules share: a sample, a limit of time, a record, the CPU for CUDA.

A plugin of pytest, whose workers (``-n 8``) load it too.
"""

from __future__ import annotations

import functools
import inspect
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

START = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("foreign tests")
    group.addoption("--sample", type=int, default=None, metavar="N", help="run N cases of each test function")
    group.addoption("--seed", type=int, default=0, help="of the sample")
    group.addoption("--seconds", type=float, default=None, help="skip what has not begun by then, and say so")
    group.addoption("--record", type=Path, default=None, metavar="FILE", help="a line of JSON for every case")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the sample of what ``-k`` and the like left."""
    size = config.getoption("--sample")
    if size is None:
        return
    functions: dict[Any, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(inspect.unwrap(item.function).__code__, []).append(item)
    draw = random.Random(config.getoption("--seed"))
    kept = {item for cases in functions.values() for item in draw.sample(cases, min(size, len(cases)))}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--seconds")
    if limit is not None and time.monotonic() - START > limit:
        pytest.skip(f"the {limit:g} s of --seconds were over")


def instantiate_for_cpu() -> None:
    """Have PyTorch's test modules make their cases for the CPU, whatever devices they name."""
    from torch.testing._internal import common_device_type

    instantiate = common_device_type.instantiate_device_type_tests

    @functools.wraps(instantiate)
    def for_cpu(test_class: type, scope: dict[str, Any], **others: Any) -> Any:
        return instantiate(test_class, scope, **{**others, "only_for": ("cpu",)})

    common_device_type.instantiate_device_type_tests = for_cpu


class Record:
    """Writes the outcome of every case as it ends, so that a run that is cut off leaves what it found."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")[-2000:]
        line = {"case": report.nodeid, "when": report.when, "outcome": report.outcome, "why": why}
        line |= {"seconds": round(report.duration, 3)}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(path))
