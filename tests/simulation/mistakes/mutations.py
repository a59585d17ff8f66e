"""Mistakes to make in the code, one at a time, to prove that the simulation would find them.

Each is a few lines put in the place of a real method for the length of a run, and a sentence that says what went
wrong. The story of each is one that a tired engineer could write.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tests.simulation.mistakes import (
    constrained,
    designs,
    draining,
    fleets,
    groups,
    lies,
    local_prompts,
    logprobs,
    prompts,
    ranks,
    requests,
    steps,
    tenants,
    trust,
    waiting,
)
from tests.simulation.mistakes.mutation import Mutation

FILES = (
    requests,
    constrained,
    designs,
    draining,
    fleets,
    groups,
    lies,
    local_prompts,
    logprobs,
    prompts,
    ranks,
    steps,
    tenants,
    trust,
    waiting,
)
MUTATIONS = {
    name: Mutation(area, instead)
    for file in FILES
    for area, mistakes in file.MISTAKES.items()
    for name, instead in mistakes.items()
}


def mutated(name: str) -> AbstractContextManager[None]:
    """Make a mistake for a while; "" makes none."""
    return MUTATIONS[name].made() if name else nullcontext()
