"""A change to every object of a JSON schema, however deep: nothing here recurses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

VALUES = {"const", "enum", "default", "examples"}  # keywords that hold values and no schemas


def rewritten(schema: bytes, keyword: str, rewrite: Callable[[dict[str, Any]], None]) -> bytes:
    """A schema as JSON, after `rewrite` has changed each of its objects; unread where `keyword` does not occur."""
    if f'"{keyword}"'.encode() not in schema:
        return schema
    whole = msgspec.json.decode(schema)
    waiting = [whole]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            rewrite(node)
            waiting += (value for key, value in node.items() if key not in VALUES)
    return msgspec.json.encode(whole)
