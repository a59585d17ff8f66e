"""Runs seeds: one, or many on several processes; and says how to see a failure again."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from tests.simulation import report
from tests.simulation.drawing import draw
from tests.simulation.mutations import mutated
from tests.simulation.world import SimulationError, World


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a seed."""

    seed: int
    mutation: str
    failure: str  # empty: none
    proven: bool  # by an invariant, the oracle or a bound; a crash finds a mistake too, but might be the mutation's own
    digest: str  # of the journal
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def story(self) -> str:
        """The failure, and the command that replays it."""
        mutation = f" --mutation {self.mutation!r}" if self.mutation else ""
        replay = f"python -m tests.simulation --seed {self.seed}{mutation} --log"
        return f"SEED {self.seed}: {self.failure}\n    replay: {replay}"


def run_seed(seed: int, mutation: str = "", show: Callable[[str], None] | None = None) -> Run:
    """Live through one seed, with the code as it is or with a mutation in it."""
    world = World(draw(seed), show)
    failure, proven = "", False
    with mutated(mutation):
        try:
            world.run()
        except SimulationError as error:
            failure, proven = str(error), error.proven
    return Run(seed, mutation, failure, proven, world.journal.digest(), report.gather(world))


def run_seeds(seeds: Iterable[int], processes: int) -> Iterator[Run]:
    """Live through many seeds; results come in the order of the seeds."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(run_seed, seeds, chunksize=10)


def seeds_until_caught(mutation: str, seeds_max: int, first: int = 0) -> Run | None:
    """The first seed that proves the mutation wrong; None: it survived all of them, or only crashed."""
    runs = map(partial(run_seed, mutation=mutation), range(first, first + seeds_max))
    return next((run for run in runs if run.proven), None)
