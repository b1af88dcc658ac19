"""A GPU by name for the tests of the tuner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tuner_fakes import ARCH, DEVICE, TableClock

from flashlane.core import registry
from flashlane.tuning import search, stored


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of its own, and a GPU by name: ``tune`` and the tuner believe that it is there."""
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "device_of", lambda arch: DEVICE if arch == ARCH else None)
    monkeypatch.setattr(search, "environment", lambda device: {"device": DEVICE, "torch": torch.__version__})
    monkeypatch.setattr(search, "clock_for", lambda device, settings: TableClock())
    registry.changed()
    yield
    registry.changed()
