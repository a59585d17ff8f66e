"""The simulation can fail: each of these mistakes in the code is found by some seed."""

from __future__ import annotations

import inspect
import json
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.simulation import run as simulation
from tests.simulation.mistakes.mutation import Mutation
from tests.simulation.mistakes.mutations import MUTATIONS
from tests.simulation.run import CAUGHT_BY, Run, catch, run_seed, seeds_until_caught

SEEDS_MAX = 1000  # as many as must pass
REFRESH = "python -m tests.simulation --mutations writes which, and this test is fast again"
AREAS = {
    "bad words",
    "balance",
    "caches",
    "begun streams",
    "migration",
    "draining",
    "page_pool",
    "pauses",
    "radix_cache",
    "ranks",
    "leases",
    "links",
    "baton",
    "transfer_queue",
    "retraction",
    "turns",
    "lifecycle",
    "placement",
    "fleets",
    "foresight",
    "grammars",
    "masks",
    "lies",
    "room",
    "groups",
    "steps",
    "tenants",
    "versions",
    "waiting",
    "partitions",
}


def _catch(name: str) -> Run | None:
    return catch(name, SEEDS_MAX)


def test_there_is_a_mistake_in_each_part() -> None:
    assert len(MUTATIONS) >= 14
    assert {mutation.area for mutation in MUTATIONS.values()} >= AREAS | {"event_loop", "transfer", "decode"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_takes_what_the_code_it_replaces_takes(name: str) -> None:
    """Else the call itself would fail, and the simulation would seem to have found the mistake."""
    for patch in MUTATIONS[name].patches():
        if inspect.isroutine(patch.mistaken):
            parameters = inspect.signature(patch.real).parameters
            keywords = {name: None for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
            inspect.signature(patch.mistaken).bind(*parameters.keys() - keywords, **keywords)


def test_a_mistake_that_only_crashes_counts_as_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(*_: object) -> None:
        raise KeyError("the mistake's own")

    mistake = Mutation("decode", {"a step is settled": settle})
    monkeypatch.setitem(MUTATIONS, "a clumsy mistake", mistake)
    run = run_seed(0, "a clumsy mistake")
    assert "KeyError" in run.failure
    assert seeds_until_caught("a clumsy mistake", 3) is None


@pytest.mark.long
def test_a_seed_that_no_longer_finds_its_mistake_is_not_the_end_of_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "a flush forgets all but the last token of a request"
    blameless = next(seed for seed in range(100) if not run_seed(seed, name).failure)
    monkeypatch.setattr(simulation, "CAUGHT_BY", tmp_path / "caught_by.json")
    simulation.CAUGHT_BY.write_text(json.dumps({name: blameless}))
    run = catch(name, SEEDS_MAX)
    assert run is not None
    assert run.seed != blameless


@pytest.mark.timeout(1800)  # when no seed is the one that it was: a hundred mistakes, on two cores
def test_every_mistake_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    remembered = json.loads(CAUGHT_BY.read_text())
    with get_context("spawn").Pool(2) as pool:
        caught = dict(zip(MUTATIONS, pool.map(_catch, MUTATIONS, chunksize=1), strict=True))
    assert [name for name, run in caught.items() if run is None] == []
    changed = [name for name, run in caught.items() if run is not None and run.seed != remembered.get(name)]
    with capsys.disabled():
        if changed:
            sys.stdout.write(f"\n{len(changed)} mistakes are found by other seeds: {REFRESH}\n")
