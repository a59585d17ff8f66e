"""Mistakes name roles, and each role has its place in the product."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.mistakes import roles
from tests.simulation.mistakes.roles import PLACES, ROLES, owner_of

FILES = [
    *(path for path in Path(roles.__file__).parent.glob("*.py") if path != Path(roles.__file__)),
    Path(__file__).parents[2] / "tests/unit/engine/cuda/late_mistakes.py",
]
NODES = {path.name: list(ast.walk(ast.parse(path.read_text()))) for path in FILES}
WORDS = {node.value for nodes in NODES.values() for node in nodes if isinstance(node, ast.Constant)}


def _has(owner: Any, attribute: str) -> bool:
    """Whether a module, a table or a class has this; a class may give it to its objects when it makes them."""
    if isinstance(owner, dict):
        return attribute in {getattr(key, "name", key) for key in owner}
    if hasattr(owner, attribute) or not inspect.isclass(owner):
        return hasattr(owner, attribute)
    made = ast.walk(ast.parse(inspect.getsource(owner)))
    return attribute in {each.attr for each in made if isinstance(each, ast.Attribute)}


def test_a_role_has_one_place() -> None:
    assert len(ROLES) == sum(map(len, PLACES.values()))


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_in_the_product(role: str) -> None:
    assert _has(owner_of(role), ROLES[role][1]), (
        f"{role}: {ROLES[role]} has gone; {roles.__file__} says where it is"
    )


def test_each_role_is_used_by_a_mistake() -> None:
    assert ROLES.keys() - WORDS == set()


@pytest.mark.parametrize("name", NODES)
def test_a_mistake_holds_no_private_name_of_the_product(name: str) -> None:
    private = {
        node.attr for node in NODES[name] if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    }
    imported = {
        each.name
        for node in NODES[name]
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name[0] == "_"
    }
    assert private - {"__signature__"} | imported == set()
