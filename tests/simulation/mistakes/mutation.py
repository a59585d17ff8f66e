"""What a mistake in the code is to the simulation, and how one is made for a while.

A mistake is a sentence and what each of its roles does instead (`roles`). What is called instead gets the real function
first and then all that the real one gets. A mistake that remembers something is a function that returns its roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

from tests.simulation.mistakes.roles import ROLES, owner_of, set_in, value_in

Instead = Mapping[str, Any]  # role: a function, or a plain value
Mistakes = dict[str, Instead | Callable[[], Instead]]  # by the sentence that says what went wrong


class Patch(NamedTuple):
    """A place in the product, what is there, and what a mistake puts there."""

    owner: Any
    attribute: str
    real: Any
    mistaken: Any


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake, and the part of the code it is in."""

    area: str
    instead: Instead | Callable[[], Instead]

    def patches(self) -> list[Patch]:
        """The places that it changes; each call starts with nothing remembered."""
        instead = self.instead() if callable(self.instead) else self.instead
        return [_patch(role, value) for role, value in instead.items()]

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the mistake for a while."""
        patches = self.patches()
        try:
            for patch in patches:
                set_in(patch.owner, patch.attribute, patch.mistaken)
            yield
        finally:
            for patch in patches:
                set_in(patch.owner, patch.attribute, patch.real)


def gives(value: Any) -> Callable[..., Any]:
    """A function that gives this, whatever it is asked."""
    return lambda *_, **__: value


nothing = gives(None)


def _patch(role: str, instead: Any) -> Patch:
    owner, attribute = owner_of(role), ROLES[role][1]
    real = value_in(owner, attribute)
    if isinstance(real, property):
        return Patch(owner, attribute, real, property(_after(real.fget, instead)))
    return Patch(owner, attribute, real, _after(real, instead) if callable(instead) else instead)


def _after(real: Any, instead: Callable[..., Any]) -> Callable[..., Any]:
    """The function that stands in the place of the real one and gets that one first, then arguments by their place."""

    def mistaken(*arguments: Any, **named: Any) -> Any:
        if not named:
            return instead(real, *arguments)
        bound = signature(real).bind(*arguments, **named)
        return instead(real, *bound.args, **bound.kwargs)

    whole = signature(instead)
    takes = [
        each for at, each in enumerate(whole.parameters.values()) if at or each.kind is each.VAR_POSITIONAL
    ]
    mistaken.__signature__ = whole.replace(parameters=takes)  # type: ignore[attr-defined]
    return mistaken
