"""The arguments of a call that its model has written as texts, in the types that the tool declares for them.

    declared                        the text 7 is
    string                          "7"
    integer, or integer or null     7
    a $ref to an object, {…}        what the text is as JSON, whose strings may have raw line breaks
    nothing                         "7", unless the format writes all values as texts: then 7

What cannot be read in a declared type stays a text: the client, who knows the tool, judges it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def typed_arguments(arguments: Mapping[str, Any], parameters: Any, *, all_texts: bool) -> dict[str, Any]:
    """The arguments of a call in the types of `parameters`, the schema of its tool.

    `all_texts`: the format writes every value as a text, so one whose type is not declared is read as JSON.
    """
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    declared = properties if isinstance(properties, dict) else {}
    typed = {}
    for key, value in arguments.items():
        types = _types(declared.get(key), parameters)
        if not types and all_texts:
            typed[key] = _read(value) if isinstance(value, str) else value
        elif isinstance(value, list) and "array" not in types:  # a key that was written more than once
            typed[key] = [_typed(one, types) for one in value]
        else:
            typed[key] = _typed(value, types)
    return typed


def _types(schema: Any, root: Any) -> set[str]:
    """The names of the types that a schema may mean; each of its parts is looked at once."""
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        named = node.get("type")
        named = named if isinstance(named, list) else [named]
        known = {one for one in named if isinstance(one, str)}
        if not known:
            values = node["enum"] if isinstance(node.get("enum"), list) else []
            values = [*values, node["const"]] if "const" in node else values
            known = {_NAMES.get(type(value), "null") for value in values}
        types |= known | ({"null"} if node.get("nullable") else set())
        for union in ("anyOf", "oneOf", "allOf"):
            waiting += node[union] if isinstance(node.get(union), list) else []
        if isinstance(node.get("$ref"), str):
            waiting.append(_referred(node["$ref"], root))
    return types


def _referred(reference: str, root: Any) -> Any:
    node = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _typed(value: Any, types: Collection[str]) -> Any:
    """A value that may be a text in one of the types, else as it is."""
    if not isinstance(value, str) or set(types) <= {"string"}:
        return value
    text = value.strip()
    if "null" in types and text in ("null", "None"):
        return None
    if (number := _number(text, types)) is not None:
        return number
    if "boolean" in types and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    wanted = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    read = _read(text) if wanted else value
    return read if isinstance(read, wanted) else value


def _read(text: str) -> Any:
    """What a text is as JSON, else the text."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text


def _number(text: str, types: Collection[str]) -> int | float | None:
    """The number that a text is, if the types allow it; whole numbers are integers where no point says otherwise."""
    if not {"integer", "number"} & set(types):
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):  # no number of JSON
        return None
    if number.is_integer() and ("number" not in types or "." not in text):
        return int(number)
    return number if "number" in types else None
