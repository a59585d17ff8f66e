"""No property is judged by the time that an example takes: machines differ, and other work goes on beside the tests.

What is imported stays to the end: the garbage collector looks at none of it, neither while it grows nor later.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.byte_tokenizer import write_byte_tokenizer

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of a token a byte, for tests of grammars."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
