"""flashlane under torch's FlexAttention names, and the tool that runs FlexAttention's own tests."""

from __future__ import annotations

import functools
import inspect
import logging
import pickle
from pathlib import Path

import pytest
import torch
import torch_forks
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane.flex import attention
from flashlane.flex.program import Program
from flashlane.integrations import torch_flex as integration

ROOT = Path(__file__).parents[2]
MODULE = """
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA not available")
def test_gradient():
    q = torch.randn(1, 2, 32, 8, device="cuda", requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cuda")
    out = torch.compile(flex_attention)(q, q, q, block_mask=mask)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape

def test_skipped():
    pytest.skip("why it is")

def test_refused():
    q = torch.randn(1, 2, 32, 8)
    flex_attention(q, q, q, lambda s, b, h, i, j: s + torch.searchsorted(torch.arange(3.0), s))
"""


PYTORCHS = """
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.common_device_type import instantiate_device_type_tests, skipCPUIf
from torch.testing._internal.common_utils import TestCase

class TestIt(TestCase):
    @skipCPUIf(True, "Not supported on CPU")
    def test_gradient(self, device):
        q = torch.randn(1, 2, 32, 8, device=device, requires_grad=True)
        bias = torch.randn(32, device=device, requires_grad=True)
        score = lambda s, b, h, i, j: s + bias[j]
        found = [flex_attention(q, q, q, score), torch.compile(flex_attention)(q, q, q, score)]
        of_torch, ours = (torch.autograd.grad(out.square().sum(), (q, bias)) for out in found)
        self.assertEqual("_Attention" in type(found[0].grad_fn).__name__, False)
        self.assertEqual("_Attention" in type(found[1].grad_fn).__name__, True)
        self.assertEqual(of_torch, ours, atol=1e-4, rtol=1e-4)

    def test_epilogue_fused(self, device):
        raise AssertionError("of Inductor's code")

instantiate_device_type_tests(TestIt, globals(), only_for=("cuda",))
"""


def tensors() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]


def test_torchs_names_run_flashlane_while_it_is_enabled() -> None:
    before = torch_flex.flex_attention, torch_flex.create_block_mask
    q, k, v = tensors()
    with integration.enabled():
        assert integration.is_enabled()
        mask = torch_flex.create_block_mask(lambda b, h, i, j: i >= j, 1, None, 16, 16, device="cpu", BLOCK_SIZE=8)
        out = torch_flex.flex_attention(q, k, v, block_mask=mask)  # torch's own has no gradients on the CPU
        (grad,) = torch.autograd.grad(out.sum(), q)
        with integration.enabled(otherwise="torch"):
            assert torch_flex.flex_attention.flashlane_original is before[0]
        torch.testing.assert_close(torch_flex.flex_attention(q, k, v, block_mask=mask), out)
    assert grad.isfinite().all() and not integration.is_enabled()
    assert (torch_flex.flex_attention, torch_flex.create_block_mask) == before
    torch.testing.assert_close(out, flashlane.flex_attention(q, k, v, None, mask))
    integration.enable()
    integration.disable()
    assert (torch_flex.flex_attention, torch_flex.create_block_mask) == before


def searching(score, b, h, q, kv):
    return score + torch.searchsorted(torch.arange(3.0), score)


def test_what_is_not_run_raises_or_goes_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = tensors()
    score_mods = []
    caplog.set_level(logging.DEBUG, logger="flashlane")
    monkeypatch.setattr(attention, "torch_function", lambda device: lambda *a, **k: score_mods.append(a[3]))
    with integration.enabled(), pytest.raises(NotImplementedError, match="searchsorted"):
        torch_flex.flex_attention(q, k, v, searching)
    with integration.enabled(otherwise="torch"):
        torch_flex.flex_attention(q, k, v, searching)
        table = torch.arange(16)
        mask = torch_flex.create_block_mask(
            lambda b, h, i, j: torch.searchsorted(table, i) >= j, None, None, 16, 16, device="cpu"
        )
    assert score_mods == [searching] and mask.shape == (1, 1, 16, 16)
    runs_torchs = "runs torch's own function: "
    said = [r.message.split(runs_torchs) for r in caplog.records if runs_torchs in r.message]
    assert [function for function, _ in said] == ["flex_attention ", "create_block_mask "], said
    assert all("searchsorted" in why for _, why in said), said
    assert attention._kernels(q, k, v, None, "reference", Program(), (), 1.0) is None
    assert caplog.messages[-1].startswith("flex_attention runs torch operations in tiles: ")
    monkeypatch.setattr(attention, "_is_of_torch", lambda device: True)
    flashlane.flex_attention(q, k, v, searching)
    assert len(score_mods) == 2
    assert caplog.messages[-1] == f"flex_attention {runs_torchs}cpu has no kernels of flashlane for it"
    with pytest.raises(ValueError, match="otherwise is 'never'; it may be raise, torch, reference"):
        integration.enable(otherwise="never")


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.float8_e4m3fn, torch.float8_e4m3fn)])
def test_types_that_flashlane_does_not_take_go_to_torch(
    types: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (t.detach().to(types[i > 0]) for i, t in enumerate(tensors()))
    monkeypatch.setattr(attention, "torch_function", lambda device: lambda *a, **k: [t.dtype for t in a[:3]])
    with integration.enabled(otherwise="torch"):
        assert torch_flex.flex_attention(q, k, v) == [types[0], types[1], types[1]]
    for otherwise in ("raise", "reference"):
        with integration.enabled(otherwise=otherwise), pytest.raises(TypeError, match="has dtype"):
            torch_flex.flex_attention(q, k, v)


def test_torchs_names_are_pickled_while_it_is_enabled() -> None:
    before = {name: getattr(torch_flex, name) for name in integration.NAMES}
    with integration.enabled():
        for name, original in before.items():
            now = getattr(torch_flex, name)
            held = functools.partial(now, Q_LEN=4)
            assert now is not original and pickle.loads(pickle.dumps(held)).func is now
            assert inspect.signature(now) == inspect.signature(original)


def test_under_torch_compile() -> None:
    q, k, v = (t.detach() for t in tensors())
    with integration.enabled():
        ours = torch.compile(torch_flex.flex_attention, backend="eager")
        torch.testing.assert_close(ours(q, k, v, lambda s, b, h, i, j: s * 2), flashlane.flex_attention(q * 2, k, v))


def run(path: Path, *options: str, fresh: bool = False) -> tuple[int, str]:
    return torch_forks.run(ROOT / "tools" / "flex_tests.py", path, *options, fresh=fresh)


def test_the_tool_compares_with_torch_in_pytorchs_own_modules(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    path = tmp_path / "test_module.py"
    path.write_text(PYTORCHS)
    rc, said = run(path, "--on-cpu", "-q")
    assert rc == 0 and "1 passed, 1 skipped" in said and "1 calls ran the tiled reference" in said, said
    assert "it reads the code or the log that Inductor writes" in said


def test_the_tool_tells_calls_refusals_and_skips(tmp_path: Path) -> None:
    path = tmp_path / "test_module.py"
    path.write_text(MODULE)
    rc, said = run(path, "--on-cpu", "--eager", "-q", fresh=True)
    assert rc == 1 and "1 failed, 1 passed, 1 skipped" in said, said
    assert "1 calls ran the tiled reference" in said and "why it is" in said and "searchsorted" in said, said
    rc, said = run(tmp_path / "none.py")
    assert rc == 2 and "which is not a file" in said


def test_the_tool_asks_for_the_package_that_pytorchs_own_module_imports(tmp_path: Path) -> None:
    path = tmp_path / "test_module.py"
    path.write_text("instantiate_device_type_tests(TestIt, globals())\n")
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "expecttest" else find(name, *rest)
sys.path.insert(0, {str(ROOT / "tools")!r})
import flex_tests
flex_tests.main([sys.argv[-1], "--on-cpu", "-q"])
"""
    rc, said = torch_forks.run(code, path)
    assert rc == 2 and "PyTorch's tests import expecttest" in said, said
