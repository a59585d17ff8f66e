"""Each client does what it is for, unmodified, and the server has counted what the client was told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.local.model_store import resolve
from tests.clients.environments import client_command, run_client
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.waiting import until

EXACT = {"kvPages": 600, "kvCacheDtype": "float32"}
ROUTER = {"toolCallParser": "hermes", "allowedOrigins": ["http://app.test:5173"]}
CLIENTS = (
    "openai_python",
    "openai_node",
    "anthropic_python",
    "litellm_sdk",
    "langchain",
    "instructor_library",
    "pydantic_ai_agent",
    "agents_loop",
    "vercel_ai",
    "chromium_page",
    "aiperf_run",
    "guidellm_run",
    "lm_eval_loglikelihood",
)
SECONDS_MAX = 1500  # of a program


@pytest.fixture(scope="module")
def serving() -> Iterator[LocalDeployment]:
    with deployment(as_shipped=True, config={"prefill": EXACT, "decode": EXACT, "router": ROUTER}) as running:
        yield running


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_works_unmodified(serving: LocalDeployment, name: str) -> None:
    client_command(name)
    model = Path(resolve("smollm2", lambda _line: None))
    before = serving.total("router", "segue_generated_tokens_total")
    told = run_client(name, serving.url + "/v1", model, SECONDS_MAX)
    generated = serving.total("router", "segue_generated_tokens_total") - before
    assert told["answers"] > 0
    assert generated >= max(told["answers"], told["completion_tokens"])
    until(lambda: not serving.held(), 10, "everything given back")
