"""The fields of POST /v1/responses, and the chat request that they mean.

Everything is served as a chat is: same bounds, same tokens. Nothing is stored, so a request brings the whole
conversation as its `input`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from router.openai.fields.generation_fields import NULL, ChatFields, SamplingFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode
from router.openai.fields.table import read_by_table
from router.openai.fields.thinking import ThinkingObject
from router.openai.responses.input import chat_messages

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (  # from answers of tools that this server does not run, and for those that store nothing
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", "reasoning.encrypted_content"),
    *("web_search_call.action.sources", "web_search_call.results"),
)
_FALSE = msgspec.Raw(b"false")
_FUNCTION = {"description": NULL, "parameters": NULL, "strict": _FALSE}  # what an answer says of every one
_CALLABLE = ("function", "custom", "namespace")  # other tools are a server's own


class ReasoningFields(msgspec.Struct):
    """How much a model thinks; summaries are not made."""

    effort: str | None = None
    summary: str | None = None


class TextFormatFields(msgspec.Struct):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = NULL
    strict: bool | None = None


class TextFields(msgspec.Struct):
    """The text of the answer."""

    format: TextFormatFields | None = None
    verbosity: str | None = None


class ResponsesFields(SamplingFields, kw_only=True):
    """The body of POST /v1/responses; null means the default everywhere."""

    model: str | None = None  # there is one
    input: msgspec.Raw
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
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


class RepeatedTool(msgspec.Struct, omit_defaults=True):
    """The fields of one tool that the answer repeats, as JSON."""

    type: str | None = None
    name: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    description: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    strict: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    format: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # of a custom tool
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # of a namespace
    function: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # a chat has the fields of a tool in an object
    custom: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    defer_loading: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    allowed_callers: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedFields:
    """What the answer repeats of its request. What a client can make long is JSON, of as many bytes as it says."""

    instructions: msgspec.Raw
    metadata: msgspec.Raw
    effort: msgspec.Raw
    text_format: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    max_output_tokens: int | None
    parallel_tool_calls: bool
    temperature: float | None
    top_logprobs: int
    top_p: float | None

    @property
    def held_bytes(self) -> int:
        """Bytes of all that is repeated, which are held as long as the answer takes."""
        long = (self.instructions, self.metadata, self.effort, self.text_format, self.tool_choice, self.tools)
        return sum(map(len, map(bytes, long)))


class ChatOfResponses(ChatFields, kw_only=True):
    """The chat request, with what was asked for: the answer repeats some of it."""

    asked: ResponsesFields


def read_responses(body: bytes | bytearray, context_len: int, ignored: Ignored) -> ChatOfResponses:
    """The chat request that a body means; what is passed over goes to `ignored`.

    Raises `RequestError` naming the field that is wrong.
    """
    asked = read_by_table(body, "responses", ResponsesFields, ignored)
    messages = chat_messages(asked.input, asked.instructions, context_len, ignored)
    _pass_over(asked, ignored)
    asks = LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs)
    return ChatOfResponses(
        asked=asked,
        model=asked.model,
        messages=msgspec.Raw(msgspec.json.encode(messages)),
        stream=asked.stream,
        max_completion_tokens=asked.max_output_tokens,
        **asked.given(),
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
        logprobs=True if asks else None,
        top_logprobs=asked.top_logprobs if asks else None,
        prompt_cache_key=asked.prompt_cache_key,
        cache_salt=asked.cache_salt,
    )


def repeated_fields(asked: ResponsesFields) -> RepeatedFields:
    """What the answer repeats, copied: it holds nothing of the body. Takes milliseconds, so it is for a thread."""
    return RepeatedFields(
        instructions=_json(asked.instructions),
        metadata=_json(asked.metadata or {}),
        effort=_json(asked.reasoning and asked.reasoning.effort),
        text_format=_json((asked.text and asked.text.format) or {"type": "text"}),
        tool_choice=_json("auto" if bytes(asked.tool_choice) == b"null" else asked.tool_choice),
        tools=_json(_repeated_tools(asked.tools)),
        max_output_tokens=asked.max_output_tokens,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        temperature=asked.temperature,
        top_logprobs=asked.top_logprobs or 0,
        top_p=asked.top_p,
    )


def _repeated_tools(given: msgspec.Raw) -> list[RepeatedTool]:
    """The tools of a request that are no server's own."""
    tools = [] if bytes(given) == b"null" else decode(given, list[RepeatedTool], "tools")
    for tool in tools:
        if tool.type == "function":
            for name, value in _FUNCTION.items():
                if getattr(tool, name) is msgspec.UNSET:
                    setattr(tool, name, value)
    return [tool for tool in tools if tool.type in _CALLABLE]


def _json(value: object) -> msgspec.Raw:
    """JSON on one line, as an event must be, however the client wrote the parts of it that are JSON."""
    return msgspec.Raw(msgspec.json.format(msgspec.json.encode(value), indent=-1))


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
        return NULL
    if text.format.type == "json_object":
        return msgspec.Raw(b'{"type":"json_object"}')
    schema = {"name": text.format.name, "schema": text.format.schema, "strict": text.format.strict}
    given = {name: value for name, value in schema.items() if value is not None}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": given}))
