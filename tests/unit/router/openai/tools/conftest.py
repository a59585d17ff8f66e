"""A model whose template shows tools with their parameters."""

from __future__ import annotations

import pytest

from tests.unit.router.openai.tools.agents import AGENT_MODEL
from tests.unit.router.tiny_model import TinyModel


@pytest.fixture
def model() -> TinyModel:
    return AGENT_MODEL
