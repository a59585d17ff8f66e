"""Many clients at a time, through OpenAI's own asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import openai


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """What one client got: the text, why it ended, how many tokens the usage says, and which, if it has asked."""

    text: str
    finish_reason: str | None
    completion_tokens: int
    token_ids: tuple[int, ...] = ()


async def complete(
    client: openai.AsyncOpenAI, prompt: Any, on_text: Callable[[], object] = lambda: None, **params: Any
) -> StreamedAnswer:
    """One streamed completion; `on_text` is called at each piece of text."""
    pieces: list[str] = []
    token_ids: list[int] = []
    reason, tokens = None, 0
    stream = await client.completions.create(
        model="smollm2", prompt=prompt, stream=True, stream_options={"include_usage": True}, **params
    )
    async for chunk in stream:
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            token_ids += (choice.model_extra or {}).get("token_ids") or ()
            if choice.text:
                pieces.append(choice.text)
                on_text()
    return StreamedAnswer("".join(pieces), reason, tokens, tuple(token_ids))


def client_of(url: str) -> openai.AsyncOpenAI:
    """OpenAI's own client for many streams at a time; it never tries again by itself."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240.0)


def crowd(url: str, prompts: Sequence[Any], at_a_time: int, **params: Any) -> list[StreamedAnswer]:
    """All prompts, at most `at_a_time` of them under way; answers in the order of the prompts."""

    async def run() -> list[StreamedAnswer]:
        gate = asyncio.Semaphore(at_a_time)
        async with client_of(url) as client:

            async def one(prompt: Any) -> StreamedAnswer:
                async with gate:
                    return await complete(client, prompt, **params)

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return asyncio.run(run())
