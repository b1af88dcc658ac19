"""Run PyTorch's own attention tests, unmodified, with flashlane in torch's registry.

    python tools/torch_tests.py PATH/test/test_varlen_attention.py [--on-cpu] [pytest options]
    python tools/torch_tests.py PATH/test/test_transformers.py -k "TestSDPACudaOnly and flash"

The modules are those of the PyTorch version that is installed. In the end it says how many calls each operator made of
flashlane, and which calls torch's own kernels ran and why. ``--sample N`` draws N cases of each test function: some
have tens of thousands. See docs/torch-tests.md.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_tests
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
    from torch.testing._internal import common_cuda

    common_cuda.PLATFORM_SUPPORTS_FLASH_ATTENTION = True
    foreign_tests.instantiate_for_cpu()
    return registry.Handle("CPU")


# --- pytest, whose workers (``-n 8``) load this file as a plugin too ---


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch")
    group.addoption("--on-cpu", action="store_true", help="run on the CPU what asks for CUDA; slow")


def pytest_configure(config: pytest.Config) -> None:
    count()
    if config.getoption("--on-cpu"):
        config.add_cleanup(on_cpu().remove)
    else:
        registry.enable()
        config.add_cleanup(registry.disable)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in OF_TORCHS_KERNELS.items():
            if name in item.name and not config.getoption("--on-cpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
    refuses = [item for item in items if UNDER_A_MODE in item.name]
    if refuses and not compiles_under_a_mode():
        reason = (
            f"torch {torch.__version__} refuses torch.compile(fullgraph=True) under a dispatch mode, of any function"
        )
        for item in refuses:
            item.add_marker(pytest.mark.skip(reason=reason))


OF_TORCHS_KERNELS = {
    "test_fused_sdp_choice": "it asks which backend SDPA takes first, which enable() changes",
    "test_fused_backwards_throws_determinism_warning_fused_kernel0_warn_only_True": (
        "it asks for the warning that torch's backward is not deterministic; flashlane's is, when that is asked for"
    ),
}
"""Tests that ask about torch's own kernels, by how their names begin, and why they mean nothing here."""
UNDER_A_MODE = "test_custom_op_registration"
"""A test that calls a compiled function under a dispatch mode."""


def compiles_under_a_mode() -> bool:
    """Whether torch compiles a function without any attention there."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(lambda t: t.sin() + 1, backend="eager", fullgraph=True)
    try:
        with Mode():
            compiled(torch.ones(3))
    except RuntimeError:
        return False
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """What a worker counted."""
    found = getattr(node, "workeroutput", {})
    RAN.update(found.get("ran", {}))
    FELL_BACK.update(found.get("fell back", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output |= {"ran": dict(RAN), "fell back": dict(FELL_BACK)}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("flashlane under torch's operators")
    for name, number in sorted(RAN.items()):
        write(f"{number:6} aten::{name}")
    for reason, number in FELL_BACK.most_common():
        write(f"{number:6} {reason}")
    if not RAN:
        write("none of these tests called one of them")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, help="a test module of PyTorch")
    parsed, pytest_arguments = parser.parse_known_args(arguments)
    if not parsed.module.is_file():
        parser.error(f"module is {parsed.module}, which is not a file; download it from PyTorch's folder test")
    if importlib.util.find_spec("expecttest") is None:
        parser.error("PyTorch's tests import expecttest: pip install expecttest")
    if "--on-cpu" not in pytest_arguments and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --on-cpu runs the tests there")
    sys.path.insert(0, str(Path(__file__).parent))
    # Its own root, so that no configuration or conftest of this repository is in force.
    plugins = ["-p", "torch_tests", "-p", "foreign_tests", "-p", "no:cacheprovider"]
    options = [*plugins, str(parsed.module), f"--rootdir={parsed.module.parent}", "-c", "/dev/null"]
    return int(pytest.main([*options, "-rs", *pytest_arguments]))


if __name__ == "__main__":
    sys.exit(main())
