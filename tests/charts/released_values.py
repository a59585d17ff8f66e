"""Which values the chart of the last release took: their paths, and the words that a value is chosen from.

`released_values.txt` keeps them from release to release. `python -m tests.charts.released_values` writes those of this
tree, which is a step of a release (CONTRIBUTING.md); until then a test asks for a line under *Upgrading* in the
changelog for each that this tree no longer takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.charts.rendering import CHART

RELEASED = Path(__file__).with_name("released_values.txt")
HEAD = "# Values of the chart of version {version}; written by tests/charts/released_values.py.\n"


def values_of(schema: dict[str, Any]) -> set[str]:
    """`router.config.name` for each value that a schema takes, `kv.transport=tls` for each word of a choice.

    What is let through only to be refused in a sentence (`deprecated`) is not taken.
    """
    return set(_under(schema, "", schema["definitions"]))


def _under(schema: dict[str, Any], path: str, definitions: dict[str, Any]) -> Iterator[str]:
    named = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    yield from (f"{path}={word}" for word in _words(named))
    for name, value in named.get("properties", {}).items():
        if not value.get("deprecated"):
            below = f"{path}.{name}".lstrip(".")
            yield below
            yield from _under(value, below, definitions)


def _words(schema: dict[str, Any]) -> list[str]:
    """What one of must be chosen; `then` is what an old word is let through beside."""
    parts = [schema, schema.get("then", {}), *schema.get("anyOf", [])]
    return [word for part in parts for word in part.get("enum", []) if isinstance(word, str) and word]


def taken_now() -> set[str]:
    """The values of this tree."""
    return values_of(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")))


def taken_by_the_last_release() -> set[str]:
    """The values of the last release."""
    lines = RELEASED.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def write(version: str, values: set[str]) -> None:
    """Keep them as those of the last release."""
    RELEASED.write_text(HEAD.format(version=version) + "\n".join(sorted(values)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from shared.primitives.version import VERSION

    write(VERSION, taken_now())
