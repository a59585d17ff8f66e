"""What one body asks for: `GenerationRequest`, which is all that leaves the reading of a body, of every endpoint.

    body ─► fields of JSON ─► chat or completion ─► GenerationRequest ─► token ids ─► requests to the core
            (`fields.table`)   (`responses`, `messages`)   here           (`prompts`)     (`completions`)

Each field is read once: its bound is checked there, and its value gets the form in which it is used. What comes behind
takes the value and knows no field. The bounds that depend on the prompt or on the vocabulary are those of
`SamplingParams`, which are checked where they are made of it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.openai.fields.generation_fields import (
    ChatFields,
    CompletionFields,
    GenerationFields,
    StreamOptions,
)
from router.openai.fields.ignored import Ignored, in_own_words
from router.openai.fields.states import Endpoint
from router.openai.fields.table import read_by_table
from router.openai.fields.thinking import separates_thoughts, shows_thoughts
from router.openai.messages.fields import read_messages
from router.openai.prompts.chat_messages import chat_options
from router.openai.prompts.prompts import ChatPrompt, CompletionPrompt, Truncation
from router.openai.responses.fields import ChatOfResponses, RepeatedFields, read_responses, repeated_fields
from router.openai.serving import OpenAIServing
from router.openai.tools.answer_reading import AnswerReading, TextOptions, answer_reading
from router.openai.tools.choice import NO_TOOLS, ToolUse, tool_use
from router.openai.tools.structured_output import asked_grammar
from router.text.stop_strings import StopPattern
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar
from shared.wire.sampled import TOP_LOGPROBS_MAX
from shared.wire.sampling_params import SamplingParams, brief, validate

STOP_STRINGS_MAX = 16  # OpenAI takes 4, some clients send more
STOP_CHARS_MAX = 1024
DEADLINE_SECONDS_MAX = 86_400  # a day
COMPLETION_MAX_TOKENS = 16  # OpenAI's default
ANY_SEED = -1  # as at vLLM, llama.cpp and text-generation-webui: programs send it where no seed is set


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimit:
    """How many tokens an answer may have."""

    field: str  # that sets it
    tokens: int | None  # None: no field does
    capped: bool  # of more than the context leaves, all that it leaves is taken
    default: int | None  # where no field sets it; None: all that the context leaves
    prompt: str  # the field that the prompt is in

    def behind(self, prompt_len: int, context_len: int) -> int:
        """How many may be generated behind a prompt; raises `RequestError` if they do not fit."""
        room = context_len - prompt_len
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_len} tokens and leaves no room for output"
                f" in the model's context of {context_len} tokens",
                param=self.prompt,
                code="context_length_exceeded",
            )
        if self.tokens is None:
            return room if self.default is None else min(room, self.default)
        if self.tokens <= room:
            return max(1, self.tokens)  # of 0 the one is not shown
        if self.capped:
            return room
        raise RequestError(
            f"{self.field} is {brief(self.tokens)}, but a prompt of {prompt_len} tokens leaves {room}"
            f" of the model's context of {context_len} tokens",
            param=self.field,
            code="context_length_exceeded",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What an answer looks like. Lives as long as the answer, so it holds no view of the body."""

    stream: bool
    usage: bool  # a stream ends with it
    usage_so_far: bool  # in each chunk
    likeliest: int  # tokens that are named with each of the output; -1: no logprobs
    tokens_as_ids: bool  # in logprobs
    text: TextOptions
    tools: ToolUse
    repeated: RepeatedFields | None  # by the answers of /v1/responses


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a body asks for."""

    prompt: ChatPrompt | CompletionPrompt
    answer: AnswerOptions
    choices: int  # answers to each prompt
    limit: OutputLimit
    echo: bool  # the prompt begins the answer
    prompt_logprobs: int | None  # how many of the likeliest, with each token of the prompt; None: no logprobs
    grammar: Grammar | None  # what the fields say of the answer's form
    bad_words: Sequence[str]
    sampling: Mapping[str, Any]  # parameters of sampling that are given, by name
    seed: int | None  # None: any
    min_tokens: int | None
    ignore_eos: bool
    logit_bias: Mapping[str, float]
    cache_salt: str  # requests of different salts share no prefix cache
    session: str  # requests of one session prefer one worker
    deadline_seconds: float  # until the first token; 0.0: none is asked for

    @property
    def tells_of_prompt(self) -> bool:
        """Whether the answer shows its prompt, or what is known of its tokens."""
        return self.echo or self.prompt_logprobs is not None

    def sampling_params(
        self,
        max_tokens: int,
        vocab_size: int,
        defaults: Mapping[str, float],
        grammar: Grammar | None,
        bad_words: tuple[tuple[int, ...], ...],
        ends: tuple[int, ...] = (),
    ) -> SamplingParams:
        """The engine's parameters for one prompt; raises `RequestError` naming the field that is out of bounds.

        `ends` are tokens that end this answer, beside those that the model's files name.
        """
        if self.min_tokens is not None and not 0 <= self.min_tokens <= max_tokens:
            raise RequestError(
                f"min_tokens must be between 0 and max_tokens ({max_tokens}), got {brief(self.min_tokens)}",
                param="min_tokens",
            )
        if grammar is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos cannot go with a grammar, which says where the answer ends", param="ignore_eos"
            )
        sampling = {**defaults, **self.sampling}
        if ends and not self.ignore_eos:
            sampling["stop_token_ids"] = tuple(dict.fromkeys((*sampling.get("stop_token_ids", ()), *ends)))
        params = SamplingParams(
            max_new_tokens=max_tokens,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            min_new_tokens=self.min_tokens or 0,
            ignore_eos=self.ignore_eos,
            logprobs=self.answer.likeliest,
            prompt_logprobs=self._scored(),
            logit_bias=_logit_bias(self.logit_bias),
            grammar=grammar,
            bad_words=bad_words,
            **sampling,
        )
        validate(params, vocab_size)
        return params

    def _scored(self) -> int:
        """How many of the likeliest a worker names with each token of the prompt; -1: no logprobs."""
        asked = -1 if self.prompt_logprobs is None else _within("prompt_logprobs", self.prompt_logprobs)
        return max(asked, self.answer.likeliest) if self.echo else asked


class RequestReader:
    """Reads the bodies of one endpoint. For the tokenizer's threads."""

    def __init__(self, serving: OpenAIServing, endpoint: Endpoint):
        self._serving = serving
        self._endpoint = endpoint

    def read(
        self,
        body: bytes | bytearray,
        context_len: int,
        seed_for: Callable[[int | None, bool], int | None],
        ignored: Ignored,
    ) -> GenerationRequest:
        """What a body asks for; what is passed over goes to `ignored`.

        `seed_for` gives the seed to use for the one that the body says, of a stream or not. Raises `RequestError` for
        the first field that is wrong.
        """
        fields = self._fields(body, context_len, ignored)
        ignored.chat_of = self._endpoint
        try:
            return self._request(fields, seed_for, ignored)
        except RequestError as error:
            raise in_own_words(error, self._endpoint) from None

    def _fields(
        self, body: bytes | bytearray, context_len: int, ignored: Ignored
    ) -> ChatFields | CompletionFields:
        match self._endpoint:
            case "chat":
                return read_by_table(body, "chat", ChatFields, ignored)
            case "completions":
                return read_by_table(body, "completions", CompletionFields, ignored)
            case "responses":
                return read_responses(body, context_len, ignored)
            case "messages":
                return read_messages(body, context_len, ignored)

    def _request(
        self,
        fields: ChatFields | CompletionFields,
        seed_for: Callable[[int | None, bool], int | None],
        ignored: Ignored,
    ) -> GenerationRequest:
        """The value that chats and completions become. The order in which fields are read says which error is told."""
        self._serving.check_model(fields.model)
        chat = fields if isinstance(fields, ChatFields) else None
        stream = bool(fields.stream)
        echo = isinstance(fields, CompletionFields) and bool(fields.echo)
        choices = _choices(fields, self._serving.settings.prompts_max)
        limit = _limit(fields, echo=echo)
        usage, usage_so_far = _usage(fields.stream_options, stream=stream)
        stops = _stops(fields.stop)
        truncation = _truncation(fields)
        likeliest = _likeliest(fields)
        _check_streamed(fields.prompt_logprobs, stream=stream, echoed=likeliest if echo else -1)
        seed = seed_for(None if fields.seed == ANY_SEED else fields.seed, stream)
        grammar = asked_grammar(fields, ignored)
        tools = NO_TOOLS if chat is None else tool_use(chat, ignored)
        structured = grammar is not None
        reading = None if chat is None else self._reading(chat, tools, ignored, structured=structured)
        prompt = self._prompt(fields, tools, truncation, ignored)
        if usage_so_far and not usage:
            ignored.own("stream_options.continuous_usage_stats")
        return GenerationRequest(
            prompt=prompt,
            answer=AnswerOptions(
                stream=stream,
                usage=usage,
                usage_so_far=usage_so_far and usage,
                likeliest=likeliest,
                tokens_as_ids=bool(fields.return_tokens_as_token_ids),
                text=TextOptions(
                    stops=stops,
                    include_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
                    skip_special_tokens=fields.skip_special_tokens is not False,
                    continues_prompt=chat is None or bool(chat.continue_final_message),
                    token_ids=bool(fields.return_token_ids),
                    reading=reading,
                ),
                tools=tools,
                repeated=repeated_fields(fields.asked) if isinstance(fields, ChatOfResponses) else None,
            ),
            choices=choices,
            limit=limit,
            echo=echo,
            prompt_logprobs=fields.prompt_logprobs,
            grammar=grammar,
            bad_words=fields.bad_words or (),
            sampling=_sampling(fields),
            seed=seed,
            min_tokens=fields.min_tokens,
            ignore_eos=bool(fields.ignore_eos),
            logit_bias=fields.logit_bias or {},
            cache_salt=_opaque(fields.cache_salt),
            session=_opaque(fields.prompt_cache_key),
            deadline_seconds=_deadline(fields.deadline_seconds),
        )

    def _reading(
        self, fields: ChatFields, tools: ToolUse, ignored: Ignored, *, structured: bool
    ) -> AnswerReading | None:
        return answer_reading(
            self._serving.tokenizer,
            tools,
            ignored,
            structured=structured,
            thoughts=separates_thoughts(fields),
            shows_thoughts=shows_thoughts(fields),
        )

    def _prompt(
        self,
        fields: ChatFields | CompletionFields,
        tools: ToolUse,
        truncation: Truncation | None,
        ignored: Ignored,
    ) -> ChatPrompt | CompletionPrompt:
        if isinstance(fields, CompletionFields):
            return CompletionPrompt(fields.prompt, truncation, fields.add_special_tokens is not False)
        options = chat_options(fields, tools.shown, self._serving.tokenizer, ignored)
        return ChatPrompt(fields.messages, options, truncation)


# ---- single fields, in the order in which they are read ----------------------------------------------------------


def _choices(fields: GenerationFields, most: int) -> int:
    """How many answers each prompt gets, at most `most` for all prompts together."""
    count = 1 if fields.n is None else fields.n
    if not 1 <= count <= most:
        raise RequestError(f"n must be between 1 and {most}, got {brief(count)}", param="n")
    best_of = count if fields.best_of is None else fields.best_of
    if best_of != count:
        reason = "answers are not ranked: ask for n of them" if best_of > count else "it must not be below n"
        raise RequestError(f"best_of is {brief(best_of)} and n is {count}; {reason}", param="best_of")
    return count


def _limit(fields: ChatFields | CompletionFields, *, echo: bool) -> OutputLimit:
    field, tokens, least = "max_tokens", fields.max_tokens, 1
    if isinstance(fields, CompletionFields):
        least = 0 if echo or fields.prompt_logprobs is not None else 1  # the answer may be the prompt alone
    elif fields.max_completion_tokens is not None:
        field, tokens = "max_completion_tokens", fields.max_completion_tokens
    if tokens is not None and tokens < least:
        raise RequestError(f"{field} must be at least {least}, got {brief(tokens)}", param=field)
    completion = isinstance(fields, CompletionFields)
    return OutputLimit(
        field=field,
        tokens=tokens,
        capped=fields.caps_max_tokens,
        default=COMPLETION_MAX_TOKENS if completion else None,
        prompt="prompt" if completion else "messages",
    )


def _usage(options: StreamOptions | None, *, stream: bool) -> tuple[bool, bool]:
    """Whether a stream ends with a chunk of usage, and whether each chunk is to have the usage so far."""
    if options is None:
        return False, False
    if not stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def _stops(stop: str | list[str] | None) -> tuple[StopPattern, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > STOP_STRINGS_MAX:
        raise RequestError(f"stop takes at most {STOP_STRINGS_MAX} strings, got {len(stops)}", param="stop")
    for one in stops:
        if not 1 <= len(one) <= STOP_CHARS_MAX:
            raise RequestError(
                f"stop strings must have 1 to {STOP_CHARS_MAX} characters, got {len(one)}", param="stop"
            )
    return tuple(map(StopPattern, stops))


def _truncation(fields: GenerationFields) -> Truncation | None:
    """How much of a long prompt is kept; None: all of it."""
    tokens = fields.truncate_prompt_tokens
    if tokens is None:
        return None
    if tokens < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, got {brief(tokens)}", param="truncate_prompt_tokens"
        )
    return Truncation(tokens, keeps_end=fields.truncation_side != "right")


def _likeliest(fields: ChatFields | CompletionFields) -> int:
    """How many of the likeliest tokens are to be named with each; -1: no logprobs."""
    if isinstance(fields, ChatFields):
        if fields.top_logprobs and not fields.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        return _within("top_logprobs", fields.top_logprobs or 0) if fields.logprobs else -1
    if fields.logprobs is True:
        raise RequestError("logprobs must be a number in a completion, got true", param="logprobs")
    if fields.logprobs is None or fields.logprobs is False:
        return -1
    return _within("logprobs", fields.logprobs)


def _within(name: str, asked: int) -> int:
    if not 0 <= asked <= TOP_LOGPROBS_MAX:
        raise RequestError(f"{name} must be between 0 and {TOP_LOGPROBS_MAX}, got {brief(asked)}", param=name)
    return asked


def _check_streamed(prompt_logprobs: int | None, *, stream: bool, echoed: int) -> None:
    """Raise `RequestError` for what a stream does not tell of a prompt: its events are to be small."""
    if stream and prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not streamed: leave out stream", param="prompt_logprobs")
    if stream and echoed >= 0:
        raise RequestError("echo with logprobs is not streamed: leave out one of the three", param="echo")


def _sampling(fields: GenerationFields) -> dict[str, Any]:
    given = fields.given()
    if fields.top_k == -1:
        given["top_k"] = 0
    if fields.top_p == 0:  # the smallest share of the likeliest is one token
        given |= {"top_p": 1.0, "temperature": 0.0}
    if fields.stop_token_ids:
        given["stop_token_ids"] = tuple(fields.stop_token_ids)
    if fields.allowed_token_ids:
        given["allowed_token_ids"] = tuple(fields.allowed_token_ids)
    return given


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token_id, value in given.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
        bias[int(token_id)] = value
    return bias


def _opaque(text: str | None) -> str:
    """A key that differs for different texts and reveals none: workers and logs see it."""
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""


def _deadline(seconds: float | None) -> float:
    if seconds is None:
        return 0.0
    if not 0 < seconds <= DEADLINE_SECONDS_MAX:
        raise RequestError(
            f"deadline_seconds must be above 0 and at most {DEADLINE_SECONDS_MAX}, got {brief(seconds)}",
            param="deadline_seconds",
        )
    return float(seconds)
