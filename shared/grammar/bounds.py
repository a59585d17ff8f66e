"""How large a grammar may be, counted in its text before any library reads it.

llguidance bounds what it builds by fuel. But some of its work grows with the square of what a text names, and a chain
of rules is followed by recursion. Counting is iterative and takes a millisecond, so no text can be too deep for it.
"""

from __future__ import annotations

import re

import msgspec

from shared.primitives.errors import RequestError
from shared.wire.grammar import GRAMMAR_CHARACTERS_MAX, Grammar

REGEX_CHARACTERS_MAX = 32 << 10
SCHEMA_NESTING_MAX = 64
SCHEMA_PROPERTIES_MAX = 500  # of one object: time to compile grows with their square
ALL_PROPERTIES_MAX = 2000  # of all objects of a schema together
SCHEMA_VALUES_MAX = 2000  # of one enum or other list
LARK_RULES_MAX = 1000  # and as many properties in schemas inside: both are counted by their colons

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKET = re.compile(r"[\[\]{}]")


def check_bounds(grammar: Grammar, param: str) -> None:
    """Raise `RequestError`, naming the field and the bound, for a grammar that is too large to be compiled."""
    text = grammar.text
    if len(text) > GRAMMAR_CHARACTERS_MAX:
        raise too_large(param, "characters", len(text), GRAMMAR_CHARACTERS_MAX)
    if grammar.kind == "regex" and len(text) > REGEX_CHARACTERS_MAX:
        raise too_large(param, "characters", len(text), REGEX_CHARACTERS_MAX)
    if grammar.kind == "lark" and (colons := text.count(":")) > LARK_RULES_MAX:
        raise too_large(param, "rules, or colons at all", colons, LARK_RULES_MAX)
    if grammar.kind == "json":
        check_nesting(text, param)
        _check_schema(msgspec.json.decode(text), param)


def check_nesting(text: str, param: str) -> None:
    """Raise `RequestError` for JSON that is nested too deep. To be called before it is decoded."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > SCHEMA_NESTING_MAX:
        raise too_large(param, "nested levels", deepest, SCHEMA_NESTING_MAX)


def _check_schema(schema: object, param: str) -> None:
    every = 0
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as found:
                every += len(found)
                if len(found) > SCHEMA_PROPERTIES_MAX:
                    raise too_large(param, "properties in one object", len(found), SCHEMA_PROPERTIES_MAX)
                if every > ALL_PROPERTIES_MAX:
                    raise too_large(param, "properties in all its objects", every, ALL_PROPERTIES_MAX)
                waiting.extend(found.values())
            case list() as found:
                if len(found) > SCHEMA_VALUES_MAX:
                    raise too_large(param, "values in one list", len(found), SCHEMA_VALUES_MAX)
                waiting.extend(found)


def too_large(param: str, what: str, met: int, most: int) -> RequestError:
    """The grammar has more of something than it may have."""
    return RequestError(
        f"{param} may have at most {most} {what}, got {met}: make it smaller",
        param=param,
        code="grammar_too_complex",
    )
