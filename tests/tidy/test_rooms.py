"""The product's import graph: how many rooms each place has and how many arrows, and that its arrows run down.

The *rooms* of a place are the files and folders in it. An *arrow* leads from one of them to another of which some file
of the first imports something, for its types alone too. The house is the packages of the product, with `shared` opened:
its own packages stand in its stead.

Bounds are for the reader: what is above them is no longer found by its noun. Who meets one moves what lies in the wrong
room, or joins two rooms that are one idea. An import inside a function counts as any other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.tidy.source_files import ROLES, ROOT, SourceFile, source_files

HOUSE = "the house"
BOUNDS = {  # rooms, arrows
    HOUSE: (16, 85),
    "router.core": (10, 30),
    "router.openai": (12, 40),
    "shared.engine": (14, 45),
}

Arrow = tuple[str, str]  # who imports, and whom


def module_of(file: SourceFile) -> str:
    """The dotted name of a file; that of the folder, for its `__init__`."""
    return file.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported(file: SourceFile) -> Iterator[str]:
    """Names that a file imports, each module and whatever it takes of it."""
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file.path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def arrows_of_files() -> tuple[frozenset[str], frozenset[Arrow]]:
    """The modules of the product, and the imports among them."""
    files = {module_of(file): file for file in source_files() if file.path.startswith((*ROLES, "shared/"))}
    arrows = set()
    for module, file in files.items():
        for name in imported(file):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and name != module:
                arrows.add((module, name))
    return frozenset(files), frozenset(arrows)


def room_in(place: str) -> Callable[[str], str]:
    """Says in which room of a place a module is; empty: in none."""

    def room(module: str) -> str:
        parts = module.split(".")
        if place == HOUSE:
            return ".".join(parts[:2]) if parts[0] == "shared" else parts[0]
        depth = place.count(".") + 2
        return ".".join(parts[:depth]) if module.startswith(f"{place}.") else ""

    return room


def plan_of(place: str) -> tuple[set[str], set[Arrow]]:
    """Rooms and arrows of a place."""
    room = room_in(place)
    modules, arrows = arrows_of_files()
    rooms = {room(module) for module in modules} - {"", "shared"}
    drawn = {(room(one), room(other)) for one, other in arrows}
    return rooms, {(one, other) for one, other in drawn if one != other and {one, other} <= rooms}


@pytest.mark.parametrize("place", BOUNDS)
def test_a_place_has_no_more_rooms_and_arrows_than_a_reader_can_keep_in_mind(place: str) -> None:
    rooms, arrows = plan_of(place)
    rooms_max, arrows_max = BOUNDS[place]
    assert len(rooms) <= rooms_max, sorted(rooms)
    assert len(arrows) <= arrows_max, sorted(arrows)
    assert len(arrows) >= len(rooms)  # they were read


@pytest.mark.parametrize("place", BOUNDS)
def test_no_rooms_import_each_other_in_a_circle(place: str) -> None:
    rooms, arrows = plan_of(place)
    while ground := {room for room in rooms if not any(one == room for one, _ in arrows)}:
        rooms -= ground
        arrows = {(one, other) for one, other in arrows if other not in ground}
    assert rooms == set()


def test_rooms_of_shared_import_only_what_stands_below_them_in_the_picture() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    top = next(number for number, line in enumerate(page) if line.startswith("router/ "))
    column = page[top].index("shared/")
    shown = []
    for line in page[top + 1 :]:
        if "shared/engine/" in line:
            break
        shown += [f"shared.{word}" for word in line[column:].split()[:1]]
    rooms, arrows = plan_of(HOUSE)
    assert set(shown) == {room for room in rooms if room.startswith("shared.")}
    height = {room: number for number, room in enumerate(reversed(shown))}
    inside = [(one, other) for one, other in sorted(arrows) if one in height and other in height]
    assert [(one, other) for one, other in inside if height[one] <= height[other]] == []
