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
from router.openai.fields.request_body import decode, missing_field
from router.openai.fields.table import read_by_table
from router.openai.fields.thinking import ThinkingObject
from router.openai.tools.declared import joined_name
from shared.primitives.errors import RequestError

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
    deadline_seconds: float | None = None


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
        deadline_seconds=asked.deadline_seconds,
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


# ---- the items of a Responses request become the messages of a chat --------------------------------------------------
#     message                                           a message of its role
#     function_call, custom_tool_call                   a call in the assistant's message
#     function_call_output, custom_tool_call_output     a message of role tool
#     reasoning                                         the thoughts of the assistant's message
#     web_search_call, mcp_call, …                      nothing: a server's own tool did that, elsewhere
#
# What an assistant thought, said and called in a row is one message, as chat templates want it. Instructions stand
# before all; where the input begins with a system message too, both are one, because many templates take one alone.


OBJECTS_PER_TOKEN_MAX = 4  # of the context: an item, and each of its parts, is an object

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_SYSTEM = ("system", "developer")
_OF_SERVERS = (  # what tools of other servers did, and what only they can read
    *("code_interpreter_call", "computer_call", "computer_call_output", "file_search_call"),
    *("image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
    *("program", "program_output", "tool_search_call", "tool_search_output", "web_search_call"),
)


class PartFields(msgspec.Struct):
    """One part of a content that is a list."""

    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None


class ItemFields(msgspec.Struct):
    """One item of `input`, whatever its type."""

    type: str = "message"
    role: str | None = None
    content: str | list[PartFields] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    call_id: str | None = None
    output: str | list[PartFields] | None = None


def chat_messages(
    given: msgspec.Raw, instructions: str | None, context_len: int, ignored: Ignored
) -> list[Json]:
    """The messages of a chat; raises `RequestError` naming the item that is wrong. Others go to `ignored`."""
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if bytes(given).startswith(b'"'):
        return [*messages, {"role": "user", "content": decode(given, str, "input")}]
    if bytes(given).count(b"{") > OBJECTS_PER_TOKEN_MAX * context_len:
        raise RequestError(
            f"input has more items than the model's context of {context_len} tokens can hold",
            param="input",
            code="context_length_exceeded",
        )
    items = decode(given, list[ItemFields], "input")
    if not items:
        raise RequestError("input must be a string, or a list of at least one item", param="input")
    for at, item in enumerate(items):
        _add(messages, item, f"input[{at}]", ignored)
    return _with_one_system(messages)


def _add(messages: list[Json], item: ItemFields, param: str, ignored: Ignored) -> None:
    if item.type == "message":
        role = item.role or _missing(f"{param}.role")
        may_be_empty = role == "assistant"
        content = _text(item.content, f"{param}.content", may_be_empty=may_be_empty)
        if role == "assistant":
            _assistant(messages, "content")["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif item.type in ("function_call", "custom_tool_call"):
        _assistant(messages).setdefault("tool_calls", []).append(_call(item, param))
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        called = item.call_id or _missing(f"{param}.call_id")
        output = _text(item.output, f"{param}.output", may_be_empty=True)
        messages.append({"role": "tool", "tool_call_id": called, "content": output})
    elif item.type == "reasoning":
        if item.content:
            thoughts = _text(item.content, f"{param}.content")
            _assistant(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = thoughts
    elif item.type in _OF_SERVERS:
        ignored.own(item.type)
    else:
        raise RequestError(
            f"{param}.type must be message, reasoning, or a call of a function or custom tool or its output: nothing is"
            " stored here, so send what the item stands for",
            param=f"{param}.type",
        )


def _call(item: ItemFields, param: str) -> Json:
    """A call as a chat has it, under the name by which the model is shown its tool."""
    called: Json = {"name": joined_name(item.namespace, item.name or _missing(f"{param}.name"))}
    call: Json = {"id": item.call_id or _missing(f"{param}.call_id")}
    if item.type == "custom_tool_call":
        return {**call, "type": "custom", "custom": {**called, "input": item.input or ""}}
    return {**call, "type": "function", "function": {**called, "arguments": item.arguments or "{}"}}


def _assistant(messages: list[Json], *without: str) -> Json:
    """The assistant's message that an item belongs to; a new one if the last one has something of `without`."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _with_one_system(messages: list[Json]) -> list[Json]:
    first = messages[:2]
    if len(first) == 2 and all(message["role"] in _SYSTEM for message in first):
        both = "\n\n".join(message["content"] for message in first)
        return [{"role": "system", "content": both}, *messages[2:]]
    return messages


def _text(content: str | list[PartFields] | None, param: str, *, may_be_empty: bool = False) -> str:
    """The text of a content. As in chats, what an assistant said and a tool gave may be null or an empty list."""
    if may_be_empty and not content:
        return ""
    if content is None:
        raise missing_field(param)
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"{param}[{at}].type must be a part of text: this server reads text only",
                param=f"{param}[{at}].type",
            )
        if _said(part) is None:
            raise missing_field(f"{param}[{at}].{'refusal' if part.type == 'refusal' else 'text'}")
    return "\n".join(_said(part) or "" for part in content)


def _said(part: PartFields) -> str | None:
    return part.refusal if part.type == "refusal" else part.text


def _missing(param: str) -> str:
    raise missing_field(param)
