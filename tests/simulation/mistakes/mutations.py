"""Mistakes to make in the code, one at a time, to prove that the simulation would find them.

Each is a few lines put in the place of a real method for the length of a run, and a sentence that says what went
wrong. The story of each is one that a tired engineer could write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulation.mistakes import (
    bad_words,
    choices,
    chunks,
    draining,
    fleets,
    grammars,
    groups,
    lies,
    logprobs,
    losses,
    masks,
    requests,
    room,
    steps,
    tenants,
    trust,
    versions,
    waiting,
)

MUTATIONS = {
    **requests.MISTAKES,
    **bad_words.MISTAKES,
    **draining.MISTAKES,
    **choices.MISTAKES,
    **chunks.MISTAKES,
    **fleets.MISTAKES,
    **grammars.MISTAKES,
    **lies.MISTAKES,
    **logprobs.MISTAKES,
    **losses.MISTAKES,
    **masks.MISTAKES,
    **room.MISTAKES,
    **groups.MISTAKES,
    **steps.MISTAKES,
    **tenants.MISTAKES,
    **trust.MISTAKES,
    **versions.MISTAKES,
    **waiting.MISTAKES,
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Make a mistake for a while; "" makes none."""
    patches = MUTATIONS[name].patches() if name else []
    before = [(owner, attribute, _get(owner, attribute)) for owner, attribute, _ in patches]
    try:
        for owner, attribute, value in patches:
            _set(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in before:
            _set(owner, attribute, value)


def _get(owner: Any, attribute: Any) -> Any:
    return owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)


def _set(owner: Any, attribute: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[attribute] = value
    else:
        setattr(owner, attribute, value)
