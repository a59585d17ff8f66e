"""Tools in words: for chat templates that know neither tools, nor their calls, nor their results.

The system message describes the tools, an assistant's calls become its text as the model shall write them, and a tool's
result is a message of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.parsers.answer_formats import CallWriting
from router.parsers.answer_parser import AnswerFormatReader
from router.text.chat_template import Message
from shared.primitives.errors import RequestError

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
    words = _IN_WORDS.format(tools=listed, example=_call("NAME", {"ARGUMENT": "VALUE"}, writing))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{words}"}, *plain[1:]]
    return [{"role": "system", "content": words}, *plain]


def _without_tools(message: Message, writing: CallWriting) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [
        _call(call["function"]["name"], call["function"]["arguments"], writing)
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": "\n".join([message["content"], *calls]).strip()}


def _call(name: str, arguments: Any, writing: CallWriting) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return writing.one_call(name, text)
