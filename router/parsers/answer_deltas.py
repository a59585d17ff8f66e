"""What a parser finds in an answer, piece by piece: content, thoughts, calls of tools and their arguments.

Every parser writes a `DeltaList`, so calls are counted, control characters in their arguments escaped, and texts of
custom tools taken out of their JSON, alike in every format. This file knows no format.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from router.parsers.call_scanner import ControlEscapes, CustomInput

DeltaKind = Literal["content", "reasoning", "call", "arguments", "custom_call", "input"]
NAMES = ("call", "custom_call")  # whose text is the name of a tool


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new of an answer. The text of a `call` is its name; `call` counts calls from 0.

    A `custom_call` is one of a tool that takes a text, and its `input` is that text, without the JSON around it.
    """

    kind: DeltaKind
    text: str
    call: int = 0


class AnswerParser(Protocol):
    """Reads one answer, whatever way its text is cut into pieces. Never raises: what cannot be read is content."""

    reads_thoughts: bool  # else they are content
    thought_pieces: int  # that were read so far, those of blank space too
    begins_in_thoughts: bool  # the prompt has begun them

    @property
    def in_thoughts(self) -> bool:
        """Whether thoughts are open behind what was read so far."""

    @property
    def calls(self) -> int:
        """How many calls have begun."""

    def push(self, text: str) -> list[AnswerDelta]:
        """What is certain now."""

    def finish(self) -> list[AnswerDelta]:
        """The rest. The text may have ended anywhere."""


class DeltaList:
    """The deltas of one answer that nobody has taken yet."""

    def __init__(self, text_tools: Collection[str]):
        """`text_tools` names those that take one text."""
        self.calls = 0  # that have begun
        self._text_tools = text_tools
        self._deltas: list[AnswerDelta] = []
        self._input: CustomInput | None = None  # of the last call, if its tool takes a text
        self._escapes = ControlEscapes()  # of its arguments, if not

    def take(self) -> list[AnswerDelta]:
        """What came since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def put(self, kind: DeltaKind, text: str) -> None:
        """Add a text, unless it is empty."""
        if text:
            self._deltas.append(AnswerDelta(kind, text, max(self.calls - 1, 0)))

    def call(self, name: str) -> None:
        """A call begins, and ends the one before."""
        self.end_call()
        self.calls += 1
        self._input = CustomInput() if name in self._text_tools else None
        self._escapes = ControlEscapes()
        self.put("custom_call" if self._input else "call", name)

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if self._input:
            self.put("input", self._input.push(text))
        else:
            self.put("arguments", self._escapes.push(text))

    def end_call(self) -> None:
        """Nothing more comes of the last call."""
        if self._input:
            self.put("input", self._input.finish())
            self._input = None
