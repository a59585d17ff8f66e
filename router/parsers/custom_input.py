r"""The text of a custom tool out of the arguments of its call, while they come.

    {"input": "*** Begin Patch\n…"}    the text is the string, without its escapes
    "*** Begin Patch\n…"               … as some models write it
    anything else                      the text of an object's one string, else what stands there; told at its end

The string passes on piece by piece, and an escape that is cut waits for its end. Half of a surrogate pair alone is
replaced, because it is no text.
"""

from __future__ import annotations

import json
import re

INPUT = "input"  # the argument that holds the text, as OpenAI names it in calls

_BEGIN_CHARS = 256  # before a string; of more, blanks are none, and nothing is read again with each piece
_BEGIN = re.compile(rf'\s*(?:\{{\s*"{INPUT}"\s*:\s*)?"')
_PART = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]', re.DOTALL
)
_CUT = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?")  # an escape, or a pair
_HALVES = re.compile("[\ud800-\udfff]")


class CustomInput:
    """Reads the arguments of one call."""

    def __init__(self) -> None:
        self._held = ""  # what cannot be told yet, of a string or of its beginning
        self._rest: list[str] = []  # of what is no string
        self._begun = self._ended = self._other = False

    def push(self, text: str) -> str:
        """What of the tool's text is certain now."""
        if self._ended:
            return ""
        if self._other:
            self._rest.append(text)
            return ""
        self._held += text
        return self._string() if self._begun or self._begins() else ""

    def finish(self) -> str:
        """The rest."""
        held, self._held = self._held + "".join(self._rest), ""
        if self._begun or not held:
            return ""  # an escape that was cut off
        try:
            value = json.loads(held)
        except (ValueError, RecursionError):
            return held
        strings = list(value.values()) if isinstance(value, dict) else [value]
        return _whole(strings[0]) if len(strings) == 1 and isinstance(strings[0], str) else held

    def _begins(self) -> bool:
        """Whether the string has begun. What cannot become one any more is held to the end."""
        if found := _BEGIN.match(self._held):
            self._held = self._held[found.end() :]
            self._begun = True
        else:
            compact = "".join(self._held[:_BEGIN_CHARS].split())
            self._other = len(self._held) > _BEGIN_CHARS or not f'{{"{INPUT}":"'.startswith(compact)
        return self._begun

    def _string(self) -> str:
        held, at, parts = self._held, 0, []
        while at < len(held):
            if held[at] == '"':
                self._ended = True
                break
            if held[at] == "\\" and len(held) - at < 12 and _CUT.fullmatch(held, at):
                break
            found = _PART.match(held, at)
            parts.append(found[0] if found else held[at])  # a backslash before what is no escape
            at += len(parts[-1])
        self._held = "" if self._ended else held[at:]
        return "".join(map(_decoded, parts))


def _decoded(part: str) -> str:
    if not part.startswith("\\"):
        return part
    try:
        return _whole(json.loads(f'"{part}"'))
    except ValueError:
        return part


def _whole(text: str) -> str:
    return _HALVES.sub("\ufffd", text)
