"""POST /v1/completions and /v1/chat/completions: from the body to the last byte of the answer.

Plain ASGI under FastAPI, because these two carry all the traffic. One HTTP request is one `ResponseStream` with a
choice for each prompt, and each choice is one request to the core. Two tasks serve it: one writes, another waits for
the client to hang up. Status and headers wait for the first outcome, so that a refusal is an HTTP status and not an
event inside a 200; after them a silent stream gets comment lines, and a failure is an `error` event and the stream
ends without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.core.effects import ClientRequest, RequestFailed
from router.http.client_address import tenant_of
from router.http.openai_objects import AnswerObjects, ChatObjects, CompletionObjects, ObjectHead, usage_json
from router.http.prompts import NO_BYTES, Prompts, TokenIds
from router.http.replies import (
    DisconnectedError,
    failure_body,
    send_failure,
    send_json,
    send_request_error,
    send_start,
)
from router.http.request_body import BodyReader
from router.http.request_fields import (
    ChatFields,
    CompletionFields,
    GenerationFields,
    asked_max_tokens,
    include_usage,
    max_new_tokens,
    read_fields,
    sampling_params,
    stop_strings,
)
from router.http.response_stream import Choice, ResponseStream, TextDelta
from router.shell import RouterShell
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopPattern, StopStrings
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError

log = structlog.get_logger(__name__)

COMMENT = b": waiting\n\n"  # server-sent events ignore lines that begin with a colon
DONE = b"data: [DONE]\n\n"


class OpenAIServing:
    """What the endpoints share: the parts of the router, and the answers being written."""

    def __init__(self, shell: RouterShell, tokenizer: Tokenizer, prompts: Prompts, settings: RouterConfig):
        self.settings = settings
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.bodies = BodyReader(settings)
        self._shell = shell
        self._answers: set[ResponseStream] = set()

    def context_len(self) -> int:
        """Tokens that prompt and output may have together; raises `RequestError` (503) while unknown."""
        served = self._shell.context_len(self.settings.model_name)
        known = [length for length in (self.tokenizer.context_len, served) if length]
        if not known:
            raise RequestError("no worker has named the model's context length yet", status=503)
        return min(known)

    def check_model(self, name: str) -> None:
        """Raise `RequestError` (404) for a model that is not served here."""
        if name != self.settings.model_name:
            raise RequestError(
                f"the model does not exist; this server has {self.settings.model_name}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def fail_all(self, failure: RequestFailed) -> None:
        """End every answer that is being written."""
        for answer in list(self._answers):
            answer.fail(failure)

    @contextlib.asynccontextmanager
    async def submitted(
        self, rid: str, requests: list[ClientRequest], stops: list[StopPattern], context: bool
    ) -> AsyncIterator[ResponseStream]:
        """Hand `requests` to the core for one answer; those still running at the end are cancelled."""
        rids = [request.rid for request in requests]

        def cancel() -> None:
            for one in rids:
                self._shell.cancel(one)

        answer = ResponseStream(len(requests), self.settings.stream_backlog_bytes, cancel)
        self._answers.add(answer)
        try:
            for index, request in enumerate(requests):
                if not answer.complete:
                    self._shell.submit(request, self._choice(index, request, answer, stops, context))
            yield answer
        finally:
            self._answers.discard(answer)
            cancel()
            if answer.cut:
                log.warning("stream.cut", rid=rid)

    def _choice(
        self,
        index: int,
        request: ClientRequest,
        answer: ResponseStream,
        stops: list[StopPattern],
        context: bool,
    ) -> Choice:
        skip = self.tokenizer.special_token_ids | set(request.params.stop_token_ids)
        detokenizer = Detokenizer(self.tokenizer, skip, request.token_ids if context else ())
        return Choice(index, answer, detokenizer, StopStrings(stops), lambda: self._shell.stop(request.rid))


class CompletionEndpoint:
    """The ASGI endpoint of one of the two paths."""

    def __init__(self, serving: OpenAIServing, *, chat: bool):
        self._serving = serving
        self._settings = serving.settings
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever it holds."""
        try:
            rid, tenant, context_len = scope["segue.rid"], tenant_of(scope), self._serving.context_len()
            async with self._serving.bodies.read(scope, receive) as body:
                fields, requests = await self._serving.prompts.run(
                    tenant, receive, lambda: self._requests(rid, tenant, body, context_len)
                )
            await self._answer(scope, receive, send, fields, requests)
        except RequestError as error:
            await send_request_error(scope, send, error, self._settings.retry_after_seconds)
        except DisconnectedError:
            pass

    def _fields(self, body: bytearray) -> GenerationFields:
        fields = read_fields(body, ChatFields) if self._chat else read_fields(body, CompletionFields)
        self._serving.check_model(fields.model)
        asked_max_tokens(fields)
        include_usage(fields)
        stop_strings(fields)
        return fields

    def _requests(
        self, rid: str, tenant: str, body: bytearray, context_len: int
    ) -> tuple[GenerationFields, list[ClientRequest]]:
        """The fields of a body, and one request to the core for each prompt. On a thread, with all bounds checked."""
        fields = self._fields(body)
        prompts = self._token_ids(fields, context_len)
        tokenizer = self._serving.tokenizer
        requests = []
        for index, token_ids in enumerate(prompts):
            max_tokens = max_new_tokens(fields, len(token_ids), context_len)
            requests.append(
                ClientRequest(
                    rid=rid if len(prompts) == 1 else f"{rid}-{index}",
                    model=self._settings.model_name,
                    token_ids=token_ids,
                    params=sampling_params(fields, max_tokens, tokenizer.vocab_size),
                    tenant=tenant,
                    cache_salt=_opaque(fields.cache_salt),
                    session=_opaque(fields.prompt_cache_key),
                    eos_token_ids=tokenizer.eos_token_ids,
                )
            )
        return fields, requests

    def _token_ids(self, fields: GenerationFields, context_len: int) -> list[TokenIds]:
        prompts = self._serving.prompts
        if isinstance(fields, ChatFields):
            messages, fields.messages = fields.messages, NO_BYTES  # the fields live on, the body need not
            return [prompts.chat(messages, context_len)]
        assert isinstance(fields, CompletionFields)
        prompt, fields.prompt = fields.prompt, NO_BYTES
        return prompts.completion(prompt, context_len)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        fields: GenerationFields,
        requests: list[ClientRequest],
    ) -> None:
        objects = self._objects(scope["segue.rid"], fields)
        stops = [StopPattern(stop) for stop in stop_strings(fields)]
        write = partial(self._stream, scope["segue.rid"]) if fields.stream else self._whole
        async with self._serving.submitted(scope["segue.rid"], requests, stops, not self._chat) as answer:
            _watch_backlog(scope, answer)
            async with _watch_disconnect(receive, answer):
                await write(send, answer, objects, include_usage(fields))
            if answer.cut:
                await _abort(scope, receive)

    def _objects(self, rid: str, fields: GenerationFields) -> AnswerObjects:
        head = ObjectHead(
            answer_id=f"{'chatcmpl' if self._chat else 'cmpl'}-{rid}",
            created=int(time.time()),
            model=fields.model,
            chunk_usage=include_usage(fields),
        )
        return ChatObjects(head) if self._chat else CompletionObjects(head)

    async def _whole(
        self, send: Send, answer: ResponseStream, objects: AnswerObjects, with_usage: bool
    ) -> None:
        del with_usage  # an answer that is not streamed always has usage
        texts: dict[int, list[TextDelta]] = {}
        while pieces := await answer.take(None):
            answer.written(pieces)
            for piece in pieces:
                texts.setdefault(piece.index, []).append(piece)
        if answer.failure:
            await send_failure(send, answer.failure, self._settings.retry_after_seconds)
        elif not answer.abandoned:
            whole = [_joined(texts[index]) for index in sorted(texts)]
            await send_json(send, 200, objects.whole(whole, usage_json(answer.usage.values())))

    async def _stream(
        self, rid: str, send: Send, answer: ResponseStream, objects: AnswerObjects, with_usage: bool
    ) -> None:
        silence = self._settings.keepalive_seconds
        pieces = await answer.take(None)  # however long it takes: a failure that comes first is the status
        if answer.abandoned:
            return
        if answer.failure and not pieces:
            await send_failure(send, answer.failure, self._settings.retry_after_seconds)
            return
        headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send_start(send, 200, b"text/event-stream; charset=utf-8", headers)
        opened: set[int] = set()
        while pieces or not answer.complete:
            await send(_body(_events(pieces, objects, opened) if pieces else COMMENT))
            answer.written(pieces)
            pieces = await answer.take(silence)
        if not answer.abandoned:
            if failure := answer.failure:
                log.warning("stream.failed", rid=rid, status=failure.status, reason=failure.message)
            await send(_body(_last_events(answer, objects, with_usage), more=False))


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


def _opaque(text: str | None) -> str:
    """A key that differs for different texts and reveals none: workers and logs see it."""
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""


def _joined(pieces: list[TextDelta]) -> TextDelta:
    return TextDelta(pieces[0].index, "".join(piece.text for piece in pieces), pieces[-1].finish_reason)


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _events(pieces: list[TextDelta], objects: AnswerObjects, opened: set[int]) -> bytes:
    """Server-sent events of some pieces; a choice is opened before its first."""
    events = []
    for piece in pieces:
        if piece.index not in opened:
            opened.add(piece.index)
            if opening := objects.opening(piece.index):
                events.append(_event(opening))
        events.append(_event(objects.chunk(piece)))
    return b"".join(events)


def _last_events(answer: ResponseStream, objects: AnswerObjects, with_usage: bool) -> bytes:
    if answer.failure:
        return _event(failure_body(answer.failure))
    usage = _event(objects.usage_chunk(usage_json(answer.usage.values()))) if with_usage else b""
    return usage + DONE


def _body(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
