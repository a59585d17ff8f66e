"""Requests cut anywhere, and bytes that are none: same answers in the same order, and no connection over its budget.

`FUZZ_EXAMPLES=20000 python -m pytest tests/unit/router/listener/test_http_fuzz.py` is the longer run by hand.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.config import RouterConfig
from router.listener.connection import AHEAD_BYTES_MAX, LINGER_SECONDS, ClientConnection
from router.listener.connections import ClientConnections
from router.listener.request_parser import HEAD_BYTES_MAX
from tests.doubles.memory_transport import MemoryTransport
from tests.fuzzing import fuzzed
from tests.unit.router.raw_http import answers

CONFIG = RouterConfig()
LATE = 10 * (CONFIG.body_seconds_max + CONFIG.idle_seconds_max + LINGER_SECONDS)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers what it was asked: in one piece, or for paths with a b in pieces."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    told = expected(scope["method"], scope["raw_path"], body)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if b"b" in scope["raw_path"]:
        for byte in told:
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
        told = b""
    await send({"type": "http.response.body", "body": told})


def expected(method: str, path: bytes, body: bytes) -> bytes:
    return method.encode() + b" " + path + b" " + hashlib.sha256(body).hexdigest()[:8].encode()


class EchoClient:
    """One connection to `echo`, over a transport in memory."""

    def __init__(self) -> None:
        config = uvicorn.Config(echo, lifespan="off", ws="none", log_config=None)
        config.load()
        self.clients = ClientConnections(CONFIG)
        self.connection = ClientConnection(self.clients, config, ServerState(), {})
        self.transport = MemoryTransport(self.connection)
        self.connection.connection_made(self.transport)

    async def send(self, part: bytes) -> None:
        """Deliver a part, as soon as the connection reads."""
        for _ in range(10_000):
            if self.transport.reading or self.transport.closed:
                break
            await asyncio.sleep(0)
        self.transport.receive(part)

    async def settle(self) -> None:
        """Let everything happen that needs no more bytes and no time."""
        written = -1
        while written < len(self.transport.written):
            written = len(self.transport.written)
            for _ in range(20):
                await asyncio.sleep(0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run each example in an event loop that must meet no exception."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        async def guarded() -> None:
            faults: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            await test(*args, **named)
            assert not faults

        asyncio.run(guarded())

    return run


CHUNKS = [b"x", b"\r\n\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"y" * 3000]


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A valid request, and the body of its answer."""
    path = b"/" + draw(st.text("abc%20", max_size=8)).encode()
    headers = draw(st.lists(st.sampled_from([b"a: b", b"x-empty:", b"Cookie: " + b"c" * 300]), max_size=3))
    lines = [b"host: localhost", *headers]
    kind = draw(st.sampled_from(["get", "length", "chunked", "upgrade"]))
    if kind == "get":
        head = b"\r\n".join([b"GET " + path + b" HTTP/1.1", *lines])
        return head + b"\r\n\r\n", expected("GET", path, b"")
    chunks = draw(
        st.lists(
            st.sampled_from([b"x", b"\r\n\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"y" * 3000]),
            max_size=4,
        )
    )
    body = b"".join(chunks)
    if kind == "chunked":
        wire = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        trailers = draw(st.sampled_from([b"", b"trailer: one\r\n", b"a: b\r\nc: d\r\n"]))
        lines, wire = [*lines, b"transfer-encoding: chunked"], wire + b"0\r\n" + trailers + b"\r\n"
    else:
        lines, wire = [*lines, b"content-length: %d" % len(body)], body
    if kind == "upgrade":
        lines += [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c"]
    head = b"\r\n".join([b"POST " + path + b" HTTP/1.1", *lines])
    return head + b"\r\n\r\n" + wire, expected("POST", path, body)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in parts. An even place is taken modulo the length, an odd one lies within an empty line."""
    empty_lines = [found.start() for found in re.finditer(b"\r\n\r\n", data)] or [0]
    within = [empty_lines[place % len(empty_lines)] + place // 2 % 4 for place in places if place % 2]
    anywhere = [place % (len(data) + 1) for place in places if not place % 2]
    at = sorted({0, len(data), *within, *anywhere})
    return [data[begin:end] for begin, end in pairwise(at)]


PLACES = st.lists(st.integers(0, 1 << 20), max_size=40)
FRAGMENTS = [b"\r\n" * 9, b"GET ", b"a: b\r\n" * 300]
PAUSES = st.lists(st.integers(0, 6), min_size=1, max_size=8)  # turns of the loop between two parts


@fuzzed
@given(st.lists(requests(), min_size=1, max_size=12), PLACES, PAUSES)
@in_loop
async def test_a_pipeline_cut_anywhere_has_the_same_answers_in_order(
    pipeline: list[tuple[bytes, bytes]], places: list[int], pauses: list[int]
) -> None:
    client = EchoClient()
    for number, part in enumerate(cut(b"".join(data for data, _ in pipeline), places)):
        await client.send(part)
        for _ in range(pauses[number % len(pauses)]):
            await asyncio.sleep(0)
    wanted = [answer for _, answer in pipeline]
    await client.settle()
    assert [answer.body for answer in answers(bytes(client.transport.written))] == wanted
    assert not client.transport.closed
    assert not client.connection.held_bytes


@fuzzed
@given(st.lists(requests(), min_size=1, max_size=3), st.integers(0, 1 << 20), st.binary(max_size=64), PLACES)
@in_loop
async def test_a_damaged_pipeline_never_crashes_and_ends_within_its_budgets(
    pipeline: list[tuple[bytes, bytes]], place: int, damage: bytes, places: list[int]
) -> None:
    data = b"".join(data for data, _ in pipeline)
    place %= len(data)
    await _abused(cut(data[:place] + damage + data[place + len(damage) :], places))


@fuzzed
@given(
    st.lists(
        st.one_of(st.binary(max_size=3000), st.sampled_from([b"\r\n" * 9, b"GET ", b"a: b\r\n" * 300])),
        max_size=20,
    )
)
@in_loop
async def test_any_bytes_never_crash_and_end_within_their_budgets(parts: list[bytes]) -> None:
    await _abused(parts)


async def _abused(parts: list[bytes]) -> None:
    client = EchoClient()
    longest = max(map(len, parts), default=0)
    for part in parts:
        if client.transport.reading:
            await client.send(part)
        assert client.connection.held_bytes <= HEAD_BYTES_MAX + AHEAD_BYTES_MAX + longest
    await client.settle()
    now = asyncio.get_running_loop().time()
    client.connection.check(now + LATE)  # what did not arrive is answered with a 408, and that lingers
    client.connection.check(now + 2 * LATE)
    await client.settle()
    assert client.transport.closed, "it is over each of its budgets of seconds"
    assert not len(client.clients)
    assert not client.connection.held_bytes
    answers(bytes(client.transport.written))  # whole ones


@in_loop
async def test_a_slow_reader_is_kept_for_as_long_as_it_reads_something() -> None:
    client = EchoClient()
    client.transport.blocked = True
    await client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await client.settle()
    now = asyncio.get_running_loop().time()
    for _ in range(20):
        client.connection.check(now)
        client.transport.read(1)
        now += 0.9 * CONFIG.write_seconds_max
        assert not client.transport.closed
        client.connection.check(now)
    assert not client.transport.closed
    client.connection.check(now + 1.1 * CONFIG.write_seconds_max)
    assert client.transport.closed
    assert client.clients.counters.ended["unread"] == 1
