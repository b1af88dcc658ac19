"""Processes that make their first calls, on a machine without a driver: what they import, compile, load and launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
of_torch = set(sys.modules)
nvrtc_of_torch = "libnvrtc" in open("/proc/self/maps").read()  # a torch for CUDA loads it, on some machines
from flashlane import flash_attn_func
imported = set(sys.modules) - of_torch
import driverless
driver = driverless.install()
q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
before = set(sys.modules)
out = flash_attn_func(q, k, v, causal=True)
after_forward = driver.launched
from flashlane.jit import compiler
out.sum().backward()
loaded = not nvrtc_of_torch and "libnvrtc" in open("/proc/self/maps").read()
print(json.dumps({
    "imported": sorted(imported), "called": sorted(set(sys.modules) - before),
    "nvrtc": loaded or "cuda.bindings.nvrtc" in sys.modules,
    "launched": [after_forward, driver.launched], "cached": [found.cached for found in compiler._memo.values()],
    "entries": sorted(source.entry for source, *_ in compiler._memo),
}))
"""
KERNELS = ["hopper_backward", "hopper_backward_postprocess", "hopper_backward_preprocess", "hopper_forward"]


def process(cache: Path, program: str = PROGRAM, *arguments: str, paths: tuple[Path, ...] = ()) -> dict[str, Any]:
    """What a program prints as JSON, run with a cache's folder and further folders of modules."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests" / "support", *paths)))
    environment = {**os.environ, "PYTHONPATH": path, "FLASHLANE_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
