"""How many tokens of an answer are thoughts: those with text that the answer's parser finds between the marks.

A token with the end of a mark and the beginning of a thought counts, one with no more than a mark's text does not. What
a parser holds back, as it may be the beginning of a mark, counts once that is known; so does half a character. A token
without text counts with the thought that comes behind it. This file knows no token's id.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.parsers.answer_parser import AnswerDelta, AnswerParser


class ThoughtTokens:
    """Reads one answer by its parser, and counts."""

    def __init__(self, parser: AnswerParser):
        self.count = 0
        self._parser = parser
        self._held = 0  # tokens in thoughts, of whose text none was certain

    def push(self, texts: Sequence[str]) -> list[AnswerDelta]:
        """What is certain now. Each text is what one token has added, maybe nothing."""
        if len(texts) == 1:  # nearly always
            return self._push(texts[0])
        return [delta for text in texts for delta in self._push(text)]

    def _push(self, text: str) -> list[AnswerDelta]:
        parser = self._parser
        was_open, pieces = parser.in_thoughts, parser.thought_pieces
        deltas = parser.push(text)
        new = parser.thought_pieces > pieces
        if new and not self._held:
            self.count += 1
        elif new or was_open:
            self._settle(1, new=new)
        return deltas

    def finish(self, text: str) -> list[AnswerDelta]:
        """The rest, with text that the last tokens had held back."""
        pieces = self._parser.thought_pieces
        deltas = self._parser.push(text) + self._parser.finish()
        self._settle(0, new=self._parser.thought_pieces > pieces)
        return deltas

    def _settle(self, tokens: int, *, new: bool) -> None:
        """Count tokens if there is new text of thoughts, else hold them until there is, or a mark ends."""
        held, self._held = self._held + tokens, 0
        if new:
            self.count += held
        elif self._parser.in_thoughts:
            self._held = held
