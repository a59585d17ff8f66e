"""Every setting that a core reads is drawn: one that never differs is never tested under faults."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from shared.process.settings import Settings
from tests.simulation.scenarios.drawing import draw
from tests.simulation.scenarios.scenario import CONTEXT_LEN, ScenarioSizes, SimulationScenario
from tests.simulation.scenarios.settings import decode_config, prefill_config, router_config

ROOT = Path(__file__).parents[2]
SEEDS = 300
ROLES: dict[Callable[[ScenarioSizes], Settings], tuple[str, ...]] = {  # and where their cores read settings
    router_config: ("router/core",),
    prefill_config: ("prefill", "shared/scheduling", "shared/kv"),
    decode_config: ("decode", "shared/scheduling", "shared/kv"),
}
NOT_DRAWN = {
    "ended_requests_max": "the judge of tenants asks about every request at the end",
    "retry_after_seconds": "it is only told to clients, and those here do not come back",
}


def read_by(folders: Sequence[str]) -> set[str]:
    """Names of what the code in these folders reads of a config."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.stem != "__main__"]
    return {
        name for file in files for name in re.findall(r"(?:config|settings|rules)\.(\w+)", file.read_text())
    }


@pytest.mark.parametrize("config_of", ROLES, ids=lambda config_of: config_of.__name__)
def test_every_setting_that_a_core_reads_is_drawn(config_of: Callable[[ScenarioSizes], Settings]) -> None:
    drawn: defaultdict[str, set[object]] = defaultdict(set)
    for seed in range(SEEDS):
        config = config_of(draw(seed).sizes)
        for name in type(config).model_fields:
            drawn[name].add(getattr(config, name))
    read = read_by(ROLES[config_of]) & drawn.keys()
    assert len(read) > 10
    never = sorted(name for name in read - NOT_DRAWN.keys() if len(drawn[name]) == 1)
    assert not never, f"a line in tests/simulation/scenarios/bounds.py draws {never}"
    for name, field in type(config).model_fields.items():
        if name in read and get_origin(field.annotation) is Literal:
            assert drawn[name] == set(get_args(field.annotation)), name


def test_what_is_not_drawn_exists() -> None:
    assert NOT_DRAWN.keys() <= set.union(*map(read_by, ROLES.values()))


def test_in_a_quarter_of_the_worlds_most_requests_come_without_max_tokens() -> None:
    def mostly(scenario: SimulationScenario) -> bool:
        requests = scenario.requests
        without = [len(each.prompt) + each.params.max_new_tokens == CONTEXT_LEN for each in requests]
        return sum(without) > len(without) / 2

    assert 0.15 < sum(mostly(draw(seed)) for seed in range(SEEDS)) / SEEDS < 0.35
