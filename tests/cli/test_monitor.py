"""``flashlane monitor`` on machines that are not there."""

import csv
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_fakes
import pytest

from flashlane.cli import monitor
from flashlane.inspect import gpu_state


@pytest.fixture
def invoke(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words: invoke("monitor", *words)


@pytest.fixture
def waits(monkeypatch):
    """What is waited for, in seconds that only waiting takes: a loaded machine would look less often."""
    now, seen = [0.0], []

    def sleep(seconds):
        seen.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return SimpleNamespace(seen=seen, sleep=sleep)


def test_nvml_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.Nvml())
    (state,) = gpu_state.states(with_processes=True)
    assert (state.uuid, state.name, state.sm_clock_max, state.memory_clock) == ("GPU-c", "NVIDIA H100", 1980, 2619)
    assert (state.power, state.power_limit, state.utilisation, state.memory_used) == (350.0, 700.0, 50, 2**30)
    assert state.temperature is None, "a figure that the GPU does not give is none, and no error"
    assert state.slowed_by == ("thermal (software)",)
    assert state.processes == (gpu_state.Process(7, "/usr/bin/python3", 2**20),)


def test_nvidia_smi_is_read(monkeypatch, tmp_path):
    gpu_fakes.nvidia_smi(tmp_path, monkeypatch, gpu_fakes.IDLE_LINE, gpu_fakes.SLOW_LINE.replace(" 78,", " [N/A],"))
    idle, slow = gpu_state.states(with_processes=True)
    assert (idle.sm_clock, idle.power, idle.memory_total, idle.slowed_by) == (1980, 75.5, 143771 * 2**20, ())
    assert slow.temperature is None and slow.utilisation == 97 and slow.slowed_by == ("power cap",)
    assert not idle.processes and slow.processes[0].pid == 4242


def test_a_program_that_fails_is_a_reason(monkeypatch, tmp_path):
    program = gpu_fakes.nvidia_smi(tmp_path, monkeypatch, "")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    with pytest.raises(
        gpu_state.NoState, match=r"nvidia-ml-py is not installed; nvidia-smi failed: NVIDIA-SMI has failed"
    ):
        gpu_state.states()


def test_a_line_for_each_look_then_the_summary_and_the_file(invoke, monkeypatch, waits):
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.Nvml())
    outcome = invoke("--interval", "0.25", "--seconds", "0.875", "--out", "gpu.csv")
    assert outcome.exit_code == 0, outcome.output
    assert "0 NVIDIA H100 · SM MHz 1100 · mem MHz 2619 · W 350 · °C – · MiB 1024 · busy % 50" in outcome.stdout
    assert "limits: 1980 MHz, 700 W" in outcome.stdout and "slowed by thermal (software)" in outcome.stdout
    rows = list(csv.DictReader(Path("gpu.csv").read_text().splitlines()))
    clocks = [float(row["sm_clock"]) for row in rows]
    assert [row["seconds"] for row in rows] == ["0.000", "0.250", "0.500", "0.750", "0.875"]
    assert clocks == [1100, 1300, 1500, 1700, 1900]
    least, _, most = next(line for line in outcome.stdout.splitlines() if line.startswith("SM MHz")).split()[2:]
    assert (float(least), float(most)) == (min(clocks), max(clocks))


def test_a_command_is_run_and_its_status_kept(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.Nvml())
    script = "import time, pathlib; time.sleep(0.3); pathlib.Path('ran').touch(); raise SystemExit(7)"
    done = invoke("--interval", "0.1", "--", sys.executable, "-c", script)
    assert done.exit_code == 7 and "NVIDIA H100 ·" in done.stdout
    assert Path("ran").exists()
    endless = invoke("--interval", "0.1", "--seconds", "0.3", "--", sys.executable, "-c", "import time; time.sleep(60)")
    assert endless.exit_code == 128 + 15
    absent = invoke("--", "no-such-command")
    assert absent.exit_code == 2 and "COMMAND is 'no-such-command'" in absent.stderr


def test_an_interval_delays_neither_the_end_of_the_command_nor_that_of_the_seconds(invoke, monkeypatch, waits):
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.Nvml())

    class Command:
        """One that ends with status 7 after so many seconds, or at the signal to end."""

        lasts, returncode = 0.0, None

        def __init__(self, words):
            self.left = self.lasts

        def poll(self):
            return self.returncode

        def wait(self, seconds=0.0):
            waits.sleep(min(seconds, self.left))
            self.left -= min(seconds, self.left)
            if self.left and self.returncode is None:
                raise subprocess.TimeoutExpired("command", seconds)
            self.returncode = 7 if self.returncode is None else self.returncode
            return self.returncode

        def terminate(self):
            self.returncode = -15

    monkeypatch.setattr(monitor.subprocess, "Popen", Command)
    for lasts, words, waited, status in (
        (2.5, ("--interval", "60", "--", "command"), [2.5], 7),
        (90.0, ("--interval", "60", "--", "command"), [60, 30], 7),
        (0.0, ("--interval", "60", "--seconds", "0.25"), [0.25], 0),
        (1e9, ("--interval", "60", "--seconds", "70.5", "--", "command"), [60, 10.5, 0], 128 + 15),
    ):
        waits.seen.clear()
        monkeypatch.setattr(Command, "lasts", lasts)
        done = invoke(*words)
        assert done.exit_code == status and waits.seen == pytest.approx(waited), (done.output, waits.seen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--interval", "0"), "--interval is 0"),
        (("--interval", "inf"), "--interval is inf; it may be 0.1 to 1000000 seconds"),
        (("--seconds", "-1"), "--seconds is -1"),
        (("--gpu", "3", "--seconds", "1"), "--gpu is 3; there are 1: 0 to 0"),
        (("--out", "."), "--out is '.', which is a folder"),
    ],
)
def test_bad_input(invoke, monkeypatch, words, message):
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.Nvml())
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_no_gpu_is_one_clear_line(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    done = invoke()
    assert done.exit_code == 2 and done.stderr.startswith("error: the state of the GPUs cannot be read: ")
