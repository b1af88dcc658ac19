"""The plain transformer: one curve whatever computes attention, positions that turn, sizes that are the course's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training import losses_of_training

from flashlane.models import ATTENTIONS, SIZES, Config, Transformer, select_attention
from flashlane.models.transformer import rotary_angles, rotate

SMALL = Config(d_model=48, d_ff=64, layers=2, heads=4, kv_heads=2, vocab=61)
COURSE_PARAMETERS = {"sm": 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 2 * 10000 * 768 + 768}


pytestmark = pytest.mark.usefixtures("one_thread")


def curve(attention: str, steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, attention=attention))
    tokens = torch.randint(61, (3, 19))
    return losses_of_training(model, tokens, steps, lr=1e-2)


def test_training_follows_one_curve_whatever_computes_attention() -> None:
    want = curve("eager")
    assert want[-1] < want[0] - 1
    for name in (*ATTENTIONS, "reference", "tiled"):
        assert curve(name) == pytest.approx(want, rel=1e-4), name


def test_an_unknown_attention_names_near_ones() -> None:
    with pytest.raises(ValueError, match=r"attention is 'tild'; it may be 'auto', .* 'tiled'"):
        select_attention("tild")


@pytest.mark.parametrize("name", [*ATTENTIONS, "tiled"])
def test_attention_is_causal_grouped_and_right(name: str) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    got = select_attention(name)(q, k, v)
    group = torch.arange(4) // 2
    scores = torch.einsum("bihd,bjhd->bhij", q, k[:, :, group]) / 4
    weights = torch.softmax(scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf), -1)
    torch.testing.assert_close(got, torch.einsum("bhij,bjhd->bihd", weights, v[:, :, group]))


def test_a_token_sees_none_after_it() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL).eval()
    tokens = torch.randint(61, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 61
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :7], other[:, :7])
    assert (one[:, 7:] - other[:, 7:]).abs().amax(-1).min() > 1e-4


def test_rotation_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    cos, sin = (t.double() for t in rotary_angles(40, 16, 10000.0, torch.device("cpu")))
    at = [(rotate(q[None], cos[i : i + 1], sin[i : i + 1]), rotate(k[None], cos[j : j + 1], sin[j : j + 1]))
          for i, j in ((5, 2), (33, 30), (5, 3))]  # fmt: skip
    products = [float((a.double() * b.double()).sum()) for a, b in at]
    assert products[0] == pytest.approx(products[1], rel=1e-4) and abs(products[0] - products[2]) > 1e-3


def test_the_sizes_are_the_courses() -> None:
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in Transformer(size).parameters()) for name, size in SIZES.items()}
    assert counts["sm"] == COURSE_PARAMETERS["sm"]
    assert [round(counts[name] / 1e6) for name in SIZES] == sorted(round(n / 1e6) for n in counts.values())
    assert SIZES["2.7B"].head_dim == 80 and {SIZES[name].head_dim for name in ("sm", "md", "lg", "xl")} == {64}


def test_tied_weights_are_one_tensor() -> None:
    model = Transformer(replace(SMALL, tied=True))
    assert model.unembed.weight is model.embed.weight
    free = sum(p.numel() for p in Transformer(SMALL).parameters())
    assert free - sum(p.numel() for p in model.parameters()) == 61 * 48


def test_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, tokens = Transformer(SMALL), torch.randint(61, (2, 11))
    want = model.loss(tokens)
    got = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(tokens)
    torch.testing.assert_close(got, want)
    parameters = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "d_model is 48 with 5 heads"),
        ({"kv_heads": 3}, "kv_heads is 3; it must divide heads, 4"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)
