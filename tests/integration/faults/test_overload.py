"""More than fits: everybody gets an answer, and it is a token stream or a 429."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx2
import pytest

from tests.integration.conftest import SMALL
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.streams import crowd
from tests.waiting import until


def test_sixty_four_concurrent_streams_complete(one_each: LocalDeployment) -> None:
    prompts = [f"Stream {k} tells the story of" for k in range(64)]
    answers = crowd(
        one_each.url, prompts, 64, max_tokens=64, temperature=0.8, extra_body={"ignore_eos": True}
    )
    assert {(answer.completion_tokens, answer.finish_reason) for answer in answers} == {(64, "length")}
    until(lambda: not one_each.held(), 5, "everything given back")


@pytest.mark.timeout(600)
@pytest.mark.long
def test_two_thousand_requests_against_a_queue_of_a_hundred_all_get_an_answer() -> None:
    patient = {"maxQueuedRequests": 100, "waitingSecondsMax": 300}
    with deployment(config={**SMALL, "router": patient}) as running:
        statuses = asyncio.run(flood(running.url, 2000))
        assert set(statuses) == {200, 429}
        assert statuses[429] >= 1
        assert sum(statuses.values()) == 2000
        until(lambda: not running.held(), 5, "everything given back")


async def flood(url: str, requests: int) -> Counter[int]:
    """All at once; the statuses of the answers."""
    limits = httpx2.Limits(max_connections=requests)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=240.0) as client:

        async def one(number: int) -> int:
            body = {"model": "smollm2", "prompt": f"Request {number}", "max_tokens": 2}
            response = await client.post("/v1/completions", json=body)
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
            return response.status_code

        return Counter(await asyncio.gather(*(one(number) for number in range(requests))))
