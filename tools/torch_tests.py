"""Run PyTorch's own attention tests, unmodified, with flashlane in torch's registry.

    python tools/torch_tests.py PATH/test/test_varlen_attention.py [--on-cpu] [pytest options]
    python tools/torch_tests.py PATH/test/test_transformers.py -k "TestSDPACudaOnly and flash"

The modules are those of the PyTorch version that is installed. In the end it says how many calls each operator made of
flashlane, and which calls torch's own kernels ran and why. See docs/torch.md.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashlane.integrations import torch as registry

RAN: collections.Counter[str] = collections.Counter()
"""Calls that flashlane's operators finished, by operator."""
FELL_BACK: collections.Counter[str] = collections.Counter()
"""Calls that torch's own kernels ran, by what was said of them."""


class _Reasons(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        FELL_BACK[record.getMessage()] += 1


def count() -> None:
    """Have the operators note their calls."""
    logger = logging.getLogger(registry.__name__)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_Reasons())
    logger.propagate = False
    for name, implementation in list(registry.OPERATORS.items()):

        def noted(*args: Any, _name: str = name, _run: Callable[..., Any] = implementation, **kwargs: Any) -> Any:
            found = _run(*args, **kwargs)
            RAN[_name] += 1
            return found

        registry.OPERATORS[name] = noted


def on_cpu() -> registry.Handle:
    """What the module asks of CUDA is asked of the CPU, with flashlane's operators there."""
    from torch.testing._internal import common_cuda, common_device_type

    common_cuda.PLATFORM_SUPPORTS_FLASH_ATTENTION = True
    instantiate = common_device_type.instantiate_device_type_tests

    @functools.wraps(instantiate)
    def for_cpu(test_class: type, scope: dict[str, Any], **others: Any) -> Any:
        return instantiate(test_class, scope, **{**others, "only_for": ("cpu",)})

    common_device_type.instantiate_device_type_tests = for_cpu
    return registry.Handle("CPU")


# --- pytest, whose workers (``-n 8``) load this file as a plugin too ---


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("torch").addoption("--on-cpu", action="store_true", help="run on the CPU what asks for CUDA; slow")


def pytest_configure(config: pytest.Config) -> None:
    count()
    if config.getoption("--on-cpu"):
        config.add_cleanup(on_cpu().remove)
    else:
        registry.enable()
        config.add_cleanup(registry.disable)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("flashlane under torch's operators")
    for name, number in sorted(RAN.items()):
        write(f"{number:6} aten::{name}")
    for reason, number in FELL_BACK.most_common():
        write(f"{number:6} {reason}")
    if not RAN:
        write("none of these tests called one of them in this process")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, help="a test module of PyTorch")
    known, rest = parser.parse_known_args(arguments)
    if not known.module.is_file():
        parser.error(f"module is {known.module}, which is not a file; download it from PyTorch's folder test")
    if importlib.util.find_spec("expecttest") is None:
        parser.error("PyTorch's tests import expecttest: pip install expecttest")
    if "--on-cpu" not in rest and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --on-cpu runs the tests there")
    sys.path.insert(0, str(Path(__file__).parent))
    # Its own root, so that no configuration or conftest of this repository is in force.
    options = ["-p", "torch_tests", str(known.module), f"--rootdir={known.module.parent}", "-c", "/dev/null"]
    return int(pytest.main([*options, "-p", "no:cacheprovider", "-rs", *rest]))


if __name__ == "__main__":
    sys.exit(main())
