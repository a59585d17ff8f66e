"""The choices of an answer that is not streamed, until all are complete: as few bytes as they can be written from.

Status and headers wait for the last choice, because a choice that fails makes the answer an error. What is held
meanwhile is counted (`HeldBytes`): text as UTF-8 in one growing buffer, so that a piece costs no more than its bytes,
token ids as their JSON, logprobs packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from router.openai.answers.answer_bytes import HeldBytes
from router.openai.answers.logprob_objects import PackedList, TokenEntry
from router.openai.answers.prompt_echo import PromptEcho
from router.openai.answers.response_stream import TextDelta
from router.parsers.answer_deltas import NAMES, AnswerDelta

CALL_BYTES = 256  # of a call of a tool, and of its arguments, beside their text


class KeptChoice:
    """One choice. `prompt` is the one that the answer tells of; None: none."""

    def __init__(self, index: int, prompt: PromptEcho | None, likeliest: int):
        """`likeliest`: how many tokens are named with each of the output."""
        self.index = index
        self.prompt = prompt
        self.entries = PackedList(TokenEntry, likeliest)
        self._last = TextDelta(index, "")
        self._text, self._reasoning = bytearray(), bytearray()
        self._calls: list[tuple[AnswerDelta, bytearray]] = []
        self._token_ids = bytearray()
        self._held_bytes = 0

    def add(self, piece: TextDelta) -> None:
        """The next piece."""
        self._last = piece
        self._keep(piece.text, self._text)
        if piece.reasoning:
            self._keep(piece.reasoning, self._reasoning)
        if piece.token_ids:
            self._token_ids += b"," + msgspec.json.encode(piece.token_ids)[1:-1]
        if piece.entries:
            self.entries.add(piece.entries)
        for part in piece.calls:
            self._keep(part.text, self._buffer_of(part))

    def _buffer_of(self, part: AnswerDelta) -> bytearray:
        """Where the text of this part of a call goes on."""
        last = self._calls[-1][0] if self._calls else None
        if part.kind in NAMES or last is None or (last.kind, last.call) != (part.kind, part.call):
            self._calls.append((part, bytearray()))
            self._held_bytes += CALL_BYTES
        return self._calls[-1][1]

    def _keep(self, text: str, buffer: bytearray) -> None:
        added = text.encode()
        buffer += added
        self._held_bytes += len(added)

    @property
    def held_bytes(self) -> int:
        """What it holds beside its prompt."""
        return self._held_bytes + len(self._token_ids) + self.entries.held_bytes

    def joined(self) -> TextDelta:
        """All of it as one piece, but for tokens and their reports."""
        echo = self.prompt.text if self.prompt else ""
        return TextDelta(
            self.index,
            echo + self._text.decode(),
            self._last.finish_reason,
            self._last.stop_reason,
            reasoning=self._reasoning.decode(),
            calls=tuple(replace(part, text=buffer.decode()) for part, buffer in self._calls),
        )

    @property
    def token_ids(self) -> msgspec.Raw | None:
        """As a JSON list; None: they were not asked for, or there are none."""
        return msgspec.Raw(b"[" + self._token_ids[1:] + b"]") if self._token_ids else None


class KeptAnswer:
    """All choices of one answer; `echoes` are their prompts, if the answer repeats or scores them."""

    def __init__(self, echoes: Sequence[PromptEcho], likeliest: int, held: HeldBytes):
        self._echoes = echoes
        self._likeliest = likeliest
        self._held = held
        self._choices: dict[int, KeptChoice] = {}

    def add(self, pieces: Iterable[TextDelta]) -> None:
        """More of it. Raises `RequestError` if it holds too much, or all answers together do."""
        grown = 0
        for piece in pieces:
            choice = self._choices.get(piece.index)
            if choice is None:
                prompt = self._echoes[piece.index] if self._echoes else None
                choice = self._choices[piece.index] = KeptChoice(piece.index, prompt, self._likeliest)
            before = choice.held_bytes
            choice.add(piece)
            grown += choice.held_bytes - before
        self._held.grow(grown)

    def choices(self) -> list[KeptChoice]:
        """In the order in which they are written."""
        return [self._choices[index] for index in sorted(self._choices)]
