"""The JSON of /v1/messages: one answer as blocks (thoughts, text, calls), whole and as typed events.

    message_start, ping                     before the first piece
    content_block_start                     when a block begins
    content_block_delta                     thinking_delta, text_delta, input_json_delta
    content_block_stop                      before the next block begins: one is open at a time
    message_delta, message_stop             why it ended, and its usage

What a model says behind a call is a block of its own in a stream, and a part of the one text in a whole answer. How
much of a prompt was cached is known at the end, so the usage of `message_start` does not say it and that of
`message_delta` does. `input_tokens` are without them, as Anthropic counts. Pure functions of pieces; no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from pydantic_core import from_json

from router.core.effects import RequestFailed
from router.openai.answers.json_parts import Parts, object_parts
from router.openai.answers.kept_answer import KeptChoice
from router.openai.answers.openai_objects import Event, Json, ObjectHead, call_id
from router.openai.answers.response_stream import TextDelta
from router.parsers.answer_deltas import AnswerDelta
from router.replies import error_object

Kind = Literal["thinking", "text", "tool_use"]

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
UNREADABLE = "INVALID_JSON"  # Anthropic's word for an input that is no JSON object
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessagesObjects:
    """One answer on its way. Its events come in order, so it is for one stream, or for one whole answer."""

    done = False  # no [DONE]: message_stop says that it is the last
    waiting = PING
    held_bytes = 0

    def __init__(self, head: ObjectHead, prompt_tokens: int, max_tokens: int):
        """`max_tokens` is what the client asked for, which may be more than the context left."""
        self._head = head
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._open: Kind | None = None
        self._index = -1  # of the block that began last
        self._last = TextDelta(0, "")

    def opening(self, index: int) -> Event | None:
        """The message before anything of it is known."""
        del index
        usage = {"input_tokens": self._prompt_tokens, "cache_read_input_tokens": None, "output_tokens": 0}
        message = self._message([], usage)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def chunk(self, piece: TextDelta) -> Event:
        """The events of one piece."""
        events: list[Json] = []
        calls = list(piece.calls)
        while calls and calls[0].kind == "arguments":  # of the call that is open, before what follows it
            events += self._delta("tool_use", calls.pop(0).text)
        if piece.reasoning:
            events += self._delta("thinking", piece.reasoning)
        if piece.text:
            events += self._delta("text", piece.text)
        for part in calls:
            events += self._begin_call(part) if part.kind == "call" else self._delta("tool_use", part.text)
        if piece.finish_reason is not None:
            self._last = piece
            events += self._stop()
        return events

    def usage_chunk(self, usage: Json) -> Event:
        """The last events."""
        ended = {"type": "message_delta", "delta": self._ended(usage), "usage": _usage(usage)}
        return [ended, {"type": "message_stop"}]

    def failed(self, failure: RequestFailed) -> Event:
        """The last event of an answer that was interrupted."""
        return error_object(failure.status, failure.message)

    def whole(self, choices: Sequence[KeptChoice], usage: Json) -> Parts:
        """The whole answer."""
        (choice,) = choices
        self._last = piece = choice.joined()
        content: list[Json] = []
        if piece.reasoning:
            content.append(
                {"type": "thinking", "thinking": piece.reasoning, "signature": self._head.answer_id}
            )
        if piece.text:
            content.append({"type": "text", "text": piece.text})
        for _, parts in groupby(piece.calls, key=lambda part: part.call):
            content.append(self._call(list(parts)))
        return object_parts(self._message(content, _usage(usage)) | self._ended(usage))

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _delta(self, kind: Kind, text: str) -> list[Json]:
        """Events of more text in a block of a kind."""
        assert self._open == kind or kind != "tool_use", "arguments of a call that has not begun"
        events = [] if self._open == kind else self._begin(kind, {_DELTAS[kind][1]: ""})
        name, field = _DELTAS[kind]
        return [*events, self._about({"type": name, field: text})]

    def _begin(self, kind: Kind, content: Json) -> list[Json]:
        events = self._stop()
        self._open = kind
        self._index += 1
        signed = {"signature": ""} if kind == "thinking" else {}
        block = {"type": kind, **content, **signed}
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _begin_call(self, part: AnswerDelta) -> list[Json]:
        return self._begin("tool_use", self._call_head(part))

    def _stop(self) -> list[Json]:
        """Events of the end of the block that is open. Thoughts are signed: clients send back no others."""
        if self._open is None:
            return []
        signed = self._open == "thinking"
        self._open = None
        signature = [self._about({"type": "signature_delta", "signature": self._head.answer_id})]
        return [*(signature if signed else []), {"type": "content_block_stop", "index": self._index}]

    def _about(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _call(self, parts: Sequence[AnswerDelta]) -> Json:
        head, *arguments = parts
        return {
            "type": "tool_use",
            **self._call_head(head),
            "input": _input("".join(part.text for part in arguments)),
        }

    def _call_head(self, part: AnswerDelta) -> Json:
        return {"id": call_id(self._head.answer_id, 0, part.call), "name": part.text, "input": {}}

    # ---- the message -------------------------------------------------------------------------------------------

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self._head.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _ended(self, usage: Json) -> Json:
        """Why it ended. One that reached its limit had less room than it asked for, where it has fewer tokens."""
        found = self._last.stop_reason
        reason, sequence = "end_turn", None
        match self._last.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                cut = usage["completion_tokens"] < self._max_tokens
                reason = "model_context_window_exceeded" if cut else "max_tokens"
            case "stop" if isinstance(found, str):
                reason, sequence = "stop_sequence", found
        return {"stop_reason": reason, "stop_sequence": sequence}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; of those that were cut, what came, as the SDK's accumulator reads them."""
    try:
        value = from_json(arguments, allow_partial=True) if arguments.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: arguments}


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
