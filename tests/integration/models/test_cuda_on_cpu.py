"""The CUDA engine serves on CPU: streams, staging, graphs and pages by token, over real NIXL, and workers that die.

Only the kernels' arithmetic is another than on a GPU. Tokens are compared up to near ties: this path promises no bits.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.deployments.aggregated import PROMPT_ROLE
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import LocalDeployment, RunningProcess, deployment
from tests.integration.deployments.observing import continuations
from tests.integration.deployments.streams import crowd
from tests.integration.faults.conftest import PROMPT
from tests.integration.faults.test_faults import disturb, kill
from tests.integration.models.answers_of_transformers import assert_answers_of_transformers
from tests.integration.models.prompts import varied_prompts
from tests.waiting import until

TOKENS = 12
PROMPT_TOKENS_MAX = 200
EXACTLY = {"ignore_eos": True, "return_token_ids": True}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "extra_body": EXACTLY}
LONG = GREEDY | {"max_tokens": 40}
WORKER = {"kvPages": 160, "contextLen": 256, "maxRunningRequests": 4}


@pytest.fixture(scope="module")
def path_of_a_gpu() -> Iterator[LocalDeployment]:
    """One prefill and two decode workers."""
    flags = ("--device", "cuda-on-cpu", "--decode", "2")
    with deployment(*flags, config={"prefill": WORKER, "decode": WORKER}) as running:
        yield running


@pytest.mark.timeout(900)
def test_greedy_answers_are_those_of_transformers(path_of_a_gpu: LocalDeployment) -> None:
    model = cut_model()
    prompts = [prompt for prompt in varied_prompts(model) if len(prompt) <= PROMPT_TOKENS_MAX][::2]
    answers = crowd(path_of_a_gpu.url, prompts, 4, **GREEDY)
    assert_answers_of_transformers(model, prompts, answers, TOKENS)
    steps = graph_steps(path_of_a_gpu)
    assert steps.pop("eager") == 0
    assert sum(steps.values()) >= TOKENS
    assert len([rows for rows, count in steps.items() if count]) > 1, "batches of several sizes"
    assert path_of_a_gpu.total("decode", "segue_device_busy_seconds_total{mode=decode}") > 0
    assert path_of_a_gpu.total("decode", "segue_memory_bytes{kind=kv}") > 0
    assert path_of_a_gpu.total(PROMPT_ROLE, "segue_device_busy_seconds_total{mode=extend}") > 0


@pytest.mark.timeout(600)
def test_a_killed_decode_worker_only_pauses_the_stream(path_of_a_gpu: LocalDeployment) -> None:
    undisturbed = crowd(path_of_a_gpu.url, [PROMPT], 1, **LONG)[0]
    until(lambda: not path_of_a_gpu.held(), 10, "that no worker shows its slot any more")
    before = continuations(path_of_a_gpu)
    assert asyncio.run(disturb(path_of_a_gpu, pieces=8, with_worker=kill, params=LONG)) == undisturbed
    assert continuations(path_of_a_gpu) == before + 1
    until(path_of_a_gpu.all_linked, 180, "all workers' readiness")


@pytest.mark.timeout(600)
def test_answers_that_are_constrained_or_told_of_go_on_after_a_kill(path_of_a_gpu: LocalDeployment) -> None:
    """A grammar's mask waits for the token before; what is told of tokens comes with them."""
    words = r"([a-z]{2,9} ){40}"
    asked: list[dict[str, Any]] = [
        LONG | {"temperature": 1, "seed": 5, "extra_body": {"structured_outputs": {"regex": words}}},
        LONG | {"logprobs": 3, "extra_body": {"ignore_eos": True, "bad_words": [" the"]}},
    ]
    for params in asked:
        undisturbed = crowd(path_of_a_gpu.url, [PROMPT], 1, **params)[0]
        until(lambda: not path_of_a_gpu.held(), 10, "that no worker shows its slot any more")
        before = continuations(path_of_a_gpu)
        assert asyncio.run(disturb(path_of_a_gpu, pieces=8, with_worker=kill, params=params)) == undisturbed
        assert continuations(path_of_a_gpu) == before + 1
        until(path_of_a_gpu.all_linked, 180, "all workers' readiness")
        if "logprobs" not in params:
            assert re.match(r"([a-z]{2,9} )+[a-z]*$", undisturbed.text)
        else:
            assert not re.search(r" the\b", undisturbed.text)
    told = openai.OpenAI(base_url=f"{path_of_a_gpu.url}/v1", api_key="none").completions.create(
        model="smollm2",
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        logprobs=3,
        extra_body={"prompt_logprobs": 1},
    )
    (choice,) = told.choices
    assert choice.logprobs is not None
    assert [len(top) for top in choice.logprobs.top_logprobs or ()] == [3] * 4
    assert len(choice.model_dump()["prompt_logprobs"]) == told.usage.prompt_tokens  # type: ignore[union-attr]


@pytest.mark.timeout(600)
def test_a_stream_migrates_from_a_draining_decode_worker(path_of_a_gpu: LocalDeployment) -> None:
    def drain(victim: RunningProcess) -> None:
        os.kill(victim.pid, signal.SIGTERM)

    undisturbed = crowd(path_of_a_gpu.url, [PROMPT], 1, **LONG)[0]
    tried_again = continuations(path_of_a_gpu)
    assert asyncio.run(disturb(path_of_a_gpu, pieces=8, with_worker=drain, params=LONG)) == undisturbed
    assert path_of_a_gpu.total("router", "segue_migrations_total{cause=drain,outcome=migrated}") == 1
    assert continuations(path_of_a_gpu) == tried_again
    until(path_of_a_gpu.all_linked, 180, "all workers' readiness")
    until(lambda: not path_of_a_gpu.held(), 5, "everything given back")


def graph_steps(running: LocalDeployment) -> dict[str, float]:
    """DECODE steps of all workers by the graph that ran them."""
    name = "segue_graph_steps_total{rows="
    steps: dict[str, float] = {}
    for process in running.processes("decode"):
        for sample, value in running.metrics(process).items():
            if sample.startswith(name):
                rows = sample.removeprefix(name).rstrip("}")
                steps[rows] = steps.get(rows, 0) + value
    return steps
