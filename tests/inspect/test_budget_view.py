"""``flashlane budget``: regions that sum to what is launched, and figures that are the compiler's and the SM's."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from flashlane import jit
from flashlane.cli import main as cli
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import DeviceKernel
from flashlane.inspect.budget_view import Budget, _fits, budget_of, print_budgets, regions
from flashlane.inspect.compile_report import Usage
from flashlane.jit import toolchain
from flashlane.kernels.mma.tiles import Shape

TAG, SPLIT_KV = "mma(split-q+acc-f32+swizzle-qkv+stage1)", "mma(split-kv+acc-f32+stage1)"


def has_compiler() -> bool:
    try:
        toolchain.supported_architectures()
    except jit.ToolchainError:
        return False
    return True


compiles = pytest.mark.skipif(not has_compiler(), reason="no NVRTC")


def problem(head_dim: int = 64, **changes) -> AttentionProblem:
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "seqlen_q": 8192, "seqlen_k": 8192, "dtype": torch.float16}
    return AttentionProblem(**{**sizes, "head_dim": head_dim, "head_dim_v": head_dim, "scale": 1.0, **changes})


def invoke(*arguments: object, columns: int = 80, status: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["budget", *map(str, arguments)], env={"COLUMNS": str(columns)})
    assert done.exit_code == status, done.output
    return done.stderr if status == 2 else done.stdout


@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
@pytest.mark.parametrize("batch", [1, 64])
def test_regions_sum_to_the_launched_bytes(head_dim, arch, batch):
    asked, apart = problem(head_dim, batch=batch, seqlen_q=512, seqlen_k=512).on(arch), 0
    for kernel in registry.kernels(listed_only=True):
        if isinstance(kernel, DeviceKernel) and kernel.supports(asked) is None:
            config = kernel.config(asked)
            total = kernel.resources(config).shared_memory
            parts = regions(config, total, 16)
            assert sum(parts.values()) == total + 16 and min(parts.values()) > 0, (kernel.tag, parts)
            if kernel.tag.startswith("mma(split-") and hasattr(config, "layouts"):
                assert "tiles" not in parts and ("P" in parts) == (config.warps_kv > 1), kernel.tag
                assert ("Q/KV" in parts) == ("share-qkv" in kernel.tag) and ("QKV" in parts) == config.q_streamed
                apart += 1
    assert apart > 20


def test_regions_by_hand():
    """64 rows and 64 keys, D 64, padded to 72: the 9 KiB a tile."""
    kernel = registry.get("mma(split-kv+acc-f32+stage1)")
    config = kernel.variant.at(problem(64).on("sm_80"), Shape(64, 64, 2, 4))
    tile = 64 * 72 * 2
    parts = regions(config, config.shared_memory)
    assert parts == {"Q": tile, "KV": 2 * tile, "P": tile, "stats": 64 * 4 * 4}


def test_regions_that_do_not_sum_are_refused():
    config = registry.get(TAG).config(problem(64).on("sm_90a"))
    with pytest.raises(ValueError, match="do not sum"):
        regions(config, config.shared_memory + 1)


def test_each_resource_by_itself_holds_so_many_ctas():
    usage = Usage("k", "sm_90a", registers=64, shared_bytes=100 * 1024, threads=256)
    assert _fits(usage) == {"registers": 4, "shared memory": 2, "threads": 8}
    assert _fits(replace(usage, registers=32, threads=128)) == {"registers": 16, "shared memory": 2, "threads": 16}


@compiles
def test_budget_is_the_compilers_and_the_sms():
    kernel = registry.get(TAG)
    asked = problem(64).on("sm_90a")
    config = kernel.config(asked)
    (budget,) = budget_of(kernel, problem(64), "sm_90a")
    compiled = kernel.compile(config, "sm_90a")
    usage, shared = budget.usage, kernel.resources(config).shared_memory
    assert (usage.registers, usage.spills) == (compiled.report.registers, compiled.report.spills)
    assert usage.shared_bytes == sum(budget.regions.values()) == shared + compiled.report.static_shared
    fit = jit.occupancy("sm_90a", kernel.resources(config).threads, compiled.report.registers, usage.shared_bytes)
    assert (usage.blocks, usage.limit, usage.occupancy) == (fit.ctas, fit.limit, fit.fraction)
    assert usage.blocks == min(budget.fits.values()) == budget.fits[usage.limit]
    assert budget.shared_limit == 227 * 1024


@compiles
def test_command_prints_each_architecture():
    for columns in (80, 120):
        text = invoke(SPLIT_KV, "--D", 64, "--arch", "sm_80,sm_90a", columns=columns)
        assert max(map(len, text.splitlines())) <= max(columns, 91)
        rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("sm_")}
        assert set(rows) >= {"sm_80", "sm_90a"} and "/163" in rows["sm_80"] and "/227" in rows["sm_90a"]
        assert "…" not in text and "stats" in text and SPLIT_KV in text


@compiles
def test_json_has_what_the_table_has():
    found = json.loads(invoke("mma(naive)", "fa1(f32)", "--arch", "sm_90a", "--json"))
    naive, fa1 = found
    assert naive["tag"] == "mma(naive)" and naive["regions"] == {"tiles": 16384} and naive["registers"] > 0
    assert "dtype is f16" in fa1["reason"] and fa1["registers"] is None and fa1["regions"] == {}


@compiles
def test_a_backward_kernel_has_a_budget_for_each_of_its_device_files():
    found = json.loads(invoke("hopper", "--direction", "backward", "--D", 128, "--json"))
    main = "hopper_backward"
    assert [budget["entry"] for budget in found] == [f"{main}_preprocess", main, f"{main}_postprocess"]
    assert all(budget["tag"] == "hopper" and budget["direction"] == "backward" for budget in found)
    assert found[0]["regions"] == {} and found[1]["regions"]["K and V"] == 128 * 128 * 2 * 2
    assert (
        "architecture is sm_80"
        in json.loads(invoke("hopper", "--direction", "backward", "--arch", "sm_80", "--json"))[0]["reason"]
    )
    assert "it may be forward or backward" in invoke("hopper", "--direction", "up", columns=200, status=2)


@compiles
def test_all_architectures_of_a_kernel():
    found = json.loads(invoke("mma(naive)", "--arch", "all", "--json"))
    assert [budget["arch"] for budget in found] == list(registry.get("mma(naive)").architectures)


def test_a_failed_compile_is_a_line_and_a_status(monkeypatch):
    monkeypatch.setattr(jit, "compile", lambda *_: (_ for _ in ()).throw(RuntimeError("ptxas broke")))
    text = invoke(TAG, status=1)
    assert "sm_90a: error: RuntimeError: ptxas broke" in text


def test_unsupported_problems_say_why():
    text = invoke(TAG, "--D", 512)
    assert "not for this problem: head_dim is 512" in text and "regs" not in text


def test_spills_and_no_blocks_stand_out():
    from flashlane.inspect.compile_report import Usage

    usage = Usage("t", "sm_90a", "p", "c", 255, 8, 4, 240000, 128, 0, 0.0, "shared memory")
    console = Console(width=80, force_terminal=True, color_system="truecolor", file=io.StringIO())
    print_budgets([Budget(usage, {"Q": 240000}, 232448, {"registers": 2, "shared memory": 0, "threads": 16})], console)
    assert re.findall(r"\x1b\[1;31m *(\d+)", console.file.getvalue()) == ["12", "0"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("mma(split-q+acc-f32+stage)",), "did you mean 'mma(split-q+acc-f32+stage"),
        (("reference",), "reference is made of torch operations"),
        (("triton",), "triton is compiled by Triton"),
        (("mma(naive)", "--arch", "sm_91a"), "--arch is 'sm_91a'"),
        (("mma(naive)", "--D", "0"), "--D"),
    ],
)
def test_bad_input_is_explained(arguments, words):
    assert words in invoke(*arguments, columns=200, status=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("budget", TAG, "--N", 10**9), "--N is 1000000000; what is explained may have up to 16777216"),
        (("budget", "hopper", "--direction", "backward", "--N", 8, "--seqlen-k", 10**9), "--seqlen-k is 1000000000"),
        (("compile", "--tags", TAG, "--N", 10**9), "--N is 1000000000; what is explained may have up to 16777216"),
        (("explain", "--N", 10**9), "--N is 1000000000; what is explained may have up to 16777216"),
    ],
)
def test_lengths_whose_tiles_take_minutes_are_refused(invoke, words, message) -> None:
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.stderr, done.output
