"""POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages: from a body to requests to the core.

Plain ASGI under FastAPI, because they carry all the traffic. One HTTP request is one `ResponseStream` with a
choice for each prompt, and each choice is one request to the core. The way of tokens out, from the core to the bytes
of an answer, is composed in `write_answer`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial

from starlette.types import Receive, Scope, Send

from router.core.effects import ClientRequest
from router.core.requests.sampling_group import split_choices
from router.openai.answers.answer_bytes import AskedAnswer, HeldBytes
from router.openai.answers.answer_writer import AnswerWriter
from router.openai.answers.kept_answer import KeptAnswer
from router.openai.answers.logprob_objects import LogprobObjects, PackedList
from router.openai.answers.openai_objects import AnswerObjects, ChatObjects, CompletionObjects, ObjectHead
from router.openai.answers.prompt_echo import EchoChoice, PromptEcho, echoed_text
from router.openai.answers.response_stream import Choice, ResponseStream
from router.openai.answers.resumable_streams import AskedStream, StreamMarks, StreamTicket
from router.openai.fields.ignored import Ignored, in_own_words
from router.openai.fields.states import Endpoint
from router.openai.generation_request import AnswerOptions, GenerationRequest, RequestReader
from router.openai.messages.answer import MessagesObjects
from router.openai.messages.fields import too_long_error
from router.openai.prompts.prompts import TokenIds
from router.openai.responses.events import ResponsesObjects
from router.openai.serving import OpenAIServing
from router.openai.tools.answer_reading import TextOptions
from router.openai.tools.structured_output import bad_word_ids, check_masks
from router.parsers.answer_parser import ThoughtTokens
from router.replies import DisconnectedError, send_request_error
from router.request_context import Account, RequestContext, context_of, tenant_of
from router.shell import TokenSink
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from shared.wire.sampled import TokenLogprobs

PREFIXES: dict[Endpoint, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
}  # of ids


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    """What a body asks for, and the requests to the core that it takes.

    Lives as long as the answer, so it holds no view of the body, of which one keeps all.
    """

    options: AnswerOptions
    max_tokens: int  # that /v1/messages was asked for
    asked: AskedAnswer  # what decides how much the answer will hold
    logprobs: LogprobObjects | None
    requests: list[ClientRequest]  # a choice each
    echoes: list[PromptEcho]  # their prompts, if the answer repeats or scores them
    ignored: Ignored  # what of the body is passed over


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request when its body has come; times by the loop's clock."""

    rid: str
    tenant: str
    head_at: float
    body_at: float


def asks_for_prefill(scope: Scope) -> bool:
    """Whether `X-Segue-Local-Prefill: never` came; raises `RequestError` for another value."""
    value = next((value for name, value in scope["headers"] if name == b"x-segue-local-prefill"), None)
    if value is not None and value.strip().lower() != b"never":
        raise RequestError("X-Segue-Local-Prefill must be never, or left out")
    return value is not None


class CompletionEndpoint:
    """The ASGI endpoint of one of the paths."""

    def __init__(self, serving: OpenAIServing, endpoint: Endpoint):
        self._serving = serving
        self._settings = serving.settings
        self._endpoint = endpoint
        self._reader = RequestReader(serving, endpoint)
        self._typed = endpoint in ("responses", "messages")  # their events have types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever it holds."""
        try:
            context = context_of(scope)
            asked = AskedStream(self._serving.resuming, scope, self._serving.system_fingerprint() or "")
            by_prefill = asks_for_prefill(scope)
            wanted = await self._read_wanted(scope, receive, context, asked)
            if by_prefill:
                wanted.requests[:] = [replace(request, by_prefill=True) for request in wanted.requests]
            context.core_rids = [request.rid for request in wanted.requests]
            marks = self._begin(context.account, wanted, asked)
            objects = self._objects(asked.plan.ticket or context.rid, wanted)
            usage_chunk = wanted.options.usage or self._typed
            await write_answer(
                self._serving, context, scope, receive, send, wanted, objects, marks, usage_chunk=usage_chunk
            )
        except RequestError as error:
            if self._endpoint == "messages":
                error = too_long_error(error)
            await send_request_error(scope, send, error, self._settings.retry_after_seconds)
        except DisconnectedError:
            pass

    async def _read_wanted(
        self, scope: Scope, receive: Receive, context: RequestContext, asked: AskedStream
    ) -> WantedAnswer:
        """What the body asks for. The body lives no longer than this call."""
        context_len = self._serving.context_len()
        async with self._serving.bodies.read(scope, receive) as body:
            arrival = Arrival(
                context.rid, tenant_of(scope), context.head_at, asyncio.get_running_loop().time()
            )
            self._serving.prompts.counters.body_seconds.append(arrival.body_at - arrival.head_at)
            return await self._serving.prompts.run(
                arrival.tenant, receive, lambda: self._wanted(arrival, body, context_len, asked)
            )

    def _wanted(
        self, arrival: Arrival, body: bytearray, context_len: int, asked: AskedStream
    ) -> WantedAnswer:
        """What a body asks for. On a thread, with all bounds checked."""
        ignored = Ignored()
        request = self._reader.read(
            body, context_len, lambda seed, stream: asked.seed_for(body, seed, stream=stream), ignored
        )
        try:
            return self._tokenized(arrival, request, context_len, ignored)
        except RequestError as error:
            raise in_own_words(error, self._endpoint) from None

    def _tokenized(
        self, arrival: Arrival, request: GenerationRequest, context_len: int, ignored: Ignored
    ) -> WantedAnswer:
        tokenizer, answer, count = self._serving.tokenizer, request.answer, request.choices
        prompts = self._serving.prompts.token_ids(request.prompt, context_len, count)
        bad_words = bad_word_ids(request.bad_words, tokenizer)
        max_tokens = [request.limit.behind(len(token_ids), context_len) for token_ids in prompts]
        held = _asked_answer(request, [len(token_ids) for token_ids in prompts], max(max_tokens))
        held.check(self._serving.answer_bytes_max)
        total = count * len(prompts)
        rids = [f"{arrival.rid}-{index}" for index in range(total)] if total > 1 else [arrival.rid]
        reading = answer.text.reading
        requests: list[ClientRequest] = []
        echoes: list[PromptEcho] = []
        for index, token_ids in enumerate(prompts):
            grammar = request.grammar
            if reading:
                grammar = reading.grammar(tokenizer, token_ids, grammar, ignored)
            params = request.sampling_params(
                max_tokens[index],
                tokenizer.vocab_size,
                self._serving.sampling_defaults,
                grammar,
                bad_words,
                tokenizer.turn_ends if reading else (),
            )
            check_masks(params, tokenizer.eos_token_ids)
            first = ClientRequest(
                rid=arrival.rid,
                model=self._settings.model_name,
                token_ids=token_ids,
                params=params,
                tenant=arrival.tenant,
                cache_salt=request.cache_salt,
                session=request.session,
                deadline_seconds=request.deadline_seconds,
                eos_token_ids=tokenizer.eos_token_ids,
                head_at=arrival.head_at,
                body_at=arrival.body_at,
            )
            requests += split_choices(first, rids[index * count : (index + 1) * count])
            if request.tells_of_prompt:
                echoes += [_prompt_echo(request, token_ids, params.prompt_logprobs, tokenizer)] * count
        return WantedAnswer(
            options=answer,
            max_tokens=request.limit.tokens or 0,
            asked=held,
            logprobs=self._logprobs(request),
            requests=requests,
            echoes=echoes,
            ignored=ignored,
        )

    def _logprobs(self, request: GenerationRequest) -> LogprobObjects | None:
        if request.answer.likeliest < 0 and request.prompt_logprobs is None:
            return None
        self._serving.token_bytes.ready()  # on this thread: the event loop never waits for it
        return LogprobObjects(self._serving.token_bytes, request.answer.tokens_as_ids)

    def _begin(self, account: Account | None, wanted: WantedAnswer, asked: AskedStream) -> StreamMarks | None:
        """Take the tokens of the account, and give the marks of the events. Raises `RequestError`."""
        if self._typed and asked.plan.ticket is not None:
            raise RequestError("a stream of typed events cannot be resumed: leave out X-Segue-Resumable")
        now, options = asyncio.get_running_loop().time(), wanted.options
        tenant = wanted.requests[0].tenant
        if account is not None:
            account.reserve(wanted.requests, now)
        of_tokens = options.text.token_ids or bool(wanted.echoes) or options.likeliest >= 0
        return asked.begin(tenant, len(wanted.requests), tells_of_tokens=of_tokens, now=now)

    def _objects(self, began: str | StreamTicket, wanted: WantedAnswer) -> AnswerObjects:
        """Objects of an answer; it begins with this rid, or goes on as a ticket says."""
        rid, created = (began, int(time.time())) if isinstance(began, str) else (began.rid, began.created)
        options = wanted.options
        prompt_tokens = tuple(len(request.token_ids) for request in wanted.requests)
        head = ObjectHead(
            answer_id=f"{PREFIXES[self._endpoint]}{rid}",
            created=created,
            model=self._settings.model_name,
            system_fingerprint=self._serving.system_fingerprint(),
            chunk_usage=options.usage,
            prompt_tokens=prompt_tokens if options.usage_so_far else (),
            logprobs=wanted.logprobs,
        )
        if options.repeated is not None:
            return ResponsesObjects(head, options.repeated, options.tools)
        if self._endpoint == "messages":
            return MessagesObjects(head, len(wanted.requests[0].token_ids), wanted.max_tokens)
        if self._endpoint == "chat":
            return ChatObjects(head, older=options.tools.older)
        return CompletionObjects(head)


def _asked_answer(request: GenerationRequest, prompts: list[int], output_tokens: int) -> AskedAnswer:
    """What decides how much the answer will hold; `prompts` are the tokens of each."""
    answer = request.answer
    return AskedAnswer(
        prompts=prompts,
        choices=request.choices,
        output_tokens=output_tokens,
        limited=request.limit.tokens is not None or request.limit.default is not None,
        likeliest=answer.likeliest,
        echoes=request.echo,
        echo_likeliest=answer.likeliest if request.echo else -1,
        scored_likeliest=-1 if request.prompt_logprobs is None else request.prompt_logprobs,
        stream=answer.stream,
        typed=answer.repeated is not None,
        repeated_bytes=answer.repeated.held_bytes if answer.repeated else 0,
    )


def _prompt_echo(
    request: GenerationRequest, token_ids: TokenIds, likeliest: int, tokenizer: Tokenizer
) -> PromptEcho:
    """How the answer tells of a prompt. Of an echo it takes as long as the prompt is."""
    return PromptEcho(
        token_ids,
        echoed_text(token_ids, tokenizer) if request.echo else None,
        echo_top=request.answer.likeliest if request.echo else -1,
        scored=request.prompt_logprobs is not None,
        keeps_output=request.limit.tokens != 0,
        choices=request.choices,
        scores=PackedList(TokenLogprobs, likeliest),
    )


async def write_answer(
    serving: OpenAIServing,
    context: RequestContext,
    scope: Scope,
    receive: Receive,
    send: Send,
    wanted: WantedAnswer,
    objects: AnswerObjects,
    marks: StreamMarks | None,
    *,
    usage_chunk: bool,
) -> None:
    """Hand the requests of one answer to the core, and write what comes; those still running at the end are cancelled.

    Tokens pass in this order. What stands to the left is there for every answer, the rest if the request asks for it.

        WorkerReplies, RequestTable     a worker's message becomes `NewTokens`, an effect
        EffectPass, RouterShell         find the sink of the request:
            MeteredSink                     counts and pays, for the holder of an API key
            EchoChoice                      puts the prompt before the output
        Choice                          makes text of the output of one prompt, with
            Detokenizer                     tokens to text
            ThoughtTokens, AnswerParser     text to thoughts, calls and content
            StopStrings                     content up to the first of them
        ResponseStream                  keeps pieces of all choices until they are taken
        AnswerWriter                    takes them, whole or streamed, with
            KeptAnswer                      keeps them until the answer is complete, if it is not streamed
            StreamMarks                     leaves out what a resumed stream's client has, and gives ids
            AnswerObjects                   pieces to the JSON of one API, which the writer puts into events
        send                            of `KeyGuard` and `RequestIdMiddleware`, which add headers
        Exchange                        HTTP's framing
        ClientConnection, ClientOutput  to the socket
    """
    options, text, headers = wanted.options, wanted.options.text, wanted.ignored.headers
    with serving.answers.hold(wanted.requests[0].tenant) as holding:
        held = HeldBytes(holding, wanted.asked, serving.answer_bytes_max)
        wanted.ignored.log(context.rid)
        writer = AnswerWriter(
            serving.settings, context, objects, held, usage_chunk=usage_chunk, marks=marks, headers=headers
        )
        rids = [request.rid for request in wanted.requests]
        with serving.answer_of(rids, context.rid) as answer:
            for index, request in enumerate(wanted.requests):
                if answer.complete:
                    break
                echo = wanted.echoes[index] if wanted.echoes else None
                choice = _choice(index, request, answer, text, serving, echo)
                sink: TokenSink = choice
                if echo:
                    sink = EchoChoice(index, answer, echo, choice, streamed=options.stream)
                if context.account is not None:
                    request, sink = context.account.metered(request, sink)
                serving.shell.submit(request, sink)
            if options.stream:
                await writer.stream(scope, receive, send, answer)
            else:
                kept = KeptAnswer(wanted.echoes, options.likeliest, held)
                await writer.whole(scope, receive, send, answer, kept, serving.writing)


def _choice(
    index: int,
    request: ClientRequest,
    answer: ResponseStream,
    text: TextOptions,
    serving: OpenAIServing,
    echo: PromptEcho | None,
) -> Choice:
    parser = text.reading.parser(serving.tokenizer, request.token_ids) if text.reading else None
    return Choice(
        index,
        answer,
        _detokenizer(serving.tokenizer, request, text),
        StopStrings(text.stops, include=text.include_stop),
        partial(serving.shell.stop, request.rid),
        stop_token_ids=request.params.stop_token_ids,
        min_tokens=request.params.min_new_tokens,
        with_token_ids=text.token_ids,
        parser=parser,
        thoughts=ThoughtTokens(parser) if parser and parser.reads_thoughts else None,
        shows_thoughts=text.reading is None or text.reading.shows_thoughts,
        begins_at=len(echo.text) if echo else 0,
    )


def _detokenizer(tokenizer: Tokenizer, request: ClientRequest, options: TextOptions) -> Detokenizer:
    """What a request shows of its tokens. The one that ends an answer is no part of its text, unless it is a mark."""
    answer_format = options.reading.reader.format if options.reading else tokenizer.answers.format
    marks = tokenizer.marks(answer_format.special_tokens)
    ends = set() if request.params.ignore_eos else set(request.eos_token_ids) - marks
    asked = set(request.params.stop_token_ids)
    skip = tokenizer.special_token_ids if options.skip_special_tokens else frozenset()
    if options.reading is not None:
        skip -= marks
        asked -= marks if answer_format.channels else set()  # which the parser leaves out
    skip = skip - asked if options.include_stop else skip | asked | ends
    spelling = tokenizer.of_answers if options.reading else tokenizer.spelling_specials
    decoder = tokenizer if skip >= tokenizer.special_token_ids else spelling
    return Detokenizer(decoder, skip, request.token_ids if options.continues_prompt else ())
