"""Chats that outgrow the KV memory of `segue up`, and long prompts beside them: no stream that began is ended.

With a small pool all of it takes seconds; the virtual cluster has the size that users have (`outgrown_pool`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic

import openai
import pytest

from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.ranked import RANKED
from tests.integration.deployments.streams import client_of
from tests.waiting import soon, until

POOL_TOKENS, CONTEXT_LEN = 2_048, 1_024
CHATS, CHAT_TOKENS = 8, 40  # each grows to the whole context: two of them fill the pool
PROMPTS, PROMPT_TOKENS = 3, 900
PAUSE_SECONDS_MAX = 30.0


@dataclass
class WatchedStream:
    """A stream, and when its tokens came."""

    prompt: list[int]
    max_tokens: int
    text: str = ""
    pause: float = 0.0  # the longest
    error: str = ""

    async def read(self, client: openai.AsyncOpenAI, grown: asyncio.Event | None = None) -> WatchedStream:
        """Read until it ends; `grown` is set when a good part has come."""
        last, pieces = None, 0
        try:
            async with await client.completions.create(
                model="smollm2",
                prompt=self.prompt,
                max_tokens=self.max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ) as stream:
                async for chunk in stream:
                    now = monotonic()
                    self.pause = max(self.pause, now - (last or now))
                    last = now
                    pieces += 1
                    if grown is not None and pieces > CONTEXT_LEN / 4:
                        grown.set()
                    self.text += "".join(choice.text for choice in chunk.choices)
        except openai.APIError as error:
            self.error = str(error)
        return self


def chat(number: int) -> WatchedStream:
    return WatchedStream(_tokens(number, CHAT_TOKENS), CONTEXT_LEN - CHAT_TOKENS)


def prompt(number: int) -> WatchedStream:
    return WatchedStream(_tokens(100 + number, PROMPT_TOKENS), 30)


def _tokens(number: int, length: int) -> list[int]:
    """Unlike the others', so that no cache helps."""
    return [1_000 + (number * 7_919 + 31 * place) % 20_000 for place in range(length)]


async def _all_at_once(running: LocalDeployment) -> tuple[list[WatchedStream], list[WatchedStream]]:
    async with client_of(running.url) as client:
        grown = asyncio.Event()
        chats = [asyncio.create_task(chat(number).read(client, grown)) for number in range(CHATS)]
        await grown.wait()
        prompts = [asyncio.create_task(prompt(number).read(client)) for number in range(PROMPTS)]
        return list(await asyncio.gather(*chats)), list(await asyncio.gather(*prompts))


async def _alone(running: LocalDeployment, stream: WatchedStream) -> str:
    async with client_of(running.url) as client:
        return (await stream.read(client)).text


@pytest.mark.timeout(900 if RANKED else 300)
@pytest.mark.parametrize(
    ("decode", "counted"),
    [
        ({"hostFraction": 8}, "segue_backups_total"),
        pytest.param({"hostFraction": 0}, "segue_recomputed_total", marks=pytest.mark.long),
    ],
    ids=["copied to host memory", "computed again"],
)
def test_streams_that_outgrow_the_pool_take_turns_and_none_that_began_is_ended(
    decode: dict[str, object], counted: str
) -> None:
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--context-len", str(CONTEXT_LEN))
    with deployment(*flags, config={"decode": decode}) as running:
        chats, prompts = asyncio.run(_all_at_once(running))
        began = [each for each in chats + prompts if each.text]
        assert chats == [each for each in began if each in chats]
        assert [each.error for each in began if each.error] == []
        assert max(each.pause for each in began) < soon(PAUSE_SECONDS_MAX)
        assert running.total("decode", "segue_retractions_total") > 0
        assert running.total("decode", counted) > 0
        assert running.total("router", "segue_pause_seconds_count{cause=retracted}") > 0
        assert asyncio.run(_alone(running, chat(CHATS - 1))) == chats[-1].text
        if prompts[0].text:
            assert asyncio.run(_alone(running, prompt(0))) == prompts[0].text
        until(lambda: not running.held(), soon(5), "everything given back")
