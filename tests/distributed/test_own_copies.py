"""What is handed to the kernel that copies rows of a rank's own keys."""

from __future__ import annotations

import pytest
from hopper_fakes import Launches

from flashlane.distributed import own_copies
from flashlane.jit import launch


def test_copies_are_launched_by_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(own_copies.jit, "load", lambda compiled, device: launches)
    monkeypatch.setattr(own_copies.jit, "compile", lambda source, arch: source)
    monkeypatch.setattr(own_copies, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "stream_getter", lambda: lambda device: 7)
    own_copies._plan.cache_clear()
    own_copies.enqueue(0, [(1000 * i, 2000 * i, 32 * i) for i in range(1, 19)])
    own_copies._plan.cache_clear()
    assert [grid for grid, *_ in launches] == [(own_copies.CTAS_A_COPY, 16, 1), (own_copies.CTAS_A_COPY, 2, 1)]
    words = list(launches[1][3].copies)
    assert words[:6] == [17000, 34000, 34, 18000, 36000, 36]
