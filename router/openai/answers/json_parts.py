"""JSON that is made in parts, so that an answer of any size is written as it is made and no part takes long to make.

A value that holds `Parts` is no plain JSON: `object_parts` and `list_parts` make its text. Others' work on the event
loop goes on between two portions; of all answers one at a time makes a portion (`PartsWriter`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.types import Send

from router.replies import Headers, send_start

PORTION_BYTES = 64 << 10  # what a client's connection takes at once
PORTION_SECONDS = 0.002  # after which a portion is sent as it is


class Parts:
    """The text of one JSON value, in parts."""

    def __init__(self, texts: Iterable[bytes]):
        self._texts = texts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._texts)


class KeptTexts:
    """Texts that are made once, when they are first read, and kept for whoever reads them later.

    Readers come one after the other: the next one begins when the last has read everything.
    """

    def __init__(self, texts: Iterable[bytes]):
        self._rest = iter(texts)
        self._kept: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        yield from self._kept
        for text in self._rest:
            self._kept.append(text)
            yield text


def object_parts(fields: Mapping[str, Any]) -> Parts:
    """An object, some of whose values may be `Parts`."""
    return Parts(_object_texts(fields))


def list_parts(items: Iterable[Any]) -> Parts:
    """A list, whose items may be `Parts`."""
    return Parts(_list_texts(items))


def _object_texts(fields: Mapping[str, Any]) -> Iterator[bytes]:
    begin = b"{"
    plain: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, Parts):
            plain[name] = value
            continue
        text = _members(plain)
        yield b'%b%b"%b":' % (begin, text and text + b",", name.encode())
        yield from value
        begin, plain = b",", {}
    text = _members(plain)
    yield (begin if text or begin == b"{" else b"") + text + b"}"


def _members(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields)[1:-1]


def _list_texts(items: Iterable[Any]) -> Iterator[bytes]:
    before = b"["
    for item in items:
        if isinstance(item, Parts):
            yield before
            yield from item
        else:
            yield before + msgspec.json.encode(item)
        before = b","
    yield b"]" if before == b"," else b"[]"


class PartsWriter:
    """Writes answers in portions, each to its own client; one for all answers of a router."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()  # fair: whoever waits longest is next

    async def send(self, send: Send, gone: asyncio.Future[None], parts: Parts, headers: Headers = ()) -> None:
        """Send a JSON answer with status 200, until it is complete or its client has `gone`."""
        texts = iter(parts)
        await send_start(send, 200, b"application/json", headers)
        body, more = await self._portion(texts)
        while more and not gone.done():
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body, more = await self._portion(texts, behind_others=True)
        if not more:
            await send({"type": "http.response.body", "body": body})

    async def _portion(self, texts: Iterator[bytes], *, behind_others: bool = False) -> tuple[bytes, bool]:
        """The next texts, and whether there are more."""
        async with self._making:
            if behind_others:
                await asyncio.sleep(0)
            now = asyncio.get_running_loop().time
            until, found, size = now() + PORTION_SECONDS, [], 0
            for text in texts:
                found.append(text)
                size += len(text)
                if size >= PORTION_BYTES or now() >= until:
                    return b"".join(found), True
            return b"".join(found), False
