"""Shell completion as the shells have it: the script of each, and what fish and zsh offer with it."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashlane.bench.measure.environment import child_environment
from flashlane.cli import complete

AS_INSTALLED = 'import sys; sys.argv[0] = "flashlane"; from flashlane.cli.entry import main; main()'


def test_words_that_begin_with_what_was_typed_are_offered():
    """Without a shell: of one word, and of the last word of a list, in which each stands once."""
    assert complete.one_of(("f16", "bf16", "f32"))("f") == ["f16", "f32"]
    assert complete.one_of(("f16", "bf16"))("x") == []
    assert complete.one_of("architectures")("sm_9") == [
        name for name in complete.names()["architectures"] if "_9" in name
    ]
    assert complete.list_of(("f16", "bf16", "f32"))("f16,f") == ["f16,f32"]
    assert complete.list_of(("f16", "bf16", "f32"))("") == ["f16", "bf16", "f32"]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """With a program ``flashlane`` on the PATH, as an install puts it there."""
    program = tmp_path / "bin" / "flashlane"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{AS_INSTALLED}' \"$@\"\n")
    program.chmod(0o755)
    found = child_environment()
    return found | {"PATH": f"{program.parent}{os.pathsep}{found['PATH']}", "HOME": str(tmp_path)}


def in_shell(shell: str, code: str, environment: dict[str, str], **how: object) -> subprocess.CompletedProcess:
    words = {"zsh": ["zsh", "-f", "-c"], "fish": ["fish", "--no-config", "-c"], "bash": ["bash", "--norc", "-c"]}[shell]
    # The command after it keeps the shell there, so that its name can be asked.
    return subprocess.run(
        [*words, f"{code}\ntrue"], env=environment, capture_output=True, text=True, timeout=300, **how
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell, environment):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = in_shell(shell, "flashlane --show-completion", environment).stdout
    assert f"_FLASHLANE_COMPLETE=complete_{shell}" in script
    assert in_shell(shell, script, environment).returncode == 0, "the shell reads it"


def test_python_m_installs_the_completion_of_flashlane(environment, tmp_path):
    """Not one of ``python``, which would have no other words from then on."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    command = f"{sys.executable} -m flashlane --install-completion bash"
    done = in_shell("bash", f"test $HOME = {tmp_path} && {command}", environment)
    assert (tmp_path / ".bash_completions" / "flashlane.sh").is_file(), done.stdout + done.stderr
    assert not list((tmp_path / ".bash_completions").glob("*python*"))
    asked = "source ~/.bash_completions/flashlane.sh; complete -p flashlane; complete -p python || echo none"
    shown = in_shell("bash", asked, environment).stdout
    assert shown.splitlines()[-1] == "none" and shown.splitlines()[0].endswith(" flashlane"), shown


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here (Debian: apt-get install fish)")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("flashlane be", "bench"),
        ("flashlane bench suite ", "attention"),
        ("flashlane bench --pee", "--peers"),
        ("flashlane bench --peers sdpa-e", "sdpa-efficient"),
        ('flashlane bench --kernels "mma(split-kv+sw', "mma(split-kv+swizzle-qkv+stage1)"),
    ],
)
def test_fish_offers(line, offered, environment, tmp_path):
    script = tmp_path / "flashlane.fish"
    script.write_text(in_shell("fish", "flashlane --show-completion", environment).stdout)
    done = in_shell("fish", f"source {script}; complete -C '{line}'", environment, cwd=tmp_path)
    assert offered in [entry.split("\t")[0] for entry in done.stdout.splitlines()], done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here (Debian: apt-get install zsh)")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("flashlane bench su\t", "suite"),
        ("flashlane bench suite \t\t", "attention"),
        ("flashlane bench --peers fla\t\t", "flash-attn-2"),
        ("flashlane mask causal-\t\t", "causal-documents"),
    ],
)
def test_zsh_offers(typed, offered, environment, tmp_path):
    """In a terminal, as zsh completes only there."""
    script = in_shell("zsh", "flashlane --show-completion", environment).stdout
    (tmp_path / ".zshrc").write_text(f"autoload -Uz compinit; compinit -u\n{script}\nPS1='ready> '\n")
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("zsh", ["zsh", "-i"], environment | {"ZDOTDIR": str(tmp_path), "TERM": "dumb", "COLUMNS": "80"})
    try:
        seen = shown_until(terminal, "ready> ")
        os.write(terminal, typed.encode())
        seen = shown_until(terminal, offered)
        assert offered in seen, seen
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def shown_until(terminal: int, words: str) -> str:
    """What a terminal shows until the words are there, or five minutes are over."""
    shown, end = "", time.monotonic() + 300.0
    while words not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def test_a_home_that_cannot_be_written_to_gives_one_line(environment):
    broken = environment | {"HOME": "/dev/null/home"}
    done = in_shell("bash", "flashlane --install-completion; echo status $?", broken)
    assert "status 2" in done.stdout and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1 and "cannot be written" in done.stderr, done.stderr
    assert not Path("/dev/null/home").exists()
