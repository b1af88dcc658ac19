"""Forwards that poll flags while keys come, with all ranks on one GPU: right, and the same bits at every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashlane.core.arch import arch_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scripts" / "ranks_on_one_gpu.py"
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")
def test_ranks_of_one_gpu(tmp_path: Path) -> None:
    """In a process of its own, as a kernel that waits too long ends its use of the GPU."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--seconds", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    file = tmp_path / "ranks_on_one_gpu.json"
    shown = done.stdout[-3000:] + done.stderr[-2000:]
    assert file.exists(), shown
    # A machine may refuse CUDA IPC, and with it two processes; torch may refuse two ranks on one GPU.
    found = [each for each in json.loads(file.read_text()) if each["part"] not in ("two processes", "symmetric memory")]
    wrong = [each for each in found if each.get("ok") is False or "skipped" in each]
    assert len(found) > 5 and not wrong, shown
