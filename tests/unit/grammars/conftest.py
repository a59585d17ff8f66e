"""The tokenizer of the tests of grammars: a token a byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
