"""A tiny model folder for all tests of the router, and a running router for those that need no special one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.router.scripted_workers import RunningRouter
from tests.unit.router.tiny_model import write_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def router(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder) as running:
        yield running
