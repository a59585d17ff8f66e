"""A plugin of pytest for `make check`: torch cannot be imported, as in a router's process.

Where it can, transformers imports it beside each tokenizer, in each of the processes: that takes longer than a tenth of
all tests. One that is marked `torch` may import it.
"""

from __future__ import annotations

import os
import sys

import pytest


def pytest_configure() -> None:
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("torch") and sys.modules.get("torch") is None:
        sys.modules.pop("torch", None)
