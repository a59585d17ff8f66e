"""From token ids to text, step by step: never half a character, never a piece of a stop string.

A token is a run of bytes, not of characters, so the text of a stream may only grow by what later tokens cannot
change. `Detokenizer` decodes a short window: the tokens of the last piece it gave out (some decoders treat the
first token of a text differently, so there must be one before the new ones) and those after it. While the
window's text ends in U+FFFD, the last character may be incomplete and waits.

    given out ──────────┐
    … t t t [ t t       │ t t ]      window: [context, pending]
                        └ decode(window)[given:] is new, unless it ends in U+FFFD

Broken bytes would make it wait for ever, and the window grow: an incomplete character spans at most three tokens,
so beyond `PENDING_TOKENS_MAX` all is given out but the last three. For byte-level vocabularies the pieces join to
exactly `decode(all tokens)`; vocabularies with byte fallback decode a broken run of bytes as a whole, so there the
number of U+FFFD for broken bytes may differ.

Neither class knows requests, tokens' meaning, or HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from router.text.tokenizer import Decoder

BROKEN = "\N{REPLACEMENT CHARACTER}"
INCOMPLETE_TOKENS_MAX = (
    3  # UTF-8: at most three bytes of a character, so tokens, can lie before its last byte
)
PENDING_TOKENS_MAX = 8  # longer than any incomplete character: what still ends in U+FFFD then is broken
CONTEXT_TOKENS = 6  # of a prompt, before its continuation


class Detokenizer:
    """The text of one growing list of tokens."""

    def __init__(self, decoder: Decoder, skip: Collection[int] = (), context: Sequence[int] = ()):
        """`skip` are ids without text (special tokens); `context` the end of the text that is continued."""
        self._decoder = decoder
        self._skip = skip
        self._window = [token_id for token_id in context if token_id not in skip][-CONTEXT_TOKENS:]
        self._pending = 0  # tokens at the end of the window whose text was not wholly given out
        self._given = len(decoder.decode(self._window).rstrip(BROKEN)) if self._window else 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._skip])

    def finish(self) -> str:
        """The rest, complete or not."""
        if not self._pending:
            return ""
        rest = self._decoder.decode(self._window)[self._given :]
        self._pending = 0
        return rest

    def _push(self, token_id: int) -> str:
        """One at a time, so that each complete character is given out before another one begins."""
        self._window.append(token_id)
        self._pending += 1
        text = self._decoder.decode(self._window)
        if not text.endswith(BROKEN):
            return self._give(text)
        if self._pending > PENDING_TOKENS_MAX:
            return self._give_broken(text)
        return ""

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._window = self._window[-self._pending :]
        self._given = len(self._decoder.decode(self._window))
        self._pending = 0
        return new

    def _give_broken(self, text: str) -> str:
        uncertain = min(len(text) - len(text.rstrip(BROKEN)), INCOMPLETE_TOKENS_MAX)
        new = text[self._given : len(text) - uncertain]
        self._window = self._window[-INCOMPLETE_TOKENS_MAX - 1 :]
        self._given = max(0, len(self._decoder.decode(self._window)) - uncertain)
        self._pending = len(self._window)
        return new


class StopStrings:
    """Lets text pass up to the first stop string, which is left out.

    The first is the one that ends first (of two that end together, the longer), so the outcome does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""  # may be the beginning of a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """What may be given out of all the text so far, and whether a stop string ended it."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        """The held text: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
