"""llguidance, as routers and engines use it: how a `Grammar` becomes its input, under which limits, and its version.

One place for both, so that a grammar that a router admits is compiled by the workers under the same limits. With
`check_bounds`, which looks at a text before the library does, the limits bound time and memory: of a compile
to a fraction of a second, and of a step to some milliseconds. A grammar that meets a limit has an error, never a crash.

Nothing here knows torch, requests or threads. Errors quote the grammar, so they go to its sender alone, never to a log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, get_version

from shared.primitives.errors import RequestError
from shared.wire.grammar import GRAMMAR_CHARACTERS_MAX, Grammar

NOTHING_FOLLOWS = (
    "no token can follow here: no answer, or none that begins like this one, satisfies the grammar"
)
_STOPS = {"NoExtension": NOTHING_FOLLOWS, "NoExtensionBias": NOTHING_FOLLOWS}  # the library's words for it

ERROR_LENGTH = 400  # of the library's messages, which may quote much of a grammar

# Measured with 50,000 tokens: each keeps its worst case (docs/lab/grammars.md) below what other requests would feel.
_LIMITS = LLParserLimits(
    max_items_in_row=2500,  # an object of 500 optional properties takes 2,007
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    step_max_items=10_000,
    max_lexer_states=20_000,  # of up to 2 kB
    max_grammar_size=50_000,
    verbose_errors=False,  # the others quote the answer so far
)
_IN_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?)\n +\d+ \| .*", re.DOTALL)


def library_version() -> str:
    """Version of the library and of its engine for regular expressions: another may allow other tokens."""
    return get_version()


@dataclass(frozen=True, slots=True)
class Judgement:
    """Why a grammar cannot be compiled, empty if it can; and keywords of its schemas to which it is not kept."""

    problem: str
    unkept: tuple[str, ...] = ()


def judged(grammar: Grammar) -> Judgement:
    """Whether `grammar` can be compiled, and what of it is kept to. Releases the GIL meanwhile."""
    try:
        text = _library_text(grammar)
    except ValueError as error:  # a schema that is no JSON object
        return Judgement(_shortened(str(error)))
    failed, said = LLMatcher.validate_grammar_with_warnings(text, limits=_LIMITS)
    if failed:
        return Judgement(_shortened(_of_schema(said[0] if said else "it cannot be compiled")))
    return Judgement("", tuple(dict.fromkeys(name for one in said for name in _keywords(one))))


def problem(grammar: Grammar) -> str:
    """Why `grammar` cannot be compiled, in the library's words; empty if it can. Releases the GIL meanwhile."""
    return judged(grammar).problem


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the start of the grammar; one in error if it cannot be compiled. Releases the GIL meanwhile."""
    try:
        text = _library_text(grammar)
    except ValueError:
        text = "start: no_json_object"  # an unknown rule: a matcher in error, like all others that cannot be compiled
    return LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)


class Failing(Protocol):
    """What may be in error, as an `LLMatcher`."""

    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


def error_of(matcher: Failing) -> str:
    """What the matcher met, shortened; empty if it is sound."""
    return _shortened(matcher.get_error()) if matcher.is_error() else ""


def _library_text(grammar: Grammar) -> str:
    match grammar.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _of_schema(message: str) -> str:
    """What is wrong in a schema, without the lines of the grammar around it, which its sender has never seen."""
    found = _IN_SCHEMA.fullmatch(message)
    return found[1] if found else message


def _keywords(warning: str) -> list[str]:
    """The keywords of a schema that a warning is about."""
    if warning.startswith("Unimplemented keys"):
        return re.findall(r'"([$A-Za-z]{1,64})"', warning)
    return ["format" if "format" in warning else "oneOf" if "oneOf" in warning else "schema"]


def _shortened(message: str) -> str:
    message = " ".join(message.replace("<non-verbose/>", "").split())
    message = _STOPS.get(message, message)
    return message if len(message) <= ERROR_LENGTH else message[: ERROR_LENGTH - 1] + "…"


# ---- how large a grammar may be, counted in its text before any library reads it -------------------------------------
# llguidance bounds what it builds by fuel. But some of its work grows with the square of what a text names, and a chain
# of rules is followed by recursion. Counting is iterative and takes a millisecond, so no text can be too deep for it.


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
