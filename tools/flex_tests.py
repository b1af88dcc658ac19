"""Run FlexAttention's own tests, unmodified, with flashlane under ``torch.nn.attention.flex_attention``.

    python tools/flex_tests.py PATH/test/inductor/test_flex_attention.py -k "builtin_score_mods and float16"
    python tools/flex_tests.py PATH/attention-gym/test/test_natten.py --package PATH/attention-gym --eager [--on-cpu]

A call under torch.compile runs flashlane, one without it torch's own dense formula, so that PyTorch's tests, which
compare the two, compare flashlane with torch. With ``--uncompiled`` torch.compile compiles nothing: it says only which
of the two runs. With ``--eager`` every call runs flashlane: attention-gym's tests compare with formulas of their own.
In the end it says which kernels ran how many calls, what was refused and why, and every skip.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import foreign_tests
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

    def chosen(*operands: Any) -> Any:
        try:
            return kernels(*operands[:-1], "raise")
        except NotImplementedError as error:
            REFUSED[str(error).split(". kernel_options")[0][:150]] += 1
            return kernels(*operands)

    function = attention.bind

    def bound(*operands: Any, **named: Any) -> Any:
        try:
            return function(*operands, **named)
        except NotImplementedError as error:
            REFUSED[str(error)[:150]] += 1
            raise

    attention._Attention.apply = noted  # type: ignore[method-assign]
    attention._kernels, attention.bind = chosen, bound


_inside = 0
"""How many functions that a test compiled are running, where torch.compile is left out."""


def compiled_only() -> None:
    """Leave calls outside torch.compile to torch's dense formula."""
    ours = torch_flex.flex_attention
    torchs = ours.flashlane_original  # type: ignore[attr-defined]
    compile = torch.compile

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        if _inside or torch.compiler.is_compiling():
            return ours(*args, **kwargs)
        left_out, torch.compile = torch.compile, compile  # torch's formula uses it
        try:
            return torchs(*args, **kwargs)
        finally:
            torch.compile = left_out

    flex_attention.flashlane_original = torchs  # type: ignore[attr-defined]
    torch_flex.flex_attention = flex_attention


def leave_out_compile() -> None:
    """Have torch.compile mark what runs in the functions that it is given, and nothing else."""

    def compile(function: Any = None, **_: Any) -> Any:
        if function is None:
            return compile

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            global _inside
            _inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                _inside -= 1

        return marked

    torch.compile = compile


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked of CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, (str, torch.device)) and str(a).startswith("cuda") else a for a in args)
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


def of_pytorch(path: str) -> bool:
    """Whether a module makes cases for each device by itself."""
    path = path.split("::")[0]
    return Path(path).is_file() and "instantiate_device_type_tests(" in Path(path).read_text()


def cases_for_the_cpu() -> None:
    """Have PyTorch's module make all its cases for the CPU; torch's own kernels lack some things there."""
    from torch.testing._internal import common_device_type

    foreign_tests.instantiate_for_cpu()
    common_device_type.skipCPUIf = lambda *_: lambda test: test
    torch_flex._validate_device = lambda *_: None  # type: ignore[assignment]  # it refuses gradients on a CPU


def on_cpu(config: pytest.Config) -> None:
    """Pretend that there is a GPU."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.manual_seed_all = lambda *_: None
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
    group.addoption("--uncompiled", action="store_true", help="torch.compile compiles nothing, as on a CPU")
    group.addoption("--eager", action="store_true", help="calls outside torch.compile run flashlane too")


FOR_TRITON = "Requires Triton + A100"
"""How the reason begins for which PyTorch's module leaves cases out on Hopper: defects of Triton there."""


OF_TORCH = {
    "it counts graphs or compilations of torch.compile; a call of flashlane is a break of the graph": (
        "test_builtin_score_mods_dynamic",
        "test_builtin_score_mods_automatic_dynamic",
        "test_compiling_create_block_mask_no_recompile",
        "test_dynamic_shapes_bug_dynamic_batch",
        "test_free_symbol_dynamic",
        "test_fw_bw_graph_correctness",
        "test_symbol_closure_in_score_mod",
    ),
    "it reads the code or the log that Inductor writes": (
        "test_dynamic_divisibility_guards",
        "test_backend_triton_decode_matches_auto",
        "test_epilogue_fused",
        "test_flex_attention_logging",
        "test_kernel_options_argument_is_respected",
        "test_logsumexp_only_return",
        "test_strided_backwards",
    ),
    "it asks that torch's kernels refuse what flashlane computes": (
        "test_backend_triton_decode_errors",
        "test_backward_error_with_none_q_indices",
        "test_captured_reduction",
        "test_cpu_error_message_return_lse",
        "test_invalid_block_size",
        "test_mixed_dtype_backwards_compiled",
        "test_symmetric_bias.*mode_default",
        "test_validate_small_embedding_size_error_message",
        "test_zero_length_sequence_error",
    ),
    "flashlane refuses its function as torch does, in other words": (
        "test_cant_lower_error_message",
        "test_captured_wrong_device_error_message",
        "test_block_mask_vs_sequence_lengths.*compile_True",
        "test_sliced_blockmask_mask_mod_error",
    ),
    "it asks for the bits of torch's Triton kernel": ("test_backend_auto_matches_triton_large",),
    "it takes a gradient of many elements for a truth value": ("test_learnable_bias_global_compiled",),
}
"""Tests of torch's own machinery, by how their names begin (regular expressions), and why they mean nothing here."""
WITHOUT_COMPILE = {
    "checkpoint calls its function again where the tool cannot see that it was compiled": ("test_selective_ac",),
}
ON_A_GPU = {
    "it reads entries of lists after their counts, which torch calls undefined": ("test_convert_logical_block_mask",),
}
ON_A_CPU = {
    "torch's own function, which it compares with, has no largest scores on a CPU": ("test_return_max",),
    "it needs a CUDA device": ("test_mixed_device_error_message", "test_create_is_cuda_graphable"),
}


def skip(items: list[pytest.Item], reasons: dict[str, tuple[str, ...]]) -> None:
    for reason, names in reasons.items():
        for item in items:
            if any(re.match(name, item.name) for name in names):
                item.add_marker(pytest.mark.skip(reason=reason))


def run_what_fails_for_triton() -> None:
    skip_unless = unittest.skipUnless

    def unless(condition: object, reason: str) -> Any:
        return skip_unless(bool(condition) or reason.startswith(FOR_TRITON), reason)

    unittest.skipUnless = unless  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    count()
    run_what_fails_for_triton()
    integration.enable(otherwise="reference")
    if not config.getoption("--eager"):
        compiled_only()
    if config.getoption("--on-cpu") and any(map(of_pytorch, config.args)):
        cases_for_the_cpu()
    elif config.getoption("--on-cpu"):
        on_cpu(config)
    if config.getoption("--on-cpu") or config.getoption("--uncompiled"):
        leave_out_compile()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_pytorchs = [item for item in items if of_pytorch(str(item.path))]
    skip(of_pytorchs, OF_TORCH)
    if config.getoption("--on-cpu") or config.getoption("--uncompiled"):
        skip(of_pytorchs, WITHOUT_COMPILE)
    skip(of_pytorchs, {} if config.getoption("--on-cpu") else ON_A_GPU)
    if config.getoption("--on-cpu"):
        skip(of_pytorchs, ON_A_CPU)
        for module in {item.module for item in items}:  # PyTorch's module takes no gradients on a CPU
            getattr(getattr(module, "DEVICE_SUPPORTS_BACKWARDS", None), "items", set()).add("cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """What a worker counted."""
    found = getattr(node, "workeroutput", {})
    RAN.update(found.get("ran", {}))
    REFUSED.update(found.get("refused", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output |= {"ran": dict(RAN), "refused": dict(REFUSED)}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("flashlane under FlexAttention")
    for name, number in RAN.most_common():
        write(f"{number:6} calls ran {name}")
    for reason, number in REFUSED.most_common():
        write(f"{number:6} not by the kernels: {reason}")
    if not RAN:
        write("no call ran flashlane")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, nargs="+", help="test modules of PyTorch or attention-gym")
    parser.add_argument("--package", type=Path, help="a folder that the tests import from")
    parsed, pytest_arguments = parser.parse_known_args(arguments)
    for path in parsed.module:
        if not path.is_file():
            parser.error(f"module is {path}, which is not a file")
    if importlib.util.find_spec("expecttest") is None and any(of_pytorch(str(path)) for path in parsed.module):
        parser.error("PyTorch's tests import expecttest: pip install expecttest")
    if "--on-cpu" not in pytest_arguments and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --on-cpu runs the tests there")
    # Inductor would start as many processes as there are cores, for every worker.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Their import asks Inductor for a C++ compiler, which compiles a file for each instruction set of the CPU (AMX and
    # three more), and loads it in a new process with torch while all others wait: minutes, and of use on a CPU alone.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    sys.path[:0] = [str(Path(__file__).parent), *([str(parsed.package)] if parsed.package else [])]
    # Its own root, so that no configuration or conftest of this repository is in force.
    plugins = ["-p", "flex_tests", "-p", "foreign_tests", "-p", "no:cacheprovider", "--noconftest"]
    options = [*plugins, *map(str, parsed.module), f"--rootdir={parsed.module[0].parent}", "-c", "/dev/null"]
    return int(pytest.main([*options, "-rs", *pytest_arguments]))


if __name__ == "__main__":
    sys.exit(main())
