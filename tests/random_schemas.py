"""JSON schemas drawn from a seed, of what clients use: objects, arrays, unions, references, formats and bounds."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4")
PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^a+b?$", r"^\d{4}$")
NAMES = ("name", "age", "city", "tags", "size", "état", "a b", 'q"uote', "id", "kind")


def random_schema(seed: int) -> dict[str, Any]:
    """An object of a few properties."""
    rng = random.Random(f"schema {seed}")
    schema = _object(rng, 0)
    if rng.random() < 0.3:
        schema["$defs"] = {"leaf": _leaf(rng)}
        schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
        schema["required"].append("leaf")
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if depth < 2 and kind < 0.2:
        return _object(rng, depth + 1)
    if depth < 2 and kind < 0.35:
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": _any(rng, depth + 1),
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }
    if depth < 2 and kind < 0.5:
        return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    return _leaf(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: _any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    return rng.choice(
        (
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)},
            {"type": "number", "minimum": 0, "maximum": 10},
            {"type": "integer", "multipleOf": rng.choice((2, 5, 10)), "minimum": 0, "maximum": 1000},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"enum": rng.sample(["a", "b", 3, None, True, {"x": 1}], rng.randint(1, 4))},
            {"const": rng.choice(("fixed", 7, [1, 2]))},
        )
    )
