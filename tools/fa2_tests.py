"""Run FlashAttention's own test modules, unmodified, on flashlane.

    python tools/fa2_tests.py PATH/tests/test_flash_attn.py [--sample N] [--seed S] [--on-cpu] [pytest options]
    python tools/fa2_tests.py PATH/hopper/test_flash_attn.py ...
    python tools/fa2_tests.py PATH/tests/cute/test_flash_attn_fast.py ...

The modules import ``flash_attn``, ``flash_attn_interface`` or ``flash_attn.cute``, names under which
:mod:`flashlane.integrations.flash_attn` gives flashlane's functions. They have up to hundreds of thousands of cases:
``--sample N`` draws N of each function, without making the others. See docs/flash-attention-2-tests.md.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import math
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import flashlane
from flashlane.integrations import flash_attn


def with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn_with_kvcache``, which for pages waits for the GPU to check the lengths, as FlashAttention-2 does.

    flashlane does not wait: on a GPU, lengths past the pages count as full.
    """
    table, lengths = kwargs.get("block_table"), kwargs.get("cache_seqlens")
    if table is not None and isinstance(lengths, torch.Tensor):
        new = 0 if kwargs.get("k") is None else kwargs["k"].shape[1]
        capacity = table.shape[1] * k_cache.shape[1]
        if int(lengths.max()) + new > capacity:
            raise RuntimeError(f"cache_seqlens is up to {int(lengths.max())} + {new}; block_table holds {capacity}")
    return flashlane.flash_attn_with_kvcache(q, k_cache, v_cache, *args, **kwargs)


def install(module: Path) -> None:
    """Put flashlane under the names that a test module imports, whatever is installed."""
    flash_attn.install(*flash_attn.NAMES, replace=True)
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        second = importlib.import_module(name)
        second.flash_attn_with_kvcache = with_kvcache
        # True where there is no CUDA extension: a test of that extension's raw functions is skipped by it.
        second.USE_TRITON_ROCM = True
    testing = module.parents[2] / "flash_attn" / "cute" / "testing.py" if len(module.parents) > 2 else module
    if module.parent.name == "cute" and testing.is_file():
        _install_fourth(testing)


def _install_fourth(testing: Path) -> None:
    """What FlashAttention-4's modules import besides its functions: its references, which are torch, and its cache."""
    spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", testing)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    cache = types.ModuleType("flash_attn.cute.cache_utils")
    cache.JITCache = dict
    sys.modules[cache.__name__] = cache
    interface = importlib.import_module("flash_attn.cute.interface")
    interface._flash_attn_fwd = types.SimpleNamespace(compile_cache=None)


OF_THE_ORIGINAL = {
    "test_flash_attn_varlen_tensor_max_seqlen_reuses_fwd_cache": "FlashAttention-4's own cache of compiled kernels",
    "test_flash3_bw_compatibility": "the schemas of the operators of FlashAttention-3's extension",
}
"""Tests that ask about a part of FlashAttention that flashlane does not replace, and which."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if what := OF_THE_ORIGINAL.get(item.name):
            item.add_marker(pytest.mark.skip(reason=f"it asks about {what}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A case that asks for what flashlane has not (descales, chunks) is skipped, and says so."""
    try:
        return (yield)
    except NotImplementedError as error:
        if "flashlane has no kernel for it" not in str(error):
            raise
        pytest.skip(str(error))


# --- fewer cases ---


class Sample:
    """A pytest plugin that draws so many cases of each test function from the product of its parameters."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
        axes = [_axis(mark) for mark in marks]
        total = math.prod(len(values) for _, values in axes)
        if not axes or total <= self.count:
            return
        draw = random.Random(f"{self.seed} {metafunc.definition.name}")
        names = [name for axis, _ in axes for name in axis]
        cases = [_case(axes, number) for number in sorted(draw.sample(range(total), self.count))]
        metafunc.definition.own_markers[:] = [m for m in metafunc.definition.own_markers if m not in marks]
        metafunc.parametrize(names, cases, ids=["-".join(map(str, case)) for case in cases])


def _axis(mark: pytest.Mark) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Names and values of one ``parametrize``."""
    names, values = mark.args[:2]
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
        if len(names) == 1:
            return names, [(value,) for value in values]
    return list(names), [tuple(value) for value in values]


def _case(axes: list[tuple[list[str], list[tuple[Any, ...]]]], number: int) -> list[Any]:
    """Case ``number`` of the product, without making the product."""
    chosen: list[Any] = []
    for _, values in axes:
        number, at = divmod(number, len(values))
        chosen += values[at]
    return chosen


# --- without a GPU ---


class OnCpu(TorchFunctionMode):
    """What is asked of "cuda" is done on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _pretend() -> list[Any]:
    """What the module asks of a GPU that is not there."""
    memory = types.SimpleNamespace(total_memory=1 << 37)
    return [
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: memory),
        OnCpu(),
    ]


# --- pytest, whose workers (``-n 8``) load this file as a plugin too ---


def _add_options(add: Callable[..., Any]) -> None:
    add("--sample", type=int, default=None, metavar="N", help="run N cases of each test function")
    add("--seed", type=int, default=0, help="of the sample")
    add("--on-cpu", action="store_true", help="run on the CPU what the module asks of a GPU; slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    _add_options(parser.getgroup("flash-attention-2").addoption)


def pytest_configure(config: pytest.Config) -> None:
    install(Path(config.args[0]).resolve())
    if config.getoption("--sample") is not None:
        config.pluginmanager.register(Sample(config.getoption("--sample"), config.getoption("--seed")))
    for context in _pretend() if config.getoption("--on-cpu") else []:
        context.__enter__()
        config.add_cleanup(functools.partial(context.__exit__, None, None, None))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, help="a test module of FlashAttention, in its repository's layout")
    _add_options(parser.add_argument)
    parsed, pytest_arguments = parser.parse_known_args(arguments)
    if not parsed.module.is_file():
        parser.error(f"module is {parsed.module}, which is not a file; download FlashAttention's test module")
    if parsed.sample is not None and parsed.sample < 1:
        parser.error(f"--sample is {parsed.sample}; it must be at least 1")
    sys.path.insert(0, str(Path(__file__).parent))
    # Its own root, so that no configuration or conftest of this repository is in force.
    options = ["-p", "fa2_tests", str(parsed.module), f"--rootdir={parsed.module.parent}", "-c", "/dev/null"]
    options += ["-p", "no:cacheprovider", f"--seed={parsed.seed}"]
    options += [f"--sample={parsed.sample}"] if parsed.sample is not None else []
    options += ["--on-cpu"] if parsed.on_cpu else []
    return int(pytest.main([*options, *pytest_arguments]))


if __name__ == "__main__":
    sys.exit(main())
