"""From token ids to text, step by step: never half a character.

A token is a run of bytes, not of characters, so the text of a stream may only grow by what later tokens cannot change.
`Detokenizer` decodes a short window: the tokens of the text it emitted last (some decoders treat the first token of a
text differently, so there must be one before the new ones) and those after it. While the window's text ends in U+FFFD,
the last character may be incomplete and waits.

    emitted ────────────┐
    … t t t [ t t       │ t t ]      window: [context, pending]
                        └ decode(window)[emitted:] is new, unless it ends in U+FFFD

With broken bytes it would wait without end and the window would grow. An incomplete character spans at most three
tokens, so beyond `PENDING_TOKENS_MAX` everything but the last three is emitted. For byte-level vocabularies the texts
join to exactly `decode(all tokens)`. Vocabularies with byte fallback decode a broken run of bytes as a whole, so there
the number of U+FFFD for broken bytes may differ.

`tokenizers` has a `DecodeStream` for this, which is one call a token instead of two. It is not used because it is not
exact: of 300 random sequences of byte-level tokens it joined to `decode(all tokens)` for 298, this file for 300.

This file knows neither requests, nor tokens' meaning, nor stop strings (`stop_strings`), nor HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from router.text.tokenizer import Decoder

BROKEN = "\N{REPLACEMENT CHARACTER}"
INCOMPLETE_TOKENS_MAX = 3  # of a UTF-8 character at most three bytes, so tokens, come before its last byte
PENDING_TOKENS_MAX = 8  # longer than any incomplete character: what still ends in U+FFFD then is broken
CONTEXT_TOKENS = 6  # of a prompt, before its continuation


class Detokenizer:
    """The text of one growing list of tokens."""

    def __init__(self, decoder: Decoder, skip: Collection[int] = (), context: Sequence[int] = ()):
        """`skip` are ids without text (special tokens); `context` the end of the text that is continued."""
        self._decoder = decoder
        self._skip = skip
        newest_first = (token_id for token_id in reversed(context) if token_id not in skip)
        self._window = list(islice(newest_first, CONTEXT_TOKENS))[::-1]
        self._pending = 0  # tokens at the end of the window whose text was not wholly emitted
        self._emitted = len(decoder.decode(self._window).rstrip(BROKEN)) if self._window else 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._skip])

    def finish(self) -> str:
        """The rest, complete or not."""
        if not self._pending:
            return ""
        rest = self._decoder.decode(self._window)[self._emitted :]
        self._pending = 0
        return rest

    def _push(self, token_id: int) -> str:
        """One at a time, so that each complete character is emitted before another one begins."""
        self._window.append(token_id)
        self._pending += 1
        text = self._decoder.decode(self._window)
        if not text.endswith(BROKEN):
            return self._emit(text)
        if self._pending > PENDING_TOKENS_MAX:
            return self._emit_broken(text)
        return ""

    def _emit(self, text: str) -> str:
        new = text[self._emitted :]
        self._window = self._window[-self._pending :]
        self._emitted = len(self._decoder.decode(self._window))
        self._pending = 0
        return new

    def _emit_broken(self, text: str) -> str:
        uncertain = min(len(text) - len(text.rstrip(BROKEN)), INCOMPLETE_TOKENS_MAX)
        new = text[self._emitted : len(text) - uncertain]
        self._window = self._window[-INCOMPLETE_TOKENS_MAX - 1 :]
        self._emitted = max(0, len(self._decoder.decode(self._window)) - uncertain)
        self._pending = len(self._window)
        return new
