"""One running router for each model, for all tests that need none of their own, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import msgspec
import openai
import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted_workers import LIMITS, RunningRouter, Script
from tests.unit.router.tiny_model import TinyModel, write_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


Routers = Callable[[TinyModel], RunningRouter]


@pytest.fixture(scope="session")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    with ExitStack() as running:

        @cache
        def of(model: TinyModel) -> RunningRouter:
            folder = tmp_path_factory.mktemp("model")
            write_folder(
                folder, chat_template=model.chat_template, context_len=model.context_len, marks=model.marks
            )
            limits = msgspec.structs.replace(LIMITS, context_len=model.context_len)
            parser = model.reasoning_parser
            started = RunningRouter(folder, limits=limits, features=model.features, reasoning_parser=parser)
            return running.enter_context(started)

        yield of


@pytest.fixture
def model() -> TinyModel:
    """What the `router` of a room or of a file serves, where it is another one."""
    return TinyModel()


@pytest.fixture
def router(routers: Routers, model: TinyModel) -> RunningRouter:
    running = routers(model)
    running.workers.script = Script()
    return running


@pytest.fixture
def tokenizer(router: RunningRouter) -> Tokenizer:
    return router.tokenizer


@pytest.fixture
def client(router: RunningRouter) -> openai.OpenAI:
    return router.openai
