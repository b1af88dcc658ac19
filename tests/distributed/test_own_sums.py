"""What is handed to the kernel that adds the ranks' gradients."""

from __future__ import annotations

import pytest
import torch
from hopper_fakes import Launches

from flashlane.distributed import own_sums
from flashlane.jit import launch


def test_sums_are_launched_by_thirty_two(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(own_sums.jit, "load", lambda compiled, device: launches)
    monkeypatch.setattr(own_sums.jit, "compile", lambda source, arch: source)
    monkeypatch.setattr(own_sums, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "stream_getter", lambda: lambda device: 7)
    own_sums._plan.cache_clear()
    one, two = (1600, (3200,), 1024), (4800, (6400, 8000), 1 << 20)
    own_sums.enqueue(0, torch.bfloat16, [one, two] + [one] * 31)
    own_sums._plan.cache_clear()
    assert [grid for grid, *_ in launches] == [(own_sums.MOST_CTAS // 32, 32, 1), (1, 1, 1)]
    words, of_a_sum = list(launches[0][3].sums), own_sums.RANKS + 3
    assert words[:of_a_sum] == [1600, 3200, *[0] * 7, 128, 1]
    assert words[of_a_sum : 2 * of_a_sum] == [4800, 6400, 8000, *[0] * 6, 1 << 17, 2]
    assert list(launches[1][3].sums)[:of_a_sum] == words[:of_a_sum]


@pytest.mark.parametrize(
    "other", [("cpu", torch.bfloat16, 2, 64), ("cuda", torch.float32, 2, 64), ("cuda", torch.float16, 9, 64),
              ("cuda", torch.float16, 2, 12)], ids=str,
)  # fmt: skip
def test_what_it_does_not_add(other: tuple[str, torch.dtype, int, int]) -> None:
    device, *more = other
    assert own_sums.takes(torch.device("cuda"), torch.bfloat16, own_sums.RANKS, 8)
    assert not own_sums.takes(torch.device(device), *more)  # type: ignore[arg-type]
