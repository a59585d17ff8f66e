"""A model that calls tools and thinks, and says "the fox" until it is told otherwise."""

from __future__ import annotations

import pytest

from tests.unit.router.openai.tools.agents import CITY_MODEL
from tests.unit.router.scripted_workers import RunningRouter
from tests.unit.router.tiny_model import TinyModel


@pytest.fixture
def model() -> TinyModel:
    return CITY_MODEL


@pytest.fixture
def router(router: RunningRouter) -> RunningRouter:
    router.says("the fox")
    return router
