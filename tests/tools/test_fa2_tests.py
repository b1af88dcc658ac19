"""The shim that runs FlashAttention-2's test module: its own parts, and a small module of the same kind through it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch_forks

ROOT = Path(__file__).parents[2]

MODULE = """
import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

ARCH = torch.cuda.get_device_capability("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq,sk", [(1, 3), (5, 5), (4, 9)])
@pytest.mark.parametrize("d", list(range(8, 200)))
def test_func(sq, sk, d, causal, dtype):
    q = torch.randn(2, sq, 4, d, device="cuda", dtype=dtype)
    k = torch.randn(2, sk, 4, d, device="cuda", dtype=dtype)
    assert flash_attn_func(q, k, k, causal=causal).shape == q.shape


def test_others():
    assert _get_block_size_n(torch.device("cuda"), 128, True, False) == 32
    q = torch.zeros(1, 1, 1, 64, device="cuda")
    pages = torch.zeros(2, 4, 1, 64, device="cuda")
    table = torch.zeros(1, 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((1,), 5, device="cuda", dtype=torch.int32)
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)


def test_flash3_bw_compatibility():
    assert torch.ops.flash_attn_3.fwd.default


def test_that_fails():
    assert flash_attn_func is None
"""


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fa2_tests", ROOT / "tools" / "fa2_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path: Path, *options: str, fresh: bool = False) -> tuple[int, str]:
    return torch_forks.run(ROOT / "tools" / "fa2_tests.py", path, "--on-cpu", *options, fresh=fresh)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "test_module.py"
    path.write_text(MODULE)
    return path


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "workers"])
def test_a_sample_of_a_module_runs(module: Path, options: tuple[str, ...]) -> None:
    rc, output = run(module, "--sample", "6", "-v", *options, fresh=not options)
    cases = [
        re.search(r"test_func\[\S+\]", line)[0]
        for line in output.splitlines()
        if "PASSED" in line and "test_func[" in line
    ]
    assert rc == 1 and "7 passed, 1 skipped" in output.replace("1 failed, ", "") and "1 failed" in output, output
    assert len(set(cases)) == 6


def drawn(shim: ModuleType, count: int, seed: int) -> list[tuple]:
    """The cases of a function of 2 x 3 x 40 that are drawn."""
    marks = [pytest.mark.parametrize("a", [1, 2]), pytest.mark.parametrize("b, c", [(1, 2), (3, 4), (5, 6)])]
    marks = [
        mark.mark for mark in (*marks, pytest.mark.parametrize(["d"], [(n,) for n in range(40)]), pytest.mark.slow)
    ]
    parametrized: list[tuple] = []
    definition = SimpleNamespace(own_markers=marks, name="test_it")
    metafunc = SimpleNamespace(definition=definition, parametrize=lambda *args, ids: parametrized.extend((args, ids)))
    shim.Sample(count, seed).pytest_generate_tests(metafunc)
    if not parametrized:
        assert len(marks) == 4
        return []
    (names, cases), ids = parametrized
    assert names == ["a", "b", "c", "d"] and [m.name for m in definition.own_markers] == ["slow"]
    assert ids == ["-".join(map(str, case)) for case in cases]
    return [tuple(case) for case in cases]


def test_a_sample_is_drawn_evenly_and_again(shim: ModuleType) -> None:
    every = {(a, b, b + 1, d) for a in (1, 2) for b in (1, 3, 5) for d in range(40)}
    cases = drawn(shim, 60, 0)
    assert len(set(cases)) == 60 and set(cases) < every
    assert cases == drawn(shim, 60, 0) and set(cases) != set(drawn(shim, 60, 1))
    assert 20 <= sum(case[0] == 1 for case in cases) <= 40 and len({case[3] for case in cases}) > 20
    assert set(drawn(shim, 239, 0)) < every and drawn(shim, 240, 0) == []


def test_bad_options_say_so(module: Path) -> None:
    rc, said = run(module, "--sample", "0")
    assert rc == 2 and "--sample is 0; it must be at least 1" in said
    rc, said = run(module.with_name("none.py"))
    assert rc == 2 and "which is not a file" in said
