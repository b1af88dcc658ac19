"""The doctor finds what is here, prices what is not, and never falls ill itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_fakes
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from flashlane.bench.measure.environment import child_environment
from flashlane.inspect import doctor
from flashlane.jit import sass, toolchain

EXPECTED = [
    "Python",
    "OS",
    "GPU",
    "driver",
    "torch",
    "torch CUDA",
    "NVRTC",
    "runtime headers",
    "disassembler",
    "numpy",
    "triton",
    "cuda-bindings",
    "cache",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "xformers",
    "ffpa-attn",
    "flashinfer-python",
    "FlexAttention",
    "cuDNN SDPA",
    "Nsight Compute",
    "Nsight Systems",
    "compute-sanitizer",
    "matplotlib",
    "pandas",
    "transformers",
    "safetensors",
    "attention",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check_prices(report: doctor.Report) -> None:
    for finding in report.findings:
        if finding.status == "ok":
            assert finding.found and not finding.cost and not finding.remedy, finding
        else:
            assert finding.cost, finding


def test_examines_everything_and_leaves_no_trace(folder):
    report = doctor.examine()
    names = [finding.name for finding in report.findings if not finding.name.startswith("GPU ")]
    assert names == EXPECTED
    check_prices(report)
    assert all(finding.remedy for finding in report.findings if finding.status != "ok")
    assert "right to" in report["attention"].found and not report.wrong
    assert report["torch"].found == torch.__version__
    assert report["Python"].found == ".".join(map(str, sys.version_info[:3]))
    assert (report["GPU"].status == "ok") == torch.cuda.is_available()
    assert str(folder) in report["cache"].found and "0 entries" in report["cache"].found
    assert not folder.exists() or torch.cuda.is_available()  # a GPU's kernel is compiled into it


def test_json_and_table_say_the_same():
    report = doctor.examine()
    body = json.loads(report.to_json())
    assert [finding["name"] for finding in body["findings"]] == [finding.name for finding in report.findings]
    assert body["can_compile"] is report.can_compile and body["verdict"] == report.verdict
    out = io.StringIO()
    Console(file=out, width=200).print(doctor.render(report))
    text = out.getvalue()
    for finding in report.findings:
        assert finding.name in text


def test_brackets_of_extras_are_printed():
    finding = doctor.Finding("compiler", "NVRTC", "missing", cost="no kernel compiles", remedy=doctor.NVRTC_EXTRA)
    findings = (finding, doctor.Finding("compiler", "runtime headers", "ok", "x"))
    out = io.StringIO()
    Console(file=out, width=200).print(doctor.render(doctor.Report(findings)))
    assert 'pip install "flashlane[nvrtc]"' in out.getvalue()


def test_nothing_installed(monkeypatch, tmp_path):
    """A machine with none of the things: every finding is there and says what it costs."""

    def absent(name, *_):
        raise importlib.metadata.PackageNotFoundError(name)

    def fail():
        raise toolchain.ToolchainError("not here")

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(doctor, "_torch", lambda: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "_output", lambda *_: "")
    monkeypatch.setattr(toolchain, "compiler_version", fail)
    monkeypatch.setattr(toolchain, "include_directory", fail)
    monkeypatch.setattr(sass, "disassemblers", lambda: ())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    report = doctor.examine()
    assert [finding.name for finding in report.findings] == EXPECTED
    here = {finding.name for finding in report.findings if finding.status == "ok"}
    assert here <= {"Python", "OS", "driver"}
    assert report["cache"].status == "degraded"
    check_prices(report)
    assert not report.can_compile and not report.can_launch
    assert "kernels do not compile" in report.verdict


def test_what_is_older_than_the_package_allows_is_said(monkeypatch):
    old = {"torch": "2.9.1+cu128", "numpy": "1.25.2", "triton": "3.5.1", "transformers": "4.57.0", "pandas": "3.1.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old.get(name, "99.0"))
    for package in (*doctor._PACKAGES, *doctor._EXTRAS):
        found = package.examine()
        older = package.distribution in old and package.distribution != "pandas"
        assert found.status == ("degraded" if older else "ok"), found
        assert not older or f'"{package.distribution}>=' in found.remedy
    found = doctor._torch_finding(SimpleNamespace(__version__=old["torch"]))
    assert (found.status, found.found, found.remedy) == ("degraded", "2.9.1+cu128", 'pip install "torch>=2.10"')


def test_the_oldest_versions_are_those_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for name, oldest in doctor.OLDEST.items():
        assert re.search(rf'"{name}>={re.escape(oldest)}[";,]', text), name


def test_a_compiler_that_is_too_old_compiles_nothing(monkeypatch):
    """It was ok, and "Kernels compile here"."""
    import cuda.bindings.nvrtc as bindings

    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (0, 12, 8))
    caches = toolchain.nvrtc, toolchain.supported_architectures, toolchain.compiler_version
    for each in caches:
        each.cache_clear()
    try:
        found = doctor._nvrtc()
    finally:
        for each in caches:
            each.cache_clear()
    assert found.status == "missing" and found.cost == "12.8 is too old, no kernel compiles"


def test_a_look_that_fails_is_a_finding(monkeypatch):
    def explode():
        raise RuntimeError("boom\nmore")

    monkeypatch.setattr(doctor, "_driver", explode)
    monkeypatch.setenv("FLASHLANE_CACHE_LIMIT", "much")
    report = doctor.examine()
    assert report["driver"].status == "missing" and "RuntimeError: boom" in report["driver"].cost
    assert "FLASHLANE_CACHE_LIMIT is 'much'" in report["cache"].cost


def test_a_gpu_is_described(monkeypatch):
    class Properties:
        name, total_memory, multi_processor_count, major, minor = "NVIDIA H200", 140 * 2**30, 132, 9, 0

    class Old(Properties):
        name, major, minor = "Tesla T4", 7, 5

    class Cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)
        get_device_properties = staticmethod(lambda index: (Properties, Old)[index])

    class Torch:
        cuda = Cuda

    first, second = doctor._gpus(Torch)
    assert (first.name, first.status, first.found) == ("GPU", "ok", "NVIDIA H200, 140 GiB, 132 SMs, sm_90")
    assert (second.name, second.status) == ("GPU 1", "degraded") and "sm_75" in second.found


@pytest.mark.parametrize("version, status", [(None, "missing"), ("12.8", "degraded"), ("13.0", "ok")])
def test_cuda_of_torch(version, status):
    class Torch:
        class version:
            cuda = None

    Torch.version.cuda = version
    assert doctor._torch_cuda(Torch).status == status


def test_no_peer_is_imported(tmp_path):
    """Peers that are installed are found by looking only: these would end the process if imported."""
    for name in ("flash_attn", "xformers", "ffpa_attn", "transformers", "matplotlib", "pandas"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("import os; os._exit(3)")
    (tmp_path / "flash_attn" / "cute").mkdir()
    code = (
        "from flashlane.inspect import doctor; report = doctor.examine();"
        "print(*(report[name].status for name in ('xformers', 'ffpa-attn', 'flash-attn', 'flash-attn-4')))"
    )
    root = str(Path(doctor.__file__).parents[2])
    environment = {"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # flash-attn-4 alone also makes a package flash_attn.
    assert done.stdout.split() == ["ok", "ok", "missing", "ok"]


def test_a_wrong_result_is_said_and_is_a_status(monkeypatch):
    import flashlane
    from flashlane.cli.main import app

    right = flashlane.flash_attn_func
    monkeypatch.setattr(flashlane, "flash_attn_func", lambda *args, **keywords: right(*args, **keywords) * 1.01)
    report = doctor.examine()
    assert report.wrong and report["attention"].status == "missing" and "is off by" in report["attention"].cost
    assert "cannot" not in report.verdict and "is wrong" in report.verdict
    assert json.loads(report.to_json())["verdict"] == report.verdict
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1 and done.stdout.count("its result is wrong") == 1


def test_the_verdict_is_printed_once():
    from flashlane.cli.main import app

    report = doctor.examine()
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    assert done.exit_code == 0 and done.stdout.count(report.verdict) == 1


class Torch:
    """What doctor asks torch for, of a machine with GPUs."""

    class cuda:
        is_available = staticmethod(lambda: True)


def test_clocks_power_and_other_processes_of_a_gpu(monkeypatch, tmp_path):
    gpu_fakes.nvidia_smi(tmp_path, monkeypatch, gpu_fakes.IDLE_LINE, gpu_fakes.SLOW_LINE)
    findings = {finding.name: finding for finding in doctor._states(Torch)}
    assert findings["clocks"].status == findings["power limit"].status == findings["other processes"].status == "ok"
    assert findings["clocks"].found == "SM 1980 of 1980 MHz, memory 3201 MHz (idle)"
    assert findings["power limit"].found == "700 W, of which 76 W are drawn now"
    assert findings["other processes"].found == "none"
    assert findings["clocks 1"].status == "degraded" and "slowed by power cap" in findings["clocks 1"].found
    assert findings["power limit 1"].status == "degraded" and "400 W, of which" in findings["power limit 1"].found
    assert "nvidia-smi --power-limit 700" in findings["power limit 1"].remedy
    assert findings["other processes 1"].found == "train.py (pid 4242, 3.0 GiB)"
    assert findings["other processes 1"].status == "degraded"


def test_a_gpu_whose_state_nobody_can_read(monkeypatch):
    monkeypatch.setenv("PATH", "")
    (found,) = doctor._states(Torch)
    assert found.status == "missing" and "nvidia-ml-py" in found.remedy and "nvidia-smi" in found.remedy


def test_the_driver_is_named_with_the_cuda_that_it_runs(monkeypatch, tmp_path):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    monkeypatch.setattr(doctor, "Path", lambda _: version)
    monkeypatch.setattr(doctor, "_driver_cuda", lambda: ", CUDA up to 13.0")
    assert doctor._driver().found == "580.65.06, CUDA up to 13.0"
    version.unlink()
    monkeypatch.setattr(doctor, "_output", lambda *command: "")
    assert doctor._driver().status == "missing" and doctor._driver().cost == "nothing runs on a GPU"


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_the_command_runs_where_a_package_that_all_else_needs_cannot_be_imported(name):
    code = f"import sys; sys.modules[{name!r}] = None; sys.argv[1:] = ['doctor']\n"
    code += "from flashlane.cli.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout and "\nmissing  attention" in done.stdout
