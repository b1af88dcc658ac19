"""Run FlexAttention's own tests, unmodified, with flashlane under ``torch.nn.attention.flex_attention``.

    python tools/flex_tests.py PATH/test/inductor/test_flex_attention.py -k "builtin_score_mods and float16"
    python tools/flex_tests.py PATH/attention-gym/test/test_natten.py --package PATH/attention-gym [--on-cpu]

A call under torch.compile runs flashlane, one without it torch's own dense formula, so that PyTorch's tests, which
compare the two, compare flashlane with torch. With ``--eager`` every call runs flashlane: attention-gym's tests compare
with formulas of their own. In the end it says which kernels ran how many calls, what was refused and why, and every
skip. The test modules are those of the PyTorch version that is installed.
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from flashlane.flex import attention
from flashlane.integrations import torch_flex as integration

RAN: collections.Counter[str] = collections.Counter()
"""Calls of flex_attention by what ran them, and block masks."""
REFUSED: collections.Counter[str] = collections.Counter()
"""Calls that went to torch, or to the reference, by the reason."""


def count() -> None:
    """Have calls noted."""
    apply, kernels = attention._Attention.apply, attention._kernels

    def noted(call: Any, *rest: Any) -> Any:
        RAN["the tiled reference" if call.kernels is None else "the Hopper kernels"] += 1
        return apply(call, *rest)

    def chosen(*given: Any) -> Any:
        try:
            return kernels(*given[:-1], "raise")
        except NotImplementedError as error:
            REFUSED[str(error).split(". kernel_options")[0][:150]] += 1
            return kernels(*given)

    function = attention.bind

    def bound(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except NotImplementedError as error:
            REFUSED[str(error)[:150]] += 1
            raise

    attention._Attention.apply = noted  # type: ignore[method-assign]
    attention._kernels, attention.bind = chosen, bound


def compiled_only() -> None:
    """Leave calls outside torch.compile to torch's dense formula."""
    ours = torch_flex.flex_attention
    torchs = ours.flashlane_original  # type: ignore[attr-defined]

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if torch.compiler.is_compiling() else torchs(*args, **kwargs)

    flex_attention.flashlane_original = torchs  # type: ignore[attr-defined]
    torch_flex.flex_attention = flex_attention


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked of CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, (str, torch.device)) and str(a).startswith("cuda") else a for a in args)
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


def on_cpu(config: pytest.Config) -> None:
    """Pretend that there is a GPU; torch.compile is left out."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.manual_seed_all = lambda *_: None
    torch.compile = lambda function=None, **_: function if function is not None else (lambda f: f)  # type: ignore[assignment]
    create = torch_flex.create_block_mask

    def create_on_cpu(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if str(a).startswith("cuda") else a for a in args)
        return create(*args, **{**kwargs, **({"device": "cpu"} if len(args) < 6 else {})})

    torch_flex.create_block_mask = create_on_cpu
    mode = OnCpu()
    mode.__enter__()
    config.add_cleanup(lambda: mode.__exit__(None, None, None))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashlane")
    group.addoption("--on-cpu", action="store_true", help="run on the CPU what asks for CUDA; slow")
    group.addoption("--eager", action="store_true", help="calls outside torch.compile run flashlane too")


def pytest_configure(config: pytest.Config) -> None:
    count()
    integration.enable(otherwise="reference")
    if config.getoption("--on-cpu"):
        on_cpu(config)
    elif not config.getoption("--eager"):
        compiled_only()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("flashlane under FlexAttention")
    for name, number in RAN.most_common():
        write(f"{number:6} calls ran {name}")
    for reason, number in REFUSED.most_common():
        write(f"{number:6} not by the kernels: {reason}")
    if not RAN:
        write("no call ran flashlane in this process")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, nargs="+", help="test modules of PyTorch or attention-gym")
    parser.add_argument("--package", type=Path, help="a folder that the tests import from")
    known, rest = parser.parse_known_args(arguments)
    for path in known.module:
        if not path.is_file():
            parser.error(f"module is {path}, which is not a file")
    if "--on-cpu" not in rest and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --on-cpu runs the tests there")
    sys.path[:0] = [str(Path(__file__).parent), *([str(known.package)] if known.package else [])]
    # Its own root, so that no configuration or conftest of this repository is in force.
    options = ["-p", "flex_tests", *map(str, known.module), f"--rootdir={known.module[0].parent}", "-c", "/dev/null"]
    return int(pytest.main([*options, "-p", "no:cacheprovider", "--noconftest", "-rs", *rest]))


if __name__ == "__main__":
    sys.exit(main())
