"""Chats that send no `max_tokens`, the default of most clients, leave room for others in the pool of `segue up`.

Each kind of request is timed alone first: what it may take beside others is relative to that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import monotonic

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.integration.deployment import LocalDeployment, deployment
from tests.integration.streams import client_of
from tests.waiting import soon, until

POOL_TOKENS = 12_288  # of each worker of `segue up`
PAGE_SIZE = 16
CHATS = 6
SHORT = 3
LONG_TOKENS = 4_400
LOOK_SECONDS = 0.1  # between two looks at the metrics


@pytest.fixture(scope="module")
def defaults() -> Iterator[LocalDeployment]:
    """`segue up` without flags and settings."""
    with deployment() as running:
        yield running


def may_take(alone: float) -> float:
    """Seconds to the second token beside others, for a request that took so many alone."""
    return soon(1.5) + 3 * alone


def long_prompt(number: int) -> list[int]:
    """Equally long for each number, and nothing that a cache could have of another."""
    return [1_000 + (number * 7_919 + 31 * place) % 20_000 for place in range(LONG_TOKENS)]


async def second_token(client: openai.AsyncOpenAI, prompt: str | list[int]) -> float:
    """Seconds until the second piece of a streamed answer came. Then the client leaves."""
    began_at, pieces = monotonic(), 0
    async with await client.completions.create(model="smollm2", prompt=prompt, stream=True) as stream:
        async for chunk in stream:
            pieces += bool(chunk.choices and chunk.choices[0].text)
            if pieces == 2:
                return monotonic() - began_at
    raise AssertionError(f"the answer ended after {pieces} pieces")


async def chat(client: openai.AsyncOpenAI, topic: str, seconds: asyncio.Future[float]) -> None:
    """One chat after the other without `max_tokens`, until it is cancelled. `seconds` is set at its second token."""
    while True:
        began_at, pieces = monotonic(), 0
        message = ChatCompletionUserMessageParam(
            role="user", content=f"Write a very long story about {topic}."
        )
        stream = await client.chat.completions.create(model="smollm2", messages=[message], stream=True)
        async for chunk in stream:
            pieces += bool(chunk.choices and chunk.choices[0].delta.content)
            if pieces == 2 and not seconds.done():
                seconds.set_result(monotonic() - began_at)


@asynccontextmanager
async def chats(client: openai.AsyncOpenAI, count: int) -> AsyncIterator[list[float]]:
    """So many chats are under way; gives the seconds to the second token of each."""
    seconds = [asyncio.get_running_loop().create_future() for _ in range(count)]
    topics = [f"the lighthouse number {number}" for number in range(count)]
    tasks = [
        asyncio.create_task(chat(client, topic, each)) for topic, each in zip(topics, seconds, strict=True)
    ]
    try:
        yield list(await asyncio.gather(*seconds))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def most_in_decode(running: LocalDeployment) -> AsyncIterator[list[float]]:
    """Looks all the while at how many requests the decode worker has at a time; the list has what it saw."""
    (worker,) = running.processes("decode")
    seen: list[float] = []

    async def look() -> None:
        while True:
            metrics = await asyncio.to_thread(running.metrics, worker)
            seen.append(metrics["segue_slots_used"])
            await asyncio.sleep(LOOK_SECONDS)

    task = asyncio.create_task(look())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.timeout(400)
def test_beside_chats_without_max_tokens_a_second_token_comes_soon(defaults: LocalDeployment) -> None:
    async def story() -> None:
        async with client_of(defaults.url) as client:
            await second_token(client, "Warm up: ")
            short_alone = max([await second_token(client, f"Number {n} is") for n in range(SHORT)])
            long_alone = await second_token(client, long_prompt(1))
            async with chats(client, 1) as alone:
                chat_alone = alone[0]
            async with chats(client, CHATS) as chat_seconds, most_in_decode(defaults) as seen:
                long = asyncio.create_task(second_token(client, long_prompt(2)))
                short = await asyncio.gather(
                    *(second_token(client, f"The {n}. of them is") for n in range(SHORT))
                )
                long_seconds = await long
        figures = (
            f"alone: chat {chat_alone:.2f}, short {short_alone:.2f}, long {long_alone:.2f} s; beside others: chats "
            f"{max(chat_seconds):.2f}, short {max(short):.2f}, long {long_seconds:.2f} s; {max(seen)} in decode"
        )
        sys.stdout.write(f"{figures}\n")
        assert max(seen) >= CHATS + 1, figures
        assert max(chat_seconds) <= may_take(chat_alone), figures
        assert max(short) <= may_take(short_alone), figures
        assert long_seconds <= may_take(long_alone), figures

    for worker in [*defaults.processes("prefill"), *defaults.processes("decode")]:
        metrics = defaults.metrics(worker)
        pages = sum(value for name, value in metrics.items() if name.startswith("segue_pages{"))
        assert pages * PAGE_SIZE == POOL_TOKENS, worker
    asyncio.run(story())
    until(lambda: not defaults.held(), 10, "everything given back")
