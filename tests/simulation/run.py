"""Runs seeds: one, or many on several processes; and says how to see a failure again."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.simulation import report
from tests.simulation.mistakes.mutations import mutated
from tests.simulation.scenarios.drawing import draw
from tests.simulation.world.world import SimulationError, World

# The seed that finds each mistake; `--mutations` writes it.
CAUGHT_BY = Path(__file__).with_name("caught_by.json")
# A seed in which each row of the report occurs that few worlds show; `--seldom` writes it.
SHOWN_BY = Path(__file__).with_name("shown_by.json")
SEEDS = 400  # that run in any case
SEEDS_MAX = 3000  # that run until each row has occurred
SEARCHED = 100  # seeds that are run before the report is looked at again


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
    with multiprocessing.get_context("spawn").Pool(processes, _keep_what_is_imported) as pool:
        yield from pool.imap(run_seed, seeds, chunksize=10)


def run_until_all_occurred(processes: int) -> Iterator[Run]:
    """Live through SEEDS seeds and those of SHOWN_BY, and while a row of the report is missing through further ones."""
    shown_by = set(json.loads(SHOWN_BY.read_text()).values())
    counts: Counter[str] = Counter()
    batches = [
        [*range(SEEDS), *sorted(shown_by)],
        *(range(first, first + SEARCHED) for first in range(SEEDS, SEEDS_MAX, SEARCHED)),
    ]
    for batch in batches:
        for run in run_seeds(batch, processes):
            counts += run.counts
            yield run
        if not report.missing(counts):
            return


def _keep_what_is_imported() -> None:
    """The garbage collector looks at none of it while worlds come and go."""
    gc.collect()
    gc.freeze()


def seeds_until_caught(mutation: str, seeds_max: int) -> Run | None:
    """The first seed that proves the mutation wrong; None: it survived all of them, or only crashed."""
    return _first_proof(mutation, range(seeds_max))


def catch(mutation: str, seeds_max: int) -> Run | None:
    """A seed that proves the mutation wrong: the one that did when CAUGHT_BY was written, else as above."""
    remembered = json.loads(CAUGHT_BY.read_text()).get(mutation)
    run = _first_proof(mutation, [] if remembered is None else [remembered])
    return run or seeds_until_caught(mutation, seeds_max)


def _first_proof(mutation: str, seeds: Iterable[int]) -> Run | None:
    runs = map(partial(run_seed, mutation=mutation), seeds)
    return next((run for run in runs if run.proven), None)
