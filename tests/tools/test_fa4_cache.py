"""tools/fa4_cache.py where FlashAttention-4 is not: who compiles what, what is lacking, and what it says."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("fa4_cache")


def test_every_cell_is_in_one_share_and_the_shares_are_alike(tool: ModuleType, tmp_path: Path) -> None:
    forward, backward, other = ((tmp_path / name, "k") for name in ("fwd", "bwd", "bwd_pre"))
    todo = [(n, str(n), kernels) for n, kernels in enumerate([(forward,), (backward, other), (other,), (forward,)])]
    shares = tool.shares(todo, 2)
    assert sorted(number for share in shares for number in share) == [0, 1, 2, 3]
    assert shares[0][0] == 1  # of 9 seconds, the longest
    cost = {0: 6, 1: 9, 2: 2, 3: 6}
    assert sorted(sum(cost[n] for n in share) for share in shares) == [11, 12]
    assert tool.shares(todo[:1], 8) == [[0]] and tool.shares([], 2) == []


def test_a_kernel_that_is_there_is_not_lacking(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.o").touch()
    kernels = ((tmp_path, "a"), (tmp_path, "b"))
    assert tool.lacking(kernels) == ((tmp_path, "b"),)


def test_without_flash_attention_4_it_says_so(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("tvm_ffi") is not None:
        pytest.skip("FlashAttention-4's packages are here")
    for name in (*tool.TARGET, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    monkeypatch.setattr("sys.argv", ["fa4_cache", str(tmp_path / "cache")])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2 and "FlashAttention-4 is not there" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
