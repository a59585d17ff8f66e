"""Which modules a checkpoint leaves in 16 bits: names and patterns of names, in bounded time whatever they say.

A folder may come from anybody, and a regular expression may take exponential time, or memory to compile. So patterns
are not given to `re`: a small part of its language is read here (characters, `.`, `\\d`, `\\w`, classes, `*` `+` `?`
behind one of them, and groups of alternatives), which is what published checkpoints use, and is matched by keeping all
states at once: each character of a name costs at most the length of the pattern. Everything else is refused by name.
Knows no torch.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from shared.primitives.errors import ModelError

NAMES_MAX = 1 << 16  # entries of a list: Qwen3-235B's has some 300
PATTERNS_MAX = 64
PATTERN_LENGTH_MAX = 256  # characters
BRANCHES_MAX = 64  # sequences that a pattern's alternatives stand for
# Characters of all names, by elements of all patterns: some seconds of the interpreter.
STEPS_MAX = 10_000_000

_DIGITS = frozenset(string.digits)
_WORDS = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES = {"d": _DIGITS, "w": _WORDS}
_SPECIAL = frozenset("*+?{}[]()|^$\\")


@dataclass(frozen=True, slots=True)
class _Element:
    """One character of these, or any; at least and at most how many times."""

    characters: frozenset[str] | None  # None: any
    optional: bool = False
    repeated: bool = False

    def takes(self, character: str) -> bool:
        return self.characters is None or character in self.characters


class NamePattern:
    """A regular expression in the part of the language that this module reads."""

    def __init__(self, text: str) -> None:
        """`ModelError` names a pattern that is too long or says more than is read here."""
        self._text = text
        if len(text) > PATTERN_LENGTH_MAX:
            raise ModelError(
                f"a pattern of names has {len(text)} characters, at most {PATTERN_LENGTH_MAX} are read: {text[:40]!r}…"
            )
        body = text.removeprefix("^")
        self._to_end = body.endswith("$") and not body.endswith("\\$")
        self._branches = _Reader(text, body.removesuffix("$") if self._to_end else body).branches()
        self.elements = sum(map(len, self._branches))

    def ends(self, name: str) -> set[int]:
        """Where in `name` a match that begins at its first character may end."""
        found = set().union(*(_ends(branch, name) for branch in self._branches))
        return found & {len(name)} if self._to_end else found


def _ends(branch: Sequence[_Element], name: str) -> set[int]:
    found, states = set(), _closed(branch, {0})
    for place in range(len(name) + 1):
        if len(branch) in states:
            found.add(place)
        if place == len(name) or not states:
            break
        taken = set()
        for state in states:
            if state < len(branch) and branch[state].takes(name[place]):
                taken.add(state + 1)
                if branch[state].repeated:
                    taken.add(state)
        states = _closed(branch, taken)
    return found


def _closed(branch: Sequence[_Element], states: set[int]) -> set[int]:
    """States that are given, and those behind elements that may be left out."""
    closed, waiting = set(states), list(states)
    while waiting:
        state = waiting.pop()
        if state < len(branch) and branch[state].optional and state + 1 not in closed:
            closed.add(state + 1)
            waiting.append(state + 1)
    return closed


class _Reader:
    """Reads a pattern into the sequences of elements that its alternatives stand for."""

    def __init__(self, text: str, body: str) -> None:
        self._text, self._body, self._place = text, body, 0

    def branches(self) -> list[list[_Element]]:
        found = self._alternatives()
        if self._place < len(self._body):
            raise self._refused()
        return found

    def _alternatives(self) -> list[list[_Element]]:
        found = self._sequence()
        while self._peek() == "|":
            self._place += 1
            found = self._bounded(found + self._sequence())
        return found

    def _sequence(self) -> list[list[_Element]]:
        found: list[list[_Element]] = [[]]
        while (character := self._peek()) not in ("", "|", ")"):
            if character == "(":
                inner = self._group()
                found = self._bounded([[*before, *after] for before in found for after in inner])
            else:
                element = self._counted(self._characters())
                found = [[*before, element] for before in found]
        return found

    def _group(self) -> list[list[_Element]]:
        self._place += 1
        if self._body.startswith("?:", self._place):
            self._place += 2
        inner = self._alternatives()
        if self._peek() != ")":
            raise self._refused()
        self._place += 1
        if self._peek() in "*+?{" and self._peek():
            raise self._refused()
        return inner

    def _counted(self, characters: frozenset[str] | None) -> _Element:
        many = self._peek()
        if many not in ("*", "+", "?"):
            return _Element(characters)
        self._place += 1
        if self._peek() == "?":  # which match is found first does not matter here
            self._place += 1
        return _Element(characters, optional=many in "*?", repeated=many in "*+")

    def _characters(self) -> frozenset[str] | None:
        character = self._take()
        if character == ".":
            return None
        if character == "\\":
            escaped = self._take()
            if escaped.isalnum() and escaped not in _CLASSES:
                raise self._refused()
            return _CLASSES.get(escaped, frozenset(escaped))
        if character == "[":
            return self._class()
        if character in _SPECIAL:
            raise self._refused()
        return frozenset(character)

    def _class(self) -> frozenset[str]:
        found: set[str] = set()
        while (character := self._take()) != "]":
            if character in "\\^[":
                raise self._refused()
            if self._peek() == "-" and not self._body.startswith("-]", self._place):
                self._place += 1
                found.update(map(chr, range(ord(character), min(ord(self._take()), 127) + 1)))
            else:
                found.add(character)
        return frozenset(found)

    def _bounded(self, branches: list[list[_Element]]) -> list[list[_Element]]:
        if len(branches) > BRANCHES_MAX:
            raise self._refused()
        return branches

    def _peek(self) -> str:
        return self._body[self._place : self._place + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise self._refused()
        self._place += 1
        return character

    def _refused(self) -> ModelError:
        return ModelError(
            f"unsupported pattern of module names: {self._text!r}; supported are characters, '.', '\\d', '\\w', "
            "classes, '*', '+' and '?' behind one of them, and groups of alternatives"
        )


class NameMatch(Enum):
    """Which names an entry that is no pattern stands for."""

    WHOLE = "whole"  # its own
    # As transformers reads `modules_to_not_convert`: also the modules within it, and every name that ends with it; and
    # it may be a pattern itself.
    PREFIXES = "prefixes"
    PARTS = "parts"  # as AutoAWQ reads that: every name that it is a part of


class NamesKept:
    """The list of modules that a checkpoint leaves in 16 bits."""

    def __init__(self, entries: Iterable[str], match: NameMatch) -> None:
        """`re:` begins a pattern that a name must begin with."""
        entries = list(entries)
        if len(entries) > NAMES_MAX:
            raise ModelError(
                f"a list of modules has {len(entries):,} entries, at most {NAMES_MAX:,} are read"
            )
        self._match = match
        self._patterns = [NamePattern(entry[3:]) for entry in entries if entry.startswith("re:")]
        plain = {entry for entry in entries if not entry.startswith("re:")}
        within = {entry for entry in plain if match is NameMatch.PREFIXES and _SPECIAL.intersection(entry)}
        self._within = [NamePattern(entry) for entry in sorted(within)]
        self._names = plain - within
        if (count := len(self._patterns) + len(self._within)) > PATTERNS_MAX:
            raise ModelError(f"{count} patterns of module names, at most {PATTERNS_MAX} are read")

    def among(self, names: Sequence[str]) -> frozenset[str]:
        """Names, of those given, that the list stands for; `ModelError` if that would take too long to find."""
        elements = sum(pattern.elements for pattern in (*self._patterns, *self._within))
        steps = elements * sum(map(len, names))
        if self._match is NameMatch.PARTS:
            steps += len(self._names) * len(names)
        if steps > STEPS_MAX:
            raise ModelError(
                f"patterns of module names take {steps:,} steps for {len(names):,} modules, at most {STEPS_MAX:,} "
                "are made"
            )
        return frozenset(name for name in names if self._has(name))

    def _has(self, name: str) -> bool:
        if name in self._names:
            return True
        if any(pattern.ends(name) for pattern in self._patterns):
            return True
        if self._match is NameMatch.WHOLE:
            return False
        if self._match is NameMatch.PARTS:
            return any(part in name for part in self._names)
        borders = [place for place, character in enumerate(name) if character == "."]
        if any(name[:place] in self._names for place in borders):
            return True
        if any(name[place:] in self._names for place in range(len(name))):
            return True
        ends = {*borders, *(place + 1 for place in borders), len(name)}
        return any(pattern.ends(name) & ends for pattern in self._within)
