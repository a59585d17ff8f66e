"""The claims of the simulation: hundreds of worlds end as they should, and everything they exist for has happened."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation import report
from tests.simulation.run import SEEDS, SHOWN_BY, Run, run_until_all_occurred, seeds_until_caught
from tests.simulation.scenarios.drawing import draw
from tests.simulation.world.world import World

PROCESSES = 2
REFRESH = "python -m tests.simulation --seldom writes which seeds show it all, and this test is fast again"

pytestmark = pytest.mark.timeout(1800)  # up to thousands of worlds, on two cores that are busy with others


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return list(run_until_all_occurred(PROCESSES))


def test_every_world_ends_with_every_token_once_and_nothing_left_behind(
    runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    for run in runs:
        counts += run.counts
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *report.lines(counts), ""]))
        if len(runs) > SEEDS + len(set(json.loads(SHOWN_BY.read_text()).values())):
            sys.stdout.write(f"{len(runs)} worlds: {REFRESH}\n")
    failures = [run.story for run in runs if run.failure]
    assert not failures, "\n".join(failures)
    assert not report.missing(counts), "these never happened"


def test_a_third_of_the_worlds_overflow_and_a_quarter_are_calm(runs: list[Run]) -> None:
    scenarios = [draw(seed) for seed in range(SEEDS)]
    assert 0.2 < sum(scenario.calm for scenario in scenarios) / SEEDS < 0.3
    assert sum(run.counts["decode no_room"] > 0 for run in runs[:SEEDS]) > SEEDS / 3


def test_worlds_are_as_large_as_they_claim() -> None:
    for seed in range(50):
        scenario = draw(seed)
        assert scenario.sizes.decode_workers >= 3
        assert scenario.sizes.prefill_workers >= 3 or not scenario.sizes.prefill_workers
        assert len(scenario.requests) >= 30


def test_two_runs_of_a_seed_agree_even_where_hashes_of_strings_differ(runs: list[Run]) -> None:
    program = "from tests.simulation.run import run_seed; print(*(run_seed(s).digest for s in range(12)))"
    other = (
        "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    )  # not set: each process has one of its own
    journals = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": other},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert journals.split() == [run.digest for run in runs[:12]]


def test_a_failure_names_its_seed_and_the_command_that_replays_it() -> None:
    run = seeds_until_caught("rows are settled in another order", 50)
    assert run is not None
    command = re.search(r"replay: python -m (\S+) (.*)", run.story)
    assert command
    arguments = [part.strip("'") for part in re.findall(r"'[^']*'|\S+", command[2])]
    replay = subprocess.run(
        [sys.executable, "-m", command[1], *arguments], check=False, capture_output=True, text=True
    )
    assert replay.returncode == 1
    assert run.failure in replay.stdout


def test_the_next_step_is_launched_before_the_last_is_settled() -> None:
    """For every step but the named exceptions: settled first on purpose, or nothing to plan."""
    ahead = 0
    for seed in range(30):
        world = World(draw(seed))
        world.run()
        for worker in world.all_workers:
            order = worker.witness.steps
            assert world.scenario.sizes.launches_cost or "settles first" not in order
            launched = 0
            for place, entry in enumerate(order):
                word, _, step = entry.rpartition(" ")
                if word == "plan":
                    launched = int(step)
                elif word == "settle" and world.scenario.sizes.overlap:
                    on_purpose = order[place - 1] in ("settles first", "nothing to plan")
                    assert launched == int(step) + 1 or on_purpose, (
                        seed,
                        worker.hello.uid,
                        order[:place][-4:],
                    )
                    ahead += launched == int(step) + 1
                elif word == "settle":
                    assert launched == int(step), (seed, worker.hello.uid)
    assert ahead > 1000
