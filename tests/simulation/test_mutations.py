"""The simulation can fail: each of these mistakes in the code is found by some seed."""

from __future__ import annotations

import inspect
import statistics
import sys
from multiprocessing import get_context

import pytest

from decode.scheduler import DecodeScheduler
from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import Run, run_seed, seeds_until_caught

SEEDS_MAX = 1000  # as many as must pass
AREAS = {
    "bars",
    "migration",
    "draining",
    "page_pool",
    "radix_cache",
    "leases",
    "links",
    "baton",
    "transfer_queue",
    "retraction",
    "lifecycle",
    "placement",
    "fleets",
    "grammars",
    "room",
    "siblings",
    "steps",
    "tenants",
    "versions",
    "waiting",
    "partitions",
}


def _catch(name: str) -> Run | None:
    return seeds_until_caught(name, SEEDS_MAX)


def test_there_is_a_mistake_in_each_part() -> None:
    assert len(MUTATIONS) >= 14
    assert {mutation.area for mutation in MUTATIONS.values()} >= AREAS | {"event_loop", "transfer", "decode"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_takes_what_the_code_it_replaces_takes(name: str) -> None:
    """Else the call itself would fail, and the simulation would seem to have found the mistake."""
    for owner, attribute, mistaken in MUTATIONS[name].patches():
        real = owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)
        if inspect.isroutine(mistaken):
            parameters = inspect.signature(real).parameters
            keywords = {name: None for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
            inspect.signature(mistaken).bind(*parameters.keys() - keywords, **keywords)


def test_a_mistake_that_only_crashes_counts_as_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: DecodeScheduler, batch: object, sampled: object, now: float) -> None:
        del self, batch, sampled, now
        raise KeyError("the mistake's own")

    mistake = Mutation("decode", lambda: [(DecodeScheduler, "settle", settle)])
    monkeypatch.setitem(MUTATIONS, "a clumsy mistake", mistake)
    run = run_seed(0, "a clumsy mistake")
    assert "KeyError" in run.failure
    assert seeds_until_caught("a clumsy mistake", 3) is None


@pytest.mark.timeout(1800)  # a hundred mistakes, on two cores
def test_every_mistake_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with get_context("spawn").Pool(2) as pool:
        caught = dict(zip(MUTATIONS, pool.map(_catch, MUTATIONS, chunksize=1), strict=True))
    needed = {name: run.seed + 1 if run else SEEDS_MAX for name, run in caught.items()}
    with capsys.disabled():
        lines = [f"{needed[name]:4d} seeds  {name}" for name in MUTATIONS]
        sys.stdout.write("\n".join(["", *lines, f"median: {statistics.median(needed.values())} seeds", ""]))
    assert [name for name, run in caught.items() if run is None] == []
