"""Decode workers that compute prompts: a deployment without prefill workers, and one that loses its only one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from shared.local.smoke_test import smoke_test
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.observing import linked_workers
from tests.integration.deployments.streams import StreamedAnswer, crowd
from tests.integration.faults.conftest import PROMPTS
from tests.waiting import until

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
LOCAL = "segue_local_prompts_total"
SMALL: dict[str, dict[str, Any]] = {"prefill": {"kvPages": 400}, "decode": {"kvPages": 800}}


@pytest.fixture(scope="module")
def reference(two_each: LocalDeployment) -> list[StreamedAnswer]:
    """What prefill and decode workers answer."""
    before = two_each.total("decode", LOCAL)
    answers = crowd(two_each.url, PROMPTS, len(PROMPTS), **GREEDY)
    assert two_each.total("decode", LOCAL) == before
    return answers


@pytest.fixture(scope="module")
def whole() -> Iterator[LocalDeployment]:
    """One worker that does both."""
    with deployment("--prefill", "0", config=SMALL) as running:
        yield running


def test_one_worker_answers_as_two_do(whole: LocalDeployment, reference: list[StreamedAnswer]) -> None:
    assert [process.role for process in whole.processes()] == ["decode", "router"]
    assert crowd(whole.url, PROMPTS, len(PROMPTS), **GREEDY) == reference
    assert whole.total("decode", LOCAL) == len(PROMPTS)
    assert whole.total("decode", "segue_steps_total{mode=mixed}") > 0
    assert whole.total("router", "segue_router_local_prompts_total{why=no_prefill}") == len(PROMPTS)
    until(lambda: not whole.held(), 10, "that nothing is held")


def test_its_second_turn_finds_the_first_in_its_cache(whole: LocalDeployment) -> None:
    prompt = list(range(3000, 3400))
    first = whole.client.completions.create(model="smollm2", prompt=prompt, max_tokens=40, temperature=0)
    assert first.usage is not None
    again = whole.client.completions.create(
        model="smollm2", prompt=[*prompt, *range(3400, 3410)], max_tokens=4, temperature=0
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 384


def test_it_says_that_it_serves(whole: LocalDeployment) -> None:
    health = httpx2.get(f"{whole.url}/health", verify=False).json()
    assert (health["ready"], health["facts"]["serving"]) == (True, "aggregated")
    assert "decode-0/" in smoke_test(whole.url, whole.admin_url, aggregated=True)[1]


def test_a_deployment_that_loses_its_only_prefill_worker_goes_on_and_goes_back(
    one_each: LocalDeployment,
) -> None:
    def local() -> float:
        return one_each.total("decode", LOCAL)

    before = local()
    answers = crowd(one_each.url, PROMPTS, len(PROMPTS), **GREEDY)
    assert local() == before
    [prefill] = one_each.processes("prefill")
    os.kill(prefill.pid, signal.SIGSTOP)  # so that `segue up` does not bring it back at once
    try:
        assert crowd(one_each.url, PROMPTS, len(PROMPTS), **GREEDY) == answers
        assert local() >= before + len(PROMPTS)
    finally:
        os.kill(prefill.pid, signal.SIGCONT)
    until(lambda: linked_workers(one_each) == 2, 60, "the prefill worker's return")
    before = local()
    assert crowd(one_each.url, PROMPTS[:2], 2, **GREEDY) == answers[:2]
    assert local() == before


def test_the_smoke_test_sees_kv_move_where_decode_workers_compute_the_prompts() -> None:
    with deployment(config=SMALL | {"router": {"localPrefill": "always"}}) as running:
        running.client.completions.create(model="smollm2", prompt="one", max_tokens=2)
        assert running.total("prefill", "segue_extend_tokens_total") == 0
        went, moved, _ = smoke_test(running.url, running.admin_url)[1:]
        assert "prefill-0/" in went
        assert moved.split()[0] == str(int(running.total("decode", "segue_kv_fetched_bytes_total")))


def test_prompts_go_the_shorter_way_and_streams_make_room_with_the_same_answers(
    reference: list[StreamedAnswer],
) -> None:
    """With 5 ms between tokens hardly a pass fits beside a stream, so streams leave the worker of their prompt."""
    decode = SMALL["decode"] | {"itlTargetSeconds": 0.005}
    config = SMALL | {"decode": decode, "router": {"localPrefill": "short"}}
    with deployment("--prefill", "1", "--decode", "2", config=config) as running:
        more = [f"{turn} {prompt}" for turn in range(3) for prompt in PROMPTS]
        for _ in range(3):
            assert crowd(running.url, PROMPTS, len(PROMPTS), **GREEDY) == reference
            crowd(running.url, more, len(more), **GREEDY)
        assert running.total("router", "segue_router_local_prompts_total{why=sooner}") > 0
        assert running.total("prefill", "segue_worker_requests_total{outcome=received}") > 0
        assert running.total("router", "segue_migrations_total{cause=packed,outcome=migrated}") > 0
        until(lambda: not running.held(), 10, "that nothing is held")
