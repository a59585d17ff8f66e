"""Writes an answer to its client, whole or as server-sent events, and watches for the client to hang up.

Either is written in portions, between which others have their turn. Two tasks serve an answer: one writes, another
waits for the end of the connection. Status and headers wait for the first token or a failure, so that a refusal is an
HTTP status and not an event inside a 200; after them a silent stream gets comment lines, and a failure is an `error`
event and the stream ends without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.core.effects import RequestFailed
from router.openai.answers.answer_bytes import HeldBytes
from router.openai.answers.json_parts import PORTION_BYTES, PartsWriter
from router.openai.answers.kept_answer import KeptAnswer
from router.openai.answers.openai_objects import AnswerObjects, Event, usage_json
from router.openai.answers.response_stream import ResponseStream, TextDelta
from router.openai.answers.resumable_streams import StreamMarks
from router.replies import Headers, send_failure, send_start
from router.request_context import RequestContext
from router.shell import FAILED
from shared.primitives.errors import RequestError

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"
SMALL_BYTES = PORTION_BYTES // 8  # of pieces whose events make one portion at most, whatever they hold


class AnswerWriter:
    """Writes one answer of `objects`, streamed or whole.

    `usage_chunk`: a stream ends with a chunk of usage. `marks`: events have ids. `headers`: of an answer that is 200.
    `held`: what it holds until its end.
    """

    def __init__(
        self,
        settings: RouterConfig,
        context: RequestContext,
        objects: AnswerObjects,
        held: HeldBytes,
        *,
        usage_chunk: bool,
        marks: StreamMarks | None = None,
        headers: Headers = (),
    ):
        self._held = held
        self._marks = marks
        self._settings = settings
        self._rid = context.rid
        self._connection = context.connection
        self._objects = objects
        self._usage_chunk = usage_chunk
        self._headers = headers
        self._heard_at: float | None = None  # when the client last got something; None: not even the headers

    async def stream(self, scope: Scope, receive: Receive, send: Send, answer: ResponseStream) -> None:
        """Write the answer as it comes, unless the client hangs up."""
        self._connection.watch_backlog(lambda: answer.backlog_bytes)
        async with _watch_disconnect(receive, answer):
            await self._stream(scope, send, answer)
        self._count_own_fault(answer)
        if answer.cut:
            self._connection.abort()
            while (await receive())["type"] != "http.disconnect":  # wait until that has happened
                pass

    async def whole(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        answer: ResponseStream,
        kept: KeptAnswer,
        writer: PartsWriter,
    ) -> None:
        """Write the answer once it is complete; `kept` is where it is until then. Raises `RequestError`."""
        async with _watch_disconnect(receive, answer) as gone:
            while pieces := await answer.take(None):
                answer.written(pieces)
                kept.add(pieces)
            self._count_own_fault(answer)
            if answer.failure:
                await send_failure(scope, send, answer.failure, self._settings.retry_after_seconds)
            elif not answer.abandoned:
                usage = usage_json(answer.usage.values(), answer.reasoning_tokens)
                await writer.send(send, gone, self._objects.whole(kept.choices(), usage), self._headers)

    def _count_own_fault(self, answer: ResponseStream) -> None:
        """Count an answer that could not be written: to the core, its request was given up by the client."""
        if answer.failure is FAILED:
            self._connection.count_refusal(FAILED.status)

    async def _stream(self, scope: Scope, send: Send, answer: ResponseStream) -> None:
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
            if answer.backlog_bytes <= SMALL_BYTES or len(pieces) == 1:  # as nearly always
                await self._send(send, self._events(pieces, opened))
                answer.written(pieces)
            else:
                await self._send_portions(send, answer, pieces, opened)
            if self._objects.held_bytes:
                self._settle(answer)
            pieces = await answer.take(self._silence_left())
        if not answer.abandoned:
            if failure := answer.failure:
                write = log.info if answer.ordered else log.warning
                write("stream.failed", rid=self._rid, status=failure.status, reason=failure.message)
            await send(_body(_last_events(answer, self._objects, self._usage_chunk), more=False))

    async def _send(self, send: Send, events: bytes) -> None:
        """Write the events, or a comment if it is time for one; at first whatever there is, for headers go with it.

        There may be no event of pieces that came: the client has them, or they are held until more is known.
        """
        comment = self._objects.waiting if self._silence_left() <= 0 else b""
        if events or comment or self._heard_at is None:
            await send(_body(events or comment))
            self._heard_at = asyncio.get_running_loop().time()

    def _silence_left(self) -> float:
        """Seconds until the client gets a comment, if it gets nothing else."""
        silence = self._settings.keepalive_seconds
        if self._heard_at is None:
            return silence
        return max(0.0, self._heard_at + silence - asyncio.get_running_loop().time())

    def _settle(self, answer: ResponseStream) -> None:
        """Count what the stream has to repeat at its end; one that has too much of it ends with an error."""
        try:
            self._held.reach(self._objects.held_bytes)
        except RequestError as error:
            answer.fail(RequestFailed(error.status, error.message, code=error.code, param=error.param))

    async def _send_portions(
        self, send: Send, answer: ResponseStream, pieces: list[TextDelta], opened: set[int]
    ) -> None:
        """All that the client does not have of many pieces; of much, a portion at a time."""
        begin, size, events = 0, 0, list[bytes]()
        for end, piece in enumerate(pieces, 1):
            events.append(self._events([piece], opened))
            size += len(events[-1])
            if size >= PORTION_BYTES and end < len(pieces):
                await self._send(send, b"".join(events))
                answer.written(pieces[begin:end], more=True)
                await asyncio.sleep(0)
                begin, size, events = end, 0, []
        await self._send(send, b"".join(events))
        answer.written(pieces[begin:] if begin else pieces)

    def _events(self, pieces: list[TextDelta], opened: set[int]) -> bytes:
        """Server-sent events of what the client does not have of some pieces; a choice is opened before its first."""
        events, marks = [], self._marks
        for piece in pieces:
            if piece.index not in opened:
                opened.add(piece.index)
                if (opening := self._objects.opening(piece.index)) and not (
                    marks and marks.has_opening(piece.index)
                ):
                    events.append((marks.opened(piece.index) if marks else b"") + _event(opening))
            unread = marks.unread(piece) if marks else piece
            if unread is not None and not unread.says_nothing:
                mark = marks.written(unread) if marks else b""
                events.append(mark + _event(self._objects.chunk(unread)))
        return b"".join(events)


@contextlib.asynccontextmanager
async def _watch_disconnect(receive: Receive, answer: ResponseStream) -> AsyncIterator[asyncio.Task[None]]:
    """Abandon the answer as soon as the client hangs up; gives the task that ends then."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.abandon()

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()


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
    counted = usage_json(answer.usage.values(), answer.reasoning_tokens)
    usage = _event(objects.usage_chunk(counted)) if with_usage else b""
    return usage + DONE if objects.done else usage


def _body(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
