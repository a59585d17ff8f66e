"""What is measured: each scenario is a few requests and the one figure that is read off them.

All are greedy, never end before their number of tokens, and share no prefix but the one that is meant to be shared:
prompts come fresh from the seed of each run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tests.benchmarks.client import figures
from tests.benchmarks.client.client import BenchClient
from tests.benchmarks.client.recording import RecordedStream, Recording, understand
from tests.benchmarks.client.words import DrawnPrompts

LENGTHS_SEED = 20  # of the mixed scenario: always the same lengths, never the same words


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much each scenario asks for, in tokens and requests."""

    short_prompt: int = 32
    output: int = 128
    streams: int = 8
    batch: int = 32
    prompt: int = 512
    prompt_output: int = 8
    mixed_requests: int = 32
    mixed_prompt: tuple[int, int] = (64, 512)
    mixed_output: tuple[int, int] = (64, 256)
    mixed_at_a_time: int = 16
    prefix: int = 1000
    prefix_end: int = 24
    prefix_requests: int = 32
    prefix_output: int = 32
    decoding: int = 4
    decoding_output: int = 2048  # never reached: the client hangs up once it has seen enough
    decoding_head_start: int = 8
    arriving_prompt: int = 4000
    arriving_output: int = 16


FULL = Size()
SMALL = Size(
    output=8,
    streams=2,
    batch=4,
    prompt=48,
    prompt_output=2,
    mixed_requests=4,
    mixed_prompt=(8, 32),
    mixed_output=(4, 8),
    mixed_at_a_time=2,
    prefix=48,
    prefix_end=8,
    prefix_requests=4,
    prefix_output=4,
    decoding=2,
    decoding_output=512,
    decoding_head_start=2,
    arriving_prompt=64,
    arriving_output=2,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a scenario."""

    value: float  # in the scenario's unit
    streams: list[RecordedStream]
    prompt_tokens_drawn: int  # of the streams that were read to their end


Run = Callable[[BenchClient, DrawnPrompts, Size], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A row of the table."""

    name: str
    what: str
    unit: str
    better: Literal["less", "more"]
    run: Run


async def stream(client: BenchClient, prompts: DrawnPrompts, size: Size) -> Outcome:
    """Milliseconds between the tokens of a request that has the server for itself."""
    streams = _understood([await client.complete(prompts.draw(size.short_prompt), size.output)])
    return Outcome(figures.seconds_per_token(streams[0]) * 1e3, streams, size.short_prompt)


async def streams8(client: BenchClient, prompts: DrawnPrompts, size: Size) -> Outcome:
    """Output tokens a second of a few streams."""
    return await _all_at_once(client, prompts, size, size.streams)


async def batch32(client: BenchClient, prompts: DrawnPrompts, size: Size) -> Outcome:
    """Output tokens a second of many streams."""
    return await _all_at_once(client, prompts, size, size.batch)


async def _all_at_once(client: BenchClient, prompts: DrawnPrompts, size: Size, count: int) -> Outcome:
    asked = [(prompts.draw(size.short_prompt), size.output) for _ in range(count)]
    streams = _understood(await asyncio.gather(*(client.complete(*one) for one in asked)))
    return Outcome(figures.tokens_per_second(streams), streams, count * size.short_prompt)


async def prompt512(client: BenchClient, prompts: DrawnPrompts, size: Size) -> Outcome:
    """Seconds to the first token of a prompt that no cache holds."""
    streams = _understood([await client.complete(prompts.draw(size.prompt), size.prompt_output)])
    return Outcome(figures.seconds_to_first(streams[0]), streams, size.prompt)


async def mixed(client: BenchClient, prompts: DrawnPrompts, size: Size) -> Outcome:
    """Output tokens a second of requests of many lengths, a fixed number of them at a time."""
    lengths = random.Random(LENGTHS_SEED)
    drawn = [
        (lengths.randint(*size.mixed_prompt), lengths.randint(*size.mixed_output))
        for _ in range(size.mixed_requests)
    ]
    gate = asyncio.Semaphore(size.mixed_at_a_time)

    async def one(prompt: str, output_tokens: int) -> Recording:
        async with gate:
            return await client.complete(prompt, output_tokens)

    asked = [(prompts.draw(prompt_tokens), output_tokens) for prompt_tokens, output_tokens in drawn]
    streams = _understood(await asyncio.gather(*(one(*request) for request in asked)))
    return Outcome(figures.tokens_per_second(streams), streams, sum(tokens for tokens, _ in drawn))


async def shared_prefix(client: BenchClient, prompts: DrawnPrompts, size: Size) -> Outcome:
    """Seconds until all requests have ended that begin alike and come at once."""
    prefix = prompts.draw(size.prefix)
    asked = [(prompts.draw(size.prefix_end, prefix), size.prefix_output) for _ in range(size.prefix_requests)]
    streams = _understood(await asyncio.gather(*(client.complete(*request) for request in asked)))
    drawn = size.prefix_requests * (size.prefix + size.prefix_end)
    return Outcome(figures.seconds_together(streams), streams, drawn)


async def interference(client: BenchClient, prompts: DrawnPrompts, size: Size) -> Outcome:
    """Longest gap on any of a few streams, in milliseconds, from the arrival of a long prompt to its answer's end."""
    decoding = [
        client.start(prompts.draw(size.short_prompt), size.decoding_output) for _ in range(size.decoding)
    ]
    await asyncio.gather(*(request.events(size.decoding_head_start) for request in decoding))
    arriving = understand(await client.complete(prompts.draw(size.arriving_prompt), size.arriving_output))
    await asyncio.gather(*(request.events(2) for request in decoding))  # what was a gap at the end has ended
    streams = _understood([await request.hang_up() for request in decoding])
    gaps = [figures.longest_gap(one.times, arriving.sent, arriving.last) for one in streams]
    return Outcome(max(gaps) * 1e3, [arriving, *streams], size.arriving_prompt)


def _understood(recordings: Iterable[Recording]) -> list[RecordedStream]:
    return [understand(recording) for recording in recordings]


SCENARIOS = (
    Scenario("stream", "1 stream, a token", "ms", "less", stream),
    Scenario("streams8", "8 streams, output", "tok/s", "more", streams8),
    Scenario("batch32", "32 streams at once, output", "tok/s", "more", batch32),
    Scenario("prompt512", "first token of a 512-token prompt", "s", "less", prompt512),
    Scenario("mixed", "32 requests of 64-512 in, 64-256 out, 16 at a time, output", "tok/s", "more", mixed),
    Scenario("shared-prefix", "32 requests sharing 1,000 tokens, all at once", "s", "less", shared_prefix),
    Scenario(
        "interference", "4 streams while a 4,000-token prompt comes, longest gap", "ms", "less", interference
    ),
)
