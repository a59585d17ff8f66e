"""Streams of POST /v1/completions to any server; keeps what arrives and when, and looks at none of it.

The client shares the cores with the servers it measures. For each piece of a stream it reads the clock, appends to a
list and counts a word; everything else happens after the measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter

import aiohttp

from tests.benchmarks.client.errors import BenchError
from tests.benchmarks.client.recording import Recording

SILENCE_SECONDS_MAX = 900.0  # a slow machine may need minutes for the first token of many long prompts
EVENT = b"data:"


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is measured."""

    url: str  # ends with /v1
    model: str
    software: str  # as its answers say, if they do


class BenchRequest:
    """One stream under way."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.task: asyncio.Task[None] | None = None
        self._events = 0
        self._awaited_events = -1
        self._reached = asyncio.Event()

    def take(self, time: float, piece: bytes) -> None:
        """Bytes have come."""
        self.recording.pieces.append((time, piece))
        self._events += piece.count(EVENT)
        if 0 <= self._awaited_events <= self._events:
            self._reached.set()

    async def events(self, count: int) -> None:
        """Wait for this many more events; raises BenchError when the stream ends before."""
        self._reached.clear()
        self._awaited_events = self._events + count
        assert self.task is not None
        reached = asyncio.create_task(self._reached.wait())
        await asyncio.wait({reached, self.task}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if self.task.done():
            await self.task
            raise BenchError(
                "a stream ended that should have gone on: the server is faster than this scenario"
            )

    async def ended(self) -> Recording:
        """The whole recording."""
        assert self.task is not None
        await self.task
        return self.recording

    async def hang_up(self) -> Recording:
        """Read no more of it."""
        assert self.task is not None
        self.recording.cut = True
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        return self.recording


class BenchClient:
    """Sends requests to one server; all its streams live on one event loop."""

    def __init__(self, session: aiohttp.ClientSession, target: Target):
        self._session = session
        self.target = target

    def start(self, prompt: str, output_tokens: int) -> BenchRequest:
        """Ask for a greedy completion of exactly this many tokens, and read it in the background."""
        request = BenchRequest(Recording(output_tokens))
        body = {
            "model": self.target.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request.task = asyncio.create_task(self._read(request, body))
        request.task.add_done_callback(_look_at)
        return request

    async def complete(self, prompt: str, output_tokens: int) -> Recording:
        """`start`, and wait for the end."""
        return await self.start(prompt, output_tokens).ended()

    async def _read(self, request: BenchRequest, body: dict[str, object]) -> None:
        request.recording.sent = perf_counter()
        try:
            async with self._session.post(f"{self.target.url}/completions", json=body) as response:
                await _require_ok(response)
                async for piece in response.content.iter_any():
                    request.take(perf_counter(), piece)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self.target.url}: {_reason(error)}") from None


@contextlib.asynccontextmanager
async def connected(url: str, model: str) -> AsyncIterator[BenchClient]:
    """A client of the server at `url`; an empty `model` is the first that it serves. Raises BenchError."""
    key = os.environ.get("OPENAI_API_KEY")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_SECONDS_MAX)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),  # some servers drop idle connections
        timeout=timeout,
        headers={"Authorization": f"Bearer {key}"} if key else None,
    ) as session:
        yield BenchClient(session, await _find(session, url.rstrip("/"), model))


async def _find(session: aiohttp.ClientSession, url: str, model: str) -> Target:
    try:
        async with session.get(f"{url}/models") as response:
            response.raise_for_status()
            served = [str(entry["id"]) for entry in (await response.json())["data"]]
            software = response.headers.get("Server", "")
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"no server of OpenAI's API answers at {url} ({_reason(error)}); the URL should end with /v1"
        ) from None
    if not served or (model and model not in served):
        raise BenchError(
            f"{url} does not serve {model or 'any model'}; it has: {', '.join(served) or 'none'}"
        )
    return Target(url, model or served[0], software)


def _look_at(task: asyncio.Task[None]) -> None:
    """Where one stream's failure ends the scenario, asyncio need not report those of the others."""
    if not task.cancelled():
        task.exception()


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = " ".join((await response.text()).split())
        raise BenchError(f"{response.url} answered {response.status}: {text[:300]}")


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
