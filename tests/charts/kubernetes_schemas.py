"""What the versions of Kubernetes have against an object, by the JSON schemas that PyPI's kubernetes-validate carries.

Only its data is used: its own `validate` reads some megabytes of definitions again for each object. The strict variant
also refuses fields that the version does not know, which an API server drops without a word.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import jsonschema
from referencing import Registry, Resource

from tests.charts.rendering import Object

OLDEST = (1, 29)
_SUFFIX = "-local-strict"


def _folder() -> Traversable:
    return files("kubernetes_validate") / "kubernetes-json-schema"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def versions() -> list[str]:
    """The supported versions that there are schemas of, oldest first."""
    names = [each.name for each in _folder().iterdir() if each.name.endswith(_SUFFIX)]
    found = [name.removeprefix("v").removesuffix(_SUFFIX) for name in names]
    return sorted((version for version in found if _number(version) >= OLDEST), key=_number)


def complaints(thing: Object, version: str) -> list[str]:
    """Why Kubernetes `version` would not take this object as it is."""
    group, _, number = thing["apiVersion"].rpartition("/")
    name = "-".join(filter(None, [thing["kind"].lower(), group.split(".")[0], number]))
    schema = json.loads((_folder() / f"v{version}{_SUFFIX}" / f"{name}.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema, registry=_definitions(version))
    who = f"{thing['kind']} {thing['metadata']['name']}"
    return [f"{who}: {error.json_path}: {error.message}" for error in validator.iter_errors(thing)]


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    """Crawled once: a validator looks through a registry that is not for whatever may be referred to."""
    text = (_folder() / f"v{version}{_SUFFIX}" / "_definitions.json").read_text(encoding="utf-8")
    resource: Resource[Any] = Resource.from_contents(json.loads(text))
    registry: Registry[Any] = Registry().with_resource("_definitions.json", resource).crawl()
    return registry
