"""flashlane prebuild: what it compiles is what calls load; a model's configuration gives its problems."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import KERNELS, ROOT, process

from flashlane.core.problem import AttentionProblem
from flashlane.flex.bind import bind
from flashlane.inspect import prebuild
from flashlane.kernels.hopper.flex import run_backward, run_forward
from flashlane.kernels.hopper.forward.launch import config_and_splits

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048}
SIZES = ("--B", "1", "--H", "2", "--N", "128", "--D", "64", "--dtype", "bf16", "--causal", "--arch", "sm_90a")


def flashlane(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **variables}
    command = [sys.executable, "-m", "flashlane", "prebuild", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_call_compiles_nothing_where_it_was_prebuilt_nor_where_the_wheel_is(tmp_path: Path) -> None:
    """And the wheel is read without NVRTC, and leaves the user's cache empty."""
    done = flashlane(*SIZES, "--out", str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "4 kernels of 2 problems for sm_90a: 4 compiled, 0 there before" in done.stdout
    assert "0 compiled, 4 there before" in flashlane(*SIZES, "--out", str(tmp_path / "cache")).stdout
    outcome = process(tmp_path / "cache")
    assert outcome["entries"] == KERNELS and outcome["cached"] == [True] * 4 and not outcome["nvrtc"]

    tool = [sys.executable, str(ROOT / "tools" / "cubin_wheel.py"), str(tmp_path / "cache"), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    made = subprocess.run(tool, env=environment, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("flashlane_cubins-*-py3-none-any.whl")
    assert f"{wheel}: 4 kernels" in made.stdout
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"]
    subprocess.run([*pip, str(tmp_path / "installed"), str(wheel)], check=True, timeout=300)
    outcome = process(tmp_path / "empty", paths=(tmp_path / "installed",))
    assert outcome["entries"] == KERNELS and outcome["cached"] == [True] * 4 and not outcome["nvrtc"]
    assert not (tmp_path / "empty").exists()

    paths = os.pathsep.join((str(ROOT / "src"), str(tmp_path / "installed")))
    done = flashlane(*SIZES, "--out", str(tmp_path / "for another machine"), PYTHONPATH=paths)
    assert "4 compiled, 0 there before" in done.stdout, "that machine may not have the wheel"

    index = tmp_path / "installed" / "flashlane_cubins" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "compiler": "12.0"}))
    outcome = process(tmp_path / "other", paths=(tmp_path / "installed",))
    assert outcome["cached"] == [False] * 4, "of another compiler than their keys say, they are no one's"


def test_kernels_of_block_lists_are_those_that_calls_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mask function, and of lists by hand with blocks of 128 and of 64, whatever the length and the mask."""
    made: list[str] = []

    def sources(problem: AttentionProblem, mask: Any, block: int, bits: bool) -> set[Any]:
        program, _ = bind(None, mask, torch.device("cpu"))
        call = problem, program, (block, block), bits
        return {run_forward.config_of(*call).source(), *run_backward.config_of(*call).sources()}

    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        problem = AttentionProblem(
            batch=1, heads=16, kv_heads=16, seqlen_q=512, seqlen_k=512, head_dim=head_dim, head_dim_v=head_dim,
            dtype=dtype, scale=0.1, arch="sm_90a", needs_grad=True,
        )  # fmt: skip
        found = set(prebuild.sources_of_lists(problem))
        called = replace(problem, seqlen_q=5000, seqlen_k=7000, heads=4, kv_heads=4, alignment="top-left", num_splits=1)
        wanted = sources(called, lambda b, h, q, kv: (q - kv) % 7 != 3, 128, True)
        wanted |= sources(called, None, 128, False) | sources(called, None, 64, False)
        assert found == wanted
        forward_alone = set(prebuild.sources_of_lists(replace(problem, needs_grad=False)))
        assert forward_alone < found and len(forward_alone) == 3
        made += [source.name for source in found]
    assert not prebuild.sources_of_lists(replace(problem, arch="sm_80"))
    assert not prebuild.sources_of_lists(replace(problem, dtype=torch.float32))
    assert made


def test_ptx_for_a_wheel_is_written_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    done = flashlane(*SIZES, "--no-backward", "--ptx", "--out", str(tmp_path / "ptx"))
    assert done.returncode == 0, done.stderr
    assert "PTX of 1 kernel for sm_90a" in done.stdout
    (written,) = (tmp_path / "ptx").iterdir()
    (compiled,) = (tmp_path / "cache").iterdir()
    assert written.name == f"{compiled.stem}.ptx", "both have the kernel's key"


def test_a_wheel_of_nothing_is_refused(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "cubin_wheel.py"), str(tmp_path), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(tool, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "has no compiled kernels; flashlane prebuild --out" in done.stderr


def test_a_models_configuration_gives_its_problems() -> None:
    config = LLAMA | {"torch_dtype": "float16", "sliding_window": 256, "attn_logit_softcapping": 50.0}
    problems = list(prebuild.problems_of_model(config, "sm_90a", batches=(1, 2)))
    assert {(p.heads, p.kv_heads, p.head_dim, p.dtype, p.softcap, p.arch) for p in problems} == {
        (32, 8, 128, torch.float16, 50.0, "sm_90a")
    }
    assert {p.seqlen_k for p in problems} == {512, 1024, 2048} and {p.batch for p in problems} == {1, 2}
    assert {(p.window_left, p.window_right) for p in problems} == {(-1, 0), (255, 0)}
    assert {(p.varlen, p.needs_grad, p.seqlen_q == 1) for p in problems} == {
        (False, False, False), (True, False, False), (False, True, False), (True, True, False), (False, False, True),
    }  # fmt: skip
    assert {p.seqlen_q for p in problems if p.seqused_k} == {1}
    forward_only = list(prebuild.problems_of_model(LLAMA, "sm_90a", backward=False, causal=False))
    assert not any(p.needs_grad or p.causal or p.seqlen_q == 1 for p in forward_only)
    assert {p.dtype for p in forward_only} == {torch.bfloat16}
    assert not any(p.sinks for p in problems), "a type of model without them"
    assert all(p.sinks for p in prebuild.problems_of_model(LLAMA | {"model_type": "gpt_oss"}, "sm_90a", batches=(1,)))


def test_split_keys_are_combined_by_a_kernel_that_is_compiled_too() -> None:
    from flashlane.core import registry

    kernel = registry.get("hopper(wgmma+tma)")
    counts = set()
    for batch in (1, 4):
        for seqlen_k in (1024, 65536):
            problem = AttentionProblem(batch, 4, 4, 128, seqlen_k, 128, 128, torch.bfloat16, 0.1, arch="sm_90a")
            config, splits = config_and_splits(kernel.config(problem), problem)
            sources = prebuild.sources_of(problem, kernel)
            assert len(sources) == 1 + (splits > 1 and not config.combine_in_kernel)
            counts.add(len(sources))
    assert counts <= {1, 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "nowhere"), "--model is 'nowhere', which is not there"),
        (("--model", "{bad}"), "which is not valid JSON"),
        (("--model", "{deep}"), "which is not valid JSON: its brackets are nested too deeply"),
        (("--model", "{empty}"), "which has no hidden_size and no num_attention_heads"),
        (("--model", "{empty}", "--N", "128"), "--model is given together with sizes"),
        (("--N", "128", "--ptx"), "--ptx is given without --out"),
        ((), "--arch is not given, and there is no GPU"),
    ],
)
def test_bad_input_is_told(invoke: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    if not words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bad, empty, deep = tmp_path / "bad.json", tmp_path / "config.json", tmp_path / "deep.json"
    bad.write_text("{")
    deep.write_text("[" * 200000)
    empty.write_text("{}")
    given = [word.format(bad=bad, empty=empty, deep=deep) for word in words]
    done = invoke("prebuild", *given, *(("--arch", "sm_90a") if words else ()))
    assert done.exit_code == 2 and message in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "which holds no JSON object"),
        ({"text_config": "x"}, "which holds no JSON object"),
        (LLAMA | {"num_attention_heads": None}, "which has no num_attention_heads"),
        (LLAMA | {"num_attention_heads": 0}, "whose num_attention_heads is 0; it may be a whole number from 1"),
        (LLAMA | {"num_attention_heads": "x"}, "whose num_attention_heads is 'x'; it may be a whole number from 1"),
        (LLAMA | {"num_attention_heads": -4}, "whose num_attention_heads is -4; it may be a whole number from 1"),
        ({"text_config": LLAMA | {"hidden_size": True}}, "whose hidden_size is True"),
        (LLAMA | {"hidden_size": 16}, "whose hidden_size is 16; it may be 32, the number of heads, or more"),
        (LLAMA | {"num_key_value_heads": 5}, "whose num_key_value_heads is 5; it may be a divisor of 32"),
        (LLAMA | {"head_dim": 0.5}, "whose head_dim is 0.5"),
        (LLAMA | {"max_position_embeddings": "x"}, "whose max_position_embeddings is 'x'"),
        (LLAMA | {"sliding_window": -1}, "whose sliding_window is -1; it may be a whole number from 0"),
        (LLAMA | {"attn_logit_softcapping": -2.0}, "whose attn_logit_softcapping is -2.0; it must be finite"),
        (LLAMA | {"attn_logit_softcapping": "x"}, "whose attn_logit_softcapping is 'x'; it must be a number"),
        (LLAMA | {"attn_logit_softcapping": float("nan")}, "whose attn_logit_softcapping is nan"),
    ],
)
def test_a_configuration_that_no_model_has_is_refused(tmp_path: Path, text: Any, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(text))
    with pytest.raises(ValueError, match=re.escape(f"--model is {str(path)!r}, {message}")):
        prebuild.read_config(tmp_path)


def test_what_a_configuration_leaves_out_or_sets_to_nothing_is_not_refused(tmp_path: Path) -> None:
    nothing = {"sliding_window": 0, "head_dim": None, "num_key_value_heads": None, "attn_logit_softcapping": None}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA | nothing}))
    problems = list(prebuild.problems_of_model(prebuild.read_config(tmp_path), "sm_90a", batches=(1,)))
    assert {(p.kv_heads, p.head_dim, p.window_left) for p in problems} == {(32, 128, -1)}


@pytest.mark.parametrize("ptx", [False, True])
def test_a_file_in_the_place_of_the_folder_is_refused(invoke: Callable[..., Any], tmp_path: Path, ptx: bool) -> None:
    """Before anything is compiled, and the file stands."""
    out = tmp_path / "taken"
    out.write_text("old")
    done = invoke("prebuild", *SIZES, "--out", out, *["--ptx"] * ptx)
    assert done.exit_code == 2 and f"--out is {str(out)!r}, where results cannot be written" in done.stderr, done.stderr
    assert out.read_text() == "old"


def test_what_does_not_compile_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from jit_sources import vector_add

    def fail(source: Any, arch: str) -> None:
        raise RuntimeError("no such thing\nhere\nand more")

    monkeypatch.setattr(prebuild.jit, "compile", fail)
    source = vector_add()
    steps: list[int] = []
    built = prebuild.compile_all([(source, "sm_80"), (source, "sm_80")], lambda: steps.append(1))
    assert built.wrong == [f"{source.entry} for sm_80: no such thing here"] and not built.compiled and len(steps) == 1


def test_a_model_is_prebuilt_in_the_types_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--dtype`` was read by a name that was not there."""
    from typer.testing import CliRunner

    from flashlane.cli.main import app

    path, problems = tmp_path / "config.json", []
    path.write_text(json.dumps(LLAMA))
    monkeypatch.setattr(prebuild, "sources_of", lambda problem: problems.append(problem) or ())
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path))
    done = CliRunner().invoke(
        app, ["prebuild", "--model", str(path), "--dtype", "f16,bf16", "--arch", "sm_90a", "--no-backward"]
    )
    assert done.exit_code == 0, done.output
    assert {problem.dtype for problem in problems} == {torch.float16, torch.bfloat16}


@pytest.mark.parametrize(("limit", "status"), [("0", 3), ("1G", 0)])
def test_kernels_that_the_folder_has_no_room_for_are_told(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, status: int
) -> None:
    """And a folder whose name has brackets, which is no markup, is shown."""
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("FLASHLANE_CACHE_LIMIT", limit)
    monkeypatch.setattr(prebuild.compiler, "_memo", {})
    out = tmp_path / "[red]cache"
    done = invoke("prebuild", *SIZES, "--no-backward", "--out", str(out))
    assert done.exit_code == status, done.stdout + done.stderr
    assert f"in {out}\n" in done.stdout
    told = f"error: 1 kernel is not in {out}: it has no room, or its limit is less"
    assert (told in done.stderr) == (status == 3), done.stderr
    assert len(list(out.iterdir())) == (1 if status == 0 else 0)
