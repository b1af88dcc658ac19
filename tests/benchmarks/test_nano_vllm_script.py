"""The script that serves with nano-vllm: the parts that need no GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
transformers = pytest.importorskip("transformers")


def test_the_model_is_written_and_tokens_are_held_against_it(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("nano_vllm", ROOT / "benchmarks" / "scripts" / "nano_vllm.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    model = tool.make_model(tmp_path, layers=1, hidden=64, heads=4)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight) and again.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32, "positions far out would be rotated wrongly"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 0
    first, second = tool.prompts_of(2, 5, 10)
    assert len(first) <= 5 and len(second) > 10 and all(2 <= token < tool.VOCABULARY for token in first + second)
    best = model.generate(torch.tensor([second]), do_sample=False, max_new_tokens=4, eos_token_id=None)[
        0, len(second) :
    ]
    assert float(tool.regrets(again, second, best.tolist()).max()) <= 0.1
    wrong = best.tolist()
    wrong[2] = (wrong[2] + 1) % tool.VOCABULARY
    assert float(tool.regrets(again, second, wrong)[2]) > tool.WORST


def test_what_cannot_be_served_says_so(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "scripts" / "nano_vllm.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "which has no folder nanovllm" in done.stderr
