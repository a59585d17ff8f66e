"""A router whose model calls tools and thinks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.tools.test_tools_over_http import CONTEXT_LEN, LIMITS, TEMPLATE, says
from tests.unit.router.scripted_workers import FEATURES, RunningRouter
from tests.unit.router.tiny_model import write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("messages"), chat_template=TEMPLATE, context_len=CONTEXT_LEN)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, template_seconds_max=5)


@pytest.fixture(scope="session")
def running(folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(folder, limits=LIMITS, features=(*FEATURES, "grammar")) as running:
        yield running


@pytest.fixture
def served(running: RunningRouter, tokenizer: Tokenizer) -> RunningRouter:
    says(running, tokenizer, "the fox")
    return running
