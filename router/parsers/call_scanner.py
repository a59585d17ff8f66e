"""Reads calls of tools that a model writes as JSON, while it writes them.

    {"name": "weather", "arguments": {"city": "Paris"}}      one call, or several with , ; or spaces between, or a list
    weather[ARGS]{"city": "Paris"}                            `named`: the name stands before its arguments

The name of a call is told as soon as it is complete. What its arguments hold is passed on as the model wrote it, not
judged: a text may end in the middle of a call. Line breaks within strings alone are mended (`ControlEscapes`). What has
no name was no call, and is given back as text; so is what has a name that is not known, if names are, and no arguments.

This file knows neither tags around calls nor tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

NAME_CHARS = 256  # what is longer is no name
_BETWEEN = " \t\r\n,;[]}"
_SPACES = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call's name, a piece of its arguments, or text that was no call."""

    kind: Literal["name", "arguments", "text"]
    text: str


class CallScanner:
    """The calls in one piece of an answer that is set apart for them."""

    def __init__(self, *, named: bool = False, names: Collection[str] = ()):
        """`names`: those that are known to be of calls; empty: any is."""
        self._names = names
        self._doubted = ""  # a name that is not, which makes a call with arguments alone
        self._parts: list[CallPart] = []
        self._named = named
        self._step = self._between
        self._raw: list[str] = []  # since the call began, while it may be none
        self._name: str | None = None
        self._value = _ValueEnd()
        self._key = ""
        self._text: list[str] = []  # of the value that is read, where it is not passed on
        self._streams = False
        self._arguments: list[str] = []  # held until the name is known
        self._has_arguments = False
        self.calls = 0  # so far
        self.text_only = False  # what came was no call, or no longer

    def push(self, text: str) -> list[CallPart]:
        """What is certain now."""
        for character in text:
            self._step(character)
        return self._take()

    def finish(self) -> list[CallPart]:
        """What was held back; the text of a call without a name is text."""
        if self._raw:
            self._give_up()
        return self._take()

    def _take(self) -> list[CallPart]:
        parts, self._parts = self._parts, []
        return [
            CallPart(kind, "".join(part.text for part in same))
            for (kind, _), same in groupby(
                parts, key=lambda part: (part.kind, part.kind == "name" and id(part))
            )
        ]

    # ---- one character, where the call stands -------------------------------------------------------------------

    def _between(self, character: str) -> None:
        self._raw.append(character)
        if character == "{":
            self._raw = ["{"] if self.calls else self._raw
            self._name, self._doubted, self._arguments, self._has_arguments = None, "", [], False
            self._step = self._before_key
        elif self._named and character not in _BETWEEN:
            self._name = None
            self._step = self._bare_name
        elif character not in _BETWEEN:
            self._give_up()

    def _bare_name(self, character: str) -> None:
        self._raw.append(character)
        raw = "".join(self._raw)  # of at most NAME_CHARS
        if character == "{" or raw.endswith(("[ARGS]", "[CALL_ID]")):
            self._arguments, self._has_arguments, self._value = [], False, _ValueEnd()
            self._say_name(raw.split("[")[0].rstrip("{").strip(_BETWEEN))
            if self._name is None:
                self._give_up()
            elif character == "{":
                self._step = self._bare_arguments
                self._bare_arguments(character)
            else:
                self._step = self._before_arguments
        elif len(self._raw) > NAME_CHARS:
            self._give_up()

    def _before_arguments(self, character: str) -> None:
        """Behind [ARGS], or in an id of the call, which is left out."""
        if character == "{":
            self._step = self._bare_arguments
            self._bare_arguments(character)

    def _bare_arguments(self, character: str) -> None:
        self._say_arguments(character)
        if self._value.push(character):
            self._raw, self._step = [], self._between

    def _before_key(self, character: str) -> None:
        self._hold(character)
        if character == '"':
            self._value, self._key = _ValueEnd('"'), '"'
            self._step = self._in_key
        elif character == "}":
            self._end()
        elif character not in " \t\r\n,":
            self._give_up()

    def _in_key(self, character: str) -> None:
        self._hold(character)
        self._key += character
        if self._value.push(character):
            self._key = _string(self._key) or ""
            self._step = self._behind_key

    def _behind_key(self, character: str) -> None:
        self._hold(character)
        if character == ":":
            self._value, self._step = _ValueEnd(), self._before_value
        elif character not in _SPACES:
            self._give_up()

    def _before_value(self, character: str) -> None:
        if character in _SPACES:
            self._hold(character)
        else:
            self._text, self._streams = [], character == "{" and self._key in _ARGUMENTS
            self._step = self._in_value
            self._in_value(character)

    def _in_value(self, character: str) -> None:
        if character in ",}" and self._value.bare:  # ends a number or a word
            self._value_ended()
            self._before_key(character)
            return
        self._hold(character)
        if self._streams:
            self._say_arguments(character)
        else:
            self._text.append(character)
        if self._value.push(character):
            self._value_ended()

    def _value_ended(self) -> None:
        self._step = self._before_key
        text = "".join(self._text)
        if self._key == "name" and self._name is None:
            self._say_name(_string(text))
        elif self._key in _ARGUMENTS and not self._streams and text.strip() != "null":
            inner = _string(text)  # some models write them as a text that is JSON
            self._say_arguments(text if inner is None else inner)

    # ---- what is known ------------------------------------------------------------------------------------------

    def _hold(self, character: str) -> None:
        if self._name is None:
            self._raw.append(character)

    def _say_name(self, name: str | None) -> None:
        if name and self._names and name not in self._names:
            self._doubted = name
        elif name:
            self._begin_call(name)

    def _begin_call(self, name: str) -> None:
        self._name, self._raw = name, []
        self.calls += 1
        self._parts.append(CallPart("name", name))
        self._parts += [CallPart("arguments", text) for text in self._arguments]

    def _say_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self._name is None:
            self._arguments.append(text)
        else:
            self._parts.append(CallPart("arguments", text))

    def _end(self) -> None:
        if self._name is None and self._doubted and self._has_arguments:
            self._begin_call(self._doubted)
        if self._name is None:
            self._give_up()
            return
        if not self._has_arguments:
            self._say_arguments("{}")
        self._step = self._between

    def _give_up(self) -> None:
        """This and all that follows is text."""
        raw, self._raw = "".join(self._raw), []
        if raw.strip(_BETWEEN) or not self.calls:
            self._parts.append(CallPart("text", raw))
        self.text_only = True
        self._step = self._text_only

    def _text_only(self, character: str) -> None:
        self._parts.append(CallPart("text", character))


class _ValueEnd:
    """Finds the end of one JSON value."""

    def __init__(self, begun: str = ""):
        self._depth = 0
        self._quoted = begun == '"'
        self._escaped = False

    @property
    def bare(self) -> bool:
        """Whether this stands outside strings, objects and lists."""
        return not self._quoted and not self._depth

    def push(self, character: str) -> bool:
        """Whether the value ends with `character`; a number or a word ends before the next."""
        if self._quoted:
            ends = character == '"' and not self._escaped
            self._escaped = character == "\\" and not self._escaped
            self._quoted = not ends
            return ends and not self._depth
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


def _string(text: str) -> str | None:
    """The string that `text` is in JSON, though its line breaks may be no escapes."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return whole_text(value) if isinstance(value, str) else None


class ControlEscapes:
    """Escapes control characters within the strings of a JSON text, which models write as they are."""

    def __init__(self) -> None:
        self._quoted = self._escaped = False

    def push(self, text: str) -> str:
        """The next piece, as JSON has it."""
        return "".join(map(self._character, text)) if self._quoted or '"' in text else text

    def _character(self, character: str) -> str:
        if not self._quoted:
            self._quoted = character == '"'
            return character
        was_escaped, self._escaped = self._escaped, character == "\\" and not self._escaped
        if character < " ":  # behind a backslash it is one beside a line break
            return ("\\" if was_escaped else "") + json.dumps(character)[1:-1]
        self._quoted = character != '"' or was_escaped
        return character


# ---- the text of a custom tool out of the arguments of its call, while they come -------------------------------------
#     {"input": "*** Begin Patch\n…"}    the text is the string, without its escapes
#     "*** Begin Patch\n…"               … as some models write it
#     anything else                      the text of an object's one string, else what stands there; told at its end
#
# The string passes on piece by piece, and an escape that is cut waits for its end. Half of a surrogate pair alone is
# replaced, because it is no text.


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
        return whole_text(strings[0]) if len(strings) == 1 and isinstance(strings[0], str) else held

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
        return whole_text(json.loads(f'"{part}"'))
    except ValueError:
        return part


def whole_text(text: str) -> str:
    """Text with each half of a surrogate pair replaced, as JSON may have it: it cannot be written."""
    return _HALVES.sub("\ufffd", text)
