"""Mistakes to make in the code, one at a time, to prove that the simulation would find them.

Each is a few lines put in the place of a real method for the length of a run, and a sentence that says what went
wrong. The story of each is one that a tired engineer could write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulation import (
    mistakes,
    mistakes_about_bars,
    mistakes_about_choices,
    mistakes_about_chunks,
    mistakes_about_fleets,
    mistakes_about_grammars,
    mistakes_about_lies,
    mistakes_about_logprobs,
    mistakes_about_losses,
    mistakes_about_masks,
    mistakes_about_room,
    mistakes_about_siblings,
    mistakes_about_steps,
    mistakes_about_tenants,
    mistakes_about_trust,
    mistakes_about_versions,
    mistakes_about_waiting,
    mistakes_in_draining,
)

MUTATIONS = {
    **mistakes.MISTAKES,
    **mistakes_about_bars.MISTAKES,
    **mistakes_in_draining.MISTAKES,
    **mistakes_about_choices.MISTAKES,
    **mistakes_about_chunks.MISTAKES,
    **mistakes_about_fleets.MISTAKES,
    **mistakes_about_grammars.MISTAKES,
    **mistakes_about_lies.MISTAKES,
    **mistakes_about_logprobs.MISTAKES,
    **mistakes_about_losses.MISTAKES,
    **mistakes_about_masks.MISTAKES,
    **mistakes_about_room.MISTAKES,
    **mistakes_about_siblings.MISTAKES,
    **mistakes_about_steps.MISTAKES,
    **mistakes_about_tenants.MISTAKES,
    **mistakes_about_trust.MISTAKES,
    **mistakes_about_versions.MISTAKES,
    **mistakes_about_waiting.MISTAKES,
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
