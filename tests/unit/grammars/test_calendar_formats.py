"""Dates and times that a schema asks for: what passes is what Python's calendar takes, and what llguidance writes."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest

from router.openai.tools.structured_output import PATTERNS, json_grammar, with_calendar
from tests.unit.grammars.test_tool_grammars import accepts

YEARS = (
    0,
    1,
    4,
    9,
    10,
    99,
    100,
    400,
    999,
    1000,
    1600,
    1700,
    1900,
    1996,
    2000,
    2023,
    2024,
    2100,
    2400,
    9996,
    9999,
)


def exists(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_a_date_passes_if_the_calendar_has_it() -> None:
    for year in YEARS:
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(re.search(PATTERNS["date"], text)) is exists(text), text


@pytest.mark.parametrize(
    ("name", "text", "passes"),
    [
        ("date", "2024-02-29", True),
        ("date", "2023-02-29", False),
        ("date", "0000-02-01", False),
        ("date", "2024-04-31", False),
        ("time", "23:59:59Z", True),
        ("time", "23:59:60Z", False),
        ("time", "08:00:00.125+05:30", True),
        ("date-time", "2000-02-29T00:00:00Z", True),
        ("date-time", "1900-02-29T00:00:00Z", False),
        ("date-time", "2000-02-29 00:00:00Z", False),
    ],
)
def test_an_answer_is_held_to_it(tokenizer_json: Path, name: str, text: str, passes: bool) -> None:
    grammar = json_grammar({"type": "string", "format": name}, "response_format")
    assert accepts(tokenizer_json, grammar, json.dumps(text)) is passes


def test_nothing_but_formats_is_changed() -> None:
    kept = {
        "properties": {"format": {"type": "string"}, "a": {"const": {"format": "date"}}},
        "anyOf": [
            {"type": "string", "format": "date", "maxLength": 10},
            {"type": "string", "format": "uuid"},
        ],
        "enum": [{"format": "time"}],
    }
    assert json.loads(with_calendar(json.dumps(kept).encode())) == kept


def test_the_schema_that_was_given_stays_as_it_is() -> None:
    """It may be a tool's, which the prompt shows."""
    given = {"type": "array", "items": {"type": "string", "format": "date"}}
    assert "pattern" in json_grammar(given, "tools").text
    assert given["items"] == {"type": "string", "format": "date"}
