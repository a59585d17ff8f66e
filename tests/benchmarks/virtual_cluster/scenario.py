"""What a scenario is: a few runs of virtual clusters, and what their figures show beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.benchmarks.virtual_cluster.cluster import ClusterShape, VirtualCluster
from tests.benchmarks.virtual_cluster.figures import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSize:
    """1 is what docs/performance.md shows."""

    fleet: float = (
        1.0  # pods of a fleet, and the requests that come in a second; a scenario of a few pods has no other
    )
    length: float = 1.0  # seconds in which requests come


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadScenario:
    """Runs by name, for a size."""

    about: str
    runs: Callable[[ScenarioSize], Mapping[str, ClusterShape]]
    compared: Callable[[Mapping[str, Figures]], Figures] = (
        lambda _: {}
    )  # the figures that the scenario is for


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The figures of each run, what they show together, and what the routers cost on this machine."""

    figures: Mapping[str, Figures]
    compared: Figures
    cost: Mapping[str, Figures]


def run_scenario(
    scenario: LoadScenario, *, seed: int, size: ScenarioSize, encodes: bool = False
) -> ScenarioResult:
    """Live through all runs of a scenario."""
    figures, cost = {}, {}
    for name, shape in scenario.runs(size).items():
        cluster = VirtualCluster(shape, seed, encodes=encodes)
        cluster.run()
        figures[name], cost[name] = cluster.figures(), cluster.cost()
    return ScenarioResult(figures, scenario.compared(figures), cost)


def number(figures: Figures, *path: str) -> float:
    """A figure that must be there."""
    value: object = figures
    for key in path:
        assert isinstance(value, dict), path
        value = value.get(key, 0)
    assert isinstance(value, int | float), (path, value)
    return value
