"""Padded batches of transformers run by lengths: the numbers of the mask, no mask read, one wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashlane
from flashlane.core.problem import Inputs
from flashlane.integrations import transformers as huggingface
from flashlane.integrations import transformers_padding as padded
from flashlane.ops import call as ops

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
WAITS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")


@pytest.fixture(autouse=True)
def lengths_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    flashlane.register_transformers()
    monkeypatch.setattr(padded, "DEVICES", ("cuda", "cpu"))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Inputs]:
    """The tensors of each attention."""
    seen: list[Inputs] = []
    attend = ops.attend
    monkeypatch.setattr(ops, "attend", lambda inputs, **asked: seen.append(inputs) or attend(inputs, **asked))
    return seen


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of tensors' methods that wait for a GPU."""
    found: list[str] = []
    for name in WAITS:
        method = getattr(torch.Tensor, name)
        watched = lambda self, *args, name=name, method=method, **k: found.append(name) or method(self, *args, **k)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, watched)
    yield found


def model_of(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1, "num_key_value_heads": 2}
    if family == "Bert":
        return transformers.BertModel(transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0)).eval()
    config = getattr(transformers, f"{family}Config")(**SIZES, **tokens, max_position_embeddings=512, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if family == "GptOss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def text_of(lengths: tuple[int, ...], side: str, longest: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    text = torch.randint(1, 97, (len(lengths), longest))
    mask = torch.zeros_like(text)
    for row, length in enumerate(lengths):
        mask[row, slice(longest - length, None) if side == "left" else slice(0, length)] = 1
    return text * mask, mask


def theirs(model: Any, run: Any) -> Any:
    model.set_attn_implementation("eager" if "GptOss" in type(model).__name__ else "sdpa")
    want = run()
    model.set_attn_implementation(huggingface.NAME)
    return want


GPT_OSS = {"sliding_window": 5, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {"Bert": {}, "Llama": {}, "Mistral": {"sliding_window": 4}, "GptOss": GPT_OSS}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_one_side_is_lengths(family: str, side: str, captured: list[Inputs]) -> None:
    model = model_of(family, **FAMILIES[family])
    text, mask = text_of((11, 3, 1, 8), side)

    @torch.no_grad()
    def run() -> torch.Tensor:
        return model(text, attention_mask=mask)[0]

    want = theirs(model, run)
    got = run()
    seen = mask.bool()
    torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=1e-5)
    if family != "GptOss" and (side == "right" or family == "Bert"):  # rows that see no key differ among eager and sdpa
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(captured) == 2
    for inputs in captured:
        assert inputs.bias is None and inputs.seqused_k is not None
        first = inputs.leftpad_k if inputs.leftpad_k is not None else torch.zeros_like(inputs.seqused_k)
        assert torch.equal(inputs.seqused_k - first, mask.sum(-1).int())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss"])
def test_a_padded_batch_generates_without_a_mask(family: str, cache: str, captured: list[Inputs]) -> None:
    model = model_of(family, **FAMILIES[family])
    text, mask = text_of((9, 5), "left", 9)
    asked = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    for each in (mask, torch.ones_like(mask)):
        run = lambda each=each: model.generate(text, attention_mask=each, **asked)  # noqa: E731
        want = theirs(model, run)
        del captured[:]
        got = run()
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-3, atol=1e-4)
        assert len(captured) == 14 and any(inputs.seqused_k is not None for inputs in captured) == (
            each is mask or cache == "static"
        )
        assert all(inputs.bias is None for inputs in captured)


@pytest.mark.parametrize("window", [None, 4])
def test_a_static_caches_lengths_stay_when_generate_makes_its_mask_contiguous(window: int | None) -> None:
    """generate of transformers 5.24 does, which copies a mask that is expanded over the batch."""
    functions = transformers.masking_utils
    function = functions.sliding_window_causal_mask_function(window) if window else functions.causal_mask_function
    asked = {"batch_size": 2, "q_length": 1, "mask_function": function, "allow_is_causal_skip": False, "device": "cpu"}
    if window is None:
        asked |= {"kv_length": 11, "q_offset": torch.tensor(9)}
    else:  # a full cache of a window, which generate counts by int
        asked |= {"kv_length": 4, "q_offset": 9, "kv_offset": 6, "local_size": window}
    found = huggingface.mask(**asked)
    q, k = torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, asked["kv_length"], 8)
    ranges = padded.attached(found.contiguous(), q, k)
    assert ranges is not None and ranges.stop.tolist() == ([10, 10] if window is None else [4, 4])


def test_layers_copy_nothing_and_a_model_waits_once(monkeypatch: pytest.MonkeyPatch, waits: list[str]) -> None:
    captured: list[Inputs] = []
    # Without the call itself, which looks at lengths that lie on a CPU.
    monkeypatch.setattr(ops, "attend", lambda inputs, **asked: captured.append(inputs) or (inputs.q, None))
    model = model_of("Bert")
    model.set_attn_implementation(huggingface.NAME)
    text, mask = text_of((11, 3, 8), "right")
    with torch.inference_mode():
        model(text, attention_mask=mask)
        assert waits == ["tolist"]
        model(text, attention_mask=torch.ones_like(mask))
        assert waits == ["tolist"] * 2
        assert captured[1].seqused_k is captured[0].seqused_k, "lengths are worked out once for all layers"
        assert captured[2].seqused_k is captured[2].bias is None, "an unpadded batch needs no lengths"
        model_mask = huggingface.mask(
            batch_size=3, q_length=11, kv_length=11, attention_mask=mask, device="cpu",
            allow_is_bidirectional_skip=True, mask_function=transformers.masking_utils.bidirectional_mask_function,
        )  # fmt: skip
        assert model_mask.shape == (3, 1, 11, 11) and torch.equal(model_mask[:, 0, 5], mask.bool()), (
            "others may read the mask"
        )
        q = torch.randn(3, 11, 4, 16).transpose(1, 2)
        out, _ = huggingface.attention(model, q, q, q, model_mask)
        assert out.data_ptr() == captured[-1].q.data_ptr() == q.data_ptr() and captured[-1].bias is None


def made(padding: list[list[int]], queries: int = 4, keys: int = 4, end: int = 4, causal: bool = True) -> Any:
    tensor = torch.tensor(padding)
    return padded.key_ranges(tensor, len(padding), queries, keys, end, causal, None, "cpu")


def test_what_lengths_cannot_say_stays_a_mask(captured: list[Inputs]) -> None:
    assert made([[1, 0, 1, 1]]) is None and made([[1, 0, 1, 1]], causal=False) is None
    assert made([[0, 1, 1, 0]]) is None, "causal, padded on both sides"
    both = made([[0, 1, 1, 0], [0, 0, 0, 0]], causal=False)
    assert both.first.tolist() == [1, 0] and both.stop.tolist() == [3, 0]
    assert made([[0, 1, 1, 1], [1, 1, 1, 0]]) is None, "some on the left, some on the right"
    assert made([[1, 1, 1, 0]], queries=2) is None, "queries that are not the first, padded on the right"
    assert made([[1, 1, 1, 1]]).whole and not made([[1, 1, 1, 1]], keys=4, queries=2).prefill
    static = padded.key_ranges(torch.tensor([[0, 1, 1, 0]]), 1, 1, 4, torch.tensor(3), True, 2, "cpu")
    assert (static.first.tolist(), static.stop.tolist(), static.alignment) == ([1], [3], "bottom-right")
    model = model_of("Llama")
    text, mask = text_of((11, 3), "left")
    mask[0, 4] = 0
    with torch.no_grad():
        want = theirs(model, lambda: model(text, attention_mask=mask)[0])
        torch.testing.assert_close(model(text, attention_mask=mask)[0][mask.bool()], want[mask.bool()])
    assert all(inputs.bias is not None and inputs.seqused_k is None for inputs in captured)


def test_a_mask_that_was_changed_or_is_of_other_queries_is_read() -> None:
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    ranges = made([[1, 1, 1, 0], [1, 1, 0, 0]], causal=False)
    q = torch.zeros(2, 4, 4, 8)
    padded.attach(mask, ranges)
    assert padded.attached(mask, q, q) is ranges
    assert padded.attached(mask, q[:, :, :3], q) is None and padded.attached(mask, q, q[:, :, :3]) is None
    assert padded.attached(mask[:1], q[:1], q[:1]) is None
    mask[0, 0, 0, 0] = False
    assert padded.attached(mask, q, q) is None


def test_training_keeps_the_mask(captured: list[Inputs]) -> None:
    """Keys of a cache, which lengths make them, have no gradients."""
    model = model_of("Llama")
    text, mask = text_of((11, 3), "left")

    def step() -> list[torch.Tensor]:
        loss = (model(text, attention_mask=mask)[0] * mask.unsqueeze(-1)).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    want = theirs(model, step)
    for mine, other in zip(step(), want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
    assert all(inputs.bias is not None for inputs in captured)


@pytest.mark.parametrize("side", ["left", "right"])
def test_dropout_draws_the_same_weights_with_and_without_gradients(side: str) -> None:
    """A reentrant checkpoint runs a layer without them, and again with them."""
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.3)
    model = transformers.BertModel._from_config(config, attn_implementation=huggingface.NAME).train()
    text, mask = text_of((11, 3, 8), side)

    def run(gradients: bool) -> torch.Tensor:
        torch.manual_seed(3)
        with torch.set_grad_enabled(gradients):
            return model(text, attention_mask=mask)[0][mask.bool()].detach()

    torch.testing.assert_close(run(False), run(True))


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_padding_on_a_gpu(family: str, side: str, captured: list[Inputs]) -> None:
    """The states of tokens against those of f32 with torch's attention: no further off than torch's in f16."""
    model = model_of(family).cuda()
    text, mask = (t.cuda() for t in text_of((300, 17, 1, 128, 129), side, 300))
    seen = mask.bool()

    @torch.no_grad()
    def run() -> torch.Tensor:
        return model(text, attention_mask=mask)[0][seen].float()

    model.set_attn_implementation("sdpa")
    exact = run()
    model.half()
    rough = theirs(model, run)
    got = run()
    assert len(captured) == 2 and all(inputs.bias is None and inputs.seqused_k is not None for inputs in captured)
    assert (got - exact).norm() <= 2 * (rough - exact).norm()
