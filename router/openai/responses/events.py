"""The JSON of /v1/responses: one answer as items (thoughts, a message, calls), whole and as typed events.

    created, in_progress                            before the first piece
    output_item.added, content_part.added           when an item begins
    reasoning_text.delta, output_text.delta, function_call_arguments.delta, custom_tool_call_input.delta
    the same with done, content_part.done, output_item.done
    completed, or incomplete where max_output_tokens was reached

A whole answer is what the same events would have built, so both are equal. Thoughts and message stay open until the
end: a model may go on with either. A call ends where the next one begins. Pure functions of pieces; no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from router.core.effects import RequestFailed
from router.openai.answers.json_parts import Parts
from router.openai.answers.kept_answer import KeptChoice
from router.openai.answers.openai_objects import COMMENT, Event, Json, ObjectHead, call_id
from router.openai.answers.response_stream import TextDelta
from router.openai.responses.fields import RepeatedFields
from router.openai.tools.choice import ToolUse
from router.parsers.answer_deltas import NAMES, AnswerDelta

Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
_TEXT_KINDS = {"reasoning": "reasoning_text", "message": "output_text"}
_CALL_KINDS = {  # the event of a call's pieces, and the field that they make
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}  # of ids


class ResponsesObjects:
    """One answer on its way. Its events come in order, so it is for one stream, or for one whole answer."""

    done = False  # no [DONE]: the last event says that it is the last
    waiting = COMMENT

    def __init__(self, head: ObjectHead, repeated: RepeatedFields, use: ToolUse):
        self._head = head
        self._repeated = repeated
        self._use = use
        self._items: list[_Item] = []
        self.held_bytes = 0  # of logprobs, which the last events repeat
        self._sent = 0
        self._complete = True

    def opening(self, index: int) -> Event | None:
        """The response before anything of it is known."""
        del index
        response = self._response("in_progress", None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def chunk(self, piece: TextDelta) -> Event:
        """The events of one piece."""
        events: list[Json] = []
        if piece.reasoning:
            events += self._text("reasoning", piece.reasoning, [])
        if piece.text or piece.entries:
            objects = self._head.logprobs
            entries = objects.chat(piece.entries)["content"] if objects and piece.entries else []
            events += self._text("message", piece.text, entries)
        for part in piece.calls:
            events += self._begin_call(part) if part.kind in NAMES else self._argue(part.text)
        if piece.finish_reason is not None:
            self._complete = piece.finish_reason != "length"
            if not self._items:
                events += self._begin("message")
            for item in self._items:
                events += self._end(item)
        return events

    def usage_chunk(self, usage: Json) -> Event:
        """The last event."""
        status = "completed" if self._complete else "incomplete"
        return self._event(f"response.{status}", response=self._response(status, usage))

    def failed(self, failure: RequestFailed) -> Event:
        """The last events of an answer that was interrupted."""
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        for item in self._items:
            item.status = "completed" if item.ended else "incomplete"
        response = self._response("failed", None) | {"error": {"code": code, "message": failure.message}}
        return [
            self._event("error", code=failure.code, message=failure.message, param=failure.param),
            self._event("response.failed", response=response),
        ]

    def whole(self, choices: Sequence[KeptChoice], usage: Json) -> Parts:
        """The whole answer."""
        return Parts(self._whole_texts(choices, usage))

    def _whole_texts(self, choices: Sequence[KeptChoice], usage: Json) -> Iterator[bytes]:
        """The answer as one text, behind an empty one for each batch of logprobs that was made."""
        for kept in choices:
            piece = kept.joined()
            self.chunk(TextDelta(kept.index, "", reasoning=piece.reasoning))  # thoughts come first
            for batch in kept.entries.batches():
                self.chunk(TextDelta(kept.index, "", entries=tuple(batch)))
                yield b""
            self.chunk(replace(piece, reasoning=""))
        status = "completed" if self._complete else "incomplete"
        yield msgspec.json.encode(self._response(status, usage))

    # ---- items -------------------------------------------------------------------------------------------------

    def _text(self, kind: Kind, text: str, logprobs: list[Json]) -> list[Json]:
        """Events of more text in the one item of a kind."""
        found = [item for item in self._items if item.kind == kind]
        events = [] if found else self._begin(kind)
        item = found[0] if found else self._items[-1]
        item.text += text
        encoded = msgspec.json.encode(logprobs)
        if logprobs:
            item.logprobs.append(encoded[1:-1])
            self.held_bytes += len(encoded)
        about: Json = {"delta": text} | ({"logprobs": msgspec.Raw(encoded)} if kind == "message" else {})
        return [*events, self._event(f"response.{_TEXT_KINDS[kind]}.delta", **item.place, **about)]

    def _begin(self, kind: Kind, called: Json | None = None) -> list[Json]:
        item = _Item(kind, self._head.answer_id, len(self._items), called)
        self._items.append(item)
        added = self._event(
            "response.output_item.added", output_index=item.index, item=item.shown("in_progress")
        )
        if item.is_call:
            return [added]
        return [added, self._event("response.content_part.added", **item.place, part=item.part(begun=True))]

    def _begin_call(self, part: AnswerDelta) -> list[Json]:
        events = [] if not self._items else self._end_calls()
        tool = self._use.called(part.text)
        called = {
            "call_id": call_id(self._head.answer_id, 0, part.call),
            "name": tool.own_name if tool else part.text,
        }
        if tool and tool.namespace:
            called["namespace"] = tool.namespace
        kind: Kind = "custom_tool_call" if part.kind == "custom_call" else "function_call"
        return events + self._begin(kind, called)

    def _argue(self, text: str) -> list[Json]:
        item = self._items[-1] if self._items[-1].is_call else self._last_call()
        item.text += text
        event, _ = _CALL_KINDS[item.kind]
        return [self._event(f"response.{event}.delta", **item.call_place, delta=text)]

    def _last_call(self) -> _Item:
        return next(item for item in reversed(self._items) if item.is_call)

    def _end_calls(self) -> list[Json]:
        return [event for item in self._items if item.is_call for event in self._end(item)]

    def _end(self, item: _Item) -> list[Json]:
        if item.ended:
            return []
        item.ended = True
        status = "completed" if self._complete or item is not self._items[-1] else "incomplete"
        item.status = status
        return [
            *self._whole_text(item),
            self._event("response.output_item.done", output_index=item.index, item=item.shown(status)),
        ]

    def _whole_text(self, item: _Item) -> list[Json]:
        if item.is_call:
            event, field = _CALL_KINDS[item.kind]
            about: Json = {field: item.text}
            if item.kind == "function_call":
                about["name"] = item.called["name"]
            return [self._event(f"response.{event}.done", **item.call_place, **about)]
        logprobs: Json = {"logprobs": item.logprobs_json()} if item.kind == "message" else {}
        return [
            self._event(f"response.{_TEXT_KINDS[item.kind]}.done", **item.place, text=item.text, **logprobs),
            self._event("response.content_part.done", **item.place, part=item.part()),
        ]

    # ---- the response ------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _response(self, status: str, usage: Json | None) -> Json:
        repeated = self._repeated
        return {
            "id": self._head.answer_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": repeated.instructions,
            "max_output_tokens": repeated.max_output_tokens,
            "metadata": repeated.metadata,
            "model": self._head.model,
            "output": [item.shown(item.status) for item in self._items],
            "parallel_tool_calls": repeated.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": repeated.effort, "summary": None},
            "store": False,
            "system_fingerprint": self._head.system_fingerprint,
            "temperature": repeated.temperature,
            "text": {"format": repeated.text_format},
            "tool_choice": repeated.tool_choice,
            "tools": repeated.tools,
            "top_logprobs": repeated.top_logprobs,
            "top_p": repeated.top_p,
            "truncation": "disabled",
            "usage": usage and _usage(usage),
        }


class _Item:
    """One item of the output."""

    def __init__(self, kind: Kind, answer_id: str, index: int, called: Json | None):
        self.id = f"{_PREFIXES[kind]}_{answer_id.partition('_')[2]}-{index}"
        self.kind = kind
        self.index = index
        self.text = ""  # or the arguments or the input of a call
        self.logprobs: list[bytes] = []  # JSON, with a comma between two of them
        self.called = called or {}  # the names in a call
        self.is_call = kind in _CALL_KINDS
        self.ended = False
        self.status = "in_progress"

    @property
    def place(self) -> Json:
        return {**self.call_place, "content_index": 0}

    @property
    def call_place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}

    def logprobs_json(self) -> msgspec.Raw:
        """The logprobs of its tokens, as a JSON list."""
        return msgspec.Raw(b"[%b]" % b",".join(self.logprobs))

    def part(self, *, begun: bool = False) -> Json:
        """Object of the item's one part of text; empty where it has only begun."""
        text = "" if begun else self.text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if begun else self.logprobs_json()
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def shown(self, status: str) -> Json:
        """The item as it is now; one in progress has no content yet."""
        item: Json = {"type": self.kind, "id": self.id, "status": status}
        if self.is_call:
            return {**item, **self.called, _CALL_KINDS[self.kind][1]: self.text}
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
