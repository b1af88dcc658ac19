"""The scripts that time long calls and the kernels of whole models: the parts that need no GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import flashlane
from flashlane.core.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
WATTS = 700.0
CALL_MS = 0.25


class Clock:
    """Seconds that only calls spend: on a loaded machine, others pass between a look at the energy and one at them."""

    now = 0.0


class Event:
    """An event of that clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Nvml:
    """A device of constant power and clock."""

    NVML_CLOCK_SM = 0

    @staticmethod
    def nvmlDeviceGetClockInfo(handle: object, clock: int) -> int:
        return 1500

    @staticmethod
    def nvmlDeviceGetTotalEnergyConsumption(handle: object) -> float:
        return 1e3 * WATTS * Clock.now


class OnHopper:
    """Problems of tensors on a CPU, as if these were on a Hopper GPU."""

    @staticmethod
    def from_inputs(*args: Any, **named: Any) -> AttentionProblem:
        return AttentionProblem.from_inputs(*args, **named).on("sm_90a")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on a CPU, with the Hopper kernel answered by plain attention."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    found = importlib.import_module("long_calls")
    monkeypatch.setattr(Clock, "now", 0.0)
    reading = SimpleNamespace(perf_counter=lambda: Clock.now, monotonic=lambda: Clock.now)
    monkeypatch.setattr(found, "time", reading)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(found, "device_or_exit", lambda: torch.device("cpu"))
    problems = {"wan": found.Long(1, 8, 8, 60, 70), "llama-32k": found.Long(1, 8, 2, 64, 64, causal=True, copied=True)}
    monkeypatch.setattr(found, "PROBLEMS", problems)
    monkeypatch.setattr(found.Meter, "__init__", lambda self, device: vars(self).update(nvml=Nvml, handle=None))
    for name, value in {"PREHEAT_MS": 0.1, "METERED_MS": 4.0, "SAMPLE_SECONDS": 1e-4, "FAR_BEHIND": 1e9}.items():
        monkeypatch.setattr(found, name, value)
    monkeypatch.setattr(found, "AttentionProblem", OnHopper)
    return found


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, error: float = 0.0) -> tuple[int, Any]:
    def answer(config: Any, problem: Any, inputs: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        Clock.now += 1e-3 * CALL_MS
        wrong = error if config.block_n == 176 else 0.0
        out.copy_(flashlane.flash_attn_func(inputs.q, inputs.k, inputs.v, causal=problem.causal) * (1 + wrong))

    monkeypatch.setattr(script.KERNEL, "run", answer)
    monkeypatch.setattr(
        "sys.argv",
        ["long_calls.py", "--round-ms=5,1", "--rounds=2", "--peers=", "--tiles=192x80,256x176", f"--out={folder}"],
    )
    rc = script.main()
    return rc, json.loads((folder / "long_calls.json").read_text())


def test_every_tile_is_checked_and_timed_in_rounds_of_each_length(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rc, found = run(script, monkeypatch, tmp_path)
    assert rc == 0
    assert [(row["problem"], row["round_ms"]) for row in found["rows"]] == [
        ("wan", 5), ("wan", 1), ("llama-32k", 5), ("llama-32k", 1),
    ]  # fmt: skip
    long, short = (row["figures"]["256x176"] for row in found["rows"][:2])
    assert long["all_ms"] == pytest.approx([CALL_MS] * 2) and "watts" not in short
    assert long["mhz"] == 1500 and long["watts"] == pytest.approx(WATTS)
    flop = 4 * 8 * 60 * 70 * 128
    assert found["rows"][0]["flop"] == flop and found["rows"][2]["flop"] == 4 * 8 * 64 * 64 * 128 / 2
    assert long["joules_per_tflop"] == pytest.approx(long["watts"] * long["ms"] / 1e3 / (flop / 1e12))
    assert any(tag.startswith("sections of") for tag in found["rows"][2]["figures"])


def test_a_wrong_result_is_not_timed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rc, found = run(script, monkeypatch, tmp_path, error=0.02)
    assert rc == 1 and found["rows"][0]["errors"]["256x176"] == pytest.approx(0.02, rel=0.1)
    assert "256x176" not in found["rows"][0]["figures"] and "chosen" in found["rows"][0]["figures"]


def test_kernels_are_classed_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    class_of = importlib.import_module("e2e_kernels").class_of
    names = {
        "hopper_forward": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<": "attention",
        "nvjet_sm90_tst_256x144_64x4_1x2_h_bz_coopA_bias_TNT": "product",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(": "copy",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>": "other",
    }
    assert {name: class_of(name) for name in names} == names
