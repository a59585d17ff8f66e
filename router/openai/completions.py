"""POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages: from a body to requests to the core.

Plain ASGI under FastAPI, because they carry all the traffic. One HTTP request is one `ResponseStream` with a
choice for each prompt, and each choice is one request to the core. What is written is `answer_writer`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from router.access.client_address import tenant_of
from router.access.usage_accounts import UsageAccount
from router.core.effects import ClientRequest
from router.core.requests.sampling_group import split_choices
from router.openai.answers.answer_bytes import AskedAnswer, HeldBytes
from router.openai.answers.answer_writer import AnswerWriter
from router.openai.answers.kept_answer import KeptAnswer
from router.openai.answers.logprob_objects import LogprobObjects
from router.openai.answers.openai_objects import AnswerObjects, ChatObjects, CompletionObjects, ObjectHead
from router.openai.answers.prompt_echo import ToldPrompt
from router.openai.answers.resumable_streams import AskedStream
from router.openai.answers.stream_ids import StreamTicket
from router.openai.fields.ignored import Ignored
from router.openai.fields.own_words import errors_in_words_of
from router.openai.fields.states import Endpoint
from router.openai.fields.thinking import separates_thoughts, shows_thoughts
from router.openai.messages.answer import MessagesObjects
from router.openai.messages.fields import read_messages, told_too_long
from router.openai.prompts.prompts import TokenIds
from router.openai.request_fields import (
    ChatFields,
    CompletionFields,
    GenerationFields,
    asked_answer,
    asked_logprobs,
    asked_max_tokens,
    chat_options,
    check_told,
    choice_count,
    continuous_usage,
    include_usage,
    max_new_tokens,
    read_fields,
    sampling_params,
    stop_strings,
    text_options,
    told_prompt,
    truncation,
)
from router.openai.responses.events import ResponsesObjects
from router.openai.responses.fields import (
    ChatOfResponses,
    RepeatedFields,
    read_responses,
    repeated_fields,
)
from router.openai.serving import OpenAIServing, TextOptions
from router.openai.tools.answer_reading import AnswerReading, answer_reading
from router.openai.tools.bad_words import bad_word_ids, check_bars
from router.openai.tools.choice import NO_TOOLS, ToolUse
from router.openai.tools.structured_output import asked_grammar
from router.replies.replies import DisconnectedError, send_request_error
from shared.primitives.errors import RequestError

PREFIXES: dict[Endpoint, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
}  # of ids


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    """What a body asks for, and the requests to the core that it takes.

    Lives as long as the answer, so it holds neither the fields nor a view of the body, of which one keeps all.
    """

    stream: bool
    usage: bool  # a stream ends with it
    usage_so_far: bool  # in each chunk
    likeliest: int  # tokens that are named with each of the output; -1: no logprobs
    logprobs: LogprobObjects | None
    max_tokens: int  # that /v1/messages was asked for
    options: TextOptions
    asked: AskedAnswer  # what decides how much the answer will hold
    use: ToolUse
    repeated: RepeatedFields | None  # by the answers of /v1/responses
    requests: list[ClientRequest]  # a choice each
    told: list[ToldPrompt]  # their prompts, if the answer tells of them
    ignored: Ignored  # what of the body is passed over


class CompletionEndpoint:
    """The ASGI endpoint of one of the paths."""

    def __init__(self, serving: OpenAIServing, endpoint: Endpoint):
        self._serving = serving
        self._settings = serving.settings
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever it holds."""
        try:
            asked = AskedStream(self._serving.resuming, scope, self._serving.system_fingerprint() or "")
            wanted = await self._read_wanted(scope, receive, asked)
            await self._answer(scope, receive, send, wanted, asked)
        except RequestError as error:
            if self._endpoint == "messages":
                error = told_too_long(error)
            await send_request_error(scope, send, error, self._settings.retry_after_seconds)
        except DisconnectedError:
            pass

    async def _read_wanted(self, scope: Scope, receive: Receive, asked: AskedStream) -> WantedAnswer:
        """What the body asks for. The body lives no longer than this call."""
        rid, tenant, context_len = scope["segue.rid"], tenant_of(scope), self._serving.context_len()
        async with self._serving.bodies.read(scope, receive) as body:
            return await self._serving.prompts.run(
                tenant, receive, lambda: self._wanted(rid, tenant, body, context_len, asked)
            )

    def _check(self, fields: GenerationFields) -> None:
        self._serving.check_model(fields.model)
        choice_count(fields, self._settings.prompts_max)
        asked_max_tokens(fields)
        include_usage(fields)
        stop_strings(fields)
        truncation(fields)
        asked_logprobs(fields)
        check_told(fields)

    def _read(self, body: bytearray, context_len: int, ignored: Ignored) -> GenerationFields:
        match self._endpoint:
            case "chat":
                return read_fields(body, ChatFields, ignored)
            case "completions":
                return read_fields(body, CompletionFields, ignored)
            case "responses":
                return read_responses(body, context_len, ignored)
            case "messages":
                return read_messages(body, context_len, ignored)

    def _wanted(
        self, rid: str, tenant: str, body: bytearray, context_len: int, asked: AskedStream
    ) -> WantedAnswer:
        """What a body asks for. On a thread, with all bounds checked."""
        ignored = Ignored()
        fields = self._read(body, context_len, ignored)
        ignored.chat_of = self._endpoint
        with errors_in_words_of(self._endpoint):
            self._check(fields)
            fields.seed = asked.seed_for(body, fields.seed, stream=bool(fields.stream))
            return self._wanted_of(rid, tenant, fields, context_len, ignored)

    def _wanted_of(
        self, rid: str, tenant: str, fields: GenerationFields, context_len: int, ignored: Ignored
    ) -> WantedAnswer:
        grammar = asked_grammar(fields, ignored)
        use = fields.tool_use(ignored) if isinstance(fields, ChatFields) else NO_TOOLS
        reading = self._reading(fields, use, ignored, structured=grammar is not None)
        prompts = self._token_ids(fields, use, context_len, ignored)
        tokenizer = self._serving.tokenizer
        bad_words = bad_word_ids(fields.bad_words or (), tokenizer)
        count = choice_count(fields, self._settings.prompts_max)
        total = count * len(prompts)
        rids = [f"{rid}-{index}" for index in range(total)] if total > 1 else [rid]
        repeated = repeated_fields(fields.asked) if isinstance(fields, ChatOfResponses) else None
        asked_for = asked_answer(
            fields,
            list(map(len, prompts)),
            count,
            context_len,
            repeated.held_bytes if repeated else None,
        )
        asked_for.check(self._serving.answer_bytes_max)
        requests: list[ClientRequest] = []
        told: list[ToldPrompt] = []
        for index, token_ids in enumerate(prompts):
            max_tokens = max_new_tokens(fields, len(token_ids), context_len)
            kept = reading.grammar(tokenizer, token_ids, grammar, ignored) if reading else grammar
            params = sampling_params(
                fields, max_tokens, tokenizer.vocab_size, self._serving.sampling_defaults, kept, bad_words
            )
            check_bars(params, tokenizer.eos_token_ids)
            request = ClientRequest(
                rid=rid,
                model=self._settings.model_name,
                token_ids=token_ids,
                params=params,
                tenant=tenant,
                cache_salt=_opaque(fields.cache_salt),
                session=_opaque(fields.prompt_cache_key),
                eos_token_ids=tokenizer.eos_token_ids,
            )
            requests += split_choices(request, rids[index * count : (index + 1) * count])
            if prompt := told_prompt(fields, token_ids, count, tokenizer):
                told += [prompt] * count
        return WantedAnswer(
            stream=bool(fields.stream),
            usage=include_usage(fields),
            usage_so_far=continuous_usage(fields, ignored),
            likeliest=asked_logprobs(fields),
            logprobs=self._logprobs(fields),
            max_tokens=fields.max_tokens or 0,
            options=text_options(fields, reading),
            asked=asked_for,
            use=use,
            repeated=repeated,
            requests=requests,
            told=told,
            ignored=ignored,
        )

    def _reading(
        self, fields: GenerationFields, use: ToolUse, ignored: Ignored, *, structured: bool
    ) -> AnswerReading | None:
        if not isinstance(fields, ChatFields):
            return None
        return answer_reading(
            self._serving.tokenizer,
            use,
            ignored,
            structured=structured,
            thoughts=separates_thoughts(fields),
            shows_thoughts=shows_thoughts(fields),
        )

    def _token_ids(
        self, fields: GenerationFields, use: ToolUse, context_len: int, ignored: Ignored
    ) -> list[TokenIds]:
        prompts = self._serving.prompts
        if isinstance(fields, ChatFields):
            return [
                prompts.chat(
                    fields.messages,
                    context_len,
                    chat_options(fields, use, self._serving.tokenizer, ignored),
                    truncation(fields),
                )
            ]
        assert isinstance(fields, CompletionFields)
        special = fields.add_special_tokens is not False
        count = choice_count(fields, self._settings.prompts_max)
        prompts_max = self._settings.prompts_max // count
        return prompts.completion(fields.prompt, context_len, prompts_max, truncation(fields), special)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        wanted: WantedAnswer,
        asked: AskedStream,
    ) -> None:
        rid, requests, options = scope["segue.rid"], wanted.requests, wanted.options
        typed = self._endpoint in ("responses", "messages")
        if typed and asked.plan.ticket is not None:
            raise RequestError("a stream of typed events cannot be resumed: leave out X-Segue-Resumable")
        now = asyncio.get_running_loop().time()
        account: UsageAccount | None = scope.get("segue.account")
        if account is not None:
            account.reserve(requests, now)
        of_tokens = options.token_ids or bool(wanted.told) or wanted.likeliest >= 0
        marks = asked.begin(tenant_of(scope), len(requests), tells_of_tokens=of_tokens, now=now)
        objects = self._objects(asked.plan.ticket or rid, wanted)
        stream = wanted.stream
        with self._serving.answers.hold(tenant_of(scope)) as holding:
            held = HeldBytes(holding, wanted.asked, self._serving.answer_bytes_max)
            wanted.ignored.log(rid)
            writer = AnswerWriter(
                self._settings,
                rid,
                objects,
                held,
                usage_chunk=wanted.usage or typed,
                marks=marks,
                headers=wanted.ignored.headers,
            )
            async with self._serving.submitted(rid, requests, options, wanted.told, stream=stream) as answer:
                if stream:
                    await writer.stream(scope, receive, send, answer)
                else:
                    kept = KeptAnswer(wanted.told, wanted.likeliest, held)
                    await writer.whole(scope, receive, send, answer, kept, self._serving.writing)

    def _objects(self, began: str | StreamTicket, wanted: WantedAnswer) -> AnswerObjects:
        """Objects of an answer; it begins with this rid, or goes on as a ticket says."""
        rid, created = (began, int(time.time())) if isinstance(began, str) else (began.rid, began.created)
        prompt_tokens = tuple(len(request.token_ids) for request in wanted.requests)
        head = ObjectHead(
            answer_id=f"{PREFIXES[self._endpoint]}{rid}",
            created=created,
            model=self._settings.model_name,
            system_fingerprint=self._serving.system_fingerprint(),
            chunk_usage=wanted.usage,
            prompt_tokens=prompt_tokens if wanted.usage_so_far else (),
            logprobs=wanted.logprobs,
        )
        if wanted.repeated is not None:
            return ResponsesObjects(head, wanted.repeated, wanted.use)
        if self._endpoint == "messages":
            return MessagesObjects(head, len(wanted.requests[0].token_ids), wanted.max_tokens)
        return ChatObjects(head) if self._endpoint == "chat" else CompletionObjects(head)

    def _logprobs(self, fields: GenerationFields) -> LogprobObjects | None:
        if asked_logprobs(fields) < 0 and fields.prompt_logprobs is None:
            return None
        self._serving.token_bytes.ready()  # on this thread: the event loop never waits for it
        return LogprobObjects(self._serving.token_bytes, bool(fields.return_tokens_as_token_ids))


def _opaque(text: str | None) -> str:
    """A key that differs for different texts and reveals none: workers and logs see it."""
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""
