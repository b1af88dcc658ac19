"""How tests import the scripts of ``benchmarks/``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script as a module, imported as when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module
