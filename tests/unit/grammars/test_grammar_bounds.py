"""Grammars are counted before a library reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.limits.grammars import (
    ALL_PROPERTIES_MAX,
    LARK_RULES_MAX,
    REGEX_CHARACTERS_MAX,
    SCHEMA_NESTING_MAX,
    SCHEMA_PROPERTIES_MAX,
    SCHEMA_VALUES_MAX,
    check_bounds,
    check_nesting,
)
from shared.primitives.errors import RequestError
from shared.wire.grammar import Grammar


def nested(levels: int) -> Grammar:
    return Grammar("json", '{"items":' * levels + "true" + "}" * levels)


def schema(value: Any) -> Grammar:
    return Grammar("json", json.dumps(value, separators=(",", ":")))


def properties(count: int) -> dict[str, Any]:
    return {f"p{number}": True for number in range(count)}


def lark(rules: int) -> Grammar:
    return Grammar("lark", "\n".join(f'a{number}: "x"' for number in range(rules)))


FULL = [
    pytest.param(nested(SCHEMA_NESTING_MAX), nested(SCHEMA_NESTING_MAX + 1), "nested", id="nesting"),
    pytest.param(
        schema({"properties": properties(SCHEMA_PROPERTIES_MAX)}),
        schema({"properties": properties(SCHEMA_PROPERTIES_MAX + 1)}),
        "one object",
        id="properties",
    ),
    pytest.param(
        schema([properties(SCHEMA_PROPERTIES_MAX)] * 4),
        schema([properties(SCHEMA_PROPERTIES_MAX)] * 4 + [{"type": "object"}]),
        "all its objects",
        id="all properties",
    ),
    pytest.param(
        schema({"enum": [1] * SCHEMA_VALUES_MAX}),
        schema({"enum": [1] * (SCHEMA_VALUES_MAX + 1)}),
        "one list",
        id="values",
    ),
    pytest.param(
        Grammar("regex", "a" * REGEX_CHARACTERS_MAX),
        Grammar("regex", "a" * (REGEX_CHARACTERS_MAX + 1)),
        "characters",
        id="regex",
    ),
    pytest.param(lark(LARK_RULES_MAX), lark(LARK_RULES_MAX + 1), "rules", id="rules"),
]


@pytest.mark.parametrize(("fitting", "too_large", "word"), FULL)
def test_each_bound_is_met_exactly(fitting: Grammar, too_large: Grammar, word: str) -> None:
    assert ALL_PROPERTIES_MAX == 4 * SCHEMA_PROPERTIES_MAX
    check_bounds(fitting, "response_format")
    with pytest.raises(RequestError, match=word) as met:
        check_bounds(too_large, "response_format")
    assert (met.value.status, met.value.param, met.value.code) == (
        400,
        "response_format",
        "grammar_too_complex",
    )


def test_a_nesting_that_no_decoder_survives_is_counted() -> None:
    with pytest.raises(RequestError, match="got 60000"):
        check_nesting("[" * 60_000, "structured_outputs")


def test_brackets_in_strings_are_text() -> None:
    check_nesting(json.dumps({"const": "[{" * 100 + '"' + "\\"}), "structured_outputs")
