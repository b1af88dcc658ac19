"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool

RANKS = 4
_running: list[RankPool] = []


@pytest.fixture(scope="session")
def _pool_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("ranks")
    for each in _running:
        each.close()


@pytest.fixture
def pool(_pool_folder: Path) -> RankPool:
    """Four processes; new ones where a test ended one of them."""
    if _running and not _running[-1].alive:
        _running.pop().close()
    if not _running:
        folder = _pool_folder / str(len(list(_pool_folder.iterdir())))
        folder.mkdir()
        _running.append(RankPool(RANKS, folder))
    return _running[-1]
