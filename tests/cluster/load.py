"""Streams of OpenAI's own client while something happens to the cluster, and what their readers saw.

The client never tries again by itself. Pods on cpu compute the same bits, at any batching and after any recomputation,
so what a stream must say is what an undisturbed run said: any difference is a failure, near tie or not.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import openai

from tests.waiting import until

STREAMS_AT_FAULT_MIN = 8
FIRST_TOKENS_SECONDS_MAX = 60
STRUCK_SECONDS_MAX = 180
EXACTLY = {"ignore_eos": True, "return_token_ids": True}  # as many tokens as asked for, and which
LOOK_SECONDS_MAX = 1.0  # of a long wait: each look is a kubectl or more, on the cores that the pods start on


@dataclass(frozen=True, slots=True)
class Plan:
    """One request."""

    prompt: str
    max_tokens: int


@dataclass(slots=True)
class LoadStream:
    """What the reader of one request saw."""

    plan: Plan
    rid: str = ""
    began_at: float = 0.0
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when text came, in monotonic seconds
    ends: list[str] = field(default_factory=list)  # finish reasons
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def runs(self) -> bool:
        """Whether it has a token and has not ended."""
        return bool(self.times) and not self.ended_at

    def longest_pause(self, since: float) -> float:
        """Seconds its reader waited for the first text or the next, at most; waits over by `since` do not count."""
        moments = itertools.pairwise([self.began_at, *self.times])
        return max((after - before for before, after in moments if after > since), default=0.0)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened to the streams that ran when something was done, and to those that came with it.

    `fault_at` is when it was begun; `running` counts the streams that ran when it was seen to have struck.
    """

    name: str
    streams: list[LoadStream]
    running: int
    fault_at: float

    def to_come(self, stream: LoadStream) -> int:
        """Tokens that its reader still waited for when the fault began, a token for each piece of text."""
        return stream.plan.max_tokens - sum(at < self.fault_at for at in stream.times)

    @property
    def pauses(self) -> list[float]:
        """Of each stream the longest from the fault on, in seconds, ascending."""
        return sorted(stream.longest_pause(self.fault_at) for stream in self.streams)

    @property
    def last_end(self) -> float:
        """Seconds from the fault to the end of the last stream."""
        return max(stream.ended_at for stream in self.streams) - self.fault_at


def run_streams(
    url: str,
    api_key: str,
    plans: list[Plan],
    name: str = "",
    fault: Callable[[], object] | None = None,
    later: list[Plan] | None = None,
    struck: Callable[[], bool] = lambda: True,
) -> LoadReport:
    """All plans at once; when each has a token the fault, and with it the later ones. Raises what a stream raised."""
    return asyncio.run(_run(url, api_key, plans, name, fault, later or [], struck))


async def _run(
    url: str,
    api_key: str,
    plans: list[Plan],
    name: str,
    fault: Callable[[], object] | None,
    later: list[Plan],
    struck: Callable[[], bool],
) -> LoadReport:
    streams = [LoadStream(plan) for plan in plans]
    others = [LoadStream(plan) for plan in later]
    running, fault_at = 0, monotonic()
    async with _client(url, api_key) as client:
        tasks = [asyncio.create_task(_follow(client, stream)) for stream in streams]
        if fault is not None:
            begun = lambda: all(stream.times for stream in streams)  # noqa: E731
            await asyncio.to_thread(until, begun, FIRST_TOKENS_SECONDS_MAX, "a token of every stream")
            fault_at = monotonic()
            tasks += [asyncio.create_task(_follow(client, stream)) for stream in others]

            async def running_when_struck() -> int:
                await asyncio.to_thread(
                    until, struck, STRUCK_SECONDS_MAX, f"{name}: its strike", LOOK_SECONDS_MAX
                )
                return sum(stream.runs for stream in streams)

            running, _ = await asyncio.gather(running_when_struck(), asyncio.to_thread(fault))
        await asyncio.gather(*tasks)
    return LoadReport(name, streams + others, running, fault_at)


def ask(url: str, api_key: str, plans: list[Plan]) -> list[list[int]]:
    """The tokens of all answers, asked for at once, each as a whole: a reader of streams takes time from the pods."""

    async def run() -> list[list[int]]:
        async with _client(url, api_key, timeout=900.0) as client:  # of silence, until an answer is whole
            answers = [client.completions.create(**_asked(plan), extra_body=EXACTLY) for plan in plans]
            return [answer.choices[0].to_dict()["token_ids"] for answer in await asyncio.gather(*answers)]

    return asyncio.run(run())


def _client(url: str, api_key: str, timeout: float = 300.0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=timeout)


def _asked(plan: Plan) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": plan.prompt, "max_tokens": plan.max_tokens, "temperature": 0}


async def _follow(client: openai.AsyncOpenAI, stream: LoadStream) -> None:
    stream.began_at = monotonic()
    chunks = await client.completions.create(
        stream=True, stream_options={"include_usage": True}, extra_body=EXACTLY, **_asked(stream.plan)
    )
    async for chunk in chunks:
        stream.rid = chunk.id
        if chunk.usage:
            stream.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            stream.token_ids += (choice.model_extra or {}).get("token_ids") or ()
            if choice.text:
                stream.pieces.append(choice.text)
                stream.times.append(monotonic())
            if choice.finish_reason:
                stream.ends.append(choice.finish_reason)
    stream.ended_at = monotonic()
