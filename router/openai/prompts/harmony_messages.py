"""A chat's messages as the chat template of gpt-oss wants them.

That template reads thoughts in `thinking`, shows one call of a message and drops the others, takes a result for one of
the last call, whatever it names, and refuses a message that has a call, thoughts and content. So a message with
several calls becomes one for each, with its own result behind it, and content beside a call joins the thoughts.
Thoughts that a final answer follows are left out by the template, as the format wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
