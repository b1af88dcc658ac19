"""The tool that runs PyTorch's own test modules: a small module of their kind through it, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch_forks

ROOT = Path(__file__).parents[2]
MODULE = """
import unittest
import torch
from torch.testing._internal.common_cuda import PLATFORM_SUPPORTS_FLASH_ATTENTION
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, parametrize


class TestIt(TestCase):
    @unittest.skipIf(not PLATFORM_SUPPORTS_FLASH_ATTENTION, "no flash attention")
    @parametrize("causal", [False, True])
    def test_gradient(self, device, causal):
        q = torch.randn(1, 2, 5, 8, device=device, requires_grad=True)
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, causal)[0]
        self.assertEqual(torch.autograd.grad(out.sum(), q)[0].shape, q.shape)

    def test_dropout(self, device):
        q = torch.randn(1, 2, 5, 8, device=device)
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)

    def test_skipped(self, device):
        self.skipTest("why it is")


instantiate_device_type_tests(TestIt, globals(), only_for=("cuda",))
"""


def run(path: Path, *options: str, fresh: bool = False) -> tuple[int, str]:
    return torch_forks.run(ROOT / "tools" / "torch_tests.py", path, *options, fresh=fresh)


def test_calls_and_skips_are_told(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    path = tmp_path / "test_module.py"
    path.write_text(MODULE)
    rc, said = run(path, "--on-cpu", "-q", fresh=True)
    assert rc == 1 and "1 failed, 2 passed, 1 skipped" in said, said
    assert "2 aten::_scaled_dot_product_flash_attention\n" in said, said
    assert "2 aten::_scaled_dot_product_flash_attention_backward\n" in said, said
    assert "why it is" in said and "dropout_p is 0.5; torch's kernels draw their own mask" in said


def test_what_cannot_be_run_says_so(tmp_path: Path) -> None:
    rc, said = run(tmp_path / "none.py")
    assert rc == 2 and "which is not a file; download it from PyTorch's folder test" in said


def test_a_sample_of_each_function_and_workers_counts(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    pytest.importorskip("xdist")
    path = tmp_path / "test_module.py"
    path.write_text(MODULE)
    rc, said = run(path, "--on-cpu", "-q", "-n", "2", "-k", "gradient")
    assert rc == 0 and "2 passed" in said, said
    assert "2 aten::_scaled_dot_product_flash_attention\n" in said, "what the workers counted is summed up"
    rc, said = run(path, "--on-cpu", "-q", "--sample", "1", "-k", "gradient or skipped")
    assert rc == 0 and "1 passed, 1 skipped, 2 deselected" in said, said


def test_a_limit_of_time_and_a_record_of_every_case(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    path, record = tmp_path / "test_module.py", tmp_path / "cases.jsonl"
    path.write_text(MODULE)
    rc, output = run(path, "--on-cpu", "-q", "--record", str(record))
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    outcomes = {line["case"].rsplit("::", 1)[1]: line["outcome"] for line in lines}
    assert outcomes["test_gradient_causal_True_cpu"] == "passed" and outcomes["test_skipped_cpu"] == "skipped"
    assert outcomes["test_dropout_cpu"] == "failed", output
    assert {line["why"] for line in lines if line["outcome"] == "skipped"} == {"Skipped: why it is"}
    rc, output = run(path, "--on-cpu", "-q", "--seconds", "0")
    assert rc == 0 and "4 skipped" in output and "the 0 s of --seconds were over" in output, output


def test_a_case_that_torch_refuses_by_itself_is_skipped_with_that_reason(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    path = tmp_path / "test_module.py"
    path.write_text("import torch\ndef test_custom_op_registration():\n    pass\ndef test_other():\n    pass\n")
    rc, said = run(path, "--on-cpu", "-q")
    assert rc == 0
    if "1 skipped" in said:
        assert "refuses torch.compile(fullgraph=True) under a dispatch mode, of any function" in said
    else:
        assert "2 passed" in said
