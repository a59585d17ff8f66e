"""The messages of a chat, as they come in JSON, and as chat templates want them.

Templates take a call's arguments as an object, OpenAI's API as the text of one: a text that is JSON is decoded. What a
tool has given is a message of role `tool` that names the call. OpenAI's older `function_call` and role `function` are
the same.

What frameworks send back of an assistant or a tool may have no content: null and an empty list are "". Parts of
thoughts are the message's thoughts, and a refusal is text. `chat_options` says how the messages are to be rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.openai.fields.generation_fields import ChatFields
from router.openai.fields.ignored import Ignored
from router.openai.fields.request_body import decode, missing_field
from router.openai.fields.thinking import template_variables
from router.parsers.answer_formats import CallWriting
from router.parsers.answer_parser import AnswerFormatReader
from router.parsers.call_scanner import INPUT
from router.text.chat_template import ChatOptions, Message
from router.text.tokenizer import Tokenizer
from shared.limits.grammars import check_nesting
from shared.primitives.errors import RequestError

NO_BYTES = msgspec.Raw(b"")

_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_MAY_BE_EMPTY = ("assistant", "tool")
_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
_NEUTRAL = (b"", b"null", b"[]", b"{}", b'""', b"false")


class InnerPart(msgspec.Struct):
    """A text within a part of thoughts."""

    text: str = ""


class TextPart(msgspec.Struct):
    """One part of a content that is a list."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[InnerPart] | None = None  # Anthropic's text, or Mistral's list of texts


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
    refusal: str | None = None
    audio: msgspec.Raw = NO_BYTES


def without_late_system(messages: list[Message]) -> list[Message]:
    """Rewrite a chat for templates that take a system message at the beginning alone.

    A second one there is a part of the first. A later one becomes text of the user, joined with what the user says
    beside it, because such templates want the roles to take turns.
    """
    turns: list[tuple[str, list[Message]]] = []  # the role of each, and the messages that become one
    moved = False  # whether the last turn has a system message's text, which what follows may join
    for message in messages:
        late = message["role"] == "system" and bool(turns)
        role = message["role"] if not late or turns[-1][0] == "system" else "user"
        if turns and turns[-1][0] == role and (late or (moved and role == "user")):
            turns[-1][1].append(message)
        else:
            turns.append((role, [message]))
            moved = False
        moved = moved or late
    return [_turn(role, joined) for role, joined in turns]


def _turn(role: str, messages: list[Message]) -> Message:
    """One message of several; what else the first one has stays."""
    content = "\n\n".join(message["content"] for message in messages)
    return {**messages[0], "role": role, "content": content}


def template_message(message: MessageFields, param: str) -> Message:
    """A message for the template; raises `RequestError` naming what is wrong in it."""
    if message.role not in _ROLES:
        raise RequestError(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    if bytes(message.audio) not in _NEUTRAL:
        raise RequestError(f"{param}.audio is not supported by this server", param=f"{param}.audio")
    calls = _calls(message, param)
    if calls and _ROLES[message.role] != "assistant":
        raise RequestError(f"{param}.tool_calls: only an assistant calls tools", param=f"{param}.tool_calls")
    role = _ROLES[message.role]
    made: dict[str, Any] = {"role": role, "content": _content(message, role, f"{param}.content")}
    thoughts = message.reasoning_content or message.reasoning or _thoughts(message.content)
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
        function = {"name": call.function.name, "arguments": _arguments(call.function, f"{param}.function")}
    else:
        raise missing_field(f"{param}.{call.type or 'function'}")
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _arguments(called: CalledFunction, param: str) -> Any:
    """An object for the template; a text that is none stays what the model wrote."""
    text = b"{}" if bytes(called.arguments) in (b"", b"null") else bytes(called.arguments)
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


def _content(message: MessageFields, role: str, param: str) -> str:
    content = message.content
    if not content and role in _MAY_BE_EMPTY:
        return message.refusal or ""
    if content is None:
        raise missing_field(param)
    if isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{param} must be a string or a list of text parts", param=param)
    texts = [
        _text_part(part, f"{param}[{at}]") for at, part in enumerate(content) if part.type not in _THOUGHTS
    ]
    return "\n".join(texts)


def _text_part(part: TextPart, param: str) -> str:
    if part.type not in _TEXTS:
        raise RequestError(f"{param} must be a part of type text: this model reads text only", param=param)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise missing_field(f"{param}.{'refusal' if part.type == 'refusal' else 'text'}")
    return text


def _thoughts(content: str | list[TextPart] | None) -> str:
    """What the parts of a content say of thoughts; those that are sealed for another server say nothing."""
    parts = [part for part in content if part.type in _THOUGHTS] if isinstance(content, list) else []
    return "\n".join(filter(None, map(_thought, parts)))


def _thought(part: TextPart) -> str:
    if isinstance(part.thinking, list):
        return "".join(inner.text for inner in part.thinking)
    return part.thinking or part.text or ""


def chat_options(
    fields: ChatFields, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, ignored: Ignored
) -> ChatOptions:
    """How messages are rendered with `tools`; raises `RequestError` for options that exclude each other."""
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
        tools=tools or None,
    )


# ---- tools in words: for chat templates that know neither tools, nor their calls, nor their results ------------------
# The system message describes the tools, an assistant's calls become its text as the model shall write them, and a
# tool's result is a message of the user.


_IN_WORDS = (
    "You may call functions. Their descriptions, one a line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and its arguments as JSON, and nothing behind it:\n{example}"
)


def not_shown(param: str) -> RequestError:
    """The error of a model that can neither be shown tools nor told of them; `param` is the field that has them."""
    return RequestError(
        "this model's chat template does not show calls of tools: use a model that was trained with tools, or start"
        " the router with --tool-call-parser hermes",
        param=param,
    )


def in_words(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], reader: AnswerFormatReader
) -> list[Message]:
    """The messages of a chat for a template that knows neither tools nor their calls nor their results."""
    writing = reader.forced.format.writing
    assert writing is not None
    plain = [_without_tools(message, writing) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = _IN_WORDS.format(tools=listed, example=_written_call("NAME", {"ARGUMENT": "VALUE"}, writing))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{words}"}, *plain[1:]]
    return [{"role": "system", "content": words}, *plain]


def _without_tools(message: Message, writing: CallWriting) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [
        _written_call(call["function"]["name"], call["function"]["arguments"], writing)
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": "\n".join([message["content"], *calls]).strip()}


def _written_call(name: str, arguments: Any, writing: CallWriting) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return writing.one_call(name, text)
