"""What is stored with a mask of transformers: it is used only while the mask is the same, and in no recorded graph."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import flashlane
from flashlane.integrations import transformers as huggingface
from flashlane.integrations import transformers_padding as padded

transformers = pytest.importorskip("transformers")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(requires_grad: bool = False) -> Tensors:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 8, dtype=torch.float64, requires_grad=requires_grad) for _ in range(3))
    return q, k, v


def visible(seed: int = 1) -> torch.Tensor:
    found = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(seed)) < 0.6
    found[..., 0] = True
    return found


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return huggingface.attention(torch.nn.Module(), q, k, v, mask)[0]


def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def test_a_boolean_mask_compiles_in_one_graph() -> None:
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        given = tensors(requires_grad=True)
        torch.testing.assert_close(compiled(*given, visible(seed)), theirs(*given, visible(seed)))
        grads = [torch.autograd.grad(f(*given, visible(seed)).square().sum(), given) for f in (compiled, theirs)]
        torch.testing.assert_close(*grads)


def test_a_mask_of_inference_serves_training_afterwards() -> None:
    mask, given = visible(), tensors(requires_grad=True)
    with torch.inference_mode():
        ours(*given, mask)
    grads = [torch.autograd.grad(f(*given, mask).square().sum(), given) for f in (ours, theirs)]
    torch.testing.assert_close(*grads)


def test_a_mask_made_in_inference_mode_is_read_after_a_change() -> None:
    given = tensors()
    with torch.inference_mode():
        mask = visible()
        before = ours(*given, mask)
        mask[..., 1:].logical_not_()
        torch.testing.assert_close(ours(*given, mask), theirs(*given, mask))
        assert not torch.allclose(ours(*given, mask), before)


def saved(t: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(t, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, saved])
@pytest.mark.parametrize("changes", [0, 1, 2])
def test_a_copy_of_a_changed_mask_is_read(copied: Callable[[torch.Tensor], torch.Tensor], changes: int) -> None:
    """A copy has the attributes of its source, and counts its own changes."""
    mask, given = visible(), tensors()
    mask = mask.clone()
    for _ in range(changes):
        mask.logical_and_(mask)
    ours(*given, mask)
    mask[..., 1:].logical_not_()
    torch.testing.assert_close(ours(*given, copied(mask)), theirs(*given, mask))


def test_a_transform_leaves_nothing_of_its_own_with_a_mask() -> None:
    mask, given = visible(), tensors()
    torch.func.vmap(torch.func.grad(lambda q: ours(q, *given[1:], mask).sum()))(torch.stack([given[0]] * 2))
    assert torch.equal(pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask))
    torch.testing.assert_close(ours(*given, mask), theirs(*given, mask))


@pytest.mark.parametrize("record", [torch.jit.trace, lambda f, example: make_fx(f)(*example)], ids=["trace", "make_fx"])
@pytest.mark.filterwarnings("ignore")  # a trace warns of each comparison of a size
def test_a_recorded_graph_reads_the_mask_that_it_is_given(record: Callable[..., Callable[..., torch.Tensor]]) -> None:
    mask, given = visible(), tensors()
    ours(*given, mask)
    graph = record(ours, (*given, mask))
    torch.testing.assert_close(graph(*given, visible(2)), theirs(*given, visible(2)))


def test_a_model_in_inference_mode_keeps_what_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks count their changes, so that all layers share one additive mask, or lengths."""
    flashlane.register_transformers()
    masks: list[torch.Tensor] = []
    make = huggingface.mask
    of_masks = lambda **options: masks.append(make(**options)) or masks[-1]  # noqa: E731
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=4)).eval()
    model.set_attn_implementation(huggingface.NAME)
    table = transformers.AttentionMaskInterface()
    monkeypatch.setitem(table._global_mapping, huggingface.NAME, of_masks)
    text, padding = torch.randint(1, 97, (2, 5)), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    with torch.inference_mode():
        padding = padding.clone()
        model(text, attention_mask=padding)
        additive = getattr(masks[0], huggingface._BIAS)[1]
        assert additive.shape == (2, 1, 1, 5) and not masks[0].is_inference() and not additive.is_inference()
        monkeypatch.setattr(padded, "DEVICES", ("cuda", "cpu"))
        model(text, attention_mask=padding)
        q = torch.randn(2, 4, 5, 16)
        assert padded.attached(masks[1], q, q) is not None
        assert padded.attached(copy.deepcopy(masks[1]), q, q) is None
        masks[1][0, 0, 0, 0] = False
        assert padded.attached(masks[1], q, q) is None
        made_here = torch.ones(2, 1, 5, 5, dtype=torch.bool)
        padded.attach(made_here, padded.key_ranges(padding, 2, 5, 5, 5, False, None, "cpu"))
        assert padded.attached(made_here, q, q) is None, "nothing says when it changes"


def packed(mask: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    """Three sequences in one row of 12 tokens, told apart by their lengths."""
    q, k, v = torch.linspace(-9, 9, 3 * 192).mul(7).sin().view(3, 1, 2, 12, 8)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
    return huggingface.attention(torch.nn.Module(), q, k, v, mask, sliding_window=4, **lengths)[0]


@pytest.mark.parametrize("kind", ["bool", "float", "inference", "compiled"])
def test_a_mask_keeps_packed_sequences_apart(kind: str) -> None:
    """transformers makes a mask of a window or of chunks without their lengths."""
    near = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril().triu(-3)
    mask = torch.zeros(near.shape).masked_fill_(~near, -torch.inf) if kind == "float" else near
    run = torch.compile(packed, fullgraph=True, backend="aot_eager") if kind == "compiled" else packed
    with torch.inference_mode(kind == "inference"):
        mask = mask.clone()
        for ends in (torch.tensor([0, 5, 12]), torch.tensor([0, 3, 3, 10], dtype=torch.int32)):
            torch.testing.assert_close(run(mask, ends), packed(None, ends))


def test_lengths_of_packed_sequences_are_read_after_a_change() -> None:
    mask, ends = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril().triu(-3), torch.tensor([0, 5, 12])
    first = packed(mask, ends)
    assert torch.equal(packed(mask, ends), first)
    ends[1] = 7
    torch.testing.assert_close(packed(mask, ends), packed(None, ends))
    torch.testing.assert_close(packed(mask, torch.tensor([0, 9, 12])), packed(None, torch.tensor([0, 9, 12])))
    mask[..., 1:, 0] = False
    assert not torch.equal(packed(mask, ends), packed(None, ends))


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 12, 12, dtype=torch.bool)], ids=["none", "mask"])
def test_lengths_that_cannot_be_are_named(mask: torch.Tensor | None) -> None:
    with pytest.raises(TypeError, match=r"^cu_seq_lens_q is a list; it must be a torch\.Tensor"):
        packed(mask, [0, 5, 12])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q is \[0, 14\]; it must start at 0"):
        packed(mask, torch.tensor([0, 14]))
