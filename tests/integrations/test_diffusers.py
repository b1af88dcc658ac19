"""``register_diffusers``: models of diffusers, built from configurations, next to the library's own attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashlane
from flashlane.integrations.diffusers import NAME, attention, register_diffusers

diffusers = pytest.importorskip("diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")


@pytest.fixture(autouse=True)
def registered() -> Iterator[str]:
    active = dispatch._AttentionBackendRegistry._active_backend
    yield register_diffusers()
    dispatch._AttentionBackendRegistry.set_active_backend(active)


class Count(TorchDispatchMode):
    """Calls of flashlane's operator, and of torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = self.torchs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ours += func is torch.ops.flashlane.forward.default
        self.torchs += "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


def wan() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Of Wan 2.1's kind: self-attention over a video, cross-attention to a text."""
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 16)}
    return model, {**given, "timestep": torch.tensor([3, 700])}


def flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Of Flux's kind: joint attention of image and text, then blocks of one stream."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    given = {"hidden_states": torch.randn(1, 16, 8), "encoder_hidden_states": torch.randn(1, 6, 32)}
    given |= {"pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5])}
    return model, {**given, "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(6, 3)}


@pytest.mark.parametrize(("make", "calls"), [(wan, 4), (flux, 2)], ids=["Wan", "Flux"])
def test_a_model_gives_what_torch_s_attention_gives(make: Any, calls: int) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        out = model(**inputs, return_dict=False)[0]
        return out, torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)

    model.set_attention_backend("native")
    want, expected_grads = run()
    model.set_attention_backend(NAME)
    with torch.no_grad(), Count() as count:
        model(**inputs)
    assert (count.ours, count.torchs) == (calls, 0)
    got, found = run()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert sum(grad is not None for grad in expected_grads) > 10
    for mine, right in zip(found, expected_grads, strict=True):
        if right is not None:
            torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)


def test_a_model_that_calls_torch_s_attention_itself_does_not_run_it_as_the_page_says() -> None:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    model.set_attention_backend(NAME)
    given = {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 32)}
    with torch.no_grad(), Count() as count:
        model(**given, pooled_projections=torch.randn(1, 64), timestep=torch.tensor([3]))
    assert count.ours == 0
    assert count.torchs == 2


def test_a_block_of_code_takes_it_by_name() -> None:
    q = torch.randn(1, 6, 2, 8)
    with dispatch.attention_backend(NAME), Count() as count:
        out = dispatch.dispatch_attention_fn(q, q, q)
    assert count.ours == 1
    torch.testing.assert_close(out, dispatch.dispatch_attention_fn(q, q, q))


MASK = torch.tensor([[True] * 4 + [False] * 3, [True] * 7])


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_mask": MASK},
        {"attn_mask": MASK[:, None, None]},
        {"attn_mask": torch.randn(1, 4, 5, 7)},
        {"scale": 0.2},
        {"enable_gqa": True},
    ],
    ids=["keys", "boolean", "float", "scale", "grouped heads"],
)
def test_arguments_mean_what_they_mean_there(asked: dict[str, Any]) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), *(torch.randn(2, 7, 2 if "enable_gqa" in asked else 4, 8) for _ in range(2))
    native = dispatch.AttentionBackendName.NATIVE
    want = dispatch.dispatch_attention_fn(q, k, v, **asked, backend=native)
    torch.testing.assert_close(dispatch.dispatch_attention_fn(q, k, v, **asked, backend=NAME), want)
    square = dispatch.dispatch_attention_fn(k, k, v, is_causal=True, backend=NAME)
    torch.testing.assert_close(square, dispatch.dispatch_attention_fn(k, k, v, is_causal=True, backend=native))


def test_the_lse_has_heads_last() -> None:
    q = torch.randn(1, 6, 2, 8)
    out, lse = attention(q, q, q, return_lse=True, window_size=(2, 1))
    want, want_lse = flashlane.flash_attn_func(q, q, q, window_size=(2, 1), return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse.transpose(1, 2))


def test_names_and_arguments_that_cannot_be() -> None:
    assert register_diffusers() == NAME == dispatch.AttentionBackendName(NAME).value
    assert dispatch.AttentionBackendName(NAME) in dispatch._AttentionBackendRegistry.list_backends()
    assert not dispatch._AttentionBackendRegistry._is_context_parallel_available(dispatch.AttentionBackendName(NAME))
    for name, why in (("native", "one of diffusers' own"), ("Lane", "an identifier of lower case")):
        with pytest.raises(ValueError, match=why):
            register_diffusers(name)
    q = torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match="is_causal is True and attn_mask is given"):
        attention(q, q, q, attn_mask=torch.ones(1, 6, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="key has 1 heads and query has 2"):
        attention(q, q[:, :, :1], q[:, :, :1])
    with pytest.raises(TypeError, match=r"key has dtype torch\.float64"):
        attention(q, q.double(), q)
    with pytest.raises(TypeError, match=r"^attn_mask is a list; it must be a torch.Tensor or None$"):
        attention(q, q, q, attn_mask=[1])
    for name in ("is_causal", "enable_gqa", "return_lse"):
        for wrong in ("no", torch.tensor([True, False])):
            with pytest.raises(TypeError, match=f"^{name} is "):
                attention(q, q, q, **{name: wrong})


@pytest.mark.parametrize("wrong", [None, torch.zeros(2, 3, 4)])
def test_what_is_no_tensor_of_four_dimensions_is_named(wrong: Any) -> None:
    q = torch.zeros(1, 3, 2, 16)
    for place, name in enumerate(("query", "key", "value")):
        operands = [q, q, q]
        operands[place] = wrong
        with pytest.raises(
            TypeError, match=rf"{name} is .*; it must be a torch.Tensor \(batch, seqlen, heads, head_dim"
        ):
            attention(*operands)
