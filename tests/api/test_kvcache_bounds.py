"""What a step of a key/value cache refuses at its bounds, and what it still takes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvcache_steps import Step, update_of

from flashlane import flash_attn_with_kvcache
from flashlane.api import kvcache
from flashlane.api.kvcache import update_in_torch

F32 = Step(rotary=16).arguments(torch.float32, "cpu")
HALF = Step(rotary=16).arguments(torch.float16, "cpu")
ROTARY = {"rotary_cos": F32["rotary_cos"], "rotary_sin": F32["rotary_sin"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_seqlens": torch.tensor([-1, 3], dtype=torch.int32)}, r"cache_seqlens is \[-1, 3\]; .* may be 0 to 37"),
        ({name: t[:, :0] for name, t in ROTARY.items()}, r"rotary_cos has shape .*rotary_dim 2 to 32, the head_dim"),
        ({"rotary_cos": ROTARY["rotary_cos"]}, "rotary_sin is torch.float16 .* and rotary_cos torch.float32 "),
    ],
    ids=["negative length", "no columns", "two dtypes"],
)
def test_what_is_out_of_bounds_is_named_and_leaves_the_cache(change: dict[str, Any], message: str) -> None:
    given = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in HALF.items()}
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**given | change)
    assert torch.equal(given["k_cache"], HALF["k_cache"]) and torch.equal(given["v_cache"], HALF["v_cache"])


def test_an_axis_of_one_may_have_a_stride_of_zero() -> None:
    """So torch's ``expand`` of such an axis leaves it, and no two of its rows share memory."""
    given = Step(batch=1, heads=(2, 1)).arguments(torch.float32, "cpu")
    want = flash_attn_with_kvcache(**{n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()})
    for name in ("k_cache", "v_cache"):
        t = given[name]
        given[name] = t.as_strided(t.shape, (0, *t.stride()[1:]))
    assert torch.equal(flash_attn_with_kvcache(**given), want)


def test_the_kernel_is_given_tables_whose_columns_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads each row of them from its first column on."""
    strides: list[tuple[int, int]] = []
    run = kvcache.run_update

    def recorded(update: Any, *made: torch.Tensor) -> None:
        strides.append((update.cos.stride(-1), update.sin.stride(-1)))
        run(update, *made)

    monkeypatch.setattr(kvcache, "run_update", recorded)
    given = Step(rotary=16).arguments(torch.float32, "cpu")
    flash_attn_with_kvcache(**given | {name: t.T.contiguous().T for name, t in ROTARY.items()})
    assert strides == [(1, 1)]


def test_rows_before_the_first_one_are_not_stored() -> None:
    """A GPU's lengths are not checked: those below 0 must not reach the cache's last rows."""
    update = update_of(Step(seqlen_new=5), torch.float32, "cpu")
    update.cache_seqlens.fill_(-3)
    before = update.v_cache.clone()
    update_in_torch(update, *update.allocate())
    assert torch.equal(update.v_cache[:, :2], update.v[:, 3:]) and torch.equal(update.v_cache[:, 2:], before[:, 2:])
