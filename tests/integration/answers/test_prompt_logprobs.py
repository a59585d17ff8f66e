"""Logprobs of prompts on a real deployment: those of transformers, the same bits in chunks, cached and over a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.deployments.aggregated import PROMPT_ROLE
from tests.integration.deployments.cut_model import cut_model
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.observing import busy_worker, continuations
from tests.integration.deployments.ranked import same
from tests.integration.models.prompts import varied_prompts
from tests.waiting import until

TOLERANCE = 1e-3
EXACT = {"kvPages": 320, "kvCacheDtype": "float32"}
CHUNK = 48  # tokens
LONG = 2000  # tokens: their logits together are 375 MiB
SCORING_BYTES_MAX = 64 << 20


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A dozen, of which the longer half takes several chunks."""
    varied = sorted((prompt for prompt in varied_prompts(cut_model()) if 2 <= len(prompt) <= 200), key=len)
    return varied[1::2][:12]


@pytest.fixture(scope="module")
def exact() -> Iterator[LocalDeployment]:
    """One worker of each role, whose KV pages round nothing, and whose prompts come in chunks."""
    prefill = EXACT | {"chunkedPrefillSize": CHUNK}
    with deployment(config={"prefill": prefill, "decode": EXACT}) as running:
        yield running


def scored(client: openai.OpenAI, prompt: list[int]) -> Any:
    """The logprobs of a prompt's tokens, as lm-eval asks for them."""
    answer = client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=1,
        temperature=0,
        echo=True,
        logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )
    told = answer.choices[0].logprobs
    assert told is not None
    return told


@pytest.fixture(scope="module")
def alone(exact: LocalDeployment, prompts: list[list[int]]) -> list[Any]:
    answers = [scored(exact.client, prompt) for prompt in prompts]
    # A step is counted after its tokens have been sent
    counted = partial(exact.total, PROMPT_ROLE, "segue_steps_total{mode=extend}")
    until(lambda: counted() > len(prompts), 30, "steps of prompts that come in chunks")
    return answers


@pytest.mark.timeout(600)
def test_they_are_those_of_transformers(prompts: list[list[int]], alone: list[Any]) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(cut_model(), dtype=torch.float32)
    for prompt, told in zip(prompts, alone, strict=True):
        assert told.token_logprobs[0] is None
        assert len(told.token_logprobs) == len(prompt) + 1
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        for at, token_id in enumerate(prompt[1:]):
            assert abs(told.token_logprobs[at + 1] - expected[at, token_id].item()) < TOLERANCE
            assert abs(max(told.top_logprobs[at + 1].values()) - expected[at].max().item()) < TOLERANCE


@pytest.mark.aggregated
def test_they_are_the_same_bits_when_the_prompt_is_cached_and_in_a_crowd(
    exact: LocalDeployment, prompts: list[list[int]], alone: list[Any]
) -> None:
    exact.client.completions.create(model="smollm2", prompt=prompts[0], max_tokens=1)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda prompt: scored(exact.client, prompt), prompts))
    assert same(together, alone)


def test_what_a_scored_prompt_has_computed_is_cached_for_others(
    exact: LocalDeployment, prompts: list[list[int]]
) -> None:
    prompt = [*prompts[1], *prompts[2], *range(100, 200)]
    scored(exact.client, prompt)
    usage = exact.client.completions.create(model="smollm2", prompt=prompt, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= len(prompt) - 16


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_long_prompt_is_scored_in_little_memory(exact: LocalDeployment, prompts: list[list[int]]) -> None:
    prompt = (prompts[0] + prompts[1]) * 500
    for begin in (1, 2, 3):  # all KV pages have been used then
        plain = prompt[begin : begin + LONG]
        exact.client.completions.create(model="smollm2", prompt=plain, max_tokens=1)
    (worker,) = exact.processes(PROMPT_ROLE)
    before = peak_bytes(worker.pid)
    assert len(scored(exact.client, prompt[:LONG]).tokens) == LONG + 1
    assert peak_bytes(worker.pid) - before <= SCORING_BYTES_MAX


@pytest.mark.timeout(600)
@pytest.mark.long
def test_they_are_the_same_bits_over_a_kill(two_each: LocalDeployment, prompts: list[list[int]]) -> None:
    prompt = ((prompts[0] + prompts[1]) * 300)[:3000]
    undisturbed = scored(two_each.client, prompt)
    until(lambda: not two_each.held(), 10, "its end on the workers, so that only the other one is busy")
    before = continuations(two_each)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(scored, two_each.client, prompt)
        os.kill(busy_worker(two_each, PROMPT_ROLE).pid, signal.SIGKILL)
        assert same(answer.result(timeout=300), undisturbed)
    assert continuations(two_each) > before


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
