"""Models of transformers whose layers do not say what a missing mask means: they give what eager gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashlane
from flashlane.integrations import transformers as huggingface
from flashlane.integrations import transformers_padding

transformers = pytest.importorskip("transformers")
TOKENS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = TOKENS | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = ENCODER | {"num_key_value_heads": 2}
BOTH = TOKENS | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
BOTH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "AlignText": ENCODER,
    "ClapText": ENCODER,
    "Splinter": ENCODER,
    "BigBirdPegasus": BOTH | {"attention_type": "original_full"},
    "NllbMoe": BOTH | {"num_experts": 4, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "PegasusX": BOTH | {"block_size": 4, "num_global_tokens": 2},
    "Doge": DECODER,
    "Gemma": DECODER | {"head_dim": 8, "use_bidirectional_attention": True},  # as PaliGemma makes it
    "Phimoe": DECODER | {"sliding_window": 4, "num_local_experts": 4},
    "Qwen2Moe": DECODER
    | {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}


def model_of(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    flashlane.register_transformers()
    return getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**config)).eval()


def given_to(model: Any, padded: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    text = torch.randint(3, 97, (2, 9))
    given = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    if padded:
        given["attention_mask"][1, 6:] = 0
    return given | ({"decoder_input_ids": text[:, :5]} if model.config.is_encoder_decoder else {})


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_without_a_mask_sees_what_eager_sees(family: str, padded: bool) -> None:
    model = model_of(family, **FAMILIES[family])
    given = given_to(model, padded)
    seen = slice(None) if model.config.is_encoder_decoder else given["attention_mask"].bool()
    model.set_attn_implementation("eager")
    want = model(**given)[0][seen]
    model.set_attn_implementation(huggingface.NAME)
    torch.testing.assert_close(model(**given)[0][seen], want, rtol=1e-4, atol=1e-5)


LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
LATENT |= {"index_topk": 3, "index_head_dim": 16, "index_n_heads": 2, "mlp_layer_types": ["dense", "dense"]}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}


@pytest.mark.parametrize("lengths", [False, True], ids=["mask", "lengths"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
def test_sparse_attention_sees_the_chosen_keys_alone(
    family: str, padded: bool, lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These models put their choice into the mask for "sdpa" and "eager"; others get it as ``indices``."""
    if lengths:
        monkeypatch.setattr(transformers_padding, "DEVICES", ("cuda", "cpu"))
    model = model_of(family, **ENCODER, num_key_value_heads=4, **LATENT)
    given = given_to(model, padded)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(**given)[0][given["attention_mask"].bool()]
        model.set_attn_implementation(huggingface.NAME)
        torch.testing.assert_close(model(**given)[0][given["attention_mask"].bool()], want, rtol=1e-4, atol=1e-5)


def test_chosen_keys_of_every_form_of_mask() -> None:
    torch.manual_seed(2)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
    chosen = torch.rand(2, 5, 9).argsort(-1)[..., :4].int()
    seen = torch.zeros(2, 5, 9, dtype=torch.bool).scatter(-1, chosen.long(), True).unsqueeze(1)
    early = torch.ones(5, 11, dtype=torch.bool).tril(5)[None, None]
    module = torch.nn.Module()
    wants = {None: seen, early: seen & early[..., :9], early.float().log(): seen & early[..., :9]}
    for mask, want in wants.items():
        got, _ = huggingface.attention(module, q, k, k, mask, is_causal=False, indices=chosen)
        exact, _ = huggingface.attention(module, q, k, k, want, is_causal=False)
        torch.testing.assert_close(got, exact)
    causal, _ = huggingface.attention(module, q, k[:, :, :5], k[:, :, :5], None, indices=chosen.clamp(max=4))
    low = torch.zeros(2, 5, 5, dtype=torch.bool).scatter(-1, chosen.clamp(max=4).long(), True).tril().unsqueeze(1)
    torch.testing.assert_close(causal, huggingface.attention(module, q, k[:, :, :5], k[:, :, :5], low)[0])
    with pytest.raises(ValueError, match=r"^indices has shape \(2, 9\); it must be \(batch, seqlen_q, n\)"):
        huggingface.attention(module, q, k, k, None, indices=torch.zeros(2, 9, dtype=torch.int32))
    packed = {"cu_seq_lens_q": torch.tensor([0, 5]), "indices": chosen[:1]}
    with pytest.raises(NotImplementedError, match=r"^indices is given with cu_seq_lens_q"):
        huggingface.attention(module, q[:1], k[:1], k[:1], None, **packed)


@pytest.mark.parametrize("name", ["block_indices", "sinks"])
def test_what_changes_the_result_and_has_no_kernel_is_refused(name: str) -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"^{name} is given; only set_attn_implementation"):
        huggingface.attention(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1, 1, 3, 1)})


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["Bert", "Splinter", "Llama"])
def test_models_compile_in_one_graph(family: str, padded: bool) -> None:
    model = model_of(family, **(DECODER if family == "Llama" else ENCODER))
    model.set_attn_implementation(huggingface.NAME)
    given = given_to(model, padded)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given)[0], model(**given)[0], rtol=1e-4, atol=1e-5)


def test_the_name_reaches_t5_where_the_page_says() -> None:
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48}
    flashlane.register_transformers()
    config = transformers.T5Config(**sizes)
    model = transformers.T5Model._from_config(config, attn_implementation=huggingface.NAME)
    for part in (model, model.encoder, model.decoder):
        assert part.config._attn_implementation == huggingface.NAME


def test_layers_of_models_that_are_listed_with_sinks_pass_them() -> None:
    folder = Path(transformers.__file__).parent / "models"
    there = [path for name in huggingface.WITH_SINKS for path in folder.glob(f"{name}/modeling_{name}.py")]
    assert {"gpt_oss"} <= {path.parent.name for path in there}
    assert not [path for path in there if "s_aux=self.sinks" not in path.read_text(encoding="utf-8")]


def test_all_models_whose_layers_pass_sinks_are_listed() -> None:
    """But Mimo's, of which only the layers with windows do."""
    models = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    found = {path.parent.name for path in models if "s_aux=self.sinks" in path.read_text(encoding="utf-8")}
    assert found - {"mimo_v2_flash"} <= {name.removesuffix("_text") for name in huggingface.WITH_SINKS}


SHARED = DECODER | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED |= {"num_kv_shared_layers": 2, "sliding_window": 4, "head_dim": 8, "global_head_dim": 8}
SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}


@pytest.mark.parametrize("lengths", [False, True], ids=["mask", "lengths"])
@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "static cache"])
@pytest.mark.parametrize("kept", [1, 3])
def test_layers_that_get_the_last_queries_alone_see_their_keys(
    kept: int, cache: bool, lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's layers that share keys do so since transformers 5.24."""
    if lengths:
        monkeypatch.setattr(transformers_padding, "DEVICES", ("cuda", "cpu"))
    torch.manual_seed(0)
    flashlane.register_transformers()
    config = transformers.Gemma4TextConfig(**SHARED)
    model = transformers.Gemma4ForCausalLM(config).eval()
    given = given_to(model) | {"logits_to_keep": kept}
    found = {}
    for name in ("eager", huggingface.NAME):
        model.set_attn_implementation(name)
        kept_rows = {"past_key_values": transformers.StaticCache(config=config, max_cache_len=16)} if cache else {}
        with torch.no_grad():
            found[name] = model(**given, **kept_rows, use_cache=cache).logits
    torch.testing.assert_close(found[huggingface.NAME], found["eager"], rtol=1e-4, atol=1e-5)


def test_queries_of_a_layer_that_shares_keys_are_the_last_where_there_is_no_mask() -> None:
    layer, other = torch.nn.Module(), torch.nn.Module()
    layer.config = other.config = transformers.Gemma4TextConfig(**SHARED)
    layer.is_kv_shared_layer = True
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
    last = torch.ones(5, 9, dtype=torch.bool).tril(4)
    got, _ = huggingface.attention(layer, q, k, k, None)
    torch.testing.assert_close(got, huggingface.attention(layer, q, k, k, last[None, None])[0])
    got, _ = huggingface.attention(other, q, k, k, None)
    torch.testing.assert_close(got, huggingface.attention(other, q, k, k, last.tril()[None, None])[0])
