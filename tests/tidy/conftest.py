"""Trees of all files are a million nodes without a cycle: no garbage collection looks at them, and they do not stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.tidy.source_files import source_files


@pytest.fixture(scope="package", autouse=True)
def trees_by_reference_counts() -> Iterator[None]:
    gc.disable()
    yield
    source_files.cache_clear()
    gc.enable()
