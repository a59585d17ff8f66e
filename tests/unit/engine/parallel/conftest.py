"""Ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.engine.parallel.rank_processes import RankProcesses


@pytest.fixture(scope="package")
def rank_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Ranks for all tests of this folder."""
    ranks = RankProcesses(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
