"""flashlane's vLLM backend, and the tool that holds it against vLLM's interface: under a small interface of its kind.

tools/vllm_interface.py runs the same on vLLM's published files (docs/vllm.md says which).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch_forks

ROOT = Path(__file__).parents[2]
TITLES = ("causal", "sliding window", "softcap", "ALiBi", "sinks", "not causal", "an encoder's")
BACKEND = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch


class AttentionType(str, Enum):
    DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True


M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError


class AttentionBackend(ABC):
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]

    @staticmethod
    @abstractmethod
    def get_name():
        raise NotImplementedError

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def validate_configuration(cls, head_size, has_sink, device_capability):
        reasons = [] if cls.supports_head_size(head_size) else ["head_size not supported"]
        reasons += [] if cls.supports_compute_capability(device_capability) else ["compute capability not supported"]
        return reasons if cls.supports_sink() or not has_sink else [*reasons, "attention sinks not supported"]


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
    ):
        raise NotImplementedError

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        raise NotImplementedError
"""
REGISTRY = """
from enum import Enum

from vllm.utils.import_utils import resolve_obj_by_qualname

TAKEN = {}


class AttentionBackendEnum(Enum):
    CUSTOM = None

    def is_overridden(self):
        return self in TAKEN

    def get_path(self):
        return TAKEN[self]

    def get_class(self):
        return resolve_obj_by_qualname(TAKEN[self])


def register_backend(backend, class_path=None):
    TAKEN[backend] = class_path
"""


def package(folder: Path, backend: str = BACKEND, registry: str = REGISTRY) -> Path:
    below = folder / "vllm" / "v1" / "attention"
    (below / "backends").mkdir(parents=True)
    (below / "backend.py").write_text(backend)
    (below / "backends" / "registry.py").write_text(registry)
    return folder


def run(folder: Path, *code: str, fresh: bool = False) -> tuple[int, str]:
    if not code:
        return torch_forks.run(ROOT / "tools" / "vllm_interface.py", folder, fresh=fresh)
    lines = ["import sys, pathlib", f"sys.path.insert(0, {str(ROOT / 'tools')!r})", "import vllm_interface as tool"]
    return torch_forks.run("\n".join([*lines, f"folder = pathlib.Path({str(folder)!r})", *code]), fresh=fresh)


def test_every_kind_of_batch_agrees_with_plain_attention(tmp_path: Path) -> None:
    rc, said = run(package(tmp_path), fresh=True)
    assert rc == 0, said
    for title in TITLES:
        assert f"{title}: largest error" in said, said


@pytest.mark.gpu
def test_on_a_gpu_decoding_is_captured_in_a_graph_too(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [
        sys.executable,
        ROOT / "tools" / "vllm_interface.py",
        package(tmp_path),
        "--device=cuda",
        f"--out={found}",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    errors = json.loads(found.read_text())["errors"]
    assert set(TITLES) <= set(errors) and 0 < max(errors.values()) <= 2e-2, errors


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("output, output_scale=None", "result, output_scale=None", "FlashlaneImpl.forward takes self, layer, query"),
        ("self, common_prefix_len, ", "self, ", "FlashlaneMetadataBuilder.build takes self, common_prefix_len, common"),
        ("def get_name():", "def get_title():", "FlashlaneBackend does not define get_title"),
        (
            "    @classmethod\n    def supports_sink(cls)",
            "    @staticmethod\n    def supports_sink()",
            "is a classmethod",
        ),
        ("def supports_sink(cls):\n        return False", "def sinks(cls):\n        return False", ""),
        ("has_sink, device", "has_sink, use_dcp, device", "vLLM would take the backend with use_dcp"),
    ],
)
def test_an_interface_that_changed_is_seen(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BACKEND
    rc, said = run(package(tmp_path, BACKEND.replace(old, new)))
    assert rc == bool(message) and message in said, said


def test_wrong_numbers_are_seen(tmp_path: Path) -> None:
    broken = """
from flashlane.integrations.vllm import backend
store = backend._store
backend._store = lambda k, v, new_k, new_v, places: store(k, v, new_k, new_v, tuple(t.roll(1) for t in places))
errors = {}
wrong = list(tool.problems(folder, tool.PLACES["cpu"], errors))
assert len(errors) == 8 and max(errors.values()) > 0.1, errors
sys.exit(len(wrong))
"""
    hook = "sys.meta_path.insert(0, tool.Finder(folder))"
    rc, said = run(package(tmp_path), hook, broken)
    assert rc >= len("abcdef"), said


def test_layers_share_the_places_of_a_batch_but_where_a_graph_follows_its_slots(tmp_path: Path) -> None:
    code = """
import torch
sys.meta_path.insert(0, tool.Finder(folder))
from flashlane.integrations.vllm import backend
from vllm.v1.attention.backend import CommonAttentionMetadata
whole, calls = backend._places, []
backend._places = lambda slots, size: calls.append(size) or whole(slots, size)
layers = [backend.FlashlaneImpl(2, 16, 0.25, 1) for _ in range(3)]
builder = backend.FlashlaneMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
for lengths, found in ((3, 1), 1), ((1, 1), 3):
    calls.clear()
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    slots = torch.cat([16 * (each + 1) + torch.arange(n) for each, n in enumerate(lengths)])
    table, seen = torch.tensor([[1], [2]]).int(), starts.diff().int()
    given = CommonAttentionMetadata(starts, starts, seen, 2, len(slots), max(lengths), max(lengths), table, slots)
    batch = builder.build(0, given)
    for layer in layers:
        q, k, v = (torch.randn(len(slots), heads, 16) for heads in (2, 1, 1))
        cache = torch.full((3, 1, 16, 32), torch.nan)
        layer.forward(None, q, k, v, cache, batch, torch.empty(len(slots), 32))
        rows = cache[:, 0].flatten(0, 1)
        assert torch.equal(rows[slots], torch.cat([k, v], -1)[:, 0]) and rows.isfinite().all(1).sum() == len(slots)
        if max(lengths) == 1:
            slots += 1
            seen += 1
    assert len(calls) == found, calls
"""
    rc, said = run(package(tmp_path), code)
    assert rc == 0, said


def test_another_packages_backend_stays_and_plugin_says_so(tmp_path: Path) -> None:
    code = """
import logging
logging.basicConfig(level=logging.DEBUG)
sys.meta_path.insert(0, tool.Finder(folder))
registry = tool.importlib.import_module("vllm.v1.attention.backends.registry")
from flashlane.integrations import vllm as integration
assert integration.register_vllm() == "CUSTOM" and integration.register_vllm() == "CUSTOM"
registry.TAKEN[registry.AttentionBackendEnum.CUSTOM] = "other.Backend"
integration.plugin()
assert registry.TAKEN[registry.AttentionBackendEnum.CUSTOM] == "other.Backend"
integration.register_vllm()
"""
    rc, said = run(package(tmp_path), code)
    assert rc == 1 and "ValueError: vLLM's backend CUSTOM is other.Backend already" in said, said
    assert "flashlane is not vLLM's backend CUSTOM: vLLM's backend CUSTOM is other.Backend already" in said


def test_what_has_no_kernel_is_refused(tmp_path: Path) -> None:
    code = """
import torch
sys.meta_path.insert(0, tool.Finder(folder))
from flashlane.integrations.vllm import backend
def refused(call):
    try:
        call()
    except NotImplementedError as error:
        return str(error)
make = lambda **options: backend.FlashlaneImpl(4, 16, 0.25, 2, **options)
assert "attn_type is 'encoder_decoder'" in refused(lambda: make(attn_type="encoder_decoder"))
assert "kv_cache_dtype is 'fp8'" in refused(lambda: make(kv_cache_dtype="fp8"))
out = torch.ones(2, 64)
assert "output_scale is given" in refused(lambda: make().forward(0, 0, 0, 0, 0, 0, out, output_scale=out))
assert make().forward(0, 0, 0, 0, 0, None, out) is out and not out.any()
takes = backend.FlashlaneBackend
assert takes.supports_head_size(128) and not takes.supports_head_size(12) and not takes.supports_head_size(264)
assert takes.supports_compute_capability((9, 0)) and not takes.supports_compute_capability((7, 5))
"""
    rc, said = run(package(tmp_path), code)
    assert rc == 0, said


def test_without_vllm_it_says_what_is_missing(tmp_path: Path) -> None:
    from flashlane.integrations import vllm as integration

    try:
        import vllm.v1  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="register_vllm needs vLLM"):
            integration.register_vllm()
        integration.plugin()  # vLLM's plug-ins must not raise
    rc, said = run(tmp_path)
    assert rc == 2 and "which has no vllm/v1/attention/backend.py" in said
