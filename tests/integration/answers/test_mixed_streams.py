"""Sixty streams that ask for all kinds of things, while workers are killed and drained and pages run short.

A schema, an expression, calls of tools, four answers to a prompt, logprobs: what each client puts together is what it
gets undisturbed, to the last bit of a logprob. That each kind of trouble came is told by metrics.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest

from tests.integration.deployments.deployment import LocalDeployment, RoleConfigs, deployment
from tests.integration.deployments.observing import continuations
from tests.integration.deployments.ranked import same
from tests.integration.deployments.streams import client_of
from tests.waiting import until

OF_EACH = 12
AT_A_TIME = 20
TROUBLES = 4  # kills and drains, in turn
MODEL = "smollm2"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 60},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 12},
    },
    "required": ["name", "days"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "log", "description": "Keeps a log.", "parameters": SCHEMA},
}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "log", "schema": SCHEMA}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": "([A-Z][a-z]{2,9} ){30,40}end"}}},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "four": {"n": 4, "max_tokens": 48, "extra_body": {"ignore_eos": True}},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}},
}
TIGHT: RoleConfigs = {
    "router": {"toolCallParser": "hermes", "lossesMax": 16, "waitingSecondsMax": 300},
    "prefill": {"kvPages": 600},
    "decode": {"kvPages": 64, "hostFraction": 2.0, "initNewTokenRatio": 0.01},
}


@dataclass
class Told:
    """What one choice of a stream came to. Ids of calls are not kept: they are drawn anew."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=lambda: defaultdict(lambda: ["", ""]))
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


Answer = dict[int, Told]


async def ask(client: openai.AsyncOpenAI, kind: str, number: int) -> Answer:
    """One stream, put together."""
    body: dict[str, Any] = {"max_tokens": 160, "temperature": 1.0, "seed": number} | KINDS[kind]
    messages: Any = [
        {"role": "user", "content": f"Write entry {number} of the log of the {kind} expedition."}
    ]
    found: Answer = defaultdict(Told)
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, **body
    ):
        for choice in chunk.choices:
            told, delta = found[choice.index], choice.delta
            told.text += delta.content or ""
            told.finish_reason = choice.finish_reason or told.finish_reason
            for call in delta.tool_calls or []:
                if call.function is not None:
                    told.calls[call.index][0] += call.function.name or ""
                    told.calls[call.index][1] += call.function.arguments or ""
            if choice.logprobs and choice.logprobs.content:
                told.logprobs += [entry.model_dump() for entry in choice.logprobs.content]
    return dict(found)


async def all_of_them(url: str, ended: list[int]) -> list[Answer]:
    """Sixty streams, some at a time; each adds to `ended` when it is over."""
    gate = asyncio.Semaphore(AT_A_TIME)
    async with client_of(url) as client:

        async def one(kind: str, number: int) -> Answer:
            async with gate:
                answer = await ask(client, kind, number)
            ended.append(number)
            return answer

        return list(await asyncio.gather(*(one(kind, number) for number in range(OF_EACH) for kind in KINDS)))


@pytest.fixture(scope="module")
def tight() -> Iterator[LocalDeployment]:
    with deployment("--prefill", "2", "--decode", "2", config=TIGHT) as running:
        yield running


def slots_used(running: LocalDeployment) -> dict[int, float]:
    """How many requests each decode worker has, by its process; empty while one of them starts."""
    try:
        return {
            one.pid: running.metrics(one).get("segue_slots_used", 0.0) for one in running.processes("decode")
        }
    except httpx2.HTTPError:
        return {}


def trouble(running: LocalDeployment, number: int, is_over: Callable[[], bool]) -> None:
    """Once both decode workers are at work, the busier is told to drain, so that requests migrate, or killed."""
    used: dict[int, float] = {}

    def both_work() -> bool:
        used.clear()
        used.update(slots_used(running))
        return sum(requests >= 2 for requests in used.values()) == 2

    until(lambda: is_over() or both_work(), 120, "work on both decode workers")
    if not is_over():
        victim = max(used, key=lambda pid: used[pid])
        os.kill(victim, signal.SIGKILL if number % 2 else signal.SIGTERM)
        until(lambda: victim not in {one.pid for one in running.processes("decode")}, 60, "its end")


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_sixty_mixed_streams_come_whole_through_kills_migrations_and_retractions(
    tight: LocalDeployment,
) -> None:
    undisturbed = asyncio.run(all_of_them(tight.url, []))
    retracted = tight.total("decode", "segue_retractions_total")  # who is killed takes its count along
    tried_again = continuations(tight)
    migrated = tight.total("router", "segue_migrations_total{cause=drain,outcome=migrated}")

    async def run() -> list[Answer]:
        ended: list[int] = []
        streams = asyncio.create_task(all_of_them(tight.url, ended))
        for number in range(TROUBLES):
            await asyncio.to_thread(trouble, tight, number, streams.done)
        return await streams

    answers = asyncio.run(run())
    assert len(answers) == 5 * OF_EACH
    assert same(answers, undisturbed)
    assert {told.finish_reason for answer in answers for told in answer.values()} >= {"stop", "length"}
    assert sum(len(told.calls) for answer in answers for told in answer.values()) >= OF_EACH
    assert sum(len(answer) == 4 for answer in answers) == OF_EACH
    assert sum(bool(told.logprobs) for answer in answers for told in answer.values()) == OF_EACH
    until(tight.all_linked, 60, "all workers' readiness")
    assert continuations(tight) > tried_again, "nothing was lost"
    assert tight.total("router", "segue_migrations_total{cause=drain,outcome=migrated}") > migrated, (
        "nothing migrated"
    )
    assert retracted + tight.total("decode", "segue_retractions_total") >= 1, "pages never ran short"
    until(lambda: not tight.held(), 10, "everything given back")
