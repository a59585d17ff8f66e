"""A chat's messages and tools as the chat template of gpt-oss wants them.

That template reads thoughts in `thinking`, shows one call of a message and drops the others, takes a result for one of
the last call, whatever it names, and refuses a message that has a call, thoughts and content. So a message with
several calls becomes one for each, with its own result behind it, and content beside a call joins the thoughts.
Thoughts that a final answer follows are left out by the template, as the format wants it.

It adds the default of a parameter with an enum to a text, which fails for numbers and null: such are shown as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router.text.chat_template import Message

_THOUGHTS = ("reasoning_content", "thinking")


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The messages, each with one call at most."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if message["role"] != "assistant":
            made.append(message)
            continue
        results: list[Message] = []
        while message.get("tool_calls") and at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        made += _turn(message, results)
    return made


def with_text_defaults(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools as they are shown, with defaults of enums as texts."""
    return [{**tool, "function": _with_text_defaults(tool["function"])} for tool in tools]


def _with_text_defaults(function: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = function["parameters"].get("properties")
    if not isinstance(properties, dict):
        return function
    shown = {
        name: {**one, "default": json.dumps(one["default"])} if _fails(one) else one
        for name, one in properties.items()
    }
    return {**function, "parameters": {**function["parameters"], "properties": shown}}


def _fails(schema: Any) -> bool:
    if not isinstance(schema, dict) or "default" not in schema or isinstance(schema["default"], str):
        return False
    return bool(schema.get("enum") or schema.get("oneOf"))


def _turn(message: Message, results: list[Message]) -> Iterator[Message]:
    """An assistant's message and the results that follow it."""
    calls = message.get("tool_calls") or []
    said = {name: value for name, value in message.items() if name not in ("tool_calls", *_THOUGHTS)}
    thoughts = message.get("reasoning_content", "")
    if calls:
        thoughts, said["content"] = "\n\n".join(filter(None, (thoughts, message["content"]))), ""
    if thoughts:
        said |= dict.fromkeys(_THOUGHTS, thoughts)
    if not calls:
        yield said
    for call in calls:
        yield {**said, "tool_calls": [call]}
        said = {"role": "assistant", "content": ""}
        if (result := _result(call, results, alone=len(calls) == 1)) is not None:
            yield result
    yield from results  # of calls that nobody made


def _result(call: Any, results: list[Message], *, alone: bool) -> Message | None:
    """What a call has given, taken out of `results`: by its id, else the next that names no call."""
    if not results:
        return None
    for result in results:
        named = result.get("tool_call_id")
        if alone or named is None or named == call.get("id"):
            results.remove(result)
            return {"name": call["function"]["name"], **result}
    return None
