"""The fields of POST /v1/responses, and the chat request that they mean.

Everything is served as a chat is: same bounds, same tokens. Nothing is stored, so a request brings the whole
conversation as its `input`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from router.http.fields.ignored import Ignored
from router.http.fields.table import read_by_table
from router.http.fields.thinking import ThinkingObject
from router.http.request_body import decode
from router.http.request_fields import ChatFields
from router.http.responses_input import chat_messages

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (  # from answers of tools that this server does not run, and for those that store nothing
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", "reasoning.encrypted_content"),
    *("web_search_call.action.sources", "web_search_call.results"),
)
_FUNCTION: Json = {"description": None, "parameters": None, "strict": False}  # fields that every answer has
_NULL = msgspec.Raw(b"null")


class ReasoningFields(msgspec.Struct):
    """How much a model thinks; summaries are not made."""

    effort: str | None = None
    summary: str | None = None


class TextFormatFields(msgspec.Struct):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = _NULL
    strict: bool | None = None


class TextFields(msgspec.Struct):
    """The text of the answer."""

    format: TextFormatFields | None = None
    verbosity: str | None = None


class ResponsesFields(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses; null means the default everywhere."""

    model: str | None = None  # there is one
    input: msgspec.Raw
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    tools: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    enable_thinking: bool | None = None
    thinking: bool | str | ThinkingObject | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None


class ChatOfResponses(ChatFields, kw_only=True):
    """The chat request, with what was asked for: the answer repeats it."""

    asked: ResponsesFields


def read_responses(body: bytes | bytearray, context_len: int, ignored: Ignored) -> ChatOfResponses:
    """The chat request that a body means; what is passed over goes to `ignored`.

    Raises `RequestError` naming the field that is wrong.
    """
    asked = read_by_table(body, "responses", ResponsesFields, ignored)
    messages = chat_messages(asked.input, asked.instructions, context_len, ignored)
    _pass_over(asked, ignored)
    asked.input = _NULL  # the fields live on, the body need not
    told = LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs)
    return ChatOfResponses(
        asked=asked,
        model=asked.model,
        messages=msgspec.Raw(msgspec.json.encode(messages)),
        stream=asked.stream,
        max_completion_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        stop=asked.stop,
        seed=asked.seed,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_response_format(asked.text),
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
        enable_thinking=asked.enable_thinking,
        thinking=asked.thinking,
        chat_template_kwargs=asked.chat_template_kwargs,
        logprobs=True if told else None,
        top_logprobs=asked.top_logprobs if told else None,
        prompt_cache_key=asked.prompt_cache_key,
        cache_salt=asked.cache_salt,
    )


def tools_of(asked: ResponsesFields) -> list[Json]:
    """The tools of a request that are no server's own, as the answer repeats them."""
    given = [] if bytes(asked.tools) == b"null" else decode(asked.tools, list[Json], "tools")
    known = {"function": _FUNCTION, "custom": {}, "namespace": {}}
    return [known[tool["type"]] | tool for tool in given if tool.get("type") in known]


def _pass_over(asked: ResponsesFields, ignored: Ignored) -> None:
    """Note what agents ask for by habit, and what an answer here never has."""
    if asked.reasoning and asked.reasoning.summary not in (None, "none"):
        ignored.own("reasoning.summary")
    for name in asked.include or ():
        if name in _INCLUDABLE:
            ignored.own(f"include.{name}")
        elif name != LOGPROBS:
            ignored.own("include")


def _response_format(text: TextFields | None) -> msgspec.Raw:
    if text is None or text.format is None or text.format.type == "text":
        return _NULL
    if text.format.type == "json_object":
        return msgspec.Raw(b'{"type":"json_object"}')
    schema = {"name": text.format.name, "schema": text.format.schema, "strict": text.format.strict}
    given = {name: value for name, value in schema.items() if value is not None}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": given}))
