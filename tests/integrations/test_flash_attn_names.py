"""``flashlane.integrations.flash_attn``: which modules ``import`` finds, what they hold, and that it can be undone."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashlane
from flashlane.integrations import flash_attn as names

MODULES = [module for group in names.NAMES.values() for module in group]
FA3_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
FA3_TAIL = "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
FA3_TAIL += "sm_margin=0, return_attn_probs=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
FA4_MODS = "score_mod=None, score_mod_bwd=None, mask_mod=None"
FA4_HEAD = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
)
FA4_HEAD += f"pack_gqa=None, deterministic=False, {FA4_MODS}"
SIGNATURES = {
    ("flash_attn_interface", "flash_attn_func"): f"q, k, v, softmax_scale=None, causal=False, qv=None, {FA3_DESCALES}, "
    + FA3_TAIL,
    ("flash_attn_interface", "flash_attn_varlen_func"): f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, "
    f"softmax_scale=None, causal=False, qv=None, {FA3_DESCALES}, {FA3_TAIL}",
    ("flash_attn_interface", "flash_attn_qkvpacked_func"): f"qkv, softmax_scale=None, causal=False, {FA3_DESCALES}, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
    "return_attn_probs=False",
    ("flash_attn_interface", "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None",
    ("flash_attn_interface", "flash_attn_with_kvcache"): "q, k_cache, v_cache, k=None, v=None, qv=None, "
    "rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
    "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
    f"{FA3_DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
    "return_softmax_lse=False",
    ("flash_attn_interface", "get_scheduler_metadata"): "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, "
    "num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    ("flash_attn.cute", "flash_attn_func"): f"q, k, v, qv=None, gather_kv_indices=None, {FA4_HEAD}, aux_tensors=None, "
    "aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False",
    ("flash_attn.cute", "flash_attn_varlen_func"): "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, "
    f"page_table=None, {FA4_HEAD}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False",
    ("flash_attn.cute", "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, "
    "seqused=None, virtual_batch_idx=None, return_lse=True",
    ("flash_attn.cute.interface", "get_scheduler_metadata"): "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, "
    "num_splits, headdim_v=None, pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, "
    "seqlen_k_new=0, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
    "leftpad_k=None, seqlen_k_per_split=None, _arch=None",
}


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    assert names.installed() == ()
    if any(module in sys.modules for module in MODULES):
        pytest.skip("a FlashAttention is imported in this process")
    yield
    names.uninstall()


def test_nothing_is_installed_by_an_import() -> None:
    code = "import flashlane.integrations.flash_attn, importlib.util as u; print(u.find_spec('flash_attn_interface'))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "None"


def test_every_module_is_found_and_gone_again() -> None:
    assert names.install() == tuple(names.NAMES) == names.installed()
    for module in MODULES:
        found = importlib.import_module(module)
        assert found.__name__ == module and found.__spec__.origin == "flashlane"
    second = importlib.import_module("flash_attn")
    assert second.flash_attn_func is flashlane.flash_attn_func
    assert second.layers.rotary.apply_rotary_emb and second.flash_attn_interface._flash_attn_forward
    ours = [name for name in flashlane.__all__ if name.startswith("flash_attn_")]
    assert len(ours) == 7 and all(getattr(second, name) is getattr(flashlane, name) for name in ours)
    names.uninstall()
    assert names.installed() == () and not any(module in sys.modules for module in MODULES)
    for module in MODULES:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(module)


@pytest.mark.parametrize(("module", "function"), SIGNATURES, ids=lambda value: value)
def test_signatures_are_the_contract(module: str, function: str) -> None:
    names.install()
    found = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
    plain = [str(p.replace(annotation=inspect.Parameter.empty)).replace(" = ", "=") for p in found]
    assert ", ".join(plain) == SIGNATURES[module, function]


def test_one_library_alone() -> None:
    assert names.install("flash_attn.cute") == ("flash_attn.cute",)
    importlib.import_module("flash_attn.cute.interface")
    assert not hasattr(importlib.import_module("flash_attn"), "__version__"), "FlashAttention-2 is not provided"
    assert importlib.import_module("flash_attn.cute").__version__ == "4.0.0+flashlane"
    with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"):
        importlib.import_module("flash_attn.flash_attn_interface")
    names.install("flash_attn")
    assert importlib.import_module("flash_attn.flash_attn_interface").flash_attn_func is flashlane.flash_attn_func
    names.uninstall("flash_attn.cute")
    with pytest.raises(ModuleNotFoundError, match="cute"):
        importlib.import_module("flash_attn.cute")
    assert importlib.import_module("flash_attn").flash_attn_func is flashlane.flash_attn_func


def test_an_unknown_name_says_which_there_are() -> None:
    for call in (names.install, names.uninstall):
        with pytest.raises(
            ValueError, match="names has 'flashattn'; it may have 'flash_attn', 'flash_attn_interface', "
        ):
            call("flashattn")
        with pytest.raises(ValueError, match=r"names has \['flash_attn'\]; it may have 'flash_attn', "):
            call(["flash_attn"])


def test_replace_is_a_yes_or_no() -> None:
    """A word counted as yes, and put flashlane in the place of what was installed."""
    with pytest.raises(TypeError, match=r"^replace is 'no'; it must be True or False"):
        names.install("flash_attn", replace="no")  # type: ignore[arg-type]
    assert names.installed() == ()


def test_names_can_be_uninstalled_after_a_reload() -> None:
    """The module is run again by ``importlib.reload`` and by notebooks that reload what they import."""
    names.install()
    again = importlib.reload(names)
    assert set(again.installed()) == set(names.NAMES)
    assert importlib.import_module("flash_attn").flash_attn_func is flashlane.flash_attn_func
    again.uninstall()
    assert again.installed() == () and importlib.util.find_spec("flash_attn") is None


def libraries(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Iterator[None]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield
    names.uninstall()
    for module in [m for m in sys.modules if m.split(".")[0] == "flash_attn"]:
        del sys.modules[module]


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A FlashAttention-2 and a FlashAttention-4 that are installed."""
    files = {
        "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import flash_attn_func\nwhose = 'theirs'\n",
        "flash_attn/flash_attn_interface.py": "def flash_attn_func():\n    return 'theirs'\n",
        "flash_attn/layers/__init__.py": "",
        "flash_attn/layers/patch_embed.py": "whose = 'theirs'\n",
        "flash_attn/ops/__init__.py": "whose = 'theirs'\n",
        "flash_attn/cute/__init__.py": "whose = 'theirs'\n",
    }
    yield from libraries(tmp_path, monkeypatch, files)


@pytest.fixture(params=["raise ImportError('undefined symbol')", "raise OSError('no libcudart')"])
def broken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A FlashAttention-2 that is installed and whose import fails."""
    files = {"flash_attn/__init__.py": request.param, "flash_attn/flash_attn_interface.py": "", "flash_attn/x.py": ""}
    yield from libraries(tmp_path, monkeypatch, files)


@pytest.fixture
def fourth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A FlashAttention-4 alone, whose folder ``flash_attn`` has no code of its own."""
    code = "def flash_attn_func():\n    return 'theirs'\n"
    yield from libraries(tmp_path, monkeypatch, {"flash_attn/cute/__init__.py": code})


@pytest.mark.usefixtures("broken")
def test_an_installed_library_whose_import_fails_stays_too() -> None:
    """It is looked for without being imported, so that its own error comes where it is imported."""
    assert names.install() == ("flash_attn_interface", "flash_attn.cute")
    names.uninstall()
    with pytest.raises(ImportError, match="flash_attn is installed"):
        names.install("flash_attn")
    assert names.install("flash_attn", replace=True) == ("flash_attn",)
    assert importlib.import_module("flash_attn").flash_attn_func is flashlane.flash_attn_func
    importlib.import_module("flash_attn.x")
    names.uninstall()
    with pytest.raises((ImportError, OSError), match=r"undefined symbol|no libcudart"):
        importlib.import_module("flash_attn.x")


@pytest.mark.usefixtures("fourth")
def test_a_library_that_was_imported_under_a_name_of_ours_is_there_afterwards() -> None:
    assert names.install() == ("flash_attn", "flash_attn_interface")
    cute = importlib.import_module("flash_attn.cute")
    assert sys.modules["flash_attn"].cute is cute and cute.flash_attn_func() == "theirs"
    names.uninstall()
    assert importlib.import_module("flash_attn.cute") is cute
    assert importlib.import_module("flash_attn").cute is cute
    assert not hasattr(importlib.import_module("flash_attn"), "flash_attn_func")


@pytest.mark.usefixtures("others")
def test_an_installed_library_stays_unless_asked() -> None:
    assert names.install() == ("flash_attn_interface",)
    assert importlib.import_module("flash_attn").whose == "theirs"
    assert importlib.import_module("flash_attn.cute").whose == "theirs"
    with pytest.raises(ImportError, match=r"flash_attn is installed; install\('flash_attn', replace=True\)"):
        names.install("flash_attn")


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("imported", [False, True])
def test_an_installed_library_is_replaced_and_comes_back(imported: bool) -> None:
    if imported:
        before = importlib.import_module("flash_attn")
        ops = importlib.import_module("flash_attn.ops")
    assert names.install("flash_attn", replace=True) == ("flash_attn",)
    second = importlib.import_module("flash_attn")
    assert second.flash_attn_func is flashlane.flash_attn_func and not hasattr(second, "whose")
    assert importlib.import_module("flash_attn.flash_attn_interface").flash_attn_func is flashlane.flash_attn_func
    # What flashlane has not is still theirs.
    assert importlib.import_module("flash_attn.ops").whose == "theirs" and second.ops.whose == "theirs"
    assert importlib.import_module("flash_attn.cute").whose == "theirs"
    assert importlib.import_module("flash_attn.layers.patch_embed").whose == "theirs"
    names.uninstall()
    after = importlib.import_module("flash_attn")
    assert after.whose == "theirs" and after.flash_attn_func() == "theirs"
    assert after.ops.whose == after.layers.patch_embed.whose == "theirs"
    if imported:
        assert after is before and sys.modules["flash_attn.ops"] is ops


def test_metadata_says_a_version_that_is_ours() -> None:
    for distribution in ("flash_attn", "flash-attn", "flash_attn_3", "flash-attn-4"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(distribution)
    names.install()
    assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.4+flashlane"
    assert importlib.import_module("flash_attn").__version__ == "2.8.4+flashlane"
    assert importlib.metadata.version("flash_attn_3") == importlib.metadata.version("Flash.Attn-3") == "3.0.0+flashlane"
    mapping = importlib.metadata.packages_distributions()
    assert set(mapping["flash_attn"]) == {"flash-attn", "flash-attn-4"}
    assert mapping["flash_attn_interface"] == ["flash-attn-3"]
    assert importlib.metadata.metadata("flash-attn")["Summary"] == "flashlane under this name"
    names.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
