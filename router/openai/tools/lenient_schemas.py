"""Patterns of a lenient JSON schema that no worker can keep to: those that look around, and those that refer back.

JavaScript's regular expressions have both, and zod writes them for an e-mail address. Such a pattern becomes an
annotation under another name, so that the rest of the schema is kept, and the answer's header tells of it.
"""

from __future__ import annotations

import re

import msgspec

from router.openai.tools.calendar_formats import VALUES
from shared.wire.grammar import Grammar

_ANNOTATION = "x-pattern"
_BEYOND = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")


def with_patterns_as_annotations(schema: bytes) -> bytes:
    """A schema as JSON, without such patterns. However deep it is, nothing here recurses."""
    if b'"pattern"' not in schema:
        return schema
    whole = msgspec.json.decode(schema)
    waiting = [whole]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            pattern = node.get("pattern")
            if isinstance(pattern, str) and _BEYOND.search(pattern):
                node[_ANNOTATION] = node.pop("pattern")
            waiting += (value for key, value in node.items() if key not in VALUES)
    return msgspec.json.encode(whole)


def has_pattern_annotations(grammar: Grammar) -> bool:
    """Whether a grammar's schema has lost a pattern."""
    return f'"{_ANNOTATION}"' in grammar.text
