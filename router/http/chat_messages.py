"""The messages of a chat, as they come in JSON, and as chat templates want them.

Templates take a call's arguments as an object, OpenAI's API as the text of one: a text that is JSON is decoded. What a
tool has given is a message of role `tool` that names the call. OpenAI's older `function_call` and role `function` are
the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.http.request_body import decode, missing_field
from router.text.chat_template import Message
from router.text.custom_input import INPUT
from shared.errors import RequestError
from shared.grammar_bounds import check_nesting

NO_BYTES = msgspec.Raw(b"")

_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NEUTRAL = (b"", b"null", b"[]", b"{}", b'""', b"false")


class TextPart(msgspec.Struct):
    """One part of a content that is a list."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """What an assistant called."""

    name: str
    arguments: msgspec.Raw = NO_BYTES  # a text, or an object


class CalledCustom(msgspec.Struct):
    """What an assistant called with a text."""

    name: str
    input: str = ""


class ToolCallFields(msgspec.Struct):
    """One call in an assistant's message, of a function or of a custom tool."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None
    type: str | None = None


class MessageFields(msgspec.Struct):
    """One message of a chat, as it comes in JSON."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = NO_BYTES
    tool_call_id: str | None = None
    function_call: msgspec.Raw = NO_BYTES
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: msgspec.Raw = NO_BYTES


def without_late_system(messages: list[Message]) -> list[Message]:
    """The same chat for templates that take a system message at the beginning alone.

    A second one there is a part of the first. A later one becomes text of the user, joined with what the user says
    beside it, because such templates want the roles to take turns.
    """
    made: list[dict[str, Any]] = []
    moved = False  # whether the last message has a system message's text, which what follows may join
    for message in messages:
        late = message["role"] == "system" and bool(made)
        role = message["role"] if not late or made[-1]["role"] == "system" else "user"
        if made and made[-1]["role"] == role and (late or (moved and role == "user")):
            made[-1]["content"] += f"\n\n{message['content']}"
        else:
            made.append({**message, "role": role})
            moved = False
        moved = moved or late
    return [*made]


def template_message(message: MessageFields, param: str) -> Message:
    """A message for the template; raises `RequestError` naming what is wrong in it."""
    if message.role not in _ROLES:
        raise RequestError(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    if bytes(message.audio) not in _NEUTRAL:
        raise RequestError(f"{param}.audio is not supported by this server", param=f"{param}.audio")
    calls = _calls(message, param)
    if calls and _ROLES[message.role] != "assistant":
        raise RequestError(f"{param}.tool_calls: only an assistant calls tools", param=f"{param}.tool_calls")
    empty = message.content is None and bool(calls)
    made: dict[str, Any] = {
        "role": _ROLES[message.role],
        "content": "" if empty else _content(message.content, f"{param}.content"),
    }
    thoughts = message.reasoning_content or message.reasoning
    given = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "reasoning_content": thoughts}
    if made["role"] == "tool":
        given["name"] = message.name
    return made | {name: value for name, value in given.items() if value}


def _calls(message: MessageFields, param: str) -> list[dict[str, Any]]:
    given: list[ToolCallFields] = []
    if bytes(message.tool_calls) not in _NEUTRAL:
        given = decode(message.tool_calls, list[ToolCallFields], f"{param}.tool_calls")
    elif bytes(message.function_call) not in _NEUTRAL:
        called = decode(message.function_call, CalledFunction, f"{param}.function_call")
        given = [ToolCallFields(function=called)]
    return [_call(call, f"{param}.tool_calls[{at}]") for at, call in enumerate(given)]


def _call(call: ToolCallFields, param: str) -> dict[str, Any]:
    if call.type not in (None, "function", "custom"):
        raise RequestError(f"{param}.type must be function or custom", param=f"{param}.type")
    if call.custom:
        function: dict[str, Any] = {"name": call.custom.name, "arguments": {INPUT: call.custom.input}}
    elif call.function:
        function = {
            "name": call.function.name,
            "arguments": _arguments(call.function, f"{param}.function"),
        }
    else:
        raise missing_field(f"{param}.{call.type or 'function'}")
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _arguments(called: CalledFunction, param: str) -> Any:
    """An object for the template; a text that is none stays what the model wrote."""
    text = bytes(called.arguments) or b"{}"
    if text.startswith(b'"'):
        inner = decode(text, str, f"{param}.arguments") or "{}"
        check_nesting(inner, f"{param}.arguments")
        try:
            value = msgspec.json.decode(inner)
        except msgspec.DecodeError:
            return inner
        return value if isinstance(value, dict) else inner
    check_nesting(text.decode(errors="replace"), f"{param}.arguments")
    return decode(text, dict[str, Any], f"{param}.arguments")


def _content(content: str | list[TextPart] | None, param: str) -> str:
    if content is None:
        raise missing_field(param)
    if isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{param} must be a string or a list of text parts", param=param)
    return "\n".join(_text_part(part, f"{param}[{at}]") for at, part in enumerate(content))


def _text_part(part: TextPart, param: str) -> str:
    if part.type != "text":
        raise RequestError(f"{param} must be a part of type text: this model reads text only", param=param)
    if part.text is None:
        raise missing_field(f"{param}.text")
    return part.text
