"""What every test gets: a seed of its own, and ``gpu`` tests only where there is a GPU."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flashlane.core import registry

# Processes that test side by side share the cores: threads of each on all of them would spin while the others' run.
THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # of processes that tests start
# What hypothesis draws is the same each time, and no example fails for the time that it takes, which the machine's load
# decides. ``pytest --hypothesis-profile=default`` draws other examples each time.
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("same")
MOST_RESERVED = 1 << 30
"""Bytes of a GPU that torch's allocator may keep for the next test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # first, so that none is left alone at the end
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch and random from the test's name, so that a test gives the same numbers alone and among others."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture(autouse=True)
def memory_of_the_gpu() -> Iterator[None]:
    """What a test with large tensors took goes back: processes that test side by side share a GPU's memory."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_RESERVED:
        torch.cuda.empty_cache()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny tensors: on a busy machine, threads would wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command of flashlane, given as words, in a temporary folder and on 200 columns."""
    from typer.testing import CliRunner

    from flashlane.cli.main import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def torch_kernels() -> Iterator[None]:
    """A table of kernels that holds ``reference`` and ``tiled`` only."""
    with registry.table_of(registry.get("reference"), registry.get("tiled")):
        yield
