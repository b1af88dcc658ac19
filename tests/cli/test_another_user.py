"""The command line as a user without rights has it: what cannot be written is a line, and nothing else is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from flashlane.bench.measure.environment import child_environment

NOBODY = 65534
SOURCES = Path(__file__).parents[2] / "src"
MAY_CHANGE = hasattr(os, "geteuid") and os.geteuid() == 0


def interpreter(environment: dict[str, str]) -> str | None:
    """A Python of this version with which user nobody can load the package; ours may lie in the home of root."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in filter(None, (sys.executable, f"/usr/bin/{version}", shutil.which(version))):
        try:
            code = "import flashlane, torch, typer"
            how = {"env": environment, "cwd": "/", "user": NOBODY, "extra_groups": []}
            if subprocess.run([candidate, "-c", code], capture_output=True, **how).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


@pytest.fixture(scope="module")
def run():
    folder = Path(tempfile.mkdtemp(prefix="flashlane-home-"))  # pytest closes the parents of its own to others
    os.chown(folder, NOBODY if MAY_CHANGE else -1, -1)
    path = os.pathsep.join(map(str, (SOURCES, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))
    environment = child_environment() | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "80"}
    environment.pop("XDG_CACHE_HOME", None)
    environment.pop("FLASHLANE_CACHE_DIR", None)
    python = interpreter(environment) if MAY_CHANGE else sys.executable
    if python is None:
        pytest.skip("no Python with which another user may load the package")

    def call(*words: object, home: Path = folder) -> subprocess.CompletedProcess:
        command = [python, "-m", "flashlane", *map(str, words)]
        how = {"user": NOBODY, "extra_groups": []} if MAY_CHANGE else {}
        how |= {"env": environment | {"HOME": str(home)}, "cwd": folder}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, **how)

    yield call
    shutil.rmtree(folder)


TINY = ["--N", "32", "--D", "16", "--H", "1", "--B", "1", "--quick", "--kernels", "tiled", "--peers", "none"]
BENCH = ["bench", "--arch", "none", *TINY]


@pytest.fixture
def closed(tmp_path):
    """A folder that the user may not look into."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def test_results_are_written_where_the_user_may(run):
    done = run(*BENCH)
    assert done.returncode == 0, done.stderr
    assert "wrote results/bench-" in done.stdout


def test_a_folder_of_another_user_is_refused_before_anything_is_measured(run, closed):
    done = run(*BENCH, "--out", closed / "deep")
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1 and "Permission denied" in done.stderr, done.stderr


def test_doctor_says_what_a_home_that_is_closed_costs(run, closed):
    done = run("doctor", home=closed)
    (line,) = (text for text in done.stdout.splitlines() if text.split()[1:2] == ["cache"])
    assert done.returncode == 0 and line.startswith("degraded"), line
    assert "looking for it failed" not in done.stdout and "FLASHLANE_CACHE_DIR" in done.stdout


def test_explain_needs_no_home(run, closed):
    done = run("explain", "--N", "64", home=closed)
    assert done.returncode == 0 and not done.stderr, done.stderr
