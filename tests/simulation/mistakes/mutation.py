"""What a mistake in the code is to the simulation, and how one is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Patch = tuple[Any, Any, Any]  # owner, attribute, what it is instead


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake, and the part of the code it is in."""

    area: str
    patches: Callable[[], list[Patch]]


def into(
    mistakes: dict[str, Mutation],
) -> Callable[[str, str], Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]]:
    """A decorator that takes an area and a sentence, and adds the mistake that the function below it makes."""

    def mistake(area: str, name: str) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
        def register(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
            mistakes[name] = Mutation(area, patches)
            return patches

        return register

    return mistake
