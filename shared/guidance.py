"""llguidance, as routers and engines use it: how a `Grammar` becomes its input, under which limits, and its version.

One place for both, so that a grammar that a router admits is compiled by the workers under the same limits. With
`shared.grammar_bounds`, which looks at a text before the library does, the limits bound time and memory: of a compile
to a fraction of a second, and of a step to some milliseconds. A grammar that meets a limit has an error, never a crash.

Nothing here knows torch, requests or threads. Errors quote the grammar, so they go to its sender alone, never to a log.
"""

from __future__ import annotations

from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, get_version

from shared.grammar import Grammar

ERROR_LENGTH = 400  # of the library's messages, which may quote much of a grammar

# Measured with 50,000 tokens: each keeps its worst case (docs/performance.md) below what other requests would feel.
_LIMITS = LLParserLimits(
    max_items_in_row=2500,  # an object of 500 optional properties takes 2,007
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    step_max_items=10_000,
    max_lexer_states=20_000,  # of up to 2 kB
    max_grammar_size=50_000,
    verbose_errors=False,  # the others quote the answer so far
)


def library_version() -> str:
    """Of the library and of its engine for regular expressions: another version may allow other tokens."""
    return get_version()


def problem(grammar: Grammar) -> str:
    """Why `grammar` cannot be compiled, in the library's words; empty if it can. Releases the GIL meanwhile."""
    try:
        text = _library_text(grammar)
    except ValueError as error:  # a schema that is no JSON object
        return _shortened(str(error))
    return _shortened(LLMatcher.validate_grammar(text, limits=_LIMITS))


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


def _shortened(message: str) -> str:
    message = " ".join(message.replace("<non-verbose/>", "").split())
    return message if len(message) <= ERROR_LENGTH else message[: ERROR_LENGTH - 1] + "…"
