"""Stop strings: text passes up to the first of them, in time linear in the text.

Each stop string is matched by Knuth, Morris and Pratt's automaton: its state is the length of the longest end of the
text that the string begins with. A character moves the state forward by one or back along the *borders* (the longest
proper end of a beginning that is a beginning too), so a character costs a constant amortized over the text, whatever
the strings are. What the longest state covers may become a stop string and is held back.

    text so far   … y e s \\n \\n        stop "\\n\\nQ:"  state 2: two characters are held back

Borders are computed as far as the text has matched, so a request with long stop strings costs nothing until then.
This file knows neither tokens nor requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopPattern:
    """One stop string with its borders; shared by all texts that are looked through for it."""

    def __init__(self, stop: str):
        self.stop = stop
        self._borders = array("H", [0, 0])  # of the beginnings of 0, 1, … characters

    def border(self, length: int) -> int:
        """The longest proper end of the first `length` characters that the stop string begins with."""
        borders, stop = self._borders, self.stop
        while len(borders) <= length:
            character, at = stop[len(borders) - 1], borders[-1]
            while at and stop[at] != character:
                at = borders[at]
            borders.append(at + (stop[at] == character))
        return borders[length]


class _Matcher:
    """Where one text stands in one stop string."""

    def __init__(self, pattern: StopPattern):
        self.pattern = pattern
        self.length = len(pattern.stop)
        self.state = 0

    def push(self, text: str, read: int = 0) -> int | None:
        """How much of `text` was read when the stop string was complete; None if it is not. `read` was before."""
        stop, state = self.pattern.stop, self.state
        while read < len(text):
            if not state:
                read = text.find(stop[0], read)
                if read < 0:
                    break
            while state and stop[state] != text[read]:
                state = self.pattern.border(state)
            state += stop[state] == text[read]
            read += 1
            if state == self.length:
                self.state = self.pattern.border(state)
                return read
        self.state = state
        return None

    def pass_over(self, text: str) -> None:
        """Read `text`, in which the stop string does not count."""
        read: int | None = 0
        while read is not None:
            read = self.push(text, read)


class StopStrings:
    """Lets text pass up to the first stop string, which is left out unless asked for.

    The first is the one that ends first (of two that end together, the longer), so the outcome does not depend on
    how the text was cut into parts.
    """

    def __init__(self, patterns: Sequence[StopPattern], *, include: bool = False):
        """`include`: the text passes up to the end of the stop string."""
        self.found: str | None = None
        self._include = include
        self._matchers = [_Matcher(pattern) for pattern in patterns]
        self._held = ""  # may be the beginning of a stop string

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """The new text that may pass, and whether a stop string ended it. `may_end`: else one that ends here passes."""
        if not self._matchers:
            return text, False
        whole, ends = self._held + text, list[tuple[int, int]]()
        if may_end:
            ends = [(read, -matcher.length) for matcher in self._matchers if (read := matcher.push(text))]
        else:
            for matcher in self._matchers:
                matcher.pass_over(text)
        if ends:
            read, minus_length = min(ends)
            end, self._held = len(self._held) + read, ""
            self.found = whole[end + minus_length : end]
            return whole[: end if self._include else end + minus_length], True
        held = max(matcher.state for matcher in self._matchers)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held], False

    def finish(self) -> str:
        """The held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held
