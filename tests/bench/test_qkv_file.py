"""Saved q, k, v: what is written is what is read, other people's files too, and bad files are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from flashlane.bench.measure.qkv_file import SINGLE, Captured, load_qkv, save_qkv
from flashlane.core.files import NotWritten

safetensors = pytest.importorskip("safetensors.torch")


def triple(dtype=torch.float16, dim_v=8):
    return [torch.randn(2, 5, *shape).to(dtype) for shape in ((4, 8), (2, 8), (2, dim_v))]


def write(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> Path:
    safetensors.save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata=metadata or None)
    return path


def simple(path: Path, q, k, v, **metadata: str) -> Path:
    return write(path, {"q": q, "k": k, "v": v}, **metadata)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_round_trip_keeps_every_bit_and_fact(tmp_path, dtype):
    path = tmp_path / "calls.safetensors"
    first = Captured("layers.10.attn", *triple(dtype=dtype, dim_v=16), causal=True, scale=0.1)
    packed = torch.randn(1, 7, 3, 3, 8).to(dtype)
    second = Captured("layers.9.attn", *packed.unbind(2), window=(2, 1))
    save_qkv(path, [first, second], {"model": "m"})
    assert path.stat().st_mode & 0o777 == 0o644, "others may read it, as they may every file of results"
    loaded = load_qkv(path)
    assert [call.name for call in loaded] == ["layers.9.attn", "layers.10.attn"], "layers come in their own order"
    for got, want in zip(loaded, (second, first), strict=True):
        for side in "qkv":
            assert torch.equal(getattr(got, side), getattr(want, side))
        assert (got.causal, got.scale, got.window) == (want.causal, want.scale, want.window)
        assert got.metadata["model"] == "m"
        assert got.problem() == want.problem()
    assert list(tmp_path.iterdir()) == [path], "nothing temporary is left"


def test_a_user_s_file_needs_only_three_tensors(tmp_path):
    q, k, v = triple()
    (call,) = load_qkv(simple(tmp_path / "x.safetensors", q, k, v))
    assert call.name == SINGLE and not call.causal and call.scale is None
    assert torch.equal(call.q, q) and torch.equal(call.k, k) and torch.equal(call.v, v)
    assert call.problem().describe() == "B2 H4/2 N5 D8 f16"


def test_metadata_of_a_user_s_file(tmp_path):
    q, k, v = triple()
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    (call,) = load_qkv(simple(tmp_path / "x.safetensors", *swapped, layout="bhsd", causal="True", scale="0.25"))
    assert torch.equal(call.q, q) and torch.equal(call.k, k) and torch.equal(call.v, v)
    assert call.causal and call.scale == 0.25 and call.problem().causal


def test_many_calls_without_metadata(tmp_path):
    names = ["model.layers.2", "model.layers.10"]
    tensors = {f"{name}.{side}": t for name in names for side, t in zip("qkv", triple(), strict=True)}
    calls = load_qkv(write(tmp_path / "x.safetensors", {**tensors, "note": torch.zeros(1)}))
    assert [call.name for call in calls] == names
    assert all(torch.equal(call.v, tensors[f"{call.name}.v"]) for call in calls)


def bad_files():
    q, k, v = triple()
    inf = k.clone()
    inf[0, 1, 1, 3] = float("inf")
    odd = torch.randn(2, 5, 3, 8).half()
    good = {"q": q, "k": k, "v": v}
    return {
        "missing v": ({"q": q, "k": k}, {}, ValueError, r"has q, k but no tensor v"),
        "missing of a layer": ({"a.q": q, "a.k": k, "a.v": v, "b.q": q + 1}, {}, ValueError, r"no tensor b\.k or b\.v"),
        "other tensors": ({"weight": q}, {}, ValueError, r"no tensors q, k, v .*weight"),
        "rank 3": ({**good, "q": q[0]}, {}, ValueError, r"q of call 'qkv' has shape \(5, 4, 8\), rank 3.*rank 4"),
        "heads": ({**good, "q": odd}, {}, ValueError, r"k has 2 heads and q has 3"),
        "head_dim": ({**good, "k": k[..., :4]}, {}, ValueError, r"k has head_dim 4 and q has 8"),
        "lengths": ({**good, "v": v[:, :4]}, {}, ValueError, r"v has length 4 and k has 5; they must be equal"),
        "mixed dtype": ({**good, "k": k.float()}, {}, TypeError, r"k has dtype torch.float32 and q has torch.float16"),
        "integers": ({n: t.to(torch.int32) for n, t in good.items()}, {}, TypeError, r"q has dtype torch.int32"),
        "not finite": ({**good, "k": inf}, {}, ValueError, r"k of call 'qkv' has 1 values that are not finite"),
        "layout": (good, {"layout": "hbsd"}, ValueError, r"layout is 'hbsd'; it may be 'bshd' or 'bhsd'"),
        "causal": (good, {"causal": "yes"}, ValueError, r"causal is 'yes'"),
        "scale": (good, {"scale": "half"}, ValueError, r"scale is 'half'; it must be a number"),
        "scale nan": (good, {"scale": "nan"}, ValueError, r"scale is nan"),
        "calls json": (good, {"calls": "{"}, ValueError, r"calls is not valid JSON"),
        "calls deep": (good, {"calls": "[" * 200000}, ValueError, r"calls is not valid JSON: its brackets are nested"),
        "calls shape": (good, {"calls": "[1]"}, ValueError, r"JSON object of objects"),
        "calls key": (good, {"calls": json.dumps({"qkv": {"mask": 1}})}, ValueError, r"\['mask'\]; it may have"),
        "window": (good, {"calls": json.dumps({"qkv": {"window": [1]}})}, ValueError, r"window is \[1\]"),
    }


@pytest.mark.parametrize("case", bad_files())
def test_bad_file_is_named_with_what_was_expected(tmp_path, case):
    tensors, metadata, kind, message = bad_files()[case]
    path = write(tmp_path / "bad.safetensors", tensors, **metadata)
    with pytest.raises(kind, match=message) as caught:
        load_qkv(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 40, -1], ids=["empty", "half a length", "half a header", "a byte short"])
def test_truncated_file(tmp_path, keep):
    path = simple(tmp_path / "x.safetensors", *triple())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"x\.safetensors is not a complete safetensors file"):
        load_qkv(path)


def test_not_a_safetensors_file(tmp_path):
    torch.save(triple(), tmp_path / "x.pt")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_qkv(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match=r"nothing-here.* does not exist"):
        load_qkv(tmp_path / "nothing-here.safetensors")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load_qkv(tmp_path)


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    path = simple(tmp_path / "x.safetensors", *triple())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r'pip install "flashlane\[hf\]"'):
        load_qkv(path)
    with pytest.raises(ImportError, match=r'pip install "flashlane\[hf\]"'):
        save_qkv(path, [Captured("a", *triple())])


def test_save_refuses_what_cannot_be_read_back(tmp_path):
    q, k, v = triple()
    with pytest.raises(ValueError, match="each name once"):
        save_qkv(tmp_path / "x.safetensors", [Captured("a", q, k, v)] * 2)
    with pytest.raises(ValueError, match="at least one"):
        save_qkv(tmp_path / "x.safetensors", [])
    with pytest.raises(ValueError, match="v has 1 heads"):
        save_qkv(tmp_path / "x.safetensors", [Captured("a", q, k, v[:, :, :1])])
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = simple(tmp_path / "x.safetensors", *triple())
    before = path.read_bytes()

    def half_written(tensors, filename, metadata):
        Path(filename).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors, "save_file", half_written)
    with pytest.raises(NotWritten, match="disk full"):
        save_qkv(path, [Captured("a", *triple())])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
