"""The fields of OpenAI's requests: which are served, and what they become.

`CompletionFields` and `ChatFields` are the served ones, as they come in JSON; `sampling_params` makes the engine's
parameters of them. What becomes of all others is in `fields.known`. Prompts and messages are kept as bytes and checked
in `prompts`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from router.openai.answers.answer_bytes import AskedAnswer
from router.openai.answers.packed_list import PackedList
from router.openai.answers.prompt_echo import ToldPrompt, echoed_text
from router.openai.fields.ignored import Ignored
from router.openai.fields.table import read_by_table
from router.openai.fields.thinking import ReasoningObject, ThinkingObject, template_variables
from router.openai.prompts.prompts import Truncation
from router.openai.serving import TextOptions
from router.openai.tools.answer_reading import AnswerReading
from router.openai.tools.choice import NULL, ToolFields, ToolUse, tool_use
from router.openai.tools.structured_output import StructuredFields
from router.text.chat_template import ChatOptions
from router.text.stop_strings import StopPattern
from router.text.tokenizer import Tokenizer
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar
from shared.wire.sampled import TOP_LOGPROBS_MAX, TokenLogprobs
from shared.wire.sampling_params import SamplingParams, brief, validate

STOP_STRINGS_MAX = 16  # OpenAI takes 4, some clients send more
STOP_CHARS_MAX = 1024
COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(StructuredFields, kw_only=True):
    """What completions and chat completions have in common; null means the default everywhere."""

    caps_max_tokens: ClassVar[bool] = False  # of more than the context leaves, all that it leaves is taken

    model: str | None = None  # there is one
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    n: int | None = None  # answers to each prompt
    best_of: int | None = None  # n, if it is there
    cache_salt: str | None = None  # requests of different salts share no prefix cache
    prompt_cache_key: str | None = None  # requests of one key prefer one worker
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None  # what is cut off
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for it
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    prompt_logprobs: int | None = None  # how many of the likeliest, with each token of the prompt


class CompletionFields(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: msgspec.Raw
    logprobs: int | bool | None = None  # how many of the likeliest; false: none, as in chats
    add_special_tokens: bool | None = None
    echo: bool | None = None  # the prompt begins the answer, and its logprobs theirs


class ChatFields(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: msgspec.Raw
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | str | ThinkingObject | None = None
    think: bool | str | None = None
    reasoning: ReasoningObject | None = None
    disable_reasoning: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: str | None = None
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL

    def tool_use(self, ignored: Ignored) -> ToolUse:
        """The tools of the request; raises `RequestError` for what is wrong in them."""
        asked = ToolFields(**{name: getattr(self, name) for name in ToolFields.__struct_fields__})
        return tool_use(asked, ignored)


FieldsT = TypeVar("FieldsT", bound=GenerationFields)


def read_fields(body: bytes | bytearray, kind: type[FieldsT], ignored: Ignored) -> FieldsT:
    """The fields of a body; what is passed over goes to `ignored`. Raises `RequestError` for the first wrong one."""
    return read_by_table(body, "chat" if issubclass(kind, ChatFields) else "completions", kind, ignored)


def stop_strings(fields: GenerationFields) -> tuple[str, ...]:
    """The stop strings of a request, within their bounds."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > STOP_STRINGS_MAX:
        raise RequestError(f"stop takes at most {STOP_STRINGS_MAX} strings, got {len(stops)}", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARS_MAX:
            raise RequestError(
                f"stop strings must have 1 to {STOP_CHARS_MAX} characters, got {len(stop)}", param="stop"
            )
    return tuple(stops)


def text_options(fields: GenerationFields, reading: AnswerReading | None) -> TextOptions:
    """How the tokens of the answer become its text."""
    return TextOptions(
        stops=tuple(map(StopPattern, stop_strings(fields))),
        include_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        skip_special_tokens=fields.skip_special_tokens is not False,
        continues_prompt=isinstance(fields, CompletionFields),
        token_ids=bool(fields.return_token_ids),
        reading=reading,
    )


def chat_options(fields: ChatFields, use: ToolUse, tokenizer: Tokenizer, ignored: Ignored) -> ChatOptions:
    """How the messages are rendered; raises `RequestError` for options that exclude each other."""
    if fields.continue_final_message and fields.add_generation_prompt:
        raise RequestError(
            "continue_final_message continues the last message: add_generation_prompt must be false",
            param="add_generation_prompt",
        )
    return ChatOptions(
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=bool(fields.continue_final_message),
        variables=template_variables(fields, tokenizer, ignored),
        documents=fields.documents or None,
        tools=use.shown or None,
    )


def truncation(fields: GenerationFields) -> Truncation | None:
    """How much of a long prompt is kept; None: all of it."""
    tokens = fields.truncate_prompt_tokens
    if tokens is None:
        return None
    if tokens < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, got {brief(tokens)}", param="truncate_prompt_tokens"
        )
    return Truncation(tokens, keeps_end=fields.truncation_side != "right")


def asked_logprobs(fields: GenerationFields) -> int:
    """How many of the likeliest tokens are to be named with each; -1: no logprobs."""
    if isinstance(fields, CompletionFields):
        if fields.logprobs is True:
            raise RequestError("logprobs must be a number in a completion, got true", param="logprobs")
        return (
            -1
            if fields.logprobs is None or fields.logprobs is False
            else _within("logprobs", fields.logprobs)
        )
    assert isinstance(fields, ChatFields)
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return _within("top_logprobs", fields.top_logprobs or 0) if fields.logprobs else -1


def asked_prompt_logprobs(fields: GenerationFields) -> int:
    """How many likeliest tokens to name with each of the prompt, by its own field or `echo`; -1: no logprobs."""
    asked = -1 if fields.prompt_logprobs is None else _within("prompt_logprobs", fields.prompt_logprobs)
    return max(asked, asked_logprobs(fields)) if _echoes(fields) else asked


def told_prompt(
    fields: GenerationFields, token_ids: tuple[int, ...], choices: int, tokenizer: Tokenizer
) -> ToldPrompt | None:
    """How the answer tells of this prompt; None: not at all. Of an echo it takes as long as the prompt is."""
    if not _tells_of_prompt(fields):
        return None
    return ToldPrompt(
        token_ids,
        echoed_text(token_ids, tokenizer) if _echoes(fields) else None,
        echo_top=asked_logprobs(fields) if _echoes(fields) else -1,
        scored=fields.prompt_logprobs is not None,
        keeps_output=fields.max_tokens != 0,
        choices=choices,
        scores=PackedList(TokenLogprobs, asked_prompt_logprobs(fields)),
    )


def asked_answer(
    fields: GenerationFields, prompts: list[int], choices: int, context_len: int, repeated_bytes: int | None
) -> AskedAnswer:
    """What decides how much the answer will hold; `prompts` are the tokens of each.

    `repeated_bytes`: of the request, that an answer of /v1/responses repeats; None: it is of another path.
    """
    limit, likeliest, echoes = asked_max_tokens(fields)[1], asked_logprobs(fields), _echoes(fields)
    return AskedAnswer(
        prompts=prompts,
        choices=choices,
        output_tokens=max(max_new_tokens(fields, tokens, context_len) for tokens in prompts),
        limited=limit is not None or isinstance(fields, CompletionFields),
        likeliest=likeliest,
        echoes=echoes,
        echo_likeliest=likeliest if echoes else -1,
        told_likeliest=-1 if fields.prompt_logprobs is None else fields.prompt_logprobs,
        stream=bool(fields.stream),
        typed=repeated_bytes is not None,
        repeated_bytes=repeated_bytes or 0,
    )


def check_told(fields: GenerationFields) -> None:
    """Raise `RequestError` for what a stream does not tell of a prompt: its events are to be small."""
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not streamed: leave out stream", param="prompt_logprobs")
    if fields.stream and asked_prompt_logprobs(fields) >= 0:
        raise RequestError("echo with logprobs is not streamed: leave out one of the three", param="echo")


def _tells_of_prompt(fields: GenerationFields) -> bool:
    return fields.prompt_logprobs is not None or _echoes(fields)


def _echoes(fields: GenerationFields) -> bool:
    return isinstance(fields, CompletionFields) and bool(fields.echo)


def _within(name: str, asked: int) -> int:
    if not 0 <= asked <= TOP_LOGPROBS_MAX:
        raise RequestError(f"{name} must be between 0 and {TOP_LOGPROBS_MAX}, got {brief(asked)}", param=name)
    return asked


def include_usage(fields: GenerationFields) -> bool:
    """Whether a stream ends with a chunk of usage."""
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
    return bool(fields.stream_options.include_usage)


def continuous_usage(fields: GenerationFields, ignored: Ignored) -> bool:
    """Whether each chunk has the usage so far; as in vLLM, only where the last one has usage."""
    if fields.stream_options is None or not fields.stream_options.continuous_usage_stats:
        return False
    if not include_usage(fields):
        ignored.own("stream_options.continuous_usage_stats")
    return include_usage(fields)


def choice_count(fields: GenerationFields, most: int) -> int:
    """How many answers each prompt gets, at most `most` for all prompts together."""
    count = 1 if fields.n is None else fields.n
    if not 1 <= count <= most:
        raise RequestError(f"n must be between 1 and {most}, got {brief(count)}", param="n")
    best_of = count if fields.best_of is None else fields.best_of
    if best_of != count:
        reason = "answers are not ranked: ask for n of them" if best_of > count else "it must not be below n"
        raise RequestError(f"best_of is {brief(best_of)} and n is {count}; {reason}", param="best_of")
    return count


def asked_max_tokens(fields: GenerationFields) -> tuple[str, int | None]:
    """Name and value of the field that limits the output; None where the client gave none."""
    name, asked = "max_tokens", fields.max_tokens
    if isinstance(fields, ChatFields) and fields.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", fields.max_completion_tokens
    least = 0 if isinstance(fields, CompletionFields) and _tells_of_prompt(fields) else 1
    if asked is not None and asked < least:
        raise RequestError(f"{name} must be at least {least}, got {brief(asked)}", param=name)
    return name, asked


def max_new_tokens(fields: GenerationFields, prompt_len: int, context_len: int) -> int:
    """How many tokens may be generated behind a prompt; raises `RequestError` if they do not fit."""
    room = context_len - prompt_len
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_len} tokens and leaves no room for output"
            f" in the model's context of {context_len} tokens",
            param="messages" if isinstance(fields, ChatFields) else "prompt",
            code="context_length_exceeded",
        )
    name, asked = asked_max_tokens(fields)
    if asked is not None and asked > room and fields.caps_max_tokens:
        return room
    if asked is not None and asked > room:
        raise RequestError(
            f"{name} is {brief(asked)}, but a prompt of {prompt_len} tokens leaves {room}"
            f" of the model's context of {context_len} tokens",
            param=name,
            code="context_length_exceeded",
        )
    if asked is not None:
        return max(1, asked)  # of 0 the one is not told
    return room if isinstance(fields, ChatFields) else min(room, COMPLETION_MAX_TOKENS)


def sampling_params(
    fields: GenerationFields,
    max_tokens: int,
    vocab_size: int,
    defaults: Mapping[str, float],
    grammar: Grammar | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The engine's parameters; raises `RequestError` naming the field that is out of bounds."""
    if fields.min_tokens is not None and not 0 <= fields.min_tokens <= max_tokens:
        raise RequestError(
            f"min_tokens must be between 0 and max_tokens ({max_tokens}), got {brief(fields.min_tokens)}",
            param="min_tokens",
        )
    if grammar is not None and fields.ignore_eos:
        raise RequestError(
            "ignore_eos cannot go with a grammar, which says where the answer ends", param="ignore_eos"
        )
    given: dict[str, Any] = {
        name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None
    }
    if fields.top_k == -1:
        given["top_k"] = 0
    params = SamplingParams(
        max_new_tokens=max_tokens,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        min_new_tokens=fields.min_tokens or 0,
        logprobs=asked_logprobs(fields),
        prompt_logprobs=asked_prompt_logprobs(fields),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        grammar=grammar,
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        bad_words=bad_words,
        **{**defaults, **given},
    )
    validate(params, vocab_size)
    return params


_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token_id, value in given.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
        bias[int(token_id)] = value
    return bias
