"""Writes an answer to its client, whole or as server-sent events, and watches for the client to hang up.

Two tasks serve an answer: one writes, another waits for the end of the connection. Status and headers wait for the
first outcome, so that a refusal is an HTTP status and not an event inside a 200; after them a silent stream gets
comment lines, and a failure is an `error` event and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.http.openai_objects import AnswerObjects, Event, usage_json
from router.http.replies import Headers, send_failure, send_json, send_start
from router.http.response_stream import ResponseStream, TextDelta, joined
from router.http.resuming import StreamMarks

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"
ENTRIES_ON_THE_LOOP = 128  # tokens with logprobs whose JSON is made in a millisecond; of more on a thread


class AnswerWriter:
    """Writes one answer of `objects`.

    `usage_chunk`: a stream ends with a chunk of usage. `marks`: events have ids. `headers`: of an answer that is 200.
    """

    def __init__(
        self,
        settings: RouterConfig,
        rid: str,
        objects: AnswerObjects,
        *,
        usage_chunk: bool,
        marks: StreamMarks | None = None,
        headers: Headers = (),
    ):
        self._headers = headers
        self._marks = marks
        self._settings = settings
        self._rid = rid
        self._objects = objects
        self._usage_chunk = usage_chunk
        self._headers = headers

    async def write(
        self, scope: Scope, receive: Receive, send: Send, answer: ResponseStream, *, stream: bool
    ) -> None:
        """All of the answer, unless the client hangs up."""
        _watch_backlog(scope, answer)
        async with _watch_disconnect(receive, answer):
            await (self._stream if stream else self._whole)(scope, send, answer)
        if answer.cut:
            await _abort(scope, receive)

    async def _whole(self, scope: Scope, send: Send, answer: ResponseStream) -> None:
        texts: dict[int, list[TextDelta]] = {}
        while pieces := await answer.take(None):
            answer.written(pieces)
            for piece in pieces:
                texts.setdefault(piece.index, []).append(piece)
        if answer.failure:
            await send_failure(scope, send, answer.failure, self._settings.retry_after_seconds)
        elif not answer.abandoned:
            whole = [joined(texts[index]) for index in sorted(texts)]
            body = partial(self._objects.whole, whole, usage_json(answer.usage.values()))
            entries = sum(len(piece.entries) + len(piece.prompt_entries) for piece in whole)
            aside = entries > ENTRIES_ON_THE_LOOP
            answer_body = await asyncio.to_thread(body) if aside else body()
            await send_json(send, 200, answer_body, self._headers)

    async def _stream(self, scope: Scope, send: Send, answer: ResponseStream) -> None:
        silence = self._settings.keepalive_seconds
        pieces = await answer.take(None)  # however long it takes: a failure that comes first is the status
        if answer.abandoned:
            return
        if answer.failure and not pieces:
            await send_failure(scope, send, answer.failure, self._settings.retry_after_seconds)
            return
        headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *self._headers]
        await send_start(send, 200, b"text/event-stream; charset=utf-8", headers)
        opened: set[int] = set()
        while pieces or not answer.complete:
            await send(_body(self._events(pieces, opened) or self._objects.waiting))
            answer.written(pieces)
            pieces = await answer.take(silence)
        if not answer.abandoned:
            if failure := answer.failure:
                log.warning("stream.failed", rid=self._rid, status=failure.status, reason=failure.message)
            await send(_body(_last_events(answer, self._objects, self._usage_chunk), more=False))

    def _events(self, pieces: list[TextDelta], opened: set[int]) -> bytes:
        """Server-sent events of some pieces, of what the client does not have; a choice is opened before its first."""
        events, marks = [], self._marks
        for piece in pieces:
            if piece.index not in opened:
                opened.add(piece.index)
                if (opening := self._objects.opening(piece.index)) and not (
                    marks and marks.has_opening(piece.index)
                ):
                    events.append((marks.opened(piece.index) if marks else b"") + _event(opening))
            unread = marks.unread(piece) if marks else piece
            if unread is not None:
                mark = marks.written(unread) if marks else b""
                events.append(mark + _event(self._objects.chunk(unread)))
        return b"".join(events)


def _watch_backlog(scope: Scope, answer: ResponseStream) -> None:
    """Let the connection count what it has not taken of this answer."""
    watch: Callable[[Callable[[], int]], None] | None
    watch = scope.get("extensions", {}).get("segue.backlog", {}).get("watch")
    if watch:
        watch(lambda: answer.backlog_bytes)


@contextlib.asynccontextmanager
async def _watch_disconnect(receive: Receive, answer: ResponseStream) -> AsyncIterator[None]:
    """Abandon the answer as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.abandon()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def _abort(scope: Scope, receive: Receive) -> None:
    """Drop the connection with its unread data, and wait until that has happened."""
    abort: Callable[[], None] | None = scope.get("extensions", {}).get("segue.abort", {}).get("abort")
    if abort:
        abort()
        while (await receive())["type"] != "http.disconnect":
            pass


def _event(event: Event) -> bytes:
    """As server-sent events; one that has a type is named by it, as the Responses API wants it."""
    if isinstance(event, msgspec.Raw):
        return b"data: %b\n\n" % event
    if isinstance(event, list):
        return b"".join(map(_event, event))
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


def _last_events(answer: ResponseStream, objects: AnswerObjects, with_usage: bool) -> bytes:
    if answer.failure:
        return _event(objects.failed(answer.failure))
    usage = _event(objects.usage_chunk(usage_json(answer.usage.values()))) if with_usage else b""
    return usage + DONE if objects.done else usage


def _body(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
