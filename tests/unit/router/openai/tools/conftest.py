"""A router of a model whose template shows tools with their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.openai.tools.agents import TEMPLATE
from tests.unit.router.openai.tools.test_tools_over_http import CONTEXT_LEN, LIMITS
from tests.unit.router.scripted_workers import FEATURES, RunningRouter
from tests.unit.router.tiny_model import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("agents"), chat_template=TEMPLATE, context_len=CONTEXT_LEN)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, template_seconds_max=5)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(folder, limits=LIMITS, features=(*FEATURES, "grammar")) as running:
        yield running


@pytest.fixture
def client(served: RunningRouter) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
