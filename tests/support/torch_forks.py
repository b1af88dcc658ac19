"""Processes that begin with torch imported: forks of one process that did only that, since an import takes seconds.

They are for what does not depend on the order of imports; one test of each tool runs it in a fresh interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 300
"""A program that takes longer is a failure: its process is ended."""


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch", "torch.distributed"])
    return found


def run(program: Path | str, *arguments: str | Path, fresh: bool = False) -> tuple[int, str]:
    """Exit status and output (and errors) of a script, given as a path, or of code, given as text.

    Args:
        program: the script or the code.
        arguments: what follows it on the command line.
        fresh: in an interpreter of its own, which imports torch where the program does.
    """
    if fresh:
        command = [sys.executable, *([program] if isinstance(program, Path) else ["-c", program]), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        return done.returncode, done.stdout + done.stderr
    with tempfile.TemporaryFile() as output:
        given = _Output(output.fileno()), program, list(map(str, arguments)), dict(os.environ), os.getcwd()
        process = context().Process(target=_serve, args=given)
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"{program} did not end in {SECONDS} s")
        output.seek(0)
        return process.exitcode, output.read().decode()


class _Output:
    """A file's descriptor, which is sent to the process that is started."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        from multiprocessing.reduction import DupFd

        return _opened, (DupFd(self.number),)


def _opened(sent: object) -> _Output:
    return _Output(sent.detach())  # type: ignore[attr-defined]


def _serve(
    output: _Output, program: Path | str, arguments: list[str], environment: dict[str, str], folder: str
) -> None:
    for stream in (1, 2):
        os.dup2(output.number, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # As in an interpreter of its own: without the folders that pytest has added.
    sys.path[:] = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "tests")]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        sys.argv = [str(program), *arguments]
        runpy.run_path(str(program), run_name="__main__")
    else:
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
