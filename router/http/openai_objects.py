"""The JSON of OpenAI's answers: objects of completions and chat completions, whole and in chunks.

Pure functions of text and counts; no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.core.effects import RequestFailed, Usage
from router.http.logprob_objects import LogprobObjects
from router.http.replies import failure_body
from router.http.response_stream import TextDelta
from router.text.answer_parser import NAMES

Json = dict[str, Any]
COMMENT = b": waiting\n\n"  # server-sent events ignore lines that begin with a colon
Event = Json | msgspec.Raw | list[Json]  # of a stream: one, its JSON, or several that belong together


class AnswerObjects(Protocol):
    """One kind of answer."""

    done: bool  # whether a stream that is complete ends with [DONE]
    waiting: bytes  # what a silent stream gets

    def opening(self, index: int) -> Event | None:
        """What comes before the first piece of a choice, if this kind has that."""

    def chunk(self, piece: TextDelta) -> Event:
        """One piece of a stream."""

    def usage_chunk(self, usage: Json) -> Event:
        """The last of a stream whose request asked for usage."""

    def failed(self, failure: RequestFailed) -> Event:
        """The last of a stream that is interrupted."""

    def whole(self, pieces: Iterable[TextDelta], usage: Json) -> Json:
        """An answer that is not streamed; one piece a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHead:
    """What every object of one answer repeats."""

    answer_id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None
    chunk_usage: bool  # chunks say `usage: null` when the last one has it
    logprobs: LogprobObjects | None = None  # if they were asked for

    def chunk(self, kind: str) -> Json:
        """A chunk without choices."""
        return self.whole(kind, []) | ({"usage": None} if self.chunk_usage else {})

    def whole(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class ChunkFrame:
    """The JSON around the choice of each chunk of an answer, made once: a stream has a chunk for each token."""

    def __init__(self, chunk: Json):
        """`chunk` has no choices yet; of its fields only usage may follow them."""
        self._before, choices, self._after = msgspec.json.encode(chunk).rpartition(b"[]")
        assert choices, chunk

    def around(self, choice: Json) -> msgspec.Raw:
        """The chunk of one choice."""
        return msgspec.Raw(b"%b[%b]%b" % (self._before, msgspec.json.encode(choice), self._after))


class CompletionObjects:
    """Objects of /v1/completions."""

    done = True
    waiting = COMMENT

    def __init__(self, head: ObjectHead):
        self._head = head
        self._empty = head.chunk("text_completion")
        self._frame = ChunkFrame(self._empty)

    def opening(self, index: int) -> Json | None:
        del index
        return None

    def chunk(self, piece: TextDelta) -> Event:
        return self._frame.around(self._choice(piece))

    def usage_chunk(self, usage: Json) -> Json:
        return self._empty | {"usage": usage}

    def failed(self, failure: RequestFailed) -> Event:
        return failure_body(failure)

    def whole(self, pieces: Iterable[TextDelta], usage: Json) -> Json:
        choices = [self._choice(piece) for piece in pieces]
        return {**self._head.whole("text_completion", choices), "usage": usage}

    def _choice(self, piece: TextDelta) -> Json:
        told = self._head.logprobs
        choice = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": told.completion(piece.entries) if told and piece.entries else None,
            "finish_reason": piece.finish_reason,
        }
        if told and piece.prompt_entries:
            choice["prompt_logprobs"] = told.prompt(piece.prompt_entries)
        return _extended(choice, piece)


class ChatObjects:
    """Objects of /v1/chat/completions."""

    done = True
    waiting = COMMENT

    def __init__(self, head: ObjectHead):
        self._head = head
        self._empty = head.chunk("chat.completion.chunk")
        self._frame = ChunkFrame(self._empty)

    def opening(self, index: int) -> Event | None:
        delta = {"role": "assistant", "content": ""}
        return self._frame.around({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, piece: TextDelta) -> Event:
        delta: Json = {"content": piece.text} if piece.text else {}
        if piece.reasoning:
            delta |= _thoughts(piece.reasoning)
        if piece.calls:
            delta["tool_calls"] = [{"index": call.pop("call"), **call} for call in self._calls(piece)]
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        return self._frame.around(_extended(choice, piece))

    def usage_chunk(self, usage: Json) -> Json:
        return self._empty | {"usage": usage}

    def failed(self, failure: RequestFailed) -> Event:
        return failure_body(failure)

    def whole(self, pieces: Iterable[TextDelta], usage: Json) -> Json:
        told = list(pieces)
        choices = [
            _extended(
                {
                    "index": piece.index,
                    "message": self._message(piece),
                    "logprobs": self._logprobs(piece),
                    "finish_reason": piece.finish_reason,
                },
                piece,
            )
            for piece in told
        ]
        body = {**self._head.whole("chat.completion", choices), "usage": usage}
        if self._head.logprobs and (prompt := next((each.prompt_entries for each in told), ())):
            body["prompt_logprobs"] = self._head.logprobs.prompt(prompt)
        return body

    def _logprobs(self, piece: TextDelta) -> Json | None:
        told = self._head.logprobs
        return told.chat(piece.entries) if told and piece.entries else None

    def _message(self, piece: TextDelta) -> Json:
        """The message of an answer that is not streamed."""
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.reasoning:
            message |= _thoughts(piece.reasoning)
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "call"} for call in self._calls(piece)
            ]
        return message

    def _calls(self, piece: TextDelta) -> list[Json]:
        """One object for what the piece has of each call; only the first of a call has its id and its name."""
        calls: list[Json] = []
        for part in piece.calls:
            custom = part.kind in ("custom_call", "input")
            kind, value = ("custom", "input") if custom else ("function", "arguments")
            if part.kind in NAMES:
                named = call_id(self._head.answer_id, piece.index, part.call)
                head = {"call": part.call, "id": named, "type": kind}
                calls.append({**head, kind: {"name": part.text, value: ""}})
            elif calls and calls[-1]["call"] == part.call:
                calls[-1][kind][value] += part.text
            else:
                calls.append({"call": part.call, kind: {value: part.text}})
        return calls


def call_id(answer_id: str, choice: int, call: int) -> str:
    """Nine letters and digits: Mistral's chat template takes no other ids back."""
    return hashlib.sha256(f"{answer_id} {choice} {call}".encode()).hexdigest()[:9]


def _thoughts(text: str) -> Json:
    """As SGLang and DeepSeek, and as vLLM names them."""
    return {"reasoning_content": text, "reasoning": text}


def _extended(choice: Json, piece: TextDelta) -> Json:
    """With what vLLM tells beyond OpenAI's fields: what ended the text, and its tokens if they were asked for."""
    if piece.finish_reason is not None:
        choice["stop_reason"] = piece.stop_reason
    if piece.token_ids:
        choice["token_ids"] = piece.token_ids
    return choice


def usage_json(usages: Iterable[Usage]) -> Json:
    """OpenAI's usage object for all choices of an answer together."""
    listed = list(usages)
    prompt = sum(usage.prompt_tokens for usage in listed)
    completion = sum(usage.completion_tokens for usage in listed)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in listed)},
    }
