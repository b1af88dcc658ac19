"""The doctor finds what is here, prices what is not, and never falls ill itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

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
    "cuda-core",
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
    assert report["torch"].found == torch.__version__
    assert report["Python"].found == ".".join(map(str, sys.version_info[:3]))
    assert (report["GPU"].status == "ok") == torch.cuda.is_available()
    assert str(folder) in report["cache"].found and "0 entries" in report["cache"].found
    assert not folder.exists()


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
    assert report.verdict in text


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
