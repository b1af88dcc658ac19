"""tools/ahead.py: what is compiled before there is a GPU is what runs there."""

from __future__ import annotations

import importlib
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from flashlane import jit
from flashlane.core import registry
from flashlane.jit import KernelSource, cache
from flashlane.kernels.hopper.backward import kernel as backward

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("ahead")


def test_every_part_has_kernels_and_the_first_that_needs_one_counts(ahead: ModuleType) -> None:
    found = ahead.collected(("hopper", "tests", "mma", "baseline", "decode", "sanitize"))
    assert set(found.values()) == {"hopper", "tests", "mma", "baseline", "decode", "sanitize"}
    entries = {source.entry for source in found}
    assert {"hopper_forward", "hopper_backward", "hopper_backward_two_cta", "hopper_backward_dkdv"} <= entries
    assert {"hopper_backward_preprocess", "hopper_backward_postprocess", "mma_attention"} <= entries
    assert set(ahead.collected(("baseline", "mma"))) <= set(found)


def test_kernels_of_ranks_are_found_by_their_calls(ahead: ModuleType) -> None:
    """Of tests whose ranks are processes of their own, one of them on two GPUs."""
    found = ahead.collected(("ranks",))
    traits = [dict(source.constants) for source in found if source.entry == "hopper_forward"]
    for trait in ("RANGES", "ARRIVALS", "SPLIT"):
        assert {each[trait] for each in traits} == {False, True}, trait
    assert {"hopper_backward", "hopper_backward_postprocess", "decode_attention"} <= {each.entry for each in found}


def test_what_a_benchmark_runs_is_among_them(ahead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors or without, a problem has the same configuration."""
    sources = ahead.collected(("hopper",))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    shapes = importlib.import_module("hopper_shapes")
    kernel = registry.get(ahead.HOPPER)
    for lengths in ((), (4, 9)):
        shape = shapes.Shape(1, 4, 1, 9, 9, 128, 128, True, lengths=lengths)
        built = shapes.make(shape, "cpu")[0].on(ahead.ARCH)
        like = shapes.problem_of(shape)
        assert kernel.config(built) == kernel.config(like) and backward.config_of(built) == backward.config_of(like)
    grid = shapes.problem_of(shapes.square(64, 64, False, 16384))
    assert kernel.config(grid).source() in sources and set(backward.config_of(grid).sources()) <= set(sources)


def test_the_archive_has_the_cache_entries_and_no_others(
    ahead: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "here"))
    code = 'extern "C" __global__ void {}() {{}}'
    good, other, bad = (KernelSource(f"{name}.cu", code.format(name), name, ()) for name in ("good", "other", "bad"))
    bad = KernelSource("bad.cu", "this is no C++", "bad", ())
    jit.compile(other, ahead.ARCH)
    monkeypatch.setitem(ahead.PARTS, "decode", lambda: iter((good, bad)))
    out = tmp_path / "packed" / "cubins.tar.xz"
    assert ahead.main(["--parts", "decode", "--out", str(out)]) == 1
    text = capsys.readouterr().out
    assert "decode: 2 kernels" in text and "bad for sm_90a: " in text and "cubins.tar.xz: 1 kernels" in text
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert [path.name for path in out.parent.iterdir()] == ["cubins.tar.xz"]
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "there"))
    assert cache.default().state().entries == 1
    jit.compiler._memo.clear()
    assert jit.compile(good, ahead.ARCH).cached and not jit.compile(other, ahead.ARCH).cached


def test_unknown_parts_are_refused(ahead: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for parts in ("", "hopper,all"):
        with pytest.raises(SystemExit) as ended:
            ahead.main(["--parts", parts])
        assert ended.value.code == 2 and "it may hold hopper, tests, ranks, mma" in capsys.readouterr().err
