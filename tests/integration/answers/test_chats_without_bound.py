"""Chats that send no `max_tokens`, the default of most clients, leave room for others in the pool of `segue up`.

Each kind of request is timed alone first: what it may take beside others is relative to that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from time import monotonic

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.ranked import RANKED
from tests.integration.deployments.streams import client_of
from tests.waiting import soon, until

pytestmark = pytest.mark.skipif(
    RANKED, reason="cuda-on-cpu computes a chunk of a long prompt for longer than a short one may wait"
)
POOL_TOKENS = 12_288  # of each worker of `segue up`
PAGE_SIZE = 16
CHATS = 6
SHORT = 3
LONG_TOKENS = 4_400


@pytest.fixture(scope="module")
def defaults() -> Iterator[LocalDeployment]:
    """`segue up` without settings: its pools are those of a user."""
    with deployment() as running:
        yield running


def may_take(alone: float) -> float:
    """Seconds to the second token beside others, for a request that took so many alone."""
    return soon(1.5) + 3 * alone


def long_prompt(number: int) -> list[int]:
    """Equally long for each number, and nothing that a cache could have of another."""
    return [1_000 + (number * 7_919 + 31 * place) % 20_000 for place in range(LONG_TOKENS)]


async def second_token(
    client: openai.AsyncOpenAI, prompt: str | list[int], look: Callable[[], object] = lambda: None
) -> float:
    """Seconds until the second piece of a streamed answer came; `look` is called then and at each later one."""
    began_at, pieces, seconds = monotonic(), 0, 0.0
    async with await client.completions.create(model="smollm2", prompt=prompt, stream=True) as stream:
        async for chunk in stream:
            pieces += bool(chunk.choices and chunk.choices[0].text)
            seconds = monotonic() - began_at if pieces == 2 and not seconds else seconds
            if pieces >= 2:
                await asyncio.to_thread(look)
    assert seconds, f"the answer ended after {pieces} pieces"
    return seconds


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


@pytest.mark.timeout(400)
@pytest.mark.long
def test_beside_chats_without_max_tokens_a_second_token_comes_soon(defaults: LocalDeployment) -> None:
    (decode,) = defaults.processes("decode")
    in_decode: list[float] = []  # requests, while the long one generates

    def look() -> None:
        in_decode.append(defaults.metrics(decode)["segue_slots_used"])

    async def story() -> None:
        async with client_of(defaults.url) as client:
            await second_token(client, "Warm up: ")
            short_alone = max([await second_token(client, f"Number {n} is") for n in range(SHORT)])
            long_alone = await second_token(client, long_prompt(1))
            async with chats(client, 1) as alone:
                chat_alone = alone[0]
            async with chats(client, CHATS) as chat_seconds:
                long = second_token(client, long_prompt(2), look)
                short = [second_token(client, f"The {n}. of them is") for n in range(SHORT)]
                long_seconds, *short_seconds = await asyncio.gather(long, *short)
        figures = (
            f"alone: chat {chat_alone:.2f}, short {short_alone:.2f}, long {long_alone:.2f} s; "
            f"beside others: chats {max(chat_seconds):.2f}, short {max(short_seconds):.2f}, long {long_seconds:.2f} s; "
            f"{max(in_decode):.0f} in decode"
        )
        sys.stdout.write(f"{figures}\n")
        assert max(in_decode) >= CHATS + 1, figures
        assert max(chat_seconds) <= may_take(chat_alone), figures
        assert max(short_seconds) <= may_take(short_alone), figures
        assert long_seconds <= may_take(long_alone), figures

    for worker in [*defaults.processes("prefill"), *defaults.processes("decode")]:
        metrics = defaults.metrics(worker)
        pages = sum(value for name, value in metrics.items() if name.startswith("segue_pages{"))
        assert pages * PAGE_SIZE == POOL_TOKENS, worker
    asyncio.run(story())
    until(lambda: not defaults.held(), 10, "everything given back")
