"""The JSON of OpenAI's answers: objects of completions and chat completions, whole and in chunks.

Pure functions of text and counts; no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from router.core.effects import Usage
from router.http.logprob_objects import LogprobObjects
from router.http.response_stream import TextDelta

Json = dict[str, Any]


class AnswerObjects(Protocol):
    """One kind of answer."""

    def opening(self, index: int) -> Json | None:
        """The chunk before the first piece of a choice, if this kind has one."""

    def chunk(self, piece: TextDelta) -> Json:
        """One piece of a stream."""

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk of a stream whose request asked for usage."""

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

    def chunk(self, kind: str, choices: list[Json]) -> Json:
        body = self.whole(kind, choices)
        return {**body, "usage": None} if self.chunk_usage else body

    def whole(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class CompletionObjects:
    """Objects of /v1/completions."""

    def __init__(self, head: ObjectHead):
        self._head = head

    def opening(self, index: int) -> Json | None:
        del index
        return None

    def chunk(self, piece: TextDelta) -> Json:
        return self._head.chunk("text_completion", [self._choice(piece)])

    def usage_chunk(self, usage: Json) -> Json:
        return {**self._head.chunk("text_completion", []), "usage": usage}

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
        return _extended(choice, piece)


class ChatObjects:
    """Objects of /v1/chat/completions."""

    def __init__(self, head: ObjectHead):
        self._head = head

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._head.chunk("chat.completion.chunk", [choice])

    def chunk(self, piece: TextDelta) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        return self._head.chunk("chat.completion.chunk", [_extended(choice, piece)])

    def usage_chunk(self, usage: Json) -> Json:
        return {**self._head.chunk("chat.completion.chunk", []), "usage": usage}

    def whole(self, pieces: Iterable[TextDelta], usage: Json) -> Json:
        choices = [
            _extended(
                {
                    "index": piece.index,
                    "message": {"role": "assistant", "content": piece.text, "refusal": None},
                    "logprobs": self._logprobs(piece),
                    "finish_reason": piece.finish_reason,
                },
                piece,
            )
            for piece in pieces
        ]
        return {**self._head.whole("chat.completion", choices), "usage": usage}

    def _logprobs(self, piece: TextDelta) -> Json | None:
        told = self._head.logprobs
        return told.chat(piece.entries) if told and piece.entries else None


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
