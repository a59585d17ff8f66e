"""The items of a Responses request become the messages of a chat.

    message                                           a message of its role
    function_call, custom_tool_call                   a call in the assistant's message
    function_call_output, custom_tool_call_output     a message of role tool
    reasoning                                         the thoughts of the assistant's message
    web_search_call, mcp_call, …                      nothing: a server's own tool did that, elsewhere

What an assistant thought, said and called in a row is one message, as chat templates want it. Instructions stand before
all; where the input begins with a system message too, both are one, because many templates take one alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode, missing_field
from router.openai.tools.declared import joined_name
from shared.primitives.errors import RequestError

OBJECTS_PER_TOKEN_MAX = 4  # of the context: an item, and each of its parts, is an object

Json = dict[str, Any]

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
