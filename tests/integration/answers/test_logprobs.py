"""Logprobs on a real deployment: those of transformers, and the same bits however the tokens came to be."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
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
from tests.integration.deployments.streams import client_of
from tests.integration.models.prompts import varied_prompts
from tests.waiting import until

TOKENS = 32
TOP = 5
TOLERANCE = 1e-3
ASKED: dict[str, Any] = {
    "model": "smollm2",
    "max_tokens": TOKENS,
    "temperature": 0,
    "logprobs": TOP,
    "extra_body": {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
}

EXACT = {"kvPages": 1200, "kvCacheDtype": "float32"}
Entry = tuple[int, float, dict[str, float]]  # the token, its logprob, and the likeliest


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt for prompt in varied_prompts(cut_model()) if len(prompt) <= 1000][:20]


@pytest.fixture(scope="module")
def exact() -> Iterator[LocalDeployment]:
    """One worker of each role, whose KV pages round nothing."""
    with deployment(config=dict.fromkeys(("prefill", "decode"), EXACT)) as running:
        yield running


@pytest.fixture(scope="module")
def alone(exact: LocalDeployment, prompts: list[list[int]]) -> list[list[Entry]]:
    """Each prompt by itself, met for the first time."""
    return [told(exact.client, prompt) for prompt in prompts]


def told(client: openai.OpenAI, prompt: list[int], **fields: Any) -> list[Entry]:
    return _entries(client.completions.create(prompt=prompt, **(ASKED | fields)).choices[0])


def _entries(choice: Any) -> list[Entry]:
    each = zip(choice.token_ids, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
    return [(token_id, logprob, top) for token_id, logprob, top in each]


@pytest.mark.timeout(900)
@pytest.mark.long
def test_they_are_those_of_transformers(prompts: list[list[int]], alone: list[list[Entry]]) -> None:
    assert len(prompts) == 20
    reference: Any = AutoModelForCausalLM.from_pretrained(cut_model(), dtype=torch.float32)
    for prompt, entries in zip(prompts, alone, strict=True):
        assert len(entries) == TOKENS
        token_ids = [token_id for token_id, _, _ in entries]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.double().log_softmax(-1)
        for row, (token_id, logprob, top) in zip(expected, entries, strict=True):
            assert abs(logprob - row[token_id].item()) < TOLERANCE
            assert len(top) >= TOP
            for name, value in top.items():
                assert abs(value - row[int(name.removeprefix("token_id:"))].item()) < TOLERANCE
            assert [*top.values()][:TOP] == sorted([*top.values()][:TOP], reverse=True)


def test_they_are_the_same_bits_from_a_cached_prompt(
    exact: LocalDeployment, prompts: list[list[int]], alone: list[list[Entry]]
) -> None:
    before = exact.total(PROMPT_ROLE, "segue_cache_hit_tokens_total")
    assert same([told(exact.client, prompt) for prompt in prompts], alone)
    assert exact.total(PROMPT_ROLE, "segue_cache_hit_tokens_total") > before


@pytest.mark.aggregated
def test_they_are_the_same_bits_among_eight(
    exact: LocalDeployment, prompts: list[list[int]], alone: list[list[Entry]]
) -> None:
    names = ("segue_sampled_tokens_total", "segue_steps_total{mode=decode}")
    before = [exact.total("decode", name) for name in names]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda prompt: told(exact.client, prompt), prompts))
    assert same(together, alone)
    tokens, steps = (exact.total("decode", name) - then for name, then in zip(names, before, strict=True))
    assert tokens >= 2 * steps, "there was no crowd"


@pytest.mark.timeout(600)
@pytest.mark.long
def test_they_are_the_same_bits_from_other_chunks(prompts: list[list[int]], alone: list[list[Entry]]) -> None:
    chunked = {"prefill": EXACT | {"chunkedPrefillSize": 48}, "decode": EXACT}
    with deployment(config=chunked) as running:
        assert same([told(running.client, prompt) for prompt in prompts], alone)
        assert running.total(PROMPT_ROLE, "segue_steps_total{mode=extend}") > 2 * len(prompts)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_they_are_the_same_bits_over_a_kill(two_each: LocalDeployment, prompts: list[list[int]]) -> None:
    longer = ASKED | {"max_tokens": 400, "prompt": prompts[0]}
    undisturbed = _entries(two_each.client.completions.create(**longer).choices[0])
    until(lambda: not two_each.held(), 10, "its end on the workers, so that only the other one is busy")
    before = continuations(two_each)
    entries = asyncio.run(_killed_once(two_each, longer))
    assert same(entries, undisturbed)
    assert continuations(two_each) > before
    until(two_each.all_linked, 30, "all workers' readiness")


async def _killed_once(running: LocalDeployment, asked: dict[str, Any]) -> list[Entry]:
    """The entries of a stream whose decode worker is killed in the middle."""
    entries: list[Entry] = []
    async with client_of(running.url) as client:
        killed = False
        async for chunk in await client.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                if choice.logprobs:
                    entries += _entries(choice)
            if len(entries) >= 20 and not killed:
                victim = await asyncio.to_thread(busy_worker, running, "decode")
                os.kill(victim.pid, signal.SIGKILL)
                killed = True
    return entries


def test_entries_of_a_stream_are_those_of_the_whole_answer(
    exact: LocalDeployment, prompts: list[list[int]], alone: list[list[Entry]]
) -> None:
    stream = exact.client.completions.create(stream=True, prompt=prompts[3], **ASKED)
    found: list[Entry] = []
    offsets: list[int] = []
    for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs:
                found += _entries(choice)
                offsets += _offsets(choice.logprobs.text_offset)
    assert found == alone[3]
    assert all(first <= second for first, second in pairwise(offsets))


def _offsets(given: Sequence[int] | None) -> list[int]:
    assert given is not None
    return list(given)
