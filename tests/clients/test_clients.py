"""Each client does what it is for, unmodified, and the server has counted what the client was told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.local.model_store import resolve
from tests.clients.environments import client_python, run_client
from tests.integration.deployment import LocalDeployment, deployment

EXACT = {"kvPages": 600, "kvCacheDtype": "float32"}
CLIENTS = {  # seconds that a program may take
    "openai_python": 600,
    "litellm_sdk": 600,
    "langchain": 600,
    "instructor_library": 600,
    "pydantic_ai_agent": 600,
    "agents_loop": 600,
    "lm_eval_loglikelihood": 1500,
}


@pytest.fixture(scope="module")
def serving() -> Iterator[LocalDeployment]:
    with deployment(
        config={"prefill": EXACT, "decode": EXACT, "router": {"toolCallParser": "hermes"}}
    ) as running:
        yield running


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_works_unmodified(serving: LocalDeployment, name: str) -> None:
    client_python(name)
    model = Path(resolve("smollm2", lambda _line: None))
    before = serving.total("router", "segue_generated_tokens_total")
    told = run_client(name, serving.url + "/v1", model, CLIENTS[name])
    generated = serving.total("router", "segue_generated_tokens_total") - before
    assert told["answers"] > 0
    assert generated >= max(told["answers"], told["completion_tokens"])
    assert serving.held() == {}
