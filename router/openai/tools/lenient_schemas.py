"""Patterns of a lenient JSON schema that no worker can keep to: those that look around, and those that refer back.

JavaScript's regular expressions have both, and zod writes them for an e-mail address. Such a pattern becomes an
annotation under another name, so that the rest of the schema is kept, and the answer's header tells of it.
"""

from __future__ import annotations

import re
from typing import Any

from router.openai.tools.schema_walk import rewritten
from shared.wire.grammar import Grammar

_ANNOTATION = "x-pattern"
_BEYOND = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")


def with_patterns_as_annotations(schema: bytes) -> bytes:
    """A schema as JSON, without such patterns."""
    return rewritten(schema, "pattern", _pattern_as_annotation)


def _pattern_as_annotation(node: dict[str, Any]) -> None:
    pattern = node.get("pattern")
    if isinstance(pattern, str) and _BEYOND.search(pattern):
        node[_ANNOTATION] = node.pop("pattern")


def has_pattern_annotations(grammar: Grammar) -> bool:
    """Whether a grammar's schema has lost a pattern."""
    return f'"{_ANNOTATION}"' in grammar.text
