"""Where a long text may be cut so that the parts' token ids join to the whole's.

A tokenizer keeps 100 to 200 bytes for each byte of a text while it encodes it, and a text that is far too long would be
encoded to its end. So long texts are encoded in slices. That is exact only at a *seam*: a place where the tokenizer
cuts whatever stands on both sides. Five kinds are known:

    before a space    word| next      a space after a letter or digit begins a new piece (GPT-2, Llama 3, Qwen)
    after a line      line\\n|next     a letter or digit after a line break does, too; texts without spaces have these
    after lines        line\\n\\n|next   the same after any line breaks (Llama 3, Qwen), so between paragraphs, too
    before a line     line\\n|\\nnext   the last of several line breaks begins a piece before a letter (GPT-2, SmolLM)
    at a space        word next       the space falls between, for tokenizers that put one before each text (Llama 2)

Which of them a tokenizer has is found out when it is loaded. A kind counts if no token of the vocabulary spans it, so
that no merge can, and if a set of samples encodes equally in one and in two parts. A tokenizer that has none, and a
text without any in `SLICE_BYTES`, is encoded in one call or not at all.

This file knows neither messages nor context lengths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product

# of UTF-8 in one call of the tokenizer: at most 54 MiB, measured with the dearest characters
SLICE_BYTES = 256 << 10
TAIL_CHARS = 1024  # a seam is looked for here first: most texts have one

Encode = Callable[[str], list[int]]

# Each kind's last match in a text is where it is cut; what the match covers is left out. In the vocabulary, U+FFFD is
# a part of a character, so it may be one of a letter.
_BEFORE_SPACE = r"(?<=[^\W_])(?= )"
_AFTER_LINE = r"(?<=\S\n)(?=[^\W_])"
_AFTER_LINES = r"(?<=\n)(?=[^\W_])"
_LETTER = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u3400-\u4db5\u4e00-\u9fef\uac00-\ud7a3"  # none of them a number, as ² is
_BEFORE_LINE = rf"(?<=\n)(?=\n[{_LETTER}])"
_AT_SPACE = r"(?<=[^\W_]) (?=[^\W_])"
_SPANNED = {
    _BEFORE_SPACE: re.compile(r"(?:[^\W_]|\ufffd) "),
    _AFTER_LINE: re.compile(r"\n(?:[^\W_]|\ufffd)"),
    _AFTER_LINES: re.compile(r"\n(?:[^\W_]|\ufffd)"),
    _BEFORE_LINE: re.compile(r"\n(?:[^\W_]|\ufffd)|\S\n\n"),
    _AT_SPACE: re.compile(r"(?:[^\W_]|\ufffd) "),
}
_BEFORE_SAMPLES = ["The fox", "x = {7", "don't,(a", "日本語", "über", "a  \n\n b", "1234567", "🙂 9", "A"]
_AFTER_SAMPLES = ["fox.", "7 + 8\n", "a\n\n  b", "日本", "é!", "1234567 x", "B  ", "'s", "x🙂"]


class SplitPoints:
    """The split points of one tokenizer; none where a cut is not exact."""

    def __init__(self, patterns: list[str]):
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def slices(self, text: str, chars_max: int) -> Iterator[str]:
        """`text` in slices of at most `chars_max` characters and `SLICE_BYTES`.

        Raises `NoSplitPointError` behind the last slice that could be cut.
        """
        at = 0
        while len(text) - at > (fits := len(_window(text, at, chars_max))):
            cut = self._last_seam(text, at, at + fits)
            if cut is None:
                raise NoSplitPointError(fits)
            yield text[at : cut[0]]
            at = cut[1]
        yield text[at:]

    def _last_seam(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Where the last seam in `text[start:end]` begins and ends; the end of the window is none."""
        if self._pattern is None:
            return None
        for first in (max(start + 1, end - TAIL_CHARS), start + 1):
            spans = [match.span() for match in self._pattern.finditer(text, first, end)]
            inner = [span for span in spans if span[1] < end]
            if inner:
                return inner[-1]
        return None


class NoSplitPointError(Exception):
    """A text has no seam within the `chars` that may be encoded in one call."""

    def __init__(self, chars: int):
        super().__init__(chars)
        self.chars = chars


def find_split_points(encode: Encode, vocabulary: list[str], added_tokens: list[str]) -> SplitPoints:
    """Split points of a tokenizer: `encode` adds no special tokens, `vocabulary` has the text of every other."""
    alternatives = [
        [_BEFORE_SPACE, _AFTER_LINES],
        [_BEFORE_SPACE, _AFTER_LINE, _BEFORE_LINE],
        [_BEFORE_SPACE, _AFTER_LINE],
        [_BEFORE_SPACE],
        [_AT_SPACE],
    ]
    for patterns in alternatives:
        if all(_holds(pattern, encode, vocabulary, added_tokens) for pattern in patterns):
            return SplitPoints(patterns)
    return SplitPoints([])


def _holds(pattern: str, encode: Encode, vocabulary: list[str], added_tokens: list[str]) -> bool:
    """Whether a cut of this kind is exact."""
    seam = re.compile(pattern)
    if any(seam.search(f" {token} a") for token in added_tokens):
        return False
    if any(_SPANNED[pattern].search(token) for token in vocabulary):
        return False
    return all(_joins(seam, encode, before + between + after) for before, between, after in _samples())


def _samples() -> Iterator[tuple[str, str, str]]:
    return product(_BEFORE_SAMPLES, ("", " ", "\n", "\n\n", " \n", "  "), _AFTER_SAMPLES)


def _joins(seam: re.Pattern[str], encode: Encode, text: str) -> bool:
    whole = encode(text)
    return all(
        encode(text[: match.start()]) + encode(text[match.end() :]) == whole for match in seam.finditer(text)
    )


def _window(text: str, at: int, chars_max: int) -> str:
    """The beginning of `text[at:]` that one call may encode."""
    window = text[at : at + min(chars_max, SLICE_BYTES)]
    encoded = window.encode()
    return window if len(encoded) <= SLICE_BYTES else encoded[:SLICE_BYTES].decode(errors="ignore")
